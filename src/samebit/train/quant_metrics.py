"""quant/ metrics: how many codes an update moved, how an update compares with the rounding error.

The weight-update problem of low-precision RL (QuRL 4.3): a step far below a code's spacing leaves the
sampler where it was. Measured on every linear (codes) and on one block per role (sizes).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from samebit.formats import get_format
from samebit.layers.linear import Linear
from samebit.models.decoder import Decoder
from samebit.operand import Operand, QuantizedWeight
from samebit.reference.quantize import dequantize_weight

CODES_LIMIT = 512 << 20
"""Most bytes of codes a snapshot holds; beyond it as many evenly spaced blocks as fit are followed."""


def _integers(weight: QuantizedWeight) -> torch.Tensor:
    """The stored codes as integers, padding (always zero codes) included."""
    return weight.codes.view(torch.uint8 if weight.codes.element_size() == 1 else torch.int16)


def _nonzero(weight: QuantizedWeight) -> torch.Tensor:
    """How many codes are not zero of either sign, on the device."""
    if weight.codes.dtype == torch.int8:
        return torch.count_nonzero(weight.codes)
    codes = _integers(weight)
    return torch.count_nonzero(codes & (0x7F if codes.dtype == torch.uint8 else 0x7FFF))


def _followed(model: Decoder) -> list[tuple[str, Linear]]:
    """Every linear, or those of evenly spaced blocks where all codes would be too many bytes."""
    layers = model.config.layers
    found = list(model.linears())
    size = sum(m.weights["rollout"].codes.nbytes for _, m in found)
    if size <= CODES_LIMIT:
        return found
    blocks = max(1, CODES_LIMIT * layers // size)
    chosen = {f"layers.{(2 * i + 1) * layers // (2 * blocks)}." for i in range(blocks)}
    return [(n, m) for n, m in found if n[: n.index(".", len("layers.")) + 1] in chosen]


class UpdateProbe:
    """Snapshot before an optimiser step; `measure` after the refresh gives the quant/ metrics.

    Counts stay on the device until all are known: `measure` waits for it once.
    """

    def __init__(self, model: Decoder) -> None:
        middle = f"layers.{model.config.layers // 2}."
        self.linears = _followed(model)
        self.middle = [(n, m) for n, m in model.linears() if n.startswith(middle)]
        self.codes = {name: _integers(m.weights["rollout"]).clone() for name, m in self.linears}
        self.masters = {name: m.master.detach().clone() for name, m in self.middle}

    def measure(self) -> dict[str, float]:
        """quant/codes_moved_share, weight_zero_share and update_over_error, each by role."""
        counts: list[torch.Tensor] = []
        for name, module in self.linears:
            weight = module.weights["rollout"]
            moved_codes = (_integers(weight) != self.codes[name]).sum()
            counts += [moved_codes.double(), _nonzero(weight).double()]
        ratios = [self._ratio(name, module) for name, module in self.middle]
        numbers: list[float] = torch.stack([*counts, *ratios]).tolist()
        moved: dict[str, float] = {}
        zero: dict[str, float] = {}
        total: dict[str, float] = {}
        for i, (_, module) in enumerate(self.linears):
            role, weight = module.shape.role, module.weights["rollout"]
            real = weight.out_features * weight.features
            moved[role] = moved.get(role, 0.0) + numbers[2 * i]
            zero[role] = zero.get(role, 0.0) + (real - numbers[2 * i + 1])
            total[role] = total.get(role, 0.0) + real
        out = {f"quant/codes_moved_share/{r}": n / total[r] for r, n in moved.items()}
        out |= {f"quant/weight_zero_share/{r}": n / total[r] for r, n in zero.items()}
        for (_, module), ratio in zip(self.middle, numbers[len(counts) :], strict=True):
            out[f"quant/update_over_error/{module.shape.role}"] = ratio
        return out

    def _ratio(self, name: str, module: Linear) -> torch.Tensor:
        """RMS of the master's update over the RMS of its rounding error, FP64 on the device."""
        master = module.master.detach()
        error = (dequantize_weight(module.weights["rollout"]) - master).norm()
        update = (master - self.masters[name]).norm()
        return torch.where(error != 0, update / error, torch.inf).double()


Observed = dict[str, torch.Tensor]
"""By role: FP64 [3], codes at the format's maximum, non-zero inputs coded as zero, elements."""


def observe_activations(model: Decoder, store: Observed) -> Callable[[], None]:
    """Count codes at the format's maximum and non-zero inputs coded as zero, on the middle block.

    Fills `store`; the returned function removes the hooks.
    """
    middle = f"layers.{model.config.layers // 2}."
    hooked = [(n, m) for n, m in model.linears() if n.startswith(middle)]

    def make(role: str) -> Callable[[torch.Tensor, Operand], None]:
        def observe(x_TK: torch.Tensor, operand: Operand) -> None:
            largest = get_format(operand.precision.format).max
            if largest is None:
                return
            codes = operand.codes[:, : operand.features].float()
            saturated = (codes.abs() == largest).sum()
            flushed = ((codes == 0) & (x_TK != 0)).sum()
            elements = torch.full_like(saturated, codes.numel())
            counts = torch.stack([saturated, flushed, elements]).double()
            store[role] = store[role] + counts if role in store else counts

        return observe

    for _, module in hooked:
        module.observe = make(module.shape.role)

    def remove() -> None:
        for _, module in hooked:
            module.observe = None

    return remove


def activation_shares(observed: Observed) -> dict[str, float]:
    """quant/activation_saturated_share and activation_flushed_share of what was observed."""
    out: dict[str, float] = {}
    if observed:
        rows: list[list[float]] = torch.stack(list(observed.values())).tolist()
        for role, (saturated, flushed, count) in zip(observed, rows, strict=True):
            out[f"quant/activation_saturated_share/{role}"] = saturated / count
            out[f"quant/activation_flushed_share/{role}"] = flushed / count
    return out
