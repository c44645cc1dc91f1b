"""A model to run from what a user names: a run folder, a checkpoint, a TOML file, or a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samebit.cli.validate import check_model, model_of
from samebit.config import Config, TaskSection
from samebit.config_io import load, origin_of
from samebit.models.decoder import Decoder
from samebit.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Target:
    """What was named, before anything large is read.

    config: of the run or file, or defaults around a bare model (task name ""). checkpoint: the
    weights of the run, or None for the model's own. source: the option or file that gave the model,
    "" where it was named itself.
    """

    config: Config
    checkpoint: Path | None
    source: str = ""

    @property
    def describe(self) -> str:
        """The weights in words."""
        return str(self.checkpoint) if self.checkpoint else self.config.model


def find_target(name: str, overrides: Sequence[tuple[str, str]] = ()) -> Target:
    """Sort out `name`; ValueError for a run without a complete checkpoint or whose model is nowhere.

    A `model` among the overrides names the weights: of a run they are not its checkpoint's then.
    """
    path, given = Path(name), {key for key, _ in overrides}
    if path.suffix == ".toml":
        return _target(path, overrides, None)
    if (path / "config.toml").is_file():
        from samebit.train.checkpoint import newest

        if "model" in given:
            return _target(path / "config.toml", overrides, None)
        checkpoint = newest(path / "checkpoints")
        if checkpoint is None:
            raise ValueError(f"{path}: no complete checkpoint in {path / 'checkpoints'}")
        return _target(path / "config.toml", overrides, checkpoint)
    if (path / "state.json").is_file():
        from samebit.train.checkpoint import problem_of

        problem = problem_of(path)
        if problem is not None:
            raise ValueError(f"{path}: unreadable checkpoint: {problem}")
        config = path.parent.parent / "config.toml"
        if "model" in given:
            raise ValueError(
                f"command line: --model: the weights are named twice, {path} is a checkpoint; leave "
                f"--model out, or give {config.parent} instead for its task and settings"
            )
        return _target(config, overrides, path)
    defaults = [("model", name), ("task.name", "none"), *_exported_recipe(path)]
    extra = [(key, value) for key, value in defaults if key not in given]
    source = "command line: --model" if "model" in given else ""
    return Target(load(None, [*extra, *overrides]), None, source)


def _target(path: Path, overrides: Sequence[tuple[str, str]], checkpoint: Path | None) -> Target:
    """A file's target; ValueError naming file or option for a model that is nowhere."""
    config, origin = load(path, overrides), origin_of(path, overrides)
    check_model(config, origin)
    return Target(config, checkpoint, origin.of("model"))


def _exported_recipe(folder: Path) -> list[tuple[str, str]]:
    """The recipe that an FP8 export says it is a policy of."""
    if not (folder / "config.json").is_file():
        return []
    from samebit.models.config import read_config

    recipe = read_config(folder).exported_recipe
    return [("recipe", recipe)] if recipe else []


def load_policy(target: Target, recipe: str | None = None) -> tuple[Decoder, Tokenizer, Path]:
    """(model under the recipe, tokenizer, folder the model came from)."""
    from samebit.models.load import load_model
    from samebit.models.source import resolve
    from samebit.quant.plan import load_recipe
    from samebit.run_checks import choose_device, set_threads
    from samebit.train.checkpoint import load_weights

    chosen = load_recipe(recipe or target.config.recipe)
    set_threads(target.config)
    with model_of(target.source):
        source = resolve(target.config.model)
    model = load_model(source, chosen, choose_device(target.config))
    if target.checkpoint is not None:
        load_weights(target.checkpoint, model)
    return model, Tokenizer(source, model.config), source


def needs_task(config: Config, name: str) -> TaskSection:
    """The task of what `name` named; ValueError for a bare model, which has none, or for nothing."""
    if config.task.name == "none":
        if not (Path(name).exists() or name.startswith("pypi:")):
            raise ValueError(
                f"{name}: no such folder; give a run folder, a checkpoint or a TOML file (a model, of a "
                "hub too, needs a file's task: samebit eval FILE.toml --model MODEL)"
            )
        raise ValueError(
            f"{config.model!r} is no run folder, checkpoint or TOML file, and a bare model has no "
            f"task; samebit eval FILE.toml --model {config.model} takes the file's task"
        )
    return config.task
