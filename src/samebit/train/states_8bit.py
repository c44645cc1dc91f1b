"""AdamW whose moments take a byte each: 256 values share a scale, rounded at random but reproducibly.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861) keep moments in
blocks of a byte a value. Two things are different here. Codes are small floating-point numbers
relative to the block's largest value: a sign, 15 octaves and 3 bits for the first moment; 32
octaves and 3 bits for the second, which is never negative. And a value between two codes goes to
either with the chance that keeps it unbiased: rounded to nearest, a second moment that moves by
1 - beta2 = 0.001 a step would never leave its code. The chance is a hash of (step, element), so
two runs agree in every bit. Only a second moment too small for its smallest code is always rounded up to
it: at 0 beside a first moment that is not, it would divide that by epsilon alone.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from samebit.train.states import AdamWStates

BLOCK_VALUES = 256
"""Values that share a scale."""
SMALLEST = 4096
"""Parameters with fewer values (norm gains, biases) keep FP32 moments."""
_CHUNK = 1 << 22
"""Values updated at a time in torch; a multiple of BLOCK_VALUES. Bounds the temporaries."""

ONE = 0x3F8
"""The upper 12 bits of FP32 1.0: sign, exponent and the 3 leading bits of the fraction."""


@dataclass(frozen=True)
class MomentFormat:
    """Codes 1..`one` are the FP32 numbers with upper bits code + base; `one` is 1.0, 0 is 0."""

    one: int
    stream: int
    """Which of the two random streams rounds it."""
    vanishes: bool
    """Whether what is below the smallest code may become 0."""

    @property
    def base(self) -> int:
        """What a code is short of its FP32 upper bits."""
        return ONE - self.one

    @property
    def smallest(self) -> float:
        """The value of code 1."""
        bits = torch.tensor((self.base + 1) << 20, dtype=torch.int32)
        return float(bits.view(torch.float32))


FIRST = MomentFormat(one=120, stream=0, vanishes=True)
"""7 bits and a sign: relative to the block's largest down to 2^-15."""
SECOND = MomentFormat(one=255, stream=1, vanishes=False)
"""8 bits without a sign: down to 2^-32."""


@dataclass(frozen=True)
class Update:
    """One step's scalars, the same for every value. key: of the random streams."""

    beta1: float
    beta2: float
    epsilon: float
    decay: float
    """1 - learning rate * weight decay."""
    size: float
    """Learning rate over the bias correction of the first moment."""
    root: float
    """1 / sqrt(bias correction of the second moment)."""
    key: int

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> Update:
        """Of a parameter group at its step `step` (from 1)."""
        beta1, beta2 = group["betas"]
        return cls(
            beta1=beta1,
            beta2=beta2,
            epsilon=group["eps"],
            decay=1.0 - group["lr"] * group["weight_decay"],
            size=group["lr"] / (1.0 - beta1**step),
            root=1.0 / math.sqrt(1.0 - beta2**step),
            key=step,
        )


def apply_(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, u: Update) -> None:
    """AdamW on FP32 tensors in place: p, m and v (Loshchilov & Hutter, arXiv 1711.05101)."""
    m.mul_(u.beta1).add_(grad * (1.0 - u.beta1))
    v.mul_(u.beta2).add_(grad * grad * (1.0 - u.beta2))
    denominator = v.sqrt().mul_(u.root).add_(u.epsilon)
    p.mul_(u.decay).sub_((m / denominator).mul_(u.size))


def random_bits(first: int, count: int, key: int, stream: int, device: torch.device) -> Tensor:
    """int64 [count], each below 2^20: a hash of (key, stream, element first + i)."""
    mask = 0xFFFFFFFF
    x = torch.arange(first, first + count, dtype=torch.int64, device=device) & mask
    x = x ^ ((2 * key + stream) * 0x9E3779B1 & mask)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & mask
    return (x ^ (x >> 16)) >> 12


def encode(x: Tensor, form: MomentFormat, random: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 [n], n a multiple of BLOCK_VALUES -> (codes int16 [n] of the magnitudes, scale [n / 256])."""
    blocks = x.abs().view(-1, BLOCK_VALUES)
    scale = blocks.amax(1)
    y = (blocks / torch.where(scale > 0, scale, 1.0)[:, None]).view(-1)
    codes = ((y.view(torch.int32).long() + random) >> 20) - form.base
    below = (random.float() * (2.0**-20 * form.smallest) < y).long()
    if not form.vanishes:
        below = (blocks > 0).view(-1).long()
    return torch.where(y < form.smallest, below, codes).short(), scale


def decode(codes: Tensor, scale: Tensor, form: MomentFormat) -> Tensor:
    """The magnitudes FP32 [n] of `encode`."""
    bits = (codes.int() + form.base) << 20
    values = torch.where(codes == 0, 0.0, bits.view(torch.float32))
    return (values.view(-1, BLOCK_VALUES) * scale[:, None]).view(-1)


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % BLOCK_VALUES))


def update_8bit(p: Tensor, grad: Tensor, state: dict[str, Tensor], u: Update) -> None:
    """One step on flat FP32 p [n]; codes uint8 [n padded to 256] and scales in `state` are rewritten."""
    for first in range(0, len(p), _CHUNK):
        values = slice(first, min(first + _CHUNK, len(p)))
        coded = slice(first, first + len(_padded(p[values])))
        blocks = slice(first // BLOCK_VALUES, coded.stop // BLOCK_VALUES)
        m_codes, v_codes = (state[k][coded].short() for k in ("exp_avg", "exp_avg_sq"))
        m = decode(m_codes & 0x7F, state["exp_avg_scale"][blocks], FIRST)
        m = torch.where(m_codes >= 0x80, -m, m)
        v = decode(v_codes, state["exp_avg_sq_scale"][blocks], SECOND)
        size = values.stop - first
        apply_(p[values], grad[values], m[:size], v[:size], u)
        for name, x, form in (("exp_avg", m, FIRST), ("exp_avg_sq", v, SECOND)):
            random = random_bits(first, len(x), u.key, form.stream, x.device)
            codes, state[f"{name}_scale"][blocks] = encode(x, form, random)
            if form is FIRST:
                codes = codes | (x < 0).short() << 7
            state[name][coded] = codes.to(torch.uint8)


class AdamW8bit(AdamWStates):
    """Moments in a byte each (see the module); nothing waits for the device."""

    KEYS: ClassVar = ("step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(_first_state(p))
        state["step"] += 1
        u = Update.of(group, int(state["step"]))
        if p.numel() < SMALLEST:
            apply_(p, p.grad, state["exp_avg"], state["exp_avg_sq"], u)  # type: ignore[arg-type]
            return
        flat, grad = p.view(-1), p.grad.reshape(-1)  # type: ignore[union-attr]
        if p.device.type == "cuda":
            # late: triton must not be needed on a CPU
            importlib.import_module("samebit.kernels.adamw_8bit").update_8bit(flat, grad, state, u)
        else:
            update_8bit(flat, grad, state, u)


def _first_state(p: Tensor) -> dict[str, Tensor]:
    step = torch.zeros(())
    if p.numel() < SMALLEST:
        return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    blocks = -(-p.numel() // BLOCK_VALUES)
    state = {"step": step}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros(blocks * BLOCK_VALUES, dtype=torch.uint8, device=p.device)
        state[f"{name}_scale"] = torch.zeros(blocks, device=p.device)
    return state
