"""A whole RL step of an 8B model made of measured parts: the decode grid and the training phase.

Nothing is measured here. A decode step takes a + b x sequences + c x sequences x mean context, fitted
through the recipe's rows of the grid with 32 to 256 sequences. As many sequences run at once as the
engine's cache holds at their full length, so long answers come in waves (a part of a wave costs its
part: there is always work to fill the places). Prompts are priced as a third of
their training time (a forward). The training phase is the one measured at the same length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from samebit.bench.api import NEAR, Records, comparable

SEQUENCES = 256
PROMPT = 128
GROUP = 8
"""Samples that share a prompt in the cache."""
BASE = "bf16-fast"
CARD_GIB = 139.8
"""What torch calls the memory of an H200."""
LEAST_SEQUENCES = 32


def fit_decode(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[float], float]:
    """((a, b, c) of milliseconds by name `.../SEQUENCESxCONTEXT`, the largest error of the fit as a share)."""
    import torch

    points = []
    for name, row in rows.items():
        sequences, context = (int(n) for n in name.rsplit("/", 1)[1].split("x"))
        if LEAST_SEQUENCES <= sequences <= SEQUENCES:
            points.append((sequences, context, float(row["ms"])))
    if len(points) < 3:
        raise ValueError(f"{len(points)} rows of the decode grid; three or more make a fit")
    x = torch.tensor([[1.0, s, s * c] for s, c, _ in points], dtype=torch.float64)
    y = torch.tensor([ms for _, _, ms in points], dtype=torch.float64)
    # each point by its own share: a long step must not outvote a short one
    solved = torch.linalg.lstsq(x / y[:, None], torch.ones(len(y), 1, dtype=torch.float64)).solution
    error = float(((x @ solved)[:, 0] / y - 1).abs().max())
    return solved[:, 0].tolist(), error


def at_once(model: str, recipe: str, length: int) -> int:
    """Sequences of `length` tokens that the engine's cache holds beside masters, moments and weights."""
    import torch

    from samebit.bench.training import settings, shape_of
    from samebit.engine.native import AUTO_CACHE_SHARE
    from samebit.layers.kv import page_bytes, page_size_for
    from samebit.models.load import plan_for
    from samebit.quant.plan import load_recipe
    from samebit.train.memory import GIB, plan_memory

    c, wanted = shape_of(model), load_recipe(recipe)
    plan = plan_for(wanted, c)
    held = plan_memory(c, plan, settings(1, length, "none")).standing
    size = page_size_for(torch.device("cuda"))
    page = page_bytes(c.layers, size, c.kv_heads, c.head_dim, wanted.rollout.attention.kv)
    pages = int((CARD_GIB * GIB - held) * AUTO_CACHE_SHARE) // page
    own, shared = -(-(length - PROMPT) // size), -(-PROMPT // size)
    return min(SEQUENCES, int(pages / (own + shared / GROUP)))


def rollout_s(fit: list[float], length: int, places: int) -> float:
    """Seconds to draw all sequences, `places` of them at a time, token by token."""
    a, b, c = fit
    steps = length - PROMPT
    step_ms = a + b * places + c * places * (PROMPT + steps / 2)
    return SEQUENCES / places * steps * step_ms / 1e3


def _phase_s(held: Records, model: str, length: int, recipe: str) -> float:
    row = held["step"].get(f"micro/{model}/{length}/once", {})
    if f"{recipe}_phase_s" not in row:
        raise ValueError(f"micro/{model}/{length}/once has no {recipe}: measure it first")
    return row[f"{recipe}_phase_s"]


def _parts(held: Records, model: str, length: int, recipe: str) -> dict[str, Any]:
    phase = _phase_s(held, model, length, recipe)
    grid = {n: r for n, r in held["rollout"].items() if n.startswith(f"decode/{model}/{recipe}/")}
    fit, error = fit_decode(grid)
    places = at_once(model, recipe, length)
    rollout = rollout_s(fit, length, places) + phase * PROMPT / length / 3
    return {
        "rollout_s": rollout,
        "training_s": phase,
        "step_s": rollout + phase,
        "places": places,
        "decode_fit_error": error,
    }


def _judged(points: float, base: str) -> dict[str, Any]:
    """The fields that say whether a ratio of times is one of even arms."""
    nearer = "this recipe" if points > 0 else base
    apart = (
        f"no: more than {100 * NEAR:.0f} points of roofline apart, {nearer} is nearer to its own"
    )
    return {"roofline_points": points, "comparable": "yes" if comparable(points) else apart}


def training_of(held: Records, model: str, length: int, recipe: str) -> dict[str, Any]:
    """A training phase as a row: seconds, share of the data sheet's roofline, speed over the other arm.

    The other arm is bf16-fast, and for bf16-fast the plain torch model.
    """
    from samebit.bench.training import roofline_share

    base = "torch" if recipe == BASE else BASE
    mine, theirs = (_phase_s(held, model, length, arm) for arm in (recipe, base))
    share, other = (
        roofline_share(model, arm, SEQUENCES, length, seconds)
        for arm, seconds in ((recipe, mine), (base, theirs))
    )
    row = {"training_s": mine, "roofline": share, f"over_{base}": theirs / mine}
    return row | _judged(share - other, base)


def _decode_points(held: Records, model: str, recipe: str) -> float:
    """Mean distance in roofline shares from bf16-fast over the sizes of the grid that both have."""

    def shares(arm: str) -> dict[str, float]:
        prefix = f"decode/{model}/{arm}/"
        found = {
            n.removeprefix(prefix): r for n, r in held["rollout"].items() if n.startswith(prefix)
        }
        return {
            size: row["share_of_roofline"]
            for size, row in found.items()
            if LEAST_SEQUENCES <= int(size.split("x")[0]) <= SEQUENCES
        }

    mine, theirs = shares(recipe), shares(BASE)
    gaps = [mine[size] - theirs[size] for size in mine if size in theirs]
    return math.fsum(gaps) / len(gaps) if gaps else math.nan


def step_of(held: Records, model: str, length: int, recipe: str) -> dict[str, Any]:
    """The fields of a row: seconds, and the speed over bf16-fast where that is there too.

    roofline_points: the larger of the distances of the two parts, decode grid and training phase; a ratio
    of sums is one of even arms only where both parts are.
    """
    row = _parts(held, model, length, recipe)
    if recipe != BASE:
        base = _parts(held, model, length, BASE)
        row[f"over_{BASE}"] = base["step_s"] / row["step_s"]
        row[f"rollout_over_{BASE}"] = base["rollout_s"] / row["rollout_s"]
        decode = _decode_points(held, model, recipe)
        training = training_of(held, model, length, recipe)["roofline_points"]
        row |= {"decode_points": decode, "training_points": training}
        row |= _judged(decode if math.isnan(decode) else max(decode, training, key=abs), BASE)
    return row
