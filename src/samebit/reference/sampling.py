"""Sampling noise and the restricted distribution: pure functions of (seed, sample, position, id) and logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from samebit.reference.exact import exp, log, row_sum


@dataclass(frozen=True)
class Transform:
    """What turns logits into the sampling distribution, on both sides (types.Sampling's numbers)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def restricts(self) -> bool:
        """Whether tokens are removed from the distribution."""
        return self.top_k > 0 or self.top_p < 1.0


def transform_logits(logits_TV: torch.Tensor, transform: Transform) -> torch.Tensor:
    """FP32 logits of the sampling distribution: * fl(1/T), removed ids at -inf. Greedy uses T = 1.

    Order: temperature, then top-k, then top-p over what top-k kept; ties at the cut-off are kept by
    smaller id. A pure function of a row's logits: equal logits give equal sets on both sides.
    """
    if transform.temperature not in (0.0, 1.0):
        inverse = torch.tensor(1.0 / transform.temperature, dtype=torch.float32)
        logits_TV = logits_TV * inverse.to(logits_TV.device)
    if not transform.restricts:
        return logits_TV
    order = torch.sort(logits_TV, dim=-1, descending=True, stable=True)
    kept = torch.ones_like(order.values, dtype=torch.bool)
    if transform.top_k > 0:
        kept[:, transform.top_k :] = False
    if transform.top_p < 1.0:
        shifted = order.values - order.values[:, :1]
        mass = exp(shifted).masked_fill_(~kept, 0.0).double()
        # one serial sum per row, in rank order: independent of the other rows
        before = torch.cumsum(mass, -1) - mass
        kept &= before < transform.top_p * mass.sum(-1, keepdim=True)
    keep_by_id = torch.zeros_like(kept).scatter_(1, order.indices, kept)
    return logits_TV.masked_fill(~keep_by_id, float("-inf"))


def log_normaliser(logits_TV: torch.Tensor) -> torch.Tensor:
    """FP32 [T, 1] log-sum-exp of each row as maximum + log(fixed-tree sum)."""
    top = logits_TV.amax(-1, keepdim=True)
    sums = torch.empty_like(top)
    for rows in _cached_rows(logits_TV):
        sums[rows, 0] = row_sum(exp(logits_TV[rows] - top[rows]))
    return top + log(sums)


_CACHED = 1 << 18
"""Logits worked on at once, so that a chain of passes stays in cache. Changes no bit."""


def _cached_rows(x_TV: torch.Tensor) -> Iterator[slice]:
    step = max(1, _CACHED // x_TV.shape[1])
    return (slice(i, i + step) for i in range(0, x_TV.shape[0], step))


def stream_key(seed: int, sample_id: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of a token's noise stream (splitmix64 over the three counters)."""
    key = _splitmix64((stream_state(seed, sample_id) ^ position) & _MASK64)
    return key & _MASK32, key >> 32


def stream_state(seed: int, sample_id: int) -> int:
    """What a sample's tokens have in common: 64 bits, from which each position makes its key."""
    state = _splitmix64(seed & _MASK64)
    return _splitmix64((state ^ sample_id) & _MASK64)


def stream_keys(state_T: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
    """int32 [T, 2]: the keys of `stream_key` as bit patterns, from int64 states and positions."""
    x = (state_T ^ position_T) + _signed64(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed64(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed64(0x94D049BB133111EB)
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return x.contiguous().view(torch.int32).view(-1, 2)


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_MASK32, _MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """murmur3's 32-bit finaliser on int32 (wrapping), in place; scratch: int32 of x's shape."""
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        # torch shifts arithmetically: the mask makes it a logical shift
        torch.bitwise_right_shift(x, bits, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))
        if factor is not None:
            x.mul_(_signed(factor))
    return x


def gumbel_noise(
    keys: list[tuple[int, int]], vocabulary: int, device: torch.device
) -> torch.Tensor:
    """FP32 [T, V] standard Gumbel noise; row t, column v depends on keys[t] and v only.

    h = mix(mix(v ^ low) + high); u = (h >> 9 + 0.5) * 2^-23, in (0, 1) exactly; -log(-log(u)).
    """
    low, high = _key_columns(keys, device)
    ids = torch.arange(vocabulary, dtype=torch.int32, device=device)[None]
    return _gumbel(_uniform(low, high, ids))


def _key_columns(
    keys: list[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    signed = [[_signed(low), _signed(high)] for low, high in keys]
    both = torch.tensor(signed, dtype=torch.int32, device=device)
    return both[:, :1], both[:, 1:]


def noise_words(keys: list[tuple[int, int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """int32 [T, V]: the hash word of every (token, vocabulary id); equal on every backend."""
    low, high = _key_columns(keys, device)
    return _words(low, high, torch.arange(vocabulary, dtype=torch.int32, device=device)[None])


def _words(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    words = torch.bitwise_xor(ids, low)
    scratch = torch.empty_like(words)
    return _mix(_mix(words, scratch).add_(high), scratch)


def _uniform(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    words = _words(low, high, ids)
    top_bits = words.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1)
    return top_bits.float().add_(0.5).mul_(2.0**-23)


def _gumbel(u: torch.Tensor) -> torch.Tensor:
    return -log(-log(u))


_SPAN = 64
"""Ids whose best bound is looked at as one. Changes no bit."""


def gumbel_argmax(logits_TV: torch.Tensor, keys: list[tuple[int, int]]) -> torch.Tensor:
    """int64 [T]: the id with the largest logits + gumbel_noise(keys), the smallest on ties.

    Noise is computed only where it can win: each id's score is bounded from above (`_span_bounds`), and
    what reaches the true score of the id with the largest bound is scored too.
    """
    logits, (low, high) = logits_TV, _key_columns(keys, logits_TV.device)
    bounds = [_span_bounds(logits[r], low[r], high[r]) for r in _cached_rows(logits)]
    spans = torch.cat(bounds)
    best, _, _ = _best_of(spans == spans.amax(-1, keepdim=True), logits, low, high)
    # covers every rounding of bounds, noise, logits and their sums
    slack = 1e-3 + 1e-6 * logits.amax(-1).abs()
    best, row, (score, ids) = _best_of(spans >= (best - slack)[:, None], logits, low, high)
    ids = ids.masked_fill(score != best[row, None], logits.shape[1]).amin(-1)
    chosen = torch.full_like(row[:1], logits.shape[1]).repeat(len(logits))
    return chosen.scatter_reduce_(0, row, ids, "amin")


def _best_of(
    spans: torch.Tensor, logits: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """(largest score of each row, rows [n], (scores, ids) [n, _SPAN]) of spans marked in bool [T, S]."""
    row, span = spans.nonzero().unbind(1)
    ids = span[:, None] * _SPAN + torch.arange(_SPAN, device=logits.device)
    ids.clamp_(max=logits.shape[1] - 1)  # past the end: the last id once more
    score = logits[row[:, None], ids] + _gumbel(_uniform(low[row], high[row], ids.int()))
    best = torch.full_like(logits[:, 0], float("-inf"))
    return best.scatter_reduce_(0, row, score.amax(-1), "amax"), row, (score, ids)


_LN2 = 0.6931471805599453


def _span_bounds(logits: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """FP32 [T, S]: for each _SPAN ids a number that none of their scores exceeds.

    Noise is at most -ln(1 - u), because -ln u >= 1 - u. With 1 - u = 2^-23 f that is ln 2 * (23 - log2 f),
    and the bits of an FP32 f >= 0.5, read as an integer, are at most 2^23 * (127 + log2 f), never
    0.09 * 2^23 less.
    """
    rows, vocabulary = logits.shape
    width = -(-vocabulary // _SPAN) * _SPAN
    words = _words(low, high, torch.arange(width, dtype=torch.int32, device=logits.device)[None])
    f = words.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1).float()
    torch.sub(torch.tensor(2.0**23 - 0.5, device=f.device), f, out=f)
    bounds = f.view(torch.int32).float()
    torch.add(logits, bounds[:, :vocabulary], alpha=-_LN2 * 2.0**-23, out=bounds[:, :vocabulary])
    bounds[:, vocabulary:] = float("-inf")
    return bounds.view(rows, -1, _SPAN).amax(-1).add_(_LN2 * (23 + 127))
