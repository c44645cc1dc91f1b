"""The operator set's linear part on Hopper: quantisers and the three GEMMs of a linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from samebit.formats import BLOCK, get_format
from samebit.kernels._ops_elementwise import silu_mul_backward
from samebit.kernels.dequantize import dequantize
from samebit.kernels.gemm_bf16 import bf16_gemm
from samebit.kernels.gemm_fp8_block import fp8_block_gemm
from samebit.kernels.gemm_fp8_row import fp8_row_gemm
from samebit.kernels.gemm_fp8_wgrad import fp8_block_wgrad
from samebit.kernels.gemm_int8 import int8_gemm
from samebit.kernels.quantize_activation import quantize_activation as quantize_groups
from samebit.kernels.quantize_gradient import (
    GradientCodes,
    quantize_gradient,
    quantize_silu_mul_gradient,
)
from samebit.kernels.quantize_row import quantize_rows
from samebit.kernels.quantize_saved import requantize_tokens, rescale_tokens
from samebit.kernels.quantize_weight import quantize_weight, transpose_codes
from samebit.operand import HeadCodes, Operand, QuantizedWeight, pad_to_block
from samebit.spec import Backward, Gemm, Precision

GROUPS = (1, BLOCK)
ROW = (1, 0)


def quantize_activation(x_TK: torch.Tensor, precision: Precision) -> Operand:
    """BF16 [T, K] as a GEMM operand; see the reference. Group scales are stored group-major."""
    features = x_TK.shape[1]
    if precision.block is None:
        assert x_TK.dtype == get_format(precision.format).dtype
        return Operand(x_TK.contiguous(), None, precision, features)
    fmt = get_format(precision.format)
    x_TK = x_TK.contiguous()
    if precision.block == GROUPS and fmt.name == "e4m3":
        codes, scale = quantize_groups(x_TK)
    elif precision.block == ROW:
        codes, scale_T = quantize_rows(x_TK, fmt)
        scale = scale_T[:, None]
    else:
        raise ValueError(
            f"the Hopper kernels cannot quantise activations as {precision}; use e4m3 in 1x128 groups, "
            "or e4m3 or int8 per token"
        )
    return Operand(codes, scale, precision, features)


def quantize_heads(x_SHD: torch.Tensor, precision: Precision) -> HeadCodes:
    """BF16 Q, K or V [S, heads, D] -> codes and one FP32 scale per token and head [S, heads]."""
    if precision.block != ROW or precision.format != "e4m3":
        raise ValueError(
            f"the Hopper attention kernels have no {precision} operands; use e4m3 with one scale per head"
        )
    rows_RD = x_SHD.reshape(-1, x_SHD.shape[-1])
    codes, scale_R = quantize_rows(rows_RD, get_format(precision.format))
    codes = codes[:, : rows_RD.shape[1]].contiguous()
    return HeadCodes(codes.view(x_SHD.shape), scale_R.view(x_SHD.shape[:2]))


def refresh_weight(weight: QuantizedWeight, master_NK: torch.Tensor) -> None:
    """Requantise `weight` in place from its FP32 master [N, K]; addresses never change."""
    assert master_NK.dtype == torch.float32 and master_NK.shape[0] == weight.out_features
    weight.version += 1
    if weight.scale is None:
        weight.codes.copy_(master_NK)
        return
    start = 0
    for rows, offset in zip(weight.rows, weight.padded_offsets, strict=True):
        part = master_NK[start : start + rows]
        codes = weight.codes[offset : offset + pad_to_block(rows)]
        if weight.precision.block == (BLOCK, BLOCK):
            first = offset // BLOCK
            quantize_weight(part, codes, weight.scale[first : first + codes.shape[0] // BLOCK])
        else:
            scale_N = weight.scale[offset : offset + rows, 0]
            quantize_rows(part, get_format(weight.precision.format), codes, scale_N)
        start += rows


def _logical_rows(weight: QuantizedWeight) -> torch.Tensor:
    return weight.kept("logical_rows", weight.logical_rows)


def gemm(
    lhs: Operand, weight: QuantizedWeight, spec: Gemm, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """lhs [T, K] x weight [N, K]^T -> BF16 [T, N], logical outputs; bias is added in FP32.

    Where a part that is not the last has padding rows, the product is made over all stored rows and
    gathered: a column's bits do not depend on its place.
    """
    if spec.library:
        return F.linear(lhs.codes, weight.codes, bias_N)
    if weight.scale is None:
        return bf16_gemm(lhs.codes, weight.codes, bias_N=bias_N)
    if weight.last_part_padded:
        return _scaled(lhs, weight, spec, weight.out_features, bias_N)
    return _stored(lhs, weight, spec, bias_N).index_select(1, _logical_rows(weight))


def gemm_parts(
    lhs: Operand, weight: QuantizedWeight, spec: Gemm, bias_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """`gemm` of a fused weight, one BF16 [T, rows] per named part: views of one buffer."""
    if spec.library or weight.scale is None or weight.last_part_padded:
        return gemm(lhs, weight, spec, bias_N).split(weight.rows, dim=1)
    whole = _stored(lhs, weight, spec, bias_N)
    parts = zip(weight.padded_offsets, weight.rows, strict=True)
    return tuple(whole[:, offset : offset + rows] for offset, rows in parts)


def _stored(
    lhs: Operand, weight: QuantizedWeight, spec: Gemm, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """The product over all stored rows, padding included."""
    stored = weight.codes.shape[0]
    if bias_N is not None:
        wide = torch.zeros(stored, dtype=bias_N.dtype, device=bias_N.device)
        bias_N = wide.index_copy_(0, _logical_rows(weight), bias_N)
    return _scaled(lhs, weight, spec, stored, bias_N)


def _scaled(
    lhs: Operand, weight: QuantizedWeight, spec: Gemm, n: int, bias_N: torch.Tensor | None
) -> torch.Tensor:
    assert lhs.scale is not None and weight.scale is not None
    x, w = lhs.codes, weight.codes
    if spec.rhs.block == (BLOCK, BLOCK):
        if spec.promote != BLOCK:
            raise ValueError(
                f"the Hopper FP8 block GEMM promotes every {BLOCK}, not {spec.promote}"
            )
        return fp8_block_gemm(x, lhs.scale, w, weight.scale, n=n, bias_N=bias_N)
    x_scale_T, w_scale_N = lhs.scale[:, 0], weight.scale[:, 0]
    if spec.rhs.format == "int8":
        return int8_gemm(x, x_scale_T, w, w_scale_N, n=n, bias_N=bias_N)
    return fp8_row_gemm(x, x_scale_T, w, w_scale_N, n=n, bias_N=bias_N, promote=spec.promote)


def input_grad(dy_TN: torch.Tensor, weight: QuantizedWeight, backward: Backward) -> torch.Tensor:
    """dX = dY W, BF16 [T, K]; FP8: dY in 1x128 groups aligned to the weight's row blocks."""
    if backward.input_grad.lhs.block is None:
        return dy_TN @ _dequantised(weight)
    _check_input_grad(weight, backward)
    codes, scale = quantize_groups(_stored_columns(dy_TN, weight))
    return _input_grad(codes, scale, weight)


def _check_input_grad(weight: QuantizedWeight, backward: Backward) -> None:
    spec = backward.input_grad
    if weight.precision.block != (BLOCK, BLOCK) or spec.lhs.block != GROUPS:
        raise ValueError(
            f"the Hopper kernels have no input gradient {spec} over a {weight.precision} weight; use "
            "e4m3 1x128 by 128x128, or BF16"
        )


def _stored_columns(dy_TN: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """dY with zero columns where a part that is not the last has padding rows."""
    if weight.last_part_padded:
        return dy_TN.contiguous()
    padded = dy_TN.new_zeros(dy_TN.shape[0], weight.codes.shape[0])
    return padded.index_copy_(1, _logical_rows(weight), dy_TN)


def _input_grad(
    codes_TN: torch.Tensor, scale: torch.Tensor, weight: QuantizedWeight
) -> torch.Tensor:
    """The product with the transposed weight, whose codes are made for it and dropped.

    To keep them would be a second copy of the weights; to make them costs 0.5 % of a backward.
    """
    assert weight.scale is not None
    w_KN = transpose_codes(weight.codes)
    return fp8_block_gemm(codes_TN, scale, w_KN, weight.scale.t(), n=weight.features)


def _dequantised(weight: QuantizedWeight) -> torch.Tensor:
    """BF16 [N, K] of the logical rows."""
    if weight.scale is None or weight.precision.block is None:
        return weight.codes
    rows, columns = weight.precision.block
    w_NK = dequantize(weight.codes, weight.scale, weight.features, (rows, columns))
    if weight.last_part_padded:
        return w_NK[: weight.out_features]
    return w_NK.index_select(0, _logical_rows(weight))


def weight_grad(
    dy_TN: torch.Tensor,
    saved: Operand,
    token_groups: torch.Tensor,
    backward: Backward,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """dW = dY^T X, FP32 [N, K], added to `into` when given.

    FP8: dY in 128x1 token groups; X from its saved codes, 128x1 or 128x128.
    """
    if backward.weight_grad.lhs.block is None:
        x_TK = saved.codes
        if saved.scale is not None:
            width = saved.codes.shape[1] // saved.scale.shape[1]
            block = (1, 0 if saved.scale.shape[1] == 1 else width)
            x_TK = dequantize(saved.codes, saved.scale, saved.features, block)
        if into is None:
            return torch.mm(dy_TN.t(), x_TK, out_dtype=torch.float32)
        torch.ops.aten.addmm.dtype_out(into, dy_TN.t(), x_TK, torch.float32, out=into)
        return into
    _check_weight_grad(saved, backward)
    _, _, dy_NT, dy_scale_GN = quantize_gradient(dy_TN.contiguous(), token_groups)
    return _weight_grad(dy_NT[: dy_TN.shape[1]], dy_scale_GN, saved, token_groups, backward, into)


def _check_weight_grad(saved: Operand, backward: Backward) -> None:
    spec = backward.weight_grad
    known = spec.lhs.block == (BLOCK, 1) and spec.rhs.block in ((BLOCK, 1), (BLOCK, BLOCK))
    if not known or saved.precision.block != GROUPS:
        raise ValueError(
            f"the Hopper kernels have no weight gradient {spec} from a saved {saved.precision}; use "
            "e4m3 128x1 by 128x128 or 128x1 from a saved e4m3 1x128, or BF16"
        )


def _weight_grad(
    dy_NT: torch.Tensor,
    dy_scale_GN: torch.Tensor,
    saved: Operand,
    token_groups: torch.Tensor,
    backward: Backward,
    into: torch.Tensor | None,
) -> torch.Tensor:
    """The product of codes along tokens; dY's are given for the logical outputs only."""
    assert saved.scale is not None
    tiles = backward.weight_grad.rhs.block == (BLOCK, BLOCK)
    bring = rescale_tokens if tiles else requantize_tokens
    x_KT, x_scale_GK = bring(saved.codes, saved.scale, token_groups, saved.features)
    x_KT = x_KT[: saved.features]
    return fp8_block_wgrad(
        dy_NT, dy_scale_GN.t(), x_KT, x_scale_GK.t(), into, accumulate=into is not None
    )


def silu_mul_gradient(
    dy_TF: torch.Tensor,
    gate_TF: torch.Tensor,
    up_TF: torch.Tensor,
    token_groups: torch.Tensor,
    backward: Backward,
) -> torch.Tensor | GradientCodes:
    """`silu_mul_backward` for the `linear_backward` of the linear that made gate and up.

    Where that quantises its gradient in groups, it is made in codes and never written in BF16.
    """
    if backward.input_grad.lhs.block is None or backward.weight_grad.lhs.block is None:
        return silu_mul_backward(dy_TF, gate_TF, up_TF)
    return quantize_silu_mul_gradient(dy_TF.contiguous(), gate_TF, up_TF, token_groups)


def linear_backward(
    dy_TN: torch.Tensor | GradientCodes,
    saved: Operand,
    weight: QuantizedWeight,
    token_groups: torch.Tensor,
    backward: Backward,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dX BF16 [T, K], dW FP32 [N, K]) of a linear; dW is added to `into` when given.

    FP8: dY is read once and quantised in both layouts, unless it comes so.
    """
    if not isinstance(dy_TN, GradientCodes) and (
        backward.input_grad.lhs.block is None or backward.weight_grad.lhs.block is None
    ):
        dx = input_grad(dy_TN, weight, backward)
        return dx, weight_grad(dy_TN, saved, token_groups, backward, into)
    _check_input_grad(weight, backward)
    _check_weight_grad(saved, backward)
    if not isinstance(dy_TN, GradientCodes):
        dy_TN = quantize_gradient(_stored_columns(dy_TN, weight), token_groups)
    codes, scale, dy_NT, dy_scale_GN = dy_TN
    dx = _input_grad(codes, scale, weight)
    if weight.last_part_padded:
        dy_NT = dy_NT[: weight.out_features]
    else:
        rows = _logical_rows(weight)
        dy_NT = dy_NT.view(torch.uint8).index_select(0, rows).view(dy_NT.dtype)
        dy_scale_GN = dy_scale_GN.index_select(1, rows)
    return dx, _weight_grad(dy_NT, dy_scale_GN, saved, token_groups, backward, into)


def bias_grad(dy_TN: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """FP32 [N]: dY summed over tokens, added to `into` when given."""
    db = dy_TN.sum(0, dtype=torch.float32)
    return db if into is None else into.add_(db)
