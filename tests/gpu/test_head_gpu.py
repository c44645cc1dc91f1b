"""Sampler and training head give the same bits, for every tile and number of rows."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
from samebit.kernels import ops
from samebit.kernels.head import HeadParts, head_log_prob, inverse_temperature
from samebit.kernels.head_backward import HeadGradient, head_log_prob_backward
from samebit.kernels.head_restrict import HeadCut, head_cut, scaled_logits
from samebit.kernels.head_tile import HeadTile, head_tile
from samebit.kernels.sample import draw_tile, noise_keys, sample
from samebit.operand import allocate_weight
from samebit.reference.sampling import Transform, gumbel_noise, stream_key, transform_logits
from samebit.spec import Precision
from tests.kernels.pointwise_oracle import BF16, same_bits

pytestmark = pytest.mark.gpu
TILES = [HeadTile(n, True, 8, 3) for n in (16, 32, 64, 128)]
TILES += [HeadTile(64, False, 4, 3), HeadTile(128, False, 8, 3), HeadTile(128, False, 4, 3)]
TILES += [HeadTile(32, True, 4, 3, block_k=128), head_tile(4096)]


def problem(T, K, V, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    hidden = torch.randn(T, K, generator=generator, device="cuda").to(BF16)
    weight = (torch.randn(V, K, generator=generator, device="cuda") * 4 / K**0.5).to(BF16)
    return hidden, weight


@pytest.mark.parametrize(("K", "V", "vocab"), [(576, 50257, 50257), (1024, 151936, 151669)])
def test_sampled_log_probs_equal_the_trained_ones(K, V, vocab):
    T = 1024
    hidden, weight = problem(T, K, V)
    inverse = inverse_temperature(0.8, T, "cuda")
    inverse[::3] = 0.0
    counters = [(11, i, i + 9) for i in range(T)]
    keys = noise_keys(counters, "cuda")
    drawn = torch.empty(T, dtype=torch.int64, device="cuda")
    logp = torch.empty(T, device="cuda")
    rows = [1, 2, 3, 15, 16, 17, 33, 64, 100, 128, 200, 256]
    start = 0
    for count in [*rows, T - sum(rows)]:
        part = slice(start, start + count)
        drawn[part], logp[part], _ = sample(hidden[part], weight, inverse[part], keys[part], vocab)
        start += count
    for tile in TILES:
        trained, _, _ = head_log_prob(hidden, weight, drawn, inverse, vocab, tile=tile)
        assert same_bits(trained, logp), tile
    z = (hidden.double() @ weight.double().t())[:, :vocab]
    z *= torch.where(inverse == 0, 1.0, inverse).double()[:, None]
    expected = z.log_softmax(-1)[torch.arange(T, device="cuda"), drawn]
    torch.testing.assert_close(logp.double(), expected, rtol=1e-5, atol=1e-5)
    noise = gumbel_noise([stream_key(*c) for c in counters[:64]], vocab, hidden.device)
    noise[inverse[:64] == 0] = 0.0
    assert torch.equal((z[:64] + noise).argmax(-1), drawn[:64])


@pytest.mark.parametrize(("K", "V", "vocab"), [(576, 50257, 50257), (1000, 9000, 8897)])
@pytest.mark.parametrize("restricted", [False, True])
def test_every_tile_and_kernel_of_the_sampler_draws_the_same(K, V, vocab, restricted):
    T = 1100
    hidden, weight = problem(T, K, V)
    weight[V // 2 : V // 2 + 40] = weight[:40]  # equal keys of greedy tokens
    hidden[7], hidden[70, 3] = float("nan"), float("inf")
    inverse = inverse_temperature(0.8, T, "cuda")
    inverse[::3] = 0.0
    keys = noise_keys([(11, i, i + 9) for i in range(T)], "cuda")
    cut = HeadCut(torch.randn(T, device="cuda"), keys[:, 0] % V) if restricted else None
    plain = sample(hidden, weight, inverse, keys, vocab, cut=cut, tile=HeadTile(64, False, 4, 4))
    for rows in (1, 33, 65, 96, 128, 129, 192, 193, 256, 257, 300, 384, 512, 513, 1100):
        for chosen in (None, draw_tile(rows)):
            part = slice((T - rows) // 2, (T - rows) // 2 + rows)
            own = None if cut is None else HeadCut(cut.logit[part], cut.id[part])
            drawn = sample(
                hidden[part], weight, inverse[part], keys[part], vocab, cut=own, tile=chosen
            )
            for a, b in zip(drawn, plain, strict=True):
                assert torch.equal(a.view(torch.int32), b[part].view(torch.int32)), (rows, chosen)


@pytest.mark.parametrize("one_pass", [False, True])
def test_backward(one_pass):
    T, K, V, vocab = 700, 576, 9000, 8990
    hidden, weight = problem(T, K, V)
    target = torch.randint(0, vocab, (T,), device="cuda")
    inverse = inverse_temperature(0.7, T, "cuda")
    logp, lse, entropy = head_log_prob(hidden, weight, target, inverse, vocab, entropy=True)
    dlogp, dentropy = torch.randn(2, T, device="cuda")
    gradient = HeadGradient(dlogp, entropy, dentropy)
    parts = HeadParts.empty(V, T, True, hidden.device) if one_pass else None
    results = [
        head_log_prob_backward(
            hidden, weight, target, inverse, lse, gradient, vocab, parts=parts, parts_entropy=True
        )
        for _ in range(2)
    ]
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_probs = ((h @ w.t())[:, :vocab] * inverse.double()[:, None]).log_softmax(-1)
    chosen = log_probs[torch.arange(T, device="cuda"), target]
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    ((chosen * dlogp).sum() + (entropies * dentropy).sum()).backward()
    for got, exact in zip(results[0], (h.grad, w.grad), strict=True):
        assert (got.double() - exact).norm() / exact.norm() < 4e-3
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    if parts is not None:
        assert all(
            same_bits(a, b) for a, b in zip(parts.combine(True), (logp, lse, entropy), strict=True)
        )
    total = torch.ones_like(results[0][1])
    head_log_prob_backward(hidden, weight, target, inverse, lse, gradient, vocab, dweight_VK=total)
    torch.testing.assert_close(total, results[0][1] + 1.0, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_planned_head_is_the_two_pass_one(temperature):
    T, K, V, vocab = 700, 576, 9000, 8990
    hidden, weight = problem(T, K, V)
    head = allocate_weight((V,), K, Precision("bf16"), hidden.device)
    head.codes.copy_(weight)
    target, dlogp = torch.randint(0, vocab, (T,), device="cuda"), torch.randn(T, device="cuda")
    common = (hidden, head, target, vocab, Transform(temperature))
    logp, entropy, lse = ops.log_prob(*common)
    expected = ops.log_prob_backward(dlogp, None, *common, entropy, lse)
    planned = ops.log_prob_planned(*common, logp, dlogp)
    assert same_bits(planned[0], logp) and same_bits(planned[1], entropy)
    for got, want in zip(planned[2:], expected, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 1e-3
    total = torch.ones_like(planned[3])
    assert ops.log_prob_planned(*common, logp, dlogp, total)[3] is total
    torch.testing.assert_close(total, planned[3] + 1.0, rtol=1e-5, atol=1e-5)


def test_sampled_frequencies():
    T, V = 20000, 128
    hidden, weight = problem(1, 64, V)
    hidden = hidden.expand(T, 64).contiguous()
    inverse = inverse_temperature(1.5, T, "cuda")
    keys = noise_keys([(3, i, 0) for i in range(T)], "cuda")
    ids, _, _ = sample(hidden, weight, inverse, keys, V)
    p = (hidden[:1].double() @ weight.double().t() / 1.5).softmax(-1)[0]
    counts = torch.bincount(ids, minlength=V).double()
    seen = p * T > 5
    chi_square = ((counts - p * T) ** 2 / (p * T))[seen].sum()
    degrees = float(seen.sum())
    # About five standard deviations.
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.95), (20, 0.8)])
def test_restricted_samples_and_log_probs_have_the_same_bits(top_k, top_p):
    T, V, vocab = 300, 151936, 151669
    hidden, weight = problem(T, 1024, V)
    inverse = inverse_temperature(0.8, T, "cuda")
    inverse[::3] = 0.0
    counters = [(11, i, i + 9) for i in range(T)]
    keys = noise_keys(counters, "cuda")
    cut = head_cut(hidden, weight, inverse, vocab, top_k, top_p)
    drawn = torch.empty(T, dtype=torch.int64, device="cuda")
    logp = torch.empty(T, device="cuda")
    start = 0
    for count in (1, 2, 16, 17, 64, 200):
        part = slice(start, start + count)
        own = head_cut(hidden[part], weight, inverse[part], vocab, top_k, top_p)
        assert same_bits(own.logit, cut.logit[part]) and torch.equal(own.id, cut.id[part])
        drawn[part], logp[part], _ = sample(
            hidden[part], weight, inverse[part], keys[part], vocab, cut=own
        )
        start += count
    assert start == T
    for tile in TILES:
        trained, _, _ = head_log_prob(hidden, weight, drawn, inverse, vocab, cut=cut, tile=tile)
        assert same_bits(trained, logp), tile
    z = scaled_logits(hidden, weight, inverse, vocab)
    kept = transform_logits(z, Transform(1.0, top_k, top_p))
    removed = (z < cut.logit[:, None]) | (
        (z == cut.logit[:, None]) & (torch.arange(V, device="cuda") > cut.id[:, None])
    )
    assert torch.equal(removed | (z == float("-inf")), kept == float("-inf"))
    noise = gumbel_noise([stream_key(*c) for c in counters[:64]], V, hidden.device)
    noise[inverse[:64] == 0] = 0.0
    assert torch.equal((kept[:64].double() + noise).argmax(-1), drawn[:64])
    expected = kept.double().log_softmax(-1)[torch.arange(T, device="cuda"), drawn]
    torch.testing.assert_close(logp.double(), expected, rtol=1e-5, atol=1e-5)


def test_restricted_backward():
    T, K, V, vocab = 300, 576, 9000, 8990
    hidden, weight = problem(T, K, V)
    inverse = inverse_temperature(0.7, T, "cuda")
    cut = head_cut(hidden, weight, inverse, vocab, 30, 0.9)
    keys = noise_keys([(1, i, 0) for i in range(T)], "cuda")
    target, _, _ = sample(hidden, weight, inverse, keys, vocab, cut=cut)
    _, lse, entropy = head_log_prob(hidden, weight, target, inverse, vocab, entropy=True, cut=cut)
    dlogp, dentropy = torch.randn(2, T, device="cuda")
    gradient = HeadGradient(dlogp, entropy, dentropy)
    got = [
        head_log_prob_backward(hidden, weight, target, inverse, lse, gradient, vocab, cut=cut)
        for _ in range(2)
    ]
    alive = transform_logits(scaled_logits(hidden, weight, inverse, vocab), Transform(1.0, 30, 0.9))
    alive = alive > float("-inf")
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    z = torch.where(alive, (h @ w.t()) * inverse.double()[:, None], float("-inf"))
    log_probs = torch.where(alive, z.log_softmax(-1), 0.0)
    chosen = log_probs[torch.arange(T, device="cuda"), target.long()]
    entropies = -(log_probs.exp() * log_probs * alive).sum(-1)
    ((chosen * dlogp).sum() + (entropies * dentropy).sum()).backward()
    for mine, exact in zip(got[0], (h.grad, w.grad), strict=True):
        assert (mine.double() - exact).norm() / exact.norm() < 4e-3
    assert all(same_bits(a, b) for a, b in zip(*got, strict=True))


def test_a_graph_replays_the_restricted_draw():
    T, V, vocab = 130, 151936, 151669
    hidden, weight = problem(T, 256, V)
    inverse = inverse_temperature(0.9, T, "cuda")
    keys = noise_keys([(4, i, 0) for i in range(T)], "cuda")

    def draw():
        cut = head_cut(hidden, weight, inverse, vocab, 40, 0.9)
        return sample(hidden, weight, inverse, keys, vocab, cut=cut)

    draw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw()
    hidden.copy_(problem(T, 256, V, seed=1)[0])
    keys.copy_(noise_keys([(4, i, 1) for i in range(T)], "cuda"))
    graph.replay()
    again = draw()
    assert all(same_bits(a, b) for a, b in zip(captured, again, strict=True))
