"""Token embedding: gather, and a deterministic backward without atomics.

Backward: token positions are sorted by id (stable), and one program adds up the gradient rows of
one id in position order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import cdiv, launch, next_power_of_2
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, round_to_bf16


@triton.jit
def _embed_kernel(ids_ptr, weight_ptr, out_ptr, weight_stride, K, WIDTH: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(ids_ptr + t).to(tl.int64)
    x = tl.load(weight_ptr + row * weight_stride + k, mask=k < K)
    tl.store(out_ptr + t * K + k, round_to_bf16(x.to(tl.float32)), mask=k < K)


@triton.jit
def _embed_backward_kernel(
    sorted_ids_ptr, order_ptr, dy_ptr, dweight_ptr, T, K, WIDTH: tl.constexpr
):
    i = tl.program_id(0)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(sorted_ids_ptr + i)
    previous = tl.load(sorted_ids_ptr + i - 1, mask=i > 0, other=-1)
    if row != previous:
        address = dweight_ptr + row.to(tl.int64) * K + k
        total = tl.load(address, mask=k < K, other=0.0)
        j = i
        current = row
        while current == row:
            t = tl.load(order_ptr + j)
            total += tl.load(dy_ptr + t * K + k, mask=k < K, other=0.0).to(tl.float32)
            j += 1
            current = tl.load(sorted_ids_ptr + j, mask=j < T, other=-1)
        tl.store(address, total, mask=k < K)


def embed(ids_T: torch.Tensor, weight_VK: torch.Tensor) -> torch.Tensor:
    """BF16 rows of `weight` [V, K] (FP32 or BF16) at `ids` [T] (int32 or int64) in [0, V)."""
    T, K = ids_T.shape[0], weight_VK.shape[1]
    assert weight_VK.stride(1) == 1
    out = torch.empty((T, K), dtype=torch.bfloat16, device=weight_VK.device)
    width = min(next_power_of_2(K), 4096)
    if T:
        launch(
            _embed_kernel,
            (T, cdiv(K, width)),
            ids_T,
            weight_VK,
            out,
            weight_VK.stride(0),
            K,
            WIDTH=width,
            num_warps=4,
            **NUMERIC_OPTIONS,
        )
    return out


def embed_backward(
    dy_TK: torch.Tensor, ids_T: torch.Tensor, dweight_VK: torch.Tensor
) -> torch.Tensor:
    """Add the gradient rows dy BF16 [T, K] into `dweight` FP32 [V, K] at `ids`; return it."""
    T, K = dy_TK.shape
    assert dy_TK.is_contiguous() and dweight_VK.is_contiguous()
    assert dweight_VK.dtype == torch.float32
    if T == 0:
        return dweight_VK
    sorted_ids, order = torch.sort(ids_T, stable=True)
    width = min(next_power_of_2(K), 1024)
    launch(
        _embed_backward_kernel,
        (T, cdiv(K, width)),
        sorted_ids,
        order,
        dy_TK,
        dweight_VK,
        T,
        K,
        WIDTH=width,
        num_warps=4,
        **NUMERIC_OPTIONS,
    )
    return dweight_VK
