"""What the README names exists, and its tables are those of the records."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "readme.py"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PLACES = ("", "src/samebit", "bench/results", "bench/results/h200", "docs")
PATHS = sorted(
    set(re.findall(r"`([\w/-]+(?:\.(?:py|md|json|toml)|/))`", TEXT)) - {"out/", ".venv/"}
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_in_backticks_is_there(path: str):
    assert any((ROOT / place / path).exists() for place in PLACES)


def test_the_map_lists_what_there_is():
    """Every folder of the package has a line, and every name that starts one exists."""
    block = TEXT.split("## Map")[1].split("```")[1]
    named = set(re.findall(r"[\w*]+(?:/|\.py)", block))
    package = ROOT / "src" / "samebit"
    folders = {f"{p.name}/" for p in package.iterdir() if (p / "__init__.py").is_file()}
    assert folders <= named
    for name in named - {"src/", "samebit/", "docs/", "recipes/", "tests/"}:
        assert list(package.glob(name.rstrip("/"))) or (ROOT / name).exists(), name


@pytest.fixture
def readme() -> Any:
    spec = importlib.util.spec_from_file_location("readme", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_say_what_the_records_say(readme: Any):
    """After new records: python bench/readme.py."""
    assert readme.rendered(TEXT) == TEXT
    assert readme.rendered(TEXT.replace("| 16 | ", "| 17 | ")) == TEXT


def test_the_page_on_products_says_what_the_records_say(readme: Any):
    text = (ROOT / "docs" / "kernels-gemm.md").read_text(encoding="utf-8")
    assert readme.gemm((16, 32, 64, 128, 256, 512, 4096, 8192, 32768)) in text
    for row in readme.rows("kernels_backward").values():
        assert f"{row['ours_us']:,.0f} ({row['ratio']:.2f})" in text, row["row"]


def test_a_missing_record_leaves_its_line_out(
    readme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(readme, "H200", tmp_path)
    monkeypatch.setattr(readme, "STUDIES", tmp_path)
    for make in readme.SECTIONS.values():
        assert make().count("\n") == 1  # the head and its rule
    (tmp_path / "rollout.json").write_text('{"rows": []}')
    row = {"row": "fp8_block/8B.qkv/16", "ratio": 1.5}
    (tmp_path / "kernels_gemm.json").write_text(json.dumps({"rows": [row]}))
    assert readme.models().count("\n") == readme.gemm().count("\n") == 1


def test_what_differed_or_failed_is_no_zero(
    readme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(readme, "H200", tmp_path)
    monkeypatch.setattr(readme, "STUDIES", tmp_path)

    def cells(engine: Any, backend: dict[str, Any], parity: int = 0) -> list[str]:
        total = 2 if engine["a"]["ok"] else 3
        held = {"cases_ok": 2, "cases_total": total, "cases": backend}
        kernels = {"cases_ok": 1, "cases_total": 1, "cases": {}, "elements_compared": 9}
        for name, record in (
            ("engine_cases", engine),
            ("backend", held),
            ("parity", kernels | {"elements_differing": parity}),
        ):
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        return [" | ".join(line.split(" | ")[1:3]) for line in readme.zeros().splitlines()[2:]]

    good = {"ok": True, "differing": 0}
    several = {"ok": True, "differing": [0, 0]}
    assert cells({"a": good}, {"b": several, "c": {"ok": True}}) == [
        "9 elements | **0**",
        "1 of 1 and 2 of 2 cases | **0**",
    ]
    bad = {"ok": False, "differing": 777}
    found = cells({"a": bad}, {"b": several | {"ok": False, "differing": [0, 5]}}, parity=1234)
    assert found == [
        "9 elements | 1,234, **cause not proven**",
        "0 of 1 and 2 of 3 cases; not: a, b | 782",
    ]
    (_, engine) = cells({"a": {"ok": False}}, {})
    assert engine == "0 of 1 and 2 of 3 cases; not: a | 0, but cases failed or are missing"
