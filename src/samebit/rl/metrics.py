"""Metrics that merge exactly over micro-batches and ranks: sums and maxima, no means of means.

Every entry is a small FP64 vector on the batch's device; nothing is copied to the host before
`compute`, so the training step does not wait for its metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["sum", "mean", "max", "ess"]

_MERGES = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "ess": torch.add}


class Entry(NamedTuple):
    """One metric before division: `values` FP64 [1] (sum, max), [2] (mean) or [3] (ess)."""

    kind: Kind
    values: Tensor


def total(value: Tensor | float) -> Entry:
    """A plain sum or count; never absent."""
    return Entry("sum", torch.as_tensor(value).detach().double().reshape(1))


def mean(values_T: Tensor, where_T: Tensor) -> Entry:
    """Mean of `values_T` over the tokens where `where_T` is True; absent when there are none."""
    kept_T = torch.where(where_T, values_T.detach().double(), 0.0)
    return Entry("mean", torch.stack([kept_T.sum(), where_T.double().sum()]))


def share(hit_T: Tensor, where_T: Tensor) -> Entry:
    """Share of the tokens where `where_T` that also have `hit_T`."""
    return mean(hit_T.double(), where_T)


def maximum(values_T: Tensor, where_T: Tensor) -> Entry:
    """Largest of `values_T` over `where_T` (NaN wins); absent when there are none."""
    kept_T = torch.where(where_T, values_T.detach().double(), -torch.inf)
    floor = kept_T.new_full((1,), -torch.inf)
    return Entry("max", torch.cat([kept_T.reshape(-1), floor]).amax().reshape(1))


def effective_sample_size(weights_T: Tensor, where_T: Tensor) -> Entry:
    """(sum w)^2 / (n * sum w^2): 1 when all weights are equal, 1/n when one token holds all."""
    kept_T = torch.where(where_T, weights_T.detach().double(), 0.0)
    return Entry("ess", torch.stack([kept_T.sum(), kept_T.square().sum(), where_T.double().sum()]))


class Metrics(dict[str, Entry]):
    """Named entries. Which keys exist depends on the settings only, never on the data."""

    def merge(self, other: Mapping[str, Entry]) -> Metrics:
        """Both together: sums and counts add, maxima take the larger, NaN stays NaN."""
        merged = Metrics(self)
        for key, entry in other.items():
            mine = merged.get(key)
            if mine is None:
                merged[key] = entry
                continue
            assert mine.kind == entry.kind, f"metric {key} is both {mine.kind} and {entry.kind}"
            merged[key] = Entry(mine.kind, _MERGES[mine.kind](mine.values, entry.values))
        return merged

    def on_host(self) -> Metrics:
        """The same, in main memory."""
        return Metrics({key: Entry(e.kind, e.values.cpu()) for key, e in self.items()})

    def compute(self) -> dict[str, float]:
        """The numbers to log. A mean or maximum over no token is absent, not 0 and not NaN."""
        result: dict[str, float] = {}
        on_host = _read(self)
        for key, entry in sorted(self.items()):
            values = on_host[key]
            if entry.kind == "mean":
                if values[1] > 0:
                    result[key] = values[0] / values[1]
            elif entry.kind == "ess":
                if values[2] > 0:
                    squares = values[2] * values[1]
                    result[key] = values[0] ** 2 / squares if squares != 0 else 0.0
            elif entry.kind == "sum" or values[0] != -torch.inf:
                result[key] = values[0]
        return result


def _read(entries: Mapping[str, Entry]) -> dict[str, list[float]]:
    """Every entry's numbers, with one read per device."""
    devices: dict[torch.device, list[str]] = {}
    for key, entry in entries.items():
        devices.setdefault(entry.values.device, []).append(key)
    out: dict[str, list[float]] = {}
    for keys in devices.values():
        sizes = [entries[key].values.numel() for key in keys]
        parts = iter(torch.cat([entries[key].values for key in keys]).cpu().split(sizes))
        out |= {key: next(parts).tolist() for key in keys}
    return out
