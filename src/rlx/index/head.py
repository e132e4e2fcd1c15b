"""The head of an index: what is committed. It is replaced as a whole, so a reader sees one commit or the next.

The file is the magic, a version, the length and the BLAKE2 digest of a JSON object, and that object.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.ops.search import MAX_INT8

NAME = "head.rlx"
MAGIC = b"rlxindex"
VERSION = 1
DTYPES = ("f32", "f16", "int8")
METRICS = ("cosine", "dot", "l2")
ID_KINDS = ("row", "int", "str")
COLUMNS = ("ids", "metadata", "texts")  # optional ones, with values of any length
MAX_ROWS = 2**31 - 2
MAX_HEAD = 1 << 20
MAX_MODEL = 4096  # characters
_HEX = re.compile("([0-9a-f]{64})?")
_PREFIX = struct.Struct("<8sII32s")


@dataclass(frozen=True)
class Head:
    """A commit of an index."""

    dim: int
    dtype: str
    metric: str
    model: str | None = None
    rows: int = 0
    ids: str = "row"  # a kind of ids
    first: dict[str, int] = field(default_factory=dict)  # optional column -> first row that has it
    epoch: int = 0  # number of the data files; compaction starts new ones
    pieces: int = 0  # appended so far
    chain: str = ""  # digest of the last piece, which covers the one before it
    deleted: int = 0  # rows
    deleted_digest: str = ""

    def encode(self) -> bytes:
        body = json.dumps(asdict(self), sort_keys=True).encode()
        return _PREFIX.pack(MAGIC, VERSION, len(body), hashlib.blake2b(body, digest_size=32).digest()) + body


def read_head(folder: Path) -> Head:
    """Reads and checks the head of an index."""
    path = folder / NAME
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_HEAD + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(
            f"{folder}: not an index: there is no {NAME} in it", hint="rlx.Index.create makes one"
        ) from None
    if len(data) < _PREFIX.size or len(data) > MAX_HEAD:
        raise FormatError(f"{path}: {len(data)} bytes, expected {_PREFIX.size} to {MAX_HEAD}")
    magic, version, length, digest = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FormatError(f"{path}: offset 0: found {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise FormatError(f"{path}: offset 8: version {version}, this rlx reads {VERSION}")
    body = data[_PREFIX.size :]
    if length != len(body):
        raise FormatError(f"{path}: offset 12: {length} bytes are said to follow, found {len(body)}")
    if hashlib.blake2b(body, digest_size=32).digest() != digest:
        raise FormatError(f"{path}: offset 16: the digest does not fit the {length} bytes behind it")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: offset {_PREFIX.size}: not JSON: {error}") from None
    return _checked(path, fields)


def _checked(path: Path, fields: Any) -> Head:
    names = set(Head.__dataclass_fields__)
    if not isinstance(fields, dict) or set(fields) != names:
        raise FormatError(f"{path}: expected the fields {', '.join(sorted(names))}, found {fields!r}")
    limits = {
        "dim": (1, MAX_INT8), "rows": (0, MAX_ROWS), "epoch": (0, 2**63), "pieces": (0, MAX_ROWS),
        "deleted": (0, MAX_ROWS),
    }  # fmt: skip
    for name, (low, high) in limits.items():
        if type(fields[name]) is not int or not low <= fields[name] <= high:
            raise FormatError(f"{path}: {name} is {fields[name]!r}, expected an integer from {low} to {high}")
    for name, known in (("dtype", DTYPES), ("metric", METRICS), ("ids", ID_KINDS)):
        if fields[name] not in known:
            raise FormatError(f"{path}: {name} is {fields[name]!r}, expected one of {', '.join(known)}")
    for name in ("chain", "deleted_digest"):
        if not isinstance(fields[name], str) or _HEX.fullmatch(fields[name]) is None:
            raise FormatError(f"{path}: {name} is {fields[name]!r}, expected 64 hexadecimal digits or nothing")
    model = fields["model"]
    if model is not None and (not isinstance(model, str) or len(model) > MAX_MODEL):
        raise FormatError(f"{path}: model is {model!r}, expected a name or null")
    first, rows = fields["first"], fields["rows"]
    valid = isinstance(first, dict) and set(first) <= set(COLUMNS)
    if not valid or not all(type(row) is int and 0 <= row <= rows for row in first.values()):
        raise FormatError(f"{path}: first is {first!r}, expected rows up to {rows} of {', '.join(COLUMNS)}")
    if fields["deleted"] > rows or (fields["ids"] == "str") != ("ids" in first):
        raise FormatError(f"{path}: {fields['deleted']} deleted of {rows} rows, ids {fields['ids']!r} in {first!r}")
    return Head(**fields)


def write_head(folder: Path, head: Head) -> None:
    """Commits a head: it replaces the old one when all of it is on disk."""
    replace_file(folder / NAME, head.encode())


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, and renames it when it is on disk."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames and new files in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
