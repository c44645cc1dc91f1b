"""Host side of the Hopper GEMM: tiles, descriptors and the launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from samebit.kernels import _gemm_plain as plain
from samebit.kernels._gemm_hopper import hopper_gemm_kernel
from samebit.kernels._gemm_problem import GLOBAL, NONE, RING
from samebit.kernels.launch import Box, form, launch, processors, rows_box

GROUP = 128


@dataclass(frozen=True)
class Tile:
    """One tuned configuration. No field changes a result's bits.

    rows, columns: rows of the M-side and of the N-side operand a tile covers. swap: the weights are
    the M side. consumers: warp groups that multiply, 64 rows each. stages: slots of the operand
    ring. hold: K steps a slot holds. depth: K steps a consumer multiplies at once (block scaling).
    ring: per-row scales come through the ring when their layout allows. group: row tiles that share
    their columns in L2. per_sm: resident programs an SM. registers: a thread's launch registers.
    """

    rows: int = 128
    columns: int = 128
    swap: bool = False
    consumers: int = 2
    stages: int = 3
    hold: int = 1
    depth: int = 1
    ring: bool = True
    group: int = 8
    per_sm: int = 1
    registers: int = 168


def tma_ready(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can address `tensor`: 16-byte aligned base and rows."""
    return (
        tensor.stride(1) == 1
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * tensor.element_size() % 16 == 0
    )


def _scale_source(scale: torch.Tensor, vector: bool, ring: bool) -> int:
    """Through the ring only if every group's row of scales starts on 16 bytes: the copy engine
    stops with an illegal instruction otherwise."""
    if not vector:
        return NONE.value
    aligned = scale.ndim == 2 and scale.stride(0) == 1 and scale.data_ptr() % 16 == 0
    if ring and aligned and (scale.stride(1) % 4 == 0 or scale.shape[1] == 1):
        return RING.value
    return GLOBAL.value


def _scale_box(scale: torch.Tensor, source: int, rows: int, other: Box) -> Box:
    """A flat view: a box past a group's last row reads the next group's, for rows not stored."""
    if source != RING.value:
        return other
    length = (scale.shape[1] - 1) * scale.stride(1) + scale.shape[0]
    return Box(scale, form((rows,), 0, 32), (length,), (1,))


def hopper_gemm(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    out_MN: torch.Tensor,
    mode: int,
    tile: Tile,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    w_scale_rows: int = 1,
    promote: int = GROUP,
    bias_N: torch.Tensor | None = None,
    add: bool = False,
) -> torch.Tensor:
    """Launch the kernel on out = x w^T; scales are [rows] or [rows, groups], any strides."""
    M, N = out_MN.shape
    if M == 0 or N == 0:
        return out_MN
    step = 64 if mode == plain.BF16 else GROUP
    steps = -(-x_MK.shape[1] // step)
    span = promote // step
    hold, depth = tile.hold, tile.depth
    if mode != plain.BLOCK:
        hold = math.gcd(hold, steps, span if mode == plain.ROW else steps)
    stages = tile.stages * tile.hold // hold
    a, b, sa, sb, a_vector, b_vector = x_MK, w_NK, x_scale, w_scale, True, w_scale_rows == 1
    rows, cols = M, N
    if tile.swap:
        a, b, sa, sb, a_vector, b_vector = b, a, sb, sa, b_vector, a_vector
        rows, cols = N, M
    sa = out_MN if sa is None else sa
    sb = out_MN if sb is None else sb
    ring = tile.ring and mode == plain.BLOCK
    a_source, b_source = _scale_source(sa, a_vector, ring), _scale_source(sb, b_vector, ring)
    tma_out = not tile.swap and not add and out_MN.dtype == torch.bfloat16 and tma_ready(out_MN)
    a_desc = rows_box(a, min(tile.rows, 64), step)
    assert tile.rows == 64 * tile.consumers or (tile.rows, tile.consumers) == (32, 1)
    assert stages <= 32, "the kernel keeps 32 barriers"
    tiles = -(-rows // tile.rows) * -(-cols // tile.columns)
    grid = (min(tiles, processors(out_MN) * tile.per_sm),)
    launch(hopper_gemm_kernel, grid,
        a_desc, rows_box(b, tile.columns, step),
        _scale_box(sa, a_source, min(tile.rows, 64), a_desc),
        _scale_box(sb, b_source, max(tile.columns, 32), a_desc),
        rows_box(out_MN, 64, tile.columns) if tma_out else a_desc,
        out_MN, sa, sb, out_MN if bias_N is None else bias_N, rows, cols, steps, out_MN.stride(0),
        sa.stride(0), sa.stride(1) if sa.ndim > 1 else 0,
        sb.stride(0), sb.stride(1) if sb.ndim > 1 else 0,
        MODE=mode, SWAP=tile.swap, A_SCALE=a_source, B_SCALE=b_source, BM=tile.rows,
        BN=tile.columns, CONSUMERS=tile.consumers, STAGES=stages, HOLD=hold, DEPTH=depth,
        REST=steps % depth, SPAN=max(span // hold, 1), GROUP_ROWS=tile.group,
        HAS_BIAS=bias_N is not None, ADD=add, TMA_OUT=tma_out,
        WHOLE=not tile.swap and N % 16 == 0 and tma_ready(out_MN),
        num_warps=4, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out_MN
