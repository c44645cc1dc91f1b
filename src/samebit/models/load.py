"""From a model folder to a Decoder under a plan, and from a Decoder to checkpoint names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import torch

from samebit.models.config import ModelConfig, read_config
from samebit.models.decoder import Block, Decoder, linear_shapes
from samebit.models.weights import CheckpointReader
from samebit.quant.plan import Plan, resolve
from samebit.spec import Recipe


def plan_for(recipe: Recipe, config: ModelConfig) -> Plan:
    """The recipe resolved against a model."""
    return resolve(recipe, linear_shapes(config))


def family_names(config: ModelConfig) -> dict[str, str]:
    """Checkpoint name of each parameter path, from the family's file."""
    module = importlib.import_module(f"samebit.models.{config.family}")
    return module.names(config)


def _block_parameters(block: Block) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("norm_attention", "norm_mlp", "query_norm", "key_norm"):
        gain = getattr(block, name)
        if gain is not None:
            yield name, gain.detach()
    for linear in (block.qkv, block.out, block.gate_up, block.down):
        start = 0
        for part, rows in linear.shape.parts:
            yield f"{part}.weight", linear.master.detach()[start : start + rows]
            if linear.bias is not None:
                yield f"{part}.bias", linear.bias.detach()[start : start + rows]
            start += rows


def named_masters(model: Decoder) -> dict[str, torch.Tensor]:
    """FP32 master of every parameter by checkpoint name; views, so writing loads the model."""
    paths = {"embedding": model.embedding.detach(), "norm_final": model.norm_final.detach()}
    if not model.config.tied:
        paths["head"] = model.head.detach()
    for i, block in enumerate(model.layers):
        assert isinstance(block, Block)
        paths |= {f"layers.{i}.{name}": tensor for name, tensor in _block_parameters(block)}
    names = family_names(model.config)
    assert names.keys() == paths.keys(), names.keys() ^ paths.keys()
    return {names[path]: tensor for path, tensor in paths.items()}


def load_model(folder: str | Path, recipe: Recipe, device: torch.device | str = "cpu") -> Decoder:
    """Build the folder's model under `recipe`, read its weights into the masters, refresh once.

    ValueError naming file and tensor for anything missing, of another shape, or not understood.
    """
    config = read_config(folder)
    model = Decoder(config, plan_for(recipe, config), device)
    reader = CheckpointReader(folder)
    masters = named_masters(model)
    for name, master in masters.items():
        master.copy_(reader.read(name, tuple(master.shape)))
    ignored = {"lm_head.weight"} if config.tied else set()
    unknown = [
        n for n in reader.names() if n not in masters and n not in ignored and "rotary" not in n
    ]
    if unknown:
        raise ValueError(
            f"{folder}: {len(unknown)} tensors no {config.family} model has, first {unknown[0]!r}; "
            "the checkpoint belongs to another architecture"
        )
    model.refresh()
    return model


@torch.no_grad()
def freeze(model: Decoder) -> Decoder:
    """Give back what only training needs: the model keeps the weights its forwards read, for good.

    `refresh` and gradients are over for it. A tied embedding becomes the head's BF16 copy.
    """

    def constant(tensor: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=False)

    head = model.head_weight.codes
    model.embedding = constant(head if model.config.tied else model.embedding.bfloat16())
    model.head = model.embedding if model.config.tied else constant(head)
    for _, linear in model.linears():
        linear.master = constant(linear.master[:0].clone())
    return model.requires_grad_(False)


def share_masters(reader: Decoder, owner: Decoder) -> None:
    """Make `reader` requantise from the owner's masters instead of its own, which are given back."""
    theirs = dict(owner.named_modules())
    for path, module in reader.named_modules():
        for name, _ in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, getattr(theirs[path], name))
