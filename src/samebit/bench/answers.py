"""Whole rollouts through the engine: answers that all stop at once, never, or at random lengths."""

from __future__ import annotations

import time
from typing import Any

import torch

from samebit.bench.decoding import HELD
from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from samebit.types import Prompt, Sampling

SEQUENCES = 256
PROMPT_TOKENS = 100
NEVER_TOKENS = 256
MEAN_TOKENS = 96
"""Mean length of the answers that stop at random."""

KINDS = ("at-once", "never", "spread")


def sampling_of(kind: str, vocabulary: int) -> Sampling:
    """What makes the answers of a model with random weights end so."""
    if kind == "never":
        return Sampling(max_tokens=NEVER_TOKENS)
    every = 1 if kind == "at-once" else MEAN_TOKENS
    return Sampling(max_tokens=1024, stop_ids=tuple(range(0, vocabulary, every)))


def answers_row(name: str, recipe: str, kind: str) -> dict[str, Any]:
    """Twice as many prompts as places, one sample each; the second of two runs is timed."""
    model = HELD.model(name, recipe)
    torch.manual_seed(0)
    limit = model.config.tokenizer_size
    ids = torch.randint(0, limit, (2 * SEQUENCES, PROMPT_TOKENS)).tolist()
    prompts = [Prompt(str(i), tuple(row), "") for i, row in enumerate(ids)]
    engine = Engine(model, RolloutConfig(max_batch=SEQUENCES), None, 0)
    sampling = sampling_of(kind, limit)
    try:
        for _ in range(2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            groups = engine.generate(prompts, 1, sampling)
            seconds = time.perf_counter() - begun
            engine.refresh()
        lengths = [len(s.ids) for g in groups for s in g.samples]
        return {
            "seconds": seconds, "tokens_per_s": sum(lengths) / seconds,
            "ms_per_longest_token": 1e3 * seconds / max(lengths),
            "idle_share": engine.idle_share, "tail_share": engine.tail_share,
            "mean_tokens": sum(lengths) / len(lengths), "longest": max(lengths),
            "graphs": engine.stats.captures,
        }  # fmt: skip
    finally:
        engine.close()
