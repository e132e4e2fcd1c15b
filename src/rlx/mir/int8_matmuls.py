"""Int8 matmuls: a float matmul by a weight becomes an int8 x int8 matmul and a rescale.

Weights are i8 with a scale per column, computed when weights are bound. Activations are u8 with a scale and an offset
per row, computed in every run, so a row's result depends on that row alone; thanks to the offset, values of mostly one
sign, such as those after GELU, use all 255 steps. Outlier columns of a norm would leave few steps to the others, so
part of their magnitude is moved into the weight before rounding (SmoothQuant, arXiv 2211.10438, equation 4); the
magnitude is estimated from the norm's own scale. Everything between matmuls stays f32.
MIR in, MIR out. Needs operands of one type (`legalize`); matmuls that share their left operand must be merged before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from rlx.dtypes import F32, I8
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.mir.weight_only_values import is_matrix, sides, weight_nodes
from rlx.mir.weights_to_front import weights_to_front
from rlx.ops.quant import MIN_SCALE

NORMS = ("layer_norm", "rms_norm")
MAX_INT8 = 127  # largest magnitude of a quantised weight; -128 is not used
DEVIATIONS = 3.5  # assumed largest magnitude of a normalised value, in standard deviations
MIN_MAGNITUDE = 1e-5
MIN_SIZE = 64  # rows and columns of a weight: below, quantising costs more than integer arithmetic saves


@dataclass(frozen=True)
class _Rows:
    """The left operand of matmuls as integers, with a scale and an offset per row.

    `factor` [k, 1] is the smoothing factor that weights are multiplied by first, if any.
    """

    integers: Value
    scale: Value
    offset: Value
    factor: Value | None


@dataclass(frozen=True)
class _Columns:
    """A weight [k, n] as integers, with a scale [n] per column and the sum [n] of each dequantised column."""

    integers: Value
    scale: Value
    total: Value


def int8_matmuls(graph: Graph) -> Graph:
    """matmul(x, w) -> integer_matmul(rows of x, columns of w) · scales of both + offsets of rows · sums of columns."""
    graph = weights_to_front(graph)
    weights, packed = weight_nodes(graph), _packed(graph)
    readers: dict[Value, list[Value]] = {}  # left operand -> the weights it is multiplied by
    matmuls = [node for node in graph.nodes if _pays(node, weights, packed)]
    for node in matmuls:
        x, w = sides(node)
        readers.setdefault(x, []).append(w)
    quantised = set(matmuls)
    rows: dict[Value, _Rows] = {}  # operands of several matmuls are quantised once
    columns: dict[tuple[Value, Value | None], _Columns] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node not in quantised:
            return None
        x, w = sides(node)
        if x not in rows:
            rows[x] = _rows(rewriter, node, x, [rewriter[v] for v in readers[x]], weights)
        left = rows[x]
        if (w, left.factor) not in columns:
            columns[w, left.factor] = _columns(rewriter, node, rewriter[w], left.factor)
        right = columns[w, left.factor]
        sums = rewriter.one(node, "integer_matmul", left.integers, right.integers)
        scaled = rewriter.one(node, "mul", rewriter.one(node, "cast", sums, dtype=F32), left.scale)
        scaled = rewriter.one(node, "mul", scaled, right.scale)
        return rewriter.one(node, "add", scaled, rewriter.one(node, "mul", left.offset, right.total))

    return rebuild(graph, visit, made_by="int8_matmuls")


def _pays(node: Node, weights: set[Node], packed: set[Node]) -> bool:
    if node.op != "matmul" or node.types[0].dtype is not F32:
        return False
    x, w = sides(node)
    if x.node in weights or not is_matrix(w, weights) or w.node in packed:
        return False
    return x.dtype is w.dtype is F32 and all(isinstance(size, int) and size >= MIN_SIZE for size in w.shape)


def _packed(graph: Graph) -> set[Node]:
    """Return the nodes computed from weights that are quantised already."""
    packed: set[Node] = set()
    for node in graph.nodes:
        if node.op == "dequantise" or any(o is not None and o.node in packed for o in node.operands):
            packed.add(node)
    return packed


def _rows(rewriter: Rewriter, like: Node, x: Value, matrices: Sequence[Value], weights: set[Node]) -> _Rows:
    make, norm, value = rewriter.one, x.node, rewriter[x]
    gamma = norm.operands[1] if norm.op in NORMS else None
    if gamma is None or any(o is not None and o.node not in weights for o in norm.operands[1:]):
        integers, scale, offset = rewriter.make(like, "quantise_rows", value)
        return _Rows(integers, scale, offset, None)
    magnitude = make(like, "mul", make(like, "abs", rewriter[gamma]), _number(rewriter, like, DEVIATIONS))
    if norm.operands[2] is not None:
        magnitude = make(like, "add", magnitude, make(like, "abs", rewriter[norm.operands[2]]))
    largest = [make(like, "max", make(like, "abs", w), axis=(1,)) for w in matrices]
    weight_magnitude = functools.reduce(lambda a, b: make(like, "maximum", a, b), largest)
    floor = _number(rewriter, like, MIN_MAGNITUDE)
    magnitude, weight_magnitude = (make(like, "maximum", size, floor) for size in (magnitude, weight_magnitude))
    factor = make(like, "sqrt", make(like, "div", magnitude, weight_magnitude))
    smoothed = make(like, "mul", value, make(like, "div", _number(rewriter, like, 1.0), factor))
    integers, scale, offset = rewriter.make(like, "quantise_rows", smoothed)
    return _Rows(integers, scale, offset, make(like, "reshape", factor, shape=(x.shape[-1], 1)))


def _columns(rewriter: Rewriter, like: Node, w: Value, factor: Value | None) -> _Columns:
    make = rewriter.one
    w = w if factor is None else make(like, "mul", w, factor)
    step = make(like, "div", make(like, "max", make(like, "abs", w), axis=(0,)), _number(rewriter, like, MAX_INT8))
    scale = make(like, "maximum", step, _number(rewriter, like, MIN_SCALE))
    integers = make(like, "quantise", w, scale, axis=1, dtype=I8)
    total = make(like, "sum", make(like, "cast", integers, dtype=F32), axis=(0,))
    return _Columns(integers, scale, make(like, "mul", total, scale))


def _number(rewriter: Rewriter, like: Node, value: float) -> Value:
    return rewriter.constant(like, np.array(value, np.float32))
