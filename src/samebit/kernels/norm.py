"""RMSNorm, with the residual add before it and the quantisation after it fused where wanted.

rstd = 1/sqrt(mean(x^2) + eps) in FP32, y = bf16((x * rstd) * w); the residual sum is rounded to
BF16 before the norm, and codes come from the BF16 y, so fused and unfused chains agree bit for bit.
One program owns one row, and sums run over a tree that is written out and depends on the width
alone, so a row's bits are the same whatever the number of rows and whatever is fused.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK, INT8, Format
from samebit.kernels.launch import cdiv, launch, next_power_of_2
from samebit.kernels.quantize_common import (
    NUMERIC_OPTIONS,
    amax_bits,
    block_codes,
    empty_activation_scale,
    fold_rows,
    padded,
    pair_sum,
    round_to_bf16,
    tree_sum,
    widened,
    widened_once,
)
from samebit.kernels.quantize_row import row_codes

NO_CODES = tl.constexpr(0)
BLOCK_E4M3 = tl.constexpr(1)
ROW_E4M3 = tl.constexpr(2)
ROW_INT8 = tl.constexpr(3)
REGISTERS = None


@dataclass(frozen=True)
class RowTile:
    """The tile of one row: `groups` x 128 elements (a power of two) and its warps."""

    groups: int
    num_warps: int


@functools.lru_cache
def row_tile(width: int) -> RowTile:
    """The tile for rows of `width`; `groups` decides the sum's tree and so the bits."""
    groups = next_power_of_2(cdiv(width, BLOCK))
    # At most four warps: with more, the first folds of a row would cross warps.
    return RowTile(groups, min(max(groups // 8, 1), 4))


@triton.jit
def row_sum(x, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of a row tile [groups, 128], a scalar: rows folded down to 16, then adjacent pairs.

    Folding first keeps the early steps in one thread's registers for the usual layouts.
    """
    if GROUPS > 16:
        x = fold_rows(x, 16)
    return pair_sum(tree_sum(tl.reshape(x, (1, x.shape[0] * BLOCK)), 8))


@triton.jit
def row_rstd(x, K, eps, WHOLE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """1/sqrt(mean(x^2) + eps), a scalar, of one row tile [groups, 128] padded with zeros.

    WHOLE: there is no padding.
    """
    total = row_sum(x * x, GROUPS, BLOCK)
    if WHOLE:
        # K is a power of two: the same quotient.
        mean = total * (1.0 / (GROUPS * BLOCK))
    else:
        mean = tl.div_rn(total, tl.cast(K, tl.float32))
    root = tl.sqrt_rn(mean + tl.cast(eps, tl.float32))
    return tl.div_rn(tl.full((), 1.0, tl.float32), root)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    K,
    K_PADDED,
    eps,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUPS)
    k = g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # A constant where the tile has no padding: then no load is masked and nothing is selected.
    inside = (k < K) | WHOLE
    padding = (k < K_PADDED) | WHOLE
    x = tl.load(x_ptr + t * x_stride + k, mask=inside, other=0.0)
    # Here, not where it is used: the sum's barriers would stand between the two reads.
    weight = tl.load(weight_ptr + k, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + t * residual_stride + k, mask=inside, other=0.0)
        x = round_to_bf16(widened_once(x) + widened_once(residual))
        tl.store(sum_ptr + t * K + k, x, mask=inside)
    rstd = row_rstd(widened(x), K, eps, WHOLE, GROUPS, BLOCK)
    y = round_to_bf16((widened(x) * rstd) * widened_once(weight))
    if STORE:
        tl.store(y_ptr + t * K + k, y, mask=inside)
    if CODES != NO_CODES:
        # Without the mask a NaN rstd would leak into the zero padding.
        if not WHOLE:
            y = tl.where(inside, y, 0.0)
        y = widened_once(y)
        bits = amax_bits(y, 1)
        if CODES == BLOCK_E4M3:
            codes, scale = block_codes(y, bits, True)
            address = scale_ptr + t * scale_stride_t + g * scale_stride_g
            tl.store(address, tl.reshape(scale, (GROUPS,)), mask=g * BLOCK < K)
        else:
            bits = tl.max(bits, axis=0, keep_dims=True)
            codes, scale = row_codes(y, bits, CODES == ROW_INT8, True)
            tl.store(scale_ptr + t * scale_stride_t + tl.arange(0, 1), tl.reshape(scale, (1,)))
        tl.store(codes_ptr + t * codes_stride + k, codes, mask=padding)


@dataclass(frozen=True)
class NormResult:
    """What a norm wrote: BF16 `y` [T, K]; `residual` sum [T, K]; codes and scales of `y`.

    Fields that were not asked for are None. Codes are [T, ceil128(K)]; scales [T, ceil(K/128)]
    (group-major storage) for blocks, [T] for rows.
    """

    y: torch.Tensor | None
    residual: torch.Tensor | None
    codes: torch.Tensor | None
    scale: torch.Tensor | None


def _code_buffers(
    mode: int, T: int, K: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.int8 if mode == ROW_INT8.value else torch.float8_e4m3fn
    codes = torch.empty((T, padded(K)), dtype=dtype, device=device)
    if mode == BLOCK_E4M3.value:
        return codes, empty_activation_scale(T, K, device)
    return codes, torch.empty((T,), dtype=torch.float32, device=device)


def _launch(
    x_TK: torch.Tensor,
    weight_K: torch.Tensor,
    eps: float,
    residual_TK: torch.Tensor | None,
    store: bool,
    mode: int,
) -> NormResult:
    T, K = x_TK.shape
    assert x_TK.stride(1) == 1 and weight_K.shape == (K,) and weight_K.is_contiguous()
    device, tile = x_TK.device, row_tile(K)
    y = torch.empty((T, K), dtype=torch.bfloat16, device=device) if store else None
    total = codes = scale = None
    if residual_TK is not None:
        assert residual_TK.shape == x_TK.shape and residual_TK.stride(1) == 1
        total = torch.empty((T, K), dtype=torch.bfloat16, device=device)
    if mode != NO_CODES.value:
        codes, scale = _code_buffers(mode, T, K, device)
    result = NormResult(y, total, codes, scale)
    if T == 0:
        return result
    unused = weight_K
    launch(
        _rms_norm_kernel,
        (T,),
        x_TK,
        unused if residual_TK is None else residual_TK,
        weight_K,
        unused if total is None else total,
        unused if y is None else y,
        unused if codes is None else codes.view(torch.int8 if mode == 3 else torch.uint8),
        unused if scale is None else scale,
        x_TK.stride(0),
        0 if residual_TK is None else residual_TK.stride(0),
        padded(K),
        0 if scale is None else scale.stride(0),
        scale.stride(1) if scale is not None and scale.dim() == 2 else 0,
        K,
        padded(K),
        eps,
        ADD=residual_TK is not None,
        STORE=store,
        CODES=mode,
        WHOLE=tile.groups * BLOCK == K,
        GROUPS=tile.groups,
        BLOCK=BLOCK,
        num_warps=tile.num_warps,
        maxnreg=REGISTERS,
        **NUMERIC_OPTIONS,
    )
    return result


def code_mode(fmt: Format | None, per_row: bool) -> int:
    """The kernel's CODES constant for a format (None: no codes) and a granularity."""
    if fmt is None:
        return NO_CODES.value
    if fmt is INT8:
        assert per_row, "INT8 codes are per row"
        return ROW_INT8.value
    return ROW_E4M3.value if per_row else BLOCK_E4M3.value


def rms_norm(x_TK: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """BF16 y [T, K] of BF16 x [T, K] (rows may be strided) and BF16 gain [K]."""
    y = _launch(x_TK, weight_K, eps, None, True, NO_CODES.value).y
    assert y is not None
    return y


def add_rms_norm(
    x_TK: torch.Tensor, residual_TK: torch.Tensor, weight_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, sum), both BF16 [T, K]: sum = bf16(x + residual), y = RMSNorm(sum)."""
    result = _launch(x_TK, weight_K, eps, residual_TK, True, NO_CODES.value)
    assert result.y is not None and result.residual is not None
    return result.y, result.residual


def rms_norm_quantize(
    x_TK: torch.Tensor,
    weight_K: torch.Tensor,
    eps: float,
    fmt: Format,
    *,
    residual_TK: torch.Tensor | None = None,
    per_row: bool = False,
    keep_output: bool = False,
) -> NormResult:
    """RMSNorm (after the residual add, if given) and the codes of its BF16 output in one pass.

    `fmt` is E4M3 or INT8; `per_row` selects one scale per token instead of 1x128 groups (INT8 is
    always per token). `keep_output` also stores y. Equal to the unfused chain bit for bit.
    """
    return _launch(x_TK, weight_K, eps, residual_TK, keep_output, code_mode(fmt, per_row))
