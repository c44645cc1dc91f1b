"""The chain's two ends: what the engine drew, and the training forward over the same tokens."""

from __future__ import annotations

import numpy as np
import torch

from samebit.engine.requests import transform_of
from samebit.layout import PackedLayout, Segment
from samebit.models.decoder import Decoder
from samebit.types import Group, Sampling


def packed(groups: list[Group]) -> tuple[torch.Tensor, PackedLayout, torch.Tensor, torch.Tensor]:
    """(ids, layout, rows whose hidden predicts a sampled token, those tokens); shared prompts."""
    ids: list[int] = []
    segments: list[Segment] = []
    rows: list[int] = []
    targets: list[int] = []
    for group in groups:
        start, length = len(ids), len(group.prompt.ids)
        segments.append(Segment(start, length))
        ids += group.prompt.ids
        for sample in group.samples:
            own = len(ids)
            segments.append(Segment(own, len(sample.ids), start, length))
            ids += sample.ids
            rows += [start + length - 1, *range(own, own + len(sample.ids) - 1)]
            targets += sample.ids
    layout = PackedLayout(tuple(segments))
    return torch.tensor(ids), layout, torch.tensor(rows), torch.tensor(targets)


def training_logps(model: Decoder, groups: list[Group], sampling: Sampling) -> torch.Tensor:
    """FP32 log-probs of every sampled token from the differentiable training forward."""
    ids, layout, rows, targets = packed(groups)
    hidden = model(ids, layout, "train")
    logps, _ = model.log_prob(hidden[rows], targets, transform_of(sampling))
    assert logps.requires_grad
    return logps.detach()


def sampled_logps(groups: list[Group]) -> torch.Tensor:
    """The log-probs the engine stored, in the same order."""
    return torch.from_numpy(np.concatenate([s.logps for g in groups for s in g.samples]))


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many FP32 values differ in bits (NaN counts as different from NaN)."""
    assert a.shape == b.shape and a.numel() > 0
    return int(((a.view(torch.int32) != b.view(torch.int32)) | torch.isnan(a)).sum())


def optimiser_steps(model: Decoder, groups: list[Group], steps: int = 2) -> None:
    """Real AdamW steps on the masters from the sampled tokens, then a refresh."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, layout, rows, targets = packed(groups)
    for _ in range(steps):
        optimiser.zero_grad()
        hidden = model(ids, layout, "train")
        logps, _ = model.log_prob(hidden[rows], targets, transform_of(Sampling()))
        (-logps.mean()).backward()
        optimiser.step()
        model.refresh()
