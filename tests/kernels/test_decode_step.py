"""Slots, contexts and noise keys before a decode step, ids and positions after it."""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels.pointwise_oracle import DEVICE

from samebit.engine.decode import HEADER  # isort: skip
from samebit.kernels import decode_step  # isort: skip
from samebit.reference.sampling import stream_key, stream_state  # isort: skip

PAGE = 16
SAMPLES = ((0, 0), (3, 1 << 40), (-5, 12), (2**63 - 1, 7), (1 << 33, 99))
POSITIONS = (0, -1, 15, 16, 47)


def table():
    rows = np.zeros((5, HEADER + 3), np.int32)
    for row, sample, position in zip(rows, SAMPLES, POSITIONS, strict=True):
        row[0] = position
        row[2:4] = np.array([stream_state(*sample)], np.uint64).view(np.int32)
    rows[:, HEADER:] = np.arange(15).reshape(5, 3) + 1
    return torch.from_numpy(rows).to(DEVICE)


def test_host_and_kernels_have_the_same_header():
    assert decode_step.HEADER == HEADER


def test_prepare():
    def new(*shape, dtype=torch.int64):
        return torch.full(shape, -7, dtype=dtype, device=DEVICE)

    positions, slots = new(5), new(5)
    contexts, keys = new(5, dtype=torch.int32), new(5, 2, dtype=torch.int32)
    decode_step.prepare(table(), positions, slots, contexts, keys, PAGE)
    assert positions.tolist() == [0, 0, 15, 16, 47]
    assert contexts.tolist() == [1, 0, 16, 17, 48]
    # idle row 1 writes to its own row of page 0
    assert slots.tolist() == [1 * 16, 1, 7 * 16 + 15, 11 * 16, 15 * 16 + 15]
    for i in (0, 2, 3, 4):
        expected = stream_key(*SAMPLES[i], POSITIONS[i] + 1)
        assert [k & 0xFFFFFFFF for k in keys[i].tolist()] == list(expected)


def test_sequences_by_falling_context():
    contexts = torch.randint(0, 40, (301,), dtype=torch.int32, device=DEVICE)
    contexts[7] = 0
    order = decode_step.longest_first(contexts)
    assert order.tolist() == sorted(range(301), key=lambda i: (-int(contexts[i]), i))


def test_advance():
    meta = table()
    ids = torch.full((5,), 3, dtype=torch.int64, device=DEVICE)
    drawn = torch.tensor([9, 8, 2147483647, 6, 5], device=DEVICE)
    logp = torch.tensor([-1.0, -2.0, float("nan"), -0.0, -3.5], device=DEVICE)
    out = torch.zeros(5, 2, dtype=torch.int32, device=DEVICE)
    before = meta.clone()
    decode_step.advance(drawn, logp, meta, ids, out, 300)
    assert ids.tolist() == [9, 3, 0, 6, 5], "the idle row keeps its id; a row of NaN has none"
    assert meta[:, 0].tolist() == [1, -1, 16, 17, 48]
    assert torch.equal(meta[:, 1:], before[:, 1:])
    assert out[:, 0].tolist() == drawn.tolist()
    assert torch.equal(out[:, 1], logp.view(torch.int32))
