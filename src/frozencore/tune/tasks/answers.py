"""The number in a generated answer.

The answer is the first number after the first marker, "The answer is:" or "####" (in the data's own solution, the last
marker), on the first line that is not empty.
Later additions or corrections do not count. Without a marker, or a number after it, there is no answer.

| text after the marker        | number   | rule                                                      |
|------------------------------|----------|-----------------------------------------------------------|
| ``145``, ``145.``, ``145.0`` | 145      | a final stop and trailing zeros do not count              |
| ``1,234,567``, ``1'234``     | 1234567  | separators before groups of three digits (1,00,000 too)   |
| ``1 234`` (no-break space)   | 1234     | a plain space separates numbers instead                   |
| ``1{,}234``, ``1\\,234``      | 1234     | LaTeX's separators                                        |
| ``1.234,50``, ``1.234.567``  | 1234.5, 1234567 | points before groups: a comma behind them is decimal |
| ``12,5``                     | 12.5     | a comma not before a group of three is decimal            |
| ``$1,234.50``, ``-$5``       | 1234.5   | currency signs, before or after the minus, do not count   |
| ``+3``, ``−3``, ``- 3``      | 3, -3    | typographic minus signs too; a hyphen in a word is none   |
| ``3/4``, ``\\frac{3}{4}``, ``¾`` | 3/4  | exact fractions, ``\\frac34`` and ``1.5/2`` too            |
| ``1 3/4``, ``1¾``            | 7/4      | mixed numbers, ``1\\frac{3}{4}`` too                      |
| ``12 km``, ``25%``, ``x = 5``| 12, 25, 5| words, units and percent signs do not count               |
| ``1.2e3``, ``1.2 × 10^3``    | 1200     | scientific notation, superscripts and LaTeX's signs too   |
| ``10^3``, ``10³``, ``2^{-1}`` | 1000, 1/2 | powers                                                   |
| ``١٤٥``, ``１４５``            | 145      | any script's decimal digits                               |
| ``7 or 8``                   | 7        | the first number                                          |
| ``7/0``, ``1e999``           | none     | not a meaningful number                                   |
| ``\\sqrt{2}``, ``2\\pi``      | none     | a part of an expression                                   |
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
_SIGNS = {ord(sign): plain for sign, plain in zip("，．٬٫\u2044\u2215", ",.,.//", strict=True)}
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_GROUPED = r"[1-9]\d{0,2}(?:(?:,\d{2,3})*,\d{3}|(?:['’_\u00a0]\d{3})+)(?!\d)(?:\.\d+)?"
_EUROPEAN = r"\d{1,3}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,}(?![\d.]))"
_COMMA_DECIMAL = r"\d+,\d+(?!\d|,\d)"
_PLAIN = r"\d+(?:\.\d+)?|(?<!\.)\.\d+"
_AMOUNT = rf"(?:{_EUROPEAN}|{_GROUPED}|{_COMMA_DECIMAL}|{_PLAIN})"
_SIGN = r"(?:(?<![\w)\]])(?P<sign>[-+])\s?\(?)?"
_CURRENCY = r"(?:\\?[$€£¥₹₩₽]\s?(?P<late_sign>-)?)?"
_NUMBER = re.compile(
    rf"{_SIGN}{_CURRENCY}(?:"
    rf"(?:(?P<whole>\d+) )?(?P<top>{_AMOUNT})\s?/\s?(?P<bottom>-?(?:{_AMOUNT}))(?![\d.,]*\d)"
    rf"|(?P<amount>{_AMOUNT})(?:[eE](?P<exponent>[-+]?\d+)|\s?[x×*·]\s?10\s?\^\s?\{{?(?P<power>[-+]?\d+)\}}?"
    rf"|\s?\^\s?\{{?(?P<own_power>[-+]?\d+)\}}?)?"
    rf")"
)
_BEFORE = re.compile(r"(?:\\(?:sqrt|[dtc]?frac|log|ln|sin|cos|tan)\W*|\\[dtc]?frac\{[^{}]*\}\{|√\s*|\^\s*\{?)$")
_BEHIND = re.compile(r"\s?(?:\\(?:sqrt|pi\b)|[√π])")
"""What makes a number a part of an expression."""
_WORDS = r"[^\d\\^/+*<>_#√π-]*"
_ONLY_WORDS = re.compile(_WORDS), re.compile(rf"(?!\s*[:!]){_WORDS}")
"""What may stand before the number of a data set's own answer, and behind it."""


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


def parse_number(text: str, *, alone: bool = False) -> Fraction | None:
    """The first number in a text, exactly, by the rules of this module; ``None`` if there is none.

    Args:
        alone: Only words and units may stand beside it, such as those of ``$12`` or ``5 eggs``.
    """
    text = _plain(text)
    match = _NUMBER.search(text)
    if match is None or sum(map(str.isdigit, match[0])) > _MAX_DIGITS:
        return None
    before, behind = text[: match.start()], text[match.end() :]
    if _BEFORE.search(before) or _BEHIND.match(behind):
        return None
    if alone and not all(words.fullmatch(part) for words, part in zip(_ONLY_WORDS, (before, behind), strict=True)):
        return None
    value = _fraction(match) if match["top"] else _decimal(match)
    if value is None:
        return None
    return -value if "-" in ((match["sign"] or "") + (match["late_sign"] or "")) else value


def _fraction(match: re.Match[str]) -> Fraction | None:
    bottom = _amount(match["bottom"])
    return int(match["whole"] or 0) + _amount(match["top"]) / bottom if bottom else None


def _decimal(match: re.Match[str]) -> Fraction | None:
    exponent, power = int(match["exponent"] or match["power"] or 0), int(match["own_power"] or 1)
    amount = _amount(match["amount"])
    if max(abs(exponent), abs(power) * len(match["amount"])) > _MAX_EXPONENT or (power < 0 and not amount):
        return None
    return amount**power * Fraction(10) ** exponent


def _amount(text: str) -> Fraction:
    """The value of a decimal with separators."""
    text = re.sub(r"['’_\u00a0]", "", text)
    if re.fullmatch(rf"-?(?:{_EUROPEAN})", text):
        text = text.replace(".", "").replace(",", ".")
    elif re.fullmatch(rf"-?(?:{_GROUPED})", text):
        text = text.replace(",", "")
    return Fraction(text.replace(",", "."))


def _plain(text: str) -> str:
    """Replace the digits, signs and fractions of any script, and those of LaTeX, by ASCII."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: "^" + run[0].translate(_SUPERSCRIPT), text)
    text = "".join(_plain_character(character) for character in text.translate(_MINUS | _SPACES | _SIGNS))
    for spelled, plain in _LATEX:
        text = spelled.sub(plain, text)
    return text


_PART = r"(?:\{\s*([-+]?[\d.,]+)\s*\}|\s*(\d))"
_LATEX = [
    (re.compile(spelled), plain)
    for spelled, plain in (
        (r"\{,\}|,\\!", ","),
        (r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3})", "\u00a0"),
        (r"\\(?:times|cdot)(?![a-z])", "×"),
        (r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*(?=\{)|\\(?=[()\[\]$%])", ""),
        (rf"(?<=\d)\s*(?=\\[dtc]?frac{_PART}{_PART})", " "),
        (rf"\\[dtc]?frac\s*{_PART}\s*{_PART}", r"\1\2/\3\4"),
    )
]


def _plain_character(character: str) -> str:
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKC", character).partition("\u2044")
        return f" {top}/{bottom}"
    return character
