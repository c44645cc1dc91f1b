"""CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is a clipped, detached weight on log p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.rl import losses
from samebit.rl.advantage import group_advantages, sequence_advantages
from samebit.rl.api import Advantages, Bound, Outcomes, TokenBatch
from samebit.rl.clipped import ClippedAlgorithm, ClippedConfig


@dataclass(frozen=True, kw_only=True)
class Config(ClippedConfig):
    """Settings of CISPO."""

    clip_low: float = 1.0
    """The weight is clipped from below at 1 - clip_low; 1: no lower bound, as in the paper."""
    clip_high: float = 4.0
    """The weight is clipped from above at 1 + clip_high."""
    dual_clip: float | None = None
    """Has no place in CISPO: the weight is bounded already."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None:
            raise ValueError(f"dual_clip = {self.dual_clip}: CISPO has none; use clip_high")


class Algorithm(ClippedAlgorithm):
    """-stop_gradient(clip(R, lower, upper)) * A * log p (paper, eq. 4); no token loses gradient."""

    exact_gradient = False

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """GRPO's (paper, section 3.1)."""
        return sequence_advantages(outcomes, group_advantages(outcomes, scale_by_std=True))

    def surrogate(
        self, batch: TokenBatch, ratio_T: Tensor, lower: Bound, upper: Bound
    ) -> losses.Surrogate:
        """Per-token loss; `clipped_T` marks tokens whose weight was cut."""
        plain_T = ratio_T.detach()
        weight_T = losses.clamped(plain_T, lower, upper)
        loss_T = -weight_T * batch.advantage_T * batch.logp_T
        # NaN != NaN would count an invisible token as clipped.
        clipped_T = (weight_T < plain_T) | (weight_T > plain_T)
        return losses.Surrogate(loss_T, clipped_T, torch.zeros_like(clipped_T))
