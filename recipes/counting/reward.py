"""Pay for counting: the share of the asked numbers that come in order before the first mistake."""

from __future__ import annotations

import re


def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """One reward in [0, 1] a completion. answer: the right numbers, separated by commas."""
    return [_share(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def _share(text: str, wanted: str) -> float:
    asked = wanted.split(", ")
    right = 0
    for number, found in zip(asked, re.findall(r"\d+", text), strict=False):
        if number != found:
            break
        right += 1
    return right / len(asked)
