"""The KV cache: `kv_append` with one unit per token and head, `cached_attention` as a launch.

The portable form appends tokens in order, so that of two tokens in one slot the last one wins; here tokens are written
at the same time, after a launch that finds the place of each token and leaves out those that a later one overwrites.
Places are found once for all layers. Attention keeps its portable form for what its kernels do not take (see
`attention.py`), and for caches whose keys or values are not rows, as those of CPUs are: kernels read whole keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.forms.attention import kernel_takes
from rlx.dtypes import BOOL, I64
from rlx.ir.graph import Node, Value
from rlx.lir.forms import attention_launch
from rlx.lir.forms.kv_cache import Append, AppendOperands, pools
from rlx.lir.forms.kv_cache import cached_attention as portable_cached_attention
from rlx.lir.loops import Const, Expr, For, Index, Let, Place, Reduce, Ref, Stmt, Store, known
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit
from rlx.lir.views import View
from rlx.types import Size, TensorType, product

BATCH, TOKEN = Ref("b", I64), Ref("t", I64)


def kv_append(s: Scheduler, node: Node) -> Sequence[View]:
    operands = AppendOperands.of(s, node)
    _, _, positions, table, *rows = node.operands
    key = "places of tokens", positions, table, *rows, operands.page, operands.pool.shape[0], node.attrs["ring"]
    if key not in s.shared:
        s.shared[key] = _places(s, node, operands)
    places: View = s.shared[key]
    builder = LoopBuilder("kv_append")
    builder.param(operands.new)
    at = builder.param(places)
    append = Append(builder, operands, TOKEN)
    append.write_pool()
    sizes: tuple[Size, ...] = (*places.shape, operands.pool.shape[1])
    place = Ref("place", I64)
    body: tuple[Stmt, ...] = (
        *decode_unit(builder, sizes, ["b", "t", "h"]),
        Let("place", builder.load(at, _element(builder, places, BATCH, TOKEN))),
        Let("ok", place >= 0),
        Let("kept", Ref("ok", BOOL).select(place, 0)),
        Let("page", Ref("kept", I64).quot(operands.page)),
        Let("slot", Ref("kept", I64).rem(operands.page)),
        *append.write(),
    )
    units = product(sizes)
    flops = product(operands.new.shape)
    builder.launch(s, For("u", builder.arg("units", units), body), units, split="tokens", flops=flops)
    return [operands.result]


def _places(s: Scheduler, node: Node, operands: AppendOperands) -> View:
    """[batch, seq]: page · slots + slot of each token, -1 for tokens that are not written."""
    shape = operands.positions.shape
    places = s.temporary(TensorType(shape, I64))
    builder = LoopBuilder("kv_append_places")
    append = Append(builder, operands, TOKEN)
    append.read_places(s)
    out = builder.param(places, written=True)
    limit, capacity = append.limits(ring=node.attrs["ring"])
    at = _element(builder, places, BATCH, TOKEN)
    index = Ref("page", I64) * operands.page + Ref("slot", I64)
    body: tuple[Stmt, ...] = (
        *decode_unit(builder, shape, ["b", "t"]),
        *append.checks(TOKEN, limit),
        Store(out, at, known(-1, I64)),
        # With no rows, blocks or pages there is no entry to look up.
        For("once", builder.arg("some", operands.some), (
            *append.place(limit, capacity),
            Store(out, at, Ref("ok", BOOL).select(index, -1)),
        )),
    )  # fmt: skip
    units = product(shape)
    builder.launch(s, For("u", builder.arg("units", units), body), units, split="tokens", flops=units)
    return places if shape[1] == 1 else _last_writers(s, places)


def _last_writers(s: Scheduler, places: View) -> View:
    """Places with -1 for each token whose place a later token of the batch entry has."""
    shape = places.shape
    last = s.temporary(TensorType(shape, I64))
    builder = LoopBuilder("kv_append_last")
    every, out = builder.param(places), builder.param(last, written=True)

    def place(token: Expr) -> Expr:
        return builder.load(every, _element(builder, places, BATCH, token))

    later, own = Index("i"), Ref("own", I64)
    replaced = ((later > TOKEN) & place(later).eq(own)).select(Const(1, I64), 0)
    body: tuple[Stmt, ...] = (
        *decode_unit(builder, shape, ["b", "t"]),
        Let("own", place(TOKEN)),
        Let("replaced", Reduce("max", "i", builder.arg("tokens", shape[1]), replaced)),
        Store(out, _element(builder, last, BATCH, TOKEN), Ref("replaced", I64).eq(1).select(-1, own)),
    )
    units = product(shape)
    builder.launch(s, For("u", builder.arg("units", units), body), units, split="tokens", flops=units * shape[1])
    return last


def _element(builder: LoopBuilder, view: View, batch: Expr, token: Expr) -> Place:
    """The address of an element of a contiguous [batch, seq]."""
    return (batch, builder.arg("seq", view.shape[1])), (token, 1)


def cached_attention(s: Scheduler, node: Node) -> Sequence[View]:
    keys, values = pools(s, node)
    if not kernel_takes(node) or keys.strides[3] != 1 or values.strides[3] != 1:
        return portable_cached_attention(s, node)
    appends = all(_appends(operand, node) for operand in node.operands[1:3])
    return attention_launch.cached_attention(s, node, keys, values, key_axes="sd", appends=appends)


def _appends(pool: Value | None, attention: Node) -> bool:
    """Whether a pool is a state to which the program appends just the tokens that attend to it."""
    assert pool is not None
    append = pool.node
    if append.op != "kv_append":
        return False
    places = attention.operands[3:]  # positions, the table and rows
    state = append.operands[0]
    return append.operands[2:] == places and state is not None and state.node.op == "state"
