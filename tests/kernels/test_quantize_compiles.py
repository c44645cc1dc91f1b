"""What the compiled code must and must not contain, checked without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = SOURCE
    result = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=environment,
        cwd=tmp_path_factory.mktemp("compiled"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def test_multiplies_and_adds_are_not_contracted(reports):
    # Kernels that write no fma must have none; the quantisers' own are the quotient's.
    for name, report in reports.items():
        if name.startswith(("_head", "_sample")):
            assert report["fused"] == 0, name


def test_the_head_runs_on_wgmma(reports):
    heads = [r for n, r in reports.items() if n.startswith(("_head_kernel", "_sample_kernel"))]
    assert len(heads) == 2
    assert all(r["wgmma"] and not r["mma_sync"] for r in heads)


def test_no_kernel_reads_the_stack_pointer_as_data(reports):
    # The mark of a ptxas 12.8 miscompile of e4m3 pairs (see kernels/quantize_weight.py).
    assert {n: r["stack_pointer_as_data"] for n, r in reports.items()} == dict.fromkeys(reports, 0)
