"""Host side of the Hopper GEMM: tiles, descriptors and the launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from samebit.kernels import _gemm_plain as plain
from samebit.kernels._gemm_hopper import hopper_gemm_kernel

GROUP = 128


@dataclass(frozen=True)
class Tile:
    """One tuned configuration. No field changes a result's bits.

    rows, columns: rows of the M-side and of the N-side operand a tile covers. swap: the weights are
    the M side. width: columns of one accumulator. consumers: warp groups that multiply. stages:
    depth of the operand ring. depth: products in flight a consumer. group: row tiles that share
    their columns in L2. per_sm: resident programs an SM; registers: a thread's launch registers.
    """

    rows: int = 128
    columns: int = 128
    swap: bool = False
    width: int = 128
    consumers: int = 2
    stages: int = 4
    depth: int = 2
    group: int = 8
    per_sm: int = 1
    registers: int = 168

    @property
    def strip(self) -> int:
        """Rows of the M-side operand one consumer owns."""
        return max(self.rows // self.consumers, 64)


@functools.lru_cache
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = NVMMASharedLayout(min(128, columns * tensor.element_size()), tensor.element_size() * 8)
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout
    )


def tma_ready(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can address `tensor`: 16-byte aligned base and rows."""
    return (
        tensor.stride(1) == 1
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * tensor.element_size() % 16 == 0
    )


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
    steps = triton.cdiv(x_MK.shape[1], step)
    a, b, sa, sb = x_MK, w_NK, x_scale, w_scale
    rows, cols, strides = M, N, out_MN.stride()
    if tile.swap:
        a, b, sa, sb = b, a, sb, sa
        rows, cols, strides = N, M, strides[::-1]
    vectors = w_scale_rows == 1
    tma_out = not tile.swap and not add and tma_ready(out_MN) and out_MN.dtype == torch.bfloat16
    a_desc = _descriptor(a, tile.rows, step)
    out_desc = _descriptor(out_MN, 64, tile.width) if tma_out else a_desc
    sa = out_MN if sa is None else sa
    sb = out_MN if sb is None else sb
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(cols, tile.columns)
    grid = (min(tiles, _sm_count(out_MN.device.index or 0) * tile.per_sm),)
    hopper_gemm_kernel[grid](
        a_desc, _descriptor(b, tile.columns, step), out_desc, out_MN, sa, sb,
        out_MN if bias_N is None else bias_N, rows, cols, steps, *strides,
        sa.stride(0), sa.stride(1) if sa.ndim > 1 else 0,
        sb.stride(0), sb.stride(1) if sb.ndim > 1 else 0,
        MODE=mode, SWAP=tile.swap, A_VEC=vectors or not tile.swap, B_VEC=vectors or tile.swap,
        BM=tile.rows, BN=tile.columns, STRIP=tile.strip, TN=tile.width, CONSUMERS=tile.consumers,
        STAGES=tile.stages, GROUP_ROWS=tile.group, SPAN=promote // step, DEPTH=tile.depth,
        REST=steps % tile.depth, HAS_BIAS=bias_N is not None, ADD=add, TMA_OUT=tma_out,
        REGISTERS=240, num_warps=4, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out_MN
