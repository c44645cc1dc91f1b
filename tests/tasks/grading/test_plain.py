"""Verdicts without algebra, against hand-made pairs and against math-verify itself."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.tasks.grading.plain import plain_number, quick_verdict, take_apart

RIGHT = [
    ("-5", "-5"),
    ("-5", "−5"),
    ("1234", "1,234"),
    ("1234567", "1{,}234{,}567"),
    ("1234567", r"1\,234\,567"),
    ("1234567", "1 234 567"),
    ("1000", "1,000"),
    ("12.5", "$12.50"),
    ("12.50", r"\$12.5"),
    ("-3", "-$3"),
    ("1/2", r"\frac{1}{2}"),
    ("1/2", r"\dfrac12"),
    ("1/2", "0.5"),
    ("1.5", r"1\frac{1}{2}"),
    ("1.5", "1 1/2"),
    ("0.1", "10%"),
    ("0.1", r"10\%"),
    ("5", "x=5"),
    ("x = 5", "5"),
    ("840", "$840$"),
    ("840", r"\(840\)"),
    ("1000", "1e3"),
    ("5", "5."),
    ("5", "5 cm"),
    ("5 cm", r"5 \text{ cm}"),
    ("5", r"5\text{ square units}"),
    (r"9 \text{ cm}^2", "9 cm^2"),
    ("30", r"30^\circ"),
    ("30 degrees", "30°"),
    ("yes", "Yes"),
    ("yes", r"\text{yes}"),
    ("A", "(A)"),
    ("A", r"\text{(A)}"),
    ("5 m", "5m"),
    ("5 m", "5"),
    ("1,2,3", "1, 2, 3"),
    ("003", "3"),
    (r"\{1,2\}", r"\left\{2, 1.0\right\}"),
    ("1, 2", "2, 1"),
    ("(1,2)", r"\left(1, \frac{4}{2}\right)"),
    ("[0, 1/2)", "[0,0.5)"),
    ("3 and 4", "3 and 4"),
    ("+3", "3"),
]
WRONG = [
    ("5", "-5"),
    ("-5", "5"),
    ("12", "1 2"),
    ("3", "1 2"),
    ("10", "10%"),
    ("1/3", "0.333333"),
    ("5 m", "5 cm"),
    ("5", "The answer is 5"),
    ("5", "5 and 6"),
    ("evil", "live"),
    ("yes", "yes or no"),
    ("A", "B"),
    ("x=5", "6"),
    ("0.1", "0.10000001"),
    ("5", "a$ 5 $b"),
    ("(1,2)", "(2,1)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("[1,2]", "[1,3]"),
    ("1,2", "1,3"),
    ("5", ""),
    ("5", "$$"),
    ("5 m", "5 km"),
    ("x", "__import__('os').system('true')"),
]
UNDECIDED = [("5", "5x"), ("x=5", "y=5"), ("[1,2]", "(1,2)"), ("1", r"\sqrt{1}"), ("2", "1+1")]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_right(gold, answer):
    assert quick_verdict(gold, answer) is True


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong(gold, answer):
    assert quick_verdict(gold, answer) is False


@pytest.mark.parametrize(("gold", "answer"), UNDECIDED)
def test_what_needs_algebra_is_left_to_it(gold, answer):
    assert quick_verdict(gold, answer) is None


def test_tolerance_is_relative_and_off_by_default():
    assert quick_verdict("100", "100.9", 0.01) is True
    assert quick_verdict("100", "101.1", 0.01) is False
    assert quick_verdict("-100", "-100.9", 0.01) is True
    assert quick_verdict("0", "0.0001", 0.01) is False


def test_units_are_split_off():
    assert take_apart("9 cm^{2}").unit == "cm2"
    assert take_apart(r"2\sqrt{3} \text{ m}").text == r"2\sqrt{3}"
    assert take_apart("5 x").unit == ""


@pytest.mark.parametrize("text", ["1" * 2000, "1e999999", "1/0", "", "-", "1e", ".", "1.2.3", "٣"])
def test_what_is_no_plain_number_or_too_large_is_none(text):
    assert plain_number(text) is None


NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.decimals(-1000, 1000, places=3).map(str),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda p: f"{p[0]}/{p[1]}"),
)


@given(NUMBERS, NUMBERS)
@settings(max_examples=500, deadline=None)
def test_plain_numbers_compare_as_exact_fractions(gold, answer):
    assert quick_verdict(gold, answer) is (Fraction(gold) == Fraction(answer))


@given(NUMBERS, NUMBERS)
@settings(max_examples=150, deadline=None)
def test_math_verify_agrees_on_plain_numbers(gold, answer):
    """Both ways: what is decided here as equal is equal there, and the reverse beyond 1e-6."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text):
        return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)

    for other in (answer, gold, f"{Fraction(gold)}"):
        ours = quick_verdict(gold, other)
        theirs = verify(read(gold), read(other), timeout_seconds=None)
        if ours or abs(Fraction(gold) - Fraction(other)) > Fraction(1, 10**5):
            assert ours is theirs, (gold, other)


SEQUENCES = [
    p for p in RIGHT + WRONG if "," in p[0] and set(p[0]) & set("([{") and "{,}" not in p[0]
]


@pytest.mark.parametrize(("gold", "answer"), SEQUENCES)
def test_math_verify_agrees_on_sequences(gold, answer):
    from math_verify import LatexExtractionConfig, parse, verify

    gold_read, answer_read = (
        parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
        for text in (gold, answer)
    )
    ours = quick_verdict(gold, answer)
    assert verify(gold_read, answer_read, timeout_seconds=None) is ours


@given(st.text(alphabet="0123456789.,-+/%$ \\{}()=xAcmfrat°^e−", max_size=40), st.text(max_size=20))
@settings(max_examples=1500, deadline=None)
def test_any_pair_of_texts_gets_an_outcome_and_equal_texts_are_equal(first, second):
    assert quick_verdict(first, second) in (True, False, None)
    assert quick_verdict(first, first) is True


@pytest.mark.parametrize(
    "unit", ["(", "1 ", "1,", "1,234", "a", "\\,", "1/", "{,}", "$", "^", "x="]
)
def test_long_texts_are_decided_in_one_pass(unit):
    text = unit * (10_000 // len(unit))
    quick_verdict("5", text)
    quick_verdict(text, text)
