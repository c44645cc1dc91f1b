"""The text of `samebit train --help`: every key with its type, default and docstring, by section.

Attribute docstrings are the help texts; they are read from the source, where they are written.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal

from samebit.cli.arguments import DEBUG, HELP, Option
from samebit.config import Config
from samebit.config_io import load

_WIDTH = 100
_INDENT = 34


def attribute_docs(cls: type) -> dict[str, str]:
    """Docstring under each attribute of a class and its bases (a subclass's wins)."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = tree.body[0].body  # type: ignore[attr-defined]
        for item, after in itertools.pairwise(body):
            if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[item.target.id] = inspect.cleandoc(str(after.value.value))
    return found


def type_word(hint: Any) -> str:
    """A type as help shows it: INT, FLOAT, a|b|c, LIST, TABLE."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        return "|".join(str(a) for a in arguments)
    if origin is tuple:
        return "LIST"
    if origin in (Mapping, dict):
        return "TABLE"
    if origin is None:
        return {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false"}.get(hint, "VALUE")
    words = ["none" if a is type(None) else type_word(a) for a in arguments]
    return "|".join(words)


def _default(item: Field[Any]) -> str:
    value = item.default
    if item.default_factory is not MISSING:
        value = item.default_factory()
    if value is MISSING:
        return "(required)"
    if isinstance(value, bool):
        return f"({str(value).lower()})"
    if value is None:
        return "(none)"
    if isinstance(value, tuple):
        return f"({list(value)})"
    return f"({value})" if value != "" else '("")'


def _rows(cls: type, prefix: str, skip: Iterable[str] = ()) -> list[str]:
    docs, hints = attribute_docs(cls), typing.get_type_hints(cls)
    lines: list[str] = []
    for item in fields(cls):
        if item.name in skip or is_dataclass(hints[item.name]):
            continue
        left = f"  --{prefix}{item.name.replace('_', '-')} {type_word(hints[item.name])}"
        text = " ".join(f"{docs.get(item.name, '')} {_default(item)}".split())
        lines += _entry(left, text)
    return lines


def _entry(left: str, text: str) -> list[str]:
    body = textwrap.wrap(text, _WIDTH - _INDENT) or [""]
    if len(left) + 2 > _INDENT:
        return [left, *(" " * _INDENT + line for line in body)]
    first = f"{left:{_INDENT}s}{body[0]}"
    return [first, *(" " * _INDENT + line for line in body[1:])]


def key_help(
    usage: str, options: Sequence[Option], short: Sequence[tuple[str, str]], path: Sequence[str]
) -> str:
    """The whole text. path: [] or the FILE whose algorithm, correction and task are listed."""
    config = load(path[0]) if path else None
    lines = [f"usage: {usage}", ""]
    lines.append("FILE is TOML; every key below may also be given as --section.key VALUE.")
    lines += ["", "options:"]
    for option in (*options, DEBUG, HELP):
        lines += _entry(f"  --{option.name} {option.metavar}".rstrip(), option.help)
    for left, text in short:
        lines += _entry(f"  {left}", text)
    lines += ["", "top level:", *_rows(Config, "")]
    for name, hint in typing.get_type_hints(Config).items():
        if isinstance(hint, type) and is_dataclass(hint):
            skip = ("options",) if name in ("task", "rl") else ()
            lines += ["", f"[{name}]  {inspect.getdoc(hint)}", *_rows(hint, f"{name}.", skip)]
            lines += _module_keys(name, config)
    return "\n".join(lines)


def _module_keys(section: str, config: Config | None) -> list[str]:
    """Keys of the algorithm, correction or task that the file (or the defaults) names."""
    other = "FILE --help lists the keys of the one that FILE names"
    if section == "rl":
        from samebit.rl.registry import list_algorithms, list_corrections

        algorithm = config.rl.algorithm if config else "grpo"
        correction = str(config.rl.correction["name"]) if config else "tis"
        return [
            *_plugin(f"keys of algorithm {algorithm}", "samebit.rl", algorithm, "rl."),
            f"  (algorithms: {', '.join(list_algorithms())}; {other})",
            *_plugin(
                f"keys of correction {correction}",
                "samebit.rl.corrections",
                correction,
                "rl.correction.",
            ),
            f"  (corrections: {', '.join(list_corrections())}; {other})",
        ]
    if section == "task":
        from samebit.tasks.api import task_names

        task = config.task.name if config else "reasoning_gym"
        names = ", ".join(task_names())
        return [
            *_plugin(f"keys of task {task}", "samebit.tasks", task, "task."),
            f"  (tasks: {names}; {other})",
        ]
    return []


def _plugin(title: str, package: str, name: str, prefix: str) -> list[str]:
    import importlib

    lines = [f"  {title}:"]
    for part in name.split("+"):
        path = part if "." in part else f"{package}.{part}"
        inner = f"{prefix}{part}." if "+" in name else prefix
        rows = _rows(importlib.import_module(path).Config, inner)
        lines += rows or ["    (none)"]
    return lines
