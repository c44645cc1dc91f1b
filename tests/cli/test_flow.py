"""`samebit flow`: the graph in words and as a drawing."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from samebit.cli import main
from samebit.quant.plan import load_recipe, recipe_names
from samebit.report.flow import draw_flow
from tests.tiny import tiny_folder


def test_show_prints_every_edge_and_draws(tmp_path: Path, capsys: Any):
    svg = tmp_path / "flow.svg"
    assert main(["flow", "show", "fp8", "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    assert "qkv             <- norm_attention  activation  e4m3[1x128] promote 128" in text
    assert "weight gradient  e4m3[128x1] x e4m3[128x128]" in text and "\nunified\n" in text
    words = "".join(ET.parse(svg).getroot().itertext())
    assert "W e4m3 128x128" in words and "differs" not in words


def test_show_resolves_against_a_model(tmp_path: Path, capsys: Any):
    folder = tiny_folder(tmp_path / "m", "llama")
    assert main(["flow", "show", "int8", "--model", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "2 x qkv      q:192 k:64 v:64 x 192" in text


def test_a_mixed_recipe_shows_where_its_sides_differ(capsys: Any):
    assert main(["flow", "show", "fp8-rollout"]) == 0
    assert "mixed: 8 edges differ" in capsys.readouterr().out
    assert main(["flow", "diff", "fp8-rollout"]) == 0
    text = capsys.readouterr().out
    assert "norm_attention -> qkv (activation)\n    rollout: e4m3[1x128] promote 128" in text
    assert text.count("training: bf16") == 8


def test_diff_of_two_recipes(capsys: Any):
    assert main(["flow", "diff", "fp8", "fp8-bf16-backward"]) == 0
    text = capsys.readouterr().out
    assert text.count("no edge differs") == 2 and "input gradient" in text
    assert main(["flow", "diff", "fp8", "fp8"]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_drawn(name: str):
    recipe = load_recipe(name)
    root = ET.fromstring(draw_flow(recipe.to_dict(), standalone=True))
    marks = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text") if t.text == "differs"]
    assert bool(marks) == (recipe.rollout != recipe.train)


def test_bad_arguments(capsys: Any):
    for args in (["shw"], ["show"], ["show", "fp9"], ["diff", "a", "b", "c"]):
        assert main(["flow", *args]) == 2
    assert "known recipes" in capsys.readouterr().err
