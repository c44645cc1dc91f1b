"""Short exercises on random digits for tiny models: sort them, reverse them, or add two numbers.

One character a digit, one right answer, rewards 0 or 1. Questions are a pure function of
(seed, index); the held-out split is chosen by a hash of the question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from samebit.tasks.api import Row, Split, TaskBase, TaskConfig
from samebit.types import Prompt

MAX_TRIES = 10_000


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Keys of the digits task."""

    operation: Literal["sort", "reverse", "add"] = "sort"
    """What to do: `3142` becomes 1234 (sort) or 2413 (reverse); `31+42` becomes 73 (add)."""
    digits: int = 5
    """Digits of the question; of each of the two numbers for add."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.digits <= 100:
            raise ValueError(f"digits = {self.digits}: expected 1 to 100.")


def question_of(operation: str, digits: int, digest: bytes) -> tuple[str, str]:
    """(question, answer) from 32 random bytes."""
    number = int.from_bytes(digest, "big")
    if operation == "add":
        a, number = number % 10**digits, number // 10**digits
        b = number % 10**digits
        return f"{a}+{b}", str(a + b)
    text = str(number % 10**digits).zfill(digits)
    return text, "".join(sorted(text)) if operation == "sort" else text[::-1]


class Task(TaskBase):
    """Random digits by index; equal text earns 1."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._row = lru_cache(maxsize=4096)(self._find)
        self._held_out: list[Row] | None = None

    @property
    def held_out_count(self) -> int:
        """Distinct held-out questions found, at most `held_out_size`."""
        return len(self._held_out_rows())

    def row(self, split: Split, index: int) -> Row:
        """Return a row; the train split is endless, the held-out one has distinct questions."""
        return self._held_out_rows()[index] if split == "held_out" else self._row(index)

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        """1 where the completion is the answer and nothing else, spaces around it aside."""
        return [
            float(text.strip() == prompt.columns["answer"])
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    def _draw(self, stream: str, index: int, attempt: int) -> tuple[str, str]:
        digest = hashlib.sha256(f"digits/{stream}/{index}/{attempt}".encode()).digest()
        # 256 bits do not cover two numbers of a hundred digits: stretch them
        wide = b"".join(hashlib.sha256(digest + bytes([i])).digest() for i in range(4))
        return question_of(self.config.operation, self.config.digits, wide)

    def _is_held_out(self, question: str) -> bool:
        digest = hashlib.sha256(b"held-out\0" + question.encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.config.held_out_share * 2.0**64

    def _make(self, split: Split, index: int, question: str, answer: str) -> Row:
        name = f"digits.{self.config.operation}/{split}/{index}"
        message = {"role": "user", "content": question}
        return Row(name, question, (message,), {"answer": answer, "question": question})

    def _find(self, index: int) -> Row:
        for attempt in range(MAX_TRIES):
            question, answer = self._draw(f"train/{self.config.seed}", index, attempt)
            if not self._is_held_out(question):
                row = self._make("train", index, question, answer)
                if self.fits(row):
                    return row
        raise ValueError(
            f"no training question in {MAX_TRIES} tries; lower held_out_share, raise digits or "
            "max_prompt_tokens."
        )

    def _held_out_rows(self) -> list[Row]:
        if self._held_out is None:
            found: dict[str, Row] = {}
            size = self.config.held_out_size if self.config.held_out_share > 0 else 0
            for attempt in range(MAX_TRIES):
                if len(found) >= size:
                    break
                question, answer = self._draw("held_out", 0, attempt)
                if question not in found and self._is_held_out(question):
                    row = self._make("held_out", len(found), question, answer)
                    if self.fits(row):
                        found[question] = row
            self._held_out = list(found.values())
        return self._held_out
