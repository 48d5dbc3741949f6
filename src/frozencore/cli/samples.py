"""What a run's model says to a few prompts, before and after training, on the screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from frozencore.one_line import one_line

LONGEST = 66


def sample_lines(file: Path) -> Iterator[Text]:
    """Of each sample the end of its prompt, what was wanted, and what was said."""
    for line in file.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        prompt = one_line(sample["prompt"], 10_000)
        yield Text(f"\n{sample['id']}: {'…' if len(prompt) > LONGEST else ''}{prompt[-LONGEST:]}", style="bold")
        for name in ("wanted", "before", "after"):
            yield Text(f"  {name:<6}  {one_line(sample[name], LONGEST)}")
