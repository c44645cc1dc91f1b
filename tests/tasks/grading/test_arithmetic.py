"""Safe arithmetic: exact values, and refusal of everything that is not + - * / on integers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.tasks.grading.arithmetic import NotArithmeticError, evaluate


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1 + 2*3", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("7/2", Fraction(7, 2), [7, 2]),
        ("1/3*3", 1, [1, 3, 3]),
        ("-5 - -4", -1, [5, 4]),
        ("8 × 3 ÷ 2 − 1", 11, [8, 3, 2, 1]),
        ("999999999999999*999999999999999", 999999999999999**2, [999999999999999] * 2),
    ],
)
def test_values_are_exact(text, value, numbers):
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "9**9**9",
        "9^9",
        "7//2",
        "1.5",
        "1e9",
        "0x10",
        "1/0",
        "factorial(10**8)",
        "__import__('os').system('true')",
        "(1).__class__",
        "[1]",
        "1,2",
        "1 if 1 else 2",
        "1" * 16,
        "1+" * 600 + "1",
        "(" * 400 + "1" + ")" * 400,
        "1+" * 64 + "1",
        "٣+١",
        "()",
        "1(2)",
    ],
)
def test_everything_else_is_refused(text):
    with pytest.raises(NotArithmeticError):
        evaluate(text)


@given(st.text(alphabet="0123456789+-*/() x.,_'\n", max_size=60))
@settings(max_examples=1000, deadline=None)
def test_any_text_gives_a_fraction_or_a_refusal(text):
    try:
        value, numbers = evaluate(text)
    except NotArithmeticError:
        return
    assert isinstance(value, Fraction)
    assert numbers and all(type(number) is int for number in numbers)
