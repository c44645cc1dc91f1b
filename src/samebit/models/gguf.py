"""GGUF (llama architecture) to a Hugging Face folder.

GGUF stores every tensor of a llama model under other names, q and k rows permuted for interleaved
rotary, and the tokenizer as metadata. The folder written here is a plain BF16 checkpoint that
transformers loads.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samebit.models.weights import TensorSource, write_checkpoint, write_json

# ggml type names read through the gguf package's own dequantiser.
READABLE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL, _USER_DEFINED = 3, 4
_REQUIRED_METADATA = (
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
)


def convert_gguf(path: str | Path, folder: str | Path) -> dict[str, str]:
    """Write `path` into the existing, empty `folder` as a BF16 HF checkpoint; {file: sha256}.

    config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json
    (with the chat template). One tensor is in memory at a time. Raises ValueError naming the file
    and the metadata key or tensor for another architecture, tokenizer or quantisation.
    """
    path, folder = Path(path), Path(folder)
    reader = _open(path)
    metadata = _read_metadata(path, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _build_config(metadata, tied="output.weight" not in tensors)
    sources = list(_tensor_sources(path, tensors, config))
    _write_tokenizer(path, folder, metadata)
    write_json(folder / "config.json", config)
    generation = {key: config[key] for key in _special_ids(metadata) if key in config}
    write_json(folder / "generation_config.json", generation)
    return write_checkpoint(folder, sources)


def converted_bytes(path: str | Path) -> int:
    """Bytes of the BF16 weights that `convert_gguf` would write (metadata only is read)."""
    return sum(2 * int(np.prod(tensor.shape)) for tensor in _open(Path(path)).tensors)


def _open(path: Path) -> Any:
    # Imported here: only a GGUF source needs the package.
    from gguf import GGUFReader  # type: ignore[reportAttributeAccessIssue]

    try:
        return GGUFReader(path, "r")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (ValueError, IndexError, KeyError, OverflowError, struct.error, TypeError) as error:
        raise ValueError(f"{path}: not a sound GGUF file ({error}); fetch it again") from None


def _read_metadata(path: Path, reader: Any) -> dict[str, Any]:
    architecture = reader.fields.get("general.architecture")
    name = architecture.contents() if architecture else None
    if name != "llama":
        raise ValueError(f"{path}: general.architecture {name!r} is not supported; only llama is")
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    for key in _REQUIRED_METADATA:
        if key not in metadata:
            raise ValueError(f"{path}: metadata {key} is missing")
    for key, neutral in (("llama.rope.scaling.type", "none"), ("llama.expert_count", 0)):
        if metadata.get(key, neutral) != neutral:
            raise ValueError(f"{path}: {key} = {metadata[key]!r} is not supported")
    for key, only in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if metadata.get(key) != only:
            raise ValueError(
                f"{path}: {key} = {metadata.get(key)!r} is not supported; only {only!r} is"
            )
    return metadata


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """HF key -> token id for the special tokens that the file names."""
    pairs = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in pairs.items()}
    return {key: int(value) for key, value in found.items() if value is not None}


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same FP32 number: 9.999999747e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _build_config(metadata: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    heads = int(metadata["llama.attention.head_count"])
    hidden = int(metadata["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(metadata.get("llama.attention.key_length", hidden // heads)),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **_special_ids(metadata),
    }


def _hf_name(path: Path, name: str) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if not match or match[2] not in _LAYER_NAMES:
        raise ValueError(f"{path}: tensor {name!r} has no place in a llama model here")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor that the model has."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    rows = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    table = (config["vocab_size"], hidden)
    shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in rows.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    return shapes


def _tensor_sources(
    path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[TensorSource]:
    """A TensorSource per tensor, after names, types and shapes have all been checked."""
    expected = _expected_shapes(config)
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        hf_name = _hf_name(path, name)
        if tensor.tensor_type.name not in READABLE_TYPES:
            raise ValueError(
                f"{path}: {name!r} is {tensor.tensor_type.name}; "
                f"readable: {', '.join(READABLE_TYPES)}"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != expected.get(hf_name):
            raise ValueError(
                f"{path}: {name!r} has shape {list(shape)}, expected {expected.get(hf_name)}"
            )
        found[hf_name] = tensor
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ValueError(f"{path}: the tensor for {missing[0]} is missing")
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    for name, shape in expected.items():
        permuted = heads.get(name.split(".")[-2])
        yield TensorSource(
            name,
            torch.bfloat16,
            shape,
            lambda tensor=found[name], permuted=permuted: _dequantise(tensor, permuted),
        )


def _dequantise(tensor: Any, permuted_heads: int | None) -> torch.Tensor:
    """One tensor in BF16, q and k rows back in rotate-half order."""
    from gguf import dequantize  # type: ignore[reportAttributeAccessIssue]

    values = dequantize(tensor.data, tensor.tensor_type)
    values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
    if permuted_heads is not None:
        values = unpermute_rows(values, permuted_heads)
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)


def unpermute_rows(values_NK: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from interleaved pairs (0, D/2, 1, D/2+1, ...) to rotate-half order."""
    rows, width = values_NK.shape
    pairs = values_NK.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _write_tokenizer(path: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE with single digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(f"{path}: tokenizer.ggml.tokens has doubles, or no type for each token")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    if any(len(merge) != 2 or "".join(merge) not in vocab for merge in merges):
        raise ValueError(f"{path}: tokenizer.ggml.merges has an entry that makes no known token")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    pairs = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, k in pairs if k == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(token) for token, k in pairs if k == _USER_DEFINED])
    assert tokenizer.get_vocab_size(with_added_tokens=True) == len(tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        key.removesuffix("_id"): tokens[index] for key, index in _special_ids(metadata).items()
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "model_max_length": int(metadata["llama.context_length"]),
        **special,
    }
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    write_json(folder / "tokenizer_config.json", settings)
