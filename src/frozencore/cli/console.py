"""The terminal, file or pipe that the verbs print to."""

from __future__ import annotations

import os

from rich.console import Console

WIDE = 160  # columns of a table in a file or a pipe, unless COLUMNS says how many

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = WIDE
