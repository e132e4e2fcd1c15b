"""Ops that passes make: elementwise regions, matmuls with epilogues, residual norms, packed weights.

A fused op carries what it does in an attribute: `body` is a graph of elementwise ops over inputs `x0, x1, ...` (after
`acc0`, `acc1` for the sums of a matmul). Its reference evaluates exactly that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.dtypes import I16, DType
from rlx.errors import GraphError, ShapeError
from rlx.ir import evaluate
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import FUSED, TAKES_PACKED, op
from rlx.ir.rewrite import inline
from rlx.ops.norm import check_scale, layer_norm_array, rms_norm_array
from rlx.ops.quant import unpacked
from rlx.types import Size, TensorType, broadcast, require_equal


def _check_body(where: str, body: Graph, operands: tuple[TensorType, ...]) -> TensorType | tuple[TensorType, ...]:
    wanted = [n.types[0] for n in body.inputs]
    if wanted != list(operands):
        raise GraphError(f"{where}: body takes {', '.join(map(str, wanted))}, got {', '.join(map(str, operands))}")
    types = tuple(o.type for o in body.outputs)
    return types[0] if len(types) == 1 else types


def _run_body(body: Graph, arrays: list[Any], binding: Mapping[str, int]) -> Any:
    leaves = {n.attrs["name"]: a.astype(n.types[0].dtype.numpy) for n, a in zip(body.inputs, arrays, strict=True)}
    results = evaluate.run(body, leaves, binding)
    return results[0] if len(results) == 1 else tuple(results)


def _region(*xs: Any, body: Graph, binding: Mapping[str, int]) -> Any:
    return _run_body(body, list(xs), binding)


def _region_apart(*xs: Value, body: Graph) -> tuple[Value, ...]:
    return inline(xs[0].graph, body, xs)


@op("region", reference=_region, traits=[FUSED], decompose=_region_apart)
def region(*xs: TensorType, body: Graph) -> TensorType | tuple[TensorType, ...]:
    """Elementwise ops in one kernel: each element is loaded once, computed in registers, stored once."""
    result = _check_body("region", body, xs)
    shapes = {o.type.shape for o in body.outputs}
    if len(shapes) != 1:
        raise ShapeError(f"region: outputs have different shapes, {shapes}")
    return result


def unpack_panels(panels: Any, columns: int, weights: int) -> list[Any]:
    """The matrices that `pack_panels` interleaved."""
    count, k, width = panels.shape
    part = width // weights
    split = panels.reshape(count, k, weights, part).transpose(2, 1, 0, 3).reshape(weights, k, count * part)
    return [w[:, :columns] for w in split]


def pack_array(*ws: Any, width: int) -> Any:
    """[k, n] matrices as panels of `width` columns, each with an equal part of every matrix, padded with zeros."""
    k, n = ws[0].shape
    part = width // len(ws)
    count = -(-n // part)
    padded = [np.pad(w, ((0, 0), (0, count * part - n))).reshape(k, count, part) for w in ws]
    return np.ascontiguousarray(np.stack(padded, axis=2).reshape(k, count, width).transpose(1, 0, 2))


@op("pack_panels", reference=pack_array, traits=[FUSED])
def pack_panels(*ws: TensorType, width: int) -> TensorType:
    """Weights in the order that the matmul kernel reads them: [panels, k, width]."""
    k, n = ws[0].shape
    part = width // len(ws)
    return ws[0].with_shape((n + (part - 1)) // part, k, width)


def interleave_array(*ws: Any, width: int) -> Any:
    """Packed rows [n, blocks] as panels of `width` columns, unit by unit: [panels, blocks, units, width]."""
    n, blocks = ws[0].shape
    part, units = width // len(ws), ws[0].dtype.itemsize // 2
    count = -(-n // part)
    rows = [np.ascontiguousarray(w).view(np.int16).reshape(n, blocks, units) for w in ws]
    padded = [np.pad(r, ((0, count * part - n), (0, 0), (0, 0))).reshape(count, part, blocks, units) for r in rows]
    return np.ascontiguousarray(np.concatenate(padded, axis=1).transpose(0, 2, 3, 1))


def deinterleave_array(panels: Any, storage: DType, columns: int, weights: int) -> list[Any]:
    """The matrices [k, n] in f32 that `interleave_blocks` was given the packed rows of."""
    count, blocks, units, width = panels.shape
    part = width // weights
    rows = np.ascontiguousarray(panels.transpose(0, 3, 1, 2)).reshape(count, weights, part, blocks * units)
    packed = [np.ascontiguousarray(rows[:, i]).reshape(count * part, -1)[:columns] for i in range(weights)]
    return [unpacked(p.view(storage.numpy)).T for p in packed]


@op("interleave_blocks", reference=interleave_array, traits=[FUSED, TAKES_PACKED])
def interleave_blocks(*ws: TensorType, width: int) -> TensorType:
    """Packed weights [n, k] in the order that the matmul kernel unpacks them: [panels, blocks, units, width]."""
    n, blocks = ws[0].array_shape
    part = width // len(ws)
    return TensorType(((n + (part - 1)) // part, blocks, ws[0].dtype.size // 2, width), I16)


def _fused_matmul(
    x: Any, *rest: Any, body: Graph, weights: int, columns: Size, packed: bool, blocks: DType | None,
    binding: Mapping[str, int],
) -> Any:  # fmt: skip
    if blocks is not None:
        matrices, others = deinterleave_array(rest[0], blocks, int(columns), weights), rest[1:]
    elif packed:
        matrices, others = unpack_panels(rest[0], int(columns), weights), rest[1:]
    else:
        matrices, others = list(rest[:weights]), rest[weights:]
    return _run_body(body, [np.matmul(x, w) for w in matrices] + list(others), binding)


def _fused_matmul_apart(x: Value, *rest: Value, body: Graph, weights: int, packed: bool, **_: Any) -> tuple[Value, ...]:
    assert not packed, "panels stay packed"
    return inline(x.graph, body, [*(x @ w for w in rest[:weights]), *rest[weights:]])


@op("fused_matmul", reference=_fused_matmul, traits=[FUSED], decompose=_fused_matmul_apart)
def fused_matmul(
    x: TensorType,
    *rest: TensorType,
    body: Graph,
    weights: int,
    columns: Size,
    packed: bool,
    blocks: DType | None = None,
) -> TensorType | tuple[TensorType, ...]:
    """x times one or two weights, and elementwise work on the sums while they are in registers.

    Operands are x, the weights (one packed tensor, or `weights` matrices), then what the body reads beside the sums.
    `columns` is the width of each product; `blocks` is what the packed tensor holds where that is not plain numbers.
    """
    used = 1 if packed else weights
    matrices = rest[:used]
    k = matrices[0].shape[-2] if blocks is None else matrices[0].shape[1] * blocks.block
    require_equal(x.shape[-1], k, f"fused_matmul: inner sizes differ, {x.shape[-1]} and {k}")
    leading = x.shape[:-2] if packed else broadcast(x.shape[:-2], matrices[0].shape[:-2], where="fused_matmul")
    acc = TensorType((*leading, x.shape[-2], columns), x.dtype)
    return _check_body("fused_matmul", body, (acc,) * weights + tuple(rest[used:]))


def _residual_norm(x: Any, residual: Any, gamma: Any, beta: Any, *, kind: str, eps: float) -> Any:
    total = x + residual
    norm = layer_norm_array if kind == "layer" else rms_norm_array
    return norm(total, gamma, beta, eps=eps), total


def _residual_norm_apart(
    x: Value, residual: Value, gamma: Value | None, beta: Value | None, *, kind: str, eps: float
) -> tuple[Value, Value]:
    total = x + residual
    return x.graph.one(f"{kind}_norm", total, gamma, beta, eps=eps), total


@op("residual_norm", reference=_residual_norm, traits=[FUSED], decompose=_residual_norm_apart)
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
