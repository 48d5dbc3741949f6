"""YAML as people mean it."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.errors import ConfigError
from frozencore.files.strict_yaml import line_of, read_yaml


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
        ("a: 1\n? [b]\n: 2\n", r"a.yaml, line 2: found unhashable key"),
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
    with pytest.raises(ConfigError, match=reason):
        read_yaml(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file .*none.yaml"):
        read_yaml(tmp_path / "none.yaml")


def test_an_empty_file_holds_nothing_and_a_huge_one_is_not_read(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "# nothing yet\n")) is None
    with pytest.raises(ConfigError, match=r"is larger than 1,048,576 bytes: it is not a file written by hand"):
        read_yaml(written(tmp_path, "a: 1\n" + "#" * 2**20))


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
    assert line_of(written(tmp_path, text), keys) == line


def test_lists_that_alias_one_another_may_form_a_longer_chain_than_lists_may_be_nested(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 100))]
    chain = read_yaml(written(tmp_path, "\n".join(lines)))["a99"]
    for _ in range(99):
        (chain,) = chain
    assert chain == ["x"]
