"""Whole steps made of measured parts, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebit.bench import api, integrate, records

H200 = Path(__file__).parents[2] / "bench" / "results" / "h200"


def grid(a: float, b: float, c: float, share: float = 0.6) -> dict[str, dict[str, float]]:
    points = ((1, 1024), (32, 1200), (128, 384), (256, 384), (256, 1792))
    return {
        f"decode/qwen3-8b/x/{s}x{n}": {"ms": a + b * s + c * s * n, "share_of_roofline": share}
        for s, n in points
    }


def test_a_decode_step_is_fitted_through_the_grid():
    rows = grid(2.0, 0.01, 1e-5)
    rows["decode/qwen3-8b/x/1x1024"]["ms"] = 50.0  # one sequence alone is left out
    fit, error = integrate.fit_decode(rows)
    assert fit == pytest.approx([2.0, 0.01, 1e-5]) and error < 1e-9
    rows["decode/qwen3-8b/x/256x1792"]["ms"] *= 1.2
    assert 0.01 < integrate.fit_decode(rows)[1] < 0.2
    with pytest.raises(ValueError, match="1 rows of the decode grid"):
        integrate.fit_decode({"decode/m/r/64x10": {"ms": 1.0}})


def test_half_the_places_take_two_waves():
    # 384 tokens: 256 steps at a mean context of 256; 2 + 0.01 x 64 + 1e-5 x 64 x 256 ms a step
    expected = 4 * 256 * (2.0 + 0.64 + 0.16384) / 1e3
    assert integrate.rollout_s([2.0, 0.01, 1e-5], 384, 64) == pytest.approx(expected)


def test_fp8_keys_and_values_leave_room_for_twice_the_sequences():
    bf16, fp8_kv = (integrate.at_once("qwen3-8b", r, 8192) for r in ("bf16-fast", "fp8-kv"))
    # 139.8 - 60.1 of masters, moments and weights, 85 % of it; 147,456 bytes a token, 64 pages of 128
    # less the prompt's eighth
    pages = int((139.8 - 60.1) * 2**30 * 0.85 / (147456 * 128))
    assert bf16 == pytest.approx(pages / (63 + 1 / 8), abs=1)
    assert 1.9 < fp8_kv / bf16 < 2.2
    assert integrate.at_once("qwen3-8b", "fp8-kv", 2048) == 256


def test_a_step_adds_decode_prefill_and_training():
    held = {
        "rollout": {
            **{n.replace("/x/", "/fp8/"): r for n, r in grid(1.0, 0.01, 1e-5).items()},
            **{n.replace("/x/", "/bf16-fast/"): r for n, r in grid(2.0, 0.02, 1e-5, 0.7).items()},
        },
        "step": {
            "micro/qwen3-8b/2048/once": {"fp8_phase_s": 30.0, "bf16-fast_phase_s": 40.0},
        },
    }
    fast = integrate.step_of(held, "qwen3-8b", 2048, "bf16-fast")
    fp8 = integrate.step_of(held, "qwen3-8b", 2048, "fp8")
    decode = 1920 * (1.0 + 2.56 + 1e-5 * 256 * 1088) / 1e3
    assert fp8["rollout_s"] == pytest.approx(decode + 30 * 128 / 2048 / 3)
    assert fp8["step_s"] == pytest.approx(fp8["rollout_s"] + 30.0)
    assert fp8["over_bf16-fast"] == pytest.approx(fast["step_s"] / fp8["step_s"])
    assert fp8["decode_points"] == pytest.approx(-0.1) and "over_bf16-fast" not in fast
    training = integrate.training_of(held, "qwen3-8b", 2048, "fp8")
    assert training["over_bf16-fast"] == pytest.approx(40 / 30)
    # the part that is farther apart speaks for the step
    assert fp8["training_points"] == training["roofline_points"] < -0.1
    assert fp8["roofline_points"] == fp8["training_points"]
    assert (
        fp8["comparable"].startswith("no: more than 5 points")
        and "bf16-fast is" in fp8["comparable"]
    )
    with pytest.raises(ValueError, match="micro/qwen3-8b/2048/once has no torch"):
        integrate.training_of(held, "qwen3-8b", 2048, "bf16-fast")
    with pytest.raises(ValueError, match="micro/qwen3-8b/8192/once has no fp8"):
        integrate.step_of(held, "qwen3-8b", 8192, "fp8")


def test_shares_of_the_decode_grid_are_compared_size_by_size():
    """bf16-fast alone at a size that it does well says nothing of the distance; nor does one sequence."""
    held = {
        "rollout": {
            "decode/m/fp8/64x10": {"share_of_roofline": 0.6},
            "decode/m/fp8/1x10": {"share_of_roofline": 0.1},
            "decode/m/bf16-fast/64x10": {"share_of_roofline": 0.62},
            "decode/m/bf16-fast/1x10": {"share_of_roofline": 0.5},
            "decode/m/bf16-fast/64x4000": {"share_of_roofline": 0.9},
        }
    }
    assert integrate._decode_points(held, "m", "fp8") == pytest.approx(-0.02)


def test_a_training_phase_s_share_by_hand():
    """BF16: 6 x parameters x tokens at 989.4 TFLOP/s, attention's seven products at the same rate."""
    from samebit.bench.training import MODELS, roofline_share

    c = MODELS["qwen3-8b"]
    linears = c.layers * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    products = 6 * 2048 * linears + 6 * (2049 - 128) * 4096 * 151936
    attention = 2 * 7 * 36 * 4096 * 2048 * 2049 / 2
    least = (products + attention) / 989.4e12
    assert roofline_share("qwen3-8b", "bf16", 1, 2048, 1.0) == pytest.approx(least, rel=1e-3)
    assert roofline_share("qwen3-8b", "torch", 1, 2048, 2.0) == pytest.approx(least / 2, rel=1e-3)


def test_rows_made_of_others_are_those_of_the_records_there_are():
    """After new records: samebit bench step --rows training/,integrated/."""
    held = {name: records.read(H200 / f"{name}.json") for name in ("rollout", "step")}
    for case in api.load_suite("step").cases():
        if case.derive is not None and case.name in held["step"]:
            made = records.rounded(case.derive(held))
            assert held["step"][case.name] == {"row": case.name, **made}, case.name
