"""The precision plan: a recipe applied to a model. One value, read by trainer, engine, checkpoint, export.

`resolve(recipe, linears)` lists every linear with its role and GEMMs and every constant that changes a
number. The digest identifies the function being sampled from and trained; a checkpoint with another
digest is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from dataclasses import asdict, dataclass
from typing import Any

from samebit.formats import AMAX_FLOOR, BLOCK
from samebit.modules import import_named
from samebit.option_table import did_you_mean
from samebit.quant import recipes
from samebit.quant.flow import is_unified
from samebit.spec import Recipe, Role

NUMERICS_VERSION = 4
"""Raised whenever docs/numerics.md changes what a given input yields."""


@dataclass(frozen=True)
class LinearShape:
    """One linear of a model. parts: (name, rows) of each named matrix fused into it, in order."""

    path: str
    role: Role
    parts: tuple[tuple[str, int], ...]
    in_features: int


@dataclass(frozen=True)
class Plan:
    """A recipe resolved against a model's linears. Build with `resolve`."""

    recipe: Recipe
    linears: tuple[LinearShape, ...]

    @property
    def unified(self) -> bool:
        """Whether rollout and training forward are the same function (Jet-RL 4.1)."""
        return is_unified(self.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Everything that changes a number, as plain JSON-ready values."""
        return {
            "numerics_version": NUMERICS_VERSION,
            "block": BLOCK,
            "amax_floor": AMAX_FLOOR,
            "recipe": self.recipe.to_dict(),
            "linears": [asdict(shape) for shape in self.linears],
        }

    @property
    def digest(self) -> str:
        """sha256 over the canonical JSON of `to_dict`, without prose."""
        content = self.to_dict()
        for prose in ("summary", "sqnr_floor_db", "logp_gap_limit"):
            content["recipe"].pop(prose)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def require_same(self, digest: str, where: str) -> None:
        """ValueError when `digest` (read from `where`) is not this plan's."""
        if digest != self.digest:
            raise ValueError(
                f"{where} was written under precision plan {digest[:12]}, this run's plan is "
                f"{self.digest[:12]} (recipe {self.recipe.name!r}): use the recipe and model it was "
                "written with, or start a new run from its exported weights"
            )

    def describe(self) -> str:
        """A table for people: one line per distinct (role, GEMMs)."""
        lines = [f"plan {self.digest[:12]}  recipe {self.recipe.name}  unified {self.unified}"]
        counts: dict[tuple[str, str], int] = {}
        for shape in self.linears:
            part_names = " ".join(f"{name}:{rows}" for name, rows in shape.parts)
            key = (shape.role, f"{part_names} x {shape.in_features}")
            counts[key] = counts.get(key, 0) + 1
        for (role, text), count in counts.items():
            rollout, train = (
                flow.gemm(role)  # type: ignore[arg-type]
                for flow in (self.recipe.rollout, self.recipe.train)
            )
            lines.append(f"  {count:3d} x {role:8s} {text:40s} rollout {rollout}  train {train}")
        b = self.recipe.backward
        lines.append(f"  backward: dX {b.input_grad}  dW {b.weight_grad}  saved {b.saved}")
        a = self.recipe.train.attention
        lines.append(f"  attention: kv {a.kv}  block {a.kv_block}  split {a.kv_split or 'none'}")
        return "\n".join(lines)


def recipe_names() -> list[str]:
    """Names of the shipped recipes (the files of quant/recipes, dashes for underscores)."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(recipes.__path__))


def load_recipe(name: str) -> Recipe:
    """The RECIPE of quant/recipes/<name>.py, or of a dotted module path outside the package."""
    if "." in name:
        return _recipe_of(import_named(name, "recipe"), name)
    if name not in recipe_names():
        known = ", ".join(recipe_names())
        near = did_you_mean(name.lower(), recipe_names())
        raise ValueError(
            f"unknown recipe {name!r}{near}; known recipes: {known}; or give a dotted module"
        )
    return _recipe_of(importlib.import_module(f"{recipes.__name__}.{name.replace('-', '_')}"), name)


def _recipe_of(module: Any, name: str) -> Recipe:
    recipe = module.__dict__.get("RECIPE")
    if not isinstance(recipe, Recipe):
        raise ValueError(f"module of recipe {name!r} must define RECIPE, a samebit Recipe")
    return recipe


def resolve(recipe: Recipe, linears: tuple[LinearShape, ...]) -> Plan:
    """Apply `recipe` to a model's linears; ValueError for what no operator implements."""
    for flow in (recipe.rollout, recipe.train):
        if flow.head.lhs.format != "bf16":
            raise ValueError(
                f"recipe {recipe.name!r} quantises the head: its logits decide every log-prob and "
                "stay BF16 x BF16 with FP32 sums; set head=GEMM_HEAD"
            )
    return Plan(recipe, linears)
