"""Several sources of one configuration as one table: a file, others over it, the command line.

Keys get their own names (hyphens, other tools' spellings), and the later source wins under whatever
name either uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samebit.config_build import Override, plain
from samebit.config_origin import Origin
from samebit.option_aliases import KEY_ALIASES, OPTION_ALIASES

SHORTCUTS = {"steps": "train.steps", "out": "run.out"}
"""Command-line names that stand for a dotted key."""


def override_table(overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Nested tables of `Override` leaves, under canonical keys."""
    table: dict[str, Any] = {}
    seen: dict[tuple[str, ...], str] = {}
    for key, text in overrides:
        option = f"--{key}"
        parts = _parts(key)
        if not all(parts):
            raise ValueError(f"command line: {option}: empty part in a dotted key")
        if parts in seen:
            both = f"{seen[parts]} and {option}" if seen[parts] != option else option
            raise ValueError(f"command line: {'.'.join(parts)} is given twice ({both}); keep one")
        seen[parts] = option
        _place(table, parts, Override(option, text))
    return _expand_correction(table)


def _parts(key: str) -> tuple[str, ...]:
    """An option's dotted key in our own names."""
    name = key.replace("-", "_")
    parts = tuple(SHORTCUTS.get(name, name).split("."))
    return (*parts[:1], *(_alias(parts[0], p) for p in parts[1:2]), *parts[2:])


def origin_of(path: str | Path | None, overrides: Sequence[tuple[str, str]]) -> Origin:
    """Where the configuration of a file (or none) under options comes from."""
    options = {".".join(_parts(key)): f"--{key}" for key, _ in overrides}
    return Origin("" if path is None else str(path), options)


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
    return KEY_ALIASES.get(section, {}).get(key, key)


def canonical(table: Mapping[str, Any], origin: str) -> dict[str, Any]:
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
    """`correction = "tis"` is short for a table of that name and nothing else; so is an option's table."""
    rl = table.get("rl")
    if isinstance(rl, dict) and "correction" in rl:
        value = rl["correction"]
        if isinstance(value, Override):
            given = value.value(False)
            rl["correction"] = _Whole(given if isinstance(given, dict) else {"name": value})
        elif isinstance(value, str):
            rl["correction"] = _Whole(name=value)
    return table


class _Whole(dict[str, Any]):
    """A table that replaces the one below it instead of merging into it."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        held = result.get(key)
        if isinstance(value, dict) and not isinstance(value, _Whole) and isinstance(held, dict):
            value = merge(held, value)
        result[key] = value
    return result


def merge_under(table: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """The file's table under the options; a later source wins under whatever name either uses."""
    rl, rl_over = table.get("rl"), over.get("rl")
    if isinstance(rl, dict) and isinstance(rl_over, dict):
        algorithm = plain(rl_over.get("algorithm", rl.get("algorithm", "")))
        rl = _without_overruled(rl, rl_over, "rl", "." in str(algorithm))
        held, given = rl.get("correction"), rl_over.get("correction")
        if isinstance(held, dict) and isinstance(given, dict) and not isinstance(given, _Whole):
            name = str(plain(given.get("name", held.get("name", ""))))
            rl["correction"] = _without_overruled(held, given, "rl.correction", "." in name)
        table = table | {"rl": rl}
    return merge(table, over)


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
