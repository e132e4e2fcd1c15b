"""The evaluator against NumPy written out, and its own strictness."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from layers import (
    Bert,
    Llama,
    bert_graph,
    bert_inputs,
    bert_numpy,
    llama_graph,
    llama_inputs,
    llama_numpy,
    relative,
    weights,
)

from rlx import Graph
from rlx.errors import BindError, LowerError
from rlx.ir.evaluate import run
from rlx.ir.registry import OPS, op
from rlx.types import TensorType


def test_a_small_composite() -> None:
    g = Graph("g")
    x, w, idx = g.input("x", ("n", 4)), g.param("w", (4, 3)), g.input("i", (2,), "i32")
    h = (x @ w + 1.0).tanh()
    top, where = h.topk(k=2)
    g.set_outputs([h.softmax(axis=-1), h.gather(idx)[:, ::2], top, where, (h > 0.5).astype("i32").sum(axis=0)])
    rng = np.random.default_rng(0)
    a, b, i = (
        rng.standard_normal((5, 4), np.float32),
        rng.standard_normal((4, 3), np.float32),
        np.array([4, 0], np.int32),
    )
    actual = run(g, {"x": a, "w": b, "i": i}, {"n": 5})
    t = np.tanh(a @ b + 1)
    e = np.exp(t)
    order = np.argsort(-t, axis=-1)[:, :2]
    expected = [e / e.sum(-1, keepdims=True), t[i][:, ::2], np.take_along_axis(t, order, -1), order, (t > 0.5).sum(0)]
    for have, want, value in zip(actual, expected, g.outputs, strict=True):
        assert have.dtype == value.dtype.numpy
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_narrow_floats_compute_in_f32_and_round_once_an_op() -> None:
    g = Graph("g")
    x = g.input("x", (3,), "bf16")
    g.set_outputs([x * x + x])
    data = np.array([1.0078125, 3.140625, -0.2001953125], ml_dtypes.bfloat16)
    wide = data.astype(np.float32)
    product = (wide * wide).astype(ml_dtypes.bfloat16)
    expected = (product.astype(np.float32) + wide).astype(ml_dtypes.bfloat16)
    assert run(g, {"x": data}, {})[0].tobytes() == expected.tobytes()


def test_whole_layers_agree_with_numpy() -> None:
    bert, llama = Bert(16, 2, 24, layers=2), Llama(16, 4, 2, 4, 24, layers=2)
    inputs = bert_inputs(bert, 2, 5)
    (actual,) = run(bert_graph(bert), {**weights(bert), **inputs}, {"batch": 2, "seq": 5})
    assert relative(actual, bert_numpy(bert, weights(bert), **inputs)[0]) < 1e-5
    inputs = llama_inputs(llama, 2, 3, past=4)
    all_found = run(llama_graph(llama, past=True), {**weights(llama), **inputs}, {"batch": 2, "seq": 3, "past": 4})
    for have, want in zip(all_found, llama_numpy(llama, weights(llama), **inputs), strict=True):
        assert relative(have, want) < 1e-5


def test_shapes_that_do_not_fit_their_types_are_errors() -> None:
    g = Graph("g")
    x = g.input("x", ("n", 4))
    g.set_outputs([x.tanh()])
    with pytest.raises(BindError, match=r"%0 input: shape is \(3, 4\), its type f32\[n, 4\] says \(2, 4\)"):
        run(g, {"x": np.ones((3, 4), np.float32)}, {"n": 2})
    with pytest.raises(BindError, match="'n' is not bound"):
        run(g, {"x": np.ones((3, 4), np.float32)}, {})


def test_an_op_without_a_reference_says_where_to_add_one() -> None:
    @op("nothing_at_all")
    def nothing(x: TensorType) -> TensorType:
        return x

    try:
        g = Graph("g")
        g.set_outputs([g.nothing_at_all(g.input("x", (1,)))])
        with pytest.raises(LowerError, match="has no NumPy reference") as caught:
            run(g, {"x": np.ones(1, np.float32)}, {})
        assert caught.value.hint and "test_evaluate.py" in caught.value.hint
    finally:
        del OPS["nothing_at_all"]
