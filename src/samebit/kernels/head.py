"""Log-prob of the target, log-sum-exp and entropy over the vocabulary, logits never materialised.

Extra memory: three FP32 numbers per token and 128 ids, 2.4 % of the FP32 logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, tree_sum


def inverse_temperature(temperature: float, T: int, device: torch.device | str) -> torch.Tensor:
    """FP32 [T] of fl(1/temperature); 0 marks greedy, whose log-probs are those of temperature 1."""
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    value = 1.0 / temperature if temperature > 0 else 0.0
    return torch.full((T,), value, dtype=torch.float32, device=device)


@triton.jit
def _head_kernel(
    hidden_desc,
    weight_desc,
    inverse_temperature_ptr,
    cut_ptr,
    cut_id_ptr,
    target_ptr,
    max_ptr,
    sum_ptr,
    moment_ptr,
    target_logit_ptr,
    T,
    K,
    vocab_size,
    num_vocab_tiles,
    MOMENT: tl.constexpr,
    RESTRICT: tl.constexpr,
    SWAP: tl.constexpr,
    TOKENS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKEN_GROUP: tl.constexpr,
):
    token_tile, vocab_tile = tile_place(tl.program_id(0), T, num_vocab_tiles, TOKENS, TOKEN_GROUP)
    first_token = token_tile * TOKENS
    first_id = vocab_tile * VOCAB
    z, ids, t = tile_scaled_logits(
        hidden_desc, weight_desc, inverse_temperature_ptr, cut_ptr, cut_id_ptr, first_token,
        first_id, 0, T, K, vocab_size, RESTRICT, SWAP, TOKENS, VOCAB, BLOCK_K,
    )  # fmt: skip
    parts = vocab_tile.to(tl.int64) * T
    store_parts(
        z, ids, vocab_size, max_ptr + parts, sum_ptr + parts, moment_ptr + parts, t, T, MOMENT,
        RESTRICT, SWAP,
    )  # fmt: skip
    store_target_logit(z, ids, target_ptr, target_logit_ptr, first_token, first_id, T, SWAP, TOKENS)


@triton.jit
def store_target_logit(
    z, ids, target_ptr, target_logit_ptr, first_token, first_id, T, SWAP: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write z of each token's target where this tile holds it."""
    row = first_token + tl.arange(0, TOKENS)
    target = tl.load(target_ptr + row, mask=row < T, other=-1).to(tl.int32)
    here = (target >= first_id) & (target < first_id + 128)
    if tl.max(here.to(tl.int32), axis=0) > 0:
        address = tl.broadcast_to(target_logit_ptr + over_tokens(row, SWAP), z.shape)
        tl.store(address, z, mask=ids == over_tokens(target, SWAP))


@triton.jit
def _head_combine_kernel(
    max_ptr,
    sum_ptr,
    moment_ptr,
    target_logit_ptr,
    logp_ptr,
    lse_ptr,
    entropy_ptr,
    T,
    num_vocab_tiles,
    MOMENT: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.arange(0, TILES)
    inside = (t < T)[:, None] & (tile < num_vocab_tiles)[None, :]
    offset = tile.to(tl.int64)[None, :] * T + t[:, None]
    base, total, tops, factor = combine_parts(max_ptr, sum_ptr, offset, inside, TILES)
    lse = base + tl.log(total)
    logit = tl.load(target_logit_ptr + t, mask=t < T, other=0.0)
    tl.store(logp_ptr + t, logit - lse, mask=t < T)
    tl.store(lse_ptr + t, lse, mask=t < T)
    if MOMENT:
        sums = tl.load(sum_ptr + offset, mask=inside, other=0.0)
        moments = tl.load(moment_ptr + offset, mask=inside, other=0.0)
        gap = tl.where(factor > 0.0, tops - base[:, None], 0.0)
        mean = tl.div_rn(tree_sum(factor * (moments + sums * gap)), total)
        tl.store(entropy_ptr + t, tl.log(total) - mean, mask=t < T)


@triton.jit
def _known_normaliser_kernel(
    hidden_ptr,
    weight_ptr,
    target_ptr,
    inverse_temperature_ptr,
    logp_ptr,
    lse_ptr,
    K,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + t).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(hidden_ptr + t * K + k, mask=k < K, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + target * K + k, mask=k < K, other=0.0).to(tl.float32)
    inverse = tl.load(inverse_temperature_ptr + t)
    inverse = tl.where(inverse == 0.0, 1.0, inverse)
    tl.store(lse_ptr + t, tl.sum(total, axis=0) * inverse - tl.load(logp_ptr + t))


def known_normaliser(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    target_T: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    logp_T: torch.Tensor,
) -> torch.Tensor:
    """FP32 [T]: the log-sum-exp that a known log-prob implies, logit of the target - logp.

    Within a few FP32 roundings of the forward's: good for a gradient, not for a log-prob.
    """
    T, K = hidden_TK.shape
    assert hidden_TK.is_contiguous() and weight_VK.is_contiguous()
    lse = torch.empty((T,), dtype=torch.float32, device=hidden_TK.device)
    block = 1024
    if T:
        launch(
            _known_normaliser_kernel,
            (T,),
            hidden_TK,
            weight_VK,
            target_T,
            inverse_temperature_T,
            logp_T,
            lse,
            K,
            WIDTH=cdiv(K, block) * block,
            BLOCK=block,
            num_warps=4,
            **NUMERIC_OPTIONS,
        )
    return lse


@dataclass(frozen=True)
class HeadParts:
    """Per-tile parts [vocab tiles, T] FP32 and the target's logit [T], before they are combined."""

    top: torch.Tensor
    sum: torch.Tensor
    moment: torch.Tensor
    target_logit: torch.Tensor

    @classmethod
    def empty(cls, V: int, T: int, entropy: bool, device: torch.device) -> HeadParts:
        """Uninitialised parts for a vocabulary of `V` rows."""
        shape = (cdiv(V, VOCAB_TILE), T)
        top = torch.empty(shape, dtype=torch.float32, device=device)
        moment = torch.empty_like(top) if entropy else top
        # A target outside the vocabulary leaves NaN, which is visible.
        logit = torch.full((T,), float("nan"), dtype=torch.float32, device=device)
        return cls(top, torch.empty_like(top), moment, logit)

    def combine(self, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(log-prob, log-sum-exp, entropy or None), FP32 [T] each."""
        tiles, T = self.top.shape
        logp = torch.empty((T,), dtype=torch.float32, device=self.top.device)
        lse = torch.empty_like(logp)
        out = torch.empty_like(logp) if entropy else None
        rows = 1 if T <= 512 else 4
        launch(
            _head_combine_kernel,
            (cdiv(T, rows),),
            self.top,
            self.sum,
            self.moment,
            self.target_logit,
            logp,
            lse,
            logp if out is None else out,
            T,
            tiles,
            MOMENT=entropy,
            ROWS=rows,
            TILES=next_power_of_2(tiles),
            num_warps=4,
            **NUMERIC_OPTIONS,
        )
        return logp, lse, out


def head_log_prob(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    target_T: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    vocab_size: int,
    *,
    entropy: bool = False,
    cut: HeadCut | None = None,
    tile: HeadTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log-prob of the target, log-sum-exp, entropy or None), FP32 [T] each.

    hidden BF16 [T, K], weight BF16 [V, K], target ids int32 or int64 [T], FP32 fl(1/temperature)
    [T] (see `inverse_temperature`); ids >= `vocab_size` have no probability, nor has what `cut`
    removes. Entropy is in nats.
    """
    T, K = hidden_TK.shape
    V = weight_VK.shape[0]
    assert T > 0 and 0 < vocab_size <= V and weight_VK.shape[1] == K
    tile = tile or head_tile(T)
    hidden_desc, weight_desc = descriptors(hidden_TK, weight_VK, tile)
    parts = HeadParts.empty(V, T, entropy, hidden_TK.device)
    vocab_tiles = cdiv(V, VOCAB_TILE)
    launch(
        _head_kernel,
        (cdiv(T, tile.tokens) * vocab_tiles,),
        hidden_desc,
        weight_desc,
        inverse_temperature_T,
        inverse_temperature_T if cut is None else cut.logit,
        inverse_temperature_T if cut is None else cut.id,
        target_T,
        parts.top,
        parts.sum,
        parts.moment,
        parts.target_logit,
        T,
        K,
        vocab_size,
        vocab_tiles,
        MOMENT=entropy,
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
    return parts.combine(entropy)
