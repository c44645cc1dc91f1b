"""Counts of what grading did, kept for the metrics `reward/...`."""

from __future__ import annotations

import threading
from collections import Counter

OUTCOMES = ("graded", "timeouts", "memory", "too_long", "no_verdict", "crashes")


class RewardStats:
    """Counts since the last `metrics(reset=True)`; safe to add to from several threads.

    graded: verdicts given, limits included. timeouts, memory, too_long: the completion's own fault,
    reward 0. crashes: the verifier failed. no_verdict: rewards None, crashes included.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, outcome: str, count: int = 1) -> None:
        """Add to one of OUTCOMES."""
        assert outcome in OUTCOMES, outcome
        with self._lock:
            self._counts[outcome] += count

    def __getitem__(self, outcome: str) -> int:
        with self._lock:
            return self._counts[outcome]

    def metrics(self, *, reset: bool = False) -> dict[str, int]:
        """Return `reward/<outcome>_count` for every outcome; `reset` starts a new step."""
        with self._lock:
            result = {f"reward/{name}_count": self._counts[name] for name in OUTCOMES}
            if reset:
                self._counts.clear()
        return result
