"""What a step trains on: prompts sampled and graded, whole or, with `rollout.partial_tokens`, in parts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from samebit.clock import Clock
from samebit.config import Config
from samebit.engine.api import RolloutEngine
from samebit.engine.requests import begin
from samebit.partial import Held
from samebit.ranks import ALONE, Ranks
from samebit.reporter import Reporter
from samebit.rl.api import Algorithm
from samebit.samples import aborted, rollout_metrics, without_empty
from samebit.tasks.api import TaskBase
from samebit.train.checkpoint import Progress
from samebit.types import Group, Prompt, Sampling


@dataclasses.dataclass(frozen=True)
class Collected:
    """A step's samples. groups: to train on. seen: all that were graded. held: begun and not finished.

    progress: the counters after the step, its number apart.
    """

    groups: list[Group]
    seen: list[Group]
    metrics: dict[str, float]
    progress: Progress
    held: tuple[Held, ...] = ()


class Collector:
    """Draws and grades a step's samples."""

    def __init__(
        self,
        config: Config,
        task: TaskBase,
        engine: RolloutEngine,
        algorithm: Algorithm,
        sampling: Sampling,
        report: Reporter,
        ranks: Ranks = ALONE,
    ):
        self.config, self.task, self.engine, self.ranks = config, task, engine, ranks
        self.algorithm, self.sampling, self.report = algorithm, sampling, report
        self._busy_s: list[list[float]] = []
        """Seconds that each process drew, rollout by rollout of the step."""

    def draw(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        first_sample: int,
        what: str = "rollout",
        clock: Clock | None = None,
    ) -> list[Group]:
        """Completions of prompts, graded; divided among the run's processes, everybody's."""
        mine = self.ranks.drawn(len(prompts))
        clock = clock or Clock()
        with clock("rollout"), self._waiting():
            groups = self.engine.generate(
                [prompts[i] for i in mine],
                samples,
                sampling,
                first_sample + mine.start * samples,
                self.report.progress(what),
            )
        with clock("reward"):
            return self.ranks.everybodys(grade(self.task, groups))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A rollout ends when all have drawn theirs; how long each was at it is noted."""
        begun = time.perf_counter()
        yield
        self._busy_s.append(self.ranks.gather(time.perf_counter() - begun))

    def _numbers(self, seen: Sequence[Group]) -> dict[str, float]:
        """reward/ and rollout/ of a step; what grading counted, by everybody; who waited for whom."""
        counts = self.ranks.gather(self.task.stats.metrics(reset=True))
        out = rollout_metrics(seen) | {key: sum(c[key] for c in counts) for key in counts[0]}
        if self.ranks.size > 1:
            longest = sum(map(max, self._busy_s))
            busy = sum(map(sum, self._busy_s)) / self.ranks.size
            out["perf/rollout_wait_share"] = 1.0 - busy / max(longest, 1e-9)
        return out

    def collect(self, progress: Progress, held: Sequence[Held], clock: Clock) -> Collected:
        """The next step's groups; held: what the step before left."""
        self._busy_s.clear()
        if held or self.config.rollout.partial_tokens:
            return self._parts(progress, held, clock)
        return self._rounds(progress, clock)

    def _rounds(self, progress: Progress, clock: Clock) -> Collected:
        """Sample until the algorithm's selection fills a step, at most its number of rounds."""
        config, wanted = self.config, self.config.rl.prompts_per_step
        kept: list[Group] = []
        seen: list[Group] = []
        for _ in range(self.algorithm.max_sampling_rounds):
            prompts = self.task.prompts("train", progress.next_prompt, wanted)
            groups = self.draw(
                prompts, config.rl.group_size, self.sampling, progress.next_sample, clock=clock
            )
            progress = self._after(progress)
            seen += groups
            selection = self.algorithm.select(without_empty(groups))
            kept += selection.groups
            if len(kept) >= wanted:
                break
        else:
            if len(kept) < wanted:
                self.report.note(f"{selection.describe()}; training on {len(kept)} groups")
        return Collected(kept[:wanted], seen, self._numbers(seen), progress)

    def _parts(self, progress: Progress, held: Sequence[Held], clock: Clock) -> Collected:
        """New prompts and those held go on by `partial_tokens` a sample; whole groups are trained on."""
        config, start = self.config, progress.next_prompt
        wanted, size = config.rl.prompts_per_step, config.rl.group_size
        new = begin(self.task.prompts("train", start, wanted), size, progress.next_sample)
        open_ones = [*held, *(Held(start + i, group) for i, group in enumerate(new))]
        mine = [open_ones[i] for i in self.ranks.drawn(len(open_ones))]
        with clock("rollout"), self._waiting():
            groups = self.engine.advance(
                [h.group for h in mine],
                self.sampling,
                self.report.progress("rollout"),
                budget=config.rollout.partial_tokens,
            )
        moved = [Held(h.index, group) for h, group in zip(mine, groups, strict=True)]
        now = self.ranks.everybodys(moved)
        whole = [h.group for h in now if h.whole]
        left = tuple(h for h in now if not h.whole)
        with clock("reward"):
            ungraded = [whole[i] for i in self.ranks.drawn(len(whole))]
            seen = self.ranks.everybodys(grade(self.task, ungraded))
        selection = self.algorithm.select(without_empty(seen))
        drawn = sum(h.tokens for h in now) - sum(h.tokens for h in held)
        metrics = self._numbers(seen) | {
            "rollout/drawn_tokens": float(drawn),
            "rollout/groups": float(len(whole)),
            "rollout/held_groups": float(len(left)),
            "rollout/held_tokens": float(sum(h.tokens for h in left)),
        }
        return Collected(list(selection.groups), seen, metrics, self._after(progress), left)

    def _after(self, progress: Progress) -> Progress:
        """The counters after a step's worth of prompts."""
        wanted, size = self.config.rl.prompts_per_step, self.config.rl.group_size
        return dataclasses.replace(
            progress,
            next_prompt=progress.next_prompt + wanted,
            next_sample=progress.next_sample + wanted * size,
        )


def grade(task: TaskBase, groups: Sequence[Group]) -> list[Group]:
    """Rewards for every sample; None is no verdict, as for a sample that the engine gave up."""
    whole = [(g.prompt, s.text) for g in groups for s in g.samples if not aborted(s)]
    found = iter(task.reward([p for p, _ in whole], [t for _, t in whole]))
    return [
        dataclasses.replace(
            g, rewards=tuple(None if aborted(s) else next(found) for s in g.samples)
        )
        for g in groups
    ]
