"""Scorers of reasoning-gym answers: strict or safe; never a completion evaluated as code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from samebit.tasks._stats import RewardStats
from samebit.tasks.grading.arithmetic import NotArithmeticError, evaluate
from samebit.tasks.grading.pool import Outcome, Pool
from samebit.types import Prompt

logger = logging.getLogger(__name__)

# Data sets whose own scorer passes the answer to eval or to sympy's parser (which calls eval).
UNSAFE: Mapping[str, str] = {
    "binary_matrix": "eval",
    "composite": "it runs the scorers of its members, and those may",
    "countdown": "sympy.parse_expr, which calls eval",
    "intermediate_integration": "sympy.parse_expr, which calls eval",
    "n_queens": "eval",
    "polynomial_multiplication": "sympy.parse_expr, which calls eval",
    "puzzle24": "sympy.parse_expr, which calls eval",
    "simple_integration": "sympy.parse_expr, which calls eval",
    "spiral_matrix": "eval",
    "string_insertion": "eval",
}


class Scorer(Protocol):
    """Grades extracted answers; None as an answer earns 0."""

    def score(self, prompts: Sequence[Prompt], answers: Sequence[str | None]) -> list[float | None]:
        """Return a reward per answer, None where there is no verdict."""
        ...

    def close(self) -> None:
        """End whatever the scorer holds."""
        ...


class ExactScorer:
    """Grades by a predicate (answer, columns) that runs in this process and cannot hang."""

    def __init__(self, right: Callable[[str, Mapping[str, Any]], bool]) -> None:
        self._right = right

    def score(self, prompts: Sequence[Prompt], answers: Sequence[str | None]) -> list[float | None]:
        """Return 1 or 0 for every answer."""
        return [
            float(answer is not None and self._right(answer, prompt.columns))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def close(self) -> None:
        """Nothing to end."""


class DatasetScorer:
    """The package's own scorer, in worker processes with limits; white space is stripped first."""

    def __init__(self, config: Any, dataset_size: int, stats: RewardStats) -> None:
        self._partial = config.partial_credit
        self._stats = stats
        setup = (config.dataset, dict(config.parameters), dataset_size)
        self._pool = Pool("samebit.tasks.grading.gym", setup, workers=config.grading_workers)

    def score(self, prompts: Sequence[Prompt], answers: Sequence[str | None]) -> list[float | None]:
        """Return 1 for a full score and 0 for less, or the score itself with partial credit."""
        items = [
            (
                answer.strip(),
                {key: prompt.columns[key] for key in ("question", "answer", "metadata")},
            )
            for prompt, answer in zip(prompts, answers, strict=True)
            if answer is not None
        ]
        outcomes = iter(self._pool.grade(items))
        return [0.0 if answer is None else self._reward(next(outcomes)) for answer in answers]

    def _reward(self, outcome: Outcome) -> float | None:
        if outcome.kind == "score" and outcome.value is not None:
            return outcome.value if self._partial else float(outcome.value >= 1.0)
        if outcome.kind in ("timeout", "memory"):
            self._stats.add("timeouts" if outcome.kind == "timeout" else "memory")
            return 0.0
        self._stats.add("crashes")
        logger.warning("the data set's scorer failed, no verdict: %s", outcome.detail)
        return None

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def strictly_equal(answer: str, columns: Mapping[str, Any]) -> bool:
    """Say whether the answer is the data set's, white space at both ends aside."""
    return answer.strip() == str(columns["answer"]).strip()


def countdown_right(answer: str, columns: Mapping[str, Any]) -> bool:
    """Say whether an expression uses each given number exactly once and makes the target."""
    try:
        value, numbers = evaluate(answer)
    except NotArithmeticError:
        return False
    metadata = columns["metadata"]
    return sorted(numbers) == sorted(metadata["numbers"]) and value == metadata["target"]


def puzzle24_right(answer: str, columns: Mapping[str, Any]) -> bool:
    """Say whether an expression uses each of the four numbers exactly once and makes 24."""
    try:
        value, numbers = evaluate(answer)
    except NotArithmeticError:
        return False
    return sorted(numbers) == sorted(columns["metadata"]["numbers"]) and value == 24


SAFE = {"countdown": countdown_right, "puzzle24": puzzle24_right}


def make_scorer(config: Any, dataset_size: int, stats: RewardStats) -> Scorer:
    """Return the scorer that `scoring` asks for; refuses an unsafe one with the reason."""
    if config.scoring == "auto" and config.dataset in SAFE:
        return ExactScorer(SAFE[config.dataset])
    if config.scoring in ("auto", "strict"):
        return ExactScorer(strictly_equal)
    if config.dataset in UNSAFE:
        raise ValueError(
            f"scoring = 'dataset': the scorer of {config.dataset} evaluates the model's answer as "
            f"code ({UNSAFE[config.dataset]}). Use scoring = 'auto' or 'strict'."
        )
    return DatasetScorer(config, dataset_size, stats)
