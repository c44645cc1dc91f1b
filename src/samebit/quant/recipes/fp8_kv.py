"""Jet-RL's unified FP8 flow with an FP8 KV cache: rollout and training attend over the same codes.

Q, K (after rotary) and V in e4m3 with one FP32 scale per token and head; scores from the codes, P times the
scale of V in FP16; the backward is that of BF16 attention at the dequantised Q, K and V.
"""

from dataclasses import replace

from samebit.quant.recipes.fp8 import FLOW as FP8_FLOW
from samebit.quant.recipes.fp8 import RECIPE as FP8
from samebit.spec import FP8_HEAD, FP16, Attention

FLOW = replace(FP8_FLOW, attention=Attention(q=FP8_HEAD, kv=FP8_HEAD, probabilities=FP16))

RECIPE = replace(
    FP8,
    name="fp8-kv",
    summary="unified FP8 with an FP8 KV cache: training attends over the same quantised K and V",
    rollout=FLOW,
    train=FLOW,
    logp_gap_limit=0.15,
)
