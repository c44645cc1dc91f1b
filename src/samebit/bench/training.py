"""Models and micro-batches for the step bench: our arms over one set of masters, and a plain torch model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from samebit.bench.shapes import MODELS
from samebit.config import Config, RLSection, RolloutConfig, TaskSection, TrainConfig
from samebit.models.config import ModelConfig
from samebit.models.decoder import Decoder
from samebit.models.load import plan_for, share_masters
from samebit.quant.plan import load_recipe
from samebit.rl.registry import load_algorithm, load_correction
from samebit.train.roofline import CARDS, counted_seconds
from samebit.train.step import Trainer
from samebit.types import Group, Prompt, Sample

PROMPT = 128
"""Prompt tokens of each sequence; the rest is its completion."""
PACK = 16384
"""Tokens of a pack, where a bench does not say otherwise."""


def shape_of(name: str, layers: int = 0, positions: int = 16384) -> ModelConfig:
    """A model's shape with fewer layers (0: all)."""
    model = MODELS[name]
    return replace(model, layers=layers or model.layers, max_position=positions)


@torch.no_grad()
def random_decoder(config: ModelConfig, recipe: str, owner: Decoder | None = None) -> Decoder:
    """Random weights N(0, 0.02) on the device; with `owner`, that model's masters."""
    model = Decoder(config, plan_for(load_recipe(recipe), config), "cuda")
    if owner is not None:
        share_masters(model, owner)
    else:
        generator = torch.Generator("cuda").manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
    model.refresh()
    return model


def roofline_share(model: str, recipe: str, sequences: int, length: int, seconds: float) -> float:
    """Share of an H200's data sheet that a training phase of `seconds` reaches (recipe `torch`: as `bf16`)."""
    config = MODELS[model]
    plan = plan_for(load_recipe("bf16" if recipe == "torch" else recipe), config)
    rows, pairs = sequences * length, sequences * length * (length + 1) // 2
    predicted = sequences * (length + 1 - PROMPT)
    least = counted_seconds(CARDS["NVIDIA H200"], config, plan, rows, pairs, predicted)
    return sum(least.values()) / seconds


def settings(tokens: int, length: int, recompute: str) -> Config:
    """One update of GRPO over packs of `tokens`, moments in a byte each."""
    return Config(
        model="random",
        task=TaskSection(name="none"),
        rollout=RolloutConfig(max_tokens=length),
        rl=RLSection(group_size=1),
        train=TrainConfig(
            micro_batch_tokens=tokens,
            recompute=recompute,  # type: ignore[arg-type]
            optimizer_states="8bit",
            learning_rate=1e-6,
        ),
    )


def random_groups(config: ModelConfig, count: int, length: int) -> list[Group]:
    """`count` sequences of `length` fed tokens, no prompt shared (the plain model has no such thing)."""
    numbers = np.random.default_rng(0)
    groups = []
    for i in range(count):
        ids = numbers.integers(0, config.tokenizer_size, length + 1).tolist()
        answer = tuple(ids[PROMPT:])
        sample = Sample(
            prompt_id=str(i),
            sample_id=i,
            ids=answer,
            logps=np.zeros(len(answer), dtype=np.float32),
            versions=np.ones(len(answer), dtype=np.int32),
            finish_reason="length",
        )
        groups.append(Group(Prompt(str(i), tuple(ids[:PROMPT]), ""), (sample,), (0.0,)))
    return groups


class Arm:
    """A recipe's trainer over one pack. `run` is its forward, loss and backward."""

    def __init__(self, model: Decoder, groups: list[Group], config: Config) -> None:
        self.model, self.layers = model, model.layers
        algorithm, correction = load_algorithm("grpo", {}), load_correction("none", {})
        self.trainer = Trainer(model, config, algorithm, correction)
        share = self.trainer._pack(groups, range(len(groups)))
        self.batches = share.batches
        assert len(self.batches) == 1, "one pack"
        self.rollout = self.trainer._prepare(groups, share)
        generator = torch.Generator("cuda").manual_seed(1)
        advantage = self.rollout.advantages.advantage_T
        advantage.normal_(0.0, 1.0, generator=generator)
        self.normaliser = self.rollout.normaliser(share.part, config.rollout.max_tokens)
        assert self.batches[0].drawn_at == model.version, "drawn under the present weights"
        self.rollout.scores.old = self.batches[0].rollout_logp
        self._drawn: dict[int, Tensor] = {}

    def run(self, layers: int) -> None:
        """One micro-batch through the first `layers` blocks, on policy: the sampler agrees."""
        self.model.layers = self.layers[:layers]
        if layers not in self._drawn:
            (self._drawn[layers],) = self.trainer.scorer.log_probs(self.model, self.batches)
        self.batches[0].rollout_logp.copy_(self._drawn[layers])
        self.trainer.micro_batch(self.rollout, self.batches[0], self.normaliser)
        self.rollout.observed.clear()


# --- what people write themselves ----------------------------------------------------------------


class PlainBlock(nn.Module):
    """A transformer block as in transformers: BF16 parameters, SDPA, separate projections."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16)

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=c.rms_eps, device="cuda", dtype=torch.bfloat16)

        self.c = c
        self.norm1, self.norm2 = norm(c.hidden), norm(c.hidden)
        self.q, self.k, self.v = linear(c.hidden, q), linear(c.hidden, kv), linear(c.hidden, kv)
        self.o = linear(q, c.hidden)
        self.q_norm = norm(c.head_dim) if c.qk_norm else nn.Identity()
        self.k_norm = norm(c.head_dim) if c.qk_norm else nn.Identity()
        self.gate, self.up = linear(c.hidden, c.intermediate), linear(c.hidden, c.intermediate)
        self.down = linear(c.intermediate, c.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """BF16 [B, S, hidden] -> the same."""
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.c.head_dim)) for p in (self.q, self.k, self.v))
        q, k = _rotate(self.q_norm(q), cos, sin), _rotate(self.k_norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class PlainModel(nn.Module):
    """Embedding, blocks, norm and head in BF16; blocks and log-probs through torch.compile."""

    def __init__(self, c: ModelConfig, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden, device="cuda", dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(PlainBlock(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, eps=c.rms_eps, device="cuda", dtype=torch.bfloat16)
        self.head = nn.Linear(
            c.hidden, c.vocab_size, bias=False, device="cuda", dtype=torch.bfloat16
        )
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 2:
                    p.normal_(0.0, 0.02)
        half = torch.arange(0, c.head_dim, 2, device="cuda").float() / c.head_dim
        angles = torch.outer(torch.arange(length, device="cuda").float(), c.rope_theta**-half)
        table = torch.cat((angles, angles), -1)[:, None]
        self.cos, self.sin = table.cos().bfloat16(), table.sin().bfloat16()
        for block in self.blocks:
            block.compile()
        self.log_probs = torch.compile(_log_probs)

    def forward(self, ids: Tensor, targets: Tensor, layers: int) -> Tensor:
        """Log-probs FP32 [B, completion] of the targets [B, S] past the prompt."""
        x = self.embedding(ids)
        for block in self.blocks[:layers]:
            x = block(x, self.cos, self.sin)
        rows = self.norm(x)[:, PROMPT - 1 :].flatten(0, 1)
        wanted = targets[:, PROMPT - 1 :].flatten()
        pieces = zip(rows.split(2048), wanted.split(2048), strict=True)
        return torch.cat([self.log_probs(r, self.head.weight, w) for r, w in pieces])


def _log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, -1)


class PlainArm:
    """The plain model over the same sequences, gradients in BF16."""

    def __init__(self, config: ModelConfig, groups: list[Group]) -> None:
        whole = [[*g.prompt.ids, *g.samples[0].ids] for g in groups]
        ids = torch.tensor(whole, device="cuda")
        self.ids, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.model = PlainModel(config, self.ids.shape[1])
        tokens = self.targets[:, PROMPT - 1 :].numel()
        self.advantage = torch.randn(tokens, device="cuda")
        self.old: Tensor | None = None

    def run(self, layers: int) -> None:
        """One micro-batch: forward, clipped loss, backward."""
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], True):
            logp = self.model(self.ids, self.targets, layers)
            ratio = torch.exp(logp - (logp.detach() if self.old is None else self.old))
            clipped = torch.clamp(ratio, 0.8, 1.2)
            loss = -torch.minimum(ratio * self.advantage, clipped * self.advantage).mean()
            loss.backward()


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds on the device between two events, launches included where the device waits for them."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)
