"""Continuous batching: who is computed in the next forward, on which pages.

First come, first served. A sample is admitted when a batch place and the pages of its known tokens
are free; when a running one needs a page and none is left, the youngest running one gives its pages
back and waits at the front of the queue, to be computed again from its tokens (which it keeps, with
their log-probs: nothing that was drawn is ever drawn again).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from samebit.engine.cache import PagePool, PrefixCache
from samebit.engine.requests import SampleState
from samebit.layers.kv import PageCopy


@dataclass(eq=False)
class Slot:
    """A sample and its pages. `computed`: leading tokens whose K and V are cached or scheduled.

    target: tokens to compute before the next draw, fixed at admission (the prompt, and after a
    preemption what was drawn). hidden: the last token's hidden row [1, K], from which the next one is drawn.
    ready: whether that row is, or was, there.
    """

    state: SampleState
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    target: tuple[int, ...] = ()
    hidden: torch.Tensor | None = None
    ready: bool = False

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.computed < len(self.target)


@dataclass
class Batch:
    """One forward's rows. chunks: (slot, first position, tokens) in row order.

    last_rows: (slot, row) of every slot whose last known token is in this forward.
    """

    chunks: list[tuple[Slot, int, tuple[int, ...]]] = field(default_factory=list)
    last_rows: list[tuple[Slot, int]] = field(default_factory=list)
    num_rows: int = 0

    def add(self, slot: Slot, tokens: tuple[int, ...]) -> None:
        """Compute `tokens` of a slot, which follow its computed ones."""
        self.chunks.append((slot, slot.computed, tokens))
        self.num_rows += len(tokens)
        slot.computed += len(tokens)
        if not slot.prefilling:
            self.last_rows.append((slot, self.num_rows - 1))


@dataclass
class SchedulerStats:
    """What the engine did since it was made."""

    forwards: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    decode_rows: int = 0
    """Rows of all decode steps, idle ones included (GPU only)."""
    dropped_tokens: int = 0
    """Rows computed for samples that had stopped a step before (GPU only)."""
    captures: int = 0
    """CUDA graphs made."""


class Scheduler:
    """Slots waiting and running over one page pool."""

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache,
        max_batch: int,
        prefill_tokens: int,
        admit_at_least: int = 1,
    ) -> None:
        """admit_at_least: free places for which new prompts wait, unless fewer samples do.

        Where prompts are a forward of their own, one for every sample that ends costs more than a few
        idle places.
        """
        self.pool, self.prefix = pool, prefix
        self.max_batch, self.prefill_tokens = max_batch, prefill_tokens
        self.admit_at_least = admit_at_least
        self.waiting: deque[Slot] = deque()
        self.running: list[Slot] = []
        self.stats = SchedulerStats()

    def add(self, state: SampleState) -> None:
        """Queue a new sample."""
        self.waiting.append(Slot(state))

    def plan(self) -> Batch:
        """The next forward: one token of each decoding slot, prompt chunks up to the budget."""
        batch = Batch()
        self._decode(batch)
        return self.plan_prompts(batch)

    def plan_prompts(self, batch: Batch) -> Batch:
        """Prompt chunks up to the budget, added to `batch`; samples are admitted while they fit."""
        budget = self.prefill_tokens
        for slot in self.running:
            if slot.prefilling and budget > 0:
                budget -= self._chunk(batch, slot, budget)
        self._admit(batch, budget)
        if batch.num_rows:
            self.stats.forwards += 1
        return batch

    def _decode(self, batch: Batch) -> None:
        for slot in list(self.running):
            if slot.prefilling or slot not in self.running:
                continue
            assert slot.computed == len(slot.state.prompt.ids) + len(slot.state.ids) - 1
            if slot.computed == len(slot.pages) * self.pool.page_size and not self._grow(slot):
                continue
            batch.add(slot, (slot.state.ids[-1],))
            self.stats.decode_tokens += 1

    def _grow(self, slot: Slot) -> bool:
        """A page for `slot`, taken from the youngest if need be; False when that is `slot`."""
        while not self.prefix.reserve(1):
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is slot:
                return False
        slot.pages.append(self.pool.allocate())
        return True

    def preempt(self, slot: Slot) -> None:
        """Take a running slot's pages; it waits at the front with all its tokens."""
        self.release(slot)
        self.waiting.appendleft(slot)
        self.stats.preemptions += 1

    def release(self, slot: Slot) -> None:
        """Take a slot out of the batch and give its pages back."""
        self.running.remove(slot)
        for page in slot.pages:
            self.pool.release(page)
        slot.pages, slot.computed, slot.target, slot.hidden = [], 0, (), None
        slot.ready = False

    def _chunk(self, batch: Batch, slot: Slot, budget: int) -> int:
        tokens = slot.target[slot.computed : slot.computed + budget]
        batch.add(slot, tokens)
        self.stats.prefill_tokens += len(tokens)
        # shareable at once: whoever matches these pages is computed in this forward or a later one
        self.prefix.insert(slot.target, slot.pages, slot.computed)
        return len(tokens)

    def _admit(self, batch: Batch | None, budget: int) -> None:
        """Start waiting slots in order; one whose prompt is being computed keeps its place."""
        being_computed = {s.target for s in self.running if not (s.state.ids or s.ready)}
        passed: list[Slot] = []
        copies: list[PageCopy] = []
        room = self.max_batch - len(self.running)
        if room < min(len(self.waiting), self.admit_at_least):
            budget = 0  # what is computed already may still be shared
        while self.waiting and len(self.running) + len(passed) < self.max_batch:
            slot = self.waiting.popleft()
            ids = slot.state.all_ids
            if ids in being_computed:
                passed.append(slot)
                continue
            if self._fork(slot, copies):
                continue
            if batch is None or budget <= 0 or not self._start(slot, ids):
                self.waiting.appendleft(slot)
                break
            budget -= self._chunk(batch, slot, budget)
            if not slot.state.ids:
                being_computed.add(ids)
        self.waiting.extendleft(reversed(passed))
        self.pool.copy(copies)

    def computed(self, batch: Batch, hidden_TK: torch.Tensor) -> None:
        """Take the forward's result; samples that wait for a prompt computed in it start now."""
        for slot, row in batch.last_rows:
            slot.hidden, slot.ready = hidden_TK[row : row + 1], True
            if not slot.state.ids:
                hidden = hidden_TK[row : row + 1].clone()
                self.prefix.insert_prompt(slot.target, slot.pages, hidden)
        self._admit(None, 0)

    def drawing(self) -> list[Slot]:
        """Slots that draw a token now."""
        return [slot for slot in self.running if slot.hidden is not None]

    def _fork(self, slot: Slot, copies: list[PageCopy]) -> bool:
        """Start from a computed prompt: share its full pages, have the half-filled one copied.

        A source let go here may be another's target: copies are made in order, before any write.
        """
        ids = slot.state.prompt.ids
        entry = None if slot.state.ids else self.prefix.prompt(ids)
        if entry is None:
            return False
        held = [self.pool.hold(page) for page in entry.pages]
        tail = len(ids) % self.pool.page_size
        if tail:
            if not self.prefix.reserve(1):
                for page in held:
                    self.pool.release(page)
                return False
            source, target = held.pop(), self.pool.allocate()
            copies.append((source, target, tail))
            self.pool.release(source)
            held.append(target)
        slot.pages, slot.computed, slot.target, slot.hidden = held, len(ids), ids, entry.hidden
        slot.ready = True
        self.running.append(slot)
        self.stats.shared_tokens += len(ids)
        return True

    def _start(self, slot: Slot, ids: tuple[int, ...]) -> bool:
        """Take pages for every token of `ids`; False, nothing taken, when there are too few."""
        pages = self.prefix.match(ids)
        missing = self.pool.pages_for(len(ids)) - len(pages)
        if not self.prefix.reserve(missing):
            for page in pages:
                self.pool.release(page)
            return False
        slot.pages = pages + [self.pool.allocate() for _ in range(missing)]
        slot.computed = len(pages) * self.pool.page_size
        slot.target = ids
        self.running.append(slot)
        self.stats.shared_tokens += slot.computed
        return True
