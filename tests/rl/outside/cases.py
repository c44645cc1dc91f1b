"""Random masked batches in both layouts: packed for us, padded for the outside implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.rl.api import Normaliser, TokenBatch

MAX_LENGTH = 16
SEEDS = range(60)
PADDING = 0.75
"""What the outside implementation gets in padded slots; ours gets NaN in masked ones."""
EXTREMES = torch.tensor([-100.0, -30.0, -21.0, -12.0, 12.0, 21.0, 30.0, 100.0])
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Case:
    """One batch; `logp_T` and `value_T` are leaves that either side differentiates."""

    lengths: list[int]
    mask_T: Tensor
    logp_T: Tensor
    old_T: Tensor
    rollout_T: Tensor
    ref_T: Tensor
    advantage_T: Tensor
    value_T: Tensor
    old_value_T: Tensor
    return_T: Tensor

    @property
    def sequence_T(self) -> Tensor:
        """Which sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def pad(self, values_T: Tensor) -> Tensor:
        """[T] -> [B, longest], differentiable."""
        real_BL = self.real()
        rows_BL = torch.full(real_BL.shape, PADDING, dtype=values_T.dtype)
        return rows_BL.masked_scatter(real_BL, values_T)

    def unpad(self, rows_BL: Tensor) -> Tensor:
        """[B, longest] -> [T]."""
        return rows_BL[self.real()]

    def real(self) -> Tensor:
        """Slots that hold a token, masked or not."""
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]

    def mask(self) -> Tensor:
        """The response mask in the outside layout, as floats."""
        mask_BL = torch.zeros(self.real().shape, dtype=self.logp_T.dtype)
        mask_BL[self.real()] = self.mask_T.to(self.logp_T.dtype)
        return mask_BL

    def leaf(self, values_T: Tensor) -> Tensor:
        """A fresh leaf with these values."""
        return values_T.clone().requires_grad_()

    def batch(self, logp_T: Tensor, value_T: Tensor | None = None) -> TokenBatch:
        """Our layout, with NaN wherever the mask is off."""

        def poisoned(values_T: Tensor) -> Tensor:
            return torch.where(self.mask_T, values_T, torch.nan)

        return TokenBatch(
            logp_T=poisoned(logp_T),
            old_logp_T=poisoned(self.old_T),
            rollout_logp_T=poisoned(self.rollout_T),
            advantage_T=poisoned(self.advantage_T),
            mask_T=self.mask_T,
            sequence_T=self.sequence_T,
            num_sequences=len(self.lengths),
            ref_logp_T=poisoned(self.ref_T),
            value_T=poisoned(self.value_T if value_T is None else value_T),
            old_value_T=poisoned(self.old_value_T),
            return_T=poisoned(self.return_T),
        )

    def normaliser(self) -> Normaliser:
        """Counts of this batch as a whole step."""
        return Normaliser.of(self.mask_T, self.sequence_T, MAX_LENGTH)


def random_case(
    seed: int, dtype: torch.dtype = torch.float64, extreme: bool = True, limit: float = 100.0
) -> Case:
    """Lengths 0 to 12 with one of 0 and one of 1, a mask with holes, log-ratios up to +-limit.

    At least two tokens in two sequences stay unmasked: the outside functions divide by the count.
    """
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(2, 6, (), generator=generator))
    lengths = torch.randint(2, 13, (count,), generator=generator).tolist()
    lengths.insert(seed % count, 0)
    lengths.insert(seed % 3, 1)
    total = sum(lengths)
    mask_T = torch.rand(total, generator=generator) >= (0.0, 0.3, 0.7)[seed % 3]
    starts = [sum(lengths[:i]) for i, n in enumerate(lengths) if n > 1]
    mask_T[starts] = True
    if seed % 4 == 0 and len(starts) > 2:
        sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask_T[sequence_T == sequence_T[starts[0]]] = False

    def noise(size: float) -> Tensor:
        return (size * torch.randn(total, generator=generator, dtype=torch.float64)).to(dtype)

    def gaps(size: float) -> Tensor:
        gap_T = noise(size)
        if not extreme:
            return gap_T
        pick_T = torch.randint(0, len(EXTREMES), (total,), generator=generator)
        hit_T = torch.rand(total, generator=generator) < 0.15
        return torch.where(hit_T, EXTREMES[pick_T].to(dtype).clamp(-limit, limit), gap_T)

    old_T = -noise(1.0).abs() - 0.1
    value_T = noise(1.0)
    return Case(
        lengths=lengths,
        mask_T=mask_T,
        logp_T=old_T + gaps(0.4),
        old_T=old_T,
        rollout_T=old_T - gaps(0.5),
        ref_T=old_T + gaps(0.4),
        advantage_T=noise(1.0) * (torch.rand(total, generator=generator) > 0.1),
        value_T=value_T,
        old_value_T=value_T + noise(0.6),
        return_T=noise(1.5),
    )


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-6, relative above 1; NaN fails."""
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-6, atol=1e-6)
