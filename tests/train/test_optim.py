"""AdamW's moments by setting: FP32 as torch keeps them, a byte each, or in host memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from samebit.config import TrainConfig
from samebit.train import states_8bit, states_host
from samebit.train.optim import build_optimizer, clip_gradients, finite_norm, nonfinite_roles
from samebit.train.states_8bit import BLOCK_VALUES, FIRST, SECOND, decode, encode, random_bits


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layers.0.out.master": (40, 130), "norm_final": (70,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def run(states: str, steps: int, rate: float = 1e-2) -> dict[str, nn.Parameter]:
    held = parameters()
    optimizer = build_optimizer(held, TrainConfig(optimizer_states=states, weight_decay=0.1))  # type: ignore[arg-type]
    for group in optimizer.param_groups:
        group["lr"] = rate
    for step in range(steps):
        for name, p in parameters(step + 1).items():
            held[name].grad = p.detach()
        optimizer.step()
    return held


def test_moments_in_host_memory_give_the_bits_of_moments_on_the_device(monkeypatch):
    monkeypatch.setattr(states_host, "SLICE", 1000)  # a parameter of several slices
    for (_, mine), theirs in zip(run("host", 5).items(), run("fp32", 5).values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_byte_per_moment_follows_fp32_s_path(monkeypatch):
    monkeypatch.setattr(states_8bit, "_CHUNK", 2 * BLOCK_VALUES)
    start, mine, theirs = parameters(), run("8bit", 30), run("fp32", 30)
    whole = "layers.0.out.master"
    moved, apart = ((a[whole] - theirs[whole]).detach().norm() for a in (start, mine))
    assert float(apart / moved) < 0.1
    # small parameters keep FP32 moments: only the order of operations differs
    assert torch.allclose(mine["norm_final"], theirs["norm_final"], rtol=0, atol=1e-6)


def test_two_runs_round_alike_and_chunks_change_nothing(monkeypatch):
    first = run("8bit", 4)
    monkeypatch.setattr(states_8bit, "_CHUNK", 3 * BLOCK_VALUES)
    for mine, theirs in zip(first.values(), run("8bit", 4).values(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_state_is_two_bytes_a_value():
    held = parameters()["layers.0.out.master"]
    optimizer = build_optimizer({"embedding": held}, TrainConfig(optimizer_states="8bit"))
    held.grad = torch.ones_like(held)
    optimizer.step()
    size = sum(t.numel() * t.element_size() for t in optimizer.state[held].values())
    assert size < 2.06 * held.numel() + 2 * BLOCK_VALUES


@pytest.mark.parametrize("form", [FIRST, SECOND])
def test_codes_bracket_a_value_and_are_right_on_average(form):
    x = torch.zeros(BLOCK_VALUES)
    x[0], x[1:] = 3.0, 3.0 * 0.37  # between two codes: 0.375 and 0.34375 of the largest
    found = []
    for key in range(400):
        codes, scale = encode(x, form, random_bits(0, BLOCK_VALUES, key, form.stream, x.device))
        assert codes[0] == form.one and scale.tolist() == [3.0]
        found.append(decode(codes, scale, form))
    values = torch.stack(found)[:, 1:]
    assert set((values / 3.0).unique().tolist()) == {0.34375, 0.375}
    deviation = 3.0 * 0.03125 / 2 / math.sqrt(values.numel())
    assert abs(float(values.double().mean()) - 3.0 * 0.37) < 5 * deviation


def test_what_is_below_the_smallest_code_is_zero_or_the_smallest():
    x = torch.full((BLOCK_VALUES,), FIRST.smallest / 4)
    x[0] = 1.0
    codes, scale = encode(x, FIRST, random_bits(0, BLOCK_VALUES, 1, 0, x.device))
    assert set(codes[1:].tolist()) == {0, 1} and 30 < int(codes[1:].sum()) < 100
    assert decode(codes, scale, FIRST)[1:].max() == FIRST.smallest
    nothing, scale = encode(torch.zeros(BLOCK_VALUES), FIRST, torch.full((BLOCK_VALUES,), 1))
    assert not nothing.any() and scale.tolist() == [0.0]


@pytest.mark.parametrize("case", ["sparse", "spread"])
def test_a_quiet_value_beside_a_loud_one_takes_no_huge_step(case):
    """Its second moment must not vanish while its first moment is still there."""
    generator = torch.Generator().manual_seed(0)
    held = nn.Parameter(torch.zeros(100, 96))
    optimizer = build_optimizer({"embedding": held}, TrainConfig(optimizer_states="8bit"))
    optimizer.param_groups[0]["lr"] = 1.0
    loud = torch.exp(3.0 * torch.randn(100, 96, generator=generator))
    for _ in range(60):
        grad = 1e-3 * torch.randn(100, 96, generator=generator) * loud
        if case == "sparse":  # rows of an embedding that few batches hold, two or three to a block
            grad *= torch.rand(100, 1, generator=generator) < 0.05
        before, held.grad = held.detach().clone(), grad
        optimizer.step()
        assert float((held.detach() - before).abs().max()) < 8.0
    assert int((optimizer.state[held]["exp_avg"] != 0).sum()) > 1000


def test_norm_clip_and_faults_read_all_gradients_at_once():
    held = parameters()
    assert finite_norm(held.values()) == 0.0 and nonfinite_roles(held) == ()
    held["layers.0.out.master"].grad = torch.full((40, 130), 3.0)
    held["norm_final"].grad = torch.full((70,), 4.0)
    norm = finite_norm(held.values())
    assert norm == pytest.approx(math.sqrt(9 * 5200 + 16 * 70), rel=1e-6)
    clip_gradients(held.values(), norm, norm / 2)
    assert float(held["norm_final"].grad[0]) == pytest.approx(2.0)
    held["norm_final"].grad[3] = math.nan
    assert nonfinite_roles(held) == ("norm",) and math.isnan(finite_norm(held.values()))
