"""The head's log-probs, entropy, backward tiles, and sampling, against FP64."""

import pytest
import torch

from tests.kernels.pointwise_oracle import BF16, DEVICE, same_bits

import triton  # isort: skip
import triton.language as tl  # isort: skip

from samebit.kernels.head import HeadParts, head_log_prob, inverse_temperature  # isort: skip
from samebit.kernels.head import known_normaliser  # isort: skip
from samebit.kernels.head_backward import HeadGradient, _gradient_chunk  # isort: skip
from samebit.kernels.head_tile import HeadTile  # isort: skip
from samebit.kernels.sample import noise_keys, sample  # isort: skip
from samebit.kernels.sample_noise import noise_word  # isort: skip
from samebit.reference.sampling import gumbel_noise, noise_words, stream_key  # isort: skip

NORMAL = HeadTile(64, False, 4, 2)
SWAPPED = HeadTile(16, True, 8, 2)


def problem(T, K, V, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, K, generator=generator).to(BF16).to(DEVICE)
    weight = (torch.randn(V, K, generator=generator) * 4 / K**0.5).to(BF16).to(DEVICE)
    target = torch.randint(0, V - 60, (T,), generator=generator).to(DEVICE)
    return hidden, weight, target


def exact(hidden, weight, vocab_size, temperature):
    z = hidden.cpu().double() @ weight.cpu().double()[:vocab_size].t() / temperature
    return z, z.log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_a_known_log_prob_implies_its_normaliser(temperature):
    hidden, weight, target = problem(7, 192, 300)
    inverse = inverse_temperature(temperature, 7, DEVICE)
    logp, lse, _ = head_log_prob(hidden, weight, target, inverse, 270, tile=NORMAL)
    found = known_normaliser(hidden, weight, target, inverse, logp)
    torch.testing.assert_close(found, lse, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("tile", [NORMAL, SWAPPED], ids=["normal", "swapped"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_prob_and_entropy(tile, temperature):
    T, V, vocab_size = 19, 300, 270
    hidden, weight, target = problem(T, 64, V)
    inverse = inverse_temperature(temperature, T, DEVICE)
    logp, lse, entropy = head_log_prob(
        hidden, weight, target, inverse, vocab_size, entropy=True, tile=tile
    )
    z, expected = exact(hidden, weight, vocab_size, temperature)
    rows = torch.arange(T)
    near = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(logp.cpu().double(), expected[rows, target.cpu()], **near)
    torch.testing.assert_close(lse.cpu().double(), z.logsumexp(-1), **near)
    torch.testing.assert_close(entropy.cpu().double(), -(expected.exp() * expected).sum(-1), **near)


def test_log_prob_does_not_depend_on_orientation_or_rows():
    hidden, weight, target = problem(70, 64, 300)
    inverse = inverse_temperature(1.0, 70, DEVICE)
    whole = head_log_prob(hidden, weight, target, inverse, 300, tile=NORMAL)
    for rows in (slice(0, 1), slice(13, 40)):
        part = head_log_prob(hidden[rows], weight, target[rows], inverse[rows], 300, tile=SWAPPED)
        if DEVICE == "cuda":
            assert same_bits(part[0], whole[0][rows]) and same_bits(part[1], whole[1][rows])
        else:
            # The interpreter's product is numpy's, whose bits depend on the shape.
            torch.testing.assert_close(part[0], whole[0][rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [NORMAL, SWAPPED], ids=["normal", "swapped"])
def test_gradient_of_the_logits(tile):
    T, V, vocab_size, temperature, start = 19, 300, 270, 0.7, 128
    hidden, weight, target = problem(T, 64, V)
    inverse = inverse_temperature(temperature, T, DEVICE)
    logp, lse, entropy = head_log_prob(
        hidden, weight, target, inverse, vocab_size, entropy=True, tile=tile
    )
    generator = torch.Generator().manual_seed(3)
    dlogp, dentropy = torch.randn(2, T, generator=generator).to(DEVICE)
    parts = HeadParts.empty(V, T, True, hidden.device)
    chunks = []
    for first, last in ((0, start), (start, V)):
        out = torch.empty((T, last - first), dtype=BF16, device=DEVICE)
        _gradient_chunk(
            hidden, weight[first:last], target, inverse, lse,
            HeadGradient(dlogp, entropy, dentropy), out, first, vocab_size, parts, True, tile,
        )  # fmt: skip
        chunks.append(out)
    logits = (hidden.cpu().double() @ weight.cpu().double().t()).requires_grad_()
    log_probs = (logits[:, :vocab_size] / temperature).log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    chosen = log_probs[torch.arange(T), target.cpu()]
    (chosen * dlogp.cpu() + entropies * dentropy.cpu()).sum().backward()
    torch.testing.assert_close(
        torch.cat(chunks, 1).cpu().double(), logits.grad, rtol=2**-8, atol=1e-6
    )
    assert not torch.cat(chunks, 1)[:, vocab_size:].any()
    if DEVICE == "cuda":
        again = parts.combine(True)
        assert same_bits(again[0], logp) and same_bits(again[1], lse)
        assert same_bits(again[2], entropy)


@pytest.mark.parametrize("tile", [NORMAL, SWAPPED], ids=["normal", "swapped"])
def test_sample_is_the_gumbel_argmax(tile):
    T, V, vocab_size, seed = 23, 300, 270, 0x1234_5678_9ABC
    hidden, weight, _ = problem(T, 64, V)
    inverse = inverse_temperature(0.9, T, DEVICE)
    inverse[5] = 0.0
    counters = [(seed, i * 2**31 + 7, i % 4) for i in range(T)]
    keys = noise_keys(counters, DEVICE)
    ids, logp, lse = sample(hidden, weight, inverse, keys, vocab_size, tile=tile)
    z, _ = exact(hidden, weight, vocab_size, 0.9)
    noise = gumbel_noise([stream_key(*c) for c in counters], vocab_size, torch.device("cpu"))
    noise[5] = 0.0
    assert torch.equal(ids.cpu().long(), (z + noise).argmax(-1))
    trained = head_log_prob(hidden, weight, ids, inverse, vocab_size, tile=tile)
    assert same_bits(logp, trained[0]) and same_bits(lse, trained[1])


def test_ties_go_to_the_smaller_id_and_greedy_has_temperature_one():
    hidden, weight, _ = problem(2, 64, 300)
    weight[1:] = weight[0]
    inverse = inverse_temperature(0.0, 2, DEVICE)
    keys = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    ids, logp, _ = sample(hidden, weight, inverse, keys, 256, tile=SWAPPED)
    assert ids.tolist() == [0, 0]
    torch.testing.assert_close(logp.cpu(), torch.full((2,), -torch.tensor(256.0).log()))


@triton.jit
def words_kernel(keys_ptr, out_ptr, V, WIDTH: tl.constexpr):
    t = tl.program_id(0)
    ids = tl.arange(0, WIDTH)
    low = tl.load(keys_ptr + 2 * t).to(tl.uint32, bitcast=True)
    high = tl.load(keys_ptr + 2 * t + 1).to(tl.uint32, bitcast=True)
    word = noise_word(ids, low, high).to(tl.int32, bitcast=True)
    tl.store(out_ptr + t * V + ids, word, mask=ids < V)


def test_noise_words_are_the_reference_ones():
    counters = [(0, 0, 0), (2**63 - 1, 2**40 + 3, 17), (5, 1, 2**31)]
    out = torch.empty(3, 1000, dtype=torch.int32, device=DEVICE)
    words_kernel[(3,)](noise_keys(counters, DEVICE), out, 1000, WIDTH=1024)
    expected = noise_words([stream_key(*c) for c in counters], 1000, torch.device("cpu"))
    assert torch.equal(out.cpu(), expected)


def test_noise_is_uniform():
    keys = [stream_key(3, i, i % 3) for i in range(40)]
    words = noise_words(keys, 4000, torch.device("cpu")).long() & 0xFFFFFFFF
    counts = torch.bincount((words >> 26).flatten(), minlength=64).double()
    chi_square = ((counts - 2500.0) ** 2 / 2500.0).sum()
    # 63 degrees of freedom: 0.0001 and 0.9999 quantiles.
    assert 29.0 < chi_square < 113.0
    assert words.unique().numel() > 0.9999 * words.numel() - 10
