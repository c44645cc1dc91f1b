"""The loop that launches ahead gives the same samples; its bookkeeping, on a CPU without graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from samebit.config import RolloutConfig
from samebit.engine import decode, native, pipeline
from samebit.engine.cache import PagePool
from samebit.engine.native import Engine as Native
from samebit.engine.scheduler import Slot
from samebit.layers.kv import PageStore, page_bytes
from samebit.operand import HeadCodes
from samebit.reference.sampling import stream_key, stream_keys, stream_state
from samebit.spec import BF16, FP8_HEAD
from samebit.types import Sampling
from tests.engine.common import drawn, prompts, tiny_model


class Ahead(Native):
    """Steps are launched before the one before is read."""

    pipelined = True


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama", "fp8")


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_samples_are_those_of_the_plain_loop(model, page_size):
    """Preemption, chunks, compaction, a batch that shrinks through every bucket."""
    sampling = Sampling(max_tokens=24, stop_ids=tuple(range(0, 250, 13)))
    request = (prompts(), 4, sampling)
    expected = drawn(Native(model, RolloutConfig(), None, 5).generate(*request))
    tight = RolloutConfig(max_batch=9, prefill_tokens=17, cache_tokens=192)
    engine = Ahead(model, tight, None, 5, page_size=page_size)
    for _ in range(2):
        assert drawn(engine.generate(*request)) == expected
    stats = engine.stats
    assert len({len(s[2]) for s in expected}) > 4, "lengths differ, or the test shows nothing"
    assert stats.dropped_tokens > 0 and 0.0 < engine.idle_share < 1.0
    engine.refresh()
    assert engine.pool.num_free == engine.pool.num_pages
    assert set(engine.pool.references[1:]) == {0}


@pytest.mark.parametrize("page_size", [4, 16])
def test_prompts_and_draws_come_in_whole_sixteens(model, page_size, monkeypatch):
    """Rows of nobody fill them up, on the page of nobody: no other row of the cache is written."""
    engine = Ahead(model, RolloutConfig(max_batch=9, prefill_tokens=21), None, 5, page_size)
    rows: list[int] = []
    draws: list[int] = []
    real, draw = type(model).__call__, model.draw
    written: list[int] = []

    def seen(self, ids, layout, side, store):
        rows.append(len(ids))
        before = store.keys[0].clone()
        out = real(self, ids, layout, side, store)
        changed = (store.keys[0] != before).flatten(1).any(1).nonzero()[:, 0]
        written.extend(changed[changed >= page_size].tolist())
        return out

    def counted(hidden, transform, keys):
        draws.append(len(hidden))
        return draw(hidden, transform, keys)

    monkeypatch.setattr(type(model), "__call__", seen)
    monkeypatch.setattr(model, "draw", counted)
    engine.generate(prompts(), 3, Sampling(max_tokens=1))
    assert rows and draws and all(n % 16 == 0 for n in rows + draws)
    assert len(written) == len(set(written)) == engine.stats.prefill_tokens < sum(rows)


def test_rows_of_nobody_are_added_only_where_nobody_has_a_page():
    pool = PagePool(None, 4, 16, first=1)  # type: ignore[arg-type]
    assert [pipeline.idle_rows(n, pool) for n in (1, 15, 16, 17, 8192)] == [15, 1, 0, 15, 0]
    assert pipeline.idle_rows(17, PagePool(None, 4, 16)) == 0  # type: ignore[arg-type]


def test_preempted_samples_lose_nothing(model):
    request = (prompts((60, 62, 63)), 1, Sampling(max_tokens=40))
    engine = Ahead(model, RolloutConfig(max_batch=3, cache_tokens=176), None, 5)
    plain = Native(model, RolloutConfig(), None, 5)
    assert drawn(engine.generate(*request)) == drawn(plain.generate(*request))
    assert engine.stats.preemptions > 0


def test_abort_keeps_what_was_drawn_and_an_error_leaves_nothing_held(model):
    whole = Native(model, RolloutConfig(), None, 0).generate(prompts(), 2, Sampling(max_tokens=12))
    engine = Ahead(model, RolloutConfig(), None, 0)

    def stop(finished: int, total: int, tokens: int) -> None:
        if tokens >= 24:
            engine.abort()

    part = engine.generate(prompts(), 2, Sampling(max_tokens=12), progress=stop)
    for a, b in zip(drawn(part), drawn(whole), strict=True):
        assert 0 < len(a[2]) < 12 and a[2] == b[2][: len(a[2])] and a[5] == "abort"

    def fail(finished: int, total: int, tokens: int) -> None:
        raise KeyboardInterrupt

    engine.refresh()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts(), 2, Sampling(max_tokens=12), progress=fail)
    assert engine.pool.num_free == engine.pool.num_pages
    again = engine.generate(prompts(), 2, Sampling(max_tokens=12))
    assert drawn(again) == drawn(whole)


def test_the_plain_tests_hold_for_it(model, tmp_path, monkeypatch):
    """The engine's own tests with the loop exchanged: naive, restricted sampling, limits, NaN."""
    from tests.engine import test_native

    monkeypatch.setattr(Native, "pipelined", True)
    test_native.test_restricted_sampling_equals_naive(model)
    test_native.test_every_end_id_is_honoured_and_stays_in_the_sample(model)
    test_native.test_length_limits(tmp_path / "a")
    test_native.test_not_a_number_is_named_not_sampled(tmp_path / "b")
    test_native.test_prompt_is_prefilled_once_and_pages_are_shared(model)


def test_random_requests_leave_no_page_and_change_no_sample(model):
    """A soak in small: requests of every kind on one engine, aborts and refreshes between them."""
    draw = random.Random(7)
    plain = Native(model, RolloutConfig(), None, 2)
    options = RolloutConfig(max_batch=6, prefill_tokens=24, cache_tokens=208)
    engine = Ahead(model, options, None, 2)
    for number in range(12):
        lengths = [draw.randrange(17, 70) for _ in range(draw.randrange(1, 5))]
        stops = tuple(draw.sample(range(250), draw.choice((0, 20, 120))))
        sampling = Sampling(
            max_tokens=draw.randrange(1, 30), stop_ids=stops, seed=number,
            temperature=draw.choice((0.0, 0.7, 1.0)),
        )  # fmt: skip
        request = (prompts(lengths, shared=16, seed=number), draw.randrange(1, 5), sampling)
        limit = draw.choice((None, None, 5))

        def stop(finished: int, total: int, tokens: int, limit: int | None = limit) -> None:
            if limit is not None and tokens >= limit:
                engine.abort()

        found = drawn(engine.generate(*request, progress=stop))
        for mine, whole in zip(found, drawn(plain.generate(*request)), strict=True):
            assert mine == whole or (mine[5] == "abort" and mine[2] == whole[2][: len(mine[2])])
        if draw.random() < 0.3:
            engine.refresh()
            assert engine.pool.num_free == engine.pool.num_pages
    engine.refresh()
    assert engine.pool.num_free == engine.pool.num_pages
    engine.release()
    assert engine.pool is None
    assert drawn(engine.generate(*request)) == drawn(plain.generate(*request))


def test_bucket_sizes():
    assert decode.bucket_sizes(1) == (1,)
    assert decode.bucket_sizes(6) == (1, 2, 4, 6)
    assert decode.bucket_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert decode.bucket_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert decode.smallest_at_least((1, 2, 4), 3) == 4
    assert decode.smallest_at_least((1, 2, 4), 9) == 4


def test_device_keys_are_the_definition():
    samples = [(0, 0, 0), (3, 1 << 40, 17), (-5, 12, 40959), (2**63 - 1, 7, 1)]
    states = np.array([stream_state(s, i) for s, i, _ in samples], np.uint64).view(np.int64)
    positions = torch.tensor([p for _, _, p in samples])
    keys = stream_keys(torch.from_numpy(states), positions)
    assert [[k & 0xFFFFFFFF for k in row] for row in keys.tolist()] == [
        list(stream_key(*s)) for s in samples
    ]


def test_compaction_moves_the_last_rows_into_holes():
    state = decode.DecodeState(8, 64, 16, torch.device("cpu"))
    places = pipeline.Places(state)
    state.ids[:] = torch.arange(8) * 10
    for row in (0, 3, 6, 7):
        places.active[row], places.table[row, 0], places.left[row] = True, row, 5 + row
        places.slots[row] = Slot(None)
        places.place_of[id(places.slots[row])] = row
    moved, gone = places.slots[7], places.slots[3]
    assert places.compact((1, 2, 4, 8)) == 4
    assert places.table[:, 0].tolist() == [0, 6, 7, 3, -1, -1, -1, -1]
    assert places.left[:4].tolist() == [5, 11, 12, 8]
    assert state.ids[:4].tolist() == [0, 60, 70, 30] and places.dirty
    assert places.slots[2] is moved and places.place_of[id(moved)] == 2
    places.leave_slot(gone)
    places.leave_slot(gone)
    assert places.table[:4, 0].tolist() == [0, 6, 7, -1]


@pytest.mark.parametrize("precision", [BF16, FP8_HEAD])
def test_page_store(precision):
    """Written by slot, read as [pages, page size, heads, D]; a copy takes all layers and scales."""
    layers, size, heads, dim = 2, 8, 3, 16
    record = page_bytes(layers, size, heads, dim, precision)
    scale = 0 if precision.block is None else 4
    assert record == layers * 2 * heads * size * (dim * (1 if scale else 2) + scale)
    store = PageStore(
        layers, size, heads, dim, precision, torch.zeros(5 * record, dtype=torch.uint8)
    )
    assert store.num_pages == 5
    x = torch.randn(3, heads, dim).bfloat16()
    if scale:
        new = HeadCodes(x.to(torch.float8_e4m3fn), torch.rand(3, heads))
    else:
        new = x
    slots = torch.tensor([9, 15, 32])  # page 1 rows 1 and 7, page 4 row 0
    for layer in range(layers):
        store.write(layer, slots, new, new)
    store.copy([(1, 0, 8), (4, 3, 1)], size)

    def parts(held):
        return (held.codes.float(), held.scale) if isinstance(held, HeadCodes) else (held.float(),)

    for held in (*store.keys, *store.values):
        for found, wanted in zip(parts(held), parts(new), strict=True):
            for page, row, i in ((1, 1, 0), (1, 7, 1), (4, 0, 2), (0, 1, 0), (0, 7, 1), (3, 0, 2)):
                assert torch.equal(found[page, row], wanted[i])
            assert float(found[2].abs().sum()) == 0.0
    for held in store.read(1, slots):
        assert all(map(torch.equal, parts(held), parts(new)))


def test_new_prompts_wait_for_free_places_and_no_bit_changes(model, monkeypatch):
    """Prompts are forwards of their own: fewer of them, at the price of a few idle places."""
    request = (prompts(tuple(range(33, 65))), 1, Sampling(max_tokens=20, stop_ids=(7, 30, 99, 140)))
    forwards: list[int] = []
    real = pipeline.forward

    def counted(*args):
        forwards.append(args[1].num_rows)
        return real(*args)

    monkeypatch.setattr(pipeline, "forward", counted)
    found = {}
    for part in (8, 1 << 30):
        monkeypatch.setattr(native, "ADMIT_PART", part)
        forwards.clear()
        engine = Ahead(model, RolloutConfig(max_batch=16), None, 5)
        groups = drawn(engine.generate(*request))
        found[part] = (groups, len(forwards), engine.stats.decode_rows)
    waiting, at_once = found.values()
    assert waiting[0] == at_once[0]
    assert waiting[1] < at_once[1], (waiting[1:], at_once[1:])


def test_a_place_is_not_waited_for_longer_than_there_are_samples(model):
    """One more sample than places: it starts when one place is free, not when an eighth is."""
    engine = Ahead(model, RolloutConfig(max_batch=16), None, 5)
    groups = engine.generate(prompts(tuple(range(33, 50))), 1, Sampling(max_tokens=6))
    assert all(len(s.ids) == 6 for g in groups for s in g.samples)
    assert engine.stats.forwards <= 2 + 2 * 6, "the last one beside none, after the first sixteen"
