"""The head's tile: 128 vocabulary ids of the logits, their log-sum-exp part, and how parts combine.

Every user of the head (training log-probs, their backward, sampling) calls these functions, so a
token's logit and log-sum-exp have the same bits everywhere:
- a logit is one FP32 accumulation over K on the tensor core (wgmma; either operand may be the M
  side), scaled by fl(1/temperature) at one place, ids >= vocab_size masked with -inf;
- the vocabulary is cut in tiles of VOCAB_TILE ids; a tile yields (max, sum of exp(z - max)) over a
  written-out tree: id bit 0, bits 3 to 6, bits 1 and 2 (cheap in registers when tokens are the M
  side, and the same sum when they are not);
- tiles combine as S = sum_i s_i * exp(m_i - m) over adjacent pairs, lse = m + log(S).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from samebit.kernels.launch import Box, form
from samebit.kernels.quantize_common import NATIVE, tree_sum

VOCAB_TILE = 128
"""Ids per log-sum-exp part: part of the numerics."""
_BELOW = tl.constexpr(float("-inf"))


@dataclass(frozen=True)
class HeadTile:
    """How a launch is tiled. Free to tune: the bits do not depend on it.

    swap: vocabulary ids, not tokens, are the M side of the tensor-core product (which needs at
    least 64 rows there; with fewer it would be another instruction and other bits).
    """

    tokens: int
    swap: bool
    num_warps: int
    num_stages: int
    block_k: int = 64
    token_group: int = 16

    def __post_init__(self) -> None:
        assert self.swap or self.tokens >= 64 * self.num_warps // 4


def head_tile(T: int) -> HeadTile:
    """The tile for `T` tokens."""
    if T <= 32:
        return HeadTile(16 if T <= 16 else 32, True, 8, 4)
    if T <= 512:
        return HeadTile(64, False, 4, 4)
    return HeadTile(256, False, 8, 4)


def descriptors(
    hidden_TK: torch.Tensor, weight_VK: torch.Tensor, tile: HeadTile
) -> tuple[Box, Box]:
    """Boxes of the two operands."""
    check_operands(hidden_TK, weight_VK)
    return (
        Box(hidden_TK, form((tile.tokens, tile.block_k), None, 16)),
        Box(weight_VK, form((VOCAB_TILE, tile.block_k), None, 16)),
    )


def check_operands(hidden_TK: torch.Tensor, weight_VK: torch.Tensor) -> None:
    """ValueError unless the copy engine can address both: rows start at whole 16 bytes."""
    for name, x in (("hidden", hidden_TK), ("weight", weight_VK)):
        if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            raise ValueError(
                f"head: {name} must be BF16 with 16-byte aligned rows, got {x.dtype}, strides "
                f"{x.stride()}; pad the width to a multiple of 8"
            )


@triton.jit
def tile_place(pid, T, num_vocab_tiles, TOKENS: tl.constexpr, TOKEN_GROUP: tl.constexpr):
    """(token tile, vocabulary tile) of a program; token tiles go in groups that stay in L2."""
    token_tiles = tl.cdiv(T, TOKENS)
    per_group = TOKEN_GROUP * num_vocab_tiles
    group = pid // per_group
    size = tl.minimum(token_tiles - group * TOKEN_GROUP, TOKEN_GROUP)
    inner = pid % per_group
    return group * TOKEN_GROUP + inner % size, inner // size


@triton.jit
def tile_scaled_logits(
    hidden_desc,
    weight_desc,
    inverse_temperature_ptr,
    cut_ptr,
    cut_id_ptr,
    first_token,
    first_id,
    row_offset,
    T,
    K,
    vocab_size,
    RESTRICT: tl.constexpr,
    SWAP: tl.constexpr,
    TOKENS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """FP32 z = logit * fl(1/temperature), -inf past the vocabulary: [TOKENS, VOCAB], or swapped.

    Also (ids, t) shaped to broadcast against it. `row_offset` is the id of the weight's first row.
    RESTRICT: what ranks behind the token's cut (head_restrict.py) is -inf too.
    """
    if SWAP:
        acc = tl.zeros((VOCAB, TOKENS), dtype=tl.float32)
    else:
        acc = tl.zeros((TOKENS, VOCAB), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        hidden = hidden_desc.load([first_token, k])
        weight = weight_desc.load([first_id, k])
        if not NATIVE:
            # The interpreter multiplies the bit patterns of BF16.
            hidden = hidden.to(tl.float32)
            weight = weight.to(tl.float32)
        if SWAP:
            acc = tl.dot(weight, hidden.T, acc)
        else:
            acc = tl.dot(hidden, weight.T, acc)
    t = first_token + tl.arange(0, TOKENS)
    inverse = tl.load(inverse_temperature_ptr + t, mask=t < T, other=1.0)
    inverse = tl.where(inverse == 0.0, 1.0, inverse)
    ids = row_offset + first_id + tl.arange(0, VOCAB)
    if SWAP:
        ids = ids[:, None]
        t = t[None, :]
        z = acc * inverse[None, :]
    else:
        ids = ids[None, :]
        t = t[:, None]
        z = acc * inverse[:, None]
    z = tl.where(ids < vocab_size, z, _BELOW)
    if RESTRICT:
        cut = tl.load(cut_ptr + t, mask=t < T, other=0.0)
        cut_id = tl.load(cut_id_ptr + t, mask=t < T, other=0)
        # said as what is removed: comparisons with NaN are false, and a NaN logit must stay
        z = tl.where((z < cut) | ((z == cut) & (ids > cut_id)), _BELOW, z)
    return z, ids, t


@triton.jit
def vocab_sum(x, SWAP: tl.constexpr):
    """Sum over the 128 ids of a tile in the written-out order; [TOKENS]."""
    if SWAP:
        n: tl.constexpr = x.shape[1]
        x = tl.sum(tl.reshape(x, (64, 2, n)), axis=1)
        for _ in tl.static_range(4):
            x = tl.sum(tl.reshape(x, (x.shape[0] // 8, 2, 4, n)), axis=1)
            x = tl.reshape(x, (x.shape[0] * 4, n))
        x = tl.sum(tl.reshape(x, (2, 2, n)), axis=1)
        return tl.sum(x, axis=0)
    else:
        n: tl.constexpr = x.shape[0]
        x = tl.sum(tl.reshape(x, (n, 64, 2)), axis=2)
        for _ in tl.static_range(4):
            x = tl.sum(tl.reshape(x, (n, x.shape[1] // 8, 2, 4)), axis=2)
            x = tl.reshape(x, (n, x.shape[1] * 4))
        x = tl.sum(tl.reshape(x, (n, 2, 2)), axis=2)
        return tl.sum(x, axis=1)


@triton.jit
def over_tokens(x, SWAP: tl.constexpr):
    """A [TOKENS] vector shaped to broadcast against a tile."""
    if SWAP:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def stays(z, ids, vocab_size, RESTRICT: tl.constexpr):
    """Whether an id is part of the distribution."""
    if RESTRICT:
        return z != _BELOW
    else:
        return ids < vocab_size


@triton.jit
def store_parts(
    z, ids, vocab_size, max_ptr, sum_ptr, moment_ptr, t, T, MOMENT: tl.constexpr,
    RESTRICT: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Write a tile's max, sum of exp(z - max) and, if asked, sum of exp(z - max) * (z - max)."""
    top = tl.max(z, axis=0 if SWAP else 1)
    base = tl.where(top == _BELOW, 0.0, top)
    shifted = z - over_tokens(base, SWAP)
    weight = tl.exp(shifted)
    row = tl.reshape(t, (z.shape[1] if SWAP else z.shape[0],))
    tl.store(max_ptr + row, top, mask=row < T)
    tl.store(sum_ptr + row, vocab_sum(weight, SWAP), mask=row < T)
    if MOMENT:
        # A masked id has weight 0 and shifted -inf.
        alive = stays(z, ids, vocab_size, RESTRICT)
        moment = vocab_sum(tl.where(alive, weight * shifted, 0.0), SWAP)
        tl.store(moment_ptr + row, moment, mask=row < T)


@triton.jit
def combine_parts(max_ptr, sum_ptr, offset, inside, TILES: tl.constexpr):
    """(m, S, tile maxima, rescaling factors) of tokens [rows, TILES] from the parts at `offset`."""
    tops = tl.load(max_ptr + offset, mask=inside, other=_BELOW)
    top = tl.max(tops, axis=1)
    base = tl.where(top == _BELOW, 0.0, top)
    factor = tl.exp(tops - base[:, None])
    sums = tl.load(sum_ptr + offset, mask=inside, other=0.0)
    return base, tree_sum(sums * factor), tops, factor
