"""`rlx.debug`: printing from inside programs, and the line where NaN and infinity begin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import GraphError, NonFiniteError
from rlx.runtime import nan_switch
from rlx.runtime.nan_check import WatchedRun

Array = np.ndarray[Any, Any]


def f32(*numbers: float) -> Array:
    return np.array(numbers, np.float32)


def line_of(marker: str) -> int:
    """The line of this file that ends with a marker."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


def caught(run: Callable[[], Any]) -> NonFiniteError:
    with rlx.debug.nans(), pytest.raises(NonFiniteError) as error:
        run()
    return error.value


def place(error: NonFiniteError) -> str:
    return next(n for n in error.notes if "built at" in n)


# -- nans -------------------------------------------------------------------------------------------------------------
def planted(x: Any) -> Any:
    shifted = x - 2.0
    logs = np.log(shifted)  # a logarithm
    return np.sum(logs * 3.0)


def test_the_logarithm_of_a_negative_number_is_named_with_its_line_and_count() -> None:
    error = caught(lambda: rlx.jit(planted)(f32(1, 2, 3, 0.5)))  # log of -1, 0, 1, -1.5
    assert str(error) == "log: makes 2 NaN and 1 infinite of 4 elements from finite operands"
    assert f"test_debug.py:{line_of('a logarithm')}" in place(error)
    assert any("-1.5 to 1" in n for n in error.notes)
    assert isinstance(error, FloatingPointError)


def test_zero_over_zero_is_named() -> None:
    def f(x: Any) -> Any:
        return x * 2 / (x + x)  # a quotient

    error = caught(lambda: rlx.jit(f)(f32(0, 1)))
    assert str(error) == "div: makes 1 NaN of 2 elements from finite operands"
    assert f"test_debug.py:{line_of('a quotient')}" in place(error)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_node_of_a_graph_is_named_with_its_stage(device: str) -> None:
    g = rlx.Graph("model")
    x, w = g.input("x", ("n", 3)), g.param("w", (3, 2))
    with rlx.stage("layers.1"), rlx.stage("ffn"):
        h = (x @ w).sqrt()  # a root
    g.set_outputs([h.tanh()])
    f = rlx.compile(g, device)
    f.set_param("w", -np.ones((3, 2), np.float32))
    error = caught(lambda: f.run({"x": np.ones((4, 3), np.float32)}))
    assert str(error) == "sqrt: makes 8 NaN of 8 elements from finite operands"
    assert "layers.1.ffn" in place(error) and f"test_debug.py:{line_of('a root')}" in place(error)
    assert any("output 0 of 'model'" in n for n in error.notes)


def test_a_gradient_names_the_line_of_the_function_that_it_is_of() -> None:
    def f(x: Any) -> Any:
        return np.sum(np.sqrt(x))  # its slope at 0

    error = caught(lambda: rlx.grad(f)(f32(0, 4)))
    assert "1 infinite of 2" in str(error)
    assert f"test_debug.py:{line_of('its slope at 0')}" in place(error)


def test_a_node_inside_a_scan_is_named() -> None:
    def body(carry: Any, x: Any) -> Any:
        logs = np.log(carry)  # in the third step
        return carry - x, logs

    error = caught(lambda: rlx.jit(lambda start: rlx.scan(body, start, np.ones(3, np.float32)))(f32(2)))
    assert str(error) == "log: makes 1 infinite of 1 elements from finite operands"
    assert f"test_debug.py:{line_of('in the third step')}" in place(error)


@pytest.mark.parametrize("loop", ["while_loop", "fori_loop", "cond"])
def test_a_node_inside_other_bodies_is_named(loop: str) -> None:
    def body(x: Any) -> Any:
        return np.sqrt(x - 3.0)  # below zero at last

    def f(x: Any) -> Any:
        if loop == "while_loop":
            return rlx.while_loop(lambda x: x > 0, body, x)
        if loop == "fori_loop":
            return rlx.fori_loop(0, 2, lambda i, x: body(x), x)
        return rlx.cond(x > 0, body, lambda x: x, x / 4)

    error = caught(lambda: rlx.jit(f)(np.float32(7)))
    assert str(error) == "sqrt: makes 1 NaN of 1 elements from finite operands"
    assert f"test_debug.py:{line_of('below zero at last')}" in place(error)


def test_infinities_that_do_not_reach_the_result_are_nobodys_fault() -> None:
    def masked(x: Any, mask: Any) -> Any:
        quiet = np.exp(np.log(x - x))  # log(0) is -inf, its exp 0
        shares = rlx.softmax(x + mask) + quiet
        return np.log(shares - shares)  # what is left

    error = caught(lambda: rlx.jit(masked)(f32(1, 2), f32(0, -np.inf)))
    assert "log: makes 2 infinite" in str(error)
    assert f"test_debug.py:{line_of('what is left')}" in place(error)


def test_a_row_that_is_masked_altogether_names_what_made_nan_of_infinities() -> None:
    def f(x: Any, mask: Any) -> Any:
        scores = x + mask
        return scores - np.max(scores)  # -inf less -inf

    error = caught(lambda: rlx.jit(f)(f32(1, 2), f32(-np.inf, -np.inf)))
    assert str(error) == "sub: makes 2 NaN of 2 elements from infinities"
    assert f"test_debug.py:{line_of('-inf less -inf')}" in place(error)


def test_a_bad_weight_is_named() -> None:
    g = rlx.Graph("model")
    g.set_outputs([g.input("x", (2,)) * g.param("w", (2,))])
    f = rlx.compile(g)
    f.set_param("w", f32(1, np.nan))
    assert str(caught(lambda: f.run({"x": f32(1, 2)}))) == (
        "param 'w': has 1 NaN of 2 elements before anything is computed"
    )


def test_a_state_that_turns_bad_is_found_from_what_it_was_before() -> None:
    g = rlx.Graph("step")
    x, total = g.input("x", (3,)), g.state("total", (3,))
    with rlx.stage("update"):
        total = total.assign(total + x.log())  # into the state
    g.set_outputs([total > 0.0])
    f = rlx.compile(g)
    state = f32(1, 2, np.nan)
    with rlx.debug.nans():
        f.run({"x": f32(1, 1, 1), "total": state})  # what was bad before is not this run's fault
    error = caught(lambda: f.run({"x": f32(0, 1, 1), "total": state}))
    assert str(error) == "log: makes 1 infinite of 3 elements from finite operands"
    assert "update" in place(error) and f":{line_of('into the state')}" in place(error)
    assert any("state 'total'" in n for n in error.notes)


def test_the_same_expression_on_another_line_is_told_apart() -> None:
    first = caught(lambda: rlx.log(f32(-1)))  # one line
    second = caught(lambda: rlx.log(f32(-1)))  # another line
    assert f":{line_of('one line')}" in place(first) and f":{line_of('another line')}" in place(second)


def test_it_watches_only_inside_the_context() -> None:
    f = rlx.jit(planted)
    assert np.isnan(f(f32(1)))
    with rlx.debug.nans():
        with rlx.debug.nans(False):
            assert np.isnan(f(f32(1)))
        with pytest.raises(NonFiniteError):
            f(f32(1))
        assert f(f32(3)) == 0.0  # finite results pass
    assert np.isnan(f(f32(1)))
    assert not nan_switch.watching


def test_without_a_context_it_is_a_switch() -> None:
    try:
        rlx.debug.nans()
        with pytest.raises(NonFiniteError):
            rlx.jit(planted)(f32(1))
    finally:
        rlx.debug.nans(False)
    assert np.isnan(rlx.jit(planted)(f32(1)))


def test_a_result_that_only_machine_code_makes_bad_says_so() -> None:
    f = rlx.jit(lambda x: x + 1.0)
    f(f32(1))
    (call,) = f.compiled.values()
    compiled = call.compiled
    watched = WatchedRun(compiled, [f32(1)])
    with pytest.raises(NonFiniteError, match="output 0 has 1 NaN of 1 elements") as error:
        watched.check([f32(np.nan)])
    assert any("reference is finite" in n for n in error.value.notes)


# -- print ------------------------------------------------------------------------------------------------------------
def test_outside_of_a_trace_it_prints_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    rlx.debug.print("{} and {name:.1f}", np.arange(3), name=0.25)
    assert capsys.readouterr().out == "[0 1 2] and 0.2\n"


def test_a_jitted_function_prints_each_time_it_runs_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    @rlx.jit
    def f(x: Any, tree: Any) -> Any:
        rlx.debug.print("x {:.2f}", x)
        y = x * 2
        rlx.debug.print("y {}, tree {tree[a]}", y, tree=tree)
        rlx.debug.print("no values")
        return y + tree["a"]

    for x in (1.0, 2.0):
        assert f(x, {"a": 3.0}) == 2 * x + 3
    assert capsys.readouterr().out == ("x 1.00\ny 2.0, tree 3.0\nno values\nx 2.00\ny 4.0, tree 3.0\nno values\n")
    assert len(f.history) == 1


def cube(x: Any) -> Any:
    rlx.debug.print("x = {:.1f}", x)
    return x**3


@pytest.mark.parametrize("wrap", [lambda f: f, rlx.jit], ids=["at once", "jit"])
@pytest.mark.parametrize(
    ("transform", "wanted"),
    [
        (rlx.grad, 12.0), (lambda f: rlx.grad(rlx.grad(f)), 12.0), (lambda f: rlx.grad(rlx.jit(f)), 12.0),
        (lambda f: lambda x: rlx.jvp(f, (x,), (1.0,))[1], 12.0), (rlx.jacfwd, 12.0),
        (lambda f: lambda x: rlx.vjp(f, x)[1](1.0)[0], 12.0), (rlx.checkpoint, 8.0),
    ],
    ids=["grad", "grad of grad", "grad of jit", "jvp", "jacfwd", "vjp", "checkpoint"],
)  # fmt: skip
def test_transforms_print_the_values_of_the_function_once(
    wrap: Any, transform: Any, wanted: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wrap(transform(cube))(2.0) == wanted
    assert capsys.readouterr().out == "x = 2.0\n"


def test_vmap_prints_the_whole_batch(capsys: pytest.CaptureFixture[str]) -> None:
    batch = f32(1, 2, 3)
    np.testing.assert_allclose(rlx.vmap(rlx.grad(cube))(batch), 3 * batch**2)
    np.testing.assert_allclose(rlx.jit(rlx.vmap(cube))(batch), batch**3)
    assert capsys.readouterr().out == "x = [1.0 2.0 3.0]\n" * 2


def running(carry: Any, x: Any) -> Any:
    rlx.debug.print("from {:.0f}", carry)
    total = carry + x
    rlx.debug.print("  by {:.0f} to {:.0f}", x, total)
    return total, total * 10


COUNTED = "from 1\n  by 5 to 6\nfrom 6\n  by 6 to 12\nfrom 12\n  by 7 to 19\n"


@pytest.mark.parametrize("wrap", [lambda f: f, rlx.jit, rlx.grad], ids=["at once", "jit", "grad"])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_scan_prints_step_by_step(wrap: Any, checkpoints: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    wrap(lambda start: rlx.scan(running, start, f32(5, 6, 7), checkpoints=checkpoints)[0])(np.float32(1))
    assert capsys.readouterr().out == COUNTED


def test_a_scan_that_prints_gives_what_it_gave(capsys: pytest.CaptureFixture[str]) -> None:
    final, rows = rlx.scan(running, np.float32(1), f32(5, 6, 7))
    assert final == 19 and np.array_equal(rows, f32(60, 120, 190))
    final, rows = rlx.scan(running, np.float32(1), f32(7, 6, 5), reverse=True)
    assert final == 19 and np.array_equal(rows, f32(190, 120, 60))
    assert capsys.readouterr().out == COUNTED * 2


def test_vmap_of_a_scan_prints_the_batch_of_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    rlx.vmap(lambda start: rlx.scan(running, start, f32(5, 6))[0])(f32(1, 2))
    assert capsys.readouterr().out == "from [1 2]\n  by [5 5] to [6 7]\nfrom [6 7]\n  by [6 6] to [12 13]\n"


def test_loops_in_loops_print_in_order_between_the_lines_around_them(capsys: pytest.CaptureFixture[str]) -> None:
    @rlx.jit(dims={"x": ("n",)})
    def f(x: Any) -> Any:
        def inner(j: Any, total: Any) -> Any:
            rlx.debug.print("  {} {}", j, total)
            return total + 1

        def outer(total: Any, row: Any) -> Any:
            rlx.debug.print("row {}", row)
            return rlx.fori_loop(0, 2, inner, total), None

        rlx.debug.print("begin")
        total = rlx.scan(outer, np.int32(0), x)[0]
        rlx.debug.print("end {}", total)
        return total

    for rows in (2, 1):
        f(np.arange(rows, dtype=np.int32))
    first = "begin\nrow 0\n  0 0\n  1 1\n"
    assert capsys.readouterr().out == first + "row 1\n  0 2\n  1 3\nend 4\n" + first + "end 2\n"
    assert len(f.history) == 1


def doubled(x: Any) -> Any:
    rlx.debug.print("at {:.0f}", x)
    return x * 2


def test_a_while_loop_prints_as_many_steps_as_it_made(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Any, limit: float = 20.0) -> Any:
        return rlx.while_loop(lambda x: x < limit, doubled, x, max_steps=8)

    for limit, wanted in ((20, "at 3\nat 6\nat 12\n"), (4, "at 3\n"), (1, "")):
        rlx.jit(f)(np.float32(3), np.float32(limit))
        assert capsys.readouterr().out == wanted
    assert rlx.grad(f)(np.float32(3)) == 8.0
    assert capsys.readouterr().out == "at 3\nat 6\nat 12\n"
    np.testing.assert_array_equal(rlx.vmap(f)(f32(3, 11)), f32(24, 22))
    assert capsys.readouterr().out == "at [3 11]\nat [6 0]\nat [12 0]\n"  # zeros once an element has ended


def test_a_long_while_loop_says_what_it_did_not_keep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.functional.control.MAX_PRINTED_STEPS", 2)
    assert rlx.while_loop(lambda x: x < 20, doubled, np.float32(1)) == 32
    assert capsys.readouterr().out == "at 1\nat 2\n... and 3 more steps, whose values were not stored\n"


def test_the_branch_that_is_taken_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def seen(i: Any, x: Any) -> Any:
        def yes(x: Any) -> Any:
            rlx.debug.print("{}: even, x {}", i, x)
            return x + 10

        def no(x: Any) -> Any:
            rlx.debug.print("{}: odd", i)
            return x + 1

        return rlx.cond(i % 2 == 0, yes, no, x)

    assert rlx.jit(lambda x: rlx.fori_loop(0, 3, seen, x))(np.int32(5)) == 26
    assert capsys.readouterr().out == "0: even, x 5\n1: odd\n2: even, x 16\n"


@pytest.mark.parametrize("where", ["rule", "condition"])
def test_where_it_cannot_print_it_says_what_can(where: str) -> None:
    def f(x: Any) -> Any:
        rlx.debug.print("{}", x)
        return x * 2

    if where == "rule":
        own = rlx.custom_vjp(f)
        own.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
        run = own
    else:

        def run(x: Any) -> Any:
            return rlx.while_loop(lambda x: f(x) < 10, lambda x: x + 1, x)

    with pytest.raises(GraphError, match="custom rules, or in the condition of a while_loop") as error:
        run(np.float32(1))
    line = inspect.getsourcelines(f)[1] + 1
    assert any(f"test_debug.py:{line}" in n for n in error.value.notes)
    assert "in the body of the loop" in (error.value.hint or "")


def test_a_format_that_does_not_fit_is_an_error_where_it_is_written() -> None:
    with pytest.raises(GraphError, match="does not fit 1 values"):
        rlx.jit(lambda x: rlx.debug.print("{} {}", x))(1.0)
