"""Record a finished demo run as JSON: what was learnt, the mismatch, and the time, on this machine.

python bench/demo.py runs/demo --out bench/results/cpu/demo.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path

import torch

from samebit.log import read_json_lines


def main() -> None:
    """Read metrics.jsonl, write the record, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = read_json_lines(arguments.run / "metrics.jsonl")
    steps = [r for r in rows if r["step"] > 0]
    held_out = {r["step"]: r["reward/eval_mean"] for r in rows if "reward/eval_mean" in r}
    plan = json.loads((arguments.run / "plan.json").read_text())
    record = {
        "recipe": plan["recipe"]["name"],
        "steps": len(steps),
        "held_out_mean_reward": held_out,
        "rise": held_out[max(held_out)] - held_out[min(held_out)],
        "mismatch_logp_abs_max_over_all_steps": max(r["mismatch/logp_abs_max"] for r in steps),
        "tokens_compared": sum(r["mismatch/tokens"] for r in steps),
        "tokens_differing": sum(r["mismatch/tokens_differing"] for r in steps),
        "seconds_steps": round(sum(r["time/step_s"] for r in steps), 1),
        "seconds_evaluations": round(sum(r.get("time/eval_s", 0.0) for r in rows), 1),
        "machine": f"{os.cpu_count()} cores, {_cpu()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
    }
    text = json.dumps(record, indent=1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def _cpu() -> str:
    """Model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
