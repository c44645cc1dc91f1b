"""What a decode step needs besides the model: slots, contexts and noise keys before it, the next
inputs after it. All of it happens on the device, so that step follows step without the host.

A row's metadata, int32 [HEADER + P]: position of its token (-1: idle), 0, the low and the high word of
its noise state (`reference.sampling.stream_state`), and its page numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import cdiv, launch

HEADER = 4
"""Words before a row's page numbers."""
_HEADER = tl.constexpr(HEADER)
ROWS = 128


@triton.jit
def _splitmix64(x):
    x = x + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _word(ptr, mask):
    return tl.load(ptr, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _prepare_kernel(
    meta_ptr, position_ptr, slot_ptr, context_ptr, key_ptr, T, width,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < T
    row = meta_ptr + r * width
    position = tl.load(row, mask=inside, other=-1)
    active = position >= 0
    position = tl.maximum(position, 0)
    page = tl.load(row + _HEADER + position // PAGE, mask=active, other=0).to(tl.int64)
    # idle rows write to page 0, which belongs to nobody
    slot = tl.where(active, page * PAGE + position % PAGE, (r % PAGE).to(tl.int64))
    state = _word(row + 2, active) | (_word(row + 3, active) << 32)
    key = _splitmix64(state ^ (position + 1).to(tl.uint64))
    low = (key & tl.full((), 0xFFFFFFFF, tl.uint64)).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    tl.store(position_ptr + r, position.to(tl.int64), mask=inside)
    tl.store(slot_ptr + r, slot, mask=inside)
    tl.store(context_ptr + r, tl.where(active, position + 1, 0), mask=inside)
    tl.store(key_ptr + 2 * r, low.to(tl.int32, bitcast=True), mask=inside)
    tl.store(key_ptr + 2 * r + 1, high.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _advance_kernel(
    drawn_ptr, logp_ptr, meta_ptr, id_ptr, out_ptr, T, width, vocabulary, ROWS: tl.constexpr
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < T
    position = tl.load(meta_ptr + r * width, mask=inside, other=-1)
    active = position >= 0
    drawn = tl.load(drawn_ptr + r, mask=inside, other=0)
    logp = tl.load(logp_ptr + r, mask=inside, other=0.0)
    tl.store(out_ptr + 2 * r, drawn.to(tl.int32), mask=inside)
    tl.store(out_ptr + 2 * r + 1, logp.to(tl.int32, bitcast=True), mask=inside)
    # the id of a row of NaN is none: the host stops at its log-prob, the next step must not fault
    tl.store(id_ptr + r, tl.where(drawn < vocabulary, drawn, 0), mask=active)
    tl.store(meta_ptr + r * width, position + 1, mask=active)


@triton.jit
def _order_kernel(context_ptr, order_ptr, B, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    context = tl.load(context_ptr + r, mask=r < B, other=0)
    rank = tl.zeros([ROWS], tl.int32)
    for first in range(0, B, ROWS):
        j = first + tl.arange(0, ROWS)
        other = tl.load(context_ptr + j, mask=j < B, other=-1)
        before = (other[None, :] > context[:, None]) | (
            (other[None, :] == context[:, None]) & (j[None, :] < r[:, None])
        )
        rank += tl.sum((before & (j < B)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + rank, r, mask=r < B)


def longest_first(contexts_B: torch.Tensor) -> torch.Tensor:
    """Sequences by falling context, int32 [B]; contexts int32 [B], contiguous."""
    order = torch.empty_like(contexts_B)
    B = contexts_B.numel()
    launch(_order_kernel, (cdiv(B, ROWS),), contexts_B, order, B, ROWS=ROWS, num_warps=4)
    return order


def prepare(
    meta_BW: torch.Tensor,
    positions_B: torch.Tensor,
    slots_B: torch.Tensor,
    contexts_B: torch.Tensor,
    keys_B2: torch.Tensor,
    page_size: int,
) -> None:
    """Fill positions and slots (int64), contexts (int32, 0 for idle rows) and noise keys from `meta`."""
    B, width = meta_BW.shape
    launch(_prepare_kernel, (cdiv(B, ROWS),),
        meta_BW, positions_B, slots_B, contexts_B, keys_B2, B, width,
        PAGE=page_size, ROWS=ROWS, num_warps=4,
    )  # fmt: skip


def advance(
    drawn_B: torch.Tensor,
    logp_B: torch.Tensor,
    meta_BW: torch.Tensor,
    ids_B: torch.Tensor,
    out_B2: torch.Tensor,
    vocabulary: int,
) -> None:
    """Note (id, bits of the log-prob) in out int32 [B, 2]; active rows take the id and move on by one."""
    B, width = meta_BW.shape
    launch(
        _advance_kernel,
        (cdiv(B, ROWS),),
        drawn_B,
        logp_B,
        meta_BW,
        ids_B,
        out_B2,
        B,
        width,
        vocabulary,
        ROWS=ROWS,
        num_warps=4,
    )
