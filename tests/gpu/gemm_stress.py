"""Products of few rows, over and over, in many processes that share the card; keeps the first difference.

    python -m tests.gpu.gemm_stress --processes 40 --seconds 50 --out stress.json
    python -m tests.gpu.gemm_stress --fence ring --fence init --fence epilogue ...   (candidate fences)

Every process computes its expected product with the plain kernel, whose operands pass a fence (one stage),
and repeats three things beside each other: the fast tile at every number of rows, the plain kernel with one
stage and with four (`cp.async`, no fence). A first difference is kept whole: which of them, at how many rows,
where, both values, and what two recomputations of the same product gave. 0 everywhere is the bar.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROWS = (1, 2, 3, 15, 16, 17, 33, 64)
MOST, OUTPUTS, DEPTH = 8192, 576, 1152
FENCES = {
    "ring": ("            mbarrier.arrive(p.empty.index(stages[i]), count=1)\n",
             "            fence_async_shared()\n"
             "            mbarrier.arrive(p.empty.index(stages[i]), count=1)\n"),
    "init": ("    p = Problem(\n", "    fence_async_shared()\n    p = Problem(\n"),
    "epilogue": ("            value = gl.convert_layout(value, OUT)\n",
                 "            value = gl.convert_layout(value, OUT)\n"
                 "            fence_async_shared()\n"),
}  # fmt: skip
"""Where a fence of the two proxies may be missing in the fast kernel: before a slot of the ring is given
back, after the barriers are made, after the epilogue used shared memory."""


def use_fences(names: list[str], folder: Path) -> None:
    """Replace the fast kernel in this process by a copy with the named fences."""
    from samebit.kernels import _gemm_fast, _gemm_hopper

    assert _gemm_hopper.__file__ is not None
    source = Path(_gemm_hopper.__file__).read_text()
    for name in names:
        before, after = FENCES[name]
        assert source.count(before) == 1, name
        source = source.replace(before, after)
    path = folder / "fenced_gemm.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("fenced_gemm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fenced_gemm"] = module
    spec.loader.exec_module(module)
    _gemm_fast.hopper_gemm_kernel = module.hopper_gemm_kernel


class Stress:
    """One operator and tile with fixed operands, and what has been seen of them."""

    def __init__(self, operator: str, tile: str, seed: int) -> None:
        from tests.gpu.test_gemm_bits import TABLE, operands

        self.operator, self.tile = operator, TABLE["tiles"][tile]
        self.x, self.xs, self.w, self.ws = operands(operator, MOST, OUTPUTS, DEPTH, seed=seed)
        self.bias = torch.randn(OUTPUTS, device="cuda").bfloat16()
        self.seen: dict[str, dict[str, Any]] = {}
        self.expected = self.plain(slice(0, MOST), 1)
        torch.cuda.synchronize()

    def plain(self, part: slice, stages: int) -> torch.Tensor:
        """Rows `part` by the plain kernel."""
        from samebit.kernels import _gemm_plain as plain

        modes = {"fp8_block": (plain.BLOCK, 128), "fp8_row": (plain.ROW, 512),
                 "int8": (plain.INT8, 0), "bf16": (plain.BF16, 0)}  # fmt: skip
        mode, promote = modes[self.operator]
        x = self.x[part]
        out = torch.full((x.shape[0], OUTPUTS), float("nan"), device="cuda", dtype=torch.bfloat16)
        return plain.plain_gemm(
            x, self.w, out, mode, a_scale=None if self.xs is None else self.xs[part],
            b_scale=self.ws, col_group=128 if self.operator == "fp8_block" else 1,
            promote=promote, bias_N=self.bias, stages=stages,
        )  # fmt: skip

    def fast(self, part: slice) -> torch.Tensor:
        """Rows `part` by the tile under test."""
        from tests.gpu.test_gemm_bits import run

        scale = None if self.xs is None else self.xs[part]
        return run(
            self.operator, self.x[part], scale, self.w, self.ws, OUTPUTS, self.tile, self.bias
        )

    def explain(self, part: slice, got: torch.Tensor, differs: torch.Tensor) -> dict[str, int]:
        """How many of the differing elements each wrong reading of an operand would give.

        Rows moved: a descriptor of the launch before (its rows start elsewhere). Blocks of K that are
        zero or another block: a slot of the ring read too early, or written too early.
        """
        from samebit.kernels import _gemm_plain as plain

        kept, found = (self.x, self.w), {}

        def matches(name: str, x: torch.Tensor, w: torch.Tensor) -> None:
            self.x, self.w = x, w
            wrong = self.plain(part, plain.STAGES)
            same = wrong.view(torch.int16) == got.view(torch.int16)
            found[name] = int((same & differs).sum())

        for shift in (-3, -2, -1, 1, 2, 3):
            matches(
                f"tokens moved by {shift}",
                kept[0].view(torch.uint8).roll(shift, 0).view(kept[0].dtype),
                kept[1],
            )
        blocks = kept[0].shape[1] // 128
        for block in range(blocks):
            for other in (None, block - 1, block - 8):
                if other is not None and other < 0:
                    continue
                for name, index in (("tokens", 0), ("outputs", 1)):
                    changed = kept[index].clone()
                    put = changed.view(torch.uint8)[:, block * 128 : (block + 1) * 128]
                    if other is None:
                        put.zero_()
                    else:
                        source = kept[index].view(torch.uint8)
                        put.copy_(source[:, other * 128 : (other + 1) * 128])
                    both = [*kept]
                    both[index] = changed
                    matches(f"block {block} of {name} was {other}", both[0], both[1])
        self.x, self.w = kept
        return {name: n for name, n in found.items() if n > 8}

    def compute(self, what: str, part: slice) -> torch.Tensor:
        """By the name that a record gives it."""
        if what == "fast":
            return self.fast(part)
        return self.plain(part, 1 if what == "plain" else 4)

    def check(self, what: str, rows: int) -> None:
        """Compute once and count; the first difference is kept with two recomputations."""
        part = slice((MOST - rows) // 2, (MOST - rows) // 2 + rows)
        got = self.compute(what, part)
        want = self.expected[part]
        differs = got.view(torch.int16) != want.view(torch.int16)
        record = self.seen.setdefault(what, {"products": 0, "wrong": 0, "first": None})
        record["products"] += 1
        if not bool(differs.any()):
            return
        record["wrong"] += 1
        if record["first"] is None:
            again = [self.compute(what, part) for _ in range(2)]
            plain = [self.plain(part, 1) for _ in range(2)]
            where = differs.nonzero()
            record["first"] = {
                "rows": rows,
                "differing": int(differs.sum()),
                "of": differs.numel(),
                "tokens": sorted(set(where[:, 0].tolist())),
                "outputs": [int(where[:, 1].min()), int(where[:, 1].max())],
                "at": where.tolist(),
                "got": got[differs].tolist(),
                "want": want[differs].tolist(),
                "again_equals_want": [bits_equal(a, want) for a in again],
                "again_equals_got": [bits_equal(a, got) for a in again],
                "plain_equals_want": [bits_equal(p, want) for p in plain],
                "explained_by": {} if self.operator == "bf16" else self.explain(part, got, differs),
            }


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two BF16 tensors have the same bits."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def work(options: argparse.Namespace, path: Path) -> None:
    """One process: repeat until the time is over, then write what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        if options.fence:
            use_fences(options.fence, Path(folder))
        stress = Stress(options.operator, options.tile, options.seed)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            for rows in ROWS:
                for what in ("fast", "plain", "plain, four stages"):
                    stress.check(what, rows)
            stress.check("plain, four stages", MOST)
            path.write_text(json.dumps(stress.seen))


def gather(files: list[Path]) -> dict[str, Any]:
    """Counts over all processes, and every first difference."""
    total: dict[str, Any] = {"processes": 0}
    for file in files:
        if not file.exists():
            continue
        total["processes"] += 1
        for what, record in json.loads(file.read_text()).items():
            sums = total.setdefault(what, {"products": 0, "wrong": 0, "firsts": []})
            sums["products"] += record["products"]
            sums["wrong"] += record["wrong"]
            if record["first"] is not None:
                sums["firsts"].append(record["first"])
    return total


def main() -> None:
    """Start the processes, wait, add up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--operator", default="fp8_block")
    parser.add_argument("--tile", default="s64x32p2")
    parser.add_argument("--fence", action="append", choices=sorted(FENCES), default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        work(options, Path(options.part))
        return
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(options.processes)]
        fences = [word for name in options.fence for word in ("--fence", name)]
        command = [
            sys.executable, "-m", "tests.gpu.gemm_stress", "--seconds", str(options.seconds),
            "--operator", options.operator, "--tile", options.tile, *fences,
        ]  # fmt: skip
        processes = [
            subprocess.Popen([*command, "--seed", str(i), "--part", str(file)])
            for i, file in enumerate(files)
        ]
        for process in processes:
            process.wait()
        total = gather(files)
    total |= {"operator": options.operator, "tile": options.tile, "fences": options.fence}
    if options.out:
        Path(options.out).write_text(json.dumps(total, indent=1) + "\n")
    for what in ("fast", "plain", "plain, four stages"):
        record = total.get(what, {"products": 0, "wrong": 0})
        print(f"{what}: {record['wrong']} of {record['products']} products differ")  # noqa: T201


if __name__ == "__main__":
    main()
