"""Configuration in and out of TOML: files, command-line overrides, errors that name the fix.

`load` merges a file and overrides into a `Config`; `dump` writes text that `load` reads back to an
equal one. Keys of [task], [rl] and [rl.correction] that are not of the section itself belong to the
task, the algorithm or the correction and are kept as tables (their modules check them).
Imports no torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samebit.config import Config
from samebit.config_build import build, known_keys, nearest_key
from samebit.config_checks import check_config
from samebit.config_dump import dump
from samebit.config_merge import canonical, merge, merge_under, origin_of, override_table
from samebit.config_origin import Origin

__all__ = [
    "dump",
    "from_tables",
    "known_keys",
    "load",
    "loads",
    "nearest_key",
    "origin_of",
    "read_table",
]


def load(path: str | Path | None, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """The Config of a TOML file under overrides, checked.

    overrides: (dotted key, text), as `--rl.group-size 8`; hyphens count as underscores. OSError for
    an unreadable file; ValueError naming the file or option, the key and the nearest valid name for
    anything else.
    """
    origin = origin_of(path, overrides)
    table = canonical({} if path is None else _read(Path(path)), str(origin))
    return _checked(merge_under(table, override_table(overrides)), origin)


def loads(text: str, origin: str = "text") -> Config:
    """The Config of TOML text, checked; errors as `load`."""
    return _checked(canonical(_parse(text, origin), origin), Origin(origin))


def from_tables(tables: Sequence[Mapping[str, Any]], origin: str) -> Config:
    """The Config of parsed TOML tables, each over the ones before it, checked; errors as `load`."""
    merged: dict[str, Any] = {}
    for table in tables:
        merged = merge(merged, canonical(table, origin))
    return _checked(merged, Origin(origin))


def _checked(table: dict[str, Any], origin: Origin) -> Config:
    config = build(Config, table, "", origin)
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
