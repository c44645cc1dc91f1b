"""Quantise a weight matrix to e4m3 in 128x128 blocks, in place, from its FP32 master."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK
from samebit.kernels.launch import launch
from samebit.kernels.quantize_common import (
    E4M3_LARGEST,
    NUMERIC_OPTIONS,
    block_codes,
    e4m3_code,
    e4m3_word,
    magnitude_bits,
    padded,
    quotient,
    scale_from_bits,
)
from samebit.kernels.quantize_gradient import QUADS, store_quads

WARPS = 8
REGISTERS = 128
"""Per thread, so that two programs fit on a multiprocessor."""


@triton.jit
def _quantize_weight_kernel(
    w_ptr, codes_ptr, scale_ptr, w_stride, codes_stride, scale_stride, N, K, BLOCK: tl.constexpr
):
    block_k = tl.program_id(0)
    block_n = tl.program_id(1)
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    n = block_n.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + n[:, None] * w_stride + k[None, :], mask=inside, other=0.0)
    w = w.to(tl.float32)
    bits = tl.max(tl.max(magnitude_bits(w), axis=1, keep_dims=True), axis=0, keep_dims=True)
    codes, scale = block_codes(w, bits, False)
    tl.store(codes_ptr + n[:, None] * codes_stride + k[None, :], codes)
    tl.store(scale_ptr + block_n * scale_stride + block_k, tl.sum(scale))


@triton.jit
def _rows(w_ptr, w_stride, block_n, N, k, K, quad, J: tl.constexpr):
    n = block_n.to(tl.int64) * (4 * quad.shape[0]) + 4 * quad + J
    inside = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + n[:, None] * w_stride + k[None, :], mask=inside, other=0.0)
    return w.to(tl.float32)


@triton.jit
def _store_rows(codes_ptr, codes_stride, block_n, k, quad, q, J: tl.constexpr):
    n = block_n.to(tl.int64) * (4 * quad.shape[0]) + 4 * quad + J
    tl.store(codes_ptr + n[:, None] * codes_stride + k[None, :], e4m3_code(q))


@triton.jit
def _quantize_weight_both_kernel(
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
    QUADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block_k = tl.program_id(0)
    block_n = tl.program_id(1)
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    quad = tl.arange(0, QUADS)
    w0 = _rows(w_ptr, w_stride, block_n, N, k, K, quad, 0)
    w1 = _rows(w_ptr, w_stride, block_n, N, k, K, quad, 1)
    w2 = _rows(w_ptr, w_stride, block_n, N, k, K, quad, 2)
    w3 = _rows(w_ptr, w_stride, block_n, N, k, K, quad, 3)
    low = tl.maximum(magnitude_bits(w0), magnitude_bits(w1))
    high = tl.maximum(magnitude_bits(w2), magnitude_bits(w3))
    bits = tl.max(tl.maximum(low, high), axis=1, keep_dims=True)
    scale = scale_from_bits(tl.max(bits, axis=0, keep_dims=True), E4M3_LARGEST, False)
    tl.store(scale_ptr + block_n * scale_stride + block_k, tl.sum(scale))
    q0 = quotient(w0, scale, False)
    q1 = quotient(w1, scale, False)
    q2 = quotient(w2, scale, False)
    q3 = quotient(w3, scale, False)
    _store_rows(codes_ptr, codes_stride, block_n, k, quad, q0, 0)
    _store_rows(codes_ptr, codes_stride, block_n, k, quad, q1, 1)
    _store_rows(codes_ptr, codes_stride, block_n, k, quad, q2, 2)
    _store_rows(codes_ptr, codes_stride, block_n, k, quad, q3, 3)
    # Converted anew, not taken apart: ptxas 12.8 miscompiles e4m3 pairs that are both stored packed
    # and taken apart byte by byte (it reads the stack pointer in place of some).
    words = e4m3_word(q0, q1, q2, q3)
    target = transposed_ptr + block_n.to(tl.int64) * BLOCK
    store_quads(target, transposed_stride, k, quad, words, BLOCK)


@triton.jit
def _words(x_ptr, x_stride, n, word, J: tl.constexpr):
    x = x_ptr.to(tl.pointer_type(tl.int32))
    return tl.load(x + (n + J)[:, None] * (x_stride // 4) + word[None, :])


@triton.jit
def _byte_of_four(w0, w1, w2, w3, J: tl.constexpr):
    """Byte J of four words, as a word."""
    b0 = (w0 >> (8 * J)) & 0xFF
    b1 = (w1 >> (8 * J)) & 0xFF
    b2 = (w2 >> (8 * J)) & 0xFF
    b3 = (w3 >> (8 * J)) & 0xFF
    return b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)


@triton.jit
def _transpose_codes_kernel(
    x_ptr, out_ptr, x_stride, out_stride, QUADS: tl.constexpr, BLOCK: tl.constexpr
):
    quad = tl.arange(0, QUADS)
    n = tl.program_id(1).to(tl.int64) * BLOCK + 4 * quad
    word = tl.program_id(0) * QUADS + quad
    w0 = _words(x_ptr, x_stride, n, word, 0)
    w1 = _words(x_ptr, x_stride, n, word, 1)
    w2 = _words(x_ptr, x_stride, n, word, 2)
    w3 = _words(x_ptr, x_stride, n, word, 3)
    out = out_ptr.to(tl.pointer_type(tl.int32)) + tl.program_id(1) * QUADS + quad[None, :]
    k = word.to(tl.int64)[:, None] * 4
    for j in tl.static_range(4):
        words = tl.trans(_byte_of_four(w0, w1, w2, w3, j))
        tl.store(out + (k + j) * (out_stride // 4), words)


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
    grid = (Kp // BLOCK, Np // BLOCK)
    sizes = {"num_warps": WARPS, "maxnreg": REGISTERS, **NUMERIC_OPTIONS}
    if transposed_codes is None:
        launch(_quantize_weight_kernel, grid,
            w_NK, codes.view(torch.uint8), scale, w_NK.stride(0), codes.stride(0), scale.stride(0),
            N, K, BLOCK=BLOCK, **sizes,
        )  # fmt: skip
    else:
        launch(_quantize_weight_both_kernel, grid,
            w_NK, codes.view(torch.uint8), transposed_codes.view(torch.uint8), scale,
            w_NK.stride(0), codes.stride(0), transposed_codes.stride(0), scale.stride(0),
            N, K, QUADS=QUADS, BLOCK=BLOCK, **sizes,
        )  # fmt: skip
    return codes, scale


def transpose_codes(codes_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose [K, N] of one-byte codes [N, K] (both sides multiples of 128)."""
    N, K = codes_NK.shape
    assert N % BLOCK == 0 and K % BLOCK == 0 and codes_NK.element_size() == 1
    if out is None:
        out = torch.empty((K, N), dtype=codes_NK.dtype, device=codes_NK.device)
    launch(
        _transpose_codes_kernel,
        (K // BLOCK, N // BLOCK),
        codes_NK.view(torch.uint8),
        out.view(torch.uint8),
        codes_NK.stride(0),
        out.stride(0),
        QUADS=QUADS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
