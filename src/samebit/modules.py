"""Modules that a configuration names by their dotted path."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_named(path: str, what: str) -> ModuleType:
    """The module at dotted `path`; ValueError naming `what` where there is none.

    A missing import inside the module is that module's own error and is raised as it is.
    """
    if not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{what} {path!r} is no dotted module path, such as my_package.my_module")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise
        raise ValueError(f"{what} {path!r}: no module {error.name!r} can be imported") from error
