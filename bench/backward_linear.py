"""A linear's whole backward in FP8 beside cuBLAS BF16: both gradient GEMMs and what feeds them.

    python bench/backward_linear.py --out DIR

Ours, captured as one sequence: quantise dY in both layouts, input gradient, bring the saved codes of X
along tokens, weight gradient. cuBLAS: the two BF16 products, the weight gradient in FP32 (what a
trainer accumulates) and, beside it, in BF16. Medians of CUDA-graph replays over rotating dY.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from gemm import BANDWIDTH, RATE, provenance, timed

from samebit.kernels.gemm_fp8_block import fp8_block_gemm
from samebit.kernels.gemm_fp8_wgrad import fp8_block_wgrad
from samebit.kernels.quantize_activation import quantize_activation
from samebit.kernels.quantize_gradient import quantize_gradient, token_group_table
from samebit.kernels.quantize_saved import requantize_tokens, rescale_tokens
from samebit.kernels.quantize_weight import quantize_weight, transpose_codes

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
    "q06_gate_up": (6144, 1024), "smol_gate_up": (3072, 576),
}  # fmt: skip
"""(outputs, inputs); the first four are 8B shapes."""


class Linear:
    """Random operands of one linear, and its backward in pieces."""

    def __init__(self, tokens: int, outputs: int, inputs: int) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").bfloat16()

        self.dys = [normal(tokens, outputs) for _ in range(2)]
        self.x, self.w = normal(tokens, inputs), normal(outputs, inputs)
        self.saved = quantize_activation(self.x)
        codes, self.w_scale = quantize_weight(self.w.float())
        self.w_transposed = transpose_codes(codes)
        self.groups = token_group_table([tokens], "cuda")
        self.quantised = quantize_gradient(self.dys[0], self.groups)
        self.x_codes = self.bring(rescale_tokens)
        self.out = torch.empty(outputs, inputs, device="cuda")

    def bring(self, function) -> tuple[torch.Tensor, torch.Tensor]:
        return function(*self.saved, self.groups, self.x.shape[1])

    def input_grad(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return fp8_block_gemm(codes, scale, self.w_transposed, self.w_scale.t(), n=self.x.shape[1])

    def weight_grad(self, dy_NT, dy_scale_GN, x_KT, x_scale_GK) -> torch.Tensor:
        n, k = self.w.shape
        return fp8_block_wgrad(dy_NT[:n], dy_scale_GN.t(), x_KT[:k], x_scale_GK.t(), self.out)

    def backward(self, dy: torch.Tensor, function) -> None:
        codes, scale, dy_NT, dy_scale = quantize_gradient(dy, self.groups)
        self.input_grad(codes, scale)
        self.weight_grad(dy_NT, dy_scale, *self.bring(function))

    def library(self, dy: torch.Tensor, dtype: torch.dtype) -> None:
        torch.mm(dy, self.w)
        torch.mm(dy.t(), self.x, out_dtype=dtype)


def measure(name: str, tokens: int) -> dict:
    outputs, inputs = SHAPES[name]
    case = Linear(tokens, outputs, inputs)
    codes, scale, dy_NT, dy_scale = case.quantised
    library = {
        kind: timed([lambda dy=dy, t=t: case.library(dy, t) for dy in case.dys])
        for kind, t in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    times = {
        "fp8": timed([lambda dy=dy: case.backward(dy, rescale_tokens) for dy in case.dys]),
        "fp8-jet": timed([lambda dy=dy: case.backward(dy, requantize_tokens) for dy in case.dys]),
    }
    parts = {
        "quantize_gradient": [lambda dy=dy: quantize_gradient(dy, case.groups) for dy in case.dys],
        "rescale_tokens": [lambda: case.bring(rescale_tokens)],
        "input_grad": [lambda: case.input_grad(codes, scale)],
        "weight_grad": [lambda: case.weight_grad(dy_NT, dy_scale, *case.x_codes)],
    }
    n, k = tokens * outputs, tokens * inputs
    floor = 4 * tokens * outputs * inputs / RATE["fp8"] + (4 * n + 2 * k) / BANDWIDTH
    best = min(library.values())
    return {
        "shape": name, "tokens": tokens, "outputs": outputs, "inputs": inputs, "us": times,
        "parts_us": {part: timed(calls) for part, calls in parts.items()},
        "cublas_bf16_us": library, "floor_us": 1e6 * floor,
        "ratio": {kind: best / time for kind, time in times.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--commit", default="", help="where there is no repository to ask")
    options = parser.parse_args()
    header = provenance()
    header["commit"] = options.commit or header["commit"]
    records = []
    for name in SHAPES:
        record = measure(name, options.tokens)
        records.append(record)
        parts = " ".join(f"{k} {v:.0f}" for k, v in record["parts_us"].items())
        library = " / ".join(f"{v:.0f}" for v in record["cublas_bf16_us"].values())
        print(
            f"{name:14s} fp8 {record['us']['fp8']:.0f} us ({record['ratio']['fp8']:.2f}x) fp8-jet "
            f"{record['us']['fp8-jet']:.0f} ({record['ratio']['fp8-jet']:.2f}x) cuBLAS {library} {parts}",
            flush=True,
        )
        text = json.dumps({**header, "records": records}, indent=1)
        (options.out / "backward_linear.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
