"""Merge sort of rows, the form of `topk` for many elements: n log n steps instead of one pass over the row per element.

A unit sorts one row. Runs of 1, 2, 4, ... elements are merged in pairs, from one half of the scratch memory to the
other; of equal keys the left run's comes first, so the sort is stable.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.dtypes import I32, I64
from rlx.lir.forms.row_kernels import ROW, Body, Rows
from rlx.lir.loops import Const, Expr, For, Index
from rlx.lir.schedule import LoopBuilder, Scheduler
from rlx.lir.views import View
from rlx.types import TensorType, contiguous_strides, product

MAX_PASSES = 32  # indices are i32, so a row has at most 2^31 elements


def launch_largest(s: Scheduler, key: Callable[[Expr], Expr], x: View, values: View, indices: View) -> None:
    """Launch a kernel that sorts the rows of `x` by `key`, largest first, and stores as many as the results hold.

    `x` and the results are contiguous; rows are along the last axis.
    """
    units, width, k = product(x.shape[:-1]), x.shape[-1], values.shape[-1]
    b = LoopBuilder("sort")
    row = Rows(b, "x", _as_matrix(x))
    out, out_indices = (Rows(b, n, _as_matrix(v), written=True) for n, v in (("values", values), ("indices", indices)))
    keys, order = (
        Rows(b, name, s.temporary(TensorType((units, width * 2), dtype)), written=True)
        for name, dtype in (("keys", I64), ("order", I32))
    )
    n, i, t = b.arg("n", width), Index("i"), Index("t")
    body = Body()
    with body.loop("i", n, vector=True) as start:
        start.store(keys, i, key(row[i].cast(x.dtype.wide)))
        start.store(order, i, i.cast(I32))
    run, source = body.var("run", 1, I64), body.var("source", 0, I64)
    with body.loop("pass", MAX_PASSES) as each, each.when("unsorted", run < n) as merging:
        target = merging.let("target", n - source)
        pairs = merging.let("pairs", (n + run * 2 - 1).quot(run * 2))
        with merging.loop("pair", pairs) as pair:
            left = pair.var("left", Index("pair") * run * 2, I64)
            place = pair.let("place", target + Index("pair") * run * 2)
            middle = pair.let("middle", (left + run).min(n))
            right = pair.var("right", middle, I64)
            stop = pair.let("stop", (middle + run).min(n))
            with pair.loop("t", pair.let("both", stop - left)) as step:
                # An exhausted run is read at its last element, which is not used.
                left_at = step.let("left_at", source + left.min(middle - 1))
                right_at = step.let("right_at", source + right.min(stop - 1))
                left_key, right_key = step.let("left_key", keys[left_at]), step.let("right_key", keys[right_at])
                ahead = ((left_key >= right_key) | (right >= stop)) & (left < middle)
                first = step.let("first", ahead)
                step.store(keys, place + t, first.select(left_key, right_key))
                step.store(order, place + t, order[first.select(left_at, right_at)])
                step.assign(left, left + first.cast(I64))
                step.assign(right, right + (Const(1, I64) - first.cast(I64)))
        merging.assign(source, target)
        merging.assign(run, run * 2)
    with body.loop("i", b.arg("k", k)) as each:
        index = each.let("index", order[source + i])
        each.store(out, i, row[index.cast(I64)])
        each.store(out_indices, i, index)
    passes = width.bit_length() if isinstance(width, int) else MAX_PASSES
    b.launch(s, For(ROW.name, b.arg("units", units), tuple(body.stmts)), units, flops=product(x.shape) * passes)


def _as_matrix(view: View) -> View:
    shape = (product(view.shape[:-1]), view.shape[-1])
    return view.with_(shape, contiguous_strides(shape))
