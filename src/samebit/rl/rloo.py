"""RLOO (arXiv 2402.14740): the baseline of a sample is the mean reward of the others."""

from __future__ import annotations

from dataclasses import dataclass

from samebit.rl.advantage import group_advantages, sequence_advantages
from samebit.rl.api import Advantages, Averaging, Outcomes
from samebit.rl.clipped import ClippedAlgorithm, ClippedConfig


@dataclass(frozen=True, kw_only=True)
class Config(ClippedConfig):
    """Settings of RLOO."""

    averaging: Averaging = "seq-mean-token-sum"
    """How token losses become one number, by verl's names; the paper acts on whole sequences."""


class Algorithm(ClippedAlgorithm):
    """A_i = r_i - mean of the other rewards of the group = (r_i - mean) * n / (n - 1) (eq. 8).

    On policy the clipped surrogate has the gradient of REINFORCE; clipping bounds later updates.
    """

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """The same advantage for every token of a sequence."""
        advantage_B = group_advantages(outcomes, scale_by_std=False, leave_one_out=True)
        return sequence_advantages(outcomes, advantage_B)
