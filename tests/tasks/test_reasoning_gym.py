"""The reasoning-gym task: pure rows, disjoint splits, strict and safe scoring."""

from __future__ import annotations

import contextlib
import io
import pathlib
import sys

import pytest

from samebit.tasks._gym_scorers import UNSAFE
from samebit.tasks.api import load_task

ONE_DIGIT = {
    "dataset": "chain_sum",
    "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "keep": r" \+ ",
    "shots": 3,
    "system": "Answer with the number only.",
}


def make(tokenizer, **changes):
    task = load_task("reasoning_gym", {**ONE_DIGIT, **changes})
    task.bind(tokenizer)
    return task


def test_rows_are_a_pure_function_of_seed_split_and_index(tokenizer):
    first, second = make(tokenizer), make(tokenizer)
    forward = first.prompts("train", 0, 50)
    backward = [second.prompts("train", i, 1)[0] for i in reversed(range(50))]
    assert forward == backward[::-1]
    assert first.held_out() == second.held_out()
    assert [p.text for p in make(tokenizer, seed=1).prompts("train", 0, 50)] != [
        p.text for p in forward
    ]


def test_held_out_set_does_not_depend_on_the_seed(tokenizer):
    assert make(tokenizer).held_out() == make(tokenizer, seed=7).held_out()


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_splits_and_shots_are_disjoint_by_text(tokenizer, share):
    task = make(tokenizer, held_out_share=share)
    train = {prompt.text for prompt in task.prompts("train", 0, 2000)}
    held_out = [prompt.text for prompt in task.held_out()]
    shots = {message["content"] for message in task.shots if message["role"] == "user"}
    assert len(held_out) == len(set(held_out)) > 0
    assert not train & set(held_out)
    assert not shots & (train | set(held_out))
    assert len(shots) == 3
    # One digit plus one digit has 100 questions in all: together the three sets hold every one.
    assert len(train) + len(held_out) + len(shots) == 100


def test_train_questions_follow_the_filter_and_carry_the_right_answer(tokenizer):
    for prompt in make(tokenizer).prompts("train", 0, 100):
        left, right = prompt.text.split(": ")[1].removesuffix(" =").split(" + ")
        assert int(left) + int(right) == int(prompt.columns["answer"])


def test_rendering_puts_system_shots_and_question_in_order(tokenizer):
    prompt = make(tokenizer).prompts("train", 0, 1)[0]
    assert [m["role"] for m in prompt.messages] == ["system"] + ["user", "assistant"] * 3 + ["user"]
    assert prompt.messages[0]["content"] == "Answer with the number only."
    assert prompt.messages[-1]["content"] == prompt.text
    assert tokenizer.decode(prompt.ids).endswith(prompt.text + "assistant\n")


def test_scoring_is_strict_without_credit_for_length(tokenizer):
    task = make(tokenizer)
    prompt = task.prompts("train", 0, 1)[0]
    gold = prompt.columns["answer"]
    completions = [gold, f" {gold}\n", f"The answer is {gold}", f"{gold} {gold}", "", "banana"]
    assert task.reward([prompt] * 6, completions) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert task.stats["graded"] == 6


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'reasoning_gym'"):
        load_task("reasoning-gim", {})
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
        load_task("reasoning_gym", {"dataset": "chain_sun"})
    with pytest.raises(ValueError, match=r"parameters.max_term: .*did you mean 'max_terms'"):
        load_task("reasoning_gym", {"dataset": "chain_sum", "parameters": {"max_term": 2}})
    with pytest.raises(ValueError, match=r"unknown key 'shotz'.*did you mean 'shots'"):
        load_task("reasoning_gym", {"dataset": "chain_sum", "shotz": 2})
    with pytest.raises(ValueError, match="'dataset' is required"):
        load_task("reasoning_gym", {})
    with pytest.raises(ValueError, match="shots = True must be a whole number"):
        load_task("reasoning_gym", {"dataset": "chain_sum", "shots": True})
    with pytest.raises(ValueError, match="refused by reasoning-gym"):
        load_task("reasoning_gym", {"dataset": "chain_sum", "parameters": {"min_terms": 0}})


def test_a_filter_that_leaves_nothing_says_so(tokenizer):
    with pytest.raises(ValueError, match="0 distinct questions"):
        make(tokenizer, keep="no such question")


HOSTILE = [
    "__import__('os').system('touch {marker}')",
    "exec(\"open('{marker}', 'w')\")",
    "(lambda: open('{marker}', 'w'))()",
    "9**9**9",
    "factorial(10**8)",
    "(" * 200_000,
    "1" * 100_000,
    "\x00\ud800",
]


@pytest.mark.parametrize("dataset", ["chain_sum", "countdown", "puzzle24", "n_queens"])
def test_hostile_answers_earn_nothing_and_run_nothing(tokenizer, tmp_path, dataset):
    task = load_task("reasoning_gym", {"dataset": dataset, "held_out_size": 0})
    task.bind(tokenizer)
    marker = tmp_path / "marker"
    prompt = task.prompts("train", 0, 1)[0]
    completions = [text.replace("{marker}", str(marker)) for text in HOSTILE]
    assert task.reward([prompt] * len(HOSTILE), completions) == [0.0] * len(HOSTILE)
    assert not pathlib.Path(marker).exists()


@pytest.mark.parametrize("dataset", ["countdown", "puzzle24"])
def test_safe_scorers_give_the_gold_answer_everything(tokenizer, dataset):
    task = load_task("reasoning_gym", {"dataset": dataset})
    task.bind(tokenizer)
    prompts = task.prompts("train", 0, 10)
    golds = [prompt.columns["answer"] for prompt in prompts]
    assert task.reward(prompts, golds) == [1.0] * 10
    assert task.reward(prompts, [f"{gold} + 0" for gold in golds]) == [0.0] * 10
    assert task.reward(prompts, [f"({gold}) + 1 - 1" for gold in golds]) == [0.0] * 10


def test_a_scorer_that_evaluates_answers_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"countdown evaluates the model's answer as code"):
        load_task("reasoning_gym", {"dataset": "countdown", "scoring": "dataset"})


def test_the_list_of_unsafe_scorers_is_complete_for_the_installed_package():
    """Watch what every scorer compiles from text when it is given an answer no data set has."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    canary = "[7103, 7103]"
    current: list[str] = []
    caught: set[str] = set()

    def watch(event, arguments):
        if event == "compile" and current and arguments[1] in ("<string>", b"<string>"):
            source = arguments[0]
            text = source.decode() if isinstance(source, bytes) else str(source)
            if "7103" in text:
                caught.add(current[0])

    sys.addaudithook(watch)
    for name in sorted(set(DATASETS) - {"composite"}):
        dataset = create_dataset(name, seed=0)
        with contextlib.redirect_stdout(io.StringIO()):
            entry = dataset[0]
            current.append(name)
            for answer in (canary, "7103"):
                with contextlib.suppress(Exception):
                    dataset.score_answer(answer, entry)
            current.clear()
    assert caught == set(UNSAFE) - {"composite"}


def test_the_data_sets_own_scorer_pays_full_scores_only(tokenizer):
    table = {"dataset": "chain_sum", "scoring": "dataset", "grading_workers": 1}
    task = load_task("reasoning_gym", table)
    task.bind(tokenizer)
    prompt = task.prompts("train", 0, 1)[0]
    gold = prompt.columns["answer"]
    completions = [gold, f" {gold} ", f"It is {gold}", "wrong"]
    assert task.reward([prompt] * 4, completions) == [1.0, 1.0, 0.0, 0.0]
    task.close()
    partial = load_task("reasoning_gym", {**table, "partial_credit": True})
    partial.bind(tokenizer)
    assert 0.0 < partial.reward([prompt], [f"It is {gold}"])[0] < 1.0
    partial.close()


def test_a_data_set_without_answers_needs_its_own_scorer(tokenizer):
    with pytest.raises(ValueError, match="gives no answer to compare with"):
        load_task("reasoning_gym", {"dataset": "graph_color"})
    with pytest.raises(ValueError, match="partial_credit needs scoring = dataset"):
        load_task("reasoning_gym", {"dataset": "gcd", "partial_credit": True})


def test_a_data_set_with_prepared_items_stays_inside_them(tokenizer):
    task = load_task("reasoning_gym", {"dataset": "word_ladder", "held_out_size": 4})
    task.bind(tokenizer)
    assert len(task.prompts("train", 10**9, 5)) == 5
    assert len(task.held_out()) == 4


def test_questions_over_the_limit_are_passed_over(tokenizer):
    table = {"dataset": "chain_sum", "on_long_prompt": "skip", "held_out_size": 16}
    free = make_plain(tokenizer, table)
    lengths = sorted(len(prompt.ids) for prompt in free.prompts("train", 0, 200))
    limit = lengths[100]
    task = make_plain(tokenizer, {**table, "max_prompt_tokens": limit})
    prompts = task.prompts("train", 0, 200)
    assert max(len(prompt.ids) for prompt in [*prompts, *task.held_out()]) <= limit < lengths[-1]
    kept = {prompt.id: prompt for prompt in prompts}
    for prompt in free.prompts("train", 0, 200):
        if len(prompt.ids) <= limit:
            assert kept[prompt.id] == prompt


def make_plain(tokenizer, table):
    task = load_task("reasoning_gym", table)
    task.bind(tokenizer)
    return task
