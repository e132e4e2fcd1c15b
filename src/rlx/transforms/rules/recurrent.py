"""What rules of recurrences share: scans over tokens, inside scans over chunks that keep one state each.

A chunk has `CHUNK` tokens, so that the gradient of a sequence keeps its states at chunk ends and, while it goes back
through one, those of that chunk. Short sequences are one chunk. Zeros pad the last: they leave the state as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.ir.graph import Graph, Value
from rlx.ops.recurrent import chunks_of, state_reset_values
from rlx.transforms.build import declare, move_axis, taken
from rlx.transforms.rule_tables import Vmapped, no_derivative_with
from rlx.transforms.vmap import by_scan, folded
from rlx.types import Size

CHUNK = 64
Results = tuple[Value, ...]  # the state after the last token, then what there is for each token
Token = Callable[..., Results]
Native = Callable[[Value, Sequence[Value], Sequence[Value], Value | None], Results]


def cut(x: Value, chunk: int) -> Value:
    """[batch, seq, ...] as [chunks, batch, chunk, ...], the last one filled up with zeros."""
    seq = x.shape[1]
    many = chunks_of(seq, chunk)
    high = tuple(many * chunk - seq if a == 1 else 0 for a in range(x.rank))
    whole = x.graph.one("pad", x, low=(0,) * x.rank, high=high)
    return move_axis(whole.reshape(x.shape[0], many, chunk, *x.shape[2:]), 1, 0)


def joined(ys: Value, seq: Size) -> Value:
    """The opposite of `cut`."""
    many, batch, chunk = ys.shape[:3]
    return taken(move_axis(ys, 0, 1).reshape(batch, many * chunk, *ys.shape[3:]), 1, 0, seq)


def row_of_starts(segments: Value | None) -> list[Value]:
    """1 for each token that starts a segment and 0 for others, [batch, seq]; nothing where there are no segments."""
    return [] if segments is None else [state_reset_values(segments).astype("i32")]


def reset(state: Value, starts: Value | None) -> Value:
    """The state [batch, ...] that a token finds, where `starts` [batch] may say that it starts a segment."""
    if starts is None:
        return state
    return state.graph.one("where", (starts > 0).reshape(starts.shape[0], *(1,) * (state.rank - 1)), 0.0, state)


def chunked(
    state: Value, shared: Sequence[Value], rows: Sequence[Value], segments: Value | None, token: Token, native: Native
) -> Results:
    """A recurrence: the last state, and outputs [batch, seq, ...]. `rows` are [batch, seq, ...] each.

    `token` is one step of it (see `over_tokens`); `native` is the op itself on one chunk.
    """
    g, seq = state.graph, rows[0].shape[1]
    rows = [*rows, *row_of_starts(segments)]
    if isinstance(seq, int) and seq <= CHUNK:
        return over_tokens(g, state, shared, rows, token)
    many, pieces = chunks_of(seq, CHUNK), [cut(x, CHUNK) for x in rows]
    body = Graph("chunk")
    inner = declare(body, "state", state.type)
    held = [declare(body, f"shared{i}", v.type) for i, v in enumerate(shared)]
    tokens, ids = each_of(body, pieces), None
    if segments is not None:  # as the op takes them: the first token of the chunk resets the state here
        *tokens, starts = tokens
        inner, ids = reset(inner, starts[:, 0]), starts.cumsum(axis=1)
    body.set_outputs(native(inner, held, tokens, ids))
    (last,), ys = g.scan_general(
        [state], body, many, broadcasts=shared, xs=pieces,
        checkpoints=many,  # type: ignore[arg-type]
    )  # fmt: skip
    return last, *(joined(y, seq) for y in ys)


def each_of(body: Graph, xs: Sequence[Value]) -> list[Value]:
    """Inputs of a body for one step of each of `xs`."""
    return [declare(body, f"x{i}", x.type.with_shape(*x.shape[1:])) for i, x in enumerate(xs)]


def over_tokens(
    g: Graph, state: Value, shared: Sequence[Value], rows: Sequence[Value], token: Token, *,
    reverse: bool = False,
) -> Results:  # fmt: skip
    """A chunk as a scan over its tokens; `token` takes the state, what is shared and a token of each."""
    body = Graph("token")
    inner = declare(body, "state", state.type)
    held = [declare(body, f"shared{i}", v.type) for i, v in enumerate(shared)]
    xs = [move_axis(x, 1, 0) for x in rows]
    body.set_outputs(token(inner, *held, *each_of(body, xs)))
    (last,), ys = g.scan_general([state], body, rows[0].shape[1], broadcasts=shared, xs=xs, reverse=reverse)
    return last, *(move_axis(y, 0, 1) for y in ys)


no_derivative_with(
    "rows", "gated_delta_net_carry", "gated_linear_attention_carry", "selective_scan_carry",
    why="the states of ragged rows are written in place while a model generates; for training use segments",
)  # fmt: skip


def batched(vmapped: Vmapped, *shared: int) -> Sequence[Value]:
    """Batches as one; entry by entry if one of the `shared` operands, which have no batch, differs between entries.

    So are ragged tokens: each entry has row numbers of its own.
    """
    ragged = vmapped.node.operand("rows") is not None
    if ragged or any(vmapped.batched[i] for i in shared):
        return by_scan(vmapped)
    return folded(vmapped, [i for i in range(len(vmapped.operands)) if i not in shared])
