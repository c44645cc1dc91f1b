"""What can be refused, and what can be foreseen, before a model is read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from samebit.config import Config
from samebit.engine.api import load_engine
from samebit.engine.native import AUTO_CACHE_SHARE
from samebit.engine.requests import check_stop_ids, positions_warning
from samebit.lock import require_free
from samebit.log import read_json_lines
from samebit.models.config import ModelConfig, read_json
from samebit.models.load import config_under, plan_for
from samebit.models.source import resolve
from samebit.models.tokenizer import Tokenizer
from samebit.quant.flow import is_unified
from samebit.quant.ops import get_ops, missing_for_cuda
from samebit.quant.plan import Plan, load_recipe
from samebit.ranks import claim_gpu, processes_here, world
from samebit.rl.checks import check_pair
from samebit.rl.registry import load_algorithm, load_correction
from samebit.tasks.api import load_task
from samebit.train.leaves import leaves_of
from samebit.train.memory import GIB, SHARE, MemoryPlan, parameter_count, plan_memory
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
            config.rollout.partial_tokens,
        ):
            log.warning("%s", warning)
        load_engine(config.rollout.engine)
        self.task = load_task(config.task.name, config.task.options, config.seed)

    def model_of(self, folder: Path) -> ModelConfig:
        """The folder's model; ValueError where recipe or sampling are not for it."""
        model = config_under(self.recipe, folder)
        check_stop_ids(self.sampling, model)
        return model


def require_unused(folder: Path, resume: bool) -> str:
    """ValueError where the folder holds a run that is not asked to go on; a note, for people.

    A run that left no finished step and no checkpoint has nothing to go on from: the note says so.
    """
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    if resume or not (metrics.exists() or checkpoints.exists()):
        return ""
    if any(checkpoints.glob("step_*")) or _has_finished_step(metrics):
        raise ValueError(
            f"{folder} already holds a run: continue it with --resume, or choose another folder with "
            "--out"
        )
    return f"{folder} holds a run without a finished step or a checkpoint: it starts anew"


def _has_finished_step(path: Path) -> bool:
    """Whether a run's metrics are of more than its first evaluation; what cannot be read counts."""
    try:
        return any(record.get("step", 0) > 0 for record in read_json_lines(path))
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def require_same_plan(folder: Path, plan: Plan) -> None:
    """ValueError where the run in the folder, if there is one, was made under another plan."""
    path = folder / "plan.json"
    if path.exists():
        written = str(read_json(path).get("digest", "(damaged)"))
        plan.require_same(written, f"run {folder} (plan.json)")


def require_divisible(config: Config, processes: int) -> None:
    """ValueError where the processes cannot divide a step: too few prompts, or leaves of gradients."""
    leaves_of(config.train.gradient_leaves, processes)
    if config.rl.prompts_per_step < processes:
        raise ValueError(
            f"rl.prompts_per_step = {config.rl.prompts_per_step} for {processes} processes: each needs a "
            f"prompt a step; use at least {processes}"
        )


def with_leaves(config: Config, processes: int) -> Config:
    """The configuration with as many gradient leaves as its run has: of several processes, a number."""
    leaves = leaves_of(config.train.gradient_leaves, processes)
    if processes == 1:
        return config
    return replace(config, train=replace(config.train, gradient_leaves=leaves))


def describe_processes(config: Config, processes: int) -> Iterator[str]:
    """How many there are, and leaves, for people; nothing for one of each."""
    leaves = leaves_of(config.train.gradient_leaves, processes)
    if leaves > 1:
        yield f"processes: {processes}, gradient leaves: {leaves} (docs/parallel.md)"


def require_enough_steps(config: Config, finished: int) -> None:
    """ValueError where a run has finished more steps than it is to have."""
    if finished > config.train.steps:
        raise ValueError(
            f"train.steps = {config.train.steps}, but {Path(config.run.out)} holds "
            f"{finished} finished steps; use more than that to go on"
        )


def choose_device(config: Config) -> torch.device:
    """run.device as a torch device, ValueError where it cannot be used; auto is the GPU or the CPU."""
    claim_gpu()
    if config.run.device != "auto":
        get_ops(torch.device(config.run.device))  # refuses, before it is asked for its memory
        return _own(torch.device(config.run.device))
    missing = missing_for_cuda(torch.device("cuda"))
    return _own(torch.device("cuda" if missing is None else "cpu"))


def _own(device: torch.device) -> torch.device:
    """The device of this process, of several on a machine: each takes its own GPU."""
    _, size, local = world()
    if size == 1 or device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(
            f"run.device = {str(device)!r} names one GPU, and {size} processes take one each: use 'cuda'"
        )
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"process {local + 1} of this machine has no GPU: there are {torch.cuda.device_count()} "
            "(torchrun --nproc-per-node)"
        )
    return torch.device("cuda", local)


def set_threads(config: Config) -> None:
    """Apply run.threads (part of a CPU run's numerics)."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)


def other_machine(before: Mapping[str, Any], device: torch.device, leaves: int) -> Iterator[str]:
    """What it means that a run goes on with other threads or leaves; before: the checkpoint's `machine`."""
    now, threads = torch.get_num_threads(), before.get("threads")
    if threads not in (None, now) and device.type == "cpu":
        yield (
            f"resumed with {now} CPU threads after {threads}: threads are part of a CPU run's numerics, so "
            f"what follows need not be the unbroken run's bits (they are with --run.threads {threads})"
        )
    had = before.get("gradient_leaves", 1)
    if had != leaves:
        yield (
            f"resumed with train.gradient_leaves = {leaves} after {had}: gradients add up in another order, "
            f"so what follows is not the unbroken run's bits (it is with --train.gradient-leaves {had})"
        )


def available_memory(config: Config, device: torch.device) -> int | None:
    """Bytes of the device that a run is planned into; None on a CPU."""
    if device.type != "cuda":
        return None
    if config.train.memory_gib:
        return int(config.train.memory_gib * GIB)
    return int(torch.cuda.mem_get_info(device)[0] * SHARE)


def planned_memory(
    config: Config, checks: Checks, folder: Path, available: int | None = None
) -> MemoryPlan:
    """What the run will take, from the model's shape alone; errors as `Checks.model_of`."""
    model = checks.model_of(folder)
    return _memory_of(config, checks, model, plan_for(checks.recipe, model), available)


def _memory_of(
    config: Config, checks: Checks, model: ModelConfig, plan: Plan, available: int | None
) -> MemoryPlan:
    """`planned_memory` of a model and a plan that are known."""
    if (cut := positions_warning(checks.sampling, model)) is not None:
        log.warning("%s", cut)
    needs = checks.algorithm.needs | checks.correction.needs
    _, processes, _ = world()
    memory = plan_memory(model, plan, config, frozenset(needs), available, processes)
    for warning in memory_warnings(config, memory, available):
        log.warning("%s", warning)
    return memory


def memory_warnings(config: Config, memory: MemoryPlan, available: int | None) -> Iterator[str]:
    """What of a configuration the memory does not bear; available: of the device, None on a CPU."""
    if available is None and config.train.memory_gib:
        yield (
            f"train.memory_gib = {config.train.memory_gib} does not apply: on a CPU no plan is made to "
            "fit the memory"
        )
    together, local = sum(p.size for p in memory.parts if p.host), processes_here()
    if local > 1 and together * local > _main_memory():
        yield (
            f"{local} processes of this machine keep {together * local / GIB:,.1f} GiB of moments in main "
            f'memory, which has {_main_memory() / GIB:,.1f}: use train.optimizer_states = "8bit"'
        )
    room = _main_memory() if available is None else available
    size, tokens = config.rl.group_size, memory.answer
    if memory.total > room and memory.tokens == size * tokens:
        length = memory.longest_answers(size, room)
        use = "lower rollout.max_tokens or rl.group_size"
        yield (
            f"rollout.max_tokens = {config.rollout.max_tokens:,}: to train on {size} answers of {tokens:,} "
            f"tokens takes about {memory.total / GIB:,.2f} GiB, more than the {room / GIB:,.2f} GiB there are; "
            + (f"{length:,} tokens each fit: {use}" if length else memory.advice("train"))
        )


def _main_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe_memory(config: Config, memory: MemoryPlan, available: int | None) -> str:
    """What fits, for people: the training phase, and on a GPU the sequences drawn at once."""
    if available is None:
        return memory.describe()
    rollout = config.rollout
    room = int(max(0, available - memory.standing) * AUTO_CACHE_SHARE)
    tokens = rollout.cache_tokens or room // memory.cache_row
    at_once = min(rollout.max_batch, tokens // memory.answer)
    return (
        f"{memory.describe(available)}\n  a rollout has room for {tokens:,} tokens of keys and values: "
        f"{at_once:,} completions of {memory.answer:,} tokens at once (rollout.max_batch is "
        f"{rollout.max_batch:,})"
    )


def foresee(config: Config, resume: bool = False) -> Iterator[str]:
    """Lines for people: the device, the model and the memory of a run that is not made.

    ValueError where the run itself would be refused: a folder that is in use or holds another run, a
    device or a model that is not there, or a model that recipe, sampling or task do not go with. The
    folder is not touched.
    """
    out = Path(config.run.out)
    require_divisible(config, world()[1])
    require_free(out)
    if note := require_unused(out, resume):
        yield note
    checks = Checks(config)
    with closing(checks.task):
        device = choose_device(config)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "reference kernels"
        yield f"device: {device} ({name})"
        yield from describe_processes(config, world()[1])
        folder = resolve(config.model)
        model = checks.model_of(folder)
        checks.task.bind(Tokenizer(folder, model))
    plan = plan_for(checks.recipe, model)
    if resume:
        require_same_plan(out, plan)
    count = parameter_count(model, plan)
    yield f"model: {model.family} with {count:,} parameters in {folder}"
    available = available_memory(config, device)
    memory = _memory_of(config, checks, model, plan, available)
    yield describe_memory(config, memory, available)


def out_of_memory(error: RuntimeError) -> str | None:
    """What was asked for in vain, when the error says that a device has no memory left."""
    text = str(error)
    known = isinstance(error, torch.OutOfMemoryError)
    # cuBLAS and the driver's loader have errors of their own for it
    if not known and "ALLOC_FAILED" not in text and "out of memory" not in text:
        return None
    return text.split(". ")[0].splitlines()[0]
