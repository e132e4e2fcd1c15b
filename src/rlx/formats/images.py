"""Images as arrays: `[height, width, 3]` of bytes, red, green, blue.

PNG, PPM, PGM and NPY are read here, which needs nothing but NumPy; every other kind of file is read by Pillow, if that
is installed. Transparency is dropped, not blended. Images are resized by Pillow's arithmetic: rows, then columns, each
rounded to bytes.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import CapabilityError, RequestError
from rlx.formats.tensors import PathLike, broken, open_bytes

Array = np.ndarray[Any, Any]
MOST = 1 << 27  # pixels of an image
PNG = b"\x89PNG\r\n\x1a\n"
NPY = b"\x93NUMPY"


def read_image(path: PathLike) -> Array:
    """The pixels of a file, by what it holds and not by its name."""
    file = Path(path)
    data = bytes(open_bytes(file).view)
    if data.startswith(PNG):
        return _read_png(file, data)
    if re.match(rb"P[56]\s", data):
        return _read_pnm(file, data)
    if data.startswith(NPY):
        try:
            array = np.load(io.BytesIO(data), allow_pickle=False)
        except Exception as error:  # its header is parsed as Python: many kinds of errors come out
            raise broken(file, f"no array of NumPy: {error}") from error
        return as_pixels(array, str(file))
    return _read_by_pillow(file, data)


def as_pixels(array: Any, where: str = "image") -> Array:
    """An array of pixels as `[height, width, 3]` bytes.

    Bytes are 0 to 255, floats 0 to 1. The channels (one, three, or four with transparency) are the last axis, else the
    first (one or three); without such an axis the image is grey.
    """
    array = np.asarray(array)
    if array.dtype.kind == "f":
        if array.size and not (array.min() >= 0 and array.max() <= 1):  # NaN is refused too
            found = f"from {array.min():.4g} to {array.max():.4g}"
            raise RequestError(f"{where}: floats {found}", hint="floats lie in 0 to 1; give 0 to 255 as uint8")
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    if array.dtype != np.uint8:
        raise RequestError(f"{where}: pixels are {array.dtype}", hint="expected uint8, or floats from 0 to 1")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3:
        raise RequestError(f"{where}: the shape is {list(array.shape)}, expected [height, width, 3]")
    if array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in (1, 3, 4) or not array.size:
        raise RequestError(f"{where}: the shape is {list(array.shape)}, expected [height, width, 3]")
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array[:, :, :3])


# -- resizing --------------------------------------------------------------------------------------------------------
def _cubic(x: Array) -> Array:
    a = -0.5
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: Array) -> Array:
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


# Under Pillow's numbers for them: how far a filter reaches, and its weight at a distance.
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)
FILTERS: dict[int, tuple[float, Callable[[Array], Array]]] = {
    LANCZOS: (3.0, _lanczos),
    BILINEAR: (1.0, lambda x: np.maximum(1 - x, 0.0)),
    BICUBIC: (2.0, _cubic),
    BOX: (0.5, lambda x: np.where(x <= 0.5, 1.0, 0.0)),
    HAMMING: (1.0, lambda x: np.where(x < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0.0)),
}


def resampling(size: int, wanted: int, kind: int = BICUBIC) -> Array:
    """[wanted, size] what each old element counts in each new one. Where it gets smaller, filters get wider."""
    reach, weight = FILTERS[kind]
    scale = size / wanted
    wide = max(scale, 1.0)
    centres = (np.arange(wanted)[:, None] + 0.5) * scale
    first = np.maximum((centres - reach * wide + 0.5).astype(np.int64), 0)
    last = np.minimum((centres + reach * wide + 0.5).astype(np.int64), size)
    places = np.arange(size)[None]
    weights = weight(np.abs(places - centres + 0.5) / wide)
    weights = np.where((first <= places) & (places < last), weights, 0.0)
    total = weights.sum(1, keepdims=True)
    return np.asarray(weights / np.where(total == 0, 1, total))


def resize(image: Array, height: int, width: int, kind: int = BICUBIC) -> Array:
    """An image of bytes in another size, as Pillow makes it.

    Newer versions of that sometimes take columns before rows, from which the last bits of a byte differ.
    """
    if not (0 < height * width <= MOST and height > 0):
        raise RequestError(f"resize: an image of {height} × {width}, expected 1 to {MOST} pixels")
    for axis, wanted in ((1, width), (0, height)):
        size = image.shape[axis]
        if size == wanted:
            continue
        if kind == NEAREST:
            image = image.take(((np.arange(wanted) + 0.5) * (size / wanted)).astype(np.int64), axis=axis)
            continue
        exact = resampling(size, wanted, kind) * (1 << 22)
        weights = np.trunc(exact + np.copysign(0.5, exact))  # whole numbers below 2^53: sums in any order are exact
        sums = np.tensordot(weights, image.astype(np.float64), axes=(1, axis))
        rounded = np.clip(np.floor((sums + (1 << 21)) / (1 << 22)), 0, 255).astype(np.uint8)
        image = np.moveaxis(rounded, 0, axis)
    return np.ascontiguousarray(image)


# -- PPM and PGM -----------------------------------------------------------------------------------------------------
_PNM = re.compile(rb"P([56])(?:\s+(?:#[^\n]*\n\s*)*)(\d{1,9})\s+(\d{1,9})\s+(\d{1,5})\s")


def _read_pnm(file: Path, data: bytes) -> Array:
    header = _PNM.match(data)
    if header is None:
        raise broken(file, "the header of a PPM", at=0, expected="P6 width height 255", found=data[:24])
    width, height, most = (int(header[i]) for i in (2, 3, 4))
    channels = 3 if header[1] == b"6" else 1
    if most != 255:
        raise CapabilityError(f"{file}: a PPM whose largest value is {most}, expected 255")
    size = _checked_size(file, width, height) * channels
    pixels = np.frombuffer(data, np.uint8, offset=header.end())
    if pixels.size < size:
        raise broken(file, "pixels of a PPM", at=header.end(), expected=f"{size} bytes", found=pixels.size)
    return as_pixels(pixels[:size].reshape(height, width, channels), str(file))


def _checked_size(file: Path, width: int, height: int) -> int:
    if not 0 < width * height <= MOST:
        raise broken(file, "an image", expected=f"1 to {MOST} pixels", found=f"{width} × {height}")
    return width * height


# -- PNG (W3C, third edition) ----------------------------------------------------------------------------------------
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the kind of colour: grey, RGB, palette, grey + alpha, RGB + alpha
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_WHOLE = ((0, 0, 1, 1),)
_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def _read_png(file: Path, data: bytes) -> Array:
    chunks: dict[bytes, bytes] = {}
    for name, content in _chunks(file, data):
        chunks[name] = chunks[name] + content if name == b"IDAT" and name in chunks else content
    head = chunks.get(b"IHDR", b"")
    if len(head) != 13:
        raise broken(file, "the header of a PNG", at=8, expected="13 bytes", found=len(head))
    width, height = (int.from_bytes(head[i : i + 4], "big") for i in (0, 4))
    depth, colour, *others, interlace = head[8:]
    _checked_size(file, width, height)
    if depth not in _DEPTHS.get(colour, ()) or any(others) or interlace > 1:
        raise broken(file, "the header of a PNG", at=24, expected="a depth, a kind of colour", found=list(head[8:]))
    bits = depth * _CHANNELS[colour]
    passes = _ADAM7 if interlace else _WHOLE
    sizes = [(-(-(height - y) // down), -(-(width - x) // right)) for y, x, down, right in passes]
    rows = [(h, w, (w * bits + 7) // 8) for h, w in sizes if h > 0 and w > 0]
    raw = _inflated(file, chunks.get(b"IDAT", b""), sum(h * (1 + wide) for h, _, wide in rows))
    samples = np.zeros((height, width, _CHANNELS[colour]), np.uint8)
    start = 0
    for (y, x, down, right), (h, w) in zip(passes, sizes, strict=True):
        if h <= 0 or w <= 0:
            continue
        wide = (w * bits + 7) // 8
        lines = raw[start : start + h * (1 + wide)].reshape(h, 1 + wide)
        start += h * (1 + wide)
        plain = _unfiltered(file, lines[:, 0], lines[:, 1:], max(bits // 8, 1))
        samples[y::down, x::right] = _samples(plain, w, depth, _CHANNELS[colour], scaled=colour != 3)
    if colour == 3:
        palette = np.frombuffer(chunks.get(b"PLTE", b""), np.uint8)
        if palette.size % 3 or samples.max() >= palette.size // 3:
            raise broken(file, "a colour", expected=f"below {palette.size // 3}", found=int(samples.max()))
        return np.ascontiguousarray(palette.reshape(-1, 3)[samples[:, :, 0]])
    return as_pixels(samples[:, :, :1] if colour == 4 else samples, str(file))


def _chunks(file: Path, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(PNG)
    name = b""
    while name != b"IEND":
        length = int.from_bytes(data[at : at + 4], "big")
        name, content, check = data[at + 4 : at + 8], data[at + 8 : at + 8 + length], data[at + 8 + length :][:4]
        if len(check) < 4 or int.from_bytes(check, "big") != zlib.crc32(name + content):
            raise broken(file, "a chunk of a PNG is cut off or damaged", at=at)
        yield name, content
        at += 12 + length


def _inflated(file: Path, packed: bytes, size: int) -> Array:
    """The lines of an image, of which there are exactly so many bytes; whatever claims more is not unpacked."""
    try:
        raw = zlib.decompressobj().decompress(packed, size + 1)
    except zlib.error as error:
        raise broken(file, f"the pixels of a PNG: {error}") from error
    if len(raw) != size:
        raise broken(file, "the pixels of a PNG", expected=f"{size} bytes", found=len(raw))
    return np.frombuffer(raw, np.uint8)


def _unfiltered(file: Path, kinds: Array, lines: Array, step: int) -> Array:
    """Lines whose bytes are differences to the bytes left, above and left above, as plain bytes.

    A byte needs its neighbours first, so this goes along diagonals from the upper left: all pixels of one need only
    those of the two before.
    """
    if kinds.max(initial=0) > 4:
        raise broken(file, "a filter of a PNG", expected="0 to 4", found=int(kinds.max()))
    height, size = lines.shape
    if not kinds.any():
        return lines
    width = size // step
    # with a row of zeros above and a column of zeros on the left; pixels in a line, so that a diagonal is a slice
    out = np.zeros(((height + 1) * (width + 1), step), np.int16)
    given = np.ascontiguousarray(lines).reshape(height * width, step)
    kind = kinds[:, None]
    for d in range(height + width - 1):
        top, end = max(0, d - width + 1), min(height, d + 1)
        places = np.arange(top, end)
        here = (places + 1) * (width + 1) + (d - places) + 1
        diagonal = slice(here[0], here[-1] + 1, max(width, 1))
        a, b, c = (out[slice(diagonal.start - back, diagonal.stop - back, diagonal.step)] for back in _back(width))
        pa, pb, pc = np.abs(b - c), np.abs(a - c), np.abs(a + b - 2 * c)
        paeth = np.where((pa <= pb) & (pa <= pc), a, np.where(pb <= pc, b, c))
        k = kind[top:end]
        guess = np.where(k == 1, a, np.where(k == 2, b, np.where(k == 3, (a + b) >> 1, np.where(k == 4, paeth, 0))))
        out[diagonal] = (given[places * width + (d - places)] + guess) & 255
    return out.reshape(height + 1, width + 1, step)[1:, 1:].reshape(height, size).astype(np.uint8)


def _back(width: int) -> tuple[int, int, int]:
    """How far back a pixel's neighbours lie: left, above, left above."""
    return 1, width + 1, width + 2


def _samples(lines: Array, width: int, depth: int, channels: int, *, scaled: bool) -> Array:
    """[height, width, channels] of 8 bits; of 16, the upper ones."""
    height = len(lines)
    if depth == 16:
        return lines.reshape(height, width, channels, 2)[..., 0]
    if depth == 8:
        return lines.reshape(height, width, channels)
    bits = np.unpackbits(lines, axis=1).reshape(height, -1, depth)[:, :width]
    values = bits @ (1 << np.arange(depth)[::-1])
    return (values * (255 // ((1 << depth) - 1)) if scaled else values).astype(np.uint8)[:, :, None]


# -- Pillow ----------------------------------------------------------------------------------------------------------
def _read_by_pillow(file: Path, data: bytes) -> Array:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise CapabilityError(
            f"{file}: an image that is no PNG, PPM or NPY is read by Pillow, which is not installed",
            hint="pip install pillow, or save the image as PNG",
        ) from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            _checked_size(file, *image.size)
            upright = ImageOps.exif_transpose(image)  # as a camera was held
            return np.array(upright.convert("RGB"))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise broken(file, f"no image that Pillow can read: {error}") from error
