"""QK norm, rotary, KV write and their backward; the embedding."""

import numpy as np
import pytest
import torch

from tests.kernels.pointwise_oracle import BF16, DEVICE, blocks, same_bits, scale_of

from samebit.kernels import rope  # isort: skip
from samebit.kernels.embed import embed, embed_backward  # isort: skip
from samebit.kernels.rope import KeyValueStore, qk_norm_rope_store, rotary_table  # isort: skip
from samebit.kernels.rope_backward import rope_backward  # isort: skip

H, G, D, T = 3, 2, 64, 11
TABLE = rotary_table(40, D, 1e4, DEVICE)
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 39, 38, 7], dtype=torch.int32, device=DEVICE)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(BF16).to(DEVICE)


def parts():
    fused = normal(T, 512)
    return fused[:, : H * D], fused[:, 256 : 256 + G * D], fused[:, 384 : 384 + G * D]


def rotated(x_TN, heads):
    x = x_TN.cpu().float().reshape(T, heads, D)
    cos, sin = (t.cpu()[POSITIONS.cpu().long()][:, None, :] for t in TABLE)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(BF16)


def test_table_matches_the_definition():
    cos, sin = rotary_table(3, 4, 100.0, "cpu")
    expected = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]], dtype=torch.float64)
    assert same_bits(cos, expected.cos().float()) and same_bits(sin, expected.sin().float())


def test_packed_rotation_has_the_reference_bits():
    q, k, v = parts()
    store = KeyValueStore.packed(T, G, D, False, q.device)
    out, scale = qk_norm_rope_store(q, k, v, POSITIONS, TABLE, store, num_heads=H)
    assert scale is None and same_bits(out, rotated(q, H))
    assert same_bits(store.k[0], rotated(k, G))
    assert same_bits(store.v[0], v.reshape(T, G, D))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_few_tokens_have_the_bits_of_many(fp8, norm, monkeypatch):
    q, k, v = parts()
    weights = (normal(D, seed=5), normal(D, seed=6)) if norm else None

    def launched():
        store = KeyValueStore.packed(T, G, D, fp8, q.device)
        out, scale = qk_norm_rope_store(
            q, k, v, POSITIONS, TABLE, store, num_heads=H, norm_weights=weights
        )
        scales = (scale, store.k_scale, store.v_scale) if fp8 else ()
        return (out, store.k, store.v, *scales)

    few = launched()
    monkeypatch.setattr(rope, "FEW", 0)
    assert all(same_bits(a, b) for a, b in zip(few, launched(), strict=True))


@pytest.mark.parametrize("fp8", [False, True])
def test_paged_write_equals_the_packed_one(fp8):
    q, k, v = parts()
    weights = (normal(D, seed=5), normal(D, seed=6))
    packed = KeyValueStore.packed(T, G, D, fp8, q.device)
    expected = qk_norm_rope_store(
        q, k, v, POSITIONS, TABLE, packed, num_heads=H, norm_weights=weights
    )
    kv = torch.zeros((4, 8, G, D), device=DEVICE).to(packed.k.dtype)
    scales = torch.zeros((4, 8, G), device=DEVICE) if fp8 else None
    paged = KeyValueStore(kv, kv.clone(), scales, None if scales is None else scales.clone())
    slots = torch.tensor([3, 31, 8, 9, -1, 0, 1, 2, 17, 30, 22], device=DEVICE)
    q1, s1 = qk_norm_rope_store(
        q, k, v, POSITIONS, TABLE, paged, num_heads=H, slots_T=slots, norm_weights=weights
    )
    assert same_bits(q1, expected[0]) and (s1 is None or same_bits(s1, expected[1]))
    keep = slots >= 0
    pairs = [(paged.k, packed.k), (paged.v, packed.v)]
    if fp8:
        pairs += [(paged.k_scale, packed.k_scale), (paged.v_scale, packed.v_scale)]
    for ours, theirs in pairs:
        flat = ours.flatten(0, 1)
        assert same_bits(flat[slots[keep]], theirs[0][keep])
        untouched = torch.ones(32, dtype=torch.bool, device=DEVICE)
        untouched[slots[keep]] = False
        assert not flat[untouched].float().any()


def test_fp8_is_the_quantised_bf16():
    q, k, v = parts()
    plain = KeyValueStore.packed(T, G, D, False, q.device)
    coded = KeyValueStore.packed(T, G, D, True, q.device)
    out, _ = qk_norm_rope_store(q, k, v, POSITIONS, TABLE, plain, num_heads=H)
    codes, scale = qk_norm_rope_store(q, k, v, POSITIONS, TABLE, coded, num_heads=H)
    for bf16, ours, ours_scale in (
        (out, codes, scale),
        (plain.k[0], coded.k[0], coded.k_scale[0]),
        (plain.v[0], coded.v[0], coded.v_scale[0]),
    ):
        heads = bf16.reshape(-1, D)
        expected = scale_of(heads.cpu().float().abs().amax(-1), 448.0)
        assert same_bits(ours_scale.reshape(-1), expected)
        assert same_bits(ours.view(torch.uint8).reshape(-1, D), blocks(heads)[0][:, :D])


def test_norm_comes_before_the_rotation_and_is_rounded():
    q, k, v = parts()
    weights = (normal(D, seed=5), normal(D, seed=6))
    store = KeyValueStore.packed(T, G, D, False, q.device)
    out, _ = qk_norm_rope_store(
        q, k, v, POSITIONS, TABLE, store, num_heads=H, norm_weights=weights, eps=1e-6
    )
    x = q.cpu().float().reshape(T, H, D)
    squares = x[..., : D // 2] ** 2 + x[..., D // 2 :] ** 2
    while squares.shape[-1] > 1:
        squares = squares[..., 0::2] + squares[..., 1::2]
    # numpy's FP32 sqrt is correctly rounded; torch's on a CPU is not.
    rstd = 1.0 / torch.from_numpy(np.sqrt((squares / D + 1e-6).numpy()))
    normed = ((x * rstd) * weights[0].cpu().float()).to(BF16)
    assert same_bits(out, rotated(normed.reshape(T, -1), H))


@pytest.mark.parametrize("norm", [False, True])
def test_backward(norm):
    q, _, _ = parts()
    dy, weight = normal(T, H, D, seed=7), normal(D, seed=5)
    dx, dweight = rope_backward(
        dy, POSITIONS, TABLE, x_TN=q if norm else None, norm_weight=weight if norm else None
    )
    x = q.cpu().double().reshape(T, H, D).requires_grad_()
    w = weight.cpu().double().requires_grad_()
    y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w if norm else x
    cos, sin = (t.cpu().double()[POSITIONS.cpu().long()][:, None, :] for t in TABLE)
    a, b = y[..., : D // 2], y[..., D // 2 :]
    y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    (y * dy.cpu().double()).sum().backward()
    torch.testing.assert_close(dx.cpu().double(), x.grad.reshape(T, -1), rtol=2**-8, atol=1e-5)
    if norm:
        torch.testing.assert_close(dweight.cpu().double(), w.grad, rtol=1e-5, atol=1e-5)


def test_embedding_and_its_gradient():
    ids = torch.tensor([3, 0, 3, 9, 3, 0], device=DEVICE)
    weight, dy = normal(10, 48), normal(6, 48, seed=1)
    assert same_bits(embed(ids, weight), weight[ids])
    dweight = torch.ones((10, 48), device=DEVICE)
    embed_backward(dy, ids, dweight)
    expected = torch.ones((10, 48))
    for i, row in enumerate(ids.tolist()):
        expected[row] += dy[i].cpu().float()
    assert same_bits(dweight, expected)
