"""QuRL's update-aware scaling: W / s with s folded into the preceding norm gain, once, before training.

The full-precision function stays the same (QuRL eq. 11); under Adam the step of those linears grows by
s relative to their size (docs/qurl.md says what that amounts to). The linears that follow a norm are
qkv and gate_up; the head never takes part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from samebit.models.config import ModelConfig
from samebit.models.decoder import Block, Decoder
from samebit.models.load import family_names

FOLLOWING = {"norm_attention": ("q", "k", "v"), "norm_mlp": ("gate", "up")}
"""Which named matrices of a block read which norm's output."""


def _check(s: float) -> None:
    if not (s > 0.0 and s < float("inf")):
        raise ValueError(f"train.invariant_scale = {s}: must be a positive finite number")


@torch.no_grad()
def apply_invariant_scale(model: Decoder, s: float) -> None:
    """Divide qkv and gate_up masters by s and multiply their norm gains by s; call `refresh` after.

    A QKV bias is not an input of the norm and stays. ValueError unless s is positive and finite.
    """
    _check(s)
    for block in model.layers:
        assert isinstance(block, Block)
        for linear, gain in (
            (block.qkv, block.norm_attention),
            (block.gate_up, block.norm_mlp),
        ):
            linear.master.div_(s)
            gain.mul_(s)


def fold_back(
    masters: Mapping[str, torch.Tensor], config: ModelConfig, s: float
) -> dict[str, torch.Tensor]:
    """Masters by checkpoint name with the scaling undone: those matrices times s, the gains over s.

    masters: as `named_masters` gives them, of a model that was trained under s; copies are returned
    and the model is left alone. Exact for powers of two, else to one FP32 rounding a value. Codes and
    scales need no folding: with the scaled gains they are a whole model as they are.
    """
    _check(s)
    names = family_names(config)
    folded = {name: tensor.detach().clone() for name, tensor in masters.items()}
    for i in range(config.layers):
        for gain, parts in FOLLOWING.items():
            folded[names[f"layers.{i}.{gain}"]].div_(s)
            for part in parts:
                folded[names[f"layers.{i}.{part}.weight"]].mul_(s)
    return folded
