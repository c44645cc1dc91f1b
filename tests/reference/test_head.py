"""The head's log-probs by hand: FP32 logits, one transform, ids the tokenizer lacks, bounded memory."""

from __future__ import annotations

import math

import pytest
import torch

from samebit.operand import QuantizedWeight, allocate_weight
from samebit.reference import head as module
from samebit.reference import refresh_weight
from samebit.reference.head import log_prob, log_prob_backward, sample
from samebit.reference.sampling import Transform
from samebit.spec import BF16

PLAIN = Transform()


def head_of(rows: list[list[float]]) -> QuantizedWeight:
    """A head weight [V, K] of BF16-exact values."""
    master = torch.tensor(rows)
    assert torch.equal(master.bfloat16().float(), master)
    weight = allocate_weight((master.shape[0],), master.shape[1], BF16, torch.device("cpu"))
    refresh_weight(weight, master)
    return weight


def log_probs(
    logits: list[float], transform: Transform = PLAIN, vocabulary: int = 0
) -> list[float]:
    """Log-prob of every id, from a hidden row of ones."""
    weight = head_of([[x] for x in logits])
    hidden = torch.ones(len(logits), 1, dtype=torch.bfloat16)
    targets = torch.arange(len(logits))
    return log_prob(hidden, weight, targets, vocabulary or len(logits), transform)[0].tolist()


def test_logits_are_not_rounded_to_bf16():
    """20 and 20 - 0.03: neighbours that BF16, with steps of 0.125 there, makes one number."""
    gap = float(torch.tensor(0.03).bfloat16())
    weight = head_of([[20.0, 0.0], [20.0, -gap]])
    hidden = torch.ones(2, 2, dtype=torch.bfloat16)
    found, _, _ = log_prob(hidden, weight, torch.tensor([0, 1]), 2, PLAIN)
    want = [-math.log1p(math.exp(-gap)), -gap - math.log1p(math.exp(-gap))]
    assert found.tolist() == pytest.approx(want, abs=3e-6)
    assert abs(found[0] - found[1]) > 0.029


def test_temperature_by_hand_and_greedy_divides_by_nothing():
    logits = [2.0, 1.0, 0.0]
    assert log_probs(logits) == pytest.approx([-0.4076, -1.4076, -2.4076], abs=1e-4)
    at = Transform(temperature=0.6)
    assert log_probs(logits, at) == pytest.approx([-0.2026, -1.8692, -3.5359], abs=1e-4)
    assert log_probs(logits, Transform(temperature=0.0)) == log_probs(logits)


def test_a_cut_distribution_is_renormalised_and_what_it_cut_is_impossible():
    logits = [float(torch.tensor(math.log(p)).bfloat16()) for p in (0.5, 0.3, 0.15, 0.05)]
    found = log_probs(logits, Transform(top_p=0.75))
    kept = [math.exp(x) for x in logits[:2]]
    want = [math.log(p / sum(kept)) for p in kept]
    assert found[:2] == pytest.approx(want, abs=1e-6) and want[0] == pytest.approx(-0.47, abs=5e-3)
    assert found[2:] == [-math.inf, -math.inf]
    assert log_probs(logits, Transform(top_k=2)) == found


def test_ids_the_tokenizer_lacks_have_no_mass_however_large_their_logit():
    want = log_probs([2.0, 1.0])
    found = log_probs([2.0, 1.0, 50.0], vocabulary=2)
    assert found[:2] == want and found[2] == -math.inf
    weight = head_of([[2.0], [1.0], [50.0]])
    rows = torch.ones(200, 1, dtype=torch.bfloat16)
    ids, _ = sample(rows, weight, 2, PLAIN, [(0, i, 0) for i in range(200)])
    assert set(ids.tolist()) == {0, 1}


def test_entropy_is_never_negative_and_masked_columns_add_nothing():
    weight = head_of([[120.0], [-120.0], [0.0]])
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    _, entropy, _ = log_prob(hidden, weight, torch.tensor([0]), 2, PLAIN)
    assert entropy.tolist() == [0.0]
    _, entropy, _ = log_prob(hidden * 0, weight, torch.tensor([0]), 2, PLAIN)
    assert entropy.tolist() == pytest.approx([math.log(2)], abs=1e-6)


def test_no_more_than_a_chunk_of_logits_is_alive_forward_or_backward(
    monkeypatch: pytest.MonkeyPatch,
):
    rows: list[int] = []
    real = module.head_logits

    def counted(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return real(hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "head_logits", counted)
    tokens = 5 * module.CHUNK + 3
    weight = head_of([[0.5], [-1.0], [2.0]])
    hidden = torch.linspace(-2, 2, tokens)[:, None].bfloat16()
    targets = torch.arange(tokens) % 3
    _, entropy, lse = log_prob(hidden, weight, targets, 3, PLAIN)
    assert len(rows) == 6 and max(rows) == module.CHUNK
    rows.clear()
    ones, zeros = torch.ones(tokens), torch.zeros(tokens)
    whole = log_prob_backward(ones, zeros, hidden, weight, targets, 3, PLAIN, entropy, lse)
    assert len(rows) == 6 and max(rows) == module.CHUNK
    monkeypatch.setattr(module, "CHUNK", tokens)
    at_once = log_prob_backward(ones, zeros, hidden, weight, targets, 3, PLAIN, entropy, lse)
    assert torch.equal(whole[0], at_once[0])
    without = log_prob_backward(ones, None, hidden, weight, targets, 3, PLAIN, entropy, lse)
    assert torch.equal(without[0], at_once[0]) and torch.equal(without[1], at_once[1])
    torch.testing.assert_close(whole[1], at_once[1], rtol=1e-5, atol=1e-5)
