"""Update-aware scaling: the function it must keep, its way back, and what quantisers make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from samebit.cli import main
from samebit.config import Config, TaskSection, TrainConfig
from samebit.config_dump import dump
from samebit.formats import BF16, E4M3, INT8
from samebit.layout import PackedLayout, Segment
from samebit.models.decoder import Decoder
from samebit.models.export import export_bf16
from samebit.models.load import load_model, named_masters
from samebit.models.weights import CheckpointReader
from samebit.quant.plan import load_recipe
from samebit.reference.quantize import quantize_matrix
from samebit.reference.sampling import Transform
from samebit.rl.registry import load_algorithm, load_correction
from samebit.spec import FP8_BLOCK, FP8_ROW, INT4_ROW, INT8_ROW
from samebit.train import checkpoint
from samebit.train.checkpoint import Progress
from samebit.train.invariant import apply_invariant_scale, fold_back
from samebit.train.step import Trainer
from tests.tiny import tiny_folder

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: tiny_folder(tmp_path_factory.mktemp(f), f) for f in FAMILIES}


def log_probs(model: Decoder, side: str = "train") -> torch.Tensor:
    ids = torch.arange(40) * 37 % 250
    with torch.no_grad():
        hidden = model(ids, PackedLayout((Segment(0, 40),)), side)
        return model.log_prob(hidden[:-1], ids[1:], Transform())[0]


def scaled(folder: Path, s: float, recipe: str = "bf16") -> Decoder:
    model = load_model(folder, load_recipe(recipe))
    apply_invariant_scale(model, s)
    model.refresh()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_function_is_the_same_bits_at_two(folders: dict[str, Path], family: str):
    plain = load_model(folders[family], load_recipe("bf16"))
    assert torch.equal(log_probs(scaled(folders[family], 2.0)), log_probs(plain))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_function_is_the_same_to_rounding_at_one_and_a_half(
    folders: dict[str, Path], family: str
):
    plain = log_probs(load_model(folders[family], load_recipe("bf16")))
    moved = (log_probs(scaled(folders[family], 1.5)) - plain).abs()
    assert 0 < moved.max() < 0.15 and moved.mean() < 0.04
    wrong = load_model(folders[family], load_recipe("bf16"))
    with torch.no_grad():
        wrong.layers[0].qkv.master.div_(1.5)  # without the gain: another function altogether
    wrong.refresh()
    assert (log_probs(wrong) - plain).abs().mean() > 5 * moved.mean()


def test_only_what_follows_a_norm_is_scaled(folders: dict[str, Path]):
    before = named_masters(load_model(folders["qwen2"], load_recipe("bf16")))
    after = named_masters(scaled(folders["qwen2"], 2.0))
    for name, master in before.items():
        factor = 1.0
        if name.endswith("layernorm.weight"):
            factor = 2.0
        elif any(f"{part}_proj.weight" in name for part in ("q", "k", "v", "gate", "up")):
            factor = 0.5
        assert torch.equal(after[name], master * factor), name
    assert sum(name.endswith("proj.bias") for name in before) == 6
    assert "model.norm.weight" in before  # the head's norm: never


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_scales_are_refused(folders: dict[str, Path], bad: float):
    model = load_model(folders["llama"], load_recipe("bf16"))
    with pytest.raises(ValueError, match="invariant_scale"):
        apply_invariant_scale(model, bad)
    with pytest.raises(ValueError, match="invariant_scale"):
        fold_back(named_masters(model), model.config, bad)


@pytest.mark.parametrize("family", FAMILIES)
def test_fold_back_is_the_inverse(folders: dict[str, Path], family: str):
    before = named_masters(load_model(folders[family], load_recipe("bf16")))
    for s, tolerance in ((2.0, 0.0), (1.5, 2**-22)):
        model = scaled(folders[family], s)
        kept = {n: t.clone() for n, t in named_masters(model).items()}
        folded = fold_back(named_masters(model), model.config, s)
        assert folded.keys() == before.keys()
        for name, master in before.items():
            torch.testing.assert_close(folded[name], master, rtol=tolerance, atol=0.0)
            assert torch.equal(named_masters(model)[name], kept[name])


def test_export_of_the_folded_masters_is_the_unscaled_model(
    folders: dict[str, Path], tmp_path: Path
):
    model = scaled(folders["qwen2"], 2.0)
    folded = fold_back(named_masters(model), model.config, 2.0)
    reader = CheckpointReader(export_bf16(tmp_path / "out", folders["qwen2"], folded))
    source = CheckpointReader(folders["qwen2"])
    assert reader.names() == source.names()
    assert all(torch.equal(reader.read(n), source.read(n).bfloat16()) for n in reader.names())


def test_the_export_command_folds_a_runs_checkpoint(folders: dict[str, Path], tmp_path: Path):
    model = str(folders["llama"])
    settings = TrainConfig(invariant_scale=2.0)
    config = Config(model=model, recipe="bf16", task=TaskSection(name="digits"), train=settings)
    trainer = Trainer(
        scaled(folders["llama"], 2.0), config, load_algorithm("grpo"), load_correction("none")
    )
    run = tmp_path / "run"
    checkpoint.save(run / "checkpoints", trainer, Progress(step=1), 1, {"invariant_scale": 2.0})
    (run / "config.toml").write_text(dump(config))
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    reader, source = CheckpointReader(tmp_path / "out"), CheckpointReader(folders["llama"])
    assert all(torch.equal(reader.read(n), source.read(n).bfloat16()) for n in reader.names())


def test_checkpoint_records_the_scale_and_refuses_another(folders: dict[str, Path], tmp_path: Path):
    config = Config(model="m", task=TaskSection(name="digits"), train=TrainConfig())
    trainer = Trainer(
        scaled(folders["llama"], 1.5), config, load_algorithm("grpo", {}), load_correction("none")
    )
    about = {"invariant_scale": 1.5}
    folder = checkpoint.save(tmp_path, trainer, Progress(step=3), 1, about)
    assert json.loads((folder / "state.json").read_text())["invariant_scale"] == 1.5
    assert checkpoint.restore(folder, trainer, about).step == 3
    with pytest.raises(ValueError, match=r"invariant_scale = 1\.5"):
        checkpoint.restore(folder, trainer, {"invariant_scale": 1.0})


def relative_error(w: torch.Tensor, precision) -> float:
    codes, scale = quantize_matrix(w, precision)
    values = codes.float()[: w.shape[0], : w.shape[1]]
    if precision == FP8_BLOCK:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = values * scale[: w.shape[0], : scale.shape[1] if scale.shape[1] == 1 else w.shape[1]]
    return float((values.double() - w.double()).norm() / w.double().norm())


@pytest.mark.parametrize("precision", [INT8_ROW, FP8_ROW, INT4_ROW, FP8_BLOCK], ids=str)
def test_quantisers_are_equivariant(precision):
    """QuRL's eq. 12 expects a smaller relative error from W / s; abs-max scales give the same one."""
    w = torch.randn(192, 320, generator=torch.Generator().manual_seed(0)) * 0.02
    codes, scale = quantize_matrix(w, precision)
    halved, half_scale = quantize_matrix(w / 2, precision)
    assert torch.equal(halved.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(half_scale[: scale.shape[0]] * 2, scale) or precision != FP8_BLOCK
    assert torch.equal(half_scale[:192] * 2, scale[:192]) or precision == FP8_BLOCK
    plain, moved = relative_error(w, precision), relative_error(w / 1.5, precision)
    assert plain > 1e-3 and moved == pytest.approx(plain, rel=1e-4)


def test_small_updates_move_few_codes():
    """One Adam step at 1e-6 on N(0, 0.02): what the sampler sees of it (QuRL's weight-update problem)."""
    generator = torch.Generator().manual_seed(1)
    w = torch.nn.Parameter(torch.randn(512, 1024, generator=generator) * 0.02)
    before = w.detach().clone()
    w.grad = torch.randn(w.shape, generator=generator)
    torch.optim.AdamW([w], lr=1e-6, weight_decay=0.0).step()
    after = w.detach()
    assert ((after - before).abs() - 1e-6).abs().max() < 1e-8  # whatever the gradient's size
    shares = {"bf16": float((before.to(BF16.dtype) != after.to(BF16.dtype)).float().mean())}
    for name, precision in (("e4m3", FP8_BLOCK), ("int8", INT8_ROW)):
        codes = [quantize_matrix(x, precision)[0].view(torch.uint8) for x in (before, after)]
        shares[name] = float((codes[0] != codes[1]).float().mean())
    assert (E4M3.max, INT8.max) == (448.0, 127.0)
    assert 0.03 < shares["bf16"] < 0.05, shares
    assert 0.003 < shares["e4m3"] < 0.005, shares
    assert 0.001 < shares["int8"] < 0.003, shares
