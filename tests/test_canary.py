"""The canary sings while both sides agree, and names the operator when they do not."""

from __future__ import annotations

import pytest

from samebit.canary import Canary
from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from samebit.errors import RunStopped
from samebit.trace import inject_fault
from samebit.types import Sampling
from tests.engine.common import tiny_model


def test_canary(tmp_path):
    model = tiny_model(tmp_path, "llama", "fp8")
    canary = Canary(model, Sampling(temperature=0.8, max_tokens=50), every=3)
    engine = Engine(model, RolloutConfig(), None, 0)
    canary.check(engine, 0)
    inject_fault(model, "scale", "layers.1.gate_up")
    canary.check(engine, 1)  # not due
    engine.refresh()
    with pytest.raises(RunStopped, match=r"canary after step 3: .*gate_up.* layer 1"):
        canary.check(engine, 3)


def test_no_canary_where_every_token_is_compared_or_none_can_be(tmp_path):
    model = tiny_model(tmp_path, "llama", "fp8")
    assert Canary.of(model, 20, Sampling()) is None
