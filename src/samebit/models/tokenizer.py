"""Text to token ids and back, with one rule for BOS and one set of end ids.

Sampled ids are only ever decoded: nothing here, and nothing elsewhere, encodes a completion again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samebit.models.config import ModelConfig, read_config

_REPLACEMENT = "�"


class Tokenizer:
    """The tokenizer of a local HF folder.

    size: one more than the largest id it knows; ids from there on are masked in sampling and in
    training alike. bos_id: the id that this model's tokenizer puts before every text, or None
    (Qwen, SmolLM2: a `bos_token` that is only named, never prepended, does not count).
    stop_ids: the union of config.json, generation_config.json and the tokenizer's own end id.
    Raises ValueError naming the folder when the tokenizer cannot be loaded or has no end id.
    """

    def __init__(self, folder: str | Path, config: ModelConfig | None = None) -> None:
        from transformers import AutoTokenizer

        self.folder = Path(folder)
        config = config or read_config(self.folder)
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(
                f"{self.folder}: the tokenizer could not be loaded ({error})"
            ) from None
        self.size = max(self._inner.get_vocab().values()) + 1
        if self.size > config.vocab_size:
            raise ValueError(
                f"{self.folder}: the tokenizer knows {self.size} ids but the embedding has "
                f"{config.vocab_size} rows; use the tokenizer that belongs to this checkpoint"
            )
        self.bos_id = self._find_bos()
        own_end = self._inner.eos_token_id
        ends = set(config.eos_ids) | (set() if own_end is None else {own_end})
        if not ends:
            raise ValueError(
                f"{self.folder}: no end-of-sequence id in config.json, generation_config.json or "
                "the tokenizer; add eos_token_id to generation_config.json"
            )
        self.stop_ids: tuple[int, ...] = tuple(sorted(ends))

    def _find_bos(self) -> int | None:
        bos = self._inner.bos_token_id
        with_specials = self._inner("a", add_special_tokens=True)["input_ids"]
        return bos if bos is not None and with_specials[0] == bos else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it is: no BOS, no EOS."""
        return list(self._inner(text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with exactly one BOS where this model has one."""
        return self._with_one_bos(self.encode(text))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, with exactly one BOS where this model has one.

        The BOS may come from the template or not at all: both ways give one. Raises ValueError when
        the model has no template, or when its template refuses the messages.
        """
        from jinja2 import TemplateError

        if not self._inner.chat_template:
            raise ValueError(
                f"{self.folder}: the tokenizer has no chat template; use plain-text prompts, or "
                "add chat_template to tokenizer_config.json"
            )
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.folder}: the chat template refused the messages ({error})"
            ) from None
        return self._with_one_bos(self.encode(text))

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return [self.bos_id, *ids[start:]]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; special tokens (the end of a turn) are left out by default."""
        return self._inner.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def stream(self) -> TextStream:
        """A decoder that takes one id at a time, for stop strings."""
        return TextStream(self)


class TextStream:
    """Text of a growing completion: what is settled so far, never half a character.

    `text` only grows and is always a prefix of `Tokenizer.decode(all ids)`; `finish` makes them
    equal. Each step decodes a few ids, not the whole completion.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # ids[_context:_settled] are shown already; they are decoded again with what follows,
        # because a token's text may depend on the one before it (leading spaces).
        self._context = 0
        self._settled = 0
        self.text = ""

    def push(self, token: int) -> str:
        """Add one id; the text that became settled by it (often one word, sometimes nothing)."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """Settle what is left: an unfinished character becomes U+FFFD, as in `decode`."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        shown = self._tokenizer.decode(self._ids[self._context : self._settled])
        text = self._tokenizer.decode(self._ids[self._context :])
        # U+FFFD at the end may be the first bytes of a character whose rest is still to come.
        if len(text) <= len(shown) or (text.endswith(_REPLACEMENT) and not final):
            return ""
        piece = text[len(shown) :]
        self._context, self._settled = self._settled, len(self._ids)
        self.text += piece
        return piece
