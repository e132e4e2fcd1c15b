"""Ragged tokens in blocks with a cache: a batch of one sequence, and the row of the cache of each token."""

from __future__ import annotations

from rlx.errors import DTypeError, ShapeError
from rlx.ir.graph import Value
from rlx.types import TensorType, require_equal


def check_token_rows(where: str, x: TensorType, rows: TensorType) -> None:
    """Raise unless `rows` has the row of each token of `x` [1, tokens, ...]."""
    if not rows.dtype.is_integer:
        raise DTypeError(f"{where}: token_rows are integers, found {rows}")
    problem = f"{where}: token_rows is {rows}, x {x}; expected [tokens] and [1, tokens, ...]"
    if rows.rank != 1 or x.rank < 2 or x.shape[0] != 1:
        raise ShapeError(problem)
    require_equal(x.shape[1], rows.shape[0], problem)


def without_batch(x: Value) -> Value:
    """[1, tokens, ...] as [tokens, ...]."""
    result: Value = x.reshape(*x.shape[1:])
    return result
