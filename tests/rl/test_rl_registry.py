"""Names, keys and types of algorithms and corrections, and the rules for pairs."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import pytest

from samebit.option_aliases import OPTION_ALIASES as ALIASES
from samebit.rl.api import Algorithm
from samebit.rl.checks import check_pair
from samebit.rl.registry import list_algorithms, load_algorithm, load_correction
from samebit.types import Sampling

PLAIN = Sampling()


def test_defaults_are_the_common_ones():
    grpo, dapo = load_algorithm("grpo").config, load_algorithm("dapo").config
    assert (grpo.clip_low, grpo.clip_high, grpo.kl_estimator) == (0.2, 0.2, "k3")
    assert (dapo.clip_low, dapo.clip_high, dapo.averaging) == (0.2, 0.28, "token-mean")
    assert load_correction("tis").config.cap == load_correction("acr").config.cap == 2.0
    assert load_correction("reject+tis", {"tis": {"cap": 8}}).cap == 8.0


@pytest.mark.parametrize("alias", ["epsilon", "clip_ratio", "eps_clip"])
def test_one_number_for_both_clips_yields_to_a_side(alias):
    config = load_algorithm("grpo", {alias: 0.1}).config
    assert (config.clip_low, config.clip_high) == (0.1, 0.1)
    for table in ({"clip_ratio_high": 0.3, alias: 0.1}, {alias: 0.1, "clip_high": 0.3}):
        config = load_algorithm("grpo", table).config
        assert (config.clip_low, config.clip_high) == (0.1, 0.3)


def test_other_tools_keys():
    table = {"beta": 0.01, "loss_agg_mode": "token-mean", "clip_ratio_c": 4, "entropy_coeff": 1e-3}
    config = load_algorithm("grpo", table).config
    assert (config.kl_coefficient, config.averaging) == (0.01, "token-mean")
    assert (config.dual_clip, config.entropy_coefficient) == (4.0, 1e-3)
    assert isinstance(config.dual_clip, float)
    assert load_correction("tis", {"rollout_is_threshold": 5}).config.cap == 5.0
    assert all(target not in ALIASES for targets in ALIASES.values() for target in targets)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"clip_hgh": 0.2}, "clip_high"),
        ({"clip-low": 0.2, "clip_low": 0.2}, "both set clip_low"),
        ({"epsilon": 0.2, "clip_ratio": 0.1}, "both set"),
        ({"clip_high": 0.2, "epsilon_high": 0.1}, "both set"),
        ({"clip_low": "0.2"}, "is a string, must be a number; write 0.2 without"),
        ({"clip_low": True}, "clip_low = True must be a number"),
        ({"clip_low": [0.2]}, "must be a number, not a list"),
        ({"clip_low": float("nan")}, "clip_low = nan"),
        ({"clip_low": 1.5}, "between 0 and 1"),
        ({"dual_clip": 0.5}, "above 1"),
        ({"averaging": "token_mean"}, "did you mean 'token-mean'"),
        ({"scale_by_std": 1}, "scale_by_std = 1 must be true or false"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "zero expected gradient"),
    ],
)
def test_bad_settings_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        load_algorithm("grpo", table)


def test_none_turns_an_optional_setting_off():
    assert load_algorithm("grpo", {"dual_clip": "none"}).config.dual_clip is None
    assert load_algorithm("grpo", {"dual_clip": None}).config.dual_clip is None


@pytest.mark.parametrize("name", ["gpro", "losses", "api", "nowhere.at_all", "samebit.rl.losses"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match="known: cispo, dapo"):
        load_algorithm(name)


def test_unknown_correction_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'tis'"):
        load_correction("tsi")


def test_a_module_outside_the_package_is_an_algorithm():
    module = types.ModuleType("outside_algorithm")

    @dataclass(frozen=True, kw_only=True)
    class Config:
        strength: float = 1.0

    module.Config, module.Algorithm = Config, Algorithm
    sys.modules["outside_package"] = types.ModuleType("outside_package")
    sys.modules["outside_package.mine"] = module
    try:
        assert load_algorithm("outside_package.mine", {"strength": 2}).config.strength == 2.0
    finally:
        del sys.modules["outside_package"], sys.modules["outside_package.mine"]


def pair(algorithm: str, correction: str, unified: bool, **more):
    """Warnings of a pair; `table` is the correction's, `sampling` defaults to plain."""
    table, sampling = more.pop("table", {}), more.pop("sampling", PLAIN)
    chosen = load_correction(correction, table)
    return check_pair(load_algorithm(algorithm), chosen, unified, sampling, **more)


def test_pairs_that_make_sense_are_silent():
    assert pair("grpo", "none", True) == []
    assert pair("dapo", "tis", False) == []
    assert pair("grpo", "acr", False, updates_per_rollout=4) == []
    assert pair("grpo", "calibrated", True, updates_per_rollout=4) == []
    assert pair("grpo", "tis+calibrated", False, updates_per_rollout=2) == []
    assert pair("grpo", "none", True, sampling=Sampling(top_p=0.9)) == []


@pytest.mark.parametrize(
    ("algorithm", "correction", "unified", "more", "message"),
    [
        ("grpo", "none", False, {}, "mixed"),
        ("grpo", "calibrated", False, {"updates_per_rollout": 2}, "mixed"),
        ("grpo", "none", False, {"table": {"denominator": "rollout"}}, "eq. 3"),
        ("grpo", "tis", True, {}, "exactly nothing"),
        ("grpo", "acr", False, {}, "acr is then tis"),
        ("grpo", "calibrated", True, {}, "every ratio is 1"),
    ],
)
def test_doubtful_pairs_warn_with_the_reason(algorithm, correction, unified, more, message):
    assert any(message in w for w in pair(algorithm, correction, unified, **more))


@pytest.mark.parametrize(
    ("algorithm", "correction", "unified", "more", "message"),
    [
        ("grpo", "none", True, {"group_size": 1}, "group_size = 1"),
        ("rloo", "none", True, {"group_size": 1}, "at least 2"),
        ("grpo", "none", True, {"sampling": Sampling(temperature=0.0)}, "temperature = 0"),
        ("grpo", "tis", False, {"sampling": Sampling(top_p=0.9)}, "mixed recipe"),
        (
            "grpo",
            "none",
            True,
            {"sampling": Sampling(top_k=20), "updates_per_rollout": 2},
            "2 updates",
        ),
        ("gspo", "acr", False, {}, "geometric"),
        ("gspo", "calibrated", True, {}, "no such clip"),
        ("cispo", "tis+calibrated", False, {}, "no such clip"),
    ],
)
def test_nonsense_is_refused(algorithm, correction, unified, more, message):
    with pytest.raises(ValueError, match=message):
        pair(algorithm, correction, unified, **more)


def test_no_algorithm_refuses_the_plain_setting():
    for name in list_algorithms():
        assert pair(name, "none", True, group_size=8) == []
        assert pair(name, "tis", False, group_size=8) == []
    assert pair("ppo", "none", True, group_size=1) == []
    assert pair("gspo", "acr", False, table={"level": "geometric"}, updates_per_rollout=2) == []
