"""Masked importance sampling ("When Speed Kills Stability", Liu et al. 2025): whole sequences.

A sequence whose ratio leaves the band is dropped rather than clipped: the heavy tail is harmful
text, not information.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from samebit.rl import api
from samebit.rl.api import TokenBatch, Weights
from samebit.rl.clipped import check_range
from samebit.rl.ratios import rho, weight_metrics

DEFAULT_BANDS = {"sequence": (0.0, 2.0), "geometric": (0.99, 1.001)}
"""verl's usual cap for products; Miles' band for geometric means, which are per token."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of masked importance sampling."""

    level: Literal["sequence", "geometric"] = "sequence"
    """sequence: product of the token ratios; geometric: their geometric mean."""
    lower: float | None = None
    """Smallest ratio kept; none: 0 for sequence, 0.99 for geometric."""
    upper: float | None = None
    """Largest ratio kept; none: 2 for sequence, 1.001 for geometric."""
    reweight: bool = True
    """Weight kept sequences by their ratio; false: by 1 (for use beside tis)."""

    def __post_init__(self) -> None:
        lower, upper = self.band
        check_range("lower", lower, 0.0, 1.0)
        check_range("upper", upper, 1.0, float("inf"))

    @property
    def band(self) -> tuple[float, float]:
        """(lower, upper) with the defaults of the level filled in."""
        lower, upper = DEFAULT_BANDS[self.level]
        return (
            lower if self.lower is None else self.lower,
            upper if self.upper is None else self.upper,
        )


class Correction(api.Correction):
    """Dropped sequences still count in the averages, so nothing else is scaled up."""

    needs = frozenset({"proximal"})
    corrects_rollout = True

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.level = self.config.level
        self.reweights = self.config.reweight

    def weights(self, batch: TokenBatch) -> Weights:
        """The ratio or 1 for sequences inside the band, 0 for the others."""
        lower, upper = self.config.band
        rho_T = rho(batch, self.config.level)
        kept_T = (rho_T >= lower) & (rho_T <= upper)
        inside_T = rho_T if self.config.reweight else torch.ones_like(rho_T)
        weight_T = torch.where(kept_T | torch.isnan(rho_T), inside_T, torch.zeros_like(rho_T))
        return Weights(weight_T, weight_metrics(batch, weight_T))
