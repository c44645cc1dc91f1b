"""What the code compiled for sm_90 must and must not contain, checked without a GPU.

`pytest -m whole tests/kernels/test_compiled.py` compiles every shipped tile and head shape; otherwise
one of each kind stands for them. Triton keeps what it compiled, so a second run takes seconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
ROOT = Path(__file__).parents[2]
SOURCE = str(ROOT / "src")
ON_TENSOR_CORES = (
    "hopper_gemm", "attention_hopper", "attention_stream", "attention_decode_hopper",
    "attention_decode_codes",
    "attention_prefill", "attention_dkdv_hopper", "attention_dq_hopper", "_head_kernel",
    "_sample_kernel", "sample_hopper", "_logits_kernel", "_head_gradient",
)  # fmt: skip
SHARED_BYTES = 227 * 1024
PROCESSES = 2


def compile_all(*options: str) -> dict[str, dict[str, Any]]:
    """Reports by kernel, from processes that do not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([SOURCE, str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(part), str(PROCESSES), *options], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for part in range(PROCESSES)
    ]  # fmt: skip
    reports: dict[str, dict[str, Any]] = {}
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
        reports |= json.loads(out)
    return reports


@pytest.fixture(
    scope="module", params=["one of each kind", pytest.param("all", marks=pytest.mark.whole)]
)
def reports(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    if request.param == "all":
        if "whole" not in request.config.option.markexpr:
            pytest.skip("minutes: pytest -m whole tests/kernels/test_compiled.py")
        return compile_all("--all")
    return compile_all()


def test_every_kernel_of_the_package_was_compiled(reports):
    kernels = set()
    for file in Path(SOURCE, "samebit/kernels").glob("*.py"):
        kernels |= set(re.findall(r"^def (\w*kernel)\(", file.read_text(), re.MULTILINE))
    assert len(kernels) > 40
    assert kernels - {name.split(" ")[0] for name in reports} == set()


def test_every_fused_multiply_add_was_written_as_one(reports):
    """No multiply and add became one instruction that rounds once: neither in Triton's optimiser, nor in
    LLVM, nor in ptxas. The assembler adds some only inside exact division and square roots."""
    for name, r in reports.items():
        assert r["ir_contract"] == 0, name
        assert r["ptx_fma"] == r["ir_fma"], name
        if r["ptx_exact"] == 0:
            assert r["sass_fma"] >= r["ptx_fma"], name
            # One computed twice to save a register leaves the additions alone; a fusion takes one.
            assert r["sass_fma"] == r["ptx_fma"] or r["sass_add"] == r["ptx_add"], name


def test_forward_kernels_that_write_none_have_none(reports):
    silent = ("_head_kernel", "_sample_kernel", "sample_hopper", "_logits_kernel", "_head_gradient",
              "_silu_mul_b", "_embed", "_transpose", "attention_delta", "attention_dk",
              "attention_dq")  # fmt: skip
    seen = [name for name in reports if name.startswith(silent)]
    assert len(seen) >= 8
    assert {name: reports[name]["ptx_fma"] for name in seen} == dict.fromkeys(seen, 0)
    row_scaled = [n for n in reports if n.startswith("hopper_gemm") and "fp8_block" not in n]
    row_scaled = [n for n in row_scaled if "wgrad" not in n]
    assert row_scaled and all(reports[n]["ptx_fma"] == 0 for n in row_scaled)


def test_products_run_on_wgmma(reports):
    kernels = [name for name in reports if name.startswith(ON_TENSOR_CORES)]
    assert {name.split(" ")[0] for name in kernels} >= {"hopper_gemm_kernel", "_sample_kernel"}
    for name in kernels:
        assert reports[name]["wgmma"] and reports[name]["mma_sync"] == 0, name


def test_block_scaled_tiles_promote_with_one_fma_an_element(reports):
    from samebit.kernels._gemm_tuning import load_table

    tiles = load_table("tuning_h200.json")["tiles"]
    checked = 0
    for name, r in reports.items():
        if name.startswith("hopper_gemm_kernel (gemm fp8_block"):
            tile = tiles[name.split(" ")[-1].rstrip(")")]
            # an instruction multiplies 64 rows, whatever the tile holds
            assert r["ptx_fma"] == tile.consumers * tile.depth * 64 * tile.columns // 128, name
            checked += 1
    assert checked >= 2


def test_no_sum_depends_on_who_comes_first(reports):
    assert {n for n, r in reports.items() if r["float_atomics"]} == set()


UNFENCED = {"attention_dkdv_hopper_kernel"}
"""Its `cp.async` bring log-sum-exps and deltas, which ordinary loads read; products read what TMA brought."""


def test_what_cp_async_brought_is_fenced_before_a_product_reads_it(reports):
    """`wgmma` reads shared memory through another proxy, and Triton 3.6 leaves the fence out where
    it pipelines loads itself; registers stored to shared memory get one."""
    products = {name: r for name, r in reports.items() if r["wgmma"]}
    assert {name for name, r in products.items() if r["pipelined"]} == set()
    unfenced = {n for n, r in products.items() if r["cp_async"] and not r["proxy_fences"]}
    assert {name.split(" ")[0] for name in unfenced} == UNFENCED
    plain = [r for name, r in reports.items() if name.startswith("plain_gemm_kernel")]
    assert plain and all(r["proxy_fences"] and not r["cp_async"] for r in plain)


def test_no_kernel_reads_the_stack_pointer_as_data(reports):
    # The mark of a ptxas 12.8 miscompile of e4m3 pairs (see kernels/quantize_weight.py).
    assert {n for n, r in reports.items() if r["stack_pointer_as_data"]} == set()


def test_attention_uses_wide_products_within_shared_memory(reports):
    forward = reports["attention_hopper_kernel (attention packed 32/8x128 bf16)"]
    decode = reports["attention_decode_codes_kernel (attention decode 32/8x128 fp8)"]
    assert forward["wgmma"] == ["m64n128k16"]
    assert decode["wgmma"] == ["m64n8k16", "m64n8k32"]
    assert max(r["shared"] for r in reports.values()) <= SHARED_BYTES
    # Two programs on a multiprocessor, 1 KiB each reserved.
    assert 2 * (decode["shared"] + 1024) <= 228 * 1024
