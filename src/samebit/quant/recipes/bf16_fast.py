"""The baseline that the same-bits recipes are measured against: BF16 with the platform's own GEMMs.

cuBLAS (on a CPU the library matmul) multiplies in whatever order is fastest for the number of rows, and
training keeps BF16 logits, so rollout and training forward are *not* the same bits. Attention, norms,
the sampling head, scheduler and graphs are those of every other recipe: what a run gains or loses
against this one is the price of the bits.
"""

from dataclasses import replace

from samebit.spec import GEMM_LIBRARY, Flow, Recipe

FLOW = Flow.linears(GEMM_LIBRARY)

RECIPE = Recipe(
    name="bf16-fast",
    summary="BF16 with the platform's own GEMMs: fast, not the same bits (a baseline to measure against)",
    rollout=FLOW,
    train=replace(FLOW, head=GEMM_LIBRARY),
    sqnr_floor_db=40.0,
    logp_gap_limit=0.02,
)
