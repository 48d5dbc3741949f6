"""Words for people: any text on one line of visible characters; sizes and times against what reads them again."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from frozencore import errors
from frozencore.errors import FrozenCoreError
from frozencore.text import bytes_in_words, one_line, time_in_words

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FrozenCoreError)]


@given(st.text())
@example("a\r\nb\rc\u2028d\x85e\x1b[2Jf\u202eg\ud800h")
def test_any_text_is_one_printable_line_and_stays_it(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line.splitlines()) <= 1
    assert one_line(line) == line


@given(st.text(st.characters(exclude_categories=("C", "Z"))), st.text(" \t\n\xa0\u3000", min_size=1, max_size=3))
def test_what_can_be_seen_stays_as_it_is_and_layout_is_one_space(word: str, layout: str) -> None:
    assert one_line(f"{layout}{word}{layout}-{layout}") == f"{word} -".strip()


@pytest.mark.parametrize("code", [*range(32), 127, 0x85, 0x9B, 0x200B, 0x2028, 0x202E, 0x2066, 0xFEFF, 0xD800])
def test_a_character_that_no_screen_shows_stands_there_as_python_writes_it(code: int) -> None:
    character = chr(code)
    assert unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl"}
    assert one_line(f"<{character}>") == ("< >" if character in "\t\n" else f"<{character!r:.8}>".replace("'", ""))


def test_no_more_is_kept_than_was_asked_for() -> None:
    assert one_line("ab\x1bcd", 4) == "ab\\x"
    assert one_line(ValueError("two\nlines")) == "two lines"


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_of_ours_is_one_line_whatever_it_quotes(kind: type[FrozenCoreError]) -> None:
    assert len(ERRORS) > 5
    assert str(kind("No layer 'a\r', 'b\nc'.\x1b[31m")) == "No layer 'a\\r', 'b c'.\\x1b[31m"


def test_bytes_are_said_to_a_tenth_of_their_unit() -> None:
    sizes = (960, 10**6, 300 * 10**6, 2**40)
    assert [bytes_in_words(size) for size in sizes] == ["1.0 KB", "1.0 MB", "300.0 MB", "1099.5 GB"]


def test_a_time_is_said_in_seconds_minutes_hours_or_days() -> None:
    times = {0: "0 s", 119: "119 s", 120: "2 min", 3599: "1 h 00 min", 11_100: "3 h 05 min", 187_200: "2 days 4 h"}
    assert {seconds: time_in_words(seconds) for seconds in times} == times
