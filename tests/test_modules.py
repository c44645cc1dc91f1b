"""Names of modules in a configuration: one clear ValueError where there is no such module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from samebit.engine.api import load_engine
from samebit.quant.plan import load_recipe
from samebit.rl.registry import load_algorithm
from samebit.tasks.api import load_task


@pytest.mark.parametrize("name", ["../x", ".x", "a..b", "my recipes.x", "no_such_package.x"])
def test_a_name_that_is_no_module_is_refused_by_name(name: str):
    for load in (load_recipe, load_engine, load_algorithm, lambda n: load_task(n, {})):
        with pytest.raises(ValueError) as found:
            load(name)
        assert repr(name) in str(found.value)


def test_a_missing_import_inside_the_module_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "broken.py").write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_recipe("inside.broken")
    sys.modules.pop("inside", None)
