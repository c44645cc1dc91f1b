"""Quantise a weight matrix to e4m3 in 128x128 blocks, in place, from its FP32 master."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, block_codes, magnitude_bits, padded

WARPS = 8
REGISTERS = 128
"""Per thread, so that two programs fit on a multiprocessor."""


@triton.jit
def _quantize_weight_kernel(
    w_ptr,
    codes_ptr,
    transposed_ptr,
    scale_ptr,
    w_stride,
    codes_stride,
    transposed_stride,
    scale_stride,
    N,
    K,
    TRANSPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block_k = tl.program_id(0)
    block_n = tl.program_id(1)
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    n = block_n.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + n[:, None] * w_stride + k[None, :], mask=inside, other=0.0)
    w = w.to(tl.float32)
    bits = tl.max(tl.max(magnitude_bits(w), axis=1, keep_dims=True), axis=0, keep_dims=True)
    codes, scale = block_codes(w, bits)
    tl.store(codes_ptr + n[:, None] * codes_stride + k[None, :], codes)
    if TRANSPOSE:
        # Not tl.trans(codes): ptxas 12.8 miscompiles e4m3 pairs that are both stored packed and
        # taken apart byte by byte (it reads the stack pointer in place of some).
        codes, _ = block_codes(tl.trans(w), bits)
        address = transposed_ptr + k.to(tl.int64)[:, None] * transposed_stride + n[None, :]
        tl.store(address, codes)
    tl.store(scale_ptr + block_n * scale_stride + block_k, tl.sum(scale))


@triton.jit
def _transpose_codes_kernel(x_ptr, out_ptr, x_stride, out_stride, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n[:, None] * x_stride + k[None, :])
    tl.store(out_ptr + k[:, None] * out_stride + n[None, :], tl.trans(x))


def quantize_weight(
    w_NK: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    transposed_codes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes e4m3 [ceil128(N), ceil128(K)] and scales FP32 [N/128, K/128] (up) of FP32 w [N, K].

    Writes into `codes` and `scale` when given (views into a fused buffer: the parts of a fused
    matrix are quantised one by one). `transposed_codes` [ceil128(K), ceil128(N)], when given, gets
    the transpose; its scales are `scale.t()`. Padding is zero codes.
    """
    N, K = w_NK.shape
    Np, Kp = padded(N), padded(K)
    if codes is None:
        codes = torch.empty((Np, Kp), dtype=torch.float8_e4m3fn, device=w_NK.device)
    if scale is None:
        scale = torch.empty((Np // BLOCK, Kp // BLOCK), dtype=torch.float32, device=w_NK.device)
    assert w_NK.stride(1) == 1 and codes.shape == (Np, Kp) and scale.stride(1) == 1
    transpose = transposed_codes is not None
    other = transposed_codes if transposed_codes is not None else codes
    _quantize_weight_kernel[(Kp // BLOCK, Np // BLOCK)](
        w_NK,
        codes.view(torch.uint8),
        other.view(torch.uint8),
        scale,
        w_NK.stride(0),
        codes.stride(0),
        other.stride(0),
        scale.stride(0),
        N,
        K,
        TRANSPOSE=transpose,
        BLOCK=BLOCK,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        **NUMERIC_OPTIONS,
    )
    return codes, scale


def transpose_codes(codes_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose [K, N] of one-byte codes [N, K] (both sides multiples of 128)."""
    N, K = codes_NK.shape
    assert N % BLOCK == 0 and K % BLOCK == 0 and codes_NK.element_size() == 1
    if out is None:
        out = torch.empty((K, N), dtype=codes_NK.dtype, device=codes_NK.device)
    _transpose_codes_kernel[(K // BLOCK, N // BLOCK)](
        codes_NK.view(torch.uint8),
        out.view(torch.uint8),
        codes_NK.stride(0),
        out.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
