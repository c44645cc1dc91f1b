"""The trainer: exact ratios, splits that change nothing, faults that move nothing."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from samebit.models.load import load_model
from samebit.quant.plan import load_recipe
from samebit.rl.registry import load_algorithm, load_correction
from samebit.train.pack import pack_part
from samebit.train.step import Trainer
from tests.tiny import tiny_folder
from tests.train.groups import config_for, rollout, trainer_for

UNIFIED = ("bf16", "fp8", "fp8-bf16-backward", "fp8-row", "int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("step"), "qwen3")


def build(
    folder, recipe: str, correction: str = "none", algorithm: str = "grpo", **kwargs
) -> Trainer:
    model = load_model(folder, load_recipe(recipe))
    return trainer_for(model, config_for(**kwargs), correction, algorithm)


def gradient(trainer: Trainer, groups) -> torch.Tensor:
    """The gradient of one update, caught before the optimiser."""
    caught = []
    trainer._optimise = lambda: caught.append(flat_gradient(trainer)) or {}
    trainer.step(groups)
    return caught[0]


def flat_gradient(trainer: Trainer) -> torch.Tensor:
    grad = torch.cat([p.grad.flatten() for p in trainer.parameters().values()])
    for p in trainer.parameters().values():
        p.grad = None
    return grad


def masters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.parameters().values()])


@pytest.mark.parametrize("recipe", UNIFIED)
def test_mismatch_is_zero_on_every_token_of_several_steps(folder, recipe):
    trainer = build(folder, recipe)
    before = masters(trainer)
    for step in range(2):
        metrics = trainer.step(rollout(trainer.model, first_id=100 * step))
        assert metrics["mismatch/tokens"] == 30
        assert metrics["mismatch/tokens_differing"] == 0
        assert metrics["mismatch/logp_abs_max"] == 0.0
        assert metrics["rl/ratio_max"] == 1.0
    assert float((masters(trainer) - before).abs().max()) > 1e-4


@pytest.mark.parametrize("recipe", ["fp8-rollout", "int8-rollout", "fp8-row-rollout"])
def test_a_mixed_recipe_s_mismatch_is_clearly_not_zero(folder, recipe):
    trainer = build(folder, recipe, correction="tis")
    metrics = trainer.step(rollout(trainer.model))
    assert metrics["mismatch/tokens_differing_share"] > 0.9
    assert metrics["mismatch/logp_abs_mean"] > 1e-3


def test_library_gemms_promise_nothing_and_are_measured(folder):
    trainer = build(folder, "bf16-fast")
    assert not trainer.model.plan.unified
    metrics = trainer.step(rollout(trainer.model))
    assert metrics["mismatch/tokens"] == 30
    assert metrics["mismatch/logp_abs_mean"] < 0.02  # 0 where the CPU's library is row-invariant


@pytest.mark.parametrize(("recipe", "limit"), [("bf16", 1e-6), ("fp8", 1e-5)])
def test_any_split_into_micro_batches_gives_the_same_gradient(folder, recipe, limit):
    whole = build(folder, recipe)
    groups = rollout(whole.model)
    want = gradient(whole, groups)
    for budget in (1, 60, 170):
        got = gradient(build(folder, recipe, micro_batch_tokens=budget), groups)
        assert float((got - want).norm() / want.norm()) < limit, budget


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_the_order_of_groups_does_not_change_the_gradient(folder, recipe):
    trainer = build(folder, recipe)
    groups = rollout(trainer.model)
    want = gradient(trainer, groups)
    got = gradient(build(folder, recipe), groups[::-1])
    assert float((got - want).norm() / want.norm()) < 1e-5


def test_a_sample_without_a_verdict_changes_nothing_whatever_its_log_probs(folder):
    def with_hole(filler: float):
        groups = rollout(build(folder, "bf16").model)
        first = groups[1]
        samples = list(first.samples)
        samples[1] = dataclasses.replace(
            samples[1], logps=np.full(len(samples[1].ids), filler, dtype=np.float32)
        )
        rewards = (first.rewards[0], None, first.rewards[2])
        groups[1] = dataclasses.replace(first, samples=tuple(samples), rewards=rewards)
        return gradient(build(folder, "bf16"), groups)

    clean = with_hole(-1.0)
    assert torch.isfinite(clean).all()
    for filler in (math.nan, 1e6, -1e6):
        assert torch.equal(with_hole(filler), clean)


def test_equal_rewards_everywhere_move_no_weight_at_all(folder):
    trainer = build(folder, "fp8", weight_decay=0.1)
    groups = [dataclasses.replace(g, rewards=(0.7, 0.7, 0.7)) for g in rollout(trainer.model)]
    before = masters(trainer)
    metrics = trainer.step(groups)
    assert torch.equal(masters(trainer), before)
    assert metrics["train/grad_norm"] == 0.0 and math.isfinite(metrics["rl/loss"])


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(folder):
    trainer = build(folder, "fp8")
    groups = rollout(trainer.model)
    before = masters(trainer)
    trainer.model.norm_final.register_hook(lambda grad: grad * math.nan)
    metrics = trainer.step(groups)
    assert math.isnan(metrics["train/grad_norm"]) and metrics["train/skipped_steps"] == 1.0
    assert torch.equal(masters(trainer), before)
    assert not trainer.optimizer.state


def test_a_step_counts_its_updates_in_the_schedule_however_few_it_makes(folder):
    """Two groups make two of four mini-batches; no group makes none."""
    trainer = build(folder, "fp8", schedule="linear", steps=4, rl={"mini_batches": 4})
    few = trainer.step(rollout(trainer.model)[:2])
    assert trainer.updates == 4 and few["train/learning_rate"] == pytest.approx(15 / 16 * 1e-3)
    trainer.pass_over()
    later = trainer.step(rollout(trainer.model, first_id=100))
    assert trainer.updates == 12 and later["train/learning_rate"] == pytest.approx(5 / 16 * 1e-3)


def test_zero_learning_rate_gives_ratio_exactly_one_over_epochs(folder):
    trainer = build(folder, "fp8", learning_rate=0.0, rl={"epochs": 2, "mini_batches": 2})
    metrics = trainer.step(rollout(trainer.model))
    assert trainer.updates == 4
    assert metrics["rl/ratio_max"] == 1.0 and metrics["rl/ratio_mean"] == 1.0
    assert metrics["mismatch/tokens_differing"] == 0


def test_two_trainers_with_one_seed_end_on_the_same_bits(folder):
    def run() -> torch.Tensor:
        trainer = build(folder, "fp8")
        for step in range(2):
            trainer.step(rollout(trainer.model, first_id=50 * step))
        return masters(trainer)

    assert torch.equal(run(), run())


def test_stale_tokens_are_counted_apart(folder):
    trainer = build(folder, "bf16")
    groups = rollout(trainer.model)
    sample = groups[0].samples[0]
    stale = dataclasses.replace(sample, versions=sample.versions - 1)
    groups[0] = dataclasses.replace(groups[0], samples=(stale, *groups[0].samples[1:]))
    metrics = trainer.step(groups)
    assert metrics["mismatch/stale_tokens"] == len(sample.ids)
    assert metrics["mismatch/tokens"] == 30 - len(sample.ids)


def test_ppo_trains_its_value_head(folder):
    trainer = build(folder, "fp8", algorithm="ppo", rl={"epochs": 2})
    groups = rollout(trainer.model)
    metrics = trainer.step(groups)
    assert float(trainer.value.bias.detach().abs()) > 0
    assert metrics["mismatch/tokens_differing"] == 0


@pytest.mark.parametrize("correction", ["tis", "acr", "icepop", "mis", "reject", "adaptive"])
def test_every_correction_is_an_exact_no_op_in_a_unified_recipe(folder, correction):
    plain = build(folder, "fp8", rl={"mini_batches": 2})
    corrected = build(folder, "fp8", correction=correction, rl={"mini_batches": 2})
    groups = rollout(plain.model)
    plain.step(groups)
    corrected.step(groups)
    assert torch.equal(masters(plain), masters(corrected))


def test_a_mixed_recipe_s_old_policy_is_the_training_forward_at_the_old_weights(folder):
    trainer = build(folder, "int8-rollout", correction="tis", rl={"epochs": 2})
    groups = rollout(trainer.model)
    prepared = trainer._prepare(groups, trainer._pack(groups, range(len(groups))))
    batch = pack_part(groups, range(len(groups)), 4096, trainer.model.device)[0]
    with torch.no_grad():
        want, _, _ = trainer.scorer.forward(trainer.model, batch)
    assert torch.equal(prepared.scores.old, want)
    assert not torch.equal(prepared.scores.old, batch.rollout_logp)


def test_a_pack_feeds_a_prompt_once_and_predicts_every_token(folder):
    groups = rollout(build(folder, "bf16").model)
    (batch,) = pack_part(groups, range(len(groups)), 4096, torch.device("cpu"))
    assert len(batch.ids) == sum(len(g.prompt.ids) for g in groups) + 30 - 12
    ids = batch.ids.tolist()
    place = 0
    for group in groups:
        for sample in group.samples:
            rows = batch.predicting[place : place + len(sample.ids)]
            assert batch.targets[place : place + len(sample.ids)].tolist() == list(sample.ids)
            assert ids[rows[0]] == group.prompt.ids[-1]
            assert [ids[r] for r in rows[1:]] == list(sample.ids[:-1])
            place += len(sample.ids)
    assert batch.layout.positions[batch.predicting[0]] == len(groups[0].prompt.ids) - 1


def test_calibrated_clipping_calibrates_on_due_steps_and_keeps_its_bounds(folder):
    model = load_model(folder, load_recipe("fp8"))
    shadow = load_model(folder, load_recipe("bf16"))
    config = config_for(rl={"epochs": 3}, learning_rate=5e-3)
    trainer = Trainer(
        model,
        config,
        load_algorithm("grpo", {}),
        load_correction("calibrated", {"every": 2}),
        shadow=shadow,
    )
    metrics = trainer.step(rollout(model))
    bounds = trainer.correction.calibrated
    # metrics are taken of FP32 values
    assert metrics["rl/calibrated_lower"] == pytest.approx(bounds[0], rel=1e-6)
    assert metrics["rl/calibrated_upper"] == pytest.approx(bounds[1], rel=1e-6)
    assert bounds is not None and bounds[0] <= 1.0 <= bounds[1]
    # the shadow ran at the weights before the last update of the step
    assert trainer.correction.state() == {"calibrated": list(bounds)}
    trainer.step(rollout(model, first_id=100))  # step 1 is not due
    assert trainer.correction.calibrated == bounds
    again = load_correction("calibrated", {"every": 2}).with_state(trainer.correction.state())
    assert again.calibrated == bounds


def test_a_reference_model_supplies_the_kl(folder):
    model, reference = (load_model(folder, load_recipe("fp8")) for _ in range(2))
    algorithm = load_algorithm("grpo", {"kl_coefficient": 0.1})
    trainer = Trainer(model, config_for(), algorithm, load_correction("none", {}), reference)
    first = trainer.step(rollout(model))
    assert first["rl/reference_kl"] == 0.0  # the same weights, the same bits
    second = trainer.step(rollout(model, first_id=100))
    assert second["rl/reference_kl"] > 0.0
