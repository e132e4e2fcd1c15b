"""Block formats: how many elements and bytes a block has, and how its bytes become float32.

`dequantise` gives the same bits as ggml's reference: widen to f32, then multiply and add in its order. Blocks of 8-bit
floats, which GGUF has not, are widened and multiplied by their scale.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, PACKED, DType
from rlx.errors import FormatError
from rlx.formats import grids

Buffer = bytes | bytearray | memoryview | Array

BLOCK_TYPES: dict[str, DType] = {d.name: d for d in PACKED}

_GGUF_NAMES = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k",
    14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s",
    22: "iq2_s", 23: "iq4_xs", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
    42: "q2_0",
}  # fmt: skip
GGUF_TYPES: dict[int, DType] = {
    0: F32, 1: F16, 24: I8, 25: I16, 26: I32, 27: I64, 28: F64, 30: BF16,
    **{number: BLOCK_TYPES[name] for number, name in _GGUF_NAMES.items()},
}  # fmt: skip
GGUF_REMOVED = {
    4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8", 36: "iq4_nl_4_4", 37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}  # fmt: skip


def dequantise(data: Buffer, storage: DType, count: int) -> Array:
    """The `count` elements stored in `data` as a flat float32 array; stored float32 comes back as a view.

    >>> dequantise(bytes.fromhex("003c") + bytes(range(32)), BLOCK_TYPES["q8_0"], 32)[:4].tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    raw = np.asarray(data).reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    elements, nbytes = storage.block, storage.size
    if count < 0 or count % elements:
        raise FormatError(f"dequantise: {count} elements of {storage} are not whole blocks of {elements}")
    if raw.size != count // elements * nbytes:
        raise FormatError(
            f"dequantise: {count} elements of {storage} are {count // elements * nbytes} bytes, found {raw.size}"
        )
    with np.errstate(all="ignore"):  # a file may hold infinities, NaN and values beyond f32
        if not storage.is_packed:
            return raw.view(storage.numpy).astype(np.float32, copy=False)
        return _dequantise_blocks(raw, storage, count)


_CHUNK = 1 << 17  # elements a step: temporaries stay in the cache


def _dequantise_blocks(raw: Array, storage: DType, count: int) -> Array:
    decode = _DECODERS[storage.name]
    blocks = raw.view(storage.numpy)
    out = np.empty((blocks.size, storage.block), np.float32)
    step = _CHUNK // storage.block
    for first in range(0, blocks.size, step):
        decode(blocks[first : first + step], out[first : first + step])
    return out.reshape(count)


# -- decoders: blocks [n] of one layout in, out [n, elements] f32 ----------------------------------------------------
def _scale(field: Array) -> Array:
    return field.astype(np.float32)[:, None]  # [n, 1]


def _nibbles(qs: Array) -> Array:
    """Low halves of all bytes of the last axis, then high halves: [..., k] -> [..., 2, k]."""
    q = np.empty((*qs.shape[:-1], 2, qs.shape[-1]), np.uint8)
    np.bitwise_and(qs, 15, out=q[..., 0, :])
    np.right_shift(qs, 4, out=q[..., 1, :])
    return q


def _bit_planes(bits: Array, width: int) -> Array:
    """Each byte's fields of `width` bits, lowest first, as planes: [..., k] -> [..., 8 // width, k]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    planes = bits[..., None, :] >> shifts
    planes &= np.uint8((1 << width) - 1)
    return np.asarray(planes)


def _five_bits(b: Array) -> Array:
    high = np.unpackbits(b["qh"], axis=-1, bitorder="little").reshape(-1, 2, 16)
    return np.asarray(_nibbles(b["qs"]) | high << np.uint8(4)).reshape(-1, 32)


def _q4_0(b: Array, out: Array) -> None:
    np.subtract(_nibbles(b["qs"]).reshape(-1, 32), 8, out=out, dtype=np.float32)
    out *= _scale(b["d"])


def _q4_1(b: Array, out: Array) -> None:
    np.multiply(_nibbles(b["qs"]).reshape(-1, 32), _scale(b["d"]), out=out, dtype=np.float32)
    out += _scale(b["m"])


def _q5_0(b: Array, out: Array) -> None:
    np.subtract(_five_bits(b), 16, out=out, dtype=np.float32)
    out *= _scale(b["d"])


def _q5_1(b: Array, out: Array) -> None:
    np.multiply(_five_bits(b), _scale(b["d"]), out=out, dtype=np.float32)
    out += _scale(b["m"])


def _q8_0(b: Array, out: Array) -> None:
    np.multiply(b["qs"], _scale(b["d"]), out=out, dtype=np.float32)


def _q2_k(b: Array, out: Array) -> None:
    scales = _scale(b["d"]) * (b["scales"] & 15)  # [n, 16]: one for each 16 elements
    mins = _scale(b["dmin"]) * (b["scales"] >> 4)
    rows = out.reshape(-1, 16, 16)
    np.multiply(_bit_planes(b["qs"], 2).reshape(rows.shape), scales[..., None], out=rows, dtype=np.float32)
    rows -= mins[..., None]


def _q3_k(b: Array, out: Array) -> None:
    packed = b["scales"]  # 16 scales of 6 bits: 8 bytes of low nibbles, 4 bytes of high bit pairs
    low = _nibbles(packed[:, :8]).reshape(-1, 16)
    high = _bit_planes(packed[:, 8:], 2).reshape(-1, 16)
    scales = _scale(b["d"]) * ((low | high << np.uint8(4)).astype(np.int8) - np.int8(32))
    q = _bit_planes(b["qs"], 2).astype(np.int8).reshape(-1, 8, 32)
    q |= _bit_planes(b["hmask"], 1).view(np.int8) << np.int8(2)
    q -= np.int8(4)  # a set bit means that 4 is not taken off
    rows = out.reshape(-1, 16, 16)
    np.multiply(q.reshape(rows.shape), scales[..., None], out=rows, dtype=np.float32)


def _k_scales(b: Array) -> tuple[Array, Array]:
    """Eight 6-bit scales and mins: four whole in the low bits of rows 0 and 1, four as row 2 plus their top bits."""
    first, second, third = (b["scales"][:, i] for i in range(3))  # [n, 4] each
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    mins = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return _scale(b["d"]) * scales, _scale(b["dmin"]) * mins  # [n, 8]


def _q4_k(b: Array, out: Array) -> None:
    scales, mins = _k_scales(b)
    rows = out.reshape(-1, 8, 32)
    np.multiply(_nibbles(b["qs"]).reshape(rows.shape), scales[..., None], out=rows, dtype=np.float32)
    rows -= mins[..., None]


def _q5_k(b: Array, out: Array) -> None:
    scales, mins = _k_scales(b)
    rows = out.reshape(-1, 8, 32)
    q = _nibbles(b["qs"]).reshape(rows.shape)
    q |= _bit_planes(b["qh"], 1) << np.uint8(4)
    np.multiply(q, scales[..., None], out=rows, dtype=np.float32)
    rows -= mins[..., None]


def _q6_k(b: Array, out: Array) -> None:
    scales = _scale(b["d"]) * b["scales"]  # [n, 16]
    low = b["ql"]  # [n, 2, 2, 32]: per half 64 bytes, whose low nibbles precede all their high nibbles
    nibbles = np.empty((b.size, 2, 2, 2, 32), np.uint8)
    np.bitwise_and(low, 15, out=nibbles[:, :, 0])
    np.right_shift(low, 4, out=nibbles[:, :, 1])
    q = nibbles.reshape(-1, 2, 4, 32)
    q |= _bit_planes(b["qh"], 2) << np.uint8(4)
    rows = out.reshape(-1, 16, 16)
    np.subtract(q.reshape(rows.shape), 32, out=rows, dtype=np.float32)
    rows *= scales[..., None]


def _q8_k(b: Array, out: Array) -> None:
    np.multiply(b["qs"], _scale(b["d"]), out=out, dtype=np.float32)


def _q1_0(b: Array, out: Array) -> None:
    bits = np.unpackbits(b["bits"], axis=-1, bitorder="little")
    np.multiply(bits.view(np.int8) * np.int8(2) - np.int8(1), _scale(b["d"]), out=out, dtype=np.float32)


def _q2_0(b: Array, out: Array) -> None:
    q = (b["pairs"][..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)).view(np.int8) - np.int8(1)
    np.multiply(q.reshape(-1, 64), _scale(b["d"]), out=out, dtype=np.float32)


def _tq1_0(b: Array, out: Array) -> None:
    """Five digits of base 3 a byte (the last four bytes: four), as a fraction: times 3 brings the next one out."""
    thirds = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = ((b["qs"][:, :32], 5), (b["qs"][:, 32:], 5), (b["qh"], 4))
    shifted = [(part[:, None] * thirds[:count]).reshape(b.size, -1) for part, count in parts]  # wraps
    q = (np.concatenate(shifted, axis=1).astype(np.uint16) * 3 >> 8).astype(np.int8) - np.int8(1)
    np.multiply(q, _scale(b["d"]), out=out, dtype=np.float32)


def _tq2_0(b: Array, out: Array) -> None:
    q = _bit_planes(b["qs"], 2).reshape(out.shape).view(np.int8) - np.int8(1)
    np.multiply(q, _scale(b["d"]), out=out, dtype=np.float32)


# -- decoders of vectors from a grid: signs and scales are shared by 8, 16 or 32 elements -----------------------------
def _signed(magnitudes: Array, signs: Array) -> Array:
    """Numbers [n, ..., 8], negative where a bit of their byte [n, ...] is set."""
    bits = np.unpackbits(signs[..., None], axis=-1, bitorder="little")
    return np.where(bits.reshape(magnitudes.shape), -magnitudes, magnitudes)


def _seven_signs(words: Array) -> Array:
    """Four bytes of signs from the low 28 bits of each word: [n, k] -> [n, 4 k]."""
    packed = words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return np.asarray(np.array(grids.SIGNS, np.uint8)[packed].reshape(len(words), -1))


def _nibble_pairs(scales: Array) -> Array:
    """Low and high half of each byte in turn: [n, k] -> [n, 2 k]."""
    return np.stack([scales & 15, scales >> 4], axis=-1).reshape(len(scales), -1)


def _above_half(d: Array, scales: Array, factor: float) -> Array:
    """d · (0.5 + scale) · factor, in ggml's order."""
    return np.asarray(_scale(d) * (np.float32(0.5) + scales.astype(np.float32)) * np.float32(factor))


def _scaled(numbers: Array, scales: Array, out: Array) -> None:
    """`out` in as many equal rows as there are scales of a block."""
    rows = out.reshape(*scales.shape, -1)
    np.multiply(numbers.reshape(rows.shape), scales[..., None], out=rows, dtype=np.float32)


def _iq2_xxs(b: Array, out: Array) -> None:
    numbers = grids.vectors("iq2_xxs")[b["parts"]["qs"]].reshape(-1, 32, 8)
    words = np.ascontiguousarray(b["parts"]["signs"])
    _scaled(_signed(numbers, _seven_signs(words)), _above_half(b["d"], words >> 28, 0.25), out)


def _iq2_xs(b: Array, out: Array) -> None:
    numbers = grids.vectors("iq2_xs")[b["qs"] & 511]
    signs = np.array(grids.SIGNS, np.uint8)[b["qs"] >> 9]
    _scaled(_signed(numbers, signs), _above_half(b["d"], _nibble_pairs(b["scales"]), 0.25), out)


def _iq2_s(b: Array, out: Array) -> None:
    high = b["qh"][..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
    numbers = grids.vectors("iq2_s")[b["qs"] | high.reshape(-1, 32).astype(np.uint16) << 8]
    _scaled(_signed(numbers, b["signs"]), _above_half(b["d"], _nibble_pairs(b["scales"]), 0.25), out)


def _iq3_xxs(b: Array, out: Array) -> None:
    numbers = grids.vectors("iq3_xxs")[b["qs"]].reshape(-1, 32, 8)
    words = np.ascontiguousarray(b["signs"])
    _scaled(_signed(numbers, _seven_signs(words)), _above_half(b["d"], words >> 28, 0.5), out)


def _iq3_s(b: Array, out: Array) -> None:
    high = np.unpackbits(b["qh"], axis=-1, bitorder="little").astype(np.uint16)
    numbers = grids.vectors("iq3_s")[b["qs"] | high << 8].reshape(-1, 32, 8)
    _scaled(_signed(numbers, b["signs"]), _scale(b["d"]) * (_nibble_pairs(b["scales"]) * 2 + 1), out)


def _iq1_s(b: Array, out: Array) -> None:
    high = (b["qh"][..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    shift = np.where(b["qh"] >> 15, np.float32(-0.125), np.float32(0.125))
    numbers = grids.vectors("iq1")[b["qs"] | high << 8].reshape(-1, 8, 32) + shift[..., None]
    _scaled(numbers, _scale(b["d"]) * ((b["qh"] >> 12 & 7) * 2 + 1), out)


def _iq1_m(b: Array, out: Array) -> None:
    words = b["scales"]  # 3 bits for each 16 elements, above them the f16 scale in pieces
    pieces = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(pieces, axis=-1, dtype=np.uint16).view(np.float16)
    scales = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    high = _nibble_pairs(b["qh"])
    shift = np.where(high & 8, np.float32(-0.125), np.float32(0.125))
    numbers = grids.vectors("iq1")[b["qs"] | (high & 7).astype(np.uint16) << 8] + shift[..., None]
    _scaled(numbers, _scale(d) * (scales * 2 + 1), out)


# -- decoders of codes for single numbers -----------------------------------------------------------------------------
_IQ4, _FP4 = (np.array(codes, np.float32) for codes in (grids.IQ4, grids.FP4))
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _iq4_nl(b: Array, out: Array) -> None:
    np.multiply(_IQ4[_nibbles(b["codes"]).reshape(-1, 32)], _scale(b["d"]), out=out)


def _iq4_xs(b: Array, out: Array) -> None:
    high = b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_nibble_pairs(b["scales_l"]) | high << 4).astype(np.int8) - np.int8(32)
    _scaled(_IQ4[_nibbles(b["codes"])], _scale(b["d"]) * scales, out)


def _mxfp4(b: Array, out: Array) -> None:
    scales = np.ldexp(np.float32(1), b["e"].astype(int) - 128)  # half of E8M0, since the numbers are doubled
    np.multiply(_FP4[_nibbles(b["codes"]).reshape(-1, 32)], scales[:, None], out=out)


def _nvfp4(b: Array, out: Array) -> None:
    """Scales are E4M3 without a sign, and 0 where that would be NaN."""
    size = b["d"] & 127
    exponent, mantissa = (size >> 3).astype(int), size & 7
    scales = np.ldexp((mantissa + 8 * (exponent > 0)).astype(np.float32), np.maximum(exponent, 1) - 11)
    _scaled(_FP4[_nibbles(b["codes"])], np.where(b["d"] == 127, np.float32(0), scales), out)


def _f8e4m3(b: Array, out: Array) -> None:
    np.multiply(_E4M3[b["codes"]], _scale(b["d"]), out=out)


_DECODERS: dict[str, Callable[[Array, Array], None]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "q8_k": _q8_k,
    "q8_1": _q8_0, "q1_0": _q1_0, "q2_0": _q2_0, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "iq1_s": _iq1_s, "iq1_m": _iq1_m,
    "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs, "mxfp4": _mxfp4, "nvfp4": _nvfp4, "f8e4m3_128": _f8e4m3, "f8e4m3_32": _f8e4m3,
}  # fmt: skip
