"""GGUF to a HF folder: every tensor in its place, and the same model for transformers."""

import gguf
import numpy as np
import pytest
import torch

from samebit.models.config import read_config
from samebit.models.gguf import convert_gguf, converted_bytes, unpermute_rows
from samebit.models.tokenizer import Tokenizer
from samebit.models.weights import CheckpointReader
from tests.tiny import CHAT_TEMPLATE, MERGES, SPECIALS, TOKENIZER_SIZE, byte_chars, split_merge

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 64, 96, 4, 2, 16
TYPES = gguf.GGMLQuantizationType


def interleave(rotated: np.ndarray, heads: int) -> np.ndarray:
    """What a GGUF llama file stores for q and k: row 2i is i, row 2i+1 is i + D/2, per head."""
    stored = np.empty_like(rotated)
    dim = rotated.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            stored[head * dim + 2 * i] = rotated[head * dim + i]
            stored[head * dim + 2 * i + 1] = rotated[head * dim + dim // 2 + i]
    return stored


def tensors_of(generator: np.random.Generator, tied: bool) -> dict[str, np.ndarray]:
    shapes = {
        "token_embd": (TOKENIZER_SIZE, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * DIM),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    if not tied:
        shapes["output"] = (TOKENIZER_SIZE, HIDDEN)
    return {
        f"{name}.weight": generator.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path, *, tied=True, types=None, arch="llama", pre="smollm", drop=(), extra=None):
    """A one-layer llama file; returns its tensors as a rotate-half model has them."""
    tensors = {**tensors_of(np.random.default_rng(0), tied), **(extra or {})}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    chars = byte_chars()
    writer.add_token_list([*chars, *MERGES, *SPECIALS])
    plain, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([plain] * (len(chars) + len(MERGES)) + [control] * len(SPECIALS))
    writer.add_token_merges([" ".join(split_merge(merge)) for merge in MERGES])
    writer.add_eos_token_id(TOKENIZER_SIZE - 1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in tensors.items():
        if name in drop:
            continue
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        stored = interleave(values, heads) if heads else values
        kind = (types or {}).get(name, TYPES.F32)
        if kind == TYPES.F32:
            writer.add_tensor(name, stored)
        elif kind == TYPES.F16:
            writer.add_tensor(name, stored.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def convert(tmp_path, **options):
    tensors = write_gguf(tmp_path / "m.gguf", **options)
    folder = tmp_path / "hf"
    folder.mkdir()
    convert_gguf(tmp_path / "m.gguf", folder)
    return folder, tensors


def test_unpermute_by_hand():
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    # Two heads of four rows: pairs (0, 1), (2, 3) become halves (0, 2), (1, 3).
    assert unpermute_rows(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_lands_under_its_name_in_bf16(tmp_path, tied):
    folder, tensors = convert(tmp_path, tied=tied)
    reader = CheckpointReader(folder)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    if not tied:
        names["lm_head.weight"] = "output.weight"
    assert set(reader.names()) == set(names)
    for hf_name, name in names.items():
        assert torch.equal(reader.read(hf_name), torch.from_numpy(tensors[name]).bfloat16())
    assert converted_bytes(tmp_path / "m.gguf") == sum(
        reader.read(name).nbytes for name in reader.names()
    )
    config = read_config(folder)
    assert (config.tied, config.rope_theta, config.rms_eps) == (tied, 5000.0, 1e-5)
    assert (config.head_dim, config.kv_heads, config.eos_ids) == (
        DIM,
        KV_HEADS,
        (TOKENIZER_SIZE - 1,),
    )


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (TYPES.F16, 2**-10),
        (TYPES.BF16, 2**-8),
        (TYPES.Q8_0, 1 / 127),
        (TYPES.Q4_0, 1 / 7),
        (TYPES.Q4_1, 1 / 7),
    ],
)
def test_quantised_types_come_back_within_their_own_step(tmp_path, kind, step):
    name = "blk.0.ffn_gate.weight"
    folder, tensors = convert(tmp_path, types={name: kind})
    read = CheckpointReader(folder).read("model.layers.0.mlp.gate_proj.weight").float().numpy()
    bound = np.abs(tensors[name]).max() * (step + 2**-8)
    assert 0 < np.abs(read - tensors[name]).max() <= bound


def test_transformers_loads_it_and_the_tokenizer_splits_digits(tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    folder, _ = convert(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = Tokenizer(folder)
    assert (
        tokenizer.encode("<|im_end|>") == [TOKENIZER_SIZE - 1] and len(tokenizer.encode("123")) == 3
    )
    text = "hello 12\n<|im_start|>\u00e9 \U0001f642  x"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) > 5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"arch": "gpt2"}, "general.architecture"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre"),
        ({"types": {"blk.0.ffn_gate.weight": TYPES.Q5_0}}, "Q5_0"),
        ({"drop": ("blk.0.ffn_up.weight",)}, "up_proj.weight is missing"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope_freqs"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "attn_q.bias"),
        ({"extra": {"blk.7.ffn_up.weight": np.ones((96, 64), np.float32)}}, "expected None"),
        ({"extra": {"output_norm.weight": np.ones(65, np.float32)}}, "output_norm"),
    ],
)
def test_refusals_name_the_file_and_the_cause(tmp_path, options, named):
    with pytest.raises(ValueError, match=named) as error:
        convert(tmp_path, **options)
    assert "m.gguf" in str(error.value)


@pytest.mark.parametrize("keep", [0, 3, 20, 3000, -1])
def test_a_cut_file_is_named(tmp_path, keep):
    write_gguf(tmp_path / "m.gguf")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw[:keep] if keep >= 0 else raw[: len(raw) // 2])
    with pytest.raises(ValueError, match=r"m\.gguf"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)
