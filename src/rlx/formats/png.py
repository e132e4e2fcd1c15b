"""PNG reader (W3C, third edition).

Time is linear in file size and pixels. Sizes are checked before anything is inflated, and no more is inflated than the
header implies. Most time goes into undoing the filters; if Pillow is installed (the extra `vision`), its
decoder does that up to twice as fast, with identical results.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rlx.arrays import Array
from rlx.formats.tensor_file import broken

Unfilter = Callable[[Array, Array, Array], Array]

MAGIC = b"\x89PNG\r\n\x1a\n"
SIDE = 1 << 16  # largest height or width in pixels
PIXELS = 64 << 20  # largest number of pixels
ROWS = 512  # rows inflated and unfiltered at a time
_INPUT_CHUNK = 1 << 18  # compressed bytes passed to zlib at a time, since it copies the unconsumed rest

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type: grey, RGB, palette, grey + alpha, RGB + alpha
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PALETTE = 3
_PLAIN = ((0, 0, 1, 1),)
_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def check_size(file: Path, width: int, height: int) -> None:
    """Reject an empty or oversized image before allocating anything for it."""
    if not (0 < width <= SIDE and 0 < height <= SIDE and width * height <= PIXELS):
        bounds = f"sides of 1 to {SIDE} pixels and at most {PIXELS} in all"
        raise broken(file, "an image", expected=bounds, actual=f"{width} × {height}", hint="make it smaller, or cut it")


def read_png(file: Path, data: memoryview) -> Array:
    """Read a PNG as `[height, width, 1 or 3]` uint8; drops alpha and the low byte of 16-bit samples."""
    chunks = _chunks(file, data)
    name, head = next(chunks)
    if name != b"IHDR" or len(head) != 13:
        raise broken(file, "the header of a PNG", at=8, expected="13 bytes", actual=len(head) if name == b"IHDR" else 0)
    width, height = (int.from_bytes(head[i : i + 4], "big") for i in (0, 4))
    depth, colour, *others, interlace = head[8:]
    check_size(file, width, height)
    if depth not in _DEPTHS.get(colour, ()) or any(others) or interlace > 1:
        raise broken(file, "the header of a PNG", at=24, expected="a depth, a kind of colour", actual=list(head[8:]))
    packed: list[memoryview] = []
    palette = np.zeros(0, np.uint8)
    for name, content in chunks:
        if name == b"IDAT":
            packed.append(content)
        elif name == b"PLTE":
            palette = np.frombuffer(content, np.uint8)
    pixels = _pixels(file, b"".join(packed), (height, width), depth, colour, _ADAM7 if interlace else _PLAIN)
    if colour != _PALETTE:
        return pixels
    if palette.size % 3 or pixels.max() >= palette.size // 3:
        raise broken(file, "a colour", expected=f"below {palette.size // 3}", actual=int(pixels.max()))
    return np.asarray(palette.reshape(-1, 3)[pixels[:, :, 0]])


def _chunks(file: Path, data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    at = len(MAGIC)
    name = b""
    while name != b"IEND":
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        check = data[end : end + 4]
        if len(check) < 4 or int.from_bytes(check, "big") != zlib.crc32(data[at + 4 : end]):
            raise broken(file, "a chunk of a PNG is cut off or damaged", at=at)
        name = bytes(data[at + 4 : at + 8])
        yield name, data[at + 8 : end]
        at = end + 4


def _pixels(
    file: Path, packed: bytes, shape: tuple[int, int], depth: int, colour: int, passes: tuple[tuple[int, ...], ...]
) -> Array:
    """Decode samples to `[height, width, 1 or 3]` uint8; palette images give indices."""
    height, width = shape
    channels = _CHANNELS[colour]
    colour_channels = 3 if channels > 2 else 1  # without alpha
    sizes = [(-(-(height - y) // down), -(-(width - x) // right)) for y, x, down, right in passes]
    wide = [(w * depth * channels + 7) // 8 for _, w in sizes]
    size = sum(h * (1 + n) for (h, w), n in zip(sizes, wide, strict=True) if h > 0 and w > 0)
    inflate = _Inflate(file, packed, size)
    unfilter = _pillow_unfilter() or unfilter_by_numpy
    pixels = np.zeros((*shape, colour_channels), np.uint8)
    for (y, x, down, right), (h, w), n in zip(passes, sizes, wide, strict=True):
        if h <= 0 or w <= 0:
            continue
        out = pixels[y::down, x::right]
        # Filters work per byte position, so alpha and low bytes are dropped without unfiltering them.
        above = np.zeros((w, colour_channels) if depth >= 8 else (n, 1), np.uint8)
        for start in range(0, h, ROWS):
            rows = min(ROWS, h - start)
            lines = inflate.take(rows * (1 + n)).reshape(rows, 1 + n)
            kinds, filtered = lines[:, 0], lines[:, 1:]
            if kinds.max() > 4:
                raise broken(file, "a filter of a PNG", expected="0 to 4", actual=int(kinds.max()))
            if depth >= 8:
                filtered = filtered.reshape(rows, w, channels, depth // 8)[:, :, :colour_channels, 0]
            plain = unfilter(kinds, filtered.reshape(rows, *above.shape), above)
            above = plain[-1]
            out[start : start + rows] = plain if depth >= 8 else _small(plain[:, :, 0], w, depth, colour != _PALETTE)
    inflate.finish()
    return pixels


def _small(lines: Array, width: int, depth: int, scaled: bool) -> Array:
    """Unpack samples of fewer than 8 bits to `[rows, width, 1]`."""
    bits = np.unpackbits(lines, axis=1).reshape(len(lines), -1, depth)[:, :width]
    values = bits @ (1 << np.arange(depth)[::-1]).astype(np.uint8)
    return np.asarray(values * np.uint8(255 // ((1 << depth) - 1)) if scaled else values)[:, :, None]


class _Inflate:
    """Incremental inflate: expects exactly `size` bytes and never inflates more than one beyond."""

    def __init__(self, file: Path, packed: bytes, size: int) -> None:
        self.file, self.packed, self.size = file, memoryview(packed), size
        self.produced = self.consumed = 0
        self.zlib = zlib.decompressobj()

    def _inflate(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count and not self.zlib.eof:
            source: bytes | memoryview = self.zlib.unconsumed_tail
            if not source:
                source = self.packed[self.consumed : self.consumed + _INPUT_CHUNK]
                self.consumed += len(source)
            try:
                part = self.zlib.decompress(source, count)
            except zlib.error as error:
                raise broken(self.file, f"the pixels of a PNG: {error}") from error
            if not source and not part:
                break
            parts.append(part)
            count -= len(part)
            self.produced += len(part)
        return b"".join(parts)

    def take(self, count: int) -> Array:
        raw = self._inflate(count)
        if len(raw) < count:
            raise self._wrong_size()
        return np.frombuffer(raw, np.uint8)

    def finish(self) -> None:
        """Check that no data follows, which also verifies the stream's checksum."""
        if self._inflate(1):
            raise self._wrong_size()

    def _wrong_size(self) -> Exception:
        return broken(self.file, "the pixels of a PNG", expected=f"{self.size} bytes", actual=self.produced)


# -- filters ---------------------------------------------------------------------------------------------------------
# An unfilter takes the filter type of each row, `[rows, pixels, channels]` filtered bytes and the decoded row above; it
# returns decoded bytes. Filtered bytes are differences to a prediction from the bytes left (a), above (b) and above
# left (c).
SUB, UP, AVERAGE, PAETH = 1, 2, 3, 4
# Masks per filter: whether its prediction uses a, b and c, and whether it is an average.
_USES = -np.array([(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 1), (1, 1, 1, 0)], np.int16)


def unfilter_by_numpy(kinds: Array, filtered: Array, above: Array) -> Array:
    """Unfilter Average and Paeth rows byte by byte, or all rows along diagonals, whichever is estimated faster."""
    rows, width, channels = filtered.shape
    slow = int((kinds >= AVERAGE).sum())
    by_bytes = slow * (3 + width * channels * 0.2)  # microseconds
    by_diagonals = (width + rows) * (9 + rows * channels * 0.01)
    return _by_rows(kinds, filtered, above) if by_bytes <= by_diagonals else _by_diagonals(kinds, filtered, above)


def _by_rows(kinds: Array, filtered: Array, above: Array) -> Array:
    """Unfilter runs of rows that share a filter; Sub and Up are cumulative sums modulo 256."""
    plain = np.array(filtered)
    ends = [*(np.flatnonzero(np.diff(kinds)) + 1), len(kinds)]
    first = 0
    for last in ends:
        run = plain[first:last]
        kind = kinds[first]
        if kind == SUB:
            np.cumsum(run, axis=1, dtype=np.uint8, out=run)
        elif kind == UP:
            run[0] += above
            np.cumsum(run, axis=0, dtype=np.uint8, out=run)
        elif kind in (AVERAGE, PAETH):
            undo = _average if kind == AVERAGE else _paeth
            for row in run:
                for channel in range(row.shape[1]):
                    row[:, channel] = undo(row[:, channel].tolist(), above[:, channel].tolist())
                above = row
        above = run[-1]
        first = last
    return plain


def _average(row: list[int], above: list[int]) -> list[int]:
    a = 0
    for i, b in enumerate(above):
        row[i] = a = (row[i] + ((a + b) >> 1)) & 255
    return row


def _paeth(row: list[int], above: list[int]) -> list[int]:
    a = c = 0
    for i, b in enumerate(above):
        pa, pb = b - c, a - c
        pc = abs(pa + pb)
        pa, pb = abs(pa), abs(pb)
        guess = a if pa <= pb and pa <= pc else b if pb <= pc else c
        row[i] = a = (row[i] + guess) & 255
        c = b
    return row


def _by_diagonals(kinds: Array, filtered: Array, above: Array) -> Array:
    """Unfilter all rows together, each one pixel behind the row above, so that its inputs are ready a step earlier."""
    rows, width, channels = filtered.shape
    # Row r of the image is row r + 1 here and begins at pixel `rows`, with zeros to its left.
    padded = np.zeros((rows + 1, width + 2 * rows, channels), np.uint8)
    padded[0, rows : rows + width] = above
    padded[1:, rows : rows + width] = filtered
    row_stride, pixel_stride, byte_stride = padded.strides
    steps = as_strided(  # [step, row, channel]: pixel `step - r` of each row r, which starts behind `rows - r` pixels
        padded[:, rows:], (width + rows, rows + 1, channels), (pixel_stride, row_stride - pixel_stride, byte_stride)
    )
    # With b = c = 0, Paeth predicts a; with a = c = 0, b; with all zero, 0: masking gives the other filters.
    uses = [np.repeat(_USES[kinds, i], channels) for i in range(4)]
    use_a, use_b, use_c, average = uses
    averages = bool((kinds == AVERAGE).any())
    span = rows * channels
    byte, one, sign, three = (np.full(span, n, np.int16) for n in (255, 1, 15, 3))
    a, b, c, total, low, high, guess, mask = (np.empty(span, np.int16) for _ in range(8))
    older = before = np.zeros(span + channels, np.int16)
    for start in range(0, width + rows, 64):  # steps are copied in blocks to be contiguous
        block = steps[start : start + 64].astype(np.int16).reshape(-1, span + channels)
        for now in block:
            np.bitwise_and(before[channels:], use_a, out=a)
            np.bitwise_and(before[:-channels], use_b, out=b)
            np.bitwise_and(older[:-channels], use_c, out=c)
            np.add(a, b, out=total)
            np.minimum(a, b, out=low)
            np.maximum(a, b, out=high)
            # Paeth picks the closest of a, b and c to a + b - c: min(a, b) if 3c - a - b >= max(a, b), max(a, b) if
            # 3c - a - b <= min(a, b), else c.
            np.multiply(c, three, out=guess)
            np.subtract(guess, total, out=guess)
            np.subtract(guess, high, out=mask)
            np.right_shift(mask, sign, out=mask)  # -1 where 3c - a - b < high, else 0
            np.subtract(c, low, out=c)
            np.bitwise_and(c, mask, out=c)
            np.subtract(low, guess, out=mask)
            np.right_shift(mask, sign, out=mask)  # -1 where low < 3c - a - b, else 0
            np.add(c, low, out=guess)
            np.subtract(guess, high, out=guess)
            np.bitwise_and(guess, mask, out=guess)
            np.add(guess, high, out=guess)
            if averages:
                np.right_shift(total, one, out=total)
                np.bitwise_xor(total, guess, out=total)
                np.bitwise_and(total, average, out=total)
                np.bitwise_xor(guess, total, out=guess)
            plain = now[channels:]
            np.add(plain, guess, out=plain)
            np.bitwise_and(plain, byte, out=plain)
            older, before = before, now
        steps[start : start + 64] = block.reshape(-1, rows + 1, channels)
    return padded[1:, rows : rows + width]


@functools.cache
def _pillow_unfilter() -> Unfilter | None:
    """An unfilter based on Pillow's zlib decoder; None if Pillow is not installed."""
    try:
        from PIL import Image, features
    except ImportError:
        return None
    if not features.check_codec("zlib"):
        return None

    def unfilter(kinds: Array, filtered: Array, above: Array) -> Array:
        rows, width, channels = filtered.shape
        mode = "L" if channels == 1 else "RGB"
        lines = np.zeros((rows + 1, 1 + width * channels), np.uint8)
        lines[0, 1:] = above.reshape(-1)
        lines[1:, 0] = kinds
        lines[1:, 1:] = filtered.reshape(rows, -1)
        stored = zlib.compress(lines.data, 0)
        plain = np.asarray(Image.frombytes(mode, (width, rows + 1), stored, "zip", mode))
        return plain.reshape(rows + 1, width, channels)[1:]

    return unfilter
