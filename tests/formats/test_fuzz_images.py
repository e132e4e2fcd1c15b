"""Thousands of nearly valid PNG and PNM files: each is read with the size in its header, or raises FormatError.

A writer that follows the standard builds files from random samples, so undamaged files have known pixels. Chunk
checksums are mostly repaired after damage, since otherwise every damaged file would fail there.
"""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from png_writing import CHANNELS, DEPTHS, MAGIC, chunk, lines_of, shown

from rlx.errors import CapabilityError, FormatError
from rlx.formats import png as png_module
from rlx.formats.images import read_image
from rlx.formats.png import PIXELS, SIDE

Array = np.ndarray[Any, Any]
NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    16,
    17,
    255,
    256,
    4096,
    65_535,
    65_536,
    65_537,
    1 << 24,
    (1 << 31) - 1,
    (1 << 32) - 1,
)


@dataclass
class Png:
    """A PNG in parts. `pixels` is the expected result, None once the file is damaged."""

    head: list[int]  # width, height, depth, colour, compression, filter, interlace
    lines: bytearray
    palette: bytes
    pixels: Array | None
    chunks: list[tuple[bytes, bytes]] = field(default_factory=list)

    def pack(self, rng: random.Random) -> None:
        """Compress the lines and assemble the chunks."""
        packed = zlib.compress(bytes(self.lines), rng.choice((0, 1, 6, 9)))
        cuts = sorted(rng.randrange(len(packed) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
        parts = [packed[a:b] for a, b in zip([0, *cuts], [*cuts, len(packed)], strict=True)]
        self.chunks = [(b"IHDR", struct.pack(">IIBBBBB", *self.head)), *((b"IDAT", part) for part in parts)]
        if self.head[3] == 3 or rng.random() < 0.1:
            self.chunks.insert(1, (b"PLTE", self.palette))
        if rng.random() < 0.2:
            self.chunks.insert(rng.randrange(1, len(self.chunks)), (b"tRNS", rng.randbytes(rng.randrange(7))))
        self.chunks.append((b"IEND", b""))


def a_png(rng: random.Random) -> Png:
    colour = rng.choice(list(DEPTHS))
    depth = rng.choice(DEPTHS[colour])
    width, height = (rng.choice((1, 2, 3, 5, 8, 13, 24)) for _ in range(2))
    adam7 = int(rng.random() < 0.3)
    noise = np.random.default_rng(rng.randrange(1 << 32))
    colours = rng.randint(1, 1 << min(depth, 8))
    palette = noise.integers(0, 256, (colours, 3)).astype(np.uint8)
    top = colours if colour == 3 else 1 << depth
    samples = noise.integers(0, top, (height, width, CHANNELS[colour]))
    kinds = [rng.randrange(5) for _ in range(rng.choice((1, 2, 5)))]
    lines = lines_of(samples, depth, kinds, adam7=adam7)
    head = [width, height, depth, colour, 0, 0, adam7]
    return Png(head, bytearray(lines), palette.tobytes(), shown(samples, depth, colour, palette))


# -- damage ----------------------------------------------------------------------------------------------------------
def change_lines(rng: random.Random, png: Png) -> None:
    """Damage filter types and filtered bytes; mostly gives another image of the same size."""
    for _ in range(rng.choice((1, 3, 20)) if png.lines else 0):
        png.lines[rng.randrange(len(png.lines))] = rng.choice((0, 1, 2, 3, 4, 5, 255, rng.randrange(256)))


def change_length(rng: random.Random, png: Png) -> None:
    if rng.random() < 0.5:
        del png.lines[rng.randrange(len(png.lines) + 1) :]
    else:
        png.lines += bytes(rng.choice((1, 7, 100_000)))


def change_size(rng: random.Random, png: Png) -> None:
    png.head[rng.randrange(2)] = rng.choice(NUMBERS)


def change_head(rng: random.Random, png: Png) -> None:
    png.head[rng.randrange(2, 7)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))


def change_palette(rng: random.Random, png: Png) -> None:
    png.palette = rng.choice((b"", png.palette[:-1], png.palette[:-3], png.palette * 300, rng.randbytes(768)))


def change_chunk(rng: random.Random, png: Png) -> None:
    """Damage one chunk: its bytes, name or place, or duplicate or drop it."""
    at = rng.randrange(len(png.chunks))
    name, content = png.chunks[at]
    match rng.randrange(6):
        case 0 | 1 if content:
            changed = bytearray(content)
            changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            png.chunks[at] = name, bytes(changed)
        case 2:
            png.chunks[at] = rng.choice((b"IDAT", b"IHDR", b"PLTE", b"IEND", b"tEXt", rng.randbytes(4))), content
        case 3:
            del png.chunks[at]
        case 4:
            png.chunks.insert(rng.randrange(len(png.chunks) + 1), (name, content))
        case _:
            rng.shuffle(png.chunks)


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Damage the file itself, regardless of checksums."""
    at = rng.randrange(len(data))
    match rng.randrange(3):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(1) + data[at + 1 :]
        case _:
            return data[:at] + data[rng.randrange(len(data)) :]


BEFORE: list[Callable[[random.Random, Png], None]] = [
    change_lines, change_lines, change_lines, change_length, change_size, change_size, change_head, change_palette,
]  # fmt: skip


def png_file(rng: random.Random) -> tuple[bytes, Array | None]:
    png = a_png(rng)
    way = rng.random()
    if way < 0.6:
        for _ in range(rng.choice((1, 1, 2))):
            rng.choice(BEFORE)(rng, png)
        png.pixels = None
    png.pack(rng)
    if 0.6 <= way < 0.75:
        change_chunk(rng, png)
        png.pixels = None
    data = MAGIC + b"".join(chunk(*each) for each in png.chunks)
    return (change_bytes(rng, data), None) if way >= 0.95 else (data, png.pixels)


def pnm_file(rng: random.Random) -> tuple[bytes, Array | None]:
    width, height, channels = rng.randint(1, 9), rng.randint(1, 9), rng.choice((1, 3))
    samples = np.frombuffer(rng.randbytes(width * height * channels), np.uint8).reshape(height, width, channels)
    words = ["P6" if channels == 3 else "P5", str(width), str(height), "255"]
    space = rng.choice((" ", "\n", "\n# a comment\n"))
    pixels: Array | None = samples.repeat(3 // channels, 2)
    if rng.random() < 0.5:
        words[rng.randrange(4)] = rng.choice(("P5", "P6", "P3", "", "-1", "1e3", *map(str, NUMBERS)))
        pixels = None
    data = (words[0] + space + " ".join(words[1:]) + "\n").encode() + samples.tobytes()
    if rng.random() < 0.2:
        return change_bytes(rng, data), None
    return data, pixels


# -- cases -----------------------------------------------------------------------------------------------------------
def said_size(data: bytes) -> tuple[int, int]:
    """Height and width, by the header alone."""
    if data.startswith(MAGIC):
        width, height = struct.unpack(">II", data[16:24])
    else:
        words = b" ".join(line for line in data[:60].split(b"\n") if not line.startswith(b"#")).split()
        width, height = int(words[1]), int(words[2])
    return height, width


def check(data: bytes, pixels: Array | None, path: Path) -> str:
    """Read one file and return the outcome."""
    path.write_bytes(data)
    tracemalloc.start()
    begin = time.process_time()
    try:
        result = read_image(path)
    except (FormatError, CapabilityError) as error:
        png = data.startswith(MAGIC)
        # without the magic it is another format, left to Pillow; PNM with more than 8 bits is unsupported
        assert isinstance(error, FormatError) or not png, error
        assert pixels is None, error
        assert len(str(error)) <= 500 + len(str(path)), error
        return "refused"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        spent = time.process_time() - begin
        assert spent < 5, f"{spent:.1f} s"
        # a header may claim 64 million pixels, which are allocated; everything else is a strip of them
        assert peak < 16 * len(data) + 6 * PIXELS, f"{peak} bytes"
    assert result.dtype == np.uint8 and result.shape == (*said_size(data), 3)
    assert max(result.shape) <= SIDE and result.size <= 3 * PIXELS
    if pixels is None:
        return "read"
    assert np.array_equal(result, pixels)
    return "read as written"


@pytest.mark.fuzz
@pytest.mark.parametrize("make", [png_file, pnm_file])
def test_a_damaged_image_is_read_or_refused(
    make: Callable[[random.Random], tuple[bytes, Array | None]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuzz_seeds: range,
) -> None:  # fmt: skip
    unfilters = [u for u in (png_module._pillow_unfilter(), png_module.unfilter_by_numpy) if u]

    def unfilter_by_all(kinds: Array, filtered: Array, above: Array) -> Array:
        """Run every unfilter and check that they agree."""
        first, *others = (unfilter(kinds, filtered, above) for unfilter in unfilters)
        assert all(np.array_equal(first, other) for other in others)
        return first

    monkeypatch.setattr(png_module, "_pillow_unfilter", lambda: unfilter_by_all)
    outcomes: Counter[str] = Counter()
    begin = time.process_time()
    for seed in fuzz_seeds:
        data, pixels = make(random.Random(f"image {seed}"))
        try:
            outcomes[check(data, pixels, tmp_path / "x")] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    print(f"{make.__name__}: {dict(outcomes)}, {time.process_time() - begin:.1f} s")
    for outcome in ("refused", "read", "read as written"):  # else the damage is too weak or too strong
        assert outcomes[outcome] >= len(fuzz_seeds) // 20, outcomes
