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


def named(value: Any) -> str:
    """Every key of a record, and what it says about itself in words."""
    if isinstance(value, dict):
        own = str(value["about"]) if "about" in value else ""
        return " ".join([own, *value, *map(named, value.values())])
    return " ".join(map(named, value)) if isinstance(value, list) else ""


def test_records_that_name_no_hardware_versions_or_commit_are_listed():
    text = TEXT.split("## Measured")[1].split("\n## ")[0]
    facts = {
        "hardware": r"\b(card|device|machine|processor|cpu|H200)\b",
        "versions": r"\b(torch|python)\b",
        "commit": r"\bcommit\b",
    }
    lacking: dict[str, list[str]] = {}
    for path in sorted(set(re.findall(r"`([\w/]+)\.(?:md|json)`", text))):
        places = [ROOT / place / f"{path}.json" for place in PLACES]
        (file,) = [p for p in places if p.exists()] or [None]
        said = named(json.loads(file.read_text(encoding="utf-8"))) if file else ""
        missing = [fact for fact, pattern in facts.items() if not re.search(pattern, said)]
        if file and missing:
            lacking[file.name] = missing
    assert lacking == {
        "grading.json": ["commit"],
        "engine_cases.json": ["versions"],
        "study.json": ["hardware", "versions", "commit"],
    }
    introduction = text.split("\n\n")[1]
    assert all(name in introduction for name in lacking)


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

    def cells(engine: Any, backend: dict[str, Any], total: int, parity: int = 0) -> list[str]:
        held = {"cases_total": total, "cases": backend}
        kernels = {"cases_ok": 1, "cases_total": 1, "cases": {}, "elements_compared": 9}
        for name, record in (
            ("engine_cases", engine),
            ("backend", held),
            ("parity", kernels | {"elements_differing": parity}),
        ):
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        lines = readme.zeros().splitlines()[2:]
        return [" | ".join(line.split(" | ")[1:3]) if line[:1] == "|" else line for line in lines]

    good = {"ok": True, "differing": 0, "tokens": 1000}
    several = {"ok": True, "differing": [0, 0], "tokens": [30, 4]}
    found = cells(
        {"a": good, "memory": {"ok": True}, "naive/x": {"ok": True, "differing": [0]}},
        {"a": several, "gradients/x": {"ok": True}, "gradients/y": {"ok": False}},
        total=3,
    )
    assert found[:4] == [
        "9 elements | **0**",
        "1,034 tokens in 2 of 2 cases | **0**",
        "1 of 1 cases | **0**",
        "",
    ]
    assert "memory, given back and taken again (1); gradients against" in found[4]
    assert found[4].endswith("Passed: 2 of 3 cases; not: gradients/y.")
    bad = {"ok": False, "differing": 777, "tokens": 900}
    found = cells({"a": bad}, {"b": several | {"ok": False, "differing": [0, 5]}}, 2, parity=1234)
    assert found == [
        "9 elements | 1,234, **cause not proven**",
        "934 tokens in 0 of 2 cases; not: a, b; 1 not run | 782",
    ]
    (_, engine) = cells({"a": {"ok": False}}, {}, 0)
    assert engine == "0 of 1 cases; not: a | 0, but cases failed or are missing"


def test_a_number_of_tokens_is_of_cases_that_compare_tokens(readme: Any):
    """Every case of the records is in one row or in the sentence below the table."""
    cases, missing = readme.engine_cases()
    others = [case for name, case in cases if readme.is_other(name)]
    assert not missing and not any("tokens" in case or "differing" in case for case in others)
    assert all("differing" in case for name, case in cases if not readme.is_other(name))
