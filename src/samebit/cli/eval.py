"""`samebit eval`: avg@n and pass@k on held-out prompts, under one or several recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from samebit.cli.arguments import Option, expect, help_text, parse
from samebit.cli.policy import Target, find_target, load_policy, needs_task
from samebit.reporter import Reporter

USAGE = "samebit eval FILE|RUN|CHECKPOINT [--model M] [--recipe A,B] [--json] [--any.key VALUE]"
ABOUT = (
    "Samples completions of the held-out prompts and grades them. The number and temperature are\n"
    "eval.prompts, eval.samples and eval.temperature of the configuration; with n samples the mean is\n"
    "avg@n, and pass@k the chance that one of k passes (k = 1, 2, 4, ... n).\n"
    "--model M evaluates M on the task and settings of FILE or RUN, not RUN's own checkpoint."
)
OPTIONS = (
    Option("recipe", "A,B", "recipes to evaluate under, comma-separated (default: the run's own)"),
    Option("pass-reward", "X", "least reward of a sample that passes (default: 1)"),
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
    needs_task(target.config, name)
    recipes = found.text("recipe", target.config.recipe).split(",")
    pass_reward = _pass_reward(found.text("pass-reward", "1"))
    from samebit.quant.plan import load_recipe

    for recipe in recipes:
        load_recipe(recipe)
    rows = []
    reporter = Reporter(quiet=found.flag("json"))
    try:
        for recipe in recipes:
            row = evaluate(target, recipe, reporter, pass_reward)
            rows.append(row)
            if not found.flag("json"):
                print(_line(row), flush=True)
    finally:
        reporter.close()
    if found.flag("json"):
        print(json.dumps(rows, indent=2))
    return 0


def _pass_reward(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--pass-reward {text}: must be a number") from None


def evaluate(
    target: Target, recipe: str, reporter: Reporter, pass_reward: float = 1.0
) -> dict[str, Any]:
    """avg@n with its standard error, and pass@k, over the held-out prompts."""
    from samebit.collect import grade
    from samebit.engine.api import load_engine
    from samebit.engine.requests import positions_warning
    from samebit.evaluation import summarise
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
        if (cut := positions_warning(sampling, model.config)) is not None:
            reporter.note(cut)
        engine = load_engine(rollout.engine)(model, rollout, tokenizer, config.seed)
        groups = engine.generate(
            prompts,
            config.eval.samples,
            sampling,
            EVALUATION_SAMPLES,
            reporter.progress(f"evaluating {recipe}"),
        )
        engine.close()
        found = summarise(grade(task, groups), pass_reward)
    finally:
        task.close()
    samples = [s for g in groups for s in g.samples]
    known = found.verdicts > 0
    return {
        "weights": target.describe,
        "recipe": recipe,
        "plan": model.plan.digest,
        "device": model.device.type,
        "reward_mean": found.mean if known else None,
        "standard_error": found.standard_error if known else None,
        "pass_at": {str(k): value for k, value in found.pass_at.items()},
        "pass_reward": pass_reward,
        "prompts": len(prompts),
        "samples": len(samples),
        "no_verdict": len(samples) - found.verdicts,
        "tokens": sum(len(s.ids) for s in samples),
    }


def _line(row: dict[str, Any]) -> str:
    if row["reward_mean"] is None:
        return f"{row['recipe']}: no verdict on any of {row['samples']} samples"
    each = row["samples"] // row["prompts"]
    passed = "  ".join(f"pass@{k} {value:.4f}" for k, value in row["pass_at"].items())
    name = "reward" if each == 1 else f"avg@{each}"
    return (
        f"{row['recipe']}: {name} {row['reward_mean']:.4f} +- {row['standard_error']:.4f}  {passed}  "
        f"({row['samples']} samples of {row['prompts']} held-out prompts, {row['weights']})"
    )
