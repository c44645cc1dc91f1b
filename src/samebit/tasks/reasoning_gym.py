"""Any data set of the reasoning-gym package, with shots, a system prompt and strict scoring.

The package's own scorers are not used by default: several evaluate the completion as code, and the
common one pays by the share of the text that is the answer. `_gym_scorers.py` holds what replaces
them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from samebit.option_table import nearest
from samebit.tasks._gym_scorers import Scorer, make_scorer
from samebit.tasks.api import Message, Row, Split, TaskBase, TaskConfig
from samebit.tasks.grading.extract import ExtractRule, extract_answer
from samebit.types import Prompt

# One question in this many tries at least must be usable, or the filters leave too little.
MAX_TRIES = 20_000
MAX_FRUITLESS = 4_000
MAX_ANSWER_CHARACTERS = 20_000
# Two of the generators hand the index to numpy, which takes 32 bits.
ENDLESS_SIZE = 2**30
PREPARED_SIZE = 4_000


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Keys of a reasoning-gym task."""

    dataset: str
    """Name of the data set in reasoning-gym, for example chain_sum."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Its own parameters, for example max_terms; `seed` and `size` are ours to choose."""
    keep: str = ""
    """Regular expression that a question must contain to be used; empty keeps all."""
    shots: int = 0
    """Solved examples before the question; they appear in neither split."""
    shot_seed: int = 0
    """Which examples are drawn."""
    extract: ExtractRule = "whole"
    """Where in the completion the answer is: whole, tag, hash, boxed or auto."""
    scoring: Literal["auto", "strict", "dataset"] = "auto"
    """strict: equal to the data set's answer. dataset: the package's own scorer, in a worker that
    can be killed; refused where it evaluates the answer as code. auto: our safe scorer where many
    answers are right (countdown, puzzle24), else strict."""
    partial_credit: bool = False
    """With scoring = dataset: pay fractions too, instead of 1 for a full score only."""
    grading_workers: int = 2
    """Processes that run the data set's scorer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shots < 0:
            raise ValueError(f"shots = {self.shots}: expected 0 or more.")
        if self.partial_credit and self.scoring != "dataset":
            raise ValueError(f"partial_credit needs scoring = dataset, not {self.scoring!r}.")
        for key in ("seed", "size"):
            if key in self.parameters:
                raise ValueError(
                    f"parameters.{key}: chosen by the task; use the task's own `seed` instead."
                )
        try:
            re.compile(self.keep)
        except re.error as error:
            raise ValueError(
                f"keep = {self.keep!r}: not a regular expression ({error})."
            ) from error


class Task(TaskBase):
    """Questions drawn by index from a reasoning-gym generator; splits by a hash of the text."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._keep = re.compile(config.keep)
        self._dataset, self._size = _open_dataset(config.dataset, config.parameters)
        self._scorer: Scorer = make_scorer(config, self._size, self.stats)
        self._require_answers()
        self._shots, self._shot_texts = self._draw_shots()
        self._held_out: list[Row] | None = None
        self._train_row = lru_cache(maxsize=4096)(self._find_train_row)

    @property
    def held_out_count(self) -> int:
        """Number of distinct held-out questions found, at most `held_out_size`."""
        return len(self._held_out_rows())

    @property
    def shots(self) -> tuple[Message, ...]:
        """The examples put before every question, as alternating user and assistant messages."""
        return self._shots

    def row(self, split: Split, index: int) -> Row:
        """Return a row; the train split is endless, the held-out one has distinct questions."""
        if split == "held_out":
            return self._held_out_rows()[index]
        return self._train_row(index)

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        """Grade the extracted answers; a completion without an answer earns 0."""
        answers: list[str | None] = []
        for completion in completions:
            answer = extract_answer(completion, self.config.extract)
            if answer is not None and len(answer) > MAX_ANSWER_CHARACTERS:
                self.stats.add("too_long")
                answer = None
            answers.append(answer)
        return self._scorer.score(prompts, answers)

    def close(self) -> None:
        """End the scorer's worker processes, where it has any."""
        self._scorer.close()

    def bind(self, tokenizer: Any) -> None:
        """Give the task its tokenizer; which rows fit may change, so cached rows are dropped."""
        super().bind(tokenizer)
        self._held_out = None
        self._train_row.cache_clear()

    def _entry(self, stream: str, index: int, attempt: int) -> dict[str, Any]:
        digest = hashlib.sha256(f"{stream}/{index}/{attempt}".encode()).digest()
        return self._dataset[int.from_bytes(digest[:8], "big") % self._size]

    def _require_answers(self) -> None:
        if self._entry("probe", 0, 0)["answer"] is not None:
            return
        if self.config.scoring != "dataset" or self.config.shots:
            raise ValueError(
                f"data set {self.config.dataset!r} gives no answer to compare with: "
                "set scoring = 'dataset' and shots = 0."
            )

    def _draw_shots(self) -> tuple[tuple[Message, ...], frozenset[str]]:
        messages: list[Message] = []
        texts: set[str] = set()
        for attempt in range(MAX_TRIES):
            if len(texts) == self.config.shots:
                return tuple(messages), frozenset(texts)
            entry = self._entry(f"shots/{self.config.shot_seed}", 0, attempt)
            question = entry["question"]
            if question in texts or self._is_held_out(question) or not self._keep.search(question):
                continue
            texts.add(question)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": str(entry["answer"])})
        raise ValueError(
            f"data set {self.config.dataset!r}: only {len(texts)} distinct questions found for "
            f"{self.config.shots} shots; ask for fewer, or widen `parameters` or `keep`."
        )

    def _is_held_out(self, question: str) -> bool:
        digest = hashlib.sha256(b"held-out\0" + question.encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.config.held_out_share * 2.0**64

    def _make_row(self, split: Split, index: int, entry: Mapping[str, Any]) -> Row:
        question = entry["question"]
        columns = {
            "answer": entry["answer"],
            "question": question,
            "metadata": entry["metadata"],
            "data_source": self.config.dataset,
        }
        messages = (*self._shots, {"role": "user", "content": question})
        name = f"reasoning_gym.{self.config.dataset}/{split}/{index}"
        return Row(id=name, question=question, messages=messages, columns=columns)

    def _find_train_row(self, index: int) -> Row:
        for attempt in range(MAX_TRIES):
            entry = self._entry(f"train/{self.config.seed}", index, attempt)
            question = entry["question"]
            if (
                self._keep.search(question)
                and question not in self._shot_texts
                and not self._is_held_out(question)
            ):
                row = self._make_row("train", index, entry)
                if self.fits(row):
                    return row
        raise ValueError(
            f"data set {self.config.dataset!r}: no usable question in {MAX_TRIES} tries; "
            "lower held_out_share or shots, or widen `parameters`, `keep` or max_prompt_tokens."
        )

    def _held_out_rows(self) -> list[Row]:
        if self._held_out is not None:
            return self._held_out
        rows: list[Row] = []
        seen: set[str] = set()
        fruitless = 0
        attempt = 0
        size = self.config.held_out_size if self.config.held_out_share > 0 else 0
        # Stops early once new questions have become rare: small data sets have no more of them.
        while len(rows) < size and fruitless < MAX_FRUITLESS and attempt < MAX_TRIES:
            entry = self._entry("held_out", 0, attempt)
            attempt += 1
            question = entry["question"]
            if not self._keep.search(question) or not self._is_held_out(question):
                fruitless += 1
                continue
            if question in seen:
                fruitless += 1
                continue
            fruitless = 0
            seen.add(question)
            row = self._make_row("held_out", len(rows), entry)
            if self.fits(row):
                rows.append(row)
        self._held_out = rows
        return rows


def _open_dataset(name: str, parameters: Mapping[str, Any]) -> tuple[Any, int]:
    """Create the generator and say how many indices it has.

    Unknown names and parameters are refused with the nearest ones.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"dataset = {name!r}: not in reasoning-gym{nearest(name, DATASETS)}")
    known = {item.name for item in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in parameters:
        if key not in known:
            raise ValueError(f"parameters.{key}: not a parameter of {name}{nearest(key, known)}")
    try:
        dataset = reasoning_gym.create_dataset(name, seed=0, **parameters)  # type: ignore[reportAttributeAccessIssue]
        try:
            dataset[ENDLESS_SIZE - 1]
        except IndexError:
            # A few generators prepare `size` items and have no others.
            size = PREPARED_SIZE
            return reasoning_gym.create_dataset(name, seed=0, size=size, **parameters), size  # type: ignore[reportAttributeAccessIssue]
        return dataset, ENDLESS_SIZE
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"parameters of {name} = {dict(parameters)}: refused by reasoning-gym: {error}"
        ) from error
