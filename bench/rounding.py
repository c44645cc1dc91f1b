"""What a second rounding does to FP8 codes, and how often torch's FP32 square root is off.

    python bench/rounding.py --out docs/results/rounding.json

Codes: E4M3 in blocks of 128x128, normal weights of a megabyte each; a code counts as moved when its byte
differs. Runs on the CPU in a few seconds; the square root's share is that of this build of torch.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch

from samebit.bench.records import git_commit
from samebit.formats import BLOCK, E4M3
from samebit.reference.quantize import encode, scale_of

SPREADS = tuple(0.02 * 2 ** (i / 16) for i in range(16))
"""Standard deviations over one octave: what a power-of-two scale does depends on where amax lies in it."""


def blocks(std: float) -> torch.Tensor:
    """FP32 [64, 16384]: as many blocks, one a row."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, BLOCK * BLOCK, generator=generator) * std


def quantised(w: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of one block a row; power_of_two: the scale rounded up to one."""
    scale = scale_of(w.abs().amax(1, keepdim=True), E4M3)
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return encode(w, scale, E4M3), scale


def moved(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.view(torch.uint8) != b.view(torch.uint8)).float().mean())


def codes() -> dict[str, dict[str, float]]:
    """Shares of codes that move: the mean over the spreads, and the most of one."""
    found: dict[str, list[float]] = {
        "BF16 weights quantised instead of FP32 masters": [],
        "FP8 to BF16 to FP8, FP32 scales": [],
        "FP8 to BF16 to FP8, power-of-two scales": [],
    }
    bf16, plain, power = found.values()
    for std in SPREADS:
        w = blocks(std)
        bf16.append(moved(quantised(w, False)[0], quantised(w.bfloat16().float(), False)[0]))
        for shares, power_of_two in ((plain, False), (power, True)):
            first, scale = quantised(w, power_of_two)
            again = quantised((first.float() * scale).bfloat16().float(), power_of_two)[0]
            shares.append(moved(first, again))
    return {name: {"mean": sum(s) / len(s), "most": max(s)} for name, s in found.items()}


def misrounded_roots() -> float:
    """Share of FP32 numbers in [1, 4) whose torch root is not the nearest FP32 number."""
    x = torch.arange(1 << 24, dtype=torch.int32).add_(0x3F800000).view(torch.float32)
    x = x[::16].contiguous()
    exact = np.sqrt(x.double().numpy()).astype(np.float32)  # FP64 holds enough bits to round twice
    return float((torch.sqrt(x).numpy() != exact).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "commit": git_commit(), "torch": str(torch.__version__), "machine": platform.machine(),
        "codes_moved_share": codes(), "square_roots_misrounded_share": misrounded_roots(),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
