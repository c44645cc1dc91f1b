"""The 8-bit AdamW kernel against its definition in torch: the same codes, scales and weights."""

import torch

from tests.kernels.pointwise_oracle import DEVICE

from samebit.kernels.adamw_8bit import update_8bit  # isort: skip
from samebit.train import states_8bit  # isort: skip

SIZE = 256 * 20 + 77
GROUP = {"betas": (0.9, 0.999), "eps": 1e-8, "lr": 1e-2, "weight_decay": 0.01}


def fresh_state():
    blocks = -(-SIZE // 256)
    state = {}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros(blocks * 256, dtype=torch.uint8, device=DEVICE)
        state[f"{name}_scale"] = torch.zeros(blocks, device=DEVICE)
    return state


def test_codes_scales_and_weights_of_several_steps():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SIZE, generator=generator)
    kernel, torch_ = start.clone().to(DEVICE), start.clone()
    mine, theirs = fresh_state(), {k: v.cpu() for k, v in fresh_state().items()}
    for step in range(1, 6):
        grad = torch.randn(SIZE, generator=generator) * torch.logspace(-6, 0, SIZE)
        grad[::3] *= 1e-8  # second moments below the smallest code
        grad[256:512] = 0.0  # a block without a gradient
        u = states_8bit.Update.of(GROUP, step)
        update_8bit(kernel, grad.to(DEVICE), mine, u)
        states_8bit.update_8bit(torch_, grad, theirs, u)
        for name in theirs:
            assert torch.equal(mine[name].cpu(), theirs[name]), (step, name)
        # torch's FP32 square root on a CPU is an ulp off for some values
        assert float((kernel.cpu() - torch_).abs().max()) < 5e-7
    assert mine["exp_avg"].any() and (kernel.cpu() - start).abs().max() > 0.01
