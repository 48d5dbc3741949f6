"""lm-evaluation-harness: its tasks on our models, and our tasks as files of its own."""

from __future__ import annotations
