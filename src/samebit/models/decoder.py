"""The decoder that trainer and engine both run: one class, one forward.

A family file (llama.py, qwen2.py, qwen3.py) says what its checkpoints call the parameters; the config
says whether QKV has a bias and whether queries and keys are normalised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from samebit.layers.block import (
    AttentionHalf,
    ForwardCall,
    Gain,
    MlpHalf,
    Recompute,
    Tap,
    attention_half,
    mlp_half,
)
from samebit.layers.functional import add_rms_norm, embed, log_prob, planned_log_prob
from samebit.layers.kv import AnyStore, KVStore, PageStore, page_bytes, page_size_for
from samebit.layers.linear import Linear
from samebit.layers.rope import rope_table
from samebit.layout import Layout
from samebit.models.config import ModelConfig
from samebit.operand import Rotation, allocate_weight
from samebit.quant.ops import Ops, get_ops
from samebit.quant.plan import LinearShape, Plan
from samebit.spec import BF16


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
        self.config, self.index = config, index
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
        for name in ("norm_attention", "query_norm", "key_norm", "norm_mlp"):
            master = getattr(self, name)
            rounded = None if master is None else master.detach().bfloat16()
            self.register_buffer(f"{name}_bf16", rounded, persistent=False)

    def gains(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """(master, BF16 rounding) of every norm."""
        names = ("norm_attention", "query_norm", "key_norm", "norm_mlp")
        masters = [(name, getattr(self, name)) for name in names]
        return [(m, getattr(self, f"{n}_bf16")) for n, m in masters if m is not None]

    def _gain(self, name: str) -> Gain | None:
        master = getattr(self, name)
        if master is None:
            return None
        return Gain(master, getattr(self, f"{name}_bf16"), self.config.rms_eps)

    def forward(
        self, x: torch.Tensor, update: torch.Tensor | None, call: ForwardCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual stream and the update still to be added to it, BF16 [T, hidden] -> the same."""
        norm_attention, norm_mlp = self._gain("norm_attention"), self._gain("norm_mlp")
        assert norm_attention is not None and norm_mlp is not None
        attention = AttentionHalf(
            call,
            self.index,
            norm_attention,
            self.qkv.use(call.side),
            self._gain("query_norm"),
            self._gain("key_norm"),
            self.out.use(call.side),
        )
        x, update = attention_half(x, update, attention)
        mlp = MlpHalf(
            call, self.index, norm_mlp, self.gate_up.use(call.side), self.down.use(call.side)
        )
        return mlp_half(x, update, mlp)


class Decoder(nn.Module):
    """A dense decoder under a plan. Parameters are FP32 masters; `refresh` derives what GEMMs read.

    Call `refresh` after loading and after every optimiser step; `version` counts refreshes.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    norm_final_bf16: torch.Tensor

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
        self.register_buffer(
            "norm_final_bf16", self.norm_final.detach().bfloat16(), persistent=False
        )
        self.recompute: Recompute | tuple[Recompute, ...] = "none"
        """What the backward makes again instead of keeping it, for all blocks or block by block;
        gradients have the same bits."""
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
        gains = [pair for block in self.layers for pair in block.gains()]  # type: ignore[operator]
        gains.append((self.norm_final, self.norm_final_bf16))
        torch._foreach_copy_([rounded for _, rounded in gains], [master for master, _ in gains])
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

    def _recompute_by_block(self) -> tuple[Recompute, ...]:
        chosen = self.recompute
        return (chosen,) * len(self.layers) if isinstance(chosen, str) else chosen

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
        c, recipe = self.config, self.plan.recipe
        flow = recipe.train if side == "train" else recipe.rollout
        rotation = Rotation(
            c.heads, c.kv_heads, c.head_dim, layout.positions, self.cos, self.sin, c.rms_eps
        )
        call = ForwardCall(self.ops, layout, cache, side, flow.attention, rotation, "none", tap)
        modes = self._recompute_by_block()
        calls = {mode: replace(call, recompute=mode) for mode in set(modes)}
        x = embed(ids_T, self.embedding, self.ops)
        update: torch.Tensor | None = None
        for block, mode in zip(self.layers, modes, strict=True):
            x, update = block(x, update, calls[mode])
        assert update is not None
        gain, rounded = self.norm_final, self.norm_final_bf16
        y, total = add_rms_norm(x, update, gain, rounded, c.rms_eps, self.ops)
        if tap is not None:
            tap(f"layers.{c.layers - 1}.down", total)
        return y

    def log_prob(
        self, hidden_TK: torch.Tensor, targets_T: torch.Tensor, transform: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob of targets, entropy) FP32 [T], differentiable, under the sampling transform."""
        vocabulary = self.config.tokenizer_size
        library = self.plan.recipe.train.head.library
        head, weight = self.head, self.head_weight
        return log_prob(
            hidden_TK, head, weight, targets_T, vocabulary, transform, self.ops, library
        )

    def planned_log_prob(
        self,
        hidden_TK: torch.Tensor,
        targets_T: torch.Tensor,
        transform: object,
        planned: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`log_prob` where the sampler's log-probs and the loss's gradient at them are known.

        The head's gradients are made in the forward; a backward must follow (one product less).
        """
        vocabulary = self.config.tokenizer_size
        head, weight = self.head, self.head_weight
        return planned_log_prob(
            hidden_TK, head, weight, targets_T, vocabulary, transform, planned, self.ops
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
