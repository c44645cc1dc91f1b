"""Pages: references, sharing by exact content, eviction; the sparse draw against the dense."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.engine.cache import PagePool, PrefixCache
from samebit.layers.kv import KVStore
from samebit.reference.sampling import gumbel_argmax, gumbel_noise, stream_key


def make_pool(pages: int = 6, size: int = 4) -> PagePool:
    return PagePool(KVStore(1, pages * size, 1, 2, torch.device("cpu")), pages, size)


def test_references():
    pool = make_pool()
    page = pool.allocate()
    pool.hold(page)
    pool.release(page)
    assert pool.num_free == 5
    pool.release(page)
    assert pool.num_free == 6
    with pytest.raises(AssertionError, match="twice"):
        pool.release(page)


def test_copy_takes_the_first_rows_only():
    pool = make_pool()
    rows = pool.store.keys[0]
    rows.copy_(torch.arange(24.0)[:, None, None].expand_as(rows))
    pool.copy([(1, 3, 2)])
    assert rows[12:16, 0, 0].tolist() == [4.0, 5.0, 14.0, 15.0]


def test_match_is_exact_and_leaves_one_token():
    pool = make_pool()
    prefix = PrefixCache(pool)
    ids = tuple(range(8))
    pages = [pool.allocate(), pool.allocate()]
    prefix.insert(ids, pages, computed=8)
    assert prefix.match(ids) == pages[:1], "the last token must still be computed"
    assert prefix.match((*ids, 9)) == pages
    assert prefix.match((0, 1, 2, 9, 4, 5, 6, 7, 8)) == []
    # the second page's tokens after another first page are another content
    assert prefix.match((9, 9, 9, 9, 4, 5, 6, 7, 8)) == []


def test_eviction_takes_leaves_and_never_a_page_in_use():
    pool = make_pool()
    prefix = PrefixCache(pool)
    ids = tuple(range(12))
    pages = [pool.allocate() for _ in range(3)]
    prefix.insert(ids, pages, computed=12)
    for page in pages[1:]:
        pool.release(page)  # the first stays in use
    assert prefix.reserve(4) and prefix.match((*ids, 0)) == pages[:2]
    for page in pages[:2]:
        pool.release(page)
    assert prefix.reserve(5) and not prefix.reserve(6)
    prefix.clear()
    pool.release(pages[0])
    assert pool.num_free == 6


class Users:
    """Samples that take pages, share them, and let them go, as the scheduler has them do."""

    def __init__(self, pages: int):
        self.pool = make_pool(pages)
        self.prefix = PrefixCache(self.pool)
        self.held: list[list[int]] = []

    def start(self, ids: tuple[int, ...], prompt: bool) -> bool:
        """Take what is known of `ids` and fresh pages for the rest; known from now on."""
        pages = self.prefix.match(ids)
        missing = self.pool.pages_for(len(ids)) - len(pages)
        if not self.prefix.reserve(missing):
            for page in pages:
                self.pool.release(page)
            return False
        pages += [self.pool.allocate() for _ in range(missing)]
        self.held.append(pages)
        self.prefix.insert(ids, pages, len(ids))
        if prompt:
            self.prefix.insert_prompt(ids, pages, torch.zeros(1, 1))
        return True

    def stop(self, which: int) -> None:
        """Let one sample's pages go."""
        for page in self.held.pop(which % len(self.held)):
            self.pool.release(page)

    def require_exact(self) -> None:
        """Every page is held as often as its holders say, and what could be forgotten is listed."""
        owners = [page for pages in self.held for page in pages]
        owners += [page for entry in self.prefix._prompts.values() for page in entry.pages]
        owners += [node.page for node in self.prefix._nodes.values()]
        for page, count in enumerate(self.pool.references):
            assert count == owners.count(page)
        unused = self.pool.references.count(0)
        assert unused == self.pool.num_free == len(set(self.pool._free))
        for key, node in self.prefix._nodes.items():
            assert self.prefix._key_of[node.page] == key
            children = sum(other.parent == key for other in self.prefix._nodes.values())
            assert node.children == children
            if not children and self.pool.references[node.page] == 1:
                assert node.page in self.pool.idle
        assert len(self.prefix._key_of) == len(self.prefix._nodes)

    def require_running_known(self, ids: tuple[int, ...], pages: list[int]) -> None:
        """What a sample that still runs has computed is there for others."""
        found = self.prefix.match((*ids, -1))
        assert found == pages[: len(ids) // self.pool.page_size]
        for page in found:
            self.pool.release(page)

    def pages_in_use(self) -> int:
        """Distinct pages of the samples that hold any."""
        return len({page for pages in self.held for page in pages})


moves = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 14), st.booleans())


@given(st.lists(moves, max_size=60), st.integers(4, 12))
def test_pages_are_counted_and_all_that_nobody_uses_can_be_had(steps: list[tuple], pages: int):
    users = Users(pages)
    for kind, family, length, prompt in steps:
        if kind == 0 and users.held:
            users.stop(length)
        elif kind == 1 and prompt and not length % 7:
            users.prefix.clear()
        else:
            ids = tuple(100 * family + (i if i < 6 else i * length) for i in range(length))
            needed = users.pool.pages_for(length)
            started = users.start(ids, prompt)
            assert started or needed + users.pages_in_use() > pages
        users.require_exact()
    free = pages - users.pages_in_use()
    assert users.prefix.reserve(free)
    assert not users.prefix.reserve(free + 1)
    users.require_exact()


def forgotten(prefix: PrefixCache, pages: list[int]) -> list[int]:
    """These pages, in the order in which they are given up when room is asked for."""
    order: list[int] = []
    while prefix.reserve(prefix.pool.num_free + 1):
        order.append(next(p for p in pages if not prefix.pool.references[p] and p not in order))
    return order


def test_what_was_let_go_first_is_forgotten_first():
    pool = make_pool()
    prefix = PrefixCache(pool)
    chains = [tuple(range(n, n + 4)) for n in (0, 10, 20)]
    pages = [pool.allocate() for _ in chains]
    for ids, page in zip(chains, pages, strict=True):
        prefix.insert(ids, [page], 4)
    for at in (1, 0, 2):
        pool.release(pages[at])
    assert prefix.match((*chains[1], 0)) == [pages[1]]
    pool.release(pages[1])  # used again, so the newest
    assert forgotten(prefix, pages) == [pages[0], pages[2], pages[1]]


def test_what_runs_stays_known_however_little_room_is_left():
    users = Users(7)
    assert users.start(tuple(range(8)), prompt=False)
    users.stop(0)
    assert users.start(tuple(range(9)), prompt=False)  # takes up what nobody held for a while
    for n in range(20):
        assert users.start(tuple(range(100 * n + 50, 100 * n + 62)), prompt=bool(n % 2))
        users.stop(1)
    users.require_running_known(tuple(range(8)), users.held[0])
    assert not users.prefix.reserve(5)
    users.require_running_known(tuple(range(8)), users.held[0])
    users.require_exact()


def chain_and_other(full_pages: int) -> tuple[PrefixCache, tuple[int, ...], list[int]]:
    """(a cache that knows a chain of pages and one more, all let go in order; the chain's ids; the pages)."""
    pool = make_pool()
    prefix = PrefixCache(pool)
    chain = tuple(range(4 * full_pages))
    pages = [pool.allocate() for _ in range(full_pages + 1)]
    prefix.insert(chain, pages[:-1], len(chain))
    prefix.insert((90, 91, 92, 93), pages[-1:], 4)
    for page in pages:
        pool.release(page)
    return prefix, chain, pages


def test_a_parent_used_since_keeps_its_place():
    prefix, chain, pages = chain_and_other(2)
    for page in prefix.match((*chain[:4], 77)):  # the parent alone, after everything else
        prefix.pool.release(page)
    assert forgotten(prefix, pages) == [pages[1], pages[2], pages[0]]


def test_a_child_goes_before_its_parent_and_a_parent_right_after():
    prefix, _, pages = chain_and_other(3)
    assert forgotten(prefix, pages) == [pages[2], pages[1], pages[0], pages[3]]


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 60.0])
def test_sparse_draw_equals_dense_draw(spread):
    logits = torch.randn(40, 3001, generator=torch.Generator().manual_seed(1)) * spread
    logits[:, 2900:] = float("-inf")
    logits[7] = -3.0
    logits[8, 11] = 500.0
    keys = [stream_key(5, i, 3 * i) for i in range(40)]
    dense = (logits + gumbel_noise(keys, 3001, logits.device)).argmax(-1)
    assert torch.equal(gumbel_argmax(logits, keys), dense)
