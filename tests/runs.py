"""Whole runs of a tiny model in a second or so: its folder, data, configuration, and log."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebit.config import Config
from samebit.config_io import load
from samebit.log import read_json_lines
from tests.tiny import tiny_folder

ROOT = Path(__file__).parent.parent

TOML = """
model = "{model}"
recipe = "fp8"
[run]
out = "{out}"
save_every = 1
threads = 1
save_samples = 100
[task]
name = "file"
files = ["{data}"]
held_out_share = 0.3
reward_function = "{here}:reward"
[rollout]
max_tokens = 6
[rl]
prompts_per_step = 2
group_size = 2
[train]
steps = 4
learning_rate = 1e-3
[eval]
every = 2
prompts = 2
"""


def reward(completions: list[str], **_: Any) -> list[float]:
    """Something that differs within most groups."""
    return [float(sum(map(ord, text)) % 5) for text in completions]


def make(root: Path, **model: Any) -> Path:
    """A model folder, a data file and run.toml under `root`; the TOML file."""
    sizes = {"hidden": 64, "intermediate": 96, "layers": 1, "heads": 2, "kv_heads": 1}
    folder = tiny_folder(root / "model", "llama", **(sizes | model))
    data = root / "data.jsonl"
    rows = [{"prompt": f"say {i} " + "x" * (i % 7), "answer": str(i)} for i in range(11)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = root / "run.toml"
    out = root / "out"
    file.write_text(TOML.format(model=folder, out=out, data=data, here=Path(__file__)))
    return file


def config(file: Path, out: Path, *overrides: tuple[str, str]) -> Config:
    """The configuration with its run folder in `out`."""
    return load(file, [("run.out", str(out)), *overrides])


def metrics(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured."""
    return [
        {k: repr(v) for k, v in record.items() if not k.startswith(("time/", "perf/"))}
        for record in read_json_lines(folder / "metrics.jsonl")
    ]


def samples(folder: Path) -> list[dict[str, Any]]:
    """samples.jsonl."""
    return read_json_lines(folder / "samples.jsonl")


def free_port() -> str:
    """For processes to meet at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def start_ranks(code: str, size: int, **environment: str) -> list[subprocess.Popen[str]]:
    """As torchrun would: `size` interpreters that know of one another."""
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        start(code, environment=world | {"RANK": str(r), "LOCAL_RANK": str(r)} | environment)
        for r in range(size)
    ]


def start(
    code: str, namespace: bool = False, environment: Mapping[str, str] | None = None, **popen: Any
) -> subprocess.Popen[str]:
    """A fresh interpreter that runs `code` with this tree importable, on one thread.

    namespace: it may mount file systems that nobody else sees (where the system allows that).
    """
    prefix = ["unshare", "--map-root-user", "--mount"] if namespace else []
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | (environment or {})
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )
