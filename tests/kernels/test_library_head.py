"""The library head's two kernels against its definition in torch, and that against FP64."""

import pytest
import torch

from tests.kernels.pointwise_oracle import BF16, DEVICE

from samebit.kernels import library_ops  # isort: skip
from samebit.operand import allocate_weight  # isort: skip
from samebit.reference import library_head  # isort: skip
from samebit.reference.sampling import Transform  # isort: skip
from samebit.spec import BF16 as BF16_WEIGHT  # isort: skip

T, K, V, VOCABULARY = 5, 64, 4500, 4321


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, K, generator=generator).to(BF16).to(DEVICE)
    head = allocate_weight((V,), K, BF16_WEIGHT, torch.device(DEVICE))
    head.codes.copy_(torch.randn(V, K, generator=generator) * 0.4)
    targets = torch.randint(0, VOCABULARY, (T,), generator=generator).to(DEVICE)
    grads = [torch.randn(T, generator=generator).to(DEVICE) for _ in range(2)]
    return hidden, head, targets, grads


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_kernels_and_definition_agree_with_fp64(monkeypatch, temperature, with_entropy):
    def multiply_add(a, b, out, accumulate):
        product = a.float() @ b.float()
        out.copy_(out + product if accumulate else product)

    if DEVICE == "cpu":
        monkeypatch.setattr(library_ops, "multiply_add", multiply_add)
    hidden, head, targets, (dlogp, dentropy) = problem()
    transform = Transform(temperature=temperature)
    logits = (hidden.double() @ head.codes.double().t()).to(BF16).double()
    z = (logits[:, :VOCABULARY] / (temperature or 1.0)).requires_grad_()
    true = z.log_softmax(-1)
    true_logp = true.gather(1, targets[:, None])[:, 0]
    true_entropy = -(true.exp() * true).sum(-1)
    loss = (true_logp * dlogp).sum() + (true_entropy * dentropy).sum() * with_entropy
    (dz,) = torch.autograd.grad(loss, z)
    dlogits = torch.zeros_like(logits)
    dlogits[:, :VOCABULARY] = dz / (temperature or 1.0)
    for ops in (library_head, library_ops):
        logp, entropy, lse, kept = ops.library_log_prob(
            hidden, head, targets, VOCABULARY, transform
        )
        # BF16 logits of two libraries: an ulp of a few of them
        assert float((logp - true_logp.detach()).abs().max()) < 0.05
        assert float((entropy - true_entropy.detach()).abs().max()) < 0.05
        more = dentropy if with_entropy else None
        into = torch.ones(V, K, device=DEVICE)
        dhidden, dweight = ops.library_log_prob_backward(
            dlogp, more, hidden, head, targets, VOCABULARY, transform, entropy, lse, kept, into
        )
        assert dweight is into
        for mine, want in (
            (dhidden, dlogits @ head.codes.double()),
            (dweight - 1.0, dlogits.t() @ hidden.double()),
        ):
            assert float((mine.double() - want).norm() / want.norm()) < 0.02


def test_restricted_sampling_is_refused_by_name():
    hidden, head, targets, _ = problem()
    for ops in (library_head, library_ops):
        with pytest.raises(ValueError, match=r"top_k = 5.*recipe bf16"):
            ops.library_log_prob(hidden, head, targets, VOCABULARY, Transform(1.0, 5))
