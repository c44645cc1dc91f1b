"""Groups that a step began and left for the next: what is kept of them, compared, and saved.

A sample cut at `rollout.partial_tokens` goes on in the next step from its tokens, under the weights of that
step: each token has the version and the log-prob of its own time. Of older tokens the trainer's ratio is
policy / sampler (docs/engine.md); of every token the sampler's log-prob is compared with the training
forward of its own version, either in the update or, while its group waits, here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samebit.models.weights import CheckpointReader
from samebit.reference.sampling import Transform
from samebit.rl.mismatch import measure
from samebit.tasks.api import TaskBase
from samebit.train.rollout import Share
from samebit.train.score import Compared
from samebit.train.step import Trainer
from samebit.types import FinishReason, Group, Prompt, Sample

FOLDER = "held"
"""Of a checkpoint: where the tokens of held groups are."""

_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "partial")
_ARRAYS = {
    "samples": np.int64, "sample_id": np.int64, "reason": np.int64, "length": np.int64,
    "ids": np.int32, "logps": np.float32, "versions": np.int32,
}  # fmt: skip
"""samples: of each group; the next three of each sample; the rest of each token."""
_COMPARED = ("tokens", "tokens_differing", "missing_tokens", "logp_abs_max")
"""What is told of the comparison of held groups."""


@dataclass(frozen=True)
class Held:
    """A group with unfinished samples. index: of its prompt in the task's train stream."""

    index: int
    group: Group

    @property
    def tokens(self) -> int:
        """Tokens drawn so far."""
        return sum(len(s.ids) for s in self.group.samples)

    @property
    def whole(self) -> bool:
        """Whether nothing more will be drawn of it."""
        return all(s.finished for s in self.group.samples)


def tensors_of(held: Sequence[Held]) -> dict[str, torch.Tensor]:
    """Bytes to be saved, uint8; {} where nothing is held."""
    if not held:
        return {}
    samples = [s for h in held for s in h.group.samples]
    values: dict[str, Any] = {
        "samples": [len(h.group.samples) for h in held],
        "sample_id": [s.sample_id for s in samples],
        "reason": [_REASONS.index(s.finish_reason) for s in samples],
        "length": [len(s.ids) for s in samples],
        "ids": [i for s in samples for i in s.ids],
        "logps": np.concatenate([s.logps for s in samples]),
        "versions": np.concatenate([s.versions for s in samples]),
    }
    arrays = {name: np.asarray(values[name], dtype) for name, dtype in _ARRAYS.items()}
    return {name: torch.from_numpy(array.view(np.uint8)) for name, array in arrays.items()}


def about(held: Sequence[Held], transform: Transform) -> dict[str, Any]:
    """What a checkpoint's state says of the groups held. transform: what they are drawn under."""
    return {
        "transform": asdict(transform),
        "prompts": [h.index for h in held],
        "digests": [_digest(h.group.prompt) for h in held],
    }


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(np.asarray(prompt.ids, np.int64).tobytes()).hexdigest()[:16]


def read_held(
    checkpoint: Path, found: dict[str, Any], task: TaskBase, transform: Transform
) -> tuple[Held, ...]:
    """The groups that a checkpoint holds; found: its `about`.

    ValueError where the task's prompts or the sampling transform changed.
    """
    if not found.get("prompts"):
        return ()
    _require_same_transform(checkpoint, found.get("transform", {}), transform)
    reader = CheckpointReader(checkpoint / FOLDER, codes=True)
    arrays = {name: reader.read(name).numpy().view(dtype).copy() for name, dtype in _ARRAYS.items()}
    ends = np.cumsum(arrays["length"])
    samples: list[Sample] = []
    for i, end in enumerate(ends.tolist()):
        part = slice(end - int(arrays["length"][i]), end)
        samples.append(
            Sample(
                prompt_id="",
                sample_id=int(arrays["sample_id"][i]),
                ids=tuple(arrays["ids"][part].tolist()),
                logps=arrays["logps"][part],
                versions=arrays["versions"][part],
                finish_reason=_REASONS[int(arrays["reason"][i])],
            )
        )
    out, start = [], 0
    for index, digest, count in zip(
        found["prompts"], found["digests"], arrays["samples"].tolist(), strict=True
    ):
        (prompt,) = task.prompts("train", index, 1)
        if _digest(prompt) != digest:
            raise ValueError(
                f"checkpoint {checkpoint} holds unfinished samples of train prompt {index}, which is "
                f"another prompt now ({prompt.id!r}): set the task's options back"
            )
        mine = tuple(replace(s, prompt_id=prompt.id) for s in samples[start : start + count])
        out.append(Held(index, Group(prompt, mine)))
        start += count
    return tuple(out)


def _require_same_transform(checkpoint: Path, drawn: dict[str, Any], transform: Transform) -> None:
    """Log-probs under two transforms are not of one policy: neither ratios nor comparisons hold."""
    for key, value in asdict(transform).items():
        if drawn.get(key) != value:
            raise ValueError(
                f"checkpoint {checkpoint} holds unfinished samples drawn with rollout.{key} = "
                f"{drawn.get(key)!r}, this run has {value!r}: set it back (a step with "
                "rollout.partial_tokens = 0 finishes them; then it can be changed), or start a new run "
                "in another folder"
            )


def compare_held(trainer: Trainer, held: Sequence[Held]) -> Compared:
    """The present version's tokens of held groups against the training forward, before they go stale."""
    model, config = trainer.model, trainer.config
    begun = []
    for group in (h.group for h in held if h.tokens):
        samples = tuple(s for s in group.samples if s.ids)
        begun.append(Group(group.prompt, samples, (None,) * len(samples)))
    found, everybodys = Compared(begun, ranks=trainer.ranks), range(len(begun))
    budget = config.train.micro_batch_tokens
    share = Share.pack(begun, everybodys, budget, model.device, trainer.leaves, trainer.ranks)
    for leaf, batches in enumerate(share.leaves):
        for batch in batches:
            with torch.no_grad():
                logp, _, _ = trainer.scorer.forward(model, batch)
            everything = torch.ones_like(batch.targets, dtype=torch.bool)
            stale = batch.version != model.version
            found.merge(measure(logp, batch.rollout_logp, everything, stale), leaf)
            found.observed.append(logp)
    return found


def held_metrics(compared: Compared) -> dict[str, float]:
    """mismatch/held_*; tokens that wait through a step without an update are counted again."""
    numbers = compared.numbers()
    names = {n: f"mismatch/{n}" for n in _COMPARED}
    return {f"mismatch/held_{n}": numbers[key] for n, key in names.items() if key in numbers}
