"""The shapes, candidate tiles and operands that bench/gemm.py times."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from samebit.kernels._gemm_fast import Tile
from samebit.kernels.gemm_bf16 import bf16_gemm
from samebit.kernels.gemm_fp8_block import fp8_block_gemm
from samebit.kernels.gemm_fp8_row import fp8_row_gemm
from samebit.kernels.gemm_fp8_wgrad import fp8_block_wgrad
from samebit.kernels.gemm_int8 import int8_gemm

REGISTERS = {(1, 1): 168, (1, 2): 128, (2, 1): 168, (3, 1): 128, (4, 1): 96}
"""Launch registers a thread by (consumers, programs an SM): they share 65,536."""


def _tile(rows, columns, consumers, stages, hold, depth, per_sm=1, **more) -> Tile:
    return Tile(
        rows=rows, columns=columns, consumers=consumers, stages=stages, hold=hold, depth=depth,
        per_sm=per_sm, registers=REGISTERS[consumers, per_sm], **more,
    )  # fmt: skip


TILES = {
    "s64x16": _tile(64, 16, 1, 5, 4, 4, swap=True),
    "s64x16p2": _tile(64, 16, 1, 5, 2, 2, per_sm=2, swap=True),
    "s32x16p2": _tile(32, 16, 1, 5, 2, 2, per_sm=2, swap=True),
    "s64x32": _tile(64, 32, 1, 4, 4, 4, swap=True),
    "s64x32p2": _tile(64, 32, 1, 4, 2, 2, per_sm=2, swap=True),
    "m64x32": _tile(64, 32, 1, 4, 4, 4),
    "m64x32p2": _tile(64, 32, 1, 4, 2, 2, per_sm=2),
    "m64x64d4": _tile(64, 64, 1, 3, 4, 4),
    "m64x64d2": _tile(64, 64, 1, 6, 2, 2),
    "m64x64p2": _tile(64, 64, 1, 3, 2, 2, per_sm=2),
    "m64x128": _tile(64, 128, 1, 4, 2, 2),
    "m128x64": _tile(128, 64, 2, 4, 2, 2),
    "m128x128d1": _tile(128, 128, 2, 5, 1, 1),
    "m128x128s6": _tile(128, 128, 2, 6, 1, 1),
    "m128x128d2": _tile(128, 128, 2, 5, 1, 2),
    "m128x128d2g": _tile(128, 128, 2, 6, 1, 2, ring=False),
    "m128x128d2w": _tile(128, 128, 2, 6, 1, 2),
    "m128x128h2": _tile(128, 128, 2, 3, 2, 2),
    "m128x128h2g16": _tile(128, 128, 2, 3, 2, 2, group=16),
    "m192x128": _tile(192, 128, 3, 4, 1, 1),
    "m192x128g4": _tile(192, 128, 3, 4, 1, 1, group=4),
    "m256x128": _tile(256, 128, 4, 3, 1, 1),
    "m128x256": _tile(128, 256, 2, 3, 1, 1),
}
_FEW = [
    [16, ["s64x16", "s64x16p2", "s32x16p2"]],
    [32, ["s64x32", "s64x32p2", "m64x32", "m64x64d4", "m64x64d2"]],
    [64, ["m64x32", "m64x32p2", "m64x64d4", "m64x64d2"]],
    [128, ["m64x64d4", "m64x64d2", "m64x64p2", "m64x128"]],
]
_SOME = [
    [16, ["s64x16", "s64x16p2"]],
    [64, ["m64x32", "m64x64d2"]],
    [128, ["m64x64d2", "m64x128"]],
    [512, ["m64x128", "m128x128s6"]],
]
CANDIDATES = {
    "fp8_block": [
        *_FEW,
        [256, ["m64x128", "m128x64", "m128x128d2", "m128x128d2g"]],
        [512, ["m64x128", "m128x128d2", "m128x128d2g"]],
        [None, ["m128x128d2", "m128x128d2g", "m192x128", "m192x128g4"]],
    ],
    "fp8_row": [*_SOME, [None, ["m128x128s6", "m192x128", "m192x128g4"]]],
    "int8": [*_SOME, [None, ["m128x128s6", "m192x128", "m256x128", "m128x256"]]],
    "bf16": [*_SOME, [None, ["m128x256", "m128x128s6"]]],
    "fp8_wgrad": [[None, ["m128x128h2", "m128x128h2g16", "m128x128d2w", "m192x128"]]],
    "fp8_wgrad_xblock": [[None, ["m128x128h2", "m128x128d2w", "m192x128"]]],
}
"""Per operator: [largest number of rows, tile names to try]."""

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
    "w_o": (4096, 8192), "w_gate_up": (4096, 8192), "w_down": (12288, 8192),
    "dx_qkv": (4096, 6144), "dx_gate_up": (4096, 24576), "dx_down": (12288, 4096),
    "smol_qkv": (1152, 640), "smol_gate_up": (3072, 640), "smol_down": (640, 1536),
    "q06_qkv": (4096, 1024), "q06_gate_up": (6144, 1024), "q06_down": (1024, 3072),
    "warm": (256, 2560),
}  # fmt: skip
"""(outputs, K). w_: weight gradients, K = tokens. dx_: input gradients. smol_: SmolLM2-135M as
stored; q06_: Qwen3-0.6B."""

_WGRAD = ("fp8_wgrad", "fp8_wgrad_xblock")
_BIG = ("qkv", "o", "gate_up", "down")
_FORWARD = ("fp8_block", "fp8_row", "int8", "bf16")
BUCKETS = [
    *((s, 8192, _FORWARD) for s in _BIG),
    ("w_o", 4096, _WGRAD),
    ("w_gate_up", 24576, _WGRAD),
    ("w_down", 4096, _WGRAD),
    *((s, m, _FORWARD) for m in (16, 64, 128, 512) for s in _BIG),
    *((s, m, ("fp8_block",)) for m in (32, 256, 1024, 4096) for s in _BIG),
    *((s, 8192, ("fp8_block",)) for s in ("dx_qkv", "dx_gate_up", "dx_down")),
    *((s, m, ("fp8_block",)) for m in (16, 128, 8192) for s in SHAPES if s[:3] in ("smo", "q06")),
    *((s, 32768, ("fp8_block",)) for s in _BIG),
]
"""(shape, rows, operators) in the order they are timed."""


@dataclass
class Case:
    """Operands of one operator at one shape, with several weight copies to rotate over."""

    operator: str
    rows: int
    outputs: int
    depth: int
    x: torch.Tensor
    weights: list[torch.Tensor]
    x_scale: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        dtype = torch.float32 if self.operator.startswith("fp8_wgrad") else torch.bfloat16
        self.out = torch.empty(self.rows, self.outputs, device="cuda", dtype=dtype)

    def launches(self, tile: Tile | None) -> list:
        """One call per weight copy; tile None is the shipped table's choice."""
        if self.operator == "bf16":
            return [
                lambda w=w: bf16_gemm(self.x, w, self.out, n=self.outputs, tile=tile)
                for w in self.weights
            ]
        function = {
            "fp8_block": fp8_block_gemm, "fp8_row": fp8_row_gemm, "int8": int8_gemm,
            "fp8_wgrad": fp8_block_wgrad, "fp8_wgrad_xblock": fp8_block_wgrad,
        }[self.operator]  # fmt: skip
        return [
            lambda w=w: function(self.x, self.x_scale, w, self.w_scale, self.out, tile=tile)
            for w in self.weights
        ]


def _codes(rows: int, columns: int, operator: str) -> torch.Tensor:
    values = torch.randn(rows, columns, device="cuda")
    if operator == "int8":
        return (values * 40).round().clamp(-127, 127).to(torch.int8)
    return values.to(torch.bfloat16 if operator == "bf16" else torch.float8_e4m3fn)


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda") * 0.01 + 0.001


def make_case(operator: str, shape: str, rows: int, copies: int) -> Case:
    """Random operands; per-row scales in the layout the kernels read fastest."""
    outputs, depth = SHAPES[shape]
    groups = depth // 128
    x_scale = w_scale = None
    if operator == "fp8_block":
        x_scale, w_scale = _scales(groups, rows).T, _scales(outputs // 128, groups)
    elif operator.startswith("fp8_wgrad"):
        columns = outputs // 128 if operator.endswith("xblock") else outputs
        x_scale, w_scale = _scales(groups, rows).T, _scales(groups, columns).T
    elif operator != "bf16":
        x_scale, w_scale = _scales(rows), _scales(outputs)
    weights = [_codes(outputs, depth, operator) for _ in range(copies)]
    return Case(
        operator, rows, outputs, depth, _codes(rows, depth, operator), weights, x_scale, w_scale
    )


def library_fp8(case: Case) -> dict[str, list]:
    """The library's FP8 products of the same kind, where this torch has them."""
    out_dtype = torch.bfloat16
    if case.operator == "fp8_row":
        row, column = case.x_scale[:, None], case.w_scale[None, :]
        return {
            "cublas_row": [
                lambda w=w: torch._scaled_mm(case.x, w.t(), row, column, out_dtype=out_dtype)
                for w in case.weights
            ]
        }
    if case.operator == "fp8_block":
        from torch.nn.functional import ScalingType, scaled_mm

        def block(w):
            return scaled_mm(
                case.x, w.t(), case.x_scale, ScalingType.BlockWise1x128, case.w_scale.t(),
                ScalingType.BlockWise128x128, output_dtype=out_dtype,
            )  # fmt: skip

        try:
            block(case.weights[0])
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"  library block-scaled product: {str(error)[:160]}")
            return {}
        return {"cublas_block": [lambda w=w: block(w) for w in case.weights]}
    return {}
