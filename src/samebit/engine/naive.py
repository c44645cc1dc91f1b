"""The oracle: no cache, no batching, one forward over the whole sequence for every token.

It says what a sample is. Anything faster must return these tokens and these log-prob bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from samebit.config import RolloutConfig
from samebit.engine.api import Progress, RolloutEngine
from samebit.engine.requests import SampleState, states_of, to_groups, transform_of
from samebit.layout import PackedLayout, Segment
from samebit.models.decoder import Decoder
from samebit.models.tokenizer import Tokenizer
from samebit.reference.sampling import Transform
from samebit.types import Group, Sampling


class Engine(RolloutEngine):
    """See `RolloutEngine`. O(tokens^2) forwards: for tests and for bisecting."""

    def __init__(
        self, model: Decoder, config: RolloutConfig, tokenizer: Tokenizer | None, seed: int
    ) -> None:
        self.model, self.config, self.tokenizer, self.seed = model, config, tokenizer, seed
        self._abort = threading.Event()

    @torch.no_grad()
    def advance(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        progress: Progress | None = None,
        deadline_s: float | None = None,
        budget: int = 0,
    ) -> list[Group]:
        """See `RolloutEngine.advance`."""
        transform = transform_of(sampling)
        config, tokenizer = self.model.config, self.tokenizer
        states = states_of(groups, sampling, self.seed, config, tokenizer, budget)
        end = None if deadline_s is None else time.monotonic() + deadline_s
        self._abort.clear()
        drawn = 0
        for finished, state in enumerate(states):
            while state.finish_reason is None:
                if self._abort.is_set() or (end is not None and time.monotonic() >= end):
                    return to_groups(groups, states, tokenizer)
                self._step(state, transform)
                drawn += 1
                if progress is not None:
                    done = finished + (state.finish_reason is not None)
                    progress(done, len(states), drawn)
        return to_groups(groups, states, tokenizer)

    def _step(self, state: SampleState, transform: Transform) -> None:
        ids = torch.tensor(state.all_ids, device=self.model.device)
        layout = PackedLayout((Segment(0, len(ids)),), self.model.device)
        hidden = self.model(ids, layout, "rollout")[-1:]
        token, logp = self.model.sample(hidden, transform, [state.counter])
        state.push(int(token), float(logp), self.model.version)

    @property
    def idle_share(self) -> float:
        """Every forward is of one sample."""
        return 0.0

    @property
    def tail_share(self) -> float:
        """There is one place, and it is filled."""
        return 0.0

    def refresh(self) -> None:
        """Nothing is kept between tokens, so nothing can be stale."""

    def release(self) -> None:
        """No memory is kept."""

    def abort(self) -> None:
        """End the `generate` in progress at its next token."""
        self._abort.set()

    def close(self) -> None:
        """Nothing to give back."""
