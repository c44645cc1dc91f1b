"""`samebit eval`: mean reward on held-out prompts, under one or several recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from samebit.cli.arguments import Option, expect, help_text, parse
from samebit.cli.policy import Target, find_target, load_policy, needs_task
from samebit.reporter import Reporter

USAGE = "samebit eval FILE|RUN|CHECKPOINT [--recipe A,B] [--json] [--any.key VALUE]"
ABOUT = (
    "Samples completions of the held-out prompts and grades them. The number and temperature are\n"
    "eval.prompts, eval.samples and eval.temperature of the configuration."
)
OPTIONS = (
    Option("recipe", "A,B", "recipes to evaluate under, comma-separated (default: the run's own)"),
    Option("json", "", "print JSON"),
)


def run(args: Sequence[str]) -> int:
    """Print one line per recipe."""
    found = parse(args, OPTIONS, overridable=True)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, OPTIONS))
        return 0
    (name,) = expect(found, ["FILE, RUN or CHECKPOINT"], USAGE)
    target = find_target(name, found.overrides)
    needs_task(target.config)
    recipes = found.text("recipe", target.config.recipe).split(",")
    from samebit.quant.plan import load_recipe

    for recipe in recipes:
        load_recipe(recipe)
    rows = []
    reporter = Reporter(quiet=found.flag("json"))
    try:
        for recipe in recipes:
            row = evaluate(target, recipe, reporter)
            rows.append(row)
            if not found.flag("json"):
                print(_line(row), flush=True)
    finally:
        reporter.close()
    if found.flag("json"):
        print(json.dumps(rows, indent=2))
    return 0


def evaluate(target: Target, recipe: str, reporter: Reporter) -> dict[str, Any]:
    """Mean reward and its standard error over the held-out prompts."""
    import math

    from samebit.engine.api import load_engine
    from samebit.loop import EVALUATION_SAMPLES, held_out
    from samebit.tasks.api import load_task
    from samebit.types import Sampling

    config = target.config
    task = load_task(config.task.name, config.task.options, config.seed)
    try:
        model, tokenizer, _ = load_policy(target, recipe)
        task.bind(tokenizer)
        prompts = held_out(task, config.eval.prompts)
        if not prompts:
            raise ValueError(f"task {config.task.name}: no held-out prompt")
        rollout = config.rollout
        sampling = Sampling(
            temperature=config.eval.temperature,
            max_tokens=rollout.max_tokens,
            stop=rollout.stop,
            stop_ids=rollout.stop_ids,
            seed=config.seed,
        )
        engine = load_engine(rollout.engine)(model, rollout, tokenizer, config.seed)
        groups = engine.generate(
            prompts,
            config.eval.samples,
            sampling,
            EVALUATION_SAMPLES,
            reporter.progress(f"evaluating {recipe}"),
        )
        engine.close()
        asked = [g.prompt for g in groups for _ in g.samples]
        texts = [s.text for g in groups for s in g.samples]
        rewards = [r for r in task.reward(asked, texts) if r is not None]
    finally:
        task.close()
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    variance = sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - 1, 1)
    return {
        "weights": target.describe,
        "recipe": recipe,
        "plan": model.plan.digest,
        "reward_mean": mean if rewards else None,
        "standard_error": math.sqrt(variance / len(rewards)) if rewards else None,
        "prompts": len(prompts),
        "samples": len(texts),
        "no_verdict": len(texts) - len(rewards),
        "tokens": sum(len(s.ids) for g in groups for s in g.samples),
    }


def _line(row: dict[str, Any]) -> str:
    if row["reward_mean"] is None:
        return f"{row['recipe']}: no verdict on any of {row['samples']} samples"
    return (
        f"{row['recipe']}: reward {row['reward_mean']:.4f} +- {row['standard_error']:.4f}  "
        f"({row['samples']} samples of {row['prompts']} held-out prompts, {row['weights']})"
    )
