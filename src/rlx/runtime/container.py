"""Container files: a header, a JSON manifest, and sections of bytes or arrays, each with its length and digest.

Exports and model snapshots are container files. Arrays are aligned to cache lines, so they are mapped and used in
place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import dtype
from rlx.fast_dataclass import dataclass
from rlx.formats.mapped_file import FileMap, map_of
from rlx.formats.strict_json import parse_json
from rlx.formats.tensor_file import PathLike, broken, open_bytes
from rlx.runtime.manifest import CONTAINER, LINE, check, check_sections

Content = bytes | Mapping[str, Array]  # of a section
SUFFIX = ".rlxp"  # of an export
MAGIC, VERSION = b"RLXP", 4
_DIGEST = 32  # bytes
_HEAD = struct.Struct(f"<4sIQ{_DIGEST}s")  # magic, version, bytes of the manifest, its digest
_CHUNK = 8 << 20  # bytes per write: a multiple of the huge page size


def write(path: Path, manifest: Mapping[str, Any], contents: Mapping[str, Content], *, mode: int = 0o644) -> Path:
    """Write a container atomically: the file appears under its name once it is complete."""
    sections: dict[str, dict[str, Any]] = {}
    pieces: list[tuple[int, memoryview]] = []  # offset and bytes
    end = 0
    for name, content in contents.items():
        arrays = content if isinstance(content, Mapping) else {"": np.frombuffer(content, np.uint8)}
        at = end = _round_up(end)
        index: list[tuple[str, str, tuple[int, ...], int]] = []
        digest = hashlib.blake2b(digest_size=_DIGEST)
        for key, array in arrays.items():
            data, place = _bytes(array), _round_up(end)
            index.append((key, dtype(array.dtype).name, array.shape, place - at))
            pieces.append((place, data))
            digest.update(bytes(place - end))
            digest.update(data)
            end = place + len(data)
        sections[name] = {"at": at, "bytes": end - at, "digest": digest.hexdigest()}
        if isinstance(content, Mapping):
            sections[name]["arrays"] = index
    written = json.dumps({**manifest, "bytes": end, "sections": sections}, indent=1).encode()
    with open_atomic(path, mode) as file:
        head = _HEAD.pack(MAGIC, VERSION, len(written), hashlib.blake2b(written, digest_size=_DIGEST).digest())
        placed = [(_start(written) + place, data) for place, data in pieces]
        _write_pieces(file, [(0, memoryview(head)), (len(head), memoryview(written)), *placed], _start(written) + end)
    return path


def _write_pieces(file: IO[bytes], pieces: Iterable[tuple[int, memoryview]], size: int) -> None:
    """Write a file of `size` bytes: each piece at its offset, in order, with zeros in between.

    Chunks are aligned to huge pages, so that the page cache uses huge pages: kernels read mapped weights half as fast
    from small ones.
    """
    chunk = memoryview(bytearray(min(_CHUNK, size)))
    at = 0  # offset of the chunk in the file
    for place, data in pieces:
        while len(data):
            if place >= at + len(chunk):
                at += file.write(chunk)
                chunk[:] = bytes(len(chunk))
                continue
            part = data[: at + len(chunk) - place]
            chunk[place - at : place - at + len(part)] = part
            place, data = place + len(part), data[len(part) :]
    while at < size:
        at += file.write(chunk[: size - at])
        chunk[:] = bytes(len(chunk))


@contextlib.contextmanager
def open_atomic(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Container:
    """An open container: its manifest and the bytes that follow it."""

    path: Path
    manifest: Mapping[str, Any]
    data: memoryview

    @property
    def maps(self) -> list[FileMap]:
        """The memory map of the file."""
        return map_of(self.data)

    def section(self, name: str) -> bytes:
        return bytes(self._bytes(name))

    def arrays(self, name: str) -> dict[str, Array]:
        """The arrays of a section by name, mapped from the file; empty if the section is missing."""
        index = self.manifest["sections"].get(name, {}).get("arrays")
        if not index:
            return {}
        section, arrays = self._bytes(name), {}
        for key, kind, shape, at in index:
            element = dtype(kind).numpy
            data = section[at : at + math.prod(shape) * element.itemsize]
            arrays[key] = np.frombuffer(data, np.uint8).view(element).reshape(shape)
        return arrays

    def check(self, names: Iterable[str]) -> None:
        """Raise FormatError if the digest of a section does not match."""
        for name in names:
            digest = hashlib.blake2b(self._bytes(name), digest_size=_DIGEST).hexdigest()
            if digest != self.manifest["sections"][name]["digest"]:
                raise broken(self.path, f"section {name!r} is damaged", hint="export it again, or copy it again")

    def _bytes(self, name: str) -> memoryview:
        section = self.manifest["sections"][name]
        return self.data[section["at"] : section["at"] + section["bytes"]]


def read(path: PathLike, kind: str = "an export of rlx") -> Container:
    """Open a container; checks its header, manifest and length, not the digests of its sections."""
    file = open_bytes(path)
    file.prefer_huge_pages()
    if file.size < _HEAD.size or bytes(file.view[:4]) != MAGIC:
        raise broken(file.path, f"not {kind}", at=0, expected=MAGIC, actual=bytes(file.view[:4]))
    _, version, size, digest = _HEAD.unpack_from(file.view)
    if version != VERSION:
        hint = "another version of rlx made it: export it again with this one"
        raise broken(file.path, "version of the format", at=4, expected=VERSION, actual=version, hint=hint)
    written = file.view[_HEAD.size : _HEAD.size + size]
    if hashlib.blake2b(written, digest_size=_DIGEST).digest() != digest:
        hint = "export it again, or copy it again"
        raise broken(file.path, "the manifest is damaged or cut short", at=_HEAD.size, hint=hint)
    manifest = parse_json(written, file.path)
    check(manifest, CONTAINER, file.path)
    check_sections(manifest, file.path)
    complete = _start(written) + manifest["bytes"]
    if file.size != complete:
        hint = "it was not copied completely"
        raise broken(file.path, "length", expected=f"{complete} bytes", actual=f"{file.size} bytes", hint=hint)
    return Container(file.path, manifest, file.view[_start(written) :])


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _round_up(n: int) -> int:
    return -(-n // LINE) * LINE


def _start(manifest: bytes | memoryview) -> int:
    """Offset of the first section in the file."""
    return _round_up(_HEAD.size + len(manifest))
