"""Looking into jitted functions: program, graph, report, memory, trace, page and export; and how functions print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import GraphError, RequestError

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)
PARAMS = {"w": np.ones((3, 4), np.float32), "b": np.zeros(4, np.float32)}


def layer(params: dict[str, Any], x: Any) -> Any:
    return {"y": np.tanh(x @ params["w"] + params["b"]), "n": np.sum(x)}


def test_a_jitted_function_can_be_looked_into(tmp_path: Path) -> None:
    step = rlx.jit(layer)
    with pytest.raises(GraphError, match="report: layer has not been called") as caught:
        step.report()
    assert caught.value.hint is not None and "f.report(*args)" in caught.value.hint
    before = step.graph(PARAMS, X)  # with arguments it need not have been called
    assert [n.attrs["name"] for n in before.inputs] == ["params.b", "params.w", "x"]
    result = step(PARAMS, X)
    assert step.graph().fingerprint() == step.program().graph.fingerprint() == before.fingerprint()
    report = step.report()
    assert report.seconds > 0 and report.launches and report.name == "layer"
    assert step.report(PARAMS, X[:1]).seconds > 0  # another signature
    assert str(step.memory()).startswith("memory of layer")
    timeline = json.loads(step.trace(tmp_path / "trace.json", PARAMS, X).read_text())
    assert timeline["traceEvents"]
    assert "layer" in step.page(tmp_path / "page.html").read_text()
    inputs = {"params.b": PARAMS["b"], "params.w": PARAMS["w"], "x": X}
    for path in (step.export(tmp_path / "a.rlxp", PARAMS, X), rlx.export(step, tmp_path / "b.rlxp")):
        loaded = rlx.load_exported(path)
        assert isinstance(loaded, rlx.CompiledGraph)
        n, y = loaded.run(inputs)
        np.testing.assert_array_equal(y, result["y"])
        np.testing.assert_array_equal(n, result["n"])
    with pytest.raises(RequestError, match="a jitted function or a model, found function"):
        rlx.export(layer, tmp_path / "c.rlxp")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="trace: needs the arguments"):
        step.trace(tmp_path / "trace.json")


def test_what_is_looked_at_is_the_last_call() -> None:
    double = rlx.jit(lambda x: x * 2.0)
    double(X)
    double(X[0])
    assert double.graph().inputs[0].types[0].shape == (3,)
    double(X)
    assert double.graph().inputs[0].types[0].shape == (2, 3)
    static = rlx.jit(lambda x, n: x * n, static_argnums=1)
    static(X, 3)
    assert len(static.graph().inputs) == 1
    nothing = rlx.jit(lambda: None)
    nothing()
    with pytest.raises(GraphError, match="returns no arrays"):
        nothing.report()


def test_arguments_by_name_are_the_same_program() -> None:
    subtract = rlx.jit(lambda a, b: a - b)
    one, two = np.float32(1), np.full((), 2, np.float32)
    for _ in range(2):  # the second call takes the short way
        assert float(subtract(one, two)) == -1.0
        assert float(subtract(b=two, a=one)) == -1.0
        assert float(subtract(one, b=two)) == -1.0
        assert float(subtract(b=one, a=two)) == 1.0


def test_functions_say_what_they_are() -> None:
    def loss(x: Any) -> Any:
        return np.sum(x)

    shown = {
        "<rlx.grad of loss>": rlx.grad(loss),
        "<rlx.grad of loss, argnums=(0, 1)>": rlx.grad(loss, (0, 1)),
        "<rlx.vmap of rlx.grad of loss, in_axes=(0, None)>": rlx.vmap(rlx.grad(loss), (0, None)),
        "<rlx.value_and_grad of loss, has_aux=True>": rlx.value_and_grad(loss, has_aux=True),
        "<rlx.hessian of loss>": rlx.hessian(loss),
        "<rlx.jacfwd of sin>": rlx.jacfwd(np.sin),
        "<rlx.checkpoint of loss, keep='nothing'>": rlx.checkpoint(loss),
        "<rlx.jit of rlx.grad of loss, not traced yet>": rlx.jit(rlx.grad(loss)),
        "<rlx.custom_vjp of loss>": rlx.custom_vjp(loss),
    }
    assert {repr(f): f for f in shown.values()} == shown
    assert rlx.grad(loss).__name__ == "loss" and rlx.jit(loss).__doc__ == loss.__doc__


def test_a_notebook_shows_why_a_function_was_traced() -> None:
    double = rlx.jit(lambda x: x * 2.0)
    assert "not traced yet" in double._repr_html_()
    double(X)
    html = double._repr_html_()
    assert "traced for x: f32[2, 3]" in html and "<details" in html and "mul" in html
    assert repr(double) == "<rlx.jit of <lambda>, traced once>"


def test_a_counter_that_starts_as_an_array_is_traced_once() -> None:
    """As docs/slow.md says: a NumPy scalar counts as a number."""
    for start, traces in ((np.zeros((), np.int32), 1), (np.int32(0), 2), (0, 2)):
        f, count = rlx.jit(lambda t, x: (t + 1, x * t)), start
        for _ in range(3):
            count, _ = f(count, np.ones(2, np.float32))
        assert len(f.history) == traces and count == 3
