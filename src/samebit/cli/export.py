"""`samebit export`: a run's policy as a Hugging Face folder, in BF16 or as FP8 codes and scales."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samebit.cli.arguments import Option, expect, help_text, parse
from samebit.cli.policy import find_target, load_policy
from samebit.models.decoder import Decoder
from samebit.models.export import QuantisedMatrix

USAGE = "samebit export RUN|CHECKPOINT OUT [--fp8]"
ABOUT = (
    "Writes OUT, which transformers and vLLM load: the masters rounded to BF16, or with --fp8\n"
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
    if found.flag("fp8"):
        _require_fp8_blocks(recipe)
    from samebit.models.export import export_bf16, export_fp8
    from samebit.models.load import named_masters
    from samebit.quant.flow import is_unified
    from samebit.quant.plan import load_recipe

    model, _, source = load_policy(target, recipe)
    masters = named_masters(model)
    if not found.flag("fp8"):
        s = target.config.train.invariant_scale
        if target.checkpoint is not None and s != 1.0:
            from samebit.train.invariant import fold_back

            masters = fold_back(masters, model.config, s)
        print(export_bf16(out, source, masters))
        trained = load_recipe(target.config.recipe)
        if target.checkpoint is not None and is_unified(trained) and trained.quantised:
            print(
                f"the run was trained as {trained.name}; its BF16 weights are another policy: "
                f"compare them by samebit eval {name} --recipe {trained.name},bf16",
                file=sys.stderr,
            )
        return 0
    quantised = quantised_matrices(model)
    rest = {name: tensor for name, tensor in masters.items() if name not in quantised}
    print(export_fp8(out, source, rest, quantised))
    return 0


def _require_fp8_blocks(recipe: str) -> None:
    from samebit.formats import BLOCK
    from samebit.quant.plan import load_recipe

    loaded = load_recipe(recipe)
    weights = {str(loaded.rollout.gemm(r).rhs) for r in ("qkv", "out", "gate_up", "down")}
    if weights != {f"e4m3[{BLOCK}x{BLOCK}]"}:
        raise ValueError(
            f"--fp8: recipe {recipe!r} samples with weights in {', '.join(sorted(weights))}, not "
            f"in e4m3[{BLOCK}x{BLOCK}]; export it without --fp8, or add --recipe fp8"
        )


def quantised_matrices(model: Decoder) -> dict[str, QuantisedMatrix]:
    """Codes and scales of every block linear as the sampler reads them, by checkpoint name."""
    from samebit.models.export import unfuse
    from samebit.models.load import family_names

    names = family_names(model.config)
    found: dict[str, QuantisedMatrix] = {}
    for path, linear in model.linears():
        weight = linear.weights["rollout"]
        assert weight.scale is not None
        layer = path.rsplit(".", 1)[0]
        parts = {
            names[f"{layer}.{part}.weight"]: (rows, linear.shape.in_features)
            for part, rows in linear.shape.parts
        }
        found |= unfuse(weight.codes, weight.scale, parts)
    return found
