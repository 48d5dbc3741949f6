"""The number in a generated answer.

The answer is the first number after the first marker, "The answer is:" or "####" (in the data's own solution, the last
marker), on the first line that is not empty. Later corrections do not count. Otherwise there is no answer.

| text after the marker        | number   | rule                                                      |
|------------------------------|----------|-----------------------------------------------------------|
| ``145``, ``145.``, ``145.0`` | 145      | a final stop and trailing zeros do not count              |
| ``1,234,567``, ``1'234``     | 1234567  | separators before groups of three digits (1,00,000 too)   |
| ``1 234`` (no-break space)   | 1234     | any space but a plain one, which separates numbers        |
| ``1{,}234``, ``1\\,234``      | 1234     | LaTeX's separators                                        |
| ``1.234,50``, ``1.234.567``  | 1234.5, 1234567 | points before groups: a comma behind them is decimal |
| ``12,5``, ``1 234,5``        | 12.5, 1234.5 | a comma not before a group of three is decimal        |
| ``(3,4)``                    | none     | a point or an interval, or a decimal comma                |
| ``$1,234.50``, ``-$5``       | 1234.5   | currency signs, before or after the minus, do not count   |
| ``+3``, ``−3``, ``- 3``      | 3, -3    | typographic minus signs too; a hyphen in a word is none   |
| ``minus 3``, ``-{3}``, ``-US$3`` | -3   | a sign before brackets or a currency, or as the first word |
| ``±3``, ``-(-3)``            | none     | more than one sign                                        |
| ``3/4``, ``\\frac{3}{4}``, ``¾`` | 3/4  | exact fractions, ``\\frac34`` and ``1.5/2`` too            |
| ``1 3/4``, ``1¾``            | 7/4      | mixed numbers, ``1\\frac{3}{4}`` too                      |
| ``12 km``, ``25%``, ``x = 5``| 12, 25, 5| words, units and percent signs do not count               |
| ``1.2e3``, ``1.2 × 10^3``    | 1200     | scientific notation, superscripts and LaTeX's signs too   |
| ``10^3``, ``10³``, ``2^{-1}``, ``10**3`` | 1000, 1/2 | powers of a number with a whole exponent      |
| ``١٤٥``, ``１４５``            | 145      | any script's decimal digits                               |
| ``7 or 8``                   | 7        | the first number                                          |
| ``7/0``, ``1e999``, ``4 10/3`` | none   | not a meaningful number                                   |
| ``\\sqrt{2}``, ``2\\pi``, ``2^x``, ``1/2/3``, ``5(2)``, ``0.\\overline{3}`` | none | a part of an expression  |
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MARKERS = ("The answer is:", "####")
_MAX_DIGITS = 300
_MAX_EXPONENT = 300

_MINUS = dict.fromkeys(map(ord, "−–—‐‑‒―➖"), "-")
_SIGNS = {ord(sign): plain for sign, plain in zip("٬٫\u2044\u2215ʼ⋅✕✖", ",.//'·××", strict=True)}
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_GROUPED = r"[1-9]\d{0,2}(?:(?:,\d{2,3})*,\d{3}(?!\d)(?:\.\d+)?|(?:['’_\u00a0]\d{3})+(?!\d)(?:[.,]\d+)?)"
_EUROPEAN = r"\d{1,3}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,}(?![\d.]))"
_COMMA_DECIMAL = r"\d+,\d+(?!\d|,\d)"
_PLAIN = r"\d+(?:\.\d+)?|(?<!\.)\.\d+"
_AMOUNT = rf"(?:{_EUROPEAN}|{_GROUPED}|{_COMMA_DECIMAL}|{_PLAIN})"
_SIGN = r"(?:(?<![\w)\]])(?P<sign>[-+])(?:\s?\(?|[({*]*)(?:[A-Z]{0,2}(?=\$))?)?"
_CURRENCY = r"(?:\$\s?(?P<late_sign>-)?)?"
_SPACED = r"[ \u00a0]{1,2}"
_NUMBER = re.compile(
    rf"{_SIGN}{_CURRENCY}(?:"
    rf"(?:(?P<whole>{_GROUPED}|\d+){_SPACED})?(?P<top>{_AMOUNT})\s?/\s?(?P<bottom>-?(?:{_AMOUNT}))(?![\d.,]*\d)"
    rf"|(?P<amount>{_AMOUNT})(?:[eE](?P<exponent>[-+]?\d+)|\s*[xX×*·]\s*10\s?\^\s?(?P<power>[-+]?\d+)(?![.,/]?\d)"
    rf"|\s?\^\s?(?P<own_power>[-+]?\d+)(?![.,/]?\d))?"
    rf")"
)
_BEFORE = re.compile(
    r"(?:\\(?:sqrt|[dtc]?frac|binom|log|ln|sin|cos|tan)[\W_]*|\\[dtc]?frac\{[^{}]*\}\{|√\s*|\^\s*\{?|(?:±|\\pm)\W*"
    r"|(?<![\w)\]])-\s?[({]*)$"
)
_BEHIND = re.compile(
    r"\.?\s?(?:\\(?:sqrt|pi\b|[dtc]?frac|overline|bar\b|dot\b)|[√π])|[)}]*\s?\^|\.?\(\d|/\d|\s?[xX×*·]\s?10\s?\^"
)
"""What makes a number a part of an expression."""
_WORDS = r"[^\d\\^/*_#@|π-]*"
_SCALE = r"(?i:hundred|thousand|million|billion|trillion|dozen)s?\b"
_ONLY_WORDS = re.compile(_WORDS), re.compile(rf"(?!\s*(?:[:!]|{_SCALE})){_WORDS}")
"""What may stand before the number of a data set's own answer, and behind it: no word that changes its value."""
_NO_WORDS = ("Sm", "No", "Nl")
"""Unicode's categories of mathematical signs and of numerals that are no decimal digits."""
_IN_A_PAIR = re.compile(rf"[(\[][-+]?(?!{_GROUPED}$){_COMMA_DECIMAL}$")
"""A comma that separates the numbers of a point or an interval, or is decimal."""


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
    text = _plain(text)
    match = _NUMBER.search(text)
    if match is None or sum(map(str.isdigit, match[0])) > _MAX_DIGITS:
        return None
    before, behind = text[: match.start()], text[match.end() :]
    if _BEFORE.search(before) or _BEHIND.match(behind) or _IN_A_PAIR.search(text[: match.end()]):
        return None
    if alone and not all(words.fullmatch(part) for words, part in zip(_ONLY_WORDS, (before, behind), strict=True)):
        return None
    if alone and any(unicodedata.category(sign) in _NO_WORDS and sign not in "=≈~" for sign in before + behind):
        return None
    value = _fraction(match) if match["top"] else _decimal(match)
    if value is None:
        return None
    return -value if "-" in ((match["sign"] or "") + (match["late_sign"] or "")) else value


def _fraction(match: re.Match[str]) -> Fraction | None:
    whole, top, bottom = (_amount(match[part] or "0") for part in ("whole", "top", "bottom"))
    if not bottom or (match["whole"] and not 0 < top / bottom < 1):
        return None
    return whole + top / bottom


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
    text = re.sub(r"[⁰¹²³⁴-⁹]+(?=⁄[₀-₉])|(?<=⁄)[₀-₉]+", lambda run: f" {unicodedata.normalize('NFKC', run[0])}", text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: "^" + run[0].translate(_SUPERSCRIPT), text)
    text = "".join(map(_plain_character, text)).translate(_MINUS | _SIGNS)
    for spelled, plain in _LATEX:
        text = spelled.sub(plain, text)
    return text


_PART = r"(?:\{\s*([-+]?)\s*([\d.,]+)\s*\}|\s*(\d))"
_FRACTION = rf"\\(?:[dtcs]|nice)?frac\s*{_PART}\s*{_PART}"
_LATEX = [
    (re.compile(spelled), plain)
    for spelled, plain in (
        (r"\\(?:boxed|text|textbf|mathrm|mathbf|left|right)(?![a-z])\s*(?=[{()\[\]])|\\(?=[()\[\]$%])", ""),
        (r"\{([-,])\}", r"\1"),
        (r",\\!", ","),
        (r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3})", "\u00a0"),
        (r"(?:\\[,;:! ])*\\(?:times|cdot)(?![a-z])(?:\\[,;:! ])*", "×"),
        (r"\s?\^\s?\{?\s?\\circ\s?\}?", "°"),
        (r"\^\s?[{(]\s?([-+]?\d+)\s?[)}](?!\d)|(?<=\d)(?:\*\*| \*\* )(?=[-+]?\d)", r"^\1"),
        (r"\s*\\over(?![a-z])\s*", "/"),
        (rf"(?<=\d)(?:\s|~|\\[,;:! ])*(?={_FRACTION})", " "),
        (_FRACTION, r"\1\2\3/\4\5\6"),
        (r"(?i:^(\W*)minus|\bnegative)\s+(?=\$?\d)", r"\1-"),
    )
]


def _plain_character(character: str) -> str:
    digit, category = unicodedata.decimal(character, None), unicodedata.category(character)
    if digit is not None:
        return str(digit)
    decomposition = unicodedata.decomposition(character)
    if decomposition.startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKC", character).partition("\u2044")
        return f" {top}/{bottom}"
    if decomposition.startswith(("<wide>", "<small>")):
        character = unicodedata.normalize("NFKC", character)
    is_space = category == "Zs" and character != " "
    return "\u00a0" if is_space else "$" if category == "Sc" else "" if category == "Cf" else character
