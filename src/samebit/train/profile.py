"""The kernels of one update by time, with the least time of those whose work is known from shapes.

`train.profile_step` names the step. Tracing costs that step some time; no other step pays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from samebit.log import replace_file

FILE = "kernels.txt"
ROWS = 40
WIDTH = 72
FAMILIES = {
    "attention": ("attention", "fmha", "flash"),
    "products": ("gemm", "nvjet", "_head_gradient", "_head_kernel", "cutlass", "mm", "linear"),
}
"""Parts of kernel names (on a CPU: of operator names), first match counts; the rest moves data."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of an update: seconds of all its launches."""

    name: str
    seconds: float
    launches: int

    @property
    def family(self) -> str:
        """A key of FAMILIES, or `the rest`."""
        lower = self.name.lower()
        for family, parts in FAMILIES.items():
            if any(part in lower for part in parts):
                return family
        return "the rest"


def table(kernels: Iterable[Kernel], least: Mapping[str, float]) -> str:
    """Text: families with their least seconds (`least`, by family) and their share of it, then kernels."""
    ordered = sorted(kernels, key=lambda k: -k.seconds)
    total = sum(k.seconds for k in ordered) or 1.0
    families: dict[str, float] = defaultdict(float)
    for k in ordered:
        families[k.family] += k.seconds
    lines = [f"{1e3 * total:10.2f} ms in {sum(k.launches for k in ordered):,} launches"]
    for family, seconds in sorted(families.items(), key=lambda item: -item[1]):
        line = f"{1e3 * seconds:10.2f} ms  {seconds / total:4.0%}  {family}"
        if family in least and seconds > 0:
            line += (
                f": {1e3 * least[family]:.2f} ms at the peak, {least[family] / seconds:.0%} of it"
            )
        lines.append(line)
    lines.append(f"{'ms':>10s}  {'share':>5s} {'launches':>9s} {'us each':>9s}  kernel")
    for k in ordered[:ROWS]:
        each = 1e6 * k.seconds / max(1, k.launches)
        lines.append(
            f"{1e3 * k.seconds:10.2f}  {k.seconds / total:5.1%} {k.launches:9,d} {each:9.1f}  "
            f"{k.name[:WIDTH]}"
        )
    return "\n".join(lines)


@contextmanager
def kernels_of(device: torch.device) -> Iterator[list[Kernel]]:
    """Collect the kernels (on a CPU: the operators) launched inside; the list is full at the end."""
    on_cuda = device.type == "cuda"
    found: list[Kernel] = []
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as seen:
        yield found
        if on_cuda:
            torch.cuda.synchronize(device)
    for event in seen.key_averages():
        time = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if time > 0:
            found.append(Kernel(event.key, time / 1e6, event.count))


def write_table(folder: Path, kernels: list[Kernel], least: Mapping[str, float]) -> str:
    """Write kernels.txt; what to tell people of it: the lines of the families."""
    text = table(kernels, least)
    replace_file(folder / FILE, (text + "\n").encode())
    head = text.split("\n", 1 + len({k.family for k in kernels}))[:-1]
    return "\n".join([*head, f"  all kernels: {folder / FILE}"])
