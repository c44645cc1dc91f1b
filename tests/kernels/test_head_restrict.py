"""Top-k and top-p in the head's kernels: the reference's set, its log-probs, samples and gradients."""

import pytest
import torch

from tests.kernels.pointwise_oracle import BF16, DEVICE, same_bits

from samebit.kernels.head import HeadParts, head_log_prob, inverse_temperature  # isort: skip
from samebit.kernels.head_backward import HeadGradient, _gradient_chunk  # isort: skip
from samebit.kernels.head_restrict import cut_of_logits, head_cut, scaled_logits  # isort: skip
from samebit.kernels.head_tile import HeadTile  # isort: skip
from samebit.kernels.sample import NO_TOKEN, noise_keys, sample  # isort: skip
from samebit.reference.sampling import (  # isort: skip
    Transform,
    gumbel_noise,
    stream_key,
    transform_logits,
)

NORMAL, SWAPPED = HeadTile(64, False, 4, 2), HeadTile(16, True, 8, 2)
TILES = pytest.mark.parametrize("tile", [NORMAL, SWAPPED], ids=["normal", "swapped"])
RESTRICTIONS = [(1, 1.0), (3, 1.0), (40, 1.0), (0, 0.5), (0, 0.97), (20, 0.8), (999, 0.999)]
T, K, V, VOCAB = 19, 64, 300, 270


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, K, generator=generator).to(BF16).to(DEVICE)
    weight = (torch.randn(V, K, generator=generator) * 4 / K**0.5).to(BF16).to(DEVICE)
    return hidden, weight


def kept_ids(logits, cut):
    """What a kernel keeps, said independently: rank by (-logit, id), up to and with the cut's id."""
    rows = []
    for row, last in zip(logits.cpu(), cut.id.tolist(), strict=True):
        ranking = sorted(range(len(row)), key=lambda i, row=row: (-row[i].item(), i))
        rows.append(set(ranking[: ranking.index(last) + 1]))
    return rows


@pytest.mark.parametrize(("top_k", "top_p"), RESTRICTIONS)
def test_the_cut_keeps_the_reference_set_with_ties(top_k, top_p):
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(2)) * 2
    logits[1] = (logits[1] * 2).round() / 2  # many ties
    logits[2] = 1.5
    logits[3, 7:] = float("-inf")
    want = transform_logits(logits, Transform(1.0, top_k, top_p))
    got = kept_ids(logits, cut_of_logits(logits.to(DEVICE), top_k, top_p))
    for row, kept in zip(want, got, strict=True):
        ids = set(torch.nonzero(row > float("-inf"))[:, 0].tolist())
        # a cut among ids of no probability keeps some of them, which changes nothing
        assert ids == {i for i in kept if row[i] > float("-inf")}


def test_hand_worked_top_p():
    # masses 8 : 4 : 2 : 1 : 1 of 16; the two last tie
    logits = torch.tensor([[0.25, 1.0, 0.5, 2.0, 0.25]]).log2() * torch.tensor(2.0).log()
    for top_p, last in ((0.5, 3), (0.501, 1), (0.76, 2), (0.93, 0), (0.94, 4)):
        assert cut_of_logits(logits, 0, top_p).id.tolist() == [last], top_p
    assert cut_of_logits(logits, 2, 0.99).id.tolist() == [1]
    assert cut_of_logits(logits, 4, 1.0).id.tolist() == [0]


def test_a_cut_does_not_depend_on_the_other_rows():
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 3
    whole = cut_of_logits(logits, 0, 0.9)
    for rows in (slice(0, 1), slice(7, 12), slice(39, 40)):
        part = cut_of_logits(logits[rows], 0, 0.9)
        assert same_bits(part.logit, whole.logit[rows]) and torch.equal(part.id, whole.id[rows])


@TILES
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.9), (20, 0.8)])
def test_samples_and_log_probs_are_of_the_restricted_distribution(tile, top_k, top_p):
    hidden, weight = problem()
    inverse = inverse_temperature(0.9, T, DEVICE)
    inverse[5] = 0.0
    cut = head_cut(hidden, weight, inverse, VOCAB, top_k, top_p, tile=tile)
    counters = [(77, i * 2**31 + 7, i % 4) for i in range(T)]
    keys = noise_keys(counters, DEVICE)
    ids, logp, lse = sample(hidden, weight, inverse, keys, VOCAB, cut=cut, tile=tile)
    logits = scaled_logits(hidden, weight, inverse, VOCAB, tile=tile).cpu()
    restricted = transform_logits(logits, Transform(1.0, top_k, top_p))
    noise = gumbel_noise([stream_key(*c) for c in counters], V, torch.device("cpu"))
    noise[5] = 0.0
    assert torch.equal(ids.cpu().long(), (restricted.double() + noise).argmax(-1))
    expected = restricted.double().log_softmax(-1)
    rows = torch.arange(T)
    near = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(logp.cpu().double(), expected[rows, ids.cpu().long()], **near)
    trained, again, entropy = head_log_prob(
        hidden, weight, ids, inverse, VOCAB, entropy=True, cut=cut, tile=tile
    )
    assert same_bits(trained, logp) and same_bits(again, lse)
    finite = torch.where(restricted > float("-inf"), expected, 0.0)
    torch.testing.assert_close(entropy.cpu().double(), -(finite.exp() * finite).where(
        restricted > float("-inf"), 0.0).sum(-1), **near)  # fmt: skip
    removed = torch.argmin(torch.where(restricted > float("-inf"), 1.0, 0.0), dim=-1)
    outside, _, _ = head_log_prob(
        hidden, weight, removed.to(DEVICE), inverse, VOCAB, cut=cut, tile=tile
    )
    assert (outside == float("-inf")).all()


@TILES
def test_gradient_of_the_restricted_logits(tile):
    hidden, weight = problem()
    inverse = inverse_temperature(0.7, T, DEVICE)
    cut = head_cut(hidden, weight, inverse, VOCAB, 12, 0.95, tile=tile)
    logits = scaled_logits(hidden, weight, inverse, VOCAB, tile=tile).cpu()
    alive = transform_logits(logits, Transform(1.0, 12, 0.95)) > float("-inf")
    target = torch.where(alive, logits, float("-inf")).argmax(-1).to(DEVICE)
    _, lse, entropy = head_log_prob(
        hidden, weight, target, inverse, VOCAB, entropy=True, cut=cut, tile=tile
    )
    dlogp, dentropy = torch.randn(2, T, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    parts = HeadParts.empty(V, T, True, hidden.device)
    out = torch.empty((T, V), dtype=BF16, device=DEVICE)
    _gradient_chunk(
        hidden, weight, target, inverse, lse, HeadGradient(dlogp, entropy, dentropy), out, 0,
        VOCAB, parts, True, tile, cut,
    )  # fmt: skip
    plain = (hidden.cpu().double() @ weight.cpu().double().t()).requires_grad_()
    scaled = torch.where(alive, plain / 0.7, float("-inf"))
    log_probs = torch.where(alive, scaled.log_softmax(-1), 0.0)
    entropies = -(log_probs.exp() * log_probs * alive).sum(-1)
    chosen = log_probs[torch.arange(T), target.cpu()]
    (chosen * dlogp.cpu() + entropies * dentropy.cpu()).sum().backward()
    torch.testing.assert_close(out.cpu().double(), plain.grad, rtol=2**-7, atol=1e-6)
    assert not out.cpu()[~alive].any()


def test_a_row_of_nan_stays_visible():
    hidden, weight = problem()
    hidden[2] = float("nan")
    inverse = inverse_temperature(1.0, T, DEVICE)
    cut = head_cut(hidden, weight, inverse, VOCAB, 4, 0.9, tile=SWAPPED)
    keys = torch.zeros(T, 2, dtype=torch.int32, device=DEVICE)
    ids, logp, _ = sample(hidden, weight, inverse, keys, VOCAB, cut=cut, tile=SWAPPED)
    assert ids[2] == NO_TOKEN and logp[2].isnan()
    assert (ids.cpu()[torch.arange(T) != 2] < VOCAB).all()
