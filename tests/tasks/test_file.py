"""File tasks: every row checked up front, exact resumption, disjoint splits, grading."""

from __future__ import annotations

import builtins
import csv
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebit.tasks.api import load_task


@pytest.fixture
def write(tmp_path):
    def write(rows, name="rows.jsonl", *, newline="\n", last_newline=True, encoding="utf-8"):
        path = tmp_path / name
        text = newline.join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_bytes((text + (newline if last_newline else "")).encode(encoding))
        return str(path)

    return write


def load(path, tokenizer=None, **table):
    files = [path] if isinstance(path, str) else path
    task = load_task("file", {"files": files, "held_out_share": 0.0, **table})
    if tokenizer is not None:
        task.bind(tokenizer)
    return task


def texts(task):
    return sorted(row.question for row in task.rows("train", 0, task.train_count))


def numbered(count):
    return [{"prompt": f"question {i}", "answer": i} for i in range(count)]


SEPARATORS = ["a\u2028b", "a\u2029b", "a\u0085b", "emoji \U0001f600", "x\x0b\x0c\x1cy"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("last_newline", [True, False])
@pytest.mark.parametrize("escaped", [True, False])
def test_only_a_line_feed_ends_a_record(write, newline, last_newline, escaped):
    rows = [
        json.dumps({"prompt": text, "answer": "1"}, ensure_ascii=escaped) for text in SEPARATORS
    ]
    path = write(rows, newline=newline, last_newline=last_newline)
    assert texts(load(path)) == sorted(SEPARATORS)


@pytest.mark.parametrize(
    ("encoding", "setting"),
    [("utf-8-sig", "utf-8"), ("utf-16", "utf-8"), ("utf-32", "utf-8"), ("latin-1", "latin-1")],
)
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_encodings_and_marks(write, encoding, setting, kind):
    rows = [json.dumps({"prompt": "été", "answer": 1}, ensure_ascii=False)]
    if kind == "csv":
        rows = ["prompt,answer", "été,1"]
    path = write(rows, f"rows.{kind}", encoding=encoding)
    assert texts(load(path, encoding=setting)) == ["été"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_carriage_return_between_fields_does_not_end_a_record(write, encoding):
    rows = [f'{{"prompt": "{text}",\r "answer": 1}}' for text in "ab"]
    assert texts(load(write(rows, encoding=encoding))) == ["a", "b"]


BAD = [
    ("not json", "not a JSON object"),
    ('["a list"]', "a JSON list, expected an object"),
    ('{"prompt": "p", "answer": NaN}', "NaN is not JSON"),
    ('{"prompt": "p", "prompt": "q", "answer": 1}', "keys given twice: prompt"),
    ("[" * 100_000, "nested too deeply"),
    ('{"prompt": "p", "answer": ' + "9" * 5000 + "}", "not a JSON object"),
    ({"prompt": "p", "anwser": 1}, "no column 'answer'; did you mean 'anwser'?"),
    ({"question": "p", "answer": 1}, "no column 'prompt'; known: answer, question"),
    ({"prompt": "p", "answer": None}, "column 'answer': missing"),
    ({"prompt": "p", "answer": True}, "column 'answer': a bool"),
    ({"prompt": "p", "answer": {"a": 1}}, "column 'answer': a dict"),
    ({"prompt": "p", "answer": " "}, "column 'answer': empty text"),
    ({"prompt": "p", "answer": []}, "column 'answer': an empty list"),
    ({"prompt": "p", "answer": "####"}, "holds nothing by the rule"),
    ({"prompt": 3, "answer": 1}, "column 'prompt': a int"),
    ({"prompt": "", "answer": 1}, "column 'prompt': empty text"),
    ({"prompt": "a\ud83d", "answer": 1}, "a lone surrogate"),
    ({"prompt": [], "answer": 1}, "an empty chat"),
    ({"prompt": [{"role": "user"}], "answer": 1}, "role and content"),
    ({"prompt": [{"role": "bot", "content": "x"}], "answer": 1}, "role 'bot'"),
    ({"prompt": [{"role": "user", "content": [{}]}], "answer": 1}, "content is a list"),
    ({"prompt": [{"role": "assistant", "content": "x"}], "answer": 1}, "ends with the assistant"),
    ({"prompt": "p", "reward_model": {"style": "rule"}}, "'ground_truth' inside 'reward_model'"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_stops_with_its_place_or_is_skipped_and_counted(write, row, message):
    path = write([{"prompt": "good", "answer": 1}, row, {"prompt": "also good", "answer": 2}])
    with pytest.raises(ValueError) as caught:
        load(path)
    assert f"{path}:2: " in str(caught.value)
    assert message in str(caught.value)
    task = load(path, on_bad_row="skip")
    assert texts(task) == ["also good", "good"]
    assert (task.report.rows, task.report.bad_rows) == (3, 1)
    assert message in task.report.first_bad[0]


def test_undecodable_bytes_spoil_their_row_only(tmp_path):
    for name, lines in {
        "rows.jsonl": [b'{"prompt": "a", "answer": 1}', b'{"prompt": "\xff", "answer": 1}'],
        "rows.csv": [b"prompt,answer", b"a,1", b"\xff,1"],
        "rows.tsv": [b"prompt\tanswer", b"a\t1", b"\xff\t1"],
    }.items():
        path = tmp_path / name
        path.write_bytes(b"\n".join(lines))
        with pytest.raises(ValueError, match="not utf-8"):
            load(str(path))
        task = load(str(path), on_bad_row="skip")
        assert (texts(task), task.report.bad_rows) == (["a"], 1)


def test_a_huge_row_is_bad_and_the_next_one_is_read(write):
    for name, rows in {
        "rows.jsonl": [{"prompt": "x" * 5000, "answer": 1}, {"prompt": "y", "answer": 1}],
        "rows.csv": ["prompt,answer", "x" * 5000 + ",1", "y,1"],
    }.items():
        path = write(rows, name)
        with pytest.raises(ValueError, match="longer than 1000 bytes"):
            load(path, max_row_bytes=1000)
        assert texts(load(path, max_row_bytes=1000, on_bad_row="skip")) == ["y"]
        assert load(path).train_count == 2


def test_csv_rows_with_quotes_line_ends_and_wrong_widths(write):
    rows = ["prompt,answer", '"a, ""b""\nc\u2028d",1', "short", "", "x,2"]
    path = write(rows, "rows.csv")
    with pytest.raises(ValueError, match=r"rows\.csv:4: 1 fields, the header has 2"):
        load(path)
    task = load(path, on_bad_row="skip")
    assert texts(task) == ['a, "b"\nc\u2028d', "x"]
    assert task.report.bad_rows == 1


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("rows.jsonl", None, "no such file"),
        ("rows.jsonl", "", "the file is empty"),
        ("rows.jsonl", "\n\n", "no training row is left"),
        ("rows.csv", "prompt,answer\n", "no training row is left"),
        ("rows.csv", "prompt,prompt\n", "empty or repeated"),
        ("rows.txt", "x", r"unknown kind '\.txt'; known: \.jsonl"),
        ("rows.json", "{}", r"Rename it to \.jsonl"),
        ("rows.parquet", "not parquet", "not a readable Parquet file"),
    ],
)
def test_what_is_wrong_with_a_whole_file(tmp_path, name, rows, message):
    path = tmp_path / name
    if rows is not None:
        path.write_text(rows)
    for policy in ("stop", "skip"):
        with pytest.raises(ValueError, match=message):
            load(str(path), on_bad_row=policy)


def test_a_folder_is_named_as_one(tmp_path):
    with pytest.raises(ValueError, match=r"a folder; name the files in it"):
        load(str(tmp_path))


def test_patterns_and_unknown_encodings(write, tmp_path):
    write(numbered(2), "a1.jsonl")
    path = write([{"prompt": "other", "answer": 1}], "a2.jsonl")
    assert load(str(tmp_path / "a*.jsonl")).train_count == 3
    with pytest.raises(ValueError, match="nothing matches"):
        load(str(tmp_path / "b*.jsonl"))
    with pytest.raises(ValueError, match="encoding = 'utf-9'"):
        load(path, encoding="utf-9")
    with pytest.raises(ValueError, match="at least one"):
        load([])


def test_whole_numbers_and_their_text_grade_alike(write, tokenizer):
    rows = [
        {"prompt": "int", "answer": 42},
        {"prompt": "text", "answer": "42"},
        {"prompt": "float", "answer": 42.0},
        {"prompt": "solution", "answer": "6 * 7\n#### 42"},
        {"prompt": "any of", "answer": ["41", 42]},
    ]
    task = load(write(rows), tokenizer)
    prompts = task.prompts("train", 0, 5)
    assert task.reward(prompts, ["42"] * 5) == [1.0] * 5
    assert task.reward(prompts, [r"so \boxed{42}"] * 5) == [1.0] * 5
    assert task.reward(prompts, ["43"] * 5) == [0.0] * 5
    assert {p.text: p.columns["answer"] for p in prompts}["int"] == "42"


def test_verl_parquet_columns(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(3)
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = load(str(path), tokenizer)
    prompts = task.prompts("train", 0, 3)
    assert task.reward(prompts, [p.columns["answer"] for p in prompts]) == [1.0] * 3
    assert {p.text: p.columns["extra_info"]["index"] for p in prompts} == {
        "q0": 0,
        "q1": 1,
        "q2": 2,
    }
    assert all(p.columns["data_source"] == "gsm8k" for p in prompts)

    rows[1]["reward_model"] = None
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(ValueError, match=r"row 1: no column 'ground_truth' inside 'reward_model'"):
        load(str(path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.split(".")[0] == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}", name="pyarrow")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'samebit\[parquet\]'"):
        load(str(tmp_path / "rows.parquet"))


def test_train_stream_is_a_new_order_each_epoch_addressed_by_index(write, tokenizer):
    path = write(numbered(20))
    task = load(path, tokenizer)
    stream = [prompt.text for prompt in task.prompts("train", 0, 60)]
    epochs = [stream[:20], stream[20:40], stream[40:]]
    assert all(sorted(epoch) == sorted(stream[:20]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    resumed = load(path, tokenizer)
    assert [p.text for p in resumed.prompts("train", 37, 10)] == stream[37:47]
    assert [p.text for p in load(path, tokenizer, seed=1).prompts("train", 0, 20)] != epochs[0]
    plain = load(path, tokenizer, shuffle=False).prompts("train", 0, 40)
    assert [p.text for p in plain] == [f"question {i}" for i in range(20)] * 2


def test_held_out_share_is_disjoint_by_text_whatever_the_order_and_spacing(write):
    rows = numbered(300) + [{"prompt": f" question  {i} ", "answer": i} for i in range(300)]
    task = load(write(rows), held_out_share=0.2)
    train = {" ".join(text.split()) for text in texts(task)}
    held_out = [" ".join(row.question.split()) for row in task.rows("held_out", 0, 40)]
    assert not train & set(held_out)
    assert len(held_out) == len(set(held_out)) == 40
    assert 30 < 300 - len(train) < 90
    backwards = load(write(rows[::-1], "backwards.jsonl"), held_out_share=0.2)
    assert {" ".join(text.split()) for text in texts(backwards)} == train


def test_held_out_file_takes_its_questions_out_of_training(write, tokenizer):
    train = write(numbered(10), "train.jsonl")
    held = write([*numbered(3), {"prompt": "new", "answer": 1}, numbered(1)[0]], "held.jsonl")
    task = load(train, tokenizer, held_out_files=[held])
    assert texts(task) == sorted(f"question {i}" for i in range(3, 10))
    assert [p.text for p in task.held_out()] == ["question 0", "question 1", "question 2", "new"]
    assert (task.report.overlap, task.report.duplicates) == (3, 1)


def test_duplicate_prompts_stay_and_are_counted(write):
    task = load(write(numbered(3) + numbered(2)))
    assert (task.train_count, task.report.duplicates) == (5, 2)


def test_long_rows_by_each_policy(write, tokenizer):
    # Rendered: "user\n" + text + end + "assistant\n" is the text and 16 tokens more.
    path = write([{"prompt": "x" * n, "answer": 1} for n in (19, 20, 21)])
    with pytest.raises(ValueError, match="has 37 tokens after the chat template"):
        load(path, tokenizer, max_prompt_tokens=36)
    task = load(path, tokenizer, max_prompt_tokens=36, on_long_prompt="skip")
    assert (task.train_count, task.report.too_long) == (2, 1)
    assert {len(p.ids) for p in task.prompts("train", 0, 4)} == {35, 36}
    cut = load(path, tokenizer, max_prompt_tokens=36, on_long_prompt="truncate_left")
    assert sorted(len(p.ids) for p in cut.prompts("train", 0, 3)) == [35, 36, 36]
    with pytest.raises(ValueError, match="no training row is left"):
        load(path, tokenizer, max_prompt_tokens=10, on_long_prompt="skip")


def test_a_reward_function_replaces_the_verifier(write, tmp_path, tokenizer):
    (tmp_path / "mine.py").write_text(
        "def f(completions, level, **_):\n    return [n if c else None for c, n in "
        "zip(completions, level)]\n"
    )
    path = write([{"prompt": "p", "answer": 1, "level": 5}])
    task = load(path, tokenizer, reward_function=f"{tmp_path}/mine.py:f")
    assert task.reward(task.prompts("train", 0, 2), ["a", ""]) == [5.0, None]
    assert task.stats.metrics()["reward/no_verdict_count"] == 1


SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(data=st.binary(max_size=200))
@settings(max_examples=300, **SLOW)
@pytest.mark.parametrize("name", ["fuzz.jsonl", "fuzz.csv", "fuzz.parquet"])
def test_any_bytes_are_read_or_refused(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    for policy in ("stop", "skip"):
        try:
            load(str(path), on_bad_row=policy)
        except ValueError as error:
            assert name in str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
ROWS = st.dictionaries(st.sampled_from(["prompt", "answer", "reward_model", "x"]), VALUES)


@given(rows=st.lists(ROWS, min_size=1, max_size=4))
@settings(max_examples=500, **SLOW)
def test_any_objects_become_rows_or_are_counted(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    good = {"prompt": "good", "answer": 1}
    (tmp_path / "good.jsonl").write_text(json.dumps(good))
    task = load([str(path), str(tmp_path / "good.jsonl")], on_bad_row="skip")
    assert task.train_count + task.report.bad_rows == task.report.rows == len(rows) + 1


@given(rows=st.lists(st.tuples(st.text(min_size=1), st.integers()), min_size=1, max_size=5))
@settings(max_examples=300, **SLOW)
def test_what_is_written_is_what_is_read(tmp_path, rows):
    rows = [(text, value) for text, value in rows if text.strip() and "\0" not in text]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"".join(
            json.dumps({"prompt": t, "answer": v}, ensure_ascii=False).encode() + b"\n"
            for t, v in [*rows, ("last", 0)]
        )
    )
    assert texts(load(str(path))) == sorted([*(t for t, _ in rows), "last"])
    table = tmp_path / "rows.csv"
    with table.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("prompt", "answer"), *rows, ("last", 0)])
    assert texts(load(str(table))) == sorted([*(t for t, _ in rows), "last"])
