"""Host side of the sampler's warp-specialised kernel: its forms, descriptors and the launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from samebit.kernels.head_restrict import HeadCut
from samebit.kernels.head_tile import check_operands
from samebit.kernels.quantize_common import NUMERIC_OPTIONS
from samebit.kernels.sample_hopper import (
    BLOCK_K,
    REGISTERS,
    STRIP,
    VOCAB,
    sample_hopper_kernel,
    strips,
)

MOST_TOKENS = 2048
"""Whose hidden states stay in L2 beside the weight; more would need groups of token tiles."""
_LAYOUT = NVMMASharedLayout(128, 16, 2)


@dataclass(frozen=True)
class Form:
    """How a launch works. Free to tune: the bits do not depend on it.

    turns: a consumer takes every other tile of 128 tokens, or its half of every tile of 256.
    """

    turns: bool
    stages: int
    hold: int = 1


def form(T: int) -> Form | None:
    """The form for `T` tokens; None where the kernel of sample.py is as fast.

    So it is for 129 to 192 tokens, whose second tile of 128 would be half empty.
    """
    if T <= STRIP.value or 2 * STRIP.value < T <= 3 * STRIP.value or T > MOST_TOKENS:
        return None
    return Form(True, 6)


def _tensor_map(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A BF16 matrix in boxes of `rows` rows and one step of K."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, BLOCK_K.value], _LAYOUT)


def draw(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    noise_keys_T2: torch.Tensor,
    vocab_size: int,
    cut: HeadCut | None,
    form: Form,
    parts: torch.Tensor,
) -> None:
    """Fill contiguous `parts` FP32 [5, T, tiles]; inputs as in `sample`."""
    (T, K), tiles = hidden_TK.shape, parts.shape[2]
    check_operands(hidden_TK, weight_VK)
    steps = triton.cdiv(K, BLOCK_K.value)
    hold = math.gcd(form.hold, steps)
    programs = triton.cdiv(T, STRIP.value * strips(form.turns)) * tiles
    processors = torch.cuda.get_device_properties(parts.device).multi_processor_count
    sample_hopper_kernel[(min(programs, processors),)](  # pyright: ignore[reportIndexIssue]
        _tensor_map(hidden_TK, STRIP.value),
        _tensor_map(weight_VK, VOCAB.value),
        inverse_temperature_T,
        inverse_temperature_T if cut is None else cut.logit,
        inverse_temperature_T if cut is None else cut.id,
        noise_keys_T2,
        parts,
        T,
        steps // hold,
        vocab_size,
        tiles,
        TURNS=form.turns,
        STAGES=form.stages * form.hold // hold,
        HOLD=hold,
        RESTRICT=cut is not None,
        num_warps=4,
        maxnreg=REGISTERS,
        **NUMERIC_OPTIONS,
    )
