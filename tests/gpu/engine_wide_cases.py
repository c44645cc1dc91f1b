"""Cases of engine_cases.py that go wide: every bucket, many samples, long prompts, all ways to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from samebit.config import RolloutConfig
from samebit.engine.decode import GraphStep, bucket_sizes
from samebit.engine.native import Engine
from samebit.engine.requests import begin
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder
from samebit.reference.sampling import Transform
from samebit.rl.mismatch import differing as differing_bits
from samebit.types import Group, Prompt, Sampling
from tests.gpu.backend_cases import (
    DEVICE,
    MODELS,
    RECIPES,
    learn,
    mismatch,
    random_model,
    train_logp,
)

Engine.pipelined = True

SAMPLES = 8
"""Samples of a prompt where many prompts are wanted."""

LIMIT = 1024 if DEVICE.type == "cuda" else 24
"""Rows of the widest batch: a CPU only checks the cases themselves."""

PROMPT_LENGTHS = (10, 100, 1000, 4000, 8000) if DEVICE.type == "cuda" else (10, 40)


def prompts_of(lengths: Sequence[int], limit: int, seed: int = 0) -> list[Prompt]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Prompt(str(i), tuple(torch.randint(0, limit, (n,), generator=generator).tolist()), "")
        for i, n in enumerate(lengths)
    ]


def drawn(groups: Sequence[Group]) -> list[tuple[object, ...]]:
    """Everything of the samples that must be equal."""
    return [
        (s.sample_id, s.ids, s.logps.tobytes(), s.finish_reason) for g in groups for s in g.samples
    ]


def differing(left: Sequence[Group], right: Sequence[Group]) -> int:
    """Samples that are not the same in every bit."""
    return sum(a != b for a, b in zip(drawn(left), drawn(right), strict=True))


def leaked(engine: Engine) -> int:
    """Pages held after everything was forgotten."""
    engine.refresh()
    assert engine.pool is not None
    return engine.pool.num_pages - engine.pool.num_free


class Tally:
    """What was compared of one engine, added up."""

    def __init__(self, model: Decoder, engine: Engine):
        self.model, self.engine = model, engine
        self.wrong = self.tokens = 0
        self.largest = 0.0
        self.unequal = 0

    def score(self, groups: Sequence[Group], transform: Transform | None = None) -> None:
        """Compare with the training forward."""
        wrong, tokens, largest = mismatch(self.model, list(groups), transform or Transform())
        self.wrong, self.tokens = self.wrong + wrong, self.tokens + tokens
        self.largest = max(self.largest, largest)

    def score_fresh(self, groups: Sequence[Group]) -> None:
        """Compare the tokens of the present weight version."""
        with torch.no_grad():
            logp, batch = train_logp(self.model, list(groups))
        fresh = batch.version == self.model.version
        self.wrong += int((differing_bits(logp, batch.rollout_logp) & fresh).sum())
        self.tokens += int(fresh.sum())

    def equal(self, left: Sequence[Group], right: Sequence[Group]) -> None:
        """Compare two rollouts that must be one."""
        self.unequal += differing(left, right)

    def close(self, ok: bool = True, **more: object) -> dict[str, object]:
        """The case's record."""
        lost, stats = leaked(self.engine), self.engine.stats
        self.engine.close()
        return {
            "differing": self.wrong, "tokens": self.tokens, "largest": self.largest,
            "unequal": self.unequal, "leaked": lost, "captures": stats.captures,
            "preemptions": stats.preemptions, **more,
            "ok": ok and not (self.wrong or self.unequal or lost),
        }  # fmt: skip


def graph_keys(engine: Engine) -> list[tuple[int, int]]:
    """(rows, context bound) of every graph there is; on a CPU what would be one is not known."""
    step = engine._step
    return sorted((k.bucket, k.bound) for k in step.keys()) if isinstance(step, GraphStep) else []


def every_bucket(config: ModelConfig, recipe: str) -> dict[str, object]:
    """A batch of exactly each size that graphs are made for, under two context bounds."""
    model = random_model(config, recipe, DEVICE)
    engine = Engine(model, RolloutConfig(max_batch=LIMIT), None, 3)
    tally, sizes = Tally(model, engine), bucket_sizes(LIMIT)
    limit, long = config.tokenizer_size, 1100 if DEVICE.type == "cuda" else 30
    for n in sizes:
        each = min(n, SAMPLES)
        lengths = [3 + 7 * i % 30 for i in range(n // each)]
        sampling = Sampling(max_tokens=4)
        tally.score(engine.generate(prompts_of(lengths, limit, n), each, sampling, n))
        tally.score(engine.generate(prompts_of([long], limit, n), n, sampling, n))
    keys = graph_keys(engine)
    wanted = {(n, b) for n in sizes for b in (1024, 4096)} if keys else set()
    return tally.close(not wanted.difference(keys), graphs=len(keys), sizes=len(sizes))


def crowd(config: ModelConfig, recipe: str, rows: int) -> dict[str, object]:
    """More samples than places, of random lengths, with too few pages; in another order, the same."""
    model = random_model(config, recipe, DEVICE)
    rows = min(rows, LIMIT)
    limit = config.tokenizer_size
    prompts = prompts_of([1 + 37 * i % 300 for i in range(rows * 5 // 16)], limit)
    tight = RolloutConfig(max_batch=rows, prefill_tokens=2048, cache_tokens=128 * (rows + 5))
    ends = Sampling(max_tokens=160, stop_ids=tuple(range(0, limit, 24)))
    engine = Engine(model, tight, None, 3)
    tally = Tally(model, engine)
    groups = engine.generate(prompts, SAMPLES, ends, 7)
    idle, tail = engine.idle_share, engine.tail_share
    tally.score(groups)
    other = Engine(model, RolloutConfig(max_batch=max(2, rows // 3)), None, 3)
    tally.equal(groups, other.generate(prompts, SAMPLES, ends, 7))
    other.close()
    samples = [s for g in groups for s in g.samples]
    return tally.close(
        samples=len(samples), longest=max(len(s.ids) for s in samples),
        idle=round(idle, 3), tail=round(tail, 3),
    )  # fmt: skip


def prompt_lengths(config: ModelConfig, recipe: str) -> dict[str, object]:
    """Prompts of 10 to 8,000 tokens, whole and in chunks, before and after an update."""
    model = random_model(replace(config, max_position=16384), recipe, DEVICE)
    prompts = prompts_of(PROMPT_LENGTHS, config.tokenizer_size)
    engine = Engine(model, RolloutConfig(max_batch=16), None, 3)
    tally, sampling = Tally(model, engine), Sampling(max_tokens=12)
    for step in range(2):
        groups = engine.generate(prompts, 3, sampling, 5)
        tally.score(groups)
        if step == 0:
            learn(model, groups[:3])
            engine.refresh()
    chunked = Engine(model, RolloutConfig(max_batch=7, prefill_tokens=333), None, 3)
    tally.equal(groups, chunked.generate(prompts, 3, sampling, 5))
    chunked.close()
    return tally.close()


def ways_to_end(config: ModelConfig, recipe: str) -> dict[str, object]:
    """Answers that all stop at once, all at their limit, never before it, or by an abort."""
    model = random_model(config, recipe, DEVICE)
    limit, rows = config.tokenizer_size, min(128, LIMIT)
    prompts = prompts_of([2 + 11 * i % 90 for i in range(rows // 4)], limit)
    engine = Engine(model, RolloutConfig(max_batch=rows), None, 3)
    tally = Tally(model, engine)
    at_once = engine.generate(prompts, 4, Sampling(max_tokens=9, stop_ids=tuple(range(limit))), 1)
    reasons = {s.finish_reason for g in at_once for s in g.samples}
    never = engine.generate(prompts, 4, Sampling(max_tokens=9), 1)
    for groups in (at_once, never):
        tally.score(groups)
    cut = engine.generate(prompts, 4, Sampling(max_tokens=3000), 1, deadline_s=0.3)
    begun = [Group(g.prompt, tuple(s for s in g.samples if s.ids)) for g in cut]
    some = [g for g in begun if g.samples]
    if some:
        tally.score(some)
    firsts = all(
        s.ids[: len(c.ids)] == c.ids[: len(s.ids)]
        for g, h in zip(never, cut, strict=True)
        for s, c in zip(g.samples, h.samples, strict=True)
    )
    lengths = {len(s.ids) for g in never for s in g.samples}
    return tally.close(
        reasons == {"stop"} and lengths == {9} and firsts,
        cut_tokens=sum(len(s.ids) for g in cut for s in g.samples),
    )  # fmt: skip


def restricted_draw(config: ModelConfig, recipe: str) -> dict[str, object]:
    """Top-k and top-p drawn inside graphs, over several batch sizes and before and after an update."""
    model = random_model(config, recipe, DEVICE)
    limit, rows = config.tokenizer_size, min(96, LIMIT)
    prompts = prompts_of([2 + 13 * i % 150 for i in range(rows // 3)], limit)
    engine = Engine(model, RolloutConfig(max_batch=rows), None, 3)
    tally = Tally(model, engine)
    for temperature, top_k, top_p in ((0.8, 40, 0.9), (1.0, 5, 1.0), (1.3, 0, 0.6)):
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=24,
            stop_ids=tuple(range(0, limit, 20)),
        )  # fmt: skip
        transform = Transform(temperature, top_k, top_p)
        groups = engine.generate(prompts, 3, sampling, 2)
        tally.score(groups, transform)
        few = engine.generate(prompts[:1], 3, sampling, 2)
        tally.equal(groups[:1], few)
        learn(model, groups[:4], transform)
        engine.refresh()
    return tally.close()


def partial_rollouts(config: ModelConfig, recipe: str) -> dict[str, object]:
    """Samples in parts, weights moving in between: every part's tokens against the forward of its version.

    At the same weights the parts are the whole; a prompt's known lengths change the order, not a bit.
    """
    model = random_model(config, recipe, DEVICE)
    limit, rows = config.tokenizer_size, min(96, LIMIT)
    prompts = prompts_of([3 + 17 * i % 250 for i in range(rows // 2)], limit)
    ends = Sampling(max_tokens=45, stop_ids=tuple(range(0, limit, 40)))
    engine = Engine(model, RolloutConfig(max_batch=rows, cache_tokens=128 * (rows + 5)), None, 3)
    tally = Tally(model, engine)
    whole = engine.generate(prompts, 4, ends, 9)
    groups = begin(prompts, 4, 9)
    while not all(s.finished for g in groups for s in g.samples):
        groups = engine.advance(groups, ends, budget=16)
    tally.equal(groups, whole)
    groups, parts = begin(prompts, 4, 9), 0
    while not all(s.finished for g in groups for s in g.samples):
        groups = engine.advance(groups, ends, budget=16)
        parts += 1
        tally.score_fresh(groups)
        if parts == 1:
            engine.release()
        learn(model, groups[:3])
        engine.refresh()
    mixed = sum(len(set(s.versions.tolist())) > 1 for g in groups for s in g.samples)
    return tally.close(parts == 3 and mixed > 0, parts=parts, of_several_versions=mixed)


Case = Callable[[], dict[str, object]]
KINDS: dict[str, Callable[[ModelConfig, str], dict[str, object]]] = {
    "buckets": every_bucket,
    "crowd": lambda config, recipe: crowd(config, recipe, 256),
    "crowd-1024": lambda config, recipe: crowd(config, recipe, 1024),
    "prompts": prompt_lengths,
    "ends": ways_to_end,
    "restricted": restricted_draw,
    "partial": partial_rollouts,
}


def cases() -> dict[str, Case]:
    """KIND/MODEL/RECIPE; heads of 128 (qwen3) under every recipe, of 64 (llama) under the extremes."""
    out: dict[str, Case] = {}
    for kind, case in KINDS.items():
        for recipe in RECIPES:
            for model in ("qwen3", "llama") if recipe in ("bf16", "fp8-kv") else ("qwen3",):
                out[f"{kind}/{model}/{recipe}"] = lambda c=case, m=model, r=recipe: c(MODELS[m], r)
    return out
