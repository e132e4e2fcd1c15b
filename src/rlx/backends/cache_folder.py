"""The cache folder: compiled programs and kernels on disk, and snapshots (models with packed weights, to be mapped).

Cached code is executed, so the folder and its subfolders belong to the user alone (mode 0700), files are written under
a temporary name and renamed, and every file carries a digest that is checked on reading. `RLX_CACHE` is `off`,
`readonly` or a folder. Snapshots are as large as models; `RLX_CACHE_LIMIT` bounds them in gigabytes (default 8; 0: keep
none).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rlx.errors import CapabilityError
from rlx.fast_dataclass import dataclass

_PACKAGE = Path(__file__).resolve().parent.parent
_DIGEST = 32
SNAPSHOTS = "starts"  # folder of mapped files; the name dates from older versions
LIMIT_GB = 8.0  # of snapshots
SHARE = 0.25  # of the free disk that one new snapshot may take
LEFTOVER_S = 3600.0  # age after which a temporary file counts as abandoned


@dataclass(frozen=True)
class Cache:
    """A usable folder, or None and the reason."""

    folder: Path | None
    writable: bool
    why: str = ""

    def read(self, kind: str, key: str) -> bytes | None:
        """Returns an entry, or None if it is missing or damaged (a damaged one is removed)."""
        if self.folder is None:
            return None
        path = self.folder / kind / key
        try:
            data = path.read_bytes()
        except OSError:
            return None
        payload = data[_DIGEST:]
        if hashlib.blake2b(payload, digest_size=_DIGEST).digest() != data[:_DIGEST]:
            if self.writable:
                with contextlib.suppress(OSError):  # another process may have removed it, or the disk may be read-only
                    path.unlink()
            return None
        return payload

    def write(self, kind: str, key: str, payload: bytes) -> None:
        """Stores an entry. Write failures are ignored: the next process just compiles again."""
        if self.folder is None or not self.writable:
            return
        import tempfile  # a warm start writes nothing

        folder = self.folder / kind
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.blake2b(payload, digest_size=_DIGEST).digest() + payload)
                os.replace(name, folder / key)
            except OSError:
                Path(name).unlink(missing_ok=True)
        except OSError:
            return

    # -- snapshots --
    def snapshot(self, key: str) -> Path | None:
        """Path of a snapshot, if it exists."""
        path = None if self.folder is None else self.folder / SNAPSHOTS / key
        return path if path is not None and path.is_file() else None

    def snapshots(self) -> list[Path]:
        """Paths of all snapshots."""
        folder = None if self.folder is None else self.folder / SNAPSHOTS
        return sorted(p for p in folder.iterdir() if p.name[0] != ".") if folder is not None and folder.is_dir() else []

    def room(self, key: str, size: int) -> Path | None:
        """Path where a snapshot of `size` bytes may be written, after evicting older ones; None if it does not fit.

        A key is `owner-state`: only the snapshot of an owner's last state is kept. A snapshot that exists already is
        left alone: another process may just have written it.
        """
        limit = snapshot_limit()
        if self.folder is None or not self.writable or size > limit:
            return None
        import shutil

        folder = self.folder / SNAPSHOTS
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in folder.glob(f"{key.partition('-')[0]}-*"):
                if old.name != key:
                    old.unlink(missing_ok=True)
            if size > SHARE * shutil.disk_usage(folder).free:
                return None
            self._trim(folder, limit - size)
        except OSError:
            return None
        return folder / key

    def used(self, path: Path) -> None:
        """Marks a snapshot as used; the least recently used are evicted first."""
        if self.writable:
            with contextlib.suppress(OSError):
                # Only the access time: the modification time tells processes that have it mapped that it changed.
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def drop(self, path: Path, seen: str) -> bool:
        """Removes a useless snapshot; returns whether it did. Keeps one that another process has replaced since."""
        if not self.writable or file_of(path) != seen:
            return False
        try:
            path.unlink()
        except OSError:
            return False
        return True

    @staticmethod
    def _trim(folder: Path, limit: float) -> None:
        """Evicts the least recently used snapshots until the rest take at most `limit` bytes."""
        entries = sorted(((p, p.stat()) for p in folder.iterdir()), key=lambda x: -x[1].st_atime)
        total = 0
        for path, status in entries:
            total += status.st_size
            leftover = path.name.startswith(".") and time.time() - status.st_mtime > LEFTOVER_S
            if leftover or (total > limit and not path.name.startswith(".")):
                path.unlink(missing_ok=True)

    def kinds(self) -> Iterator[tuple[str, int, int]]:
        """File count and bytes of each kind of entry."""
        folders = [] if self.folder is None else sorted(p for p in self.folder.iterdir() if p.is_dir())
        for folder in folders:
            sizes = [p.stat().st_size for p in folder.iterdir() if p.is_file()]
            yield folder.name, len(sizes), sum(sizes)

    def size(self) -> tuple[int, int]:
        """File count and bytes of the folder."""
        if self.folder is None:
            return 0, 0
        files = [p for p in self.folder.rglob("*") if p.is_file()]
        return len(files), sum(p.stat().st_size for p in files)

    def clear(self) -> int:
        """Removes all entries; returns how many."""
        count = 0
        if self.folder is not None:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    path.unlink(missing_ok=True)
                    count += 1
        return count


def snapshot_limit() -> float:
    """Bytes that snapshots may take."""
    text = os.environ.get("RLX_CACHE_LIMIT", "")
    try:
        limit = float(text) if text else LIMIT_GB
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise CapabilityError(f"RLX_CACHE_LIMIT: expected gigabytes, such as 8 or 0.5, found {text!r}")
    return limit * 1e9


def current() -> Cache:
    """The cache that the environment asks for."""
    return _open(os.environ.get("RLX_CACHE", ""))


@functools.cache
def _open(setting: str) -> Cache:
    if setting == "off":
        return Cache(None, False, "RLX_CACHE is off")
    readonly = setting == "readonly"
    try:
        folder = Path(setting).expanduser().absolute() if setting and not readonly else _default_folder()
        if not readonly:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Subfolders created later belong to this user, since nobody else may write to the outer folder.
        folders = [folder, *(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir())]
        shared = next(filter(None, map(_why_shared, folders)), None)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return Cache(None, False, f"the folder cannot be used: {error}")
    if shared is not None:
        return Cache(None, False, shared)
    return Cache(folder, not readonly and os.access(folder, os.W_OK))


def _why_shared(folder: Path) -> str | None:
    """Why code in a folder cannot be trusted: somebody else may write to it. None if nobody else may."""
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not mode & 0o022):
        return None
    import shlex

    remedy = "remove it" if status.st_uid != os.getuid() else f"run: chmod go-w {shlex.quote(str(folder))}"
    return f"{folder} is not ours alone (owner {status.st_uid}, mode {mode:o}); {remedy}"


def _default_folder() -> Path:
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("rlx", appauthor=False))
    if not folder.is_absolute():  # an unexpanded "~" must not become a folder in the working directory
        raise RuntimeError(f"no home folder, {folder} leads nowhere")
    return folder


def has_foreign_passes() -> bool:
    """Whether the pipeline is not that of rlx's sources: what other passes make is not cached."""
    pipeline = sys.modules.get("rlx.mir.pipeline")  # a warm start does not import it
    return pipeline is not None and pipeline.PIPELINE is not pipeline.BUILT_IN


@functools.cache
def source_digest() -> str:
    """A digest of rlx's sources: cached results are valid for exactly these sources.

    Reading all sources takes a tenth of a warm start, so the digest is cached under their file system state.
    """
    store, state = current(), _source_state()
    known = store.read("sources", state)
    if known is not None:
        return known.decode()
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(entry.path for entry in _sources()):
        with open(path, "rb", buffering=0) as file:
            digest.update(file.read())
    if state == _source_state():  # otherwise somebody is editing them
        store.write("sources", state, digest.hexdigest().encode())
    return digest.hexdigest()


def _source_state() -> str:
    """Changes whenever a source does: programs cannot reset a file's change time (ctime)."""
    digest = hashlib.blake2b(digest_size=16)
    for entry in _sources():
        digest.update(f"{entry.path}|{identity(entry.stat())}\n".encode())
    return digest.hexdigest()


def _sources() -> Iterator[os.DirEntry[str]]:
    folders = [str(_PACKAGE)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    yield entry


def file_of(path: Path) -> str:
    """Identifies the file at a path: changes when it is replaced, not when only its times change."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino} {status.st_size}"


def identity(status: os.stat_result) -> str:
    """Distinguishes two states of a file."""
    s = status
    return f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}"
