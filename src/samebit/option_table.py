"""A table of settings as a frozen dataclass: every key, type and choice checked. Imports no torch.

Algorithms, corrections, tasks and studies read their tables here, and the configuration its values.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Aliases = Mapping[str, tuple[str, ...]]
"""Another tool's key, and the keys of ours that it sets."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the closest known name; nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did_you_mean`, or `; known: ...` with all of them."""
    names = sorted(known)
    return did_you_mean(name, names) or f"; known: {', '.join(names)}"


def build_options(
    config_type: type[T], table: Mapping[str, Any], where: str, aliases: Aliases | None = None
) -> T:
    """`config_type` from a table; dashes in keys count as underscores.

    An alias that sets several keys yields to one that sets a single one. ValueError, beginning with
    `where`, for an unknown key (with the nearest), one given twice or missing, and a wrong value.
    """
    aliases = aliases or {}
    hints = typing.get_type_hints(config_type)
    known = {item.name: item for item in fields(config_type)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    spelled: dict[str, tuple[str, int]] = {}
    for raw, targets, value in _widest_first(table, known, aliases, where):
        for target in targets:
            earlier, width = spelled.get(target, ("", 0))
            if width == len(targets):
                raise ValueError(f"{where}: {earlier!r} and {raw!r} both set {target}; keep one")
            values[target] = convert(value, hints[target], f"{where}.{raw.replace('-', '_')}")
            spelled[target] = (raw, len(targets))
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{where}: key {name!r} is required and missing")
    return config_type(**values)


def _widest_first(
    table: Mapping[str, Any], known: Mapping[str, Field[Any]], aliases: Aliases, where: str
) -> list[tuple[str, tuple[str, ...], Any]]:
    """(key as spelled, the keys it sets, value); those that set most come first."""
    found: list[tuple[str, tuple[str, ...], Any]] = []
    for raw, value in table.items():
        key = str(raw).replace("-", "_")
        targets = (key,) if key in known else aliases.get(key, ())
        if not targets or any(target not in known for target in targets):
            usable = [*known, *(a for a, ours in aliases.items() if set(ours) <= set(known))]
            raise ValueError(f"{where}: unknown key {str(raw)!r}{nearest(key, usable)}")
        found.append((str(raw), targets, value))
    return sorted(found, key=lambda entry: -len(entry[1]))


def convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as a field's type; ValueError that begins with `where = value`.

    hint: bool, int, float, str, Literal, tuple or list of one kind, Mapping, Any, or a union of such.
    Whole numbers are accepted for floats and lists for tuples. TOML has no null: the word none stands
    for it.
    """
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Any:
        return value
    if kind is Literal:
        return _convert_choice(value, arguments, where)
    if kind in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, where)
    if kind in (tuple, list):
        if not isinstance(value, (list, tuple)):
            shown = f'["{value}"]' if arguments[:1] == (str,) else f"[{value}]"
            raise _wrong(where, value, f"must be a list, such as {shown}")
        inner = arguments[0] if arguments else Any
        return kind(convert(item, inner, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(where, value, f"must be a table: [{where}]")
        inner = arguments[1] if arguments else Any
        return {key: convert(item, inner, f"{where}.{key}") for key, item in value.items()}
    return _convert_scalar(value, kind, where)


def _convert_union(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    """As the first choice that fits; the fault of the only one where there is but one beside None."""
    if type(None) in choices and (value is None or value == "none"):
        return None
    kinds = [choice for choice in choices if choice is not type(None)]
    if len(kinds) == 1:
        return convert(value, kinds[0], where)
    for kind in kinds:
        try:
            return convert(value, kind, where)
        except ValueError:
            continue
    names = ", ".join(_word(typing.get_origin(kind) or kind) for kind in kinds)
    raise _wrong(where, value, f"must be one of: {names}")


def _convert_choice(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    if isinstance(value, bool) or value not in choices:
        names = [str(choice) for choice in choices]
        close = did_you_mean(str(value), names)
        raise _wrong(where, value, f"must be one of {', '.join(names)}{close}")
    return value


def _convert_scalar(value: Any, kind: type, where: str) -> Any:
    if isinstance(value, (list, dict)):
        raise _wrong(where, value, f"must be {_word(kind)}, not a {_word(type(value))}")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _wrong(where, value, "must be a number a float can hold") from None
    if isinstance(value, str) and kind in (int, float):
        fix = f"; write {value.strip()} without quotes" if _is_number(value) else ""
        raise _wrong(where, value, f"is a string, must be {_word(kind)}{fix}")
    if kind is int and isinstance(value, float) and value.is_integer():
        raise _wrong(where, value, f"must be a whole number; write {int(value)}")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(where, value, f"must be {_word(kind)}")
    return value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _word(kind: type) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names.get(kind, {list: "list", dict: "table"}.get(kind, kind.__name__))


def _wrong(where: str, value: Any, problem: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ValueError(f"{where} = {shown} {problem}")
