"""Image files: every kind of PNG, PPM, NPY and Pillow's formats; resizing against a formula and Pillow."""

from __future__ import annotations

import builtins
import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from png_writing import ADAM7, chunk, filtered, png

from rlx.errors import CapabilityError, FormatError, RequestError, RlxError
from rlx.formats.images import BICUBIC, BILINEAR, BOX, NEAREST, as_pixels, read_image, resampling, resize

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def image(height: int, width: int, channels: int) -> Array:
    return RNG.integers(0, 256, (height, width, channels)).astype(np.uint8)


# -- PNG -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("colour", [0, 2, 4, 6])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (6, 5), (11, 23)])
def test_every_filter_and_kind_of_colour_is_read(tmp_path: Path, colour: int, shape: tuple[int, int]) -> None:
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    pixels = image(*shape, channels)
    lines = filtered(pixels.reshape(shape[0], -1), channels, [i % 5 for i in range(shape[0])])
    path = tmp_path / "x.anything"
    path.write_bytes(png(lines, shape[1], shape[0], 8, colour))
    grey = np.repeat(pixels[:, :, :1], 3, axis=2)
    assert np.array_equal(read_image(path), pixels[:, :, :3] if channels > 2 else grey)


@pytest.mark.parametrize("kind", range(5))
def test_of_sixteen_bits_the_upper_eight_are_kept(tmp_path: Path, kind: int) -> None:
    pixels = RNG.integers(0, 1 << 16, (7, 5, 3)).astype(">u2")
    lines = filtered(np.frombuffer(pixels.tobytes(), np.uint8).reshape(7, -1), 6, [kind] * 7)
    (tmp_path / "x.png").write_bytes(png(lines, 5, 7, 16, 2))
    assert np.array_equal(read_image(tmp_path / "x.png"), pixels >> 8)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("colour", [0, 3])
def test_small_numbers_are_greys_or_colours_of_a_palette(tmp_path: Path, depth: int, colour: int) -> None:
    values = RNG.integers(0, 1 << depth, (5, 11)).astype(np.uint8)
    bits = np.unpackbits(values[:, :, None], axis=2)[:, :, 8 - depth :].reshape(5, -1)
    palette = image(1 << depth, 3, 1)[:, :, 0]
    lines = filtered(np.packbits(bits, axis=1), 1, [0, 1, 2, 3, 4])
    (tmp_path / "x.png").write_bytes(png(lines, 11, 5, depth, colour, extra=chunk(b"PLTE", palette.tobytes())))
    greys = np.rint(values[:, :, None] * (255 / ((1 << depth) - 1))).astype(np.uint8).repeat(3, 2)
    assert np.array_equal(read_image(tmp_path / "x.png"), palette[values] if colour else greys)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (8, 8), (13, 21)])
def test_interlaced_images_are_put_together(tmp_path: Path, shape: tuple[int, int]) -> None:
    pixels = image(*shape, 3)
    lines = b""
    for y, x, down, right in ADAM7:
        part = pixels[y::down, x::right]
        if part.size:
            lines += filtered(part.reshape(len(part), -1), 3, [i % 5 for i in range(len(part))])
    (tmp_path / "x.png").write_bytes(png(lines, shape[1], shape[0], 8, 2, adam7=1))
    assert np.array_equal(read_image(tmp_path / "x.png"), pixels)


def good() -> bytes:
    return png(filtered(image(4, 9, 1)[:, :, 0], 3, [0, 1, 2, 4]), 3, 4, 8, 2)


WRONG: list[tuple[bytes, str]] = [
    (good()[:40], "cut off or damaged"),
    (good()[:-20] + b"x" + good()[-19:], "cut off or damaged"),
    (b"\x89PNG\r\n\x1a\n" + chunk(b"IEND", b""), "expected 13 bytes"),
    (png(b"", 0, 4, 8, 2), "0 × 4"),
    (png(b"", 1 << 20, 1 << 20, 8, 2), "1048576 × 1048576"),
    (png(b"", 3, 4, 5, 2), "a depth"),
    (png(b"", 3, 4, 8, 7), "a depth"),
    (png(b"", 3, 4, 8, 2, adam7=2), "a depth"),
    (png(b"\0" * 39, 3, 4, 8, 2), "expected 40 bytes, found 39"),
    (png(b"\0" * 10**6, 3, 4, 8, 2), "expected 40 bytes, found 41"),
    (png(b"\5" + b"\0" * 39, 3, 4, 8, 2), "expected 0 to 4, found 5"),
    (png(b"\0\1", 1, 1, 8, 3), "a colour: expected below 0, found 1"),
]


@pytest.mark.parametrize(("data", "match"), WRONG)
def test_a_png_that_cannot_be_is_a_format_error(tmp_path: Path, data: bytes, match: str) -> None:
    (tmp_path / "x.png").write_bytes(data)
    with pytest.raises(FormatError, match=match) as caught:
        read_image(tmp_path / "x.png")
    assert str(tmp_path / "x.png") in str(caught.value)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 200))
def test_damaged_files_are_read_or_refused(tmp_path: Path, at: int, byte: int, cut: int) -> None:
    for data in (good(), b"P6 3 2 255\n" + bytes(18), _npy(image(2, 3, 3))):
        broken = bytearray(data)
        broken[at % len(data)] = byte
        (tmp_path / "x").write_bytes(bytes(broken)[: len(data) - cut % len(data)])
        with contextlib.suppress(RlxError):
            assert read_image(tmp_path / "x").ndim == 3


# -- other files -----------------------------------------------------------------------------------------------------
def _npy(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_ppm_pgm_and_npy_are_read(tmp_path: Path) -> None:
    pixels, path = image(4, 5, 3), tmp_path / "x"
    path.write_bytes(b"P6\n# a comment\n5 4\n255\n" + pixels.tobytes())
    assert np.array_equal(read_image(path), pixels)
    path.write_bytes(b"P5 5 4 255\n" + pixels[:, :, 0].tobytes())
    assert np.array_equal(read_image(path), pixels[:, :, :1].repeat(3, 2))
    path.write_bytes(_npy(pixels))
    assert np.array_equal(read_image(path), pixels)


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"P6 5 4 65535\n" + bytes(120), CapabilityError, "65535"),
        (b"P6 5 4 255\n" + bytes(59), FormatError, "expected 60 bytes, found 59"),
        (b"P6 5\n", FormatError, "header of a PPM"),
        (b"\x93NUMPY\1\0", FormatError, "not a NumPy array"),
        (_npy(np.array([{}], object)), FormatError, "not a NumPy array"),
    ],
)
def test_other_files_that_cannot_be_are_refused(tmp_path: Path, data: bytes, error: Any, match: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(error, match=match):
        read_image(tmp_path / "x")


def test_other_kinds_need_pillow_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    (tmp_path / "x.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(CapabilityError, match="needs Pillow, which is not installed") as caught:
        read_image(tmp_path / "x.jpg")
    assert caught.value.hint and "pip install pillow" in caught.value.hint


@pytest.mark.parity
def test_pillow_reads_the_rest(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.fromarray(image(20, 30, 3)).save(tmp_path / "x.bmp")
    assert np.array_equal(read_image(tmp_path / "x.bmp"), np.asarray(pillow.open(tmp_path / "x.bmp")))
    (tmp_path / "x.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(FormatError, match="not an image that Pillow can read"):
        read_image(tmp_path / "x.jpg")


# -- arrays ----------------------------------------------------------------------------------------------------------
def test_arrays_of_all_layouts_are_the_same_image() -> None:
    pixels = image(6, 7, 3)
    for same in (pixels, pixels.transpose(2, 0, 1), pixels / 255.0, (pixels / 255).astype(np.float32)):
        assert np.array_equal(as_pixels(same), pixels)
    with_alpha = np.concatenate([pixels, image(6, 7, 1)], axis=2)
    assert np.array_equal(as_pixels(with_alpha), pixels)
    grey = np.repeat(pixels[:, :, :1], 3, axis=2)
    for same in (pixels[:, :, 0], pixels[:, :, :1], pixels[None, :, :, 0]):
        assert np.array_equal(as_pixels(same), grey)
    assert np.array_equal(as_pixels(pixels[:, :, 0] > 99), np.where(grey > 99, 255, 0))


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.full((2, 2, 3), 1.5), "floats from 1.5 to 1.5"),
        (np.full((2, 2, 3), np.nan), "floats from nan"),
        (np.full((2, 2, 3), -0.1), "floats from -0.1"),
        (np.zeros((2, 2, 3), np.int64), "pixels are int64"),
        (np.zeros((2, 2, 2), np.uint8), r"shape is \[2, 2, 2\]"),
        (np.zeros((4,), np.uint8), r"shape is \[4\]"),
        (np.zeros((0, 4, 3), np.uint8), r"shape is \[0, 4, 3\]"),
    ],
)
def test_arrays_that_are_no_images_are_named(array: Array, match: str) -> None:
    with pytest.raises(RequestError, match=f"my image: .*{match}"):
        as_pixels(array, "my image")


# -- resizing --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [(8, 4), (9, 4), (4, 9), (5, 5), (7, 1), (1, 6)])
def test_bilinear_weights_are_those_of_a_triangle(sizes: tuple[int, int]) -> None:
    size, wanted = sizes
    matrix = resampling(size, wanted, BILINEAR)
    for i, row in enumerate(matrix):
        centre, wide = (i + 0.5) * size / wanted, max(size / wanted, 1)
        weights = [max(0, 1 - abs(j + 0.5 - centre) / wide) for j in range(size)]
        assert np.allclose(row, np.array(weights) / sum(weights))


def test_halving_by_a_box_is_the_mean_of_four() -> None:
    pixels = image(8, 6, 3)
    rows = (pixels.reshape(8, 3, 2, 3).sum(2) + 1) // 2
    assert np.array_equal(resize(pixels, 4, 3, BOX), (rows.reshape(4, 2, 3, 3).sum(1) + 1) // 2)


def test_resizing_keeps_what_needs_no_change() -> None:
    pixels = image(8, 6, 3)
    assert np.array_equal(resize(pixels, 8, 6), pixels)
    assert np.array_equal(resize(pixels, 16, 12, NEAREST), pixels.repeat(2, 0).repeat(2, 1))
    flat = np.full((5, 4, 3), 77, np.uint8)
    assert (resize(flat, 11, 13, BICUBIC) == 77).all()
    with pytest.raises(RequestError, match="0 × 5"):
        resize(pixels, 0, 5)


@pytest.mark.parity
@pytest.mark.parametrize("kind", range(6))
def test_resizing_is_that_of_pillow(kind: int) -> None:
    """Bit-identical along one axis; along two, Pillow may resize the other one first."""
    pillow = pytest.importorskip("PIL.Image")
    pixels = image(37, 53, 3)
    for height, width in ((37, 20), (37, 99), (80, 53), (9, 53), (1, 53)):
        wanted = np.asarray(pillow.fromarray(pixels).resize((width, height), resample=kind))
        assert np.array_equal(resize(pixels, height, width, kind), wanted)
    wanted = np.asarray(pillow.fromarray(pixels).resize((30, 20), resample=kind)).astype(int)
    assert np.abs(resize(pixels, 20, 30, kind) - wanted).max() <= 2
