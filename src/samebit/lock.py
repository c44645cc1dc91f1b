"""One process at a time in a run's folder: a lock that dies with its owner, however that dies."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType

FILE = "run.lock"


class FolderLock:
    """Holds `folder` (made if need be) while the `with` block runs.

    The kernel drops the lock when the process ends, by `kill -9` too, so no stale lock is ever left;
    the file stays, and says who held it last. ValueError when another run holds the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = _in_use(self.folder, descriptor)
            os.close(descriptor)
            raise error from None
        except BaseException:
            os.close(descriptor)
            raise
        about = {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode() + b"\n", 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def require_free(folder: str | Path) -> None:
    """ValueError where a live run holds `folder`; nothing is made, written or kept.

    The lock is shared for the moment of looking, so those who only look do not refuse one another.
    """
    try:
        descriptor = os.open(Path(folder) / FILE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(Path(folder), descriptor) from None
    finally:
        os.close(descriptor)


def require_place(folder: str | Path) -> None:
    """ValueError where no run can be at `folder`; what is made to find out is removed again."""
    folder = Path(folder)
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = "a file" if folder.is_file() else "no folder that can be written"
        reason = "" if folder.is_file() else f" ({error.strerror})"
        raise ValueError(
            f"run.out = {str(folder)!r} is {what}{reason}: choose another folder with --out"
        ) from None
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _in_use(folder: Path, descriptor: int) -> ValueError:
    owner = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
    return ValueError(
        f"{folder} is in use by a live run ({owner or 'starting'}): wait for it or end it, or choose "
        "another folder with --out"
    )
