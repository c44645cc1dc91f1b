"""Runs of several processes: the bits of one process with the same gradient leaves; how they end together."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from samebit.cli import main
from samebit.log import Reporter
from samebit.loop import Run
from samebit.ranks import ALONE, world
from samebit.replay import replay
from samebit.train import checkpoint
from samebit.train.leaves import GradientTree, leaves_of, split_leaves
from samebit.types import Group, Prompt
from tests import runs

COMMAND = "from samebit.cli import main; raise SystemExit(main({arguments!r}))"
WAIT_S = 120


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("ranks"))


def options(settings: dict[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key}", value)]


def train(file: Path, out: Path, size: int, settings: dict[str, str], *more: str) -> list[str]:
    """A run by the command line; what each process said on stderr."""
    arguments = ["train", str(file), "--out", str(out), *options(settings), *more]
    processes = runs.start_ranks(COMMAND.format(arguments=arguments), size)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    assert [p.returncode for p in processes] == [0] * size, said
    return said


MANY = """
import os
from samebit.cli import main
for port, arguments in {work!r}:
    os.environ["MASTER_PORT"] = port
    assert main(arguments) == 0, arguments
"""


def train_many(file: Path, size: int, work: dict[Path, dict[str, str]]) -> None:
    """Runs one after the other in the same processes, which saves their start."""
    listed = [
        (runs.free_port(), ["train", str(file), "--out", str(out), *options(settings)])
        for out, settings in work.items()
    ]
    processes = runs.start_ranks(MANY.format(work=listed), size)
    said = [p.communicate(timeout=2 * WAIT_S)[1] for p in processes]
    assert [p.returncode for p in processes] == [0] * size, said


def alone(
    file: Path, out: Path, leaves: int, settings: dict[str, str], resume: bool = False
) -> None:
    """The same run in this process."""
    more = settings | {"train.gradient_leaves": str(leaves)}
    run = Run(runs.config(file, out, *more.items()), resume, Reporter(quiet=True))
    run.train()
    run.close()


def weights(out: Path) -> bytes:
    found = checkpoint.newest(out / "checkpoints")
    assert found is not None
    return b"".join(p.read_bytes() for p in sorted(found.rglob("*.safetensors")))


FOUR = {"rl.prompts_per_step": "4"}
KINDS = {
    "fp8": FOUR,
    "parts": FOUR | {"rollout.max_tokens": "9", "rollout.partial_tokens": "4", "train.steps": "6"},
    "mini-batches int8": FOUR | {"recipe": "int8", "rl.mini_batches": "2", "rl.epochs": "2"},
    "ppo 8 bit": FOUR | {"rl.algorithm": "ppo", "train.optimizer_states": "8bit"},
    "mixed adaptive": FOUR
    | {"recipe": "fp8-rollout", "rl.mini_batches": "2", "rl.correction.name": "adaptive"},
    "dapo uneven": {"rl.algorithm": "dapo", "rl.prompts_per_step": "3"},
    "kl small packs": {
        "rl.prompts_per_step": "8",
        "rl.kl_coefficient": "0.1",
        "train.micro_batch_tokens": "16",
    },
    "calibrated": FOUR
    | {"recipe": "fp8-rollout", "rl.epochs": "2", "rl.correction.name": "calibrated"},
}


@pytest.fixture(scope="module")
def two(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of run by two processes."""
    root = tmp_path_factory.mktemp("two")
    train_many(file, 2, {root / kind: settings for kind, settings in KINDS.items()})
    return root


@pytest.mark.parametrize("kind", list(KINDS))
def test_two_processes_give_the_bits_of_one_with_two_leaves(
    file: Path, tmp_path: Path, two: Path, kind: str
):
    alone(file, tmp_path, 2, KINDS[kind])
    assert runs.metrics(two / kind) == runs.metrics(tmp_path)
    assert runs.samples(two / kind) == runs.samples(tmp_path)
    assert weights(two / kind) == weights(tmp_path)


def test_four_processes_and_four_leaves_on_two(file: Path, tmp_path: Path):
    """With four mini-batches most leaves have no group."""
    kinds = {n: FOUR | {"rl.mini_batches": n} for n in ("1", "4")}
    leaves = {"train.gradient_leaves": "4"}
    train_many(file, 4, {tmp_path / f"four{n}": s for n, s in kinds.items()})
    train_many(file, 2, {tmp_path / f"two{n}": s | leaves for n, s in kinds.items()})
    for n, settings in kinds.items():
        alone(file, tmp_path / n, 4, settings)
        for name in ("four", "two"):
            assert runs.metrics(tmp_path / f"{name}{n}") == runs.metrics(tmp_path / n)
            assert weights(tmp_path / f"{name}{n}") == weights(tmp_path / n)


def test_other_leaves_are_another_sum(file: Path, tmp_path: Path):
    alone(file, tmp_path / "one", 1, FOUR)
    alone(file, tmp_path / "two", 2, FOUR)
    assert weights(tmp_path / "one") != weights(tmp_path / "two")
    first = [runs.metrics(tmp_path / name)[1] for name in ("one", "two")]
    drawn = [{k: v for k, v in m.items() if k.startswith(("rollout/", "reward/m"))} for m in first]
    assert drawn[0] == drawn[1]


def test_a_run_goes_on_with_another_number_of_processes(file: Path, tmp_path: Path):
    out = tmp_path / "out"
    train(file, out, 2, FOUR | {"train.steps": "2"})
    alone(file, out, 2, FOUR | {"train.steps": "3"}, resume=True)
    said = train(file, out, 2, FOUR | {"train.steps": "4"}, "--resume")
    assert "gradient_leaves" not in said[0]
    assert "processes: 2, gradient leaves: 2" in said[0]
    alone(file, tmp_path / "whole", 2, FOUR)
    # the last step of each part was evaluated
    rows = [runs.metrics(path) for path in (out, tmp_path / "whole")]
    assert rows[0][3].pop("reward/eval_mean") is not None
    assert rows[0] == rows[1]
    assert weights(out) == weights(tmp_path / "whole")
    said = train(
        file, out, 2, FOUR | {"train.steps": "5", "train.gradient_leaves": "4"}, "--resume"
    )
    assert "gradient_leaves = 4 after 2" in said[0]
    assert said[1] == ""


def started(
    file: Path, out: Path, size: int, code: str = "", **settings: str
) -> list[subprocess.Popen[str]]:
    """Processes of a long run, after its first step."""
    more = FOUR | {"train.steps": "500", "eval.every": "0"} | settings
    arguments = ["train", str(file), "--out", str(out), *options(more)]
    processes = runs.start_ranks(code + COMMAND.format(arguments=arguments), size)
    end = time.monotonic() + WAIT_S
    while not (out / "checkpoints" / "step_000001").exists():
        assert time.monotonic() < end, [p.poll() for p in processes]
        time.sleep(0.05)
    return processes


@pytest.mark.parametrize(
    ("number", "code", "to"),
    [(signal.SIGTERM, 143, "all"), (signal.SIGTERM, 143, "one"), (signal.SIGINT, 130, "one")],
    ids=["term", "term to one", "int to one"],
)
def test_processes_leave_together_with_a_checkpoint(
    file: Path, tmp_path: Path, number: signal.Signals, code: int, to: str
):
    processes = started(file, tmp_path / "out", 2)
    for process in processes if to == "all" else processes[1:]:
        process.send_signal(number)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    codes = [p.returncode for p in processes]
    # who did not hear of it learns that the other has gone, or is told between steps
    assert codes[1] == code and codes[0] in (code, 1), said
    found = checkpoint.newest(tmp_path / "out" / "checkpoints")
    assert found is not None
    steps = {"train.steps": str(int(found.name.removeprefix("step_")) + 1), "eval.every": "0"}
    alone(file, tmp_path / "out", 2, FOUR | steps, resume=True)
    alone(file, tmp_path / "whole", 2, FOUR | steps)
    assert runs.metrics(tmp_path / "out") == runs.metrics(tmp_path / "whole")
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_who_is_left_ends_when_another_is_killed(file: Path, tmp_path: Path):
    processes = started(file, tmp_path / "out", 2)
    processes[1].kill()
    _, said = processes[0].communicate(timeout=WAIT_S)
    assert processes[0].returncode == 1
    assert "another process of this run ended" in said
    assert "holds step" in said


ENDS = """
import os, signal
from samebit.train.step import Trainer
whole = Trainer._update
def update(self, *more, **named):
    found = whole(self, *more, **named)
    if self.updates == 5 and {here}:  # the third step's first of two
        {does}
    return found
Trainer._update = update
"""
MIDDLE = FOUR | {
    "train.steps": "4",
    "run.save_every": "0",
    "rl.mini_batches": "2",
    "eval.every": "0",
}


@pytest.mark.parametrize(
    ("size", "does", "codes"),
    [
        (1, "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)", [143]),
        (2, "os._exit(9)", [1, 9]),
        (2, "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)", [1, 143]),
    ],
    ids=["second signal", "one dies", "second signal to one"],
)
def test_no_checkpoint_is_made_between_two_steps(
    file: Path, tmp_path: Path, size: int, does: str, codes: list[int]
):
    """Its weights would be of neither."""
    arguments = ["train", str(file), "--out", str(tmp_path / "out"), *options(MIDDLE)]
    code = ENDS.format(here=f'os.environ["RANK"] == "{size - 1}"', does=does)
    processes = runs.start_ranks(code + COMMAND.format(arguments=arguments), size)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    assert [p.returncode for p in processes] == codes, said
    assert len(runs.metrics(tmp_path / "out")) == 2
    assert checkpoint.newest(tmp_path / "out" / "checkpoints") is None
    assert "2 finished steps" in said[0]


def test_processes_that_see_other_folders_are_refused(file: Path, tmp_path: Path):
    out = str(tmp_path / "out")
    train(file, tmp_path / "out", 2, FOUR | {"train.steps": "1"})
    arguments = ["train", str(file), "--out", out, *options(FOUR), "--resume"]
    code = """
import os
from samebit.train import checkpoint
if os.environ["RANK"] == "1":
    checkpoint.newest = lambda folder: None
"""
    processes = runs.start_ranks(code + COMMAND.format(arguments=arguments), 2)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    assert [p.returncode for p in processes] == [1, 1], said
    assert "do all see the same run.out" in said[0]


FLIP = """
import numpy as np
from samebit.engine.native import Engine
whole = Engine.advance
def advance(self, groups, *more, **named):
    found = whole(self, groups, *more, **named)
    last = found[-1].samples[-1].logps
    if groups[-1].samples[-1].sample_id == 3:  # drawn by the second process, trained on by the first
        last.view(np.int32)[0] ^= 1
    return found
Engine.advance = advance
"""


def test_a_bit_that_differs_at_another_process_stops_all_and_is_replayed(
    file: Path, tmp_path: Path
):
    arguments = ["train", str(file), "--out", str(tmp_path / "out"), *options(FOUR)]
    processes = runs.start_ranks(FLIP + COMMAND.format(arguments=arguments), 2)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    assert [p.returncode for p in processes] == [3, 3], said
    assert "mismatch is not 0" in said[0]
    found = replay(tmp_path / "out" / "repro" / "step_000001")
    assert found.differing_recorded == 1
    assert found.trainer_repeats == found.tokens


APART = """
import os
import torch
from samebit.models.decoder import Decoder
whole = Decoder.refresh
def refresh(self):
    here = os.environ["RANK"] == "1" and self.version == 2
    with torch.no_grad():
        if here and {masters}:
            self.head.view(-1)[0] *= 1.5
        whole(self)
        if here and not {masters}:
            _, linear = next(iter(self.linears()))
            linear.weights["rollout"].codes.view(torch.uint8).view(-1)[:64] ^= 64
Decoder.refresh = refresh
"""


@pytest.mark.parametrize(
    ("masters", "code", "text"),
    [(True, 1, "have come apart"), (False, 3, "mismatch is not 0")],
    ids=["masters", "codes"],
)
def test_weights_that_come_apart_are_found(
    file: Path, tmp_path: Path, masters: bool, code: int, text: str
):
    """Codes: a process's own sampler and trainer agree, but each trains on what another drew."""
    arguments = ["train", str(file), "--out", str(tmp_path / "out"), *options(FOUR)]
    broken = APART.format(masters=masters) + COMMAND.format(arguments=arguments)
    processes = runs.start_ranks(broken, 2)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    assert [p.returncode for p in processes] == [code, code], said
    assert text in said[0]


POISON = """
import os
from samebit.train.step import Trainer
inside = Trainer.micro_batch
def micro_batch(self, *more):
    inside(self, *more)
    if self.steps == 1 and {here}:
        self.model.norm_final.grad[0] = float("nan")
Trainer.micro_batch = micro_batch
"""


def test_a_gradient_that_is_not_finite_at_one_is_skipped_by_all(file: Path, tmp_path: Path):
    arguments = ["train", str(file), "--out", str(tmp_path / "two"), *options(FOUR)]
    code = POISON.format(here='os.environ["RANK"] == "1"') + COMMAND.format(arguments=arguments)
    processes = runs.start_ranks(code, 2)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], said
    found = runs.metrics(tmp_path / "two")
    assert [m["train/skipped_steps"] for m in found[1:]] == ["0.0", "1.0", "1.0", "1.0"]
    more = options(FOUR | {"train.gradient_leaves": "2"})
    arguments = ["train", str(file), "--out", str(tmp_path / "one"), *more]
    alone = runs.start(POISON.format(here="True") + COMMAND.format(arguments=arguments))
    assert alone.wait(timeout=WAIT_S) == 0
    assert weights(tmp_path / "two") == weights(tmp_path / "one")


UNJUDGED = """
from dataclasses import replace
from samebit.collect import Collector
whole = Collector.collect
def collect(self, *more):
    found = whole(self, *more)
    first = [replace(g, rewards=(None,) * len(g.rewards)) for g in found.groups[:2]]
    return replace(found, groups=[*first, *found.groups[2:]])
Collector.collect = collect
"""


def test_a_process_without_a_verdict_weighs_nothing(file: Path, tmp_path: Path):
    arguments = ["train", str(file), "--out", str(tmp_path / "two"), *options(FOUR)]
    processes = runs.start_ranks(UNJUDGED + COMMAND.format(arguments=arguments), 2)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], said
    more = options(FOUR | {"train.gradient_leaves": "2"})
    arguments = ["train", str(file), "--out", str(tmp_path / "one"), *more]
    assert runs.start(UNJUDGED + COMMAND.format(arguments=arguments)).wait(timeout=WAIT_S) == 0
    assert runs.metrics(tmp_path / "two") == runs.metrics(tmp_path / "one")
    assert weights(tmp_path / "two") == weights(tmp_path / "one")


@pytest.mark.parametrize(
    ("size", "settings", "text"),
    [
        (2, {"rl.prompts_per_step": "1"}, "1 for 2 processes"),
        (2, FOUR | {"train.gradient_leaves": "1"}, "1 for 2 processes: use"),
    ],
)
def test_what_several_processes_refuse(
    file: Path, tmp_path: Path, size: int, settings: dict[str, str], text: str
):
    arguments = ["train", str(file), "--out", str(tmp_path / "out"), *options(settings)]
    processes = runs.start_ranks(COMMAND.format(arguments=arguments), size)
    said = [p.communicate(timeout=WAIT_S)[1] for p in processes]
    assert any(p.returncode == 2 for p in processes)
    assert any(text in one for one in said)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_other_commands_are_for_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["flow", "show", "fp8"]) == 2
    assert "only train is for torchrun" in capsys.readouterr().err


def test_three_processes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="binary tree"):
        world()


def test_leaves_are_even_and_none_is_empty_while_there_are_groups():
    def group(tokens: int) -> Group:
        return Group(Prompt("", (0,) * tokens, ""), ())

    groups = [group(n) for n in (1, 1, 1, 1, 100, 1, 1, 1)]
    assert split_leaves(groups, range(8), 1) == [range(8)]
    assert split_leaves(groups, range(8), 2) == [range(4), range(4, 8)]
    first = [group(n) for n in (100, 1, 1, 1, 1, 1, 1, 1)]
    assert split_leaves(first, range(8), 2) == [range(1), range(1, 8)]
    for leaves in (1, 2, 4, 8):
        found = split_leaves(groups, range(8), leaves)
        assert [i for leaf in found for i in leaf] == list(range(8))
        assert all(found)
    assert split_leaves(groups, range(2, 4), 4) == [
        range(2, 3),
        range(3, 4),
        range(4, 4),
        range(4, 4),
    ]
    even = split_leaves([group(10)] * 16, range(16), 4)
    assert [len(leaf) for leaf in even] == [4, 4, 4, 4]


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_the_tree_adds_pairs(leaves: int):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1000, generator=generator) for _ in range(leaves)]
    parameter = nn.Parameter(torch.zeros(1000))
    tree = GradientTree([parameter])
    for i, value in enumerate(values):
        assert parameter.grad is None
        parameter.grad = value.clone()
        tree.end_leaf(last=i == leaves - 1)
    sums = values
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, sums[0])


def test_vectors_of_a_gpu_are_joined_in_main_memory():
    """As the watchdog and a replay ask for log-probs; fake tensors know the rules of devices."""
    with FakeTensorMode():
        on_gpu = [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")]
        with pytest.raises(Exception, match="device"):
            torch.cat([torch.zeros(0), *on_gpu[:1], torch.ones(1)])
        found = ALONE.cat(on_gpu, torch.device("cpu"))
        assert found.device.type == "cpu" and found.shape == (5,)


def test_leaves_of_a_run():
    assert leaves_of(0, 4) == 4
    assert leaves_of(8, 2) == 8
    for setting, size in ((3, 1), (2, 4)):
        with pytest.raises(ValueError, match="gradient_leaves"):
            leaves_of(setting, size)
