"""The number in a generated answer.

The answer is the first number after the first marker, "The answer is:" or "####" (in the data's own solution, the last
marker), on the first line that is not empty. Later corrections do not count. Otherwise there is no answer.

| text after the marker        | number   | rule                                                      |
|------------------------------|----------|-----------------------------------------------------------|
| ``145``, ``145.``, ``145.0`` | 145      | a final stop and trailing zeros do not count              |
| ``1,234,567.5``              | 1234567.5 | commas before groups of three digits (1,00,000 too)      |
| ``$1,234.50``, ``-$5``       | 1234.5   | a dollar sign, before or after the minus, does not count  |
| ``+3``, ``−3``, ``- 3``      | 3, -3    | a sign (also – and −); a hyphen in a word is none         |
| ``3/4``, ``-1.5/2``          | 3/4      | exact fractions                                           |
| ``12 km``, ``25%``, ``x = 5``| 12, 25, 5| words, units and percent signs do not count               |
| ``7 or 8``                   | 7        | the first number                                          |
| ``7/0``                      | none     | not a number                                              |

These are the patterns of lm-evaluation-harness for GSM8K, with exact fractions.
"""

from __future__ import annotations

import re
from fractions import Fraction

MARKERS = ("The answer is:", "####")
_MAX_DIGITS = 300

_AMOUNT = r"(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+"
_NUMBER = re.compile(rf"(?:(?<![\w)\]])([-+])\s?)?(?:\$\s?(-)?)?({_AMOUNT})(?:\s?/\s?(-?(?:{_AMOUNT})))?")
_WORDS = r"[^\d\\^/*_#@|√π∞±<>≤≥÷×-]*"
_SIGN = r"(?i:minus|negative)\b"
_SCALE = r"(?i:hundred|thousand|million|billion|trillion|dozen)s?\b|(?i:k|bn)\b|M\b"
_ONLY_WORDS = re.compile(rf"(?!.*\b{_SIGN}){_WORDS}"), re.compile(rf"(?!\s*(?:[:!]|{_SCALE})){_WORDS}")
"""The text that may stand before the number of an answer in a data set, and after it: no word changes its value."""


def find_answer(text: str, *, gold: bool = False) -> str | None:
    """The first line that is not empty after the first marker; after the last one in a ``gold`` text."""
    find = text.rindex if gold else text.index  # a solution may mark its steps, and a model may go on after its answer
    places = [(find(marker), len(marker)) for marker in MARKERS if marker in text]
    if not places:
        return None
    start, length = max(places) if gold else min(places)
    lines = text[start + length :].strip().splitlines()
    return lines[0] if lines else None


def parse_answer(text: str, *, gold: bool = False) -> Fraction | None:
    """The exact number of a generated answer, or of a ``gold`` one; ``None`` if there is no answer."""
    line = find_answer(text, gold=gold)
    return None if line is None else parse_number(line)


def parse_number(text: str, *, alone: bool = False) -> Fraction | None:
    """The first number in a text, exactly, by the rules of this module; ``None`` if there is none.

    If ``alone``, only words and units may stand beside it, such as those of ``$12`` or ``5 eggs``.
    """
    text = text.replace("\u2212", "-").replace("\u2013", "-")
    match = _NUMBER.search(text)
    if match is None or sum(map(str.isdigit, match[0])) > _MAX_DIGITS:
        return None
    beside = text[: match.start()], text[match.end() :]
    if alone and not all(words.fullmatch(part) for words, part in zip(_ONLY_WORDS, beside, strict=True)):
        return None
    sign, late_sign, top, bottom = match.groups()
    below = Fraction((bottom or "1").replace(",", ""))
    value = Fraction(top.replace(",", "")) / below if below else None
    return -value if value is not None and "-" in (sign, late_sign) else value
