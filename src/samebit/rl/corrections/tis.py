"""Truncated importance sampling (FlashRL; QuRL eq. 5): weight min(rho, cap)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebit.rl import api
from samebit.rl.api import TokenBatch, Weights
from samebit.rl.clipped import check_range
from samebit.rl.ratios import Level, rho, weight_metrics


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of truncated importance sampling."""

    cap: float = 2.0
    """Largest weight (FlashRL uses 2 for small models and 8 for 32B)."""
    level: Level = "token"
    """What rho is taken over: token, sequence (product) or geometric (mean)."""

    def __post_init__(self) -> None:
        check_range("cap", self.cap, 1.0, float("inf"))


class Correction(api.Correction):
    """min(rho, cap), detached."""

    needs = frozenset({"proximal"})
    corrects_rollout = True
    reweights = True

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.level = self.config.level
        self.cap = self.config.cap

    def weights(self, batch: TokenBatch) -> Weights:
        """Token- or sequence-level truncated ratio."""
        rho_T = rho(batch, self.config.level)
        weight_T = torch.clamp(rho_T, max=self.config.cap)
        return Weights(weight_T, weight_metrics(batch, weight_T, rho_T > self.config.cap))
