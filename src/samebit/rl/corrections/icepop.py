"""IcePop, a two-sided mask: weight rho inside [low, high], 0 outside."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebit.rl import api
from samebit.rl.api import TokenBatch, Weights
from samebit.rl.clipped import check_range
from samebit.rl.ratios import rho, weight_metrics


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the two-sided mask."""

    low: float = 0.5
    """Smallest rho that is kept."""
    high: float = 2.0
    """Largest rho that is kept (IcePop's authors use 5)."""
    reweight: bool = True
    """Weight kept tokens by rho (IcePop); false: by 1 (a plain mask)."""

    def __post_init__(self) -> None:
        check_range("low", self.low, 0.0, 1.0)
        check_range("high", self.high, 1.0, float("inf"))


class Correction(api.Correction):
    """Token level; masked tokens still count in the averages, so nothing else is scaled up."""

    needs = frozenset({"proximal"})
    corrects_rollout = True

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.reweights = self.config.reweight
        self.cap = self.config.high

    def weights(self, batch: TokenBatch) -> Weights:
        """rho or 1 inside the band, 0 outside."""
        rho_T = rho(batch, "token")
        kept_T = (rho_T >= self.config.low) & (rho_T <= self.config.high)
        inside_T = rho_T if self.config.reweight else torch.ones_like(rho_T)
        # A NaN gap is kept and seen: a mask must not hide a broken forward.
        weight_T = torch.where(kept_T | torch.isnan(rho_T), inside_T, torch.zeros_like(rho_T))
        return Weights(weight_T, weight_metrics(batch, weight_T))
