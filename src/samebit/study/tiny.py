"""A tiny model from nothing, warmed up by a few minutes of supervised training on a task's answers.

The folder is an ordinary Hugging Face folder (Qwen2 layout, one character a token), so every command
takes it. Everything is a function of the settings: the same settings give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from samebit.models.load import load_model, named_masters
from samebit.models.tokenizer import Tokenizer
from samebit.models.weights import atomic_folder, sources_of, write_checkpoint, write_json
from samebit.quant.plan import load_recipe
from samebit.reference.sampling import Transform
from samebit.tasks.api import TaskBase
from samebit.train.pack import PackedBatch, pack
from samebit.train.score import Scorer
from samebit.types import Group, Prompt, Sample

CHARACTERS = "0123456789+-*/()., abcdefghijklmnopqrstuvwxyz"
"""What the tokenizer knows, one id a character; others are dropped."""
ASK, END = "<|ask|>", "<|endoftext|>"
"""Qwen2 tokenizers know the second one whatever the files say, so it is the end token."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'user' %}<|ask|>{% else %}<|endoftext|>{% endif %}{% endfor %}"
)


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Keys of [warmup]: the tiny model's shape and its supervised training."""

    hidden: int = 128
    """Width of the residual stream."""
    intermediate: int = 256
    """Width of the MLP."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 4
    """Query heads; there are half as many KV heads."""
    steps: int = 300
    """AdamW steps on gold answers."""
    batch: int = 64
    """Questions a step."""
    learning_rate: float = 2e-3
    """Peak rate; 20 warm-up steps, then cosine to a tenth."""
    seed: int = 0
    """Of the random initial weights."""

    def __post_init__(self) -> None:
        for key in ("hidden", "intermediate", "layers", "heads", "steps", "batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"[warmup] {key} = {getattr(self, key)}: expected at least 1")
        if self.heads % 2 or self.hidden % (2 * self.heads):
            raise ValueError(
                f"[warmup] heads = {self.heads}, hidden = {self.hidden}: heads must be even and "
                "twice the heads must divide hidden"
            )


def write_tokenizer(folder: Path) -> int:
    """Write a character tokenizer with a chat template; the number of ids."""
    vocab = {c: i for i, c in enumerate(CHARACTERS)}
    specials = [
        {
            "id": len(vocab) + i,
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, token in enumerate((ASK, END))
    ]
    core = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(core), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return len(vocab) + len(specials)


def _config(shape: Warmup, vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 2,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eos_token_id": vocabulary - 1,
        "torch_dtype": "float32",
    }


def _initial(shape: Warmup, vocabulary: int) -> dict[str, torch.Tensor]:
    """Random FP32 weights by checkpoint name: N(0, 1/inputs), norm gains 1, biases 0."""
    generator = torch.Generator().manual_seed(shape.seed)
    head_dim = shape.hidden // shape.heads
    kv = shape.heads // 2 * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        noise = torch.randn(rows, columns, generator=generator)
        return noise * (gain / math.sqrt(columns))

    out: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": torch.randn(vocabulary, shape.hidden, generator=generator)
        * 0.5,
        "lm_head.weight": matrix(vocabulary, shape.hidden, 0.5),
        "model.norm.weight": torch.ones(shape.hidden),
    }
    residual = 1.0 / math.sqrt(2 * shape.layers)
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        out[f"{at}.input_layernorm.weight"] = torch.ones(shape.hidden)
        out[f"{at}.post_attention_layernorm.weight"] = torch.ones(shape.hidden)
        for name, rows in (("q", shape.hidden), ("k", kv), ("v", kv)):
            out[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows, shape.hidden)
            out[f"{at}.self_attn.{name}_proj.bias"] = torch.zeros(rows)
        out[f"{at}.self_attn.o_proj.weight"] = matrix(shape.hidden, shape.hidden, residual)
        out[f"{at}.mlp.gate_proj.weight"] = matrix(shape.intermediate, shape.hidden)
        out[f"{at}.mlp.up_proj.weight"] = matrix(shape.intermediate, shape.hidden)
        out[f"{at}.mlp.down_proj.weight"] = matrix(shape.hidden, shape.intermediate, residual)
    return out


def write_random_model(folder: Path, shape: Warmup) -> None:
    """Config, tokenizer and random FP32 weights into an existing folder."""
    vocabulary = write_tokenizer(folder)
    write_json(folder / "config.json", _config(shape, vocabulary))
    write_checkpoint(folder, sources_of(_initial(shape, vocabulary)))


def gold_group(prompt: Prompt, tokenizer: Tokenizer) -> Group:
    """A prompt with its answer and the end token as the one sample, for supervised packing."""
    ids = (*tokenizer.encode(str(prompt.columns["answer"])), tokenizer.stop_ids[0])
    zeros = np.zeros(len(ids), dtype=np.float32)
    sample = Sample(prompt.id, 0, ids, zeros, zeros.astype(np.int32), "stop")
    return Group(prompt, (sample,))


def gold_batch(task: TaskBase, tokenizer: Tokenizer, start: int, count: int) -> PackedBatch:
    """Training questions start .. start + count - 1 with their answers, packed."""
    groups = [gold_group(p, tokenizer) for p in task.prompts("train", start, count)]
    return pack(groups, 0, 0, 0, torch.device("cpu"))


def warm_up(
    folder: Path, shape: Warmup, task: TaskBase, note: Callable[[str], None]
) -> list[float]:
    """Train a random tiny model on the task's answers and publish it as `folder`; the losses.

    Cross-entropy of the answer's tokens through the BF16 training forward. A folder that is there
    already must carry the same settings (ValueError otherwise) and is kept.
    """
    about = folder / "warmup.json"
    if folder.exists():
        if not about.is_file() or json.loads(about.read_text())["settings"] != asdict(shape):
            raise ValueError(
                f"{folder} holds a model warmed up with other settings; remove it, or choose "
                "another [study] out"
            )
        return json.loads(about.read_text())["losses"]
    with atomic_folder(folder) as work:
        write_random_model(work, shape)
        model = load_model(work, load_recipe("bf16"))
        tokenizer = Tokenizer(work, model.config)
        task.bind(tokenizer)
        scorer = Scorer(model, None, None, None, Transform())
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        losses = []
        for step in range(shape.steps):
            for group in optimizer.param_groups:
                group["lr"] = _rate(shape, step)
            batch = gold_batch(task, tokenizer, step * shape.batch, shape.batch)
            logp, _, _ = scorer.forward(model, batch)
            loss = -logp.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.refresh()
            losses.append(float(loss.detach()))
            if step % 50 == 49 or step + 1 == shape.steps:
                note(f"warm-up {step + 1}/{shape.steps}  loss {losses[-1]:.3f}")
        (work / "model.safetensors").unlink()
        write_checkpoint(work, sources_of(named_masters(model)))
        write_json(work / "warmup.json", {"settings": asdict(shape), "losses": losses})
    return losses


def _rate(shape: Warmup, step: int) -> float:
    rise = min(1.0, (step + 1) / 20)
    fall = 0.55 + 0.45 * math.cos(math.pi * step / max(1, shape.steps))
    return shape.learning_rate * rise * fall
