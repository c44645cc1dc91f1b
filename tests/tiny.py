"""Tiny random models for tests: a HF folder with weights, config and a byte-level tokenizer.

The defaults are awkward on purpose: widths that are no multiple of 128 and that span several
blocks, fewer KV heads than heads, and more embedding rows than the tokenizer knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("he", "ll", "lo", "llo", "Ġt", "in", "er", "an", "th", "Ġa")
"""A few merges on top of the 256 bytes, so that a text has more than one tokenisation."""

TOKENIZER_SIZE = 256 + len(MERGES) + len(SPECIALS)
END_ID = TOKENIZER_SIZE - 1
"""Id of <|im_end|>, the end of a turn."""


def tiny_folder(
    folder: str | Path,
    family: str,
    *,
    hidden: int = 192,
    intermediate: int = 320,
    layers: int = 2,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = TOKENIZER_SIZE + 19,
    tied: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    std: float = 0.08,
    outliers: int = 0,
    max_position: int = 1024,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    shard_bytes: int | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write a random model of `family` (llama, qwen2, qwen3) into `folder`; the folder.

    Every parameter is random, biases and norm gains included. vocab: embedding rows, at least
    TOKENIZER_SIZE. outliers: that many input channels are 50 times larger in every matrix.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    assert vocab >= TOKENIZER_SIZE or not tokenizer
    config = _config(family)(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=max_position,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta, **(rope_scaling or {})},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed, std, outliers)
    options = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(dtype).save_pretrained(folder, **options)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def _config(family: str) -> Any:
    import transformers

    names = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
    return getattr(transformers, names[family])


def _randomise(model: torch.nn.Module, seed: int, std: float, outliers: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(1 + noise if "norm" in name else noise)
            if outliers and parameter.dim() == 2 and "embed" not in name:
                parameter[:, torch.arange(outliers) * 7 % parameter.shape[1]] *= 50


def write_tokenizer(folder: str | Path, *, bos: str | None = None, pad: str | None = None) -> None:
    """A byte-level BPE with a ChatML template. `bos`: a special that is put before every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    folder = Path(folder)
    vocab = {char: index for index, char in enumerate(byte_chars() + list(MERGES))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[split_merge(merge) for merge in MERGES]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    assert core.get_vocab_size() == TOKENIZER_SIZE
    if bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "chat_template": (bos or "") + CHAT_TEMPLATE,
    }
    settings.update({k: v for k, v in (("bos_token", bos), ("pad_token", pad)) if v is not None})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def byte_chars() -> list[str]:
    """The 256 characters that stand for bytes, in the order of their ids."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def split_merge(merge: str) -> tuple[str, str]:
    """The two pieces that a merge joins."""
    return ("l", "lo") if merge == "llo" else (merge[0], merge[1:])
