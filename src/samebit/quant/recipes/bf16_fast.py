"""The baseline that the same-bits recipes are measured against: BF16 with the platform's own GEMMs.

cuBLAS (on a CPU the library matmul) multiplies in whatever order is fastest for the number of rows, so
rollout and training forward are *not* the same bits. Head, attention, norms, scheduler and
graphs are those of every other recipe: what a run gains or loses against this one is the price of the bits.
"""

from samebit.spec import GEMM_LIBRARY, Flow, Recipe

FLOW = Flow.linears(GEMM_LIBRARY)

RECIPE = Recipe(
    name="bf16-fast",
    summary="BF16 with the platform's own GEMMs: fast, not the same bits (a baseline to measure against)",
    rollout=FLOW,
    train=FLOW,
    sqnr_floor_db=40.0,
    logp_gap_limit=0.02,
)
