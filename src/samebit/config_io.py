"""Configuration in and out of TOML: files, command-line overrides, errors that name the fix.

`load` merges a file and overrides into a `Config`; `dump` writes text that `load` reads back to an
equal one. Keys of [task], [rl] and [rl.correction] that are not of the section itself belong to the
task, the algorithm or the correction and are kept as tables (their modules check them).
Imports no torch.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from samebit.config import Config
from samebit.config_checks import check_config
from samebit.config_dump import dump
from samebit.option_aliases import KEY_ALIASES as ALIASES
from samebit.option_aliases import OPTION_ALIASES

__all__ = ["dump", "from_tables", "known_keys", "load", "loads", "nearest_key", "read_table"]

SHORTCUTS = {"steps": "train.steps", "out": "run.out"}
"""Command-line names that stand for a dotted key."""

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


def load(path: str | Path | None, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """The Config of a TOML file under overrides, checked.

    overrides: (dotted key, text), as `--rl.group-size 8`; hyphens count as underscores. OSError for
    an unreadable file; ValueError naming the file or option, the key and the nearest valid name for
    anything else.
    """
    origin = "command line" if path is None else str(path)
    table = _canonical({} if path is None else _read(Path(path)), origin)
    merged = _merged_under(table, _override_table(overrides))
    config = _build(Config, merged, "", origin)
    both = path is not None and overrides
    check_config(config, f"{origin} and the command line" if both else origin)
    return config


def loads(text: str, origin: str = "text") -> Config:
    """The Config of TOML text, checked; errors as `load`."""
    config = _build(Config, _canonical(_parse(text, origin), origin), "", origin)
    check_config(config, origin)
    return config


def from_tables(tables: Sequence[Mapping[str, Any]], origin: str) -> Config:
    """The Config of parsed TOML tables, each over the ones before it, checked; errors as `load`."""
    merged: dict[str, Any] = {}
    for table in tables:
        merged = _merge(merged, _canonical(table, origin))
    config = _build(Config, merged, "", origin)
    check_config(config, origin)
    return config


def read_table(path: str | Path) -> dict[str, Any]:
    """A TOML file as it is, unchecked; errors as `load`."""
    return _read(Path(path))


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give a TOML file (of a run: {path}/config.toml)")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); save it as UTF-8") from None
    return _parse(text, str(path))


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{origin}: not valid TOML: {error}") from None


def _override_table(overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Nested tables of `Override` leaves, under canonical keys."""
    table: dict[str, Any] = {}
    seen: dict[tuple[str, ...], str] = {}
    for key, text in overrides:
        option = f"--{key}"
        name = key.replace("-", "_")
        parts = tuple(SHORTCUTS.get(name, name).split("."))
        parts = (*parts[:1], *(_alias(parts[0], p) for p in parts[1:2]), *parts[2:])
        if not all(parts):
            raise ValueError(f"command line: {option}: empty part in a dotted key")
        if parts in seen:
            both = f"{seen[parts]} and {option}" if seen[parts] != option else option
            raise ValueError(f"command line: {'.'.join(parts)} is given twice ({both}); keep one")
        seen[parts] = option
        _place(table, parts, Override(option, text))
    return _expand_correction(table)


def _place(table: dict[str, Any], parts: tuple[str, ...], leaf: Override) -> None:
    for part in parts[:-1]:
        held = table.setdefault(part, {})
        if isinstance(held, Override):
            raise ValueError(
                f"command line: {held.option} sets the whole of what {leaf.option} sets a part of; "
                "keep one"
            )
        table = held
    if isinstance(table.get(parts[-1]), dict):
        raise ValueError(f"command line: {leaf.option} and a key below it are both given; keep one")
    table[parts[-1]] = leaf


def _alias(section: str, key: str) -> str:
    return ALIASES.get(section, {}).get(key, key)


def _canonical(table: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Keys of the file with underscores and our own names, on the two levels that are ours."""
    result: dict[str, Any] = {}
    for key, value in _renamed(table, "", origin):
        if isinstance(value, dict):
            value = dict(_renamed(value, key, origin))
        result[key] = value
    return _expand_correction(result)


def _renamed(table: Mapping[str, Any], section: str, origin: str) -> Iterator[tuple[str, Any]]:
    spelled: dict[str, str] = {}
    for raw, value in table.items():
        key = _alias(section, raw.replace("-", "_"))
        if key in spelled:
            where = f"{section}.{key}" if section else key
            raise ValueError(
                f"{origin}: {where} is given twice (as {spelled[key]!r} and {raw!r}); keep one"
            )
        spelled[key] = raw
        yield key, value


def _expand_correction(table: dict[str, Any]) -> dict[str, Any]:
    """`correction = "tis"` is short for a table of that name and nothing else."""
    rl = table.get("rl")
    if isinstance(rl, dict) and "correction" in rl:
        value = rl["correction"]
        text = value.value(True) if isinstance(value, Override) else value
        if isinstance(text, str):
            rl["correction"] = _Whole(name=value)
    return table


class _Whole(dict[str, Any]):
    """A table that replaces the one below it instead of merging into it."""


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        held = result.get(key)
        if isinstance(value, dict) and not isinstance(value, _Whole) and isinstance(held, dict):
            value = _merge(held, value)
        result[key] = value
    return result


def _merged_under(table: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """The file's table under the options; a later source wins under whatever name either uses."""
    rl, rl_over = table.get("rl"), over.get("rl")
    if isinstance(rl, dict) and isinstance(rl_over, dict):
        algorithm = _plain(rl_over.get("algorithm", rl.get("algorithm", "")))
        rl = _without_overruled(rl, rl_over, "rl", "." in str(algorithm))
        held, given = rl.get("correction"), rl_over.get("correction")
        if isinstance(held, dict) and isinstance(given, dict) and not isinstance(given, _Whole):
            name = str(_plain(given.get("name", held.get("name", ""))))
            rl["correction"] = _without_overruled(held, given, "rl.correction", "." in name)
        table = table | {"rl": rl}
    return _merge(table, over)


def _without_overruled(
    base: Mapping[str, Any], over: Mapping[str, Any], where: str, foreign: bool
) -> dict[str, Any]:
    """`base` without the keys all of whose settings an option sets under another name.

    foreign: the keys are those of a module outside the package, where equal meaning is a guess.
    """
    result = dict(base)
    setters = {ours: key for key in over for ours in OPTION_ALIASES.get(key, (key,))}
    for key, value in base.items():
        targets = OPTION_ALIASES.get(key, (key,))
        if isinstance(value, dict):
            inner = over.get(key)
            if isinstance(inner, dict):
                result[key] = _without_overruled(value, inner, f"{where}.{key}", foreign)
        elif key not in over and all(target in setters for target in targets):
            if foreign:
                raise ValueError(
                    f"command line: --{where}.{setters[targets[0]]} may be another name of "
                    f"{where}.{key}, which the file sets; keep one"
                )
            del result[key]
    return result


# --- values --------------------------------------------------------------------------------------


def _build(cls: Any, table: Any, path: str, origin: str) -> Any:
    """An instance of the frozen dataclass `cls` from a canonical table."""
    if not isinstance(table, dict):
        raise _wrong(table, path, origin, f"needs a table: [{path}]")
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
            rest[key] = _plain(value)
        else:
            raise _fault(value, origin, where, f"unknown key{nearest_key(where)}")
    if open_field is not None:
        values[open_field] = rest
    _require(known, values, path, origin)
    return cls(**values)


def _require(known: Mapping[str, Field[Any]], values: Mapping[str, Any], path: str, origin: str):
    for name, item in known.items():
        required = item.default is MISSING and item.default_factory is MISSING
        if required and name not in values:
            where = f"{path}.{name}" if path else name
            hint = f"add `[{path}]` with `{name} = ...`" if path else f"add `{name} = ...`"
            if name in ("task", "model"):
                hint = {"task": "add `[task]` with `name = ...`", "model": "add `model = ...`"}[
                    name
                ]
            raise ValueError(f"{origin}: {where} is missing; {hint}")


def _plain(value: Any) -> Any:
    """An option's value: overrides parsed, tables walked."""
    if isinstance(value, Override):
        return value.value(False)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _convert(value: Any, hint: Any, where: str, origin: str) -> Any:
    """`value` as the field's type; ValueError naming option or file, key and expectation."""
    if is_dataclass(hint):
        return _build(hint, value, where, origin)
    kind = typing.get_origin(hint) or hint
    raw = value.value(hint is str or kind is Literal) if isinstance(value, Override) else value
    if kind is Literal:
        choices = typing.get_args(hint)
        if raw not in choices:
            close = _close(str(raw), [str(c) for c in choices])
            raise _wrong(value, where, origin, f"must be one of {', '.join(choices)}{close}")
        return raw
    if kind is tuple:
        return _convert_list(value, raw, typing.get_args(hint)[0], where, origin)
    if kind is Mapping:
        return _convert_table(value, raw, typing.get_args(hint)[1], where, origin)
    return _convert_scalar(value, raw, hint, where, origin)


def _convert_scalar(value: Any, raw: Any, hint: type, where: str, origin: str) -> Any:
    if isinstance(raw, (list, dict)):
        raise _wrong(value, where, origin, f"must be {_word(hint)}, not a {_word(type(raw))}")
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        try:
            raw = float(raw)
        except OverflowError:
            raise _wrong(value, where, origin, "must be a number a float can hold") from None
    if isinstance(raw, str) and hint in (int, float):
        fix = f"; write {raw.strip()} without quotes" if _is_number(raw) else ""
        raise _wrong(value, where, origin, f"is a string, must be {_word(hint)}{fix}")
    if hint is int and isinstance(raw, float) and raw.is_integer():
        raise _wrong(value, where, origin, f"must be a whole number; write {int(raw)}")
    if not isinstance(raw, hint) or (isinstance(raw, bool) and hint is not bool):
        raise _wrong(value, where, origin, f"must be {_word(hint)}")
    if isinstance(raw, float) and not math.isfinite(raw):
        raise _wrong(value, where, origin, "must be a finite number")
    return raw


def _convert_list(value: Any, raw: Any, item: type, where: str, origin: str) -> tuple[Any, ...]:
    if not isinstance(raw, (list, tuple)):
        shown = f'["{raw}"]' if item is str else f"[{raw}]"
        raise _wrong(value, where, origin, f"must be a list, such as {shown}")
    return tuple(
        _convert_scalar(entry, entry, item, f"{where}[{i}]", origin) for i, entry in enumerate(raw)
    )


def _convert_table(value: Any, raw: Any, item: Any, where: str, origin: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _wrong(value, where, origin, f"must be a table: [{where}]")
    if item is Any:
        return _plain(raw)
    return {key: _convert(entry, item, f"{where}.{key}", origin) for key, entry in raw.items()}


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _word(kind: type) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names.get(kind, {list: "list", dict: "table"}.get(kind, kind.__name__))


def _source(value: Any, origin: str) -> str:
    """Where a value came from: the option that set it (or any part of it), else the file."""
    if isinstance(value, Override):
        return f"command line: {value.option}"
    if isinstance(value, dict) and value:
        parts = {_source(item, "") for item in value.values()}
        if "" not in parts:
            return sorted(parts)[0]
    return origin


def _fault(value: Any, origin: str, where: str, problem: str) -> ValueError:
    return ValueError(f"{_source(value, origin)}: {where}: {problem}")


def _wrong(value: Any, where: str, origin: str, problem: str) -> ValueError:
    shown = repr(value.text if isinstance(value, Override) else value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ValueError(f"{_source(value, origin)}: {where} = {shown} {problem}")


# --- names ---------------------------------------------------------------------------------------


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
        f"{s}.{ours}" for s, names in ALIASES.items() for t, ours in names.items() if t == last
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


def _close(name: str, names: list[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
