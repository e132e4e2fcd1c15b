"""safetensors, Hugging Face's checkpoint format: one file, or shards with an index.

Layout: eight bytes of header length, a JSON header, then the data, which the tensors cover without gap or overlap.
`model.safetensors.index.json` maps tensors to shards; tensors it does not list are not part of the model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, U32, DType
from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats.strict_json import MAX_BYTES, parse_json
from rlx.formats.tensor_file import (
    F8E4M3,
    F8E5M2,
    F8E8M0,
    MAX_TENSORS,
    U16,
    U64,
    FileBytes,
    PathLike,
    TensorEntry,
    TensorFile,
    broken,
    check_shape,
    open_bytes,
    quoted,
    stored_bytes,
)
from rlx.types import TensorType

INDEX_NAME = "model.safetensors.index.json"
DTYPES: dict[str, DType] = {
    "BOOL": BOOL, "U8": U8, "I8": I8, "U16": U16, "I16": I16, "U32": U32, "I32": I32, "U64": U64, "I64": I64,
    "F8_E4M3": F8E4M3, "F8_E5M2": F8E5M2, "F8_E8M0": F8E8M0, "F16": F16, "BF16": BF16, "F32": F32, "F64": F64,
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


def open_safetensors(path: PathLike, *, mapped: bool = True) -> TensorFile:
    """Open one `.safetensors` file, or all shards that an index (`....index.json`) names.

    `metadata` is the header's `__metadata__`; for a sharded model, that of the index merged over that of its shards.
    """
    file = Path(path)
    if file.name.endswith(".json"):
        return _open_index(file, mapped)
    shard = _read_shard(open_bytes(file, mapped=mapped))
    return TensorFile(file, "safetensors", shard.entries.values(), shard.metadata, [shard.file])


# -- shards ----------------------------------------------------------------------------------------------------------
def _open_index(path: Path, mapped: bool) -> TensorFile:
    index = parse_json(open_bytes(path).view, path)
    if not isinstance(index, dict):
        raise broken(path, "the index", at=0, expected="a JSON object", actual=_json_kind(index))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise broken(path, "the index's weight_map", expected="a JSON object", actual=_json_kind(weight_map))
    if not weight_map:
        raise broken(path, "the index's weight_map is empty")
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise broken(path, "the index's metadata", expected="a JSON object", actual=_json_kind(metadata))
    for name, shard_name in weight_map.items():
        _check_shard_name(path, name, shard_name)
    shards = {n: _read_shard(open_bytes(path.with_name(n), mapped=mapped)) for n in dict.fromkeys(weight_map.values())}
    entries = []
    for name, shard_name in weight_map.items():
        entry = shards[shard_name].entries.get(name)
        if entry is None:
            subject = f"tensor {quoted(name)} is not in {quoted(shard_name)}, where {path.name} has it"
            raise broken(path.with_name(shard_name), subject)
        entries.append(entry)
    for shard in shards.values():
        metadata = shard.metadata | metadata
    return TensorFile(path, "safetensors", entries, metadata, [shard.file for shard in shards.values()])


def _check_shard_name(path: Path, name: str, shard: object) -> None:
    """A shard must be in the folder of its index. It may be a symlink, as in the Hugging Face cache."""
    if not isinstance(shard, str):
        raise broken(path, f"shard of tensor {quoted(name)}", expected="a file name", actual=_json_kind(shard))
    if not shard.endswith(".safetensors") or any(c in shard for c in "/\\:\0") or len(shard) > 255:
        expected = "a .safetensors file beside the index"
        raise broken(path, f"shard of tensor {quoted(name)}", expected=expected, actual=quoted(shard))


# -- one file --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    file: FileBytes
    metadata: dict[str, str]
    entries: dict[str, TensorEntry]


def _read_shard(file: FileBytes) -> _Shard:
    path = file.path
    if file.size < _LENGTH.size:
        raise broken(path, "header length", at=0, expected=f"{_LENGTH.size} bytes", actual=f"a file of {file.size}")
    (length,) = _LENGTH.unpack_from(file.view)
    start = _LENGTH.size + length
    if length > MAX_BYTES or start > file.size:
        limit = min(MAX_BYTES, file.size - _LENGTH.size)
        raise broken(path, "header length", at=0, expected=f"at most {limit}", actual=length)
    text = file.view[_LENGTH.size : start]
    if bytes(text[:1]) != b"{":
        raise broken(path, "header", at=_LENGTH.size, expected="b'{'", actual=bytes(text[:1]))
    header = parse_json(text, path, at=_LENGTH.size)
    metadata = _read_metadata(path, header.pop("__metadata__", None))
    if len(header) > MAX_TENSORS:
        raise broken(path, "header", at=_LENGTH.size, expected=f"at most {MAX_TENSORS} tensors", actual=len(header))
    entries = {name: _read_entry(file, start, name, value) for name, value in header.items()}
    _check_cover(file, start, entries)
    return _Shard(file, metadata, entries)


def _read_metadata(path: Path, value: object) -> dict[str, str]:
    if value is None:  # some writers say null
        return {}
    if not isinstance(value, dict):
        raise broken(path, "__metadata__", at=_LENGTH.size, expected="a JSON object", actual=_json_kind(value))
    for key, text in value.items():
        if not isinstance(text, str):
            subject = f"__metadata__ {quoted(key)}"
            raise broken(path, subject, at=_LENGTH.size, expected="a string", actual=_json_kind(text))
    return value


def _read_entry(file: FileBytes, start: int, name: str, value: Any) -> TensorEntry:
    path, subject = file.path, f"tensor {quoted(name)}"
    if not isinstance(value, dict) or value.keys() != _ENTRY_KEYS:
        actual = _json_kind(value) if not isinstance(value, dict) else quoted(sorted(value))
        raise broken(path, subject, at=_LENGTH.size, expected="an object of dtype, shape, data_offsets", actual=actual)
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise broken(path, f"{subject}: dtype", at=_LENGTH.size, expected=", ".join(DTYPES), actual=quoted(kind))
    if not _are_sizes(shape):
        raise broken(path, f"{subject}: shape", at=_LENGTH.size, expected="a list of sizes", actual=quoted(shape))
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        expected = "[begin, end]"
        raise broken(path, f"{subject}: data_offsets", at=_LENGTH.size, expected=expected, actual=quoted(offsets))
    check_shape(path, name, tuple(shape), _LENGTH.size)
    begin, end = offsets
    if start + end > file.size:
        expected = f"data within the {file.size - start} bytes after the header"
        raise broken(path, subject, at=_LENGTH.size, expected=expected, actual=quoted(offsets))
    nbytes = stored_bytes(tuple(shape), dtype)
    if nbytes != end - begin:
        raise broken(
            path, f"{subject}, {kind}{shape}", at=start + begin, expected=f"{nbytes} bytes", actual=end - begin
        )
    return TensorEntry(name, tuple(shape), dtype, start + begin, end - begin, path)


def _check_cover(file: FileBytes, start: int, entries: dict[str, TensorEntry]) -> None:
    """Check that tensors cover the data without gap or overlap, up to the end of the file."""
    at = start
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.end)):
        if entry.offset != at:
            subject = f"tensor {quoted(entry.name)} " + ("overlaps another" if entry.offset < at else "follows a gap")
            raise broken(file.path, subject, at=entry.offset, expected=f"byte {at}", actual=entry.offset)
        at = entry.end
    if at != file.size:
        raise broken(file.path, "data after the last tensor", at=at, expected=f"{at} bytes", actual=file.size)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _json_kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a bool", int: "a number", float: "a number"}
    return kinds.get(type(value), "nothing")


# -- writing ---------------------------------------------------------------------------------------------------------
def write_safetensors(
    path: PathLike, tensors: Mapping[str, tuple[TensorType, Callable[[], Array]]], **metadata: str
) -> None:
    """Write tensors by name, each given as its type and a function that reads it, called just before it is written."""
    names = {kind: name for name, kind in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (type_, _) in tensors.items():
        size = stored_bytes(tuple(int(n) for n in type_.shape), type_.dtype)
        if type_.dtype not in names or size is None:
            raise FormatError(f"{path}: tensor {quoted(name)}: safetensors has no type {type_.dtype}")
        header[name] = {"dtype": names[type_.dtype], "shape": list(type_.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data, as the format recommends
    with open(path, "wb") as file:
        file.write(_LENGTH.pack(len(text)))
        file.write(text)
        for name, (type_, read) in tensors.items():
            array = np.ascontiguousarray(read(), type_.dtype.numpy)
            if array.shape != type_.shape:
                raise FormatError(f"{path}: tensor {quoted(name)}: expected {type_}, found shape {list(array.shape)}")
            file.write(array.reshape(-1).view(np.uint8).data)
