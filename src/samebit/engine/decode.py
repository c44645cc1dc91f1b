"""One decode step over fixed buffers: the same launches whether run eagerly or replayed as a CUDA graph.

Row r of the buffers is place r of the batch. Between steps nothing comes from the host but what it
changed: `DecodeState.table` is the host's copy of every row's metadata, uploaded only when it differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samebit.engine.scheduler import SchedulerStats
from samebit.layers.kv import AnyStore
from samebit.layout import PagedLayout, to_device
from samebit.models.decoder import Decoder
from samebit.reference.sampling import Transform, stream_keys

HEADER = 4
"""Words of a row's metadata before its page numbers (kernels/decode_step.py says which)."""

CONTEXT_BOUNDS = (1024, 4096, 16384, 65536)
"""Longest contexts that a step may be made for: they fix how many splits attention launches."""


def bucket_sizes(max_batch: int) -> tuple[int, ...]:
    """Rows a step may have: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... and max_batch itself."""
    sizes, size = [1, 2, 4, 8], 16
    while size < max_batch:
        sizes += [size, size + size // 2]
        size *= 2
    return (*(s for s in sizes if s < max_batch), max_batch)


def smallest_at_least(choices: tuple[int, ...], n: int) -> int:
    """The first of the ascending `choices` that is >= n; the last when none is."""
    return next((c for c in choices if c >= n), choices[-1])


class Reading:
    """Values on their way to the host; `numpy` waits for them."""

    def __init__(self, x: torch.Tensor):
        self._event = None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = x.clone()

    def numpy(self) -> np.ndarray:
        """The values."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


class DecodeState:
    """The buffers of up to `rows` places.

    table: int32 [rows, HEADER + pages of the longest context], the host's copy of `meta`. ids int64:
    each place's last token, known to the device alone. out int32 [rows, 2]: the last step's ids and
    the bits of their log-probs.
    """

    def __init__(self, rows: int, max_context: int, page_size: int, device: torch.device):
        self.rows, self.page_size, self.device = rows, page_size, device
        width = HEADER + -(-max_context // page_size)
        self.table = np.zeros((rows, width), np.int32)
        self.table[:, 0] = -1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.meta = zeros(rows, width)
        self.meta[:, 0] = -1
        self.ids = zeros(rows, dtype=torch.int64)
        self.positions = zeros(rows, dtype=torch.int64)
        self.slots = zeros(rows, dtype=torch.int64)
        self.contexts = zeros(rows)
        self.keys = zeros(rows, 2)
        self.out = zeros(rows, 2)

    def upload(self, bucket: int, pages: int | None = None) -> None:
        """Bring the host's copy of the first `bucket` rows, with their first `pages` or all, over."""
        part = np.s_[:bucket, : None if pages is None else HEADER + pages]
        self.meta[part].copy_(to_device(np.ascontiguousarray(self.table[part]), self.device))

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Take over the ids of places that became others."""
        source, target = to_device(np.array([sources, targets]), self.device).unbind(0)
        self.ids[target] = self.ids[source]

    def idle(self) -> None:
        """Make every place idle on the device (not on the host)."""
        self.meta[:, 0] = -1


class EagerStep:
    """A decode step as a sequence of launches: model, draw, and what the next step starts from."""

    def __init__(self, model: Decoder, store: AnyStore, state: DecodeState):
        self.model, self.store, self.state = model, store, state
        self.on_gpu = model.device.type == "cuda"

    def run(self, bucket: int, bound: int, transform: Transform) -> None:
        """One token for each active place below `bucket`, all contexts being at most `bound`."""
        s, rows = self.state, slice(0, bucket)
        self._prepare(rows)
        layout = PagedLayout.of_step(
            s.meta[rows, HEADER:], s.positions[rows], s.slots[rows], s.contexts[rows],
            s.page_size, bound,
        )  # fmt: skip
        hidden = self.model(s.ids[rows], layout, "rollout", self.store)
        ids, logp = self.model.draw(hidden, transform, s.keys[rows])
        self._advance(rows, ids, logp)

    def _prepare(self, rows: slice) -> None:
        s = self.state
        if self.on_gpu:
            from samebit.kernels.decode_step import prepare  # late: triton

            prepare(
                s.meta[rows], s.positions[rows], s.slots[rows], s.contexts[rows], s.keys[rows],
                s.page_size,
            )  # fmt: skip
            return
        positions = s.meta[rows, 0].long()
        active, at = positions >= 0, positions.clamp(min=0)
        page = s.meta[rows, HEADER:].gather(1, (at // s.page_size)[:, None])[:, 0]
        place = torch.arange(len(at))
        own = page * s.page_size + at % s.page_size
        s.positions[rows] = at
        s.slots[rows] = torch.where(active, own, place % s.page_size)
        s.contexts[rows] = torch.where(active, at + 1, 0).int()
        words = s.meta[rows, 2:4].contiguous().view(torch.int64)[:, 0]
        s.keys[rows] = stream_keys(words, at + 1)

    def _advance(self, rows: slice, ids: torch.Tensor, logp: torch.Tensor) -> None:
        s, vocabulary = self.state, self.model.config.vocab_size
        if self.on_gpu:
            from samebit.kernels.decode_step import advance

            advance(ids, logp, s.meta[rows], s.ids[rows], s.out[rows], vocabulary)
            return
        active = s.meta[rows, 0] >= 0
        s.out[rows] = torch.stack((ids.int(), logp.view(torch.int32)), 1)
        s.ids[rows] = torch.where(active, ids, s.ids[rows])
        s.meta[rows, 0] += active.int()


MAX_TRANSFORMS = 4
"""Sampling transforms whose graphs are kept: a run has two, and one that changes them must not grow."""


@dataclass(frozen=True)
class GraphKey:
    """What a captured graph is for."""

    bucket: int
    bound: int
    transform: Transform


class GraphStep:
    """The same step, captured once per (bucket, bound, transform) and replayed.

    A graph holds addresses. Those of the buffers and of the cache's reservation never move; where an
    address of the weights is another than at capture, every graph is dropped and made anew.
    """

    def __init__(self, eager: EagerStep, stats: SchedulerStats):
        self.eager, self.store, self.stats = eager, eager.store, stats
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._transforms: dict[Transform, None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(eager.model.device)
        self._addresses: tuple[int, ...] = ()

    def check_addresses(self) -> None:
        """Drop the graphs if a weight lies elsewhere than when they were captured."""
        found = weight_addresses(self.eager.model)
        if found != self._addresses:
            self._graphs.clear()
            # a pool ends with the last graph in it
            self._pool = torch.cuda.graph_pool_handle()
            self._addresses = found

    def keys(self) -> list[GraphKey]:
        """What graphs there are."""
        return list(self._graphs)

    def _note_use(self, transform: Transform) -> None:
        """The graphs of the transform longest unused go where there are too many."""
        self._transforms.pop(transform, None)
        self._transforms[transform] = None
        while len(self._transforms) > MAX_TRANSFORMS:
            oldest = next(iter(self._transforms))
            del self._transforms[oldest]
            for key in [k for k in self._graphs if k.transform == oldest]:
                del self._graphs[key]

    def prepared(self, bucket: int, bound: int, transform: Transform) -> bool:
        """Capture the step if need be; True when it was, and the device's metadata is lost."""
        self._note_use(transform)
        key = GraphKey(bucket, bound, transform)
        if key in self._graphs:
            return False
        state = self.eager.state
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # every row idle: kernels are compiled and buffers made, and no page is written
            state.idle()
            self.eager.run(bucket, bound, transform)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self.eager.run(bucket, bound, transform)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs[key] = graph
        self.stats.captures += 1
        return True

    def run(self, bucket: int, bound: int, transform: Transform) -> None:
        """Replay; see `EagerStep.run`."""
        self._graphs[GraphKey(bucket, bound, transform)].replay()


def weight_addresses(model: Decoder) -> tuple[int, ...]:
    """Where everything that a rollout forward reads lies."""
    tensors: list[Any] = [*model.parameters(), *model.buffers(), model.head_weight.codes]
    for _, module in model.linears():
        weight = module.weights["rollout"]
        tensors += [weight.codes, weight.scale]
    return tuple(0 if t is None else t.data_ptr() for t in tensors)
