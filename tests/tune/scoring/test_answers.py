"""The parser against its documented table, and properties over generated numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures import tried
from frozencore.tune.scoring.answers import find_answer, parse_answer, parse_number
from frozencore_lab.tasks.paper import gsm8k_row

NUMBERS = {
    "145": 145, "145.": 145, "145.0": 145, "0.50": "1/2", ".5": "1/2", "...5": 5, "1,234,567": 1234567,
    "1,234,567.89": "123456789/100", "1,00,000": 100000, "1 234": 1, "3, 4": 3, "1,2,3": 1, "$1,234.50": "2469/2",
    "\\$12": 12, "-$5": -5, "$-5": -5, "+3": 3, "−3": -3, "–3": -3, "- 3": -3, "x-3": 3, "(3)": 3, "(1,234)": 1234,
    "3/4": "3/4", "3 / 4": "3/4", "-3/4": "-3/4", "6/8": "3/4", "1.5/2": "3/4", "3/-4": "-3/4", "12 km": 12, "12km": 12,
    "25%": 25, "x = 5": 5, "**27** apples": 27, "5 eggs": 5, "7 or 8": 7, "3 + 4 = 7": 3, "- **5**": 5, "5!": 5,
}  # fmt: skip
ALONE = [
    "$1,234",
    "5 km",
    "5 miles",
    "5 knives",
    "50%",
    "5 eggs",
    "$42$",
    "x: 5",
    "No. 5",
    "-3",
    "\\(3)"[1:],
    "7.",
    "≈ 5",
    "3/4",
]
NOT_ALONE = [
    "\\sqrt{2}", "2\\pi", "2π", "x^2", "5\\sqrt{3}", "(3, 4)", "7 or 8", "2024-05-01", "12:30", "0x10",
    "3 apples and 4 pears", "10 000", "5-3", "1/2/3", "12.5.1", "1,000,00", "3+4=7", "1, 2", "5!", "x-3", "seven", "±5",
    "≤5", "(3,4)", "[1,5]", "|5|", "3÷1", "@5", "-(-5)", "1.5 million", "2 dozen", "12,5", "1 3/4", "1e3", "½", "٣",
    "minus 5", "Negative 5", "5 k", "5k", "5M", "3 bn",
]  # fmt: skip
NO_NUMBERS = ["", "seven", "7/0", "9" * 5000, "-", "$", "half", "½", "٣"]

TEXTS = {
    " The answer is: 5": 5,
    "2 + 3 = 5\n#### 5": 5,
    "The answer is:\n\n 5 apples": 5,
    "The answer is: 5. No, The answer is: 6": 5,
    "#### 5\nThe answer is: 6": 5,
    "The answer is: 5 #### 6": 5,
    "The answer is: 5\n\nQuestion: what is 6?": 5,
    "The answer is 5": None,
    "the answer is: 5": None,
    "5": None,
    "The answer is:": None,
    "The answer is: unknown\n5": None,
    "The answer is: unknown. #### 5": 5,
    "": None,
}


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_a_number_is_read_as_the_table_says(text: str, number: int | str) -> None:
    assert parse_number(text) == Fraction(number)


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_not_a_number_one_could_mean_is_none(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize("text", [*ALONE, *NOT_ALONE])
def test_an_answer_of_the_data_is_one_number_with_words_at_most(text: str) -> None:
    number = parse_number(text, alone=True)
    assert (number is not None) == (text in ALONE)
    assert number in (None, parse_number(text))


@pytest.mark.parametrize(("text", "number"), TEXTS.items())
def test_the_first_marker_decides(text: str, number: int | None) -> None:
    assert parse_answer(text) == number


def test_the_last_marker_decides_in_the_datas_own_solution() -> None:
    solution = "#### Step 1: add 2.\nSo.\n#### 42"
    assert (parse_answer(solution), parse_answer(solution, gold=True)) == (1, 42)
    assert parse_answer("#### 5\nThe answer is: 6", gold=True) == 6
    row = {"question": "How many?", "answer": solution}
    assert parse_answer(gsm8k_row(row, "r").completion, gold=True) == 42


def test_the_answer_is_the_first_line_after_the_marker_that_is_not_empty() -> None:
    assert find_answer("#### \n  12 km \nmore") == "12 km "
    assert find_answer("no marker 12") is None


@given(st.integers(-(10**12), 10**12))
def test_every_spelling_of_an_integer_is_the_same_number(number: int) -> None:
    spellings = [str(number), f"{number:,}", f"{number}.00", f"{number}.", f"${number}", f"{number} units"]
    assert {parse_answer(f"so The answer is: {spelling}\nand more 77") for spelling in spellings} == {Fraction(number)}


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=4))
def test_a_decimal_is_read_exactly(number: object) -> None:
    assert parse_number(f"{number:f}") == Fraction(str(number))


@given(st.fractions())
def test_the_one_spelling_of_a_number_is_read_back(number: Fraction) -> None:
    assert parse_number(str(number)) == number


@given(st.text())
@tried(2)
def test_any_text_is_a_number_or_no_answer(text: str) -> None:
    value = parse_answer(f"####{text}")
    assert value is None or find_answer(f"####{text}") is not None
    number = parse_number(text)
    assert number is None or parse_number(str(number)) == number


@given(st.text(st.sampled_from("0123456789.,/-+ e^x×$%()'\u00a0\u2212½²\\frac{}"), max_size=40))
@tried(2)
def test_what_looks_like_a_number_is_read_without_an_error_and_quickly(text: str) -> None:
    parse_number(text * 20)
