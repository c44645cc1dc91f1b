"""The task contract: registry, rendering, one BOS, length limits, metrics."""

from __future__ import annotations

import sys
import textwrap

import pytest

from samebit.tasks.api import PromptTooLongError, Row, load_task, plain_text, task_names
from samebit.types import Prompt

BOS, END = 256, 257

OWN_TASK = textwrap.dedent("""
    from dataclasses import dataclass
    from samebit.tasks.api import Row, TaskBase, TaskConfig

    @dataclass(frozen=True, kw_only=True)
    class Config(TaskConfig):
        count: int = 3

    class Task(TaskBase):
        @property
        def held_out_count(self):
            return self.config.count

        def row(self, split, index):
            message = {"role": "user", "content": f"{split} {index}"}
            return Row(f"own/{split}/{index}", message["content"], (message,), {"answer": "a"})

        def grade(self, prompts, completions):
            return [float(c == p.columns["answer"]) for p, c in zip(prompts, completions)]
""")


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "own.py").write_text(OWN_TASK)
    (tmp_path / "pack" / "empty.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "pack.own"
    for name in [name for name in sys.modules if name.split(".")[0] == "pack"]:
        del sys.modules[name]


def test_folder_is_the_registry():
    assert task_names() == ["digits", "file", "reasoning_gym"]


def test_a_dotted_path_is_a_task_too(own, tokenizer):
    task = load_task(own, {"count": 2})
    task.bind(tokenizer)
    assert [p.text for p in task.held_out()] == ["held_out 0", "held_out 1"]
    assert task.reward(task.held_out(), ["a", "b"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="does not define Config"):
        load_task("pack.empty", {})
    with pytest.raises(ValueError, match=r"no module 'pack.missing'"):
        load_task("pack.missing", {})


def test_held_out_rows_end_and_indices_start_at_zero(own, tokenizer):
    task = load_task(own, {})
    task.bind(tokenizer)
    with pytest.raises(ValueError, match=r"held-out rows 2\.\.3 asked for; the split has 3"):
        task.prompts("held_out", 2, 2)
    with pytest.raises(ValueError, match="indices start at 0"):
        task.prompts("train", -1, 2)


def test_prompts_before_bind_say_what_is_missing(own):
    with pytest.raises(ValueError, match="call bind"):
        load_task(own, {}).prompts("train", 0, 1)


def ids_of(own, tokenizer, **table):
    task = load_task(own, table)
    task.bind(tokenizer)
    return task.prompts("train", 0, 1)[0].ids


TEXT = tuple(b"user\ntrain 0") + (END,) + tuple(b"assistant\n")


@pytest.mark.parametrize("printed", [0, 1, 2])
def test_chat_prompt_has_exactly_one_bos_whoever_adds_it(own, tokenizer, printed):
    tokenizer.template_bos = printed
    assert ids_of(own, tokenizer, bos_id=BOS) == (BOS, *TEXT)


def test_without_a_bos_id_the_template_is_left_alone(own, tokenizer):
    assert ids_of(own, tokenizer) == TEXT


def test_plain_prompt_gets_bos_only_where_the_model_has_one(own, tokenizer):
    assert ids_of(own, tokenizer, chat=False, bos_id=BOS) == (BOS, *b"train 0\n")
    assert ids_of(own, tokenizer, chat=False) == tuple(b"train 0\n")


def test_system_prompt_goes_first_and_does_not_replace_the_rows_own():
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2 ="},
    ]
    assert plain_text(chat) == "s\n\n1 + 1 =\n2\n\n2 + 2 =\n"


@pytest.mark.parametrize("limit", [len(TEXT) - 1, len(TEXT), len(TEXT) + 1])
def test_length_limit_is_measured_after_the_template(own, tokenizer, limit):
    table = {"max_prompt_tokens": limit}
    cut = ids_of(own, tokenizer, on_long_prompt="truncate_left", **table)
    assert cut == TEXT[-limit:]
    if limit >= len(TEXT):
        assert ids_of(own, tokenizer, **table) == TEXT
        return
    with pytest.raises(PromptTooLongError, match=rf"own/train/0 has {len(TEXT)} tokens.* {limit}"):
        ids_of(own, tokenizer, **table)


def test_bad_shares_and_limits_are_refused(own):
    with pytest.raises(ValueError, match=r"held_out_share = 1\.0"):
        load_task(own, {"held_out_share": 1})
    with pytest.raises(ValueError, match="max_prompt_tokens = -1"):
        load_task(own, {"max_prompt_tokens": -1})
    with pytest.raises(ValueError, match="must be one of stop, skip, truncate_left"):
        load_task(own, {"on_long_prompt": "drop"})


def test_reward_refuses_lists_of_different_length(own):
    with pytest.raises(ValueError, match="1 prompts but 2 completions"):
        load_task(own, {}).reward([Prompt("p", (1,), "t")], ["a", "b"])


def test_metrics_count_and_reset(own, tokenizer):
    task = load_task(own, {})
    task.bind(tokenizer)
    task.reward(task.held_out(), ["a", "b", "c"])
    assert task.stats.metrics(reset=True)["reward/graded_count"] == 3
    assert set(task.stats.metrics().values()) == {0}
    assert isinstance(task.row("train", 5), Row)
