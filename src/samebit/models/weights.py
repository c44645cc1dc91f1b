"""Checkpoints in safetensors: a lazy, checked reader and a streaming, sharding writer.

Pickle is never opened. Every header, index entry and size is checked before a tensor's memory is
taken; every error names the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from samebit.models.config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
READABLE = frozenset(_PLAIN.values())
"""What holds values, not codes."""
_CODES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
_WRITABLE = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class CheckpointReader:
    """The tensors of a HF folder, read one at a time (BF16, FP16 or FP32; as stored).

    codes: bytes (uint8) and E4M3 are readable too, as an optimiser's state and an FP8 export have them.
    Opening reads headers only. Raises ValueError naming the file for: no safetensors (pickle is
    refused), a corrupt header or wrong file size, an index that leaves the folder, names a missing
    shard, or disagrees with what its shards hold, and other dtypes.
    """

    def __init__(self, folder: str | Path, codes: bool = False) -> None:
        self.folder = Path(folder)
        self._readable = _PLAIN | (_CODES if codes else {})
        self._files: dict[str, Any] = {}
        self._where = self._read_index()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for shard in sorted(set(self._where.values())):
            self._open_shard(shard)

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._shapes))

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; no data is read."""
        self._require(name)
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of one tensor; no data is read."""
        self._require(name)
        return self._dtypes[name]

    def read(self, name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """One tensor as stored, in memory of its own.

        With `shape`, a tensor of any other shape is refused (ValueError) before it is read.
        """
        self._require(name)
        if shape is not None and tuple(shape) != self._shapes[name]:
            raise ValueError(
                f"{self.folder / self._where[name]}: {name} has shape {list(self._shapes[name])}, "
                f"config.json asks for {list(shape)}"
            )
        # The file's mapping must not be reachable from master weights: it may be replaced later.
        return self._files[self._where[name]].get_tensor(name).clone()

    def _require(self, name: str) -> None:
        if name not in self._shapes:
            raise ValueError(f"{self.folder}: the checkpoint has no tensor {name!r}")

    def _read_index(self) -> dict[str, str]:
        """name -> shard file; for a single file the names are filled in when it is opened."""
        single, index = self.folder / SINGLE_FILE, self.folder / INDEX_FILE
        if single.exists() and index.exists():
            raise ValueError(
                f"{self.folder}: holds both {SINGLE_FILE} and {INDEX_FILE}; remove the stale one"
            )
        if single.exists():
            return {"": SINGLE_FILE}
        if not index.exists():
            raise ValueError(missing_weights_message(self.folder))
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: weight_map is missing or empty")
        for name, shard in weight_map.items():
            # A bare name: `..`, separators and absolute paths would read outside the folder.
            if not isinstance(shard, str) or not _is_bare_name(shard):
                raise ValueError(f"{index}: {name!r} points to {shard!r}, not a file beside it")
            if not shard.endswith(".safetensors"):
                raise ValueError(f"{index}: {name!r} points to {shard!r}; only safetensors is read")
            if not (self.folder / shard).is_file():
                raise ValueError(f"{index}: shard {shard!r} of {name!r} is missing")
        return dict(weight_map)

    def _open_shard(self, shard: str) -> None:
        path = self.folder / shard
        try:
            file = safe_open(path, framework="pt", device="cpu")
            held = set(file.keys())
            slices = {name: file.get_slice(name) for name in held}
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: not a sound safetensors file ({error}); fetch it again"
            ) from None
        if self._where == {"": SINGLE_FILE}:
            self._where = dict.fromkeys(held, shard)
        listed = {name for name, where in self._where.items() if where == shard}
        for names, problem in (
            (listed - held, f"is listed in {INDEX_FILE} but not in the file"),
            (held - listed, f"is in the file but {INDEX_FILE} does not place it there"),
        ):
            if names:
                raise ValueError(f"{path}: {min(names)!r} {problem}")
        for name, piece in slices.items():
            stored = piece.get_dtype()
            if stored not in self._readable:
                raise ValueError(
                    f"{path}: {name!r} is stored as {stored}; readable: {', '.join(self._readable)}"
                )
            self._shapes[name] = tuple(piece.get_shape())
            self._dtypes[name] = self._readable[stored]
        self._files[shard] = file


def _is_bare_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0", ":"}


def missing_weights_message(folder: Path) -> str:
    """Why `folder` has no readable weights, naming pickles where there are some."""
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder}: the weights are pickled ({pickles[0]}), and a pickle can run any code; "
            "convert them to safetensors first"
        )
    return f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there"


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write: its header entry now, its data only when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Size of the data on disk."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def sources_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorSource]:
    """TensorSources of tensors already in memory, in the mapping's order."""
    return [
        TensorSource(name, tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    ]


def write_checkpoint(
    folder: str | Path, sources: Iterable[TensorSource], shard_bytes: int = SHARD_BYTES
) -> dict[str, str]:
    """Write safetensors into `folder` and return {file name: sha256}, the index included.

    One file while all data fit into `shard_bytes`, else shards of at most that (a larger tensor
    gets a shard of its own) and an index whose total_size is exact. Memory: one tensor at a time.
    Not atomic by itself: write inside `atomic_folder`.
    """
    folder = Path(folder)
    shards: list[list[TensorSource]] = [[]]
    filled, seen, total = 0, set(), 0
    for source in sources:
        assert source.name not in seen, f"{source.name} is written twice"
        seen.add(source.name)
        if shards[-1] and filled + source.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(source)
        filled += source.bytes
        total += source.bytes
    if len(shards) == 1:
        return {SINGLE_FILE: _write_file(folder / SINGLE_FILE, shards[0])}
    digests: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        digests[name] = _write_file(folder / name, shard)
        weight_map.update(dict.fromkeys((source.name for source in shard), name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    digests[INDEX_FILE] = write_json(folder / INDEX_FILE, index)
    return digests


def _write_file(path: Path, sources: Sequence[TensorSource]) -> str:
    """One safetensors file (8-byte little-endian header length, JSON header, data); its sha256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Wider elements first keeps every tensor aligned to its element size, as readers expect.
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)
    for source in ordered:
        header[source.name] = {
            "dtype": _WRITABLE[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [offset, offset + source.bytes],
        }
        offset += source.bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def emit(piece: bytes | memoryview) -> None:
            file.write(piece)
            digest.update(piece)

        emit(len(encoded).to_bytes(8, "little"))
        emit(encoded)
        for source in ordered:
            # No name is bound to the data: the next tensor is loaded after this one is gone.
            emit(_data_of(source))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _data_of(source: TensorSource) -> memoryview:
    tensor = source.load()
    assert tensor.dtype == source.dtype and tuple(tensor.shape) == source.shape, source.name
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def write_json(path: Path, value: Any) -> str:
    """Write JSON, indented, and flush it to the disk; its sha256."""
    encoded = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    with open(path, "wb") as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(encoded).hexdigest()


@contextmanager
def atomic_folder(target: str | Path, needed_bytes: int = 0) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends without an error.

    Nothing is ever visible under `target` but the whole. ValueError when `target` exists; OSError
    (ENOSPC) naming the place and the sizes when the disk cannot hold `needed_bytes`, and the same
    error with the place named when the disk fills while writing. On error the temporary is removed.
    """
    target = Path(target)
    if target.exists():
        raise ValueError(f"{target}: already exists; remove it or choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise _disk_full(target, f"{needed_bytes:,} bytes are needed, {free:,} are free")
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        # mkdtemp is private to its owner; what is published follows the parent's permissions.
        temporary.chmod(target.parent.stat().st_mode & 0o777)
        yield temporary
        os.rename(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno == errno.ENOSPC:
            raise _disk_full(target, "the disk filled while writing; nothing was kept") from error
        raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _disk_full(target: Path, detail: str) -> OSError:
    return OSError(errno.ENOSPC, f"not enough space for {target}: {detail}")


def _sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
