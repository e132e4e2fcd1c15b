"""What recurrent ops share: checks of their operands, chunks of tokens, and segments.

A recurrent op has a form that takes the state of earlier tokens and gives the one after the last (its name ends in
`_carry`), so that a sequence may come in pieces. States start at zero where none is given. A state that the runtime
owns is consumed, as a cache is: it is updated in place, and nothing may read it again as it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.graph import Value
from rlx.types import Size, TensorType, require_equal

CHUNK = 32  # tokens between the states that a gradient starts from; those of a gated delta net are computed together


def check_floats(where: str, *operands: TensorType | None) -> None:
    """Floats of one type: sums of unlike precision would be a surprise."""
    given = [t for t in operands if t is not None]
    if any(t.dtype is not given[0].dtype or not t.dtype.is_float for t in given):
        raise DTypeError(f"{where}: takes floats of one type, found {', '.join(str(t.dtype) for t in given)}")


def check_shape(where: str, name: str, operand: TensorType | None, *shape: Size) -> None:
    if operand is None:
        return
    wanted = f"[{', '.join(map(str, shape))}]"
    if operand.rank != len(shape):
        raise ShapeError(f"{where}: {name} is {operand}, wanted {wanted}")
    for have, want in zip(operand.shape, shape, strict=True):
        require_equal(have, want, f"{where}: {name} is {operand}, wanted {wanted}")


def check_state_size(where: str, n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ShapeError(f"{where}: state_size is {n!r}, wanted an integer from 1")


def chunks_of(seq: Size, chunk: int) -> Size:
    """How many chunks a sequence has, the last one perhaps a part of one."""
    return (seq + (chunk - 1)) // chunk


def check_chunk(where: str, chunk: Any) -> None:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ShapeError(f"{where}: chunk is {chunk!r}, wanted an integer from 1")


# -- segments ----------------------------------------------------------------------------------------------------------
def check_segments(where: str, batch: Size, seq: Size, segments: TensorType | None) -> None:
    if segments is not None and not segments.dtype.is_integer:
        raise DTypeError(f"{where}: segment ids are integers, found {segments.dtype}", hint="cast them to i32")
    check_shape(where, "segments", segments, batch, seq)


def starts_of(tokens: Any, segments: Any) -> Any:
    """[batch, seq], NumPy: whether the state is reset before a token, because its id is not that of the one before."""
    if segments is None:
        return np.zeros(tokens.shape[:2], bool)
    return np.diff(segments, axis=1, prepend=segments[:, :1]) != 0


def earlier(x: Value, before: Value, by: int) -> Value:
    """[batch, seq, ...] `by` tokens earlier, with tokens `before` the first."""
    whole = x.graph.one("concatenate", before, x, axis=1)
    at = before.shape[1] - by
    return whole[:, at : x.shape[1] + at]


def repeated(x: Value, times: int) -> Value:
    """The first token of [batch, seq] so many times; `seq` may be 0."""
    if x.shape[1] == 0:
        return x.graph.one("expand", x.graph.constant(0, x.dtype), shape=(x.shape[0], times))
    return x.graph.one("expand", x[:, 0:1], shape=(x.shape[0], times))


def starts_apart(segments: Value) -> Value:
    """The same as a value of a graph."""
    return segments.not_equal(earlier(segments, repeated(segments, 1), 1))
