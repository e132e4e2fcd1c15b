"""GGUF, llama.cpp's model format: versions 1 to 3, little endian, single-file or split.

Layout (ggml/docs/gguf.md): magic, version, counts, metadata, tensor infos, padding, data. The header is read in one
pass; numeric arrays become views of the map, string arrays store offsets and decode on demand.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Union, overload

import numpy as np

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.formats.gguf_quants import GGUF_REMOVED, GGUF_TYPES
from rlx.formats.tensor_file import (
    MAX_RANK,
    MAX_TENSORS,
    PART_NAME,
    FileBytes,
    PathLike,
    TensorEntry,
    TensorFile,
    broken,
    check_overlap,
    check_shape,
    open_bytes,
    quoted,
    stored_bytes,
)

MAGIC = b"GGUF"
VERSIONS = (1, 2, 3)
DEFAULT_ALIGNMENT = 32
# Far beyond any real file; every count is also bounded by the remaining bytes.
MAX_KEYS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 1 << 26
MAX_STRINGS = 1 << 23  # in all arrays of a file
MAX_ARRAYS = 1 << 16  # nested arrays in a file
MAX_NESTING = 4

Value = Union[bool, int, float, str, Array, "StringArray", tuple[Any, ...]]

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
BOOL, STRING, ARRAY = 7, 8, 9
# Type number -> name, struct code, NumPy type.
_NUMBERS: dict[int, tuple[str, struct.Struct, str]] = {
    number: (name, struct.Struct("<" + code), view)
    for number, name, code, view in (
        (0, "uint8", "B", "<u1"), (1, "int8", "b", "<i1"), (2, "uint16", "H", "<u2"), (3, "int16", "h", "<i2"),
        (4, "uint32", "I", "<u4"), (5, "int32", "i", "<i4"), (6, "float32", "f", "<f4"), (BOOL, "bool", "B", "?"),
        (10, "uint64", "Q", "<u8"), (11, "int64", "q", "<i8"), (12, "float64", "d", "<f8"),
    )
}  # fmt: skip
_VALUE_TYPES = ", ".join(f"{n} {name}" for n, (name, _, _) in _NUMBERS.items()) + ", 8 string, 9 array"


class StringArray(Sequence[str]):
    """Strings of a metadata array, decoded on access. `raw(i)` returns the stored bytes."""

    def __init__(self, file: FileBytes, offsets: array[int], prefix: int) -> None:
        self._file = file
        self._offsets = offsets  # of each string's length field, then the end of the last string
        self._prefix = prefix  # size of a length field in bytes

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        begin, end = self._span(index)
        return _decode(self._file, begin, end, "a string of an array")

    def __iter__(self) -> Iterator[str]:
        view, prefix, offsets = self._file.view, self._prefix, self._offsets
        begin = offsets[0]
        for end in offsets[1:]:
            try:
                text = str(view[begin + prefix : end], "utf-8")
            except UnicodeDecodeError:
                text = _decode(self._file, begin + prefix, end, "a string of an array")  # raises with the offset
            yield text
            begin = end

    def raw(self, index: int) -> bytes:
        """The stored bytes of string `index`, for vocabularies that are not valid UTF-8."""
        begin, end = self._span(index)
        return bytes(self._file.view[begin:end])

    def _span(self, index: int) -> tuple[int, int]:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self._offsets[place] + self._prefix, self._offsets[place + 1]


def open_gguf(path: PathLike, *, mapped: bool = True) -> TensorFile:
    """Open a GGUF file; the first part of a split model (`...-00001-of-0000N.gguf`) opens all parts.

    `metadata` holds the keys of the (first) file, and `GGUF.version`.
    """
    first = _read_part(open_bytes(path, mapped=mapped))
    parts = [first]
    count = _split_number(first, "split.count", default=1)
    if count > 1:
        parts += [_read_part(open_bytes(p, mapped=mapped)) for p in _other_parts(first, count)]
        _check_parts(parts)
    entries = [entry for part in parts for entry in part.entries]
    return TensorFile(first.file.path, "gguf", entries, first.metadata, [part.file for part in parts])


# -- split models ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    file: FileBytes
    metadata: dict[str, Value]
    entries: list[TensorEntry]


def _split_number(part: _Part, key: str, default: int | None = None) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise broken(part.file.path, f"metadata {key}", expected="a count", actual=quoted(value))
    return value


def _other_parts(first: _Part, count: int) -> list[Path]:
    path = first.file.path
    name = _part_name(path)
    if name is None or int(name["count"]) != count:
        expected = f"a name that ends in -00001-of-{count:05}.gguf"
        raise broken(path, f"split.count is {count}", expected=expected, actual=quoted(path.name))
    if int(name["number"]) != 1:
        start = f"{name['stem']}-00001-of-{count:05}.gguf"
        raise broken(path, f"part {int(name['number'])} of a split model", hint=f"open {quoted(start)}")
    return [path.with_name(f"{name['stem']}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]


def _check_parts(parts: list[_Part]) -> None:
    seen: dict[str, Path] = {}
    for number, part in enumerate(parts):
        for key, expected in (("split.count", len(parts)), ("split.no", number)):
            value = _split_number(part, key)
            if value != expected:
                raise broken(part.file.path, f"metadata {key}", expected=expected, actual=value)
        for entry in part.entries:
            if entry.name in seen:
                raise broken(part.file.path, f"tensor {quoted(entry.name)} is in {seen[entry.name].name} too")
            seen[entry.name] = part.file.path
    total = _split_number(parts[0], "split.tensors.count", default=len(seen))
    if total != len(seen):
        raise broken(parts[0].file.path, "metadata split.tensors.count", expected=total, actual=len(seen))


def is_later_part(path: Path) -> bool:
    """Whether a file is the second or a later part of a split model."""
    name = _part_name(path)
    return name is not None and int(name["number"]) > 1


def _part_name(path: Path) -> re.Match[str] | None:
    name = PART_NAME.fullmatch(path.name)
    return name if name is not None and name["kind"] == ".gguf" else None


# -- one file --------------------------------------------------------------------------------------------------------
def _read_part(file: FileBytes) -> _Part:
    cursor = _Cursor(file)
    magic = bytes(cursor.take(4, "magic"))
    if magic != MAGIC:
        raise broken(file.path, "not a GGUF file", at=0, expected=MAGIC, actual=magic)
    version = cursor.u32("version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0 and version:
            raise broken(
                file.path, "the file is big endian", at=4, expected="little endian",
                actual=f"version bytes {version.to_bytes(4, 'little').hex(' ')}",
            )  # fmt: skip
        raise broken(file.path, "GGUF version", at=4, expected="1, 2 or 3", actual=version)
    cursor.wide = version > 1
    # Minimum sizes: a tensor info has a name length, rank, type and offset; a key has a length, a type and a byte.
    tensors = cursor.count("tensor count", each=cursor.prefix + 16, max_count=MAX_TENSORS)
    keys = cursor.count("key count", each=cursor.prefix + 5, max_count=MAX_KEYS)
    metadata: dict[str, Value] = {"GGUF.version": version}
    for _ in range(keys):
        begin = cursor.at
        key = cursor.string("a key", MAX_KEY_BYTES)
        if key in metadata:
            raise broken(file.path, f"key {quoted(key)} occurs twice", at=begin)
        metadata[key] = cursor.value(cursor.u32(f"type of {quoted(key)}"), f"value of {quoted(key)}")
    return _Part(file, metadata, _read_tensors(cursor, tensors, _alignment(file.path, metadata)))


def _alignment(file: Path, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise broken(file, "metadata general.alignment", expected="a power of two", actual=quoted(alignment))
    return alignment


@dataclass(frozen=True, slots=True)
class _Info:
    at: int
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> list[TensorEntry]:
    infos = [_read_info(cursor) for _ in range(count)]
    start = -(-cursor.at // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for info in infos:
        if info.name in entries:
            raise broken(cursor.file.path, f"tensor {quoted(info.name)} occurs twice", at=info.at)
        entries[info.name] = _place(cursor.file, info, start, alignment)
    check_overlap(entries.values())
    return list(entries.values())


def _read_info(cursor: _Cursor) -> _Info:
    begin = cursor.at
    name = cursor.string("a tensor's name", MAX_KEY_BYTES)
    label = quoted(name)
    rank = cursor.u32(f"rank of {label}")
    if rank > MAX_RANK:
        at = cursor.at - 4
        raise broken(cursor.file.path, f"rank of {label}", at=at, expected=f"at most {MAX_RANK}", actual=rank)
    dims = [cursor.size_field(f"shape of {label}") for _ in range(rank)]
    type_number = cursor.u32(f"type of {label}")
    offset = cursor.u64(f"offset of {label}")
    return _Info(begin, name, tuple(reversed(dims)), type_number, offset)  # files store the fastest axis first


def _place(file: FileBytes, info: _Info, start: int, alignment: int) -> TensorEntry:
    subject = f"tensor {quoted(info.name)}"
    storage = GGUF_TYPES.get(info.type)
    if storage is None:
        removed = GGUF_REMOVED.get(info.type)
        actual = f"type {info.type}" + (f" ({removed}, which ggml removed)" if removed else ", which is unknown")
        raise broken(file.path, subject, at=info.at, expected="a type of ggml", actual=actual)
    check_shape(file.path, info.name, info.shape, info.at)
    if 0 in info.shape:
        raise broken(file.path, f"{subject}: shape", at=info.at, expected="no zero", actual=info.shape)
    nbytes = stored_bytes(info.shape, storage)
    if nbytes is None:
        expected = f"rows of whole blocks of {storage.block}"
        raise broken(file.path, f"{subject} of {storage}", at=info.at, expected=expected, actual=f"shape {info.shape}")
    if info.offset % alignment:
        raise broken(
            file.path, f"{subject}: offset", at=info.at, expected=f"a multiple of {alignment}", actual=info.offset
        )
    begin = start + info.offset
    if begin + nbytes > file.size:
        expected = f"its {nbytes} bytes within the file of {file.size}"
        raise broken(file.path, subject, at=info.at, expected=expected, actual=f"bytes {begin} to {begin + nbytes}")
    return TensorEntry(info.name, info.shape, storage, begin, nbytes, file.path)


def _decode(file: FileBytes, begin: int, end: int, field: str) -> str:
    try:
        return str(file.view[begin:end], "utf-8")
    except UnicodeDecodeError as error:
        at = begin + error.start
        raise broken(file.path, f"{field} is not UTF-8", at=at, actual=f"byte {file.view[at]:#04x}") from error


class _Cursor:
    """Sequential header reader; every read is checked against the remaining bytes."""

    def __init__(self, file: FileBytes) -> None:
        self.file = file
        self.at = 0
        self.wide = True  # counts, lengths and sizes are 64-bit; 32-bit in version 1
        self.arrays = 0  # nested arrays read so far
        self.strings = 0  # array strings read so far

    @property
    def remaining(self) -> int:
        return self.file.size - self.at

    @property
    def prefix(self) -> int:
        """Size in bytes of a count, length or size field."""
        return 8 if self.wide else 4

    def take(self, nbytes: int, field: str) -> memoryview:
        if nbytes > self.remaining:
            actual = f"{self.remaining} before the end of the file"
            raise broken(self.file.path, field, at=self.at, expected=f"{nbytes} bytes", actual=actual)
        begin, self.at = self.at, self.at + nbytes
        return self.file.view[begin : self.at]

    def number(self, code: struct.Struct, field: str) -> int | float:
        value: int | float = code.unpack(self.take(code.size, field))[0]
        return value

    def u32(self, field: str) -> int:
        return int(self.number(_U32, field))

    def u64(self, field: str) -> int:
        return int(self.number(_U64, field))

    def size_field(self, field: str) -> int:
        return self.u64(field) if self.wide else self.u32(field)

    def count(self, field: str, *, each: int, max_count: int | None = None) -> int:
        """Read a count of items that take at least `each` bytes."""
        begin = self.at
        count = self.size_field(field)
        if count * each > self.remaining:
            expected = f"at most {self.remaining // each}, for {self.remaining} bytes remain"
            raise broken(self.file.path, field, at=begin, expected=expected, actual=count)
        if max_count is not None and count > max_count:
            raise broken(self.file.path, field, at=begin, expected=f"at most {max_count}", actual=count)
        return count

    def string(self, field: str, max_bytes: int) -> str:
        length = self.count(f"length of {field}", each=1, max_count=max_bytes)
        self.at += length
        return _decode(self.file, self.at - length, self.at, field)

    def value(self, kind: int, field: str, depth: int = 0) -> Value:
        if kind == STRING:
            return self.string(field, MAX_STRING_BYTES)
        if kind == ARRAY:
            return self.array(field, depth)
        if kind not in _NUMBERS:
            raise broken(self.file.path, f"type of {field}", at=self.at - 4, expected=_VALUE_TYPES, actual=kind)
        value = self.number(_NUMBERS[kind][1], field)
        if kind == BOOL:
            if value > 1:
                raise broken(self.file.path, field, at=self.at - 1, expected="0 or 1", actual=value)
            return bool(value)
        return value

    def array(self, field: str, depth: int) -> Value:
        if depth:
            self.arrays += 1
        if depth >= MAX_NESTING or self.arrays > MAX_ARRAYS:
            expected = f"at most {MAX_NESTING} levels and {MAX_ARRAYS} inner arrays"
            raise broken(self.file.path, f"{field} is nested too much", at=self.at, expected=expected)
        kind = self.u32(f"element type of {field}")
        if kind == STRING:
            return self.string_array(field)
        if kind == ARRAY:
            inner = self.count(f"length of {field}", each=4 + self.prefix, max_count=MAX_ARRAYS)
            return tuple(self.array(field, depth + 1) for _ in range(inner))
        if kind not in _NUMBERS:
            raise broken(self.file.path, f"element type of {field}", at=self.at - 4, expected=_VALUE_TYPES, actual=kind)
        dtype = np.dtype(_NUMBERS[kind][2])
        count = self.count(f"length of {field}", each=dtype.itemsize)
        begin = self.at
        self.at += count * dtype.itemsize
        raw = self.file.array(begin, self.at)
        if kind == BOOL and count and int(raw.max()) > 1:
            at = int(np.argmax(raw > 1))
            raise broken(self.file.path, field, at=begin + at, expected="0 or 1", actual=int(raw[at]))
        return raw.view(dtype)

    def string_array(self, field: str) -> StringArray:
        """Scan an array of strings by their lengths. This loop dominates the time to open a file."""
        count = self.count(f"length of {field}", each=self.prefix, max_count=MAX_STRINGS - self.strings)
        self.strings += count
        code = _U64 if self.wide else _U32
        view, read, prefix, end, at = self.file.view, code.unpack_from, code.size, self.file.size, self.at
        offsets = array("q", (at,))
        append = offsets.append
        for _ in range(count):
            if at + prefix > end:
                break
            at += prefix + read(view, at)[0]
            if at > end:
                break
            append(at)
        if len(offsets) <= count:
            actual = f"string {len(offsets) - 1} of {count} beyond it"
            raise broken(
                self.file.path, field, at=offsets[-1], expected=f"strings that end by byte {end}", actual=actual
            )
        self.at = at
        return StringArray(self.file, offsets, prefix)
