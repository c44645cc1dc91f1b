"""Jet-RL's unified FP8 flow (arXiv 2601.14243, section 4): FP8 in all three GEMMs, both sides alike.

E4M3 throughout; weights 128x128, activations 1x128, dY 1x128 for the input gradient and 128x1 for the
weight gradient; FP32 scales; BF16 between operators; saved activations in FP8; FP32 masters. One departure
from the paper: in the weight gradient X has one scale per 128 tokens x 128 features, which costs 2 % more
error and is a faster product (docs/decisions.md). The paper's form is the recipe fp8-jet.
"""

from samebit.formats import BLOCK
from samebit.spec import (
    FP8_BLOCK,
    FP8_TOKEN_GROUP,
    FP8_TOKENS,
    Backward,
    Flow,
    Gemm,
    Recipe,
)

FLOW = Flow.linears(Gemm(FP8_TOKEN_GROUP, FP8_BLOCK, promote=BLOCK))

RECIPE = Recipe(
    name="fp8",
    summary="Jet-RL: unified FP8 rollout and training, FP8 in all three GEMMs",
    rollout=FLOW,
    train=FLOW,
    backward=Backward(
        input_grad=Gemm(FP8_TOKEN_GROUP, FP8_BLOCK, promote=BLOCK),
        weight_grad=Gemm(FP8_TOKENS, FP8_BLOCK, promote=BLOCK),
        saved=FP8_TOKEN_GROUP,
    ),
    sqnr_floor_db=25.0,
    logp_gap_limit=0.1,
)
