"""The engine: paged KV cache, continuous batching, prompts computed once, the model's modules."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

import torch

from samebit.config import RolloutConfig
from samebit.engine.api import Progress
from samebit.engine.cache import PAGE_SIZE, PagePool, PrefixCache
from samebit.engine.requests import SampleState, new_states, to_groups, transform_of
from samebit.engine.scheduler import Batch, Scheduler, SchedulerStats
from samebit.layers.kv import KVStore, row_bytes
from samebit.layout import PagedLayout
from samebit.models.decoder import Decoder
from samebit.models.tokenizer import Tokenizer
from samebit.reference.sampling import Transform
from samebit.types import Group, Prompt, Sampling

AUTO_CACHE_BYTES = 2 << 30
"""Most a cache takes whose size was left to us; preemption covers what does not fit."""


def keep_freed_memory() -> None:
    """Ask glibc to keep what is freed: else every temporary of some MB is faulted in again.

    Where the C library has no mallopt nothing changes but the speed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 1 << 30)


class Engine:
    """See `RolloutEngine`. The cache is allocated by the first `generate` and kept.

    stats: counters since construction. Not re-entrant; only `abort` may be called from elsewhere.
    """

    def __init__(
        self,
        model: Decoder,
        config: RolloutConfig,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        page_size: int = PAGE_SIZE,
    ) -> None:
        for key in ("max_batch", "prefill_tokens"):
            if getattr(config, key) < 1:
                raise ValueError(f"rollout.{key} is {getattr(config, key)}; it must be >= 1")
        self.model, self.config, self.tokenizer, self.seed = model, config, tokenizer, seed
        self.page_size = page_size
        self.stats = SchedulerStats()
        self.pool: PagePool | None = None
        self.prefix: PrefixCache | None = None
        self._version = model.version
        self._abort = threading.Event()
        self._closed = False
        if model.device.type == "cpu":
            keep_freed_memory()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        sampling: Sampling,
        first_sample_id: int = 0,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> list[Group]:
        """Draw every sample; see `RolloutEngine.generate`."""
        if self._closed:
            raise ValueError("the engine is closed; make a new one")
        transform = transform_of(sampling)
        states = new_states(
            prompts,
            samples_per_prompt,
            sampling,
            first_sample_id,
            self.seed,
            self.model.config,
            self.tokenizer,
        )
        if states:
            self._run(states, transform, progress, deadline_s)
        return to_groups(prompts, states, samples_per_prompt, self.tokenizer)

    def _run(
        self,
        states: list[SampleState],
        transform: Transform,
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        end = None if deadline_s is None else time.monotonic() + deadline_s
        pool, prefix = self._ready(states)
        scheduler = Scheduler(pool, prefix, self.config.max_batch, self.config.prefill_tokens)
        scheduler.stats = self.stats
        for state in states:
            scheduler.add(state)
        self._abort.clear()
        finished = drawn = 0
        complete = False
        try:
            while scheduler.waiting or scheduler.running:
                if self._abort.is_set() or (end is not None and time.monotonic() >= end):
                    break
                tokens, ended = self._step(scheduler, transform)
                drawn, finished = drawn + tokens, finished + ended
                if progress is not None:
                    progress(finished, len(states), drawn)
            complete = True
        finally:
            for slot in list(scheduler.running):
                scheduler.release(slot)
            if not complete:  # pages may be known whose rows were never written
                prefix.clear()

    def _step(self, scheduler: Scheduler, transform: Transform) -> tuple[int, int]:
        """One forward and one draw; (tokens drawn, samples finished)."""
        batch = scheduler.plan()
        if batch.num_rows:
            scheduler.computed(batch, self._forward(batch, scheduler.pool))
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

    def _forward(self, batch: Batch, pool: PagePool) -> torch.Tensor:
        """Hidden rows BF16 [T, K] of a batch; its K and V are written to the pool."""
        device = self.model.device
        width = max(len(slot.pages) for slot, _, _ in batch.chunks)
        table = [slot.pages + [0] * (width - len(slot.pages)) for slot, _, _ in batch.chunks]
        sequence = [i for i, (_, _, tokens) in enumerate(batch.chunks) for _ in tokens]
        positions = [p + i for _, p, tokens in batch.chunks for i in range(len(tokens))]
        ids = [token for _, _, tokens in batch.chunks for token in tokens]
        layout = PagedLayout(
            torch.tensor(table, device=device),
            torch.tensor(sequence, device=device),
            torch.tensor(positions, device=device),
            pool.page_size,
        )
        return self.model(torch.tensor(ids, device=device), layout, "rollout", pool.store)

    def _ready(self, states: list[SampleState]) -> tuple[PagePool, PrefixCache]:
        """The cache, large enough for any one sample and holding nothing of older weights."""
        if self.model.version != self._version:
            self.refresh()
        longest = max(states, key=lambda s: len(s.prompt.ids) + s.limit)
        tokens = len(longest.prompt.ids) + longest.limit
        if self.config.cache_tokens and self.config.cache_tokens < tokens + self.page_size:
            raise ValueError(
                f"rollout.cache_tokens is {self.config.cache_tokens}, but prompt "
                f"{longest.prompt.id!r} may need {tokens} tokens; set it to at least "
                f"{tokens + self.page_size}, or to 0"
            )
        pages = self._num_pages(states, tokens)
        if self.pool is None or self.prefix is None or self.pool.num_pages < pages:
            c = self.model.config
            self.pool = self.prefix = None  # give the old one back before taking the new
            rows = pages * self.page_size
            precision = self.model.plan.recipe.rollout.attention.kv
            store = KVStore(c.layers, rows, c.kv_heads, c.head_dim, self.model.device, precision)
            self.pool = PagePool(store, pages, self.page_size)
            self.prefix = PrefixCache(self.pool)
        return self.pool, self.prefix

    def _num_pages(self, states: list[SampleState], longest: int) -> int:
        size = self.page_size
        if self.config.cache_tokens:
            return self.config.cache_tokens // size
        places = min(self.config.max_batch, len(states))
        each = -(-longest // size) + 1
        prompts = {s.prompt.ids for s in states}
        shared = sum(sorted(-(-len(ids) // size) for ids in prompts)[-places:])
        c = self.model.config
        precision = self.model.plan.recipe.rollout.attention.kv
        page_bytes = 2 * c.layers * c.kv_heads * row_bytes(c.head_dim, precision) * size
        return max(each, min(places * each + shared, AUTO_CACHE_BYTES // page_bytes))

    def refresh(self) -> None:
        """Forget all cached K, V and hidden rows: they belong to older weights."""
        if self.prefix is not None:
            self.prefix.clear()
        self._version = self.model.version

    def abort(self) -> None:
        """End the `generate` in progress at its next token."""
        self._abort.set()

    def close(self) -> None:
        """Give the cache back."""
        self.pool = self.prefix = None
        self._closed = True
