"""What an engine is, and how one is found: the file name in this folder is the engine's name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from samebit import engine as package
from samebit.config import RolloutConfig
from samebit.engine.requests import begin
from samebit.models.decoder import Decoder
from samebit.models.tokenizer import Tokenizer
from samebit.modules import import_named
from samebit.types import Group, Prompt, Sampling

Progress = Callable[[int, int, int], None]
"""Called after every forward with (samples finished, samples asked for, tokens drawn so far)."""

_HELPERS = ("api", "cache", "decode", "memory", "pipeline", "requests", "scheduler", "tail")


class RolloutEngine(Protocol):
    """Draws completions from the trainer's own model; holds no weights of its own.

    A token is a function of the prompt, (seed, sample id, position), the sampling transform and the
    weight version, and of nothing else: engines differ in speed only.
    """

    def __init__(
        self, model: Decoder, config: RolloutConfig, tokenizer: Tokenizer | None, seed: int
    ) -> None: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        sampling: Sampling,
        first_sample_id: int = 0,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> list[Group]:
        """samples_per_prompt completions of each prompt, ids from first_sample_id in order.

        One Group a prompt, in the order given, without rewards. ValueError, before any work, for a
        prompt without room for a token and for sampling values that mean nothing. After deadline_s
        seconds, or on `abort`, unfinished samples come back as they are (finish reason 'abort').
        """
        groups = begin(prompts, samples_per_prompt, first_sample_id)
        return self.advance(groups, sampling, progress, deadline_s)

    def advance(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        progress: Progress | None = None,
        deadline_s: float | None = None,
        budget: int = 0,
    ) -> list[Group]:
        """The groups with their unfinished samples gone on with: `generate` in as many parts as wanted.

        A sample gets at most `budget` tokens (0: no such bound), and has reason 'partial' then. Each
        token carries the weight version and log-prob of its own time; older ones are kept as they are,
        and what they leave in the cache is computed under the present weights. Rewards are dropped.
        """
        ...

    @property
    def idle_share(self) -> float:
        """Share of the rows of the last `generate`'s decode steps that computed nothing of use."""
        ...

    @property
    def tail_share(self) -> float:
        """Share of the last `generate`'s time with under a quarter of its places filled.

        Places: as many as can be computed at once, or samples if there are fewer.
        """
        ...

    def refresh(self) -> None:
        """Drop everything derived from older weights; call after the model's own refresh."""
        ...

    def release(self) -> None:
        """Give the cache's memory back until the next `generate`, which takes it again by itself."""
        ...

    def abort(self) -> None:
        """End the `generate` in progress at its next token (callable from any thread)."""
        ...

    def close(self) -> None:
        """Give the memory back; the engine is unusable afterwards."""
        ...


def engine_names() -> list[str]:
    """Names of the engines shipped here."""
    names = {m.name for m in pkgutil.iter_modules(package.__path__)}
    return sorted(names.difference(_HELPERS))


def load_engine(name: str) -> type[RolloutEngine]:
    """The `Engine` class of engine/<name>.py, or of a dotted module path outside the package."""
    if "." not in name and name not in engine_names():
        raise ValueError(
            f"rollout.engine {name!r} is unknown; known engines: {', '.join(engine_names())}; or "
            "give a dotted module"
        )
    path = name if "." in name else f"{package.__name__}.{name}"
    module: Any = import_named(path, "rollout.engine")
    engine = getattr(module, "Engine", None)
    if not isinstance(engine, type):
        raise ValueError(f"module of engine {name!r} must define a class Engine")
    return engine
