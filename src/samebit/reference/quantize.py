"""The one quantiser: scale = max(amax, floor) / max code, code = round-to-nearest-even(clamp(x / scale)).

Divisions are IEEE FP32. amax looks at real elements only. A group holding NaN or an infinity gets a
NaN scale, so the fault stays visible; nothing is silently clamped. docs/numerics.md, section 2.
"""

from __future__ import annotations

import torch

from samebit.formats import AMAX_FLOOR, BLOCK, Format, get_format
from samebit.operand import HeadCodes, Operand, QuantizedWeight, pad_to_block
from samebit.spec import Precision


def scale_of(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """FP32 scales from FP32 amax: positive and finite, or NaN where amax is not finite."""
    assert fmt.max is not None
    # a tensor divisor: by a Python number, CUDA multiplies by the reciprocal instead of dividing
    scale = amax.clamp(min=AMAX_FLOOR) / amax.new_full((), fmt.max)
    return scale.masked_fill(~torch.isfinite(amax), float("nan"))


def encode(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes of FP32 x under broadcastable FP32 scales; NaN encodes as NaN (e4m3) or 0 (integers)."""
    assert fmt.max is not None
    scaled = (x / scale).clamp_(-fmt.max, fmt.max)
    if fmt.dtype == torch.int8:
        # the cast of NaN to int8 is undefined: the NaN scale alone carries the fault
        return scaled.round_().nan_to_num_(0.0).to(fmt.dtype)
    return scaled.to(fmt.dtype)


def _pad_columns(x: torch.Tensor, columns: int) -> torch.Tensor:
    if x.shape[-1] == columns:
        return x
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1]))


def quantize_activation(x_TK: torch.Tensor, precision: Precision) -> Operand:
    """BF16 [T, K] as a GEMM operand: BF16 itself, 1x128 groups, or one scale a token.

    Returns codes [T, K padded to 128] and FP32 scales [T, K/128] or [T, 1].
    """
    features = x_TK.shape[1]
    if precision.block is None:
        return Operand(x_TK.to(get_format(precision.format).dtype), None, precision, features)
    fmt = get_format(precision.format)
    x = _pad_columns(x_TK.float(), pad_to_block(features))
    tokens = x.shape[0]
    if precision.block == (1, BLOCK):
        grouped = x.view(tokens, -1, BLOCK)
        scale = scale_of(grouped.abs().amax(-1), fmt)
        codes = encode(grouped, scale[..., None], fmt).view(tokens, -1)
    elif precision.block == (1, 0):
        scale = scale_of(x.abs().amax(-1, keepdim=True), fmt)
        codes = encode(x, scale, fmt)
    else:
        raise ValueError(f"activations cannot be quantised as {precision}; use 1x128 or 1xall")
    return Operand(codes, scale, precision, features)


def quantize_heads(x_SHD: torch.Tensor, precision: Precision) -> HeadCodes:
    """BF16 Q, K or V [S, heads, D] -> codes and one FP32 scale per token and head [S, heads]."""
    if precision.block != (1, 0) or precision.format != "e4m3":
        raise ValueError(f"attention has no {precision} operands; use e4m3 with one scale per head")
    fmt, x = get_format(precision.format), x_SHD.float()
    scale = scale_of(x.abs().amax(-1), fmt)
    return HeadCodes(encode(x, scale[..., None], fmt), scale)


def quantize_matrix(w_NK: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    """One named FP32 matrix -> (codes [N pad, K pad], scale), 128x128 blocks or per output channel."""
    fmt = get_format(precision.format)
    rows, columns = (pad_to_block(n) for n in w_NK.shape)
    w = torch.nn.functional.pad(w_NK, (0, columns - w_NK.shape[1], 0, rows - w_NK.shape[0]))
    if precision.block == (BLOCK, BLOCK):
        tiles = w.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = scale_of(tiles.abs().amax((1, 3)), fmt)
        return encode(tiles, scale[:, None, :, None], fmt).view(rows, columns), scale
    assert precision.block == (1, 0)
    scale = scale_of(w.abs().amax(1, keepdim=True), fmt)
    return encode(w, scale, fmt), scale


def refresh_weight(weight: QuantizedWeight, master_NK: torch.Tensor) -> None:
    """Requantise `weight` in place from its FP32 master [N, K]; addresses never change."""
    assert master_NK.dtype == torch.float32 and master_NK.shape[0] == weight.out_features
    weight.version += 1
    if weight.scale is None:
        weight.codes.copy_(master_NK)
        return
    start = 0
    for rows, offset in zip(weight.rows, weight.padded_offsets, strict=True):
        codes, scale = quantize_matrix(master_NK[start : start + rows], weight.precision)
        weight.codes[offset : offset + codes.shape[0]].view(torch.uint8).copy_(
            codes.view(torch.uint8)
        )
        first = offset // BLOCK if weight.precision.block == (BLOCK, BLOCK) else offset
        weight.scale[first : first + scale.shape[0]].copy_(scale)
        start += rows


def quantize_tokens(
    x_TF: torch.Tensor, token_groups: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """Quantise FP32 [T, F] in groups of up to 128 tokens and return the dequantised FP32.

    precision: one scale per (group, feature) or, 128x128, per (group, 128 features). token_groups int32
    [n, 2]: (first row, rows). Groups tile the rows in order, so a group's codes do not depend on
    other segments.
    """
    fmt = get_format(precision.format)
    assert precision.block in ((BLOCK, 1), (BLOCK, BLOCK))
    width = precision.block[1]
    group = _group_of_rows(token_groups, x_TF.device)
    features = x_TF.shape[1]
    tiles = _pad_columns(x_TF, -(-features // width) * width).unflatten(1, (-1, width))
    amax = _largest(tiles.abs().amax(-1), group, len(token_groups))
    scale = scale_of(amax, fmt)[group][..., None]
    return (encode(tiles, scale, fmt).float() * scale).flatten(1)[:, :features]


def rescale_tokens(saved: Operand, token_groups: torch.Tensor) -> torch.Tensor:
    """Saved 1x128 codes under one scale per (token group, 128 features), as dequantised FP32 [T, F].

    The scale is the largest of the group's; code = round(code * fl(scale of the token / largest)).
    Tokens that hold the largest scale keep their codes.
    """
    assert saved.scale is not None and saved.precision.block == (1, BLOCK)
    fmt = get_format(saved.precision.format)
    group = _group_of_rows(token_groups, saved.scale.device)
    largest = _largest(saved.scale, group, len(token_groups))[group]
    ratio = (saved.scale / largest)[..., None]
    codes = (saved.codes.float().unflatten(1, (-1, BLOCK)) * ratio).to(fmt.dtype)
    return (codes.float() * largest[..., None]).flatten(1)[:, : saved.features]


def _group_of_rows(token_groups: torch.Tensor, device: torch.device) -> torch.Tensor:
    counts = token_groups[:, 1].long().to(device)
    return torch.repeat_interleave(torch.arange(len(counts), device=device), counts)


def _largest(x_TC: torch.Tensor, group_T: torch.Tensor, groups: int) -> torch.Tensor:
    """Per group and column, [groups, C]; NaN wins."""
    out = x_TC.new_zeros(groups, x_TC.shape[1])
    return out.scatter_reduce_(0, group_T[:, None].expand_as(x_TC), x_TC, "amax")


def dequantize(operand: Operand) -> torch.Tensor:
    """FP32 [T, K] of an operand, without padding."""
    values = operand.codes.float()
    if operand.scale is not None:
        width = values.shape[1] // operand.scale.shape[1]
        values = values * operand.scale.repeat_interleave(width, dim=1)
    return values[:, : operand.features]


def dequantize_weight(weight: QuantizedWeight) -> torch.Tensor:
    """FP32 [N, K] of a weight's codes, logical rows and columns."""
    values = weight.codes.float()
    if weight.scale is not None:
        rows, columns = weight.scale.shape
        scale = weight.scale.repeat_interleave(values.shape[0] // rows, dim=0)
        values = values * scale.repeat_interleave(values.shape[1] // columns, dim=1)
        values = values[weight.logical_rows()]
    return values[:, : weight.features]
