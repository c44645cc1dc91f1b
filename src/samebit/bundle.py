"""The repro bundle: all that is needed to run one step's faulty update again, in a small folder.

repro/step_000012/ of a run holds bundle.json (diagnosis, plan, checkpoint, versions), config.toml,
groups.json (prompts, samples, rewards) and arrays.npz (log-probs of both sides, weight versions).
The weights are those of the checkpoint it names, saved before the update.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import samebit
from samebit.config import Config
from samebit.config_dump import dump
from samebit.config_io import load
from samebit.models.weights import atomic_folder, write_json
from samebit.types import Group, Prompt, Sample

FOLDER = "repro"


@dataclass(frozen=True)
class Bundle:
    """What was kept. trainer_logp_C: FP32, completion tokens in rollout order."""

    folder: Path
    config: Config
    groups: tuple[Group, ...]
    trainer_logp_C: np.ndarray
    about: Mapping[str, Any]

    @property
    def checkpoint(self) -> Path:
        """The weights to replay on; ValueError when they are gone."""
        path = (self.folder / self.about["checkpoint"]).resolve()
        if not path.is_dir():
            raise ValueError(f"{self.folder}: its checkpoint {path} is gone; nothing to replay on")
        return path


def bundle_folder(run: Path, step: int) -> Path:
    """Where the bundle of a step lies."""
    return run / FOLDER / f"step_{step:06d}"


def pinned_checkpoints(run: Path) -> set[str]:
    """Names of checkpoints that bundles of this run refer to: they are not dropped."""
    names = set()
    for path in (run / FOLDER).glob("step_*/bundle.json"):
        names.add(Path(json.loads(path.read_text(encoding="utf-8"))["checkpoint"]).name)
    return names


def write_bundle(
    run: Path,
    step: int,
    config: Config,
    groups: Sequence[Group],
    trainer_logp_C: np.ndarray,
    checkpoint: Path,
    device: torch.device,
    about: Mapping[str, Any],
) -> Path:
    """Write a step's bundle whole or not at all; an existing one of the step stands."""
    target = bundle_folder(run, step)
    if target.exists():
        return target
    samples = [s for g in groups for s in g.samples]
    with atomic_folder(target) as work:
        (work / "config.toml").write_text(dump(config), encoding="utf-8")
        write_json(work / "groups.json", [_group_out(g) for g in groups])
        np.savez(
            work / "arrays.npz",
            sampler_logp=np.concatenate([s.logps for s in samples]).astype(np.float32),
            version=np.concatenate([s.versions for s in samples]).astype(np.int32),
            trainer_logp=trainer_logp_C.astype(np.float32),
        )
        reference = Path("..") / ".." / checkpoint.parent.name / checkpoint.name
        write_json(
            work / "bundle.json",
            {
                "step": step,
                "checkpoint": str(reference),
                "environment": environment(device),
                **about,
            },
        )
    return target


def environment(device: torch.device) -> dict[str, Any]:
    """What the bits of a run on `device` may depend on besides the plan."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "samebit": samebit.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def _group_out(group: Group) -> dict[str, Any]:
    return {
        "prompt": {"id": group.prompt.id, "ids": list(group.prompt.ids), "text": group.prompt.text},
        "rewards": list(group.rewards),
        "samples": [
            {
                "sample_id": s.sample_id,
                "ids": list(s.ids),
                "finish_reason": s.finish_reason,
                "text": s.text,
            }
            for s in group.samples
        ],
    }


def read_bundle(folder: str | Path) -> Bundle:
    """Read a bundle; ValueError naming the file that is missing or damaged."""
    folder = Path(folder)
    if not (folder / "bundle.json").is_file():
        raise ValueError(
            f"{folder}: no bundle.json; give a folder repro/step_N that a stopped run left"
        )
    try:
        about = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
        rows = json.loads((folder / "groups.json").read_text(encoding="utf-8"))
        with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
            logps, versions = arrays["sampler_logp"], arrays["version"]
            trainer = arrays["trainer_logp"]
        groups = _groups_in(rows, logps, versions)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: damaged bundle ({error})") from error
    return Bundle(folder, load(folder / "config.toml"), groups, trainer, about)


def _groups_in(
    rows: list[dict[str, Any]], logps: np.ndarray, versions: np.ndarray
) -> tuple[Group, ...]:
    groups, start = [], 0
    for row in rows:
        prompt = Prompt(row["prompt"]["id"], tuple(row["prompt"]["ids"]), row["prompt"]["text"])
        samples = []
        for found in row["samples"]:
            part = slice(start, start + len(found["ids"]))
            start = part.stop
            samples.append(
                Sample(
                    prompt.id,
                    found["sample_id"],
                    tuple(found["ids"]),
                    logps[part],
                    versions[part],
                    found["finish_reason"],
                    found["text"],
                )
            )
        groups.append(Group(prompt, tuple(samples), tuple(row["rewards"])))
    if start != len(logps):
        raise ValueError(f"{start} tokens in groups.json, {len(logps)} in arrays.npz")
    return tuple(groups)
