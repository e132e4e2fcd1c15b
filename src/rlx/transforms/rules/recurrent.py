"""Shared helpers of recurrence rules: scans over tokens inside scans over chunks that save one state each.

A chunk has `CHUNK` tokens: the gradient of a sequence stores the states at chunk ends and, while it goes back through a
chunk, the states of that chunk. Short sequences are one chunk. The last chunk is padded with zeros, which leave the
state unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.ir.graph import Graph, Value
from rlx.ops.recurrent import chunks_of, state_reset_values
from rlx.transforms.build import declare, move_axis, slice_axis
from rlx.transforms.rule_tables import Vmapped, no_derivative_with
from rlx.transforms.vmap import by_scan, fold_batch
from rlx.types import Size

CHUNK = 64
Results = tuple[Value, ...]  # the state after the last token, then per-token values
Token = Callable[..., Results]
Native = Callable[[Value, Sequence[Value], Sequence[Value], Value | None], Results]


def split_chunks(x: Value, chunk: int) -> Value:
    """Rearrange [batch, seq, ...] to [chunks, batch, chunk, ...], padding the last chunk with zeros."""
    seq = x.shape[1]
    many = chunks_of(seq, chunk)
    high = tuple(many * chunk - seq if a == 1 else 0 for a in range(x.rank))
    padded = x.graph.one("pad", x, low=(0,) * x.rank, high=high)
    return move_axis(padded.reshape(x.shape[0], many, chunk, *x.shape[2:]), 1, 0)


def join_chunks(ys: Value, seq: Size) -> Value:
    """Undo `split_chunks`."""
    many, batch, chunk = ys.shape[:3]
    return slice_axis(move_axis(ys, 0, 1).reshape(batch, many * chunk, *ys.shape[3:]), 1, 0, seq)


def segment_begins(segments: Value | None) -> list[Value]:
    """Return flags [batch, seq], 1 for tokens that begin a segment, as a list; empty without segments."""
    return [] if segments is None else [state_reset_values(segments).astype("i32")]


def reset(state: Value, begins: Value | None) -> Value:
    """Return the state [batch, ...] before a token: zeros where `begins` [batch] flags the beginning of a segment."""
    if begins is None:
        return state
    return state.graph.one("where", (begins > 0).reshape(begins.shape[0], *(1,) * (state.rank - 1)), 0.0, state)


def scan_chunks(
    state: Value, shared: Sequence[Value], rows: Sequence[Value], segments: Value | None, token: Token, native: Native
) -> Results:
    """Run a recurrence; returns the last state and outputs [batch, seq, ...]. `rows` are [batch, seq, ...] each.

    `token` is one step (see `scan_tokens`); `native` is the op itself on one chunk.
    """
    g, seq = state.graph, rows[0].shape[1]
    rows = [*rows, *segment_begins(segments)]
    if isinstance(seq, int) and seq <= CHUNK:
        return scan_tokens(g, state, shared, rows, token)
    many, pieces = chunks_of(seq, CHUNK), [split_chunks(x, CHUNK) for x in rows]
    body = Graph("chunk")
    inner = declare(body, "state", state.type)
    held = [declare(body, f"shared{i}", v.type) for i, v in enumerate(shared)]
    tokens, ids = declare_step_inputs(body, pieces), None
    if segments is not None:  # in the form the op takes: the chunk's first token resets the state here
        *tokens, begins = tokens
        inner, ids = reset(inner, begins[:, 0]), begins.cumsum(axis=1)
    body.set_outputs(native(inner, held, tokens, ids))
    (last,), ys = g.scan_general(
        [state], body, many, broadcasts=shared, xs=pieces,
        checkpoints=many,  # type: ignore[arg-type]
    )  # fmt: skip
    return last, *(join_chunks(y, seq) for y in ys)


def declare_step_inputs(body: Graph, xs: Sequence[Value]) -> list[Value]:
    """Declare inputs of a body for one step of each of `xs`."""
    return [declare(body, f"x{i}", x.type.with_shape(*x.shape[1:])) for i, x in enumerate(xs)]


def scan_tokens(
    g: Graph, state: Value, shared: Sequence[Value], rows: Sequence[Value], token: Token, *,
    reverse: bool = False,
) -> Results:  # fmt: skip
    """Scan over the tokens of a chunk; `token` takes the state, the shared values and one token of each row."""
    body = Graph("token")
    inner = declare(body, "state", state.type)
    held = [declare(body, f"shared{i}", v.type) for i, v in enumerate(shared)]
    xs = [move_axis(x, 1, 0) for x in rows]
    body.set_outputs(token(inner, *held, *declare_step_inputs(body, xs)))
    (last,), ys = g.scan_general([state], body, rows[0].shape[1], broadcasts=shared, xs=xs, reverse=reverse)
    return last, *(move_axis(y, 0, 1) for y in ys)


no_derivative_with(
    "rows", "gated_delta_net_carry", "gated_linear_attention_carry", "selective_scan_carry",
    why="the states of ragged rows are written in place while a model generates; for training use segments",
)  # fmt: skip


def batch_recurrence(vmapped: Vmapped, *shared: int) -> Sequence[Value]:
    """Merge both batch axes; scans over entries if one of the `shared` operands (without a batch axis) is batched.

    Ragged tokens are scanned too: each entry has its own row numbers.
    """
    ragged = vmapped.node.operand("rows") is not None
    if ragged or any(vmapped.batched[i] for i in shared):
        return by_scan(vmapped)
    return fold_batch(vmapped, [i for i in range(len(vmapped.operands)) if i not in shared])
