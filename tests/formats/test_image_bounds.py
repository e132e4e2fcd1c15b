"""Images of hostile and extreme sizes: bounds are checked first, reading is linear, resizing uses little memory."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from png_writing import CHANNELS, DEPTHS, MAGIC, chunk, head, lines_of, png, shown

from rlx.errors import FormatError, RequestError
from rlx.formats import images
from rlx.formats import png as png_module
from rlx.formats.images import BICUBIC, BILINEAR, LANCZOS, read_image, resize
from rlx.formats.png import PIXELS, SIDE

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


@pytest.fixture
def without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png_module, "_pillow_unfilter", lambda: None)


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak memory of Python and NumPy during `run`."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def npy(shape: str, kind: str = "|u1", data: bytes = b"") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


def bmp(width: int, height: int) -> bytes:
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + sizes


# -- bounds ----------------------------------------------------------------------------------------------------------
TOO_LARGE = {
    "wide png": (png(b"\1" + b"\5" * 3_000_000, 3_000_000, 1, 8, 0), "3000000 × 1"),
    "tall png": (png(b"", 1, SIDE + 1, 8, 0), f"1 × {SIDE + 1}"),
    "png with too many pixels": (png(b"", SIDE, PIXELS // SIDE + 1, 8, 2), f"{SIDE} × {PIXELS // SIDE + 1}"),
    "ppm": (b"P6 100000000 1 255\n", "100000000 × 1"),
    "pgm": (b"P5 9000 9000 255\n", "9000 × 9000"),
    "npy": (npy("(9000, 9000)"), "9000 × 9000"),
    "npy with channels first": (npy("(3, 70000, 2)"), "2 × 70000"),
    "npy of negative size": (npy("(-1, 3)"), "3 × -1"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_file_beyond_the_bounds_is_refused_before_anything_is_allocated(tmp_path: Path, name: str) -> None:
    data, size = TOO_LARGE[name]
    path = tmp_path / "x"
    path.write_bytes(data)

    def read() -> None:
        with pytest.raises(FormatError, match=f"sides of 1 to {SIDE} pixels and at most {PIXELS} in all, found {size}"):
            read_image(path)

    assert peak_bytes(read) < 500_000


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(png(b"", 1, 1, 8, 0) + bytes(1000))
    monkeypatch.setattr(images, "BYTES", 1000)
    with pytest.raises(FormatError, match="expected at most 1000 bytes"):
        read_image(path)


def test_no_more_is_inflated_than_the_header_says(tmp_path: Path) -> None:
    path = tmp_path / "x"
    packed = zlib.compress(bytes(100_000_000), 9)
    path.write_bytes(MAGIC + head(64, 64, 16, 6) + chunk(b"IDAT", packed) + chunk(b"IEND", b""))

    def read() -> None:
        with pytest.raises(FormatError, match=f"expected {64 * 513} bytes, found {64 * 513 + 1}"):
            read_image(path)

    assert peak_bytes(read) < 10_000_000  # may include importing Pillow


def test_an_npy_that_is_cut_off_or_holds_no_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data, message in (
        (npy("(4, 4, 3)", data=bytes(47)), "expected 48 bytes, found 47"),
        (npy("(4, 4, 3)", "|S0"), "not a NumPy array"),
        (npy("(4, 4, 3)", "<c8", bytes(800)), "not a NumPy array"),
        (npy("(" * 3000 + ")" * 3000), "not a NumPy array"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=message) as caught:
            read_image(path)
        assert len(str(caught.value)) <= 500
    path.write_bytes(npy("(1099511627776,)"))
    with pytest.raises(RequestError, match="the shape is"):
        read_image(path)
    path.write_bytes(npy("(True, 2, 3)", data=bytes(range(6))))
    assert read_image(path).tolist() == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parity
def test_images_of_pillow_have_the_same_bounds(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    path = tmp_path / "x"
    for sides in ((SIDE + 1, 1), (9_000, 9_000), (10_000, 10_000), (20_000, 20_000)):  # Pillow warns about the last two
        path.write_bytes(bmp(*sides))
        for action in ("error", "ignore"):
            with warnings.catch_warnings():
                warnings.simplefilter(action)  # type: ignore[arg-type]
                with pytest.raises(FormatError, match=r"at most 67108864 in all|Image size \(\d+ pixels\) exceeds"):
                    read_image(path)
    # an icon that claims 16 × 16 but holds an image wider than the limit
    inner = io.BytesIO()
    pillow.new("RGB", (SIDE + 1, 1)).save(inner, "png")
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 24, len(inner.getvalue()), 22)
    path.write_bytes(struct.pack("<HHH", 0, 1, 1) + entry + inner.getvalue())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FormatError, match=f"found {SIDE + 1} × 1"):
            read_image(path)


# -- linear reading --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("shape", [(1, SIDE // 8), (SIDE // 8, 1), (2, SIDE // 16)])
def test_thin_images_are_read(tmp_path: Path, without_pillow: None, shape: tuple[int, int], kind: int) -> None:
    """The oracle undoes filters of a row of ones: Sub counts up, Average tends to 2, and so on."""
    height, width = shape
    lines = np.ones((height, 1 + width), np.uint8)
    lines[:, 0] = kind
    (tmp_path / "x").write_bytes(png(lines.tobytes(), width, height, 8, 0))
    wanted = np.zeros((height + 1, width + 1), int)
    for y in range(1, height + 1):
        for x in range(1, width + 1):
            a, b, c = int(wanted[y, x - 1]), int(wanted[y - 1, x]), int(wanted[y - 1, x - 1])
            p = a + b - c
            paeth = min(((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c)))[2]
            wanted[y, x] = (1 + (0, a, b, (a + b) // 2, paeth)[kind]) % 256
    assert np.array_equal(read_image(tmp_path / "x")[:, :, 0], wanted[1:, 1:])


def test_bytes_are_unfiltered_the_same_way_by_rows_and_by_diagonals() -> None:
    for rows, width, channels in ((1, 1, 1), (1, 7, 3), (9, 1, 3), (40, 33, 1), (33, 40, 3), (70, 200, 3)):
        kinds = RNG.integers(0, 5, rows).astype(np.uint8)
        filtered = RNG.integers(0, 256, (rows, width, channels)).astype(np.uint8)
        above = RNG.integers(0, 256, (width, channels)).astype(np.uint8)
        by_rows = png_module._by_rows(kinds, filtered, above)
        assert np.array_equal(by_rows, png_module._by_diagonals(kinds, filtered, above))


def test_images_of_several_strips_are_read(tmp_path: Path, without_pillow: None) -> None:
    """Rows are unfiltered some hundreds at a time, and each strip needs the last row of the previous one."""
    height = 2 * png_module.ROWS + 3
    samples = RNG.integers(0, 256, (height, 5, 4))
    for adam7 in (0, 1):
        lines = lines_of(samples, 8, [4, 3, 2, 1, 0, 4, 2], adam7=adam7)
        (tmp_path / "x").write_bytes(png(lines, 5, height, 8, 6, adam7=adam7))
        assert np.array_equal(read_image(tmp_path / "x"), samples[:, :, :3])


def test_many_chunks_are_read_in_linear_time(tmp_path: Path) -> None:
    lines = lines_of(np.zeros((2, 2, 1), int), 8, [0])
    many = chunk(b"IDAT", b"") * 400_000
    packed = chunk(b"IDAT", zlib.compress(lines))
    (tmp_path / "x").write_bytes(MAGIC + head(2, 2, 8, 0) + many + packed + chunk(b"IEND", b""))
    start = time.process_time()
    assert not read_image(tmp_path / "x").any()
    assert time.process_time() - start < 15  # half a second; copying the rest of the file for each took 39 s


@pytest.mark.parity
def test_pillow_reads_png_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our reader with and without Pillow's decoder, and Pillow alone, agree for all kinds and filters."""
    pillow = pytest.importorskip("PIL.Image")
    path = tmp_path / "x.png"
    for colour, depths in DEPTHS.items():
        for depth in depths:
            for adam7 in (0, 1):
                samples = RNG.integers(0, 1 << depth, (13, 21, CHANNELS[colour]))
                palette = RNG.integers(0, 256, (1 << min(depth, 8), 3)).astype(np.uint8)
                lines = lines_of(samples, depth, [4, 0, 3, 1, 2], adam7=adam7)
                extra = chunk(b"PLTE", palette.tobytes()) if colour == 3 else b""
                transparent = {0: bytes(2), 2: bytes(6), 3: bytes(range(len(palette)))}.get(colour)
                extra += b"" if transparent is None else chunk(b"tRNS", transparent)
                path.write_bytes(png(lines, 21, 13, depth, colour, adam7=adam7, extra=extra))
                with monkeypatch.context() as patch:
                    patch.setattr(png_module, "_pillow_unfilter", lambda: None)
                    ours = read_image(path)
                assert png_module._pillow_unfilter() is not None
                assert np.array_equal(ours, read_image(path))
                assert np.array_equal(ours, shown(samples, depth, colour, palette))
                if (colour, depth) != (0, 16):  # which Pillow clips at 255
                    opened = pillow.open(path)
                    opened.load()
                    opened.info.pop("transparency", None)  # Pillow warns about it
                    assert np.array_equal(ours, np.asarray(opened.convert("RGB")))


# -- resizing --------------------------------------------------------------------------------------------------------
def test_resizing_needs_memory_for_the_taps_of_a_filter_only() -> None:
    wide = RNG.integers(0, 256, (1, SIDE, 3)).astype(np.uint8)
    assert peak_bytes(lambda: resize(wide, 224, 224)) < 20_000_000  # a matrix of all weights alone is 117 MB


@pytest.mark.parametrize("kind", [BILINEAR, BICUBIC, LANCZOS])
def test_resizing_is_a_product_with_all_weights(kind: int) -> None:
    """Resize in exact integers, one output at a time."""
    pixels = RNG.integers(0, 256, (1, 531, 3)).astype(np.uint8)
    for wanted in (1, 7, 16, 17, 530, 1200):
        exact = images.resampling(531, wanted, kind) * (1 << 22)
        weights = np.trunc(exact + np.copysign(0.5, exact)).astype(np.int64)
        sums = (weights @ pixels[0].astype(np.int64) + (1 << 21)) >> 22
        assert np.array_equal(resize(pixels, 1, wanted, kind)[0], np.clip(sums, 0, 255))


def test_an_image_is_not_resized_beyond_the_bounds() -> None:
    for height, width in ((SIDE + 1, 1), (1, SIDE + 1), (9000, 9000), (0, 4), (-4, -4)):
        with pytest.raises(RequestError, match=f"resize: an image of {height} × {width}, expected sides of 1 to"):
            resize(np.zeros((2, 2, 3), np.uint8), height, width)


@pytest.mark.parity
@pytest.mark.parametrize("kind", range(6))
def test_resizing_far_is_that_of_pillow(kind: int) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for height, width, wanted in ((3, 40_000, 1), (3, 40_000, 224), (2, 9_000, 777), (2, 30, 5_000), (1, 4_000, 3_999)):
        pixels = RNG.integers(0, 256, (height, width, 3)).astype(np.uint8)
        expected = np.asarray(pillow.fromarray(pixels).resize((wanted, height), resample=kind))
        assert np.array_equal(resize(pixels, height, wanted, kind), expected)
        transposed = np.asarray(pillow.fromarray(pixels.transpose(1, 0, 2)).resize((height, wanted), resample=kind))
        assert np.array_equal(resize(pixels.transpose(1, 0, 2), wanted, height, kind), transposed)
