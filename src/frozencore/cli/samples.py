"""What a run's model says to a few prompts, before and after training, on the screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from frozencore.words import one_line

END_OF_PROMPT = 200  # characters: what is asked mostly stands at the end
MOST = 2_000  # characters of an answer; samples.jsonl has all of it


def sample_lines(file: Path) -> Iterator[RenderableType]:
    """For each sample: the end of its prompt, what was wanted, and what was said; as many lines as that takes."""
    for line in file.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        prompt = one_line(sample["prompt"], 10_000)
        begun = "…" if len(prompt) > END_OF_PROMPT else ""
        yield Text(f"\n{sample['id']}: {begun}{prompt[-END_OF_PROMPT:]}", style="bold")
        answers = Table.grid(padding=(0, 2))
        answers.add_column(no_wrap=True)
        answers.add_column()
        for name in ("wanted", "before", "after"):
            answers.add_row(f"  {name}", Text(one_line(sample[name], MOST)))
        yield answers
