"""Floating-point operations of a training step, by the model's shape, and what the device could do.

A multiply and an add are two operations. A backward is twice its forward. What is computed again
(train.recompute, log-sum-exps) is not counted: model FLOPs, as in PaLM (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder
from samebit.train.pack import fed_tokens
from samebit.types import Group

T = TypeVar("T")

PEAK_BF16 = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}
"""Dense BF16 operations a second by the start of the device's name (SXM; NVIDIA's data sheets). The
peak of every recipe, FP8 ones too, so that their MFU can be compared: it may exceed BF16's."""


def stated(table: Mapping[str, T], device_name: str) -> T | None:
    """A device's entry in a table by the start of its name, or None where it has none."""
    return next((value for name, value in table.items() if device_name.startswith(name)), None)


def peak_of(device_name: str) -> float | None:
    """The stated BF16 peak of a device, or None where none is stated here."""
    return stated(PEAK_BF16, device_name)


def forward_flops(model: ModelConfig, rows: int, pairs: int, predicted: int) -> float:
    """One forward of `rows` fed tokens with `pairs` (query, key) pairs and `predicted` log-probs."""
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    block = model.hidden * (query + 2 * kv) + query * model.hidden
    block += 3 * model.hidden * model.intermediate
    attention = 4 * query * pairs
    head = 2 * model.vocab_size * model.hidden * predicted
    return float(model.layers * (2 * block * rows + attention) + head)


def attention_pairs(group: Group) -> int:
    """(query, key) pairs of a packed group: its prompt once, each sample on the prompt and itself."""
    prompt = len(group.prompt.ids)
    pairs = prompt * (prompt + 1) // 2
    for sample in group.samples:
        fed = len(sample.ids) - 1
        pairs += fed * prompt + fed * (fed + 1) // 2
    return pairs


def training_flops(model: ModelConfig, groups: Sequence[Group]) -> float:
    """Forward and backward of one pass over a rollout's groups."""
    rows = sum(fed_tokens(g) for g in groups)
    pairs = sum(attention_pairs(g) for g in groups)
    predicted = sum(len(s.ids) for g in groups for s in g.samples)
    return 3.0 * forward_flops(model, rows, pairs, predicted)


def training_rates(
    model: Decoder, groups: Sequence[Group], epochs: int, seconds: float, cards: int = 1
) -> dict[str, float]:
    """perf/ numbers of an update that took `seconds`: tokens and FLOPs a second, MFU, memory's peak."""
    seconds = max(1e-9, seconds)
    flops = epochs * training_flops(model.config, groups) / seconds
    out = {
        "perf/train_tokens_per_s": epochs * sum(fed_tokens(g) for g in groups) / seconds,
        "perf/train_tflops_per_s": flops / 1e12,
    }
    if model.device.type == "cuda":
        peak = peak_of(torch.cuda.get_device_name(model.device))
        if peak is not None:
            out["perf/mfu"] = flops / (peak * cards)
        out["perf/train_memory_gib"] = torch.cuda.max_memory_allocated(model.device) / (1 << 30)
    return out
