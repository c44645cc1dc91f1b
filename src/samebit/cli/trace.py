"""`samebit trace`: every operator's output on both sides, and the first that differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from samebit.cli.arguments import Arguments, Option, expect, help_text, parse

USAGE = "samebit trace --model M [--recipe R] [--tokens N] [--sequences N] [--inject FAULT:LINEAR]"
ABOUT = (
    "Runs sequences through the training forward (packed) and through the rollout (token by token\n"
    "over a paged cache), hashes every row of every operator's output, and names the first\n"
    "operator, layer and token that differ. Exit code 1 when something differs."
)
OPTIONS = (
    Option("model", "M", "model, run folder or checkpoint; `tiny` is a random one (default)"),
    Option("recipe", "R", "recipe (default: the run's own, else fp8)"),
    Option("tokens", "N", "tokens of the longest sequence (default 24)"),
    Option("sequences", "N", "sequences, of different lengths (default 3)"),
    Option("chunk", "N", "tokens per forward of the rollout side (default 1: decode)"),
    Option("seed", "N", "of the random token ids (default 0)"),
    Option("text", "TEXT", "trace this text instead of random ids"),
    Option("inject", "FAULT:LINEAR", "code:layers.0.qkv or scale:...: break the rollout's weight"),
    Option("json", "", "print digests per operator and the first difference as JSON"),
)


def run(args: Sequence[str]) -> int:
    """0 when all digests agree, 1 when not."""
    found = parse(args, OPTIONS)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, OPTIONS))
        return 0
    expect(found, [], USAGE)
    chunk, tokens = found.number("chunk", 1), found.number("tokens", 24, 2)
    count, seed = found.number("sequences", 3), found.number("seed", 0, 0)
    from samebit import trace

    model, sequences = _load(found, tokens, count, seed)
    if found.text("inject"):
        kind, _, path = found.text("inject").partition(":")
        trace.inject_fault(model, kind, path)
    train = trace.training_side(model, sequences)
    rollout = trace.rollout_side(model, sequences, chunk)
    difference = trace.first_difference(train, rollout)
    gap = float((train.logp_T - rollout.logp_T).abs().max())
    if found.flag("json"):
        print(json.dumps(_summary(model, train, rollout, difference, gap), indent=2))
        return 1 if difference else 0
    print(f"recipe {model.plan.recipe.name}, plan {model.plan.digest[:12]}")
    total = len(train.tokens)
    print(f"{len(train.rows)} operators x {total} tokens in {len(sequences)} sequences")
    if difference is None:
        print("all digests agree: rollout and training forward are the same bits")
        return 0
    print(difference.describe())
    print(f"largest |dlogp| {gap:.3g}")
    if not model.plan.unified:
        print("the recipe is mixed: its rollout and its training forward are different functions")
    return 1


def _load(found: Arguments, tokens: int, count: int, seed: int) -> tuple[Any, list[list[int]]]:
    """(model, sequences of token ids: the longest, and shorter ones)."""
    import torch

    name = found.text("model", "tiny")
    if name == "tiny":
        if found.text("text"):
            raise ValueError("--text needs a model with a tokenizer: --model M")
        from samebit.check import tiny_model

        model = tiny_model(found.text("recipe", "fp8"))
    else:
        from samebit.cli.policy import find_target, load_policy

        target = find_target(name)
        target = replace(target, source=target.source or "command line: --model")
        model, tokenizer, _ = load_policy(target, found.text("recipe") or None)
        if found.text("text"):
            return model, [tokenizer.encode_prompt(found.text("text"))]
    limit = model.config.max_position
    if tokens > limit:
        raise ValueError(f"--tokens {tokens}: the model has {limit} positions")
    generator = torch.Generator().manual_seed(seed)
    high = model.config.tokenizer_size
    lengths = [max(2, tokens - tokens * i // (count + 1)) for i in range(count)]
    return model, [torch.randint(0, high, (n,), generator=generator).tolist() for n in lengths]


def _summary(model: Any, train: Any, rollout: Any, difference: Any, gap: float) -> dict[str, Any]:
    def digest(side: Any, name: str) -> str:
        rows = side.rows[name]
        return hashlib.sha256(b"".join(rows[t] for t in side.tokens)).hexdigest()

    return {
        "recipe": model.plan.recipe.name,
        "plan": model.plan.digest,
        "unified": model.plan.unified,
        "tokens": len(train.tokens),
        "operators": [
            {"name": name, "train": digest(train, name), "rollout": digest(rollout, name)}
            for name in train.rows
            if name in rollout.rows
        ],
        "first_difference": None if difference is None else vars(difference),
        "logp_abs_max": gap,
    }
