"""The paged engine equals the cacheless oracle, whatever the batch, pages and preemptions."""

from __future__ import annotations

import numpy as np
import pytest

from samebit.config import RolloutConfig
from samebit.engine.api import engine_names, load_engine
from samebit.engine.naive import Engine as Naive
from samebit.engine.native import Engine as Native
from samebit.models.tokenizer import Tokenizer
from samebit.types import Prompt, Sampling
from tests.engine.common import FAMILIES, drawn, prompts, tiny_model
from tests.tiny import END_ID, TOKENIZER_SIZE

UNIFIED = ("bf16", "fp8", "fp8-row", "int8")
MIXED = ("fp8-rollout", "int8-rollout", "fp8-row-rollout")
TIGHT = RolloutConfig(max_batch=5, prefill_tokens=17, cache_tokens=192)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [(f, r) for f in FAMILIES for r in UNIFIED] + [("llama", r) for r in MIXED],
)
def test_equals_naive(tmp_path, family, recipe):
    model = tiny_model(tmp_path, family, recipe)
    request = (prompts((18, 33), shared=16), 2, Sampling(max_tokens=3, temperature=0.9), 7)
    expected = drawn(Naive(model, RolloutConfig(), None, 3).generate(*request))
    assert drawn(Native(model, RolloutConfig(), None, 3).generate(*request)) == expected
    assert len({s[2] for s in expected}) == 4, "four different samples, or the test shows nothing"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama", "fp8")


@pytest.fixture(scope="module")
def tokenizer(model, tmp_path_factory):
    from tests.tiny import tiny_folder

    return Tokenizer(tiny_folder(tmp_path_factory.mktemp("tokenizer"), "llama"))


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_batch_pages_chunks_and_preemption_change_nothing(model, page_size):
    sampling = Sampling(max_tokens=24)
    request = (prompts(), 3, sampling)
    wide = Native(model, RolloutConfig(), None, 5).generate(*request)
    small = Native(model, TIGHT, None, 5, page_size=page_size)
    assert drawn(small.generate(*request)) == drawn(wide)
    assert small.stats.preemptions > 0


def test_restricted_sampling_equals_naive(model):
    for sampling in (
        Sampling(max_tokens=4, temperature=0.7, top_p=0.8),
        Sampling(max_tokens=4, top_k=3),
        Sampling(max_tokens=4, temperature=0.0),
    ):
        request = (prompts((33, 40), 32), 2, sampling)
        native = Native(model, RolloutConfig(), None, 1).generate(*request)
        assert drawn(native) == drawn(Naive(model, RolloutConfig(), None, 1).generate(*request))


def test_noise_is_a_function_of_seed_sample_and_position(model):
    engine = Native(model, RolloutConfig(), None, 1)
    sampling = Sampling(max_tokens=6)
    one = engine.generate(prompts()[:1], 4, sampling, first_sample_id=10)[0].samples
    alone = engine.generate(prompts()[:1], 1, sampling, first_sample_id=12)[0].samples[0]
    assert alone.ids == one[2].ids and alone.logps.tobytes() == one[2].logps.tobytes()
    other = Native(model, RolloutConfig(), None, 2).generate(prompts()[:1], 4, sampling, 10)
    assert [s.ids for s in other[0].samples] != [s.ids for s in one]
    again = Native(model, RolloutConfig(), None, 0).generate(
        prompts()[:1], 4, Sampling(max_tokens=6, seed=1), 10
    )
    assert [s.ids for s in again[0].samples] == [s.ids for s in one]


def test_prompt_is_prefilled_once_and_pages_are_shared(model):
    engine = Native(model, RolloutConfig(), None, 0)
    engine.generate(prompts((40, 44, 64), shared=32), 4, Sampling(max_tokens=2))
    # 40, then what is left over of each after the two common pages of 16
    assert engine.stats.prefill_tokens == 40 + 12 + 32
    engine.generate(prompts((40, 44, 64), shared=32), 4, Sampling(max_tokens=2))
    assert engine.stats.prefill_tokens == 40 + 12 + 32, "the second time nothing is prefilled"


def test_no_page_leaks(model):
    engine = Native(model, TIGHT, None, 0)
    for seed in range(3):
        engine.generate(prompts(seed=seed), 2, Sampling(max_tokens=12))
        engine.refresh()
        assert engine.pool.num_free == engine.pool.num_pages
        assert set(engine.pool.references) == {0}


def test_error_in_the_middle_leaves_no_page_and_no_stale_prefix(model):
    engine = Native(model, RolloutConfig(), None, 0)
    request = (prompts(), 2, Sampling(max_tokens=6))
    expected = drawn(engine.generate(*request))
    engine.refresh()

    def stop(finished: int, total: int, tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(*request, progress=stop)
    assert engine.pool.num_free == engine.pool.num_pages
    assert drawn(engine.generate(*request)) == expected


def test_refresh_drops_what_older_weights_computed(tmp_path):
    """A25: with the prefix cache on, the second answer is a fresh engine's."""
    model = tiny_model(tmp_path, "llama", "fp8")
    engine = Native(model, RolloutConfig(), None, 0)
    request = (prompts(), 2, Sampling(max_tokens=4))
    before = drawn(engine.generate(*request))
    computed = engine.stats.prefill_tokens
    for parameter in model.parameters():
        parameter.data.mul_(1.25)
    model.refresh()
    engine.refresh()
    after = engine.generate(*request)
    assert engine.stats.prefill_tokens == 2 * computed, "no token came from the old cache"
    assert drawn(after) == drawn(Native(model, RolloutConfig(), None, 0).generate(*request))
    assert drawn(after) != before
    assert {int(v) for g in after for s in g.samples for v in s.versions} == {model.version}
    # a model refreshed behind the engine's back is noticed by its version
    for parameter in model.parameters():
        parameter.data.mul_(0.8)
    model.refresh()
    assert drawn(engine.generate(*request)) == drawn(
        Naive(model, TIGHT, None, 0).generate(*request)
    )


def test_refresh_with_equal_weights_changes_no_code_scale_or_address(model):
    """A26, A29: the same weights again are a no-op, in place."""

    def state():
        weights = [w for _, m in model.linears() for w in m.weights.values()]
        return [
            (
                w.codes.data_ptr(),
                w.scale.data_ptr(),
                w.codes.view(-1).float().sum().item(),
                w.scale.sum().item(),
            )
            for w in weights
        ]

    before = state()
    model.refresh()
    assert state() == before


def test_every_end_id_is_honoured_and_stays_in_the_sample(model):
    """A20, A23: the end token is part of the sample; reason 'stop', not the limit."""
    free = Native(model, RolloutConfig(), None, 0)
    whole = free.generate(prompts()[:1], 1, Sampling(max_tokens=8))[0].samples[0]
    assert END_ID not in whole.ids and whole.finish_reason == "length" and whole.truncated
    stop_id = whole.ids[4]
    for never in (-1, 100000):
        with pytest.raises(ValueError, match=f"stop_ids holds {never}"):
            free.generate(prompts()[:1], 1, Sampling(max_tokens=8, stop_ids=(never,)))
    cut = free.generate(prompts()[:1], 1, Sampling(max_tokens=8, stop_ids=(stop_id,)))[0].samples[0]
    first = whole.ids.index(stop_id)
    assert cut.ids == whole.ids[: first + 1] and cut.finish_reason == "stop" and not cut.truncated
    assert cut.logps.tobytes() == whole.logps[: first + 1].tobytes()


def test_prompt_may_contain_end_ids(model):
    request = ([Prompt("e", (5, END_ID, 9, END_ID), "")], 2, Sampling(max_tokens=3))
    native = Native(model, RolloutConfig(), None, 0).generate(*request)
    assert all(len(s.ids) >= 1 for s in native[0].samples)
    assert drawn(native) == drawn(Naive(model, RolloutConfig(), None, 0).generate(*request))


def test_stop_string_ends_with_the_token_that_completes_it(model, tokenizer):
    engine = Native(model, RolloutConfig(), tokenizer, 0)
    whole = engine.generate(prompts()[:1], 1, Sampling(max_tokens=24))[0].samples[0]
    assert whole.text == tokenizer.decode(whole.ids)
    plain = [i for i in range(1, 23) if tokenizer.decode(whole.ids[i - 1 : i + 1]).isascii()]
    pair = whole.ids[plain[0] - 1 : plain[0] + 1]
    stop = tokenizer.decode(pair)
    sampling = Sampling(max_tokens=24, stop=("never this", stop))
    cut = engine.generate(prompts()[:1], 1, sampling)[0].samples[0]
    assert stop in cut.text and cut.finish_reason == "stop"
    assert stop not in tokenizer.decode(cut.ids[:-1])
    assert cut.ids == whole.ids[: len(cut.ids)]


def test_length_limits(tmp_path):
    """A30: limit - 1, limit and limit + 1."""
    model = tiny_model(tmp_path, "llama", "bf16", max_position=40)
    for engine in (Native(model, RolloutConfig(), None, 0), Naive(model, RolloutConfig(), None, 0)):
        (group,) = engine.generate([Prompt("a", (1,) * 39, "")], 1, Sampling(max_tokens=9))
        assert len(group.samples[0].ids) == 1 and group.samples[0].finish_reason == "length"
        for length in (40, 41):
            with pytest.raises(
                ValueError, match=f"'b' is too long: {length} tokens, .* 40 positions"
            ):
                engine.generate(
                    [Prompt("a", (1,), ""), Prompt("b", (1,) * length, "")], 1, Sampling()
                )
    single = Native(model, RolloutConfig(), None, 0).generate(
        [Prompt("s", (3,), "")], 2, Sampling()
    )
    assert all(len(s.ids) <= 39 for s in single[0].samples)


def test_ids_past_the_tokenizer_are_never_drawn(tmp_path):
    """A24: a row of the embedding the tokenizer does not know cannot win, however large."""
    model = tiny_model(tmp_path, "llama", "bf16")
    model.embedding.data[TOKENIZER_SIZE:] *= 100
    model.refresh()
    groups = Native(model, RolloutConfig(), None, 0).generate(prompts(), 4, Sampling(max_tokens=8))
    assert all(t < TOKENIZER_SIZE for g in groups for s in g.samples for t in s.ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ("",)}, "empty string"),
        ({"stop": ("x",)}, "need a tokenizer"),
    ],
)
def test_senseless_sampling_is_refused(model, change, message):
    with pytest.raises(ValueError, match=message):
        Native(model, RolloutConfig(), None, 0).generate(prompts(), 1, Sampling(**change))


def test_senseless_requests_are_refused(model):
    engine = Native(model, RolloutConfig(), None, 0)
    with pytest.raises(ValueError, match="'x' has no tokens"):
        engine.generate([Prompt("x", (), "")], 1, Sampling())
    with pytest.raises(ValueError, match="token id 99999"):
        engine.generate([Prompt("x", (1, 99999), "")], 1, Sampling())
    with pytest.raises(ValueError, match="samples_per_prompt is 0"):
        engine.generate(prompts(), 0, Sampling())
    with pytest.raises(ValueError, match=r"cache_tokens is 64, .* at least"):
        Native(model, RolloutConfig(cache_tokens=64), None, 0).generate(prompts(), 1, Sampling())
    with pytest.raises(ValueError, match=r"rollout\.max_batch is 0"):
        Native(model, RolloutConfig(max_batch=0), None, 0)
    assert engine.generate([], 3, Sampling()) == []


def test_abort_and_deadline_return_what_there_is(model):
    engine = Native(model, RolloutConfig(), None, 0)
    whole = engine.generate(prompts(), 2, Sampling(max_tokens=12))

    def stop(finished: int, total: int, tokens: int) -> None:
        assert total == 8
        if tokens >= 24:
            engine.abort()

    part = engine.generate(prompts(), 2, Sampling(max_tokens=12), progress=stop)
    for a, b in zip(part, whole, strict=True):
        for sample, full in zip(a.samples, b.samples, strict=True):
            assert 0 < len(sample.ids) < 12 and sample.ids == full.ids[: len(sample.ids)]
            assert sample.finish_reason == "abort" or sample.ids == full.ids
    assert {s.finish_reason for g in part for s in g.samples} >= {"abort"}
    late = engine.generate(prompts(), 2, Sampling(max_tokens=12), deadline_s=0.0)
    assert [len(s.ids) for g in late for s in g.samples] == [0] * 8
    assert drawn(engine.generate(prompts(), 2, Sampling(max_tokens=12))) == drawn(whole)
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.generate(prompts(), 1, Sampling())


def test_not_a_number_is_named_not_sampled(tmp_path):
    model = tiny_model(tmp_path, "llama", "bf16")
    model.norm_final.data[0] = np.nan
    model.refresh()
    with pytest.raises(ValueError, match="not finite"):
        Native(model, RolloutConfig(), None, 0).generate(prompts(), 1, Sampling())


def test_the_folder_is_the_registry():
    assert engine_names() == ["naive", "native"]
    assert load_engine("native") is Native and load_engine("samebit.engine.naive") is Naive
    with pytest.raises(ValueError, match="known engines: naive, native"):
        load_engine("vllm")
    with pytest.raises(ValueError, match="must define a class Engine"):
        load_engine("samebit.engine.cache")
