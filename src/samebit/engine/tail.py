"""The end of a rollout, when few samples run on: how much time it takes, and who should start early.

Nothing here changes a token: a sample does not depend on when it is computed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from samebit.engine.requests import SampleState

KEPT_PROMPTS = 1 << 16
"""Prompts whose answers' lengths are remembered."""


class Tail:
    """How much of a rollout's time few samples have the device for themselves.

    places: how many could be computed at once.
    """

    def __init__(self, places: int):
        self.places = places
        self.all_s = self.tail_s = 0.0
        self._last = time.perf_counter()

    def note(self, running: int) -> None:
        """A turn ended with so many samples running."""
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        self.all_s += passed
        if running < self.places / 4:
            self.tail_s += passed

    @property
    def share(self) -> float:
        """Time with under a quarter of the places filled, of all time; 0 before any turn."""
        return self.tail_s / self.all_s if self.all_s else 0.0


class Lengths:
    """Longest first: the order that leaves the shortest tail when there are more samples than places.

    What will be long: a sample that was cut before, as it already has been; then a prompt whose answers
    were, the last time it was seen; one never seen counts as the mean. Ties keep their order, so a
    prompt's samples stay together and its pages are shared.
    """

    def __init__(self) -> None:
        self._mean: OrderedDict[str, float] = OrderedDict()

    def longest_first(self, states: Sequence[SampleState]) -> list[SampleState]:
        """The states in the order in which they should be admitted."""
        known = [self._mean[s.prompt.id] for s in states if s.prompt.id in self._mean]
        typical = sum(known) / len(known) if known else 0.0

        def expected(state: SampleState) -> tuple[int, float]:
            mean = self._mean.get(state.prompt.id, typical)
            return len(state.ids), min(mean, state.limit)

        return sorted(states, key=expected, reverse=True)

    def learn(self, states: Sequence[SampleState]) -> None:
        """Remember how long the answers of each prompt were (so far)."""
        found: dict[str, list[int]] = {}
        for state in states:
            found.setdefault(state.prompt.id, []).append(len(state.ids))
        for prompt, lengths in found.items():
            self._mean.pop(prompt, None)
            self._mean[prompt] = sum(lengths) / len(lengths)
        while len(self._mean) > KEPT_PROMPTS:
            self._mean.popitem(last=False)
