"""The Hopper kernels compile without a GPU, run on `wgmma` and hold no hidden contraction."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from samebit.kernels._gemm_hopper import hopper_gemm_kernel as kernel
from samebit.kernels._gemm_tuning import load_table

TILES = load_table("tuning_h200.json")["tiles"]
BLOCK, ROW, INT8, BF16 = 1, 2, 3, 4


def descriptor(dtype: str, shape: list[int], bits: int) -> str:
    width = min(128, shape[-1] * bits // 8) if len(shape) == 2 else 0
    return f"tensordesc<{dtype}{shape},{gl.NVMMASharedLayout(width, bits, len(shape))!r}>"


def compile_ptx(mode: int, tile, *, gradient: bool = False) -> str:
    """PTX for sm_90 of one tile, specialised as the launcher does for aligned operands."""
    dtype, bits = {ROW: ("fp8e4nv", 8), BLOCK: ("fp8e4nv", 8), INT8: ("i8", 8), BF16: ("bf16", 16)}[
        mode
    ]
    step = 1024 // bits
    vector = 2 if mode == BLOCK else 1
    a_scale = 0 if mode == BLOCK and tile.swap else vector
    b_scale = 0 if mode == BLOCK and not tile.swap and not gradient else vector
    out = "fp32" if gradient else "bf16"
    tma_out = not tile.swap and not gradient
    a_desc = descriptor(dtype, [min(tile.rows, 64), step], bits)
    types = {name: "i32" for name in kernel.arg_names}
    types |= {
        "a_desc": a_desc,
        "b_desc": descriptor(dtype, [tile.columns, step], bits),
        "sa_desc": descriptor("fp32", [min(tile.rows, 64)], 32) if a_scale == 2 else a_desc,
        "sb_desc": descriptor("fp32", [max(tile.columns, 32)], 32) if b_scale == 2 else a_desc,
        "out_desc": descriptor("bf16", [64, tile.columns], 16) if tma_out else a_desc,
        "out_ptr": f"*{out}", "sa_ptr": "*fp32", "sb_ptr": "*fp32", "bias_ptr": "*bf16",
    }  # fmt: skip
    constants = {
        "MODE": mode, "SWAP": tile.swap, "A_SCALE": a_scale, "B_SCALE": b_scale, "BM": tile.rows,
        "BN": tile.columns, "CONSUMERS": tile.consumers, "STAGES": tile.stages, "HOLD": tile.hold,
        "DEPTH": tile.depth, "REST": 0, "SPAN": max(4 // tile.hold, 1), "GROUP_ROWS": tile.group,
        "HAS_BIAS": True, "ADD": gradient, "TMA_OUT": tma_out, "WHOLE": not tile.swap,
    }  # fmt: skip
    types |= dict.fromkeys(constants, "constexpr")
    position = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {
        position[name]: [["tt.divisibility", 16]]
        for name in ("out_ptr", "sa_ptr", "sb_ptr", "bias_ptr", "stride_out")
    }
    source = GluonASTSource(
        kernel, types, {position[name]: value for name, value in constants.items()}, aligned
    )
    options = {"num_warps": 4, "maxnreg": tile.registers, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize(
    ("mode", "name", "gradient"),
    [
        (BLOCK, "s64x16", False),
        (BLOCK, "m64x64d4", False),
        (BLOCK, "m192x128", False),
        (BLOCK, "m128x128h2", True),
        (ROW, "m192x128", False),
        (INT8, "m64x64d2", False),
        (BF16, "s64x16", False),
    ],
)
def test_tile_compiles_to_wgmma_with_explicit_fma_only(mode, name, gradient):
    ptx = compile_ptx(mode, TILES[name], gradient=gradient)
    assert "wgmma.mma_async" in ptx and not re.search(r"^\s*mma\.sync", ptx, re.MULTILINE)
    # The only fused multiply-adds are the promotions, written as such.
    fused = len(re.findall(r"^\s*fma\.rn\.f32", ptx, re.MULTILINE))
    tile = TILES[name]
    promotions = tile.consumers * tile.depth * 64 * tile.columns // 128
    assert fused == (promotions if mode == BLOCK else 0)
    assert not re.search(r"^\s*(fma|mad)\.(rn\.)?(ftz|f64|bf16)", ptx, re.MULTILINE)
    assert not re.search(r"^\s*(@\S+\s+)?(atom|red)\.", ptx, re.MULTILINE)
