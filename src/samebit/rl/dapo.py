"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token mean, soft overlong penalty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebit.rl.advantage import group_advantages, read_reward, sequence_advantages
from samebit.rl.api import Advantages, Outcomes, Selection
from samebit.rl.clipped import ClippedAlgorithm, ClippedConfig, check_range
from samebit.types import Group


@dataclass(frozen=True, kw_only=True)
class Config(ClippedConfig):
    """Settings of DAPO."""

    clip_high: float = 0.28
    """The ratio is clipped from above at 1 + clip_high."""
    dynamic_sampling: bool = True
    """Drop groups whose rewards are all equal and draw more prompts in their place."""
    max_sampling_rounds: int = 4
    """Rounds of prompts drawn for one step at most; then the groups at hand are trained on."""
    overlong_penalty: float = 1.0
    """Largest penalty for length, reached at the length limit; 0 turns it off."""
    overlong_buffer_share: float = 0.2
    """Share of the length limit over which the penalty grows (the paper: 4096 of 20480)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("max_sampling_rounds", self.max_sampling_rounds, 1, float("inf"))
        check_range("overlong_penalty", self.overlong_penalty, 0.0, float("inf"))
        check_range("overlong_buffer_share", self.overlong_buffer_share, 0.0, 1.0)


class Algorithm(ClippedAlgorithm):
    """GRPO's advantage of reward + length penalty; groups of equal rewards are not trained on."""

    @property
    def max_sampling_rounds(self) -> int:
        """Rounds of prompts the loop may draw for one step."""
        return self.config.max_sampling_rounds if self.config.dynamic_sampling else 1

    def select(self, groups: Sequence[Group]) -> Selection:
        """Keep groups with two different rewards (paper, eq. 11), judged before the penalty."""
        base = super().select(groups)
        if not self.config.dynamic_sampling:
            return base
        kept = tuple(g for g in base.groups if _differs(g))
        return Selection(kept, {**base.counts, "equal rewards": len(base.groups) - len(kept)})

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """The same advantage for every token of a sequence."""
        penalty_B = overlong_penalties(
            outcomes.lengths_B, outcomes.max_length, self.config.overlong_buffer_share
        )
        reward_B = outcomes.reward_B - self.config.overlong_penalty * penalty_B.float()
        shaped = replace(outcomes, reward_B=reward_B)
        return sequence_advantages(shaped, group_advantages(shaped, scale_by_std=True))


def overlong_penalties(lengths_B: Tensor, max_length: int, buffer_share: float) -> Tensor:
    """0 up to max_length - buffer, then rising linearly to 1 at max_length (paper, eq. 13) [B]."""
    over_B = lengths_B.double() - max_length * (1.0 - buffer_share)
    if buffer_share == 0:
        return (over_B > 0).double()
    return torch.clamp(over_B / (max_length * buffer_share), 0.0, 1.0)


def _differs(group: Group) -> bool:
    rewards = {read_reward(r, f"prompt {group.prompt.id}") for r in group.rewards} - {None}
    return len(rewards) > 1
