"""read_config: both spellings of config.json, and a named refusal for what is not computed."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.models.config import read_config
from tests.tiny import END_ID, TOKENIZER_SIZE, tiny_folder, write_tokenizer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
}


def write(folder: Path, **changes):
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_5_writes_is_read(tmp_path, family, tied):
    config = read_config(tiny_folder(tmp_path, family, tied=tied, rope_theta=5000.0, layers=1))
    assert (config.family, config.hidden, config.intermediate, config.layers) == (
        family,
        192,
        320,
        1,
    )
    assert (config.heads, config.kv_heads, config.head_dim, config.group_size) == (6, 2, 32, 3)
    assert (config.vocab_size, config.tokenizer_size) == (TOKENIZER_SIZE + 19, TOKENIZER_SIZE)
    assert (config.rope_theta, config.rope_scaling) == (5000.0, None)
    assert (config.rms_eps, config.tied, config.max_position) == (1e-6, tied, 1024)
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert (config.eos_ids, config.file_dtype) == ((END_ID,), "bfloat16")


def test_transformers_4_spelling_and_defaults(tmp_path):
    config = read_config(
        write(tmp_path, rope_theta=500000.0, torch_dtype="float16", num_key_value_heads=...)
    )
    assert (config.rope_theta, config.file_dtype) == (500000.0, "float16")
    assert (config.kv_heads, config.head_dim, config.tied) == (4, 16, False)
    assert (config.max_position, config.eos_ids) == (2048, ())


def test_qwen3_without_head_dim_has_128(tmp_path):
    assert read_config(write(tmp_path, model_type="qwen3")).head_dim == 128


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
            {"rope_type": "llama3", **LLAMA3_ROPE},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
            {"rope_type": "llama3", **LLAMA3_ROPE},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope_theta": 5e5, "rope_scaling": None}, None),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
                "attention_factor": 0.1 * math.log(4.0) + 1,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": True,
            },
        ),
    ],
)
def test_rope_variants(tmp_path, changes, expected):
    config = read_config(write(tmp_path, **changes))
    assert (config.rope_theta, config.rope_scaling) == (5e5, expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}
            | {"max_window_layers": 1},
            "sliding_window",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"eos_token_id": 300}, "eos_token_id"),
        ({"vocab_size": TOKENIZER_SIZE - 1}, "tokenizer"),
    ],
)
def test_refusals_name_the_key(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        read_config(write(tmp_path, **changes))


def test_a_window_that_is_written_but_not_used_is_accepted(tmp_path):
    """Qwen2.5 ships sliding_window 32768 with use_sliding_window false."""
    config = read_config(
        write(tmp_path, model_type="qwen2", sliding_window=32768, use_sliding_window=False)
    )
    assert config.family == "qwen2"


def test_every_end_id_of_both_files_counts_and_sampling_defaults_do_not(tmp_path):
    write(tmp_path, eos_token_id=1)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [106, 1], "temperature": 0.6, "top_k": 20, "top_p": 0.8})
    )
    config = read_config(tmp_path)
    assert config.eos_ids == (1, 106)
    assert not any("top" in name or "temp" in name for name in vars(config))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": \xff}'])
def test_a_broken_config_is_named(tmp_path, text):
    write(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_config_or_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        read_config(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
CONFIG_KEYS = [
    *LLAMA,
    *("head_dim", "hidden_act", "max_position_embeddings", "rope_theta", "rope_scaling"),
    *("rope_parameters", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("attention_bias", "partial_rotary_factor", "quantization_config"),
]
ROPE_VALUES = st.dictionaries(
    st.sampled_from(["rope_type", "type", "rope_theta", "factor", "attention_factor", "truncate"]),
    JSON_VALUES | st.sampled_from(["linear", "llama3", "yarn", "default"]),
)


@settings(max_examples=400, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON_VALUES, min_size=1, max_size=3),
    rope=st.none() | ROPE_VALUES,
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
)
def test_no_config_escapes_as_anything_but_a_named_error(tmp_path_factory, changes, rope, family):
    folder = tmp_path_factory.mktemp("config")
    values = {"model_type": family, "rope_scaling": rope, **changes}
    try:
        config = read_config(write(folder, **values))
    except ValueError as error:
        assert str(folder) in str(error)
    else:
        assert isinstance(config.layers, int) and math.isfinite(config.rope_theta)
        assert math.isfinite(config.rms_eps) and config.rms_eps > 0


@settings(max_examples=200, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(["model", "added_tokens"]),
        JSON_VALUES
        | st.fixed_dictionaries({"vocab": JSON_VALUES | st.dictionaries(st.text(), JSON_VALUES)})
        | st.lists(st.fixed_dictionaries({"id": JSON_VALUES})),
        min_size=1,
    )
)
def test_no_tokenizer_file_escapes_as_anything_but_a_named_error(tmp_path_factory, changes):
    folder = write(tmp_path_factory.mktemp("tokenizer"))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    try:
        config = read_config(folder)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert 0 < config.tokenizer_size <= config.vocab_size
