"""Functions of arrays, and NumPy's own, on values of graphs that are built by hand: they build in that graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special  # type: ignore[import-untyped]

import rlx
from rlx.errors import DTypeError, GraphError, RlxError
from rlx.flow.state import FlowValue
from rlx.functional.operands import function_of
from rlx.ir import registry

f32 = np.float32
rng = np.random.default_rng(6)
V, W = (rng.uniform(0.1, 2, (3, 4)).astype(f32) for _ in range(2))
Function = Callable[[Any, Any], Any]


def built(function: Function) -> np.ndarray[Any, Any]:
    """What a graph gives that the function has built out of its inputs v and w."""
    g = rlx.Graph("by_hand")
    value = function(g.input("v", V.shape), g.input("w", W.shape))
    assert isinstance(value, rlx.Value) and value.graph is g
    assert [n.attrs["name"] for n in g.inputs] == ["v", "w"]  # nothing else is asked for
    (result,) = rlx.compile(g.set_outputs([value])).run({"v": V, "w": W})
    return result


# A function of rlx, and the same in NumPy and SciPy.
SAME: dict[str, tuple[Function, Function]] = {
    "gelu": (lambda v, w: rlx.gelu(v), lambda v, w: v * scipy.special.ndtr(v)),
    "a number": (lambda v, w: rlx.add(v, 1), lambda v, w: v + 1),
    "an array": (lambda v, w: rlx.multiply(W, v), lambda v, w: W * v),
    "where": (lambda v, w: rlx.where(v > 1, v, 0.0), lambda v, w: np.where(v > 1, v, 0)),
    "softmax": (lambda v, w: rlx.softmax(v, axis=0), lambda v, w: scipy.special.softmax(v, axis=0)),
    "logsumexp": (lambda v, w: rlx.logsumexp(v, axis=0), lambda v, w: scipy.special.logsumexp(v, axis=0)),
    "log1p": (lambda v, w: rlx.log1p(v), lambda v, w: np.log1p(v)),
    "division of integers": (
        lambda v, w: rlx.divide(rlx.astype(v * 9, "i32"), 2),
        lambda v, w: (v * 9).astype(int) / 2,
    ),
    "concatenate": (lambda v, w: rlx.concatenate([v, w], axis=1), lambda v, w: np.concatenate([v, w], axis=1)),
    "stack": (lambda v, w: rlx.stack([v, W, w]), lambda v, w: np.stack([v, W, w])),
    "asarray": (lambda v, w: rlx.asarray([v, w]), lambda v, w: np.asarray([v, w])),
    "einsum": (lambda v, w: rlx.einsum("ij,kj->ik", v, w), lambda v, w: np.einsum("ij,kj->ik", v, w)),
    "outer": (lambda v, w: rlx.outer(W, v), lambda v, w: np.outer(W, v)),
    "variance": (lambda v, w: rlx.var(v, axis=1), lambda v, w: np.var(v, axis=1)),
    "sort": (lambda v, w: rlx.sort(v), lambda v, w: np.sort(v)),
    "take": (lambda v, w: rlx.take(v, np.array([0, -1]), axis=1), lambda v, w: v[:, [0, -1]]),
    "split": (lambda v, w: rlx.split(v, 2, axis=1)[1], lambda v, w: np.split(v, 2, axis=1)[1]),
    "swapaxes": (lambda v, w: rlx.swapaxes(v, 0, 1), lambda v, w: v.T),
    "tril": (lambda v, w: rlx.tril(v), lambda v, w: np.tril(v)),
    "ones_like": (lambda v, w: rlx.ones_like(v) + w, lambda v, w: 1 + w),
    "topk": (lambda v, w: rlx.topk(v, 2)[0], lambda v, w: -np.sort(-v)[:, :2]),
    "at": (lambda v, w: rlx.at(v)[0].add(w[1]), lambda v, w: np.concatenate([v[:1] + w[1], v[1:]])),
    "scan": (lambda v, w: rlx.scan(lambda c, x: (c + x, c), w[0], v)[0], lambda v, w: w[0] + v.sum(axis=0)),
    "a body that reads around it": (
        lambda v, w: rlx.scan(lambda c, x: (c + x * w[0], None), v[0], v)[0],
        lambda v, w: v[0] + v.sum(axis=0) * w[0],
    ),
    "cond": (
        lambda v, w: rlx.cond(rlx.sum(v) > 1, lambda a: a * 2, lambda a: a - w, v),
        lambda v, w: v * 2 if v.sum() > 1 else v - w,
    ),
    "fori_loop": (lambda v, w: rlx.fori_loop(0, 3, lambda i, c: c + i, v), lambda v, w: v + 3),
    "jit": (lambda v, w: rlx.jit(lambda a, b: rlx.sin(a) * b)(v, w), lambda v, w: np.sin(v) * w),
    "grad": (lambda v, w: rlx.grad(lambda a: rlx.sum(rlx.sin(a) * w))(v), lambda v, w: np.cos(v) * w),
    "vmap": (lambda v, w: rlx.vmap(lambda a: a / rlx.sum(a))(v), lambda v, w: v / v.sum(axis=1, keepdims=True)),
}


@pytest.mark.parametrize("name", SAME)
def test_functions_of_arrays_build_in_the_graph_of_a_value(name: str) -> None:
    function, numpy = SAME[name]
    wide = V.astype(np.float64), W.astype(np.float64)
    np.testing.assert_allclose(built(function), numpy(*wide), rtol=1e-5, atol=1e-6)


UFUNCS: dict[str, Function] = {
    "tanh": lambda v, w: np.tanh(v), "add": lambda v, w: np.add(v, 1), "array first": lambda v, w: W - v,
    "array second": lambda v, w: v * W, "scalar": lambda v, w: f32(2) / v, "matmul": lambda v, w: W.T @ v,
    "compare": lambda v, w: v > W, "power": lambda v, w: np.power(v, w), "rint": lambda v, w: np.rint(v * 9),
    "absolute": lambda v, w: np.absolute(v - w),
}  # fmt: skip


@pytest.mark.parametrize("name", UFUNCS)
def test_numpy_functions_that_are_ops_build_them(name: str) -> None:
    result, wanted = built(UFUNCS[name]), UFUNCS[name](V, W)
    assert result.dtype == wanted.dtype
    np.testing.assert_allclose(result, wanted, rtol=1e-5)


def test_a_scalar_of_numpy_takes_the_type_of_the_value_next_to_it() -> None:
    result = built(lambda v, w: np.sqrt(2) * v)  # a float64 to NumPy, a number here, as in JAX
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, np.float32(np.sqrt(2)) * V, rtol=1e-6)


def refusals() -> dict[str, tuple[Callable[[], Any], str]]:
    g = rlx.Graph("by_hand")
    v, other = g.input("v", (3, 4)), rlx.Graph("other").input("v", (3, 4))
    out = W.copy()
    return {
        "no function": (lambda: np.unwrap(v), r"numpy.unwrap"),
        "equality": (lambda: np.equal(W, v), r"numpy.equal.*rlx.equal"),
        "a reduction": (lambda: np.add.reduce(v), r"numpy.add.reduce.*x.sum"),
        "in place": (lambda: np.add(out, v, out=out), r"numpy.add: out has no meaning"),
        "two graphs": (lambda: rlx.add(v, other), r"'other', not to 'by_hand'"),
        "two graphs in a list": (lambda: np.stack([v, other]), r"'other', not to 'by_hand'"),
        "traced": (lambda: rlx.trace(lambda a: a + v)(V), r"belongs to a traced function, not to graph 'by_hand'"),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_cannot_be_built_says_what_to_write(name: str) -> None:
    attempt, says = refusals()[name]
    with pytest.raises(GraphError) as caught:
        attempt()
    text = " ".join([str(caught.value), *caught.value.notes])
    assert len(text) < 500 and re.search(says, text), text


def test_types_are_refused_as_the_ops_refuse_them() -> None:
    g = rlx.Graph("by_hand")
    b, n = g.input("b", (3,), "bool"), g.input("n", (3,), "i32")
    for attempt in (lambda: rlx.add(b, b), lambda: np.tanh(n), lambda: np.add(b, b)):
        with pytest.raises(DTypeError):
            attempt()


@pytest.mark.parametrize("name", [n for n, o in registry.OPS.items() if o.samples and function_of(n) is not None])
def test_every_op_is_a_function_of_values(name: str) -> None:
    function, (s, *_) = function_of(name), registry.get(name).samples
    assert function is not None
    graphs = [rlx.Graph("ops") for _ in range(2)]
    for g, build in zip(graphs, (function, lambda *xs, **attrs: graphs[1].apply(name, *xs, **attrs)), strict=True):
        leaves = [None if o is None else g.param(f"x{i}", o.shape, o.dtype) for i, o in enumerate(s.operands)]
        results = build(*leaves, **s.attrs)
        g.set_outputs(results if isinstance(results, (list, tuple)) else [results])
    assert graphs[0] == graphs[1]


def test_values_that_flow_are_values() -> None:
    g = rlx.Graph("by_hand")
    flowing = FlowValue.of(g.input("v", (3, 4)))
    assert g.set_outputs([rlx.gelu(flowing), rlx.swapaxes(flowing, 0, 1)]).outputs[1].shape == (4, 3)


def test_run_time_sizes_stay_run_time_sizes() -> None:
    g = rlx.Graph("by_hand")
    v = g.input("v", ("n", 4))
    assert np.shape(v) == v.shape
    f = rlx.compile(g.set_outputs([rlx.zeros_like(v) + rlx.expand_dims(rlx.mean(v, axis=1), 1)]))
    for n in (0, 3):
        np.testing.assert_allclose(
            f.run({"v": V[:n]})[0], np.broadcast_to(V[:n].mean(axis=1)[:, None], (n, 4)), rtol=1e-6
        )


def test_a_failed_call_leaves_no_trace_behind() -> None:
    g = rlx.Graph("by_hand")
    v = g.input("v", (3, 4))
    with pytest.raises(RlxError):
        rlx.matmul(v, v)
    np.testing.assert_allclose(rlx.add(V, 1), V + 1)  # runs at once, as outside of any trace
