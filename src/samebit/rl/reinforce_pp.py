"""REINFORCE++ (arXiv 2501.03262): returns whitened over all tokens of the rollout; KL in reward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from samebit.rl import advantage
from samebit.rl.api import Advantages, Need, Outcomes
from samebit.rl.clipped import ClippedAlgorithm, ClippedConfig, check_range


@dataclass(frozen=True, kw_only=True)
class Config(ClippedConfig):
    """Settings of REINFORCE++."""

    gamma: float = 1.0
    """Discount from token to token."""
    reward_kl_coefficient: float = 0.0
    """Weight of the KL (k1) to the reference that is subtracted from each token's reward."""
    group_baseline: bool = False
    """Subtract the group's mean reward first (the paper's REINFORCE++-baseline)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("gamma", self.gamma, 0.0, 1.0)
        check_range("reward_kl_coefficient", self.reward_kl_coefficient, 0.0, float("inf"))


class Algorithm(ClippedAlgorithm):
    """A_t = whiten(sum of later rewards), whitened over every token with a verdict.

    Invariant to a shift of the rewards at gamma = 1 (the default).
    """

    min_group_size = 1

    def _needs(self) -> set[Need]:
        needs = super()._needs()
        if self.config.reward_kl_coefficient > 0:
            needs.add("reference")
        return needs

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """Token-level advantages; equal returns everywhere give exactly 0."""
        known = outcomes
        if self.config.group_baseline:
            centred_B = advantage.group_advantages(outcomes, scale_by_std=False)
            known = replace(outcomes, reward_B=centred_B.float())
        reward_T = advantage.terminal_rewards(known, self.config.reward_kl_coefficient)
        return_T = advantage.discounted_returns(reward_T, known.lengths_B, self.config.gamma)
        judged_T = advantage.per_token(known.verdict_B, known.lengths_B)
        advantage_T = advantage.whiten(return_T, judged_T)
        return advantage.token_advantages(outcomes, advantage_T)
