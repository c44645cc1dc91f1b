"""Files up to 400 lines, functions up to 60 (CONTRIBUTING.md); a kernel's body may be longer."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "samebit"
FILES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 400, 60


def test_no_file_is_longer():
    lengths = {str(f.relative_to(PACKAGE)): len(f.read_text().splitlines()) for f in FILES}
    assert len(lengths) > 200
    assert {name: n for name, n in lengths.items() if n > FILE_LINES} == {}


def test_no_function_is_longer():
    longer = {}
    for file in FILES:
        if file.parent.name == "kernels":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    longer[f"{file.relative_to(PACKAGE)}:{node.name}"] = lines
    assert longer == {}
