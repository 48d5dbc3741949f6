"""How a long step tells where it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is to do, and a short note (``"loss 0.412"``; often empty)."""
