"""One BOS, all end ids, and text that never changes ids."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.models.tokenizer import Tokenizer
from tests.tiny import CHAT_TEMPLATE, END_ID, SPECIALS, TOKENIZER_SIZE, tiny_folder, write_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
BOS_ID = TOKENIZER_SIZE - len(SPECIALS)
TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama", layers=1)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


@pytest.fixture
def scratch(folder, tmp_path):
    """A private copy of the model's JSON files."""
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    return tmp_path


def edit(path, **changes):
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def test_sizes_and_ids(tokenizer):
    assert (tokenizer.size, tokenizer.bos_id, tokenizer.stop_ids) == (
        TOKENIZER_SIZE,
        None,
        (END_ID,),
    )
    assert tokenizer.encode("<|im_end|>") == [END_ID]
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special=False) == TEXT
    assert tokenizer.decode(tokenizer.encode("hi<|im_end|>")) == "hi"


def test_a_pieces_text_may_have_other_ids_and_stays_as_sampled(tokenizer):
    """`h` + `e` decodes to the text of the one piece `he`; only decoding ever happens."""
    whole = tokenizer.encode("he")
    parts = tokenizer.encode("h") + tokenizer.encode("e")
    assert len(whole) == 1 and len(parts) == 2
    stream = tokenizer.stream()
    for token in parts:
        stream.push(token)
    stream.finish()
    assert stream.text == tokenizer.decode(parts) == tokenizer.decode(whole) == "he"


def test_no_bos_model_gets_none_on_either_path(tokenizer):
    ids = tokenizer.apply_chat_template(HELLO)
    assert ids == tokenizer.encode(TEXT) and ids.count(BOS_ID) == 0
    assert tokenizer.encode_prompt("hello") == tokenizer.encode("hello")


@pytest.mark.parametrize("template_prints", [True, False])
def test_exactly_one_bos_on_both_paths(scratch, template_prints):
    """The tokenizer adds a BOS; its template prints one too (Llama 3) or does not."""
    write_tokenizer(scratch, bos="<|endoftext|>")
    if not template_prints:
        edit(scratch / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    tokenizer = Tokenizer(scratch)
    assert tokenizer.bos_id == BOS_ID
    for ids in (
        tokenizer.apply_chat_template(HELLO),
        tokenizer.encode_prompt("hello"),
        tokenizer.encode_prompt("<|endoftext|>hello"),
        tokenizer.encode_prompt(""),
    ):
        assert ids[0] == BOS_ID and ids.count(BOS_ID) == 1
    assert tokenizer.apply_chat_template(HELLO)[1:] == tokenizer.encode(TEXT)
    assert tokenizer.encode("hello").count(BOS_ID) == 0


def test_a_bos_that_is_only_named_is_not_added(scratch):
    edit(scratch / "tokenizer_config.json", bos_token="<|im_start|>")
    tokenizer = Tokenizer(scratch)
    assert tokenizer.bos_id is None
    assert tokenizer.apply_chat_template(HELLO) == tokenizer.encode(TEXT)


def test_end_ids_are_the_union_of_three_sources(scratch):
    edit(scratch / "config.json", eos_token_id=5)
    edit(scratch / "generation_config.json", eos_token_id=[1, 106])
    assert Tokenizer(scratch).stop_ids == (1, 5, 106, END_ID)


def test_no_end_id_anywhere_is_refused(scratch):
    edit(scratch / "config.json", eos_token_id=None)
    (scratch / "generation_config.json").unlink()
    edit(scratch / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match="eos_token_id"):
        Tokenizer(scratch)


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_padding_never_matters(scratch, pad):
    """pad = end of sequence, or no pad at all: same ids, same sizes."""
    write_tokenizer(scratch, pad=pad)
    tokenizer = Tokenizer(scratch)
    assert tokenizer.size == TOKENIZER_SIZE
    assert tokenizer.apply_chat_template(HELLO) == tokenizer.encode(TEXT)


def test_missing_and_refusing_templates_are_named(scratch):
    edit(scratch / "tokenizer_config.json", chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="no system role"):
        Tokenizer(scratch).apply_chat_template(HELLO)
    edit(scratch / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(scratch).apply_chat_template(HELLO)


def test_a_template_cannot_reach_the_interpreter(scratch):
    edit(scratch / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="refused"):
        Tokenizer(scratch).apply_chat_template(HELLO)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZER_SIZE - 1), max_size=30))
def test_streamed_text_is_a_growing_prefix_and_ends_equal(tokenizer, ids):
    stream = tokenizer.stream()
    whole = tokenizer.decode(ids)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        assert "".join(pieces) == stream.text and whole.startswith(stream.text)
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == whole


def test_half_a_character_is_held_back(tokenizer):
    stream = tokenizer.stream()
    ids = tokenizer.encode("é!")
    assert len(ids) == 3
    assert [stream.push(token) for token in ids] == ["", "é", "!"]
    assert stream.push(ids[0]) == "" and stream.finish() == "\ufffd"
