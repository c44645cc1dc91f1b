"""From a model folder to a Decoder under a plan, and from a Decoder to checkpoint names."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from samebit.formats import BLOCK, E4M3
from samebit.models.config import ModelConfig, read_config
from samebit.models.decoder import Block, Decoder, linear_shapes
from samebit.models.fp8_blocks import (
    QuantisedMatrix,
    first_difference,
    master_of,
    quantised_matrices,
    require_blocks,
    scale_name,
)
from samebit.models.weights import READABLE, CheckpointReader
from samebit.quant.plan import Plan, load_recipe, recipe_names, resolve
from samebit.spec import Recipe

log = logging.getLogger(__name__)


def plan_for(recipe: Recipe, config: ModelConfig) -> Plan:
    """The recipe resolved against a model."""
    return resolve(recipe, linear_shapes(config))


def family_names(config: ModelConfig) -> dict[str, str]:
    """Checkpoint name of each parameter path, from the family's file."""
    module = importlib.import_module(f"samebit.models.{config.family}")
    return module.names(config)


def config_under(recipe: Recipe, folder: str | Path) -> ModelConfig:
    """The folder's configuration; ValueError where the recipe does not sample with weights it holds."""
    config = read_config(folder)
    if config.fp8_blocks:
        require_blocks(recipe, f"{folder} holds FP8 codes and scales")
    return config


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

    A folder of FP8 codes and scales gives masters that quantise to them, bit for bit. ValueError naming
    file and tensor for anything missing, of another shape, or not understood, for codes that are NaN or
    of a tensor that is not quantised, and for FP8 codes that the recipe does not sample with.
    """
    config = config_under(recipe, folder)
    if config.fp8_blocks:
        _warn_of_another_recipe(folder, config.exported_recipe, recipe)
    model = Decoder(config, plan_for(recipe, config), device)
    reader = CheckpointReader(folder, codes=config.fp8_blocks)
    masters = named_masters(model)
    blocks = quantised_matrices(model, family_names(config)) if config.fp8_blocks else {}
    for name, master in masters.items():
        if name in blocks:
            master.copy_(master_of(_read_blocks(reader, name, master.shape)))
        else:
            master.copy_(_read_plain(reader, name, master.shape))
    ignored = {"lm_head.weight"} if config.tied else set()
    ignored |= {scale_name(name) for name in blocks}
    unknown = [
        n for n in reader.names() if n not in masters and n not in ignored and "rotary" not in n
    ]
    if unknown:
        raise ValueError(
            f"{folder}: {len(unknown)} tensors no {config.family} model has, first {unknown[0]!r}; "
            "the checkpoint belongs to another architecture"
        )
    model.refresh()
    for name in blocks:
        # Read again rather than kept: all codes beside all masters may be more than there is room for.
        differs = first_difference(blocks, name, _read_blocks(reader, name, masters[name].shape))
        if differs:
            raise ValueError(
                f"{folder}: {name}: {differs} are not what the FP32 master of any matrix is quantised "
                "to here, so this would be another policy; give the unquantised checkpoint"
            )
    return model


def _read_plain(reader: CheckpointReader, name: str, shape: torch.Size) -> torch.Tensor:
    """A tensor that is no block linear; codes of one would be read as if they were its values."""
    if reader.dtype(name) not in READABLE:
        raise ValueError(
            f"{reader.folder}: {name} is {reader.dtype(name)}; of an FP8 export only the linears of the "
            "blocks are codes, so export it again or give the unquantised checkpoint"
        )
    return reader.read(name, tuple(shape))


def _read_blocks(reader: CheckpointReader, name: str, shape: torch.Size) -> QuantisedMatrix:
    """Codes and scales of a linear, dtypes, shapes and finiteness checked."""
    codes = reader.read(name, tuple(shape))
    scales = reader.read(scale_name(name), tuple(-(-n // BLOCK) for n in shape))
    if codes.dtype != E4M3.dtype or scales.dtype != torch.float32:
        raise ValueError(
            f"{reader.folder}: {name} is {codes.dtype} with {scales.dtype} scales; every linear of an "
            f"FP8 export is {E4M3.dtype} with torch.float32 scales"
        )
    matrix = QuantisedMatrix(codes, scales)
    fault = matrix.fault()
    if fault is not None:
        raise ValueError(
            f"{reader.folder}: {name}: {fault}; fetch the folder again or give the unquantised checkpoint"
        )
    return matrix


def _warn_of_another_recipe(folder: str | Path, exported: str, recipe: Recipe) -> None:
    """Say where the exported policy is not the function that the recipe samples from."""
    known = exported in recipe_names()
    if known and load_recipe(exported).rollout == recipe.rollout:
        return
    if exported and exported != recipe.name:
        log.warning(
            "%s is a policy of recipe %s; under %s it is another policy",
            folder,
            exported,
            recipe.name,
        )


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
