"""The files of an index: columns of rows under a head that says what is committed.

One process writes at a time, under a lock. An append writes behind the committed rows and then replaces the head, so a
crash leaves the index as it was; readers go on with the rows of the head that they have read.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlx.arrays import Array
from rlx.errors import FormatError, RequestError
from rlx.index.columns import Fixed, Varying, read_parts, write_at
from rlx.index.head import MAX_ROWS, Head, read_head, replace_file, sync_folder, write_head

LOCK = "lock"
TRIES = 100  # a writer may replace files between two reads of a reader, again and again
_PIECE = struct.Struct("<Q32s")  # rows up to and including the piece, digest
_LEVELS = 127


def row_bytes(dim: int) -> int:
    """Bytes of a row of int8 codes: whole cache lines."""
    return (dim + 63) // 64 * 64


class Store:
    """The files of an index, as of one head."""

    def __init__(self, folder: Path, *, write: bool) -> None:
        self.folder = folder
        self._lock: int | None = None
        self._publishes = True
        if write:
            read_head(folder)  # a folder that is no index gets no lock file
            self._lock = _acquire(folder)
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, folder: Path, head: Head) -> Store:
        """Makes a folder with an index without rows."""
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir() or any(folder.iterdir()):
                hint = "rlx.Index.open(path, write=True) appends to an index"
                raise RequestError(f"Index.create: {folder} exists already", hint=hint) from None
        write_head(folder, head)
        return cls(folder, write=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def writable(self) -> bool:
        return self._lock is not None

    # -- reading -------------------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Reads the head that is current now, and maps its rows."""
        for attempt in range(TRIES):
            head = read_head(self.folder)
            try:
                self._map(head)
                self._pieces(head)
                return
            except FormatError:
                if attempt == TRIES - 1 or read_head(self.folder) == head:
                    raise

    def _map(self, head: Head) -> None:
        fixed = {name: column.map(head.rows) for name, column in self._fixed(head).items()}
        strings = {name: column.map(head.rows) for name, column in self._varying(head).items()}
        deleted = self._read_deleted(head)
        self.head, self.fixed, self.strings, self.deleted = head, fixed, strings, deleted

    def _path(self, name: str, head: Head) -> Path:
        return self.folder / f"{name}.{head.epoch}"

    def _fixed(self, head: Head) -> dict[str, Fixed]:
        columns = {"vectors": Fixed(self._path("vectors", head), "<f2" if head.dtype == "f16" else "<f4", head.dim)}
        if head.dtype == "int8":
            columns["codes"] = Fixed(self._path("codes", head), "i1", row_bytes(head.dim))
            columns["scales"] = Fixed(self._path("scales", head), "<f4", 1)
            if head.metric == "l2":
                columns["halves"] = Fixed(self._path("halves", head), "<f4", 1)
        if head.ids == "int":
            columns["numbers"] = Fixed(self._path("numbers", head), "<i8", 1)
        return columns

    def _varying(self, head: Head) -> dict[str, Varying]:
        return {name: Varying(self.folder, name, head.epoch, first) for name, first in head.first.items()}

    def _read_deleted(self, head: Head) -> Array:
        if head.deleted == 0:
            return np.empty(0, np.int64)
        path = self.folder / f"deleted.{head.deleted_digest[:16]}"
        data = b"".join(read_parts(path, 0, 8 * head.deleted))
        if _digest([data]) != head.deleted_digest:
            raise FormatError(f"{path}: the digest of its {len(data)} bytes is not the one in the head")
        rows = np.frombuffer(data, "<i8")
        if rows[0] < 0 or rows[-1] >= head.rows or (np.diff(rows) <= 0).any():
            raise FormatError(f"{path}: expected rising rows from 0 to {head.rows - 1}, found {rows[0]} to {rows[-1]}")
        return rows

    def _pieces(self, head: Head) -> list[tuple[int, bytes]]:
        """The pieces that were appended: their last rows and digests."""
        path = self._path("pieces", head)
        data = b"".join(read_parts(path, 0, _PIECE.size * head.pieces)) if head.pieces else b""
        pieces = [(int(rows), digest) for rows, digest in _PIECE.iter_unpack(data)]
        ends = [rows for rows, _ in pieces]
        if sorted(ends) != ends or (ends[-1] if ends else 0) != head.rows:
            raise FormatError(f"{path}: pieces end at rows {ends[-3:]}, the head has {head.rows} rows")
        if pieces and pieces[-1][1].hex() != head.chain:
            raise FormatError(f"{path}: the last digest is {pieces[-1][1].hex()}, the head says {head.chain}")
        return pieces

    def values(self, name: str, rows: Sequence[int]) -> list[bytes | None]:
        """Values of an optional column; None for rows without one."""
        column = self.strings.get(name)
        return [None] * len(rows) if column is None else column.read(rows)

    def verify(self) -> None:
        """Reads everything and compares digests; a FormatError names the first rows that differ.

        If a writer has replaced files since they were mapped, those that are current are compared.
        """
        store = self
        for attempt in range(TRIES):
            try:
                store._verify()
                return
            except FormatError:
                if attempt == TRIES - 1 or read_head(self.folder) == store.head:
                    raise
            store = Store(self.folder, write=False)

    def _verify(self) -> None:
        start, chain = 0, b""
        for stop, digest in self._pieces(self.head):
            if self._piece_digest(self.head, start, stop, chain) != digest:
                raise FormatError(f"{self.folder}: the digest of rows {start} to {stop - 1} does not fit their bytes")
            start, chain = stop, digest

    def _piece_digest(self, head: Head, start: int, stop: int, chain: bytes) -> bytes:
        columns: dict[str, Fixed | Varying] = {**self._fixed(head), **self._varying(head)}
        present = [c for _, c in sorted(columns.items()) if not isinstance(c, Varying) or c.first < stop]
        parts = (part for column in present for part in column.piece(start, stop))
        return bytes.fromhex(_digest([chain, struct.pack("<QQ", start, stop)], parts))

    # -- writing -------------------------------------------------------------------------------------------------------
    def append(self, fixed: Mapping[str, Array], varying: Mapping[str, Sequence[bytes | None]], ids: str) -> None:
        """Adds rows: all of them, or none if anything fails. `fixed` has every fixed column."""
        self._require_lock("append")
        head, count = self.head, len(fixed["vectors"])
        if count == 0:
            return
        if head.rows + count > MAX_ROWS:
            raise RequestError(f"append: {head.rows} and {count} rows, an index has at most {MAX_ROWS}")
        first = head.first | {name: head.rows for name in varying if name not in head.first}
        after = replace(head, rows=head.rows + count, ids=ids, first=first, pieces=head.pieces + 1)
        for name, column in self._fixed(after).items():
            column.write(head.rows, fixed[name])
        for name, strings in self._varying(after).items():
            strings.write(head.rows, varying.get(name, [None] * count))
        digest = self._piece_digest(after, head.rows, after.rows, bytes.fromhex(head.chain))
        write_at(self._path("pieces", head), _PIECE.size * head.pieces, _PIECE.pack(after.rows, digest))
        sync_folder(self.folder)
        self._commit(replace(after, chain=digest.hex()))

    def delete(self, rows: Array) -> None:
        """Marks rows as deleted."""
        self._require_lock("delete")
        deleted = np.union1d(self.deleted, rows).astype("<i8")
        if len(deleted) == len(self.deleted):
            return
        old, data = self.head, deleted.tobytes()
        digest = _digest([data])
        replace_file(self.folder / f"deleted.{digest[:16]}", data)
        self._commit(replace(old, deleted=len(deleted), deleted_digest=digest))
        if old.deleted:
            (self.folder / f"deleted.{old.deleted_digest[:16]}").unlink(missing_ok=True)

    def start_epoch(self, head: Head) -> Store:
        """A store for the rows that compaction keeps, in files of their own; `finish_epoch` commits it."""
        self._require_lock("compact")
        fresh = copy.copy(self)
        fresh._publishes = False
        fresh._map(Head(head.dim, head.dtype, head.metric, head.model, ids=head.ids, epoch=self.head.epoch + 1))
        return fresh

    def finish_epoch(self, fresh: Store) -> None:
        old = self.head
        self._commit(fresh.head)
        for path in self.folder.glob(f"*.{old.epoch}"):
            path.unlink(missing_ok=True)
        if old.deleted:
            (self.folder / f"deleted.{old.deleted_digest[:16]}").unlink(missing_ok=True)

    def _commit(self, head: Head) -> None:
        if self._publishes:
            write_head(self.folder, head)
        self._map(head)

    def _require_lock(self, what: str) -> None:
        if self._lock is None:
            raise RequestError(f"{what}: {self.folder} is open for reading", hint="rlx.Index.open(path, write=True)")


def _acquire(folder: Path) -> int:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise RequestError(
            f"{folder}: the index is open for writing already, in this process or in another",
            hint="index.close() or `with` ends writing; rlx.Index.open(path) reads meanwhile",
        ) from None
    return descriptor


def _digest(parts: Iterable[bytes], more: Iterable[bytes] = ()) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for group in (parts, more):
        for part in group:
            digest.update(part)
    return digest.hexdigest()


def quantise(vectors: Array) -> tuple[Array, Array]:
    """Rows as int8 codes, padded to whole cache lines, and the scale of each."""
    scales = np.abs(vectors).max(1, initial=0, keepdims=True) / np.float32(_LEVELS)
    codes = np.zeros((len(vectors), row_bytes(vectors.shape[1])), np.int8)
    with np.errstate(divide="ignore", invalid="ignore"):
        rounded = np.rint(vectors / scales)
    codes[:, : vectors.shape[1]] = np.where(scales > 0, np.clip(rounded, -_LEVELS, _LEVELS), 0)
    return codes, scales
