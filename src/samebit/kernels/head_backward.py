"""Backward of the head's log-prob and entropy, vocabulary chunk by chunk.

A chunk's gradient of the logits [T, chunk] is made in BF16 from a recomputed tile and the saved
log-sum-exp, then multiplied by cuBLAS (deterministic) into the FP32 gradients of hidden and weight.

One pass: sampler and trainer agree bit for bit, so the log-sum-exp may be the one that the sampler
stored, and the gradient of the loss with respect to each log-prob follows from the stored
log-probs. The same tiles then also give this pass's own log-probs (`parts`), so nothing is
computed twice and the agreement is still checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from samebit.kernels.head import HeadParts, store_target_logit
from samebit.kernels.head_restrict import HeadCut
from samebit.kernels.head_tile import (
    VOCAB_TILE,
    HeadTile,
    descriptors,
    head_tile,
    over_tokens,
    stays,
    store_parts,
    tile_place,
    tile_scaled_logits,
)
from samebit.kernels.launch import cdiv, launch
from samebit.kernels.quantize_common import NUMERIC_OPTIONS, round_to_bf16

CHUNK = 33 * VOCAB_TILE
"""Ids per chunk: 1.4 % of the FP32 logits at 8,192 x 151,936, and whole waves on 132 processors."""


@triton.jit
def _head_gradient_kernel(
    hidden_desc, weight_desc, inverse_temperature_ptr, cut_ptr, cut_id_ptr, target_ptr,
    lse_ptr, dlogp_ptr, entropy_ptr, dentropy_ptr, out_ptr,
    max_ptr, sum_ptr, moment_ptr, target_logit_ptr,
    out_stride, row_offset, T, K, vocab_size, num_vocab_tiles,
    ENTROPY: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENT: tl.constexpr,
    RESTRICT: tl.constexpr,
    SWAP: tl.constexpr,
    TOKENS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKEN_GROUP: tl.constexpr,
):  # fmt: skip
    token_tile, vocab_tile = tile_place(tl.program_id(0), T, num_vocab_tiles, TOKENS, TOKEN_GROUP)
    first_token = token_tile * TOKENS
    first_id = vocab_tile * VOCAB
    z, ids, t = tile_scaled_logits(
        hidden_desc, weight_desc, inverse_temperature_ptr, cut_ptr, cut_id_ptr, first_token,
        first_id, row_offset, T, K, vocab_size, RESTRICT, SWAP, TOKENS, VOCAB, BLOCK_K,
    )  # fmt: skip
    if PARTS:
        parts = (row_offset // VOCAB + vocab_tile).to(tl.int64) * T
        store_parts(
            z, ids, vocab_size, max_ptr + parts, sum_ptr + parts, moment_ptr + parts, t, T,
            MOMENT, RESTRICT, SWAP,
        )  # fmt: skip
        store_target_logit(
            z, ids, target_ptr, target_logit_ptr, first_token, row_offset + first_id, T, SWAP,
            TOKENS,
        )  # fmt: skip
    row = first_token + tl.arange(0, TOKENS)
    rows = row < T
    inverse = tl.load(inverse_temperature_ptr + row, mask=rows, other=0.0)
    inverse = tl.where(inverse == 0.0, 1.0, inverse)
    lse = tl.load(lse_ptr + row, mask=rows, other=0.0)
    target = tl.load(target_ptr + row, mask=rows, other=-1).to(tl.int32)
    dlogp = tl.load(dlogp_ptr + row, mask=rows, other=0.0) * inverse
    logp = z - over_tokens(lse, SWAP)
    p = tl.exp(logp)
    gradient = tl.where(ids == over_tokens(target, SWAP), 1.0 - p, -p) * over_tokens(dlogp, SWAP)
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row, mask=rows, other=0.0)
        dentropy = tl.load(dentropy_ptr + row, mask=rows, other=0.0) * inverse
        shifted = tl.where(stays(z, ids, vocab_size, RESTRICT), logp, 0.0)
        shifted += over_tokens(entropy, SWAP)
        gradient -= over_tokens(dentropy, SWAP) * (p * shifted)
    column = ids - row_offset
    address = out_ptr + t.to(tl.int64) * out_stride + column
    tl.store(address, round_to_bf16(gradient), mask=(t < T) & (column < out_stride))


@dataclass(frozen=True)
class HeadGradient:
    """What the loss hands to the head: FP32 [T] gradients of the log-probs and of the entropies.

    `entropy` is the forward's; both entropy fields may be None.
    """

    dlogp: torch.Tensor
    entropy: torch.Tensor | None = None
    dentropy: torch.Tensor | None = None


def _gradient_chunk(
    hidden_TK: torch.Tensor,
    weight_CK: torch.Tensor,
    target_T: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    lse_T: torch.Tensor,
    gradient: HeadGradient,
    out_TC: torch.Tensor,
    row_offset: int,
    vocab_size: int,
    parts: HeadParts | None,
    parts_entropy: bool,
    tile: HeadTile,
    cut: HeadCut | None = None,
) -> None:
    """Write the gradient of the (unscaled) logits of one chunk of weight rows."""
    T, K = hidden_TK.shape
    hidden_desc, weight_desc = descriptors(hidden_TK, weight_CK, tile)
    vocab_tiles = cdiv(weight_CK.shape[0], VOCAB_TILE)
    entropy, dentropy = gradient.entropy, gradient.dentropy
    has_entropy = dentropy is not None
    assert not has_entropy or entropy is not None
    launch(
        _head_gradient_kernel,
        (cdiv(T, tile.tokens) * vocab_tiles,),
        hidden_desc,
        weight_desc,
        inverse_temperature_T,
        lse_T if cut is None else cut.logit,
        lse_T if cut is None else cut.id,
        target_T,
        lse_T,
        gradient.dlogp,
        lse_T if entropy is None else entropy,
        lse_T if dentropy is None else dentropy,
        out_TC,
        lse_T if parts is None else parts.top,
        lse_T if parts is None else parts.sum,
        lse_T if parts is None else parts.moment,
        lse_T if parts is None else parts.target_logit,
        out_TC.stride(0),
        row_offset,
        T,
        K,
        vocab_size,
        vocab_tiles,
        ENTROPY=has_entropy,
        PARTS=parts is not None,
        MOMENT=parts_entropy,
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


def head_log_prob_backward(
    hidden_TK: torch.Tensor,
    weight_VK: torch.Tensor,
    target_T: torch.Tensor,
    inverse_temperature_T: torch.Tensor,
    lse_T: torch.Tensor,
    gradient: HeadGradient,
    vocab_size: int,
    *,
    dweight_VK: torch.Tensor | None = None,
    parts: HeadParts | None = None,
    parts_entropy: bool = False,
    chunk: int = CHUNK,
    cut: HeadCut | None = None,
    tile: HeadTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dhidden FP32 [T, K], dweight FP32 [V, K]); inputs as in `head_log_prob`.

    `lse_T` is the forward's, or the one the sampler stored; `cut` the forward's too. `dweight_VK` is
    accumulated into when given. `parts` (see `HeadParts.empty`) receives this pass's own forward
    results; combine them afterwards. Deterministic; extra memory is one BF16 chunk [T, chunk].
    """
    T, K = hidden_TK.shape
    V = weight_VK.shape[0]
    assert T > 0 and chunk % VOCAB_TILE == 0
    tile = tile or head_tile(T)
    accumulate = dweight_VK is not None
    if dweight_VK is None:
        dweight_VK = torch.empty((V, K), dtype=torch.float32, device=hidden_TK.device)
    assert dweight_VK.dtype == torch.float32 and dweight_VK.shape == (V, K)
    dhidden = torch.empty((T, K), dtype=torch.float32, device=hidden_TK.device)
    buffer = torch.empty((T, min(chunk, V)), dtype=torch.bfloat16, device=hidden_TK.device)
    for start in range(0, V, chunk):
        rows = min(chunk, V - start)
        weight = weight_VK[start : start + rows]
        dlogits = buffer.view(-1)[: T * rows].view(T, rows)
        _gradient_chunk(
            hidden_TK, weight, target_T, inverse_temperature_T, lse_T, gradient, dlogits, start,
            vocab_size, parts, parts_entropy, tile, cut,
        )  # fmt: skip
        multiply_add(dlogits, weight, dhidden, start > 0)
        multiply_add(dlogits.t(), hidden_TK, dweight_VK[start : start + rows], accumulate)
    return dhidden, dweight_VK


def multiply_add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """out (+)= a @ b with BF16 operands, FP32 accumulation and FP32 output."""
    if accumulate:
        torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
