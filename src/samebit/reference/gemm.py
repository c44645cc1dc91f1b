"""Linear products whose rows do not know each other: FP8 and INT8 exact, BF16 at fixed shapes.

FP8: products of e4m3 codes are multiples of 2^-18 below 2^18, so the FP64 sum of a promotion block is
exact in any order; blocks are then folded in K order with one rounding each:
acc = fl(acc + fl(dot * scale)). INT8: int32 sums are exact. BF16 and FP32 go through the library matmul at
row counts from a small fixed set, over which `samebit check` proves row-invariance on this machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from samebit.formats import BLOCK
from samebit.operand import Operand, QuantizedWeight
from samebit.reference.quantize import (
    dequantize,
    dequantize_weight,
    quantize_activation,
    quantize_tokens,
    rescale_tokens,
)
from samebit.spec import Backward, Gemm

ROW_STEP = 16
"""Library matmuls see row counts that are multiples of this, at least one step."""
ROW_LIMIT = 512
"""... and at most this many rows a call: a finite set of shapes, all of them checkable."""
_EXACT_ROWS = 256
_EXACT_COLUMNS = 4096
"""Tile of FP64 work per pass. Changes no bit (block sums are exact)."""


def matmul_rows(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """x @ w.T through the library with rows padded to ROW_STEP, at most ROW_LIMIT a call.

    w: [N, K], or what `packed` made of it.
    """
    outs = []
    for chunk in x_TK.split(ROW_LIMIT) if x_TK.shape[0] > ROW_LIMIT else (x_TK,):
        rows = chunk.shape[0]
        padded = -(-rows // ROW_STEP) * ROW_STEP
        if padded != rows:
            chunk = F.pad(chunk, (0, 0, 0, padded - rows))
        if w_NK.is_mkldnn:
            out = torch.ops.mkldnn._linear_pointwise(chunk, w_NK, None, "none", [], "")
        else:
            out = F.linear(chunk, w_NK)
        outs.append(out[:rows])
    return outs[0] if len(outs) == 1 else torch.cat(outs)


BF16_OPERANDS = torch.__version__.split(".")[:2] == ["2", "13"]
"""Whether FP32 products of BF16 values may run on BF16 operands: where that was found row-invariant.

With torch 2.11 it is not (K 576, N 2,048, fewer than 96 rows); its plain FP32 product is.
"""


def matmul_rows_fp32(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """`matmul_rows` of BF16 values held as FP32: FP32 sums, returned unrounded."""
    with _bf16_operands():
        return matmul_rows(x_TK, w_NK)


@contextmanager
def _bf16_operands() -> Iterator[None]:
    """Let oneDNN take FP32 operands as BF16, which changes none that holds BF16 values.

    Where the processor multiplies BF16 that is twice as fast; elsewhere it is the FP32 product, and so
    it is without BF16_OPERANDS.
    """
    if not BF16_OPERANDS:
        yield
        return
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    kept = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = kept


def packed(w_NK: torch.Tensor) -> torch.Tensor:
    """The weight in the order that the library would bring it to at every call, where there is one."""
    if w_NK.device.type != "cpu" or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return w_NK
    if w_NK.dtype == torch.float32 and not BF16_OPERANDS:
        return w_NK
    with _bf16_operands():
        return torch.ops.mkldnn._reorder_linear_weight(w_NK.contiguous(), 2 * ROW_STEP)


def packed_fp32(weight: QuantizedWeight) -> torch.Tensor:
    """A BF16 weight for `matmul_rows_fp32` (kept per version): BF16 products would come back rounded."""
    return weight.derived("packed_fp32", lambda: packed(weight.codes.float()))


def gemm(
    lhs: Operand, weight: QuantizedWeight, spec: Gemm, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """lhs [T, K] x weight [N, K]^T -> BF16 [T, N]; bias (BF16 values) is added in FP32 before rounding."""
    if spec.library:
        return F.linear(lhs.codes, weight.codes, bias_N)
    if spec.rhs.block is None:
        return _bf16(lhs.codes, weight, bias_N)
    if spec.rhs.format in ("int8", "int4"):
        product = _int8(lhs, weight)
    elif spec.rhs.block == (BLOCK, BLOCK):
        product = _fp8_block(lhs, weight)
    else:
        product = _fp8_row(lhs, weight, spec.promote)
    if bias_N is not None:
        product = product + bias_N.float()
    return product.bfloat16()


def _bf16(x_TK: torch.Tensor, weight: QuantizedWeight, bias_N: torch.Tensor | None) -> torch.Tensor:
    if bias_N is None:
        return matmul_rows(x_TK, weight.derived("packed", lambda: packed(weight.codes)))
    # the bias needs the FP32 sum
    return (matmul_rows_fp32(x_TK.float(), packed_fp32(weight)) + bias_N.float()).bfloat16()


def _expanded(weight: QuantizedWeight, width: int) -> torch.Tensor:
    """FP64 [K / width, width, N] of the codes of the logical rows (kept per version)."""

    def make() -> torch.Tensor:
        codes = weight.codes[weight.logical_rows()].float().double()
        return codes.view(codes.shape[0], -1, width).permute(1, 2, 0).contiguous()

    return weight.derived(f"fp64/{width}", make)


def _fp8_block(lhs: Operand, weight: QuantizedWeight) -> torch.Tensor:
    w_BKN = _expanded(weight, BLOCK)
    assert lhs.scale is not None and weight.scale is not None

    def column_scales() -> torch.Tensor:
        assert weight.scale is not None
        return weight.scale.t()[:, weight.logical_rows() // BLOCK].contiguous()

    sw_BN = weight.derived("column_scales", column_scales)
    x_TK, tokens, features = lhs.codes.float().double(), lhs.codes.shape[0], w_BKN.shape[2]
    out_TN = torch.empty(tokens, features, device=x_TK.device)
    for t in range(0, tokens, _EXACT_ROWS):
        rows = slice(t, min(t + _EXACT_ROWS, tokens))
        for n in range(0, features, _EXACT_COLUMNS):
            columns = slice(n, min(n + _EXACT_COLUMNS, features))
            w, sw = w_BKN[:, :, columns], sw_BN[:, columns]
            _fold_blocks(x_TK[rows], lhs.scale[rows], w, sw, out_TN[rows, columns])
    return out_TN


def _fold_blocks(
    x_TK: torch.Tensor,
    sx_TB: torch.Tensor,
    w_BKN: torch.Tensor,
    sw_BN: torch.Tensor,
    acc_TN: torch.Tensor,
) -> None:
    """acc = fl(acc + fl(fl(dot) * fl(sx * sw))) of one tile, block after block, from acc = 0."""
    dot, single, scale = _workspace(acc_TN.shape[0], acc_TN.shape[1], acc_TN.device)
    for b in range(w_BKN.shape[0]):
        torch.mm(x_TK[:, b * BLOCK : (b + 1) * BLOCK], w_BKN[b], out=dot)
        torch.mul(sx_TB[:, b, None], sw_BN[b], out=scale)
        single.copy_(dot).mul_(scale)
        if b:
            acc_TN.add_(single)
        else:
            acc_TN.copy_(single)


_BUFFERS = threading.local()


def _workspace(
    rows: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(FP64, FP32, FP32) [rows, columns], reused: fresh megabytes cost a page fault each 4 KB."""
    held: dict[torch.device, tuple[torch.Tensor, ...]] = vars(_BUFFERS).setdefault("held", {})
    if device not in held:
        size = _EXACT_ROWS * _EXACT_COLUMNS
        held[device] = tuple(
            torch.empty(size, dtype=dtype, device=device)
            for dtype in (torch.float64, torch.float32, torch.float32)
        )
    dot, single, scale = (x[: rows * columns].view(rows, columns) for x in held[device])
    return dot, single, scale


def _fp8_row(lhs: Operand, weight: QuantizedWeight, promote: int) -> torch.Tensor:
    """acc = acc + dot over `promote` elements of K, in order; one multiply by fl(sx * sw) at the end."""
    assert lhs.scale is not None and weight.scale is not None
    w_BKN = _expanded(weight, BLOCK)
    x_TK = lhs.codes.float().double()
    acc = torch.zeros(x_TK.shape[0], w_BKN.shape[2], device=x_TK.device)
    step = promote // BLOCK
    for first in range(0, w_BKN.shape[0], step):
        w = w_BKN[first : first + step].flatten(0, 1)
        dot = x_TK[:, first * BLOCK : first * BLOCK + w.shape[0]] @ w
        acc = acc + dot.float()
    return acc * (lhs.scale * weight.scale[weight.logical_rows()].t())


def _int8(lhs: Operand, weight: QuantizedWeight) -> torch.Tensor:
    assert lhs.scale is not None and weight.scale is not None
    rows = weight.logical_rows()
    w_KN = weight.derived("int8_kn", lambda: weight.codes[rows].t())
    dot = torch._int_mm(lhs.codes.contiguous(), w_KN)
    return dot.float() * (lhs.scale * weight.scale[rows].t())


def input_grad(dy_TN: torch.Tensor, weight: QuantizedWeight, backward: Backward) -> torch.Tensor:
    """dX = dY W, BF16 [T, K]. FP8: dY in 1x128 groups aligned to the weight's row blocks.

    The operands are those of the plan; the sum is FP32 over their dequantised values (order free:
    gradients carry no bit contract across splits, only determinism).
    """
    spec = backward.input_grad
    if spec.lhs.block is None:
        w_NK = weight.codes if weight.scale is None else dequantize_weight(weight).bfloat16()
        return dy_TN @ w_NK
    padded = torch.zeros(dy_TN.shape[0], weight.codes.shape[0], dtype=dy_TN.dtype)
    rows = weight.logical_rows()
    padded = padded.to(dy_TN.device).index_copy_(1, rows, dy_TN)
    dy = dequantize(quantize_activation(padded, spec.lhs))[:, rows]
    return (dy @ dequantize_weight(weight)).bfloat16()


def weight_grad(
    dy_TN: torch.Tensor,
    saved: Operand,
    token_groups: torch.Tensor,
    backward: Backward,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """dW = dY^T X, FP32 [N, K]. FP8: dY in 128x1 token groups; X from its saved codes, 128x1 or 128x128."""
    spec = backward.weight_grad
    dy, x = dy_TN.float(), dequantize(saved)
    if spec.lhs.block is not None:
        dy = quantize_tokens(dy, token_groups, spec.lhs)
        if spec.rhs.block == (BLOCK, BLOCK) and saved.precision.block == (1, BLOCK):
            x = rescale_tokens(saved, token_groups)
        else:
            x = quantize_tokens(x, token_groups, spec.rhs)
    elif saved.scale is not None:
        x = x.bfloat16().float()
    dw = dy.t() @ x
    return dw if into is None else into.add_(dw)
