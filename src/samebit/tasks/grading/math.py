"""Grade mathematical answers: extract, decide plain cases here, the rest in the workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from samebit.tasks._stats import RewardStats
from samebit.tasks.grading.extract import ExtractRule, extract_answer
from samebit.tasks.grading.plain import quick_verdict
from samebit.tasks.grading.pool import Limits, Outcome, Pool

logger = logging.getLogger(__name__)

MAX_COMPLETION_CHARACTERS = 4_000_000
MAX_ANSWER_CHARACTERS = 10_000

Item = tuple[str, str, float]


class MathGrader:
    """Grades completions against one or several right answers; workers start when first needed."""

    def __init__(self, *, workers: int = 2, limits: Limits | None = None) -> None:
        self._pool = Pool("samebit.tasks.grading.algebra", workers=workers, limits=limits)

    def grade(
        self,
        golds: Sequence[Sequence[str]],
        completions: Sequence[str],
        *,
        rule: ExtractRule = "auto",
        tolerance: float = 0.0,
        strict: bool = False,
        stats: RewardStats,
    ) -> list[float | None]:
        """Return 1 where an answer equals any of its golds, else 0, None for no verdict.

        A completion that runs into a limit (length, time, memory) earns 0 and is counted; where the
        verifier itself fails there is no verdict, unless another gold gives one.
        """
        questions = [
            self._items(gold, completion, rule, tolerance, stats)
            for gold, completion in zip(golds, completions, strict=True)
        ]
        if strict:
            return [
                float(any(text_equal(gold, answer) for gold, answer, _ in items))
                for items in questions
            ]
        verdicts = self._verdicts({item for items in questions for item in items})
        return [self._combine(items, verdicts, stats) for items in questions]

    def process_ids(self) -> list[int]:
        """Return the ids of the workers now alive."""
        return self._pool.process_ids()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    @staticmethod
    def _items(
        golds: Sequence[str],
        completion: str,
        rule: ExtractRule,
        tolerance: float,
        stats: RewardStats,
    ) -> list[Item]:
        if len(completion) > MAX_COMPLETION_CHARACTERS:
            stats.add("too_long")
            return []
        answer = extract_answer(completion, rule)
        if answer is None:
            return []
        if len(answer) > MAX_ANSWER_CHARACTERS:
            stats.add("too_long")
            return []
        # Lone surrogates cannot be sent, and no right answer holds one.
        answer = answer.encode("utf-8", errors="replace").decode()
        return [(gold, answer, tolerance) for gold in golds]

    def _verdicts(self, items: set[Item]) -> dict[Item, Outcome]:
        """Decide each distinct item once: the samples of a group often answer alike."""
        verdicts: dict[Item, Outcome] = {}
        hard: list[Item] = []
        for item in items:
            quick = quick_verdict(*item)
            if quick is None:
                hard.append(item)
            else:
                verdicts[item] = Outcome("score", float(quick))
        hard.sort()
        verdicts.update(zip(hard, self._pool.grade(hard), strict=True))
        return verdicts

    @staticmethod
    def _combine(
        items: list[Item], verdicts: dict[Item, Outcome], stats: RewardStats
    ) -> float | None:
        outcomes = [verdicts[item] for item in items]
        if any(outcome.value == 1.0 for outcome in outcomes):
            return 1.0
        crashes = [outcome for outcome in outcomes if outcome.kind == "crash"]
        if crashes:
            stats.add("crashes")
            logger.warning("the verifier failed, no verdict: %s", crashes[0].detail)
            return None
        for kind, counter in (("timeout", "timeouts"), ("memory", "memory")):
            if any(outcome.kind == kind for outcome in outcomes):
                stats.add(counter)
                break
        return 0.0


def text_equal(gold: str, answer: str) -> bool:
    """Say whether two answers are the same text, white space at both ends aside."""
    return gold.strip() == answer.strip()
