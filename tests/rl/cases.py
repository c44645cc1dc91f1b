"""Random batches for the tests of rl: packed, masked, with a gap between all policies."""

from __future__ import annotations

from dataclasses import replace

import torch

from samebit.rl.advantage import outcomes
from samebit.rl.api import Normaliser, Outcomes, TokenBatch

MAX_LENGTH = 16


def random_batch(
    lengths: list[int],
    seed: int = 0,
    gap: float = 0.5,
    rollout_gap: float = 0.7,
    dtype: torch.dtype = torch.float32,
    masked: float = 0.2,
) -> TokenBatch:
    """A batch whose ratios spread over `gap` nats and whose rho spread over `rollout_gap`."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def noise(size: float) -> torch.Tensor:
        return (size * torch.randn(total, generator=generator)).to(dtype)

    old_T = -torch.rand(total, generator=generator).to(dtype) * 3 - 0.1
    sequence_T = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
    )
    values_T = noise(1.0)
    return TokenBatch(
        logp_T=(old_T + noise(gap)).requires_grad_(),
        old_logp_T=old_T,
        rollout_logp_T=old_T - noise(rollout_gap),
        advantage_T=noise(1.0),
        mask_T=torch.rand(total, generator=generator) >= masked,
        sequence_T=sequence_T,
        num_sequences=len(lengths),
        ref_logp_T=old_T + noise(0.3),
        shadow_logp_T=old_T + noise(gap),
        shadow_old_logp_T=old_T.clone(),
        entropy_T=noise(1.0).abs().requires_grad_(),
        value_T=values_T.clone().requires_grad_(),
        old_value_T=values_T + noise(0.6),
        return_T=noise(1.0),
    )


def normaliser_of(batch: TokenBatch) -> Normaliser:
    """Counts of a batch that is the whole step."""
    return Normaliser.of(batch.mask_T, batch.sequence_T, MAX_LENGTH)


def fresh(batch: TokenBatch, **changes: torch.Tensor) -> TokenBatch:
    """The same values as new leaves, so that gradients start from nothing."""
    leaves = {
        name: getattr(batch, name).detach().clone().requires_grad_()
        for name in ("logp_T", "entropy_T", "value_T")
    }
    return replace(batch, **(leaves | changes))


def gradients(batch: TokenBatch) -> list[torch.Tensor]:
    """Gradients of the leaves, zeros where none arrived."""
    leaves = (batch.logp_T, batch.entropy_T, batch.value_T)
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves if x is not None]


def take(batch: TokenBatch, sequences: list[int]) -> TokenBatch:
    """The micro-batch with these sequences; leaves stay linked to the whole batch."""
    renumbered = torch.full((batch.num_sequences,), -1)
    renumbered[sequences] = torch.arange(len(sequences))
    keep_T = renumbered[batch.sequence_T] >= 0
    parts = {name: value[keep_T] for name, value in batch.tensors_T().items()}
    parts["sequence_T"] = renumbered[batch.sequence_T][keep_T]
    return replace(batch, num_sequences=len(sequences), **parts)


def known(rewards: list, groups: list[int], lengths: list[int] | None = None) -> Outcomes:
    """Outcomes with values and reference gaps filled in from a fixed seed."""
    lengths = lengths or [2 + i % 3 for i in range(len(rewards))]
    generator = torch.Generator().manual_seed(7)
    values_T = torch.randn(sum(lengths), generator=generator)
    gaps_T = 0.1 * torch.randn(sum(lengths), generator=generator)
    return outcomes(rewards, groups, lengths, MAX_LENGTH, values_T, gaps_T)
