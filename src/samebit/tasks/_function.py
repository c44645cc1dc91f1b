"""The user's own reward function, in TRL's list signature or verl's `compute_score`."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from samebit.errors import RunLeft
from samebit.option_table import nearest
from samebit.tasks._stats import RewardStats
from samebit.types import Prompt

LARGEST_REWARD = float(2**128 - 2**104)
"""FP32's largest number; the squares of deviations of such rewards are finite in FP64."""


class RewardFunctionError(ValueError):
    """What is wrong with a user's reward function, in one line that names it."""


@contextmanager
def _own_fault(path: str, file: str = "") -> Iterator[None]:
    """Turn what the user's code raises into RewardFunctionError, naming file, line and function.

    The line is the innermost of `file`, which is where the user can act, or else of all files.
    """
    try:
        yield
    except (RunLeft, RewardFunctionError):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames = [f for f in frames if f.filename != __file__]
        frames = [f for f in frames if f.filename == file] or frames
        what, where = str(error), ""
        if isinstance(error, SyntaxError):
            what, where = error.msg, f"{error.filename}, line {error.lineno}; "
        elif frames:
            where = f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}; "
        raise RewardFunctionError(
            f"reward function {path} raised {type(error).__name__}: {what} "
            f"({where}--debug shows the traceback)"
        ) from error


def load_function(path: str) -> Callable[..., Any]:
    """Import `path/to/file.py:function` or `package.module:function`.

    ValueError where the file, the module or the function does not exist, and, naming file and line,
    where the user's module raises.
    """
    place, mark, name = path.rpartition(":")
    if not mark or not place or not name:
        raise ValueError(
            f"reward_function = {path!r}: expected path/to/file.py:function or "
            "package.module:function."
        )
    module = _load_file(place, path) if place.endswith(".py") else _load_module(place, path)
    if name not in vars(module):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"reward_function = {path!r}: no {name!r} there{nearest(name, known)}")
    function = vars(module)[name]
    if not callable(function):
        raise ValueError(f"reward_function = {path!r}: {name!r} cannot be called.")
    return function


def _load_file(place: str, path: str) -> Any:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"reward_function = {path!r}: no file {file}.")
    # One module a file, however often it is loaded, under a name nothing else can have.
    name = f"samebit_reward_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _own_fault(path, str(file)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(place: str, path: str) -> Any:
    with _own_fault(path):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise RewardFunctionError(
                f"reward_function = {path!r}: no module {error.name!r} can be imported."
            ) from error


def as_reward(value: Any, where: str) -> float | None:
    """Return a finite float, or None for None.

    Booleans, integers, numpy scalars and 0-d tensors are numbers; text, lists, NaN and infinity are
    refused with a ValueError.
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes)):
        raise ValueError(f"{where} returned {value!r}: expected a number or None.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where} returned a {type(value).__name__}: expected a number or None."
        ) from error
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{where} returned {number}: expected a number, finite in FP32, or None.")
    return number


class RewardFunction:
    """Calls the user's function; its errors stop the run or are counted, as the setting says."""

    def __init__(
        self,
        path: str,
        *,
        style: Literal["trl", "verl"],
        completion_format: Literal["text", "messages"],
        on_error: Literal["stop", "no-verdict"],
    ) -> None:
        self._path = path
        self._function = load_function(path)
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        self._file = "" if code is None else code.co_filename
        self._style = style
        self._format = completion_format
        self._on_error = on_error
        if style == "trl":
            self._accepted = self._accepted_names()

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[str], stats: RewardStats
    ) -> list[float | None]:
        """Return a reward per completion."""
        if not prompts:
            return []
        if self._style == "verl":
            return [
                self._guard(lambda p=p, c=c: [self._verl(p, c)], 1, stats)[0]
                for p, c in zip(prompts, completions, strict=True)
            ]
        return self._guard(lambda: self._trl(prompts, completions), len(prompts), stats)

    def _guard(
        self, call: Callable[[], list[float | None]], count: int, stats: RewardStats
    ) -> list[float | None]:
        try:
            return call()
        except RunLeft:
            raise
        except Exception:
            if self._on_error == "stop":
                raise
            stats.add("crashes", count)
            return [None] * count

    def _called(self, **arguments: Any) -> Any:
        """What the user's function returns; RewardFunctionError where it raises."""
        with _own_fault(self._path, self._file):
            returned = self._function(**arguments)
            return asyncio.run(returned) if inspect.iscoroutine(returned) else returned

    def _accepted_names(self) -> frozenset[str] | None:
        """Return the keyword names the function takes, or None where it takes any."""
        parameters = inspect.signature(self._function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        return frozenset(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL)

    def _require_columns(self, given: Set[str]) -> None:
        """ValueError naming the first parameter without a default that no column fills."""
        for parameter in inspect.signature(self._function).parameters.values():
            variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if variable or parameter.default is not parameter.empty or parameter.name in given:
                continue
            raise ValueError(
                f"reward function {self._path} needs {parameter.name!r}, which is no column of "
                f"this task{nearest(parameter.name, given)}"
            )

    def _trl(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | None]:
        given: list[Any] = list(completions)
        if self._format == "messages":
            given = [[{"role": "assistant", "content": text}] for text in completions]
        shown = [list(p.messages) if p.messages else p.text for p in prompts]
        names = sorted({name for prompt in prompts for name in prompt.columns})
        keywords: dict[str, Any] = {
            name: [prompt.columns.get(name) for prompt in prompts] for name in names
        }
        keywords["prompts"] = shown
        self._require_columns({"completions", *keywords})
        if self._accepted is not None:
            keywords = {key: value for key, value in keywords.items() if key in self._accepted}
        returned = self._called(completions=given, **keywords)
        if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__len__"):
            raise ValueError(
                f"reward function {self._path} returned a {type(returned).__name__}: "
                "expected a list with one number or None per completion."
            )
        if len(returned) != len(completions):
            raise ValueError(
                f"reward function {self._path} returned {len(returned)} rewards for "
                f"{len(completions)} completions."
            )
        return [
            as_reward(value, f"reward function {self._path}, item {i},")
            for i, value in enumerate(returned)
        ]

    def _verl(self, prompt: Prompt, completion: str) -> float | None:
        columns = prompt.columns
        returned = self._called(
            data_source=columns.get("data_source"),
            solution_str=completion,
            ground_truth=columns.get("answer"),
            extra_info=columns.get("extra_info"),
        )
        if isinstance(returned, Mapping):
            if "score" not in returned:
                raise ValueError(
                    f"reward function {self._path} returned a table without 'score': "
                    f"{sorted(map(str, returned))}."
                )
            returned = returned["score"]
        return as_reward(returned, f"reward function {self._path}")
