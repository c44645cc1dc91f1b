"""Adaptive clipping range (QuRL, arXiv 2602.13953 eq. 9): TIS whose truncation frees the clip.

With r = min(1, cap / rho): min(rho, cap) * min(R*A, clip(R, 1 - eps, (1 + eps) / r) * A). It
differs from TIS only where rho > cap, A > 0 and R > 1 + eps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebit.rl import api, metrics
from samebit.rl.api import Bound, TokenBatch, Weights
from samebit.rl.clipped import check_range
from samebit.rl.ratios import Level, rho, weight_metrics


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the adaptive clipping range."""

    cap: float = 2.0
    """Largest weight, and the rho above which the upper bound widens."""
    level: Level = "token"
    """What rho is taken over: token (the paper), sequence (product) or geometric (mean)."""

    def __post_init__(self) -> None:
        check_range("cap", self.cap, 1.0, float("inf"))


class Correction(api.Correction):
    """Weight min(rho, cap); upper bound divided by min(1, cap / rho); lower bound unchanged.

    With clip-higher the upper bound that is divided is 1 + clip_high (the paper does not say).
    """

    needs = frozenset({"proximal"})
    corrects_rollout = True
    reweights = True
    moves_bounds = True

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.level = self.config.level
        self.cap = self.config.cap

    def weights(self, batch: TokenBatch) -> Weights:
        """TIS weights, and the share of tokens whose upper bound matters and is wider."""
        rho_T = rho(batch, self.config.level)
        weight_T = torch.clamp(rho_T, max=self.config.cap)
        capped_T = rho_T > self.config.cap
        entries = weight_metrics(batch, weight_T, capped_T)
        widened_T = capped_T & (batch.advantage_T > 0)
        entries["rl/acr_widened_share"] = metrics.share(widened_T, batch.mask_T)
        return Weights(weight_T, entries)

    def bounds(self, batch: TokenBatch, lower: float, upper: float) -> tuple[Bound, Bound]:
        """(lower, upper / r) with r detached."""
        r_T = torch.clamp(self.config.cap / rho(batch, self.config.level), max=1.0)
        return lower, upper / r_T
