"""Stress recipe: INT4-range codes, weights per output channel and activations per token, unified."""

from samebit.spec import INT4_ROW, Backward, Flow, Gemm, Recipe

FLOW = Flow.linears(Gemm(INT4_ROW, INT4_ROW))

RECIPE = Recipe(
    name="int4",
    summary="stress: unified INT4-range rollout and training forward; BF16 backward",
    rollout=FLOW,
    train=FLOW,
    backward=Backward(saved=INT4_ROW),
    sqnr_floor_db=12.0,
    logp_gap_limit=1.0,
)
