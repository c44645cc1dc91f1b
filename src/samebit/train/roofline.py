"""How near each phase of a step comes to the card's data sheet: least seconds by shape, over seconds taken.

Least means: every product at the dense peak of its format, every byte that must be moved at the memory's
peak, whichever is longer, and nothing else. What is computed again (train.recompute) and the passes
before the first update are not in it. No kernel reaches these peaks; `samebit bench` measures what a
card does reach, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from samebit.config import Config
from samebit.formats import get_format
from samebit.layers.kv import row_bytes
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder
from samebit.quant.plan import LinearShape, Plan
from samebit.spec import Precision
from samebit.train.flops import PEAK_BF16, attention_pairs, stated, training_rates
from samebit.train.memory import parameter_count
from samebit.train.pack import fed_tokens
from samebit.types import Group


@dataclass(frozen=True)
class Card:
    """Peaks of a device: dense operations a second in BF16 (8-bit formats: twice) and bytes a second."""

    bf16: float
    memory: float

    def times(self, count: int) -> Card:
        """So many of them together."""
        return Card(self.bf16 * count, self.memory * count)

    def products(self, precision: Precision) -> float:
        """Operations a second of products of a format."""
        return self.bf16 * (2.0 if get_format(precision.format).bytes == 1 else 1.0)


CARDS = {
    "NVIDIA H100": Card(PEAK_BF16["NVIDIA H100"], 3.35e12),
    "NVIDIA H200": Card(PEAK_BF16["NVIDIA H200"], 4.8e12),
}
"""By the start of the device's name (SXM; NVIDIA's data sheets)."""
_MOMENTS = {"fp32": 8, "8bit": 2}
"""Bytes a parameter of moments on the device."""


def card_of(device_name: str) -> Card | None:
    """The stated peaks of a device, or None where none are stated here."""
    return stated(CARDS, device_name)


def _size(shape: LinearShape) -> int:
    return sum(rows for _, rows in shape.parts) * shape.in_features


def update_seconds(
    card: Card, model: ModelConfig, plan: Plan, groups: Sequence[Group]
) -> dict[str, float]:
    """Of one forward and backward over a rollout, by family of kernels (`train.profile`)."""
    rows = sum(fed_tokens(g) for g in groups)
    predicted = sum(len(s.ids) for g in groups for s in g.samples)
    pairs = sum(attention_pairs(g) for g in groups)
    return counted_seconds(card, model, plan, rows, pairs, predicted)


def counted_seconds(
    card: Card, model: ModelConfig, plan: Plan, rows: int, pairs: int, predicted: int
) -> dict[str, float]:
    """`update_seconds` of so many rows, (query, key) pairs and log-probs: three products a linear."""
    backward, total = plan.recipe.backward, 0.0
    for shape in plan.linears:
        forward = plan.recipe.train.gemm(shape.role).lhs
        precisions = [forward, backward.input_grad.lhs, backward.weight_grad.lhs]
        if shape.role == "head":
            precisions = [forward] * 3
        tokens = predicted if shape.role == "head" else rows
        total += sum(2.0 * tokens * _size(shape) / card.products(p) for p in precisions)
    # seven a head of attention: Q K and P V; backward P again, dP, dV, dQ, dK
    attention = 2.0 * 7 * model.layers * model.heads * model.head_dim * pairs
    return {"products": total, "attention": attention / card.bf16}


def rollout_seconds(
    card: Card, model: ModelConfig, plan: Plan, groups: Sequence[Group], places: int
) -> float:
    """Of drawing the groups' samples, `places` at a time; prompts once a group."""
    samples = [s for g in groups for s in g.samples]
    drawn, prompts = sum(len(s.ids) for s in samples), sum(len(g.prompt.ids) for g in groups)
    steps = max(max(len(s.ids) for s in samples), -(-drawn // places))
    flow, total = plan.recipe.rollout, 0.0
    for shape in plan.linears:
        gemm = flow.gemm(shape.role)
        moved = steps * _size(shape) * get_format(gemm.rhs.format).bytes / card.memory
        rows = drawn if shape.role == "head" else drawn + prompts
        total += max(moved, 2.0 * rows * _size(shape) / card.products(gemm.lhs))
    keys = sum(attention_pairs(g) - _prompt_pairs(g) for g in groups)
    key = 2 * model.layers * model.kv_heads * row_bytes(model.head_dim, flow.attention.kv)
    operations = 4.0 * model.layers * model.heads * model.head_dim * keys
    return total + max(keys * key / card.memory, operations / card.bf16)


def _prompt_pairs(group: Group) -> int:
    length = len(group.prompt.ids)
    return length * (length + 1) // 2


def optimizer_seconds(card: Card, model: ModelConfig, plan: Plan, states: str) -> float | None:
    """Of one AdamW step and requantising; None where moments are in host memory."""
    if states not in _MOMENTS:
        return None
    count = parameter_count(model, plan)
    codes = sum(
        _size(s) * get_format(plan.recipe.train.gemm(s.role).rhs.format).bytes for s in plan.linears
    )
    # master read, written and read again for the codes; gradient read; moments read and written
    return (count * (4 * 4 + 2 * _MOMENTS[states]) + codes) / card.memory


def roofline_shares(
    card: Card,
    model: ModelConfig,
    plan: Plan,
    config: Config,
    groups: Sequence[Group],
    seconds: Mapping[str, float],
    cards: int = 1,
) -> dict[str, float]:
    """perf/roofline_* of a step whose `time/` metrics are `seconds`: least time over time taken.

    cards: among which the groups were divided; each makes the optimiser's step. No rollout's where the
    step drew parts of samples: `groups` were not drawn in its time.
    """
    rl = config.rl
    update = sum(update_seconds(card.times(cards), model, plan, groups).values()) * rl.epochs
    optimizer = optimizer_seconds(card, model, plan, config.train.optimizer_states)
    rollout = rollout_seconds(card.times(cards), model, plan, groups, config.rollout.max_batch)
    taken = {
        "rollout": (rollout, ("rollout",)),
        "update": (update, ("forward", "backward")),
        "optimizer": (optimizer and optimizer * rl.epochs * rl.mini_batches, ("optimizer",)),
    }
    out, in_parts = {}, "rollout/drawn_tokens" in seconds
    for phase, (least, parts) in taken.items():
        time = sum(seconds.get(f"time/{part}_s", 0.0) for part in parts)
        if least is not None and time > 0 and not (phase == "rollout" and in_parts):
            out[f"perf/roofline_{phase}"] = least / time
    return out


def card_under(device: torch.device) -> Card | None:
    """The stated peaks of the device a run is on; None on a CPU."""
    return card_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def known_seconds(
    model: Decoder, groups: Sequence[Group], epochs: int, cards: int = 1
) -> dict[str, float]:
    """Least seconds of an update by family of kernels; empty where no peaks are stated."""
    card = card_under(model.device)
    if card is None:
        return {}
    least = update_seconds(card.times(cards), model.config, model.plan, groups)
    return {family: epochs * seconds for family, seconds in least.items()}


def step_rates(
    model: Decoder,
    config: Config,
    groups: Sequence[Group],
    seconds: Mapping[str, float],
    cards: int = 1,
) -> dict[str, float]:
    """perf/ numbers of a step whose `time/` metrics are `seconds`: rates, MFU, memory, rooflines.

    cards: among which the groups were divided.
    """
    out = training_rates(model, groups, config.rl.epochs, seconds["time/train_s"], cards)
    card = card_under(model.device)
    if card is not None:
        out |= roofline_shares(card, model.config, model.plan, config, groups, seconds, cards)
    return out
