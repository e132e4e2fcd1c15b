"""Causal depthwise convolution, with the last tokens as its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_ROWS, SEGMENTED, f32, i32, op, sample
from rlx.ops.recurrent import (
    TOKEN_AXES,
    check_floats,
    check_rows,
    check_segments,
    check_shape,
    count_states,
    repeat_first,
    row_by_row,
    shift_tokens,
)
from rlx.types import TensorType


def _depthwise_conv1d_causal(x: Any, weight: Any, left_pad: Any, segments: Any = None, *, kernel_size: int) -> Any:
    padded, seq = np.concatenate([left_pad, x], axis=1), x.shape[1]
    taps = weight.reshape(weight.shape[0], kernel_size)
    y = np.zeros_like(x)
    ids = np.zeros(x.shape[:2], np.int32) if segments is None else segments
    before = np.pad(ids, ((0, 0), (kernel_size - 1, 0)), "edge" if seq else "constant")
    for k in range(kernel_size):
        same = before[:, k : k + seq] == ids
        y += np.where(same[..., None], padded[:, k : k + seq], 0) * taps[:, k]
    return y


def _decompose_depthwise_conv1d_causal(
    x: Value, weight: Value, left_pad: Value, segments: Value, *, kernel_size: int
) -> Value:
    """Tokens of other segments count as zeros; those of `left_pad` belong to the first segment."""
    taps, wide = weight.reshape(weight.shape[0], kernel_size), x.dtype.wide
    total: Value | None = None
    for k in range(kernel_size):
        back = kernel_size - 1 - k
        token = shift_tokens(x, left_pad, back)
        if back:
            same = segments.equal(shift_tokens(segments, repeat_first(segments, kernel_size - 1), back))
            token = x.graph.one("where", same.reshape(*same.shape, 1), token, 0.0)
        term = token.astype(wide) * taps[:, k].astype(wide)
        total = term if total is None else total + term
    assert total is not None
    return total.astype(x.dtype)


@op(
    "depthwise_conv1d_causal", independent=never,
    reference=_depthwise_conv1d_causal, tolerance=2e-6, traits=[SEGMENTED],
    decompose=_decompose_depthwise_conv1d_causal,
    samples=[
        sample(f32(2, 9, 3), f32(3, 4), f32(2, 3, 3), i32(2, 9, low=0, high=2), kernel_size=4),
        sample(f32(2, 5, 3), f32(3, 4), f32(2, 3, 3), kernel_size=4),
        sample(f32(1, 1, 70), f32(70, 1, 4), f32(1, 3, 70), kernel_size=4),
        sample(f32(2, 9, 5), f32(5, 1, 1, 3), f32(2, 2, 5), kernel_size=3),
        sample(f32(2, 4, 5), f32(5, 1), f32(2, 0, 5), kernel_size=1),
    ],
)  # fmt: skip
def depthwise_conv1d_causal(
    x: TensorType, weight: TensorType, left_pad: TensorType, segments: TensorType | None = None, *, kernel_size: int
) -> TensorType:
    """y[t, c] = sum over k of weight[c, k] x[t + k - (kernel_size - 1), c], for each channel c.

    x is [batch, seq, channels]; `left_pad` [batch, kernel_size - 1, channels] holds the previous tokens: zeros at the
    start, otherwise the last tokens of the previous piece. The weight is [channels, kernel_size]; axes of size 1
    between them, as in files, are accepted. With ids `segments` [batch, seq], tokens outside the segment of t count as
    zeros.
    """
    where = "depthwise_conv1d_causal"
    _check_conv(where, x, weight, "left_pad", left_pad, kernel_size)
    check_segments(where, x.shape[:2], segments)
    return x


def _check_conv(
    where: str, x: TensorType, weight: TensorType, name: str, before: TensorType, kernel_size: int, axes: int = 2
) -> None:
    if x.rank != axes + 1 or kernel_size < 1:
        raise ShapeError(f"{where}: x is [{TOKEN_AXES[axes]}, channels], found {x} and kernel_size {kernel_size}")
    *lead, channels = x.shape
    ones = (1,) * (weight.rank - 2)
    check_shape(where, "weight", weight, channels, *ones, kernel_size)
    check_shape(where, name, before, count_states(before, lead), kernel_size - 1, channels)
    check_floats(where, x, weight, before)


def _depthwise_conv1d_causal_carry(
    x: Any, weight: Any, state: Any, lengths: Any = None, rows: Any = None, *, kernel_size: int
) -> tuple[Any, Any]:
    if rows is not None:

        def run(tokens: Sequence[Any], start: Any) -> tuple[Any, Any]:
            count = np.array([tokens[0].shape[1]])
            return _depthwise_conv1d_causal_carry(tokens[0], weight, start, count, kernel_size=kernel_size)

        return row_by_row("depthwise_conv1d_causal_carry", rows, state, [x], run)
    y = _depthwise_conv1d_causal(x, weight, state, kernel_size=kernel_size)
    all_of_it, ends = np.concatenate([state, x], axis=1), np.clip(lengths, 0, x.shape[1])
    after = [row[end : end + kernel_size - 1] for row, end in zip(all_of_it, ends, strict=True)]
    return y, np.stack(after) if after else state.copy()


@op(
    "depthwise_conv1d_causal_carry", independent=never, reference=_depthwise_conv1d_causal_carry, tolerance=2e-6,
    traits=[CHECKS_ROWS],
    samples=[
        sample(f32(2, 5, 3), f32(3, 4), f32(2, 3, 3), i32(2, low=0, high=6), kernel_size=4),
        sample(f32(3, 1, 70), f32(70, 1, 4), f32(3, 3, 70), i32(3, low=0, high=2), kernel_size=4),
        sample(f32(2, 2, 5), f32(5, 1), f32(2, 0, 5), i32(2, low=0, high=3), kernel_size=1),
        sample(f32(12, 40), f32(40, 4), f32(4, 3, 40), None, i32(12, low=-1, high=4), kernel_size=4),
        sample(f32(5, 3), f32(3, 1), f32(2, 0, 3), None, i32(5, low=-1, high=2), kernel_size=1),
    ],
)  # fmt: skip
def depthwise_conv1d_causal_carry(
    x: TensorType, weight: TensorType, state: TensorType, lengths: TensorType | None = None,
    rows: TensorType | None = None, *, kernel_size: int,
) -> tuple[TensorType, TensorType]:  # fmt: skip
    """`depthwise_conv1d_causal` after the tokens in `state`, and the state after the last token.

    The state has the last kernel_size - 1 tokens, [batch, kernel_size - 1, channels]. The first `lengths[b]` tokens of
    a row count; the rest is padding and does not enter the state.

    With `rows` [tokens] in place of lengths, x is [tokens, channels] and the state is
    [rows, kernel_size - 1, channels]: the previous tokens are those of the same row, as in `selective_scan_carry`.
    """
    where = "depthwise_conv1d_causal_carry"
    if (lengths is None) == (rows is None):
        raise GraphError(f"{where}: takes lengths or rows, found {'neither' if rows is None else 'both'}")
    _check_conv(where, x, weight, "state", state, kernel_size, check_rows(where, x, rows))
    check_shape(where, "lengths", lengths, x.shape[0])
    if lengths is not None and not lengths.dtype.is_integer:
        raise DTypeError(f"{where}: lengths are integers, found {lengths}")
    return x, state
