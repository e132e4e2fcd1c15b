"""Left sides of matmuls in 8 bits: one scale a block of numbers, as integer kernels want them.

`round_blocks` says what is lost, in f32; `activation_blocks` is the same numbers as the words that kernels read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.dtypes import F32, I32
from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, ShapeError
from rlx.ir.registry import FUSED, f32, op, sample
from rlx.types import TensorType

LARGEST = 127
LEAST = 2.0**-100  # a block whose largest number is below is zeros: inverses of scales would overflow
# Packed types whose weights are codes times scales, so that kernels multiply them by 8-bit activations as they are.
WHOLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4")


@dataclass(frozen=True, slots=True)
class Activations:
    """Where the parts of a block lie, in 32-bit words.

    `scale` is an f32. `codes` are signed bytes. `sums` are sums of codes with their sign changed: of the whole block of
    32, of each run of 16 in one of 256. `total` is scale · sum, an f32, in a block of 32. In one of 256, sums of runs
    of 32 come a second time, as bytes: 128 · `high` + `low`, which `dot_u7` multiplies by four minima at once.
    """

    block: int
    words: int
    scale: int
    sums: int
    codes: int
    total: int = -1
    high: int = -1
    low: int = -1


SHORT = Activations(block=32, words=11, scale=0, total=1, sums=2, codes=3)
LONG = Activations(block=256, words=85, scale=0, high=1, low=3, sums=5, codes=21)


def activations_for(block: int) -> Activations:
    """The form for weights in blocks of this length."""
    return {32: SHORT, 256: LONG}[block]


def _check(where: str, x: TensorType, block: int) -> int:
    if not x.dtype.is_float:
        raise DTypeError(f"{where}: takes floats, found {x}")
    if block not in (SHORT.block, LONG.block):
        raise ShapeError(f"{where}: block is {block}, expected {SHORT.block} or {LONG.block}")
    k = x.shape[-1] if x.rank else 0
    if not isinstance(k, int) or k == 0 or k % block:
        raise ShapeError(f"{where}: the last axis of {x} is not whole blocks of {block}")
    return k


def rounded(x: Any, block: int) -> tuple[Any, Any]:
    """Codes [..., blocks, block] and their scales [..., blocks, 1], in the type that arithmetic has."""
    parts = x.astype(dtype_of(x.dtype).wide.numpy).reshape(*x.shape[:-1], -1, block)
    kind = parts.dtype.type
    largest = np.abs(parts).max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        inverse = np.where(largest < LEAST, kind(0), kind(LARGEST) / largest)
        scale = np.where(largest < LEAST, kind(0), largest / kind(LARGEST))
        return np.rint(parts * inverse), scale


def _round_blocks(x: Any, *, block: int) -> Any:
    codes, scale = rounded(x, block)
    return (codes * scale).astype(x.dtype).reshape(x.shape)


@op("round_blocks", reference=_round_blocks, samples=[sample(f32(3, 64), block=32), sample(f32(2, 2, 256), block=256)])
def round_blocks(x: TensorType, *, block: int) -> TensorType:
    """x as 8-bit numbers with one scale for each `block` of them along the last axis: what that keeps of it."""
    _check("round_blocks", x, block)
    return x


def activation_words(x: Any, *, block: int) -> Any:
    """The reference of `activation_blocks`."""
    form = activations_for(block)
    codes, scale = rounded(x, block)
    codes = np.nan_to_num(codes).astype(np.int8)
    words = np.zeros((*codes.shape[:-1], form.words), np.int32)
    numbers, signed = words.view(np.float32), words.view(np.int8)
    numbers[..., form.scale] = scale[..., 0]
    signed[..., 4 * form.codes :] = codes
    wide = codes.astype(np.int32)
    if form is SHORT:
        words[..., form.sums] = -wide.sum(axis=-1)
        numbers[..., form.total] = wide.sum(axis=-1).astype(np.float32) * scale[..., 0]
    else:
        words[..., form.sums : form.codes] = -wide.reshape(*wide.shape[:-1], 16, 16).sum(axis=-1)
        runs = wide.reshape(*wide.shape[:-1], 8, 32).sum(axis=-1)
        signed[..., 4 * form.high : 4 * form.high + 8] = runs >> 7
        signed[..., 4 * form.low : 4 * form.low + 8] = runs & 127
    return words.reshape(*x.shape[:-1], -1)


def numbers_of(words: Any, block: int) -> Any:
    """The numbers that words of `activation_blocks` stand for."""
    form = activations_for(block)
    blocks = words.reshape(*words.shape[:-1], -1, form.words)
    codes = np.ascontiguousarray(blocks[..., form.codes :]).view(np.int8).astype(np.float32)
    scale = np.ascontiguousarray(blocks[..., form.scale]).view(np.float32)
    return (codes * scale[..., None]).reshape(*words.shape[:-1], -1)


@op("activation_blocks", reference=activation_words, traits=[FUSED])
def activation_blocks(x: TensorType, *, block: int) -> TensorType:
    """`round_blocks` as words: scales, sums and four codes a word, block by block (see `Activations`)."""
    k = _check("activation_blocks", x, block)
    assert x.dtype is F32, "made of f32 only"
    return TensorType((*x.shape[:-1], k // block * activations_for(block).words), I32)
