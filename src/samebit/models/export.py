"""A trained model out: a BF16 folder, or block FP8 as vLLM and transformers read it.

Both take Hugging Face tensor names, check them against the source checkpoint's before anything is
written, and publish the folder whole or not at all.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samebit.formats import BLOCK, E4M3
from samebit.models.config import FP8_BLOCKS, read_config, read_json
from samebit.models.fp8_blocks import QuantisedMatrix, scale_name
from samebit.models.source import SIDE_FILES
from samebit.models.weights import (
    SHARD_BYTES,
    CheckpointReader,
    TensorSource,
    atomic_folder,
    write_checkpoint,
    write_json,
)

log = logging.getLogger(__name__)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FUSED = re.compile(r"\.(q|k|v|gate|up)_proj\.weight$")
"""Matrices that other engines run as one."""
_MASTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def export_bf16(
    target: str | Path,
    source: str | Path,
    tensors: Mapping[str, torch.Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `tensors` (FP32 masters or BF16; HF names) as a BF16 HF folder; `target`.

    source: the folder the model came from (config, tokenizer, expected names and shapes). With tied
    embeddings `lm_head.weight` is not written; if given it must equal the embedding. Raises
    ValueError for a missing, unknown, misshapen, quantised or non-finite tensor and for an existing
    target; OSError when the disk is full. Nothing is left behind on error.
    """
    source = Path(source)
    shapes, tied = _expected(source)
    sources = _bf16_sources(tensors, shapes, tied)
    return _publish(Path(target), source, sources, {}, shard_bytes)


def export_fp8(
    target: str | Path,
    source: str | Path,
    tensors: Mapping[str, torch.Tensor],
    quantised: Mapping[str, QuantisedMatrix],
    recipe: str,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a block FP8 folder: codes and scales as they are, all other tensors in BF16; `target`.

    quantised: name of a weight -> its codes and scales; `tensors` holds the rest. A matrix `X` is
    stored as `X.weight` (E4M3) and `X.weight_scale_inv` (FP32, which despite its name is the factor
    that multiplies codes to dequantise). recipe: of the policy, kept in config.json as `samebit_recipe`.
    Errors as in `export_bf16`.
    """
    source = Path(source)
    shapes, tied = _expected(source)
    if not quantised:
        raise ValueError("an FP8 export needs at least one quantised matrix; use the BF16 export")
    for name, matrix in quantised.items():
        _check_quantised(name, matrix, shapes.get(name))
    plain_shapes = {name: shape for name, shape in shapes.items() if name not in quantised}
    doubled = sorted(quantised.keys() & tensors.keys())
    if doubled:
        raise ValueError(f"{doubled[0]} is given both quantised and unquantised")
    sources = _bf16_sources(tensors, plain_shapes, tied)
    for name, matrix in quantised.items():
        sources.append(_as_is(name, matrix.codes))
        sources.append(_as_is(scale_name(name), matrix.scales))
    kept = {
        name.removesuffix(".weight")
        for name, shape in plain_shapes.items()
        if len(shape) == 2 and name != EMBEDDING
    }
    settings = {
        "quantization_config": {
            **FP8_BLOCKS,
            "modules_to_not_convert": sorted(kept | {HEAD.removesuffix(".weight")}),
        },
        "samebit_recipe": recipe,
    }
    partial = sorted(n for n in quantised if shapes[n][0] % BLOCK and _FUSED.search(n))
    if partial:
        log.warning(
            "%s has %d rows, no multiple of %d: vLLM refuses such q, k, v, gate and up",
            partial[0],
            shapes[partial[0]][0],
            BLOCK,
        )
    return _publish(Path(target), source, sources, settings, shard_bytes)


def _expected(source: Path) -> tuple[dict[str, tuple[int, ...]], bool]:
    """(name -> shape of what an export of this model holds, tied)."""
    config = read_config(source)
    reader = CheckpointReader(source, codes=config.fp8_blocks)
    names = reader.names()
    scales = {scale_name(name) for name in names} if config.fp8_blocks else set()
    shapes = {name: reader.shape(name) for name in names if name not in scales}
    if config.tied:
        shapes.pop(HEAD, None)
    return shapes, config.tied


def _bf16_sources(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], tied: bool
) -> list[TensorSource]:
    given = dict(tensors)
    if tied and HEAD in given:
        head = given.pop(HEAD)
        if EMBEDDING not in given or not torch.equal(head, given[EMBEDDING]):
            raise ValueError(f"{HEAD} differs from {EMBEDDING}, but this model ties them")
    missing, unknown = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
    if missing:
        raise ValueError(f"the export lacks {missing[0]} ({len(missing)} missing)")
    if unknown:
        raise ValueError(f"{unknown[0]} is no tensor of this model ({len(unknown)} unknown)")
    for name, shape in shapes.items():
        tensor = given[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in _MASTER_DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}: codes do not belong among BF16 tensors")
    return [
        TensorSource(
            name, torch.bfloat16, shape, lambda name=name, tensor=given[name]: _round(name, tensor)
        )
        for name, shape in shapes.items()
    ]


def _round(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The BF16 rounding of a master: the same value that enters the forward."""
    rounded = tensor.detach().to(torch.bfloat16)
    if not torch.isfinite(rounded).all():
        raise ValueError(f"{name} holds values that are not finite; this model is not exported")
    return rounded


def _check_quantised(name: str, matrix: QuantisedMatrix, shape: tuple[int, ...] | None) -> None:
    if shape is None or not name.endswith(".weight"):
        raise ValueError(f"{name} is no weight of this model")
    codes, scales = matrix.codes, matrix.scales
    if codes.dtype != E4M3.dtype or tuple(codes.shape) != shape:
        raise ValueError(
            f"{name}: codes are {codes.dtype} {list(codes.shape)}, expected {E4M3.dtype} "
            f"{list(shape)}"
        )
    blocks = tuple(math.ceil(size / BLOCK) for size in shape)
    if scales.dtype != torch.float32 or tuple(scales.shape) != blocks:
        raise ValueError(
            f"{name}: scales are {scales.dtype} {list(scales.shape)}, expected float32 "
            f"{list(blocks)}"
        )
    fault = matrix.fault()
    if fault is not None:
        raise ValueError(f"{name}: {fault}; this model is not exported")


def _as_is(name: str, tensor: torch.Tensor) -> TensorSource:
    return TensorSource(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def _publish(
    target: Path,
    source: Path,
    sources: list[TensorSource],
    settings: Mapping[str, Any],
    shard_bytes: int,
) -> Path:
    config = {key: value for key, value in read_json(source / "config.json").items()}
    # One spelling: an old torch_dtype beside the new dtype could contradict it.
    config.pop("torch_dtype", None)
    # What the model was read from says nothing about what is written.
    config.pop("quantization_config", None)
    config.pop("samebit_recipe", None)
    config.update(dtype="bfloat16", **settings)
    copied = [source / name for name in SIDE_FILES if (source / name).is_file()]
    needed = sum(tensor.bytes for tensor in sources) + sum(path.stat().st_size for path in copied)
    with atomic_folder(target, needed_bytes=needed) as folder:
        for path in copied:
            shutil.copyfile(path, folder / path.name)
        write_json(folder / "config.json", config)
        write_checkpoint(folder, sources, shard_bytes)
    return target
