"""Shared by recurrent ops: operand checks, chunks of tokens, ragged tokens and segments.

A recurrent op has a form that takes the state of earlier tokens and returns the state after the last (its name ends in
`_carry`), so that a sequence can be processed in pieces. States start at zero by default. A state that the runtime owns
is consumed like a cache: it is updated in place, and its old contents must not be read again.

Tokens are rectangular, [batch, seq, ...], where batch entry b uses row b of the state; or ragged, [tokens, ...], where
`rows` has the row of each. Tokens of a row are in order, those of different rows may interleave. A negative row is
padding: it changes no state and gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.dtypes import F32, F64
from rlx.errors import DTypeError, GraphError, KernelError, ShapeError
from rlx.ir.graph import Value
from rlx.types import Size, TensorType, require_equal

CHUNK = 32  # tokens between stored states for gradients; a gated delta net computes the tokens of a chunk together
TOKEN_AXES = {2: "batch, seq", 1: "tokens"}  # names of the token axes, by number


def check_floats(where: str, *operands: TensorType | None) -> None:
    """Check for floats of one type: mixed precision in sums would be a surprise."""
    present = [t for t in operands if t is not None]
    if any(t.dtype is not present[0].dtype or not t.dtype.is_float for t in present):
        kinds = [t.dtype for t in present]
        hint = "f64 comes from a NumPy array: array.astype(np.float32)" if F64 in kinds and F32 in kinds else None
        raise DTypeError(f"{where}: takes floats of one type, found {', '.join(map(str, kinds))}", hint=hint)


def check_shape(where: str, name: str, operand: TensorType | None, *shape: Size) -> None:
    if operand is None:
        return
    wanted = f"[{', '.join(map(str, shape))}]"
    if operand.rank != len(shape):
        raise ShapeError(f"{where}: {name} is {operand}, expected {wanted}")
    for have, want in zip(operand.shape, shape, strict=True):
        require_equal(have, want, f"{where}: {name} is {operand}, expected {wanted}")


def check_state_size(where: str, n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ShapeError(f"{where}: state_size is {n!r}, expected an integer from 1")


def chunks_of(seq: Size, chunk: int) -> Size:
    """Number of chunks per sequence, including a partial last one."""
    return (seq + (chunk - 1)) // chunk


def checked_chunks(where: str, seq: Size, chunk: Any) -> Size:
    """`chunks_of` for an unchecked chunk size."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ShapeError(f"{where}: chunk is {chunk!r}, expected an integer from 1")
    return chunks_of(seq, chunk)


def check_backward(where: str, x: TensorType, **operands: tuple[TensorType, Sequence[Size]]) -> None:
    """Check the additional operands of a gradient: floats of the type of `x`, of these shapes."""
    for name, (operand, shape) in operands.items():
        check_shape(where, name, operand, *shape)
    check_floats(where, x, *(operand for operand, _ in operands.values()))


# -- ragged tokens -----------------------------------------------------------------------------------------------------
def check_rows(where: str, tokens: TensorType, rows: TensorType | None, segments: TensorType | None = None) -> int:
    """Checks the rows of tokens; returns the number of token axes: 2, or 1 if ragged."""
    if rows is None:
        return 2
    if segments is not None:
        raise GraphError(f"{where}: takes segments or rows, found both", hint="each row is a sequence of its own")
    if not rows.dtype.is_integer:
        raise DTypeError(f"{where}: row numbers are integers, found {rows}", hint="cast them to i32")
    check_shape(where, "rows", rows, *tokens.shape[:1])
    return 1


def count_states(state: TensorType | None, lead: Sequence[Size]) -> Size:
    """Expected number of states: one per batch entry or, for ragged tokens, as many as are passed."""
    return state.shape[0] if state is not None and state.rank and len(lead) == 1 else lead[0]


def row_by_row(
    where: str, rows: Any, state: Any, tokens: Sequence[Any], run: Callable[[Sequence[Any], Any], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """The NumPy reference for ragged tokens: `run`, on rectangular tokens and their state, per row.

    The first result is as large as the first of the tokens.
    """
    rows = rows.astype(np.int64)
    if rows.max(initial=-1) >= len(state):
        raise KernelError(f"{where}: row {rows.max()} lies outside the state, which has {len(state)} rows")
    out, after = np.zeros_like(tokens[0]), state.copy()
    for row in np.unique(rows[rows >= 0]):
        own = rows == row
        outputs, last = run([x[own][None] for x in tokens], state[row][None])
        out[own], after[row] = outputs[0], last[0]
    return out, after


# -- segments ----------------------------------------------------------------------------------------------------------
def check_segments(where: str, lead: Sequence[Size], segments: TensorType | None) -> None:
    if segments is not None and not segments.dtype.is_integer:
        raise DTypeError(f"{where}: segment ids are integers, found {segments.dtype}", hint="cast them to i32")
    check_shape(where, "segments", segments, *lead)


def state_resets(tokens: Any, segments: Any) -> Any:
    """[batch, seq], NumPy: whether the state is reset before a token, where the segment id changes."""
    if segments is None:
        return np.zeros(tokens.shape[:2], bool)
    return np.diff(segments, axis=1, prepend=segments[:, :1]) != 0


def shift_tokens(x: Value, before: Value, by: int) -> Value:
    """Shifts [batch, seq, ...] by `by` tokens, with tokens `before` in front of the first."""
    joined = x.graph.one("concatenate", before, x, axis=1)
    at = before.shape[1] - by
    return joined[:, at : x.shape[1] + at]


def repeat_first(x: Value, times: int) -> Value:
    """Repeats the first token of [batch, seq] `times` times; `seq` may be 0."""
    if x.shape[1] == 0:
        return x.graph.one("expand", x.graph.constant(0, x.dtype), shape=(x.shape[0], times))
    return x.graph.one("expand", x[:, 0:1], shape=(x.shape[0], times))


def state_reset_values(segments: Value) -> Value:
    """`state_resets` as a graph value."""
    return segments.not_equal(shift_tokens(segments, repeat_first(segments, 1), 1))
