"""Running a study: the tiny model, failures that stop nobody, finished runs that stay."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.log import Reporter, read_json_lines
from samebit.models.load import load_model
from samebit.models.tokenizer import Tokenizer
from samebit.quant.plan import load_recipe
from samebit.study.plan import Job, Study, load_study
from samebit.study.runs import find_job, is_finished, prepare_model, read_result, run_job, run_study
from samebit.study.summary import summarise
from samebit.study.tiny import Warmup, gold_batch, warm_up
from samebit.tasks.api import load_task

FILE = """
[study]
out = "OUT"
seeds = [0]
final_prompts = 4
[warmup]
hidden = 32
intermediate = 48
layers = 1
heads = 2
steps = 3
batch = 4
[base]
[base.run]
threads = 1
save_every = 1
[base.task]
name = "digits"
digits = 3
[base.rollout]
max_tokens = 4
[base.rl]
prompts_per_step = 2
group_size = 2
mini_batches = 2
[base.train]
steps = 2
[base.eval]
prompts = 4
every = 1
[[arm]]
name = "plain"
recipe = "bf16"
[[arm]]
name = "broken"
recipe = "bf16"
rollout.engine = "no.such.engine"
[[arm]]
name = "mixed"
recipe = "int4-rollout"
rl.correction = "acr"
"""


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    path = tmp_path / "study.toml"
    path.write_text(FILE.replace("OUT", str(tmp_path / "out")))
    return load_study(path)


def here(study: Study):
    """Runs jobs in this process, as `--only` does."""

    def launch(job: Job) -> int:
        try:
            run_job(study, job, Reporter(quiet=True))
        except ValueError:  # what the broken arm raises
            return 1
        return 0

    return launch


def test_a_failed_arm_stops_nobody_and_finished_runs_stay(study: Study):
    notes: list[str] = []
    prepare_model(study, notes.append)
    run_study(study, "unused", 1, notes.append, here(study))
    plain, broken, mixed = (read_result(job) for job in study.jobs)
    assert plain and broken and mixed
    assert broken["status"] == "failed" and "no module 'no'" in broken["error"]
    assert plain["final_reward"] == plain["final_reward_sampler"] == plain["final_reward_bf16"]
    assert mixed["status"] == "done" and mixed["final_reward"] == mixed["final_reward_bf16"]
    assert any("FAILED" in note for note in notes)
    arms = summarise(study)["arms"]
    assert [arm["done"] for arm in arms] == [1, 0, 1]
    assert arms[0]["mismatch_max"] == 0.0 and arms[2]["mismatch_max"] > 0.0
    assert arms[2]["bounds_differ_share"] is not None

    again: list[str] = []
    run_study(study, "unused", 1, lambda text: None, lambda job: again.append(job.label) or 0)
    assert again == ["broken:0"]


def test_an_unfinished_run_goes_on_from_its_checkpoint(study: Study):
    prepare_model(study, lambda text: None)
    job = find_job(study, "mixed:0")
    run_job(study, job, Reporter(quiet=True))
    whole = read_json_lines(job.folder / "metrics.jsonl")
    result = read_result(job)
    # as if killed after step 1: no result, no second checkpoint
    (job.folder / "result.json").unlink()
    os.rename(job.folder / "checkpoints" / "step_000002", job.folder / "gone")
    assert not is_finished(job)
    run_job(study, job, Reporter(quiet=True))
    resumed = read_json_lines(job.folder / "metrics.jsonl")

    def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [{k: v for k, v in r.items() if k[:5] not in ("time/", "perf/")} for r in records]
        return kept

    assert repr(untimed(resumed)) == repr(untimed(whole))
    again = read_result(job)
    assert again and result and again["final_reward"] == result["final_reward"]


def test_a_process_that_dies_is_recorded(study: Study):
    run_study(study, "unused", 2, lambda text: None, lambda job: -9)
    assert {read_result(job)["error"] for job in study.jobs} == {  # type: ignore[index]
        "the process ended with exit code -9"
    }


def test_warm_up_learns_and_repeats_bit_for_bit(tmp_path: Path):
    torch.set_num_threads(1)
    shape = Warmup(hidden=32, intermediate=48, layers=1, heads=2, steps=25, batch=8)
    task = load_task("digits", {"operation": "reverse", "digits": 2})
    losses = warm_up(tmp_path / "a", shape, task, lambda text: None)
    assert losses[-1] < 0.9 * losses[0]
    warm_up(tmp_path / "b", shape, task, lambda text: None)
    files = [tmp_path / name / "model.safetensors" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert warm_up(tmp_path / "a", shape, task, lambda text: None) == losses
    with pytest.raises(ValueError, match="other settings"):
        warm_up(tmp_path / "a", Warmup(hidden=64), task, lambda text: None)


def test_gold_batches_are_question_answer_end(tmp_path: Path):
    shape = Warmup(hidden=32, intermediate=48, layers=1, heads=2, steps=1, batch=1)
    task = load_task("digits", {"operation": "add", "digits": 1})
    warm_up(tmp_path / "m", shape, task, lambda text: None)
    model = load_model(tmp_path / "m", load_recipe("bf16"))
    tokenizer = Tokenizer(tmp_path / "m", model.config)
    task.bind(tokenizer)
    (prompt,) = task.prompts("train", 5, 1)
    batch = gold_batch(task, tokenizer, 5, 1)
    assert tokenizer.decode(prompt.ids, skip_special=False) == prompt.text + "<|ask|>"
    answer = prompt.columns["answer"]
    a, b = prompt.text.split("+")
    assert int(a) + int(b) == int(answer)
    assert tokenizer.decode(batch.targets.tolist(), False) == answer + "<|endoftext|>"
    assert batch.ids.tolist() == [*prompt.ids, *tokenizer.encode(answer)]
    about = json.loads((tmp_path / "m" / "warmup.json").read_text())
    assert about["settings"]["hidden"] == 32 and len(about["losses"]) == 1
    assert tokenizer.size == model.config.vocab_size == len(tokenizer.encode("0")) + 46
