"""Launches attention for one query token a sequence over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from samebit.kernels.attention_decode import attention_decode_kernel, attention_fold_kernel
from samebit.kernels.attention_decode_codes import attention_decode_codes_kernel
from samebit.kernels.attention_decode_hopper import attention_decode_hopper_kernel
from samebit.kernels.attention_gradient import rows_descriptor
from samebit.kernels.attention_layout import (
    KEY_BLOCK,
    PLAIN_STAGES,
    SPLIT_KEYS,
    PagedLayout,
    on_card,
)
from samebit.kernels.attention_pages import LOG2E, or_unused, page_rows, pages_fit, strides_of

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
        if programs * triton.cdiv(splits, count) >= enough:
            return count
    return 1


def programs_at_once(x: torch.Tensor) -> int:
    """Programs of the kernel of codes that its card holds: two a multiprocessor."""
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count


def fast_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the warp-specialised kernel takes q [B, H, D] and this cache."""
    return on_card(q) and pages_fit(k, v) and q.shape[1] // k.shape[-2] <= MAX_GROUP


def launch_decode(q, k, v, scales, layout: PagedLayout, scale: float, result: Result) -> None:
    """Fill `result`; operands as `attention_forward` takes them, scales = (q, k, v) or three None."""
    _, k_scale, v_scale = scales
    B, H, D = q.shape
    G = k.shape[-2]
    fp8 = k_scale is not None
    quantize = result.scale is not None
    splits = max(triton.cdiv(layout.max_context, SPLIT_KEYS), 1)
    shape = (B, H, splits) if splits > 1 else (1, 1, 1)
    part_m = torch.empty(shape, dtype=torch.float32, device=q.device)
    part_l = torch.empty_like(part_m)
    part_acc = torch.empty((*shape, D), dtype=torch.float32, device=q.device)
    parts = (part_acc, part_m, part_l)
    constants = {
        "H": H, "D": D, "KB": KEY_BLOCK, "SPLIT_BLOCKS": SPLIT_KEYS // KEY_BLOCK,
        "enable_fp_fusion": False,
    }  # fmt: skip
    tables = (layout.block_table, layout.context_lens, layout.block_table.stride(0), scale * LOG2E)
    strides = strides_of(k, v, k_scale, v_scale)
    out_scale = result.lse if result.scale is None else result.scale
    scale_strides = (0, 0) if result.scale is None else result.scale.stride()
    finished = 1
    if fast_decode(q, k, v):
        k_rows, v_rows = page_rows(k), page_rows(v)
        assert k_rows is not None and v_rows is not None
        finished = splits_per_program(B * G, splits)
        chunks = triton.cdiv(splits, finished)
        boxes = [
            rows_descriptor(x, KEY_BLOCK >> part, rows[0])
            for x, rows in ((k, k_rows), (v, v_rows))
            for part in range(3)
        ]
        results = (result.out, out_scale, result.lse, *parts, *tables, splits, *scale_strides)
        rows = (*k_rows[1], *v_rows[1])
        options = {
            "G": G, "PAGE": k.shape[1], "SPLITS": finished, "QUANTIZE": quantize, "num_warps": 4, **constants,
        }  # fmt: skip
        if fp8:
            items = B * G * chunks
            order = layout.context_lens if layout.order is None else layout.order
            attention_decode_codes_kernel[(min(items, programs_at_once(q)),)](
                *boxes, q, *scales, *results, order, items, chunks, *rows, *strides[6:],
                N=_columns(H // G), ORDERED=layout.order is not None, SLOTS=4, CONVERTER_REGS=88,
                LOADER_REGS=40, maxnreg=80, **options,
            )  # fmt: skip
        else:
            attention_decode_hopper_kernel[(B * G, chunks)](
                *boxes, q, *results, *rows, SLOTS=3 if D == 128 else 6, FEEDER_REGS=24, maxnreg=128,
                **options,
            )  # fmt: skip
    else:
        assert not quantize, "the plain kernel has no codes"
        attention_decode_kernel[(B * G, splits)](
            q, k, v, *or_unused(scales, result.lse), result.out, result.lse, *parts, *tables,
            *strides, G=G, PAGE=k.shape[1], ROWS=64, STAGES=PLAIN_STAGES, FP8=fp8, num_warps=4, **constants,
        )  # fmt: skip
    if splits > finished:
        out = result.out.view(torch.uint8) if quantize else result.out
        attention_fold_kernel[(B, H)](
            *parts, out, out_scale, result.lse, layout.context_lens, splits, *scale_strides,
            FP8=fp8, FINISHED=finished, QUANTIZE=quantize, num_warps=1, **constants,
        )  # fmt: skip


def _columns(group: int) -> int:
    """Columns of the products of codes that hold a group's query heads."""
    return max(8, triton.next_power_of_2(group))
