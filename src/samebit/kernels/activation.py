"""SiLU(gate) * up, forward, backward and fused with quantisation.

y = bf16(gate / (1 + exp(-gate)) * up) in FP32; codes come from the BF16 y. The division is the
hardware's fast one (2 ulp, and deterministic), as the exponential is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.formats import BLOCK, Format
from samebit.kernels.launch import cdiv, launch
from samebit.kernels.norm import ROW_INT8, code_mode
from samebit.kernels.quantize_common import (
    NUMERIC_OPTIONS,
    amax_bits,
    block_codes,
    empty_activation_scale,
    gradient_sigmoid,
    padded,
    round_to_bf16,
    widened_once,
)
from samebit.kernels.quantize_row import quantize_rows

ROWS = 32
WARPS = 4
FEW = 16
"""Tokens that share a program's rows badly: up to so many, the forward takes 8 at a time."""


@triton.jit
def _silu_mul_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    codes_ptr,
    scale_ptr,
    gate_stride,
    up_stride,
    codes_stride,
    scale_stride_t,
    scale_stride_g,
    T,
    F,
    STORE: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = g * BLOCK + tl.arange(0, BLOCK)
    rows = t < T
    inside = rows[:, None] & (f < F)[None, :]
    gate = tl.load(gate_ptr + t[:, None] * gate_stride + f[None, :], mask=inside, other=0.0)
    up = tl.load(up_ptr + t[:, None] * up_stride + f[None, :], mask=inside, other=0.0)
    gate = gate.to(tl.float32)
    denominator = 1.0 + tl.exp(-gate)
    y = round_to_bf16((gate / denominator) * up.to(tl.float32))
    if STORE:
        tl.store(y_ptr + t[:, None] * F + f[None, :], y, mask=inside)
    if CODES:
        y = widened_once(y)
        codes, scale = block_codes(y, amax_bits(y, 1), True)
        tl.store(codes_ptr + t[:, None] * codes_stride + f[None, :], codes, mask=rows[:, None])
        address = scale_ptr + t * scale_stride_t + g * scale_stride_g
        tl.store(address, tl.reshape(scale, (ROWS,)), mask=rows)


@triton.jit
def _silu_mul_backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    T,
    F,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (t < T)[:, None] & (f < F)[None, :]
    gate = tl.load(gate_ptr + t[:, None] * gate_stride + f[None, :], mask=inside, other=0.0)
    up = tl.load(up_ptr + t[:, None] * up_stride + f[None, :], mask=inside, other=0.0)
    dy = tl.load(dy_ptr + t[:, None] * F + f[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = gate.to(tl.float32)
    sigmoid = gradient_sigmoid(gate)
    dup = dy * (gate * sigmoid)
    dgate = (dy * up.to(tl.float32)) * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    tl.store(dgate_ptr + t[:, None] * dgate_stride + f[None, :], round_to_bf16(dgate), mask=inside)
    tl.store(dup_ptr + t[:, None] * dup_stride + f[None, :], round_to_bf16(dup), mask=inside)


def _forward(
    gate_TF: torch.Tensor, up_TF: torch.Tensor, store: bool, blocks: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    T, F = gate_TF.shape
    assert up_TF.shape == (T, F) and gate_TF.stride(1) == 1 and up_TF.stride(1) == 1
    device = gate_TF.device
    y = torch.empty((T, F), dtype=torch.bfloat16, device=device) if store else None
    codes = scale = None
    if blocks:
        codes = torch.empty((T, padded(F)), dtype=torch.float8_e4m3fn, device=device)
        scale = empty_activation_scale(T, F, device)
    if T == 0:
        return y, codes, scale
    rows = 8 if T <= FEW else ROWS
    launch(
        _silu_mul_kernel,
        (padded(F) // BLOCK, cdiv(T, rows)),
        gate_TF,
        up_TF,
        gate_TF if y is None else y,
        gate_TF if codes is None else codes.view(torch.uint8),
        gate_TF if scale is None else scale,
        gate_TF.stride(0),
        up_TF.stride(0),
        padded(F),
        0 if scale is None else scale.stride(0),
        0 if scale is None else scale.stride(1),
        T,
        F,
        STORE=store,
        CODES=blocks,
        ROWS=rows,
        BLOCK=BLOCK,
        num_warps=WARPS,
        **NUMERIC_OPTIONS,
    )
    return y, codes, scale


def silu_mul(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """BF16 SiLU(gate) * up [T, F]; both inputs BF16, their rows may be views of a fused buffer."""
    y, _, _ = _forward(gate_TF, up_TF, True, False)
    assert y is not None
    return y


def silu_mul_quantize(
    gate_TF: torch.Tensor,
    up_TF: torch.Tensor,
    fmt: Format,
    *,
    per_row: bool = False,
    keep_output: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(y or None, codes [T, ceil128(F)], scale) of SiLU(gate) * up, equal to the unfused chain.

    Scales are [T, ceil(F/128)] (group-major storage) for 1x128 groups, [T] per row. A row's scale
    needs the whole row, so the per-row forms write y first.
    """
    mode = code_mode(fmt, per_row)
    if per_row or mode == ROW_INT8.value:
        y, _, _ = _forward(gate_TF, up_TF, True, False)
        assert y is not None
        codes, scale = quantize_rows(y, fmt)
        return (y if keep_output else None), codes, scale
    y, codes, scale = _forward(gate_TF, up_TF, keep_output, True)
    assert codes is not None and scale is not None
    return y, codes, scale


def silu_mul_backward(
    dy_TF: torch.Tensor,
    gate_TF: torch.Tensor,
    up_TF: torch.Tensor,
    dgate_TF: torch.Tensor | None = None,
    dup_TF: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) BF16 [T, F] from dy BF16; `dgate_TF` and `dup_TF` may be views to write into."""
    T, F = gate_TF.shape
    assert dy_TF.is_contiguous() and gate_TF.stride(1) == 1 and up_TF.stride(1) == 1
    if dgate_TF is None:
        dgate_TF = torch.empty((T, F), dtype=torch.bfloat16, device=dy_TF.device)
    if dup_TF is None:
        dup_TF = torch.empty((T, F), dtype=torch.bfloat16, device=dy_TF.device)
    if T == 0:
        return dgate_TF, dup_TF
    launch(
        _silu_mul_backward_kernel,
        (padded(F) // BLOCK, cdiv(T, ROWS)),
        dy_TF,
        gate_TF,
        up_TF,
        dgate_TF,
        dup_TF,
        gate_TF.stride(0),
        up_TF.stride(0),
        dgate_TF.stride(0),
        dup_TF.stride(0),
        T,
        F,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=WARPS,
        **NUMERIC_OPTIONS,
    )
    return dgate_TF, dup_TF
