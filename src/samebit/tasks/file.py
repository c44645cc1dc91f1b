"""Questions and answers from JSON Lines, CSV or Parquet files, graded by math-verify.

Every row is read and checked when the task is built, before any model is loaded.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from samebit.tasks._readers import read_rows
from samebit.tasks._rows import BadRowError, Question, make_question
from samebit.tasks.api import Row, Split, TaskBase, TaskConfig
from samebit.tasks.grading.extract import ExtractRule, extract_answer
from samebit.tasks.grading.math import MathGrader
from samebit.tasks.grading.pool import Limits
from samebit.types import Prompt

logger = logging.getLogger(__name__)

SHOWN_BAD_ROWS = 5


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Keys of a file task."""

    files: tuple[str, ...]
    """Training files, .jsonl, .ndjson, .csv, .tsv or .parquet; `*` patterns are expanded."""
    held_out_files: tuple[str, ...] = ()
    """Held-out files; without any, `held_out_share` of the training questions is held out."""
    prompt_column: str = "prompt"
    """Column of the question: text, or a chat list of {role, content}."""
    answer_column: str = ""
    """Column of the right answer (a list: any of these). Dots reach inside. Empty: `answer`, or
    verl's `reward_model.ground_truth`."""
    encoding: str = "utf-8"
    """Encoding of text files; a byte-order mark overrules it."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """Stop at a bad row with file, row and column, or leave it out and count it."""
    max_row_bytes: int = 16 * 2**20
    """A longer row is a bad row."""
    shuffle: bool = True
    """New order of the training rows every epoch, by `seed`; false keeps the order of the files."""
    extract: ExtractRule = "auto"
    """Where in the completion the answer is: whole, tag, hash, boxed or auto."""
    answer_extract: ExtractRule = "auto"
    """Where in the answer column the right answer is (GSM8K keeps it behind ####)."""
    verifier: Literal["math", "strict"] = "math"
    """math: equal in value (docs/tasks.md has the rules). strict: equal text."""
    tolerance: float = 0.0
    """Relative tolerance between plain numbers."""
    grading_workers: int = 2
    """Processes that grade what needs algebra."""
    grading_cpu_seconds: float = 1.0
    """Processor time an answer may take; beyond it the reward is 0 and the time-out is counted."""
    grading_wall_seconds: float = 20.0
    """Wall-clock time an answer may take."""
    grading_memory_mebibytes: int = 1024
    """Memory an answer may take beyond what a worker holds at rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            raise ValueError("files: at least one is needed.")
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"tolerance = {self.tolerance}: expected a number in [0, 1).")
        if self.max_row_bytes < 1:
            raise ValueError(f"max_row_bytes = {self.max_row_bytes}: expected 1 or more.")


@dataclass
class FileReport:
    """What reading found. overlap: training rows dropped because their question is held out."""

    rows: int = 0
    bad_rows: int = 0
    duplicates: int = 0
    overlap: int = 0
    too_long: int = 0
    first_bad: tuple[str, ...] = ()


class Task(TaskBase):
    """Rows of files: training in a new order every epoch, held-out each exactly once."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.report = FileReport()
        train = self._read(config.files)
        if config.held_out_files:
            held_out = self._read(config.held_out_files)
            keys = {question.key for question in held_out}
        else:
            keys = {q.key for q in train if _held_out_by_hash(q.key, config.held_out_share)}
            held_out = [question for question in train if question.key in keys]
        kept = [question for question in train if question.key not in keys]
        if config.held_out_files:
            self.report.overlap = len(train) - len(kept)
        self.report.duplicates = (len(kept) - len({q.key for q in kept})) + (
            len(held_out) - len(keys)
        )
        distinct = {question.key: question for question in reversed(held_out)}
        # The first of equal questions stays, in the order of the files.
        ordered = [question for question in held_out if distinct[question.key] is question]
        self._all = {"train": kept, "held_out": ordered}
        self._fitting = dict(self._all)
        self._order = lru_cache(maxsize=4)(self._shuffled)
        self._grader = MathGrader(
            workers=config.grading_workers,
            limits=Limits(
                cpu_seconds=config.grading_cpu_seconds,
                wall_seconds=config.grading_wall_seconds,
                memory_mebibytes=config.grading_memory_mebibytes,
            ),
        )
        self._require_rows()
        if self.report != FileReport(rows=self.report.rows):
            logger.warning("files %s: %s", list(config.files), self.report)

    @property
    def held_out_count(self) -> int:
        """Number of distinct held-out questions, at most `held_out_size`."""
        return min(len(self._fitting["held_out"]), self.config.held_out_size)

    @property
    def train_count(self) -> int:
        """Number of training rows in an epoch."""
        return len(self._fitting["train"])

    def bind(self, tokenizer: Any) -> None:
        """Give the task its tokenizer; with a length limit every row is measured now."""
        super().bind(tokenizer)
        self._fitting = dict(self._all)
        self._order.cache_clear()
        if not self.config.max_prompt_tokens:
            return
        for split, questions in self._all.items():
            rows = [self._make_row(split, i, question) for i, question in enumerate(questions)]
            if self.config.on_long_prompt == "stop":
                for row in rows:
                    self.render(row)
            self._fitting[split] = [
                question for question, row in zip(questions, rows, strict=True) if self.fits(row)
            ]
        self.report.too_long = sum(
            len(self._all[split]) - len(self._fitting[split]) for split in self._all
        )
        if self.report.too_long:
            logger.warning("%d rows are longer than the limit: left out", self.report.too_long)
        self._require_rows()

    def row(self, split: Split, index: int) -> Row:
        """Return a row; a training index beyond the last row goes on in the next epoch's order."""
        questions = self._fitting[split]
        if split == "held_out":
            return self._make_row(split, index, questions[index])
        epoch, position = divmod(index, len(questions))
        chosen = self._order(epoch)[position] if self.config.shuffle else position
        return self._make_row(split, index, questions[chosen])

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        """Grade by value; of several right answers any counts."""
        return self._grader.grade(
            [prompt.columns["gold"] for prompt in prompts],
            completions,
            rule=self.config.extract,
            tolerance=self.config.tolerance,
            strict=self.config.verifier == "strict",
            stats=self.stats,
        )

    def close(self) -> None:
        """End the grading processes."""
        self._grader.close()

    def _make_row(self, split: str, index: int, question: Question) -> Row:
        return Row(f"file/{split}/{index}", question.text, question.messages, question.columns)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._fitting["train"])))
        random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return order

    def _require_rows(self) -> None:
        if not self._fitting["train"]:
            raise ValueError(
                f"files {list(self.config.files)}: no training row is left ({self.report})."
            )

    def _read(self, patterns: Sequence[str]) -> list[Question]:
        questions: list[Question] = []
        for path in _expand(patterns):
            rows = read_rows(
                path, encoding=self.config.encoding, max_row_bytes=self.config.max_row_bytes
            )
            for raw in rows:
                self.report.rows += 1
                try:
                    if raw.error:
                        raise BadRowError(raw.error)
                    questions.append(self._question(raw.place, raw.values))
                except BadRowError as error:
                    self._bad_row(f"{raw.place}: {error}")
        return questions

    def _question(self, place: str, values: dict[str, Any]) -> Question:
        question = make_question(
            place, values, self.config.prompt_column, self.config.answer_column
        )
        answers = question.columns["answer"]
        gold: list[str] = []
        for answer in [answers] if isinstance(answers, str) else answers:
            found = extract_answer(answer, self.config.answer_extract)
            if not found:
                raise BadRowError(
                    f"the answer {answer[:80]!r} holds nothing by the rule "
                    f"answer_extract = {self.config.answer_extract!r}"
                )
            gold.append(found)
        return Question(place, question.text, question.messages, {**question.columns, "gold": gold})

    def _bad_row(self, message: str) -> None:
        if self.config.on_bad_row == "stop":
            raise ValueError(f"{message}. (on_bad_row = 'skip' leaves such rows out.)")
        self.report.bad_rows += 1
        if len(self.report.first_bad) < SHOWN_BAD_ROWS:
            self.report.first_bad = (*self.report.first_bad, message)


def _held_out_by_hash(key: str, share: float) -> bool:
    digest = hashlib.sha256(b"held-out\0" + key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def _expand(patterns: Sequence[str]) -> list[Path]:
    paths: list[Path] = []
    for pattern in patterns:
        if any(mark in pattern for mark in "*?["):
            found = sorted(glob.glob(pattern, recursive=True))
            if not found and not Path(pattern).exists():
                raise ValueError(f"files: nothing matches {pattern!r}.")
            paths += map(Path, found or [pattern])
        else:
            paths.append(Path(pattern).expanduser())
    return paths
