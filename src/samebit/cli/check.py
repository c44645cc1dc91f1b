"""`samebit check`: the machine, and the parity chain on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from samebit.cli.arguments import Option, expect, help_text, parse

USAGE = "samebit check [--json] [--threads N] [--device NAME]"
ABOUT = "What this machine can do, and proof that rollout and training are the same bits on it."
OPTIONS = (
    Option("json", "", "print one JSON object instead of text"),
    Option("threads", "N", "CPU threads to check with (default: the machine's own count)"),
    Option("device", "NAME", "cpu or cuda (default: every device that can be used)"),
)


def run(args: Sequence[str]) -> int:
    """Print the findings; 1 when a bar is missed."""
    found = parse(args, OPTIONS)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, OPTIONS))
        return 0
    expect(found, [], USAGE)
    import torch

    from samebit import check
    from samebit.machine import environment

    device = found.text("device")
    if device not in ("", "cpu", "cuda"):
        raise ValueError(f"--device {device}: must be cpu or cuda")
    threads = found.number("threads", 0)
    if threads:
        torch.set_num_threads(threads)
    if found.flag("json"):
        report = check.report(device)
        print(json.dumps(report, indent=2))
        return 1 if report["failed"] else 0
    _print_environment(environment())
    failed = []
    for result in check.results(device):
        mark = "ok    " if result.passed else "FAILED"
        print(f"  {mark}  {result.name}: {result.detail} ({result.seconds:.1f} s)", flush=True)
        if not result.passed:
            failed.append(result.name)
    print()
    if failed:
        print(
            f"{len(failed)} of {check.number_of_checks(device)} checks missed their bar: {failed[0]}"
        )
        return 1
    print("All bars met: rollout and training are the same bits on this machine.")
    return 0


def _print_environment(found: dict[str, Any]) -> None:
    flags = " ".join(found["cpu_flags"]) or "none of interest"
    print("machine")
    print(f"  python {found['python']}, torch {found['torch']}, {found['threads']} threads")
    print(f"  {found['platform']}")
    print(f"  cpu: {found['cpu']} ({flags})")
    for gpu in found["gpus"]:
        gib = gpu["memory_bytes"] / 2**30
        print(f"  gpu: {gpu['name']}, capability {gpu['capability']}, {gib:.0f} GiB")
    print(f"  triton: {found['triton'] or 'not installed'}")
    print("backends")
    for device, state in found["backends"].items():
        print(f"  {device}: {state}")
    print("recipes")
    for kind in ("unified", "mixed", "library"):
        names = [name for name, value in found["recipes"].items() if value == kind]
        print(f"  {kind}: {', '.join(names)}")
    print("checks")
