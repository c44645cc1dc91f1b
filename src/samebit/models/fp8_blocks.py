"""Weights in 128x128 FP8 blocks, as an export holds them: out of a model, and into masters again.

A master made from codes and a scale is quantised to those codes and that scale, bit for bit, so a
model read from its own export is the function that was exported, and may go on training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from samebit.formats import BLOCK
from samebit.models.decoder import Decoder
from samebit.spec import Recipe

BLOCK_ROLES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class QuantisedMatrix:
    """Codes and scales of one named matrix, unpadded.

    codes: float8_e4m3fn [N, K]. scales: FP32 [ceil(N/128), ceil(K/128)], multiply to
    dequantise.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def fault(self) -> str | None:
        """What no quantiser gives for finite weights, in words; None where there is none."""
        # 0x7F and 0xFF are E4M3's two NaNs.
        if ((self.codes.view(torch.uint8) & 0x7F) == 0x7F).any():
            return "a code is NaN"
        if not (torch.isfinite(self.scales).all() and (self.scales > 0).all()):
            return "a scale is not finite and positive"
        return None


def scale_name(weight: str) -> str:
    """What a folder calls the scales of a weight; despite the name they multiply to dequantise."""
    return f"{weight}_scale_inv"


def require_blocks(recipe: Recipe, what: str) -> None:
    """ValueError, beginning with `what`, unless the recipe samples with 128x128 FP8 weights."""
    weights = {str(recipe.rollout.gemm(role).rhs) for role in BLOCK_ROLES}
    if weights != {f"e4m3[{BLOCK}x{BLOCK}]"}:
        raise ValueError(
            f"{what}: recipe {recipe.name!r} samples with weights in {', '.join(sorted(weights))}, "
            f"not in e4m3[{BLOCK}x{BLOCK}]; use --recipe fp8 or another whose weights are"
        )


def unfuse(
    codes_NK: torch.Tensor, scales_nk: torch.Tensor, parts: Mapping[str, tuple[int, int]]
) -> dict[str, QuantisedMatrix]:
    """The named matrices inside one fused, padded buffer.

    codes_NK: [sum of N padded to 128 each, K padded to 128]; scales_nk: one per 128x128 block.
    parts: name -> (N, K) without padding, in the buffer's order.
    """
    found: dict[str, QuantisedMatrix] = {}
    block = 0
    for name, (rows, width) in parts.items():
        row_blocks, column_blocks = math.ceil(rows / BLOCK), math.ceil(width / BLOCK)
        first = block * BLOCK
        found[name] = QuantisedMatrix(
            codes_NK[first : first + rows, :width],
            scales_nk[block : block + row_blocks, :column_blocks],
        )
        block += row_blocks
    assert block * BLOCK == codes_NK.shape[0] and block == scales_nk.shape[0]
    return found


def quantised_matrices(model: Decoder, names: Mapping[str, str]) -> dict[str, QuantisedMatrix]:
    """Codes and scales (views) of every block linear as the sampler reads them, by checkpoint name.

    names: checkpoint name of each parameter path.
    """
    found: dict[str, QuantisedMatrix] = {}
    for path, linear in model.linears():
        weight = linear.weights["rollout"]
        assert weight.scale is not None
        layer = path.rsplit(".", 1)[0]
        parts = {
            names[f"{layer}.{part}.weight"]: (rows, linear.shape.in_features)
            for part, rows in linear.shape.parts
        }
        found |= unfuse(weight.codes, weight.scale, parts)
    return found


def master_of(matrix: QuantisedMatrix) -> torch.Tensor:
    """The FP32 master [N, K] codes * scale, which is quantised to this matrix again.

    A block's largest code is 448, and fl(fl(448 * s) / 448) = s for every scale s that is itself the
    448th part of an FP32 number (each of the 2^23 significands is tested), so the scale comes back; all
    products lie within 2^-24 of code * s, so the codes do. Of other scales it need not be so.
    """
    rows, columns = matrix.codes.shape
    spread = matrix.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return matrix.codes.float() * spread[:rows, :columns]


def first_difference(
    held: Mapping[str, QuantisedMatrix], name: str, matrix: QuantisedMatrix
) -> str | None:
    """What of a matrix the model does not hold bit for bit: None, or a few words."""
    own = held[name]
    codes = own.codes.view(torch.uint8) != matrix.codes.view(torch.uint8).to(own.codes.device)
    scales = own.scales.view(torch.int32) != matrix.scales.view(torch.int32).to(own.codes.device)
    if not (codes.any() or scales.any()):
        return None
    return f"{int(codes.sum())} of {codes.numel()} codes and {int(scales.sum())} of {scales.numel()} scales"
