"""Finds algorithms and corrections by name and turns a table of settings into their `Config`.

The folder is the registry: the name is the module's name, or a dotted path outside the package.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Mapping
from typing import Any

from samebit.option_aliases import OPTION_ALIASES
from samebit.option_table import build_options, did_you_mean
from samebit.rl.api import Algorithm, Correction


def list_names(package: str, class_name: str) -> list[str]:
    """Modules of `package` that define `Config` and `class_name`, sorted."""
    folder = importlib.import_module(package)
    names = (m.name for m in pkgutil.iter_modules(folder.__path__) if not m.ispkg)
    return sorted(
        n for n in names if _defines(importlib.import_module(f"{package}.{n}"), class_name)
    )


def _defines(module: types.ModuleType, class_name: str) -> bool:
    # Imported base classes do not make a module a plug-in: it must define both itself.
    found = (vars(module).get("Config"), vars(module).get(class_name))
    return all(getattr(value, "__module__", None) == module.__name__ for value in found)


def list_algorithms() -> list[str]:
    """Names `load_algorithm` knows."""
    return list_names("samebit.rl", "Algorithm")


def list_corrections() -> list[str]:
    """Names `load_correction` knows."""
    return list_names("samebit.rl.corrections", "Correction")


def load_algorithm(name: str, table: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm called `name` (module in samebit.rl, or dotted path), built from `table`.

    ValueError for an unknown name or key (with the nearest valid one), a wrong type or a value out
    of range.
    """
    module = _find(name, "samebit.rl", "Algorithm", "algorithm", list_algorithms)
    return module.Algorithm(build_options(module.Config, table or {}, name, OPTION_ALIASES))


def load_correction(name: str, table: Mapping[str, Any] | None = None) -> Correction:
    """The correction called `name`, built from `table`; errors as `load_algorithm`.

    `a+b` composes: weights multiply, bounds chain; `table` then has one sub-table per name.
    """
    table = table or {}
    if "+" in name:
        from samebit.rl.compose import Composed

        parts = [part.strip() for part in name.split("+")]
        unknown = sorted(set(table) - set(parts))
        if unknown:
            raise ValueError(f"{name}: {unknown[0]!r} is not one of the corrections {parts}")
        return Composed(tuple(load_correction(p, table.get(p)) for p in parts))
    module = _find(name, "samebit.rl.corrections", "Correction", "correction", list_corrections)
    return module.Correction(build_options(module.Config, table, name, OPTION_ALIASES))


def _find(name: str, package: str, class_name: str, what: str, known: Any) -> Any:
    path = name if "." in name else f"{package}.{name}"
    if not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{what} {name!r} is neither a name nor a dotted module path")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        # A missing import *inside* a user's module is that module's error, not an unknown name.
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise
        module = None
    if module is None or not (
        _defines(module, class_name)
        if "." not in name
        else hasattr(module, "Config") and hasattr(module, class_name)
    ):
        names = known()
        raise ValueError(
            f"unknown {what} {name!r}{did_you_mean(name, names)}; known: {', '.join(names)}, "
            f"or the dotted path of a module that defines Config and {class_name}"
        )
    return module
