"""The head: FP32 logits of BF16 operands, log-probs and samples from one and the same product."""

from __future__ import annotations

import torch

from samebit.operand import QuantizedWeight
from samebit.reference.exact import exp
from samebit.reference.gemm import matmul_rows_fp32, packed_fp32
from samebit.reference.sampling import (
    Transform,
    gumbel_argmax,
    log_normaliser,
    stream_key,
    transform_logits,
)

CHUNK = 64
"""Rows of logits alive at once; the (tokens x vocabulary) matrix is never whole, backward included."""


def head_logits(hidden_TK: torch.Tensor, head: QuantizedWeight, vocabulary: int) -> torch.Tensor:
    """FP32 [T, V] logits, unrounded; ids >= `vocabulary` (the tokenizer's size) are -inf.

    hidden: BF16 [T, K]; head: BF16 weight [V, K].
    """
    logits = matmul_rows_fp32(hidden_TK.float(), packed_fp32(head))
    if vocabulary < logits.shape[1]:
        logits[:, vocabulary:] = float("-inf")
    return logits


def log_prob(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob of each target, entropy, log-sum-exp), FP32 [T] each, under the sampling transform."""
    logps, entropies, normalisers = [], [], []
    for hidden, targets in zip(hidden_TK.split(CHUNK), targets_T.split(CHUNK), strict=True):
        logits = transform_logits(head_logits(hidden, head, vocabulary), transform)
        lse = log_normaliser(logits)
        logps.append(_target_log_prob(logits, lse, targets))
        normalisers.append(lse[:, 0])
        logp = logits - lse
        entropies.append(-(torch.exp(logp) * logp.masked_fill(logp.isneginf(), 0.0)).sum(-1))
    return torch.cat(logps), torch.cat(entropies), torch.cat(normalisers)


def _target_log_prob(
    logits: torch.Tensor, lse: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    return (logits.gather(1, targets[:, None]) - lse)[:, 0]


def log_prob_backward(
    dlogp_T: torch.Tensor,
    dentropy_T: torch.Tensor | None,
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
    entropy_T: torch.Tensor,
    lse_T: torch.Tensor,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dhidden BF16 [T, K], dweight FP32 [V, K]); logits are recomputed chunk by chunk.

    entropy, lse: the forward's. dentropy None: nothing asks for the entropy's gradient.
    """
    entropy_grad_T = torch.zeros_like(dlogp_T) if dentropy_T is None else dentropy_T
    inverse = 1.0 if transform.temperature in (0.0, 1.0) else 1.0 / transform.temperature
    weight_VK = head.derived("fp32", lambda: head.codes.float())
    dhidden, dweight = [], torch.zeros_like(weight_VK) if into is None else into
    for i in range(0, hidden_TK.shape[0], CHUNK):
        rows = slice(i, i + CHUNK)
        logits = transform_logits(head_logits(hidden_TK[rows], head, vocabulary), transform)
        logp = logits - lse_T[rows, None]
        p = exp(logp)
        finite = logp.masked_fill(logp.isneginf(), 0.0)
        entropy = -(p * finite).sum(-1, keepdim=True)
        dlogits = -p * (dlogp_T[rows, None] + entropy_grad_T[rows, None] * (finite + entropy))
        dlogits.scatter_add_(1, targets_T[rows, None], dlogp_T[rows, None])
        dlogits *= inverse
        dhidden.append((dlogits @ weight_VK).bfloat16())
        dweight += dlogits.t() @ hidden_TK[rows].float()
    return torch.cat(dhidden), dweight


def log_prob_planned(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
    known_T: torch.Tensor,
    dlogp_T: torch.Tensor,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob, entropy, dhidden BF16, dweight FP32), the gradients for a dlogp known beforehand.

    known: the sampler's log-probs, at which dlogp was taken. A backend may use them to make the
    gradient in the pass that makes the log-probs; here it is one after the other.
    """
    logp, entropy, lse = log_prob(hidden_TK, head, targets_T, vocabulary, transform)
    gradients = log_prob_backward(
        dlogp_T, None, hidden_TK, head, targets_T, vocabulary, transform, entropy, lse, into
    )
    return (logp, entropy, *gradients)


def sample(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    vocabulary: int,
    transform: Transform,
    counters: list[tuple[int, int, int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [T], log-probs FP32 [T]): Gumbel-max, or the largest logit at temperature 0.

    counters: (seed, sample id, position) of each row. The log-prob is `log_prob`'s for that id, bit
    for bit. Ties go to the smaller id.
    """
    keys = [stream_key(*counter) for counter in counters]
    return _draw(hidden_TK, head, vocabulary, transform, keys)


def draw(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    vocabulary: int,
    transform: Transform,
    keys_T2: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` from the noise keys themselves, int32 [T, 2] bit patterns of `stream_key`."""
    keys = [(low & 0xFFFFFFFF, high & 0xFFFFFFFF) for low, high in keys_T2.tolist()]
    return _draw(hidden_TK, head, vocabulary, transform, keys)


def _draw(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    vocabulary: int,
    transform: Transform,
    keys: list[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, logps = [], []
    for i in range(0, hidden_TK.shape[0], CHUNK):
        logits = head_logits(hidden_TK[i : i + CHUNK], head, vocabulary)
        logits = transform_logits(logits, transform)
        lse = log_normaliser(logits)
        if torch.isnan(lse).any():
            row = int(torch.nonzero(torch.isnan(lse[:, 0]))[0])
            raise ValueError(
                f"logits of batch row {row} are NaN: the model's weights or activations are not finite"
            )
        if transform.temperature == 0.0:
            chosen = (logits == logits.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)
        else:
            chosen = gumbel_argmax(logits, keys[i : i + CHUNK])
        ids.append(chosen)
        logps.append(_target_log_prob(logits, lse, chosen))
    return torch.cat(ids), torch.cat(logps)
