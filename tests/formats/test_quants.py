"""Block formats against `gguf.quants`, which is ggml's own, and against plain arithmetic where that has none."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, DType
from rlx.errors import FormatError
from rlx.formats.quants import BLOCK_TYPES, GGUF_TYPES, dequantise
from rlx.formats.tensors import F8E4M3, F8E5M2

DECODED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
# Where a block keeps its f16 scales: random bytes there would be infinities and NaN.
SCALES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip
NUMBER = {storage.name: number for number, storage in GGUF_TYPES.items()}


def random_blocks(kind: DType, count: int, seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, kind.size), dtype=np.uint8)
    for at in SCALES[kind.name]:
        scales = rng.standard_normal(count) * 10.0 ** rng.integers(-7, 4, count)  # denormals of f16 among them
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(count, 2)
    return blocks


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_block_sizes_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf")
    ours = {number: (s.block, s.size) for number, s in GGUF_TYPES.items()}
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {n: ours[n] for n in theirs if n in ours} == {n: theirs[n] for n in theirs if n in ours}
    names = {n: gguf.GGMLQuantizationType(n).name.lower() for n in theirs if n in ours}
    assert names == {n: GGUF_TYPES[n].name for n in names}


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("count", [1, 15, 16, 1031])
def test_random_blocks_decode_to_the_bits_of_gguf(name: str, count: int) -> None:
    gguf = pytest.importorskip("gguf")
    kind = BLOCK_TYPES[name]
    blocks = random_blocks(kind, count, seed=count)
    theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(NUMBER[name])).reshape(-1)
    assert same_bits(dequantise(blocks, kind, count * kind.block), theirs)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16"])
def test_what_gguf_quantises_decodes_to_its_bits(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    number = NUMBER[name]
    values = np.random.default_rng(1).standard_normal((37, 96), dtype=np.float32)
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
    assert np.isnan(ours).any()
    assert np.array_equal(ours, theirs, equal_nan=True)


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


def test_a_type_without_a_decoder_is_named() -> None:
    with pytest.raises(FormatError, match="no decoder for blocks of iq4_nl"):
        dequantise(bytes(18), BLOCK_TYPES["iq4_nl"], 32)


def test_nothing_decodes_to_nothing() -> None:
    assert dequantise(b"", BLOCK_TYPES["q4_k"], 0).shape == (0,)
