"""Top-k and top-p on the card: per token, the last logit that stays in the distribution.

The definition is `reference.sampling.transform_logits`: rank by logit, ties by smaller id, keep top_k
ranks, then the ranks before which less than top_p of the kept mass lies. What is kept is a prefix of
the ranking, so its last member (logit, id) says everything; every kernel of the head removes what
ranks behind it, from logits with the same bits (head_tile.py).

Masses are added as integers in units of 2^-44: exact in any order, so a token's cut does not depend on
the other rows. The reference adds them as FP64; the two may differ where a cumulated mass lies within
2^-26 of top_p. FP32 logits of a few rows are alive at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from samebit.kernels.head_tile import (
    VOCAB_TILE,
    HeadTile,
    descriptors,
    head_tile,
    tile_place,
    tile_scaled_logits,
)
from samebit.kernels.launch import cdiv, launch
from samebit.kernels.quantize_common import NUMERIC_OPTIONS
from samebit.reference.exact import exp

LOGITS_AT_ONCE = 1 << 24
"""Logits sorted at once: about 0.6 GB with the sort's own copies."""
UNIT = 2.0**44
MOST_IDS = 1 << 19
"""Vocabulary whose masses, at most 1 each, add without overflow of 63 bits."""


@dataclass(frozen=True)
class HeadCut:
    """Per token the last kept (logit, id) of the ranking: FP32 [T] and int32 [T]."""

    logit: torch.Tensor
    id: torch.Tensor


@triton.jit
def _logits_kernel(
    hidden_desc,
    weight_desc,
    inverse_temperature_ptr,
    out_ptr,
    T,
    K,
    V,
    vocab_size,
    num_vocab_tiles,
    SWAP: tl.constexpr,
    TOKENS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKEN_GROUP: tl.constexpr,
):
    token_tile, vocab_tile = tile_place(tl.program_id(0), T, num_vocab_tiles, TOKENS, TOKEN_GROUP)
    z, ids, t = tile_scaled_logits(
        hidden_desc, weight_desc, inverse_temperature_ptr, inverse_temperature_ptr,
        inverse_temperature_ptr, token_tile * TOKENS, vocab_tile * VOCAB, 0, T, K, vocab_size,
        False, SWAP, TOKENS, VOCAB, BLOCK_K,
    )  # fmt: skip
    tl.store(out_ptr + t.to(tl.int64) * V + ids, z, mask=(t < T) & (ids < V))


def scaled_logits(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    vocab_size: int,
    *,
    tile: HeadTile | None = None,
) -> torch.Tensor:
    """FP32 [T, V] logits * fl(1/temperature) with the bits every head kernel works on; -inf past
    `vocab_size`. Inputs as in `head_log_prob`."""
    (T, K), V = hidden_TK.shape, weight_VK.shape[0]
    tile = tile or head_tile(T)
    hidden_desc, weight_desc = descriptors(hidden_TK, weight_VK, tile)
    out = torch.empty((T, V), dtype=torch.float32, device=hidden_TK.device)
    tiles = cdiv(V, VOCAB_TILE)
    launch(
        _logits_kernel,
        (cdiv(T, tile.tokens) * tiles,),
        hidden_desc,
        weight_desc,
        inverse_temperature_T,
        out,
        T,
        K,
        V,
        vocab_size,
        tiles,
        SWAP=tile.swap,
        TOKENS=tile.tokens,
        VOCAB=VOCAB_TILE,
        BLOCK_K=tile.block_k,
        TOKEN_GROUP=tile.token_group,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **NUMERIC_OPTIONS,
    )
    return out


def cut_of_logits(logits_TV: torch.Tensor, top_k: int, top_p: float) -> HeadCut:
    """The cut of each row of scaled logits FP32 [T, V]. top_k = 0 and top_p = 1.0 cut nothing."""
    T, V = logits_TV.shape
    assert V <= MOST_IDS
    values, ids = torch.sort(logits_TV, dim=-1, descending=True, stable=True)
    ranks = min(top_k, V) if top_k > 0 else V
    last = torch.full((T, 1), ranks - 1, device=logits_TV.device)
    if top_p < 1.0:
        values, ids = values[:, :ranks], ids[:, :ranks]
        mass = (exp(values - values[:, :1]).double() * UNIT).round().long()
        total = mass.sum(-1, keepdim=True)
        before = mass.cumsum(-1) - mass
        kept = (before.double() < top_p * total.double()).sum(-1, keepdim=True)
        # a row of NaN keeps its first rank, whose NaN the head then shows
        last = kept.clamp(min=1) - 1
    return HeadCut(values.gather(1, last)[:, 0], ids.gather(1, last)[:, 0].int())


def head_cut(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    vocab_size: int,
    top_k: int,
    top_p: float,
    *,
    tile: HeadTile | None = None,
) -> HeadCut:
    """The cut of every token; inputs as in `head_log_prob`. A pure function of a token's logits."""
    T, V = hidden_TK.shape[0], weight_VK.shape[0]
    step = max(1, LOGITS_AT_ONCE // V)
    parts = []
    for i in range(0, T, step):
        rows = slice(i, i + step)
        logits = scaled_logits(
            hidden_TK[rows], weight_VK, inverse_temperature_T[rows], vocab_size, tile=tile
        )
        parts.append(cut_of_logits(logits, top_k, top_p))
    return HeadCut(torch.cat([p.logit for p in parts]), torch.cat([p.id for p in parts]))
