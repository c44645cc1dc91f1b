"""Correction weights and rejection masks against verl, alone and inside a loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl", reason="verl is not installed; `make test-outside` runs these tests")

from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

from samebit.rl.registry import load_correction
from tests.rl.outside.cases import MODES, SEEDS, Case, close, random_case
from tests.rl.outside.test_outside_losses import actor, ours, theirs

pytestmark = pytest.mark.outside

BANDS = ((0.5, 2.0), (0.8, 1.25), (0.2, 5.0))


def weights(case: Case, name: str, table: dict) -> Tensor:
    """Our weight of each unmasked token."""
    batch = case.batch(case.logp_T).filled()
    return load_correction(name, table).weights(batch).weight_T[case.mask_T]


def gap(case: Case) -> Tensor:
    """log rho as verl takes it, [B, longest]."""
    return case.pad(case.old_T - case.rollout_T)


def clamped_gap(case: Case) -> Tensor:
    """The same after our clamp of each token; verl's sequence *weight* clamps the sum alone."""
    return case.pad(torch.clamp(case.old_T - case.rollout_T, -20.0, 20.0))


def kept(case: Case, rows_BL: Tensor) -> Tensor:
    """[B, longest] -> unmasked tokens."""
    return case.unpad(rows_BL)[case.mask_T]


def banded_weights(log_ratio_BL: Tensor, case: Case, level: str, low: float, high: float):
    """verl's weights for a band, zeros where its metrics divide by zero: every token dropped.

    That is the only case in which verl 0.9.1 raises here; ours must then be all zeros too.
    """
    try:
        return compute_rollout_correction_weights(
            log_ratio_BL, case.mask(), level, f"{low}_{high}"
        )[0]
    except ZeroDivisionError:
        return torch.zeros_like(log_ratio_BL)


def band(low: float, high: float) -> str:
    """Our band on rho in verl's k1 spelling, which is a band on rollout / old, the inverse."""
    return f"{1 / high!r}_{1 / low!r}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("cap", (2.0, 8.0))
def test_token_truncation(seed, dtype, cap):
    case = random_case(seed, dtype)
    want_BL, _ = compute_rollout_correction_weights(gap(case), case.mask(), "token", cap)
    close(weights(case, "tis", {"cap": cap}), kept(case, want_BL))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("extreme", (False, True))
@pytest.mark.parametrize("cap", (2.0, 8.0))
def test_sequence_truncation(seed, extreme, cap):
    # FP64: in FP32 the sum over a sequence is itself only good to about 1e-6.
    case = random_case(seed, extreme=extreme)
    log_ratio_BL = clamped_gap(case) if extreme else gap(case)
    want_BL, _ = compute_rollout_correction_weights(log_ratio_BL, case.mask(), "sequence", cap)
    close(weights(case, "tis", {"cap": cap, "level": "sequence"}), kept(case, want_BL))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize(("low", "high"), BANDS)
def test_icepop(seed, dtype, low, high):
    case = random_case(seed, dtype)
    want_BL = banded_weights(gap(case), case, "token", low, high)
    close(weights(case, "icepop", {"low": low, "high": high}), kept(case, want_BL))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), BANDS)
def test_plain_mask(seed, low, high):
    case = random_case(seed)
    want_BL, _ = compute_rollout_rejection_mask(gap(case), case.mask(), "token_k1", band(low, high))
    got_T = weights(case, "icepop", {"low": low, "high": high, "reweight": False})
    close(got_T, kept(case, want_BL))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), BANDS)
def test_masked_sequences_weighted_by_their_product(seed, low, high):
    case = random_case(seed)
    want_BL = banded_weights(clamped_gap(case), case, "sequence", low, high)
    close(weights(case, "mis", {"lower": low, "upper": high}), kept(case, want_BL))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("level", "option"), (("sequence", "sum"), ("geometric", "mean")))
@pytest.mark.parametrize(("low", "high"), BANDS)
def test_masked_sequences(seed, level, option, low, high):
    case = random_case(seed)
    want_BL, _ = compute_rollout_rejection_mask(
        gap(case), case.mask(), f"seq_{option}_k1", band(low, high)
    )
    table = {"level": level, "lower": low, "upper": high, "reweight": False}
    close(weights(case, "mis", table), kept(case, want_BL))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ("k1", "k2", "k3"))
@pytest.mark.parametrize("over", ("token", "sequence-sum", "sequence-mean", "sequence-max"))
def test_rejection(seed, estimator, over):
    case = random_case(seed)
    threshold = (0.05, 0.3, 2.0)[seed % 3]
    table = {"estimator": estimator, "over": over, "threshold": threshold}
    option = f"{over.replace('sequence', 'seq').replace('-', '_')}_{estimator}"
    spelled = repr(threshold)
    if option == "seq_max_k1":
        # verl has none: the largest |k1| is over t exactly where the largest k2 is over t^2 / 2.
        option, spelled = "seq_max_k2", repr(threshold**2 / 2)
    elif estimator == "k1":
        spelled = band(math.exp(-threshold), math.exp(threshold))
    want_BL, _ = compute_rollout_rejection_mask(gap(case), case.mask(), option, spelled)
    close(weights(case, "reject", table), kept(case, want_BL))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_truncation_and_rejection_inside_the_loss(seed, mode):
    """Composed, in the gradient; rejected tokens counted in verl's averages as in ours."""
    case = random_case(seed)
    weight_BL, kept_BL, table = composed(case, "seq_mean_k1", band(0.8, 1.25))
    correction = load_correction("tis+mis", table)
    want, want_grad, _ = theirs(case, "vanilla", actor(mode, 0.2, 0.28, 3.0), weight_BL * kept_BL)
    settings = {"clip_high": 0.28, "averaging": mode}
    loss, grad, _ = ours(case, "grpo", settings, correction)
    close(loss, want)
    close(grad, want_grad)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_rejection_as_verl_counts_it(seed, mode):
    """verl drops rejected tokens from its averages, which scales up the rest by a known factor."""
    case = random_case(seed, extreme=False)
    weight_BL, kept_BL, table = composed(case, "seq_mean_k1", band(0.8, 1.25))
    if not kept_BL.any():
        return
    want, want_grad, _ = theirs(case, "vanilla", actor(mode, 0.2, 0.28, 3.0), weight_BL, kept_BL)
    before, after = case.mask(), kept_BL
    if mode != "token-mean":
        before, after = before.amax(dim=1), after.amax(dim=1)
    share = after.sum() / before.sum()
    settings = {"clip_high": 0.28, "averaging": mode}
    loss, grad, _ = ours(case, "grpo", settings, load_correction("tis+mis", table))
    close(loss, want * share)
    close(grad, want_grad * share)


def composed(case: Case, option: str, threshold: str) -> tuple[Tensor, Tensor, dict]:
    """verl's weights and mask, and our table, for truncation beside a geometric mask."""
    weights_proto, kept_BL, _ = compute_rollout_correction_and_rejection_mask(
        case.pad(case.old_T),
        case.pad(case.rollout_T),
        case.mask(),
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs=option,
        rollout_rs_threshold=threshold,
    )
    mask = {"level": "geometric", "lower": 0.8, "upper": 1.25, "reweight": False}
    table = {"tis": {"cap": 2.0}, "mis": mask}
    return weights_proto.batch["rollout_is_weights"], kept_BL, table
