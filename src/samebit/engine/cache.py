"""Pages of KV storage, and which of them hold tokens that can be used again.

A page belongs to whoever holds a reference. Rows are written once and never changed, so a page may
be shared as soon as it is scheduled to be written: every layer writes its rows before it attends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from samebit.layers.kv import AnyStore, PageCopy


class PagePool:
    """Reference-counted pages of one store; row of (page, offset): page * page_size + offset.

    Pages below `first` are nobody's (idle rows of a decode step write to page 0).
    """

    def __init__(self, store: AnyStore, num_pages: int, page_size: int, first: int = 0) -> None:
        self.store, self.num_pages, self.page_size = store, num_pages, page_size
        self.first = first
        self.references = [0] * (first + num_pages)
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Pages that fell to one reference, the longest ago first; some have others or none by now."""
        self._free = list(range(first + num_pages - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self) -> int:
        """A free page, held once."""
        page = self._free.pop()
        self.references[page] = 1
        return page

    def hold(self, page: int) -> int:
        """One more reference to a page in use."""
        assert self.references[page] > 0, "a free page cannot be shared"
        self.references[page] += 1
        return page

    def release(self, page: int) -> None:
        """One reference less; the page is free when it was the last."""
        left = self.references[page] - 1
        assert left >= 0, "page released twice"
        self.references[page] = left
        if left == 0:
            self._free.append(page)
        elif left == 1:
            self.idle[page] = None
            self.idle.move_to_end(page)

    def copy(self, pairs: list[PageCopy]) -> None:
        """Copy the first n rows of source pages to target pages; pairs are (source, target, n)."""
        if pairs:
            self.store.copy(pairs, self.page_size)


@dataclass
class _Node:
    """A full page of tokens under its parent chain."""

    page: int
    number: int
    parent: tuple[int, tuple[int, ...]] | None
    children: int = 0


@dataclass
class PromptEntry:
    """A whole prompt: its pages (the last may be half-filled) and its last hidden row [1, K]."""

    pages: tuple[int, ...]
    hidden: torch.Tensor


class PrefixCache:
    """Full pages by their chain of token contents, and whole prompts; least recently used first.

    A chain key is (number of the parent node, the page's tokens): exact, so different prefixes never
    collide. Valid for one weight version; `clear` drops everything.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._nodes: dict[tuple[int, tuple[int, ...]], _Node] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Of every node's page."""
        self._prompts: OrderedDict[tuple[int, ...], PromptEntry] = OrderedDict()
        self._next = 1

    def match(self, ids: tuple[int, ...]) -> list[int]:
        """Pages of the longest known chain that leaves at least one token of `ids` over, held."""
        size = self.pool.page_size
        keys, parent = [], 0
        for i in range((len(ids) - 1) // size):
            key = (parent, ids[i * size : (i + 1) * size])
            node = self._nodes.get(key)
            if node is None:
                break
            keys.append(key)
            parent = node.number
        return [self.pool.hold(self._nodes[key].page) for key in keys]

    def insert(self, ids: tuple[int, ...], pages: list[int], computed: int) -> None:
        """Know the full pages of ids[:computed], save those whose content is known already."""
        size = self.pool.page_size
        parent_key, parent = None, 0
        for i in range(computed // size):
            key = (parent, ids[i * size : (i + 1) * size])
            node = self._nodes.get(key)
            if node is None:
                node = _Node(self.pool.hold(pages[i]), self._next, parent_key)
                self._next += 1
                self._nodes[key] = node
                self._key_of[node.page] = key
                if parent_key is not None:
                    self._nodes[parent_key].children += 1
            parent_key, parent = key, node.number

    def prompt(self, ids: tuple[int, ...]) -> PromptEntry | None:
        """The entry of a whole prompt."""
        entry = self._prompts.get(ids)
        if entry is not None:
            self._prompts.move_to_end(ids)
        return entry

    def insert_prompt(self, ids: tuple[int, ...], pages: list[int], hidden: torch.Tensor) -> None:
        """Know a prompt whose tokens are all computed; its writer goes on filling its last page."""
        if ids not in self._prompts:
            held = tuple(self.pool.hold(p) for p in pages[: self.pool.pages_for(len(ids))])
            self._prompts[ids] = PromptEntry(held, hidden)

    def reserve(self, pages: int) -> bool:
        """Free at least `pages` pages, forgetting the longest unused; False when it cannot."""
        while self.pool.num_free < pages and self._evict():
            pass
        return self.pool.num_free >= pages

    def _evict(self) -> bool:
        """Forget one page that nobody else holds, or the oldest prompt; False when there is neither."""
        while self.pool.idle:
            page, _ = self.pool.idle.popitem(last=False)
            key = self._key_of.get(page)
            if key is None or self.pool.references[page] != 1 or self._nodes[key].children:
                continue  # it comes back when it is let go, or with its last child
            self._forget(key)
            return True
        if self._prompts:
            _, entry = self._prompts.popitem(last=False)
            for page in entry.pages:
                self.pool.release(page)
            return True
        return False

    def _forget(self, key: tuple[int, tuple[int, ...]]) -> None:
        node = self._nodes.pop(key)
        del self._key_of[node.page]
        self.pool.release(node.page)
        if node.parent is not None:
            parent = self._nodes[node.parent]
            parent.children -= 1
            if parent.page not in self.pool.idle:  # passed over for its child: it is as old
                self.pool.idle[parent.page] = None
                self.pool.idle.move_to_end(parent.page, last=False)

    def clear(self) -> None:
        """Forget everything (the weights changed)."""
        for entry in self._prompts.values():
            for page in entry.pages:
                self.pool.release(page)
        for node in self._nodes.values():
            self.pool.release(node.page)
        self._prompts.clear()
        self._nodes.clear()
        self._key_of.clear()
        self.pool.idle.clear()
