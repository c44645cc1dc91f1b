"""Saved 1x128 activation codes brought along tokens for the weight gradient, transposed.

`rescale_tokens` gives a token group x 128 features one scale, the largest of those saved, and is a
pass over bytes; `requantize_tokens` gives every feature its own (Jet-RL section 4.2). Layouts are those
of quantize_gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK
from samebit.kernels.launch import launch
from samebit.kernels.quantize_common import (
    E4M3_LARGEST,
    NUMERIC_OPTIONS,
    amax_bits,
    e4m3_quotient,
    e4m3_word,
    larger_magnitude,
    magnitude_bits,
    padded,
    quotient,
    scale_from_bits,
)
from samebit.kernels.quantize_gradient import QUADS, store_quads

RESCALE_WARPS = 8
REQUANTISE_WARPS = 2
NARROW = 32
"""Features of a program that requantises, whose values all stay in registers."""


@triton.jit
def _group(groups_ptr, QUADS: tl.constexpr):
    """(first row, rows) of this program's token group, and its quads of tokens."""
    group = tl.program_id(1)
    first = tl.load(groups_ptr + 2 * group)
    return first, tl.load(groups_ptr + 2 * group + 1), tl.arange(0, QUADS)


@triton.jit
def _codes(codes_ptr, codes_stride, first, count, k, quad, J: tl.constexpr, EVICT: tl.constexpr):
    row = 4 * quad + J
    t = (first + row).to(tl.int64)
    address = codes_ptr + t[:, None] * codes_stride + k[None, :]
    inside = (row < count)[:, None]
    return tl.load(address, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def _scales(scale_ptr, scale_stride_t, first, count, quad, J: tl.constexpr):
    row = 4 * quad + J
    t = (first + row).to(tl.int64)
    return tl.load(scale_ptr + t * scale_stride_t, mask=row < count, other=1.0)[:, None]


@triton.jit
def _rescale_tokens_kernel(
    codes_ptr,
    scale_ptr,
    groups_ptr,
    transposed_ptr,
    transposed_scale_ptr,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    transposed_stride,
    transposed_scale_stride,
    K,
    QUADS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    block_k = tl.program_id(0)
    group = tl.program_id(1)
    first, count, quad = _group(groups_ptr, QUADS)
    k = block_k * WIDTH + tl.arange(0, WIDTH)
    x0 = _codes(codes_ptr, codes_stride, first, count, k, quad, 0, "evict_first")
    x1 = _codes(codes_ptr, codes_stride, first, count, k, quad, 1, "evict_first")
    x2 = _codes(codes_ptr, codes_stride, first, count, k, quad, 2, "evict_first")
    x3 = _codes(codes_ptr, codes_stride, first, count, k, quad, 3, "evict_first")

    scales = scale_ptr + block_k * scale_stride_g
    row = tl.arange(0, BLOCK)
    t = (first + row).to(tl.int64)
    # As bits, so that a NaN is the largest.
    bits = tl.load(scales + t * scale_stride_t, mask=row < count, other=0.0)
    largest = tl.max(magnitude_bits(bits), axis=0).to(tl.float32, bitcast=True)
    target = transposed_scale_ptr + group.to(tl.int64) * transposed_scale_stride
    tl.store(target + block_k, largest)
    # A quotient too small for `quotient` makes zero codes whatever its last bits.
    divisor = tl.full((1, 1), largest, tl.float32)
    s0 = quotient(_scales(scales, scale_stride_t, first, count, quad, 0), divisor, False)
    s1 = quotient(_scales(scales, scale_stride_t, first, count, quad, 1), divisor, False)
    s2 = quotient(_scales(scales, scale_stride_t, first, count, quad, 2), divisor, False)
    s3 = quotient(_scales(scales, scale_stride_t, first, count, quad, 3), divisor, False)
    words = e4m3_word(x0 * s0, x1 * s1, x2 * s2, x3 * s3)
    target = transposed_ptr + group.to(tl.int64) * BLOCK
    store_quads(target, transposed_stride, k, quad, words, count)


@triton.jit
def _requantize_tokens_kernel(
    codes_ptr,
    scale_ptr,
    groups_ptr,
    transposed_ptr,
    transposed_scale_ptr,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    transposed_stride,
    transposed_scale_stride,
    K,
    QUADS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    block_k = tl.program_id(0)
    group = tl.program_id(1)
    first, count, quad = _group(groups_ptr, QUADS)
    k = block_k * WIDTH + tl.arange(0, WIDTH)
    scales = scale_ptr + (block_k * WIDTH // BLOCK) * scale_stride_g
    x0 = _codes(codes_ptr, codes_stride, first, count, k, quad, 0, "")
    x1 = _codes(codes_ptr, codes_stride, first, count, k, quad, 1, "")
    x2 = _codes(codes_ptr, codes_stride, first, count, k, quad, 2, "")
    x3 = _codes(codes_ptr, codes_stride, first, count, k, quad, 3, "")
    x0 = x0 * _scales(scales, scale_stride_t, first, count, quad, 0)
    x1 = x1 * _scales(scales, scale_stride_t, first, count, quad, 1)
    x2 = x2 * _scales(scales, scale_stride_t, first, count, quad, 2)
    x3 = x3 * _scales(scales, scale_stride_t, first, count, quad, 3)
    most = larger_magnitude(larger_magnitude(x0, x1), larger_magnitude(x2, x3))
    scale = scale_from_bits(tl.reshape(amax_bits(most, 0), (WIDTH,)), E4M3_LARGEST, False)
    target = transposed_scale_ptr + group.to(tl.int64) * transposed_scale_stride
    tl.store(target + k, scale, mask=k < K)
    scale = scale[None, :]
    words = e4m3_word(
        e4m3_quotient(x0, scale, False),
        e4m3_quotient(x1, scale, False),
        e4m3_quotient(x2, scale, False),
        e4m3_quotient(x3, scale, False),
    )
    target = transposed_ptr + group.to(tl.int64) * BLOCK
    store_quads(target, transposed_stride, k, quad, words, count)


def _launch(
    kernel: triton.JITFunction,
    codes_TK: torch.Tensor,
    scale_TG: torch.Tensor,
    token_groups: torch.Tensor,
    K: int,
    scales: int,
    warps: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    groups, Kp, device = token_groups.shape[0], codes_TK.shape[1], codes_TK.device
    assert Kp == padded(K) and token_groups.dtype == torch.int32
    transposed = torch.empty((Kp, groups * BLOCK), dtype=torch.float8_e4m3fn, device=device)
    transposed_scale = torch.empty((groups, scales), dtype=torch.float32, device=device)
    if groups:
        launch(
            kernel,
            (Kp // width, groups),
            codes_TK,
            scale_TG,
            token_groups,
            transposed.view(torch.uint8),
            transposed_scale,
            codes_TK.stride(0),
            scale_TG.stride(0),
            scale_TG.stride(1),
            transposed.stride(0),
            transposed_scale.stride(0),
            K,
            QUADS=QUADS,
            BLOCK=BLOCK,
            WIDTH=width,
            num_warps=warps,
            **NUMERIC_OPTIONS,
        )
    return transposed, transposed_scale


def rescale_tokens(
    codes_TK: torch.Tensor, scale_TG: torch.Tensor, token_groups: torch.Tensor, K: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transposed codes e4m3 [ceil128(K), 128*groups], scales FP32 [groups, ceil(K/128)].

    scale = the largest saved scale of the token group; code = round(code * fl(token's scale /
    largest)). `K` is the unpadded width. A NaN scale makes its whole block NaN.
    """
    blocks = scale_TG.shape[1]
    return _launch(
        _rescale_tokens_kernel, codes_TK, scale_TG, token_groups, K, blocks, RESCALE_WARPS, BLOCK
    )


def requantize_tokens(
    codes_TK: torch.Tensor, scale_TG: torch.Tensor, token_groups: torch.Tensor, K: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transposed codes e4m3 [ceil128(K), 128*groups], scales FP32 [groups, K] of saved activations.

    The values are fl(code * scale) in FP32, quantised along tokens within each token group; `K` is
    the unpadded width.
    """
    return _launch(
        _requantize_tokens_kernel, codes_TK, scale_TG, token_groups, K, K, REQUANTISE_WARPS, NARROW
    )
