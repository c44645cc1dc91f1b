"""BF16 everywhere: the baseline, held to the same bits as every other unified recipe."""

from samebit.spec import Flow, Recipe

RECIPE = Recipe(
    name="bf16",
    summary="BF16 rollout and training, the same bits",
    rollout=Flow(),
    train=Flow(),
    sqnr_floor_db=40.0,
    logp_gap_limit=0.02,
)
