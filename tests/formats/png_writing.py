"""A byte-by-byte PNG writer after the formulas of the standard, for reader tests."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MAGIC = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def head(width: int, height: int, depth: int, colour: int, adam7: int = 0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, adam7))


def png(lines: bytes, width: int, height: int, depth: int, colour: int, *, adam7: int = 0, extra: bytes = b"") -> bytes:
    packed = zlib.compress(lines)
    parts = chunk(b"IDAT", packed[:7]) + chunk(b"IDAT", packed[7:])  # IDAT may be split into any number of chunks
    return MAGIC + head(width, height, depth, colour, adam7) + extra + parts + chunk(b"IEND", b"")


def filtered(rows: Array, step: int, kinds: list[int]) -> bytes:
    """Filter lines of bytes; `step` is the distance to the same byte of the pixel to the left."""
    out = bytearray()
    before = [0] * rows.shape[1]
    for row, kind in zip(rows.tolist(), kinds, strict=True):
        out.append(kind)
        for i, x in enumerate(row):
            a, b, c = (row[i - step] if i >= step else 0, before[i], before[i - step] if i >= step else 0)
            p = a + b - c
            paeth = min(((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c)))[2]
            out.append((x - (0, a, b, (a + b) // 2, paeth)[kind]) % 256)
        before = row
    return bytes(out)


def packed_rows(samples: Array, depth: int) -> Array:
    """`[height, width, channels]` samples as the bytes of each row."""
    height = len(samples)
    if depth == 16:
        return np.frombuffer(samples.astype(">u2").tobytes(), np.uint8).reshape(height, -1)
    if depth == 8:
        return samples.reshape(height, -1).astype(np.uint8)
    bits = np.unpackbits(samples.astype(np.uint8)[:, :, :1], axis=2)[:, :, 8 - depth :]
    return np.packbits(bits.reshape(height, -1), axis=1)


def lines_of(samples: Array, depth: int, kinds: list[int], *, adam7: int = 0) -> bytes:
    """The uncompressed stream of an image, cycling through the filters in `kinds`."""
    step = max(samples.shape[2] * depth // 8, 1)
    lines = b""
    for y, x, down, right in ADAM7 if adam7 else ((0, 0, 1, 1),):
        part = samples[y::down, x::right]
        if part.size:
            lines += filtered(packed_rows(part, depth), step, [kinds[i % len(kinds)] for i in range(len(part))])
    return lines


def shown(samples: Array, depth: int, colour: int, palette: Array) -> Array:
    """The expected `[height, width, 3]` pixels: no alpha, the upper 8 bits of 16."""
    if colour == 3:
        return np.asarray(palette[samples[:, :, 0]])
    seen = samples[:, :, :3] if colour in (2, 6) else samples[:, :, :1].repeat(3, 2)
    return np.asarray(seen >> 8 if depth == 16 else seen * (255 // ((1 << depth) - 1))).astype(np.uint8)
