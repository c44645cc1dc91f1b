"""GSPO (arXiv 2507.18071): the clipped ratio is the geometric mean over the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.rl import losses
from samebit.rl.advantage import group_advantages, sequence_advantages
from samebit.rl.api import Advantages, Averaging, Outcomes, TokenBatch
from samebit.rl.clipped import ClippedAlgorithm, ClippedConfig


@dataclass(frozen=True, kw_only=True)
class Config(ClippedConfig):
    """Settings of GSPO."""

    clip_low: float = 3e-4
    """The sequence ratio is clipped from below at 1 - clip_low."""
    clip_high: float = 4e-4
    """The sequence ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = None
    """Largest loss per unit of negative advantage; none: no such bound."""
    averaging: Averaging = "seq-mean-token-mean"
    """How token losses become one number, by verl's names; the paper's is this one."""


class Algorithm(ClippedAlgorithm):
    """s = exp(mean over tokens of log(policy / old)) (paper, eq. 7), the same for every token."""

    ratio_level = "sequence"

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """GRPO's (paper, eq. 6)."""
        return sequence_advantages(outcomes, group_advantages(outcomes, scale_by_std=True))

    def ratio(self, batch: TokenBatch) -> Tensor:
        """The sequence's ratio at each of its tokens [T]; gradient reaches every token."""
        mean_B = losses.sequence_means(batch.logp_T - batch.old_logp_T, batch)
        limit = losses.LOG_RATIO_LIMIT
        ratio_B = torch.exp(torch.clamp(mean_B, -limit, limit))
        return ratio_B[batch.sequence_T].to(batch.logp_T.dtype)
