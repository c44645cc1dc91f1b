"""Row-scaled FP8, unified: weights per output channel, activations per token (QuRL's FP8 quantiser)."""

from samebit.spec import FP8_ROW, Backward, Flow, Gemm, Recipe

PROMOTE = 512
"""Elements of K summed in the tensor core before the FP32 accumulator; scales apply once, at the end."""

FLOW = Flow.linears(Gemm(FP8_ROW, FP8_ROW, promote=PROMOTE))

RECIPE = Recipe(
    name="fp8-row",
    summary="unified FP8 with per-token and per-channel scales; BF16 backward over dequantised operands",
    rollout=FLOW,
    train=FLOW,
    backward=Backward(saved=FP8_ROW),
    sqnr_floor_db=25.0,
    logp_gap_limit=0.1,
)
