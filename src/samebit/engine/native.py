"""The engine: paged KV cache, continuous batching, prompts computed once, the model's modules.

On a CPU one forward computes prompts and decoding samples together and is read at once; on a GPU
decode steps are CUDA graphs, launched ahead of what is read (pipeline.py). Same samples, bit for bit.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import torch

from samebit.config import RolloutConfig
from samebit.engine.api import Progress, RolloutEngine
from samebit.engine.cache import PagePool, PrefixCache
from samebit.engine.decode import DecodeState, EagerStep, GraphStep
from samebit.engine.memory import Reservation, free_bytes
from samebit.engine.pipeline import Pipeline, forward
from samebit.engine.requests import SampleState, states_of, to_groups, transform_of
from samebit.engine.scheduler import Scheduler, SchedulerStats
from samebit.engine.tail import Lengths, Tail
from samebit.formats import get_format
from samebit.layers.kv import PageStore, page_bytes, page_size_for
from samebit.models.decoder import Decoder
from samebit.models.tokenizer import Tokenizer
from samebit.reference.sampling import Transform
from samebit.types import Group, Sampling

AUTO_CACHE_BYTES = 2 << 30
"""Most a CPU cache takes whose size was left to us; preemption covers what does not fit."""

AUTO_CACHE_SHARE = 0.85
"""Most a GPU cache takes of the memory that is free when it is taken; the rest is for activations."""

MAX_HEAD_ROWS = (1 << 31) - 1
"""Rows of one head that the kernels' 32-bit coordinates reach."""

ADMIT_PART = 8
"""Of the places, the part that must be free before a GPU computes new prompts.

A forward of few prompts costs about as much as two decode steps, whatever it admits; with answers of L
tokens the best part is sqrt(L / 4.6), so 5 to 15 for 100 to 1,000 tokens.
"""

PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
"""Prompt tokens a forward where rollout.prefill_tokens is 0."""


def keep_freed_memory() -> None:
    """Ask glibc to keep what is freed: else every temporary of some MB is faulted in again.

    Where the C library has no mallopt nothing changes but the speed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 1 << 30)


class Engine(RolloutEngine):
    """See `RolloutEngine`. The cache is allocated by `generate` and kept until `release`.

    stats: counters since construction. Not re-entrant; only `abort` may be called from elsewhere.
    """

    pipelined = False
    """Whether steps are launched ahead on a CPU too (for tests)."""

    def __init__(
        self,
        model: Decoder,
        config: RolloutConfig,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        page_size: int = 0,
    ) -> None:
        for key, least in (("max_batch", 1), ("prefill_tokens", 0)):
            if getattr(config, key) < least:
                raise ValueError(f"rollout.{key} is {getattr(config, key)}; it must be >= {least}")
        self.model, self.config, self.tokenizer, self.seed = model, config, tokenizer, seed
        self.page_size = page_size or page_size_for(model.device)
        self.prefill_tokens = config.prefill_tokens or PREFILL_TOKENS[model.device.type]
        self._on_gpu = model.device.type == "cuda"
        self._memory: Reservation | None = None
        self._store: PageStore | None = None
        self._step: EagerStep | GraphStep | None = None
        self.stats = SchedulerStats()
        self._rows_before = (0, 0)
        self._tail = Tail(0)
        self.lengths = Lengths()
        self.pool: PagePool | None = None
        self.prefix: PrefixCache | None = None
        self._version = model.version
        self._abort = threading.Event()
        self._closed = False
        if not self._on_gpu:
            keep_freed_memory()

    @torch.no_grad()
    def advance(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        progress: Progress | None = None,
        deadline_s: float | None = None,
        budget: int = 0,
    ) -> list[Group]:
        """Go on with unfinished samples; see `RolloutEngine.advance`."""
        if self._closed:
            raise ValueError("the engine is closed; make a new one")
        transform = transform_of(sampling)
        config, tokenizer = self.model.config, self.tokenizer
        states = states_of(groups, sampling, self.seed, config, tokenizer, budget)
        open_ones = [state for state in states if state.finish_reason is None]
        if open_ones:
            self._run(self.lengths.longest_first(open_ones), transform, progress, deadline_s)
            self.lengths.learn(open_ones)
        return to_groups(groups, states, tokenizer)

    def _run(
        self,
        states: list[SampleState],
        transform: Transform,
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        end = None if deadline_s is None else time.monotonic() + deadline_s
        pool, prefix = self._ready(states)
        places, ahead = self.config.max_batch, self._on_gpu or self.pipelined
        admit = max(1, places // ADMIT_PART) if ahead else 1
        scheduler = Scheduler(pool, prefix, places, self.prefill_tokens, admit)
        scheduler.stats = self.stats
        for state in states:
            scheduler.add(state)
        self._abort.clear()
        self._rows_before = self._rows()
        pipeline = self._pipeline(scheduler, transform, states)
        turn: Callable[[], tuple[int, int]] = (
            pipeline.turn if pipeline else lambda: self._turn(scheduler, transform)
        )
        finished = drawn = 0
        complete = False
        self._tail = Tail(min(self.config.max_batch, len(states)))
        try:
            while scheduler.waiting or scheduler.running:
                if self._abort.is_set() or (end is not None and time.monotonic() >= end):
                    break
                tokens, ended = turn()
                self._tail.note(len(scheduler.running))
                drawn, finished = drawn + tokens, finished + ended
                if progress is not None:
                    progress(finished, len(states), drawn)
            if pipeline is not None:
                pipeline.drain()
            complete = True
        finally:
            if pipeline is not None:
                pipeline.end()
            for slot in list(scheduler.running):
                scheduler.release(slot)
            if not complete:  # pages may be known whose rows were never written
                prefix.clear()

    def _pipeline(
        self, scheduler: Scheduler, transform: Transform, states: list[SampleState]
    ) -> Pipeline | None:
        """The loop that launches ahead, where this engine does."""
        if not (self._on_gpu or self.pipelined):
            return None
        store = scheduler.pool.store
        if self._step is None or self._step.store is not store:
            longest = self.model.config.max_position
            state = DecodeState(self.config.max_batch, longest, self.page_size, self.model.device)
            eager = EagerStep(self.model, store, state)
            self._step = GraphStep(eager, self.stats) if self._on_gpu else eager
        if isinstance(self._step, GraphStep):
            self._step.check_addresses()
        return Pipeline(self.model, scheduler, self._step, transform, states)

    def _turn(self, scheduler: Scheduler, transform: Transform) -> tuple[int, int]:
        """One forward and one draw; (tokens drawn, samples finished)."""
        batch = scheduler.plan()
        if batch.num_rows:
            scheduler.computed(batch, forward(self.model, batch, scheduler))
        slots = scheduler.drawing()
        assert batch.num_rows or slots, "nothing to compute and nothing to draw"
        if not slots:
            return 0, 0
        hidden = torch.cat([slot.hidden for slot in slots if slot.hidden is not None])
        counters = [slot.state.counter for slot in slots]
        ids, logps = self.model.sample(hidden, transform, counters)
        ended = 0
        for slot, token, logp in zip(slots, ids.tolist(), logps.tolist(), strict=True):
            slot.hidden = None
            slot.state.push(token, logp, self.model.version)
            if slot.state.finish_reason is not None:
                scheduler.release(slot)
                ended += 1
        return len(slots), ended

    def _ready(self, states: list[SampleState]) -> tuple[PagePool, PrefixCache]:
        """The cache, large enough for any one sample and holding nothing of older weights."""
        if self.model.version != self._version:
            self.refresh()
        longest = max(states, key=lambda s: len(s.prompt.ids) + s.end)
        tokens = len(longest.prompt.ids) + longest.end
        if self.config.cache_tokens and self.config.cache_tokens < tokens + self.page_size:
            raise ValueError(
                f"rollout.cache_tokens is {self.config.cache_tokens}, but prompt "
                f"{longest.prompt.id!r} may need {tokens} tokens; set it to at least "
                f"{tokens + self.page_size}, or to 0"
            )
        pages = self._num_pages(states, tokens)
        if self.pool is None or self.prefix is None or self.pool.num_pages < pages:
            self.pool = self.prefix = None  # give the old one back before taking the new
            self.pool = self._new_pool(pages)
            self.prefix = PrefixCache(self.pool)
        return self.pool, self.prefix

    def _new_pool(self, pages: int) -> PagePool:
        size = self.page_size
        if self._on_gpu:
            return PagePool(self._take_memory(pages + 1), pages, size, first=1)
        first = 1 if self.pipelined else 0
        store = self.model.new_cache((first + pages) * size)
        return PagePool(store, pages, size, first)

    def _take_memory(self, pages: int) -> PageStore:
        """The store, with memory behind its first `pages`; its addresses never change."""
        if self._memory is None or self._store is None:
            c, precision = self.model.config, self.model.plan.recipe.rollout.attention.kv
            total = torch.cuda.mem_get_info(self.model.device)[1]
            row = c.head_dim * get_format(precision.format).bytes
            most = min(total, MAX_HEAD_ROWS * row) // self._page_bytes
            self._memory = Reservation(most * self._page_bytes, self.model.device)
            self._store = PageStore(
                c.layers, self.page_size, c.kv_heads, c.head_dim, precision, self._memory.tensor
            )
        if pages > self._store.num_pages:
            raise ValueError(
                f"a KV cache of {pages * self.page_size} tokens is more than this GPU can address "
                f"({self._store.num_pages * self.page_size}); set rollout.cache_tokens lower"
            )
        self._memory.resize(pages * self._page_bytes)
        return self._store

    def _num_pages(self, states: list[SampleState], longest: int) -> int:
        size = self.page_size
        if self.config.cache_tokens:
            return self.config.cache_tokens // size
        places = min(self.config.max_batch, len(states))
        each = -(-longest // size) + 1
        prompts = {s.prompt.ids for s in states}
        shared = sum(sorted(-(-len(ids) // size) for ids in prompts)[-places:])
        wanted = places * each + shared
        if not self._on_gpu:
            return max(each, min(wanted, AUTO_CACHE_BYTES // self._page_bytes))
        if self.pool is not None and self.pool.num_pages >= wanted:
            return self.pool.num_pages
        mapped = 0 if self._memory is None else self._memory.mapped
        need = (wanted + 1) * self._page_bytes
        room = int((free_bytes(self.model.device, need) + mapped) * AUTO_CACHE_SHARE)
        return max(each, min(wanted, room // self._page_bytes - 1))

    @property
    def _page_bytes(self) -> int:
        c, precision = self.model.config, self.model.plan.recipe.rollout.attention.kv
        return page_bytes(c.layers, self.page_size, c.kv_heads, c.head_dim, precision)

    def release(self) -> None:
        """Give the cache's memory back until the next `generate`; graphs and addresses stay valid."""
        self.pool = self.prefix = None
        if self._memory is not None:
            self._memory.resize(0)

    @property
    def idle_share(self) -> float:
        """Share of the rows of the last `generate`'s decode steps that computed nothing of use."""
        rows, used = (now - then for now, then in zip(self._rows(), self._rows_before, strict=True))
        return 1.0 - used / rows if rows else 0.0

    @property
    def tail_share(self) -> float:
        """Share of the last `generate`'s time with under a quarter of its places filled."""
        return self._tail.share

    def _rows(self) -> tuple[int, int]:
        """(rows of all decode steps, rows that gave a token)."""
        return self.stats.decode_rows, self.stats.decode_tokens - self.stats.dropped_tokens

    def refresh(self) -> None:
        """Forget all cached K, V and hidden rows: they belong to older weights."""
        if self.prefix is not None:
            self.prefix.clear()
        self._version = self.model.version

    def abort(self) -> None:
        """End the `generate` in progress at its next token."""
        self._abort.set()

    def close(self) -> None:
        """Give everything back."""
        self.pool = self.prefix = self._step = None
        if self._memory is not None and not self._closed:
            torch.cuda.synchronize(self.model.device)
            self._memory.close()
            self._memory = self._store = None
        self._closed = True
