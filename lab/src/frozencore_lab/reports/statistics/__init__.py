"""What can be said with numbers alone: over tasks, over evaluation rows, between rankings."""
