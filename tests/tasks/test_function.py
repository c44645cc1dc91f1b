"""The user's own reward function: both signatures, what it may return, what its errors do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from samebit.errors import RunLeft
from samebit.tasks._function import RewardFunction, as_reward, load_function
from samebit.tasks._stats import RewardStats
from samebit.types import Prompt

PROMPTS = [
    Prompt("a", (1,), "q1", columns={"answer": "1", "level": 3, "data_source": "gsm8k"}),
    Prompt("b", (1,), "q2", columns={"answer": "2", "extra_info": {"index": 7}}),
]


def make(tmp_path, body, name="reward", **changes):
    file = tmp_path / "rewards.py"
    file.write_text(body)
    settings = {"style": "trl", "completion_format": "text", "on_error": "stop", **changes}
    return RewardFunction(f"{file}:{name}", **settings)


def call(function, completions=("x", "yy")):
    stats = RewardStats()
    return function(PROMPTS, list(completions), stats), stats


def test_trl_function_gets_prompts_and_every_column_as_lists(tmp_path):
    function = make(
        tmp_path,
        "def reward(completions, prompts, **columns):\n"
        "    assert prompts == ['q1', 'q2'] and columns['level'] == [3, None]\n"
        "    assert columns['answer'] == ['1', '2']\n"
        "    return [1 if a == '1' else None for a in columns['answer']]\n",
    )
    assert call(function)[0] == [1.0, None]


def test_function_without_keywords_gets_only_what_it_names(tmp_path):
    function = make(tmp_path, "def reward(completions, answer):\n    return [0, 1.5]\n")
    assert call(function)[0] == [0.0, 1.5]


def test_messages_format_and_coroutines(tmp_path):
    function = make(
        tmp_path,
        "async def reward(completions, **_):\n"
        "    return [len(c[0]['content']) * (c[0]['role'] == 'assistant') for c in completions]\n",
        completion_format="messages",
    )
    assert call(function)[0] == [1.0, 2.0]


def test_verl_function_gets_one_sample_with_its_columns(tmp_path):
    function = make(
        tmp_path,
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if data_source == 'gsm8k':\n"
        "        return {'score': float(solution_str == ground_truth), 'acc': 1}\n"
        "    return extra_info['index']\n",
        name="compute_score",
        style="verl",
    )
    assert call(function, ("1", "x"))[0] == [1.0, 7.0]


RAISES = "def reward(completions, **_):\n    raise KeyError('my own mistake')\n"


@pytest.mark.parametrize(
    ("body", "line", "said"),
    [
        (RAISES, "line 2, in reward", "KeyError: 'my own mistake'"),
        (
            "def reward(completions, **_):\n    return [float('12a') for _ in completions]\n",
            "line 2, in ",  # a list comprehension has a frame of its own before Python 3.12
            "ValueError: could not convert string to float: '12a'",
        ),
        (
            "import json\ndef reward(**_):\n    return other()\ndef other():\n"
            "    return json.loads('{')\n",
            "line 5, in other",
            "JSONDecodeError: Expecting property name",
        ),
        (
            "async def reward(completions, **_):\n    raise SystemExit(3)\n",
            "line 2, in reward",
            "SystemExit: 3",
        ),
    ],
)
def test_an_error_names_its_file_line_and_function(tmp_path, body, line, said):
    with pytest.raises(ValueError, match="--debug shows the traceback") as caught:
        call(make(tmp_path, body))
    text = str(caught.value)
    assert f"reward function {tmp_path}/rewards.py:reward raised {said}" in text
    assert f"({tmp_path}/rewards.py, {line}" in text
    assert caught.value.__cause__ is not None


def test_a_call_that_the_function_does_not_take_has_no_place(tmp_path):
    function = make(tmp_path, "def reward(solution_str):\n    return 1\n", style="verl")
    with pytest.raises(ValueError, match=r"TypeError: .*'data_source' \(--debug"):
        call(function)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import json\njson.loads('{')\n", r"JSONDecodeError: .*\.py, line 2, in <module>"),
        ("x = 1\ndef reward(:\n", r"SyntaxError: invalid syntax \(.*\.py, line 2;"),
        ("import no_such_package\n", r"No module named 'no_such_package' \(.*\.py, line 1, in"),
    ],
)
def test_an_error_of_the_module_names_its_file_and_line(tmp_path, monkeypatch, body, said):
    with pytest.raises(ValueError, match=said):
        make(tmp_path, body)
    name = f"mine_{abs(hash(body))}"
    Path(tmp_path, f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"reward function {name}:f raised "):
        load_function(f"{name}:f")


@pytest.mark.parametrize("on_error", ["stop", "no-verdict"])
def test_a_signal_while_the_function_runs_is_no_error_of_it(tmp_path, monkeypatch, on_error):
    def left(**_):
        raise RunLeft("left on SIGTERM", 143)

    function = make(tmp_path, "def reward(**_): ...\n", on_error=on_error)
    monkeypatch.setattr(function, "_function", left)
    with pytest.raises(RunLeft):
        call(function)


def test_an_error_counts_as_no_verdict_where_set_so(tmp_path):
    rewards, stats = call(make(tmp_path, RAISES, on_error="no-verdict"))
    assert rewards == [None, None]
    assert stats["crashes"] == 2


def test_one_failing_sample_leaves_the_others_their_verdicts(tmp_path):
    body = "def reward(solution_str, **_):\n    return 1 / len(solution_str)\n"
    function = make(tmp_path, body, style="verl", on_error="no-verdict")
    rewards, stats = call(function, ("", "yy"))
    assert rewards == [None, 0.5]
    assert stats["crashes"] == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), (True, 1.0), (3, 3.0), (np.float32(0.5), 0.5), (np.array(2.0), 2.0)],
)
def test_numbers_of_every_kind_are_rewards(value, expected):
    assert as_reward(value, "f") == expected


@pytest.mark.parametrize("value", ["1", b"1", [1], {}, float("nan"), float("inf"), np.zeros(2)])
def test_everything_else_is_refused(value):
    with pytest.raises(ValueError, match="f returned"):
        as_reward(value, "f")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "1 rewards for 2 completions"),
        ("return 1.0", "returned a float"),
        ("return 'ab'", "returned a str"),
        ("return [1.0, float('nan')]", "item 1, returned nan"),
    ],
)
def test_a_wrong_return_value_is_named(tmp_path, body, message):
    with pytest.raises(ValueError, match=message):
        call(make(tmp_path, f"def reward(completions, **_):\n    {body}\n"))


def test_where_the_function_is_looked_for(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def reward_length(completions): return []\nnumber = 3\n")
    assert load_function("math:sqrt")(4) == 2
    for path, message in [
        ("no_colon", "expected path/to/file.py:function"),
        (f"{tmp_path}/missing.py:f", "no file"),
        (f"{file}:reward_lenght", "did you mean 'reward_length'"),
        (f"{file}:number", "cannot be called"),
        ("no_such_module:f", "no module 'no_such_module'"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_function(path)


@pytest.mark.parametrize("value", [10**400, 1e39, -1e308])
def test_a_number_beyond_fp32_is_no_reward(value):
    with pytest.raises(ValueError, match="finite in FP32"):
        as_reward(value, "reward")


def test_a_parameter_that_no_column_fills_is_named(tmp_path):
    function = make(tmp_path, "def reward(completions, levels, weight=1):\n    return [1.0] * 2\n")
    with pytest.raises(ValueError, match=r"'levels', which is no column.*did you mean 'level'"):
        call(function)
    fine = make(
        tmp_path, "def second(completions, level, weight=1):\n    return [1.0] * 2\n", "second"
    )
    assert call(fine)[0] == [1.0, 1.0]


@pytest.mark.parametrize("on_error", ["stop", "no-verdict"])
def test_a_reward_function_that_exits_is_an_error_like_any_other(tmp_path, on_error):
    body = "def reward(completions, **columns):\n    raise SystemExit(0)\n"
    function = make(tmp_path, body, on_error=on_error)
    if on_error == "stop":
        with pytest.raises(ValueError, match="raised SystemExit: 0"):
            call(function)
        return
    rewards, stats = call(function)
    assert rewards == [None, None] and stats["crashes"] == 2
