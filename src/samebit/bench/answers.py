"""Whole rollouts through the engine: answers that all stop at once, never, or at random lengths.

A step in which a kernel was compiled or a graph made says nothing about the next: it is not counted.
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
"""(first steps that never count, steps that do): parts count when as many go on as are cut; a queue is the
answers of `spread` of four times as many prompts as places."""
MOST = 4
"""Times as many steps are run at most, until enough count."""


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
    engine = Engine(HELD.model(name, recipe), RolloutConfig(max_batch=SEQUENCES), None, 0)
    try:
        return measured(engine, kind, SEQUENCES * (4 if kind == "queue" else 1))
    finally:
        engine.close()


def made(engine: Engine) -> int:
    """Graphs and kinds of launches so far. RuntimeError where kinds are not told apart."""
    from samebit.kernels.launch import KNOWN, is_known, kinds_seen  # late: triton

    if not is_known():
        raise RuntimeError(f"which steps compile is known with triton {KNOWN}x only; install it")
    return engine.stats.captures + kinds_seen()


def measured(engine: Engine, kind: str, number: int) -> dict[str, Any]:
    """The fields of a row: `number` new prompts a step. RuntimeError if too few steps count."""
    vocabulary = engine.model.config.tokenizer_size
    sampling = sampling_of(kind, vocabulary)
    budget = PART_TOKENS if kind == "parts" else 0
    uncounted, wanted = STEPS[kind]
    held: list[Group] = []
    seconds = tail_s = 0.0
    tokens = longest = counted = step = 0
    while counted < wanted and step < uncounted + MOST * wanted:
        new = begin(prompts_of(step, number, vocabulary), 1, step * number)
        before, already = drawn(held), made(engine)
        if engine.model.device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        groups = engine.advance([*held, *new], sampling, budget=budget)
        passed = time.perf_counter() - begun
        engine.refresh()
        held = [g for g in groups if not all(s.finished for s in g.samples)]
        if step >= uncounted and made(engine) == already:
            counted += 1
            seconds, tail_s = seconds + passed, tail_s + passed * engine.tail_share
            tokens += drawn(groups) - before
            longest = max(longest, *(len(s.ids) for g in groups for s in g.samples))
        step += 1
    if counted < wanted:
        raise RuntimeError(f"kernels were still being made in step {step}; run the row again")
    return {
        "seconds": seconds / wanted, "tokens_per_s": tokens / seconds,
        "tail_share": tail_s / seconds, "idle_share": engine.idle_share,
        "tokens_a_step": tokens / wanted, "longest": longest, "cut": len(held),
        "graphs": engine.stats.captures, "steps_run": step,
    }  # fmt: skip
