"""Splits of the keys, and coded Q, K and V: the same bits packed and token by token, near FP64 softmax."""

import pytest
import torch

from samebit.layout import PackedLayout, PagedLayout, Segment
from samebit.operand import HeadCodes
from samebit.reference import attention, quantize_heads
from samebit.spec import FP8_HEAD, FP16, Attention

T, H, G, D, PAGE = 75, 6, 2, 32, 4
SPECS = {
    "one split": Attention(kv_block=16, kv_split=0),
    "splits": Attention(kv_block=16, kv_split=32),
    "coded": Attention(kv_block=16, kv_split=32, q=FP8_HEAD, kv=FP8_HEAD, probabilities=FP16),
}


def problem():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(T, n, D, generator=generator).bfloat16() for n in (H, G, G)]


def operands(spec, tensors):
    if spec.kv.block is None:
        return tensors
    return [quantize_heads(x, FP8_HEAD) for x in tensors]


def exact(tensors):
    """FP64 causal softmax attention: (out [T, H, D], log-sum-exp [T, H])."""
    q, k, v = (x.double().transpose(0, 1) for x in tensors)
    k, v = (x.repeat_interleave(H // G, 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * D**-0.5
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).t()


@pytest.mark.parametrize("name", SPECS)
def test_every_position_decodes_as_it_was_packed(name):
    spec, tensors = SPECS[name], problem()
    q, k, v = operands(spec, tensors)
    out, lse = attention(q, k, v, PackedLayout((Segment(0, T),)), D**-0.5, spec)
    pages = T // PAGE + 1
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    rows = (table[:, None] * PAGE + torch.arange(PAGE)).flatten()[:T]
    cache = [scattered(x, rows, pages * PAGE) for x in (k, v)]
    for t in range(T):
        one = PagedLayout(table[None], torch.zeros(1, dtype=torch.int64), torch.tensor([t]), PAGE)
        row = torch.tensor([t])
        mine = q.take(row) if isinstance(q, HeadCodes) else q[row]
        again, again_lse = attention(mine, *cache, one, D**-0.5, spec)
        assert torch.equal(again[0], out[t]) and torch.equal(again_lse[0], lse[t]), t


def scattered(x, rows, size):
    """Rows of `x` on their pages; NaN everywhere else."""
    if isinstance(x, HeadCodes):
        codes = torch.full((size, *x.codes.shape[1:]), 0x7F, dtype=torch.uint8)
        store = HeadCodes(codes.view(x.codes.dtype), torch.full((size, G), float("nan")))
        store.put(rows, x)
        return store
    store = torch.full((size, *x.shape[1:]), float("nan"), dtype=x.dtype)
    store[rows] = x
    return store


@pytest.mark.parametrize("name", SPECS)
def test_values_are_those_of_softmax(name):
    spec, tensors = SPECS[name], problem()
    coded = operands(spec, tensors)
    out, lse = attention(*coded, PackedLayout((Segment(0, T),)), D**-0.5, spec)
    if spec.kv.block is not None:
        tensors = [x.codes.double() * x.scale[..., None] for x in coded]
    expected, expected_lse = exact(tensors)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_a_split_changes_rounding_and_only_past_its_first_key():
    whole, split = (
        attention(*problem(), PackedLayout((Segment(0, T),)), D**-0.5, SPECS[n])[1]
        for n in ("one split", "splits")
    )
    assert torch.equal(whole[:32], split[:32])
    assert not torch.equal(whole[32:], split[32:])
