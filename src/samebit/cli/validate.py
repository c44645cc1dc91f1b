"""Checks that need the modules a configuration names: its recipe, algorithm, correction and task.

Everything here runs before a model is read, so that a misspelt key costs a second, not a load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from samebit.config import Config
from samebit.config_io import nearest_key
from samebit.config_origin import Origin
from samebit.errors import ModelError


def validate(config: Config, origin: Origin) -> list[str]:
    """Load what `config` names and check the pair; warnings.

    ValueError naming the source of the value at fault (the option, else the file), section and key.
    """
    import torch

    from samebit.engine.api import load_engine
    from samebit.quant.flow import is_unified
    from samebit.quant.ops import get_ops
    from samebit.quant.plan import load_recipe
    from samebit.rl.checks import check_pair
    from samebit.rl.registry import load_algorithm, load_correction
    from samebit.run_checks import sampling_of
    from samebit.tasks.api import load_task

    blame = partial(_blamed, config, origin)
    with blame("", ["recipe"]):
        recipe = load_recipe(config.recipe)
    with blame("rl", ["rl"]):
        algorithm = load_algorithm(config.rl.algorithm, config.rl.options)
    table = dict(config.rl.correction)
    with blame("rl.correction", ["rl"]):
        correction = load_correction(str(table.pop("name")), table)
    with blame("", ["rl", "rollout", "recipe"]):
        warnings = check_pair(
            algorithm,
            correction,
            is_unified(recipe),
            sampling_of(config),
            config.rl.group_size,
            config.rl.epochs * config.rl.mini_batches,
            config.rollout.partial_tokens,
        )
    with blame("rollout", ["rollout"]):
        load_engine(config.rollout.engine)
    if config.run.device != "auto":
        with blame("run", ["run"]):
            get_ops(torch.device(config.run.device))
    with blame("task", ["task", "seed"]):
        load_task(config.task.name, config.task.options, config.seed).close()
    return warnings


def check_model(config: Config, origin: Origin) -> None:
    """ValueError naming the source of `model` where that names nothing.

    Apart from `validate`, as a study makes its warm-up's model later.
    """
    from samebit.models.source import check_name

    with _blamed(config, origin, "", ["model"]):
        check_name(config.model)


def check_place(config: Config, origin: Origin) -> None:
    """ValueError naming the source of `run.out` where no run's folder can be."""
    from samebit.lock import require_place

    with _blamed(config, origin, "", ["run"]):
        require_place(config.run.out)


@contextmanager
def model_of(source: str) -> Iterator[None]:
    """Put `source` (an option or a file; "" none) before what only fetching a model shows to be wrong."""
    try:
        yield
    except ModelError as error:
        raise ValueError(f"{source}: {error}" if source else str(error)) from error


@contextmanager
def _blamed(
    config: Config, origin: Origin, section: str, sections: Sequence[str]
) -> Iterator[None]:
    """Put source and section before a module's own message; point out a key of another section.

    sections: whose keys the message can be about.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        source = origin.of_message(text, config, sections)
        where = f"{source}: [{section}]" if section else source
        raise ValueError(f"{where}: {_with_nearest(text, section)}") from error


def _with_nearest(text: str, section: str) -> str:
    """A module's message about an unknown key with the nearest key of the configuration's own."""
    unknown = re.search(r"unknown key '([^']*)'", text)
    own = nearest_key(f"{section}.{unknown[1]}") if unknown else ""
    near = re.search(r"did you mean ('[^']*')", own)
    if near is None:
        return text
    problem, known, _ = text.partition("; known: ")
    return f"{problem}{own}" if known else f"{text} (or the key {near[1]} of the configuration?)"
