"""The values that flow round the loop: Prompt -> Sample -> Group. All frozen; no field changes meaning.

Token-level batches of the loss are in rl/api.py. This module imports no other room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort", "partial"]
"""An end token or string; the length limit; given up; cut at a step's budget, to be gone on with."""


@dataclass(frozen=True)
class Prompt:
    """One question, already rendered to token ids.

    `id` is stable across runs (task name, split and index). `ids` are the token ids after the chat
    template; `columns` are the row's other fields (always with `answer` where the task has one) and
    reach reward functions by name. `text` is the question text used to keep splits disjoint.
    """

    id: str
    ids: tuple[int, ...]
    text: str
    messages: tuple[Mapping[str, str], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One completion as the engine drew it.

    ids: completion token ids, the end token included when one was drawn.
    logps: float32 [len(ids)], the sampler's own log-probs under the sampling transform in force.
    versions: int32 [len(ids)], the weight version each token was drawn under.
    sample_id: unique over the run; with the seed and the position it decides the sampling noise.
    """

    prompt_id: str
    sample_id: int
    ids: tuple[int, ...]
    logps: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    text: str = ""

    @property
    def truncated(self) -> bool:
        """True when the length limit ended the completion."""
        return self.finish_reason == "length"

    @property
    def finished(self) -> bool:
        """True when nothing more will be drawn of it."""
        return self.finish_reason in ("stop", "length")


@dataclass(frozen=True)
class Group:
    """The samples of one prompt and their rewards (None: no verdict; dropped from the baseline)."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    rewards: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the trainer's log-probs are taken under the same transform.

    temperature 0 is greedy (log-probs are then those of temperature 1). top_p = 1 and top_k = 0 are
    off. `stop` are strings, `stop_ids` token ids; the union with the model's end ids is honoured.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
