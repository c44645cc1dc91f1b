"""Checks that need the modules a configuration names: its recipe, algorithm, correction and task.

Everything here runs before a model is read, so that a misspelt key costs a second, not a load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from samebit.config import Config
from samebit.config_io import nearest_key


def validate(config: Config, origin: str) -> list[str]:
    """Load what `config` names and check the pair; warnings. ValueError names origin and key."""
    from samebit.quant.flow import is_unified
    from samebit.quant.plan import load_recipe
    from samebit.rl.checks import check_pair
    from samebit.rl.registry import load_algorithm, load_correction
    from samebit.tasks.api import load_task
    from samebit.types import Sampling

    with _prefixed(origin, "recipe"):
        recipe = load_recipe(config.recipe)
    with _prefixed(origin, "rl"):
        algorithm = load_algorithm(config.rl.algorithm, config.rl.options)
    table = dict(config.rl.correction)
    with _prefixed(origin, "rl.correction"):
        correction = load_correction(str(table.pop("name")), table)
    with _prefixed(origin, "rl"):
        rollout = config.rollout
        warnings = check_pair(
            algorithm,
            correction,
            is_unified(recipe),
            Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
            config.rl.group_size,
            config.rl.epochs * config.rl.mini_batches,
        )
    with _prefixed(origin, "task"):
        load_task(config.task.name, config.task.options, config.seed).close()
    return warnings


@contextmanager
def _prefixed(origin: str, section: str) -> Iterator[None]:
    """Put file and section before a module's own message; point out a key of another section."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        unknown = re.search(r"unknown key '([^']*)'", text)
        hint = ""
        if unknown is not None:
            near = re.search(r"did you mean ('[^']*')", nearest_key(f"{section}.{unknown[1]}"))
            hint = f" (or the key {near[1]} of the configuration?)" if near else ""
        raise ValueError(f"{origin}: [{section}]: {text}{hint}") from error
