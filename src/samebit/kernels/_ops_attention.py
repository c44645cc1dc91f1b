"""The operator set's attention on Hopper: the model's layouts as the kernels' layouts."""

from __future__ import annotations

import torch

from samebit.kernels import attention_layout as kernel_layout
from samebit.kernels.attention import attention_forward
from samebit.kernels.attention_gradient import attention_backward as backward
from samebit.layout import Layout, PackedLayout, PagedLayout
from samebit.spec import Attention


def check_spec(spec: Attention) -> None:
    """ValueError where a plan's attention constants are not those compiled into the kernels."""
    constants = (kernel_layout.KEY_BLOCK, kernel_layout.SPLIT_KEYS)
    if (spec.kv_block, spec.kv_split) != constants:
        raise ValueError(
            f"the Hopper attention kernels walk KV blocks of {constants[0]} keys in splits of "
            f"{constants[1]}; the recipe asks for kv_block={spec.kv_block}, kv_split={spec.kv_split}"
        )
    if not spec.q.format == spec.kv.format == spec.probabilities.format == "bf16":
        raise ValueError(
            f"the Hopper operator set has no attention with Q {spec.q}, K and V {spec.kv}, "
            f"probabilities {spec.probabilities}; use BF16"
        )


def packed(layout: PackedLayout) -> kernel_layout.PackedLayout:
    """The kernels' form of a packed layout, made once."""

    def make() -> kernel_layout.PackedLayout:
        rows = [(s.start, s.length, s.prefix_start, s.prefix_length) for s in layout.segments]
        return kernel_layout.PackedLayout.build(rows, layout.device)

    return layout.derived("attention", make)


def paged(layout: PagedLayout) -> kernel_layout.PagedLayout:
    """The kernels' form of a paged layout, made once (one copy to the host).

    A sequence's rows must be consecutive in the batch, in order of position and of sequence.
    """
    return layout.derived("attention", lambda: _paged(layout))


def _paged(layout: PagedLayout) -> kernel_layout.PagedLayout:
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
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    decode = all(length == 1 for length in lengths)
    numbers = torch.tensor([*context, *starts], dtype=torch.int32).to(layout.positions.device)
    return kernel_layout.PagedLayout(
        block_table=layout.block_table.int(),
        context_lens=numbers[:count],
        query_starts=None if decode else numbers[count:],
        max_query_length=max(lengths),
        max_context=max(context),
    )


def attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    layout: Layout,
    scale: float,
    spec: Attention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out BF16 [T, H, D], log-sum-exp FP32 [T, H], natural log); see the reference."""
    check_spec(spec)
    if isinstance(layout, PackedLayout):
        q, k, v = (x.contiguous() for x in (q_THD, k_SGD, v_SGD))
        return attention_forward(q, k, v, packed(layout), scale)
    pages = (-1, layout.page_size, *k_SGD.shape[1:])
    return attention_forward(
        q_THD.contiguous(), k_SGD.view(pages), v_SGD.view(pages), paged(layout), scale
    )


def attention_backward(
    dout_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    layout: PackedLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) BF16 of packed attention; deterministic."""
    q, k, v, dout = (x.contiguous() for x in (q_THD, k_THD, v_THD, dout_THD))
    return backward(q, k, v, out_THD, lse_TH, dout, packed(layout), scale)
