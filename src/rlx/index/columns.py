"""The columns of an index: append-only files, of which readers map what the head says is committed.

Bytes behind the committed ones are what an append that did not finish has left; the next append overwrites them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass

MISSING = b"\xff"  # a value that is absent; no UTF-8 text has this byte


@dataclass(frozen=True)
class Fixed:
    """A column of `width` numbers per row."""

    path: Path
    dtype: Any
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * int(np.dtype(self.dtype).itemsize)

    def map(self, rows: int) -> Array:
        """The first rows, mapped."""
        shape = (rows, self.width)
        if rows == 0:
            return np.empty(shape, self.dtype)
        require_bytes(self.path, rows * self.row_bytes)
        try:
            return np.memmap(self.path, self.dtype, "r", shape=shape)
        except FileNotFoundError:  # a writer has removed it since
            raise _missing(self.path) from None

    def write(self, at: int, values: Array) -> None:
        """Writes rows from row `at` on."""
        data = np.ascontiguousarray(values, self.dtype)
        assert data.size == len(values) * self.width
        write_at(self.path, at * self.row_bytes, data.view(np.uint8).reshape(-1).data if data.size else b"")

    def piece(self, start: int, stop: int) -> Iterable[bytes]:
        """The bytes of rows, in parts of bounded size."""
        yield from read_parts(self.path, start * self.row_bytes, stop * self.row_bytes)


@dataclass(frozen=True)
class Varying:
    """A column of byte strings from row `first` on: their ends as u64, and the strings one after the other."""

    folder: Path
    name: str
    epoch: int
    first: int

    @property
    def ends_path(self) -> Path:
        return self.folder / f"{self.name}_ends.{self.epoch}"

    @property
    def bytes_path(self) -> Path:
        return self.folder / f"{self.name}.{self.epoch}"

    def end(self, row: int) -> int:
        """Bytes of the rows before `row`."""
        if row <= self.first:
            return 0
        data = b"".join(read_parts(self.ends_path, (row - self.first - 1) * 8, (row - self.first) * 8))
        return int.from_bytes(data, "little")

    def map(self, rows: int) -> Strings:
        """The values of all rows up to `rows`, mapped."""
        ends = Fixed(self.ends_path, "<u8", 1).map(rows - self.first)
        size = file_size(self.bytes_path)
        stop = int(ends[-1, 0]) if len(ends) else 0
        if stop > size:
            raise FormatError(f"{self.bytes_path}: {size} bytes, {self.ends_path.name} says {stop}")
        return Strings(self, ends, Fixed(self.bytes_path, "u1", 1).map(stop))

    def write(self, at: int, values: Sequence[bytes | None]) -> None:
        start = self.end(at)
        stored = [MISSING if v is None else v for v in values]
        ends = start + np.cumsum([len(v) for v in stored], dtype=np.uint64)
        write_at(self.bytes_path, start, b"".join(stored))
        write_at(self.ends_path, (at - self.first) * 8, ends.astype("<u8").tobytes())

    def piece(self, start: int, stop: int) -> Iterable[bytes]:
        start = max(start, self.first)
        yield from read_parts(self.ends_path, (start - self.first) * 8, (stop - self.first) * 8)
        low, high = self.end(start), self.end(stop)
        if low > high:
            raise FormatError(f"{self.ends_path}: rows {start} to {stop} are bytes {low} to {high}")
        yield from read_parts(self.bytes_path, low, high)


@dataclass(frozen=True)
class Strings:
    """Mapped values of a column."""

    column: Varying
    ends: Array
    data: Array

    def read(self, rows: Sequence[int]) -> list[bytes | None]:
        """The values of rows; None where there is none."""
        values: list[bytes | None] = []
        for row in rows:
            at = row - self.column.first
            if at < 0:
                values.append(None)
                continue
            start, stop = int(self.ends[at - 1, 0]) if at else 0, int(self.ends[at, 0])
            if not start <= stop <= len(self.data):
                where = f"bytes {start} to {stop} of {len(self.data)} in {self.column.bytes_path.name}"
                raise FormatError(f"{self.column.ends_path}: row {row} is {where}")
            value = self.data[start:stop].tobytes()
            values.append(None if value == MISSING else value)
        return values


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise _missing(path) from None


def _missing(path: Path) -> FormatError:
    return FormatError(f"{path}: missing, the head names it")


def require_bytes(path: Path, size: int) -> None:
    have = file_size(path)
    if have < size:
        raise FormatError(f"{path}: {have} bytes, the head says at least {size}", hint="the file is truncated")


PART = 1 << 22


def read_parts(path: Path, start: int, stop: int) -> Iterable[bytes]:
    """Bytes of a file, in parts of bounded size."""
    require_bytes(path, stop)
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by `with`
    except FileNotFoundError:  # a writer has removed it since
        raise _missing(path) from None
    with file:
        file.seek(start)
        while start < stop:
            data = file.read(min(PART, stop - start))
            if not data:
                raise FormatError(f"{path}: ends at byte {start}, expected {stop}")
            start += len(data)
            yield data


def write_at(path: Path, at: int, data: bytes | memoryview) -> None:
    """Writes bytes at an offset, drops what is behind them, and waits until they are on disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, at)
        view = memoryview(data)
        while len(view):
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
