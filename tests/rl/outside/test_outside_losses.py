"""Losses, averaging modes, KL estimators and value loss against verl, values and gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed; `make test-outside` runs these tests")

from importlib.metadata import version

from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import ActorConfig

from samebit.rl import losses
from samebit.rl.api import Normaliser, TokenBatch
from samebit.rl.corrections.none import Correction
from samebit.rl.ppo import value_loss
from samebit.rl.registry import load_algorithm
from tests.rl.outside.cases import MAX_LENGTH, MODES, SEEDS, Case, close, random_case

pytestmark = pytest.mark.outside

UNBOUNDED = 1e30
"""A dual clip that never acts: verl has no switch to turn it off."""
PRECISIONS = (torch.float32, torch.float64)
CLIPS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.5))


def actor(mode: str, low: float, high: float, dual: float = UNBOUNDED, **counts: int):
    """verl's settings."""
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        loss_agg_mode=mode,
        global_batch_info={"loss_scale_factor": MAX_LENGTH, **counts},
    )


def theirs(case: Case, kind: str, config, weights_BL=None, mask_BL=None):
    """(loss, gradient on the packed log-probs, metrics) of verl."""
    logp_T = case.leaf(case.logp_T)
    loss, metrics = core_algos.get_policy_loss_fn(kind)(
        old_log_prob=case.pad(case.old_T),
        log_prob=case.pad(logp_T),
        advantages=case.pad(case.advantage_T),
        response_mask=case.mask() if mask_BL is None else mask_BL,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=weights_BL,
    )
    loss.backward()
    return loss.detach(), logp_T.grad, metrics


def ours(case: Case, name: str, table: dict, correction=None):
    """(loss, gradient on the packed log-probs, metrics) of samebit."""
    logp_T = case.leaf(case.logp_T)
    loss, metrics = load_algorithm(name, table).loss(
        case.batch(logp_T), case.normaliser(), correction or Correction()
    )
    loss.backward()
    return loss.detach(), logp_T.grad, metrics.compute()


def test_the_pinned_version_is_installed():
    assert version("verl") == "0.9.1"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("dual", (None, 3.0, 1.5))
def test_clipped_surrogate(dtype, mode, seed, dual):
    # Without a dual clip one token may weigh e^20: only FP64 then sums the others to 1e-6.
    case = random_case(seed, dtype, extreme=dual is not None or dtype == torch.float64)
    low, high = CLIPS[seed % len(CLIPS)]
    want, want_grad, _ = theirs(case, "vanilla", actor(mode, low, high, dual or UNBOUNDED))
    table = {"clip_low": low, "clip_high": high, "dual_clip": dual, "averaging": mode}
    loss, grad, _ = ours(case, "grpo", table)
    close(loss, want)
    close(grad, want_grad)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_clip_metrics(seed, dtype):
    case = random_case(seed, dtype, extreme=False)
    _, _, want = theirs(case, "vanilla", actor("token-mean", 0.2, 0.28, 1.2))
    _, _, got = ours(case, "grpo", {"clip_high": 0.28, "dual_clip": 1.2})
    kept_T = case.advantage_T[case.mask_T]
    positive, negative = (float((s * kept_T > 0).double().mean()) for s in (1, -1))
    clipped = got.get("rl/clip_share_positive", 0.0) * positive
    clipped += got.get("rl/clip_share_negative", 0.0) * negative
    dual = got.get("rl/dual_clip_share", 0.0) * negative
    assert clipped == pytest.approx(want["actor/pg_clipfrac"], abs=1e-6)
    assert dual == pytest.approx(want["actor/pg_clipfrac_lower"], abs=1e-6)
    assert got["rl/update_k1"] == pytest.approx(want["actor/ppo_kl"], abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_gspo(seed, mode, dtype):
    # verl clamps the log of the sequence ratio at 10, we at 20: stay below 10 here.
    case = random_case(seed, dtype, extreme=dtype == torch.float64, limit=9.0)
    low, high = ((3e-4, 4e-4), (0.2, 0.28))[seed % 2]
    want, want_grad, _ = theirs(case, "gspo", actor(mode, low, high))
    table = {"clip_low": low, "clip_high": high, "averaging": mode}
    loss, grad, _ = ours(case, "gspo", table)
    close(loss, want)
    close(grad, sequence_means(case, want_grad))


def sequence_means(case: Case, values_T: torch.Tensor) -> torch.Tensor:
    """verl's GSPO-token gradient made that of GSPO: each kept token gets its sequence's mean.

    The two are the same where advantage, weight and averaging are constant over the sequence.
    """
    result_T = torch.zeros_like(values_T)
    for sequence in range(len(case.lengths)):
        kept_T = case.mask_T & (case.sequence_T == sequence)
        if kept_T.any():
            result_T[kept_T] = values_T[kept_T].mean()
    return result_T


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_with_one_advantage_a_sequence_needs_no_conversion(seed):
    case = random_case(seed, extreme=False)
    per_sequence_B = torch.randn(
        len(case.lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    case.advantage_T.copy_(per_sequence_B[case.sequence_T])
    want, want_grad, _ = theirs(case, "gspo", actor("seq-mean-token-mean", 0.1, 0.2))
    loss, grad, _ = ours(case, "gspo", {"clip_low": 0.1, "clip_high": 0.2})
    close(loss, want)
    close(grad, want_grad)


def test_gspo_past_ten_nats_keeps_more_of_the_ratio_than_verl():
    # A < 0 and mean log-ratio 12: verl stops at e^10, we at e^20; neither side is clipped.
    case = random_case(1)
    case.logp_T.copy_(case.old_T + 12.0)
    case.advantage_T.fill_(-1.0)
    want, _, _ = theirs(case, "gspo", actor("token-mean", 0.2, 0.2))
    loss, _, _ = ours(case, "gspo", {"averaging": "token-mean"})
    close(want, torch.tensor(10.0).double().exp())
    close(loss, torch.tensor(12.0).double().exp())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_cispo(seed, mode, dtype):
    # The loss holds log p itself, 100 nats at the extremes: FP32 sums it to 1e-6 only without.
    case = random_case(seed, dtype, extreme=dtype == torch.float64)
    low, high = ((1.0, 4.0), (0.2, 0.28))[seed % 2]
    want, want_grad, _ = theirs(case, "cispo", actor(mode, low, high))
    loss, grad, _ = ours(case, "cispo", {"clip_low": low, "clip_high": high, "averaging": mode})
    close(loss, want)
    close(grad, want_grad)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_with_global_counts(seed, mode):
    """Both sides divide by the counts of the whole step, so two parts add up on both."""
    parts = [random_case(seed), random_case(seed + 1000)]
    counts = [part.normaliser() for part in parts]
    whole: Normaliser = counts[0] + counts[1]
    config = actor(
        mode,
        0.2,
        0.2,
        3.0,
        batch_num_tokens=whole.num_tokens,
        global_batch_size=whole.num_sequences,
    )
    algorithm = load_algorithm("grpo", {"averaging": mode})
    for part in parts:
        want, want_grad, _ = theirs(part, "vanilla", config)
        logp_T = part.leaf(part.logp_T)
        loss, _ = algorithm.loss(part.batch(logp_T), whole, Correction())
        loss.backward()
        close(loss.detach(), want)
        close(logp_T.grad, want_grad)


@pytest.mark.parametrize("mode", MODES)
def test_everything_masked_is_zero_here_and_undefined_in_verl(mode):
    case = random_case(0)
    case.mask_T.fill_(False)
    loss, grad, _ = ours(case, "grpo", {"averaging": mode})
    assert loss == 0 and not grad.any()
    want, _, _ = theirs(case, "vanilla", actor(mode, 0.2, 0.2, 3.0))
    assert want.isnan()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ("k1", "k2", "k3", "k1+", "k3+"))
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_kl_estimators(seed, estimator, dtype):
    case = random_case(seed, dtype)
    logp_T, other_T = case.leaf(case.logp_T), case.leaf(case.logp_T)
    got_T = losses.kl_penalty(logp_T, case.ref_T, estimator)
    # verl clamps the gap in k3 alone, and k3 at 10; we clamp every gap at 20 nats and no value.
    gap_T = torch.clamp(other_T - case.ref_T, -20.0, 20.0)
    want_T = core_algos.kl_penalty(gap_T, torch.zeros_like(gap_T), estimator)
    bounded_T = torch.zeros_like(case.mask_T)
    if estimator.startswith("k3"):
        bounded_T = got_T.detach() > 10
        assert (want_T.detach()[bounded_T] == 10).all()
    close(got_T.detach()[~bounded_T], want_T.detach()[~bounded_T])
    got_T.sum().backward()
    want_T.sum().backward()
    same_T = ~bounded_T if estimator == "k3" else torch.ones_like(bounded_T)
    close(logp_T.grad[same_T], other_T.grad[same_T])
    assert not other_T.grad[~same_T].any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_kl_loss_averaged(seed, mode):
    case = random_case(seed, extreme=False)
    logp_T, other_T = case.leaf(case.logp_T), case.leaf(case.logp_T)
    algorithm = load_algorithm("grpo", {"averaging": mode, "kl_coefficient": 0.3})
    loss, _ = algorithm.loss(case.batch(logp_T), case.normaliser(), Correction())
    plain, _ = load_algorithm("grpo", {"averaging": mode}).loss(
        case.batch(logp_T), case.normaliser(), Correction()
    )
    penalty_BL = core_algos.kl_penalty(case.pad(other_T), case.pad(case.ref_T), "low_var_kl")
    want = core_algos.agg_loss(penalty_BL, case.mask(), mode, loss_scale_factor=MAX_LENGTH)
    (loss - plain).backward()
    (0.3 * want).backward()
    close((loss - plain).detach(), 0.3 * want.detach())
    close(logp_T.grad, other_T.grad)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_value_loss(seed, mode, dtype):
    case = random_case(seed, dtype, extreme=False)
    clip = (0.0, 0.2, 0.5)[seed % 3]
    value_T, other_T = case.leaf(case.value_T), case.leaf(case.value_T)
    want, want_share = core_algos.compute_value_loss(
        case.pad(other_T),
        case.pad(case.return_T),
        case.pad(case.old_value_T),
        case.mask(),
        clip,
        mode,
        loss_scale_factor=MAX_LENGTH,
    )
    want.backward()
    batch = case.batch(case.logp_T, value_T).filled()
    weight_T = losses.averaging_weights(batch, case.normaliser(), mode)
    got = value_loss(batch.value_T, batch.old_value_T, batch.return_T, clip)
    loss = (got.loss_T * weight_T).sum()
    loss.backward()
    close(loss.detach(), want.detach())
    close(value_T.grad, other_T.grad)
    close(got.clipped_T[case.mask_T].double().mean(), want_share)


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy(seed):
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 4 * torch.randn(7, 11, generator=generator, dtype=torch.float64)
    mine_TV, their_TV = logits_TV.clone().requires_grad_(), logits_TV.clone().requires_grad_()
    got_T, want_T = losses.entropy(mine_TV), entropy_from_logits(their_TV)
    got_T.sum().backward()
    want_T.sum().backward()
    close(got_T.detach(), want_T.detach())
    close(mine_TV.grad, their_TV.grad)


def test_batches_hold_what_they_promise():
    """Lengths 0 and 1, holes, whole sequences masked and ratios past the clamp do occur."""
    batches: list[tuple[Case, TokenBatch]] = []
    for seed in SEEDS:
        case = random_case(seed)
        batches.append((case, case.batch(case.logp_T)))
    assert all(0 in case.lengths and 1 in case.lengths for case, _ in batches)
    assert any(not case.mask_T.all() for case, _ in batches)
    assert all(batch.logp_T[~batch.mask_T].isnan().all() for _, batch in batches)
    kept = [case.normaliser().num_sequences for case, _ in batches]
    assert any(
        n < sum(length > 0 for length in c.lengths) for n, (c, _) in zip(kept, batches, strict=True)
    )
    gaps = torch.cat([(c.logp_T - c.old_T)[c.mask_T] for c, _ in batches])
    assert (gaps > 20).any() and (gaps < -20).any()
