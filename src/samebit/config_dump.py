"""A Config as TOML text that `config_io.load` reads back to an equal Config. Imports no torch."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from samebit.config import Config

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {
    '"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r",
}  # fmt: skip


def dump(config: Config) -> str:
    """Every key with its value, defaults included; option tables flat in their sections.

    ValueError for an option value TOML cannot hold (None, a Python object).
    """
    lines: list[str] = []
    sections: list[tuple[str, Mapping[str, Any]]] = []
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            sections.append((item.name, _section(value)))
        else:
            lines.append(f"{item.name} = {_value(value, item.name)}")
    for name, table in sections:
        lines += ["", f"[{name}]", *_table(name, table)]
    return "\n".join(lines) + "\n"


def _section(section: Any) -> dict[str, Any]:
    table = {f.name: getattr(section, f.name) for f in fields(section)}
    options = table.pop("options", {})
    clash = sorted(options.keys() & (table.keys() | {"options"}))
    if clash:
        raise ValueError(f"option {clash[0]!r} has the name of one of the section's own keys")
    return {**table, **options}


def _table(path: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Plain keys first, then one sub-table per mapping (deeper ones inline)."""
    tables = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    for key, value in table.items():
        if key not in tables:
            yield f"{_key(key)} = {_value(value, f'{path}.{key}')}"
    for key, value in tables.items():
        where = f"{path}.{_key(key)}"
        yield ""
        yield f"[{where}]"
        for inner, item in value.items():
            yield f"{_key(inner)} = {_value(item, f'{where}.{inner}')}"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    def escaped(char: str) -> str:
        if char in _ESCAPES:
            return _ESCAPES[char]
        return f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char

    return '"' + "".join(map(escaped, text)) + '"'


def _value(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item, f"{where}[]") for item in value) + "]"
    if isinstance(value, Mapping):
        inner = (f"{_key(k)} = {_value(v, f'{where}.{k}')}" for k, v in value.items())
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    raise ValueError(f"{where} = {value!r} cannot be written as TOML; use 'none' for nothing")
