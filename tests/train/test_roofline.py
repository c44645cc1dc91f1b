"""Least times by hand, and the table of kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samebit.config import Config, RLSection, RolloutConfig, TaskSection, TrainConfig
from samebit.models.config import ModelConfig
from samebit.models.load import plan_for
from samebit.quant.plan import load_recipe
from samebit.train import roofline
from samebit.train.profile import FILE, Kernel, kernels_of, table, write_table
from samebit.train.roofline import Card, card_of
from samebit.types import Group, Prompt, Sample

MODEL = ModelConfig(
    family="llama", hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1, head_dim=64,
    vocab_size=1000, tokenizer_size=1000, rope_theta=1e4, rms_eps=1e-6, tied=True, max_position=128,
)  # fmt: skip
LINEARS = 2 * (128 * 256 + 128 * 128 + 128 * 512 + 256 * 128)
HEAD = 1000 * 128
CARD = Card(bf16=1e9, memory=1e6)


def sample(length: int) -> Sample:
    return Sample("p", 0, tuple(range(length)), np.zeros(length, np.float32),
                  np.ones(length, np.int32), "length")  # fmt: skip


# 10 prompt rows + 4 + 2 fed; 8 predicted
GROUPS = [Group(Prompt("p", tuple(range(10)), ""), (sample(5), sample(3)), (0.0, 1.0))]
PAIRS = 55 + (4 * 10 + 10) + (2 * 10 + 3)


def plan(recipe: str):
    return plan_for(load_recipe(recipe), MODEL)


def test_an_update_multiplies_each_linear_three_times():
    bf16 = roofline.update_seconds(CARD, MODEL, plan("bf16"), GROUPS)
    assert bf16["products"] == pytest.approx(3 * 2 * (16 * LINEARS + 8 * HEAD) / 1e9)
    assert bf16["attention"] == pytest.approx(2 * 7 * 2 * 128 * PAIRS / 1e9)
    fp8 = roofline.update_seconds(CARD, MODEL, plan("fp8"), GROUPS)
    assert fp8["products"] == pytest.approx(3 * 2 * (16 * LINEARS / 2 + 8 * HEAD) / 1e9)


def test_a_rollout_reads_every_weight_each_step():
    # two samples at once: five steps; a token's bytes of keys and values: 2 layers x 2 x 64 x 2
    wide = Card(bf16=1e15, memory=1e6)
    found = roofline.rollout_seconds(wide, MODEL, plan("bf16"), GROUPS, 2)
    keys = (PAIRS - 55) * 2 * 2 * 64 * 2
    assert found == pytest.approx((5 * 2 * (LINEARS + HEAD) + keys) / 1e6)
    alone = roofline.rollout_seconds(wide, MODEL, plan("bf16"), GROUPS, 1)
    assert alone == pytest.approx((8 * 2 * (LINEARS + HEAD) + keys) / 1e6)
    fp8 = roofline.rollout_seconds(wide, MODEL, plan("fp8"), GROUPS, 2)
    assert fp8 == pytest.approx((5 * (LINEARS + 2 * HEAD) + keys) / 1e6)


def test_shares_are_least_time_over_time_taken():
    config = Config(
        model="m", task=TaskSection(name="none"), rollout=RolloutConfig(max_batch=2),
        rl=RLSection(epochs=2, mini_batches=3), train=TrainConfig(optimizer_states="8bit"),
    )  # fmt: skip
    taken = {
        "time/rollout_s": 8.0,
        "time/forward_s": 1.0,
        "time/backward_s": 3.0,
        "time/optimizer_s": 2.0,
    }
    shares = roofline.roofline_shares(CARD, MODEL, plan("bf16"), config, GROUPS, taken)
    update = sum(roofline.update_seconds(CARD, MODEL, plan("bf16"), GROUPS).values())
    assert shares["perf/roofline_update"] == pytest.approx(2 * update / 4)
    least = roofline.optimizer_seconds(CARD, MODEL, plan("bf16"), "8bit")
    count = LINEARS + HEAD + 5 * 128
    assert least == pytest.approx((20 * count + 2 * (LINEARS + HEAD)) / 1e6)
    assert shares["perf/roofline_optimizer"] == pytest.approx(6 * least / 2)
    # the groups of a step that draws in parts were not drawn in that step's time
    parts = taken | {"rollout/drawn_tokens": 4.0}
    found = roofline.roofline_shares(CARD, MODEL, plan("bf16"), config, GROUPS, parts)
    assert found == {k: v for k, v in shares.items() if k != "perf/roofline_rollout"}
    assert len(found) == 2
    assert shares["perf/roofline_rollout"] == pytest.approx(
        roofline.rollout_seconds(CARD, MODEL, plan("bf16"), GROUPS, 2) / 8
    )
    assert roofline.optimizer_seconds(CARD, MODEL, plan("bf16"), "host") is None
    h200, other = card_of("NVIDIA H200 NVL"), card_of("NVIDIA A100")
    assert h200 is not None and h200.memory == 4.8e12 and other is None


def test_kernels_are_summed_by_family_beside_what_is_known_of_them():
    kernels = [
        Kernel("attention_dq_hopper_kernel", 0.002, 4),
        Kernel("hopper_gemm_kernel", 0.005, 10),
        Kernel("nvjet_sm90_tss", 0.001, 2),
        Kernel("_rms_norm_kernel", 0.002, 8),
    ]
    lines = table(kernels, {"products": 0.003}).splitlines()
    assert "10.00 ms in 24 launches" in lines[0]
    assert lines[1].split() == "6.00 ms 60% products: 3.00 ms at the peak, 50% of it".split()
    assert "attention" in lines[2] + lines[3] and "the rest" in lines[2] + lines[3]
    assert lines[5].split()[:4] == ["5.00", "50.0%", "10", "500.0"]


def test_operators_of_a_cpu_are_collected(tmp_path: Path):
    with kernels_of(torch.device("cpu")) as kernels:
        torch.ones(64, 64) @ torch.ones(64, 64)
    assert any(k.family == "products" and k.launches >= 1 for k in kernels)
    said = write_table(tmp_path, kernels, {})
    assert "products" in said and str(tmp_path / FILE) in said
    assert "aten::mm" in (tmp_path / FILE).read_text()


def test_the_least_of_an_update_counts_every_epoch(monkeypatch: pytest.MonkeyPatch):
    model = SimpleNamespace(device=torch.device("cpu"), config=MODEL, plan=plan("fp8"))
    assert roofline.known_seconds(model, GROUPS, 3) == {}  # type: ignore[arg-type]
    monkeypatch.setattr(roofline, "card_under", lambda device: CARD)
    once = roofline.update_seconds(CARD, MODEL, plan("fp8"), GROUPS)
    found = roofline.known_seconds(model, GROUPS, 3)  # type: ignore[arg-type]
    assert found == {family: 3 * seconds for family, seconds in once.items()}
