"""Sampling by the Gumbel-max rule, with the log-prob bits that the training head gives.

One pass over the head's weight: each tile yields its log-sum-exp part (head_tile.py, the training
head's own functions) and its best z + noise; ties go to the smaller id. Greedy tokens (inverse
temperature 0) take no noise, and their log-probs are those of temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from samebit.kernels import sample_fast
from samebit.kernels.attention_layout import on_card
from samebit.kernels.head_restrict import HeadCut
from samebit.kernels.head_tile import (
    VOCAB_TILE,
    HeadTile,
    combine_parts,
    descriptors,
    head_tile,
    over_tokens,
    store_parts,
    tile_place,
    tile_scaled_logits,
)
from samebit.kernels.launch import cdiv, launch, next_power_of_2
from samebit.kernels.quantize_common import NUMERIC_OPTIONS
from samebit.kernels.sample_noise import gumbel, noise_word
from samebit.reference.sampling import stream_key

NO_TOKEN = 2147483647
"""The id drawn from a row of NaN logits."""
_NONE = tl.constexpr(NO_TOKEN)


@triton.jit
def _sample_kernel(
    hidden_desc,
    weight_desc,
    inverse_temperature_ptr,
    cut_ptr,
    cut_id_ptr,
    noise_key_ptr,
    max_ptr,
    sum_ptr,
    key_ptr,
    id_ptr,
    logit_ptr,
    T,
    K,
    vocab_size,
    num_vocab_tiles,
    RESTRICT: tl.constexpr,
    SWAP: tl.constexpr,
    TOKENS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKEN_GROUP: tl.constexpr,
):
    token_tile, vocab_tile = tile_place(tl.program_id(0), T, num_vocab_tiles, TOKENS, TOKEN_GROUP)
    first_token = token_tile * TOKENS
    z, ids, t = tile_scaled_logits(
        hidden_desc, weight_desc, inverse_temperature_ptr, cut_ptr, cut_id_ptr, first_token,
        vocab_tile * VOCAB, 0, T, K, vocab_size, RESTRICT, SWAP, TOKENS, VOCAB, BLOCK_K,
    )  # fmt: skip
    parts = vocab_tile.to(tl.int64) * T
    store_parts(
        z, ids, vocab_size, max_ptr + parts, sum_ptr + parts, max_ptr, t, T, False, RESTRICT, SWAP
    )
    row = first_token + tl.arange(0, TOKENS)
    rows = row < T
    low = tl.load(noise_key_ptr + 2 * row, mask=rows, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(noise_key_ptr + 2 * row + 1, mask=rows, other=0).to(tl.uint32, bitcast=True)
    noise = gumbel(noise_word(ids, over_tokens(low, SWAP), over_tokens(high, SWAP)))
    inverse = tl.load(inverse_temperature_ptr + row, mask=rows, other=0.0)
    key = tl.where(over_tokens(inverse == 0.0, SWAP), z, z + noise)
    best = tl.max(key, axis=0 if SWAP else 1)
    # the maximum passes over NaN: a masked id must not win a tile of NaN
    wins = (key == over_tokens(best, SWAP)) & (key > float("-inf"))
    winner = tl.min(tl.where(wins, ids, _NONE), axis=0 if SWAP else 1)
    logit = tl.where(ids == over_tokens(winner, SWAP), z, float("-inf"))
    logit = tl.max(logit, axis=0 if SWAP else 1)
    tl.store(key_ptr + parts + row, best, mask=rows)
    tl.store(id_ptr + parts + row, winner, mask=rows)
    tl.store(logit_ptr + parts + row, logit, mask=rows)


@triton.jit
def _sample_combine_kernel(
    max_ptr,
    sum_ptr,
    key_ptr,
    id_ptr,
    logit_ptr,
    out_id_ptr,
    logp_ptr,
    lse_ptr,
    T,
    num_vocab_tiles,
    tile_stride,
    token_stride,
    TILES: tl.constexpr,
):
    t = tl.program_id(0) + tl.arange(0, 1)
    tile = tl.arange(0, TILES)
    inside = (t < T)[:, None] & (tile < num_vocab_tiles)[None, :]
    offset = tile.to(tl.int64)[None, :] * tile_stride + t.to(tl.int64)[:, None] * token_stride
    base, total, _, _ = combine_parts(max_ptr, sum_ptr, offset, inside, TILES)
    lse = base + tl.log(total)
    keys = tl.load(key_ptr + offset, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + offset, mask=inside, other=_NONE)
    best = tl.max(keys, axis=1)
    winner = tl.min(tl.where(keys == best[:, None], ids, _NONE), axis=1)
    logits = tl.load(logit_ptr + offset, mask=inside, other=float("-inf"))
    logit = tl.max(tl.where(ids == winner[:, None], logits, float("-inf")), axis=1)
    tl.store(out_id_ptr + t, winner, mask=t < T)
    tl.store(logp_ptr + t, logit - lse, mask=t < T)
    tl.store(lse_ptr + t, lse, mask=t < T)


def noise_keys(
    counters: Sequence[tuple[int, int, int]], device: torch.device | str
) -> torch.Tensor:
    """int32 [T, 2], the two 32-bit keys of each (seed, sample id, position)."""
    keys = [stream_key(*counter) for counter in counters]
    return torch.from_numpy(np.array(keys, dtype=np.uint32).view(np.int32)).to(device)


def draw_tile(T: int) -> HeadTile:
    """The tile for drawing `T` tokens: the training head's, but never of 256 tokens, which spill here."""
    return HeadTile(128, False, 8, 4) if T > 512 else head_tile(T)


def sample(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    noise_keys_T2: torch.Tensor,
    vocab_size: int,
    *,
    cut: HeadCut | None = None,
    tile: HeadTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token ids int64, log-probs FP32, log-sum-exps FP32), [T] each, one drawn token per row.

    Inputs as in `head_log_prob`, and the noise keys int32 [T, 2] of each row's (seed, sample id,
    position), see `noise_keys`. A row of NaN logits yields id `NO_TOKEN` and a
    NaN log-prob.
    """
    T, K = hidden_TK.shape
    V, device = weight_VK.shape[0], hidden_TK.device
    assert T > 0 and 0 < vocab_size <= V and weight_VK.shape[1] == K
    assert noise_keys_T2.shape == (T, 2) and noise_keys_T2.dtype == torch.int32
    assert noise_keys_T2.is_contiguous()
    inputs = (hidden_TK, weight_VK, inverse_temperature_T, noise_keys_T2, vocab_size, cut)
    tiles = cdiv(V, VOCAB_TILE)
    if tile is None and sample_fast.is_faster(T) and on_card(hidden_TK):
        parts = torch.empty((5, T, tiles), dtype=torch.float32, device=device)
        sample_fast.draw(*inputs, parts)
    else:
        parts = torch.empty((5, tiles, T), dtype=torch.float32, device=device).transpose(1, 2)
        _draw(*inputs, tile or draw_tile(T), parts)
    return _combined(parts)


def _draw(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    noise_keys_T2: torch.Tensor,
    vocab_size: int,
    cut: HeadCut | None,
    tile: HeadTile,
    parts: torch.Tensor,
) -> None:
    """Fill `parts` FP32 [5, T, tiles], stored tile by tile, with a program a tile."""
    (T, K), tiles = hidden_TK.shape, parts.shape[2]
    hidden_desc, weight_desc = descriptors(hidden_TK, weight_VK, tile)
    top, total, key, winner, logit = parts.unbind(0)
    launch(
        _sample_kernel,
        (cdiv(T, tile.tokens) * tiles,),
        hidden_desc,
        weight_desc,
        inverse_temperature_T,
        inverse_temperature_T if cut is None else cut.logit,
        inverse_temperature_T if cut is None else cut.id,
        noise_keys_T2,
        top,
        total,
        key,
        winner.view(torch.int32),
        logit,
        T,
        K,
        vocab_size,
        tiles,
        RESTRICT=cut is not None,
        SWAP=tile.swap,
        TOKENS=tile.tokens,
        VOCAB=VOCAB_TILE,
        BLOCK_K=tile.block_k,
        TOKEN_GROUP=tile.token_group,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **NUMERIC_OPTIONS,
    )


def _combined(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, log-probs, log-sum-exps) from parts FP32 [5, T, tiles], any strides."""
    _, T, tiles = parts.shape
    top, total, key, winner, logit = parts.unbind(0)
    ids = torch.empty((T,), dtype=torch.int64, device=parts.device)
    logp = torch.empty((T,), dtype=torch.float32, device=parts.device)
    lse = torch.empty_like(logp)
    launch(_sample_combine_kernel, (T,),
        top, total, key, winner.view(torch.int32), logit, ids, logp, lse, T, tiles, top.stride(1),
        top.stride(0), TILES=next_power_of_2(tiles), num_warps=4, **NUMERIC_OPTIONS,
    )  # fmt: skip
    return ids, logp, lse
