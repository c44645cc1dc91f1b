"""Tables of settings: every kind of field that a module outside the package may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from samebit.option_table import build_options, convert, nearest


@dataclass(frozen=True, kw_only=True)
class Settings:
    size: int
    rate: float = 0.5
    mode: Literal["a", "b"] = "a"
    limit: float | None = 1.0
    mixed: int | str = 0
    names: tuple[str, ...] = ()
    numbers: list[int] = field(default_factory=list)
    table: Mapping[str, int] = field(default_factory=dict)
    bare: dict = field(default_factory=dict)  # type: ignore[type-arg]
    anything: Any = None


def build(**table: Any) -> Settings:
    return build_options(Settings, table, "here")


def test_every_kind_is_read():
    found = build_options(
        Settings,
        {
            "size": 3, "rate": 2, "mode": "b", "limit": "none", "mixed": "x", "names": ["a", "b"],
            "numbers": (1, 2), "table": {"k": 1}, "bare": {"k": [1]}, "anything": [None],
        },
        "here",
    )  # fmt: skip
    assert found == Settings(
        size=3, rate=2.0, mode="b", limit=None, mixed="x", names=("a", "b"), numbers=[1, 2],
        table={"k": 1}, bare={"k": [1]}, anything=[None],
    )  # fmt: skip
    assert isinstance(found.rate, float) and build(size=1, mixed=4).mixed == 4


@pytest.mark.parametrize(
    ("hint", "kind"),
    [(int | float, int), (float | int, float), (list[int] | tuple[int, ...], list)],
)
def test_a_union_is_read_as_the_first_choice_that_fits(hint: Any, kind: type):
    value = [3] if kind is list else 3
    assert type(convert(value, hint, "here")) is kind


def test_dashes_are_underscores_and_a_key_given_twice_is_refused():
    table = {"size": 1, "max-size": 2}
    with pytest.raises(ValueError, match="here: unknown key 'max-size'; did you mean 'size'"):
        build_options(Settings, table, "here")
    assert build_options(Settings, {"size": 1}, "here", {"length": ("size",)}).size == 1
    with pytest.raises(ValueError, match="'size' and 'length' both set size; keep one"):
        build_options(Settings, {"size": 1, "length": 2}, "here", {"length": ("size",)})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "here: key 'size' is required and missing"),
        ({"size": "3"}, "here.size = '3' is a string, must be a whole number; write 3 without"),
        ({"size": 3.0}, "here.size = 3.0 must be a whole number; write 3"),
        ({"size": True}, "here.size = True must be a whole number"),
        ({"size": 1, "rate": 10**400}, "must be a number a float can hold"),
        ({"size": 1, "mode": "c"}, "here.mode = 'c' must be one of a, b"),
        ({"size": 1, "limit": []}, "here.limit = [] must be a number, not a list"),
        ({"size": 1, "mixed": 1.5}, "here.mixed = 1.5 must be one of: a whole number, a string"),
        ({"size": 1, "names": "a"}, """here.names = 'a' must be a list, such as ["a"]"""),
        ({"size": 1, "names": ["a", 1]}, "here.names[1] = 1 must be a string"),
        ({"size": 1, "numbers": 1}, "here.numbers = 1 must be a list, such as [1]"),
        ({"size": 1, "table": {"k": "v"}}, "here.table.k = 'v' is a string, must be a whole"),
        ({"size": 1, "bare": 1}, "here.bare = 1 must be a table: [here.bare]"),
        ({"size": [1] * 99}, "... must be a whole number, not a list"),
    ],
)
def test_faults_name_the_place_the_value_and_the_fix(table: dict[str, Any], said: str):
    with pytest.raises(ValueError) as error:
        build(**table)
    assert said in str(error.value)


def test_the_nearest_name_or_all_of_them():
    assert nearest("clip_lo", ["clip_low", "cap"]) == "; did you mean 'clip_low'?"
    assert nearest("zzz", ["b", "a"]) == "; known: a, b"
