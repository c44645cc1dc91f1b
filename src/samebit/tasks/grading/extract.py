"""Find the answer in a completion. One written rule per name; nothing is guessed out of prose."""

from __future__ import annotations

import re
from typing import Literal

ExtractRule = Literal["whole", "tag", "hash", "boxed", "auto"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CLOSE_TAG = "</answer>"
_OPEN_TAG = "<answer>"
_THINK_END = "</think>"


def extract_answer(completion: str, rule: ExtractRule = "auto") -> str | None:
    r"""Return the answer text, stripped, or None where the rule finds none.

    Only the text after the last `</think>` counts. `whole`: all of it. `tag`: inside the last
    complete `<answer>...</answer>`. `hash`: the rest of the line after the last `####`. `boxed`:
    inside the last complete `\boxed{...}` or `\fbox{...}`, braces balanced. `auto`: the last
    complete tag, and in it (or without one, in all) the last complete box, else the last `####`,
    else what is there.
    """
    text = completion.rpartition(_THINK_END)[2]
    if rule == "whole":
        return text.strip()
    if rule == "tag":
        return last_tag(text)
    if rule == "hash":
        return last_hash(text)
    if rule == "boxed":
        return last_box(text)
    tagged = last_tag(text)
    inner = text if tagged is None else tagged
    for found in (last_box(inner), last_hash(inner)):
        if found is not None:
            return found
    return inner.strip()


def last_tag(text: str) -> str | None:
    """Return the stripped inside of the last complete answer tag."""
    end = text.rfind(_CLOSE_TAG)
    if end < 0:
        return None
    start = text.rfind(_OPEN_TAG, 0, end)
    if start < 0:
        return None
    return text[start + len(_OPEN_TAG) : end].strip()


def last_hash(text: str) -> str | None:
    """Return the rest of the line after the last `####`."""
    _, mark, rest = text.rpartition("####")
    if not mark:
        return None
    return rest.split("\n", 1)[0].strip()


def last_box(text: str) -> str | None:
    """Return the stripped inside of the box that closes last; escaped braces do not count.

    A box in a box closes first, so the outer one wins; a box that never closes does not count.
    Linear in the length of the text: one pass with a stack of open braces.
    """
    starts = {match.end() - 1 for match in _BOX.finditer(text)}
    if not starts:
        return None
    stack: list[int] = []
    best: tuple[int, int] | None = None
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            # Skips the escaped character; `\boxed{` still meets its brace further on.
            position += 2
            continue
        if character == "{":
            stack.append(position)
        elif character == "}" and stack:
            start = stack.pop()
            if start in starts:
                best = (start, position)
        position += 1
    return None if best is None else text[best[0] + 1 : best[1]].strip()
