"""Study files: arms over a base, seeds, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samebit.cli import main
from samebit.config_dump import dump
from samebit.study.plan import load_study, require_unchanged

FILE = """
[study]
out = "OUT"
seeds = [3, 1]
baseline = "plain"
[base]
model = "m"
[base.task]
name = "digits"
digits = 4
[base.rl]
algorithm = "dapo"
clip_high = 0.3
correction = { name = "tis", cap = 4.0 }
[[arm]]
name = "plain"
recipe = "bf16"
rl.correction = "none"
[[arm]]
name = "mixed"
note = "a remark"
recipe = "int4-rollout"
rl.correction = { name = "acr" }
train.role_learning_rates = { qkv = 1.5 }
task.digits = 5
"""


@pytest.fixture
def write(tmp_path: Path):
    def make(text: str = FILE) -> Path:
        path = tmp_path / "study.toml"
        path.write_text(text.replace("OUT", str(tmp_path / "out")))
        return path

    return make


def test_arms_change_the_base_and_seeds_multiply_them(write: Any, tmp_path: Path):
    study = load_study(write())
    assert [job.label for job in study.jobs] == ["plain:3", "mixed:3", "plain:1", "mixed:1"]
    plain, mixed = study.jobs[0].config, study.jobs[3].config
    assert plain.rl.correction == {"name": "none"} and plain.task.options == {"digits": 4}
    assert mixed.rl.correction == {"name": "acr", "cap": 4.0}  # a table merges, a name replaces
    assert mixed.task.options == {"digits": 5} and mixed.recipe == "int4-rollout"
    assert mixed.train.role_learning_rates == {"qkv": 1.5}
    assert plain.rl.options == mixed.rl.options == {"clip_high": 0.3}
    assert (plain.seed, mixed.seed) == (3, 1)
    assert mixed.run.out == str(tmp_path / "out" / "mixed" / "seed1")
    assert study.baseline == "plain" and study.arms[1].note == "a remark"


def test_the_base_may_be_a_run_file(write: Any, tmp_path: Path):
    (tmp_path / "run.toml").write_text('model = "m"\nseed = 9\n[task]\nname = "digits"\n')
    text = '[study]\nbase = "run.toml"\nseeds = [0]\n[[arm]]\nname = "a"\nrl.group_size = 2\n'
    (job,) = load_study(write(text)).jobs
    assert job.config.model == "m" and job.config.seed == 0 and job.config.rl.group_size == 2


def test_warm_up_names_the_model(write: Any, tmp_path: Path):
    text = FILE.replace('model = "m"', "").replace("[base]", "[warmup]\nsteps = 7\n[base]", 1)
    study = load_study(write(text))
    assert study.warmup is not None and study.warmup.steps == 7
    assert study.jobs[0].config.model == str(tmp_path / "out" / "model") == str(study.model_folder)
    assert load_study(write(text), out="elsewhere").jobs[0].config.model == "elsewhere/model"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[study]", "[studies]", "'studies'"),
        ("seeds", "seed", "'seeds'"),
        ('name = "mixed"', 'name = "plain"', "two arms are called 'plain'"),
        ('name = "mixed"', 'name = "../x"', "use letters"),
        ('baseline = "plain"', 'baseline = "x"', "arms: plain, mixed"),
        ("[3, 1]", "[]", "at least one"),
        ("[3, 1]", "[1, 1]", "each once"),
        ('recipe = "int4-rollout"', "recpe = 1", "arm 'mixed'.*recipe"),
        ("train.role_learning_rates = { qkv = 1.5 }", "train.steps = 0", "arm 'mixed'.*steps"),
        ("[base]\n", "[warmup]\nheads = 3\n[base]\n", "heads"),
        ("[base]\n", "[warmup]\n[base]\n", "remove `model`"),
        ('out = "OUT"', 'out = "OUT"\nbase = "x.toml"', "either"),
    ],
)
def test_mistakes_name_key_and_fix(write: Any, old: str, new: str, said: str):
    assert old in FILE
    with pytest.raises(ValueError, match=said):
        load_study(write(FILE.replace(old, new)))


def test_a_study_without_arms_is_refused(write: Any):
    with pytest.raises(ValueError, match=r"\[\[arm\]\]"):
        load_study(write(FILE[: FILE.index("[[arm]]")]))


def test_a_changed_file_does_not_mix_with_old_runs(write: Any):
    study = load_study(write())
    for job in study.jobs:
        job.folder.mkdir(parents=True)
        (job.folder / "config.toml").write_text(dump(job.config))
    require_unchanged(study.jobs)
    changed = load_study(write(FILE.replace("digits = 5", "digits = 6")))
    with pytest.raises(ValueError, match="mixed/seed3 was started under another configuration"):
        require_unchanged(changed.jobs)


def test_the_command_checks_before_it_runs(write: Any, capsys: Any):
    assert main(["study", str(write()), "--dry-run"]) == 0
    out = capsys.readouterr()
    assert [line.split()[0] for line in out.out.splitlines()] == [
        "plain:3",
        "mixed:3",
        "plain:1",
        "mixed:1",
    ]
    text = FILE.replace('"int4-rollout"', '"int5"')
    assert main(["study", str(write(text)), "--dry-run"]) == 2
    assert "int5" in capsys.readouterr().err
    assert main(["study", str(write()), "--only", "mixed:2"]) == 2
    assert "mixed:3" in capsys.readouterr().err


def test_the_shipped_study_is_sound(tmp_path: Path):
    path = Path(__file__).parents[2] / "recipes" / "study.toml"
    study = load_study(path)
    assert len(study.header.seeds) >= 3 and study.warmup is not None
    kinds = {(job.config.recipe, job.config.rl.correction["name"]) for job in study.jobs}
    mixed = {("int4-rollout", name) for name in ("none", "tis", "acr")}
    assert kinds >= mixed | {("bf16", "none"), ("fp8", "none"), ("int8", "none")}
    assert main(["study", str(path), "--dry-run", "--out", str(tmp_path)]) == 0
