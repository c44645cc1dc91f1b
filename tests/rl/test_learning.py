"""Every algorithm, from rewards to updates, raises the probability of the rewarded token."""

from __future__ import annotations

import pytest
import torch

from samebit.rl.advantage import outcomes
from samebit.rl.api import Normaliser, TokenBatch
from samebit.rl.registry import list_algorithms, load_algorithm, load_correction

SAMPLES, VOCABULARY, RIGHT = 32, 4, 2


@pytest.mark.parametrize("name", list_algorithms())
def test_a_bandit_is_learnt_with_several_updates_per_rollout(name):
    """One-token completions, two updates a rollout, the sampler slightly off, TIS on."""
    generator = torch.Generator().manual_seed(0)
    algorithm, correction = load_algorithm(name), load_correction("tis")
    logits_V = torch.zeros(VOCABULARY, requires_grad=True)
    value = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([logits_V, value], lr=0.1)
    for _ in range(40):
        with torch.no_grad():
            noisy_V = torch.log_softmax(logits_V + 0.05 * torch.randn(4, generator=generator), 0)
            token_B = torch.multinomial(noisy_V.exp(), SAMPLES, True, generator=generator)
            old_T, old_value_T = torch.log_softmax(logits_V, 0)[token_B], value.expand(SAMPLES)
        rewards = (token_B == RIGHT).tolist()
        known = outcomes(rewards, [0] * SAMPLES, [1] * SAMPLES, 2, old_value_T.detach())
        result = algorithm.advantages(known)
        for _ in range(2):
            batch = TokenBatch(
                logp_T=torch.log_softmax(logits_V, 0)[token_B],
                old_logp_T=old_T,
                rollout_logp_T=noisy_V[token_B],
                advantage_T=result.advantage_T,
                mask_T=torch.ones(SAMPLES, dtype=torch.bool),
                sequence_T=torch.arange(SAMPLES),
                num_sequences=SAMPLES,
                value_T=value.expand(SAMPLES),
                old_value_T=old_value_T.detach(),
                return_T=result.return_T,
            )
            normaliser = Normaliser.of(batch.mask_T, batch.sequence_T, 2)
            loss, _ = algorithm.loss(batch, normaliser, correction)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert float(torch.softmax(logits_V, 0)[RIGHT].detach()) > 0.8
