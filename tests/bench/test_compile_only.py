"""Kernels are compiled for sm_90 and launched by nobody; in a process of its own, as Triton's driver is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import os, sys
sys.path.insert(0, "tests/kernels")
from compile_for_hopper import HopperTarget
import torch, triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction

driver.set_active(HopperTarget())
from samebit.bench.compile_only import compile_only

@triton.jit
def double(x_ptr, SIZE: tl.constexpr):
    at = x_ptr + tl.arange(0, SIZE)
    tl.store(at, 2 * tl.load(at))

@triton.jit
def broken(x_ptr):
    tl.store(x_ptr, undefined_name)

run, x = JITFunction.run, torch.ones(64)
with compile_only(3):
    double[(1,)](x, SIZE=64)
    double[(1,)](x, SIZE=64)
    double[(1,)](x, SIZE=32)
    broken[(1,)](x)
assert JITFunction.run is run
assert x.sum() == 64, "nothing was launched"
(cache,) = [c[0] for c in double.device_caches.values()]
assert len(cache) == 2 and all("cubin" in k.asm for k in cache.values()), cache
"""


def test_launches_are_compiled_and_not_made(tmp_path: Path):
    root = Path(__file__).parents[2]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": f"{root / 'src'}:{root}",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script)], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
