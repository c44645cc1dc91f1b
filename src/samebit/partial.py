"""Groups that a step began and left for the next: what is kept of them, compared, and saved.

A sample cut at `rollout.partial_tokens` goes on in the next step from its tokens, under the weights of that
step: each token has the version and the log-prob of its own time. Of older tokens the trainer's ratio is
policy / sampler (docs/engine.md); of every token the sampler's log-prob is compared with the training
forward of its own version, either in the update or, while its group waits, here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samebit.diagnosis import diagnose_mismatch
from samebit.errors import RunStopped
from samebit.models.weights import CheckpointReader
from samebit.rl.metrics import Metrics
from samebit.rl.mismatch import measure
from samebit.tasks.api import TaskBase
from samebit.train.pack import pack_part
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


@dataclass(frozen=True)
class Held:
    """A group with unfinished samples. index: of its prompt in the task's train stream."""

    index: int
    group: Group

    @property
    def tokens(self) -> int:
        """Tokens drawn so far."""
        return sum(len(s.ids) for s in self.group.samples)


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


def about(held: Sequence[Held]) -> dict[str, Any]:
    """What a checkpoint's state says of the groups held."""
    return {
        "prompts": [h.index for h in held],
        "digests": [_digest(h.group.prompt) for h in held],
    }


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(np.asarray(prompt.ids, np.int64).tobytes()).hexdigest()[:16]


def read_held(checkpoint: Path, found: dict[str, Any], task: TaskBase) -> tuple[Held, ...]:
    """The groups that a checkpoint holds; found: its `about`. ValueError where the task's prompts changed."""
    if not found.get("prompts"):
        return ()
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


def compare_held(trainer: Trainer, held: Sequence[Held], step: int) -> dict[str, float]:
    """Compare the present version's tokens of held groups with the training forward, before they go stale.

    `mismatch/held_*`; tokens that wait through a step without an update are compared again. RunStopped,
    the operator named, where a bit differs (run.on_mismatch = "stop").
    """
    model, config = trainer.model, trainer.config
    begun = [
        Group(h.group.prompt, tuple(s for s in h.group.samples if s.ids)) for h in held if h.tokens
    ]
    batches = pack_part(begun, range(len(begun)), config.train.micro_batch_tokens, model.device)
    found, logps = Metrics(), []
    for batch in batches:
        with torch.no_grad():
            logp, _, _ = trainer.scorer.forward(model, batch)
        everything = torch.ones_like(batch.targets, dtype=torch.bool)
        stale = batch.version != model.version
        found = found.merge(measure(logp, batch.rollout_logp, everything, stale))
        logps.append(logp)
    numbers = found.compute()
    if numbers.get("mismatch/tokens_differing") and config.run.on_mismatch == "stop":
        logp_C = torch.cat(logps).cpu().numpy()
        what = diagnose_mismatch(model, begun, logp_C, trainer.scorer.transform, step)
        raise RunStopped(
            f"unfinished samples of step {step}: engine and trainer differ ({what.role}; "
            f"{what.phase}; {what.where}). No weight was moved"
        )
    names = {"tokens": "held_tokens", "tokens_differing": "held_tokens_differing"}
    return {f"mismatch/{new}": numbers.get(f"mismatch/{old}", 0.0) for old, new in names.items()}
