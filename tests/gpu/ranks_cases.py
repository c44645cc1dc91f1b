"""Whole runs of several processes on GPUs beside the same run of one process, bit for bit.

    python -m tests.gpu.ranks_cases [--size 2] [--recipes fp8-kv,bf16] [--out FILE]

Each process takes its own GPU and adds gradients over NCCL. With fewer GPUs than processes they share the
first one, over gloo: the same loop and kernels, another transport. Without a GPU everything is on the CPU.
The bar: every metric but times, every sample, and every byte of weights and optimiser states are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from samebit.train import checkpoint
from tests import runs

STEPS = 6
SETTINGS = {
    "rl.prompts_per_step": "8", "rl.group_size": "4", "rollout.max_tokens": "40", "train.steps": str(STEPS),
    "eval.every": "3", "run.save_every": "3", "run.threads": "1",
}  # fmt: skip
SHAPE = {"hidden": 256, "intermediate": 512, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64}

SHARE_ONE = """
import torch
from samebit import loop, ranks, run_checks
run_checks._own = lambda device: torch.device("cuda", 0)
loop.join = lambda device: ranks.Ranks.join(*ranks.world()[:2], "gloo", device)
"""
ENTRY = "from samebit.cli import main; raise SystemExit(main({arguments!r}))"


def run(file: Path, out: Path, size: int, settings: dict[str, str]) -> str:
    """One run; how it was spoken with ("" alone)."""
    table = SETTINGS | settings | {"run.out": str(out)}
    arguments = ["train", str(file), *(part for k, v in table.items() for part in (f"--{k}", v))]
    gpus = torch.cuda.device_count()
    shared = size > 1 and 0 < gpus < size
    code = (SHARE_ONE if shared else "") + ENTRY.format(arguments=arguments)
    processes = runs.start_ranks(code, size) if size > 1 else [runs.start(code)]
    said = [p.communicate(timeout=500)[1] for p in processes]
    if any(p.returncode for p in processes):
        raise RuntimeError("\n".join(said)[-3000:])
    return "" if size == 1 else "nccl" if gpus >= size else "gloo"


def weights(out: Path) -> dict[str, bytes]:
    """Every tensor file of the last checkpoint."""
    found = checkpoint.newest(out / "checkpoints")
    assert found is not None
    return {str(p.relative_to(found)): p.read_bytes() for p in found.rglob("*.safetensors")}


def case(file: Path, root: Path, recipe: str, size: int) -> dict[str, Any]:
    """`size` processes, and one with as many leaves."""
    begun = time.monotonic()
    many, one = root / f"{recipe}-many", root / f"{recipe}-one"
    over = run(file, many, size, {"recipe": recipe})
    run(file, one, 1, {"recipe": recipe, "train.gradient_leaves": str(size)})
    first, second = (runs.read_json_lines(out / "metrics.jsonl") for out in (many, one))
    equal = {
        "metrics": runs.metrics(many) == runs.metrics(one),
        "samples": runs.samples(many) == runs.samples(one),
        "weights": weights(many) == weights(one),
    }
    differing = sum(m.get("mismatch/tokens_differing", 0.0) for m in first)
    tokens = sum(m.get("mismatch/tokens", 0.0) for m in first)
    moved = first[-1]["train/grad_norm"] > 0 and len(first) == len(second) >= STEPS
    return equal | {
        "tokens": tokens, "differing": differing, "over": over, "size": size,
        "ok": all(equal.values()) and moved and tokens > 0 and differing == 0,
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def main() -> None:
    """Run the cases, one after another; a table and, with --out, a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--recipes", default="bf16,fp8,fp8-kv,int8")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as root:
        file = runs.make(Path(root), **SHAPE)
        for recipe in arguments.recipes.split(","):
            found[f"{recipe}/{arguments.size}"] = row = case(
                file, Path(root), recipe, arguments.size
            )
            sys.stdout.write(f"{recipe}/{arguments.size} {row}\n")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
