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


def _bytes(weight: QuantizedWeight) -> torch.Tensor:
    """The codes of real elements as integers; padding is left out of every share."""
    codes = weight.codes.view(torch.uint8 if weight.codes.element_size() == 1 else torch.int16)
    return codes if weight.scale is None else codes[weight.logical_rows(), : weight.features]


def _zeros(weight: QuantizedWeight, codes: torch.Tensor) -> float:
    """How many of `_bytes` encode zero of either sign."""
    if weight.codes.dtype == torch.int8:
        return float((codes == 0).sum())
    negative_zero = 0x80 if codes.dtype == torch.uint8 else -0x8000
    return float(((codes == 0) | (codes == negative_zero)).sum())


class UpdateProbe:
    """Snapshot before an optimiser step; `measure` after the refresh gives the quant/ metrics."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.middle = f"layers.{model.config.layers // 2}."
        self.codes = {name: _bytes(m.weights["rollout"]).clone() for name, m in model.linears()}
        self.masters = {name: m.master.detach().clone() for name, m in self._measured(model)}

    def _measured(self, model: Decoder) -> list[tuple[str, Linear]]:
        return [(n, m) for n, m in model.linears() if n.startswith(self.middle)]

    def measure(self) -> dict[str, float]:
        """quant/codes_moved_share, weight_zero_share and update_over_error, each by role."""
        moved: dict[str, tuple[float, float]] = {}
        zero: dict[str, tuple[float, float]] = {}
        for name, module in self.model.linears():
            weight, role = module.weights["rollout"], module.shape.role
            now = _bytes(weight)
            changed = float((now != self.codes[name]).sum())
            for counts, hit in ((moved, changed), (zero, _zeros(weight, now))):
                hits, total = counts.get(role, (0.0, 0.0))
                counts[role] = (hits + hit, total + now.numel())
        out = {f"quant/codes_moved_share/{r}": a / b for r, (a, b) in moved.items()}
        out |= {f"quant/weight_zero_share/{r}": a / b for r, (a, b) in zero.items()}
        for name, module in self._measured(self.model):
            out[f"quant/update_over_error/{module.shape.role}"] = self._ratio(name, module)
        return out

    def _ratio(self, name: str, module: Linear) -> float:
        """RMS of the master's update over the RMS of its rounding error."""
        master = module.master.detach()
        error = (dequantize_weight(module.weights["rollout"]) - master).norm()
        update = (master - self.masters[name]).norm()
        return float(update / error) if float(error) else float("inf")


def observe_activations(model: Decoder, store: dict[str, list[float]]) -> Callable[[], None]:
    """Count codes at the format's maximum and non-zero inputs coded as zero, on the middle block.

    Fills store[role] = [saturated, flushed, elements]; the returned function removes the hooks.
    """
    middle = f"layers.{model.config.layers // 2}."
    hooked = [(n, m) for n, m in model.linears() if n.startswith(middle)]

    def make(role: str) -> Callable[[torch.Tensor, Operand], None]:
        def observe(x_TK: torch.Tensor, operand: Operand) -> None:
            largest = get_format(operand.precision.format).max
            if largest is None:
                return
            codes = operand.codes[:, : operand.features].float()
            counts = store.setdefault(role, [0.0, 0.0, 0.0])
            counts[0] += float((codes.abs() == largest).sum())
            counts[1] += float(((codes == 0) & (x_TK != 0)).sum())
            counts[2] += codes.numel()

        return observe

    for _, module in hooked:
        module.observe = make(module.shape.role)

    def remove() -> None:
        for _, module in hooked:
            module.observe = None

    return remove
