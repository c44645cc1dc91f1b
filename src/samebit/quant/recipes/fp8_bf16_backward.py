"""Unified FP8 forward, BF16 backward over the dequantised operands: isolates what FP8 gradients cost."""

from dataclasses import replace

from samebit.quant.recipes.fp8 import RECIPE as FP8
from samebit.spec import FP8_TOKEN_GROUP, Backward

RECIPE = replace(
    FP8,
    name="fp8-bf16-backward",
    summary="unified FP8 forward; backward in BF16 over the dequantised operands",
    backward=Backward(saved=FP8_TOKEN_GROUP),
)
