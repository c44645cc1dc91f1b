"""Adaptive importance sampling after AIS (arXiv 2605.13907): between no correction and TIS.

Three diagnostics of the whole update set the mix: effective sample size, mean |log rho| and
variance amplification. The paper's exact schedule was not available to us: here each diagnostic
is divided by its limit, and the largest, clamped to [0, 1], is the mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebit.rl import api, metrics
from samebit.rl.api import TokenBatch, Weights
from samebit.rl.clipped import check_range
from samebit.rl.ratios import log_rho, rho, weight_metrics


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of adaptive importance sampling."""

    cap: float = 2.0
    """Largest weight."""
    lost_sample_limit: float = 0.1
    """1 - effective sample size at which the full correction is on."""
    log_ratio_limit: float = 0.1
    """Mean |log rho|, nats, at which the full correction is on."""
    variance_limit: float = 0.5
    """(sum rho^2 A^2 / sum A^2) - 1 at which the full correction is on."""

    def __post_init__(self) -> None:
        check_range("cap", self.cap, 1.0, float("inf"))
        for key in ("lost_sample_limit", "log_ratio_limit", "variance_limit"):
            check_range(key, getattr(self, key), 1e-12, float("inf"))


class Correction(api.Correction):
    """Weight 1 + mix * (min(rho, cap) - 1); `prepare` finds the mix, 0 where nothing differs."""

    needs = frozenset({"proximal"})
    corrects_rollout = True
    reweights = True
    prepares = True

    def __init__(self, config: Config | None = None, mix: float | None = None) -> None:
        super().__init__(config or Config())
        self.mix = mix
        self.cap = self.config.cap

    def prepare(self, batch: TokenBatch, lower: float, upper: float) -> Correction:
        """A copy with the mix of this update."""
        batch = batch.filled()
        if not bool(batch.mask_T.any()):
            return Correction(self.config, 0.0)
        gap_T = log_rho(batch).double()[batch.mask_T]
        rho_T, weight_T = torch.exp(gap_T), batch.advantage_T.double()[batch.mask_T].square()
        lost = 1.0 - float(rho_T.sum().square() / (rho_T.numel() * rho_T.square().sum()))
        energy = float(weight_T.sum())
        amplified = float((rho_T.square() * weight_T).sum()) / energy - 1.0 if energy > 0 else 0.0
        severity = max(
            lost / self.config.lost_sample_limit,
            float(gap_T.abs().mean()) / self.config.log_ratio_limit,
            amplified / self.config.variance_limit,
        )
        return Correction(self.config, min(max(severity, 0.0), 1.0))

    def weights(self, batch: TokenBatch) -> Weights:
        """Mixed weights."""
        assert self.mix is not None, "adaptive: call prepare before the first loss of an update"
        rho_T = rho(batch, "token")
        # A token without a gap keeps exactly 1; (1 - mix) + mix need not be 1.
        weight_T = 1.0 + self.mix * (torch.clamp(rho_T, max=self.config.cap) - 1.0)
        entries = weight_metrics(batch, weight_T, rho_T > self.config.cap)
        entries["rl/adaptive_mix"] = metrics.mean(torch.full_like(weight_T, self.mix), batch.mask_T)
        return Weights(weight_T, entries)
