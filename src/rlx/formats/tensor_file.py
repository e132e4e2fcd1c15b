"""`TensorFile`, which every reader returns, and the checks that readers share.

A reader maps a file read-only, validates its header against the file size, and builds a `TensorFile`. Nothing is copied
until it is read. Files are untrusted: every defect raises `FormatError`. Truncating a mapped file kills the process
that reads it (`mapped_file.py` detects earlier changes), so replace files by renaming, or open with `mapped=False`.
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
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BOOL, DType
from rlx.errors import FormatError, ResourceError, nearest, shortened
from rlx.fast_dataclass import dataclass
from rlx.formats.mapped_file import FileMap, map_of

PathLike = str | os.PathLike[str]

# Storage types that graphs do not have.
F8E4M3 = DType("f8e4m3", "float", 1, np.dtype(ml_dtypes.float8_e4m3fn))
F8E5M2 = DType("f8e5m2", "float", 1, np.dtype(ml_dtypes.float8_e5m2))
F8E8M0 = DType("f8e8m0", "float", 1, np.dtype(ml_dtypes.float8_e8m0fnu))  # powers of two, for scales
U16 = DType("u16", "uint", 2, np.dtype(np.uint16))
U64 = DType("u64", "uint", 8, np.dtype(np.uint64))

MAX_RANK = 8
MAX_TENSORS = 1 << 18  # per file; the largest mixture-of-experts models have about as many in all shards together
# A shard of a GGUF or safetensors model.
PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<kind>\.gguf|\.safetensors)", re.S)
_MAX_BYTES = 1 << 62  # beyond it, NumPy cannot describe even an empty array


# -- errors ----------------------------------------------------------------------------------------------------------
def broken(
    file: Path, subject: str, *, at: int | None = None, expected: object = None, actual: object = None,
    hint: str | None = None,
) -> FormatError:  # fmt: skip
    """Build a FormatError that names the file, the byte offset if known, and the expected and actual values."""
    where = f"{file}" if at is None else f"{file}, byte {at}"
    values = ", ".join(f"{k} {v}" for k, v in (("expected", expected), ("found", actual)) if v is not None)
    return FormatError(f"{where}: {subject}" + (f": {values}" if values else ""), hint=hint)


_SHORT = reprlib.Repr()  # also bounds nested lists
_SHORT.maxlist = _SHORT.maxtuple = 8


def quoted(value: object, limit: int = 80) -> str:
    """Shortened `repr`: a name in a file may be a megabyte of escape codes."""
    if not isinstance(value, str):
        return _SHORT.repr(value)
    if len(value) > 2 * limit:  # only the ends are shown
        value = value[:limit] + value[-limit:]
    return shortened(repr(value), limit)


# -- records ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location and type of one tensor. `shape` is row-major as in NumPy: a linear weight is [out, in]."""

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
    """Size of a tensor in bytes, or None if its rows are not a multiple of the block size."""
    if storage.is_packed and (not shape or shape[-1] % storage.block):
        return None
    return math.prod(shape) // storage.block * storage.size


def check_shape(file: Path, name: str, shape: tuple[int, ...], at: int | None = None) -> None:
    """Reject ranks above `MAX_RANK` and shapes whose size, ignoring zeros, NumPy cannot represent."""
    if len(shape) > MAX_RANK:
        raise broken(file, f"tensor {quoted(name)}: axes", at=at, expected=f"at most {MAX_RANK}", actual=len(shape))
    if math.prod(max(n, 1) for n in shape) * 8 > _MAX_BYTES:
        raise broken(file, f"tensor {quoted(name)}: its shape {quoted(shape)} is beyond any file", at=at)


def check_overlap(entries: Iterable[TensorEntry]) -> None:
    """Reject tensors of one file that overlap."""
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
    """The bytes of one file, read-only. Views keep the map alive; it is unmapped with the last of them."""

    path: Path
    view: memoryview

    @property
    def size(self) -> int:
        return len(self.view)

    @property
    def maps(self) -> list[FileMap]:
        """The map of the file; empty if it was read into memory."""
        return map_of(self.view)

    def array(self, first: int, end: int) -> Array:
        """Bytes `first` to `end` as a u8 array, without copying."""
        return np.frombuffer(self.view[first:end], np.uint8)

    def release(self) -> None:
        """Release resident pages; later reads fault them in from the file again."""
        if isinstance(self.view.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):  # pages locked by mlockall
                self.view.obj.madvise(mmap.MADV_DONTNEED)

    def prefer_huge_pages(self) -> None:
        """Request huge pages for a file that is read repeatedly: CPU prefetchers stop at page boundaries."""
        if isinstance(self.view.obj, mmap.mmap) and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # not supported by the kernel
                self.view.obj.madvise(mmap.MADV_HUGEPAGE)


def open_bytes(path: PathLike, *, mapped: bool = True) -> FileBytes:
    """Map a regular file, or read it into memory. Never blocks on a pipe or a device."""
    file = Path(path)
    try:
        with open(file, "rb", buffering=0, opener=_open_nonblocking) as handle:
            status = os.fstat(handle.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise broken(file, "not a file of tensors", expected="a regular file", actual=_kind(status.st_mode))
            if not status.st_size:
                raise broken(file, "the file is empty")
            if mapped:
                # not closed explicitly: it is unmapped with the last view
                return FileBytes(file, memoryview(FileMap(file, handle.fileno())))
            return FileBytes(file, memoryview(handle.readall()))
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the path
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise ResourceError(
                f"{file}: not enough memory for its {status.st_size / 2**20:,.0f} MiB",
                hint="is memory limited (ulimit -v)? Choose a smaller model",
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
    """The tensors and metadata of a model, in one file or several shards. Returned by `open_gguf` and the like."""

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
        """The underlying file, if this one joins several stored tensors into one."""
        return self

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make up a tensor."""
        return (name,)

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names, in file order."""
        return tuple(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Location and type of tensor `name`."""
        entry = self._entries.get(name)
        if entry is None:
            raise FormatError(f"{self.path}: no tensor is called {quoted(name)}", hint=self._nearest(name))
        return entry

    def array(self, name: str) -> Array:
        """The stored elements as a read-only view; a packed tensor is an array of blocks, [..., blocks per row]."""
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
        from rlx.formats.gguf_quants import dequantise  # lazy: loads its tables

        entry = self.entry(name)
        try:
            return dequantise(self.array(name), entry.storage, entry.size).reshape(entry.shape)
        except FormatError as error:
            error.add_note(f"  tensor {quoted(name)} of {entry.file}")
            raise

    def release(self) -> None:
        """Release resident pages; arrays stay valid."""
        for file in (self._bytes or {}).values():
            file.release()

    def close(self) -> None:
        """Close the files. Arrays already returned stay valid and keep their map alive."""
        self._bytes, self.maps = None, ()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _nearest(self, name: str) -> str | None:
        # difflib compares with every candidate: the bound keeps a typo cheap in large or hostile files
        candidates = [n for n in self._entries if len(n) <= 256][:4096]
        return nearest(name[:256], candidates)
