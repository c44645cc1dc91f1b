"""A study file: a base run, arms that change it, seeds; each combination is one ordinary run.

Tables: [study] (name, out, seeds, baseline, base); [warmup], a tiny model to make first
(study/tiny.py), without which the base names a model; [base], a run's configuration (or its file,
as `base` of [study]); and [[arm]] (name, note, and whatever keys of the configuration it changes).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebit.config import Config
from samebit.config_dump import dump
from samebit.config_io import from_tables, read_table
from samebit.option_table import build_options
from samebit.study.tiny import Warmup

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True, kw_only=True)
class Header:
    """Keys of [study]."""

    name: str = "study"
    """Title of the table and the page."""
    out: str = "runs/study"
    """Folder of the study; runs are OUT/ARM/seedN."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each arm runs once under each seed."""
    baseline: str = ""
    """The arm others are compared with, seed by seed; empty: the first."""
    base: str = ""
    """TOML file of the base run, relative to the study file; empty: the [base] table."""
    jobs: int = 1
    """Runs at the same time, each in its own process."""
    final_prompts: int = 256
    """Held-out prompts of the final judgement of every run."""
    final_samples: int = 1
    """Completions per prompt of the final judgement."""


@dataclass(frozen=True)
class Arm:
    """One arm: its name, a remark for the table, and the keys it changes."""

    name: str
    note: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    arm: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return Path(self.config.run.out)

    @property
    def label(self) -> str:
        """`ARM:SEED`, as the command line names it."""
        return f"{self.arm}:{self.seed}"


@dataclass(frozen=True)
class Study:
    """A study file, checked."""

    header: Header
    arms: tuple[Arm, ...]
    warmup: Warmup | None
    jobs: tuple[Job, ...]
    """Seed by seed, so that an interrupted study has whole seeds."""

    @property
    def out(self) -> Path:
        """Folder of the study."""
        return Path(self.header.out)

    @property
    def baseline(self) -> str:
        """Name of the arm that others are compared with."""
        return self.header.baseline or self.arms[0].name

    @property
    def model_folder(self) -> Path:
        """Where the warmed-up model is kept."""
        return self.out / "model"


def load_study(path: str | Path, out: str = "") -> Study:
    """Read and check a study file; every run's configuration is built. ValueError names key and fix.

    out: takes the place of [study] out.
    """
    path = Path(path)
    table = read_table(path)
    unknown = sorted(table.keys() - {"study", "warmup", "base", "arm"})
    if unknown:
        raise ValueError(
            f"{path}: unknown key {unknown[0]!r}; a study has [study], [warmup], [base] and [[arm]]"
        )
    header = build_options(Header, table.get("study", {}), f"{path}: [study]")
    if out:
        header = dataclasses.replace(header, out=out)
    warmup = None
    if "warmup" in table:
        warmup = build_options(Warmup, table["warmup"], f"{path}: [warmup]")
    base = _base(path, table, header, warmup)
    arms = _arms(path, table.get("arm"), header)
    jobs = tuple(_job(path, base, arm, seed, header) for seed in header.seeds for arm in arms)
    return Study(header, arms, warmup, jobs)


def _base(
    path: Path, table: Mapping[str, Any], header: Header, warmup: Warmup | None
) -> dict[str, Any]:
    if bool(header.base) == ("base" in table):
        raise ValueError(f"{path}: give either a [base] table or `base = FILE` in [study]")
    base = dict(table["base"]) if "base" in table else read_table(path.parent / header.base)
    if warmup is not None:
        if "model" in base:
            raise ValueError(f"{path}: [warmup] makes the model; remove `model` from the base")
        base["model"] = str(Path(header.out) / "model")
    return base


def _arms(path: Path, tables: Any, header: Header) -> tuple[Arm, ...]:
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{path}: a study needs at least one [[arm]]")
    arms = []
    for number, raw in enumerate(tables, start=1):
        changes = dict(raw)
        name, note = changes.pop("name", None), changes.pop("note", "")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{path}: arm {number}: name = {name!r}: use letters, digits and . _ + -"
            )
        arms.append(Arm(name, str(note), changes))
    names = [arm.name for arm in arms]
    doubled = sorted({n for n in names if names.count(n) > 1})
    if doubled:
        raise ValueError(f"{path}: two arms are called {doubled[0]!r}; rename one")
    if header.baseline and header.baseline not in names:
        raise ValueError(
            f"{path}: baseline = {header.baseline!r} is no arm; arms: {', '.join(names)}"
        )
    if not header.seeds or len(set(header.seeds)) != len(header.seeds):
        raise ValueError(f"{path}: seeds = {list(header.seeds)}: give at least one, each once")
    return tuple(arms)


def _job(path: Path, base: Mapping[str, Any], arm: Arm, seed: int, header: Header) -> Job:
    origin = f"{path}: arm {arm.name!r}"
    config = from_tables([base, arm.changes], origin)
    run = dataclasses.replace(config.run, out=f"{header.out}/{arm.name}/seed{seed}")
    return Job(arm.name, seed, dataclasses.replace(config, seed=seed, run=run))


def require_unchanged(jobs: Sequence[Job]) -> None:
    """ValueError where a run folder was started under another configuration."""
    for job in jobs:
        path = job.folder / "config.toml"
        if path.is_file() and path.read_text(encoding="utf-8") != dump(job.config):
            raise ValueError(
                f"{job.folder} was started under another configuration: remove it, or choose "
                "another folder with --out"
            )
