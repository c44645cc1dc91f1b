"""The run's configuration: frozen dataclasses, one section each. Imports no torch.

A TOML file has the same sections; `samebit train FILE --section.key value` overrides it. Keys of an
algorithm, a correction or a task live in its own module's `Config`: here they are plain tables
(`RLConfig.algorithm_options` and so on), filled from the section's remaining keys and validated
when that module is loaded. Attribute docstrings are the help texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run is called and kept in."""

    out: str = "runs/run"
    """Folder of the run."""
    device: str = "auto"
    """cpu, cuda, or auto: the GPU where its operators exist, else the CPU."""
    threads: int = 0
    """CPU threads (part of the numerics of a CPU run); 0 keeps the machine's own count."""
    save_every: int = 5
    """Steps between checkpoints; 0 saves only at the end."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep."""
    save_samples: int = 8
    """Completions written to samples.jsonl each step."""
    on_mismatch: Literal["stop", "warn"] = "stop"
    """Where a unified recipe's log-probs differ in a bit: stop before the update, or say so once."""
    canary: int = 1
    """After the refresh of every so many steps (1: of every step), on a GPU with a unified recipe, fixed
    prompts are decoded by the engine and scored by the trainer before anything else is drawn; a differing
    bit is treated as run.on_mismatch says. 0 never."""
    max_skipped_steps: int = 3
    """Steps in a row with a loss or gradient that is not finite before the run stops; 0 never."""


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """Which task, and its table."""

    name: str
    """A file of tasks/ (reasoning_gym, file, ...) or a dotted module path."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's own keys (see docs/tasks.md)."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    max_tokens: int = 256
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same one."""
    top_p: float = 1.0
    """Nucleus mass; 1 is off."""
    top_k: int = 0
    """Tokens kept; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end one, besides the model's own end ids."""
    engine: str = "native"
    """A file of engine/: native (paged, continuous batching) or naive (no cache, the oracle)."""
    max_batch: int = 64
    """Sequences decoded at once."""
    prefill_tokens: int = 0
    """Prompt tokens processed in one forward (longer ones in chunks); 0: 512 on a CPU, 8192 on a GPU."""
    cache_tokens: int = 0
    """KV cache size in tokens; 0 chooses it from max_batch and the lengths, within 2 GB on a CPU and
    85 % of the free memory on a GPU."""
    partial_tokens: int = 0
    """Most tokens a sample is given in one step; it goes on in the next, under the newer weights, and its
    group is trained on when it is whole. 0: every sample is drawn to its end (strictly on-policy)."""


@dataclass(frozen=True, kw_only=True)
class RLSection:
    """What is learnt from the rewards."""

    algorithm: str = "grpo"
    """A file of rl/ or a dotted module path."""
    prompts_per_step: int = 8
    """Prompts sampled each step."""
    group_size: int = 8
    """Completions per prompt."""
    mini_batches: int = 1
    """Optimiser steps the rollout of one step is split into."""
    epochs: int = 1
    """Passes over one rollout."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The algorithm's own keys, such as clip_low (see docs/algorithms.md)."""
    correction: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    """The off-policy correction: `name` and its own keys."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How weights are updated."""

    steps: int = 100
    """Rollout-and-update steps."""
    learning_rate: float = 1e-6
    """Peak AdamW learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up."""
    warmup_steps: int = 0
    """Steps over which it rises linearly from 0."""
    beta1: float = 0.9
    """AdamW first-moment decay."""
    beta2: float = 0.999
    """AdamW second-moment decay."""
    epsilon: float = 1e-8
    """AdamW denominator floor."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 never."""
    optimizer_states: Literal["fp32", "8bit", "host"] = "fp32"
    """AdamW's moments: 8 bytes a parameter; 2; or 8 in pinned host memory, brought in slice by slice."""
    micro_batch_tokens: int = 4096
    """Packed tokens in one forward-backward; a group is never split, so a larger one stands alone."""
    gradient_leaves: int = 0
    """Leaves of the binary tree over which gradients are added, a power of two; 0: one a process. The
    same number gives the same bits on any number of processes."""
    recompute: Literal["auto", "none", "codes", "mlp", "block"] = "auto"
    """What the backward makes again to save memory: nothing, the operands of GEMMs, gate and up too,
    all of a block but its residual sums; auto: as little as fits. Gradients keep their bits."""
    memory_gib: float = 0.0
    """GPU memory that a run is planned into; 0: 95 % of what is free at its start. On a CPU it does
    not apply."""
    profile_step: int = 0
    """Step whose update is timed kernel by kernel, into kernels.txt of the run's folder; 0 none."""
    invariant_scale: float = 1.0
    """QuRL's update-aware scaling s: linears after a norm are divided by s, the gain multiplied."""
    role_learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Learning-rate factors by role (qkv, out, gate_up, down, head, embedding, norm)."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How the policy is judged on held-out prompts."""

    every: int = 5
    """Steps between evaluations; 0 never. The first is before any update, the last at the end."""
    prompts: int = 64
    """Held-out prompts; fewer where the task has fewer."""
    samples: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """Sampling temperature of evaluations; 0 is greedy."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything one run needs."""

    model: str
    """pypi:NAME, a hub id ORG/NAME, or a local folder."""
    recipe: str = "fp8"
    """A file of quant/recipes/ (bf16, fp8, ...) or a dotted module path."""
    seed: int = 0
    """Decides prompts' order and every sampled token."""
    run: RunConfig = field(default_factory=RunConfig)
    task: TaskSection
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rl: RLSection = field(default_factory=RLSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
