"""Loops, branches and custom functions: derivatives against the same steps unrolled, and what is kept and computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from graphs import examples
from hypothesis import given
from hypothesis import strategies as st
from loop_graphs import loop_graphs, odd_graph
from numeric import Array, Case, assert_close, check_forward, check_reverse, check_vmap, evaluate, reverse_case

import rlx
from rlx.errors import GraphError
from rlx.ir import evaluate as evaluator
from rlx.ir.rewrite import inline
from rlx.transforms import grad, hvp, jvp, value_and_grad, vjp, vmap
from rlx.transforms.walk import leaves

rng = np.random.default_rng(7)


def body_of(inputs: dict[str, Any], build: Callable[..., Any]) -> rlx.Graph:
    g = rlx.Graph("body")
    results = build(*(g.input(n, s, "f64") for n, s in inputs.items()))
    return g.set_outputs(results if isinstance(results, (tuple, list)) else [results])


def numbers(*shape: int) -> Array:
    return rng.uniform(-1, 1, shape)


def rnn() -> rlx.Graph:
    """tanh(c w + x), and a y that uses the carry after and the row."""

    def build(c: Any, w: Any, x: Any) -> Any:
        after = (c.reshape(1, 3) @ w).reshape(3).tanh() + x
        return after, after * x

    return body_of({"c": (3,), "w": (3, 3), "x": (3,)}, build)


def unrolled(body: rlx.Graph, length: int, reverse: bool) -> rlx.Graph:
    """What the scan of `rnn` gives, step by step."""
    g = rlx.Graph("unrolled")
    c, w, xs = g.input("c", (3,), "f64"), g.input("w", (3, 3), "f64"), g.input("xs", (length, 3), "f64")
    ys: dict[int, rlx.Value] = {}
    for t in reversed(range(length)) if reverse else range(length):
        c, ys[t] = inline(g, body, [c, w, xs[t]])
    return g.set_outputs([c, g.concatenate(*(ys[t].reshape(1, 3) for t in range(length)), axis=0)])


def looped(body: rlx.Graph, length: Any, reverse: bool = False, checkpoints: int = 0) -> rlx.Graph:
    g = rlx.Graph("looped")
    c, w, xs = g.input("c", (3,), "f64"), g.input("w", (3, 3), "f64"), g.input("xs", (length, 3), "f64")
    size = xs.shape[0]
    finals, ys = g.scan_general([c], body, size, broadcasts=[w], xs=[xs], reverse=reverse, checkpoints=checkpoints)
    return g.set_outputs([*finals, *ys])


def arrays(length: int) -> dict[str, Array]:
    return {"c": numbers(3), "w": numbers(3, 3), "xs": numbers(length, 3)}


# -- scans -----------------------------------------------------------------------------------------------------------
@examples(12)
@given(length=st.integers(1, 9), reverse=st.booleans(), data=st.data())
def test_the_gradient_of_a_scan_is_that_of_its_steps(length: int, reverse: bool, data: Any) -> None:
    checkpoints = data.draw(st.integers(0, length))
    inputs = arrays(length) | {"d_output_0": numbers(3), "d_output_1": numbers(length, 3)}
    results = evaluate(vjp(looped(rnn(), length, reverse, checkpoints), ["c", "w", "xs"]), inputs)
    wanted = evaluate(vjp(unrolled(rnn(), length, reverse), ["c", "w", "xs"]), inputs)
    for a, b in zip(results, wanted, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("checkpoints", [0, 3])
def test_a_scan_has_derivatives_of_every_order(checkpoints: int) -> None:
    case = Case(looped(rnn(), 4, checkpoints=checkpoints), arrays(4))
    check_forward(case, rng)
    back = reverse_case(case, rng)
    check_forward(back, rng)
    check_reverse(back, rng)
    check_reverse(reverse_case(back, rng), rng)


@pytest.mark.parametrize("checkpoints", [0, 3])
def test_a_scan_of_unknown_length_has_a_gradient(checkpoints: int) -> None:
    symbolic = vjp(looped(rnn(), "n", checkpoints=checkpoints), ["c", "w", "xs"])
    for length in (0, 1, 2, 3, 8):
        inputs = arrays(length) | {"d_output_0": numbers(3), "d_output_1": numbers(length, 3)}
        results = evaluate(symbolic, inputs, {"n": length})
        fixed = evaluate(vjp(looped(rnn(), length), ["c", "w", "xs"]), inputs)
        for a, b in zip(results, fixed, strict=True):
            assert_close(a, b, 1e-12)


@pytest.mark.parametrize("batched", [["c"], ["w"], ["xs"], ["c", "xs"], ["c", "w", "xs"]])
def test_a_scan_is_batched(batched: list[str]) -> None:
    check_vmap(Case(looped(rnn(), 4), arrays(4)), rng, batched)
    back = reverse_case(Case(looped(rnn(), 4, checkpoints=2), arrays(4)), rng)
    check_vmap(back, rng, batched)


def test_a_scan_with_integers_among_its_carries_has_a_gradient() -> None:
    body = rlx.Graph("body")
    i, c, table = body.input("i", (), "i32"), body.input("c", (), "f64"), body.input("t", (5,), "f64")
    body.set_outputs([i + 1, c * table.gather(i), (c > 0.5).astype("i32")])
    g = rlx.Graph("g")
    c, table = g.input("c", (), "f64"), g.input("t", (5,), "f64")
    finals, _ = g.scan_general([g.constant(0), c], body, 5, broadcasts=[table])
    g.set_outputs([finals[1]])
    gradients = evaluate(grad(g, ["c", "t"]), {"c": np.array(2.0), "t": np.array([1.0, 2, 3, 4, 5])})
    np.testing.assert_allclose(gradients[0], 120)
    np.testing.assert_allclose(gradients[1], 240 / np.array([1.0, 2, 3, 4, 5]))


@contextmanager
def counting(op: str) -> Iterator[list[int]]:
    """How often the reference device evaluates an op."""
    count, apply = [0], evaluator.apply

    def counted(node: Any, *rest: Any) -> Any:
        count[0] += node.op == op
        return apply(node, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "apply", counted)
        yield count


def rows_kept(graph: rlx.Graph, shape: tuple[int, ...]) -> int:
    """How many carries the scans of a graph stack up: outside, and inside of one step of a loop at a time."""
    total = 0
    for node in graph.nodes:
        if node.op == "scan":
            body, n = node.attrs["body"], node.attrs["carries"]
            total += sum(node.attrs["length"] for o in body.outputs[n:] if o.shape == shape)
            total += rows_kept(body, shape)
    return total


@pytest.mark.parametrize("length", [12, 13, 17, 24])
@pytest.mark.parametrize("checkpoints", [1, 2, 3, 4, 5, 12])
def test_checkpoints_bound_what_is_kept_and_computed(length: int, checkpoints: int) -> None:
    """At most K + ceil(length / K) carries, and two evaluations of the body a step, forward ones included."""
    step = body_of({"c": (3,)}, lambda c: (c * 1.1).tanh())
    g = rlx.Graph("g")
    g.set_outputs([g.scan_checkpointed(g.input("c", (3,), "f64"), step, length, checkpoints).sum()])
    back = value_and_grad(g, "c")
    start = {"c": numbers(3)}
    with counting("tanh") as count:
        results = evaluate(back, start)
    assert count[0] <= 2 * length
    plain = rlx.Graph("plain")
    c = plain.input("c", (3,), "f64")
    for _ in range(length):
        c = (c * 1.1).tanh()
    plain.set_outputs([c.sum()])
    for a, b in zip(results, evaluate(value_and_grad(plain, "c"), start), strict=True):
        assert_close(a, b, 1e-12)
    segments = [n for n in back.nodes if n.op == "scan"]
    outside = sum(rows_of(n, (3,)) for n in segments)
    inside = max((rows_kept(n.attrs["body"], (3,)) for n in segments), default=0)
    assert outside + inside <= checkpoints + -(-length // checkpoints), (outside, inside)


def rows_of(node: Any, shape: tuple[int, ...]) -> int:
    body, n = node.attrs["body"], node.attrs["carries"]
    return sum(node.attrs["length"] for o in body.outputs[n:] if o.shape == shape)


def test_a_plain_scan_computes_each_step_once() -> None:
    back = value_and_grad(_summed(looped(rnn(), 9)), ["c", "w"])
    with counting("tanh") as count:
        evaluate(back, arrays(9))
    assert count[0] == 9


def _summed(g: rlx.Graph) -> rlx.Graph:
    total = functools.reduce(lambda a, b: a + b, (o.sum() for o in g.outputs))
    return g.set_outputs([total])


def test_the_scan_backward_builders_take_what_vjp_makes() -> None:
    """`body_vjp` of the builders, made by the transform, against the transform of the scan itself."""
    step = body_of({"c": (3,), "x": (3,)}, lambda c, x: (c * x).tanh() + c)
    body_vjp = vjp(step, ["c", "x"])
    body_vjp.outputs = body_vjp.outputs[1:]
    inputs = {"c": numbers(3), "xs": numbers(6, 3), "up": numbers(3)}
    g = rlx.Graph("g")
    c, xs, up = g.input("c", (3,), "f64"), g.input("xs", (6, 3), "f64"), g.input("up", (3,), "f64")
    rows = body_of({"c": (3,), "x": (3,)}, lambda c, x: ((c * x).tanh() + c,) * 2)
    trajectory = g.scan_general([c], rows, 6, xs=[xs])[1][0]
    checkpoints = trajectory.gather(np.array([1, 3, 5], np.int32))
    g.set_outputs([
        g.scan_backward(c, trajectory, up, [xs], body_vjp, 6, save_trajectory=False),
        g.scan_backward_xs(c, trajectory, up, [xs], body_vjp, 6, 0, save_trajectory=False),
        g.scan_backward_with_checkpoints(c, checkpoints, up, [xs], body_vjp, 6, 3, step, save_trajectory=False),
        g.scan_backward_xs_with_checkpoints(c, checkpoints, up, [xs], body_vjp, 6, 0, 3, step, save_trajectory=False),
    ])  # fmt: skip
    plain = rlx.Graph("plain")
    plain.set_outputs([plain.scan_with_xs(plain.input("c", (3,), "f64"), [plain.input("xs", (6, 3), "f64")], step, 6)])
    wanted = evaluate(vjp(plain, ["c", "xs"]), {"c": inputs["c"], "xs": inputs["xs"], "d_output": inputs["up"]})[1:]
    for i, a in enumerate(evaluate(g, inputs)):
        assert_close(a, wanted[i % 2], 1e-12)


# -- while -----------------------------------------------------------------------------------------------------------
def doubling(max_steps: int | None) -> rlx.Graph:
    """x · w until it is at least 10, at most `max_steps` times."""
    more = rlx.Graph("more")
    x, _ = more.input("x", (), "f64"), more.input("w", (), "f64")
    more.set_outputs([x < 10.0])
    body = body_of({"x": (), "w": ()}, lambda x, w: x * w)
    g = rlx.Graph("g")
    x, w = g.input("x", (), "f64"), g.input("w", (), "f64")
    return g.set_outputs([g.while_loop(x, more, body, broadcasts=[w], max_steps=max_steps)])


def test_a_while_loop_has_derivatives() -> None:
    """x w⁴, four steps long; with at most two of them x w²."""
    at = {"x": np.array(1.5), "w": np.array(1.7)}
    for limit, steps in ((9, 4), (2, 2)):
        dx, dw = evaluate(grad(doubling(limit), ["x", "w"]), at)
        np.testing.assert_allclose([dx, dw], [1.7**steps, steps * 1.5 * 1.7 ** (steps - 1)], rtol=1e-12)
        check_reverse(reverse_case(Case(doubling(limit), at), rng), rng)
    tangents = {"tangent_x": np.array(1.0), "tangent_w": np.array(0.0)}
    assert_close(evaluate(jvp(doubling(None), ["x", "w"]), at | tangents)[1], np.array(1.7**4), 1e-12)


def test_an_unbounded_while_loop_has_no_gradient() -> None:
    with pytest.raises(GraphError, match="while_loop: its gradient needs a maximum number of steps") as caught:
        grad(doubling(None), "x")
    assert caught.value.hint and "max_steps" in caught.value.hint


@pytest.mark.parametrize("batched", [["x"], ["w"], ["x", "w"]])
def test_lanes_of_a_while_loop_stop_when_they_are_done(batched: list[str]) -> None:
    many = vmap(doubling(None), {n: 0 for n in batched}, size=4)
    at: dict[str, Array] = {"x": np.array(1.5), "w": np.array(1.7)}
    lanes = {"x": np.array([0.1, 1.5, 20.0, 3.0]), "w": np.array([1.7, 2.0, 5.0, 1.1])}
    (result,) = evaluate(many, at | {n: lanes[n] for n in batched})
    for i in range(4):
        one = at | {n: lanes[n][i] for n in batched}
        np.testing.assert_allclose(result[i], evaluate(doubling(None), one)[0], rtol=1e-12)


# -- branches --------------------------------------------------------------------------------------------------------
def branching() -> rlx.Graph:
    yes = body_of({"a": (3,), "b": (3,)}, lambda a, b: ((a * b).tanh() * a, b))
    no = body_of({"a": (3,), "b": (3,)}, lambda a, b: (a.exp() * 2.0, a - b))
    g = rlx.Graph("g")
    a, b = g.input("a", (3,), "f64"), g.input("b", (3,), "f64")
    return g.set_outputs(g.cond(a.sum() > 0.0, [a, b], yes, no))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_branch_has_derivatives_of_every_order(sign: float) -> None:
    case = Case(branching(), {"a": sign * np.array([0.3, 0.5, 0.7]), "b": numbers(3)})
    check_forward(case, rng)
    check_reverse(case, rng)
    back = reverse_case(case, rng)
    check_forward(back, rng)
    check_reverse(back, rng)
    with counting("tanh") as count:
        evaluate(vjp(branching(), ["a", "b"]), back.arrays)
    assert count[0] == (sign > 0), "the branch that is not taken does not run, the other runs once"


def test_lanes_take_branches_of_their_own() -> None:
    case = Case(branching(), {"a": numbers(3), "b": numbers(3)})
    check_vmap(case, rng, ["a", "b"], size=6)
    check_vmap(case, rng, ["b"])
    check_vmap(reverse_case(case, rng), rng, ["a"], size=6)


# -- custom functions ------------------------------------------------------------------------------------------------
def forward_body() -> rlx.Graph:
    return body_of({"a": (3,), "b": (3,)}, lambda a, b: a * b.sin())


def vjp_body(factor: float = 1.0) -> rlx.Graph:
    names = {"a": (3,), "b": (3,), "primal_output": (3,), "d_output": (3,)}
    return body_of(names, lambda a, b, y, d: (factor * d * b.sin(), factor * d * a * b.cos()))


def jvp_body(factor: float = 1.0) -> rlx.Graph:
    names = {"a": (3,), "b": (3,), "tangent_0": (3,), "tangent_1": (3,)}
    return body_of(names, lambda a, b, s, t: factor * (s * b.sin() + a * t * b.cos()))


def custom(vjp_: rlx.Graph | None, jvp_: rlx.Graph | None) -> rlx.Graph:
    g = rlx.Graph("g")
    a, b = g.input("a", (3,), "f64"), g.input("b", (3,), "f64")
    return g.set_outputs([g.custom_fn([a, b], forward_body(), vjp_, jvp_) * 2.0])


RULES = {"none": (None, None), "vjp": (vjp_body(), None), "jvp": (None, jvp_body()), "both": (vjp_body(), jvp_body())}


@pytest.mark.parametrize("rules", RULES)
def test_a_custom_function_closes_under_transforms(rules: str) -> None:
    case = Case(custom(*RULES[rules]), {"a": numbers(3), "b": numbers(3)})
    check_forward(case, rng)
    check_reverse(case, rng)
    back = reverse_case(case, rng)
    check_forward(back, rng)
    check_reverse(back, rng)
    check_vmap(case, rng, ["a"])
    check_vmap(back, rng, ["a", "b"])
    assert_close(
        evaluate(vmap(vjp(case.graph, ["b"]), {"a": 0, "b": 0, "d_output": 0}, size=2), _doubled(back.arrays))[1],
        evaluate(vjp(vmap(case.graph, 0, size=2), ["b"]), _doubled(back.arrays))[1], 1e-12,
    )  # fmt: skip


def _doubled(inputs: dict[str, Array]) -> dict[str, Array]:
    return {n: np.stack([a, a]) for n, a in inputs.items()}


@pytest.mark.parametrize("rules", [(vjp_body(5.0), None), (None, jvp_body(5.0)), (vjp_body(5.0), jvp_body(5.0))])
def test_the_rule_of_a_custom_function_is_what_counts(rules: Any) -> None:
    """A rule that says five times the truth: both modes believe it, from whichever rule there is."""
    at = {"a": numbers(3), "b": numbers(3)}
    tangents = {"tangent_a": numbers(3), "tangent_b": numbers(3)}
    wanted = evaluate(jvp(custom(None, None), ["a", "b"]), at | tangents)[1]
    assert_close(evaluate(jvp(custom(*rules), ["a", "b"]), at | tangents)[1], 5 * wanted, 1e-12)
    d = numbers(3)
    wanted = evaluate(vjp(custom(None, None), ["a"]), at | {"d_output": d})[1]
    assert_close(evaluate(vjp(custom(*rules), ["a"]), at | {"d_output": d})[1], 5 * wanted, 1e-12)


def test_a_custom_function_of_several_outputs_in_another_in_a_scan() -> None:
    """Split into whole part and sine, with a rule; inside a function without; inside a loop."""
    pair = body_of({"x": (3,)}, lambda x: (x * x, x.sin()))
    names = {"x": (3,), "primal_output_0": (3,), "primal_output_1": (3,), "d_output_0": (3,), "d_output_1": (3,)}
    rule = body_of(names, lambda x, y, z, d, e: d * 2.0 * x + e * x.cos())
    outer = rlx.Graph("outer")
    x = outer.input("x", (3,), "f64")
    square, sine = outer.custom_fn_multi([x], pair, rule)
    outer.set_outputs([square * 0.1 + sine])
    step = rlx.Graph("step")
    step.set_outputs([step.custom_fn([step.input("c", (3,), "f64")], outer)])
    g = rlx.Graph("g")
    g.set_outputs([g.scan(g.input("x", (3,), "f64"), step, 4)])
    case = Case(g, {"x": numbers(3)})
    check_forward(case, rng)
    back = reverse_case(case, rng)
    check_forward(back, rng)
    check_reverse(back, rng)
    check_vmap(back, rng, ["x"])


# -- everything in everything ----------------------------------------------------------------------------------------
@examples(15)
@given(graph=loop_graphs(), data=st.data())
def test_random_loops_in_loops(graph: rlx.Graph, data: Any) -> None:
    wide = rlx.Graph.parse(graph.text(full=True).replace("f32", "f64"))
    case = Case(wide, {n.attrs["name"]: rng.uniform(-1, 1, (3, 4)) for n in leaves(wide)})
    check_reverse(case, rng)
    check_vmap(case, rng, [data.draw(st.sampled_from(case.floats))])
    if len(wide) < 40:
        check_reverse(reverse_case(case, rng), rng)


def test_loops_of_unknown_length_and_size() -> None:
    wide = rlx.Graph.parse(odd_graph().text(full=True).replace("f32", "f64"))
    for batch, time in ((2, 3), (1, 1), (3, 0)):
        shapes = {"c": (batch, 5), "w": (5, 5), "xs": (time, batch, 5)}
        case = Case(wide, {n: rng.uniform(-1, 1, s) for n, s in shapes.items()})
        sizes = {"batch": batch, "time": time}
        check_forward(case, rng, sizes=sizes)
        check_reverse(case, rng, sizes)
        check_reverse(reverse_case(case, rng, sizes), rng, sizes)


# -- machine code ----------------------------------------------------------------------------------------------------
def in_f32(case: Case) -> tuple[rlx.Graph, dict[str, Array]]:
    text = case.graph.text(full=True).replace("f64", "f32")
    return rlx.Graph.parse(text), {n: a.astype(np.float32) for n, a in case.arrays.items()}


LOOPS: dict[str, Callable[[], Case]] = {
    "scan": lambda: Case(looped(rnn(), 5), arrays(5)),
    "scan of segments": lambda: Case(looped(rnn(), 7, True, 3), arrays(7)),
    "while": lambda: Case(doubling(6), {"x": np.array(1.5), "w": np.array(1.7)}),
    "cond": lambda: Case(branching(), {"a": numbers(3), "b": numbers(3)}),
    "custom": lambda: Case(custom(*RULES["vjp"]), {"a": numbers(3), "b": numbers(3)}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_of_loops_run_as_machine_code(name: str) -> None:
    case = LOOPS[name]()
    first = reverse_case(case, rng)
    graph, inputs = in_f32(first)
    name = case.floats[0]
    direction = {f"tangent_{name}": numbers(*case.arrays[name].shape)}
    for transformed, extra in ((graph, {}), (hvp(_summed(graph.copy()), name), direction)):
        leaves_ = {n.attrs["name"] for n in leaves(transformed)}
        run_with = {n: np.asarray(a, np.float32) for n, a in (inputs | extra).items() if n in leaves_}
        for a, b in zip(rlx.compile(transformed).run(run_with), evaluate(transformed, run_with), strict=True):
            np.testing.assert_allclose(a, b, rtol=3e-4, atol=3e-5)
