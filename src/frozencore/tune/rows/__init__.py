"""Text to tokens to batches: prompts, the user's own rows and tasks, the suite of tasks by name."""
