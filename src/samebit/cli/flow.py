"""`samebit flow`: a recipe's precision flow as text and as a drawing, and what differs in two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samebit.cli.arguments import Option, expect, help_text, parse, require_place
from samebit.cli.validate import model_of
from samebit.quant.flow import Edge, differing_edges, graph
from samebit.quant.plan import load_recipe, recipe_names
from samebit.spec import Flow, Gemm, Recipe

USAGE = "samebit flow show RECIPE [--model M] [--svg FILE] | samebit flow diff A B"
ABOUT = (
    "show: the operators of one forward and the precision of every tensor between them.\n"
    "diff: the edges on which two recipes differ (rollout, training, gradients); with one recipe,\n"
    "      where its rollout differs from its training forward."
)
OPTIONS = (
    Option("model", "M", "also resolve the recipe against this model and print the plan"),
    Option("svg", "FILE", "draw the graph into an SVG file"),
)
_ORDER = (
    "embedding",
    "residual",
    "norm_attention",
    "weights",
    "qkv",
    "rotary",
    "kv_cache",
    "attention",
    "out",
    "norm_mlp",
    "gate_up",
    "silu_mul",
    "down",
    "norm_final",
    "head",
    "log_prob",
)


def run(args: Sequence[str]) -> int:
    """Show or diff."""
    found = parse(args, OPTIONS)
    if found.flag("help"):
        print(help_text(USAGE, f"{ABOUT}\nrecipes: {', '.join(recipe_names())}", OPTIONS))
        return 0
    action = found.positionals.pop(0) if found.positionals else ""
    if action == "show":
        (name,) = expect(found, ["RECIPE"], USAGE)
        return _show(load_recipe(name), found.text("model"), found.text("svg"))
    if action == "diff":
        if len(found.positionals) == 1:
            recipe = load_recipe(found.positionals[0])
            return _print_difference("rollout", recipe.rollout, "training", recipe.train)
        a, b = expect(found, ["A", "B"], USAGE)
        return _diff(load_recipe(a), load_recipe(b))
    raise ValueError(f"say `show` or `diff`; usage: {USAGE}")


def _in_order(edges: Sequence[Edge]) -> list[Edge]:
    place = {name: i for i, name in enumerate(_ORDER)}
    return sorted(edges, key=lambda e: (place[e.target], place[e.source], e.tensor))


def _lines(flow: Flow) -> list[str]:
    """One line per operator input, grouped by the operator that reads it."""
    out, shown = [], ""
    for edge in _in_order(list(graph(flow))):
        target = "" if edge.target == shown else edge.target
        shown = edge.target
        out.append(f"  {target:15s} <- {edge.source:15s} {edge.tensor:11s} {edge.precision}")
    return out


def _show(recipe: Recipe, model: str, svg: str) -> int:
    require_place("svg", svg)
    if svg:
        from samebit.report.flow import draw_flow

        Path(svg).write_text(draw_flow(recipe.to_dict(), standalone=True), encoding="utf-8")
    differing = differing_edges(recipe.rollout, recipe.train)
    print(f"recipe {recipe.name}: {recipe.summary}")
    if not differing:
        print("\nrollout and training forward (one graph):")
        print("\n".join(_lines(recipe.train)))
    else:
        for title, flow in (("rollout", recipe.rollout), ("training forward", recipe.train)):
            print(f"\n{title}:")
            print("\n".join(_lines(flow)))
    b = recipe.backward
    print("\nbackward of a linear:")
    print(f"  input gradient   {b.input_grad}")
    print(f"  weight gradient  {b.weight_grad}")
    print(f"  kept activation  {b.saved}")
    verdict = "unified" if not differing else f"mixed: {len(differing)} edges differ"
    if recipe.library:
        verdict = (
            "library GEMMs: a row's bits depend on its batch, so mismatch is measured and not 0"
        )
    print(f"\n{verdict}")
    if model:
        print(f"\n{_plan(recipe, model)}")
    if svg:
        print(f"\ndrawn in {svg}")
    return 0


def _plan(recipe: Recipe, model: str) -> str:
    from samebit.models.config import read_config
    from samebit.models.load import plan_for
    from samebit.models.source import resolve

    with model_of("command line: --model"):
        folder = resolve(model)
    return plan_for(recipe, read_config(folder)).describe()


def _print_difference(left: str, a: Flow, right: str, b: Flow) -> int:
    pairs = differing_edges(a, b)
    place = {name: i for i, name in enumerate(_ORDER)}

    def order(pair: tuple[Edge | None, Edge | None]) -> tuple[int, int, str]:
        edge = pair[0] or pair[1]
        assert edge is not None
        return place[edge.target], place[edge.source], edge.tensor

    for pair in sorted(pairs, key=order):
        edge = pair[0] or pair[1]
        assert edge is not None
        precisions = ["absent" if e is None else e.precision for e in pair]
        print(f"  {edge.source} -> {edge.target} ({edge.tensor})")
        print(f"    {left}: {precisions[0]}\n    {right}: {precisions[1]}")
    if not pairs:
        print("  no edge differs")
    return 0


def _diff(a: Recipe, b: Recipe) -> int:
    left, right = (a.name, b.name) if a.name != b.name else (f"{a.name} (1)", f"{b.name} (2)")
    print("rollout:")
    _print_difference(left, a.rollout, right, b.rollout)
    print("training forward:")
    _print_difference(left, a.train, right, b.train)
    print("backward:")
    rows: list[tuple[str, Gemm | object, Gemm | object]] = [
        ("input gradient", a.backward.input_grad, b.backward.input_grad),
        ("weight gradient", a.backward.weight_grad, b.backward.weight_grad),
        ("kept activation", a.backward.saved, b.backward.saved),
    ]
    same = True
    for name, x, y in rows:
        if x != y:
            same = False
            print(f"  {name}\n    {left}: {x}\n    {right}: {y}")
    if same:
        print("  no difference")
    return 0
