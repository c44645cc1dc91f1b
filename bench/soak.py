"""Many steps of a tiny model: memory, open files and time per step must not grow; faults on the way.

    python bench/soak.py [--steps 1000] [--out bench/results/cpu/soak.json]

Every 100 steps the grading workers are killed with SIGKILL. Prints and writes what was measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests import runs  # noqa: E402

MARKS = (3, 50, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000)


def memory_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def handles() -> int:
    """Open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> list[int]:
    """Process ids of our own children."""
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in task.read_text().split()] if task.exists() else []


def measure(steps: int, folder: Path) -> dict[str, Any]:
    """Train `steps` steps and take marks."""
    import torch

    from samebit.log import Reporter
    from samebit.loop import Run

    torch.set_num_threads(1)
    file = runs.make(folder)
    text = file.read_text().replace(
        f'reward_function = "{ROOT / "tests" / "runs.py"}:reward"\n', ""
    )
    file.write_text(text)
    settings = [("train.steps", str(steps)), ("run.save_every", "50"), ("eval.every", "100")]
    run = Run(runs.config(file, folder / "out", *settings), False, Reporter(quiet=True))
    marks: list[dict[str, Any]] = []
    times: list[float] = []
    cpu: list[float] = []
    killed = 0
    one_step = run.one_step

    def timed() -> Any:
        nonlocal killed
        step = run.progress.step + 1
        if step % 100 == 0:
            # an answer that needs algebra brings the workers up; then they are killed
            run.task.reward(run.task.prompts("train", 0, 1), ["\\boxed{x^2+1}"])
            for pid in children():
                os.kill(pid, signal.SIGKILL)
                killed += 1
        started, busy = time.perf_counter(), time.process_time()
        found = one_step()
        times.append(time.perf_counter() - started)
        cpu.append(time.process_time() - busy)
        if step in MARKS or step == steps:
            gc.collect()
            marks.append(
                {
                    "step": step,
                    "memory_mb": round(memory_bytes() / 1e6, 2),
                    "handles": handles(),
                    "objects": len(gc.get_objects()),
                    "seconds_per_step_median_of_last_50": statistics.median(times[-50:]),
                    "cpu_seconds_per_step_median_of_last_50": statistics.median(cpu[-50:]),
                }
            )
            print(json.dumps(marks[-1]), flush=True)
        return found

    run.one_step = timed  # type: ignore[method-assign]
    run.train()
    run.close()
    log = runs.metrics(folder / "out")
    differing = sum(float(r.get("mismatch/tokens_differing", 0)) for r in log)
    return {
        "what": "one layer, hidden 64, fp8, file task, 2 prompts x 2 samples x 6 tokens a step",
        "steps": steps,
        "checkpoints_written": steps // 50,
        "grading_workers_killed": killed,
        "tokens_differing": differing,
        "lines_of_log": len(log),
        "load_average": os.getloadavg()[0],
        "marks": marks,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "cpu" / "soak.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args.steps, Path(folder))
    Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
