r"""Decide equality of answers that need no algebra: text, exact numbers, percent, units.

`quick_verdict` is the first step of every comparison, in this process and in the workers alike, so
deciding here instead of there cannot change a verdict. All patterns run in linear time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1_000
MAX_EXPONENT = 400
MAX_DEPTH = 50
UNIT_CHARACTERS = 80
MAX_ELEMENTS = 200

_DASHES = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-", "∶": ":", "　": " "})
_SPACES = r"(?:[ \t\u00a0\u2009\u202f]|\\[,;:! ]|~)"
_GROUPED = re.compile(
    r"(?<![\d.,}])([1-9]\d{0,2})"
    r"(?:(?:,\d{3})+|(?:\{,\}\d{3})+|(?:\\[,!; ]\d{3})+|(?:[ \u00a0\u2009\u202f~]\d{3})+)"
    r"(?![\d,{}]|[ ]\d)",
    re.ASCII,
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textrm|operatorname)\s*\{([^{}]*)\}")
_TEXT_UNIT = re.compile(
    r"\\(?:text|mathrm|mbox|textrm)\s*\{\s*([A-Za-z/. ]{1,40}?)\s*\}"
    r"\s*(\^\s*\{?\s*-?\d\s*\}?)?$"
)
_DEGREES = re.compile(r"(?:\s*\^\s*\{?\s*\\circ\s*\}?|°)$")
_WORD_UNITS = (
    "mm cm km in ft yd mi mg kg lb oz ml mL sec min hr mph km/h m/s deg degree degrees inch inches "
    "foot feet yard yards mile miles meter meters metre metres centimeter centimeters second "
    "seconds minute minutes hour hours day days week weeks month months year years gram grams "
    "kilogram kilograms pound pounds ounce ounces liter liters litre litres dollar dollars cent "
    "cents euro euros unit units"
).split()
_WORD_UNIT = re.compile(
    r"(?<=[\d}) ])\s*(" + "|".join(sorted(map(re.escape, _WORD_UNITS), key=len)[::-1]) + r")"
    r"\s*(\^\s*\{?\s*-?\d\s*\}?|[²³])?$"
)
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_PLAIN = re.compile(
    rf"([+-]?)(?:({_NUMBER})(?:[eE]([+-]?\d{{1,4}}))?|(\d+)\s*/\s*(\d+)"
    rf"|(?:(\d+){_SPACES}*)?\\[dt]?frac\s*(?:\{{\s*([+-]?\d+)\s*\}}\s*\{{\s*(\d+)\s*\}}|(\d)(\d))"
    rf"|(\d+) +(\d+)/(\d+))",
    re.ASCII,
)
_LETTER_UNIT = re.compile(r"(?<= )([mgshlL])\s*(\^\s*\{?\s*-?\d\s*\}?|[²³])?$")
_BRACKETS = re.compile(r"(\(|\[|\\\{)\s*([^()\[\]]*?)\s*(\)|\]|\\\})", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z])\s*=\s*(?=[^=])")
_DIGIT_GAP = re.compile(rf"(?<=\d)(?:{_SPACES}|\s)+(?=\d)", re.ASCII)
_SPACED_DIGITS = re.compile(rf"\d{_SPACES}+\d", re.ASCII)
_END_SPACES = re.compile(rf"(?:{_SPACES}|\s)+\Z")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[a-z]{1,20}\*?\}|\\[A-Za-z]+")
_MATH_WORDS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp lim max min gcd lcm mod "
    "sqrt det inf sup".split()
)


@dataclass(frozen=True)
class Answer:
    """An answer taken apart: the mathematics, and the unit beside it (empty where none)."""

    text: str
    unit: str


def normalise(text: str) -> str:
    r"""Return the text without outer math marks, with ASCII minus, and numbers without separators.

    A comma, `{,}`, thin space or space counts as a separator only between a leading group of one
    to three digits and groups of exactly three, all by the same mark.
    """
    text = text.translate(_DASHES).strip()
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inside = text[len(start) : len(text) - len(end)]
        if len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end):
            if "$" not in inside.replace(r"\$", ""):
                text = inside.strip()
            break
    text = text.replace(r"\left", "").replace(r"\right", "")
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\%", "%")
    return _GROUPED.sub(_join_groups, text)


def _join_groups(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match.group(0))


def take_apart(text: str, *, letters: bool = False) -> Answer:
    """Split off a trailing unit: in a text command, a degree sign, or a known unit word.

    letters: take the one-letter units (m, g, s, h, l, L) after a space for units too; without it
    they are variables.
    """
    text = normalise(text)
    # Units are short: looking at the end only keeps this linear.
    cut = max(0, len(text) - UNIT_CHARACTERS)
    head, tail = text[:cut], text[cut:]
    for pattern in (_DEGREES, _TEXT_UNIT, _WORD_UNIT, *((_LETTER_UNIT,) if letters else ())):
        found = pattern.search(tail)
        if not found:
            continue
        body = _strip_end(head + tail[: found.start()])
        if not body or body[-1] not in "0123456789.})":
            continue
        if pattern is _DEGREES:
            return Answer(body, "deg")
        power = re.sub(r"[^0-9²³-]", "", found.group(2) or "")
        unit = " ".join(found.group(1).split()).rstrip(".") + power
        return Answer(body, "deg" if unit in ("degree", "degrees") else unit)
    return Answer(text, "")


def _strip_end(text: str) -> str:
    # Only so many spaces as fit: an end of ten thousand of them must not cost their square.
    found = _END_SPACES.search(text, max(0, len(text) - UNIT_CHARACTERS))
    return text[: found.start()] if found else text


def split_pair(gold: str, answer: str) -> tuple[Answer, Answer]:
    """Take both apart; a letter is a unit in the answer only where the gold answer has a unit."""
    left = take_apart(gold, letters=True)
    return left, take_apart(answer, letters=bool(left.unit))


def plain_number(text: str) -> Fraction | None:
    r"""Return the exact value of a plain number, or None.

    Plain: an optional sign and currency mark, then a whole number, a decimal, one with an exponent
    of ten, a fraction `a/b` or `\frac{a}{b}`, or a mixed number; an optional percent sign divides
    by 100.
    """
    text = text.strip()
    negative = False
    currency = re.match(r"([+-]?)\s*(?:\\?\$|€|£)\s*", text)
    if currency:
        negative = currency.group(1) == "-"
        text = text[currency.end() :]
    percent = text.endswith("%")
    if percent:
        text = text[:-1].rstrip()
    if len(text) > MAX_DIGITS:
        return None
    match = _PLAIN.fullmatch(text)
    if not match:
        return None
    value = _plain_value(match)
    if value is None:
        return None
    value = -value if (match.group(1) == "-") != negative else value
    return value / 100 if percent else value


def _plain_value(match: re.Match[str]) -> Fraction | None:
    _, decimal, exponent, top, bottom, whole, f_top, f_bottom, d_top, d_bottom, *mixed = (
        match.groups()
    )
    if decimal is not None:
        power = int(exponent or 0)
        if abs(power) > MAX_EXPONENT:
            return None
        return Fraction(decimal) * Fraction(10) ** power
    base = 0
    if mixed[0] is not None:
        base, top, bottom = int(mixed[0]), mixed[1], mixed[2]
    elif top is None:
        base = int(whole or 0)
        top, bottom = (f_top, f_bottom) if f_top is not None else (d_top, d_bottom)
        if whole is not None and int(top) < 0:
            return None
    if int(bottom) == 0:
        return None
    return base + Fraction(int(top), int(bottom))


def text_form(text: str) -> str:
    """Return the form in which two answers are compared as text: no spaces, no text commands."""
    text = _TEXT.sub(r"\1", text)
    text = _DIGIT_GAP.sub("_", text)
    text = re.sub(_SPACES + r"|\s|\{\}", "", text)
    inner = re.fullmatch(r"\(([A-Za-z])\)", text)
    text = inner.group(1) if inner else text
    # A full stop that ends a sentence is no part of the answer; `0.5` keeps its own.
    return text[:-1] if len(text) > 1 and text.endswith(".") else text


def is_words(text: str) -> bool:
    """Say whether an answer is words and not mathematics: letters only, at least two together."""
    bare = _TEXT.sub(r"\1", text)
    return not re.search(r"[\d\\^_=+*/<>{}()\[\]|]", bare) and bool(
        re.search("[^\\W\\d_]{2}", bare)
    )


def has_prose(text: str) -> bool:
    """Say whether there are words that are neither commands nor the names of functions."""
    bare = _COMMAND.sub(" ", text)
    return any(word not in _MATH_WORDS for word in _WORD.findall(bare))


def close(gold: Fraction, answer: Fraction, tolerance: float) -> bool:
    """Say whether |answer - gold| <= tolerance * |gold|, in exact arithmetic; 0 is equality."""
    return abs(answer - gold) <= Fraction(tolerance) * abs(gold)


def quick_verdict(gold: str, answer: str, tolerance: float = 0.0) -> bool | None:
    """Say whether the answer equals the gold one, or None where algebra has to decide.

    tolerance is relative and counts between plain numbers only.
    """
    if not gold.strip() or not answer.strip():
        return gold.strip() == answer.strip()
    if text_form(normalise(gold)) == text_form(normalise(answer)):
        return True
    left, right = split_pair(gold, answer)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if not right.text or not left.text:
        return False
    if text_form(left.text) == text_form(right.text):
        return True
    if is_words(left.text) or is_words(right.text):
        return (
            text_form(left.text).casefold() == text_form(right.text).casefold()
            and len(text_form(left.text)) > 1
        )
    numbers = _two_numbers(left.text, right.text)
    if numbers is not None:
        return close(*numbers, tolerance)
    sequences = _sequence(left.text), _sequence(right.text)
    if sequences[0] and sequences[1] and sequences[0][0] == sequences[1][0]:
        return sequences[0] == sequences[1]
    if len(left.text) == len(right.text) == 1 and (left.text + right.text).isalpha():
        return False
    if not is_algebra(left.text) or not is_algebra(right.text):
        return False
    return None


def _two_numbers(gold: str, answer: str) -> tuple[Fraction, Fraction] | None:
    named = [_VARIABLE.match(gold), _VARIABLE.match(answer)]
    if all(named) and named[0].group(1) != named[1].group(1):  # type: ignore[union-attr]
        return None
    bodies = [
        text[match.end() :] if match else text
        for text, match in zip((gold, answer), named, strict=True)
    ]
    values = [plain_number(body) for body in bodies]
    if values[0] is None or values[1] is None:
        return None
    return values[0], values[1]


def _sequence(text: str) -> tuple[str, object] | None:
    r"""Return the brackets and the values of a list of plain numbers, or None.

    `(...)`, `[...]` and half-open ones keep order; `\{...\}` and a bare list are sets.
    """
    match = _BRACKETS.fullmatch(text)
    kind, inside = (match.group(1) + match.group(3), match.group(2)) if match else ("", text)
    pieces = inside.split(",")
    if len(pieces) < 2 or len(pieces) > MAX_ELEMENTS:
        return None
    values = [plain_number(piece) for piece in pieces]
    if None in values:
        return None
    return kind, frozenset(values) if kind in ("", r"\{\}") else tuple(values)


def is_algebra(text: str) -> bool:
    """Say whether a comparison by algebra means anything for this text.

    Not for prose (its letters would multiply), for digits with only spaces between them (they would
    add or multiply), where a math mark is left in the middle, or for brackets over MAX_DEPTH deep.
    """
    if has_prose(text) or "$" in text.replace(r"\$", "") or _depth(text) > MAX_DEPTH:
        return False
    return not _SPACED_DIGITS.search(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest
