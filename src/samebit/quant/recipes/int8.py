"""INT8, unified: weights per output channel, activations per token; BF16 backward over dequantised operands."""

from samebit.spec import INT8_ROW, Backward, Flow, Gemm, Recipe

FLOW = Flow.linears(Gemm(INT8_ROW, INT8_ROW))

RECIPE = Recipe(
    name="int8",
    summary="unified INT8 rollout and training forward; BF16 backward over dequantised operands",
    rollout=FLOW,
    train=FLOW,
    backward=Backward(saved=INT8_ROW),
    sqnr_floor_db=32.0,
    logp_gap_limit=0.1,
)
