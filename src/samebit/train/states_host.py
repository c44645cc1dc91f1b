"""AdamW whose moments live in host memory and visit the device a slice at a time.

While one slice is updated the next one's moments are on their way in and the last one's on their way
out, on a stream of their own: the device holds two slices of each moment, whatever the model's size.
The arithmetic is torch's own AdamW, so the weights are those of `optimizer_states = "fp32"` bit for bit.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from samebit.train.states import AdamWStates

SLICE = 1 << 26
"""Values a slice: 256 MiB of each moment."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWHost(AdamWStates):
    """torch.optim.AdamW's state, with FP32 moments in pinned host memory.

    A step ends when the last moments have landed there.
    """

    KEYS: ClassVar = ("step", *_MOMENTS)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lanes: dict[torch.device, _Lane] = {}

    def _finish(self) -> None:
        for lane in self._lanes.values():
            lane.finish()

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            pin = p.device.type == "cuda"
            state["step"] = torch.zeros(())
            for name in _MOMENTS:
                state[name] = torch.zeros(p.shape, pin_memory=pin)
        lane = self._lanes.setdefault(p.device, _Lane(p.device))
        flat, grad = p.view(-1), p.grad.reshape(-1)  # type: ignore[union-attr]
        held = [state[name].view(-1) for name in _MOMENTS]
        for first in range(0, len(flat), SLICE):
            part = slice(first, first + SLICE)
            with lane.visit([h[part] for h in held]) as moments:
                _adamw(flat[part], grad[part], moments, state["step"], group)
        state["step"] += 1


def _adamw(
    p: Tensor, grad: Tensor, moments: list[Tensor], step: Tensor, group: dict[str, Any]
) -> None:
    beta1, beta2 = group["betas"]
    fused = p.device.type == "cuda"
    # torch counts in the tensor it is given, and a parameter of several slices would count too far
    count = step.to(p.device, non_blocking=True) if fused else step.clone()
    adamw(
        [p],
        [grad],
        [moments[0]],
        [moments[1]],
        [],
        [count],
        foreach=False,
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _Visit:
    """Moments of one slice on the device for the time of a `with` block."""

    def __init__(self, lane: _Lane, host: list[Tensor]) -> None:
        self.lane, self.host = lane, host

    def __enter__(self) -> list[Tensor]:
        self.device = self.lane.fetch(self.host)
        return self.device

    def __exit__(self, *error: object) -> None:
        self.lane.give_back(self.host, self.device)


class _Lane:
    """The copies to and from one device, two slices in turn. On a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.visits = device, 0
        self.buffers: list[list[Tensor]] = []
        self.written: list[torch.cuda.Event] = []
        self.inward = self.outward = None
        if device.type == "cuda":
            self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def visit(self, host: list[Tensor]) -> _Visit:
        """A block in which `host` is on the device, and after which it holds what became of it."""
        return _Visit(self, host)

    def fetch(self, host: list[Tensor]) -> list[Tensor]:
        """Copies on the device that the current stream may use."""
        if self.inward is None:
            return host
        current = torch.cuda.current_stream(self.device)
        if not self.buffers:
            self.buffers = [[torch.empty(SLICE, device=self.device) for _ in host] for _ in "ab"]
            self.inward.wait_stream(current)
        if len(self.written) >= 2:
            self.inward.wait_event(self.written[-2])
        device = [b[: len(h)] for b, h in zip(self.buffers[self.visits % 2], host, strict=True)]
        with torch.cuda.stream(self.inward):
            for d, h in zip(device, host, strict=True):
                d.copy_(h, non_blocking=True)
        current.wait_stream(self.inward)
        return device

    def give_back(self, host: list[Tensor], device: list[Tensor]) -> None:
        """Write the copies back once the current stream is done with them."""
        if self.outward is None:
            return
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            for h, d in zip(host, device, strict=True):
                h.copy_(d, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.outward)
            self.written.append(event)
        self.visits += 1

    def finish(self) -> None:
        """Wait until the host's moments are whole, then give the device's memory back."""
        if self.outward is not None:
            self.outward.synchronize()
        self.buffers, self.written = [], []
