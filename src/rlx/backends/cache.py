"""The cache folder: compiled programs and kernels on disk.

What lies there is executed, so the folder is ours alone (mode 0700, our owner), files are written to a temporary name
and renamed, and every file carries a digest that is checked when it is read. `RLX_CACHE` is `off`, `readonly` or a
folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_DIGEST = 32


@dataclass(frozen=True)
class Cache:
    """A usable folder, or none and the reason."""

    folder: Path | None
    writable: bool
    why: str = ""

    def read(self, kind: str, key: str) -> bytes | None:
        """The entry, or None where there is none or it is damaged (it is removed then)."""
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
                with contextlib.suppress(OSError):  # another process may have been faster, or the disk may refuse
                    path.unlink()
            return None
        return payload

    def write(self, kind: str, key: str, payload: bytes) -> None:
        """Store an entry; a disk that cannot take it only costs the next start its time."""
        if self.folder is None or not self.writable:
            return
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

    def size(self) -> tuple[int, int]:
        """Files and bytes in the folder."""
        if self.folder is None:
            return 0, 0
        files = [p for p in self.folder.rglob("*") if p.is_file()]
        return len(files), sum(p.stat().st_size for p in files)

    def clear(self) -> int:
        """Remove all entries; gives how many."""
        count = 0
        if self.folder is not None:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    path.unlink(missing_ok=True)
                    count += 1
        return count


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
        found = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return Cache(None, False, f"the folder cannot be used: {error}")
    mode = stat.S_IMODE(found.st_mode)
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or mode & 0o022):
        return Cache(None, False, f"{folder} is not ours alone (owner {found.st_uid}, mode {mode:o})")
    return Cache(folder, not readonly and os.access(folder, os.W_OK))


def _default_folder() -> Path:
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("rlx", appauthor=False))
    if not folder.is_absolute():  # a user without a home keeps "~", which is no folder of the working directory
        raise RuntimeError(f"no home folder, {folder} leads nowhere")
    return folder


@functools.cache
def source_digest() -> str:
    """A digest of the sources of rlx: what they make is good for them alone."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
