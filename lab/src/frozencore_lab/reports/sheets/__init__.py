"""A table before it is text, and as Markdown, LaTeX, CSV, HTML and lines on a screen."""
