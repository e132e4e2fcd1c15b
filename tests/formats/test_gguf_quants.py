"""Block formats against ggml's own `gguf.quants`, and against plain arithmetic for types that it lacks."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx.dtypes import BF16, F16, F32, F64, FLOAT8_PACKED, GGUF_PACKED, I8, I16, I32, I64, PACKED, DType
from rlx.errors import FormatError
from rlx.formats import iq_tables
from rlx.formats.gguf_quants import BLOCK_TYPES, GGUF_TYPES, dequantise
from rlx.formats.quant_blocks import Position, decode
from rlx.formats.tensor_file import F8E4M3, F8E5M2

NO_READER = ("q8_k", "q8_1", "q1_0", "q2_0")  # types that `gguf.quants` does not read
DECODED = tuple(kind.name for kind in GGUF_PACKED if kind.name not in NO_READER)
# Offsets of a block's f16 scales: random bytes there would be infinities and NaN.
SCALES = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2),
          "q6_k": (208,), "tq1_0": (52,), "tq2_0": (64,), "iq1_m": (), "mxfp4": (), "nvfp4": ()}  # fmt: skip
NUMBER = {storage.name: number for number, storage in GGUF_TYPES.items()}


def random_blocks(kind: DType, count: int, seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, kind.size), dtype=np.uint8)
    for at in SCALES.get(kind.name, (0,)):
        scales = rng.standard_normal(count) * 10.0 ** rng.integers(-7, 4, count)  # includes f16 subnormals
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(count, 2)
    if kind.name == "iq1_m":
        blocks[:, 55] &= 0xBF  # the top nibbles of four words are the scale: not infinite
    return blocks


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_block_sizes_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf")
    ours = {number: (s.block, s.size) for number, s in GGUF_TYPES.items()}
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert theirs[9] == (32, 40) and ours[9] == (32, 36)  # Q8_1: the package has ggml's first layout, d and s were f32
    theirs[9] = (32, 36)
    assert {n: ours[n] for n in theirs if n in ours} == {n: theirs[n] for n in theirs if n in ours}
    names = {n: gguf.GGMLQuantizationType(n).name.lower() for n in theirs if n in ours}
    assert names == {n: GGUF_TYPES[n].name for n in names}


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("count", [1, 15, 16, 1031])
def test_random_blocks_decode_to_the_bits_of_gguf(name: str, count: int) -> None:
    gguf = pytest.importorskip("gguf")
    kind = BLOCK_TYPES[name]
    blocks = random_blocks(kind, count, seed=count)
    with np.errstate(over="ignore"):  # MXFP4 exponents are arbitrary
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(NUMBER[name])).reshape(-1)
    assert same_bits(dequantise(blocks, kind, count * kind.block), theirs)


def test_every_type_of_the_package_is_known() -> None:
    gguf = pytest.importorskip("gguf")
    assert {int(kind) for kind in gguf.GGML_QUANT_SIZES} <= GGUF_TYPES.keys()
    assert len({kind.numpy for kind in PACKED}) == len(PACKED) == len(BLOCK_TYPES)  # dtypes identify types


WRITTEN = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "tq1_0", "tq2_0", "mxfp4"]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_gguf_quantises_decodes_to_its_bits(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    number = NUMBER[name]
    values = np.random.default_rng(1).standard_normal((37, 256), dtype=np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType(number))
    theirs = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(number)).reshape(-1)
    assert same_bits(dequantise(packed, GGUF_TYPES[number], values.size), theirs)


@pytest.mark.parametrize("name", DECODED)
def test_any_bytes_decode_without_a_warning(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = BLOCK_TYPES[name]
    blocks = np.random.default_rng(2).integers(0, 256, (4096, kind.size), dtype=np.uint8)
    ours = dequantise(blocks, kind, blocks.shape[0] * kind.block)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(NUMBER[name])).reshape(-1)
    assert np.isnan(ours).any() == (name not in ("mxfp4", "nvfp4"))  # which have no NaN
    assert np.array_equal(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("kind", FLOAT8_PACKED, ids=str)
def test_8_bit_floats_are_those_of_ml_dtypes_times_their_scale(kind: DType) -> None:
    rng = np.random.default_rng(4)
    blocks = np.empty(1031, kind.numpy)
    blocks["d"] = rng.standard_normal(1031) * 10.0 ** rng.integers(-40, 30, 1031)
    blocks["codes"] = rng.integers(0, 256, (1031, kind.block))
    blocks["codes"][0, :3] = 0x7F, 0xFF, 0x80  # both NaN, and -0
    with np.errstate(all="ignore"):
        expected = blocks["codes"].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * blocks["d"][:, None]
    decoded = dequantise(blocks, kind, expected.size).reshape(expected.shape)
    assert np.isnan(decoded[0, :2]).all() and np.signbit(decoded[0, 2]) != np.signbit(blocks["d"][0])
    assert np.array_equal(decoded, expected, equal_nan=True)
    assert kind.size == kind.block + 4 and blocks.nbytes == kind.size * 1031


def test_q8_k_is_scale_times_byte() -> None:
    rng = np.random.default_rng(3)
    scales = rng.standard_normal(9, dtype=np.float32)
    q = rng.integers(-128, 128, (9, 256), dtype=np.int8)
    raw = b"".join(d.tobytes() + row.tobytes() + rng.bytes(32) for d, row in zip(scales, q, strict=True))
    expected = np.array([[d * np.float32(int(v)) for v in row] for d, row in zip(scales, q, strict=True)])
    assert same_bits(dequantise(raw, BLOCK_TYPES["q8_k"], q.size), expected.reshape(-1))


@pytest.mark.parametrize("kind", [F64, F32, F16, BF16, I64, I32, I16, I8, F8E4M3, F8E5M2], ids=lambda k: k.name)
def test_plain_types_are_widened_by_value(kind: DType) -> None:
    values = np.array([0, 1, -2, 3, 100, -128]).astype(kind.numpy)
    assert dequantise(values.tobytes(), kind, 6).tolist() == [float(v) for v in values]


def test_a_double_beyond_f32_becomes_infinite() -> None:
    assert dequantise(np.array([1e300, -1e300]), F64, 2).tolist() == [np.inf, -np.inf]


def test_e4m3_has_no_infinity_and_reaches_448() -> None:
    raw = np.array([0x7E, 0x7F], np.uint8)
    value, nan = dequantise(raw, F8E4M3, 2)
    assert value == 448 and np.isnan(nan) and F8E4M3.numpy == np.dtype(ml_dtypes.float8_e4m3fn)


def test_stored_f32_is_not_copied() -> None:
    values = np.arange(8, dtype=np.float32)
    assert np.shares_memory(dequantise(values, F32, 8), values)


@pytest.mark.parametrize("count", [-32, 31, 33])
def test_a_count_that_is_not_whole_blocks_is_refused(count: int) -> None:
    with pytest.raises(FormatError, match="not whole blocks of 32"):
        dequantise(bytes(34), BLOCK_TYPES["q8_0"], count)


@pytest.mark.parametrize("size", [0, 33, 35, 68])
def test_a_wrong_number_of_bytes_is_refused_with_both(size: int) -> None:
    with pytest.raises(FormatError, match=f"are 34 bytes, found {size}"):
        dequantise(bytes(size), BLOCK_TYPES["q8_0"], 32)


def halves(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(count).astype(np.float16)


def test_q8_1_is_scale_times_byte_and_its_sum_is_not_read() -> None:
    rng = np.random.default_rng(4)
    scales, q = halves(rng, 7), rng.integers(-128, 128, (7, 32), dtype=np.int8)
    raw = b"".join(d.tobytes() + rng.bytes(2) + row.tobytes() for d, row in zip(scales, q, strict=True))
    assert same_bits(dequantise(raw, BLOCK_TYPES["q8_1"], q.size), (scales[:, None].astype(np.float32) * q).reshape(-1))


@pytest.mark.parametrize(("name", "width", "values"), [("q1_0", 1, (-1, 1)), ("q2_0", 2, (-1, 0, 1, 2))])
def test_bits_in_order_pick_multiples_of_the_scale(name: str, width: int, values: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    count = 128 // width
    scales, q = halves(rng, 7), rng.integers(0, 2**width, (7, count))
    raw = b""
    for d, row in zip(scales, q, strict=True):
        word = sum(int(v) << width * i for i, v in enumerate(row))
        raw += d.tobytes() + word.to_bytes(16, "little")
    expected = scales[:, None].astype(np.float32) * np.array(values, np.float32)[q]
    assert same_bits(dequantise(raw, BLOCK_TYPES[name], q.size), expected.reshape(-1))


def test_grids_are_sets_of_numbers_in_order() -> None:
    for name, grid in iq_tables.GRIDS.items():
        words = iq_tables.words(name)
        assert iq_tables.digits(name).shape == (grid.size, grid.length) and words[0] == 0
        assert all(a < b for a, b in itertools.pairwise(words))
        assert iq_tables.digits(name).max() == len(grid.levels) - 1


def test_nothing_decodes_to_nothing() -> None:
    assert dequantise(b"", BLOCK_TYPES["q4_k"], 0).shape == (0,)


def test_a_type_without_blocks_has_no_decoder() -> None:
    with pytest.raises(FormatError, match="blocks of f16: no decoder is known"):
        decode(F16, None, Position.of(0))  # type: ignore[arg-type]  # nothing is read
