"""Shared pieces of the losses against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from samebit.rl import losses
from samebit.rl.api import Normaliser
from samebit.rl.ppo import value_loss
from samebit.rl.registry import load_algorithm, load_correction
from tests.rl.cases import fresh, normaliser_of, random_batch


def flat(*values: float) -> torch.Tensor:
    """FP64 leaf."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_clipped_surrogate_by_hand():
    """Both signs, inside, above and below the range, clip 0.2 / 0.28, dual clip 3."""
    ratio_T = flat(1.1, 1.5, 0.5, 1.1, 1.5, 0.5, 5.0)
    advantage_T = torch.tensor([1.0, 1, 1, -1, -1, -1, -1], dtype=torch.float64)
    result = losses.clipped_surrogate(ratio_T, advantage_T, 0.8, 1.28, 3.0)
    assert result.loss_T.tolist() == pytest.approx([-1.1, -1.28, -0.5, 1.1, 1.5, 0.8, 3.0])
    result.loss_T.sum().backward()
    assert ratio_T.grad.tolist() == [-1.0, 0.0, -1.0, 1.0, 1.0, 0.0, 0.0]
    assert result.clipped_T.tolist() == [False, True, False, False, False, True, False]
    assert result.dual_clipped_T.tolist() == [False] * 6 + [True]


def test_overflowing_ratios_by_hand():
    """A06: log-ratio +100 with A 0, +1, -1 gives 0, -1.2 and 3, all without gradient."""
    logp_T = torch.tensor([100.0, 100.0, 100.0, -800.0, -800.0], requires_grad=True)
    ratio_T = torch.exp(losses.log_ratio(logp_T, torch.zeros(5)))
    advantage_T = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0])
    result = losses.clipped_surrogate(ratio_T, advantage_T, 0.8, 1.2, 3.0)
    result.loss_T.sum().backward()
    assert result.loss_T.tolist() == pytest.approx([0.0, -1.2, 3.0, 0.0, 0.8], abs=1e-6)
    assert logp_T.grad.abs().max() == 0.0
    bare = losses.clipped_surrogate(ratio_T.detach(), advantage_T, 0.8, 1.2, None)
    assert float(bare.loss_T[2]) == pytest.approx(math.exp(20.0), rel=1e-6)
    broken = losses.clipped_surrogate(torch.tensor([torch.nan]), torch.ones(1), 0.8, 1.2, 3.0)
    assert bool(torch.isnan(broken.loss_T).all())


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        ("token-mean", 0.2),
        ("seq-mean-token-mean", 0.5),
        ("seq-mean-token-sum", 1.0),
        ("seq-mean-token-sum-norm", 1.0 / 16),
    ],
)
def test_averaging_by_hand(averaging, expected):
    """A11: 2 tokens at loss 1 and 8 at loss 0."""
    batch = random_batch([2, 8], masked=0.0)
    weight_T = losses.averaging_weights(batch, normaliser_of(batch), averaging)
    assert float(weight_T[:2].sum()) == pytest.approx(expected)


def test_a_fully_masked_sequence_is_no_sequence():
    batch = random_batch([2, 3], masked=0.0)
    batch = fresh(batch, mask_T=batch.sequence_T == 0)
    assert normaliser_of(batch) == Normaliser(num_tokens=2, num_sequences=1, max_length=16)
    weight_T = losses.averaging_weights(batch, normaliser_of(batch), "seq-mean-token-mean")
    assert weight_T.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


KL_P, KL_Q = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.085123, (0.0, 0.0, 0.0)),
        ("k2", 0.080088, (0.1759, -0.0981, -0.0778)),
        ("k3", 0.085123, (0.2, -0.1, -0.1)),
        ("k1+", 0.085123, (0.1759, -0.0981, -0.0778)),
        ("k3+", 0.085123, (0.1759, -0.0981, -0.0778)),
    ],
)
def test_kl_estimators_by_enumeration(estimator, value, gradient):
    """A15: expectation over three tokens of value and gradient; towards the reference."""
    logits_V = torch.log(torch.tensor(KL_P, dtype=torch.float64)).requires_grad_()
    reference_V = torch.log(torch.tensor(KL_Q, dtype=torch.float64)).requires_grad_()
    logp_V = torch.log_softmax(logits_V, 0)
    estimate_V = losses.kl_penalty(logp_V, reference_V, estimator)
    expected = (logp_V.exp().detach() * estimate_V).sum()
    expected.backward()
    assert float(expected.detach()) == pytest.approx(value, abs=1e-6)
    assert logits_V.grad.tolist() == pytest.approx(gradient, abs=1e-4)
    assert reference_V.grad is None


def test_entropy_by_hand():
    """A07: 0 * -inf, padded vocabulary columns, the FP16 range; never below 0, finite gradient."""
    inf = float("inf")
    assert float(losses.entropy(torch.tensor([[0.0, -inf]]))[0]) == 0.0
    logits = torch.tensor([[0.0, 0.0, -inf], [0.0, 1.0, -inf]], requires_grad=True)
    result_T = losses.entropy(logits)
    assert float(result_T[0].detach()) == pytest.approx(math.log(2.0), abs=1e-6)
    result_T.sum().backward()
    assert bool(torch.isfinite(logits.grad).all()) and float(logits.grad[1].abs().max()) > 0
    half = torch.tensor([[65504.0, -65504.0]], dtype=torch.float16)
    assert float(losses.entropy(half)[0]) == 0.0
    random = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 30
    assert bool((losses.entropy(random) >= 0).all())


def test_entropy_metric_ignores_filler():
    """A07: (0.5, 0.5) and two masked slots at -1 report 0.5; masked out: nothing."""
    batch = random_batch([4], masked=0.0)
    mask_T = torch.tensor([True, True, False, False])
    batch = fresh(batch, mask_T=mask_T, entropy_T=torch.tensor([0.5, 0.5, -1.0, -1.0]))
    algorithm = load_algorithm("grpo")
    _, metrics = algorithm.loss(batch, normaliser_of(batch), load_correction("none"))
    assert metrics.compute()["rl/entropy"] == 0.5
    empty = fresh(batch, mask_T=torch.zeros_like(mask_T))
    _, metrics = algorithm.loss(empty, normaliser_of(empty), load_correction("none"))
    assert "rl/entropy" not in metrics.compute()


def test_sequence_sums_take_tokens_in_any_order():
    values_T = flat(1, 2, 3, 4)
    sums_B = losses.sequence_sums(values_T, torch.tensor([2, 0, 2, 0]), 4)
    assert sums_B.tolist() == [6.0, 0.0, 4.0, 0.0]
    (sums_B * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    assert values_T.grad.tolist() == [100.0, 1.0, 100.0, 1.0]
    maxima_B = losses.sequence_maxima(values_T, torch.tensor([2, 0, 2, 0]), 4)
    assert maxima_B.tolist() == [4.0, 0.0, 3.0, 0.0]


def test_cispo_gradient_is_the_clipped_weight_times_advantage():
    """R = (0.5, 1, 8), weight capped at 5: gradient -(0.5, 1, 5) * A / 3."""
    batch = random_batch([3], masked=0.0)
    batch = fresh(
        batch,
        old_logp_T=torch.full((3,), -3.0),
        logp_T=(torch.tensor([0.5, 1.0, 8.0]).log() - 3.0).requires_grad_(),
        advantage_T=torch.tensor([1.0, -2.0, 3.0]),
    )
    algorithm = load_algorithm("cispo")
    loss, metrics = algorithm.loss(batch, normaliser_of(batch), load_correction("none"))
    loss.backward()
    expected = [-0.5 / 3, 2.0 / 3, -15.0 / 3]
    assert batch.logp_T.grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert metrics.compute()["rl/clip_share_positive"] == 0.5


def test_gspo_ratio_is_the_geometric_mean():
    """Log-ratios 0.2 and 0.4: s = exp(0.3); both tokens get s * A / 2 of gradient."""
    batch = random_batch([2], masked=0.0)
    old_T = torch.full((2,), -2.0)
    batch = fresh(
        batch,
        old_logp_T=old_T,
        logp_T=(old_T + torch.tensor([0.2, 0.4])).requires_grad_(),
        advantage_T=torch.tensor([-1.0, -1.0]),
    )
    loss, _ = load_algorithm("gspo").loss(batch, normaliser_of(batch), load_correction("none"))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.exp(0.3), rel=1e-6)
    assert batch.logp_T.grad.tolist() == pytest.approx([math.exp(0.3) / 2] * 2, rel=1e-6)


def test_ppo_value_loss_by_hand():
    """V = 2, old 1, clip 0.5, target 1: max(1, 0.25) / 2; target 3: max(1, 2.25) / 2."""
    value_T = flat(2.0, 2.0, 1.2)
    result = value_loss(
        value_T, torch.ones(3).double(), torch.tensor([1.0, 3.0, 2.0]).double(), 0.5
    )
    assert result.loss_T.tolist() == pytest.approx([0.5, 1.125, 0.32])
    result.loss_T.sum().backward()
    assert value_T.grad.tolist() == pytest.approx([1.0, 0.0, -0.8])
    assert result.clipped_T.tolist() == [False, True, False]


def test_a_value_inside_its_range_is_not_counted_as_clipped():
    # In FP32 0.3 + (0.001 - 0.3) is not 0.001, and may lie further from the target.
    grid_T = torch.linspace(1e-4, 0.01, 1000)
    old_T, zero_T = torch.full((1000,), 0.3), torch.zeros(1000)
    assert (old_T + (grid_T - old_T) > grid_T).any()
    assert not value_loss(grid_T, old_T, zero_T, clip=0.5).clipped_T.any()
