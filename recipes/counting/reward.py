"""Pay for counting: the share of the asked numbers that are one step on from the number before them."""

from __future__ import annotations

import re


def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """One reward in [0, 1] a completion. answer: the right numbers, separated by commas."""
    return [_share(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def _share(text: str, wanted: str) -> float:
    asked = [int(n) for n in wanted.split(", ")]
    step = asked[1] - asked[0]
    # a number of more than nine digits is a slip, and not worth an integer of that size
    found = [int(n[:9]) for n in re.findall(r"\d+", text)][: len(asked)]
    before = [asked[0] - step, *found]
    return sum(n - b == step for n, b in zip(found, before, strict=False)) / len(asked)
