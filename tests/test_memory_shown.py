"""The memory plan as people meet it: its table, and what it warns of before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samebit.cli import main
from samebit.models.config import read_config
from samebit.models.load import plan_for
from samebit.quant.plan import load_recipe
from samebit.run_checks import describe_memory, memory_warnings
from samebit.train.memory import MemoryPlan, plan_memory
from tests import runs

POSITIONS = 1024
"""Of the tiny models."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("checks"))


def planned(file: Path, max_tokens: int) -> tuple[Any, MemoryPlan]:
    """Configuration and plan of groups of two answers, in packs of 128 tokens or one group."""
    changes = [("rollout.max_tokens", str(max_tokens)), ("train.micro_batch_tokens", "128")]
    config = runs.config(file, file.parent / "out", *changes)
    model = read_config(Path(config.model))
    return config, plan_memory(model, plan_for(load_recipe("fp8"), model), config)


def test_answers_that_cannot_fit_are_warned_of_with_the_length_that_can(file: Path):
    config, memory = planned(file, 1000)
    assert memory.tokens == 2000
    assert list(memory_warnings(config, memory, memory.total)) == []
    (said,) = memory_warnings(config, memory, memory.total - 501 * memory.per_token)
    assert said.startswith("rollout.max_tokens = 1,000: to train on 2 answers of 1,000 tokens")
    # 2000 - 501 tokens are left for two answers
    assert said.endswith("749 tokens each fit: lower rollout.max_tokens or rl.group_size")
    assert planned(file, 749)[1].total <= memory.total - 501 * memory.per_token
    (said,) = memory_warnings(config, memory, 0)
    assert said.endswith(memory.advice("train"))


def test_a_pack_of_short_answers_that_is_too_large_is_not_blamed_on_them(file: Path):
    config, memory = planned(file, 6)
    assert memory.tokens == 128 and list(memory_warnings(config, memory, 0)) == []


def test_a_run_on_a_cpu_shows_its_plan_and_what_does_not_apply(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    args = ["train", str(file), "--run.device", "cpu", "--steps", "1", "--eval.every", "0"]
    assert main([*args, "--out", str(tmp_path / "out"), "--train.memory-gib", "0.5"]) == 0
    said = capsys.readouterr().err
    assert said.index("training, together") < said.index("step 1/1")
    assert said.count("train.memory_gib = 0.5 does not apply: on a CPU no plan is made") == 1
    assert main([*args, "--dry-run", "--rollout.max-tokens", "10000000"]) == 0
    said = capsys.readouterr().err
    assert "memory_gib" not in said


def test_answers_are_planned_as_long_as_the_model_s_positions_let_them_be(
    file: Path, capsys: pytest.CaptureFixture[str]
):
    config, memory = planned(file, 10_000_000)
    assert memory == planned(file, POSITIONS)[1] and memory.answer == POSITIONS
    assert f"{POSITIONS:,} tokens at once" in describe_memory(config, memory, 90 << 30)
    (said,) = memory_warnings(config, memory, memory.total - 1)
    assert said.startswith("rollout.max_tokens = 10,000,000: to train on 2 answers of 1,024 tokens")
    note = "answers end at the model's 1,024 positions, of which their prompt takes its part"
    for length, times in ((POSITIONS, 0), (10_000_000, 1)):
        args = [str(file), "--rollout.max-tokens", str(length), "--run.device", "cpu"]
        assert main(["train", *args, "--dry-run", "--out", str(file.parent / "none")]) == 0
        assert capsys.readouterr().err.count(note) == times


def test_rollout_and_eval_say_where_answers_end(file: Path, capsys: pytest.CaptureFixture[str]):
    prompts = file.parent / "prompts.jsonl"
    prompts.write_text('{"prompt": "1"}')
    cut = ["--rollout.max-tokens", "1025", "--rollout.stop-ids", str(list(range(200)))]
    sampled = ["rollout", str(file.parent / "model"), "--prompts", str(prompts)]
    for command in (sampled, ["eval", str(file), "--eval.prompts", "1"]):
        main([*command, *cut, "--run.device", "cpu"])
        assert "rollout.max_tokens = 1,025: answers end at the" in capsys.readouterr().err


def test_the_plan_reads_as_a_table(file: Path):
    lines = planned(file, 6)[1].describe(90 << 30).splitlines()
    (moments,) = [line for line in lines if "moments" in line]
    assert moments.endswith('0.00 GiB  (0.00 GiB less with train.optimizer_states = "8bit")')
    ends = {line.index(" GiB") for line in lines[1:] if line.startswith("  ") and "  " in line[2:]}
    assert len(ends) == 1, lines
    assert lines[-1].startswith("  90.00 GiB of 90.00 GiB are left")
