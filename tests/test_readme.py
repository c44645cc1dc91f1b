"""What the README names exists, and its tables are those of the records."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

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


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_say_what_the_records_say():
    """After new records: python bench/readme.py."""
    module = script()
    assert module.rendered(TEXT) == TEXT
    assert module.rendered(TEXT.replace("| 16 | ", "| 17 | ")) == TEXT


def test_the_page_on_products_says_what_the_records_say():
    text = (ROOT / "docs" / "kernels-gemm.md").read_text(encoding="utf-8")
    assert script().gemm((16, 32, 64, 128, 256, 512, 4096, 8192, 32768)) in text
    for row in script().rows("kernels_backward").values():
        assert f"{row['ours_us']:,.0f} ({row['ratio']:.2f})" in text, row["row"]
