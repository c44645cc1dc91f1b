"""What one key's type cannot say: ranges, and keys that must fit each other. Imports no torch.

Every message gives all numbers involved and the nearest values that work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from samebit.config import Config
from samebit.config_origin import Origin

_ROLES = ("qkv", "out", "gate_up", "down", "head", "embedding", "norm")

_Rule = tuple[Callable[[Any], bool], str]


def _least(low: float) -> _Rule:
    return (lambda v: v >= low), f"must be at least {low:g}"


_MOST = 10**7
"""More prompts, samples or tokens than a step can hold: a slip of the keyboard, not a wish."""


_MOST_GIB = 10**6
"""More than any device has, and its bytes are still a number."""


def _count(v: int) -> bool:
    return 1 <= v <= _MOST


def _share(v: float) -> bool:
    return 0.0 <= v < 1.0


# Below it logits divided by the temperature leave FP32.
_TEMPERATURE: _Rule = ((lambda v: v == 0 or v >= 1e-6), "must be 0 (greedy) or at least 1e-6")
_COUNT: _Rule = (_count, f"must be between 1 and {_MOST:,}")
_POSITIVE: _Rule = (lambda v: v > 0), "must be above 0"
_RULES: dict[str, _Rule] = {
    "seed": ((lambda v: 0 <= v < 2**63), "must be between 0 and 2^63 - 1"),
    "model": (bool, "must not be empty"),
    "recipe": (bool, "must not be empty"),
    "run.out": (bool, "must not be empty"),
    "run.device": (
        (lambda v: re.fullmatch(r"auto|cpu|cuda(:\d+)?", v) is not None),
        "must be auto, cpu, cuda or cuda:N",
    ),
    "run.threads": _least(0),
    "run.save_every": _least(0),
    "run.keep_checkpoints": _least(1),
    "run.save_samples": _least(0),
    "run.canary": _least(0),
    "run.max_skipped_steps": _least(0),
    "task.name": (bool, "must not be empty"),
    "rollout.max_tokens": _COUNT,
    "rollout.temperature": _TEMPERATURE,
    "rollout.top_p": ((lambda v: 0 < v <= 1), "must be above 0 and at most 1 (1 is off)"),
    "rollout.top_k": _least(0),
    "rollout.stop": ((lambda v: all(v)), "must not hold an empty string"),
    "rollout.stop_ids": ((lambda v: all(i >= 0 for i in v)), "must hold ids of at least 0"),
    "rollout.max_batch": _COUNT,
    "rollout.prefill_tokens": _least(0),
    "rollout.cache_tokens": _least(0),
    "rollout.partial_tokens": _least(0),
    "rl.prompts_per_step": _COUNT,
    "rl.group_size": _COUNT,
    "rl.mini_batches": _COUNT,
    "rl.epochs": _COUNT,
    "train.steps": ((lambda v: v >= 1), "trains nothing; use at least 1"),
    "train.learning_rate": _least(0),
    "train.warmup_steps": _least(0),
    "train.beta1": (_share, "must be at least 0 and below 1"),
    "train.beta2": (_share, "must be at least 0 and below 1"),
    "train.epsilon": _POSITIVE,
    "train.weight_decay": _least(0),
    "train.max_grad_norm": _least(0),
    "train.micro_batch_tokens": _least(1),
    "train.memory_gib": (
        (lambda v: 0 <= v <= _MOST_GIB),
        f"must be between 0 and {_MOST_GIB:,} (GiB of one device; 0: 95 % of what is free)",
    ),
    "train.gradient_leaves": (
        (lambda v: v >= 0 and not v & (v - 1)),
        "must be a power of two, or 0 (as many as processes)",
    ),
    "train.profile_step": _least(0),
    "train.invariant_scale": _POSITIVE,
    "eval.every": _least(0),
    "eval.prompts": _COUNT,
    "eval.samples": _COUNT,
    "eval.temperature": _TEMPERATURE,
}


def check_config(config: Config, origin: Origin) -> None:
    """ValueError, with the numbers and the nearest valid ones, for what cannot be run."""
    for key, (holds, problem) in _RULES.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if not holds(value):
            raise ValueError(f"{origin.of(key)}: {key} = {value!r} {problem}")
    _check_batches(config, origin)
    _check_lengths(config, origin)
    _check_tables(config, origin)


def _check_batches(config: Config, origin: Origin) -> None:
    prompts, parts = config.rl.prompts_per_step, config.rl.mini_batches
    if prompts % parts == 0:
        return
    divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
    below = max(n for n in divisors if n < parts)
    above = [n for n in divisors if n > parts]
    use = " or ".join(str(n) for n in (below, *above[:1]))
    floor = prompts // parts * parts
    fits = " or ".join(str(n) for n in (floor, floor + parts) if n)
    total = prompts * config.rl.group_size
    source = origin.of("rl.mini_batches", "rl.prompts_per_step")
    raise ValueError(
        f"{source}: rl.mini_batches = {parts} does not divide rl.prompts_per_step = {prompts} "
        f"({prompts} prompts x rl.group_size {config.rl.group_size} = {total} completions a step; "
        f"a group is never split): use mini_batches {use}, or prompts_per_step {fits}"
    )


def _check_lengths(config: Config, origin: Origin) -> None:
    rollout, train = config.rollout, config.train
    if 0 < rollout.cache_tokens <= rollout.max_tokens:
        source = origin.of("rollout.cache_tokens", "rollout.max_tokens")
        raise ValueError(
            f"{source}: rollout.cache_tokens = {rollout.cache_tokens} cannot hold one completion "
            f"of rollout.max_tokens = {rollout.max_tokens} and its prompt; use more than "
            f"{rollout.max_tokens}, or 0 to have it chosen"
        )
    if train.warmup_steps > train.steps:
        source = origin.of("train.warmup_steps", "train.steps")
        raise ValueError(
            f"{source}: train.warmup_steps = {train.warmup_steps} is more than train.steps = "
            f"{train.steps}, so the learning rate is never reached; use at most {train.steps}"
        )


def _check_tables(config: Config, origin: Origin) -> None:
    for role, factor in config.train.role_learning_rates.items():
        key = f"train.role_learning_rates.{role}"
        where = f"{origin.of(key)}: {key}"
        if role not in _ROLES:
            raise ValueError(f"{where}: unknown role; known: {', '.join(_ROLES)}")
        if factor < 0:
            raise ValueError(f"{where} = {factor!r} must be at least 0")
    correction, source = config.rl.correction, origin.of("rl.correction.name")
    if "name" not in correction:
        raise ValueError(
            f'{source}: rl.correction: name is missing; add `name = "none"` (or tis, mis, acr, ...)'
        )
    if not isinstance(correction["name"], str):
        raise ValueError(
            f"{source}: rl.correction.name = {correction['name']!r} must be a name, such as none or tis"
        )
