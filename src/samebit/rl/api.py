"""The contract between the trainer and every algorithm and correction. Tensors only, no model.

Letters: T completion tokens, packed flat; B sequences. A sequence is never split over micro-batches
or ranks; anything else about the split is free, because every loss divides by the `Normaliser` of
the whole optimiser step.

Names of the policies. *Rollout*: what drew the token (the sampler's own log-prob). *Old*
(proximal): what the clipped ratio divides by, the policy at the start of the step. No prefix: the
policy being trained. *Shadow*: that policy run in BF16; *shadow old*: the old policy run in BF16.
In a unified recipe the rollout log-probs *are* the old ones: the need `proximal` costs no pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from samebit.rl.metrics import Entry, Metrics
from samebit.types import Group

Averaging = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
Need = Literal["reference", "proximal", "shadow", "critic", "entropy"]


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Completion tokens of some whole sequences. All `_T` are [T], floats FP32 unless said.

    Slots where `mask_T` is False may hold anything, NaN included: they change no bit of a result.
    """

    logp_T: Tensor
    """Log-prob of the policy being trained; carries the gradient."""
    old_logp_T: Tensor
    """Log-prob of the old (proximal) policy; equal to `rollout_logp_T` unless a need says so."""
    rollout_logp_T: Tensor
    """The sampler's own log-prob. NaN: the engine returned none (weight 1, counted)."""
    advantage_T: Tensor
    mask_T: Tensor
    """Bool. False: the token is excluded from loss, normaliser and metrics."""
    sequence_T: Tensor
    """Int64, which of the `num_sequences` sequences of this batch the token belongs to."""
    num_sequences: int
    group_B: Tensor | None = None
    """Int64 [B], the group of each sequence."""
    ref_logp_T: Tensor | None = None
    shadow_logp_T: Tensor | None = None
    shadow_old_logp_T: Tensor | None = None
    entropy_T: Tensor | None = None
    """Entropy of the next-token distribution, nats; carries a gradient where a bonus is on."""
    value_T: Tensor | None = None
    """The critic's value; carries the gradient."""
    old_value_T: Tensor | None = None
    return_T: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logp_T.shape
        assert len(shape) == 1, f"logp_T must be flat, got shape {tuple(shape)}"
        assert self.mask_T.dtype == torch.bool, f"mask_T must be bool, got {self.mask_T.dtype}"
        assert self.sequence_T.dtype == torch.int64, "sequence_T must be int64"
        for name, value in self.tensors_T().items():
            assert value.shape == shape, f"{name}: {tuple(value.shape)}, logp_T: {tuple(shape)}"

    def tensors_T(self) -> dict[str, Tensor]:
        """Every per-token tensor that is present, by field name."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_T")}
        return {name: value for name, value in named.items() if value is not None}

    def filled(self) -> TokenBatch:
        """Masked slots set to 0, so that neither value nor gradient can leak out of them.

        Multiplying a loss by the mask is not enough: 0 * NaN is NaN, also in the backward.
        """
        filled = {
            name: torch.where(self.mask_T, value, torch.zeros_like(value))
            for name, value in self.tensors_T().items()
            if name not in ("mask_T", "sequence_T")
        }
        return replace(self, **filled)


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """What the losses of one optimiser step divide by: counts over all micro-batches and ranks.

    Sum the normalisers of the parts (`+`) before the first backward. Losses and gradients of the
    parts then add up to those of the whole batch; nothing is divided again.
    """

    num_tokens: int
    """Tokens with mask True."""
    num_sequences: int
    """Sequences with at least one such token."""
    max_length: int
    """Longest completion the sampler may draw; the constant of `seq-mean-token-sum-norm`."""

    @classmethod
    def of(cls, mask_T: Tensor, sequence_T: Tensor, max_length: int) -> Normaliser:
        """Counts of one part."""
        return cls(
            num_tokens=int(mask_T.sum()),
            num_sequences=int(torch.unique(sequence_T[mask_T]).numel()),
            max_length=max_length,
        )

    def __add__(self, other: Normaliser) -> Normaliser:
        assert self.max_length == other.max_length, "parts of one step share max_length"
        return Normaliser(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            max_length=self.max_length,
        )


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What is known about every sequence of one rollout, all ranks together, before any update.

    Tokens are packed in sequence order: `lengths_B[0]` tokens of sequence 0, then sequence 1.
    """

    reward_B: Tensor
    """FP32 [B]; 0 where there is no verdict."""
    verdict_B: Tensor
    """Bool [B]; False: no verdict, the sequence enters no baseline and gets advantage 0."""
    group_B: Tensor
    """Int64 [B]."""
    lengths_B: Tensor
    """Int64 [B], completion tokens."""
    max_length: int
    """Longest completion the sampler may draw."""
    value_T: Tensor | None = None
    """FP32 [sum of lengths], the critic's values (need `critic`)."""
    ref_log_ratio_T: Tensor | None = None
    """FP32 [sum of lengths], old minus reference log-prob (for a KL inside the reward)."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Result of `Algorithm.advantages`, token-packed like `Outcomes`."""

    advantage_T: Tensor
    """FP32 [sum of lengths], no gradient, finite."""
    include_B: Tensor
    """Bool [B]; False: no verdict. The trainer masks these sequences out of the loss."""
    return_T: Tensor | None = None
    """FP32, the critic's regression target (need `critic`)."""
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True)
class Selection:
    """Result of `Algorithm.select`: the groups to train on and how many were dropped, by reason."""

    groups: tuple[Group, ...]
    counts: Mapping[str, int]

    def describe(self) -> str:
        """One line for logs and errors, such as `0 of 8 groups kept: 8 equal rewards`."""
        dropped = ", ".join(f"{n} {reason}" for reason, n in self.counts.items() if n)
        seen = len(self.groups) + sum(self.counts.values())
        return f"{len(self.groups)} of {seen} groups kept: {dropped or 'none dropped'}"


class Weights:
    """Result of `Correction.weights`: `weight_T` without gradient, and metrics."""

    def __init__(self, weight_T: Tensor, entries: Mapping[str, Entry] | None = None) -> None:
        self.weight_T = weight_T.detach()
        self.metrics = Metrics(entries or {})


Bound = float | Tensor
"""A clip bound on the ratio: one number, or one per token [T]."""


class Correction:
    """How the gap between the policy that drew the tokens and the old policy is corrected.

    A small immutable value. The base class corrects nothing. Weights and bounds never carry a
    gradient; where rollout and old log-probs are the same bits, weights are exactly 1 and bounds
    are returned unchanged.
    """

    needs: frozenset[Need] = frozenset()
    """`proximal`: old log-probs must come from the trainer; `shadow`: BF16 shadow log-probs."""
    corrects_rollout: bool = False
    """Whether weights depend on rho = old / rollout at all."""
    reweights: bool = False
    """Whether kept tokens are weighted by rho (two such make no sense together)."""
    moves_bounds: bool = False
    """Whether clip bounds are moved (needs an algorithm that clips)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """What rho is taken over."""
    cap: float = 2.0
    """The rho beyond which the mismatch metrics count a token as over the cap."""
    prepares: bool = False
    """Whether `prepare` must be called before each update."""
    shadow_every: int = 0
    """Every how many steps `prepare` wants shadow log-probs; 0: never."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def prepare(self, batch: TokenBatch, lower: float, upper: float) -> Correction:
        """The correction to use for the coming update, from all tokens of the update, all ranks.

        `lower` and `upper` are the algorithm's own bounds on the ratio (0.8 and 1.2). Several
        ranks gather the flat tensors first: all must return the same value.
        """
        return self

    def bound_metrics(self, lower: float, upper: float) -> Metrics:
        """Once a step: the bounds in force, where they are the correction's own."""
        return Metrics()

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep of `prepare`'s results (JSON values)."""
        return {}

    def with_state(self, state: Mapping[str, Any]) -> Correction:
        """This correction with a state that `state` returned."""
        return self

    def weights(self, batch: TokenBatch) -> Weights:
        """Per-token factor on the policy loss. `batch` is already `filled`."""
        return Weights(torch.ones_like(batch.logp_T))

    def bounds(self, batch: TokenBatch, lower: float, upper: float) -> tuple[Bound, Bound]:
        """The bounds the ratio is clipped to."""
        return lower, upper


class Algorithm:
    """One algorithm; `rl/<name>.py` defines `Config` (frozen, keyword-only) and `Algorithm`."""

    needs: frozenset[Need] = frozenset()
    """What the trainer must supply for this configuration."""
    min_group_size: ClassVar[int] = 2
    """Smallest group a baseline exists for; 1 where groups play no role."""
    shift_invariant: ClassVar[bool] = True
    """Whether a constant added to all rewards leaves the advantages as they are."""
    exact_gradient: ClassVar[bool] = True
    """Whether the gradient is the derivative of the value (CISPO stops one on purpose)."""
    ratio_level: ClassVar[Literal["token", "sequence"]] = "token"
    """What the clipped ratio is of."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The algorithm's own bounds on the ratio, as `Correction.prepare` takes them."""
        raise NotImplementedError

    @property
    def max_sampling_rounds(self) -> int:
        """How many rounds of prompts the loop may draw to fill one batch."""
        return 1

    def select(self, groups: Sequence[Group]) -> Selection:
        """Drop groups that cannot teach anything. The base drops groups without any verdict."""
        kept = tuple(g for g in groups if any(r is not None for r in g.rewards))
        return Selection(kept, {"no verdict": len(groups) - len(kept)})

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """Advantages of every token of the rollout."""
        raise NotImplementedError

    def loss(
        self, batch: TokenBatch, normaliser: Normaliser, correction: Correction
    ) -> tuple[Tensor, Metrics]:
        """(scalar to call backward on, metrics) of one micro-batch."""
        raise NotImplementedError
