"""One run: its configuration, methods, rows and record."""
