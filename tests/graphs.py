"""Random graphs for property tests (whole layers are in `layers.py`).

`any_graphs` uses every kind of op, attribute and constant and is never run; `float_graphs` can be evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import rlx
from rlx import Graph, Value
from rlx.dtypes import ALL, DType
from rlx.errors import RlxError
from rlx.ir import registry

Draw = Callable[[st.SearchStrategy[Any]], Any]
Array = np.ndarray[Any, Any]

words = st.text(min_size=1, max_size=8) | st.sampled_from(
    ['a "b"', "x, y", "{", "}) : f32[2]", "  # no", "\\", "return", "%0 ="]
)
dims = st.sampled_from([0, 1, 2, 3, 5, "n", "m", "n + m", "2*n", "min(n, 4)", "(n + 3) // 4", "graph", "return"])
UNARY = [
    d.name
    for d in registry.OPS.values()
    if registry.ELEMENTWISE in d.traits and d.schema.operands == ("x",) and not d.schema.attrs
]
BINARY = [d.name for d in registry.OPS.values() if registry.ELEMENTWISE in d.traits and d.schema.operands == ("a", "b")]
REDUCTIONS = ["sum", "prod", "mean", "max", "min"]


def examples(count: int = 100) -> settings:
    """How often a property is tried; a busy machine may take as long as it needs."""
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def random_bits(draw: Draw, d: DType, shape: tuple[int, ...]) -> Array:
    """Any numbers of a type: NaN with payloads, infinities and subnormals included."""
    count = int(np.prod(shape))
    if d.is_bool:
        bits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return np.array(bits, bool).reshape(shape)
    if d.is_float and draw(st.booleans()):
        special = st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, 1e-45, 0.1, 65504.0])
        numbers = draw(st.lists(special, min_size=count, max_size=count))
        return np.array(numbers, np.float64).astype(d.numpy).reshape(shape)
    raw = draw(st.binary(min_size=count * d.size, max_size=count * d.size))
    return np.frombuffer(raw, d.numpy).reshape(shape)


# -- graphs of anything -----------------------------------------------------------------------------------------------
def _constant(draw: Draw, g: Graph, pick: Callable[[], Value]) -> Any:
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (5, 13), (70,)]))
    return g.constant(random_bits(draw, draw(st.sampled_from(ALL)), shape))


def _unary(draw: Draw, g: Graph, pick: Callable[[], Value]) -> Any:
    return g.apply(draw(st.sampled_from(UNARY)), pick())


def _binary(draw: Draw, g: Graph, pick: Callable[[], Value]) -> Any:
    other = pick() if draw(st.booleans()) else draw(st.sampled_from([2, 0.5, True, -0.0, float("inf")]))
    return g.apply(draw(st.sampled_from(BINARY)), pick(), other)


def _cast(draw: Draw, g: Graph, pick: Callable[[], Value]) -> Any:
    return pick().astype(draw(st.sampled_from(ALL)))


def _view(draw: Draw, g: Graph, pick: Callable[[], Value]) -> Any:
    x = pick()
    match draw(st.integers(0, 6)):
        case 0:
            return x.reshape(-1)
        case 1:
            return x.reshape(1, *x.shape)
        case 2:
            return x.transpose(axes=draw(st.permutations(range(x.rank))))
        case 3:
            return x[..., -1:]
        case 4:
            return x.slice(start=(0,) * x.rank, stop=x.shape, step=(2,) * x.rank)
        case 5:
            return x.expand(shape=("n", *x.shape))
        case _:
            return x.assume_equal(shape=("m", *x.shape[1:]))


def _reduce(draw: Draw, g: Graph, pick: Callable[[], Value]) -> Any:
    axis = draw(st.sampled_from([None, 0, -1, (0, 1), ()]))
    return g.apply(draw(st.sampled_from(REDUCTIONS)), pick(), axis=axis, keepdims=draw(st.booleans()))


def _structured(draw: Draw, g: Graph, pick: Callable[[], Value]) -> Any:
    x = pick()
    number = draw(st.sampled_from([0.0, -0.0, 1e-5, float("nan"), float("-inf"), 3, 0.1]))
    match draw(st.integers(0, 9)):
        case 0:
            return x @ x.mT
        case 1:
            return x.softmax(axis=draw(st.sampled_from([0, -1])))
        case 2:
            return x.topk(k=1)
        case 3:
            return g.concatenate(x, pick(), axis=0)
        case 4:
            return x.pad(low=("n", *[1] * (x.rank - 1)), high=(0,) * x.rank, value=number)
        case 5:
            return x.rms_norm(eps=number)
        case 6:
            return x.gather(np.array([[0, 0]], np.int32), axis=draw(st.sampled_from([0, -1])))
        case 7:
            return g.where(x.equal(x), x, pick())
        case 8:
            kind = draw(st.sampled_from(["none", "causal", "sliding(3)"]))
            q = x.reshape("n", -1, 1, 2)
            return g.attention(q, q, q, mask_kind=kind, softcap=draw(st.none() | st.just(0.5)))
        case _:
            return g.linear(x, x.mT, activation=draw(st.sampled_from([None, "silu"])))


def _body(draw: Draw, x: Value, depth: int) -> Graph:
    body = Graph(draw(st.sampled_from(["body", "a b", "", "%"])))
    y = body.input(draw(words), x.shape, x.dtype)
    if depth:
        y = body.apply("region", y, body=_body(draw, y, depth - 1))
    z = body.apply(draw(st.sampled_from(UNARY)), y)
    return body.set_outputs([z, y] if draw(st.booleans()) and not depth else [z])


def _region(draw: Draw, g: Graph, pick: Callable[[], Value]) -> Any:
    x = pick()
    return g.apply("region", x, body=_body(draw, x, draw(st.integers(0, 2))))


STEPS = [_constant, _unary, _binary, _cast, _view, _reduce, _structured, _region]


@st.composite
def any_graphs(draw: Draw, max_steps: int = 12) -> Graph:
    """A graph of anything; steps that do not type are left out."""
    g = Graph(draw(words), level=draw(st.sampled_from(["mir", "hir"])))
    values: list[Value] = []
    for name in draw(st.lists(words, min_size=1, max_size=3, unique=True)):
        shape = draw(st.lists(dims, max_size=3))
        if draw(st.booleans()):
            shape.append(rlx.dim("n", max=draw(st.integers(1, 99))))
        make = g.param if draw(st.booleans()) else g.input
        values.append(make(name, shape, draw(st.sampled_from(ALL))))

    def pick() -> Value:
        value: Value = draw(st.sampled_from(values))
        return value

    for _ in range(draw(st.integers(0, max_steps))):
        step = draw(st.sampled_from(STEPS))
        try:
            built = step(draw, g, pick)
        except RlxError:
            continue
        values += built if isinstance(built, tuple) else [built]
    if g.level == "mir" and any(registry.get(n.op).level == "hir" for n in g.nodes):
        g.level = "hir"
    return g.set_outputs(draw(st.lists(st.sampled_from(values), max_size=3)))


# -- graphs of floats that can be evaluated ---------------------------------------------------------------------------
SMOOTH = ["tanh", "sigmoid", "silu", "neg", "abs", "relu", "gelu", "gelu_tanh", "sin", "cos", "erf"]
WIDTHS = (3, 4, 8)
ROWS = ("n", 2)


@st.composite
def float_graphs(draw: Draw, dtype: str = "f64") -> Graph:
    """Elementwise ops, products, norms and views of [n, 2, width] tensors, with weights and what is made of them."""
    g = Graph("random")
    values = [g.input(f"x{i}", (*ROWS, draw(st.sampled_from(WIDTHS))), dtype) for i in range(draw(st.integers(1, 2)))]

    def like(x: Value) -> Value:
        value: Value = draw(st.sampled_from([v for v in values if v.shape == x.shape]))
        return value

    def param(*shape: Any) -> Value:
        return g.param(f"w{len(g.params)}", shape, dtype)

    def matrix(rows: Any) -> Value:
        columns = draw(st.sampled_from(WIDTHS))
        match draw(st.integers(0, 3)):
            case 0:
                return param(columns, rows).mT
            case 1:
                return param(rows, columns) * 2.0
            case _:
                return param(rows, columns)

    def vector(x: Value) -> Value:
        """A weight, or numbers that depend on another value, as long as a row."""
        return param(x.shape[-1]) if draw(st.integers(0, 3)) else like(x).sum(axis=(0, 1)) * 0.1

    for _ in range(draw(st.integers(1, 14))):
        x = draw(st.sampled_from(values))
        width = x.shape[-1]
        match draw(st.integers(0, 13)):
            case 0 | 1:
                y = g.apply(draw(st.sampled_from(SMOOTH)), x)
            case 2 | 3:
                y = g.apply(draw(st.sampled_from(["add", "sub", "mul", "maximum"])), x, like(x))
            case 4:
                number = draw(st.sampled_from([0, 1, -0.0, 0.5, 2.0]))
                y = g.apply(draw(st.sampled_from(["add", "sub", "mul"])), x, number)
            case 5 | 6:
                y = x @ matrix(width)
            case 7:
                y = x + vector(x)
            case 8:
                w = draw(st.sampled_from(WIDTHS))
                y = (x @ param(width, w)).silu() * (x @ param(width, w))
            case 9:
                norm = draw(st.sampled_from(["layer_norm", "rms_norm"]))
                y = g.apply(norm, x + like(x), vector(x), eps=1e-3)
            case 10:
                y = x.mT.mT if draw(st.booleans()) else x.reshape("2*n", width).reshape(*ROWS, width)
            case 11:
                y = g.concatenate(x[..., 1:], like(x)[..., :1], axis=-1)
            case 12:
                y = g.where(x > 0.1, x, like(x))
            case _:
                y = (x @ x.mT) @ x
        values.append(y * 0.5 if draw(st.booleans()) else y)
    chosen = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))
    return g.set_outputs([values[-1], *chosen])


def random_leaves(g: Graph, binding: dict[str, int], seed: int = 0) -> dict[str, Array]:
    """Arrays for all inputs and params, of size about 1."""
    rng = np.random.default_rng(seed)
    result = {}
    for node in (*g.inputs, *g.params):
        type_ = node.types[0]
        shape = rlx.types.concrete(type_.shape, binding)
        result[node.attrs["name"]] = rng.uniform(-1, 1, shape).astype(type_.dtype.numpy)
    return result
