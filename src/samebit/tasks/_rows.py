"""Turn raw records into questions and answers: which columns, which types, what makes a row bad."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samebit.option_table import nearest

ROLES = ("system", "user", "assistant", "tool")


class BadRowError(ValueError):
    """A row that cannot be used; the message names the column."""


@dataclass(frozen=True)
class Question:
    """A usable row. `key` is the text with white space folded, by which splits are disjoint."""

    place: str
    text: str
    messages: tuple[Mapping[str, str], ...]
    columns: Mapping[str, Any]

    @property
    def key(self) -> str:
        return " ".join(self.text.split())


def pick(values: Mapping[str, Any], path: str) -> Any:
    """Return a column, or a field inside one (`reward_model.ground_truth`)."""
    if path in values:
        return values[path]
    current: Any = values
    walked: list[str] = []
    for part in path.split("."):
        if not isinstance(current, Mapping) or part not in current:
            inside = f" inside {'.'.join(walked)!r}" if walked else ""
            found = sorted(map(str, current)) if isinstance(current, Mapping) else []
            raise BadRowError(f"no column {part!r}{inside}{nearest(part, found)}")
        walked.append(part)
        current = current[part]
    return current


def make_question(
    place: str, values: Mapping[str, Any], prompt_column: str, answer_column: str
) -> Question:
    """Check a record and give it its columns; raises BadRowError naming the column.

    An empty `answer_column` stands for `answer`, or verl's `reward_model.ground_truth` where there
    is no `answer`.
    """
    messages = _messages(pick(values, prompt_column), prompt_column)
    if not answer_column:
        verl = "answer" not in values and "reward_model" in values
        answer_column = "reward_model.ground_truth" if verl else "answer"
    answer = canonical_answer(pick(values, answer_column), answer_column)
    text = "\n".join(m["content"] for m in messages if m["role"] != "system")
    columns = {key: value for key, value in values.items() if key != prompt_column}
    columns["answer"] = answer
    return Question(place, text, messages, columns)


def _messages(prompt: Any, column: str) -> tuple[Mapping[str, str], ...]:
    if isinstance(prompt, str):
        return ({"role": "user", "content": _text(prompt, column)},)
    if not isinstance(prompt, list):
        raise BadRowError(
            f"column {column!r}: a {type(prompt).__name__}, expected text or a chat list"
        )
    if not prompt:
        raise BadRowError(f"column {column!r}: an empty chat")
    messages = []
    for i, message in enumerate(prompt):
        where = f"{column}[{i}]"
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise BadRowError(f"column {where!r}: expected a table with role and content")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise BadRowError(f"column {where!r}: role {role!r}, expected one of {ROLES}")
        if not isinstance(content, str):
            raise BadRowError(
                f"column {where!r}: content is a {type(content).__name__}, expected text"
            )
        messages.append({"role": role, "content": _text(content, where)})
    if messages[-1]["role"] == "assistant":
        raise BadRowError(f"column {column!r}: the chat ends with the assistant")
    return tuple(messages)


def _text(value: str, column: str) -> str:
    if not value.strip():
        raise BadRowError(f"column {column!r}: empty text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRowError(f"column {column!r}: a lone surrogate, which no tokenizer can encode")
    return value


def canonical_answer(answer: Any, column: str) -> str | list[str]:
    """Return an answer as text, so that 42 and "42" grade alike; a list means any of these."""
    if isinstance(answer, list):
        if not answer:
            raise BadRowError(f"column {column!r}: an empty list")
        return [_one_answer(item, column) for item in answer]
    return _one_answer(answer, column)


def _one_answer(answer: Any, column: str) -> str:
    if isinstance(answer, str):
        return _text(answer, column)
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        kind = "missing" if answer is None else f"a {type(answer).__name__}"
        raise BadRowError(f"column {column!r}: {kind}, expected text or a number")
    if not math.isfinite(answer):
        raise BadRowError(f"column {column!r}: {answer} is no answer")
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53:
        return str(int(answer))
    return str(answer)
