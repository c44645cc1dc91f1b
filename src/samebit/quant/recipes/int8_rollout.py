"""QuRL with INT8 (arXiv 2602.13953): quantised rollout, full-precision training; KV cache in BF16."""

from samebit.quant.recipes.int8 import FLOW
from samebit.spec import Flow, Recipe

RECIPE = Recipe(
    name="int8-rollout",
    summary="mixed: INT8 rollout, BF16 training (QuRL)",
    rollout=FLOW,
    train=Flow(),
    sqnr_floor_db=32.0,
    logp_gap_limit=0.1,
)
