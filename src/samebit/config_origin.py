"""Where the values of a configuration came from, for messages that name the source at fault.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from samebit.config import Config
from samebit.option_aliases import OPTION_ALIASES


@dataclass(frozen=True)
class Origin:
    """A file (or other text), and the options of the command line over it.

    options: the option as typed, by the dotted key it sets. Printed, it is the file.
    """

    file: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.file or "command line"

    def of(self, *keys: str) -> str:
        """The source of these values: the options that set them, else the file."""
        return self._options_or_file(self._setter(key) for key in keys)

    def of_message(self, text: str, config: Config, sections: Sequence[str]) -> str:
        """The source of what `text`, a module's own message, speaks of; as `of`.

        Such a message knows no dotted key: an option is meant where the text has its key (`key = 1`,
        'key', ...; also our name of another tool's key) or a text that it gave, such as a name or a
        path. Of an unknown key only the option that set it is. sections: those whose keys the message
        can be about.
        """
        # What a message proposes is not what it complains of.
        problem = re.split(r"; (?:did you mean|known|use|set)\b", text)[0]
        by_value = "unknown key" not in problem
        return self._options_or_file(
            option
            for key, option in self.options.items()
            if key.split(".")[0] in sections
            and (_has_key(problem, key) or (by_value and _has_value(problem, key, config)))
        )

    def _setter(self, key: str) -> str | None:
        """The option that set the key, or the table it is in."""
        parts = key.split(".")
        above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((self.options[k] for k in above if k in self.options), None)

    def _options_or_file(self, options: Iterable[str | None]) -> str:
        found = list(dict.fromkeys(o for o in options if o is not None))
        return f"command line: {', '.join(found)}" if found else str(self)


def _has_key(text: str, key: str) -> bool:
    last = key.rsplit(".", 1)[-1]
    names = "|".join(map(re.escape, (last, *OPTION_ALIASES.get(last, ()))))
    return re.search(rf"(?<![\w-])({names})(?= =| '|'|:|,| x |\))", text) is not None


def _has_value(text: str, key: str, config: Config) -> bool:
    value = _value(config, key)
    given = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, str) and item and _has_text(text, key, item) for item in given)


def _has_text(text: str, key: str, item: str) -> bool:
    """Whether `text` shows `item`; a plain word, such as the task `file`, quoted or after its key."""
    shown = rf"(?<![\w./-]){re.escape(item)}(?!\.?[\w/-])"
    if re.fullmatch(r"\w+", item):
        shown = rf"'{item}'|\b(?:{'|'.join(map(re.escape, key.split('.')))}) {shown}"
    return re.search(shown, text) is not None


def _value(config: Config, key: str) -> Any:
    """What a dotted key holds, None where nothing does; a table's name for a table of that name."""
    value: Any = config
    for part in key.split("."):
        if is_dataclass(value):
            table = vars(value)
            value = table | table.get("options", {})
        value = value.get(part) if isinstance(value, Mapping) else None
    # `--rl.correction NAME` is short for a table of that name.
    return value.get("name") if isinstance(value, Mapping) else value
