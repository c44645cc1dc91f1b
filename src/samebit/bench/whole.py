"""A whole RL step of random weights on the card: the engine draws, the trainer updates, both refresh."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from samebit.bench import training
from samebit.config import RolloutConfig
from samebit.engine.api import load_engine
from samebit.rl.registry import load_algorithm, load_correction
from samebit.train.flops import training_rates
from samebit.train.memory import GIB
from samebit.train.step import Trainer
from samebit.types import Group, Prompt, Sampling

GROUP_SIZE = 8
PARTS = ("score", "forward", "backward", "optimizer")


class RealStep:
    """One model, engine and trainer; `run` is rollout, update and refresh. Rewards are coin tosses."""

    def __init__(
        self, model: str, recipe: str, sequences: int, length: int, layers: int = 0
    ) -> None:
        self.answer = length - training.PROMPT
        rollout = RolloutConfig(max_tokens=self.answer, max_batch=sequences)
        config = training.settings(training.PACK, length, "none")
        self.config = replace(config, rollout=rollout)
        self.model = training.random_decoder(training.shape_of(model, layers), recipe)
        algorithm, correction = load_algorithm("grpo", {}), load_correction("none", {})
        self.trainer = Trainer(self.model, self.config, algorithm, correction)
        self.engine = load_engine("native")(self.model, rollout, None, 0)
        numbers = np.random.default_rng(0)
        self._numbers = numbers
        size = self.model.config.tokenizer_size
        self.prompts = [
            Prompt(str(i), tuple(numbers.integers(0, size, training.PROMPT).tolist()), "")
            for i in range(sequences // GROUP_SIZE)
        ]

    def _rewarded(self, group: Group) -> Group:
        tosses = self._numbers.integers(0, 2, len(group.samples)).tolist()
        return replace(group, rewards=tuple(float(t) for t in tosses))

    def run(self, answer: int = 0) -> dict[str, Any]:
        """The fields of a row; answer: tokens of a completion, where fewer are wanted."""
        sampling = Sampling(max_tokens=answer or self.answer)
        torch.cuda.synchronize()
        began = time.perf_counter()
        groups = self.engine.generate(self.prompts, GROUP_SIZE, sampling)
        drawn = time.perf_counter()
        self.engine.release()
        groups = [self._rewarded(g) for g in groups]
        torch.cuda.reset_peak_memory_stats()
        metrics = self.trainer.step(groups)
        torch.cuda.synchronize()
        trained = time.perf_counter()
        self.engine.refresh()
        tokens = sum(len(s.ids) for g in groups for s in g.samples)
        rates = training_rates(self.model, groups, 1, trained - drawn)
        return {
            "tokens": tokens,
            "rollout_s": drawn - began,
            "training_s": trained - drawn,
            "step_s": trained - began,
            **{f"{part}_s": metrics[f"time/{part}_s"] for part in PARTS},
            "rollout_tokens_per_s": tokens / (drawn - began),
            "mfu": rates.get("perf/mfu", 0.0),
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "tokens_differing": metrics["mismatch/tokens_differing"],
            "logp_abs_max": metrics["mismatch/logp_abs_max"],
        }
