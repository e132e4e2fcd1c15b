"""The local model folder: its location, locks, and the record of verified files.

`RLX_HOME` or the user's data folder holds `models/<catalogue name>/`, `hub/models--org--name/`, `licences/`, `locks/`.
A file is downloaded into a `.partial` folder and gets its final name only after its hash matches. Disk errors become a
`CapabilityError` that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rlx.errors import CapabilityError

CHUNK = 1 << 20
PARTIAL = ".partial"
RECORD = ".verified.json"  # verified files: name -> sha256 and modification time
_FULL = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
_SPARE = 16 << 20  # bytes left free on the disk
_POLL_S = 0.2


def home() -> Path:
    """The model folder, which need not exist yet."""
    setting = os.environ.get("RLX_HOME", "")
    if setting:
        folder = Path(os.path.expanduser(setting))
        if str(folder).startswith("~"):
            raise _no_home_error(str(folder))
        return folder.absolute()
    import platformdirs

    try:
        folder = Path(platformdirs.user_data_dir("rlx", appauthor=False))
    except RuntimeError as error:  # no home folder
        raise _no_home_error("~") from error
    if not folder.is_absolute():  # the same, in older versions of platformdirs
        raise _no_home_error(str(folder))
    return folder


def _no_home_error(folder: str) -> CapabilityError:
    return CapabilityError(f"no home folder: {folder} does not exist", hint="set RLX_HOME to a folder for models")


def home_or_none() -> Path | None:
    """The model folder, or None for a user without a home folder."""
    try:
        return home()
    except CapabilityError:
        return None


def is_offline(variable: str = "RLX_OFFLINE") -> bool:
    """Whether the environment forbids the network."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no", "off")


# -- disk errors -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def disk_errors(subject: str, folder: Path) -> Iterator[None]:
    """Convert file system errors to errors that say what to do."""
    try:
        yield
    except OSError as error:
        raise disk_error(subject, folder, error) from error


def disk_error(subject: str, folder: Path, error: OSError) -> CapabilityError:
    if error.errno in _FULL:
        return disk_full(subject, folder)
    if error.errno == errno.EFBIG:
        return CapabilityError(
            f"{subject}: a file in {folder} would become too large",
            hint="raise the limit on the size of files (ulimit -f), or set RLX_HOME to a folder on another file system",
        )
    if error.errno in _REFUSED:
        return CapabilityError(
            f"{subject}: {folder} cannot be written: {error.strerror}",
            hint="set RLX_HOME to a folder that you may write to",
        )
    return CapabilityError(f"{subject}: {folder}: {error.strerror or error}")


def tool_error(subject: str, folder: Path, code: int, output: str) -> CapabilityError | None:
    """The disk error that made a tool fail, recognised by its exit code or output; None if there is none."""
    if code == -getattr(signal, "SIGXFSZ", code):
        output = "EFBIG"
    words = {"ENOSPC": "No space left on device", "EDQUOT": "Disk quota exceeded", "EFBIG": "File too large"}
    for name, message in words.items():
        if name in output or message in output:
            return disk_error(subject, folder, OSError(getattr(errno, name, errno.ENOSPC), message))
    return None


def disk_full(subject: str, folder: Path, needed: int | None = None, free: int | None = None) -> CapabilityError:
    numbers = "" if needed is None or free is None else f": {show_size(needed)} needed, {show_size(free)} free"
    return CapabilityError(
        f"{subject}: the disk of {folder} is full{numbers}",
        hint="make room (`rlx rm` removes models), or set RLX_HOME to a folder on another disk",
    )


def check_free(subject: str, folder: Path, needed: int, largest: int = 0) -> None:
    """Raise before a download that would not fit; `largest` is the size of the largest file."""
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit not in (resource.RLIM_INFINITY, -1) and limit < largest:
            error = disk_error(subject, folder, OSError(errno.EFBIG, os.strerror(errno.EFBIG)))
            error.add_note(f"  the limit is {show_size(limit)}, the largest file has {show_size(largest)}")
            raise error
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # not reported by some file systems
        return
    if free < needed + _SPARE:
        raise disk_full(subject, folder, needed + _SPARE, free)


def make_folder(subject: str, folder: Path) -> Path:
    """Create a folder and its parents, and check that it is writable."""
    with disk_errors(subject, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return folder


# -- locks -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def lock(name: str, waiting: Callable[[], None]) -> Iterator[bool]:
    """Acquire the lock of a model, waiting if needed. Yields False if the file system does not support locks.

    The lock file is never removed: otherwise two processes could hold locks of the same name. The system releases the
    lock of a process that dies.
    """
    folder = make_folder(name, home() / "locks")
    with disk_errors(name, folder):
        file = open(folder / f"{name}.lock", "ab")  # noqa: SIM115  closed below; only opening can be a disk error
    with file as handle:
        notified = False
        while (acquired := _try_lock(handle.fileno())) is False:
            if not notified:
                waiting()
                notified = True
            time.sleep(_POLL_S)
        try:
            yield bool(acquired)
        finally:
            if acquired:
                _unlock(handle.fileno())


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool | None:
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool | None:
        """True if acquired, False if another process holds it, None if locks are not supported."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


# -- verified files --------------------------------------------------------------------------------------------------
def file_size(path: Path) -> int | None:
    """The size of a regular file, or None if there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_intact(path: Path, size: int, sha256: str) -> bool:
    """Whether a file exists with this size and hash."""
    return file_size(path) == size and file_sha256(path) == sha256


def verified_files(folder: Path, wanted: Mapping[str, tuple[int, str]]) -> list[str]:
    """List the wanted files (name -> size, sha256) that exist in the folder with the right hash.

    A file is hashed once: when downloaded, or now if it was copied there or changed. The result is recorded if the
    folder is writable.
    """
    record = _read_record(folder)
    present = [name for name, (size, _) in wanted.items() if file_size(folder / name) == size]
    new = [name for name in present if record.get(name) != _record_entry(folder / name, wanted[name][1])]
    right = [name for name in new if file_sha256(folder / name) == wanted[name][1]]
    if right:
        with contextlib.suppress(OSError):
            _write_record(folder, record | {name: _record_entry(folder / name, wanted[name][1]) for name in right})
    return [name for name in present if name not in new or name in right]


def commit_file(temporary: Path, folder: Path, name: str, sha256: str) -> None:
    """Atomically give a verified file its final name, and record its hash."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(temporary, target)
    _write_record(folder, _read_record(folder) | {name: _record_entry(target, sha256)})


def _record_entry(path: Path, sha256: str) -> list[str | int]:
    return [sha256, int(path.stat().st_mtime)]  # in seconds, the resolution that disk images and archives preserve


def _read_record(folder: Path) -> dict[str, list[str | int]]:
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(folder: Path, record: Mapping[str, list[str | int]]) -> None:
    write_text(folder / RECORD, json.dumps(record, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically, via a temporary name."""
    temporary = path.with_name(f".tmp-{path.name}-{os.urandom(4).hex()}")  # not mkstemp: others may read
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def show_size(size: int) -> str:
    """Format a size in decimal units, as download pages do.

    >>> show_size(98362432)
    '98.4 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{size} bytes"
