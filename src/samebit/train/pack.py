"""From groups to packed micro-batches: a group's prompt once, its samples after it.

The last token of a completion predicts nothing and is not fed. Completion tokens keep one order
everywhere: group by group, sample by sample, position by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from samebit.layout import PackedLayout, Segment
from samebit.types import Group


@dataclass(frozen=True)
class PackedBatch:
    """Whole groups, packed. R rows are fed; C completion tokens are predicted.

    ids: int64 [R]. predicting: int64 [C], the row whose hidden state predicts each token (all first
    tokens of a group share their prompt's last row). targets: int64 [C]. rollout_logp: FP32 [C].
    version: int64 [C]. sequence: int64 [C], which sequence of the whole rollout: the
    `num_sequences` from `first_sequence` on. `first_token` is the place of this batch's tokens in the
    rollout's token order. The whole numbers are known on the host, so that nothing waits to read them.
    """

    ids: torch.Tensor
    layout: PackedLayout
    predicting: torch.Tensor
    targets: torch.Tensor
    rollout_logp: torch.Tensor
    version: torch.Tensor
    sequence: torch.Tensor
    group: torch.Tensor
    first_token: int
    first_sequence: int
    num_sequences: int

    @property
    def tokens(self) -> slice:
        """This batch's tokens within the rollout's token order."""
        return slice(self.first_token, self.first_token + len(self.targets))


def fed_tokens(group: Group) -> int:
    """Rows a group takes in a pack."""
    return len(group.prompt.ids) + sum(len(s.ids) - 1 for s in group.samples)


def split_groups(groups: Sequence[Group], budget: int) -> list[range]:
    """Consecutive groups per micro-batch, each at most `budget` rows (a larger group stands alone)."""
    out: list[range] = []
    start, used = 0, 0
    for i, group in enumerate(groups):
        need = fed_tokens(group)
        if i > start and used + need > budget:
            out.append(range(start, i))
            start, used = i, 0
        used += need
    return [*out, range(start, len(groups))] if groups else []


def pack(
    groups: Sequence[Group],
    first_group: int,
    first_sequence: int,
    first_token: int,
    device: torch.device,
) -> PackedBatch:
    """Pack whole groups; the three offsets number them within the rollout."""
    ids: list[int] = []
    segments: list[Segment] = []
    predicting: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    next_sequence = first_sequence
    for group in groups:
        prompt = Segment(len(ids), len(group.prompt.ids))
        segments.append(prompt)
        ids.extend(group.prompt.ids)
        last = len(ids) - 1
        for sample in group.samples:
            assert sample.ids, "a sample has at least one token"
            start, fed = len(ids), len(sample.ids) - 1
            if fed:
                segments.append(Segment(start, fed, prompt.start, prompt.length))
                ids.extend(sample.ids[:-1])
            predicting.extend([last, *range(start, start + fed)])
            targets.extend(sample.ids)
            sequence.extend([next_sequence] * len(sample.ids))
            next_sequence += 1
    samples = [s for g in groups for s in g.samples]
    logps = np.concatenate([s.logps for s in samples]).astype(np.float32)
    versions = np.concatenate([s.versions for s in samples]).astype(np.int64)
    numbers = [first_group + i for i, g in enumerate(groups) for _ in g.samples]

    def on_device(values: object) -> torch.Tensor:
        host = torch.as_tensor(values)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    return PackedBatch(
        ids=on_device(ids),
        layout=PackedLayout(tuple(segments), device),
        predicting=on_device(predicting),
        targets=on_device(targets),
        rollout_logp=on_device(logps),
        version=on_device(versions),
        sequence=on_device(sequence),
        group=on_device(numbers),
        first_token=first_token,
        first_sequence=first_sequence,
        num_sequences=next_sequence - first_sequence,
    )


def pack_part(
    groups: Sequence[Group], part: range, budget: int, device: torch.device
) -> list[PackedBatch]:
    """Micro-batches of at most `budget` rows of some of a rollout's groups.

    Sequences and tokens are numbered within the whole rollout.
    """
    batches = []
    sequences = sum(len(g.samples) for g in groups[: part.start])
    tokens = sum(len(s.ids) for g in groups[: part.start] for s in g.samples)
    members = [groups[i] for i in part]
    for piece in split_groups(members, budget):
        chosen = [members[i] for i in piece]
        batches.append(pack(chosen, part.start + piece.start, sequences, tokens, device))
        sequences += sum(len(g.samples) for g in chosen)
        tokens += sum(len(s.ids) for g in chosen for s in g.samples)
    return batches
