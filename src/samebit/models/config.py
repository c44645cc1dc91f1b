"""The shape of a model, read from a Hugging Face folder.

`read_config` accepts exactly what this package computes: dense Llama, Qwen2 and Qwen3. Anything
that would change the function and is not implemented is refused by the name of its key, because
an ignored key is a model that is silently a different one.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebit.formats import BLOCK

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FILE_DTYPES = ("bfloat16", "float16", "float32")
FP8_BLOCKS: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""`quantization_config` of the one quantised format that is read and written."""

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
)
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one dense decoder.

    vocab_size: rows of the embedding (and of the head). tokenizer_size: one more than the largest
    id the tokenizer knows; ids in [tokenizer_size, vocab_size) are masked on both sides.
    rope_scaling: None for plain rotary, else {"rope_type": "linear" | "llama3" | "yarn", ...} with
    every constant of that type present. eos_ids: the union of config.json and
    generation_config.json (the tokenizer adds its own). file_dtype: what the checkpoint stores.
    fp8_blocks: its linears are stored as FP8 codes and scales. exported_recipe: the recipe whose policy
    they are, where the folder is an export of ours that says so.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tokenizer_size: int
    rope_theta: float
    rms_eps: float
    tied: bool
    max_position: int
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    file_dtype: str = "bfloat16"
    fp8_blocks: bool = False
    exported_recipe: str = ""

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ValueError naming the file when it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a model folder needs {path.name}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config(folder: str | Path) -> ModelConfig:
    """ModelConfig of a local HF folder (transformers 4 and 5 spellings of config.json).

    Reads config.json, tokenizer.json (for its size) and, where present, generation_config.json
    (for its end ids only: sampling defaults shipped with a checkpoint are never used).
    Raises ValueError naming the file and the key for anything missing, inconsistent or unsupported.
    """
    folder = Path(folder)
    path = folder / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {family!r} is not supported; known families: {', '.join(FAMILIES)}"
        )
    for key in _REQUIRED:
        if raw.get(key) is None:
            raise ValueError(f"{path}: {key} is missing")
    _refuse_unsupported(path, raw, family)
    heads = _positive(path, raw, "num_attention_heads")
    hidden = _positive(path, raw, "hidden_size")
    vocab_size = _positive(path, raw, "vocab_size")
    max_position = _positive(path, raw, "max_position_embeddings", 2048)
    theta, scaling = _read_rope(path, raw, max_position)
    config = ModelConfig(
        family=family,
        hidden=hidden,
        intermediate=_positive(path, raw, "intermediate_size"),
        layers=_positive(path, raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=_positive(path, raw, "num_key_value_heads", heads),
        head_dim=_positive(path, raw, "head_dim", 128 if family == "qwen3" else hidden // heads),
        vocab_size=vocab_size,
        tokenizer_size=_read_tokenizer_size(folder, vocab_size),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=_number(path, raw, "rms_norm_eps"),
        tied=_flag(path, raw, "tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_position=max_position,
        eos_ids=_read_eos_ids(folder, raw, vocab_size),
        file_dtype=_read_dtype(path, raw),
        fp8_blocks=bool(raw.get("quantization_config")),
        exported_recipe=_text(path, raw, "samebit_recipe"),
    )
    _check_heads(path, config)
    return config


def _positive(path: Path, raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{path}: {key} must be a positive whole number, found {value!r}")
    return value


def _number(path: Path, raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive, finite number; null counts as absent."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{path}: {key} must be a number, found {value!r}")
    # Compared before conversion: a JSON integer may be too large for a float.
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{path}: {key} must be positive and finite, found {value!r}")
    return float(value)


def _flag(path: Path, raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{path}: {key} must be true or false, found {value!r}")
    return value


def _text(path: Path, raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{path}: {key} must be a text, found {value!r}")
    return value or ""


def _mapping(path: Path, raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {key} must be an object, found {value!r}")
    return dict(value)


def _check_heads(path: Path, config: ModelConfig) -> None:
    if config.heads % config.kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads {config.heads} is not a multiple of "
            f"num_key_value_heads {config.kv_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"{path}: head_dim {config.head_dim} is odd; rotary needs pairs")


def _refuse_unsupported(path: Path, raw: Mapping[str, Any], family: str) -> None:
    """Refuse every key that changes the function and is not implemented."""

    def refuse(key: str, why: str) -> None:
        raise ValueError(f"{path}: {key} = {raw.get(key)!r} is not supported: {why}")

    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "only silu is implemented")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            refuse(key, f"a {family} model here has no such bias")
    if raw.get("quantization_config") and not _is_fp8_blocks(raw):
        refuse(
            "quantization_config",
            "of quantised checkpoints only FP8 in 128x128 blocks is read, as `samebit export --fp8` "
            "writes it; give the unquantised one",
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            refuse(key, "mixtures of experts are not implemented")
    if raw.get("partial_rotary_factor") not in (None, 1.0):
        refuse("partial_rotary_factor", "rotary covers the whole head")
    if raw.get("auto_map"):
        refuse("auto_map", "code shipped with a checkpoint is never run")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        refuse("layer_types", "only full_attention is implemented")
    # layer_types, where written, already says which layers are windowed.
    if raw.get("sliding_window") and not kinds and _uses_window(path, raw, family):
        refuse("sliding_window", "only full attention is implemented")


def _is_fp8_blocks(raw: Mapping[str, Any]) -> bool:
    settings = raw.get("quantization_config")
    return isinstance(settings, dict) and FP8_BLOCKS.items() <= settings.items()


def _uses_window(path: Path, raw: Mapping[str, Any], family: str) -> bool:
    """Whether a written sliding_window reaches any layer (Qwen: those after max_window_layers)."""
    if family == "llama":
        return True
    first = raw.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ValueError(f"{path}: max_window_layers must be a whole number, found {first!r}")
    layers = _positive(path, raw, "num_hidden_layers")
    return _flag(path, raw, "use_sliding_window") and first < layers


def _read_rope(
    path: Path, raw: Mapping[str, Any], max_position: int
) -> tuple[float, Mapping[str, Any] | None]:
    """(theta, scaling) from `rope_parameters` (5.x) or `rope_theta` + `rope_scaling` (4.x)."""
    written = _mapping(path, raw, "rope_scaling") | _mapping(path, raw, "rope_parameters")
    outer = _number(path, raw, "rope_theta", 10000.0)
    theta = _number(path, written, "rope_theta", outer)
    if raw.get("rope_theta") is not None and theta != outer:
        raise ValueError(f"{path}: rope_theta is {outer} and, among the rope parameters, {theta}")
    kind = written.get("rope_type") or written.get("type") or "default"
    if written.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"{path}: rope partial_rotary_factor other than 1 is not supported")
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{path}: rope_type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}"
        )
    constants = {key: _number(path, written, key) for key in _ROPE_KEYS[kind]}
    if kind == "default":
        return theta, None
    if kind == "yarn":
        return theta, _complete_yarn(path, written, max_position)
    return theta, {"rope_type": kind, **constants}


def _complete_yarn(path: Path, written: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """YaRN constants with the defaults of its reference implementation filled in."""
    for key in ("mscale", "mscale_all_dim"):
        if written.get(key):
            raise ValueError(f"{path}: yarn {key} is not supported")
    factor = _number(path, written, "factor")
    attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _number(
            path, written, "original_max_position_embeddings", max_position
        ),
        "attention_factor": _number(path, written, "attention_factor", attention),
        "beta_fast": _number(path, written, "beta_fast", 32.0),
        "beta_slow": _number(path, written, "beta_slow", 1.0),
        "truncate": _flag(path, written, "truncate", True),
    }


def _read_dtype(path: Path, raw: Mapping[str, Any]) -> str:
    written = raw.get("dtype", raw.get("torch_dtype")) or "float32"
    name = str(written).removeprefix("torch.")
    if name not in FILE_DTYPES:
        raise ValueError(f"{path}: dtype {name!r} is not one of {', '.join(FILE_DTYPES)}")
    return name


def _read_eos_ids(folder: Path, raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """End ids of config.json and generation_config.json, sorted."""
    found: set[int] = set()
    sources = [(folder / "config.json", raw)]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.append((generation, read_json(generation)))
    for path, values in sources:
        eos = values.get("eos_token_id")
        for token in eos if isinstance(eos, list) else [] if eos is None else [eos]:
            if not _is_id(token) or token >= vocab_size:
                raise ValueError(
                    f"{path}: eos_token_id {token!r} is outside the vocabulary of {vocab_size}"
                )
            found.add(token)
    return tuple(sorted(found))


def _read_tokenizer_size(folder: Path, vocab_size: int) -> int:
    """One more than the largest id in tokenizer.json; refused when the embedding is smaller."""
    path = folder / "tokenizer.json"
    values = read_json(path)
    vocab = _mapping(path, values, "model").get("vocab") or {}
    added = values.get("added_tokens") or []
    if not isinstance(vocab, (dict, list)) or not isinstance(added, list):
        raise ValueError(f"{path}: model.vocab or added_tokens is not a vocabulary")
    ids: list[Any] = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token.get("id") if isinstance(token, dict) else None for token in added]
    if not ids or not all(_is_id(token) for token in ids):
        raise ValueError(f"{path}: holds no vocabulary, or ids that are no whole numbers")
    size = max(ids) + 1
    if size > vocab_size:
        raise ValueError(
            f"{path}: the tokenizer knows {size} ids but the embedding has {vocab_size} rows; "
            "use the tokenizer that belongs to this checkpoint"
        )
    return size


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
