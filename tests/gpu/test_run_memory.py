"""A run that does not fit the card says what to change, and a run that is made to fit learns the same."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

usable = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable, reason="needs a Hopper GPU")]

from samebit.log import Reporter  # noqa: E402
from samebit.loop import Run  # noqa: E402
from tests import runs  # noqa: E402

SHAPE = {
    "hidden": 256,
    "intermediate": 1024,
    "layers": 6,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
}
LARGE = {
    "run.device": "cuda",
    "rollout.max_tokens": "256",
    "rollout.max_batch": "256",
    "rl.group_size": "128",
    "eval.every": "0",
    "run.save_every": "0",
    "train.steps": "2",
    "train.micro_batch_tokens": "65536",
}
MIB = 1 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("memory"), **SHAPE)


def run_of(file: Path, out: Path, said: list[str], **overrides: str) -> Run:
    values = LARGE | {name.replace("__", "."): value for name, value in overrides.items()}
    run = Run(runs.config(file, out, *values.items()), False, Reporter(quiet=True))
    run.report.note = said.append  # type: ignore[method-assign]
    return run


def test_a_full_card_names_the_step_the_phase_and_the_setting(file: Path, tmp_path: Path):
    # "auto" keeps less where other processes hold the card
    run = run_of(file, tmp_path / "full", [], train__recompute="none")
    total = torch.cuda.get_device_properties(run.model.device).total_memory
    # blocks that earlier tests left in the allocator are reserved, and yet room for the update
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 400 * MIB) / total)
    try:
        with pytest.raises(
            ValueError,
            match=r"ran out of memory in step 1, phase train \(.*out of memory.*\): the largest saving "
            r"is train\.(micro_batch_tokens|recompute)",
        ):
            run.train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        run.close()


def test_a_run_planned_into_less_memory_takes_less_and_learns_the_same(file: Path, tmp_path: Path):
    found, peaks, plans = [], [], []
    for name, gib in (("free", "0"), ("tight", "2.5")):
        run = run_of(file, tmp_path / name, [], train__memory_gib=gib)
        plans.append(run.memory.describe_recompute())
        run.train()
        run.close()
        found.append(runs.metrics(tmp_path / name))
        records = runs.read_json_lines(tmp_path / name / "metrics.jsonl")
        peaks.append(max(r["perf/train_memory_gib"] for r in records))
    assert plans[0] == "none" and plans[1].startswith("mlp in ")
    assert found[0] == found[1]
    assert peaks[1] < 0.85 * peaks[0]


def test_a_step_says_how_near_it_comes_to_the_card_and_names_its_kernels(
    file: Path, tmp_path: Path
):
    said: list[str] = []
    run = run_of(file, tmp_path / "near", said, train__profile_step="2")
    run.train()
    run.close()
    for record in runs.read_json_lines(tmp_path / "near" / "metrics.jsonl"):
        shares = {k: v for k, v in record.items() if k.startswith("perf/roofline_")}
        assert set(shares) == {f"perf/roofline_{p}" for p in ("rollout", "update", "optimizer")}
        assert all(0 < share < 1 for share in shares.values()), shares
    (table,) = (line for line in said if "launches" in line)
    assert "products" in table and "attention" in table and "at the peak" in table
    kernels = (tmp_path / "near" / "kernels.txt").read_text()
    assert "attention_dq" in kernels and "gemm" in kernels
