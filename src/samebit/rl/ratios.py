"""The importance ratio rho = old / rollout that corrections are made of; never with gradient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from samebit.rl import metrics
from samebit.rl.api import TokenBatch
from samebit.rl.losses import LOG_RATIO_LIMIT, log_ratio, sequence_means, sequence_sums
from samebit.rl.metrics import Entry

Level = Literal["token", "sequence", "geometric"]
"""token: each token's own ratio. sequence: product over the sequence. geometric: its
length-neutral version, the geometric mean."""


def missing_T(batch: TokenBatch) -> Tensor:
    """Tokens for which the engine returned no log-prob (NaN), bool [T]."""
    return batch.mask_T & torch.isnan(batch.rollout_logp_T)


def log_rho(batch: TokenBatch) -> Tensor:
    """log(old / rollout) per token [T], clamped; 0 where masked or missing.

    Exactly 0 where the two are the same bits, so exp gives exactly 1.
    """
    value_T = log_ratio(batch.old_logp_T.detach(), batch.rollout_logp_T.detach())
    ignored_T = ~batch.mask_T | torch.isnan(batch.rollout_logp_T)
    return torch.where(ignored_T, torch.zeros_like(value_T), value_T)


def rho(batch: TokenBatch, level: Level) -> Tensor:
    """rho at `level`, given to every token [T], in the dtype of the log-probs."""
    log_rho_T = log_rho(batch)
    if level == "token":
        return torch.exp(log_rho_T)
    if level == "sequence":
        log_B = sequence_sums(log_rho_T, batch.sequence_T, batch.num_sequences)
    else:
        log_B = sequence_means(log_rho_T, batch)
    rho_B = torch.exp(torch.clamp(log_B, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return rho_B[batch.sequence_T].to(log_rho_T.dtype)


def weight_metrics(
    batch: TokenBatch, weight_T: Tensor, capped_T: Tensor | None = None
) -> dict[str, Entry]:
    """What every correction reports; see docs/metrics.md."""
    capped_T = torch.zeros_like(batch.mask_T) if capped_T is None else capped_T
    return {
        "rl/correction_weight_mean": metrics.mean(weight_T, batch.mask_T),
        "rl/correction_capped_share": metrics.share(capped_T, batch.mask_T),
        "rl/correction_rejected_share": metrics.share(weight_T == 0, batch.mask_T),
        "rl/correction_missing_count": metrics.total(missing_T(batch).sum()),
    }
