"""Ops that passes make: elementwise regions, matmuls with epilogues, residual norms, packed weights.

A fused op carries what it does in an attribute: `body` is a graph of elementwise ops over inputs `x0, x1, ...` (after
`acc0`, `acc1` for the sums of a matmul). Its reference evaluates exactly that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.dtypes import F32, I8, I16, I32, U8, DType
from rlx.dtypes import dtype as dtype_of
from rlx.errors import GraphError, ShapeError
from rlx.ir import evaluate
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import FUSED, TAKES_PACKED, op
from rlx.ir.rewrite import inline
from rlx.ops.activations import activations_for, numbers_of
from rlx.ops.grouped import check_groups
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
    """[..., k, n] matrices as panels of `width` columns, each an equal part of every matrix, padded with zeros."""
    if ws[0].ndim == 3:
        return np.stack([pack_array(*each, width=width) for each in zip(*ws, strict=True)])
    k, n = ws[0].shape
    part = width // len(ws)
    count = -(-n // part)
    padded = [np.pad(w, ((0, 0), (0, count * part - n))).reshape(k, count, part) for w in ws]
    return np.ascontiguousarray(np.stack(padded, axis=2).reshape(k, count, width).transpose(1, 0, 2))


@op("pack_panels", reference=pack_array, traits=[FUSED])
def pack_panels(*ws: TensorType, width: int) -> TensorType:
    """Weights [..., k, n] in the order that the matmul kernel reads them: [..., panels, k, width]."""
    *groups, k, n = ws[0].shape
    part = width // len(ws)
    return ws[0].with_shape(*groups, (n + (part - 1)) // part, k, width)


FOUR = 4  # bytes of a word, which one instruction multiplies and adds up


def _pack_bytes(w: Any, *, width: int) -> Any:
    panels = pack_array(w, width=width)
    count, k, _ = panels.shape
    words = panels.reshape(count, k // FOUR, FOUR, width).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(words).view(np.int32)[..., 0]


@op("pack_bytes", reference=_pack_bytes, traits=[FUSED])
def pack_bytes(w: TensorType, *, width: int) -> TensorType:
    """Weights of 8 bits in panels of words, each with four numbers of a column: [panels, k / 4, width]."""
    k, n = w.shape
    assert w.dtype is I8 and isinstance(k, int) and k % FOUR == 0, "legal before this op is made"
    return TensorType(((n + (width - 1)) // width, k // FOUR, width), I32)


def _unpack_bytes(panels: Any, columns: int) -> Any:
    count, words, width = panels.shape
    numbers = np.ascontiguousarray(panels).view(np.int8).reshape(count, words, width, FOUR)
    return unpack_panels(numbers.transpose(0, 1, 3, 2).reshape(count, words * FOUR, width), columns, 1)[0]


def apart_of(storage: DType) -> list[int]:
    """The units of a block that panels keep apart: its f16 numbers, if all the rest is 32-bit words then.

    In a block of an odd number of bytes, whose units are bytes, that is the one that is the scale.
    """
    fields: Mapping[str, Any] = storage.numpy.fields or {}
    alone = np.float16 if storage.unit == 2 else np.uint8
    found = [offset // storage.unit for base, offset, *_ in fields.values() if base == alone]
    return found if (storage.size - storage.unit * len(found)) % 4 == 0 else []


def has_panels(storage: DType) -> bool:
    """Whether blocks of a type can be interleaved."""
    return (storage.size - storage.unit * len(apart_of(storage))) % 4 == 0


# Runs of words (first, count) in the order that kernels of whole numbers take them, where that is not the order of
# files: memory is fetched ahead only where it is read in order. Codes of q6_k have their low bits in two runs of words
# and their high bits in a third one.
WORD_ORDER = {
    "q6_k": [(48, 4)]
    + [
        (first, 4)
        for h in range(2)
        for a in range(2)
        for first in (32 + 8 * h + 4 * a, 16 * h + 4 * a, 16 * h + 8 + 4 * a)
    ]
}


def word_runs(storage: DType, whole: bool) -> list[tuple[int, int]]:
    """The 32-bit words of a block as panels have them, as runs of (first, count)."""
    natural = [(0, (storage.size - storage.unit * len(apart_of(storage))) // 4)]
    return WORD_ORDER.get(storage.name, natural) if whole else natural


def _units_of_words(storage: DType, whole: bool) -> list[int]:
    """The units of the words of a block, as panels have them."""
    apart, many = apart_of(storage), 4 // storage.unit
    natural = [u for u in range(storage.size // storage.unit) if u not in apart]
    words = [w for first, count in word_runs(storage, whole) for w in range(first, first + count)]
    return [natural[many * w + i] for w in words for i in range(many)]


def _unit_type(storage: DType) -> Any:
    return np.int16 if storage.unit == 2 else np.uint8


def interleave_array(*ws: Any, width: int, lanes: int, whole: bool) -> Any:
    """Packed rows [..., n, blocks] as panels of `width` columns: [..., panels, vectors, blocks, units]."""
    if ws[0].ndim == 3:
        return np.stack([interleave_array(*w, width=width, lanes=lanes, whole=whole) for w in zip(*ws, strict=True)])
    n, blocks = ws[0].shape
    part, storage = width // len(ws), dtype_of(ws[0].dtype)
    count, units = -(-n // part), storage.size // storage.unit
    apart, words = apart_of(storage), _units_of_words(storage, whole)
    rows = [np.ascontiguousarray(w).view(_unit_type(storage)).reshape(n, blocks, units) for w in ws]
    padded = [np.pad(r, ((0, count * part - n), (0, 0), (0, 0))).reshape(count, part, blocks, units) for r in rows]
    columns = np.concatenate(padded, axis=1).reshape(count, width // lanes, lanes, blocks, units)
    split = [columns[..., apart], columns[..., words].reshape(*columns.shape[:-1], -1, 4 // storage.unit)]
    ordered = [np.moveaxis(part, 2, 4).reshape(count, width // lanes, blocks, -1) for part in split]
    return np.ascontiguousarray(np.concatenate(ordered, axis=-1)).view(np.int16)


def deinterleave_array(panels: Any, storage: DType, columns: int, weights: int, whole: bool) -> list[Any]:
    """The matrices [k, n] in f32 that `interleave_blocks` was given the packed rows of."""
    panels = np.ascontiguousarray(panels).view(_unit_type(storage))
    count, vectors, blocks, size = panels.shape
    units = storage.size // storage.unit
    lanes = size // units
    apart, words = apart_of(storage), _units_of_words(storage, whole)
    rows = np.empty((count, vectors, lanes, blocks, units), panels.dtype)
    cut = len(apart) * lanes
    rows[..., apart] = np.moveaxis(panels[..., :cut].reshape(count, vectors, blocks, -1, lanes), 4, 2)
    pairs = np.moveaxis(panels[..., cut:].reshape(count, vectors, blocks, -1, lanes, 4 // storage.unit), 4, 2)
    rows[..., words] = pairs.reshape(count, vectors, lanes, blocks, -1)
    part = vectors * lanes // weights
    split = rows.reshape(count, weights, part, blocks * units)
    packed = [np.ascontiguousarray(split[:, i]).reshape(count * part, -1)[:columns] for i in range(weights)]
    return [unpacked(p.view(storage.numpy)).T for p in packed]


@op("interleave_blocks", reference=interleave_array, traits=[FUSED, TAKES_PACKED])
def interleave_blocks(*ws: TensorType, width: int, lanes: int, whole: bool) -> TensorType:
    """Packed weights [..., n, k] as matmul kernels read them: [..., panels, vectors, blocks, 16-bit units].

    A vector is `lanes` columns. Of each block come the f16 numbers (of one with an odd number of bytes, its scale), of
    all columns, then the rest by 32-bit words: in the order of files, or, with `whole`, as kernels of whole numbers
    take them.
    """
    *groups, n, blocks = ws[0].array_shape
    part, units = width // len(ws), ws[0].dtype.size * lanes // 2
    return TensorType((*groups, (n + (part - 1)) // part, width // lanes, blocks, units), I16)


def _products(x: Any, ws: Sequence[Any], weights: int, columns: int, packed: bool, blocks: DType | None) -> list[Any]:
    """x times each weight."""
    if packed and blocks is None and x.dtype == np.uint8:
        numbers = _unpack_bytes(ws[0], columns).astype(np.float64)  # exact: sums are far below 2^53
        return [np.matmul(x.astype(np.float64), numbers).astype(np.int32)]
    if blocks is not None:
        whole = x.dtype == np.int32
        ws = deinterleave_array(ws[0], blocks, columns, weights, whole)
        x = numbers_of(x, blocks.block) if whole else x
    elif packed:
        ws = unpack_panels(ws[0], columns, weights)
    return [np.matmul(x, w) for w in ws]


def _fused_matmul(
    x: Any, *rest: Any, body: Graph, weights: int, columns: Size, packed: bool, blocks: DType | None,
    binding: Mapping[str, int],
) -> Any:  # fmt: skip
    used = 1 if packed else weights
    sums = _products(x, rest[:used], weights, int(columns), packed, blocks)
    return _run_body(body, [*sums, *rest[used:]], binding)


def _fused_matmul_apart(x: Value, *rest: Value, body: Graph, weights: int, packed: bool, **_: Any) -> tuple[Value, ...]:
    assert not packed, "panels stay packed"
    return inline(x.graph, body, [*(x @ w for w in rest[:weights]), *rest[weights:]])


def _sums(where: str, x: TensorType, matrix: TensorType, blocks: DType | None) -> DType:
    """The type of sums over the inner sizes, which must be equal."""
    k, sums = matrix.shape[-2], x.dtype
    if blocks is not None:
        words = x.dtype is I32  # of 8-bit activations
        k, sums = k * (activations_for(blocks.block).words if words else blocks.block), F32
    elif x.dtype is U8:
        k, sums = k * FOUR, I32
    require_equal(x.shape[-1], k, f"{where}: inner sizes differ, {x.shape[-1]} and {k}")
    return sums


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
    `columns` is the width of each product; `blocks` is what the packed tensor holds where that is not plain numbers:
    then x may be what `activation_blocks` makes. Bytes times bytes (`pack_bytes`) are summed up as i32.
    """
    used = 1 if packed else weights
    matrices = rest[:used]
    sums = _sums("fused_matmul", x, matrices[0], blocks)
    leading = x.shape[:-2] if packed else broadcast(x.shape[:-2], matrices[0].shape[:-2], where="fused_matmul")
    acc = TensorType((*leading, x.shape[-2], columns), sums)
    return _check_body("fused_matmul", body, (acc,) * weights + tuple(rest[used:]))


def _fused_grouped(
    x: Any, *rest: Any, body: Graph, weights: int, columns: Size, packed: bool, blocks: DType | None,
    binding: Mapping[str, int],
) -> Any:  # fmt: skip
    used = 1 if packed else weights
    ws, index = rest[:used], rest[used]
    check_groups("fused_grouped", index, ws[0].shape[0])
    sums = np.empty((weights, x.shape[0], int(columns)), x.dtype if blocks is None else np.float32)
    for group in np.unique(index):
        mine = [w[group] for w in ws]
        sums[:, index == group] = _products(x[index == group], mine, weights, int(columns), packed, blocks)
    return _run_body(body, [*sums, *rest[used + 1 :]], binding)


def _fused_grouped_apart(
    x: Value, *rest: Value, body: Graph, weights: int, packed: bool, **_: Any
) -> tuple[Value, ...]:
    assert not packed, "panels stay packed"
    ws, index = rest[:weights], rest[weights]
    sums = [x.graph.one("grouped_matmul", x, w, index) for w in ws]
    return inline(x.graph, body, [*sums, *rest[weights + 1 :]])


@op("fused_grouped", reference=_fused_grouped, traits=[FUSED], decompose=_fused_grouped_apart)
def fused_grouped(
    x: TensorType,
    *rest: TensorType,
    body: Graph,
    weights: int,
    columns: Size,
    packed: bool,
    blocks: DType | None = None,
) -> TensorType | tuple[TensorType, ...]:
    """`fused_matmul` in which each row of x has its own matrix, as in `grouped_matmul`.

    Weights have one more axis in front, and after them comes the index into it of each row.
    """
    used = 1 if packed else weights
    acc = TensorType((x.shape[0], columns), _sums("fused_grouped", x, rest[0], blocks))
    return _check_body("fused_grouped", body, (acc,) * weights + tuple(rest[used + 1 :]))


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
