"""The loop for a GPU: a step is launched before the one before it is read.

The device takes each drawn token as the next input by itself, so the host only has to say what
changes: who joins, who leaves, which pages were added. It learns that a sample stopped one step late; the
row computed meanwhile is dropped, and its pages are given to others only by later launches. Tokens and
log-probs are those of every other loop: they are functions of the sample, not of the batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from samebit.engine.cache import PagePool
from samebit.engine.decode import (
    CONTEXT_BOUNDS,
    HEADER,
    DecodeState,
    EagerStep,
    GraphStep,
    Reading,
    bucket_sizes,
    smallest_at_least,
)
from samebit.engine.requests import SampleState
from samebit.engine.scheduler import Batch, Scheduler, Slot
from samebit.layout import PagedLayout, to_device
from samebit.models.decoder import Decoder
from samebit.reference.sampling import Transform, stream_key, stream_state

AHEAD = 16
"""Tokens ahead for which pages are taken once any row needs one, so that tables are uploaded seldom."""


ROWS = 16
"""Forwards of prompts and their draws are filled up to a multiple of this where there is a page for it:
Triton compiles a kernel anew for counts that are no multiples, and first runs wait for it."""


@dataclass(frozen=True)
class _Launch:
    """Tokens not read yet: row rows[i] of the reading belongs to lanes[i], if its turn is still epochs[i]."""

    reading: Reading
    rows: np.ndarray
    lanes: np.ndarray
    epochs: np.ndarray


class Lanes:
    """What was read of each running sample, in arrays: a step's tokens are stored at once.

    A lane is a sample's from its first draw to its release; epoch: how often a lane was given back.
    """

    def __init__(self, count: int, longest: int):
        self.ids = np.zeros((count, longest), np.int32)
        self.logps = np.zeros((count, longest), np.float32)
        self.length, self.limit, self.epoch = (np.zeros(count, np.int64) for _ in range(3))
        self.slots: list[Slot | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[int, int] = {}

    def lane(self, slot: Slot) -> int:
        """The slot's lane, taken now if it has none."""
        held = self._of.get(id(slot))
        if held is None:
            held = self._of[id(slot)] = self._free.pop()
            self.slots[held], self.length[held] = slot, 0
            self.limit[held] = slot.state.end - len(slot.state.ids)
        return held

    def give_back(self, slot: Slot, version: int) -> None:
        """Move what was read to the sample; the lane is free."""
        lane = self._of.pop(id(slot), None)
        if lane is None:
            return
        n = int(self.length[lane])
        slot.state.extend(self.ids[lane, :n].tolist(), self.logps[lane, :n].tolist(), version)
        self.slots[lane] = None
        self.epoch[lane] += 1
        self._free.append(lane)


class Places:
    """Who sits in which row of the decode buffers, and where each row stands."""

    def __init__(self, state: DecodeState):
        self.state = state
        self.table = state.table
        n = state.rows
        self.active = np.zeros(n, bool)
        self.left, self.capacity, self.lanes = (np.zeros(n, np.int64) for _ in range(3))
        self.slots: list[Slot | None] = [None] * n
        self.place_of: dict[int, int] = {}
        """Row by identity of the slot."""
        self.dirty = True
        self.table[:, 0] = -1

    @property
    def positions(self) -> np.ndarray:
        """Position of the token that each active row computes next."""
        return self.table[:, 0]

    def seat(self, slot: Slot, lane: int, left: int) -> int:
        """Put a slot, whose next token is drawn, on the lowest free row."""
        place = int(np.flatnonzero(~self.active)[0])
        state, row = slot.state, self.table[place]
        self.active[place], self.left[place], self.lanes[place] = True, left, lane
        self.slots[place] = slot
        seed, sample_id, position = state.counter
        row[0], row[1] = position, 0
        row[2:4] = np.array([stream_state(seed, sample_id)], np.uint64).view(np.int32)
        row[HEADER:] = 0
        self.set_pages(place)
        return place

    def set_pages(self, place: int) -> None:
        """Take over the pages of the slot on a row."""
        slot = self.slots[place]
        assert slot is not None
        self.place_of[id(slot)] = place
        self.table[place, HEADER : HEADER + len(slot.pages)] = slot.pages
        self.capacity[place] = len(slot.pages) * self.state.page_size
        self.dirty = True

    def leave(self, place: int) -> None:
        """Make a row idle."""
        self.place_of.pop(id(self.slots[place]), None)
        self.active[place], self.slots[place], self.table[place, 0] = False, None, -1
        self.dirty = True

    def leave_slot(self, slot: Slot) -> None:
        """Make the row of a slot idle, if it has one."""
        place = self.place_of.get(id(slot))
        if place is not None:
            self.leave(place)

    def compact(self, buckets: tuple[int, ...]) -> int:
        """Move the last rows into holes until they fit the smallest bucket; its size."""
        seats = np.flatnonzero(self.active)
        bucket = smallest_at_least(buckets, len(seats))
        sources = [p for p in seats.tolist() if p >= bucket]
        if sources:
            targets = np.flatnonzero(~self.active[:bucket])[: len(sources)].tolist()
            for source, target in zip(sources, targets, strict=True):
                self.slots[target] = self.slots[source]
                for held in (self.active, self.left, self.capacity, self.lanes, self.table):
                    held[target] = held[source]
                self.leave(source)
                self.place_of[id(self.slots[target])] = target
            self.state.move(sources, targets)
        return bucket


class Pipeline:
    """One `generate` on a GPU (or, with an EagerStep, on a CPU: for tests)."""

    def __init__(
        self,
        model: Decoder,
        scheduler: Scheduler,
        step: EagerStep | GraphStep,
        transform: Transform,
        states: list[SampleState],
    ):
        self.model, self.scheduler, self.step, self.transform = model, scheduler, step, transform
        self.state = (step.eager if isinstance(step, GraphStep) else step).state
        self.places = Places(self.state)
        longest = max(s.end - len(s.ids) for s in states)
        self.lanes = Lanes(scheduler.max_batch, longest)
        self.buckets = bucket_sizes(scheduler.max_batch)
        longest = (self.state.table.shape[1] - HEADER) * self.state.page_size
        self.bounds = (*(b for b in CONTEXT_BOUNDS if b < longest), longest)
        self.pending: deque[_Launch] = deque()
        self.launched = self.tokens = self.ended = 0
        self.is_stop = np.zeros(model.config.vocab_size, bool)
        self.is_stop[[i for i in states[0].stop_ids if i < len(self.is_stop)]] = True
        self.streams = any(s.stream is not None for s in states)

    def turn(self) -> tuple[int, int]:
        """Launch a decode step and prompts, read what was launched before; (tokens, samples ended)."""
        tokens, ended, launched = self.tokens, self.ended, self.launched
        waiting = len(self.pending)
        forwards = self.scheduler.stats.forwards
        self._launch_decode()
        self._launch_prompts()
        launched = self.launched - launched
        worked = launched or waiting or self.scheduler.stats.forwards > forwards
        assert worked, "nothing to launch and nothing to read"
        while len(self.pending) > launched:
            self._read()
        return self.tokens - tokens, self.ended - ended

    def drain(self) -> None:
        """Read everything that was launched."""
        while self.pending:
            self._read()

    def end(self) -> None:
        """Forget what was not read, move what was to the samples, and leave every row idle."""
        self.pending.clear()
        for slot in [s for s in self.lanes.slots if s is not None]:
            self.lanes.give_back(slot, self.model.version)
        for place in np.flatnonzero(self.places.active).tolist():
            self.places.leave(place)
        self.state.idle()

    def _launch_decode(self) -> None:
        """One step of every seated sample."""
        places, table = self.places, self.places.table
        self._take_pages()
        if not places.active.any():
            return
        bucket = places.compact(self.buckets)
        rows = np.flatnonzero(places.active)
        bound = smallest_at_least(self.bounds, int(table[rows, 0].max()) + 1)
        if isinstance(self.step, GraphStep) and self.step.prepared(bucket, bound, self.transform):
            places.dirty = True
        if places.dirty:
            pages = int(places.capacity[rows].max()) // self.state.page_size
            self.state.upload(bucket, pages)
            places.dirty = False
        self.step.run(bucket, bound, self.transform)
        self._note(Reading(self.state.out[:bucket]), rows, places.lanes[rows])
        table[rows, 0] += 1
        places.left[rows] -= 1
        for place in rows[places.left[rows] == 0].tolist():
            places.leave(place)
        stats = self.scheduler.stats
        stats.forwards += 1
        stats.decode_tokens += len(rows)
        stats.decode_rows += bucket

    def _note(self, reading: Reading, rows: np.ndarray, lanes: np.ndarray) -> None:
        self.pending.append(_Launch(reading, rows, lanes.copy(), self.lanes.epoch[lanes]))
        self.launched += 1

    def _take_pages(self) -> None:
        """A page for every row that needs one, taken from the youngest sample if need be."""
        places = self.places
        while True:
            short = places.active & (places.positions >= places.capacity)
            if not short.any():
                break
            slot = places.slots[int(np.flatnonzero(short)[0])]
            assert slot is not None
            if self._grow(slot):
                self._take_more()

    def _grow(self, slot: Slot) -> bool:
        """One more page for `slot`; False when it lost its place meanwhile."""
        scheduler = self.scheduler
        while not scheduler.prefix.reserve(1):
            if self.pending:
                self.drain()  # samples that ended give pages back
            else:
                self._preempt(scheduler.running[-1])
            if slot not in scheduler.running:
                return False
        slot.pages.append(scheduler.pool.allocate())
        self.places.set_pages(self.places.place_of[id(slot)])
        return True

    def _take_more(self) -> None:
        """Pages for rows that will need one soon, while there are free ones: tables change at once."""
        places, pool = self.places, self.scheduler.pool
        soon = places.positions + np.minimum(places.left - 1, AHEAD)
        for place in np.flatnonzero(places.active & (soon >= places.capacity)).tolist():
            slot = places.slots[place]
            assert slot is not None
            if pool.num_free:
                slot.pages.append(pool.allocate())
                places.set_pages(place)

    def _preempt(self, slot: Slot) -> None:
        """Take a sample's pages and place; it keeps what was drawn. Nothing may be unread."""
        assert not self.pending
        self.lanes.give_back(slot, self.model.version)
        self.places.leave_slot(slot)
        self.scheduler.preempt(slot)

    def _launch_prompts(self) -> None:
        """Prompt chunks and admissions, and the first token of each sample whose tokens are computed."""
        scheduler = self.scheduler
        batch = scheduler.plan_prompts(Batch())
        if batch.num_rows:
            scheduler.computed(batch, forward(self.model, batch, scheduler))
        slots = scheduler.drawing()
        if not slots:
            return
        ids, logps = self._first_tokens(slots)
        device = self.model.device
        lanes, seated, seats = [], [], []
        for i, slot in enumerate(slots):
            slot.hidden = None
            lane = self.lanes.lane(slot)
            lanes.append(lane)
            left = int(self.lanes.limit[lane]) - 1
            if left:
                seated.append(i)
                seats.append(self.places.seat(slot, lane, left))
        if seats:
            chosen, place = to_device(np.array([seated, seats]), device).unbind(0)
            # a row of NaN has no id; its log-prob ends the run when it is read
            ids_ok = ids[chosen].clamp(max=self.model.config.vocab_size - 1)
            self.state.ids[place] = ids_ok
        out = torch.stack((ids.int(), logps.view(torch.int32)), 1)
        self._note(Reading(out), np.arange(len(slots)), np.array(lanes))

    def _first_tokens(self, slots: list[Slot]) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, log-probs) drawn from the slots' hidden rows."""
        n, device = len(slots), self.model.device
        idle = idle_rows(n, self.scheduler.pool)
        rows = [slot.hidden for slot in slots if slot.hidden is not None]
        keys = np.zeros((n + idle, 2), np.uint32)
        keys[:n] = [stream_key(*slot.state.counter) for slot in slots]
        hidden = torch.cat([*rows, *(rows[:1] * idle)])
        ids, logps = self.model.draw(hidden, self.transform, to_device(keys.view(np.int32), device))
        return ids[:n], logps[:n]

    def _read(self) -> None:
        """Take one launch's tokens."""
        launch, lanes = self.pending.popleft(), self.lanes
        out = launch.reading.numpy()[launch.rows]
        valid = lanes.epoch[launch.lanes] == launch.epochs
        self.scheduler.stats.dropped_tokens += len(valid) - int(valid.sum())
        out, mine = out[valid], launch.lanes[valid]
        ids, logps = out[:, 0], out[:, 1].copy().view(np.float32)
        self._require_finite(mine, ids, logps)
        at = lanes.length[mine]
        lanes.ids[mine, at], lanes.logps[mine, at] = ids, logps
        lanes.length[mine] = at + 1
        stopped = self.is_stop[ids]
        if self.streams:
            stopped |= self._complete_stops(mine, ids)
        self.tokens += len(mine)
        for i in np.flatnonzero(stopped | (at + 1 == lanes.limit[mine])).tolist():
            self._end_sample(int(mine[i]), bool(stopped[i]))

    def _require_finite(self, lanes: np.ndarray, ids: np.ndarray, logps: np.ndarray) -> None:
        for i in np.flatnonzero(~np.isfinite(logps)).tolist():
            slot = self.lanes.slots[int(lanes[i])]
            assert slot is not None
            raise slot.state.not_finite(int(ids[i]), float(logps[i]))

    def _complete_stops(self, lanes: np.ndarray, ids: np.ndarray) -> np.ndarray:
        slots = [self.lanes.slots[lane] for lane in lanes.tolist()]
        return np.array(
            [
                slot is not None and slot.state.completes_stop(token)
                for slot, token in zip(slots, ids.tolist(), strict=True)
            ],
            bool,
        )

    def _end_sample(self, lane: int, stopped: bool) -> None:
        slot = self.lanes.slots[lane]
        assert slot is not None
        self.lanes.give_back(slot, self.model.version)
        slot.state.finish_reason = "stop" if stopped else slot.state.reason_at_end
        self.places.leave_slot(slot)
        self.scheduler.release(slot)
        self.ended += 1


def idle_rows(rows: int, pool: PagePool) -> int:
    """Rows of nobody to add to so many: they need a page of nobody."""
    return -rows % ROWS if pool.first else 0


def forward(model: Decoder, batch: Batch, scheduler: Scheduler) -> torch.Tensor:
    """Hidden rows BF16 [T or more, K] of a batch of T; its K and V are written to the pool."""
    pool = scheduler.pool
    chunks = [(slot.pages, start, len(tokens)) for slot, start, tokens in batch.chunks]
    idle = idle_rows(batch.num_rows, pool)
    if idle:
        chunks.append(([0] * pool.pages_for(idle), 0, idle))
    layout = PagedLayout.of_chunks(chunks, pool.page_size, model.device)
    ids = np.zeros(batch.num_rows + idle, np.int64)
    ids[: batch.num_rows] = [token for _, _, tokens in batch.chunks for token in tokens]
    return model(to_device(ids, model.device), layout, "rollout", pool.store)
