"""Files of sections: a head, a manifest (JSON), and bytes or arrays behind it, each section with length and digest.

Exports and kept starts are such files. Arrays begin on a cache line, so they are mapped and used in place.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import dtype
from rlx.formats.mapped_file import FileMap, map_of
from rlx.formats.strict_json import parse_json
from rlx.formats.tensor_file import PathLike, broken, open_bytes
from rlx.runtime.manifest import CONTAINER, LINE, check, check_sections

Content = bytes | Mapping[str, Array]  # of a section
SUFFIX = ".rlxp"  # of an export
MAGIC, VERSION = b"RLXP", 4
_DIGEST = 32  # bytes
_HEAD = struct.Struct(f"<4sIQ{_DIGEST}s")  # magic, version, bytes of the manifest, its digest
_CHUNK = 8 << 20  # bytes that are written at once: whole huge pages


def write(path: Path, manifest: Mapping[str, Any], contents: Mapping[str, Content], *, mode: int = 0o644) -> Path:
    """Write a file, which takes its name when it is whole."""
    sections: dict[str, dict[str, Any]] = {}
    pieces: list[tuple[int, memoryview]] = []  # and where they lie
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
    with replaced(path, mode) as file:
        head = _HEAD.pack(MAGIC, VERSION, len(written), hashlib.blake2b(written, digest_size=_DIGEST).digest())
        placed = [(_start(written) + place, data) for place, data in pieces]
        _write_pieces(file, [(0, memoryview(head)), (len(head), memoryview(written)), *placed], _start(written) + end)
    return path


def _write_pieces(file: IO[bytes], pieces: Iterable[tuple[int, memoryview]], size: int) -> None:
    """A file of `size` bytes: the pieces, in order and each at its place, with zeros between them.

    It is written by chunks that begin and end on huge pages, for then the system keeps it in such pages: a kernel that
    reads mapped weights is half as fast from small ones.
    """
    chunk = memoryview(bytearray(min(_CHUNK, size)))
    at = 0  # where the file is written up to, and the chunk begins
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
def replaced(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is whole."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Container:
    """An opened file: its manifest, and the bytes behind it."""

    path: Path
    manifest: Mapping[str, Any]
    data: memoryview

    @property
    def maps(self) -> list[FileMap]:
        """The map of the file."""
        return map_of(self.data)

    def section(self, name: str) -> bytes:
        return bytes(self._bytes(name))

    def arrays(self, name: str) -> dict[str, Array]:
        """Arrays by name, mapped from the file; none where there is no such section."""
        index = self.manifest["sections"].get(name, {}).get("arrays")
        if not index:
            return {}
        whole, found = self._bytes(name), {}
        for key, kind, shape, at in index:
            element = dtype(kind).numpy
            data = whole[at : at + math.prod(shape) * element.itemsize]
            found[key] = np.frombuffer(data, np.uint8).view(element).reshape(shape)
        return found

    def check(self, names: Iterable[str]) -> None:
        """Refuse sections whose bytes are not those that were written."""
        for name in names:
            found = hashlib.blake2b(self._bytes(name), digest_size=_DIGEST).hexdigest()
            if found != self.manifest["sections"][name]["digest"]:
                raise broken(self.path, f"section {name!r} is damaged", hint="export it again, or copy it again")

    def _bytes(self, name: str) -> memoryview:
        found = self.manifest["sections"][name]
        return self.data[found["at"] : found["at"] + found["bytes"]]


def read(path: PathLike, what: str = "an export of rlx") -> Container:
    """Open a file: its manifest is whole, and its length is right."""
    file = open_bytes(path)
    file.prefer_huge_pages()
    if file.size < _HEAD.size or bytes(file.view[:4]) != MAGIC:
        raise broken(file.path, f"not {what}", at=0, expected=MAGIC, actual=bytes(file.view[:4]))
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
    whole = _start(written) + manifest["bytes"]
    if file.size != whole:
        hint = "it was not copied whole"
        raise broken(file.path, "length", expected=f"{whole} bytes", actual=f"{file.size} bytes", hint=hint)
    return Container(file.path, manifest, file.view[_start(written) :])


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _round_up(n: int) -> int:
    return -(-n // LINE) * LINE


def _start(manifest: bytes | memoryview) -> int:
    """Where the sections begin."""
    return _round_up(_HEAD.size + len(manifest))
