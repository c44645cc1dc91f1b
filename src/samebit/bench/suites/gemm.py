"""Forward GEMMs in FP8, INT8 and BF16 beside cuBLAS, at rollout's and training's numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samebit.bench.api import Call, Case, Prepared, Target

GROUP = "kernels"
ABOUT = "forward GEMMs beside cuBLAS BF16 (and cuBLAS's own FP8 at training sizes)"

SHAPES = {
    "8B.qkv": (6144, 4096), "8B.o": (4096, 4096), "8B.gate_up": (24576, 4096),
    "8B.down": (4096, 12288),
    "0.6B.qkv": (4096, 1024), "0.6B.gate_up": (6144, 1024), "0.6B.down": (1024, 3072),
    "135M.qkv": (1152, 640), "135M.gate_up": (3072, 640), "135M.down": (640, 1536),
}  # fmt: skip
"""(outputs, K) as stored: Qwen3-8B and Llama-3.1-8B, Qwen3-0.6B, SmolLM2-135M."""

BIG = tuple(name for name in SHAPES if name.startswith("8B"))
TOKENS = {
    "fp8_block": (1, 16, 32, 64, 128, 256, 512, 4096, 8192, 32768),
    "fp8_row": (16, 128, 4096, 8192, 32768),
    "int8": (16, 64, 128, 512, 4096, 8192, 32768),
    "bf16": (16, 64, 128, 512, 4096, 8192),
}
LIBRARY_FROM = 4096
"""Tokens from which cuBLAS's own FP8 products are timed too."""


def _few(operator: str) -> str:
    return "|".join(f"{operator}/8B*/{m}" for m in (1, 16, 32, 64))


def _some(operator: str) -> str:
    return "|".join(f"{operator}/8B*/{m}" for m in (128, 256, 512))


def _many(operator: str) -> str:
    return "|".join(f"{operator}/8B*/{m}" for m in (4096, 8192, 32768))


TARGETS = (
    Target("FP8 block GEMM, 4,096 to 32,768 tokens, over cuBLAS BF16", "gemm", _many("fp8_block"),
           "ratio", 1.45, 1.65, least=1.1),
    Target("FP8 block GEMM, 1 to 64 tokens", "gemm", _few("fp8_block"), "ratio", 1.4, 1.6, least=1.1),
    Target("FP8 block GEMM, 128 to 512 tokens", "gemm", _some("fp8_block"), "ratio", 1.35, 1.55,
           least=1.1),
    Target("INT8 GEMM, 1 to 512 tokens", "gemm", _few("int8") + "|" + _some("int8"), "ratio", 1.35,
           1.6, least=1.1),
    Target("INT8 GEMM, 4,096 to 32,768 tokens", "gemm", _many("int8"), "ratio", 1.35, 1.6, least=1.1),
    Target("FP8 row-scaled GEMM, 4,096 to 32,768 tokens", "gemm", _many("fp8_row"), "ratio", 1.55,
           1.75, least=1.1),
    Target("same-bits BF16 GEMM", "gemm", "bf16/8B*", "ratio", 0.85, 1.0),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """operator/shape/tokens; the smaller models in FP8 block scaling at three sizes."""
    for operator, sizes in TOKENS.items():
        for shape in SHAPES:
            if shape in BIG:
                chosen = sizes
            else:
                chosen = (16, 128, 8192) if operator == "fp8_block" else ()
            for tokens in chosen:
                yield Case(
                    f"{operator}/{shape}/{tokens}",
                    lambda o=operator, s=shape, m=tokens: _prepare(o, s, m),
                )


def _prepare(operator: str, shape: str, tokens: int) -> Prepared:
    import torch

    from samebit.bench.ceilings import roofline_us
    from samebit.bench.timing import normal, rotation

    outputs, depth = SHAPES[shape]
    copies = rotation(outputs * depth)
    size = 2 if operator == "bf16" else 1
    operands = Operands(operator, tokens, outputs, depth, copies)
    x, out = (
        normal(tokens, depth),
        torch.empty(tokens, outputs, device="cuda", dtype=torch.bfloat16),
    )
    weights = [normal(outputs, depth) for _ in range(rotation(2 * outputs * depth))]
    calls: dict[str, list[Call]] = {
        "ours": operands.calls(),
        "cublas_bf16": [lambda w=w: torch.mm(x, w.t(), out=out) for w in weights],
    }
    if tokens >= LIBRARY_FROM:
        calls |= operands.library()

    def record(times: dict[str, float]) -> dict[str, Any]:
        moved = (tokens + outputs) * depth * size + tokens * outputs * 2
        work = 2.0 * tokens * outputs * depth
        floor = roofline_us(work, operator.split("_")[0], moved)
        return {
            "ratio": times["cublas_bf16"] / times["ours"],
            "roofline_us": floor,
            "share_of_roofline": floor / times["ours"],
            "tflops": work / times["ours"] / 1e6,
            "tokens": tokens, "outputs": outputs, "depth": depth,
        }  # fmt: skip

    return Prepared(calls, record)


class Operands:
    """Random codes and scales of one product, weights several times over."""

    def __init__(self, operator: str, tokens: int, outputs: int, depth: int, copies: int):
        import torch

        def codes(rows: int) -> torch.Tensor:
            values = torch.randn(rows, depth, device="cuda")
            if operator == "int8":
                return (values * 40).round().clamp(-127, 127).to(torch.int8)
            return values.to(torch.bfloat16 if operator == "bf16" else torch.float8_e4m3fn)

        def scales(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, device="cuda") * 0.01 + 0.001

        self.operator = operator
        self.x, self.weights = codes(tokens), [codes(outputs) for _ in range(copies)]
        self.out = torch.empty(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        self.x_scale, self.w_scale = scales(tokens), scales(outputs)
        if operator == "fp8_block":
            groups = depth // 128
            # group-major, rows of whole 16 bytes: what the quantisers write
            self.x_scale = scales(groups, -(-tokens // 4) * 4)[:, :tokens].T
            self.w_scale = scales(outputs // 128, groups)

    def calls(self) -> list[Call]:
        """Ours, one call a weight."""
        if self.operator == "bf16":
            from samebit.kernels.gemm_bf16 import bf16_gemm

            return [lambda w=w: bf16_gemm(self.x, w, self.out) for w in self.weights]
        from samebit.kernels.gemm_fp8_block import fp8_block_gemm
        from samebit.kernels.gemm_fp8_row import fp8_row_gemm
        from samebit.kernels.gemm_int8 import int8_gemm

        gemm = {"fp8_block": fp8_block_gemm, "fp8_row": fp8_row_gemm, "int8": int8_gemm}[
            self.operator
        ]
        return [
            lambda w=w: gemm(self.x, self.x_scale, w, self.w_scale, self.out) for w in self.weights
        ]

    def library(self) -> dict[str, list[Call]]:
        """cuBLAS's own product of the same kind."""
        import torch
        from torch.nn.functional import ScalingType, scaled_mm

        bf16 = torch.bfloat16
        if self.operator == "fp8_row":
            row, column = self.x_scale[:, None], self.w_scale[None, :]
            return {"cublas_fp8_row": [
                lambda w=w: torch._scaled_mm(self.x, w.t(), row, column, out_dtype=bf16)
                for w in self.weights
            ]}  # fmt: skip
        if self.operator == "fp8_block":
            return {"cublas_fp8_block": [
                lambda w=w: scaled_mm(
                    self.x, w.t(), self.x_scale, ScalingType.BlockWise1x128, self.w_scale.t(),
                    ScalingType.BlockWise128x128, output_dtype=bf16)
                for w in self.weights
            ]}  # fmt: skip
        return {}
