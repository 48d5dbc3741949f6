"""Docstrings are plain English, as far as a program can tell: how they begin, and how long a sentence is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import LAB, ROOT

LONGEST = 40  # words in a sentence
BEGINS = re.compile(r"(Of|Who|Whose|What|How)\b")
FOLDERS = (LAB, *(ROOT / name for name in ("src", "tests", "benchmarks", "conformance", "examples")))
FILES = sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def sentences(docstring: str) -> Iterator[str]:
    """The sentences of the prose, without formulas (blocks further indented), tables and section headings."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[ ]{4}\w[\w, ]*:)|^\w+:$", docstring, flags=re.MULTILINE):
        if not paragraph.startswith(("    ", "|")) or re.match(r" {4}\w[\w, ]*: ", paragraph):
            yield from re.split(r"(?<=[.!?:;])\s+", re.sub(r"``[^`]*``|\$[^$]*\$", "x", paragraph))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_or_the_thing_and_their_sentences_are_short(file: Path) -> None:
    for text in docstrings(file.read_text(encoding="utf-8")):
        assert not BEGINS.match(text), text
        for sentence in sentences(text):
            assert len(sentence.split()) <= LONGEST, sentence


def test_the_check_sees_what_it_forbids() -> None:
    assert BEGINS.match("Of a model, its parts.")
    assert not BEGINS.match("However it ends, the file is closed.")
    (long,) = sentences(" ".join(["word"] * (LONGEST + 1)))
    assert len(long.split()) > LONGEST
