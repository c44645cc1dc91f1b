"""PPO (arXiv 1707.06347) with a critic: GAE, clipped policy ratio, clipped value loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from samebit.rl import advantage, metrics
from samebit.rl.api import Advantages, Need, Outcomes, TokenBatch
from samebit.rl.clipped import ClippedAlgorithm, ClippedConfig, check_range
from samebit.rl.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Config(ClippedConfig):
    """Settings of PPO."""

    gamma: float = 1.0
    """Discount from token to token."""
    lam: float = 1.0
    """GAE's lambda: 1 is the return minus the value, 0 the one-step error."""
    value_clip: float = 0.5
    """The value may move this far from its old self before its gradient is cut."""
    value_coefficient: float = 1.0
    """Weight of the value loss (which contains its own factor of one half)."""
    reward_kl_coefficient: float = 0.0
    """Weight of the KL (k1) to the reference that is subtracted from each token's reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("gamma", self.gamma, 0.0, 1.0)
        check_range("lam", self.lam, 0.0, 1.0)
        check_range("value_clip", self.value_clip, 0.0, float("inf"))
        check_range("value_coefficient", self.value_coefficient, 0.0, float("inf"))
        check_range("reward_kl_coefficient", self.reward_kl_coefficient, 0.0, float("inf"))


class ValueLoss(NamedTuple):
    """Per-token value loss [T] and where its gradient was cut."""

    loss_T: Tensor
    clipped_T: Tensor


class Algorithm(ClippedAlgorithm):
    """Advantages are GAE, whitened over every token with a verdict; the critic is the trainer's."""

    min_group_size = 1
    shift_invariant = False

    def _needs(self) -> set[Need]:
        needs = super()._needs()
        needs.add("critic")
        if self.config.reward_kl_coefficient > 0:
            needs.add("reference")
        return needs

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """Whitened GAE, and returns = raw GAE + values as the critic's target."""
        assert outcomes.value_T is not None, "PPO needs value_T"
        reward_T = advantage.terminal_rewards(outcomes, self.config.reward_kl_coefficient)
        gae_T = advantage.generalised_advantages(
            reward_T, outcomes.value_T, outcomes.lengths_B, self.config.gamma, self.config.lam
        )
        judged_T = advantage.per_token(outcomes.verdict_B, outcomes.lengths_B)
        return_T = torch.where(judged_T, gae_T + outcomes.value_T.double(), 0.0)
        advantage_T = advantage.whiten(gae_T, judged_T)
        return advantage.token_advantages(outcomes, advantage_T, return_T)

    def extra_loss(self, batch: TokenBatch, averaging_T: Tensor, result: Metrics) -> Tensor:
        """value_coefficient * clipped value loss, averaged like the policy loss."""
        value_T, old_T, return_T = batch.value_T, batch.old_value_T, batch.return_T
        assert value_T is not None and old_T is not None and return_T is not None, (
            "PPO needs value_T, old_value_T and return_T"
        )
        value = value_loss(value_T, old_T, return_T, self.config.value_clip)
        averaged = (value.loss_T * averaging_T).sum()
        result["rl/value_loss"] = metrics.total(averaged)
        result["rl/value_clip_share"] = metrics.share(value.clipped_T, batch.mask_T)
        result["rl/value_mean"] = metrics.mean(value_T, batch.mask_T)
        result["rl/value_error_abs_mean"] = metrics.mean((value_T - return_T).abs(), batch.mask_T)
        return self.config.value_coefficient * averaged


def value_loss(value_T: Tensor, old_value_T: Tensor, return_T: Tensor, clip: float) -> ValueLoss:
    """max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2 per token."""
    plain_T = (value_T - return_T).square()
    # Not old + clamp(value - old): its rounding would count values inside the range as clipped.
    near_T = torch.clamp(value_T, old_value_T - clip, old_value_T + clip)
    bounded_T = (near_T - return_T).square()
    clipped_T = bounded_T > plain_T
    return ValueLoss(0.5 * torch.where(clipped_T, bounded_T, plain_T), clipped_T.detach())
