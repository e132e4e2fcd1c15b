"""Integer matmuls: floats times a weight become 8-bit integers times 8-bit integers, and scales.

A weight is i8 with a scale for each column, found when weights are bound. What it is multiplied by is u8 with a scale
and an offset for each row, found in every run, so that a row's numbers depend on that row alone; with an offset,
numbers that are mostly of one sign, such as those after GELU, use all 255 steps. Columns of a norm that reach far would
leave few steps to the others, so before they are rounded they hand some of their size to the weight (SmoothQuant, arXiv
2211.10438, equation 4); how far they reach is known from the norm's own scale. Everything between matmuls stays f32.
MIR in, MIR out. Needs matmuls of one type (`legalize`), and those that share their left side merged if they are to be.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlx.dtypes import F32, I8
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.mir.weights import is_matrix, sides, weight_nodes
from rlx.mir.weights_to_front import weights_to_front
from rlx.ops.quant import MIN_SCALE

NORMS = ("layer_norm", "rms_norm")
LARGEST = 127  # of a weight's integers, in magnitude; -128 is not used
DEVIATIONS = 3.5  # that a normalised number is from the mean, at most as a rule
LEAST_REACH = 1e-5
LEAST = 64  # rows and columns of a weight: below, quantising costs more than integers save


@dataclass(frozen=True)
class _Rows:
    """The left side of matmuls as integers, and for each row their scale and offset. `factor` [k, 1] is what weights
    are multiplied by first, if anything."""

    integers: Value
    scale: Value
    offset: Value
    factor: Value | None


@dataclass(frozen=True)
class _Columns:
    """A weight [k, n]: its integers, their scales [n], and the sum [n] of each column as integers and scale give it."""

    integers: Value
    scale: Value
    total: Value


def int8_matmuls(graph: Graph) -> Graph:
    """matmul(x, w) -> integer_matmul(rows of x, columns of w) · scales of both + offsets of rows · sums of columns."""
    graph = weights_to_front(graph)
    weights, packed = weight_nodes(graph), _packed(graph)
    readers: dict[Value, list[Value]] = {}  # left side -> the weights it is multiplied by
    chosen = [node for node in graph.nodes if _pays(node, weights, packed)]
    for node in chosen:
        x, w = sides(node)
        readers.setdefault(x, []).append(w)
    taken = set(chosen)
    rows: dict[Value, _Rows] = {}  # what several matmuls read is quantised once
    columns: dict[tuple[Value, Value | None], _Columns] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node not in taken:
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
    return x.dtype is w.dtype is F32 and all(isinstance(size, int) and size >= LEAST for size in w.shape)


def _packed(graph: Graph) -> set[Node]:
    """What is made of weights that are quantised already."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "dequantise" or any(o is not None and o.node in found for o in node.operands):
            found.add(node)
    return found


def _rows(rewriter: Rewriter, like: Node, x: Value, matrices: Sequence[Value], weights: set[Node]) -> _Rows:
    make, norm, value = rewriter.one, x.node, rewriter[x]
    gamma = norm.operands[1] if norm.op in NORMS else None
    if gamma is None or any(o is not None and o.node not in weights for o in norm.operands[1:]):
        integers, scale, offset = rewriter.make(like, "quantise_rows", value)
        return _Rows(integers, scale, offset, None)
    reach = make(like, "mul", make(like, "abs", rewriter[gamma]), _number(rewriter, like, DEVIATIONS))
    if norm.operands[2] is not None:
        reach = make(like, "add", reach, make(like, "abs", rewriter[norm.operands[2]]))
    largest = [make(like, "max", make(like, "abs", w), axis=(1,)) for w in matrices]
    against = functools.reduce(lambda a, b: make(like, "maximum", a, b), largest)
    least = _number(rewriter, like, LEAST_REACH)
    reach, against = (make(like, "maximum", size, least) for size in (reach, against))
    factor = make(like, "sqrt", make(like, "div", reach, against))
    even = make(like, "mul", value, make(like, "div", _number(rewriter, like, 1.0), factor))
    integers, scale, offset = rewriter.make(like, "quantise_rows", even)
    return _Rows(integers, scale, offset, make(like, "reshape", factor, shape=(x.shape[-1], 1)))


def _columns(rewriter: Rewriter, like: Node, w: Value, factor: Value | None) -> _Columns:
    make = rewriter.one
    w = w if factor is None else make(like, "mul", w, factor)
    step = make(like, "div", make(like, "max", make(like, "abs", w), axis=(0,)), _number(rewriter, like, LARGEST))
    scale = make(like, "maximum", step, _number(rewriter, like, MIN_SCALE))
    integers = make(like, "quantise", w, scale, axis=1, dtype=I8)
    total = make(like, "sum", make(like, "cast", integers, dtype=F32), axis=(0,))
    return _Columns(integers, scale, make(like, "mul", total, scale))


def _number(rewriter: Rewriter, like: Node, value: float) -> Value:
    return rewriter.constant(like, np.array(value, np.float32))
