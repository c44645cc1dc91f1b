"""From a table of a configuration to its dataclasses, each value checked, each fault named."""

from __future__ import annotations

import difflib
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal

from samebit.config import Config
from samebit.config_origin import Origin
from samebit.option_aliases import KEY_ALIASES
from samebit.option_table import convert

_OPEN = {"task": "options", "rl": "options"}
"""Sections whose remaining keys go into a table of their own."""


@dataclass(frozen=True)
class Override:
    """One value from the command line: its option as typed and its text."""

    option: str
    text: str

    def value(self, text_wanted: bool) -> Any:
        """The TOML value of the text; the bare text where it is none, or where text is wanted."""
        parsed = _parse_value(self.text)
        return self.text if text_wanted and not isinstance(parsed, str) else parsed


def _parse_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"v = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return table["v"] if table.keys() == {"v"} else text


def build(cls: Any, table: Any, path: str, origin: Origin) -> Any:
    """An instance of the frozen dataclass `cls` from a canonical table with `Override` leaves.

    path: dotted key of the table, "" for the whole. ValueError naming the source, the key and the fix.
    """
    if not isinstance(table, dict):
        shown = table.text if isinstance(table, Override) else table
        source = _source(table, origin)
        raise ValueError(f"{source}: {path} = {shown!r} needs a table: [{path}]")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}
    open_field = _OPEN.get(path)
    values: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if open_field is not None and key == open_field:
            raise _fault(value, origin, where, f"write its keys directly under [{path}]")
        if key in known:
            values[key] = _convert(value, hints[key], where, origin)
        elif open_field is not None:
            rest[key] = plain(value)
        else:
            raise _fault(value, origin, where, f"unknown key{nearest_key(where)}")
    if open_field is not None:
        values[open_field] = rest
    _require(known, values, path, origin)
    return cls(**values)


def _require(
    known: Mapping[str, Field[Any]], values: Mapping[str, Any], path: str, origin: Origin
) -> None:
    for name, item in known.items():
        if name in values or item.default is not MISSING or item.default_factory is not MISSING:
            continue
        if is_dataclass(typing.get_type_hints(Config).get(name)) and not path:
            fix = f"add `[{name}]` with `name = ...`"
        else:
            fix = f"add `[{path}]` with `{name} = ...`" if path else f"add `{name} = ...`"
        raise ValueError(f"{origin}: {f'{path}.{name}' if path else name} is missing; {fix}")


def plain(value: Any) -> Any:
    """A value without `Override`: texts parsed, tables walked."""
    if isinstance(value, Override):
        return value.value(False)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def _convert(value: Any, hint: Any, where: str, origin: Origin) -> Any:
    """`value` as the field's type; ValueError naming option or file, key and expectation."""
    if is_dataclass(hint):
        return build(hint, value, where, origin)
    kind = typing.get_origin(hint) or hint
    if kind is Mapping and isinstance(value, dict):
        item = typing.get_args(hint)[1]
        return {k: _convert(v, item, f"{where}.{k}", origin) for k, v in value.items()}
    if hint is Any:
        return plain(value)
    text_wanted = hint is str or kind is Literal
    raw = value.value(text_wanted) if isinstance(value, Override) else plain(value)
    try:
        found = convert(raw, hint, where)
    except ValueError as error:
        raise ValueError(f"{_source(value, origin)}: {error}") from None
    if isinstance(found, float) and not math.isfinite(found):
        raise ValueError(f"{_source(value, origin)}: {where} = {found} must be a finite number")
    return found


def _source(value: Any, origin: Origin) -> str:
    """Where a value came from: the option that set it (or every part of it), else the file."""
    options = _options(value)
    if options and None not in options:
        return f"command line: {min(o for o in options if o is not None)}"
    return str(origin)


def _options(value: Any) -> set[str | None]:
    """The options that set the parts of a value; None for a part that none did."""
    if isinstance(value, Override):
        return {value.option}
    if isinstance(value, dict):
        return {option for item in value.values() for option in _options(item)}
    return {None}


def _fault(value: Any, origin: Origin, where: str, problem: str) -> ValueError:
    return ValueError(f"{_source(value, origin)}: {where}: {problem}")


def known_keys() -> list[str]:
    """Every dotted key of the configuration itself (options of task and algorithm left out)."""
    keys: list[str] = []
    for name, hint in typing.get_type_hints(Config).items():
        if is_dataclass(hint):
            inner = (f.name for f in fields(hint) if f.name != _OPEN.get(name))
            keys += [f"{name}.{key}" for key in inner]
        else:
            keys.append(name)
    return keys


def nearest_key(where: str) -> str:
    """`; did you mean X?` for the nearest dotted key, the right key in another section included."""
    keys = known_keys()
    last = where.rsplit(".", 1)[-1]
    section_keys = [k for k in keys if k.rsplit(".", 1)[0] == where.rsplit(".", 1)[0] != where]
    aliased = [
        f"{s}.{ours}" for s, names in KEY_ALIASES.items() for t, ours in names.items() if t == last
    ]
    same_name = [k for k in keys if k.rsplit(".", 1)[-1] == last]
    close_here = difflib.get_close_matches(where, section_keys, n=1, cutoff=0.75)
    by_last = {k.rsplit(".", 1)[-1]: k for k in reversed(keys)}
    close_last = [by_last[n] for n in difflib.get_close_matches(last, list(by_last), n=1)]
    sections = sorted({k.split(".")[0] for k in keys})
    close_section = difflib.get_close_matches(last, sections, n=1)
    for found in (same_name, aliased, close_here, close_section, close_last):
        if found:
            return f"; did you mean {found[0]!r}?"
    listed = section_keys or sections
    return f"; known: {', '.join(k.rsplit('.', 1)[-1] for k in listed)}"
