"""What an update moved, counted on the device and read once."""

from __future__ import annotations

import pytest
import torch

from samebit.models.load import load_model
from samebit.quant.plan import load_recipe
from samebit.reference.quantize import dequantize_weight
from samebit.train import quant_metrics
from samebit.train.quant_metrics import UpdateProbe
from tests.tiny import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(
        tmp_path_factory.mktemp("probe"), "llama", layers=4, hidden=64, heads=2, kv_heads=1
    )


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "int8"])
def test_counts_are_of_real_elements_and_of_what_changed(folder, recipe):
    model = load_model(folder, load_recipe(recipe))
    probe = UpdateProbe(model)
    with torch.no_grad():
        for _, module in model.linears():
            if module.shape.role == "out":
                module.master[0, module.master[0].abs().topk(3).indices] *= -1.0  # no scale moves
            if module.shape.role == "down":
                module.master[1] = 0.0
    model.refresh()
    found = probe.measure()
    out = model.layers[0].out
    assert found["quant/codes_moved_share/out"] == pytest.approx(3 / out.master.numel())
    assert found["quant/codes_moved_share/qkv"] == 0.0
    assert found["quant/weight_zero_share/down"] >= 1 / model.layers[0].down.rows[0]
    middle = model.layers[2].out
    error = (dequantize_weight(middle.weights["rollout"]) - middle.master).norm()
    before = middle.master.clone()
    before[0, before[0].abs().topk(3).indices] *= -1.0
    want = float((middle.master - before).norm() / error)
    assert found["quant/update_over_error/out"] == pytest.approx(want, rel=1e-5)


def test_a_large_model_is_followed_on_evenly_spaced_blocks(folder, monkeypatch):
    model = load_model(folder, load_recipe("fp8"))
    size = sum(m.weights["rollout"].codes.nbytes for _, m in model.linears())
    monkeypatch.setattr(quant_metrics, "CODES_LIMIT", size // 2)
    followed = {name.split(".")[1] for name, _ in UpdateProbe(model).linears}
    assert followed == {"1", "3"}
    monkeypatch.setattr(quant_metrics, "CODES_LIMIT", 1)
    assert {name.split(".")[1] for name, _ in UpdateProbe(model).linears} == {"2"}
