"""What a run will take on the device, from shapes alone, and which setting makes each part smaller.

An estimate to plan with, made before anything is loaded: weights, gradients and moments are exact, what
the backward keeps is counted from the operators (docs/numerics.md says which values those are), the
temporaries of one block are an allowance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from samebit.config import Config, TrainConfig
from samebit.formats import BLOCK, get_format
from samebit.layers.block import Recompute
from samebit.layers.kv import row_bytes
from samebit.models.config import ModelConfig
from samebit.operand import pad_to_block
from samebit.quant.plan import LinearShape, Plan
from samebit.spec import BF16, Precision
from samebit.train.quant_metrics import CODES_LIMIT

GIB = 1 << 30
_HEAD_CHUNK = 33 * 128
"""Ids of the vocabulary whose gradient exists at a time (kernels/head_backward.py)."""
_SLICES = 4 << 28
"""Moments of two slices on the device with optimizer_states = "host" (train/states_host.py)."""
LEVELS: tuple[Recompute, ...] = ("none", "codes", "mlp", "block")
"""train.recompute, from what keeps most to what keeps least."""
SHARE = 0.95
"""Of the free memory, what a plan may fill: the rest is for graphs, workspaces and split blocks."""


@dataclass(frozen=True)
class Part:
    """One use of memory, in bytes. lever: the setting that makes it smaller; "" where none does."""

    name: str
    size: int
    lever: str = ""
    saves: int = 0
    """Bytes that the lever gives back."""
    host: bool = False
    """In host memory, not on the device."""


@dataclass(frozen=True)
class MemoryPlan:
    """The parts of a run in order; `total` of the device's."""

    parts: tuple[Part, ...]
    recompute: tuple[Recompute, ...] = ()
    """What each block makes again (train.recompute; "auto" resolved)."""
    tokens: int = 0
    """Rows of the largest pack."""
    per_token: int = 0
    """Bytes that one more row of a pack would take."""
    cache_row: int = 0
    """Bytes of a token's keys and values over all layers."""
    answer: int = 0
    """Tokens of the longest answer there can be: rollout.max_tokens within the model's positions."""

    @property
    def total(self) -> int:
        """Bytes on the device during training, the KV cache apart (it is given back)."""
        return sum(p.size for p in self.parts if not p.host and p.name != "KV cache")

    @property
    def standing(self) -> int:
        """Bytes on the device during a rollout, the KV cache apart: masters, weights and moments."""
        names = ("FP32 masters", "weights", "moments", "reference", "BF16 shadow")
        return sum(p.size for p in self.parts if p.name.startswith(names) and not p.host)

    @property
    def cache(self) -> int:
        """Bytes of the KV cache."""
        return sum(p.size for p in self.parts if p.name == "KV cache")

    @property
    def largest_lever(self) -> Part | None:
        """The part whose lever gives back most."""
        useful = [p for p in self.parts if p.lever and p.saves and p.name != "KV cache"]
        return max(useful, key=lambda p: p.saves, default=None)

    def describe(self, available: int = 0) -> str:
        """A table for people; available: bytes of the device (0: unknown)."""
        lines = ["memory on the device during training (estimated):"]
        for p in self.parts:
            if p.size:
                where = "  (host memory)" if p.host else ""
                less = f"  ({_gib(p.saves)} less with {p.lever})" if p.lever and p.saves else ""
                lines.append(f"  {p.name:38s} {_gib(p.size):>11s}{where}{less}")
        lines.append(f"  {'training, together':38s} {_gib(self.total):>11s}")
        lines.append(f"  a backward makes again: {self.describe_recompute()}")
        if available:
            lines.append(f"  {self._verdict(available)}")
        return "\n".join(lines)

    def describe_recompute(self) -> str:
        """`codes`, or `mlp in 12 blocks, codes in 24`."""
        counts = [(level, self.recompute.count(level)) for level in reversed(LEVELS)]
        counts = [(level, count) for level, count in counts if count]
        if len(counts) == 1:
            return counts[0][0]
        return ", ".join(f"{level} in {count} blocks" for level, count in counts)

    def _verdict(self, available: int) -> str:
        left = available - self.total
        if left >= 0:
            room = f"{_gib(left)} of {_gib(available)} are left"
            packs = self.tokens + left // max(1, self.per_token)
            return f"{room}: packs of up to {packs:,} tokens (train.micro_batch_tokens) fit"
        lever = self.largest_lever
        use = "" if lever is None else f"; most is won with {lever.lever}"
        return f"{_gib(-left)} more than the {_gib(available)} there are{use}"

    def longest_answers(self, group_size: int, available: int) -> int:
        """Tokens that each answer of a group may have where such a group alone is to fit; 0: none fit."""
        over = max(0, self.total - available)
        return max(0, self.tokens - -(-over // max(1, self.per_token))) // group_size

    def advice(self, phase: str) -> str:
        """What to change after the device ran out of memory in a phase (load, rollout, train, ...)."""
        if phase in ("rollout", "evaluation", "canary"):
            return "lower rollout.max_batch or rollout.cache_tokens"
        if phase == "load":
            return "the model does not fit beside what else is on the device; free it, or train a smaller one"
        lever = self.largest_lever
        if lever is None:
            return "lower train.micro_batch_tokens"
        return f"the largest saving is {lever.lever}: about {_gib(lever.saves)} of {lever.name}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _weight_bytes(shape: LinearShape, precision: Precision) -> int:
    rows = [n for _, n in shape.parts]
    if precision.block is None:
        return sum(rows) * shape.in_features * get_format(precision.format).bytes
    n, k = sum(pad_to_block(r) for r in rows), pad_to_block(shape.in_features)
    scales = n if precision.block == (1, 0) else n // BLOCK * (k // BLOCK)
    return n * k * get_format(precision.format).bytes + 4 * scales


def _operand_bytes(features: int, precision: Precision) -> int:
    """Bytes a token of a linear's input as its GEMM reads it."""
    if precision.block is None:
        return 2 * features
    k = pad_to_block(features)
    scales = 1 if precision.block == (1, 0) else k // BLOCK
    return k * get_format(precision.format).bytes + 4 * scales


def activation_bytes(model: ModelConfig, plan: Plan, recompute: str) -> int:
    """Bytes a token that one block keeps between forward and backward, at a recompute level."""
    flow = plan.recipe.train
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    kept = 2 * 2 * model.hidden  # the two residual sums
    if recompute == "block":
        return kept
    if model.qk_norm or flow.attention.kv.block is None:
        kept += 2 * (query + 2 * kv)
    else:
        kept += query + 2 * kv + 4 * (model.heads + 2 * model.kv_heads)
    kept += 2 * query + 4 * model.heads  # attention's output and log-sum-exp
    if recompute == "mlp":
        return kept
    kept += 2 * 2 * model.intermediate  # gate and up
    if recompute == "codes":
        return kept
    inputs = [
        (model.hidden, flow.qkv),
        (model.hidden, flow.gate_up),
        (model.intermediate, flow.down),
    ]
    if flow.out.lhs.block is not None:  # in BF16 it is attention's output itself
        inputs.append((query, flow.out))
    return kept + sum(_operand_bytes(width, gemm.lhs) for width, gemm in inputs)


def _passing_bytes(model: ModelConfig, kept: Recompute) -> int:
    """An allowance, bytes a token, for one block's temporaries: the product, its gradient, gate's and up's.

    Gate and up themselves where they are made again; kept ones are given back as the gradients grow.
    """
    again = 0 if kept in ("none", "codes") else 2 * 2 * model.intermediate
    return 7 * model.intermediate + again + 8 * model.hidden


def parameter_count(model: ModelConfig, plan: Plan) -> int:
    """Trained parameters, tied ones once."""
    inside = sum(
        sum(n for _, n in s.parts) * (s.in_features + (model.qkv_bias and s.role == "qkv"))
        for s in plan.linears
        if s.role != "head"
    )
    tables = model.vocab_size * model.hidden * (1 if model.tied else 2)
    gains = model.layers * (2 * model.hidden + 2 * model.head_dim * model.qk_norm) + model.hidden
    return inside + tables + gains


def _weights(model: ModelConfig, plan: Plan) -> int:
    """Both forwards' weights, one object where they agree, and the head's BF16 copy."""
    rollout, train = plan.recipe.rollout, plan.recipe.train
    size = 2 * model.vocab_size * model.hidden
    for shape in plan.linears:
        if shape.role != "head":
            kinds = {flow.gemm(shape.role).rhs for flow in (rollout, train)}
            size += sum(_weight_bytes(shape, kind) for kind in kinds)
    return size


def _moments(count: int, states: str) -> list[Part]:
    if states == "8bit":
        lever = 'train.optimizer_states = "host"'
        return [
            Part("moments (8-bit)", 2 * count + count // 32, lever, max(0, 2 * count - _SLICES))
        ]
    if states == "host":
        return [
            Part("moments (slices in use)", min(_SLICES, 8 * count)),
            Part("moments", 8 * count, host=True),
        ]
    lever = 'train.optimizer_states = "8bit"'
    return [Part("moments (FP32)", 8 * count, lever, 6 * count)]


def _waiting(count: int, leaves: int, processes: int) -> list[Part]:
    """Sums of gradient leaves that wait for their neighbours (`train/leaves.py`)."""
    levels = max(0, leaves.bit_length() - processes.bit_length())
    size, lever = levels * 4 * count, "train.gradient_leaves = 0: other bits"
    return [Part("gradient sums that wait", size, lever, size)] if size else []


def _frozen(model: ModelConfig, plan: Plan, needs: frozenset[str]) -> list[Part]:
    """The reference policy (its weights, no masters) and the BF16 shadow (the policy's own masters)."""
    parts = []
    if "reference" in needs:
        tables = 0 if model.tied else 2 * model.vocab_size * model.hidden
        lever = "rl.kl_coefficient = 0"
        size = _weights(model, plan) + tables
        parts.append(Part("reference model (no masters)", size, lever, size))
    if "shadow" in needs:
        rows = [s for s in plan.linears if s.role != "head"]
        size = sum(_weight_bytes(s, BF16) for s in rows) + 2 * model.vocab_size * model.hidden
        parts.append(Part("BF16 shadow (no masters)", size))
    return parts


def _recompute_for(each: Mapping[Recompute, int], layers: int, room: int) -> tuple[Recompute, ...]:
    """The least that leaves at most `room` bytes kept: the first blocks make more again than the rest.

    each: bytes that one block keeps at a level.
    """
    for low, high in pairwise(LEVELS):
        over = layers * each[low] - room
        more = max(0, -(-over // max(1, each[low] - each[high])))
        if more <= layers:
            return (high,) * more + (low,) * (layers - more)
    return (LEVELS[-1],) * layers


def _kept(
    model: ModelConfig,
    plan: Plan,
    train: TrainConfig,
    tokens: int,
    largest_group: int,
    room: int | None,
    passing: int,
) -> tuple[Part, tuple[Recompute, ...]]:
    """What stays between forward and backward, and what each block makes again.

    room: bytes for it and for `passing` a token.
    """
    each: dict[Recompute, int] = {
        level: activation_bytes(model, plan, level) * tokens for level in LEVELS
    }
    if train.recompute != "auto":
        chosen: tuple[Recompute, ...] = (train.recompute,) * model.layers
    else:
        limited = sum(each.values()) * model.layers if room is None else room - passing * tokens
        chosen = _recompute_for(each, model.layers, limited)
    size = sum(each[level] for level in chosen)
    lever, saves = "", 0
    if train.recompute not in ("auto", LEVELS[-1]):
        level = LEVELS[LEVELS.index(train.recompute) + 1]
        lever, saves = f'train.recompute = "{level}"', size - each[level] * model.layers
    half = train.micro_batch_tokens // 2
    if tokens == train.micro_batch_tokens > largest_group and size // 2 > saves:
        lever = f"train.micro_batch_tokens = {half}"
        saves = (size + passing * tokens) // 2
    return Part(f"kept for backward, {tokens:,} tokens", size, lever, saves), chosen


def plan_memory(
    model: ModelConfig,
    plan: Plan,
    config: Config,
    needs: frozenset[str] = frozenset(),
    available: int | None = None,
    processes: int = 1,
) -> MemoryPlan:
    """What `config` will take for this model and plan, of each of the run's processes.

    needs: of the algorithm and its correction.

    available: bytes that train.recompute = "auto" fits the plan into; None: there is enough.
    """
    train, count = config.train, parameter_count(model, plan)
    answer = min(config.rollout.max_tokens, model.max_position)
    largest_group = config.rl.group_size * answer
    tokens = max(train.micro_batch_tokens, largest_group)
    logits = 2 * model.vocab_size if plan.recipe.train.head.library else 0
    head = logits + 2 * min(_HEAD_CHUNK, model.vocab_size) + 6 * model.hidden
    probe = min(CODES_LIMIT, _weights(model, plan)) + 4 * (count // max(1, model.layers))
    standing = (
        Part("FP32 masters", 4 * count),
        Part(f"weights ({plan.recipe.name})", _weights(model, plan)),
        Part("FP32 gradients", 4 * count),
        *_waiting(count, train.gradient_leaves, processes),
        *_moments(count, train.optimizer_states),
    )
    around = (
        Part("head, logits or a chunk of them", head * tokens),
        Part("update metrics", probe),
        *_frozen(model, plan, needs),
    )
    taken = sum(p.size for p in (*standing, *around) if not p.host)
    least: Recompute = "none" if train.recompute == "auto" else train.recompute
    passing = _passing_bytes(model, least)
    room = None if available is None else available - taken
    kept, chosen = _kept(model, plan, train, tokens, largest_group, room, passing)
    # the last block's: when it runs backward everything else is still kept
    if _passing_bytes(model, chosen[-1]) > passing:
        passing = _passing_bytes(model, chosen[-1])
        kept, chosen = _kept(model, plan, train, tokens, largest_group, room, passing)
    precision = plan.recipe.rollout.attention.kv
    row = 2 * model.layers * model.kv_heads * row_bytes(model.head_dim, precision)
    cache = config.rollout.cache_tokens * row
    temporaries = Part("temporaries of a block", passing * tokens)
    return MemoryPlan(
        (
            *standing,
            kept,
            temporaries,
            *around,
            Part("KV cache", cache, "rollout.cache_tokens", cache),
        ),
        chosen,
        tokens,
        kept.size // tokens + passing + head,
        row,
        answer,
    )
