"""Bodies that do not run: nothing in them can fail, whether data, sizes or weights decide that they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from targets import AVX512

import rlx
from rlx.errors import BindError, KernelError, RlxError
from rlx.mir.pipeline import optimise

f32, i32 = np.float32, np.int32
Build = Callable[..., Any]


def graph_of(build: Build, **inputs: Any) -> rlx.Graph:
    g = rlx.Graph("body")
    return g.set_outputs([build(*(g.input(name, *shape) for name, shape in inputs.items()))])


# -- what reads only weights ------------------------------------------------------------------------------------------
def rows(w: Any) -> Any:
    return w.gather(w.graph.constant(np.array([7, 7, 7, 7], i32)))


def gated(w: Any) -> Any:
    """A pair of matrices that would be merged and packed, if they could be taken in advance."""
    return (w @ rows(w)).silu() * (w @ rows(w * 2))


def endless(w: Any) -> Any:
    more = graph_of(lambda w: w.sum() > -1e30, w=((4, 4),))
    return w.graph.while_loop(w, more, graph_of(lambda w: w * 1.0, w=((4, 4),)))


def nested(w: Any) -> Any:
    """A loop that surely runs, in a branch that does not."""
    return w.graph.scan_with_bcasts_and_xs(
        w * 0, [w], [], graph_of(lambda c, w: c + rows(w), c=((4, 4),), w=((4, 4),)), 3
    )


FAILING = {
    "gather": rows,
    "scatter": lambda w: w.scatter(w.graph.constant(np.array([9], i32)), w[:1]),
    "cross_entropy": lambda w: w + w.graph.cross_entropy(w, w.graph.constant(np.array([0, 1, 2, 9], i32))).mean(),
    "grouped_matmul": lambda w: w.graph.grouped_matmul(
        w, w.reshape(1, 4, 4), w.graph.constant(np.array([0, 0, 3, 0], i32))
    ),
    "gated": gated,
    "endless": endless,
    "nested": nested,
}


def branch(leaf: str, build: Build) -> rlx.Graph:
    g = rlx.Graph("branch")
    p, w = g.input("p", (), "bool"), getattr(g, leaf)("w", (4, 4))
    return g.set_outputs([g.cond(p, [w], graph_of(build, w=((4, 4),)), graph_of(lambda w: w + 1, w=((4, 4),)))])


@pytest.mark.parametrize("leaf", ["param", "input"])
@pytest.mark.parametrize("name", FAILING)
def test_the_branch_that_is_not_taken_does_not_fail(name: str, leaf: str) -> None:
    f, w = rlx.compile(branch(leaf, FAILING[name])), np.eye(4, dtype=f32)
    inputs: dict[str, Any] = {"w": w} if leaf == "input" else {}
    if leaf == "param":
        f.set_params({"w": w})
    np.testing.assert_array_equal(f.run({"p": np.array(False), **inputs})[0], w + 1)
    if name != "endless":
        with pytest.raises(KernelError, match="outside"):
            f.run({"p": np.array(True), **inputs})


@pytest.mark.parametrize("name", [name for name in FAILING if name not in ("endless", "nested")])
def test_loops_without_a_step_do_not_fail(name: str) -> None:
    g = rlx.Graph("loops")
    x, w = g.input("x", ("n", 4)), g.param("w", (4, 4))
    step = graph_of(lambda c, w: c + FAILING[name](w), c=((4, 4),), w=((4, 4),))
    more = graph_of(lambda c, w: c.sum() > 1.0, c=((4, 4),), w=((4, 4),))
    scanned = g.scan_with_bcasts_and_xs(w * 0, [w], [], step, x.shape[0])
    f = rlx.compile(g.set_outputs([scanned, g.while_loop(w * 0, more, step, broadcasts=[w])]))
    f.set_params({"w": np.eye(4, dtype=f32)})
    for output in f.run({"x": np.zeros((0, 4), f32)}):
        np.testing.assert_array_equal(output, np.zeros((4, 4)))
    with pytest.raises(KernelError, match="outside"):
        f.run({"x": np.zeros((1, 4), f32)})


def test_what_cannot_fail_is_still_prepared_once() -> None:
    """Weights of a branch are packed when they are bound, also beside something that can fail."""
    done = optimise(branch("param", lambda w: (w + 0.0) @ w.tanh() + rows(w)), AVX512)
    assert any(node.op == "region" for node in done.bind.nodes)
    assert not any(node.op == "gather" for node in done.bind.nodes)
    sliced = optimise(branch("param", lambda w: w[1:3].mT @ w[1:3]), AVX512)  # sizes that are known need no check
    (cond,) = (node for node in sliced.main.nodes if node.op == "cond")
    assert not any(node.op == "matmul" for node in cond.attrs["then_body"].nodes)


def test_slices_of_weights_of_a_run_time_size_wait_for_their_branch() -> None:
    g = rlx.Graph("branch")
    p, w = g.input("p", (), "bool"), g.param("w", ("m", 3))
    shapes = {"w": (("m", 3),)}
    g.set_outputs(
        [g.cond(p, [w], graph_of(lambda w: w[2].exp(), **shapes), graph_of(lambda w: w.sum(axis=0), **shapes))]
    )
    f = rlx.compile(g)
    f.set_params({"w": np.ones((1, 3), f32)})
    np.testing.assert_array_equal(f.run({"p": np.array(False)})[0], np.ones(3))
    with pytest.raises(BindError, match="slice: 3 is 3, more than m, which is 1"):
        f.run({"p": np.array(True)})


# -- sizes ------------------------------------------------------------------------------------------------------------
M3: Any = (("m", 3),)


def scan_graph() -> rlx.Graph:
    g = rlx.Graph("scan")
    x, c = g.input("x", ("n", 3)), g.input("c", *M3)
    body = rlx.Graph("body")
    carry, row = body.input("c", *M3), body.input("x", (3,))
    body.set_outputs([carry + carry[1], carry[0] + row])
    final, ys = g.scan_general([c], body, x.shape[0], xs=[x])
    return g.set_outputs([*final, *ys])


def nested_scan_graph() -> rlx.Graph:
    """The inner loop has k steps in each of n."""
    inner = graph_of(lambda c, x: c + c[1] * x.sum(), c=M3, x=((3,),))
    outer = rlx.Graph("outer")
    c, k, x = outer.input("c", *M3), outer.input("k", ("k", 3)), outer.input("x", (3,))
    outer.set_outputs([outer.scan_with_bcasts_and_xs(c + x, [], [k], inner, k.shape[0])])
    g = rlx.Graph("nested")
    c, x, k = g.input("c", *M3), g.input("x", ("n", 3)), g.input("k", ("k", 3))
    return g.set_outputs([g.scan_with_bcasts_and_xs(c, [k], [x], outer, x.shape[0])])


def while_graph() -> rlx.Graph:
    """As long as the sum is below that of x."""
    shapes: Any = {"c": M3, "x": (("n", 3),)}
    more = graph_of(lambda c, x: c.sum() < x.sum(), **shapes)
    step = graph_of(lambda c, x: c + c[1] + 1.0, **shapes)
    g = rlx.Graph("while")
    c, x = g.input("c", *M3), g.input("x", ("n", 3))
    return g.set_outputs([g.while_loop(c, more, step, broadcasts=[x])])


def cond_graph() -> rlx.Graph:
    """One side needs two rows, the other three; the one with more also has a loop that needs four, of n steps."""
    three = rlx.Graph("three")
    c, x = three.input("c", *M3), three.input("x", ("n", 3))
    four = graph_of(lambda r, c, x: r + c[3] * x, r=((3,),), c=M3, x=((3,),))
    three.set_outputs([three.scan_with_bcasts_and_xs(c[2] * 2, [c], [x], four, x.shape[0])])
    two = graph_of(lambda c, x: c[1] + x.sum(axis=0), c=M3, x=(("n", 3),))
    g = rlx.Graph("cond")
    c, x = g.input("c", *M3), g.input("x", ("n", 3))
    return g.set_outputs([g.cond(x.sum() < 6.0, [c, x], three, two)])


GRAPHS = {"scan": scan_graph, "nested": nested_scan_graph, "while": while_graph, "cond": cond_graph}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_sizes_of_a_body_matter_only_where_it_runs(name: str, threads: int) -> None:
    graph = GRAPHS[name]()
    f, right = rlx.compile(graph, threads=threads), rlx.compile(graph, "reference")
    refused = 0
    for m, n, k in np.ndindex(6, 4, 3 if name == "nested" else 1):
        arrays = {"c": np.full((m, 3), 0.5, f32), "x": np.ones((n, 3), f32), "k": np.ones((k, 3), f32)}
        inputs = {name: array for name, array in arrays.items() if graph.has(name)}
        try:
            wanted = right.run(inputs)
        except RlxError as error:
            assert isinstance(error, BindError)
            refused += 1
            with pytest.raises(BindError, match=rf"slice: \d is \d, more than m, which is {m}"):
                f.run(inputs)
            continue
        for a, b in zip(f.run(inputs), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert refused > 5


def test_memory_of_a_body_that_does_not_run_may_have_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of m - 4 rows, which a run without steps does not use."""
    monkeypatch.setenv("RLX_CHECK", "1")
    g = rlx.Graph("scan")
    x, c = g.input("x", ("n", 3)), g.input("c", *M3)
    step = graph_of(lambda c, x: c + (c[4:].mT @ c[4:]).softmax().sum() + x, c=M3, x=((3,),))
    f = rlx.compile(g.set_outputs([g.scan_with_bcasts_and_xs(c, [], [x], step, x.shape[0])]))
    ones = np.ones((2, 3), f32)
    np.testing.assert_array_equal(f.run({"c": ones, "x": ones[:0]})[0], ones)
    with pytest.raises(BindError, match="more than m, which is 2"):
        f.run({"c": ones, "x": ones})


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_results_of_no_step_still_have_a_size(device: str) -> None:
    g = rlx.Graph("scan")
    x, c = g.input("x", ("n", 3)), g.input("c", *M3)
    body = rlx.Graph("body")
    carry, row = body.input("c", *M3), body.input("x", (3,))
    body.set_outputs([carry, carry[2:] + row])
    f = rlx.compile(g.set_outputs(g.scan_general([c], body, x.shape[0], xs=[x])[1]), device)
    none = np.ones((0, 3), f32)
    assert f.run({"x": none, "c": np.ones((2, 3), f32)})[0].shape == (0, 0, 3)
    with pytest.raises(BindError, match="m - 2, which is -1"):
        f.run({"x": none, "c": np.ones((1, 3), f32)})


def test_an_output_below_no_size_is_an_error() -> None:
    g = rlx.Graph("negative")
    n = rlx.dim("n")
    g.input("x", (n,))
    f = rlx.compile(g.set_outputs([g.expand(g.constant(1.0), shape=(n - 2,))]))
    assert f.run({"x": np.ones(2, f32)})[0].shape == (0,)
    with pytest.raises(BindError, match=r"output 0: its shape is \(-1,\)"):
        f.run({"x": np.ones(1, f32)})
