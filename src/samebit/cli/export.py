"""`samebit export`: a run's policy as a Hugging Face folder, in BF16 or as FP8 codes and scales."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from samebit.cli.arguments import Option, expect, help_text, parse
from samebit.cli.policy import find_target, load_policy

USAGE = "samebit export RUN|CHECKPOINT OUT [--fp8]"
ABOUT = (
    "Writes OUT, which transformers loads: the masters rounded to BF16, or with --fp8\n"
    "the codes and scales that were trained (the policy of an FP8 recipe is that function)."
)
OPTIONS = (
    Option("fp8", "", "codes and scales in 128x128 blocks instead of BF16 matrices"),
    Option("recipe", "NAME", "recipe to quantise with (default: the run's own)"),
)


def run(args: Sequence[str]) -> int:
    """Write the folder and print its path."""
    found = parse(args, OPTIONS)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, OPTIONS))
        return 0
    name, out = expect(found, ["RUN or CHECKPOINT", "OUT"], USAGE)
    target = find_target(name)
    recipe = found.text("recipe", target.config.recipe)
    from samebit.models.export import export_bf16, export_fp8
    from samebit.models.fp8_blocks import quantised_matrices, require_blocks
    from samebit.models.load import family_names, named_masters
    from samebit.quant.flow import is_unified
    from samebit.quant.plan import load_recipe

    if found.flag("fp8"):
        require_blocks(load_recipe(recipe), "--fp8")
    model, _, source = load_policy(target, recipe)
    masters = named_masters(model)
    if not found.flag("fp8"):
        s = target.config.train.invariant_scale
        if target.checkpoint is not None and s != 1.0:
            from samebit.train.invariant import fold_back

            masters = fold_back(masters, model.config, s)
        print(export_bf16(out, source, masters))
        own = load_recipe(target.config.recipe)
        if is_unified(own) and own.quantised:
            _say_what_bf16_is(name, own.name, target.checkpoint is not None, source)
        return 0
    quantised = quantised_matrices(model, family_names(model.config))
    rest = {name: tensor for name, tensor in masters.items() if name not in quantised}
    print(export_fp8(out, source, rest, quantised, recipe))
    return 0


def _say_what_bf16_is(name: str, recipe: str, trained: bool, source: Path) -> None:
    """Warn where a policy of a quantised recipe was written in BF16: a run's, or an FP8 folder's."""
    from samebit.models.config import read_config

    another = "its BF16 weights are another policy"
    if read_config(source).fp8_blocks:  # such a folder cannot be evaluated under bf16 itself
        print(f"{name} is a policy of {recipe}; {another}", file=sys.stderr)
    elif trained:
        print(
            f"the run was trained as {recipe}; {another}: compare them by samebit eval {name} "
            f"--recipe {recipe},bf16",
            file=sys.stderr,
        )
