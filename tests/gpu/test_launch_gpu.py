"""On the card: the short launch is taken, and gives the bits of Triton's own."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
from samebit.kernels import launch as short
from samebit.quant.plan import load_recipe
from samebit.types import Sampling
from tests.gpu.backend_cases import DEVICE, MODELS, learn, random_model
from tests.gpu.engine_wide_cases import prompts_of
from tests.kernels.pointwise_oracle import same_bits

pytestmark = pytest.mark.gpu
RECIPES = ("bf16", "fp8", "fp8-kv", "fp8-row", "int8", "fp8-jet")


def trained(recipe: str) -> list[torch.Tensor]:
    """Weights after a rollout and an update, the drawn tokens and their log-probs."""
    from samebit.config import RolloutConfig
    from samebit.engine.native import Engine

    torch.manual_seed(0)
    model = random_model(MODELS["qwen3"], recipe, DEVICE)
    engine = Engine(model, RolloutConfig(max_batch=8), None, 0)
    vocabulary = model.config.tokenizer_size
    prompts = prompts_of([5, 130, 17, 300], vocabulary, 1)
    found = []
    for _ in range(2):
        groups = engine.generate(prompts, 2, Sampling(max_tokens=24))
        found += [torch.tensor(s.ids) for g in groups for s in g.samples]
        found += [torch.tensor(s.logps) for g in groups for s in g.samples]
        learn(model, groups)
        engine.refresh()
    engine.close()
    return found + [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_the_same_either_way(recipe: str, monkeypatch: pytest.MonkeyPatch):
    load_recipe(recipe)
    monkeypatch.setattr(short, "_READY", {})
    monkeypatch.setattr(short, "_MAPS", {})
    ours = trained(recipe)
    kept = list(short._READY.values())
    monkeypatch.setattr(short, "is_known", lambda: False)
    tritons = trained(recipe)
    assert all(same_bits(a, b) for a, b in zip(ours, tritons, strict=True))
    assert len(kept) > 20
    assert all(ready is not None for ready in kept), "a kernel never takes the short launch"
    assert 100 < len(short._MAPS) < short.MOST_MAPS
