"""``frozencore advise``: what it prints and writes, and that what it recommends can be trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from frozencore.tune.pocket import pocket_model_path

Command = Callable[..., tuple[int, str, str]]
ASKED = ["--model", pocket_model_path(), "--task", "pocket-sentiment"]


def test_a_table_a_record_a_figure_and_a_line_that_tune_understands(command: Command, tmp_path: Path) -> None:
    words = [*ASKED, "--rank", 4, "--calibration-size", 32, "--output", tmp_path / "advice"]
    status, out, err = command("advise", *words)
    assert status == 0, err
    record = json.loads((tmp_path / "advice" / "advice.json").read_text())
    assert (tmp_path / "advice" / "advice.png").stat().st_size > 10_000
    line = out.split("Recommended: ")[1].splitlines()[0]
    assert line == record["recommended"]["flags"]
    assert all(f"{row['gain']:.4f}" in out for row in record["bases"])
    assert f"two halves of the rows agree on {record['num_agreed']:g}" in out.replace("\n", " ")
    status, out, err = command("tune", *ASKED, *line.split(), "--output", tmp_path / "run", "--dry-run")
    assert status == 0, err
    status, _, err = command("advise", *words)
    assert status == 2
    assert "already holds advice. Choose another --output" in err
