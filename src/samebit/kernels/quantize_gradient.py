"""Quantise along tokens for the weight gradient: output gradients (both layouts) and saved codes.

A token group is at most 128 consecutive rows; a table int32 [groups, 2] holds (first row, rows).
Groups start at each segment's first token and never span two segments. The transposed codes are
[features, 128 * groups], each group padded with zero codes to 128 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK
from samebit.kernels.quantize_common import (
    E4M3_LARGEST,
    NUMERIC_OPTIONS,
    block_codes,
    e4m3_code,
    empty_activation_scale,
    magnitude_bits,
    padded,
    quotient,
    scale_from_bits,
)

ROWS = 32
"""Tokens per step of a program; a 32-byte sector of the transposed codes."""
WARPS = 4


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
def _token_codes(x, scale, rows):
    """Codes [features, tokens] under one scale per feature; tokens outside the group are zero."""
    # A NaN scale would turn the zero padding into NaN codes.
    return tl.where(rows[None, :], e4m3_code(quotient(x, scale[:, None])), 0)


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block_n = tl.program_id(0)
    group = tl.program_id(1)
    first = tl.load(groups_ptr + 2 * group)
    count = tl.load(groups_ptr + 2 * group + 1)
    n = block_n * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for start in range(0, BLOCK, ROWS):
        row = start + tl.arange(0, ROWS)
        rows = row < count
        t = (first + row).to(tl.int64)
        inside = rows[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + t[:, None] * x_stride + n[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32)
        bits = magnitude_bits(x)
        largest = tl.maximum(largest, bits)
        codes, scale = block_codes(x, tl.max(bits, axis=1, keep_dims=True))
        tl.store(codes_ptr + t[:, None] * codes_stride + n[None, :], codes, mask=rows[:, None])
        scale_row = tl.reshape(scale, (ROWS,))
        tl.store(scale_ptr + t * scale_stride_t + block_n * scale_stride_g, scale_row, mask=rows)

    scale = scale_from_bits(tl.max(largest, axis=0), E4M3_LARGEST)
    scales = transposed_scale_ptr + group.to(tl.int64) * transposed_scale_stride
    tl.store(scales + n, scale, mask=n < N)
    # The second read of the tile comes from cache. It is transposed before the arithmetic: one
    # thread then has many tokens of few features, so few scales to invert.
    target = (
        transposed_ptr + n.to(tl.int64)[:, None] * transposed_stride + group.to(tl.int64) * BLOCK
    )
    for start in range(0, BLOCK, ROWS):
        row = start + tl.arange(0, ROWS)
        rows = row < count
        t = (first + row).to(tl.int64)
        inside = rows[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + t[:, None] * x_stride + n[None, :], mask=inside, other=0.0)
        tl.store(target + row[None, :], _token_codes(tl.trans(x).to(tl.float32), scale, rows))


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block_k = tl.program_id(0)
    group = tl.program_id(1)
    first = tl.load(groups_ptr + 2 * group)
    count = tl.load(groups_ptr + 2 * group + 1)
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for start in range(0, BLOCK, ROWS):
        row = start + tl.arange(0, ROWS)
        t = (first + row).to(tl.int64)
        rows = row < count
        address = codes_ptr + t[:, None] * codes_stride + k[None, :]
        codes = tl.load(address, mask=rows[:, None], other=0.0)
        address = scale_ptr + t * scale_stride_t + block_k * scale_stride_g
        x = codes.to(tl.float32) * tl.load(address, mask=rows, other=1.0)[:, None]
        largest = tl.maximum(largest, magnitude_bits(x))
    scale = scale_from_bits(tl.max(largest, axis=0), E4M3_LARGEST)
    scales = transposed_scale_ptr + group.to(tl.int64) * transposed_scale_stride
    tl.store(scales + k, scale, mask=k < K)
    target = (
        transposed_ptr + k.to(tl.int64)[:, None] * transposed_stride + group.to(tl.int64) * BLOCK
    )
    for start in range(0, BLOCK, ROWS):
        row = start + tl.arange(0, ROWS)
        t = (first + row).to(tl.int64)
        rows = row < count
        address = codes_ptr + t[:, None] * codes_stride + k[None, :]
        codes = tl.load(address, mask=rows[:, None], other=0.0)
        address = scale_ptr + t * scale_stride_t + block_k * scale_stride_g
        x = tl.trans(codes).to(tl.float32) * tl.load(address, mask=rows, other=1.0)[None, :]
        tl.store(target + row[None, :], _token_codes(x, scale, rows))


def quantize_gradient(
    dy_TN: torch.Tensor, token_groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both operands of the backward GEMMs from one read of BF16 dy [T, N].

    `token_groups`: int32 [groups, 2] on the device, covering every row once. Returns
    - codes e4m3 [T, ceil128(N)] and scales FP32 [T, ceil(N/128)] (group-major storage), along N;
    - transposed codes e4m3 [ceil128(N), 128*groups] and scales FP32 [groups, N], along tokens.
    """
    T, N = dy_TN.shape
    assert dy_TN.stride(1) == 1 and token_groups.dtype == torch.int32
    groups, Np, device = token_groups.shape[0], padded(N), dy_TN.device
    codes = torch.empty((T, Np), dtype=torch.float8_e4m3fn, device=device)
    scale = empty_activation_scale(T, N, device)
    transposed = torch.empty((Np, groups * BLOCK), dtype=torch.float8_e4m3fn, device=device)
    transposed_scale = torch.empty((groups, N), dtype=torch.float32, device=device)
    if groups:
        _quantize_gradient_kernel[(Np // BLOCK, groups)](
            dy_TN,
            token_groups,
            codes.view(torch.uint8),
            scale,
            transposed.view(torch.uint8),
            transposed_scale,
            dy_TN.stride(0),
            codes.stride(0),
            scale.stride(0),
            scale.stride(1),
            transposed.stride(0),
            transposed_scale.stride(0),
            N,
            ROWS=ROWS,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **NUMERIC_OPTIONS,
        )
    return codes, scale, transposed, transposed_scale


def requantize_tokens(
    codes_TK: torch.Tensor, scale_TG: torch.Tensor, token_groups: torch.Tensor, K: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transposed codes e4m3 [ceil128(K), 128*groups], scales FP32 [groups, K] of saved activations.

    The values are fl(code * scale) in FP32, quantised along tokens within each token group; `K` is
    the unpadded width.
    """
    groups, Kp, device = token_groups.shape[0], codes_TK.shape[1], codes_TK.device
    assert Kp == padded(K) and token_groups.dtype == torch.int32
    transposed = torch.empty((Kp, groups * BLOCK), dtype=torch.float8_e4m3fn, device=device)
    transposed_scale = torch.empty((groups, K), dtype=torch.float32, device=device)
    if groups:
        _requantize_tokens_kernel[(Kp // BLOCK, groups)](
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
            ROWS=ROWS,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **NUMERIC_OPTIONS,
        )
    return transposed, transposed_scale
