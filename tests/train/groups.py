"""Rollouts for trainer tests: sampled from the model itself, one uncached forward a token."""

import numpy as np
import torch

from samebit.config import Config, RLSection, RolloutConfig, TaskSection, TrainConfig
from samebit.layout import PackedLayout, Segment
from samebit.models.decoder import Decoder
from samebit.reference.sampling import Transform
from samebit.rl.registry import load_algorithm, load_correction
from samebit.train.step import Trainer
from samebit.types import Group, Prompt, Sample

PROMPTS = ([5, 6, 7, 8] * 4, [50, 60, 70] * 8, [3] * 140, [9])


def draw(model: Decoder, prompt: list[int], sample_id: int, length: int) -> Sample:
    ids, logps = list(prompt), []
    with torch.no_grad():
        for t in range(length):
            layout = PackedLayout((Segment(0, len(ids)),))
            hidden = model(torch.tensor(ids), layout, "rollout")
            token, logp = model.sample(hidden[-1:], Transform(), [(0, sample_id, t)])
            ids.append(int(token))
            logps.append(float(logp))
    return Sample(
        prompt_id="p",
        sample_id=sample_id,
        ids=tuple(ids[len(prompt) :]),
        logps=np.array(logps, dtype=np.float32),
        versions=np.full(length, model.version, dtype=np.int32),
        finish_reason="stop",
    )


def rollout(model: Decoder, group_size: int = 3, first_id: int = 0) -> list[Group]:
    """Four prompts; completions of 1 to 4 tokens; rewards 0, 1, 2, ... within a group."""
    groups = []
    for n, prompt in enumerate(PROMPTS):
        samples = tuple(
            draw(model, prompt, first_id + n * group_size + i, 1 + (n + i) % 4)
            for i in range(group_size)
        )
        rewards = tuple(float(i) for i in range(group_size))
        groups.append(Group(Prompt(str(n), tuple(prompt), "text"), samples, rewards))
    return groups


def config_for(micro_batch_tokens: int = 4096, rl: dict | None = None, **train) -> Config:
    return Config(
        model="tiny",
        task=TaskSection(name="none"),
        rollout=RolloutConfig(max_tokens=8),
        rl=RLSection(group_size=3, prompts_per_step=4, **(rl or {})),
        train=TrainConfig(
            **({"learning_rate": 1e-3} | train), micro_batch_tokens=micro_batch_tokens
        ),
    )


def trainer_for(
    model: Decoder, config: Config, correction: str = "none", algorithm: str = "grpo", **options
) -> Trainer:
    return Trainer(
        model, config, load_algorithm(algorithm, options), load_correction(correction, {})
    )
