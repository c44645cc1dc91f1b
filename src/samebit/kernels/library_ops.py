"""Operators of recipes with library GEMMs: cuBLAS products, and one pass over the logits on each side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from samebit.kernels.head_backward import multiply_add
from samebit.kernels.launch import cdiv, launch
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, round_to_bf16
from samebit.operand import QuantizedWeight
from samebit.reference.library_head import inverse_of
from samebit.reference.sampling import Transform

TILE = 4096
LOWEST = tl.constexpr(-1e30)
"""Stands for -inf where a difference of two would be NaN."""


@triton.jit
def _log_prob_kernel(
    logits_ptr, target_ptr, logp_ptr, entropy_ptr, lse_ptr, V, vocabulary, inverse,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, TILE)
    top = tl.full((TILE,), LOWEST, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    moment = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        inside = start + ids < vocabulary
        z = tl.load(logits_ptr + row * V + start + ids, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, z * inverse, LOWEST)
        above = tl.maximum(top, z)
        shrink = tl.exp(top - above)
        e = tl.where(inside, tl.exp(z - above), 0.0)
        total = total * shrink + e
        moment = moment * shrink + e * z
        top = above
    highest = tl.max(top, axis=0)
    factor = tl.exp(top - highest)
    whole = tl.sum(total * factor, axis=0)
    lse = highest + tl.log(whole)
    target = tl.load(target_ptr + row)
    chosen = tl.load(logits_ptr + row * V + target).to(tl.float32) * inverse
    tl.store(logp_ptr + row, chosen - lse)
    tl.store(lse_ptr + row, lse)
    tl.store(entropy_ptr + row, lse - tl.sum(moment * factor, axis=0) / whole)


@triton.jit
def _gradient_kernel(
    logits_ptr, target_ptr, dlogp_ptr, entropy_ptr, dentropy_ptr, lse_ptr, V, vocabulary, inverse,
    ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    address = logits_ptr + row * V + ids
    z = tl.load(address, mask=ids < vocabulary, other=0.0).to(tl.float32) * inverse
    dlogp = tl.load(dlogp_ptr + row) * inverse
    logp = z - tl.load(lse_ptr + row)
    p = tl.exp(logp)
    gradient = tl.where(ids == tl.load(target_ptr + row), 1.0 - p, -p) * dlogp
    if ENTROPY:
        dentropy = tl.load(dentropy_ptr + row) * inverse
        gradient -= dentropy * (p * (logp + tl.load(entropy_ptr + row)))
    gradient = tl.where(ids < vocabulary, gradient, 0.0)
    tl.store(address, round_to_bf16(gradient), mask=ids < V)


def library_log_prob(
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob of each target, entropy, log-sum-exp, FP32 [T] each; logits BF16 [T, V] to keep)."""
    inverse = inverse_of(transform)
    logits = F.linear(hidden_TK, head.codes)
    T, V = logits.shape
    logp, entropy, lse = (
        torch.empty(T, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    launch(_log_prob_kernel, (T,),
        logits, targets_T, logp, entropy, lse, V, vocabulary, inverse,
        TILE=TILE, num_warps=8, **NUMERIC_OPTIONS,
    )  # fmt: skip
    return logp, entropy, lse, logits


def library_log_prob_backward(
    dlogp_T: torch.Tensor,
    dentropy_T: torch.Tensor | None,
    hidden_TK: torch.Tensor,
    head: QuantizedWeight,
    targets_T: torch.Tensor,
    vocabulary: int,
    transform: Transform,
    entropy_T: torch.Tensor,
    lse_T: torch.Tensor,
    logits_TV: torch.Tensor,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dhidden BF16 [T, K], dweight FP32 [V, K], added to `into` when given); `logits` is overwritten."""
    T, V = logits_TV.shape
    launch(
        _gradient_kernel,
        (T, cdiv(V, TILE)),
        logits_TV,
        targets_T,
        dlogp_T.contiguous(),
        entropy_T,
        entropy_T if dentropy_T is None else dentropy_T.contiguous(),
        lse_T,
        V,
        vocabulary,
        inverse_of(transform),
        ENTROPY=dentropy_T is not None,
        TILE=TILE,
        num_warps=8,
        **NUMERIC_OPTIONS,
    )
    dweight = into
    if dweight is None:
        dweight = torch.empty(head.codes.shape, dtype=torch.float32, device=logits_TV.device)
    multiply_add(logits_TV.t(), hidden_TK, dweight, into is not None)
    return logits_TV @ head.codes, dweight
