"""The line that an error in a YAML file names."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore_lab.typed_yaml import line_of


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ((), 1),
        (("studies",), 3),
        (("studies", "main", "seeds", 1), 7),
        (("studies", "main", "seeds", 2), 5),
        (("studies", "main", "seeds", "first"), 5),
        (("studies", "main", "title", "word"), 4),
        (("nothing", "main"), 1),
    ],
)
def test_the_line_of_a_value_is_its_own_or_that_of_the_innermost_one_there_is(
    keys: tuple[str | int, ...], line: int, tmp_path: Path
) -> None:
    text = "# a campaign\nname: a\nstudies:\n  main: {title: A,\n    seeds: [\n      42,\n      43]}\n"
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert line_of(path, keys) == line
