"""The digits task: answers by hand, disjoint splits, rows by index alone."""

from __future__ import annotations

import pytest

from samebit.tasks.api import load_task
from samebit.tasks.digits import question_of


def test_questions_by_hand():
    def digest(number: int) -> bytes:
        return number.to_bytes(32, "big")

    assert question_of("sort", 4, digest(13142)) == ("3142", "1234")
    assert question_of("reverse", 4, digest(142)) == ("0142", "2410")
    assert question_of("add", 2, digest(4231)) == ("31+42", "73")


@pytest.mark.parametrize("operation", ["sort", "reverse", "add"])
def test_splits_are_disjoint_and_rows_pure(operation: str):
    table = {"operation": operation, "digits": 2, "held_out_size": 10}
    task, again = load_task("digits", table), load_task("digits", table)
    held = [row.question for row in task.rows("held_out", 0, task.held_out_count)]
    train = [row.question for row in task.rows("train", 0, 300)]
    assert len(held) == len(set(held)) == 10 and not set(held) & set(train)
    assert again.row("train", 77) == task.row("train", 77)
    other = load_task("digits", {**table, "seed": 1})
    assert [r.question for r in other.rows("train", 0, 9)] != train[:9]
    assert [r.question for r in other.rows("held_out", 0, 10)] == held


def test_grading_and_errors(tokenizer):
    task = load_task("digits", {"operation": "sort", "digits": 3})
    task.bind(tokenizer)
    (prompt,) = task.prompts("train", 0, 1)
    answer = prompt.columns["answer"]
    assert task.reward([prompt] * 3, [answer, f" {answer}\n", answer + "1"]) == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="digits = 0"):
        load_task("digits", {"digits": 0})
    with pytest.raises(ValueError, match="operation"):
        load_task("digits", {"operation": "subtract"})
    with pytest.raises(ValueError, match="no training question"):
        load_task("digits", {"digits": 1, "held_out_share": 0.999999}).row("train", 0)
