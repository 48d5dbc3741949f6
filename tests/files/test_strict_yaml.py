"""YAML as people mean it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from frozencore.errors import ConfigError
from frozencore.files.strict_yaml import as_yaml, read_yaml


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return path


def test_numbers_are_numbers(tmp_path: Path) -> None:
    values = "[1e-3, 1E5, -2.5e3, .5e1, 5e-3, 3, -3, 0, 1.5, 3., .inf, e5, 1e, word, 010, 1:30, 1_0, 0x1F]"
    assert read_yaml(written(tmp_path, f"a: {values}"))["a"] == [
        1e-3, 1e5, -2500.0, 5.0, 5e-3, 3, -3, 0, 1.5, 3.0, float("inf"), "e5", "1e", "word", "010", "1:30", "1_0",
        "0x1F",
    ]  # fmt: skip


def test_what_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    """Text that looks like a number among it, as a folder that is named by a short hash."""
    words = ["4512e083", "1e-3", ".5e1", "12", "010", "1:30", "1_0", "0x1F", "yes", "null", "~", "é", ".inf", "- a", ""]
    content = {"words": words, "numbers": [1e-5, 1e22, 3, -0.5, float("inf")], "rest": [None, True]}
    text = as_yaml(content)
    assert read_yaml(written(tmp_path, text)) == content
    assert yaml.safe_load(text) == content  # by the rules of YAML 1.1 too


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", r"a.yaml, line 3: the key 'a' is given twice"),
        ("a:\n  b: 1\n  b: 1\n", r"line 3: the key 'b' is given twice"),
        ("a: [1\nb: 2", r"a.yaml, line 2: "),
        ("a: 1\n? [b]\n: 2\n", r"a.yaml, line 2: found unhashable key"),
        ("a: !!python/object/apply:os.system ['true']", r"line 1: could not determine a constructor"),
        ("\x07", r"Give a YAML file in UTF-8"),
        ("a: !!bool maybe", r"Give a YAML file"),
        ("a: 2020-13-45", r"month must be in 1..12. Give a YAML file"),
        ("[" * 3000, r"maximum recursion depth|line 1"),
    ],
)
def test_bad_yaml_is_one_line_with_its_place(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_yaml(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml: No such file or directory. Give a YAML file"):
        read_yaml(tmp_path / "none.yaml")


def test_an_empty_file_has_no_content(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "# nothing yet\n")) is None
