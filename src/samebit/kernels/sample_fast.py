"""Host side of the sampler's warp-specialised kernel: when it draws, descriptors and the launch."""

from __future__ import annotations

import torch

from samebit.kernels.head_restrict import HeadCut
from samebit.kernels.head_tile import check_operands
from samebit.kernels.launch import cdiv, launch, processors, rows_box
from samebit.kernels.quantize_common import NUMERIC_OPTIONS
from samebit.kernels.sample_hopper import (
    BLOCK_K,
    REGISTERS,
    STRIP,
    TOKENS,
    VOCAB,
    sample_hopper_kernel,
)

MOST_TOKENS = 2048
"""Whose hidden states stay in L2 beside the weight; more would need groups of token tiles."""


def is_faster(T: int) -> bool:
    """Whether the kernel of this file draws `T` tokens faster than sample.py's.

    Not 129 to 192, whose second tile of 128 would be half empty.
    """
    return STRIP.value < T <= MOST_TOKENS and not TOKENS.value < T <= TOKENS.value + STRIP.value


def draw(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    noise_keys_T2: torch.Tensor,
    vocab_size: int,
    cut: HeadCut | None,
    parts: torch.Tensor,
) -> None:
    """Fill contiguous `parts` FP32 [5, T, tiles]; inputs as in `sample`."""
    (T, K), tiles = hidden_TK.shape, parts.shape[2]
    check_operands(hidden_TK, weight_VK)
    programs = cdiv(T, TOKENS.value) * tiles
    launch(
        sample_hopper_kernel,
        (min(programs, processors(parts)),),
        rows_box(hidden_TK, STRIP.value, BLOCK_K.value),
        rows_box(weight_VK, VOCAB.value, BLOCK_K.value),
        inverse_temperature_T,
        inverse_temperature_T if cut is None else cut.logit,
        inverse_temperature_T if cut is None else cut.id,
        noise_keys_T2,
        parts,
        T,
        cdiv(K, BLOCK_K.value),
        vocab_size,
        tiles,
        RESTRICT=cut is not None,
        num_warps=4,
        maxnreg=REGISTERS,
        **NUMERIC_OPTIONS,
    )
