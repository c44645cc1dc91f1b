"""Noise is computed only where it can win: bounds that hold, ids of the dense definition."""

import pytest
import torch

from samebit.reference.sampling import (
    _SPAN,
    _key_columns,
    _span_bounds,
    gumbel_argmax,
    gumbel_noise,
    stream_key,
)

CPU = torch.device("cpu")


def keys_of(rows: int) -> list[tuple[int, int]]:
    return [stream_key(11, i, 7 * i) for i in range(rows)]


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 3001])
def test_no_score_exceeds_the_bound_of_its_span(vocabulary):
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(2)) * 3
    keys = keys_of(64)
    bounds = _span_bounds(logits, *_key_columns(keys, CPU))
    width = bounds.shape[1] * _SPAN
    assert 0 <= width - vocabulary < _SPAN
    scores = torch.full((64, width), float("-inf"))
    scores[:, :vocabulary] = logits + gumbel_noise(keys, vocabulary, CPU)
    best = scores.view(64, -1, _SPAN).amax(-1)
    assert bool((bounds >= best - 1e-4).all())


def test_a_bound_is_close_where_noise_is_large():
    logits, keys = torch.zeros(64, 3008), keys_of(64)
    gap = _span_bounds(logits, *_key_columns(keys, CPU)).repeat_interleave(_SPAN, 1)
    noise = gumbel_noise(keys, 3008, CPU)
    large = (noise > 5) & (noise == noise.view(64, -1, _SPAN).amax(-1).repeat_interleave(_SPAN, 1))
    assert large.sum() > 500 and float((gap - noise)[large].max()) < 0.07


@pytest.mark.parametrize("vocabulary", [1, 63, 3001])
@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0, 30.0])
def test_the_id_is_the_dense_one(vocabulary, spread):
    logits = torch.randn(48, vocabulary, generator=torch.Generator().manual_seed(3)) * spread
    logits[5] = logits[5].round()
    keys = keys_of(48)
    dense = (logits + gumbel_noise(keys, vocabulary, CPU)).argmax(-1)
    assert torch.equal(gumbel_argmax(logits, keys), dense)


def test_a_row_draws_the_same_id_alone():
    logits = torch.randn(20, 70_000, generator=torch.Generator().manual_seed(4))
    keys = keys_of(20)
    whole = gumbel_argmax(logits, keys)
    alone = [gumbel_argmax(logits[i : i + 1], keys[i : i + 1]) for i in range(20)]
    assert torch.equal(whole, torch.cat(alone))
