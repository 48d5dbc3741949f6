"""The number in a generated answer.

The answer is the first number after the first marker, "The answer is:" or "####" (in the data's own solution, the last
marker), on the first line that is not empty.
Later additions or corrections do not count. Without a marker, or a number after it, there is no answer.

| text after the marker        | number   | rule                                                      |
|------------------------------|----------|-----------------------------------------------------------|
| ``145``, ``145.``, ``145.0`` | 145      | a final stop and trailing zeros do not count              |
| ``1,234,567``, ``1'234``     | 1234567  | separators before groups of three digits (1,00,000 too)   |
| ``1 234`` (no-break space)   | 1234     | a plain space separates numbers instead                   |
| ``1.234,50``                 | 1234.5   | points before groups, then a comma: the comma is decimal  |
| ``12,5``                     | 12.5     | a comma not before a group of three is decimal            |
| ``$1,234.50``, ``-$5``       | 1234.5   | currency signs, before or after the minus, do not count   |
| ``+3``, ``−3``, ``- 3``      | 3, -3    | typographic minus signs too; a hyphen in a word is none   |
| ``3/4``, ``\\frac{3}{4}``, ``¾`` | 3/4  | exact fractions                                           |
| ``1 3/4``, ``1¾``            | 7/4      | mixed numbers                                             |
| ``12 km``, ``25%``, ``x = 5``| 12, 25, 5| words, units and percent signs do not count               |
| ``1.2e3``, ``1.2 × 10^3``    | 1200     | scientific notation, superscripts too                     |
| ``١٤٥``, ``１４５``            | 145      | any script's decimal digits                               |
| ``7 or 8``                   | 7        | the first number                                          |
| ``7/0``, ``1e999``           | none     | not a meaningful number                                   |
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MARKERS = ("The answer is:", "####")
_MAX_DIGITS = 300
_MAX_EXPONENT = 300

_MINUS = dict.fromkeys(map(ord, "−–—﹣－‒"), "-")
_SPACES = dict.fromkeys(map(ord, "\u00a0\u202f\u2009\u2007"), "\u00a0")
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_GROUPED = r"[1-9]\d{0,2}(?:(?:,\d{2,3})*,\d{3}|(?:['’\u00a0]\d{3})+)(?!\d)(?:\.\d+)?"
_EUROPEAN = r"\d{1,3}(?:\.\d{3})+,\d+"
_COMMA_DECIMAL = r"\d+,\d+(?!\d|,\d)"
_PLAIN = r"\d+(?:\.\d+)?|(?<!\.)\.\d+"
_AMOUNT = rf"(?:{_EUROPEAN}|{_GROUPED}|{_COMMA_DECIMAL}|{_PLAIN})"
_SIGN = r"(?:(?<![\w)\]])(?P<sign>[-+])\s?)?"
_CURRENCY = r"(?:\\?[$€£¥₹₩₽]\s?(?P<late_sign>-)?)?"
_NUMBER = re.compile(
    rf"{_SIGN}{_CURRENCY}(?:"
    rf"(?:(?P<whole>\d+) )?(?P<top>\d+)\s?/\s?(?P<bottom>\d+)(?![\d.,]*\d)"
    rf"|(?P<amount>{_AMOUNT})(?:[eE](?P<exponent>[-+]?\d+)|\s?[x×*·]\s?10\s?\^\s?\{{?(?P<power>[-+]?\d+))?"
    rf")"
)


def find_answer(text: str, *, gold: bool = False) -> str | None:
    """The text after the first marker, up to the end of the first line that is not empty.

    Args:
        gold: Read after the last marker: the data's own solution may use the marker for its steps, and a model's text
            may go on after its answer.
    """
    find = text.rindex if gold else text.index
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


def parse_number(text: str) -> Fraction | None:
    """The first number in a text, exactly, by the rules of this module; ``None`` if there is none."""
    match = _NUMBER.search(_plain(text))
    if match is None or sum(map(str.isdigit, match[0])) > _MAX_DIGITS:
        return None
    value = _fraction(match) if match["top"] else _decimal(match)
    if value is None:
        return None
    return -value if "-" in ((match["sign"] or "") + (match["late_sign"] or "")) else value


def _fraction(match: re.Match[str]) -> Fraction | None:
    bottom = int(match["bottom"])
    return int(match["whole"] or 0) + Fraction(int(match["top"]), bottom) if bottom else None


def _decimal(match: re.Match[str]) -> Fraction | None:
    exponent = int(match["exponent"] or match["power"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    amount = re.sub(r"['’\u00a0]", "", match["amount"])
    if re.fullmatch(_EUROPEAN, amount):
        amount = amount.replace(".", "").replace(",", ".")
    elif re.fullmatch(_GROUPED, amount):
        amount = amount.replace(",", "")
    else:
        amount = amount.replace(",", ".")
    return Fraction(amount) * Fraction(10) ** exponent


def _plain(text: str) -> str:
    """Replace the digits, signs and fractions of any script by ASCII."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: "^" + run[0].translate(_SUPERSCRIPT), text)
    text = "".join(_plain_character(character) for character in text.translate(_MINUS | _SPACES))
    return re.sub(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1/\2", text)


def _plain_character(character: str) -> str:
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKC", character).partition("\u2044")
        return f" {top}/{bottom}"
    return character
