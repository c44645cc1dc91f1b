"""A fixed prompt, decoded by the engine and scored by the trainer's forward, after a refresh.

Of a unified recipe the two log-probs of every token are the same 32 bits. If they are not, weights, cache or
captured graphs are out of step: better found on a few tokens now than on a rollout's worth later.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from samebit.diagnosis import Diagnosis, diagnose_mismatch, token_faults
from samebit.engine.api import RolloutEngine
from samebit.engine.requests import transform_of
from samebit.errors import RunStopped
from samebit.models.decoder import Decoder
from samebit.trace import training_side
from samebit.types import Group, Prompt, Sampling

FIRST_SAMPLE = 1 << 42
"""Sample ids of canaries: their noise meets neither training's nor evaluations'."""

LENGTHS = (5, 131)
"""Prompt tokens: within a key block, and past one."""

NEW_TOKENS = 4


class Canary:
    """The fixed prompts of a run, once for the weights of every so many steps.

    sampling: the run's own (its transform is part of the comparison).
    """

    def __init__(self, model: Decoder, sampling: Sampling, every: int = 1) -> None:
        self.model, self.every = model, every
        self._heard = -1
        """Finished steps at the last check."""
        self.sampling = dataclasses.replace(sampling, max_tokens=NEW_TOKENS, stop=(), stop_ids=())
        limit, room = model.config.tokenizer_size, model.config.max_position - NEW_TOKENS
        self.prompts = [
            # a fixed walk over the vocabulary
            Prompt(f"canary-{n}", tuple((7 + 7919 * (i + n)) % limit for i in range(n)), "")
            for n in (min(length, room) for length in LENGTHS)
        ]

    @classmethod
    def of(cls, model: Decoder, every: int, sampling: Sampling) -> Canary | None:
        """The canary of a run: none on a CPU, whose every token is compared, or of a mixed recipe."""
        if not every or model.device.type == "cpu" or not model.plan.unified:
            return None
        return cls(model, sampling, every)

    def check(self, engine: RolloutEngine, step: int) -> None:
        """RunStopped, where it is due after `step` finished steps, was not heard yet, and a bit differs."""
        if step % self.every or step == self._heard:
            return
        self._heard = step
        found = self.sing(engine, step)
        if found is not None:
            raise RunStopped(
                f"canary after step {step}: engine and trainer differ ({found.role}; "
                f"{found.phase}; {found.where}). No token was drawn from these weights for training"
            )

    def sing(self, engine: RolloutEngine, step: int) -> Diagnosis | None:
        """None when every token has the same bits on both sides, else what differs, operator named."""
        groups = engine.generate(self.prompts, 2, self.sampling, FIRST_SAMPLE)
        trainer = self._score(groups)
        if not token_faults(groups, trainer, self.model.version):
            return None
        transform = transform_of(self.sampling)
        return diagnose_mismatch(self.model, groups, trainer, transform, step)

    def _score(self, groups: list[Group]) -> np.ndarray:
        """FP32 log-probs of every completion token by the training forward, in order."""
        samples = [(g.prompt, s) for g in groups for s in g.samples]
        sequences = [[*prompt.ids, *sample.ids] for prompt, sample in samples]
        found = training_side(
            self.model, sequences, digests=False, transform=transform_of(self.sampling)
        )
        parts, start = [], 0
        for (prompt, sample), ids in zip(samples, sequences, strict=True):
            first = start + len(prompt.ids) - 1
            parts.append(found.logp_T[first : first + len(sample.ids)])
            start += len(ids)
        return torch.cat(parts).cpu().numpy()
