"""QuRL with FP8 (arXiv 2602.13953): quantised rollout, full-precision training; KV cache in BF16."""

from samebit.quant.recipes.fp8_row import FLOW
from samebit.spec import Flow, Recipe

RECIPE = Recipe(
    name="fp8-row-rollout",
    summary="mixed: row-scaled FP8 rollout, BF16 training (QuRL)",
    rollout=FLOW,
    train=Flow(),
    sqnr_floor_db=25.0,
    logp_gap_limit=0.1,
)
