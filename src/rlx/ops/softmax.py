"""Softmax over one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.graph import Node
from rlx.ir.registry import f32, op, sample
from rlx.types import TensorType, axis_index


def _softmax(x: Any, *, axis: int) -> Any:
    shifted = np.exp(x - np.max(x, axis=axis, keepdims=True)) if x.shape[axis] else x
    return shifted / np.sum(shifted, axis=axis, keepdims=True)


def _off_the_batch(node: Node, batched: Sequence[bool]) -> bool:
    return bool(node.attrs["axis"] % node.types[0].rank != 0)


@op(
    "softmax",
    independent=_off_the_batch,
    reference=_softmax,
    tolerance=2e-6,
    samples=[sample(f32(4, 5)), sample(f32(3, 130)), sample(f32(2, 17, 5), axis=1), sample(f32(6, 3), axis=0)],
)
def softmax(x: TensorType, *, axis: int = -1) -> TensorType:
    """exp(x) divided by its sum along an axis. A row of only -inf gives NaN."""
    if not x.dtype.is_float:
        raise DTypeError(f"softmax: takes floats, found {x.dtype}")
    axis_index(axis, x.rank, "softmax")
    return x
