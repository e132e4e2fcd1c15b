"""The folder of models: where it is, who may write to it now, what of it has been checked.

`RLX_HOME` or the user's data folder holds `models/<catalogue name>/`, `hub/models--org--name/`, `licences/`, `locks/`.
A file gets its final name only after its hash was right; until then it lies in a `.partial` folder beside it. What the
disk refuses is a `CapabilityError` that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
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
RECORD = ".verified.json"  # file name -> sha256 and time of change, of the files that were checked
_FULL = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
_SPARE = 16 << 20  # left free on a disk that we fill
_POLL_S = 0.2


def home() -> Path:
    """The folder of models, which need not exist yet."""
    setting = os.environ.get("RLX_HOME", "")
    if setting:
        folder = Path(os.path.expanduser(setting))
        if str(folder).startswith("~"):
            raise _homeless(str(folder))
        return folder.absolute()
    import platformdirs

    try:
        folder = Path(platformdirs.user_data_dir("rlx", appauthor=False))
    except RuntimeError as error:  # a user without a home
        raise _homeless("~") from error
    if not folder.is_absolute():  # the same, in older versions of platformdirs
        raise _homeless(str(folder))
    return folder


def _homeless(folder: str) -> CapabilityError:
    return CapabilityError(f"no home folder: {folder} leads nowhere", hint="set RLX_HOME to a folder for models")


def home_or_none() -> Path | None:
    """The folder of models, or None for a user without a home: nothing of ours can be there."""
    try:
        return home()
    except CapabilityError:
        return None


def is_offline(variable: str = "RLX_OFFLINE") -> bool:
    """Whether the environment forbids the network."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no", "off")


# -- what the disk says ----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def disk_errors(subject: str, folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into errors that say what to do."""
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
    """What a program that was to write files says of the disk, if that is why it has failed."""
    if code == -getattr(signal, "SIGXFSZ", code):
        output = "EFBIG"
    words = {"ENOSPC": "No space left on device", "EDQUOT": "Disk quota exceeded", "EFBIG": "File too large"}
    for name, said in words.items():
        if name in output or said in output:
            return disk_error(subject, folder, OSError(getattr(errno, name, errno.ENOSPC), said))
    return None


def disk_full(subject: str, folder: Path, needed: int | None = None, free: int | None = None) -> CapabilityError:
    numbers = "" if needed is None or free is None else f": {show_size(needed)} needed, {show_size(free)} free"
    return CapabilityError(
        f"{subject}: the disk of {folder} is full{numbers}",
        hint="make room (`rlx rm` removes models), or set RLX_HOME to a folder on another disk",
    )


def check_free(subject: str, folder: Path, needed: int, largest: int = 0) -> None:
    """Refuse before the first byte what would not fit at the end; `largest` are the bytes of the largest file."""
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit not in (resource.RLIM_INFINITY, -1) and limit < largest:
            error = disk_error(subject, folder, OSError(errno.EFBIG, os.strerror(errno.EFBIG)))
            error.add_note(f"  the limit is {show_size(limit)}, the largest file has {show_size(largest)}")
            raise error
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # some file systems do not say
        return
    if free < needed + _SPARE:
        raise disk_full(subject, folder, needed + _SPARE, free)


def make_folder(subject: str, folder: Path) -> Path:
    """The folder, made with those above it, and known to take files."""
    with disk_errors(subject, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return folder


# -- locks -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def lock(name: str, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of a model, after whoever has it now. Gives False where the file system knows no locks.

    The file stays: removing it would let two processes hold two locks of one name. The system lets go of the lock of
    a process that dies.
    """
    folder = make_folder(name, home() / "locks")
    with disk_errors(name, folder):
        file = open(folder / f"{name}.lock", "ab")  # noqa: SIM115  closed below; only the opening is the disk's matter
    with file as handle:
        told = False
        while (taken := _try_lock(handle.fileno())) is False:
            if not told:
                waiting()
                told = True
            time.sleep(_POLL_S)
        try:
            yield bool(taken)
        finally:
            if taken:
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
        """True: ours. False: another's. None: no locks here."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


# -- what was checked ------------------------------------------------------------------------------------------------
def file_size(path: Path) -> int | None:
    """The size of a regular file, or None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_intact(path: Path, size: int, sha256: str) -> bool:
    """Whether a file is there with this size and hash."""
    return file_size(path) == size and file_sha256(path) == sha256


def verified(folder: Path, wanted: Mapping[str, tuple[int, str]]) -> list[str]:
    """Which of the wanted files (name -> size, sha256) are in the folder and right.

    A file is hashed once: when it was fetched, or now, if somebody put it there or changed it. That it was right is
    remembered where the folder can be written.
    """
    record = _read_record(folder)
    present = [name for name, (size, _) in wanted.items() if file_size(folder / name) == size]
    new = [name for name in present if record.get(name) != _remembered(folder / name, wanted[name][1])]
    right = [name for name in new if file_sha256(folder / name) == wanted[name][1]]
    if right:
        with contextlib.suppress(OSError):
            _write_record(folder, record | {name: _remembered(folder / name, wanted[name][1]) for name in right})
    return [name for name in present if name not in new or name in right]


def put(temporary: Path, folder: Path, name: str, sha256: str) -> None:
    """Give a checked file its final name, at once, and remember its hash."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(temporary, target)
    _write_record(folder, _read_record(folder) | {name: _remembered(target, sha256)})


def _remembered(path: Path, sha256: str) -> list[str | int]:
    return [sha256, int(path.stat().st_mtime)]  # whole seconds: that much survives images and archives


def _read_record(folder: Path) -> dict[str, list[str | int]]:
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(folder: Path, record: Mapping[str, list[str | int]]) -> None:
    write_text(folder / RECORD, json.dumps(record, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a small file under another name, then rename it."""
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")  # not mkstemp: others may read models
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def show_size(size: int) -> str:
    """Bytes for people, in the units of download pages.

    >>> show_size(98362432)
    '98.4 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{size} bytes"
