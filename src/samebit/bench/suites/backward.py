"""Both gradient GEMMs of a linear with everything they need quantised, beside cuBLAS BF16's two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samebit.bench.api import Call, Case, Prepared, Target

GROUP = "kernels"
ABOUT = "input and weight gradient of a linear, quantising dY and requantising X included"
TOKENS = 8192
SHAPES = {"8B.qkv": (6144, 4096), "8B.o": (4096, 4096), "8B.gate_up": (24576, 4096),
          "8B.down": (4096, 12288)}  # fmt: skip
RECIPES = ("fp8", "fp8-jet")
TARGETS = (
    Target("input + weight gradient incl. quantising, 8,192 tokens, over cuBLAS BF16", "backward",
           "fp8/8B*", "ratio", 1.3, 1.5, least=1.1),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """recipe/shape, for the recipes there are."""
    from samebit.quant.plan import recipe_names

    for recipe in (name for name in RECIPES if name in recipe_names()):
        for shape in SHAPES:
            yield Case(f"{recipe}/{shape}", lambda r=recipe, s=shape: _prepare(r, s))


def _prepare(recipe: str, shape: str) -> Prepared:
    import torch

    from samebit.bench.ceilings import roofline_us
    from samebit.bench.timing import normal
    from samebit.kernels import ops
    from samebit.kernels.quantize_gradient import token_group_table
    from samebit.operand import allocate_weight
    from samebit.quant.plan import load_recipe

    plan = load_recipe(recipe)
    outputs, depth = SHAPES[shape]
    spec, device = plan.train.gemm("qkv"), torch.device("cuda")
    groups = token_group_table([TOKENS], device)
    weight = allocate_weight((outputs,), depth, spec.rhs, device)
    ops.refresh_weight(weight, torch.randn(outputs, depth, device=device) * 0.02)
    pairs = [(normal(TOKENS, outputs), normal(TOKENS, depth)) for _ in range(2)]
    saved = [ops.quantize_activation(x, spec.lhs) for _, x in pairs]
    plain = normal(outputs, depth)

    def ours(i: int) -> None:
        dy = pairs[i][0]
        ops.input_grad(dy, weight, plan.backward)
        ops.weight_grad(dy, saved[i], groups, plan.backward)

    def library(i: int) -> None:
        dy, x = pairs[i]
        torch.mm(dy, plain)
        torch.mm(dy.t(), x, out_dtype=torch.float32)

    def record(times: dict[str, float]) -> dict[str, Any]:
        work = 4.0 * TOKENS * outputs * depth
        floor = roofline_us(
            work, "fp8", TOKENS * (2.0 * outputs + 3.0 * depth) + 5.0 * outputs * depth
        )
        return {"ratio": times["cublas_bf16"] / times["ours"], "roofline_us": floor,
                "share_of_roofline": floor / times["ours"], "tflops": work / times["ours"] / 1e6,
                "tokens": TOKENS, "outputs": outputs, "depth": depth,
                "weight_gradient": str(plan.backward.weight_grad)}  # fmt: skip

    calls: dict[str, list[Call]] = {"ours": [lambda i=i: ours(i) for i in (0, 1)],
             "cublas_bf16": [lambda i=i: library(i) for i in (0, 1)]}  # fmt: skip
    return Prepared(calls, record)
