"""Arguments of a subcommand: positionals, its own options, and dotted overrides of the config.

A value is the next argument or follows `=`; hyphens and underscores are the same in names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Option:
    """One option of a subcommand. metavar "" makes it a flag."""

    name: str
    metavar: str
    help: str


HELP = Option("help", "", "this text")
DEBUG = Option("debug", "", "show the whole traceback of an error")


@dataclass
class Arguments:
    """What was given. `overrides` are (name, text) of options that are not the command's own."""

    positionals: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    overrides: list[tuple[str, str]] = field(default_factory=list)

    def flag(self, name: str) -> bool:
        """Whether a flag was given."""
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        """An option's text, or the default."""
        return self.values.get(name, default)

    def number(self, name: str, default: int, least: int = 1) -> int:
        """An option's whole number of at least `least`; ValueError naming the option otherwise."""
        text = self.values.get(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"--{name} {text}: must be a whole number") from None
        if value < least:
            raise ValueError(f"--{name} {text}: must be at least {least}")
        return value


def parse(args: Sequence[str], options: Sequence[Option], overridable: bool = False) -> Arguments:
    """Sort `args`. overridable: unknown options become overrides, not a ValueError.

    But one that is nearly an option of the command's own is that option misspelt.
    """
    known = {option.name: option for option in (*options, HELP)}
    found = Arguments()
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            found.positionals += rest
            break
        if arg == "-h":
            arg = "--help"
        if not arg.startswith("--"):
            found.positionals.append(arg)
            continue
        name, equals, value = arg[2:].partition("=")
        plain = name.replace("_", "-")
        option = known.get(plain)
        if option is None and not (overridable and _may_be_key(plain, known)):
            raise ValueError(f"unknown option --{name}{_nearest(plain, list(known))}")
        if option is not None and not option.metavar:
            if equals:
                raise ValueError(f"--{name} takes no value")
            found.values[plain] = ""
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{name} needs a value: --{name} VALUE")
            value = rest.pop(0)
        if option is None:
            found.overrides.append((name, value))
        elif plain in found.values:
            raise ValueError(f"--{name} is given twice; keep one")
        else:
            found.values[plain] = value
    return found


def expect(found: Arguments, names: Sequence[str], usage: str) -> list[str]:
    """Exactly these positionals; ValueError naming the missing one or the first too many."""
    given = found.positionals
    if len(given) < len(names):
        raise ValueError(f"{names[len(given)]} is missing; usage: {usage}")
    if len(given) > len(names):
        raise ValueError(f"unexpected argument {given[len(names)]!r}; usage: {usage}")
    return given


def require_place(option: str, path: str) -> None:
    """ValueError where an option names no file that can be written; "" is none."""
    if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise ValueError(f"--{option} {path}: must be a file in a folder that exists")


def _may_be_key(name: str, known: Iterable[str]) -> bool:
    """Whether an unknown option may be a key of the configuration: dotted, or like no known one."""
    return "." in name or not difflib.get_close_matches(name, known, n=1, cutoff=0.8)


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean --{close[0]}?" if close else f"; known: --{', --'.join(names)}"


def help_text(usage: str, about: str, options: Sequence[Option]) -> str:
    """The text of `samebit COMMAND --help`."""
    rows = [(f"--{o.name} {o.metavar}".rstrip(), o.help) for o in (*options, DEBUG, HELP)]
    width = max(len(left) for left, _ in rows)
    table = [f"  {left:{width}s}  {right}" for left, right in rows]
    return "\n".join([f"usage: {usage}", "", about, "", "options:", *table])
