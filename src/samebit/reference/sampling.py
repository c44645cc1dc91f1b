"""Sampling noise and the restricted distribution: pure functions of (seed, sample, position, id) and logits."""

from __future__ import annotations

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
    return relative_and_normaliser(logits_TV)[1]


def relative_and_normaliser(logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(exp(logits - row maximum) [T, V], log-sum-exp [T, 1]), FP32."""
    top = logits_TV.amax(-1, keepdim=True)
    relative = torch.empty_like(logits_TV)
    sums = torch.empty_like(top)
    step = max(1, _CACHED // logits_TV.shape[1])
    for i in range(0, logits_TV.shape[0], step):
        rows = slice(i, i + step)
        relative[rows] = exp(logits_TV[rows] - top[rows])
        sums[rows, 0] = row_sum(relative[rows])
    return relative, top + log(sums)


_CACHED = 1 << 17
"""Logits worked on at once, so that the chain of passes stays in cache. Changes no bit."""


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


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """murmur3's 32-bit finaliser on int32 (wrapping)."""
    x = (x ^ _shift_right(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shift_right(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shift_right(x, 16)


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
    return _mix(_mix(ids ^ low) + high)


def _uniform(low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    h = _words(low, high, ids)
    return (_shift_right(h, 9).float() + 0.5) * 2.0**-23


def _gumbel(u: torch.Tensor) -> torch.Tensor:
    return -log(-log(u))


def gumbel_argmax(
    logits_TV: torch.Tensor, relative_TV: torch.Tensor, keys: list[tuple[int, int]]
) -> torch.Tensor:
    """int64 [T]: the id with the largest logits + gumbel_noise(keys), the smallest on ties.

    relative: exp(logits - row maximum). Noise is computed only where it can win. An id beats the
    row's most likely one, of noise g, only if its own noise -log(-log(u)) reaches
    t = (maximum - logit) + g; then 1 - u <= -log(u) <= exp(-t) = relative * exp(-g).
    """
    low, high = _key_columns(keys, logits_TV.device)
    top, top_id = logits_TV.max(-1, keepdim=True)
    g = _gumbel(_uniform(low, high, top_id.int()))
    # the slack covers every rounding of logits, noise and their sum
    reach = torch.exp(1e-3 + 1e-6 * top.abs() - g)
    smallest = 0.5 * 2.0**-23
    row, column = (relative_TV >= smallest / reach).nonzero().unbind(1)
    u = _uniform(low[row, 0], high[row, 0], column.int())
    able = 1.0 - u <= relative_TV[row, column] * reach[row, 0]
    row, column, u = row[able], column[able], u[able]
    row = torch.cat([row, torch.arange(len(keys), device=row.device)])
    column = torch.cat([column, top_id[:, 0]])
    score = logits_TV[row, column] + torch.cat([_gumbel(u), g[:, 0]])
    best = torch.full_like(top[:, 0], float("-inf")).scatter_reduce_(0, row, score, "amax")
    wins = score == best[row]
    chosen = torch.full_like(top_id[:, 0], logits_TV.shape[1])
    return chosen.scatter_reduce_(0, row[wins], column[wins], "amin")
