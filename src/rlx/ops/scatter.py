"""Writing rows by data: the counterpart of gather that replaces instead of adding."""

from __future__ import annotations

from typing import Any

from rlx.errors import DTypeError, KernelError, ShapeError
from rlx.ir.registry import boolean, f32, i32, op, sample
from rlx.types import TensorType, require_equal


def _scatter(x: Any, indices: Any, updates: Any) -> Any:
    result = x.copy()
    if updates.size == 0:
        return result
    if indices.min() < 0 or indices.max() >= x.shape[0]:
        raise KernelError(f"scatter: an index lies outside 0:{x.shape[0]}")
    rows = updates.reshape(indices.size, *x.shape[1:])
    for at, row in zip(indices.reshape(-1), rows, strict=True):  # in order: of equal indices the last counts
        result[at] = row
    return result


@op(
    "scatter", reference=_scatter,
    samples=[
        sample(f32(7, 5), i32(4, low=0, high=7), f32(4, 5)), sample(f32(3, 65), i32(20, low=0, high=3), f32(20, 65)),
        sample(f32(6), i32(9, low=0, high=6), f32(9)), sample(i32(5, 3), i32(2, 4, low=0, high=5), i32(2, 4, 3)),
        sample(boolean(5, 3), i32(2, low=0, high=5), boolean(2, 3)),
    ],
)  # fmt: skip
def scatter(x: TensorType, indices: TensorType, updates: TensorType) -> TensorType:
    """`x` with row `updates[i]` in place of row `indices[i]` of its first axis; of equal indices the last counts."""
    if not indices.dtype.is_integer:
        hint = "cast with x.astype('i32')"
        raise DTypeError(f"scatter: indices are integers, found {indices.dtype}", hint=hint)
    if x.rank == 0:
        raise ShapeError(f"scatter: the table needs an axis, found {x}")
    wanted = (*indices.shape, *x.shape[1:])
    message = f"scatter: updates {updates} should have shape [{', '.join(map(str, wanted))}]"
    if updates.rank != len(wanted):
        raise ShapeError(message)
    for have, want in zip(updates.shape, wanted, strict=True):
        require_equal(have, want, message)
    if updates.dtype is not x.dtype:
        raise DTypeError(f"scatter: updates are {updates.dtype}, the table is {x.dtype}")
    return x
