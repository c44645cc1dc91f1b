"""The processes of a run, one a device: what they tell one another, and how they add up gradients.

Every process runs the same loop over the same counters and holds the whole policy. Rollouts and micro-batches
are divided; samples, rewards, log-probs and metrics are told to everybody, so that all decide alike. Gradients
are added over a binary tree of processes, a pair at a time: a + b has the same bits on both sides, and the sum
is that of one process which adds the same leaves (`train/leaves.py`).

Started by torchrun, which says who is who (RANK, WORLD_SIZE, LOCAL_RANK).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samebit.errors import RunLeft

T = TypeVar("T")

MEETING = timedelta(minutes=10)
"""How long a process waits for the others at the start."""
PATIENCE = timedelta(days=2)
"""How long it waits for another that is at work. One that ended is noticed at once."""
EXCHANGE = timedelta(minutes=30)
"""How long an exchange of gradients may take, which begins when all are ready for it."""


class Ranks:
    """This process's number among those of the run. Alone, every method is trivial."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._host: Any = None
        self._pairs: list[Any] = []

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    @classmethod
    def join(cls, rank: int, size: int, backend: str, device: torch.device) -> Ranks:
        """Meet the others; returns when all are there. backend: of gradients; all else goes over gloo.

        What a backend needs on the device is taken here, before anybody plans its memory.
        """
        ranks = cls(rank, size)
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=MEETING)
        ranks._host = dist.new_group(backend="gloo", timeout=PATIENCE)
        for distance in (1 << i for i in range(size.bit_length() - 1)):
            for low in (r for r in range(size) if not r & distance):
                pair = dist.new_group([low, low + distance], timeout=EXCHANGE)
                if rank in (low, low + distance):
                    ranks._pairs.append(pair)
        ranks.add_up([torch.zeros(1, device=device)])
        return ranks

    def gather(self, mine: T) -> list[T]:
        """What each process has, in their order. RunLeft where one of them ended."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(found, mine, group=self._host)
        return found

    def wait(self) -> None:
        """Until all are here."""
        self.gather(None)

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """A block that the leader goes through before the others do."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()

    def leaders(self, value: T) -> T:
        """The leader's value."""
        return self.gather(value if self.leads else None)[0]  # type: ignore[return-value]

    def cat(self, mine: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Everybody's vectors, FP32, one after the other, on `device`, wherever they were."""
        joined = torch.cat([torch.zeros(0, device=device), *(part.to(device) for part in mine)])
        if self.size == 1:
            return joined
        return torch.cat(self.gather(joined.cpu())).to(device)

    def share(self, count: int) -> range:
        """Which of `count` things in a row are this process's."""
        return self._part(self.rank, count)

    def drawn(self, count: int) -> range:
        """Which of a rollout's `count` prompts this process draws: those that another trains on.

        So a process whose weights are not the others' shows as log-probs that differ.
        """
        return self._part(self.size - 1 - self.rank, count)

    def everybodys(self, mine: Sequence[T]) -> list[T]:
        """What all made of their `drawn` parts, in the prompts' order."""
        return [one for each in reversed(self.gather(mine)) for one in each]

    def _part(self, rank: int, count: int) -> range:
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def require_same(self, what: str, mine: object, why: str) -> None:
        """RuntimeError where the processes do not have the same of something that prints as it is."""
        if len({repr(value) for value in self.gather(mine)}) > 1:
            raise RuntimeError(
                f"the processes of this run have come apart: {what} is not the same on all ({why}). "
                "The last checkpoint stands"
            )

    def add_up(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by everybody's sum: ((0 + 1) + (2 + 3)) + ..., the same bits everywhere."""
        self.wait()  # here a process that ended is noticed, on a GPU it would not be
        for pair in self._pairs:
            with self._together():
                works = [dist.all_reduce(g, group=pair, async_op=True) for g in gradients]
                for work in works:
                    assert work is not None
                    work.wait()

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RunLeft("another process of this run ended: it says why", 1) from error

    def close(self) -> None:
        """Part from the others; safe to call twice."""
        if self._host is not None and dist.is_initialized():
            dist.destroy_process_group()
        self._host, self._pairs = None, []


ALONE = Ranks()


def world() -> tuple[int, int, int]:
    """(rank, processes, rank on this machine) that torchrun set; (0, 1, 0) without it.

    ValueError for what is no power of two: gradients are added over a binary tree.
    """
    rank, size, local = (
        int(os.environ.get(key, default))
        for key, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if size & (size - 1):
        raise ValueError(
            f"{size} processes: gradients are added over a binary tree, so start 2, 4, 8, ... of them "
            "(torchrun --nproc-per-node)"
        )
    return rank, size, local


def processes_here() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world()[1]))


def claim_gpu() -> None:
    """Make this process's GPU the current one, before anything is asked of (and kept on) the first."""
    _, size, local = world()
    if size > 1 and local < torch.cuda.device_count():
        torch.cuda.set_device(local)


def join(device: torch.device) -> Ranks:
    """The processes of this run, met; alone without torchrun. device: of this process."""
    rank, size, _ = world()
    if size == 1:
        return ALONE
    return Ranks.join(rank, size, "nccl" if device.type == "cuda" else "gloo", device)
