"""Answers written to be paid without being right, from an attack on the finished grader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from samebit.tasks._stats import RewardStats
from samebit.tasks.grading.math import MathGrader

WRONG = [
    ("42", "\\boxed{42} or \\boxed{43}"),
    ("42", "\\boxed{42,43}"),
    ("42", "\\boxed{[0,100]}"),
    ("42", "\\boxed{x \\in [0,100]}"),
    ("42", "\\boxed{42 \\neq 43}"),
    ("42", "\\boxed{42 \\text{ or } 43}"),
    ("42", "\\boxed{\\{41,42,43\\}}"),
    ("42", "\\boxed{x}"),
    ("42", "\\boxed{nan}"),
    ("\\infty", "\\boxed{-\\infty}"),
    ("1", "\\boxed{True}"),
    ("0", "\\boxed{}"),
    ("0", "\\boxed{0/0}"),
    ("42", "\\boxed{\u202e24}"),
    ("42", "<think>\\boxed{42}</think> I do not know"),
    ("42", "<answer>42</answer><answer>43</answer>"),
    ("2", "\\boxed{2 \\pm 100}"),
    ("2", "\\boxed{\\pm 2}"),
    ("A", "\\boxed{(A) (B) (C) (D)}"),
    ("A", "\\boxed{A, B, C, D}"),
    ("1", "\\boxed{x = 1 = 2}"),
    ("1", "\\boxed{1 < 2}"),
    ("(1,2)", "\\boxed{(2,1)}"),
    ("(1,2)", "\\boxed{[1,2]}"),
    ("5 m", "\\boxed{5 km}"),
    ("1", "\\boxed{" + "(" * 9000 + "1" + ")" * 900 + "}"),
]
RIGHT = [
    ("42", "\ud800\\boxed{42}"),
    ("42", "\\boxed{42}\x00"),
    ("3", "\\boxed{\\sqrt[3]{27}}"),
    ("0.1", "\\boxed{10\\%}"),
    ("7", "\\boxed{7}" * 100_000),
    ("yes", "\\boxed{Yes}"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    made = MathGrader(workers=1)
    yield made
    made.close()


def test_attempts_at_being_paid_for_nothing(grader: MathGrader):
    stats = RewardStats()
    cases = [*WRONG, *RIGHT]
    found = grader.grade([[g] for g, _ in cases], [c for _, c in cases], stats=stats)
    wrong, right = found[: len(WRONG)], found[len(WRONG) :]
    assert [c for c, r in zip(WRONG, wrong, strict=True) if r != 0.0] == []
    assert [c for c, r in zip(RIGHT, right, strict=True) if r != 1.0] == []
    assert stats.metrics(reset=True)["reward/crashes_count"] == 0


def test_code_dressed_as_mathematics_runs_nowhere(grader: MathGrader, tmp_path: Path):
    mark = tmp_path / "ran"
    call = f'__import__("os").system("touch {mark}")'
    answers = [f"\\boxed{{{call}}}", f"\\boxed{{1+0\\cdot \\text{{{call}}}}}"]
    found = grader.grade([["1"]] * 2, answers, stats=RewardStats())
    assert found == [0.0, 0.0] and not mark.exists()
