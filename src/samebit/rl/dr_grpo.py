"""Dr. GRPO (arXiv 2503.20783): GRPO without the two biases, length and group deviation."""

from __future__ import annotations

from dataclasses import dataclass

from samebit.rl.advantage import group_advantages, sequence_advantages
from samebit.rl.api import Advantages, Averaging, Outcomes
from samebit.rl.clipped import ClippedAlgorithm, ClippedConfig


@dataclass(frozen=True, kw_only=True)
class Config(ClippedConfig):
    """Settings of Dr. GRPO."""

    averaging: Averaging = "seq-mean-token-sum-norm"
    """How token losses become one number, by verl's names; divides by a constant length."""


class Algorithm(ClippedAlgorithm):
    """A = r - mean of group, undivided (paper, eq. 3 and figure 1)."""

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """The same advantage for every token of a sequence."""
        return sequence_advantages(outcomes, group_advantages(outcomes, scale_by_std=False))
