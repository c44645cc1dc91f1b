"""Backward of RMSNorm, deterministic: per-program gain gradients, then one ordered column sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK
from samebit.kernels.launch import cdiv, launch
from samebit.kernels.norm import row_tile
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, fold_rows, round_to_bf16

WARPS_PER_TILE = 2
REGISTERS = None
STAGES = 3
PROGRAMS = 264
"""Row chunks at most (two a multiprocessor on an H200), fixed: the sum's order depends on it."""


@triton.jit
def _add_both(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dsum_ptr,
    dx_ptr,
    partial_ptr,
    x_stride,
    T,
    K,
    rows,
    eps,
    ADD: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    k = tl.arange(0, GROUPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = k < K
    weight = tl.load(weight_ptr + k, mask=inside, other=0.0)
    dweight = tl.zeros((GROUPS, BLOCK), dtype=tl.float32)
    first = program * rows
    for i in tl.range(0, tl.minimum(rows, T - first), num_stages=STAGES):
        t = (first + i).to(tl.int64)
        x = tl.load(x_ptr + t * x_stride + k, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + t * K + k, mask=inside, other=0.0).to(tl.float32)
        scaled = dy * weight.to(tl.float32)
        # Both sums at once, and in the compiler's order: gradients promise determinism only.
        squares, dot = tl.reduce((x * x, scaled * x), 1, _add_both)
        squares, dot = tl.reduce((squares, dot), 0, _add_both)
        mean = tl.div_rn(squares, tl.cast(K, tl.float32))
        root = tl.sqrt_rn(mean + tl.cast(eps, tl.float32))
        rstd = tl.div_rn(tl.full((), 1.0, tl.float32), root)
        normed = x * rstd
        dx = (scaled - normed * (dot * rstd / K)) * rstd
        if ADD:
            dx += tl.load(dsum_ptr + t * K + k, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + t * K + k, round_to_bf16(dx), mask=inside)
        dweight += dy * normed
    tl.store(partial_ptr + program.to(tl.int64) * K + k, dweight, mask=inside)


@triton.jit
def _column_sum_kernel(
    partial_ptr,
    out_ptr,
    programs,
    K,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    k = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = k < K
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        p = start + tl.arange(0, ROWS)
        mask = (p < programs)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + p[:, None] * K + k[None, :], mask=mask, other=0.0)
    total = tl.reshape(fold_rows(total, 1), (WIDTH,))
    if ACCUMULATE:
        total += tl.load(out_ptr + k, mask=inside, other=0.0)
    tl.store(out_ptr + k, total, mask=inside)


def column_sum(partial_PK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over rows of FP32 [P, K], in an order fixed by P; added to `out` [K] when given."""
    P, K = partial_PK.shape
    accumulate = out is not None
    if out is None:
        out = torch.empty((K,), dtype=torch.float32, device=partial_PK.device)
    launch(
        _column_sum_kernel,
        (cdiv(K, 32),),
        partial_PK,
        out,
        P,
        K,
        ACCUMULATE=accumulate,
        ROWS=32,
        WIDTH=32,
        num_warps=4,
        **NUMERIC_OPTIONS,
    )
    return out


def rms_norm_backward(
    dy_TK: torch.Tensor,
    x_TK: torch.Tensor,
    weight_K: torch.Tensor,
    eps: float,
    *,
    dsum_TK: torch.Tensor | None = None,
    dweight_K: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx BF16 [T, K], dweight FP32 [K]) from dy BF16 and the norm's input x (or residual sum).

    `dsum_TK` BF16 is the gradient that reaches the residual sum from elsewhere; it is added in FP32
    before the one rounding, and the result is the gradient of both addends. `dweight_K`, when
    given, is accumulated into.
    """
    T, K = x_TK.shape
    assert x_TK.stride(1) == 1 and dy_TK.is_contiguous() and T > 0
    assert dsum_TK is None or dsum_TK.is_contiguous()
    tile, rows = row_tile(K), cdiv(T, PROGRAMS)
    programs = cdiv(T, rows)
    dx = torch.empty((T, K), dtype=torch.bfloat16, device=x_TK.device)
    partial = torch.empty((programs, K), dtype=torch.float32, device=x_TK.device)
    launch(
        _rms_norm_backward_kernel,
        (programs,),
        dy_TK,
        x_TK,
        weight_K,
        dy_TK if dsum_TK is None else dsum_TK,
        dx,
        partial,
        x_TK.stride(0),
        T,
        K,
        rows,
        eps,
        ADD=dsum_TK is not None,
        GROUPS=tile.groups,
        BLOCK=BLOCK,
        STAGES=STAGES,
        num_warps=WARPS_PER_TILE * tile.num_warps,
        maxnreg=REGISTERS,
        **NUMERIC_OPTIONS,
    )
    return dx, column_sum(partial, dweight_K)
