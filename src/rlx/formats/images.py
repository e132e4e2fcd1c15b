"""Read and resize images as `[height, width, 3]` uint8 RGB arrays.

PNG, PPM, PGM and NPY need only NumPy; Pillow, if installed, reads all other formats and speeds up PNG. Alpha is
dropped, not blended. Image sizes are bounded, since a header of a few bytes could claim terabytes. Resizing follows
Pillow's arithmetic: rows, then columns, each rounded to bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from rlx.arrays import Array
from rlx.errors import CapabilityError, RequestError, RlxError, shortened
from rlx.formats.png import MAGIC as PNG
from rlx.formats.png import PIXELS, SIDE, check_size, read_png
from rlx.formats.tensor_file import PathLike, broken, open_bytes, quoted

NPY = b"\x93NUMPY"
BYTES = 1 << 30  # file size limit: enough for the largest image in any format


def read_image(path: PathLike) -> Array:
    """Read an image; the format is detected from the content, not the file name."""
    file = Path(path)
    size = open_bytes(file).size
    if size > BYTES:
        raise broken(file, "a file with an image", expected=f"at most {BYTES} bytes", actual=size)
    data = open_bytes(file, mapped=False).view  # not mapped: truncating a mapped file kills the process
    if data[: len(PNG)] == PNG:
        return as_pixels(read_png(file, data), str(file))
    if re.match(rb"P[56]\s", data):
        return _read_pnm(file, data)
    if data[: len(NPY)] == NPY:
        return _read_npy(file, data)
    return _read_by_pillow(file, data)


def as_pixels(array: Any, where: str = "image") -> Array:
    """Convert an array of pixels to `[height, width, 3]` uint8.

    Accepts uint8 from 0 to 255 and floats from 0 to 1. Channels are the last axis (1, 3, or 4 with alpha) or else the
    first (1 or 3); without such an axis the image is greyscale.
    """
    array = np.asarray(array)
    sides = _sides(array.shape)
    if sides is None or not array.size:
        raise _not_an_image(where, array.shape)
    if array.dtype.kind == "f":
        if not (array.min() >= 0 and array.max() <= 1):  # also rejects NaN
            bounds = f"from {array.min():.4g} to {array.max():.4g}"
            raise RequestError(f"{where}: floats {bounds}", hint="floats lie in 0 to 1; give 0 to 255 as uint8")
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    if array.dtype != np.uint8:
        raise RequestError(f"{where}: pixels are {array.dtype}", hint="expected uint8, or floats from 0 to 1")
    pixels = array.transpose(1, 2, 0) if array.shape[:2] != sides else array.reshape(*sides, -1)
    return np.ascontiguousarray(np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3])


def _sides(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Height and width of an array of pixels; None if it is not an image."""
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
        return shape[:2]
    return shape[1:] if len(shape) == 3 and shape[0] in (1, 3) else None


def _not_an_image(where: str, shape: tuple[int, ...]) -> RequestError:
    return RequestError(f"{where}: the shape is {quoted(list(shape))}, expected [height, width, 3]")


# -- resizing --------------------------------------------------------------------------------------------------------
def _cubic(x: Array) -> Array:
    a = -0.5
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: Array) -> Array:
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


# Resampling filters by Pillow's numbers: radius, and weight as a function of distance.
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)
FILTERS: dict[int, tuple[float, Callable[[Array], Array]]] = {
    LANCZOS: (3.0, _lanczos),
    BILINEAR: (1.0, lambda x: np.maximum(1 - x, 0.0)),
    BICUBIC: (2.0, _cubic),
    BOX: (0.5, lambda x: np.where(x <= 0.5, 1.0, 0.0)),
    HAMMING: (1.0, lambda x: np.where(x < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0.0)),
}


_ROWS_PER_MATMUL = 16  # output rows per matmul: larger wastes multiplications by zero, smaller wastes calls
_MAX_FLOATS = 1 << 21  # approximate bound on the floats of a weight matrix and of an image slice


def _taps(size: int, new_size: int, kind: int, first: int, last: int) -> tuple[Array, Array]:
    """First input index and filter weights for each output element from `first` to `last`.

    Filters widen when an image shrinks. Rows of weights are zero-padded to the longest.
    """
    reach, weight = FILTERS[kind]
    scale = size / new_size
    wide = max(scale, 1.0)
    centres = (np.arange(first, last) + 0.5) * scale
    start = np.maximum((centres - reach * wide + 0.5).astype(np.int64), 0)
    stop = np.minimum((centres + reach * wide + 0.5).astype(np.int64), size)
    places = start[:, None] + np.arange((stop - start).max())
    weights = weight(np.abs(places - centres[:, None] + 0.5) * (1 / wide))
    weights = np.where(places < stop[:, None], weights, 0.0)
    total = weights.cumsum(1)[:, -1:]  # summed left to right, as in Pillow
    return start, weights / np.where(total == 0, 1, total)


def _band_matrix(size: int, new_size: int, kind: int, first: int, last: int) -> tuple[int, Array]:
    """First input index used by outputs `first` to `last`, and the weight matrix from that index on."""
    start, weights = _taps(size, new_size, kind, first, last)
    places = start[:, None] - start[0] + np.arange(weights.shape[1])
    matrix = np.zeros((last - first, int(places.max()) + 1))
    np.put_along_axis(matrix, places, weights, axis=1)
    return int(start[0]), matrix[:, : size - int(start[0])]


def resampling(size: int, new_size: int, kind: int = BICUBIC) -> Array:
    """Resampling matrix `[new_size, size]`: the weight of each input element in each output element."""
    start, matrix = _band_matrix(size, new_size, kind, 0, new_size)
    return np.pad(matrix, ((0, 0), (start, size - start - matrix.shape[1])))


def resize(image: Array, height: int, width: int, kind: int = BICUBIC) -> Array:
    """Resize a uint8 image as Pillow does.

    Newer Pillow versions sometimes resize columns before rows, which changes the last bits of a byte.
    """
    if not (0 < height <= SIDE and 0 < width <= SIDE and height * width <= PIXELS):
        bounds = f"sides of 1 to {SIDE} pixels and at most {PIXELS} in all"
        raise RequestError(f"resize: an image of {height} × {width}, expected {bounds}")
    for axis, new_size in ((1, width), (0, height)):
        size = image.shape[axis]
        if size == new_size:
            continue
        if kind == NEAREST:
            steps = np.full(new_size, size / new_size)
            steps[0] /= 2
            image = image.take(steps.cumsum().astype(np.int64), axis=axis, mode="clip")  # accumulated, as in Pillow
        else:
            image = np.moveaxis(_resize_axis(np.moveaxis(image, axis, 0), new_size, kind), 0, axis)
    return np.ascontiguousarray(image)


def _resize_axis(image: Array, new_size: int, kind: int) -> Array:
    """Resize along the first axis by narrow matrix products, a few output rows at a time."""
    size, others = image.shape[0], image.shape[1]
    resized = np.empty((new_size, *image.shape[1:]), np.uint8)
    rows = max(1, min(_ROWS_PER_MATMUL, _MAX_FLOATS * new_size // (8 * size)))
    for first in range(0, new_size, rows):
        last = min(first + rows, new_size)
        start, weights = _band_matrix(size, new_size, kind, first, last)
        exact = weights * (1 << 22)
        weights = np.trunc(exact + np.copysign(0.5, exact))  # integers below 2^53, so sums are exact in any order
        count = weights.shape[1]
        step = max(1, _MAX_FLOATS // (count * image.shape[2]))
        for at in range(0, others, step):
            part = np.ascontiguousarray(image[start : start + count, at : at + step], np.float64)
            sums = weights @ part.reshape(count, -1)
            rounded = np.clip(np.floor((sums + (1 << 21)) / (1 << 22)), 0, 255).astype(np.uint8)
            resized[first:last, at : at + step] = rounded.reshape(last - first, *part.shape[1:])
    return resized


# -- PPM and PGM -----------------------------------------------------------------------------------------------------
_PNM = re.compile(rb"P([56])(?:\s+(?:#[^\n]*\n\s*)*)(\d{1,9})\s+(\d{1,9})\s+(\d{1,5})\s")


def _read_pnm(file: Path, data: memoryview) -> Array:
    header = _PNM.match(data)
    if header is None:
        raise broken(file, "the header of a PPM", at=0, expected="P6 width height 255", actual=bytes(data[:24]))
    width, height, max_value = (int(header[i]) for i in (2, 3, 4))
    channels = 3 if header[1] == b"6" else 1
    if max_value != 255:
        raise CapabilityError(f"{file}: a PPM whose largest value is {max_value}, expected 255")
    check_size(file, width, height)
    pixels = np.frombuffer(data[header.end() :], np.uint8)
    size = width * height * channels
    if pixels.size < size:
        raise broken(file, "pixels of a PPM", at=header.end(), expected=f"{size} bytes", actual=pixels.size)
    return as_pixels(pixels[:size].reshape(height, width, channels), str(file))


# -- NPY -------------------------------------------------------------------------------------------------------------
def _read_npy(file: Path, data: memoryview) -> Array:
    stream = io.BytesIO(data[: 1 << 17])  # NumPy rejects longer headers
    try:
        version = npy_format.read_magic(stream)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        sizes, columns_first, kind = read(stream)
        shape = tuple(map(int, sizes))
        if version not in ((1, 0), (2, 0), (3, 0)) or kind.kind not in "buif":
            raise ValueError(f"version {version}, elements of type {kind}")
    except Exception as error:  # NumPy parses the header as Python, which raises many kinds of errors
        raise broken(file, f"not a NumPy array: {shortened(str(error), 200)}") from error
    sides = _sides(shape)
    if sides is None:
        raise _not_an_image(str(file), shape)
    check_size(file, *sides[::-1])
    size, start = math.prod(shape) * kind.itemsize, stream.tell()
    if len(data) - start < size:
        raise broken(file, "not a NumPy array", at=start, expected=f"{size} bytes", actual=len(data) - start)
    array = np.frombuffer(data[start : start + size], kind)
    return as_pixels(array.reshape(shape, order="F" if columns_first else "C"), str(file))


# -- Pillow ----------------------------------------------------------------------------------------------------------
def _read_by_pillow(file: Path, data: memoryview) -> Array:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise CapabilityError(
            f"{file}: reading images other than PNG, PPM and NPY needs Pillow, which is not installed",
            hint="pip install pillow, or save the image as PNG",
        ) from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            check_size(file, *image.size)
            image.load()
            check_size(file, *image.size)  # an icon may hold an image of another size than its header says
            upright = ImageOps.exif_transpose(image)  # apply the camera orientation
            return np.array(upright.convert("RGB"))
    except RlxError:
        raise
    except Exception as error:  # Pillow raises many kinds of errors, possibly DecompressionBombWarning
        raise broken(file, f"not an image that Pillow can read: {shortened(str(error), 200)}") from error
