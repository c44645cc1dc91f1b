"""Exports: what transformers and vLLM read back is the trained function, or nothing is written."""

import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from samebit.models.export import export_bf16, export_fp8
from samebit.models.fp8_blocks import QuantisedMatrix, unfuse
from samebit.models.weights import CheckpointReader
from tests.tiny import tiny_folder

FAMILIES = ["llama", "qwen2", "qwen3"]


def masters_of(folder) -> dict[str, torch.Tensor]:
    """FP32 masters that are no BF16 values: as after an optimiser step."""
    reader = CheckpointReader(folder)
    generator = torch.Generator().manual_seed(1)
    return {
        name: reader.read(name).float() * (1 + 1e-3 * torch.rand((), generator=generator))
        for name in reader.names()
    }


def quantise(weight: torch.Tensor) -> QuantisedMatrix:
    """Block E4M3 written out by hand, a block at a time."""
    rows, columns = (math.ceil(size / 128) for size in weight.shape)
    codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[i, j]).clamp(-448, 448).to(codes.dtype)
    return QuantisedMatrix(codes, scales)


def split(masters):
    """(plain tensors, quantised matrices): every projection is quantised."""
    quantised = {name: quantise(w) for name, w in masters.items() if "_proj.weight" in name}
    return {name: w for name, w in masters.items() if name not in quantised}, quantised


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_a_sharded_export_whole_and_gives_the_same_logits(
    tmp_path, family, tied
):
    from transformers import AutoModelForCausalLM

    source = tiny_folder(tmp_path / "source", family, tied=tied)
    masters = masters_of(source)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    expected.load_state_dict(masters, strict=not tied)
    target = export_bf16(tmp_path / "out", source, masters, shard_bytes=300_000)

    index = json.loads((target / "model.safetensors.index.json").read_text())
    held = {p.name: load_file(p) for p in target.glob("*.safetensors")}
    assert len(held) > 1
    assert {name: shard for shard, ts in held.items() for name in ts} == index["weight_map"]
    total = sum(tensor.nbytes for tensors in held.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total
    assert {t.dtype for tensors in held.values() for t in tensors.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in index["weight_map"]) == (not tied)

    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    ids = torch.tensor([[5, 9, 200, 7]])
    assert torch.equal(model(ids).logits, expected(ids).logits)


def test_a_separate_process_sees_no_newly_initialised_weights(tmp_path):
    source = tiny_folder(tmp_path / "source", "qwen2", layers=1)
    target = export_bf16(tmp_path / "out", source, masters_of(source))
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T;"
        "M.from_pretrained(sys.argv[1]); print(T.from_pretrained(sys.argv[1])('hello').input_ids)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True
    )
    assert "newly" not in result.stderr and "MISSING" not in result.stderr
    assert result.stdout.startswith("[")


def test_a_tied_head_may_be_given_but_not_differ(tmp_path):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    masters = masters_of(source)
    masters["lm_head.weight"] = masters["model.embed_tokens.weight"].clone()
    target = export_bf16(tmp_path / "same", source, masters)
    assert "lm_head.weight" not in CheckpointReader(target)
    masters["lm_head.weight"][3, 3] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        export_bf16(tmp_path / "other", source, masters)


def spoil(name, value):
    def change(masters):
        masters[name] = value(masters[name])

    return change


NORM, GATE = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.pop(GATE), f"lacks {GATE}"),
        (lambda m: m.update(extra=torch.ones(1)), "extra is no tensor"),
        (spoil(NORM, lambda w: w[:-1]), f"{NORM} has shape"),
        (spoil(GATE, lambda w: w.to(torch.float8_e4m3fn)), f"{GATE} is torch.float8_e4m3fn"),
        (spoil(GATE, lambda w: w.to(torch.int8)), f"{GATE} is torch.int8"),
        (spoil(NORM, lambda w: w * float("nan")), f"{NORM} holds values that are not finite"),
        (spoil(NORM, lambda w: w * 1e39), f"{NORM} holds values that are not finite"),
    ],
)
def test_refusals_name_the_tensor_and_leave_nothing(tmp_path, change, named):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    masters = masters_of(source)
    change(masters)
    with pytest.raises(ValueError, match=named):
        export_bf16(tmp_path / "out", source, masters)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_target_is_never_touched(tmp_path):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    with pytest.raises(ValueError, match="already exists"):
        export_bf16(source, source, masters_of(source))
    assert CheckpointReader(source).names()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_folder_holds_codes_scales_and_bf16_rest(tmp_path, family, tied):
    from transformers import AutoConfig
    from transformers.utils.quantization_config import FineGrainedFP8Config

    source = tiny_folder(tmp_path / "source", family, tied=tied, layers=1)
    masters = masters_of(source)
    plain, quantised = split(masters)
    target = export_fp8(tmp_path / "out", source, plain, quantised, "fp8")
    held = load_file(target / "model.safetensors")
    scale_names = {name.replace(".weight", ".weight_scale_inv") for name in quantised}
    assert set(held) == set(masters) | scale_names
    for name, matrix in quantised.items():
        codes, scales = held[name], held[name.replace(".weight", ".weight_scale_inv")]
        assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        assert torch.equal(codes.view(torch.uint8), matrix.codes.view(torch.uint8))
        assert torch.equal(scales, matrix.scales)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        spread = spread[: codes.shape[0], : codes.shape[1]]
        # Half a step of E4M3 is 2^-4 of the value; below the smallest normal it is absolute.
        error = (codes.float() * spread - masters[name]).abs()
        assert (error <= masters[name].abs() * 2**-4 + spread * 2**-10).all()
    assert all(torch.equal(held[name], plain[name].bfloat16()) for name in plain)
    assert held[f"{GATE}_scale_inv"].shape == (3, 2)  # 320 x 192

    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    assert settings == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    read = AutoConfig.from_pretrained(target).quantization_config
    parsed = FineGrainedFP8Config.from_dict(read)
    assert list(parsed.weight_block_size) == [128, 128] and not parsed.dequantize


def test_transformers_dequantises_the_fp8_export_to_the_same_function(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    # transformers' CPU reader asks for whole blocks.
    source = tiny_folder(
        tmp_path / "source", "llama", hidden=256, intermediate=384, heads=4, kv_heads=2, head_dim=64
    )
    plain, quantised = split(masters_of(source))
    target = export_fp8(tmp_path / "out", source, plain, quantised, "fp8")
    model, info = AutoModelForCausalLM.from_pretrained(
        target, quantization_config=FineGrainedFP8Config(dequantize=True), output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    read = model.state_dict()
    for name, matrix in quantised.items():
        spread = matrix.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(read[name], (matrix.codes.float() * spread).to(read[name].dtype))


def test_matrices_left_unquantised_are_listed(tmp_path):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    plain, quantised = split(masters_of(source))
    quantised.pop(GATE)
    plain[GATE] = masters_of(source)[GATE]
    target = export_fp8(tmp_path / "out", source, plain, quantised, "fp8")
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.gate_proj"]


@pytest.mark.parametrize(("kv_heads", "warned"), [(2, "k_proj"), (4, "")])
def test_partial_blocks_are_pointed_out_where_an_engine_would_fuse_them(
    tmp_path, caplog, kv_heads, warned
):
    """160 rows of down are no matter, 64 of k are: vLLM puts q, k and v into one matrix."""
    sizes = {"hidden": 160, "intermediate": 384, "heads": 4, "head_dim": 32, "kv_heads": kv_heads}
    source = tiny_folder(tmp_path / "source", "llama", layers=1, **sizes)
    plain, quantised = split(masters_of(source))
    export_fp8(tmp_path / "out", source, plain, quantised, "fp8")
    assert [warned in r.getMessage() for r in caplog.records] == [True] * bool(warned)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p, q: q.update({GATE: QuantisedMatrix(q[GATE].codes, q[GATE].scales[:1])}), "scal"),
        (
            lambda p, q: q.update({GATE: QuantisedMatrix(q[GATE].codes[:-1], q[GATE].scales)}),
            "codes are",
        ),
        (
            lambda p, q: q.update({GATE: QuantisedMatrix(q[GATE].codes, q[GATE].scales * 0)}),
            "finite and positive",
        ),
        (
            lambda p, q: q.update({GATE: QuantisedMatrix(nan_code(q[GATE]), q[GATE].scales)}),
            "a code is NaN",
        ),
        (lambda p, q: p.update({GATE: torch.zeros(320, 192)}), "both quantised and unquantised"),
        (lambda p, q: q.pop(GATE), f"lacks {GATE}"),
        (lambda p, q: q.clear(), "at least one"),
        (lambda p, q: q.update(other=q[GATE]), "other is no weight"),
    ],
)
def test_fp8_refusals(tmp_path, change, named):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    plain, quantised = split(masters_of(source))
    change(plain, quantised)
    with pytest.raises(ValueError, match=named):
        export_fp8(tmp_path / "out", source, plain, quantised, "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def nan_code(matrix):
    codes = matrix.codes.view(torch.uint8).clone()
    codes[0, 0] = 0xFF
    return codes.view(torch.float8_e4m3fn)


def test_unfuse_cuts_padding_and_keeps_each_parts_own_scales():
    """Parts of 192 and 64 rows, 130 wide: padded to 256 + 128 rows and 256 columns."""
    codes = torch.arange(384).remainder(8)[:, None].expand(384, 256).to(torch.float8_e4m3fn)
    scales = torch.arange(6.0).reshape(3, 2)
    parts = unfuse(codes, scales, {"a": (192, 130), "b": (64, 130)})
    assert parts["a"].codes.shape == (192, 130) and parts["b"].codes.shape == (64, 130)
    assert parts["a"].scales.tolist() == [[0, 1], [2, 3]]
    assert parts["b"].scales.tolist() == [[4, 5]]
    assert parts["a"].codes[:, 0].float().tolist() == [row % 8 for row in range(192)]
    assert parts["b"].codes[:, 0].float().tolist() == [row % 8 for row in range(256, 320)]
