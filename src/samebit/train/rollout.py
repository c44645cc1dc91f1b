"""One rollout in its update: what is known of it before weights move, and each process's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from samebit.ranks import ALONE, Ranks
from samebit.rl.api import Advantages, Normaliser
from samebit.rl.metrics import Metrics
from samebit.train.leaves import split_leaves
from samebit.train.pack import PackedBatch, pack_part
from samebit.train.score import Compared, Scores
from samebit.types import Group


@dataclass(frozen=True)
class Share:
    """This process's micro-batches of one update, leaf by leaf. part: the update's groups, everybody's."""

    part: range
    leaves: list[list[PackedBatch]]

    @property
    def batches(self) -> list[PackedBatch]:
        """In order."""
        return [batch for leaf in self.leaves for batch in leaf]

    @classmethod
    def pack(
        cls,
        groups: Sequence[Group],
        part: range,
        budget: int,
        device: torch.device,
        leaves: int = 1,
        ranks: Ranks = ALONE,
    ) -> Share:
        """The process's leaves of groups `part` of a rollout; budget: rows of a micro-batch."""
        ranges = split_leaves(groups, part, leaves)
        mine = [ranges[i] for i in ranks.share(leaves)]
        return cls(part, [pack_part(groups, leaf, budget, device) for leaf in mine])


class Rollout(Compared):
    """One step's groups with everything known about them before the first update."""

    def __init__(
        self,
        groups: Sequence[Group],
        scores: Scores,
        advantages: Advantages,
        device: torch.device,
        ranks: Ranks = ALONE,
    ):
        # of everybody's groups, so counted by one process
        super().__init__(groups, Metrics(advantages.metrics if ranks.leads else {}), ranks)
        self.scores = scores
        self.included: list[bool] = advantages.include_B.tolist()
        """Of each sequence, whether it has a verdict."""
        return_T = advantages.return_T
        self.advantages = replace(
            advantages,
            advantage_T=advantages.advantage_T.to(device),
            include_B=advantages.include_B.to(device),
            return_T=None if return_T is None else return_T.to(device),
        )
        """On the device: micro-batches cut their tokens out of them."""

    def mask(self, batch: PackedBatch) -> torch.Tensor:
        """Bool [C]: tokens of sequences with a verdict."""
        return self.advantages.include_B[batch.sequence]

    def normaliser(self, part: range, limit: int) -> Normaliser:
        """What the losses of groups `part` together divide by, counted on the host."""
        samples = [s for g in self.groups for s in g.samples]
        sequences = [len(g.samples) for g in self.groups]
        members = range(sum(sequences[: part.start]), sum(sequences[: part.stop]))
        kept = [i for i in members if self.included[i]]
        return Normaliser(
            num_tokens=sum(len(samples[i].ids) for i in kept),
            num_sequences=len(kept),
            max_length=limit,
        )
