"""Quantise output gradients, both layouts from one read, and the table of token groups.

A token group is at most 128 consecutive rows; a table int32 [groups, 2] holds (first row, rows).
Groups start at each segment's first token and never span two segments. The transposed codes are
[features, 128 * groups], each group padded with zero codes to 128 columns.

The plain kernel reads a tile as four tensors of every fourth token: four codes of a feature are then
packed into a word in registers, and the transpose moves words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK
from samebit.kernels._gradient_hopper import (
    REGISTERS,
    SILU_REGISTERS,
    STRIP,
    WARPS,
    quantize_gradient_kernel,
    silu_mul_gradient_kernel,
)
from samebit.kernels.activation import silu_mul_backward
from samebit.kernels.launch import launch
from samebit.kernels.quantize_common import (
    E4M3_LARGEST,
    NATIVE,
    NUMERIC_OPTIONS,
    block_codes,
    e4m3_word,
    empty_activation_scale,
    magnitude_bits,
    padded,
    quotient,
    scale_from_bits,
)

QUADS = BLOCK // 4
"""A tile's quads of tokens."""


class GradientCodes(NamedTuple):
    """A gradient dY [T, N] in both layouts.

    codes e4m3 [T, ceil128(N)] and scale FP32 [T, ceil(N/128)] (group-major storage), along N;
    transposed e4m3 [ceil128(N), 128*groups] and transposed_scale FP32 [groups, N], along tokens.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    transposed: torch.Tensor
    transposed_scale: torch.Tensor


def token_group_table(segment_lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """The table int32 [groups, 2] of (first row, rows <= 128) for segments packed in order.

    Every row is in exactly one group; an empty segment has none.
    """
    table: list[tuple[int, int]] = []
    first = 0
    for length in segment_lengths:
        table += [(first + done, min(BLOCK, length - done)) for done in range(0, length, BLOCK)]
        first += length
    return torch.tensor(table, dtype=torch.int32).reshape(-1, 2).to(device)


@triton.jit
def kept_bytes(quad, count):
    """Per quad of tokens, an int32 with 0xFF for every token that is one of the first `count`."""
    left = tl.minimum(tl.maximum(count - 4 * quad, 0), 4)
    # Shifting by 32 is undefined, so the last byte is shifted in apart.
    low = (1 << (8 * tl.minimum(left, 3))) - 1
    return tl.where(left == 4, -1, low)


@triton.jit
def store_quads(target_ptr, stride, n, quad, words, count):
    """Transpose words [quads, features] of four token codes each and store them as rows of features.

    Codes of tokens past `count` become zero: a NaN scale makes NaN codes of the zero padding.
    """
    words = words & kept_bytes(quad, count)[:, None]
    target = target_ptr.to(tl.pointer_type(tl.int32)) + n.to(tl.int64)[:, None] * (stride // 4)
    tl.store(target + quad[None, :], tl.trans(words))


@triton.jit
def _rows(x_ptr, x_stride, first, count, n, N, quad, J: tl.constexpr):
    row = 4 * quad + J
    t = (first + row).to(tl.int64)
    inside = (row < count)[:, None] & (n < N)[None, :]
    return tl.load(x_ptr + t[:, None] * x_stride + n[None, :], mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def _row_codes(x, codes_ptr, codes_stride, first, count, n, quad, J: tl.constexpr):
    """Store the codes of every fourth row and return the rows' scales [quads]."""
    row = 4 * quad + J
    t = (first + row).to(tl.int64)
    codes, scale = block_codes(x, tl.max(magnitude_bits(x), axis=1, keep_dims=True), True)
    address = codes_ptr + t[:, None] * codes_stride + n[None, :]
    tl.store(address, codes, mask=(row < count)[:, None])
    return tl.reshape(scale, (scale.shape[0],))


@triton.jit
def _quantize_gradient_kernel(
    x_ptr,
    groups_ptr,
    codes_ptr,
    scale_ptr,
    transposed_ptr,
    transposed_scale_ptr,
    x_stride,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    transposed_stride,
    transposed_scale_stride,
    N,
    QUADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block_n = tl.program_id(0)
    group = tl.program_id(1)
    first = tl.load(groups_ptr + 2 * group)
    count = tl.load(groups_ptr + 2 * group + 1)
    n = block_n * BLOCK + tl.arange(0, BLOCK)
    quad = tl.arange(0, QUADS)
    x0 = _rows(x_ptr, x_stride, first, count, n, N, quad, 0)
    x1 = _rows(x_ptr, x_stride, first, count, n, N, quad, 1)
    x2 = _rows(x_ptr, x_stride, first, count, n, N, quad, 2)
    x3 = _rows(x_ptr, x_stride, first, count, n, N, quad, 3)

    s0 = _row_codes(x0, codes_ptr, codes_stride, first, count, n, quad, 0)
    s1 = _row_codes(x1, codes_ptr, codes_stride, first, count, n, quad, 1)
    s2 = _row_codes(x2, codes_ptr, codes_stride, first, count, n, quad, 2)
    s3 = _row_codes(x3, codes_ptr, codes_stride, first, count, n, quad, 3)
    scales = tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (BLOCK,))
    row = tl.arange(0, BLOCK)
    t = (first + row).to(tl.int64)
    target = scale_ptr + block_n * scale_stride_g + t * scale_stride_t
    tl.store(target, scales, mask=row < count)

    low = tl.maximum(magnitude_bits(x0), magnitude_bits(x1))
    high = tl.maximum(magnitude_bits(x2), magnitude_bits(x3))
    scale = scale_from_bits(tl.max(tl.maximum(low, high), axis=0), E4M3_LARGEST, True)
    target = transposed_scale_ptr + group.to(tl.int64) * transposed_scale_stride
    tl.store(target + n, scale, mask=n < N)
    scale = scale[None, :]
    words = e4m3_word(
        quotient(x0, scale, True),
        quotient(x1, scale, True),
        quotient(x2, scale, True),
        quotient(x3, scale, True),
    )
    target = transposed_ptr + group.to(tl.int64) * BLOCK
    store_quads(target, transposed_stride, n, quad, words, count)


def quantize_gradient(
    dy_TN: torch.Tensor, token_groups: torch.Tensor, *, plain: bool = False
) -> GradientCodes:
    """Both operands of the backward GEMMs from one read of BF16 dy [T, N].

    `token_groups`: int32 [groups, 2] on the device, covering every row once. plain: the Triton
    kernel, which Triton's interpreter can run; the same bytes.
    """
    T, N = dy_TN.shape
    assert dy_TN.stride(1) == 1 and token_groups.dtype == torch.int32
    groups, Np, device = token_groups.shape[0], padded(N), dy_TN.device
    codes = torch.empty((T, Np), dtype=torch.float8_e4m3fn, device=device)
    scale = empty_activation_scale(T, N, device)
    transposed = torch.empty((Np, groups * BLOCK), dtype=torch.float8_e4m3fn, device=device)
    transposed_scale = torch.empty((groups, N), dtype=torch.float32, device=device)
    if groups:
        strides = (
            dy_TN.stride(0), codes.stride(0), scale.stride(0), scale.stride(1),
            transposed.stride(0), transposed_scale.stride(0),
        )  # fmt: skip
        if NATIVE.value and not plain:
            launch(quantize_gradient_kernel, (Np // BLOCK, groups),
                dy_TN, token_groups, codes, scale, transposed, transposed_scale, *strides, N,
                BLOCK=BLOCK, num_warps=WARPS, maxnreg=REGISTERS, **NUMERIC_OPTIONS,
            )  # fmt: skip
        else:
            launch(_quantize_gradient_kernel, (Np // BLOCK, groups),
                dy_TN, token_groups, codes.view(torch.uint8), scale, transposed.view(torch.uint8),
                transposed_scale, *strides, N, QUADS=QUADS, BLOCK=BLOCK, num_warps=WARPS,
                **NUMERIC_OPTIONS,
            )  # fmt: skip
    return GradientCodes(codes, scale, transposed, transposed_scale)


def quantize_silu_mul_gradient(
    dy_TF: torch.Tensor, gate_TF: torch.Tensor, up_TF: torch.Tensor, token_groups: torch.Tensor
) -> GradientCodes:
    """`quantize_gradient` of the gradient of (gate, up) of SiLU(gate) * up, from dy BF16 [T, F].

    Two parts of ceil128(F) columns, each padded with zero codes, as the fused weight stores them:
    codes [T, 2 * ceil128(F)], transposed codes [2 * ceil128(F), 128 * groups]. The values are those
    of `silu_mul_backward`, but are never written in BF16.
    """
    T, F = gate_TF.shape
    groups, device = token_groups.shape[0], gate_TF.device
    width = padded(F)
    if not NATIVE.value:
        both = torch.zeros((T, 2 * width), dtype=torch.bfloat16, device=device)
        silu_mul_backward(dy_TF, gate_TF, up_TF, both[:, :F], both[:, width : width + F])
        return quantize_gradient(both, token_groups)
    assert dy_TF.stride(1) == gate_TF.stride(1) == up_TF.stride(1) == 1
    codes = torch.empty((T, 2 * width), dtype=torch.float8_e4m3fn, device=device)
    scale = empty_activation_scale(T, 2 * width, device)
    shape = (2 * width, groups * BLOCK)
    transposed = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    transposed_scale = torch.empty((groups, 2 * width), dtype=torch.float32, device=device)
    if groups:
        launch(silu_mul_gradient_kernel, (width // BLOCK, groups),
            dy_TF, gate_TF, up_TF, token_groups, codes, scale, transposed, transposed_scale,
            dy_TF.stride(0), gate_TF.stride(0), up_TF.stride(0), codes.stride(0), scale.stride(0),
            scale.stride(1), transposed.stride(0), transposed_scale.stride(0), F,
            STRIP=STRIP, BLOCK=BLOCK, num_warps=WARPS, maxnreg=SILU_REGISTERS, **NUMERIC_OPTIONS,
        )  # fmt: skip
    return GradientCodes(codes, scale, transposed, transposed_scale)
