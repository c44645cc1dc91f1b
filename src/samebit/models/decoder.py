"""The decoder that trainer and engine both run: one class, one forward.

A family file (llama.py, qwen2.py, qwen3.py) says what its checkpoints call the parameters; the config
says whether QKV has a bias and whether queries and keys are normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from samebit.layers.functional import (
    attention,
    embed,
    log_prob,
    quantize_qkv,
    residual_add,
    rms_norm,
    rotary,
    silu_mul,
)
from samebit.layers.kv import AnyStore, KVStore, PageStore, page_bytes, page_size_for
from samebit.layers.linear import Linear
from samebit.layers.rope import rope_table
from samebit.layout import Layout, PackedLayout
from samebit.models.config import ModelConfig
from samebit.operand import allocate_weight
from samebit.quant.ops import Ops, get_ops
from samebit.quant.plan import LinearShape, Plan
from samebit.spec import BF16, Attention

Tap = Callable[[str, torch.Tensor], None]
"""Called with (operator path, its output) after every operator; see `samebit trace`."""


def linear_shapes(config: ModelConfig) -> tuple[LinearShape, ...]:
    """Every linear of a model in order: roles, named parts, inputs. What a plan is resolved against."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = []
    for i in range(config.layers):
        path = f"layers.{i}"
        shapes += [
            LinearShape(f"{path}.qkv", "qkv", (("q", q), ("k", kv), ("v", kv)), config.hidden),
            LinearShape(f"{path}.out", "out", (("out", config.hidden),), q),
            LinearShape(
                f"{path}.gate_up",
                "gate_up",
                (("gate", config.intermediate), ("up", config.intermediate)),
                config.hidden,
            ),
            LinearShape(f"{path}.down", "down", (("down", config.hidden),), config.intermediate),
        ]
    return (*shapes, LinearShape("head", "head", (("head", config.vocab_size),), config.hidden))


class Block(nn.Module):
    """One transformer block."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        shapes: dict[str, LinearShape],
        plan: Plan,
        ops: Ops,
        device: torch.device,
    ):
        super().__init__()
        self.config, self.index, self.ops = config, index, ops
        path = f"layers.{index}"

        def make(role: str, bias: bool = False) -> Linear:
            return Linear(shapes[f"{path}.{role}"], plan, bias, ops, device)

        def gain(width: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(width, device=device))

        self.norm_attention = gain(config.hidden)
        self.qkv = make("qkv", config.qkv_bias)
        self.query_norm = gain(config.head_dim) if config.qk_norm else None
        self.key_norm = gain(config.head_dim) if config.qk_norm else None
        self.out = make("out")
        self.norm_mlp = gain(config.hidden)
        self.gate_up = make("gate_up")
        self.down = make("down")

    def forward(self, x: torch.Tensor, call: ForwardCall) -> torch.Tensor:
        """Residual stream BF16 [T, hidden] -> BF16 [T, hidden]."""
        eps, ops = self.config.rms_eps, self.ops
        h = self._tap(call, "norm_attention", rms_norm(x, self.norm_attention, eps, ops))
        attended = self._attend(h, call)
        (update,) = self.out(attended, call.side, call.token_groups)
        x = self._tap(call, "out", residual_add(x, update, ops))
        h = self._tap(call, "norm_mlp", rms_norm(x, self.norm_mlp, eps, ops))
        gate, up = self.gate_up(h, call.side, call.token_groups)
        h = self._tap(call, "silu_mul", silu_mul(gate, up, ops))
        (update,) = self.down(h, call.side, call.token_groups)
        return self._tap(call, "down", residual_add(x, update, ops))

    def _attend(self, h: torch.Tensor, call: ForwardCall) -> torch.Tensor:
        c, ops = self.config, self.ops
        q, k, v = self.qkv(h, call.side, call.token_groups)
        q, k, v = (x.unflatten(1, (-1, c.head_dim)) for x in (q, k, v))
        if call.tap is not None:
            self._tap(call, "qkv", torch.cat((q, k, v), 1))
        if self.query_norm is not None and self.key_norm is not None:
            q = rms_norm(q, self.query_norm, c.rms_eps, ops)
            k = rms_norm(k, self.key_norm, c.rms_eps, ops)
        q = self._tap(call, "rotary_q", rotary(q, call.cos, call.sin, ops))
        k = self._tap(call, "rotary_k", rotary(k, call.cos, call.sin, ops))
        scale = c.head_dim**-0.5
        if call.cache is None:
            assert isinstance(call.layout, PackedLayout)
            y = attention(q, k, v, call.layout, scale, call.attention, ops)
        else:
            if call.attention.kv.block is not None:
                q, k, v = quantize_qkv(q, k, v, call.attention, ops)
            call.cache.write(self.index, call.slots, k, v)
            keys, values = call.cache.keys[self.index], call.cache.values[self.index]
            y, _ = ops.attention(q, keys, values, call.layout, scale, call.attention)
        return self._tap(call, "attention", y.flatten(1))

    def _tap(self, call: ForwardCall, name: str, x: torch.Tensor) -> torch.Tensor:
        if call.tap is not None:
            call.tap(f"layers.{self.index}.{name}", x)
        return x


class ForwardCall:
    """What every block of one forward shares."""

    __slots__ = (
        "attention",
        "cache",
        "cos",
        "layout",
        "side",
        "sin",
        "slots",
        "tap",
        "token_groups",
    )

    def __init__(
        self,
        layout: Layout,
        cache: AnyStore | None,
        side: str,
        spec: Attention,
        cos: torch.Tensor,
        sin: torch.Tensor,
        tap: Tap | None,
    ):
        self.layout, self.cache, self.side, self.attention = layout, cache, side, spec
        self.cos, self.sin, self.tap = cos, sin, tap
        self.token_groups = layout.token_groups if isinstance(layout, PackedLayout) else None
        self.slots = layout.slots if not isinstance(layout, PackedLayout) else None


class Decoder(nn.Module):
    """A dense decoder under a plan. Parameters are FP32 masters; `refresh` derives what GEMMs read.

    Call `refresh` after loading and after every optimiser step; `version` counts refreshes.
    """

    def __init__(self, config: ModelConfig, plan: Plan, device: torch.device | str = "cpu"):
        super().__init__()
        device = torch.device(device)
        self.config, self.plan = config, plan
        self.ops = get_ops(device)
        self.version = 0
        shapes = {s.path: s for s in plan.linears}
        vocab, hidden = config.vocab_size, config.hidden
        self.embedding = nn.Parameter(torch.zeros(vocab, hidden, device=device))
        self.layers = nn.ModuleList(
            Block(config, i, shapes, plan, self.ops, device) for i in range(config.layers)
        )
        self.norm_final = nn.Parameter(torch.ones(hidden, device=device))
        self.head = (
            self.embedding if config.tied else nn.Parameter(torch.zeros_like(self.embedding))
        )
        self.head_weight = allocate_weight((vocab,), hidden, BF16, device)
        cos, sin = rope_table(
            config.head_dim, config.max_position, config.rope_theta, config.rope_scaling
        )
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.embedding.device

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """(path, module) of every block linear, in order."""
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield name, module

    @torch.no_grad()
    def refresh(self) -> None:
        """Requantise every weight in place from its master (one new weight version)."""
        self.version += 1
        for _, module in self.linears():
            module.refresh()
        self.ops.refresh_weight(self.head_weight, self.head.detach())

    def new_cache(self, num_rows: int, page_size: int = 0) -> AnyStore:
        """An empty KV store of the precision the plan's rollout attends over; page size 0: the device's."""
        c, precision = self.config, self.plan.recipe.rollout.attention.kv
        if self.device.type == "cpu":
            return KVStore(c.layers, num_rows, c.kv_heads, c.head_dim, self.device, precision)
        size = page_size or page_size_for(self.device)
        record = page_bytes(c.layers, size, c.kv_heads, c.head_dim, precision)
        raw = torch.zeros(-(-num_rows // size) * record, dtype=torch.uint8, device=self.device)
        return PageStore(c.layers, size, c.kv_heads, c.head_dim, precision, raw)

    def forward(
        self,
        ids_T: torch.Tensor,
        layout: Layout,
        side: str,
        cache: AnyStore | None = None,
        tap: Tap | None = None,
    ) -> torch.Tensor:
        """Token ids int64 [T] -> final-normed hidden BF16 [T, hidden].

        side: 'train' or 'rollout', which of the plan's forwards. With a cache the layout is paged and
        K and V of the batch's rows are written to it first.
        """
        flow = self.plan.recipe.train if side == "train" else self.plan.recipe.rollout
        positions = layout.positions
        call = ForwardCall(
            layout, cache, side, flow.attention, self.cos[positions], self.sin[positions], tap
        )
        x = embed(ids_T, self.embedding, self.ops)
        for block in self.layers:
            x = block(x, call)
        return rms_norm(x, self.norm_final, self.config.rms_eps, self.ops)

    def log_prob(
        self, hidden_TK: torch.Tensor, targets_T: torch.Tensor, transform: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob of targets, entropy) FP32 [T], differentiable, under the sampling transform."""
        vocabulary = self.config.tokenizer_size
        return log_prob(
            hidden_TK, self.head, self.head_weight, targets_T, vocabulary, transform, self.ops
        )

    @torch.no_grad()
    def sample(
        self, hidden_TK: torch.Tensor, transform: object, counters: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, log-probs) drawn at each row; counters are (seed, sample id, position)."""
        vocabulary = self.config.tokenizer_size
        return self.ops.sample(hidden_TK, self.head_weight, vocabulary, transform, counters)

    @torch.no_grad()
    def draw(
        self, hidden_TK: torch.Tensor, transform: object, keys_T2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sample` from noise keys int32 [T, 2] on the device (`reference.sampling.stream_keys`)."""
        vocabulary = self.config.tokenizer_size
        return self.ops.draw(hidden_TK, self.head_weight, vocabulary, transform, keys_T2)
