"""Pages: references, sharing by exact content, eviction; the sparse draw against the dense."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 60.0])
def test_sparse_draw_equals_dense_draw(spread):
    logits = torch.randn(40, 3001, generator=torch.Generator().manual_seed(1)) * spread
    logits[:, 2900:] = float("-inf")
    logits[7] = -3.0
    logits[8, 11] = 500.0
    keys = [stream_key(5, i, 3 * i) for i in range(40)]
    dense = (logits + gumbel_noise(keys, 3001, logits.device)).argmax(-1)
    assert torch.equal(gumbel_argmax(logits, keys), dense)
