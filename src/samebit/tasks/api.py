"""The contract of a task: rows that are a pure function of (config, split, index), and rewards.

A task is one module `tasks/<name>.py` (or any importable dotted path) with
- `Config`: a frozen keyword-only dataclass derived from `TaskConfig`; its fields are the keys of
  the task's table;
- `Task`: a class derived from `TaskBase`, built as `Task(config)`.

The life of one: `load_task(name, table)` validates everything that needs no tokenizer (files, keys,
imports); `bind(tokenizer)` adds the tokenizer; `prompts(split, start, count)` renders;
`reward(prompts, completions)` grades; `stats.metrics()` reports; `close()` ends worker processes.

The train stream is endless and addressed by index, so resuming is nothing but asking for the next
index. The held-out split is finite, and no question text of it ever appears in the train stream.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from samebit.modules import import_named
from samebit.option_table import build_options, nearest
from samebit.tasks._function import RewardFunction
from samebit.tasks._stats import RewardStats
from samebit.types import Prompt

Split = Literal["train", "held_out"]
Message = Mapping[str, str]

_NOT_TASKS = {"api"}


class Tokenizer(Protocol):
    """What a task needs of a tokenizer; nothing else of it is ever touched."""

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> Sequence[int]:
        """Return the token ids of a chat, ending where the assistant is to begin."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, without special tokens added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Keys that every task understands."""

    system: str = ""
    """System prompt put before every question; empty leaves the template's own default."""
    chat: bool = True
    """Render through the tokenizer's chat template; false renders plain text."""
    bos_id: int | None = None
    """Token id that must come first exactly once; none leaves what the template yields.
    Plain text (chat = false) gets it in front, a template that already yields it is left alone."""
    seed: int = 0
    """Order of the training questions. The held-out set does not depend on it."""
    held_out_share: float = 0.2
    """Share of the questions, by a hash of their text, that never appears in training."""
    held_out_size: int = 128
    """At most this many held-out questions; fewer where fewer distinct ones exist."""
    max_prompt_tokens: int = 0
    """Longest rendered prompt, in tokens; 0 is no limit."""
    on_long_prompt: Literal["stop", "skip", "truncate_left"] = "stop"
    """What to do with a longer one: stop with its row, leave the row out and count it, or keep its
    last `max_prompt_tokens` tokens."""
    reward_function: str = ""
    """Your own reward, `path/to/file.py:function` or `package.module:function`; empty uses the
    task's own verifier."""
    reward_style: Literal["trl", "verl"] = "trl"
    """Its signature. trl: f(completions, prompts=..., **columns) -> list of float or None. verl:
    f(data_source, solution_str, ground_truth, extra_info) -> float or {"score": ...}."""
    completion_format: Literal["text", "messages"] = "text"
    """What a trl-style function gets as a completion: its text, or [{"role", "content"}]."""
    on_reward_error: Literal["stop", "no-verdict"] = "stop"
    """When it raises, or returns no finite number: stop the run with its own traceback, or count
    the samples as without a verdict."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.held_out_share < 1.0:
            raise ValueError(f"held_out_share = {self.held_out_share}: expected a share in [0, 1).")
        for key in ("held_out_size", "max_prompt_tokens"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} = {getattr(self, key)}: expected 0 or more.")


@dataclass(frozen=True)
class Row:
    """One question before rendering.

    messages: the chat that asks it (shots included), without the system prompt.
    question: the text by which splits are kept disjoint.
    columns: every other field of the row, `answer` among them where the task has one.
    """

    id: str
    question: str
    messages: tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)


class PromptTooLongError(ValueError):
    """A rendered prompt is longer than `max_prompt_tokens` and the setting says stop."""


class TaskBase(ABC):
    """Shared half of every task: rendering, length limits, counting."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.stats = RewardStats()
        self._tokenizer: Tokenizer | None = None
        self._function: RewardFunction | None = None
        if config.reward_function:
            self._function = RewardFunction(
                config.reward_function,
                style=config.reward_style,
                completion_format=config.completion_format,
                on_error=config.on_reward_error,
            )

    @property
    @abstractmethod
    def held_out_count(self) -> int:
        """Number of held-out questions: valid indices of that split are 0 .. held_out_count - 1."""

    @abstractmethod
    def row(self, split: Split, index: int) -> Row:
        """Return row `index` of a split: a pure function of (config, split, index)."""

    @abstractmethod
    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        """Grade by the task's own verifier; called by `reward`, with lists of equal length."""

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        """Grade completion i as an answer to prompt i; None is no verdict, never a wrong answer.

        Uses `reward_function` where one is set, else the task's verifier. Completions are the text
        the model wrote, without the prompt and without the end token.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts but {len(completions)} completions to grade.")
        if self._function is None:
            rewards = self.grade(prompts, completions)
        else:
            rewards = self._function(prompts, completions, self.stats)
        unknown = sum(reward is None for reward in rewards)
        self.stats.add("no_verdict", unknown)
        self.stats.add("graded", len(rewards) - unknown)
        return rewards

    def bind(self, tokenizer: Tokenizer) -> None:
        """Give the task its tokenizer; needed before `prompts`."""
        self._tokenizer = tokenizer

    def rows(self, split: Split, start: int, count: int) -> list[Row]:
        """Return rows start .. start + count - 1; refuses an index past the held-out end."""
        if start < 0 or count < 0:
            raise ValueError(f"rows {start}..{start + count - 1}: indices start at 0.")
        if split == "held_out" and start + count > self.held_out_count:
            raise ValueError(
                f"held-out rows {start}..{start + count - 1} asked for; "
                f"the split has {self.held_out_count}."
            )
        return [self.row(split, index) for index in range(start, start + count)]

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """Render rows start .. start + count - 1 (see `rows`) to prompts."""
        return [self.render(row) for row in self.rows(split, start, count)]

    def held_out(self) -> list[Prompt]:
        """Return every held-out prompt, each exactly once."""
        return self.prompts("held_out", 0, self.held_out_count)

    def render(self, row: Row) -> Prompt:
        """Turn a row into a prompt with token ids.

        Raises PromptTooLongError, naming the row and both lengths, where the setting is `stop`.
        """
        ids = self._ids(row)
        limit = self.config.max_prompt_tokens
        if limit and len(ids) > limit:
            if self.config.on_long_prompt != "truncate_left":
                raise PromptTooLongError(
                    f"prompt too long: {row.id} has {len(ids)} tokens after the chat template, "
                    f"max_prompt_tokens = {limit}. Raise the limit or set on_long_prompt."
                )
            ids = ids[len(ids) - limit :]
        messages = self._messages(row) if self.config.chat else ()
        return Prompt(id=row.id, ids=ids, text=row.question, messages=messages, columns=row.columns)

    def fits(self, row: Row) -> bool:
        """Say whether `skip` keeps this row; always true under the other settings."""
        limit = self.config.max_prompt_tokens
        if not limit or self.config.on_long_prompt != "skip":
            return True
        return len(self._ids(row)) <= limit

    def close(self) -> None:  # noqa: B027 (most tasks hold nothing to close)
        """End worker processes, if any; the task can be used again afterwards."""

    def _messages(self, row: Row) -> tuple[Message, ...]:
        if self.config.system and (not row.messages or row.messages[0]["role"] != "system"):
            return ({"role": "system", "content": self.config.system}, *row.messages)
        return row.messages

    def _ids(self, row: Row) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise ValueError("the task has no tokenizer yet: call bind(tokenizer) before prompts.")
        messages = self._messages(row)
        if self.config.chat:
            raw = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        else:
            raw = self._tokenizer.encode(plain_text(messages))
        ids = tuple(int(token) for token in raw)
        bos = self.config.bos_id
        if bos is not None:
            # A template that prints the token and a tokenizer that adds it give it twice.
            while ids[:2] == (bos, bos):
                ids = ids[1:]
            if ids[:1] != (bos,):
                ids = (bos, *ids)
        if not ids:
            raise ValueError(f"prompt {row.id} has no tokens.")
        return ids


def plain_text(messages: Sequence[Message]) -> str:
    """Return a chat as plain text: the answer on the line after its question, then a blank."""
    pieces: list[str] = []
    for message in messages:
        pieces.append(message["content"])
        pieces.append("\n\n" if message["role"] in ("assistant", "system") else "\n")
    return "".join(pieces)


def task_names() -> list[str]:
    """Return the names of the tasks in this folder."""
    package = importlib.import_module("samebit.tasks")
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.ispkg and not module.name.startswith("_") and module.name not in _NOT_TASKS
    )


def load_task(name: str, table: Mapping[str, Any], seed: int | None = None) -> TaskBase:
    """Build a task from its name (a file of this folder, or a dotted path) and its table of keys.

    seed: the run's, for a table that names none of its own.

    Raises ValueError for an unknown task, an unknown or mistyped key, and whatever the task itself
    finds wrong with its files: all before any model is needed.
    """
    if name in task_names():
        path = f"samebit.tasks.{name}"
    elif "." in name:
        path = name
    else:
        raise ValueError(f"unknown task {name!r}{nearest(name, task_names())}")
    module = import_named(path, "task")
    for attribute in ("Config", "Task"):
        if not hasattr(module, attribute):
            raise ValueError(f"task {name!r}: module {path} does not define {attribute}.")
    if seed is not None:
        table = {"seed": seed} | dict(table)
    return module.Task(build_options(module.Config, table, f"task {name}"))
