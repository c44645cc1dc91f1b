"""Build a task's `Config` from an untyped table, with errors that name key, value and fix."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?` for the closest known name, or the sorted list of all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}."


def build_config(config_type: type[T], table: Mapping[str, Any], where: str) -> T:
    """Make a frozen Config out of a table.

    Dashes in keys count as underscores, lists become tuples, whole numbers are accepted for floats.
    Raises ValueError for an unknown key (with the nearest name), a missing key or a wrong type.
    """
    hints = typing.get_type_hints(config_type)
    fields = {field.name: field for field in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for raw_key, value in table.items():
        key = str(raw_key).replace("-", "_")
        if key not in fields:
            raise ValueError(f"{where}: unknown key {raw_key!r}.{nearest(key, fields)}")
        if key in values:
            raise ValueError(f"{where}: key {raw_key!r} is given twice.")
        values[key] = _convert(value, hints[key], f"{where}.{key}")
    for name, field in fields.items():
        missing = dataclasses.MISSING
        if name not in values and field.default is missing and field.default_factory is missing:
            raise ValueError(f"{where}: key {name!r} is required and missing.")
    return config_type(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Literal:
        if value not in arguments or isinstance(value, bool):
            choices = ", ".join(repr(choice) for choice in arguments)
            raise ValueError(f"{where} = {value!r}: expected one of {choices}.")
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} = {value!r}: expected a list.")
        return tuple(_convert(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} = {value!r}: expected a table.")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Any:
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(
            f"{where} = {value!r}: expected {hint.__name__}, got {type(value).__name__}."
        )
    return value


def _convert_union(value: Any, arguments: tuple[Any, ...], where: str) -> Any:
    for choice in arguments:
        if choice is type(None):
            if value is None:
                return None
            continue
        try:
            return _convert(value, choice, where)
        except ValueError:
            continue
    names = ", ".join(getattr(choice, "__name__", str(choice)) for choice in arguments)
    raise ValueError(f"{where} = {value!r}: expected one of the types {names}.")
