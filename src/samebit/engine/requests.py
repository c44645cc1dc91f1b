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
    """A completion being drawn. `limit`: tokens it may have; `seed`: of its noise stream.

    cut: tokens at which it is left for another time; none: `limit`.
    """

    prompt: Prompt
    sample_id: int
    limit: int
    seed: int
    stop_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    stream: TextStream | None = None
    cut: int | None = None
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
        elif len(self.ids) >= self.end:
            self.finish_reason = self.reason_at_end

    @property
    def end(self) -> int:
        """Tokens it has when it leaves the engine without a stop."""
        return self.limit if self.cut is None else min(self.limit, self.cut)

    @property
    def reason_at_end(self) -> FinishReason:
        """Why it leaves then."""
        return "length" if self.end == self.limit else "partial"

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


def positions_warning(sampling: Sampling, config: ModelConfig) -> str | None:
    """What becomes of answers that may be longer than the model's positions; None where none may."""
    if sampling.max_tokens <= config.max_position:
        return None
    return (
        f"rollout.max_tokens = {sampling.max_tokens:,}: answers end at the model's "
        f"{config.max_position:,} positions, of which their prompt takes its part"
    )


def begin(
    prompts: Sequence[Prompt], samples_per_prompt: int, first_sample_id: int = 0
) -> list[Group]:
    """Groups without a token, to be given to `advance`; ids from first_sample_id in order."""
    if samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}; it must be >= 1")

    def sample(prompt: Prompt, number: int) -> Sample:
        nothing = np.zeros(0, np.float32), np.zeros(0, np.int32)
        return Sample(prompt.id, first_sample_id + number, (), *nothing, "partial")

    n = samples_per_prompt
    return [
        Group(prompt, tuple(sample(prompt, i * n + j) for j in range(n)))
        for i, prompt in enumerate(prompts)
    ]


def check_stop_ids(sampling: Sampling, config: ModelConfig) -> None:
    """ValueError for an end id that the model cannot draw."""
    unknown = sorted(i for i in sampling.stop_ids if not 0 <= i < config.tokenizer_size)
    if unknown:
        raise ValueError(
            f"rollout.stop_ids holds {unknown[0]}; the tokenizer's ids go from 0 to "
            f"{config.tokenizer_size - 1}, so it could never be drawn"
        )


def states_of(
    groups: Sequence[Group],
    sampling: Sampling,
    seed: int,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    budget: int = 0,
) -> list[SampleState]:
    """The states of all samples in order, finished ones with their reason; ValueError before any work.

    The noise seed is seed + sampling.seed. End ids are the union of the checkpoint's, the
    tokenizer's and the request's. budget: tokens a sample may be given now (0: up to its limit).
    """
    if budget < 0:
        raise ValueError(f"the budget is {budget} tokens; it must be >= 0 (0 is none)")
    if sampling.stop and tokenizer is None:
        raise ValueError(f"stop strings {sampling.stop} need a tokenizer; give the engine one")
    for group in groups:
        _check_prompt(group.prompt, config)
    check_stop_ids(sampling, config)
    stop_ids = frozenset(config.eos_ids) | frozenset(sampling.stop_ids)
    if tokenizer is not None:
        stop_ids |= frozenset(tokenizer.stop_ids)

    def state_of(group: Group, sample: Sample) -> SampleState:
        drawn = len(sample.ids)
        state = SampleState(
            prompt=group.prompt,
            sample_id=sample.sample_id,
            limit=min(sampling.max_tokens, config.max_position - len(group.prompt.ids)),
            seed=seed + sampling.seed,
            stop_ids=stop_ids,
            stop=sampling.stop,
            stream=tokenizer.stream() if sampling.stop and tokenizer is not None else None,
            cut=drawn + budget if budget else None,
            ids=list(sample.ids),
            logps=sample.logps.tolist(),
            versions=sample.versions.tolist(),
        )
        if sample.finished:
            state.finish_reason = sample.finish_reason
        elif drawn >= state.limit:  # it was begun under a higher limit
            state.finish_reason = "length"
        elif state.stream is not None:
            for token in sample.ids:
                state.stream.push(token)
        return state

    return [state_of(group, sample) for group in groups for sample in group.samples]


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
    groups: Sequence[Group], states: Sequence[SampleState], tokenizer: Tokenizer | None
) -> list[Group]:
    """The groups with the samples as their states are now."""
    samples = iter([state.to_sample(tokenizer) for state in states])
    return [Group(g.prompt, tuple(next(samples) for _ in g.samples)) for g in groups]
