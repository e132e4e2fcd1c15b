"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import BindError, DTypeError, GraphError, KernelError, ShapeError
from rlx.ir.graph import Node
from rlx.ir.registry import CHECKS_DATA, CHECKS_SIZES, f32, i32, op, sample
from rlx.types import TensorType, require_equal

STYLES = ("halves", "pairs")


def _rope(x: Any, cos: Any, sin: Any, positions: Any, *, style: str) -> Any:
    if positions.size and (positions.min() < 0 or positions.max() >= cos.shape[0]):
        raise KernelError(f"rope: a position lies outside 0:{cos.shape[0]}")
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise BindError(f"rope: tables turn {2 * half} elements, a head has {x.shape[-1]}")
    c, s = cos[positions][:, :, None, :], sin[positions][:, :, None, :]  # [batch, seq, 1, half]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if style == "halves":
        a, b = rotated[..., :half], rotated[..., half:]
        rotated = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = np.stack([a * c - b * s, b * c + a * s], axis=-1).reshape(rotated.shape)
    return np.concatenate([rotated, rest], axis=-1)


_TABLE = (f32(11, 4), f32(11, 4), i32(2, 3, low=0, high=11))


def _of_heads(node: Node, batched: Sequence[bool]) -> bool:
    """Whether x and positions are batched; the tables are shared."""
    return batched[0] and not any(batched[1:3])


@op(
    "rope", independent=_of_heads, reference=_rope, tolerance=2e-6, traits=[CHECKS_DATA, CHECKS_SIZES],
    samples=[
        sample(f32(2, 3, 2, 8), *_TABLE), sample(f32(2, 3, 2, 8), *_TABLE, style="pairs"),
        sample(f32(2, 3, 1, 13), *_TABLE), sample(f32(1, 5, 3, 64), f32(9, 32), f32(9, 32), i32(1, 5, low=0, high=9)),
    ],
)  # fmt: skip
def rope(
    x: TensorType, cos: TensorType, sin: TensorType, positions: TensorType, *, style: str = "halves"
) -> TensorType:
    """Rotate pairs of each head by the angle of its position.

    `x` is [batch, seq, heads, head_dim], `cos` and `sin` are [positions, n] tables, `positions` is [batch, seq]. The
    first 2n elements of a head are rotated, the rest is copied. Pairs are (i, i + n) in style `halves` and (2i, 2i + 1)
    in style `pairs`.
    """
    if style not in STYLES:
        raise GraphError(f"rope: style {style!r} is not one of {', '.join(STYLES)}")
    if x.rank != 4:
        raise ShapeError(f"rope: x is [batch, seq, heads, head_dim], found {x}")
    if cos.rank != 2 or cos.shape != sin.shape:
        raise ShapeError(f"rope: cos and sin are [positions, n], found {cos} and {sin}")
    if positions.rank != 2:
        raise ShapeError(f"rope: positions are [batch, seq], found {positions}")
    if not positions.dtype.is_integer:
        raise DTypeError(f"rope: positions are integers, found {positions}")
    for axis in (0, 1):
        require_equal(positions.shape[axis], x.shape[axis], f"rope: positions {positions} do not fit x {x}")
    n, head_dim = cos.shape[1], x.shape[3]
    if isinstance(n, int) and isinstance(head_dim, int) and 2 * n > head_dim:
        raise ShapeError(f"rope: tables turn {2 * n} elements, a head has {head_dim}")
    if not (x.dtype.is_float and cos.dtype.is_float and sin.dtype.is_float):
        raise DTypeError(f"rope: takes floats, found {x.dtype}, {cos.dtype}, {sin.dtype}")
    return x
