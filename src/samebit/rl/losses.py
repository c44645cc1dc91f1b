"""Shared pieces of every loss: ratios, the clipped surrogate, loss averaging, KL and entropy."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from samebit.rl.api import Averaging, Bound, Normaliser, TokenBatch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to [-20, 20]: FP32 exp overflows past 88.7, and inf * 0 is NaN. A ratio
past e^20 = 4.9e8 has no gradient. NaN passes through the clamp and stays visible."""

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """log(p/q) from log-probs, clamped to +-LOG_RATIO_LIMIT; NaN stays NaN."""
    return torch.clamp(numerator_T - denominator_T, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_rows(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """One zero-padded row per sequence, FP64 [B, longest]; tokens in their order."""
    lengths_B = torch.bincount(sequence_T, minlength=num_sequences)
    width = int(lengths_B.max()) if lengths_B.numel() else 0
    order_T = torch.argsort(sequence_T, stable=True)
    sorted_T = sequence_T[order_T]
    starts_B = torch.cumsum(lengths_B, 0) - lengths_B
    column_T = torch.arange(sequence_T.numel(), device=sequence_T.device) - starts_B[sorted_T]
    rows_BL = values_T.new_zeros((num_sequences, width), dtype=torch.float64)
    return rows_BL.index_put((sorted_T, column_T), values_T[order_T].double())


def sequence_sums(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Sum of `values_T` per sequence, FP64 [B]; differentiable and deterministic on every device.

    Scatter-adds use atomics on CUDA, so each sequence gets a row of its own and rows are summed;
    FP64 makes the sum independent of the row width to well below FP32.
    """
    return sequence_rows(values_T, sequence_T, num_sequences).sum(dim=1)


def sequence_maxima(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Largest of the non-negative `values_T` per sequence, FP64 [B]; 0 for an empty one."""
    rows_BL = sequence_rows(values_T, sequence_T, num_sequences)
    return rows_BL.amax(dim=1) if rows_BL.shape[1] else rows_BL.sum(dim=1)


def sequence_means(values_T: Tensor, batch: TokenBatch) -> Tensor:
    """Mean over each sequence's unmasked tokens, FP64 [B]; 0 for a fully masked sequence."""
    kept_T = torch.where(batch.mask_T, values_T, torch.zeros_like(values_T))
    sums_B = sequence_sums(kept_T, batch.sequence_T, batch.num_sequences)
    return sums_B / mask_counts(batch).clamp(min=1)


def mask_counts(batch: TokenBatch) -> Tensor:
    """Unmasked tokens per sequence, FP64 [B]."""
    counts_B = torch.zeros(batch.num_sequences, dtype=torch.int64, device=batch.mask_T.device)
    # whole numbers: exact in any order, and unlike bincount it waits for nothing
    return counts_B.scatter_add_(0, batch.sequence_T, batch.mask_T.long()).double()


def averaging_weights(batch: TokenBatch, normaliser: Normaliser, averaging: Averaging) -> Tensor:
    """The factor of each token's loss [T]; 0 where masked. verl's four modes by verl's names.

    token-mean: 1 / tokens. seq-mean-token-mean: 1 / (tokens of the sequence * sequences).
    seq-mean-token-sum: 1 / sequences. seq-mean-token-sum-norm: 1 / (sequences * max_length).
    All counts but the sequence's own are those of the whole step.
    """
    tokens, sequences = max(normaliser.num_tokens, 1), max(normaliser.num_sequences, 1)
    if averaging == "token-mean":
        weight_T = torch.full_like(batch.logp_T, 1.0 / tokens)
    elif averaging == "seq-mean-token-mean":
        counts_B = mask_counts(batch).clamp(min=1)
        weight_T = (1.0 / (counts_B * sequences))[batch.sequence_T].to(batch.logp_T.dtype)
    elif averaging == "seq-mean-token-sum":
        weight_T = torch.full_like(batch.logp_T, 1.0 / sequences)
    else:
        assert averaging == "seq-mean-token-sum-norm", f"unknown loss averaging {averaging!r}"
        weight_T = torch.full_like(batch.logp_T, 1.0 / (sequences * normaliser.max_length))
    return torch.where(batch.mask_T, weight_T, torch.zeros_like(weight_T)).detach()


class Surrogate(NamedTuple):
    """Per-token policy loss [T] and which tokens lost their gradient, and why."""

    loss_T: Tensor
    clipped_T: Tensor
    dual_clipped_T: Tensor


def clipped_surrogate(
    ratio_T: Tensor,
    advantage_T: Tensor,
    lower: Bound,
    upper: Bound,
    dual_clip: float | None = None,
) -> Surrogate:
    """-min(R*A, clip(R, lower, upper)*A) (PPO, arXiv 1707.06347 eq. 7), and its dual clip.

    With `dual_clip` c > 1 the loss of a token with A < 0 is at most c*|A| (arXiv 1912.09729), and
    has no gradient there; without it the bound is e^20*|A|. Comparisons with NaN are False, so a
    NaN ratio is kept and seen.
    """
    plain_T = -advantage_T * ratio_T
    bounded_T = -advantage_T * clamped(ratio_T, lower, upper)
    clipped_T = bounded_T > plain_T
    loss_T = torch.where(clipped_T, bounded_T, plain_T)
    dual_T = torch.zeros_like(clipped_T)
    if dual_clip is not None:
        ceiling_T = -advantage_T * dual_clip
        dual_T = (advantage_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(dual_T, ceiling_T, loss_T)
    return Surrogate(loss_T, clipped_T.detach(), dual_T.detach())


def clamped(ratio_T: Tensor, lower: Bound, upper: Bound) -> Tensor:
    """torch.clamp with bounds that are numbers or tensors; NaN passes through."""
    if isinstance(lower, (int, float)) and isinstance(upper, (int, float)):
        return torch.clamp(ratio_T, lower, upper)
    low_T, high_T = _spread(lower, ratio_T), _spread(upper, ratio_T)
    return torch.clamp(ratio_T, low_T, high_T)


def _spread(bound: Bound, like_T: Tensor) -> Tensor:
    if isinstance(bound, (int, float)):
        return torch.full_like(like_T, bound)
    return bound.to(like_T)


def kl_penalty(logp_T: Tensor, ref_logp_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) per token [T]; only `logp_T` gets a gradient.

    k1 = log(p/q), k2 = k1^2/2, k3 = q/p - 1 - log(q/p) (Schulman, "Approximating KL divergence").
    On policy, the expected gradient of k2 is that of the true KL, that of k1 is 0 and that of k3
    is that of the reversed KL. `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2.
    """
    ratio_T = log_ratio(logp_T, ref_logp_T.detach())
    if estimator == "k1":
        return ratio_T
    k2_T = 0.5 * ratio_T.square()
    if estimator == "k2":
        return k2_T
    if estimator == "k1+":
        return ratio_T.detach() + (k2_T - k2_T.detach())
    k3_T = torch.expm1(-ratio_T) + ratio_T
    if estimator == "k3":
        return k3_T
    assert estimator == "k3+", f"unknown KL estimator {estimator!r}"
    return k3_T.detach() + (k2_T - k2_T.detach())


def entropy(logits_TV: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, FP32 (FP64 if given) [T]; 0 * log 0 counts as 0.

    Columns at -inf (ids past the tokenizer's vocabulary) contribute nothing, in the gradient too.
    """
    if logits_TV.dtype != torch.float64:
        logits_TV = logits_TV.float()
    logp_TV = torch.log_softmax(logits_TV, dim=-1)
    # -inf is replaced before the product: 0 * -inf is NaN, and its gradient too.
    finite_TV = torch.where(torch.isneginf(logp_TV), torch.zeros_like(logp_TV), logp_TV)
    return -(torch.exp(logp_TV) * finite_TV).sum(dim=-1).clamp(max=0.0)
