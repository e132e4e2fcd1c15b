"""Files of tensors: what every reader gives back, and the checks that all of them share.

A reader maps a file read-only, checks its header against the bytes that are there, and makes one `TensorFile`. Nothing
is copied until it is asked for. A file is hostile until checked: whatever is wrong with it is a `FormatError`.
A map cannot outlive its bytes: who cuts a file short while it is open kills the process (`mapped.py` finds what was
changed before that), so replace files by renaming, or open them with `mapped=False`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import mmap
import os
import re
import reprlib
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BOOL, DType
from rlx.errors import FormatError, ResourceError, nearest, shortened
from rlx.formats.mapped_file import FileMap, map_of

PathLike = str | os.PathLike[str]

# Stored in files, but no type of graphs.
F8E4M3 = DType("f8e4m3", "float", 1, np.dtype(ml_dtypes.float8_e4m3fn))
F8E5M2 = DType("f8e5m2", "float", 1, np.dtype(ml_dtypes.float8_e5m2))
F8E8M0 = DType("f8e8m0", "float", 1, np.dtype(ml_dtypes.float8_e8m0fnu))  # powers of two, of scales
U16 = DType("u16", "uint", 2, np.dtype(np.uint16))
U64 = DType("u64", "uint", 8, np.dtype(np.uint64))

MAX_RANK = 8
MAX_TENSORS = 1 << 18  # in one file; the largest mixtures of experts have as many in all their shards
# One of several files of a model, of GGUF or of safetensors.
PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<kind>\.gguf|\.safetensors)", re.S)
_MAX_BYTES = 1 << 62  # beyond it, NumPy cannot describe even an empty array


# -- errors ----------------------------------------------------------------------------------------------------------
def broken(
    file: Path, subject: str, *, at: int | None = None, expected: object = None, actual: object = None,
    hint: str | None = None,
) -> FormatError:  # fmt: skip
    """A FormatError that names the file, the byte where it has one, and what was expected and found."""
    where = f"{file}" if at is None else f"{file}, byte {at}"
    values = ", ".join(f"{k} {v}" for k, v in (("expected", expected), ("found", actual)) if v is not None)
    return FormatError(f"{where}: {subject}" + (f": {values}" if values else ""), hint=hint)


_SHORT = reprlib.Repr()  # its bounds hold for lists in lists too, however deep
_SHORT.maxlist = _SHORT.maxtuple = 8


def quoted(value: object, limit: int = 80) -> str:
    """`repr`, shortened: a name from a file may be a megabyte of escape codes."""
    if not isinstance(value, str):
        return _SHORT.repr(value)
    if len(value) > 2 * limit:  # only the ends can be shown
        value = value[:limit] + value[-limit:]
    return shortened(repr(value), limit)


# -- records ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `shape` is row-major, as NumPy has it: a linear weight is [out, in]."""

    name: str
    shape: tuple[int, ...]
    storage: DType
    offset: int
    nbytes: int
    file: Path

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def stored_bytes(shape: tuple[int, ...], storage: DType) -> int | None:
    """How many bytes a tensor of this shape takes, or None when its rows are not whole blocks."""
    if storage.is_packed and (not shape or shape[-1] % storage.block):
        return None
    return math.prod(shape) // storage.block * storage.size


def check_shape(file: Path, name: str, shape: tuple[int, ...], at: int | None = None) -> None:
    """Refuse more axes than `MAX_RANK` and sizes whose product NumPy cannot hold, zeros not counted."""
    if len(shape) > MAX_RANK:
        raise broken(file, f"tensor {quoted(name)}: axes", at=at, expected=f"at most {MAX_RANK}", actual=len(shape))
    if math.prod(max(n, 1) for n in shape) * 8 > _MAX_BYTES:
        raise broken(file, f"tensor {quoted(name)}: its shape {quoted(shape)} is beyond any file", at=at)


def check_overlap(entries: Iterable[TensorEntry]) -> None:
    """Refuse two tensors of one file that share a byte."""
    in_order = sorted((e for e in entries if e.nbytes), key=lambda e: e.offset)
    for before, after in itertools.pairwise(in_order):
        if after.offset < before.end:
            raise broken(
                after.file, f"tensor {quoted(after.name)} overlaps {quoted(before.name)}",
                at=after.offset, expected=f"byte {before.end} or later", actual=after.offset,
            )  # fmt: skip


# -- bytes -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class FileBytes:
    """The bytes of one file, read-only. Views keep the map alive; it goes when the last of them goes."""

    path: Path
    view: memoryview

    @property
    def size(self) -> int:
        return len(self.view)

    @property
    def maps(self) -> list[FileMap]:
        """The map of the file; none where it was read whole."""
        return map_of(self.view)

    def array(self, first: int, end: int) -> Array:
        """The bytes from `first` to `end` as an array of u8, not copied."""
        return np.frombuffer(self.view[first:end], np.uint8)

    def release(self) -> None:
        """Let go of the pages that were read: whoever looks again gets them from the file."""
        if isinstance(self.view.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):  # locked into memory, by mlockall
                self.view.obj.madvise(mmap.MADV_DONTNEED)

    def prefer_huge_pages(self) -> None:
        """Ask for huge pages, where all of a file is read again and again: prefetchers of a CPU stop at page ends."""
        if isinstance(self.view.obj, mmap.mmap) and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel that has none
                self.view.obj.madvise(mmap.MADV_HUGEPAGE)


def open_bytes(path: PathLike, *, mapped: bool = True) -> FileBytes:
    """Map a regular file, or read it whole. Never waits on a pipe or a device."""
    file = Path(path)
    try:
        with open(file, "rb", buffering=0, opener=_open_nonblocking) as handle:
            status = os.fstat(handle.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise broken(file, "not a file of tensors", expected="a regular file", actual=_kind(status.st_mode))
            if not status.st_size:
                raise broken(file, "the file is empty")
            if mapped:
                # never closed by hand: views hold it, and it is unmapped with the last of them
                return FileBytes(file, memoryview(FileMap(file, handle.fileno())))
            return FileBytes(file, memoryview(handle.readall()))
    except (OSError, ValueError) as error:  # ValueError: a NUL or half a surrogate pair in the path
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise ResourceError(
                f"{file}: no room in memory for its {status.st_size / 2**20:,.0f} MiB",
                hint="is there a limit on memory (ulimit -v)? Choose a smaller model",
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise FormatError(f"{quoted(str(file), 400)}: cannot be opened: {reason}") from error


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _kind(mode: int) -> str:
    named = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return named.get(stat.S_IFMT(mode), "something else")


# -- the file --------------------------------------------------------------------------------------------------------
class TensorFile:
    """The tensors and metadata of one model file, or of all shards of one. Made by `open_gguf` and its like."""

    def __init__(
        self, path: Path, format: str, entries: Iterable[TensorEntry], metadata: Mapping[str, Any],
        files: Iterable[FileBytes],
    ) -> None:  # fmt: skip
        self.path = path
        self.format = format
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(metadata))
        self._entries = {e.name: e for e in entries}
        self._bytes: dict[Path, FileBytes] | None = {f.path: f for f in files}
        self.maps: tuple[FileMap, ...] = tuple(m for f in self._bytes.values() for m in f.maps)

    def __repr__(self) -> str:
        return f"<{self.format} {str(self.path)!r}: {len(self)} tensors>"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def stored(self) -> TensorFile:
        """The tensors as they lie in the file, where this one joins several into one."""
        return self

    def parts(self, name: str) -> tuple[str, ...]:
        """The tensors of the stored file that a tensor is made of."""
        return (name,)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in the order of the file."""
        return tuple(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Where tensor `name` lies and what it is."""
        entry = self._entries.get(name)
        if entry is None:
            raise FormatError(f"{self.path}: no tensor is called {quoted(name)}", hint=self._nearest(name))
        return entry

    def array(self, name: str) -> Array:
        """The stored elements as a read-only view; those of a packed tensor are blocks, [..., blocks of a row]."""
        entry = self.entry(name)
        if self._bytes is None:
            raise FormatError(f"{self.path}: closed, so tensor {quoted(name)} cannot be read")
        raw = self._bytes[entry.file].array(entry.offset, entry.end)
        storage = entry.storage
        if storage.is_packed:
            return raw.view(storage.numpy).reshape(*entry.shape[:-1], entry.shape[-1] // storage.block)
        if storage is BOOL and raw.size and int(raw.max()) > 1:
            at = int(np.argmax(raw > 1))
            where = entry.offset + at
            raise broken(entry.file, f"tensor {quoted(name)}: a bool", at=where, expected="0 or 1", actual=int(raw[at]))
        return raw.view(storage.numpy).reshape(entry.shape)

    def dequantised(self, name: str) -> Array:
        """The elements as float32, in the tensor's shape; stored float32 is a view."""
        from rlx.formats.gguf_quants import dequantise  # and its tables

        entry = self.entry(name)
        try:
            return dequantise(self.array(name), entry.storage, entry.size).reshape(entry.shape)
        except FormatError as error:
            error.add_note(f"  tensor {quoted(name)} of {entry.file}")
            raise

    def release(self) -> None:
        """Let go of the pages that were read; arrays stay good."""
        for file in (self._bytes or {}).values():
            file.release()

    def close(self) -> None:
        """Let go of the files. Arrays that were handed out stay good; the map goes with the last of them."""
        self._bytes, self.maps = None, ()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _nearest(self, name: str) -> str | None:
        # difflib compares with every candidate: a bound keeps a typo in a large or hostile file cheap
        some = [n for n in self._entries if len(n) <= 256][:4096]
        return nearest(name[:256], some)
