"""Checkpoints: whole or absent, verified, refused when they belong elsewhere; resuming is exact."""

import json
import os
import shutil

import pytest
import torch

from samebit.models.load import load_model
from samebit.quant.plan import load_recipe
from samebit.train import checkpoint
from samebit.train.checkpoint import Progress
from samebit.train.step import Trainer
from tests.tiny import tiny_folder
from tests.train.groups import config_for, rollout, trainer_for

ABOUT = {"seed": 0, "model": "tiny"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("ckpt"), "llama", layers=1)


def build(folder, recipe: str = "fp8", states: str = "fp32", **kwargs) -> Trainer:
    config = config_for(optimizer_states=states)
    return trainer_for(load_model(folder, load_recipe(recipe)), config, **kwargs)


def bits(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.parameters().values()])


@pytest.mark.parametrize("states", ["fp32", "8bit", "host"])
def test_stopping_and_resuming_changes_no_bit(folder, tmp_path, states):
    unbroken = build(folder, algorithm="ppo", states=states)
    for step in range(3):
        unbroken.step(rollout(unbroken.model, first_id=100 * step))
    first = build(folder, algorithm="ppo", states=states)
    first.step(rollout(first.model, first_id=0))
    checkpoint.save(tmp_path, first, Progress(1, 4, 12), 2, ABOUT)
    second = build(folder, algorithm="ppo", states=states)
    progress = checkpoint.restore(checkpoint.newest(tmp_path), second, ABOUT)
    assert progress == Progress(1, 4, 12)
    assert torch.equal(bits(first), bits(second)) and first.model.version == second.model.version
    for step in (1, 2):
        metrics = second.step(rollout(second.model, first_id=100 * step))
        assert metrics["mismatch/tokens_differing"] == 0 and metrics["mismatch/stale_tokens"] == 0
    assert torch.equal(bits(unbroken), bits(second))


def test_moments_of_another_kind_are_refused_by_the_setting_s_name(folder, tmp_path):
    trainer = build(folder, states="8bit")
    trainer.step(rollout(trainer.model))
    path = checkpoint.save(tmp_path, trainer, Progress(1), 2, ABOUT)
    with pytest.raises(ValueError, match="optimizer_states = '8bit', this run has 'fp32'"):
        checkpoint.restore(path, build(folder), ABOUT)


def test_reloaded_codes_are_the_same_bytes(folder, tmp_path):
    trainer = build(folder)
    trainer.step(rollout(trainer.model))
    checkpoint.save(tmp_path, trainer, Progress(1), 2, ABOUT)
    again = build(folder)
    checkpoint.restore(checkpoint.newest(tmp_path), again, ABOUT)
    for (_, a), (_, b) in zip(trainer.model.linears(), again.model.linears(), strict=True):
        x, y = a.weights["train"], b.weights["train"]
        assert torch.equal(x.codes.view(torch.uint8), y.codes.view(torch.uint8))
        assert torch.equal(x.scale, y.scale)


def test_only_the_newest_are_kept_and_none_is_dropped_before_the_next_is_whole(folder, tmp_path):
    trainer = build(folder)
    for step in range(1, 5):
        checkpoint.save(tmp_path, trainer, Progress(step), 2, ABOUT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]


@pytest.mark.parametrize(
    "damage", ["truncate", "flip", "delete_shard", "empty_state", "delete_manifest", "half_written"]
)
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(folder, tmp_path, damage, caplog):
    trainer = build(folder)
    checkpoint.save(tmp_path, trainer, Progress(1), 3, ABOUT)
    bad = checkpoint.save(tmp_path, trainer, Progress(2), 3, ABOUT)
    weights = bad / "model.safetensors"
    if damage == "truncate":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
    elif damage == "delete_shard":
        shutil.rmtree(bad / "optimizer")
    elif damage == "empty_state":
        (bad / "state.json").write_text("")
    elif damage == "delete_manifest":
        (bad / checkpoint.MANIFEST).unlink()
    else:
        bad.rename(tmp_path / ".step_000002.partial-xyz")
    assert checkpoint.newest(tmp_path).name == "step_000001"
    if damage != "half_written":
        assert "step_000002" in caplog.text
        replaced = checkpoint.save(tmp_path, trainer, Progress(2), 3, ABOUT)
        assert checkpoint.problem_of(replaced) is None


def test_another_plan_seed_or_model_is_refused_by_name(folder, tmp_path):
    checkpoint.save(tmp_path, build(folder), Progress(1), 2, ABOUT)
    saved = checkpoint.newest(tmp_path)
    with pytest.raises(ValueError, match="precision plan"):
        checkpoint.restore(saved, build(folder, "bf16"), ABOUT)
    with pytest.raises(ValueError, match="seed = 0"):
        checkpoint.restore(saved, build(folder), ABOUT | {"seed": 1})
    assert json.loads((saved / "state.json").read_text())["model"] == "tiny"


def test_a_full_disk_leaves_the_previous_checkpoint_and_says_so(folder, tmp_path, monkeypatch):
    trainer = build(folder)
    checkpoint.save(tmp_path, trainer, Progress(1), 2, ABOUT)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OSError, match="not enough space"):
        checkpoint.save(tmp_path, trainer, Progress(2), 2, ABOUT)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert checkpoint.problem_of(checkpoint.newest(tmp_path)) is None
