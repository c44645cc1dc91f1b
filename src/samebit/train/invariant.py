"""QuRL's update-aware scaling: W / s with s folded into the preceding norm gain, once, before training.

The full-precision function stays the same (QuRL eq. 11); under Adam the step of those linears grows by
s relative to their size (docs/algorithms.md says what that amounts to). The linears that follow a
norm are qkv and gate_up; the head never takes part.
"""

from __future__ import annotations

import torch

from samebit.models.decoder import Block, Decoder


@torch.no_grad()
def apply_invariant_scale(model: Decoder, s: float) -> None:
    """Divide qkv and gate_up masters by s and multiply their norm gains by s; call `refresh` after.

    A QKV bias is not an input of the norm and stays. ValueError unless s is positive and finite.
    """
    if not (s > 0.0 and s < float("inf")):
        raise ValueError(f"train.invariant_scale = {s}: must be a positive finite number")
    for block in model.layers:
        assert isinstance(block, Block)
        for linear, gain in (
            (block.qkv, block.norm_attention),
            (block.gate_up, block.norm_mlp),
        ):
            linear.master.div_(s)
            gain.mul_(s)
