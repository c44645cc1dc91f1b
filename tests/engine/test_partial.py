"""Samples drawn in parts, and in another order: the same bits; each token its own weight version."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from samebit.config import RolloutConfig
from samebit.engine.naive import Engine as Naive
from samebit.engine.native import Engine as Native
from samebit.engine.requests import begin
from samebit.engine.tail import KEPT_PROMPTS, Lengths, Tail
from samebit.models.tokenizer import Tokenizer
from samebit.reference.sampling import Transform
from samebit.rl.mismatch import differing
from samebit.train.pack import pack
from samebit.train.score import Scorer
from samebit.types import Prompt, Sampling
from tests.engine.common import drawn, prompts, tiny_model
from tests.tiny import tiny_folder


class Ahead(Native):
    """Steps are launched before the one before is read."""

    pipelined = True


ENGINES = {"naive": Naive, "native": Native, "ahead": Ahead}
TIGHT = RolloutConfig(max_batch=5, prefill_tokens=17, cache_tokens=192)
ENDS = Sampling(max_tokens=20, stop_ids=tuple(range(0, 250, 17)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama", "fp8")


def in_parts(engine, groups, sampling, budget: int, most: int = 99):
    """(the groups when every sample has ended, parts)."""
    parts = 0
    while any(not s.finished for g in groups for s in g.samples) and parts < most:
        before = groups
        groups = engine.advance(groups, sampling, budget=budget)
        parts += 1
        for old, new in zip(before, groups, strict=True):
            for was, now in zip(old.samples, new.samples, strict=True):
                assert now.ids[: len(was.ids)] == was.ids, "what was drawn stays"
                assert len(now.ids) - len(was.ids) <= budget
    return groups, parts


@pytest.mark.parametrize("kind", list(ENGINES))
@pytest.mark.parametrize("budget", [1, 6, 19])
def test_parts_at_the_same_weights_are_the_whole(model, kind, budget):
    few = prompts((18, 33), shared=16) if kind == "naive" else prompts()
    sampling = dataclasses.replace(ENDS, max_tokens=7 if kind == "naive" else 20)
    whole = Native(model, RolloutConfig(), None, 5).generate(few, 3, sampling, 11)
    engine = ENGINES[kind](model, TIGHT, None, 5)
    found, parts = in_parts(engine, begin(few, 3, 11), sampling, budget)
    assert drawn(found) == drawn(whole)
    longest = max(len(s.ids) for g in whole for s in g.samples)
    assert parts == -(-longest // budget), "every part gave every open sample its budget"
    assert {s.finish_reason for g in whole for s in g.samples} == {"stop", "length"}


@pytest.mark.parametrize("kind", list(ENGINES))
@pytest.mark.parametrize("limit", [3, 4])
def test_a_sample_begun_under_a_higher_limit_ends_there(model, kind, limit):
    """Also where what was drawn is just the new limit: nothing more is drawn of it."""
    engine = ENGINES[kind](model, TIGHT, None, 5)
    begun = engine.advance(begin(prompts()[:2], 2), Sampling(max_tokens=20), budget=4)
    assert all(s.finish_reason == "partial" for g in begun for s in g.samples)
    ended = engine.advance(begun, Sampling(max_tokens=limit))
    assert [row[:-1] for row in drawn(ended)] == [row[:-1] for row in drawn(begun)]
    assert all(s.finish_reason == "length" for g in ended for s in g.samples)


def test_a_deadline_s_samples_are_gone_on_with(model):
    engine = Ahead(model, RolloutConfig(), None, 5)
    whole = engine.generate(prompts(), 2, ENDS, 3)
    cut = engine.generate(prompts(), 2, ENDS, 3, deadline_s=0.02)
    assert any(s.finish_reason == "abort" for g in cut for s in g.samples)
    assert drawn(engine.advance(cut, ENDS)) == drawn(whole)


def test_a_stop_string_over_the_seam_is_seen(model, tmp_path):
    tokenizer = Tokenizer(tiny_folder(tmp_path, "llama"))
    plain = Native(model, RolloutConfig(), tokenizer, 5).generate(
        prompts(), 2, Sampling(max_tokens=12)
    )
    texts = [s.text for g in plain for s in g.samples]
    stop = next(t[3:6] for t in texts if len(t) > 8)
    sampling = Sampling(max_tokens=12, stop=(stop,))
    whole = Native(model, RolloutConfig(), tokenizer, 5).generate(prompts(), 2, sampling)
    assert any(s.finish_reason == "stop" for g in whole for s in g.samples)
    for kind in (Native, Ahead):
        engine = kind(model, TIGHT, tokenizer, 5)
        found, _ = in_parts(engine, begin(prompts(), 2), sampling, 2)
        assert drawn(found) == drawn(whole)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-kv", "int8"])
@pytest.mark.parametrize("kind", [Native, Ahead])
def test_every_token_equals_the_training_forward_of_its_own_version(tmp_path, recipe, kind):
    """Weights move between the parts; each version's forward scores its own tokens to the bit."""
    model = tiny_model(tmp_path, "qwen3", recipe)
    engine, sampling = kind(model, TIGHT, None, 5), Sampling(max_tokens=15)
    groups, weights = begin(prompts(), 2, 4), {}
    for part in range(3):
        groups = engine.advance(groups, sampling, budget=5)
        weights[model.version] = [p.detach().clone() for p in model.parameters()]
        if part < 2:
            with torch.no_grad():
                for i, parameter in enumerate(model.parameters()):
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
                    parameter += 0.02 * noise
            model.refresh()
            engine.refresh()
    samples = [s for g in groups for s in g.samples]
    assert all(sorted(set(s.versions.tolist())) == sorted(weights) for s in samples)
    batch = pack(groups, 0, 0, 0, model.device)
    logps = {}
    with torch.no_grad():
        for version, held in weights.items():
            for parameter, value in zip(model.parameters(), held, strict=True):
                parameter.copy_(value)
            model.refresh()
            logps[version], _, _ = Scorer(model, None, None, None, Transform()).forward(
                model, batch
            )
    for version, logp in logps.items():
        mine = batch.version == version
        assert int(mine.sum()) == 5 * len(samples)
        assert not differing(logp, batch.rollout_logp)[mine].any()
    first, last = min(logps), max(logps)
    assert differing(logps[first], logps[last]).float().mean() > 0.9, "the versions differ"


def test_what_is_finished_is_returned_as_it_is_and_limits_may_shrink(model):
    engine = Native(model, RolloutConfig(), None, 5)
    whole = engine.generate(prompts(), 2, ENDS)
    before = engine.stats.forwards
    assert drawn(engine.advance(whole, ENDS, budget=3)) == drawn(whole)
    assert engine.stats.forwards == before
    part = engine.advance(begin(prompts(), 2), Sampling(max_tokens=20), budget=6)
    ended = engine.advance(part, Sampling(max_tokens=5))
    assert all(s.finish_reason == "length" and len(s.ids) == 6 for g in ended for s in g.samples)
    with pytest.raises(ValueError, match="budget is -1 tokens"):
        engine.advance(part, ENDS, budget=-1)


def test_longest_first_takes_fewer_steps_and_changes_no_bit(model):
    """Known lengths: the long answers start first, so the last steps are not one sample's alone."""
    few = prompts((36, 48, 64, 33, 40, 41, 42, 43))
    ends = Sampling(max_tokens=60, stop_ids=tuple(range(0, 250, 17)))
    engine = Native(model, RolloutConfig(max_batch=2), None, 10)
    first = engine.generate(few, 1, ends)
    steps = engine.stats.forwards
    lengths = [len(g.samples[0].ids) for g in first]
    assert lengths.index(max(lengths)) == 7, "the longest comes last, or the test shows nothing"
    second = engine.generate(few, 1, ends)
    assert drawn(second) == drawn(first)
    assert (steps, engine.stats.forwards - steps) == (71, 56)


def test_the_order_of_admission():
    class State:
        def __init__(self, prompt: str, drawn: int = 0, limit: int = 100):
            self.prompt, self.ids, self.limit = Prompt(prompt, (1,), ""), [0] * drawn, limit

    lengths = Lengths()
    lengths.learn([State("long", 90), State("long", 70), State("short", 2)])
    asked = [State("short"), State("new"), State("new"), State("long"), State("cut", 5)]
    order = lengths.longest_first(asked)
    assert [s.prompt.id for s in order] == ["cut", "long", "new", "new", "short"]
    assert order[2] is asked[1], "ties keep their order"
    short_of_room = [State("long", limit=3), State("short"), State("long")]
    assert lengths.longest_first(short_of_room) == [short_of_room[i] for i in (2, 0, 1)]
    lengths.learn([State(str(i)) for i in range(KEPT_PROMPTS)])
    assert len(lengths._mean) == KEPT_PROMPTS and "long" not in lengths._mean


def test_the_tail_is_time_with_under_a_quarter_of_the_places_filled(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("samebit.engine.tail.time", SimpleNamespace(perf_counter=lambda: now[0]))
    tail = Tail(8)
    for seconds, running in ((3.0, 8), (1.0, 2), (4.0, 1)):
        now[0] += seconds
        tail.note(running)
    assert tail.share == 0.5
    assert Tail(8).share == 0.0


def test_a_rollout_says_its_tail(model, monkeypatch):
    """On a clock that counts turns: eight places, of which under two are filled near the end."""
    turns = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(turns)))
    monkeypatch.setattr("samebit.engine.tail.time", clock)
    engine = Native(model, RolloutConfig(), None, 5)
    (group,) = engine.generate(prompts((36,)), 8, ENDS)
    lengths = [len(s.ids) for s in group.samples]
    running = [sum(n > turn for n in lengths) for turn in range(1, max(lengths) + 1)]
    assert 0 < sum(n < 2 for n in running) < len(running)
    assert engine.tail_share == sum(n < 2 for n in running) / len(running)
