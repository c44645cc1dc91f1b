"""A byte-level chat tokenizer that tasks can be tested with: no model, no files."""

from __future__ import annotations

import pytest

BOS = 256
END = 257


class ByteTokenizer:
    """One id a byte; ChatML-like turns, each begun by BOS and ended by END."""

    def __init__(self, template_bos: int = 0) -> None:
        self.template_bos = template_bos

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode()

    def apply_chat_template(self, messages, *, add_generation_prompt=True):
        ids = [BOS] * self.template_bos
        for message in messages:
            ids += [*self.encode(f"{message['role']}\n{message['content']}"), END]
        if add_generation_prompt:
            ids += self.encode("assistant\n")
        return ids


@pytest.fixture
def tokenizer():
    return ByteTokenizer()
