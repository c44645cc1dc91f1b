"""Stress recipe: QuRL's mixed flow at 15 levels, coarse enough that corrections differ in a short run."""

from samebit.quant.recipes.int4 import FLOW
from samebit.spec import Flow, Recipe

RECIPE = Recipe(
    name="int4-rollout",
    summary="stress: INT4-range rollout, BF16 training (needs a correction)",
    rollout=FLOW,
    train=Flow(),
    sqnr_floor_db=12.0,
    logp_gap_limit=1.0,
)
