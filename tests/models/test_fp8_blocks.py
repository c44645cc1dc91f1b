"""Our FP8 export read back: the exported function bit for bit, or an error that says why not."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from samebit.cli.policy import find_target
from samebit.models.config import read_config
from samebit.models.decoder import Decoder
from samebit.models.export import export_bf16, export_fp8
from samebit.models.fp8_blocks import (
    QuantisedMatrix,
    first_difference,
    master_of,
    quantised_matrices,
)
from samebit.models.load import family_names, load_model, named_masters
from samebit.quant.plan import load_recipe
from samebit.reference.quantize import quantize_matrix
from samebit.spec import FP8_BLOCK
from samebit.trace import rollout_side, training_side
from tests.tiny import tiny_folder

SEQUENCES = [[5, 9, 200, 7, 31, 8], [77, 3, 3, 120]]


def trained(folder: Path, recipe: str) -> Decoder:
    """A model whose FP32 masters are no BF16 values, as after an optimiser step."""
    model = load_model(folder, load_recipe(recipe))
    generator = torch.Generator().manual_seed(3)
    for master in named_masters(model).values():
        master.mul_(1 + 1e-3 * torch.randn(master.shape, generator=generator))
    model.refresh()
    return model


def export(model: Decoder, source: Path, target: Path, recipe: str = "fp8") -> Path:
    quantised = quantised_matrices(model, family_names(model.config))
    masters = named_masters(model)
    rest = {name: masters[name] for name in masters if name not in quantised}
    return export_fp8(target, source, rest, quantised, recipe)


def bits(model: Decoder) -> list[torch.Tensor]:
    """Codes and scales of every linear as the sampler reads them, padding included."""
    weights = [linear.weights["rollout"] for _, linear in model.linears()]
    assert all(w.scale is not None for w in weights)
    return [x.view(torch.uint8) for w in weights for x in (w.codes, w.scale) if x is not None]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_export_is_loaded_as_the_function_that_was_exported(tmp_path, family, tied):
    source = tiny_folder(tmp_path / "source", family, tied=tied, outliers=2)
    model = trained(source, "fp8")
    loaded = load_model(export(model, source, tmp_path / "out"), load_recipe("fp8"))
    assert all(map(torch.equal, bits(loaded), bits(model)))
    for side in (training_side, rollout_side):
        expected = side(model, SEQUENCES).logp_T.view(torch.int32)
        assert torch.equal(side(loaded, SEQUENCES).logp_T.view(torch.int32), expected)


def test_what_was_read_is_exported_again_byte_for_byte_and_in_bf16(tmp_path):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    first = export(trained(source, "fp8"), source, tmp_path / "first")
    loaded = load_model(first, load_recipe("fp8"))
    second = export(loaded, first, tmp_path / "second")
    for name in ("model.safetensors", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    plain = export_bf16(tmp_path / "plain", first, named_masters(loaded))
    config = json.loads((plain / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "samebit_recipe"}
    load_model(plain, load_recipe("bf16"))


def test_the_recipe_of_an_export_is_the_default_and_another_function_is_said(tmp_path, caplog):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    folder = export(trained(source, "fp8-kv"), source, tmp_path / "out", "fp8-kv")
    assert read_config(folder).exported_recipe == "fp8-kv"
    assert find_target(str(folder)).config.recipe == "fp8-kv"
    assert find_target(str(folder), [("recipe", "fp8")]).config.recipe == "fp8"
    assert find_target(str(source)).config.recipe == "fp8"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_model(folder, load_recipe("fp8-kv"))
        assert not caplog.records
        load_model(folder, load_recipe("fp8"))
    assert "is a policy of recipe fp8-kv; under fp8 it is another policy" in caplog.text


@pytest.mark.parametrize("recipe", ["bf16", "int8", "fp8-row", "int8-rollout"])
def test_a_recipe_with_other_weights_is_refused(tmp_path, recipe):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    folder = export(trained(source, "fp8"), source, tmp_path / "out")
    with pytest.raises(ValueError, match=rf"recipe '{recipe}' samples with weights in .*--recipe"):
        load_model(folder, load_recipe(recipe))


GATE = "model.layers.0.mlp.gate_proj.weight"


def change(kind: str, held: dict[str, torch.Tensor]) -> None:
    codes, scale = held[GATE], held[f"{GATE}_scale_inv"]
    if kind == "scale":
        # one of the tenth of all FP32 numbers that are no quotient of one by 448
        scale.view(torch.int32)[0, 0] += 1
        while scale[0, 0] * 448 / torch.tensor(448.0) == scale[0, 0]:
            scale.view(torch.int32)[0, 0] += 1
    elif kind == "codes":
        # the largest code gone: the block would have had another scale
        codes.view(torch.uint8)[codes.float().abs() == 448] -= 1
    elif kind == "no scale":
        del held[f"{GATE}_scale_inv"]
    elif kind == "bf16":
        held[GATE] = codes.bfloat16()
    elif kind == "nan":
        codes.view(torch.uint8)[:128, :128] = 0x7F
        scale[0, 0] = float("nan")
    elif kind == "negative":
        scale[0, 0] *= -1
    else:
        held[f"{GATE}_scale_inv"] = scale[:1]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("scale", rf"{GATE}: .* codes and 1 of 6 scales are not what"),
        ("codes", rf"{GATE}: .* of 6 scales are not what the FP32 master of any matrix"),
        ("no scale", rf"no tensor '{GATE}_scale_inv'"),
        ("bf16", rf"{GATE} is torch.bfloat16 with torch.float32 scales"),
        ("nan", rf"{GATE}: a code is NaN; fetch the folder again"),
        ("negative", rf"{GATE}: a scale is not finite and positive; fetch"),
        ("shape", rf"{GATE}_scale_inv has shape \[1, 2\], config.json asks for \[3, 2\]"),
    ],
)
def test_codes_that_no_master_has_are_refused(tmp_path, kind, said):
    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    folder = export(trained(source, "fp8"), source, tmp_path / "out")
    held = load_file(folder / "model.safetensors")
    change(kind, held)
    save_file(held, folder / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        load_model(folder, load_recipe("fp8"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8], ids=["e4m3", "uint8"])
@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.embed_tokens"])
def test_codes_of_what_is_not_quantised_are_refused(tmp_path, name, dtype):
    source = tiny_folder(tmp_path / "source", "llama", layers=1, tied=False)
    folder = export(trained(source, "fp8"), source, tmp_path / "out")
    held = load_file(folder / "model.safetensors")
    held[f"{name}.weight"] = held[f"{name}.weight"].to(dtype)
    save_file(held, folder / "model.safetensors")
    said = rf"out: {name}\.weight is {dtype}; of an FP8 export only the linears of the blocks are codes"
    with pytest.raises(ValueError, match=said):
        load_model(folder, load_recipe("fp8"))


def test_a_code_alone_or_a_scale_alone_is_a_difference():
    codes = torch.tensor([[448.0, 2.0, -1.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5]])
    other_codes, other_scales = codes.clone(), scales.clone()
    other_codes.view(torch.uint8)[0, 1] += 1
    other_scales.view(torch.int32)[0, 0] += 1
    held = {"w": QuantisedMatrix(codes, scales)}
    assert first_difference(held, "w", QuantisedMatrix(codes.clone(), scales.clone())) is None
    found = first_difference(held, "w", QuantisedMatrix(other_codes, scales))
    assert found == "1 of 3 codes and 0 of 1 scales"
    found = first_difference(held, "w", QuantisedMatrix(codes, other_scales))
    assert found == "0 of 3 codes and 1 of 1 scales"


def test_a_master_by_hand():
    """Scale 2 of the first block, 3 of the second; only codes times scale."""
    codes = torch.zeros(1, 130).to(torch.float8_e4m3fn)
    codes[0, [0, 1, 129]] = torch.tensor([448.0, -0.5, 12.0]).to(torch.float8_e4m3fn)
    master = master_of(QuantisedMatrix(codes, torch.tensor([[2.0, 3.0]])))
    assert master[0, [0, 1, 129]].tolist() == [896.0, -1.0, 36.0]
    assert master.shape == (1, 130) and int(master.count_nonzero()) == 3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    exponent=st.integers(-110, 100),
    zeros=st.floats(0, 1),
)
def test_every_quantised_matrix_has_a_master(seed, rows, columns, exponent, zeros):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    w[torch.rand(rows, columns, generator=generator) < zeros] = 0.0
    codes, scales = quantize_matrix(w, FP8_BLOCK)
    again = quantize_matrix(master_of(QuantisedMatrix(codes[:rows, :columns], scales)), FP8_BLOCK)
    assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again[1], scales)


def test_every_scale_that_is_a_448th_part_comes_back():
    """All significands of amax; an exponent moves all three numbers alike."""
    amax = torch.arange(1 << 23, dtype=torch.int32).add_(0x3F800000).view(torch.float32)
    divisor = torch.tensor(448.0)
    scale = amax / divisor
    assert torch.equal(scale * divisor / divisor, scale)
    # not because nothing is lost: a tenth of all products is another amax
    assert float((scale * divisor != amax).float().mean()) > 0.1
