"""One pointer-based Triton GEMM for all formats, which every fast kernel equals bit for bit.

It takes any shape and stride, so it also serves what the TMA kernels cannot address (an output row
that is not a multiple of 16 bytes). The M side of every tile has at least 64 rows: a smaller tile
would be run by `mma.sync`, whose bits differ from those of `wgmma`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import cdiv, launch

BLOCK = 1
"""Per-128 promotion: acc = fma(dot128, fl(row_scale * col_scale), acc)."""
ROW = 2
"""Plain promotion every `PROMOTE` of K, one scale per row and column at the end."""
INT8 = 3
"""Exact int32 over all of K, one scale per row and column at the end."""
BF16 = 4
"""FP32 accumulation over all of K, no scale."""
STAGES = 1
"""More would bring operands by `cp.async`, and Triton 3.6 puts no proxy fence between that and `wgmma`."""


@triton.jit
def plain_gemm_kernel(
    a_ptr, b_ptr, out_ptr, sa_ptr, sb_ptr, bias_ptr,
    M, N, K,
    stride_am, stride_bn, stride_om, stride_on,
    stride_sam, stride_sag, stride_sbn, stride_sbg,
    MODE: tl.constexpr, PROMOTE: tl.constexpr, COL_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[M, N] = a[M, K] x b[N, K]^T under MODE; one tile a program, K in increasing order."""
    m_M = tl.program_id(0) * BM + tl.arange(0, BM)
    n_N = tl.program_id(1) * BN + tl.arange(0, BN)
    am_M = tl.minimum(m_M, M - 1).to(tl.int64)
    bn_N = tl.minimum(n_N, N - 1).to(tl.int64)
    k_K = tl.arange(0, BK)
    a_ptrs = a_ptr + am_M[:, None] * stride_am + k_K[None, :]
    b_ptrs = b_ptr + bn_N[None, :] * stride_bn + k_K[:, None]
    sa_ptrs = sa_ptr + am_M * stride_sam
    sb_ptrs = sb_ptr + (bn_N // COL_GROUP) * stride_sbn
    ACC: tl.constexpr = tl.int32 if MODE == 3 else tl.float32
    acc = tl.zeros((BM, BN), ACC)
    for k0 in range(0, K, PROMOTE):
        dot = tl.zeros((BM, BN), ACC)
        for k1 in range(k0, min(k0 + PROMOTE, K), BK):
            if MODE == 4:
                a = tl.load(a_ptrs + k1, mask=k_K[None, :] + k1 < K, other=0.0)
                b = tl.load(b_ptrs + k1, mask=k_K[:, None] + k1 < K, other=0.0)
            else:
                a = tl.load(a_ptrs + k1)
                b = tl.load(b_ptrs + k1)
            dot = tl.dot(a, b, dot, out_dtype=ACC)
        if MODE == 1:
            group = k0 // PROMOTE
            sa = tl.load(sa_ptrs + group * stride_sag)
            sb = tl.load(sb_ptrs + group * stride_sbg)
            acc = tl.fma(dot, sa[:, None] * sb[None, :], acc)
        elif MODE == 2:
            acc += dot
        else:
            acc = dot
    if MODE == 2 or MODE == 3:
        sa = tl.load(sa_ptrs)
        sb = tl.load(sb_ptrs)
        result = acc.to(tl.float32) * (sa[:, None] * sb[None, :])
    else:
        result = acc
    if HAS_BIAS:
        result += tl.load(bias_ptr + bn_N).to(tl.float32)[None, :]
    row_offset_M = m_M.to(tl.int64) * stride_om
    out_ptrs = out_ptr + row_offset_M[:, None] + n_N.to(tl.int64)[None, :] * stride_on
    inside = (m_M[:, None] < M) & (n_N[None, :] < N)
    if ADD:
        result += tl.load(out_ptrs, mask=inside, other=0.0)
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside)


def plain_gemm(
    a_MK: torch.Tensor,
    b_NK: torch.Tensor,
    out_MN: torch.Tensor,
    mode: int,
    *,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    col_group: int = 1,
    promote: int = 0,
    bias_N: torch.Tensor | None = None,
    add: bool = False,
    tile: tuple[int, int] = (64, 64),
    stages: int = STAGES,
) -> torch.Tensor:
    """Launch `plain_gemm_kernel`; scales are [rows, groups] or [rows] with any strides.

    `promote` is the number of K elements between promotions (0: all of K). Operands are contiguous
    along K; K is a multiple of 128 except in BF16 mode.
    """
    M, K = a_MK.shape
    N = out_MN.shape[1]
    assert a_MK.stride(1) == 1 and b_NK.stride(1) == 1, "operands must be contiguous along K"
    assert tile[0] >= 64, "a tile of fewer than 64 rows runs on mma.sync and gives other bits"
    if M == 0:
        return out_MN
    step = 64 if mode == BF16 else 128
    span = promote or cdiv(K, step) * step
    sa = a_scale if a_scale is not None else out_MN
    sb = b_scale if b_scale is not None else out_MN
    grid = (cdiv(M, tile[0]), cdiv(N, tile[1]))
    launch(plain_gemm_kernel, grid,
        a_MK, b_NK, out_MN, sa, sb, bias_N if bias_N is not None else out_MN,
        M, N, K,
        a_MK.stride(0), b_NK.stride(0), out_MN.stride(0), out_MN.stride(1),
        sa.stride(0), sa.stride(1) if sa.ndim > 1 else 0,
        sb.stride(0), sb.stride(1) if sb.ndim > 1 else 0,
        MODE=mode, PROMOTE=span, COL_GROUP=col_group, HAS_BIAS=bias_N is not None, ADD=add,
        BM=tile[0], BN=tile[1], BK=step, num_warps=4, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out_MN
