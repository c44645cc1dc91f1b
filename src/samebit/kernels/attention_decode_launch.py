"""Launches attention for one query token a sequence over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from samebit.kernels.attention_decode import attention_decode_kernel, attention_fold_kernel
from samebit.kernels.attention_decode_codes import attention_decode_codes_kernel
from samebit.kernels.attention_decode_hopper import attention_decode_hopper_kernel
from samebit.kernels.attention_gradient import head_rows
from samebit.kernels.attention_layout import (
    KEY_BLOCK,
    PLAIN_STAGES,
    SPLIT_KEYS,
    PagedLayout,
    on_card,
)
from samebit.kernels.attention_pages import LOG2E, or_unused, page_rows, pages_fit, strides_of
from samebit.kernels.launch import cdiv, launch, next_power_of_2, processors

MAX_GROUP = 32
"""Query heads of a group that the warp-specialised kernel holds; the plain kernel takes 64."""


@dataclass(frozen=True)
class Result:
    """What decode fills.

    out: BF16 [B, H, D]; with `scale` [B, H] (any strides), e4m3 codes of the BF16 result instead, D = 128.
    lse: FP32 [B, H], natural log.
    """

    out: torch.Tensor
    scale: torch.Tensor | None
    lse: torch.Tensor


def splits_per_program(programs: int, splits: int) -> int:
    """Splits that one decode program walks: more amortise its start, fewer fill the card.

    A scheduling choice only: every split's partial result and their fold are the same.
    """
    for count, enough in ((4, 1024), (2, 256)):
        if programs * cdiv(splits, count) >= enough:
            return count
    return 1


def programs_at_once(x: torch.Tensor) -> int:
    """Programs of the kernel of codes that its card holds: two a multiprocessor."""
    return 2 * processors(x)


def fast_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the warp-specialised kernel takes q [B, H, D] and this cache."""
    return on_card(q) and pages_fit(k, v) and q.shape[1] // k.shape[-2] <= MAX_GROUP


def launch_decode(q, k, v, scales, layout: PagedLayout, scale: float, result: Result) -> None:
    """Fill `result`; operands as `attention_forward` takes them, scales = (q, k, v) or three None."""
    B, H, D = q.shape
    splits = max(cdiv(layout.max_context, SPLIT_KEYS), 1)
    call = _Call(q, k, v, scales, layout, scale * LOG2E, result, splits, _parts(q, splits))
    constants = {
        "H": H, "D": D, "KB": KEY_BLOCK, "SPLIT_BLOCKS": SPLIT_KEYS // KEY_BLOCK,
        "enable_fp_fusion": False,
    }  # fmt: skip
    finished = 1
    if fast_decode(q, k, v):
        finished = splits_per_program(B * k.shape[-2], splits)
        _launch_fast(call, finished, constants)
    else:
        _launch_plain(call, constants)
    if splits > finished:
        out = result.out if result.scale is None else result.out.view(torch.uint8)
        launch(attention_fold_kernel, (B, H),
            *call.parts, out, call.out_scale, result.lse, layout.context_lens, splits,
            *call.scale_strides, FP8=call.fp8, FINISHED=finished, QUANTIZE=result.scale is not None,
            num_warps=1, **constants,
        )  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """One decode: operands, where they lie, and what is filled. factor: softmax scale in units of log2."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scales: tuple
    layout: PagedLayout
    factor: float
    result: Result
    splits: int
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @property
    def fp8(self) -> bool:
        return self.scales[1] is not None

    @property
    def tables(self) -> tuple:
        rows = self.layout
        return (rows.block_table, rows.context_lens, rows.block_table.stride(0), self.factor)

    @property
    def strides(self) -> list[int]:
        return strides_of(self.k, self.v, *self.scales[1:])

    @property
    def out_scale(self) -> torch.Tensor:
        return self.result.lse if self.result.scale is None else self.result.scale

    @property
    def scale_strides(self) -> tuple[int, ...]:
        return (0, 0) if self.result.scale is None else self.result.scale.stride()


def _parts(q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(accumulator, maximum, sum) of every split, where there are several."""
    B, H, D = q.shape
    shape = (B, H, splits) if splits > 1 else (1, 1, 1)
    acc = torch.empty((*shape, D), dtype=torch.float32, device=q.device)
    maximum, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in "ml")
    return acc, maximum, total


def _launch_fast(call: _Call, finished: int, constants: dict[str, Any]) -> None:
    """The warp-specialised kernels; a program walks `finished` splits of a head."""
    q, k, v, layout, result = call.q, call.k, call.v, call.layout, call.result
    k_rows, v_rows = page_rows(k), page_rows(v)
    assert k_rows is not None and v_rows is not None
    (B, H, D), G = q.shape, k.shape[-2]
    chunks = cdiv(call.splits, finished)
    boxes = [
        head_rows(x, KEY_BLOCK >> part, rows[0])
        for x, rows in ((k, k_rows), (v, v_rows))
        for part in range(3)
    ]
    results = (
        result.out, call.out_scale, result.lse, *call.parts, *call.tables, call.splits,
        *call.scale_strides,
    )  # fmt: skip
    rows = (*k_rows[1], *v_rows[1])
    options = {
        "G": G, "PAGE": k.shape[1], "SPLITS": finished, "QUANTIZE": result.scale is not None,
        "num_warps": 4, **constants,
    }  # fmt: skip
    if not call.fp8:
        launch(attention_decode_hopper_kernel, (B * G, chunks),
            *boxes, q, *results, *rows, SLOTS=3 if D == 128 else 6, FEEDER_REGS=24, maxnreg=128,
            **options,
        )  # fmt: skip
        return
    items = B * G * chunks
    order = layout.context_lens if layout.order is None else layout.order
    launch(attention_decode_codes_kernel, (min(items, programs_at_once(q)),),
        *boxes, q, *call.scales, *results, order, items, chunks, *rows, *call.strides[6:],
        N=_columns(H // G), ORDERED=layout.order is not None, SLOTS=4, FEEDER_REGS=88,
        maxnreg=128, **options,
    )  # fmt: skip


def _launch_plain(call: _Call, constants: dict[str, Any]) -> None:
    """A program a split, by ordinary loads."""
    assert call.result.scale is None, "the plain kernel has no codes"
    q, k, result = call.q, call.k, call.result
    launch(attention_decode_kernel, (q.shape[0] * k.shape[-2], call.splits),
        q, k, call.v, *or_unused(call.scales, result.lse), result.out, result.lse, *call.parts,
        *call.tables, *call.strides, G=k.shape[-2], PAGE=k.shape[1], ROWS=64, STAGES=PLAIN_STAGES,
        FP8=call.fp8, num_warps=4, **constants,
    )  # fmt: skip


def _columns(group: int) -> int:
    """Columns of the products of codes that hold a group's query heads."""
    return max(8, next_power_of_2(group))
