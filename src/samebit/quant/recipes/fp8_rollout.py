"""The mixed recipe the papers warn about: FP8 rollout, BF16 training. Two policies, on purpose."""

from samebit.quant.recipes.fp8 import FLOW
from samebit.spec import Flow, Recipe

RECIPE = Recipe(
    name="fp8-rollout",
    summary="mixed: FP8 rollout, BF16 training (needs a correction; not the same policy)",
    rollout=FLOW,
    train=Flow(),
    sqnr_floor_db=25.0,
    logp_gap_limit=0.1,
)
