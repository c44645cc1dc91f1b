"""Exact value of an expression of whole numbers and + - * /, from text that nobody trusts.

The text is parsed to a syntax tree and walked; nothing is ever evaluated as code. Sizes are bounded
before work is done: there is no power, so a value has at most the digits that were written.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction

MAX_CHARACTERS = 1_000
MAX_NUMBERS = 64
_ALLOWED = re.compile(r"[0-9+\-*/() \t]*")
# A number of a thousand digits parses slowly in older interpreters and is never an answer.
_LONG_NUMBER = re.compile(r"[0-9]{16,}")
_SYMBOLS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "∗": "*"})


class NotArithmeticError(ValueError):
    """The text is not an expression of whole numbers and + - * /, or it is over the bounds."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value and the whole numbers used, in order of appearance.

    Raises NotArithmeticError for anything else: names, calls, powers, floats, `//`, zero division,
    more than MAX_CHARACTERS characters or MAX_NUMBERS numbers, numbers of 16 or more digits.
    """
    text = text.strip().translate(_SYMBOLS)
    if len(text) > MAX_CHARACTERS:
        raise NotArithmeticError(f"longer than {MAX_CHARACTERS} characters")
    if not _ALLOWED.fullmatch(text) or "**" in text or "//" in text or _LONG_NUMBER.search(text):
        raise NotArithmeticError("characters or numbers that are not allowed")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotArithmeticError("does not parse") from error
    numbers: list[int] = []
    try:
        return _walk(tree.body, numbers), numbers
    except ZeroDivisionError as error:
        raise NotArithmeticError("division by zero") from error
    except RecursionError as error:
        raise NotArithmeticError("nested too deeply") from error


def _walk(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        if len(numbers) > MAX_NUMBERS:
            raise NotArithmeticError(f"more than {MAX_NUMBERS} numbers")
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _walk(node.operand, numbers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left = _walk(node.left, numbers)
        right = _walk(node.right, numbers)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise NotArithmeticError(f"{type(node).__name__} is not allowed")
