"""What a recipe is made of: precisions, GEMMs, flows. Immutable values, no torch arithmetic.

A *role* names what a linear does (qkv, out, gate_up, down, head); recipes select by role, never by a
pattern on parameter names. The three GEMMs of a linear are forward, input_grad and weight_grad.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from samebit.formats import BLOCK, get_format

Role = Literal["qkv", "out", "gate_up", "down", "head"]
ROLES: tuple[Role, ...] = ("qkv", "out", "gate_up", "down", "head")

_SILENT = {"silent_default": True}
"""On a field added later: left out of `to_dict` at its default, so that earlier plans keep their digest."""


@dataclass(frozen=True)
class Precision:
    """A format and which elements share a scale.

    block = (rows, columns); 0 means the whole axis. None for formats without scales.
    """

    format: str
    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        scaled = get_format(self.format).scaled
        if scaled != (self.block is not None):
            need = "needs" if scaled else "takes no"
            raise ValueError(f"format {self.format!r} {need} block, got {self.block}")

    def __str__(self) -> str:
        if self.block is None:
            return self.format
        rows, columns = (n or "all" for n in self.block)
        return f"{self.format}[{rows}x{columns}]"


BF16 = Precision("bf16")
FP32 = Precision("fp32")
FP8_TOKEN_GROUP = Precision("e4m3", (1, BLOCK))
"""Activations and gradients, groups of 128 along the features (Jet-RL 4.2)."""
FP8_TOKENS = Precision("e4m3", (BLOCK, 1))
"""Weight-gradient operands, groups of up to 128 tokens per feature."""
FP8_BLOCK = Precision("e4m3", (BLOCK, BLOCK))
"""Weights; and X of a weight gradient, up to 128 tokens x 128 features."""
FP8_ROW = Precision("e4m3", (1, 0))
FP8_HEAD = FP8_ROW
"""Q, K or V: one scale per token and head, so that appending to a cache never requantises."""
FP16 = Precision("fp16")
INT8_ROW = Precision("int8", (1, 0))
INT4_ROW = Precision("int4", (1, 0))


@dataclass(frozen=True)
class Gemm:
    """One matrix product. `promote`: elements of K summed before the scale and the FP32 accumulator.

    promote = 0 means the whole of K (exact INT32 sums, and BF16, where K order is one chain).
    library: the product is the platform's own (cuBLAS), free to sum in another order for another
    number of rows. Nothing then says that a row keeps its bits from batch to batch.
    """

    lhs: Precision
    rhs: Precision
    promote: int = 0
    library: bool = field(default=False, metadata=_SILENT)

    def __post_init__(self) -> None:
        if (self.lhs.format, self.rhs.format) not in {
            ("bf16", "bf16"),
            ("e4m3", "e4m3"),
            ("int8", "int8"),
            ("int4", "int4"),
            ("fp32", "fp32"),
        }:
            raise ValueError(
                f"no GEMM multiplies {self.lhs} by {self.rhs}; use one format for both"
            )
        if self.lhs.format == "e4m3" and self.promote <= 0:
            raise ValueError("an FP8 GEMM needs promote > 0: the tensor core keeps too few bits")
        if self.library and self.lhs.format != "bf16":
            raise ValueError(f"only BF16 has a library product here, not {self.lhs}")

    def __str__(self) -> str:
        return f"{self.lhs} x {self.rhs}{' (library)' if self.library else ''}"


GEMM_BF16 = Gemm(BF16, BF16)
GEMM_LIBRARY = Gemm(BF16, BF16, library=True)
GEMM_HEAD = Gemm(BF16, BF16)
"""The head multiplies BF16 by BF16 and keeps FP32 logits (docs/numerics.md)."""


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The two gradient GEMMs of a linear and what the forward keeps for them.

    `saved` is the forward operand kept (its own codes, never requantised); `dequantised` says the
    backward multiplies the dequantised operands of the forward in BF16 (straight-through).
    """

    input_grad: Gemm = GEMM_BF16
    weight_grad: Gemm = GEMM_BF16
    saved: Precision = BF16


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention's constants: block edges decide rounding, so they are part of the plan.

    kv_block: keys per online-softmax step, at absolute positions. kv_split: keys per declared split,
    folded in order (0: one split). q, kv: what scores are computed from and the cache holds;
    probabilities: what P (with FP8 K and V: P times the scale of V) is rounded to before P V.
    The two constants are those of the Hopper kernels (docs/kernels-attention.md has the measurement).
    """

    q: Precision = BF16
    kv: Precision = BF16
    probabilities: Precision = BF16
    kv_block: int = 128
    kv_split: int = 1024


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One forward: the GEMM of each role and the tensors between operators."""

    qkv: Gemm = GEMM_BF16
    out: Gemm = GEMM_BF16
    gate_up: Gemm = GEMM_BF16
    down: Gemm = GEMM_BF16
    head: Gemm = GEMM_HEAD
    attention: Attention = Attention()
    between: Precision = BF16
    norm: Precision = FP32
    embedding: Precision = BF16

    def gemm(self, role: Role) -> Gemm:
        """The forward GEMM of a role."""
        return getattr(self, role)

    @classmethod
    def linears(cls, gemm: Gemm, **changes: Any) -> Flow:
        """A flow whose four block linears share one GEMM (the head stays BF16)."""
        return replace(cls(qkv=gemm, out=gemm, gate_up=gemm, down=gemm), **changes)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A precision recipe: the rollout forward, the training forward and the training backward.

    sqnr_floor_db and logp_gap_limit are what the contract tests hold a recipe to, against FP32, on
    a tiny random model: signal-to-quantisation-noise ratio of a linear in dB and mean |dlogp| in nats.
    """

    name: str
    summary: str
    rollout: Flow
    train: Flow
    backward: Backward = Backward()
    sqnr_floor_db: float
    logp_gap_limit: float

    @property
    def quantised(self) -> bool:
        """Whether any forward GEMM of either side uses scaled operands."""
        return any(gemm.lhs.block is not None for gemm in self._forward_gemms())

    @property
    def library(self) -> bool:
        """Whether any forward GEMM of either side is the platform's own, without a promise of bits."""
        return any(gemm.library for gemm in self._forward_gemms())

    def _forward_gemms(self) -> list[Gemm]:
        return [flow.gemm(role) for flow in (self.rollout, self.train) for role in ROLES]

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict for hashing and saving."""
        return _plain(self)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in fields(value)
            if not (f.metadata.get("silent_default") and getattr(value, f.name) == f.default)
        }
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
