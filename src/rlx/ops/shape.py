"""Ops that move elements without changing them: reshape, transpose, slice, expand (views), concatenate, pad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import DType, promote
from rlx.errors import BindError, DTypeError, ShapeError
from rlx.ir.graph import Node
from rlx.ir.independence import aligned, everything, never
from rlx.ir.registry import CHECKS_SIZES, TAKES_PACKED, VIEW, boolean, f32, i32, op, sample
from rlx.types import Size, TensorType, axis_index, known_equal, product, require_equal

Sizes = tuple[Size, ...]


@op("reshape", independent=everything, reference=lambda x, *, shape: x.reshape(shape), traits=[VIEW],
    samples=[sample(f32(4, 6), shape=(2, 12)), sample(f32(2, 3, 4), shape=(24,)), sample(f32(1), shape=()),
             sample(i32(3, 5), shape=(5, 3))])  # fmt: skip
def reshape(x: TensorType, *, shape: Sizes) -> TensorType:
    """The same elements in C order under another shape."""
    same = known_equal(x.elements, product(shape))
    if not same:
        wanted = "[" + ", ".join(map(str, shape)) + "]"
        require_equal(x.elements, product(shape), f"reshape: {x.elements} elements do not fit {wanted}")
    return x.with_shape(*shape)


def _keeps_first(node: Node, batched: Sequence[bool]) -> bool:
    return bool(node.attrs["axes"][0] == 0)


@op("transpose", independent=_keeps_first, reference=lambda x, *, axes: np.transpose(x, axes), traits=[VIEW],
    samples=[sample(f32(4, 6), axes=(1, 0)), sample(f32(2, 3, 4), axes=(2, 0, 1)),
             sample(i32(2, 3, 4, 5), axes=(0, 2, 1, 3))])  # fmt: skip
def transpose(x: TensorType, *, axes: tuple[int, ...]) -> TensorType:
    """Permutes axes: axis i of the result is axis `axes[i]` of `x`."""
    if sorted(axes) != list(range(x.rank)):
        raise ShapeError(f"transpose: axes {axes} do not permute the {x.rank} axes")
    return x.with_shape(*(x.shape[a] for a in axes))


def _slice(x: Any, *, start: Any, stop: Any, step: Any) -> Any:
    for axis, (a, b, size) in enumerate(zip(start, stop, x.shape, strict=True)):
        if not 0 <= a <= b <= size:
            raise BindError(f"slice: {a}:{b} on axis {axis} does not lie within 0:{size}")
    return x[tuple(slice(a, b, s) for a, b, s in zip(start, stop, step, strict=True))]


def _exceeds(a: Size, b: Size) -> bool:
    """Whether a > b for every binding."""
    gap = b - a
    return isinstance(gap, int) and gap < 0


def _all_of_first(node: Node, batched: Sequence[bool]) -> bool:
    """Whether a slice keeps the first axis: it starts at 0 with step 1 and has the same size."""
    return bool(node.attrs["start"][0] == 0 and node.attrs["step"][0] == 1)


@op("slice", independent=_all_of_first, reference=_slice, traits=[VIEW, CHECKS_SIZES],
    samples=[sample(f32(4, 6), start=(1, 0), stop=(3, 6), step=(1, 2)),
             sample(f32(9), start=(4,), stop=(4,), step=(1,)),
             sample(i32(3, 40), start=(0, 5), stop=(3, 38), step=(2, 3))])  # fmt: skip
def slice_(x: TensorType, *, start: Sizes, stop: Sizes, step: tuple[int, ...]) -> TensorType:
    """Elements start, start + step, ... below stop on each axis; run time checks that bounds lie inside the axis."""
    if not len(start) == len(stop) == len(step) == x.rank:
        raise ShapeError(f"slice: {len(start)} starts, {len(stop)} stops, {len(step)} steps for rank {x.rank}")
    sizes = []
    for axis, (a, b, s) in enumerate(zip(start, stop, step, strict=True)):
        size = x.shape[axis]
        if s < 1:
            raise ShapeError(f"slice: step {s} on axis {axis} is not positive")
        if any(_exceeds(u, v) for u, v in ((0, a), (a, b), (b, size))):
            raise ShapeError(f"slice: {a}:{b} on axis {axis} does not lie within 0:{size}")
        sizes.append((b - a + (s - 1)) // s)
    return x.with_shape(*sizes)


@op("expand", independent=aligned, reference=lambda x, *, shape: np.broadcast_to(x, shape), traits=[VIEW],
    samples=[sample(f32(1, 6), shape=(4, 6)), sample(f32(3, 1), shape=(2, 3, 5)),
             sample(i32(), shape=(3, 4))])  # fmt: skip
def expand(x: TensorType, *, shape: Sizes) -> TensorType:
    """`x` repeated along its size-1 axes (and new leading ones) to a shape; no data is copied."""
    if len(shape) < x.rank:
        raise ShapeError(f"expand: {x} has {x.rank} axes, the shape {len(shape)}")
    for have, want in zip(x.shape, shape[len(shape) - x.rank :], strict=True):
        if have != 1:
            require_equal(have, want, f"expand: axis of size {have} cannot become {want}", hint="only 1 expands")
    return x.with_shape(*shape)


def _assume_equal(x: Any, *, shape: Any) -> Any:
    for have, want in zip(x.shape, shape, strict=True):
        if have != want:
            raise BindError(f"assume_equal: {have} and {want} are not equal")
    return x


@op(
    "assume_equal",
    independent=never,
    reference=_assume_equal,
    traits=[VIEW, CHECKS_SIZES],
    samples=[sample(f32(2, 3), shape=(2, 3))],
)
def assume_equal(x: TensorType, *, shape: Sizes) -> TensorType:
    """`x` with a shape that is equal to its own, axis by axis, which is checked at each run."""
    if len(shape) != x.rank:
        raise ShapeError(f"assume_equal: {x} has {x.rank} axes, the shape {len(shape)}")
    for have, want in zip(x.shape, shape, strict=True):
        if known_equal(have, want) is False:
            raise ShapeError(f"assume_equal: {have} and {want} are never equal")
    return x.with_shape(*shape)


@op("concatenate", independent=everything, reference=lambda *xs, axis: np.concatenate(xs, axis),
    samples=[sample(f32(2, 3), f32(2, 5), axis=1), sample(f32(1, 4), f32(3, 4), f32(2, 4), axis=0),
             sample(f32(2, 0, 65), f32(2, 3, 65), axis=1), sample(i32(3, 2), i32(3, 17), axis=-1),
             sample(i32(3), f32(4)), sample(boolean(2, 3), boolean(1, 3))],
    traits=[TAKES_PACKED])  # fmt: skip
def concatenate(*xs: TensorType, axis: int = 0) -> TensorType:
    """Tensors joined along an axis; their other sizes are equal."""
    if not xs:
        raise ShapeError("concatenate: needs at least one operand")
    first = xs[0]
    at = axis_index(axis, first.rank, "concatenate")
    total: Size = 0
    for x in xs:
        if x.rank != first.rank:
            raise ShapeError(f"concatenate: ranks differ, {first.rank} and {x.rank}")
        for i, (p, q) in enumerate(zip(first.shape, x.shape, strict=True)):
            if i != at:
                require_equal(p, q, f"concatenate: sizes {p} and {q} differ on axis {i}")
        total = total + x.shape[at]
    shape = tuple(total if i == at else d for i, d in enumerate(first.shape))
    if first.dtype.is_packed:
        if at == first.rank - 1 or any(x.dtype is not first.dtype for x in xs):
            raise DTypeError(f"concatenate: packed rows are joined with their like, found {', '.join(map(str, xs))}")
        return TensorType(shape, first.dtype)
    return TensorType(shape, promote(*(x.dtype for x in xs)))


def _pad(x: Any, *, low: Any, high: Any, value: float) -> Any:
    for size in (*low, *high):
        if size < 0:
            raise BindError(f"pad: size {size} is negative")
    sizes = list(zip(low, high, strict=True))
    return np.pad(x, sizes, constant_values=value) if sizes else x


def _has(dtype: DType, value: float) -> bool:
    """Whether an integer or boolean type can represent a number."""
    if dtype.is_bool:
        return value in (0, 1)
    limits = np.iinfo(dtype.numpy)
    return limits.min <= value <= limits.max and value == int(value)


@op("pad", independent=never, reference=_pad, traits=[CHECKS_SIZES],
    samples=[sample(f32(2, 3), low=(1, 0), high=(0, 2)), sample(f32(65), low=(3,), high=(4,), value=-1.5),
             sample(f32(2, 3, 17), low=(0, 2, 0), high=(1, 1, 0)), sample(i32(3, 5), low=(0, 1), high=(2, 3), value=7),
             sample(boolean(5), low=(1,), high=(2,), value=True), sample(f32(), low=(), high=())])  # fmt: skip
def pad(x: TensorType, *, low: Sizes, high: Sizes, value: float = 0.0) -> TensorType:
    """`x` with `low` elements before and `high` after it on each axis, filled with `value`."""
    if not len(low) == len(high) == x.rank:
        raise ShapeError(f"pad: {len(low)} and {len(high)} sizes for rank {x.rank}")
    for size in (*low, *high):
        if _exceeds(0, size):
            raise ShapeError(f"pad: size {size} is negative", hint="use slice to cut")
    if not x.dtype.is_float and not _has(x.dtype, value):
        raise DTypeError(f"pad: value {value} is no {x.dtype}")
    return x.with_shape(*(a + d + b for a, d, b in zip(low, x.shape, high, strict=True)))
