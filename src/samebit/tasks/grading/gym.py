"""Score with a reasoning-gym data set's own scorer: runs in the grading workers only."""

from __future__ import annotations

import sys
from typing import Any

# These evaluate their own question or their own answer, never the completion.
EVALUATE_THEIR_OWN_TEXT = frozenset({"bitwise_arithmetic", "number_sorting"})
# What scorers raise when the answer does not have the form they parse.
_MALFORMED = (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError)

_dataset: Any = None


def setup(parameters: tuple[str, dict[str, Any], int]) -> None:
    """Create the data set, whose scorer may use its parameters, and bar code made from text."""
    import reasoning_gym

    global _dataset
    name, table, size = parameters
    _dataset = reasoning_gym.create_dataset(name, seed=0, size=size, **table)  # type: ignore[reportAttributeAccessIssue]
    entry = _dataset[0]
    try:
        # Lazy imports happen now, before the bar.
        _dataset.score_answer(str(entry["answer"]), entry)
    except _MALFORMED:
        pass  # Some data sets have no answer of their own to score.
    if name not in EVALUATE_THEIR_OWN_TEXT:
        sys.addaudithook(_refuse_code_from_text)


def _refuse_code_from_text(event: str, arguments: tuple[Any, ...]) -> None:
    # eval and exec of text compile it under this name; imports and literal_eval use others.
    if event == "compile" and arguments[1] in ("<string>", b"<string>"):
        raise PermissionError("grading workers may not evaluate text as code")


def grade(item: tuple[str, dict[str, Any]]) -> float:
    """Score (answer, entry) by the data set's rule, 0 to 1; a malformed answer scores 0."""
    answer, entry = item
    try:
        return float(_dataset.score_answer(answer, entry))
    except _MALFORMED:
        return 0.0
