"""The terminal, file or pipe that the verbs print to."""

from __future__ import annotations

from rich.console import Console

WIDE = 160  # columns of a table in a file or a pipe

console = Console()
if not console.is_terminal:
    console.width = max(console.width, WIDE)
