"""Building graphs: manners of values, operands, attributes, indexing, equality and fingerprints."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import any_graphs, examples
from hypothesis import given
from hypothesis import strategies as st
from limits import LONGEST_S

import rlx
from rlx import Graph, Value
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.evaluate import run
from rlx.ir.registry import OPS
from rlx.types import dim


def f32(*shape: Any) -> Value:
    return Graph("g").input("x", shape)


# -- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ask", [bool, int, float, iter, list, lambda x: 1 if x else 2, lambda x: max(x, x)])
def test_a_value_is_no_number_while_the_graph_is_built(ask: Callable[[Value], Any]) -> None:
    with pytest.raises(GraphError) as caught:
        ask(f32(2))
    assert caught.value.hint


def test_equality_of_values_is_identity() -> None:
    g = Graph("g")
    x, y = g.input("x", (2,)), g.input("y", (2,))
    three: object = 3
    assert x == x.node[0] and x != y and (x == three) is False
    assert {x: 1}[x.node[0]] == 1
    assert x in [y, x] and x not in [y]
    assert g.equal(x, y).dtype.name == "bool"


def test_unknown_names_get_a_hint() -> None:
    x = f32(2)
    with pytest.raises(AttributeError, match="did you mean 'softmax'"):
        _ = x.sofmax
    with pytest.raises(AttributeError, match="did you mean 'softmax'"):
        _ = x.graph.sofmax
    with pytest.raises(GraphError, match="has no attribute 'axes'") as caught:
        x.softmax(axes=0)
    assert caught.value.hint == "did you mean 'axis'?"
    with pytest.raises(GraphError, match="no op is called 'sofmax'"):
        x.graph.apply("sofmax", x)
    with pytest.raises(AttributeError):
        _ = x.input  # leaves are no methods
    assert not hasattr(x, "__array__") and not hasattr(x, "shap")


def test_every_op_is_a_method_and_a_builder() -> None:
    x = f32(2, 3)
    assert x.tanh().type == x.graph.tanh(x).type == x.type
    assert all(callable(getattr(x, name)) for name, d in OPS.items() if "leaf" not in d.traits)


def test_numpy_leaves_arithmetic_with_values_to_us() -> None:
    x = f32(2, 3)
    left = np.ones((2, 3), np.float32) + x
    assert isinstance(left, Value) and left.node.op == "add"
    assert (np.float32(2) * x).node.op == "mul"


def test_an_operand_of_another_graph_is_an_error() -> None:
    x, y = f32(2), f32(2)
    with pytest.raises(GraphError, match="belongs to graph 'g', not to 'g'"):
        x + y
    with pytest.raises(GraphError, match="not a value of graph"):
        x.graph.set_outputs([y])


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda x: x.graph.add(x), "takes 2 operands"),
        (lambda x: x.graph.add(x, x, x), "takes 2 operands"),
        (lambda x: x + "a", "str is not an operand"),
        (lambda x: x + None, "operand 'b' is missing"),
        (lambda x: x + dim("n"), "Dim is not an operand"),
        (lambda x: x.graph.attention(x, x, mask=x), "operand 'v' is missing"),
        (lambda x: x.graph.add(x, a=x), "operand 'a' is given twice"),
        (lambda x: x.topk(), "attribute 'k' is missing"),
        (lambda x: x.topk(k="many"), "topk: cannot be typed"),
        (lambda x: x.softmax(axis="last"), "softmax: cannot be typed"),
        (lambda x: x.softmax(axis=object()), "attribute 'axis' cannot be a object"),
        (lambda x: x.cast(dtype="f99"), "no element type is called 'f99'"),
        (lambda x: x.tanh().graph.tanh(x.astype("i32")), "tanh: takes floats, found i32"),
    ],
)
def test_what_does_not_fit_is_a_graph_error(build: Callable[[Value], Any], problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        build(f32(2, 3))


def test_an_error_says_operands_and_place() -> None:
    x = f32(2, 4)
    with pytest.raises(ShapeError) as caught:
        x @ np.ones((3, 5), np.float32)
    assert str(caught.value) == "matmul: inner sizes differ, 4 and 3"
    assert "  operands: f32[2, 4], f32[3, 5]" in caught.value.notes
    assert any("built at: test_graph.py:" in note for note in caught.value.notes)


def test_attributes_take_many_spellings() -> None:
    x = f32("n", 4)
    same = [x.astype("i32"), x.astype(np.int32), x.cast("i32"), x.cast(np.dtype("int32")), x.graph.cast(x, "int32")]
    assert all(v.node.attrs == same[0].node.attrs for v in same)
    assert x.sum(axis=[0, np.int64(1)]).node.attrs["axis"] == (0, 1)
    assert x.expand(shape=("m", "n", 4)).shape == (dim("m"), dim("n"), 4)
    assert x.reshape(-1).shape == x.reshape((np.int64(-1),)).shape == (4 * dim("n"),)
    assert x.reshape("n", -1, 2).shape == (dim("n"), 2, 2)
    assert type(x.rms_norm(eps=np.float64(0.5)).node.attrs["eps"]) is float
    assert x.graph.concatenate([x, x], axis=0).shape == x.graph.concatenate(x, x, axis=0).shape


def test_reshape_infers_a_size_next_to_sums() -> None:
    x = f32("past + seq", 6)
    assert x.reshape("past + seq", -1, 2).shape == (*x.shape[:1], 3, 2)
    with pytest.raises(ShapeError, match="only one size may be -1"):
        x.reshape(-1, -1)
    with pytest.raises(ShapeError, match="cannot be cut into rows of 4"):
        x.reshape(-1, 4)
    with pytest.raises(ShapeError, match="next to a size of 0"):
        x.reshape(-1, 0)


def test_leaves_have_names_of_their_own() -> None:
    g = Graph("g")
    g.input("x", (2,))
    for make in (g.input, g.param):
        with pytest.raises(GraphError, match="'x' exists already"):
            make("x", (2,))
        with pytest.raises(GraphError, match="has no name"):
            make("", (2,))
    assert g.named("x").shape == (2,)
    with pytest.raises(GraphError, match="nothing is called 'y'"):
        g.named("y")


def test_a_constant_does_not_change_with_the_array_it_came_from() -> None:
    g, data = Graph("g"), np.ones(3, np.float32)
    c = g.constant(data)
    before = g.fingerprint()
    data[:] = 7
    assert (c.node.attrs["value"].data == 1).all() and g.fingerprint() == before
    with pytest.raises(ValueError, match="read-only"):
        c.node.attrs["value"].data[0] = 2


# -- indexing ---------------------------------------------------------------------------------------------------------
axis_keys = st.integers(-3, 2) | st.slices(3).filter(lambda s: (s.step or 1) > 0)


@given(st.lists(axis_keys, max_size=3), st.integers(0, 3), st.booleans(), st.lists(st.integers(0, 4), max_size=2))
@examples()
def test_indexing_agrees_with_numpy(keys: list[Any], gap: int, dots: bool, new_axes: list[int]) -> None:
    if dots:
        keys.insert(min(gap, len(keys)), ...)
    for at in new_axes:
        keys.insert(at, None)
    data = np.arange(27, dtype=np.float32).reshape(3, 3, 3)
    x = f32(3, 3, 3)
    try:
        y = x[tuple(keys)]
    except ShapeError as error:
        assert "does not lie within" in str(error)  # what NumPy takes for an empty slice
        return
    (actual,) = run(x.graph.set_outputs([y]), {"x": data}, {})
    assert actual.shape == y.shape
    np.testing.assert_array_equal(actual, data[tuple(keys)])


def test_indexing_of_symbolic_sizes() -> None:
    x, n = f32("n", 4, "m"), dim("n")
    assert x[1:3, ..., -1].shape == (2, 4)
    (cut,) = x[..., -1].node.operands
    assert cut is not None and cut.node.attrs["start"][2] == dim("m") - 1
    assert x[n - 2 :].shape == (2, 4, dim("m"))
    assert x[:-1].shape == (n - 1, 4, dim("m"))
    assert x[0].shape == (4, dim("m"))
    assert x[::2].shape == ((n + 1) // 2, 4, dim("m"))
    assert x[..., None, -1].shape == (n, 4, 1)
    assert x[:, :, None].shape == (n, 4, 1, dim("m"))
    assert x[0, 0, 0][None].shape == (1,)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ((0, 0, 0), "3 indices for"), ((..., 0, 0, 0), "3 indices for"), (4, "4 lies outside an axis of size 3"),
        (-4, "-4 lies outside an axis of size 3"), (True, "True is not an integer or a slice"),
        (1.5, "1.5 is not an integer"), ("a", "'a' is not an integer"), ((None, 0, 0, 0), "3 indices for"),
        ((..., ...), "Ellipsis is not an integer"), (slice(0, 4), "0:4 on axis 0 does not lie within 0:3"),
        (slice(None, None, -1), "step -1 on axis 0 is not positive"),
    ],
)  # fmt: skip
def test_indices_that_do_not_fit(key: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        f32(3, 5)[key]


def test_a_value_is_no_index() -> None:
    x = f32(3, 5)
    with pytest.raises(GraphError, match="is not an integer") as caught:
        x[x.graph.constant([0])]
    assert caught.value.hint and "gather" in caught.value.hint


# -- comparing --------------------------------------------------------------------------------------------------------
def mlp(name: str = "g", stage: str = "here") -> Graph:
    g = Graph(name)
    x, w = g.input("x", ("n", 4)), g.param("w", (4, 2))
    with rlx.stage(stage):
        return g.set_outputs([g.rms_norm(x @ w, eps=1e-5) * 2.0])


def test_equality_is_structural_and_ignores_names_and_origins() -> None:
    assert mlp() == mlp("other", stage="there")
    assert hash(mlp()) == hash(mlp("other"))
    assert copy.deepcopy(mlp()) == mlp()
    assert mlp() != "graph"


CHANGED = {
    "attribute": ("eps=1e-05", "eps=1e-06"),
    "constant": ("value=2.0", "value=2.5"),
    "sign of a zero": ("value=2.0", "value=-0.0"),
    "edge": ("mul(%3, %4)", "mul(%3, %3)"),
    "order of operands": ("mul(%3, %4)", "mul(%4, %3)"),
    "output": ("return %5", "return %3"),
    "number of outputs": ("return %5", "return %5, %5"),
    "kind of a leaf": ("input(", "param("),
    "name of a leaf": ('"w"', '"v"'),
    "symbol": ("n, ", "m, "),
    "limit": ("mir {", "mir max(n=4) {"),
    "type": ("f32", "f64"),
    "level": ("mir {", "hir {"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_equality_sees_everything_else(what: str) -> None:
    text = mlp().text()
    assert CHANGED[what][0] in text
    other = Graph.parse(text.replace(*CHANGED[what]))
    assert mlp() != other and mlp().fingerprint() != other.fingerprint()


def test_fingerprints_keep_names_and_kinds_of_attributes_apart() -> None:
    def two_inputs(a: str, b: str) -> str:
        g = Graph("g")
        g.input(a, (1,))
        g.input(b, (1,))
        return g.fingerprint()

    assert two_inputs('x"', "y") != two_inputs("x", '"y')
    prints = set()
    for axis in (1, (1,), None, (0, 1)):
        x = f32(2, "n")
        prints.add(x.graph.set_outputs([x.sum(axis=axis)]).fingerprint())
    assert len(prints) == 4


SCRIPT = """
import pickle, sys
from graphs import any_graphs, examples
from layers import MINILM, SMOLLM, bert_graph, llama_graph
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise
from targets import AVX512
for g in (bert_graph(MINILM), llama_graph(SMOLLM, past=True)):
    done = optimise(g, AVX512)
    print(g.fingerprint(), done.main.fingerprint(), done.bind.fingerprint())
    print(schedule(done.main, AVX512).fingerprint(), schedule(done.bind, AVX512).fingerprint())
print(hash("x"))
"""


def test_fingerprints_are_the_same_in_every_process() -> None:
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join([here, *sys.path])
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE, text=True,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    (first, second) = (job.communicate(timeout=LONGEST_S)[0].splitlines() for job in jobs)
    assert len(first) == 5 and first[:4] == second[:4]
    assert first[4] != second[4], "the processes hash differently"


@given(any_graphs(max_steps=6))
@examples(30)
def test_fingerprints_survive_pickling(g: Graph) -> None:
    assert pickle.loads(pickle.dumps(g)).fingerprint() == g.fingerprint()


def test_a_pickle_opens_in_a_process_that_has_imported_nothing(tmp_path: Any) -> None:
    path = tmp_path / "graph.pickle"
    path.write_bytes(pickle.dumps(mlp()))
    script = f"import pickle; print(pickle.load(open({str(path)!r}, 'rb')).fingerprint())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    actual = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert actual.stdout.strip() == mlp().fingerprint()


# -- reading ----------------------------------------------------------------------------------------------------------
def test_users_count_each_use() -> None:
    x = f32(2)
    y = x * x
    users = x.graph.users()
    assert users[x] == [y.node, y.node] and y not in users
    assert x.graph.reachable([y]) == {x.node, y.node}


def test_symbols_come_from_the_leaves() -> None:
    g = Graph("g")
    g.input("x", ("b*a", "min(c, 4)"))
    assert g.symbols() == ["a", "b", "c"]
    assert repr(g) == "<graph 'g' mir: 1 node, 0 outputs>"


def test_numbers_too_large_for_f32_are_infinite() -> None:
    c = (f32(2) + 1e300).node.operands[1]
    assert c is not None and np.isinf(c.node.attrs["value"].data)
    with pytest.raises(DTypeError, match="does not fit"):
        f32(2).astype("i8") + 300


def test_a_node_and_its_attributes_cannot_be_changed() -> None:
    g = Graph("fixed")
    node = g.softmax(g.input("x", (2, 3)), axis=0).node
    again = g.append(node.op, node.operands, node.attrs, node.types)
    for frozen in (node, again):
        with pytest.raises(TypeError, match="does not support item assignment"):
            frozen.attrs["axis"] = 1  # type: ignore[index]
        with pytest.raises(AttributeError):
            frozen.attrs = {"axis": 1}  # type: ignore[misc]
        assert frozen.attrs == {"axis": 0}


def test_a_value_stays_the_result_of_its_node() -> None:
    g = rlx.Graph("g")
    value = g.input("x", (2,)).exp()
    for name in ("node", "index"):
        with pytest.raises(AttributeError, match=f"{name} of a value cannot be set"):
            setattr(value, name, getattr(g.nodes[0][0], name))
    assert value.node is g.nodes[1] and value.index == 0
