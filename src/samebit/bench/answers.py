"""Whole rollouts through the engine: answers that all stop at once, never, or at random lengths.

`parts` draws the answers of `spread` as `rollout.partial_tokens` does: what is cut goes on beside the next
step's prompts. Both count the tokens drawn in all of the timed steps over their seconds.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from samebit.bench.decoding import HELD
from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from samebit.engine.requests import begin
from samebit.types import Group, Prompt, Sampling

SEQUENCES = 256
"""Places, and prompts begun a step, with one sample each."""
PROMPT_TOKENS = 100
NEVER_TOKENS = 256
MEAN_TOKENS = 96
"""Mean length of the answers that stop at random; their limit is 1,024."""
PART_TOKENS = 192

STEPS = {"at-once": (1, 2), "never": (1, 1), "spread": (1, 2), "parts": (4, 4), "queue": (1, 1)}
"""(steps that only warm up, steps timed): parts are timed when as many go on as are cut; a queue is the
answers of `spread` of four times as many prompts as places."""


def sampling_of(kind: str, vocabulary: int) -> Sampling:
    """What makes the answers of a model with random weights end so."""
    if kind == "never":
        return Sampling(max_tokens=NEVER_TOKENS)
    every = 1 if kind == "at-once" else MEAN_TOKENS
    return Sampling(max_tokens=1024, stop_ids=tuple(range(0, vocabulary, every)))


def prompts_of(step: int, number: int, vocabulary: int) -> list[Prompt]:
    """The prompts of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocabulary, (number, PROMPT_TOKENS), generator=generator).tolist()
    return [Prompt(f"{step}/{i}", tuple(row), "") for i, row in enumerate(ids)]


def drawn(groups: list[Group]) -> int:
    """Tokens drawn so far."""
    return sum(len(s.ids) for g in groups for s in g.samples)


def answers_row(name: str, recipe: str, kind: str) -> dict[str, Any]:
    """Steps of one kind on a model of this shape; the cache stays, as it does between steps of a run."""
    model = HELD.model(name, recipe)
    engine = Engine(model, RolloutConfig(max_batch=SEQUENCES), None, 0)
    sampling = sampling_of(kind, model.config.tokenizer_size)
    untimed, timed = STEPS[kind]
    number = SEQUENCES * (4 if kind == "queue" else 1)
    held: list[Group] = []
    seconds = tail_s = 0.0
    tokens = longest = 0
    try:
        for step in range(untimed + timed):
            new = begin(prompts_of(step, number, model.config.tokenizer_size), 1, step * number)
            before = drawn(held)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            budget = PART_TOKENS if kind == "parts" else 0
            groups = engine.advance([*held, *new], sampling, budget=budget)
            passed = time.perf_counter() - begun
            engine.refresh()
            held = [g for g in groups if not all(s.finished for s in g.samples)]
            if step >= untimed:
                seconds, tail_s = seconds + passed, tail_s + passed * engine.tail_share
                tokens += drawn(groups) - before
                longest = max(longest, *(len(s.ids) for g in groups for s in g.samples))
        return {
            "seconds": seconds / timed, "tokens_per_s": tokens / seconds,
            "tail_share": tail_s / seconds, "idle_share": engine.idle_share,
            "tokens_a_step": tokens / timed, "longest": longest, "cut": len(held),
            "graphs": engine.stats.captures,
        }  # fmt: skip
    finally:
        engine.close()
