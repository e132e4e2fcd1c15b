"""Ops created by passes: elementwise regions, matmuls with epilogues, residual norms, prepacked operands.

A fused op carries its computation in an attribute: `body` is a graph of elementwise ops over inputs `x0, x1, ...`
(after `acc0`, `acc1` for the sums of a matmul). Its reference evaluates that graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.dtypes import F32, DType
from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir import evaluate
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.independence import aligned, by_rows, matrices, never
from rlx.ir.registry import CHECKS_DATA, FUSED, TAKES_PACKED, op
from rlx.ir.rewrite import inline
from rlx.operand_layouts import Layout, WeightLayout
from rlx.ops.grouped import check_groups
from rlx.ops.norm import check_scale, layer_norm_array, rms_norm_array
from rlx.ops.quant import unpack_blocks
from rlx.types import Size, TensorType, broadcast, require_equal


def _check_body(where: str, body: Graph, operands: tuple[TensorType, ...]) -> TensorType | tuple[TensorType, ...]:
    wanted = [n.types[0] for n in body.inputs]
    if wanted != list(operands):
        raise GraphError(f"{where}: body takes {', '.join(map(str, wanted))}, got {', '.join(map(str, operands))}")
    types = tuple(o.type for o in body.outputs)
    return types[0] if len(types) == 1 else types


def _check_weights(where: str, weights: int, body: Graph) -> None:
    """Refuse more weights than the body reads sums of, before allocating as many types."""
    if not 0 < weights <= len(body.inputs):
        hint = "the first inputs of the body are the sums, one per weight"
        raise GraphError(f"{where}: {weights} weights, and a body of {len(body.inputs)} inputs", hint=hint)


def _run_body(body: Graph, arrays: list[Any], binding: Mapping[str, int]) -> Any:
    leaves = {n.attrs["name"]: a.astype(n.types[0].dtype.numpy) for n, a in zip(body.inputs, arrays, strict=True)}
    results = evaluate.run(body, leaves, binding)
    return results[0] if len(results) == 1 else tuple(results)


def _region(*xs: Any, body: Graph, binding: Mapping[str, int]) -> Any:
    return _run_body(body, list(xs), binding)


def _decompose_region(*xs: Value, body: Graph) -> tuple[Value, ...]:
    return inline(xs[0].graph, body, xs)


@op("region", independent=aligned, reference=_region, traits=[FUSED], decompose=_decompose_region)
def region(*xs: TensorType, body: Graph) -> TensorType | tuple[TensorType, ...]:
    """Elementwise ops in one kernel: each element is loaded once, computed in registers, stored once."""
    result = _check_body("region", body, xs)
    shapes = {o.type.shape for o in body.outputs}
    if len(shapes) != 1:
        raise ShapeError(f"region: outputs have different shapes, {shapes}")
    return result


def _prepack(*ws: Any, layout: Layout) -> Any:
    return layout.pack(*ws)


def _by_rows_of_layout(node: Node, batched: Sequence[bool]) -> bool:
    """Whether the layout packs each row by itself, and the last axis is not the first."""
    return node.attrs["layout"].by_rows and node.types[0].rank > 1


@op("prepack", independent=_by_rows_of_layout, reference=_prepack, traits=[FUSED, TAKES_PACKED])
def prepack(*ws: TensorType, layout: Layout) -> TensorType:
    """Weights, or the left operand of a matmul, in the layout that a target's kernels read."""
    return layout.packed_type(*ws)


def _products(x: Any, ws: Sequence[Any], weights: int, columns: int, layout: WeightLayout | None) -> list[Any]:
    """x times each weight."""
    if layout is not None:
        return layout.products(x, ws[0], columns, weights)
    matrices = [unpack_blocks(w).swapaxes(-1, -2) if dtype_of(w.dtype).is_packed else w for w in ws]
    return [np.matmul(x, w.astype(x.dtype, copy=False)) for w in matrices]


def _fused_matmul(
    x: Any, *rest: Any, body: Graph, weights: int, columns: Size, layout: WeightLayout | None,
    binding: Mapping[str, int],
) -> Any:  # fmt: skip
    used = weights if layout is None else 1
    sums = _products(x, rest[:used], weights, int(columns), layout)
    return _run_body(body, [*sums, *rest[used:]], binding)


def _decompose_fused_matmul(
    x: Value, *rest: Value, body: Graph, weights: int, layout: WeightLayout | None, **_: Any
) -> tuple[Value, ...]:
    assert layout is None, "packed weights stay packed"
    return inline(x.graph, body, [*(x @ _matrix(w, x.dtype) for w in rest[:weights]), *rest[weights:]])


def _matrix(weight: Value, wide: DType) -> Value:
    """The numbers [..., k, n] of a weight; quantised weights are rows of blocks [..., n, k]."""
    if weight.dtype.is_packed:
        rows: Value = weight.dequantise()
        return rows.mT
    return weight if weight.dtype is wide else weight.cast(wide)


def _is_narrower(stored: DType, computed: DType) -> bool:
    """Whether weights are 16-bit floats that are computed in a wider type."""
    return stored.is_float and computed.is_float and stored.size == 2 < computed.size


def _sums(where: str, x: TensorType, matrix: TensorType, layout: WeightLayout | None) -> DType:
    """The accumulator type; the inner sizes must be equal."""
    k, sums = matrix.shape[-2], x.dtype
    if layout is not None:
        k, sums = layout.inner(x, matrix)
    elif matrix.dtype.is_packed:
        k = matrix.shape[-1]
        if x.dtype is not F32:
            raise DTypeError(f"{where}: takes f32 and {matrix.dtype}, found {x.dtype}")
    if not matrix.dtype.is_packed if layout is None else layout.plain:
        _check_stored(where, x.dtype, matrix.dtype)
    require_equal(x.shape[-1], k, f"{where}: inner sizes differ, {x.shape[-1]} and {k}")
    return sums


def _check_stored(where: str, computed: DType, stored: DType) -> None:
    if stored is not computed and not _is_narrower(stored, computed):
        hint = "weights are stored as x is, or as 16-bit floats"
        raise DTypeError(f"{where}: x is {computed}, the weight {stored}", hint=hint)


@op(
    "fused_matmul",
    independent=matrices,
    reference=_fused_matmul,
    traits=[FUSED, TAKES_PACKED],
    decompose=_decompose_fused_matmul,
)
def fused_matmul(
    x: TensorType,
    *rest: TensorType,
    body: Graph,
    weights: int,
    columns: Size,
    layout: WeightLayout | None = None,
) -> TensorType | tuple[TensorType, ...]:
    """x times one or two weights, with elementwise work on the sums while they are in registers.

    Operands are x, the weights, then the body's other inputs. `columns` is the width of each product. With a `layout`,
    the weights are one tensor made by `prepack`, and x may have to be packed too; otherwise they are matrices [k, n],
    possibly of 16-bit floats, which are widened to the type of x, or packed rows [n, k], as in files.
    """
    _check_weights("fused_matmul", weights, body)
    used = weights if layout is None else 1
    matrices = rest[:used]
    sums = _sums("fused_matmul", x, matrices[0], layout)
    leading = x.shape[:-2]
    if layout is None:
        leading = broadcast(leading, matrices[0].shape[:-2], where="fused_matmul")
    acc = TensorType((*leading, x.shape[-2], columns), sums)
    return _check_body("fused_matmul", body, (acc,) * weights + tuple(rest[used:]))


def _fused_grouped(
    x: Any, *rest: Any, body: Graph, weights: int, columns: Size, layout: WeightLayout | None,
    binding: Mapping[str, int],
) -> Any:  # fmt: skip
    used = weights if layout is None else 1
    ws, index = rest[:used], rest[used]
    check_groups("fused_grouped", index, ws[0].shape[0])
    sums = np.empty((weights, x.shape[0], int(columns)), body.inputs[0].types[0].dtype.numpy)
    for group in np.unique(index):
        mine = [w[group] for w in ws]
        sums[:, index == group] = _products(x[index == group], mine, weights, int(columns), layout)
    return _run_body(body, [*sums, *rest[used + 1 :]], binding)


def _decompose_fused_grouped(
    x: Value, *rest: Value, body: Graph, weights: int, layout: WeightLayout | None, **_: Any
) -> tuple[Value, ...]:
    assert layout is None, "packed weights stay packed"
    ws, index = rest[:weights], rest[weights]
    sums = [x.graph.one("grouped_matmul", x, _matrix(w, x.dtype), index) for w in ws]
    return inline(x.graph, body, [*sums, *rest[weights + 1 :]])


@op(
    "fused_grouped", independent=never, reference=_fused_grouped, traits=[FUSED, CHECKS_DATA, TAKES_PACKED],
    decompose=_decompose_fused_grouped,
)  # fmt: skip
def fused_grouped(
    x: TensorType,
    *rest: TensorType,
    body: Graph,
    weights: int,
    columns: Size,
    layout: WeightLayout | None = None,
) -> TensorType | tuple[TensorType, ...]:
    """`fused_matmul` in which each row of x has its own matrix, as in `grouped_matmul`.

    Weights have one more leading axis; after them comes the index into it of each row.
    """
    _check_weights("fused_grouped", weights, body)
    used = weights if layout is None else 1
    acc = TensorType((x.shape[0], columns), _sums("fused_grouped", x, rest[0], layout))
    return _check_body("fused_grouped", body, (acc,) * weights + tuple(rest[used + 1 :]))


def _residual_norm(x: Any, residual: Any, gamma: Any, beta: Any, *, kind: str, eps: float) -> Any:
    total = x + residual
    norm = layer_norm_array if kind == "layer" else rms_norm_array
    return norm(total, gamma, beta, eps=eps), total


def _decompose_residual_norm(
    x: Value, residual: Value, gamma: Value | None, beta: Value | None, *, kind: str, eps: float
) -> tuple[Value, Value]:
    total = x + residual
    return x.graph.one(f"{kind}_norm", total, gamma, beta, eps=eps), total


@op("residual_norm", independent=by_rows, reference=_residual_norm, traits=[FUSED], decompose=_decompose_residual_norm)
def residual_norm(
    x: TensorType,
    residual: TensorType,
    gamma: TensorType | None = None,
    beta: TensorType | None = None,
    *,
    kind: str,
    eps: float,
) -> tuple[TensorType, TensorType]:
    """x + residual, normalised (`kind` is layer or rms), and the sum itself."""
    check_scale("residual_norm", x, {"gamma": gamma, "beta": beta})
    if x != residual:
        raise ShapeError(f"residual_norm: types differ, {x} and {residual}")
    return x, x
