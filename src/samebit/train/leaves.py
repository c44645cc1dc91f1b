"""The tree over which an update's gradients are added: leaves of whole groups, then pairs of sums.

How many leaves there are is a setting (`train.gradient_leaves`), not the number of processes: each process
adds the leaves it has, a subtree, and `Ranks.add_up` adds the rest. So a run gives the same bits on 1, 2,
4, ... processes, as long as it has the same leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from samebit.ranks import Ranks
from samebit.train.pack import fed_tokens
from samebit.types import Group


def leaves_of(setting: int, size: int) -> int:
    """Leaves of a run of `size` processes. ValueError where they are no power of two or fewer than those."""
    leaves = setting or size
    if leaves & (leaves - 1) or leaves < size:
        raise ValueError(
            f"train.gradient_leaves = {setting} for {size} process{'es' if size > 1 else ''}: use a power of "
            f"two of at least {size}, or 0 (one a process)"
        )
    return leaves


def split_leaves(groups: Sequence[Group], part: range, leaves: int) -> list[range]:
    """The groups of each leaf: consecutive, of about as many tokens each, none empty while there are groups."""
    count = len(part)
    if count <= leaves:
        return [part[i : i + 1] for i in range(leaves)]
    fed = [fed_tokens(groups[i]) for i in part]
    before = [0, *accumulate(fed)]
    edges = [0]
    for leaf in range(1, leaves):
        wanted = before[-1] * leaf / leaves
        edge = min(range(count + 1), key=lambda i: abs(before[i] - wanted))
        edges.append(min(max(edge, edges[-1] + 1), count - (leaves - leaf)))
    return [part[a:b] for a, b in pairwise([*edges, count])]


class GradientTree:
    """Adds up the gradients of one update: leaf after leaf here, then those of the other processes.

    While leaves are to come, sums of 1, 2, 4, ... of them wait: log2(leaves of this process) times the
    gradients' memory, nothing for one leaf.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._waiting: list[list[torch.Tensor] | None] = []

    def end_leaf(self, last: bool) -> None:
        """Take what the leaf's backward passes left in `grad`; after the last leaf, leave the sum there."""
        if last and not self._waiting:
            return
        total = [_gradient(p) for p in self.parameters]
        for level, held in enumerate(self._waiting):
            if held is None:
                break
            torch._foreach_add_(held, total)
            total, self._waiting[level] = held, None
        else:
            level = len(self._waiting)
            self._waiting.append(None)
        if not last:
            self._waiting[level] = total
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient if last else None

    def add_others(self, ranks: Ranks) -> None:
        """Everybody's sum."""
        if ranks.size > 1:
            ranks.add_up([_gradient(p) for p in self.parameters])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Of a parameter; zeros where no backward gave it one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
