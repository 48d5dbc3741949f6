"""YAML as people mean it."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.errors import ConfigError
from frozencore.lab.strict_yaml import read_yaml


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return path


def test_numbers_are_numbers(tmp_path: Path) -> None:
    values = "[1e-3, 1E5, -2.5e3, .5e1, 5e-3, 3, 1.5, e5, 1e, word]"
    assert read_yaml(written(tmp_path, f"a: {values}"))["a"] == [
        1e-3, 1e5, -2500.0, 5.0, 5e-3, 3, 1.5, "e5", "1e", "word",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", r"a.yaml, line 3: the key 'a' is given twice"),
        ("a:\n  b: 1\n  b: 1\n", r"line 3: the key 'b' is given twice"),
        ("a: [1\nb: 2", r"a.yaml, line 2: "),
        ("a: !!python/object/apply:os.system ['true']", r"line 1: could not determine a constructor"),
        ("\x07", r"is not YAML in UTF-8"),
        ("a: !!bool maybe", r"is not YAML"),
        ("a: 2020-13-45", r"is not YAML"),
        ("[" * 60 + "]" * 60, r"line 1: values are nested deeper than 40"),
        ("[" * 3000, r"nested too deeply|line 1"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 9)), r"aliases .* expand"),
        ("a: &a [*a]", r"stands inside of what it names"),
    ],
)
def test_bad_yaml_is_one_line_with_its_place(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        read_yaml(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file .*none.yaml"):
        read_yaml(tmp_path / "none.yaml")
