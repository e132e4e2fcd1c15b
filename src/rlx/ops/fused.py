"""Ops that passes make: elementwise regions, matmuls with epilogues, residual norms, packed weights.

A fused op carries what it does in an attribute: `body` is a graph of elementwise ops over inputs `x0, x1, ...` (after
`acc0`, `acc1` for the sums of a matmul). Its reference evaluates exactly that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.dtypes import F32, I8, I16, I32, U8, DType
from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir import evaluate
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import CHECKS_DATA, FUSED, TAKES_PACKED, op
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


def _check_weights(where: str, weights: int, body: Graph) -> None:
    """Refuse more weights than the body reads sums of, before as many types are made."""
    if not 0 < weights <= len(body.inputs):
        hint = "the first inputs of the body are the sums, one per weight"
        raise GraphError(f"{where}: {weights} weights, and a body of {len(body.inputs)} inputs", hint=hint)


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


def first_word(storage: DType) -> int:
    """The byte of a block where words begin."""
    return storage.unit * sum(unit == i for i, unit in enumerate(apart_of(storage)))


def has_panels(storage: DType) -> bool:
    """Whether blocks of a type can be interleaved."""
    return (storage.size - storage.unit * len(apart_of(storage))) % 4 == 0


@dataclass(frozen=True, slots=True)
class Bits:
    """Some bits of words of a block, moved to where a word of a panel has them: `word >> right & mask`."""

    word: int
    right: int = 0  # below zero: to the left
    mask: int = (1 << 32) - 1

    def moved(self, word: Any) -> Any:
        return (word >> self.right if self.right >= 0 else word << -self.right) & self.mask

    def back(self, word: Any) -> Any:
        kept = word & self.mask
        return kept << self.right if self.right >= 0 else kept >> -self.right


@dataclass(frozen=True, slots=True)
class WordRun:
    """Words of a panel, each put together from `bits`: the first of them from these words of a block, and so on."""

    count: int
    bits: tuple[Bits, ...]


def _six_bit_runs() -> list[WordRun]:
    """Blocks of q6_k: scales, then three words for each four, of which the codes of the fourth fill the top bits.

    A file has the low halves of codes in one place and the high bits in another, and a code of any of the four planes
    takes two shifts. Here three of four codes take a mask alone, and memory is read in order.
    """
    low, pair, top = (each * 0x01010101 for each in (0x0F, 0x30, 0xC0))

    def where(run: int) -> tuple[int, int, int]:
        """The words and the plane of a run of 16 codes: where its low halves begin, and its pairs."""
        half, plane, first = run // 8, run // 2 % 4, 4 * (run % 2)
        return 16 * half + 8 * (plane % 2) + first, 32 + 8 * half + first, plane

    found = [WordRun(4, (Bits(48),))]
    for group in range(4):
        halves, pairs, plane = where(4 * group + 3)
        nibble = 4 * (plane // 2)
        fourth = [Bits(halves, nibble - 6, top), Bits(halves, nibble - 4, top), Bits(pairs, 2 * plane - 6, top)]
        for i, more in enumerate(fourth):
            halves, pairs, plane = where(4 * group + i)
            code = Bits(halves, 4 * (plane // 2), low), Bits(pairs, 2 * plane - 4, pair)
            found.append(WordRun(4, (*code, more)))
    return found


SIX_BIT_RUNS = _six_bit_runs()


def word_runs(storage: DType, whole: bool) -> list[WordRun]:
    """How the 32-bit words of a block lie in panels: as in files, or as kernels of whole numbers take them."""
    if whole and storage.name == "q6_k":
        return SIX_BIT_RUNS
    return [WordRun((storage.size - storage.unit * len(apart_of(storage))) // 4, (Bits(0),))]


def _word_units(storage: DType) -> list[int]:
    """The units of a block that are words."""
    apart = apart_of(storage)
    return [u for u in range(storage.size // storage.unit) if u not in apart]


def _unit_type(storage: DType) -> Any:
    return np.int16 if storage.unit == 2 else np.uint8


def interleave_array(*ws: Any, width: int, lanes: int, whole: bool) -> Any:
    """Packed rows [..., n, blocks] as panels of `width` columns: [..., panels, blocks, vectors, units]."""
    if ws[0].ndim == 3:
        return np.stack([interleave_array(*w, width=width, lanes=lanes, whole=whole) for w in zip(*ws, strict=True)])
    n, blocks = ws[0].shape
    part, storage = width // len(ws), dtype_of(ws[0].dtype)
    count, units = -(-n // part), storage.size // storage.unit
    apart, rest = apart_of(storage), _word_units(storage)
    rows = [np.ascontiguousarray(w).view(_unit_type(storage)).reshape(n, blocks, units) for w in ws]
    padded = [np.pad(r, ((0, count * part - n), (0, 0), (0, 0))).reshape(count, part, blocks, units) for r in rows]
    columns = np.concatenate(padded, axis=1).reshape(count, width // lanes, lanes, blocks, units)
    words = np.ascontiguousarray(columns[..., rest]).view(np.uint32)
    made = np.zeros_like(words)
    at = 0
    for run in word_runs(storage, whole):
        for bits in run.bits:
            made[..., at : at + run.count] |= bits.moved(words[..., bits.word : bits.word + run.count])
        at += run.count
    units_of_words = made.view(_unit_type(storage)).reshape(*columns.shape[:-1], -1, 4 // storage.unit)
    split = [columns[..., apart], units_of_words]
    ordered = [p.transpose(0, 3, 1, 4, 2, *range(5, p.ndim)).reshape(count, blocks, width // lanes, -1) for p in split]
    return np.ascontiguousarray(np.concatenate(ordered, axis=-1)).view(np.int16)


def deinterleave_array(panels: Any, storage: DType, columns: int, weights: int, whole: bool) -> list[Any]:
    """The matrices [k, n] in f32 that `interleave_blocks` was given the packed rows of."""
    panels = np.ascontiguousarray(panels).view(_unit_type(storage))
    count, blocks, vectors, size = panels.shape
    units = storage.size // storage.unit
    lanes = size // units
    apart, rest = apart_of(storage), _word_units(storage)
    rows = np.empty((count, vectors, lanes, blocks, units), panels.dtype)
    cut = len(apart) * lanes
    halves = panels[..., :cut].reshape(count, blocks, vectors, -1, lanes)
    rows[..., apart] = halves.transpose(0, 2, 4, 1, 3)
    pairs = panels[..., cut:].reshape(count, blocks, vectors, -1, lanes, 4 // storage.unit).transpose(0, 2, 4, 1, 3, 5)
    made = np.ascontiguousarray(pairs.reshape(count, vectors, lanes, blocks, -1)).view(np.uint32)
    words = np.zeros_like(made)
    at = 0
    for run in word_runs(storage, whole):
        for bits in run.bits:
            words[..., bits.word : bits.word + run.count] |= bits.back(made[..., at : at + run.count])
        at += run.count
    rows[..., rest] = words.view(panels.dtype)
    part = vectors * lanes // weights
    split = rows.reshape(count, weights, part, blocks * units)
    packed = [np.ascontiguousarray(split[:, i]).reshape(count * part, -1)[:columns] for i in range(weights)]
    return [unpacked(p.view(storage.numpy)).T for p in packed]


@op("interleave_blocks", reference=interleave_array, traits=[FUSED, TAKES_PACKED])
def interleave_blocks(*ws: TensorType, width: int, lanes: int, whole: bool) -> TensorType:
    """Packed weights [..., n, k] as matmul kernels read them: [..., panels, blocks, vectors, 16-bit units].

    A vector is `lanes` columns. Of each block come the f16 numbers (of one with an odd number of bytes, its scale), of
    all columns, then the rest by 32-bit words: as in files, or, with `whole`, as kernels of whole numbers take them.
    """
    *groups, n, blocks = ws[0].array_shape
    part, units = width // len(ws), ws[0].dtype.size * lanes // 2
    return TensorType((*groups, (n + (part - 1)) // part, blocks, width // lanes, units), I16)


def _products(x: Any, ws: Sequence[Any], weights: int, columns: int, packed: bool, blocks: DType | None) -> list[Any]:
    """x times each weight."""
    if packed and blocks is None and x.dtype == np.uint8:
        numbers = _unpack_bytes(ws[0], columns).astype(np.float64)  # exact: sums are far below 2^53
        return [np.matmul(x.astype(np.float64), numbers).astype(np.int32)]
    if blocks is not None and not packed:
        ws = [unpacked(w).swapaxes(-1, -2) for w in ws]
    elif blocks is not None:
        whole = x.dtype == np.int32
        ws = deinterleave_array(ws[0], blocks, columns, weights, whole)
        x = numbers_of(x, blocks.block) if whole else x
    elif packed:
        ws = unpack_panels(ws[0], columns, weights)
    return [np.matmul(x, w.astype(x.dtype, copy=False)) for w in ws]


def _fused_matmul(
    x: Any, *rest: Any, body: Graph, weights: int, columns: Size, packed: bool, blocks: DType | None,
    binding: Mapping[str, int],
) -> Any:  # fmt: skip
    used = 1 if packed else weights
    sums = _products(x, rest[:used], weights, int(columns), packed, blocks)
    return _run_body(body, [*sums, *rest[used:]], binding)


def _fused_matmul_apart(x: Value, *rest: Value, body: Graph, weights: int, packed: bool, **_: Any) -> tuple[Value, ...]:
    assert not packed, "panels stay packed"
    return inline(x.graph, body, [*(x @ _matrix(w, x.dtype) for w in rest[:weights]), *rest[weights:]])


def _matrix(weight: Value, wide: DType) -> Value:
    """The numbers [..., k, n] of a weight; quantised ones are blocks of rows [..., n, k]."""
    if weight.dtype.is_packed:
        rows: Value = weight.dequantise()
        return rows.mT
    return weight if weight.dtype is wide else weight.cast(wide)


def _is_narrower(stored: DType, computed: DType) -> bool:
    """Whether weights are 16-bit floats that are computed with in a wider type."""
    return stored.is_float and computed.is_float and stored.size == 2 < computed.size


def _sums(where: str, x: TensorType, matrix: TensorType, packed: bool, blocks: DType | None) -> DType:
    """The type of sums over the inner sizes, which must be equal."""
    k, sums = matrix.shape[-2], x.dtype
    if blocks is not None and not packed:
        if matrix.dtype is not blocks or x.dtype is not F32:
            raise DTypeError(f"{where}: takes f32 and {blocks}, found {x.dtype} and {matrix.dtype}")
        k = matrix.shape[-1]
    elif blocks is not None:
        words = x.dtype is I32  # of 8-bit activations
        k, sums = matrix.shape[-3] * (activations_for(blocks.block).words if words else blocks.block), F32
    elif x.dtype is U8:
        k, sums = k * FOUR, I32
    elif matrix.dtype is not x.dtype and not _is_narrower(matrix.dtype, x.dtype):
        hint = "weights are stored as x is, or as 16-bit floats"
        raise DTypeError(f"{where}: x is {x.dtype}, the weight {matrix.dtype}", hint=hint)
    require_equal(x.shape[-1], k, f"{where}: inner sizes differ, {x.shape[-1]} and {k}")
    return sums


@op("fused_matmul", reference=_fused_matmul, traits=[FUSED, TAKES_PACKED], decompose=_fused_matmul_apart)
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
    then x may be what `activation_blocks` makes. With `blocks` and not `packed`, the matrices are rows [n, k] of such
    blocks, as files have them. Plain weights may be 16-bit floats, which are widened to the type of x. Bytes times
    bytes (`pack_bytes`) are summed up as i32.
    """
    _check_weights("fused_matmul", weights, body)
    used = 1 if packed else weights
    matrices = rest[:used]
    sums = _sums("fused_matmul", x, matrices[0], packed, blocks)
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
    sums = [x.graph.one("grouped_matmul", x, _matrix(w, x.dtype), index) for w in ws]
    return inline(x.graph, body, [*sums, *rest[weights + 1 :]])


@op(
    "fused_grouped", reference=_fused_grouped, traits=[FUSED, CHECKS_DATA, TAKES_PACKED],
    decompose=_fused_grouped_apart,
)  # fmt: skip
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
    _check_weights("fused_grouped", weights, body)
    used = 1 if packed else weights
    acc = TensorType((x.shape[0], columns), _sums("fused_grouped", x, rest[0], packed, blocks))
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
