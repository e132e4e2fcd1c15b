"""Gated linear attention, the recurrence of Mamba 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_ROWS, f32, i32, op, sample
from rlx.ops.recurrent import (
    TOKEN_AXES,
    check_floats,
    check_rows,
    check_segments,
    check_shape,
    count_states,
    row_by_row,
    state_resets,
)
from rlx.types import TensorType


def _gated_linear_attention_carry(
    q: Any, k: Any, v: Any, g: Any, state: Any, segments: Any = None, rows: Any = None
) -> tuple[Any, Any]:
    if rows is not None:

        def run(tokens: Sequence[Any], start: Any) -> tuple[Any, Any]:
            value, query, key, gate = tokens
            return _gated_linear_attention_carry(query, key, value, gate, start)

        return row_by_row("gated_linear_attention_carry", rows, state, [v, q, k, g], run)
    state, out, resets = state.copy(), np.empty_like(v), state_resets(v, segments)
    q, k = (np.repeat(t, v.shape[2] // t.shape[2], axis=2) for t in (q, k))
    for t in range(v.shape[1]):
        state[resets[:, t]] = 0
        state = state * np.exp(g[:, t])[..., None, None] + k[:, t][..., :, None] * v[:, t][..., None, :]
        out[:, t] = np.einsum("bhij,bhi->bhj", state, q[:, t])
    return out, state


@op(
    "gated_linear_attention_carry", independent=never, reference=_gated_linear_attention_carry, tolerance=1e-5,
    traits=[CHECKS_ROWS],
    samples=[
        sample(
            f32(2, 5, 1, 3), f32(2, 5, 1, 3), f32(2, 5, 4, 16), f32(2, 5, 4, low=-1, high=0), f32(2, 4, 3, 16),
            i32(2, 5, low=0, high=2),
        ),
        sample(
            f32(2, 5, 1, 3), f32(2, 5, 1, 3), f32(2, 5, 4, 16), f32(2, 5, 4, low=-1, high=0), f32(2, 4, 3, 16)
        ),
        sample(
            f32(1, 1, 2, 20), f32(1, 1, 2, 20), f32(1, 1, 6, 5), f32(1, 1, 6, low=-1, high=0), f32(1, 6, 20, 5)
        ),
        sample(
            f32(1, 70, 2, 8), f32(1, 70, 2, 8), f32(1, 70, 2, 32), f32(1, 70, 2, low=-1, high=0), f32(1, 2, 8, 32)
        ),
        sample(
            f32(9, 1, 3), f32(9, 1, 3), f32(9, 2, 16), f32(9, 2, low=-1, high=0), f32(4, 2, 3, 16), None,
            i32(9, low=-1, high=4),
        ),
    ],
)  # fmt: skip
def gated_linear_attention_carry(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, state: TensorType, segments: TensorType | None = None,
    rows: TensorType | None = None,
) -> tuple[TensorType, TensorType]:  # fmt: skip
    """Gated linear attention; each head has a state matrix S from keys to values. Used by Mamba 2, among others.

    Per token, S = exp(g) S + k ⊗ v, and the output is qᵀ S. q and k are [batch, seq, groups, n], v is [batch, seq,
    heads, m], g (the logarithm of the gate) is [batch, seq, heads]; adjacent heads share a group. Starts from `state`
    [batch, heads, n, m] and also returns the state after the last token. Where the ids `segments` [batch, seq] change
    from one token to the next, S is reset to zero.

    With `rows` [tokens], other operands have the axis `tokens` in place of batch and seq, and the state is
    [rows, heads, n, m]: a token continues from the state of its row, as in `selective_scan_carry`.
    """
    where = "gated_linear_attention_carry"
    axes = check_rows(where, q, rows, segments)
    for name, operand in (("q", q), ("v", v)):
        if operand.rank != axes + 2 or not all(isinstance(d, int) and d > 0 for d in operand.shape[axes:]):
            wanted = f"[{TOKEN_AXES[axes]}, heads, size]"
            raise ShapeError(f"{where}: {name} is {wanted}, the last two fixed, found {operand}")
    *lead, groups, n = q.shape
    heads, m = v.shape[axes:]
    assert isinstance(heads, int) and isinstance(groups, int)
    if heads % groups:
        raise ShapeError(f"{where}: {heads} heads are no multiple of {groups} groups")
    check_shape(where, "k", k, *q.shape)
    check_shape(where, "v", v, *lead, heads, m)
    check_shape(where, "g", g, *lead, heads)
    check_shape(where, "state", state, count_states(state, lead), heads, n, m)
    check_segments(where, lead, segments)
    check_floats(where, q, k, v, g, state)
    return v, state
