"""Checkpoints: a folder that appears whole or not at all, verified by checksum before it is read.

checkpoints/step_000005/ holds model.safetensors (FP32 masters by checkpoint name), optimizer.safetensors,
state.json (counters, plan digest, what produced it) and manifest.json (sha256 of every file). Every
random choice of a run is a function of (seed, counters), so counters are all the random state.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from samebit.models.config import read_json
from samebit.models.load import named_masters
from samebit.models.source import MANIFEST, verify_manifest
from samebit.models.weights import (
    CheckpointReader,
    atomic_folder,
    sources_of,
    write_checkpoint,
    write_json,
)
from samebit.train.optim import STATE_KEYS, state_device
from samebit.train.step import Trainer

log = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Progress:
    """Where a run is: the counters every random choice is a function of.

    step: steps finished. next_prompt: index into the task's train stream. next_sample: id of the
    next sample drawn.
    """

    step: int = 0
    next_prompt: int = 0
    next_sample: int = 0


def _optimizer_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.parameters().items():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value
    if trainer.value is not None:
        tensors |= {f"value_head.{n}": p.detach() for n, p in trainer.value.named_parameters()}
    return tensors


def save(
    folder: Path,
    trainer: Trainer,
    progress: Progress,
    keep: int,
    about: Mapping[str, Any],
    pinned: Collection[str] = (),
    folders: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> Path:
    """Write checkpoint `progress.step` under `folder`, then drop all but the newest `keep`.

    pinned: names of checkpoints that are not dropped. folders: tensors of others, by folder beside the
    optimiser's.

    An unreadable folder of the same step is replaced. OSError (disk full) leaves the previous
    checkpoints as they were.
    """
    target = folder / f"step_{progress.step:06d}"
    if target.exists():
        if problem_of(target) is None:
            return target
        _drop(target)
    masters = named_masters(trainer.model)
    optimizer = _optimizer_tensors(trainer)
    size = sum(t.numel() * t.element_size() for t in (*masters.values(), *optimizer.values()))
    with atomic_folder(target, size + (1 << 20)) as work:
        digests = write_checkpoint(work, sources_of(masters))
        parts = {"optimizer": optimizer or {"none": torch.zeros(1)}, **(folders or {})}
        for folder_name, tensors in parts.items():
            (work / folder_name).mkdir()
            for name, digest in write_checkpoint(work / folder_name, sources_of(tensors)).items():
                digests[f"{folder_name}/{name}"] = digest
        state = {
            "progress": asdict(progress),
            "plan": trainer.model.plan.digest,
            "steps": trainer.steps,
            "updates": trainer.updates,
            "skipped": trainer.skipped,
            "version": trainer.model.version,
            "correction": trainer.correction.state(),
            "optimizer_states": trainer.config.train.optimizer_states,
            **about,
        }
        digests["state.json"] = write_json(work / "state.json", state)
        write_json(work / MANIFEST, {"files": digests, "step": progress.step})
    for old in _steps(folder)[:-keep] if keep > 0 else []:
        if old.name not in pinned:
            _drop(old)
    return target


def _drop(checkpoint: Path) -> None:
    """Remove a checkpoint: its name goes first, so a kill in between leaves no half of it."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.dropped")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def sweep(folder: Path) -> int:
    """Remove what a killed run left unfinished (temporaries, half-dropped ones); how many."""
    if not folder.is_dir():
        return 0
    left = [p for p in folder.iterdir() if p.name.startswith(".step_")]
    for path in left:
        shutil.rmtree(path)
    return len(left)


def _steps(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def problem_of(checkpoint: Path) -> str | None:
    """What makes a checkpoint unreadable, or None."""
    problem = verify_manifest(checkpoint)
    if problem is None:
        try:
            read_json(checkpoint / "state.json")["progress"]
        except (ValueError, KeyError) as error:
            problem = f"state.json: {error}"
    return problem


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint; broken ones are named in the log and passed over."""
    for path in reversed(_steps(folder)):
        problem = problem_of(path)
        if problem is None:
            return path
        log.warning("%s is passed over: %s", path, problem)
    return None


def extra(checkpoint: Path, key: str) -> dict[str, Any]:
    """A table that the run put into the state beside what `restore` reads; {} where it did not."""
    return dict(read_json(checkpoint / "state.json").get(key, {}))


def load_weights(checkpoint: Path, model: Any) -> None:
    """Read a checkpoint's masters into a Decoder and refresh it."""
    reader = CheckpointReader(checkpoint)
    for name, master in named_masters(model).items():
        master.copy_(reader.read(name, tuple(master.shape)))
    model.refresh()


def restore(checkpoint: Path, trainer: Trainer, about: Mapping[str, Any]) -> Progress:
    """Load a checkpoint into the trainer and return where the run was.

    ValueError when it was written under another precision plan, model, or seed. `about` holds
    what must agree (such as the seed).
    """
    state = read_json(checkpoint / "state.json")
    trainer.model.plan.require_same(state["plan"], f"checkpoint {checkpoint}")
    for key, value in about.items():
        if state.get(key) != value:
            raise ValueError(
                f"checkpoint {checkpoint} was written with {key} = {state.get(key)!r}, this run "
                f"has {value!r}: set it back, or start a new run in another folder"
            )
    states, mine = state.get("optimizer_states", "fp32"), trainer.config.train.optimizer_states
    if states != mine:
        raise ValueError(
            f"checkpoint {checkpoint} holds train.optimizer_states = {states!r}, this run has "
            f"{mine!r}: set it back, or start a new run from the exported weights"
        )
    load_weights(checkpoint, trainer.model)
    trainer.model.version = state["version"]
    _load_states(checkpoint, trainer)
    trainer_state(checkpoint, trainer)
    return Progress(**state["progress"])


def trainer_state(checkpoint: Path, trainer: Trainer) -> None:
    """Restore the trainer's counters, its correction and its value head."""
    state = read_json(checkpoint / "state.json")
    if trainer.value is not None:
        reader = CheckpointReader(checkpoint / "optimizer", codes=True)
        with torch.no_grad():
            for n, p in trainer.value.named_parameters():
                p.copy_(reader.read(f"value_head.{n}"))
    trainer.steps, trainer.updates = state["steps"], state["updates"]
    trainer.skipped = state["skipped"]
    trainer.correction = trainer.correction.with_state(state["correction"])


def _load_states(checkpoint: Path, trainer: Trainer) -> None:
    """Read the optimiser's state of every parameter that has been updated."""
    reader = CheckpointReader(checkpoint / "optimizer", codes=True)
    names, optimizer = set(reader.names()), trainer.optimizer
    for name, parameter in trainer.parameters().items():
        held = {k: f"{name}.{k}" for k in STATE_KEYS[trainer.config.train.optimizer_states]}
        if held["step"] not in names:
            continue
        optimizer.state[parameter] = {
            key: _placed(reader.read(entry), state_device(optimizer, key, parameter), parameter)
            for key, entry in held.items()
            if entry in names  # small parameters have no scales
        }


def _placed(value: torch.Tensor, device: str, parameter: torch.Tensor) -> torch.Tensor:
    value = value.to(device)
    pinned = device == "cpu" and value.dim() > 0 and parameter.device.type == "cuda"
    return value.pin_memory() if pinned else value
