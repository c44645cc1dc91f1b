"""The operator set's attention on Hopper: the model's layouts as the kernels' layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from samebit.kernels import attention_layout as kernel_layout
from samebit.kernels._ops_linear import GROUPS, quantize_activation
from samebit.kernels.attention import attention_codes, attention_forward, decodes_to_codes
from samebit.kernels.attention_gradient import attention_backward as backward
from samebit.kernels.decode_step import longest_first
from samebit.kernels.dequantize import dequantize
from samebit.layout import Layout, PackedLayout, PagedLayout, to_device
from samebit.operand import HeadCodes, Heads, Operand
from samebit.spec import BF16, FP8_HEAD, FP16, Attention, Precision


def check_spec(spec: Attention) -> None:
    """ValueError where a plan's attention constants are not those compiled into the kernels."""
    constants = (kernel_layout.KEY_BLOCK, kernel_layout.SPLIT_KEYS)
    if (spec.kv_block, spec.kv_split) != constants:
        raise ValueError(
            f"the Hopper attention kernels walk KV blocks of {constants[0]} keys in splits of "
            f"{constants[1]}; the recipe asks for kv_block={spec.kv_block}, kv_split={spec.kv_split}"
        )
    if (spec.q, spec.kv, spec.probabilities) not in (
        (BF16, BF16, BF16),
        (FP8_HEAD, FP8_HEAD, FP16),
    ):
        raise ValueError(
            f"the Hopper kernels have no attention with Q {spec.q}, K and V {spec.kv}, probabilities "
            f"{spec.probabilities}; use BF16 for all, or {FP8_HEAD} with {FP16} probabilities"
        )


def packed(layout: PackedLayout) -> kernel_layout.PackedLayout:
    """The kernels' form of a packed layout, made once."""

    def make() -> kernel_layout.PackedLayout:
        rows = [(s.start, s.length, s.prefix_start, s.prefix_length) for s in layout.segments]
        return kernel_layout.PackedLayout.build(rows, layout.device)

    return layout.derived("attention", make)


def prepare_packed(layout: PackedLayout) -> None:
    """Put on the device now what a training step reads of a layout: a copy later would wait for it."""
    packed(layout)
    assert layout.positions.is_cuda == layout.token_groups.is_cuda


def paged(layout: PagedLayout) -> kernel_layout.PagedLayout:
    """The kernels' form of a paged layout, made once (one copy to the host if it was built there).

    A sequence's rows must be consecutive in the batch, in order of position and of sequence.
    """
    return layout.derived("attention", lambda: _paged(layout))


def paged_by_context(layout: PagedLayout) -> kernel_layout.PagedLayout:
    """The same with the order of decode's sequences by context, which the kernel of FP8 caches reads."""

    def make() -> kernel_layout.PagedLayout:
        rows = paged(layout)
        decode = rows.query_starts is None and rows.context_lens.is_cuda
        return replace(rows, order=longest_first(rows.context_lens)) if decode else rows

    return layout.derived("attention by context", make)


def _paged(layout: PagedLayout) -> kernel_layout.PagedLayout:
    table = layout.block_table.int()
    if layout.max_context is not None:
        context = layout.context_lengths.int()
        return kernel_layout.PagedLayout(table, context, None, 1, layout.max_context)
    lengths, context = layout.derived("host_rows", lambda: _host_rows(layout))
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    decode = all(length == 1 for length in lengths)
    numbers = to_device(np.array([*context, *starts], dtype=np.int32), layout.positions.device)
    return kernel_layout.PagedLayout(
        block_table=table,
        context_lens=numbers[: len(context)],
        query_starts=None if decode else numbers[len(context) :],
        max_query_length=max(lengths),
        max_context=max(context),
    )


def _host_rows(layout: PagedLayout) -> tuple[list[int], list[int]]:
    """(rows, context) of each sequence, read back from the device."""
    sequence, position = torch.stack((layout.query_sequence, layout.positions)).tolist()
    count = layout.block_table.shape[0]
    lengths, context = [0] * count, [0] * count
    for row, (s, p) in enumerate(zip(sequence, position, strict=True)):
        if row and (s < sequence[row - 1] or (s == sequence[row - 1] and p != context[s])):
            raise ValueError(
                f"row {row} of a paged batch (sequence {s}, position {p}) does not follow the row "
                "before it: the Hopper kernels need each sequence's rows together and in order"
            )
        lengths[s] += 1
        context[s] = p + 1
    return lengths, context


def attention(
    q_THD: Heads,
    k_SGD: Heads,
    v_SGD: Heads,
    layout: Layout,
    scale: float,
    spec: Attention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out BF16 [T, H, D], log-sum-exp FP32 [T, H], natural log); see the reference.

    A paged layout's keys and values are rows, or pages [pages, page size, G, D] (`PageStore`).
    """
    check_spec(spec)
    if isinstance(layout, PackedLayout):
        tensors, scales = _parts(q_THD, k_SGD, v_SGD)
        q, k, v = (x.contiguous() for x in tensors)
        return attention_forward(q, k, v, packed(layout), scale, **scales)
    tensors, scales, rows = _paged_parts(q_THD, k_SGD, v_SGD, layout)
    return attention_forward(*tensors, rows, scale, **scales)


def attention_quantize(
    q_THD: Heads,
    k_SGD: Heads,
    v_SGD: Heads,
    layout: PagedLayout,
    scale: float,
    spec: Attention,
    precision: Precision,
) -> Operand:
    """`attention` over a cache, as the operand of the product after it; decode's kernel makes the codes."""
    check_spec(spec)
    tensors, scales, rows = _paged_parts(q_THD, k_SGD, v_SGD, layout)
    in_groups = precision.block == GROUPS and precision.format == "e4m3"
    if in_groups and decodes_to_codes(*tensors, rows):
        codes, out_scale = attention_codes(*tensors, rows, scale, **scales)
        return Operand(codes, out_scale, precision, codes.shape[1])
    out, _ = attention_forward(*tensors, rows, scale, **scales)
    return quantize_activation(out.flatten(1), precision)


Parts = tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]


def _parts(q: Heads, k: Heads, v: Heads) -> Parts:
    """((q, k, v) as BF16 or codes, the codes' scales by the kernels' names)."""
    if isinstance(q, HeadCodes):
        assert isinstance(k, HeadCodes) and isinstance(v, HeadCodes)
        scales = {"q_scale_TH": q.scale, "k_scale": k.scale, "v_scale": v.scale}
        return (q.codes, k.codes, v.codes), scales
    assert isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    return (q, k, v), {}


def _paged_parts(
    q: Heads, k: Heads, v: Heads, layout: PagedLayout
) -> tuple[*Parts, kernel_layout.PagedLayout]:
    """The same for a paged cache, keys and values as pages; and the kernels' form of the layout."""
    rows = paged_by_context(layout) if isinstance(q, HeadCodes) else paged(layout)
    (q, k, v), scales = _parts(q, k, v)
    k, v = (_paged_rows(x, 4, layout) for x in (k, v))
    for name in ("k_scale", "v_scale"):
        if name in scales:
            scales[name] = _paged_rows(scales[name], 3, layout)
    return (q.contiguous(), k, v), scales, rows


def _paged_rows(x: torch.Tensor, dims: int, layout: PagedLayout) -> torch.Tensor:
    """Rows [S, ...] as pages; pages [pages, page size, ...] as they are."""
    return x if x.dim() == dims else x.unflatten(0, (-1, layout.page_size))


def _bf16(x: Heads) -> torch.Tensor:
    """BF16 [T, heads, D], contiguous."""
    if isinstance(x, torch.Tensor):
        return x.contiguous()
    codes, width = x.codes, x.codes.shape[-1]
    rows = dequantize(codes.reshape(-1, width), x.scale.reshape(-1, 1), width, (1, 0))
    return rows.view(codes.shape)


def attention_backward(
    dout_THD: torch.Tensor,
    q_THD: Heads,
    k_THD: Heads,
    v_THD: Heads,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    layout: PackedLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) BF16 of packed attention (codes: at what they dequantise to); deterministic."""
    q, k, v = (_bf16(x) for x in (q_THD, k_THD, v_THD))
    dout = dout_THD.contiguous()
    return backward(q, k, v, out_THD, lse_TH, dout, packed(layout), scale)
