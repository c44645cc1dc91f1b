"""Time by kernel of one layer of a training micro-batch: the difference of two depths, arm by arm.

    python -m bench.step_profile [--model qwen3-8b] [--length 2048] [--arms fp8 torch] [--mode once]

The shapes and arms of `samebit bench step`; kernels of less than a hundredth of the layer are summed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from samebit.bench.suites import step

WIDTH = 78
LEAST = 0.01


def by_kernel(arm: Any, depth: int) -> dict[str, tuple[float, int]]:
    """(microseconds, launches) of every kernel of one micro-batch."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        arm.run(depth)
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in seen.key_averages():
        time, count = found[event.key[:WIDTH]]
        found[event.key[:WIDTH]] = (time + event.self_device_time_total, count + event.count)
    return found


def table(name: str, arm: Any) -> str:
    """Kernels of a layer, and of the rest, by time."""
    for depth in (step.FEW, step.MANY):
        arm.run(depth)
    few, many = (by_kernel(arm, depth) for depth in (step.FEW, step.MANY))
    layers = step.MANY - step.FEW
    layer = {k: (many[k][0] - few[k][0]) / layers for k in many}
    rest = {k: few[k][0] - step.FEW * layer.get(k, 0.0) for k in few}
    lines = []
    for what, times in (("a layer", layer), ("the rest", rest)):
        total = sum(times.values())
        lines.append(f"{name}, {what}: {total / 1e3:.3f} ms")
        small = 0.0
        for kernel, time in sorted(times.items(), key=lambda item: -item[1]):
            if time < LEAST * total:
                small += time
                continue
            launches = (many[kernel][1] - few[kernel][1]) / layers
            lines.append(f"{time / 1e3:10.3f} ms {launches:6.2f}  {kernel}")
        lines.append(f"{small / 1e3:10.3f} ms         others")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--arms", nargs="+", default=step.ARMS, choices=step.ARMS)
    parser.add_argument("--mode", default="once")
    found = parser.parse_args()
    arms = step._arms(found.model, found.length, found.mode, tuple(found.arms))
    for name, arm in arms.items():
        print(table(name, arm), flush=True)


if __name__ == "__main__":
    main()
