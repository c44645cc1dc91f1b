"""What can be refused, and what can be foreseen, before a model is read."""

from __future__ import annotations

import logging
from pathlib import Path

from samebit.config import Config
from samebit.models.config import read_config
from samebit.models.load import plan_for
from samebit.quant.flow import is_unified
from samebit.quant.plan import load_recipe
from samebit.rl.checks import check_pair
from samebit.rl.registry import load_algorithm, load_correction
from samebit.tasks.api import load_task
from samebit.train.memory import MemoryPlan, plan_memory
from samebit.types import Sampling

log = logging.getLogger(__name__)


def sampling_of(config: Config) -> Sampling:
    """How a run draws its rollouts."""
    r = config.rollout
    return Sampling(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        max_tokens=r.max_tokens,
        stop=r.stop,
        stop_ids=r.stop_ids,
        seed=config.seed,
    )


class Checks:
    """Everything that can be refused before the model is loaded."""

    def __init__(self, config: Config):
        self.recipe = load_recipe(config.recipe)
        self.algorithm = load_algorithm(config.rl.algorithm, config.rl.options)
        correction = dict(config.rl.correction)
        self.correction = load_correction(str(correction.pop("name", "none")), correction)
        self.sampling = sampling_of(config)
        for warning in check_pair(
            self.algorithm,
            self.correction,
            is_unified(self.recipe),
            self.sampling,
            config.rl.group_size,
            config.rl.mini_batches * config.rl.epochs,
        ):
            log.warning("%s", warning)
        self.task = load_task(config.task.name, config.task.options, config.seed)


def planned_memory(config: Config, checks: Checks, folder: Path) -> MemoryPlan:
    """What the run will take, from the model's shape alone."""
    model = read_config(folder)
    needs = checks.algorithm.needs | checks.correction.needs
    return plan_memory(model, plan_for(checks.recipe, model), config, frozenset(needs))
