"""Block formats of GGUF: how many elements and bytes a block has, and how its bytes become float32.

`dequantise` gives the same bits as ggml's reference: widen to f32, then multiply and add in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, PACKED, DType, packed_type
from rlx.errors import FormatError

Array = np.ndarray[Any, Any]
Buffer = bytes | bytearray | memoryview | Array

# Known in files, not decoded here: their tensors can be listed and their bytes read.
_UNDECODED = {
    "q8_1": (32, 40), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq3_xxs": (256, 98), "iq1_s": (256, 50),
    "iq4_nl": (32, 18), "iq3_s": (256, 110), "iq2_s": (256, 82), "iq4_xs": (256, 136), "iq1_m": (256, 56),
    "tq1_0": (256, 54), "tq2_0": (256, 66), "mxfp4": (32, 17), "nvfp4": (64, 36), "q1_0": (128, 18),
}  # fmt: skip

BLOCK_TYPES: dict[str, DType] = {d.name: d for d in PACKED} | {
    name: packed_type(name, elements, [("bytes", "u1", nbytes)]) for name, (elements, nbytes) in _UNDECODED.items()
}

_GGUF_NAMES = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k",
    14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s",
    22: "iq2_s", 23: "iq4_xs", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
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
    decode = _DECODERS.get(storage.name)
    if decode is None:
        raise FormatError(
            f"dequantise: no decoder for blocks of {storage}", hint="decoded are " + ", ".join(sorted(_DECODERS))
        )
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


_DECODERS: dict[str, Callable[[Array, Array], None]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "q8_k": _q8_k,
}  # fmt: skip
