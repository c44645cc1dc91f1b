"""GRPO (arXiv 2402.03300): group mean and standard deviation as baseline, clipped token ratios."""

from __future__ import annotations

from dataclasses import dataclass

from samebit.rl.advantage import group_advantages, sequence_advantages
from samebit.rl.api import Advantages, Averaging, Outcomes
from samebit.rl.clipped import ClippedAlgorithm, ClippedConfig


@dataclass(frozen=True, kw_only=True)
class Config(ClippedConfig):
    """Settings of GRPO."""

    averaging: Averaging = "seq-mean-token-mean"
    """How token losses become one number, by verl's names; the paper's is this one."""
    scale_by_std: bool = True
    """Divide by the standard deviation of the group's rewards."""


class Algorithm(ClippedAlgorithm):
    """A = (r - mean of group) / (sample std of group + 1e-6); exactly 0 where rewards are equal."""

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """The same advantage for every token of a sequence (paper, section 4.1.2)."""
        advantage_B = group_advantages(outcomes, self.config.scale_by_std)
        return sequence_advantages(outcomes, advantage_B)
