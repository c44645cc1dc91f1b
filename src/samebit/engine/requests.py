"""What every engine shares: checking a request, following one sample, ending it, returning it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from samebit.models.config import ModelConfig
from samebit.models.tokenizer import TextStream, Tokenizer
from samebit.reference.sampling import Transform
from samebit.types import FinishReason, Group, Prompt, Sample, Sampling


@dataclass
class SampleState:
    """A completion being drawn. `limit`: tokens it may have; `seed`: of its noise stream."""

    prompt: Prompt
    sample_id: int
    limit: int
    seed: int
    stop_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    stream: TextStream | None = None
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return self.prompt.ids + tuple(self.ids)

    @property
    def counter(self) -> tuple[int, int, int]:
        """(seed, sample id, absolute position) of the next token's noise."""
        return self.seed, self.sample_id, len(self.prompt.ids) + len(self.ids)

    def push(self, token: int, logp: float, version: int) -> None:
        """Add a drawn token; sets finish_reason when it was the last one."""
        assert self.finish_reason is None
        if not math.isfinite(logp):
            raise self.not_finite(token, logp)
        self.extend([token], [logp], version)
        if token in self.stop_ids or self.completes_stop(token):
            self.finish_reason = "stop"
        elif len(self.ids) >= self.limit:
            self.finish_reason = "length"

    def extend(self, ids: list[int], logps: list[float], version: int) -> None:
        """Add drawn tokens; whether they end the sample is the caller's to say."""
        self.ids += ids
        self.logps += logps
        self.versions += [version] * len(ids)

    def not_finite(self, token: int, logp: float) -> ValueError:
        """The error of a log-prob that is no number."""
        return ValueError(
            f"prompt {self.prompt.id!r}, sample {self.sample_id}: log-prob of token {token} is "
            f"{logp}; the model's weights or activations are not finite"
        )

    def completes_stop(self, token: int) -> bool:
        """Whether the next token's text completes a stop string; to be asked once for each token."""
        if self.stream is None:
            return False
        new = len(self.stream.push(token))
        text = self.stream.text
        return new > 0 and any(s in text[-(new + len(s) - 1) :] for s in self.stop)

    def to_sample(self, tokenizer: Tokenizer | None) -> Sample:
        """The finished value; a sample that never finished has reason 'abort'."""
        return Sample(
            prompt_id=self.prompt.id,
            sample_id=self.sample_id,
            ids=tuple(self.ids),
            logps=np.array(self.logps, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=self.finish_reason or "abort",
            text="" if tokenizer is None else tokenizer.decode(self.ids),
        )


def transform_of(sampling: Sampling) -> Transform:
    """The logit transform both sides apply; ValueError for values that mean nothing."""
    checks = (
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature < math.inf, ">= 0"),
        ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "in (0, 1]"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, ">= 0 (0 is off)"),
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, ">= 1"),
    )
    for key, value, valid, rule in checks:
        if not valid:
            raise ValueError(f"sampling {key} is {value}; it must be {rule}")
    if "" in sampling.stop:
        raise ValueError("sampling stop holds an empty string, which would end every completion")
    return Transform(sampling.temperature, sampling.top_k, sampling.top_p)


def new_states(
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    sampling: Sampling,
    first_sample_id: int,
    seed: int,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
) -> list[SampleState]:
    """One state a sample, grouped by prompt in order; ValueError before any work.

    The noise seed is seed + sampling.seed. End ids are the union of the checkpoint's, the
    tokenizer's and the request's.
    """
    if samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}; it must be >= 1")
    if sampling.stop and tokenizer is None:
        raise ValueError(f"stop strings {sampling.stop} need a tokenizer; give the engine one")
    for prompt in prompts:
        _check_prompt(prompt, config)
    unknown = sorted(i for i in sampling.stop_ids if not 0 <= i < config.tokenizer_size)
    if unknown:
        raise ValueError(
            f"rollout.stop_ids holds {unknown[0]}; the tokenizer's ids go from 0 to "
            f"{config.tokenizer_size - 1}, so it could never be drawn"
        )
    stop_ids = frozenset(config.eos_ids) | frozenset(sampling.stop_ids)
    if tokenizer is not None:
        stop_ids |= frozenset(tokenizer.stop_ids)
    return [
        SampleState(
            prompt=prompt,
            sample_id=first_sample_id + i * samples_per_prompt + j,
            limit=min(sampling.max_tokens, config.max_position - len(prompt.ids)),
            seed=seed + sampling.seed,
            stop_ids=stop_ids,
            stop=sampling.stop,
            stream=tokenizer.stream() if sampling.stop and tokenizer is not None else None,
        )
        for i, prompt in enumerate(prompts)
        for j in range(samples_per_prompt)
    ]


def _check_prompt(prompt: Prompt, config: ModelConfig) -> None:
    length = len(prompt.ids)
    if length == 0:
        raise ValueError(f"prompt {prompt.id!r} has no tokens; a completion needs at least one")
    if length >= config.max_position:
        raise ValueError(
            f"prompt {prompt.id!r} is too long: {length} tokens, and the model has "
            f"{config.max_position} positions, of which a completion needs at least one; shorten "
            "or drop it"
        )
    worst = max(prompt.ids) if min(prompt.ids) >= 0 else min(prompt.ids)
    if not 0 <= worst < config.vocab_size:
        raise ValueError(
            f"prompt {prompt.id!r} holds token id {worst}; the model knows 0 to "
            f"{config.vocab_size - 1}; use the tokenizer that belongs to it"
        )


def to_groups(
    prompts: Sequence[Prompt],
    states: Sequence[SampleState],
    samples_per_prompt: int,
    tokenizer: Tokenizer | None,
) -> list[Group]:
    """Groups in the order of `prompts`."""
    samples = [state.to_sample(tokenizer) for state in states]
    n = samples_per_prompt
    return [Group(p, tuple(samples[i * n : (i + 1) * n])) for i, p in enumerate(prompts)]
