"""Attention on the card: the same bits in three layouts, near the FP64 oracle, deterministic."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
from samebit.kernels import attention as module
from samebit.kernels import attention_decode_launch as launch
from samebit.kernels.attention import (
    attention_backward,
    attention_codes,
    attention_forward,
    decodes_to_codes,
)
from samebit.kernels.attention_layout import PagedLayout
from samebit.kernels.decode_step import longest_first
from samebit.kernels.quantize_activation import quantize_activation
from tests.kernels.attention_oracle import chunk, decode_step, dense, packed, quantise, to_pages

pytestmark = pytest.mark.gpu
# A prompt of 1,500 with three samples, one of 2,500 (three splits), one of 130.
LONG = [
    (0, 1500, 0, 0),
    (1500, 700, 0, 1500),
    (2200, 900, 0, 1500),
    (3100, 1, 0, 1500),
    (3101, 2500, 0, 0),
    (5601, 130, 0, 0),
]
SHORT = [(0, 600, 0, 0), (600, 300, 0, 600), (900, 500, 0, 600), (1400, 333, 0, 0)]
STEPS = (0, 1, 62, 127, 128, 400, 523, 524, 699, 899, 1023, 1024, 2047, 2048, 2499)
HEADS = [(32, 8, 128), (8, 8, 128), (4, 2, 64), (9, 3, 64), (8, 1, 128), (6, 1, 64), (14, 2, 64)]


def problem(H, G, D, fp8, segments):
    """(q, k, v, scales by keyword, dequantised q, k, v)."""
    generator = torch.Generator("cuda").manual_seed(H + D)
    T = segments[-1][0] + segments[-1][1]
    tensors = [torch.randn(T, n, D, generator=generator, device="cuda") for n in (H, G, G)]
    if not fp8:
        tensors = [x.bfloat16() for x in tensors]
        return *tensors, {}, tensors
    codes, scales = zip(*map(quantise, tensors), strict=True)
    named = dict(zip(("q_scale_TH", "k_scale", "v_scale"), scales, strict=True))
    return *codes, named, [c.float() * s[..., None] for c, s in zip(codes, scales, strict=True)]


def different(a, b):
    return (a.view(torch.int16) != b.view(torch.int16)).sum().item()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("H", "G", "D"), HEADS)
def test_layouts_agree_bit_for_bit_and_with_dense(H, G, D, fp8):
    q, k, v, scales, exact = problem(H, G, D, fp8, LONG)
    out, lse = attention_forward(q, k, v, packed(LONG, "cuda"), D**-0.5, **scales)
    want, want_lse = dense(*exact, LONG, D**-0.5)
    assert (out.double() - want).norm() / want.norm() < 3e-3
    assert (lse - want_lse).abs().max() < (2e-3 if fp8 else 3e-6)
    del want, want_lse
    for page, head_major in ((128, False), (32, True), (256, True)):

        def paged(x, head_major=head_major, page=page):
            return to_pages(x, LONG, page, torch.Generator().manual_seed(1), head_major=head_major)

        k_pages, table = paged(k)
        v_pages, _ = paged(v)
        cache = {name: paged(scales[name])[0] for name in ("k_scale", "v_scale") if fp8}
        calls = [chunk(LONG, table, 0, 333, "cuda"), chunk(LONG, table, 333, 2500, "cuda")]
        calls += [decode_step(LONG, table, step, "cuda") for step in STEPS]
        for layout, rows in calls:
            extra = {**cache, **({"q_scale_TH": scales["q_scale_TH"][rows]} if fp8 else {})}
            got, got_lse = attention_forward(
                q[rows].contiguous(), k_pages, v_pages, layout, D**-0.5, **extra
            )
            live = torch.arange(len(rows), device="cuda")
            if layout.query_starts is None:
                live = live[layout.context_lens > 0]
            rows = torch.tensor(rows, device="cuda")[live]
            assert different(got[live], out[rows]) == 0
            assert torch.equal(got_lse[live], lse[rows])


@pytest.mark.parametrize("fp8", [False, True])
def test_the_plain_kernel_gives_the_same_bits_as_the_specialised_ones(fp8):
    for H, G, D in HEADS:
        q, k, v, named, _ = problem(H, G, D, fp8, LONG)
        scales = tuple(named.get(name) for name in ("q_scale_TH", "k_scale", "v_scale"))
        layout = packed(LONG, "cuda")
        out, lse = attention_forward(q, k, v, layout, D**-0.5, **named)
        for run in (module._prefill, module._stream):
            other, other_lse = torch.empty_like(out), torch.empty_like(lse)
            run(q, k, v, scales, layout, D**-0.5, other, other_lse)
            assert different(other, out) == 0
            assert torch.equal(other_lse, lse)


@pytest.mark.parametrize("fp8", [False, True])
def test_every_position_of_one_sequence(fp8):
    """1 to 1,300 tokens decoded as 1,300 sequences that share their pages."""
    H, G, D, length = 8, 2, 128, 1300
    q, k, v, scales, _ = problem(H, G, D, fp8, [(0, length, 0, 0)])
    out, lse = attention_forward(q, k, v, packed([(0, length, 0, 0)], "cuda"), D**-0.5, **scales)

    def paged(x):
        return to_pages(x, [(0, length, 0, 0)], 128, torch.Generator().manual_seed(3))

    k_pages, table = paged(k)
    cache = {name: paged(scales[name])[0] for name in ("k_scale", "v_scale") if fp8}
    extra = {**cache, **({"q_scale_TH": scales["q_scale_TH"]} if fp8 else {})}
    layout = PagedLayout(
        block_table=table.expand(length, -1).contiguous(),
        context_lens=torch.arange(1, length + 1, dtype=torch.int32, device="cuda"),
        query_starts=None,
        max_query_length=1,
        max_context=length,
    )
    got, got_lse = attention_forward(q, k_pages, paged(v)[0], layout, D**-0.5, **extra)
    assert different(got, out) == 0
    assert torch.equal(got_lse, lse)


def cached(q, k, v, scales, segments, step):
    """(Q of `step`, K pages, V pages, layout, scales by keyword) of a decode batch."""
    k_pages, table = to_pages(k, segments, 128, torch.Generator().manual_seed(1), head_major=True)
    v_pages, _ = to_pages(v, segments, 128, torch.Generator().manual_seed(1), head_major=True)
    layout, rows = decode_step(segments, table, step, "cuda")
    named = {
        name: to_pages(x, segments, 128, torch.Generator().manual_seed(1), head_major=True)[0]
        for name, x in scales.items()
        if name != "q_scale_TH"
    }
    if scales:
        named["q_scale_TH"] = scales["q_scale_TH"][rows]
    return q[rows].contiguous(), k_pages, v_pages, layout, named


def test_splits_per_program_do_not_change_bits(monkeypatch):
    *batch, named = cached(*problem(8, 2, 128, False, LONG)[:4], LONG, 2400)
    outcomes = []
    for count in (1, 2, 4):
        monkeypatch.setattr(launch, "splits_per_program", lambda *_, count=count: count)
        outcomes.append(attention_forward(*batch, 0.09, **named)[0][4])
    assert different(outcomes[0], outcomes[1]) == 0
    assert different(outcomes[0], outcomes[2]) == 0


@pytest.mark.parametrize(("H", "G", "D"), [(32, 8, 128), (32, 4, 64), (24, 4, 128), (48, 4, 128)])
def test_programs_and_order_do_not_change_bits(monkeypatch, H, G, D):
    """Of an FP8 cache: any number of programs, sequences in any order, splits together or apart."""
    tensors = problem(H, G, D, True, LONG)[:4]
    for step in (0, 31, 32, 63, 64, 65, 127, 128, 523, 2400):
        *batch, named = cached(*tensors, LONG, step)
        layout = batch[3]
        live, outcomes = layout.context_lens > 0, []
        for programs, count in ((1, 4), (7, 1), (23, 2), (64, 4), (264, 1), (264, 4)):
            order = torch.randperm(len(live), device="cuda").int()
            order = longest_first(layout.context_lens) if programs == 64 else order
            batch[3] = replace(layout, order=None if programs == 7 else order)
            monkeypatch.setattr(launch, "programs_at_once", lambda _, n=programs: n)
            monkeypatch.setattr(launch, "splits_per_program", lambda *_, n=count: n)
            outcomes.append(attention_forward(*batch, 0.09, **named))
        for out, lse in outcomes[1:]:
            assert different(out[live], outcomes[0][0][live]) == 0
            assert torch.equal(lse[live], outcomes[0][1][live])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("H", "G"), [(32, 8), (8, 8), (8, 1), (14, 2), (48, 4)])
def test_decode_writes_the_codes_that_its_output_has(H, G, fp8):
    tensors = problem(H, G, 128, fp8, LONG)[:4]
    for step in (0, 62, 127, 128, 699, 1023, 1024, 2499):
        *batch, named = cached(*tensors, LONG, step)
        live = batch[3].context_lens > 0
        assert decodes_to_codes(*batch)
        codes, scale = attention_codes(*batch, 0.09, **named)
        out, _ = attention_forward(*batch, 0.09, **named)
        want, want_scale = quantize_activation(out.flatten(1))
        assert torch.equal(codes.view(torch.uint8)[live], want.view(torch.uint8)[live])
        assert torch.equal(scale[live], want_scale[live])


def test_rows_past_the_end_of_a_page_are_never_used():
    """NaN where no key is: stale shared memory, or what lies behind the last key of a page."""
    for fp8 in (False, True):
        for step in (0, 30, 31, 32, 63, 64, 100, 127, 200):
            *batch, named = cached(*problem(32, 8, 128, fp8, LONG)[:4], LONG, step)
            q, k, v, layout = batch
            want = attention_forward(*batch, 0.09, **named)[0][layout.context_lens > 0]
            assert bool(want.isfinite().all())
            rows = torch.arange(128, device="cuda")
            for index, end in enumerate(layout.context_lens.tolist()):
                if end:
                    page = int(layout.block_table[index, (end - 1) // 128])
                    for x in (k, v):
                        bits = x[page].view(torch.uint8 if fp8 else torch.int16)
                        bits[rows > (end - 1) % 128] = 0x7F if fp8 else 0x7FC0
            got = attention_forward(q, k, v, layout, 0.09, **named)[0][layout.context_lens > 0]
            assert different(got, want) == 0


@pytest.mark.parametrize(("H", "G", "D"), HEADS)
def test_backward_is_near_the_oracle_and_deterministic(H, G, D):
    q, k, v, _, _ = problem(H, G, D, False, SHORT)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want, _ = dense(*leaves, SHORT, D**-0.5)
    dout = torch.randn(want.shape, device="cuda", dtype=torch.bfloat16)
    want.backward(dout.double())
    layout = packed(SHORT, "cuda")
    out, lse = attention_forward(q, k, v, layout, D**-0.5)
    first = attention_backward(q, k, v, out, lse, dout, layout, D**-0.5)
    again = attention_backward(q, k, v, out, lse, dout, layout, D**-0.5)
    for mine, same, leaf in zip(first, again, leaves, strict=True):
        assert (mine.double() - leaf.grad).norm() / leaf.grad.norm() < 4e-3
        assert different(mine, same) == 0


def test_graph_replay_follows_the_context_lengths():
    q, k, v, _, _ = problem(8, 2, 128, False, LONG)
    k_pages, table = to_pages(k, LONG, 128, torch.Generator().manual_seed(1))
    v_pages, _ = to_pages(v, LONG, 128, torch.Generator().manual_seed(1))
    layout, rows = decode_step(LONG, table, 0, "cuda")
    want, _ = attention_forward(q, k, v, packed(LONG, "cuda"), 0.09)
    x = q[rows].contiguous()
    attention_forward(x, k_pages, v_pages, layout, 0.09)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attention_forward(x, k_pages, v_pages, layout, 0.09)
    for step in (0, 500, 1023, 1024, 2499):
        now, rows = decode_step(LONG, table, step, "cuda")
        layout.context_lens.copy_(now.context_lens)
        x.copy_(q[rows])
        graph.replay()
        assert different(out[4], want[rows[4]]) == 0
