"""Jet-RL's FP8 flow to the letter: in the weight gradient dY and X both have a scale per 128 tokens x feature.

The forward is that of `fp8`; only the weight gradient's X differs (arXiv 2601.14243, section 4.2).
"""

from dataclasses import replace

from samebit.formats import BLOCK
from samebit.quant.recipes.fp8 import RECIPE as FP8
from samebit.spec import FP8_TOKENS, Gemm

RECIPE = replace(
    FP8,
    name="fp8-jet",
    summary="as fp8, with the paper's 128x1 scales on both sides of the weight gradient",
    backward=replace(FP8.backward, weight_grad=Gemm(FP8_TOKENS, FP8_TOKENS, promote=BLOCK)),
)
