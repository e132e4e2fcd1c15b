"""Arrays as users have them: transposed, sliced, reversed, Fortran order, read-only, 0-d; and weights and constants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from oracles import NUMPY, Array
from sample_graphs import element_types, sample_graph, user_ops
from targets import supported

import rlx
from rlx.ir import registry

BEST = supported()[0].name


def _between(array: Array) -> Array:
    """Every other element of a larger array on each axis, with something else between."""
    larger = np.ones([2 * d + 1 for d in array.shape], array.dtype)
    at = tuple(slice(1, None, 2) for _ in array.shape)
    larger[at] = array
    return larger[at]


def _reversed(array: Array) -> Array:
    at = tuple(slice(None, None, -1) for _ in array.shape)
    return np.ascontiguousarray(array[at])[at]


def _read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _unaligned(array: Array) -> Array:
    """The same numbers at an address that is a multiple of the element size but not of a vector's."""
    block = np.empty(array.nbytes + 64 + array.itemsize, np.uint8)
    start = -block.ctypes.data % 64 + array.itemsize
    view = block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "fortran": lambda a: np.asfortranarray(a),
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "between": _between,
    "reversed": _reversed,
    "broadcast": lambda a: np.broadcast_to(a[..., :1], a.shape) if a.size else a,
    "read-only": _read_only,
    "unaligned": _unaligned,
}


@pytest.mark.parametrize("place", ("reference", BEST))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_an_input_does_not_matter(layout: str, place: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (7, 33), "b": (33, 19), "c": (7, 1), "d": (3, 5, 17)}
    arrays = {n: LAYOUTS[layout](rng.uniform(-2, 2, s).astype(np.float32)) for n, s in shapes.items()}
    graph = rlx.Graph("layouts")
    a, b, c, d = (graph.input(n, s) for n, s in shapes.items())
    graph.set_outputs(
        [a @ b + c, a.softmax(), a.sum(axis=0), d.mT, d.layer_norm(), graph.concatenate([d, d * 2], axis=1)]
    )
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    before = {n: x.copy() for n, x in arrays.items()}
    actual = compiled.run(arrays)
    plain = compiled.run({n: np.ascontiguousarray(x) for n, x in arrays.items()})
    for x, y in zip(actual, plain, strict=True):
        np.testing.assert_array_equal(x, y)
    p, q, r, s = (arrays[n].astype(np.float64) for n in shapes)
    np.testing.assert_allclose(actual[0], p @ q + r, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(actual[3], s.swapaxes(1, 2))
    for n, x in arrays.items():
        np.testing.assert_array_equal(x, before[n], err_msg=f"{n} was written to")


@pytest.mark.parametrize("place", ("reference", BEST))
@pytest.mark.parametrize("name", NUMPY)
def test_arrays_without_axes(name: str, place: str) -> None:
    graph = rlx.Graph("scalar")
    x, y = graph.input("x", (), name), graph.input("y", (3,), name)
    graph.set_outputs(
        [x, graph.where(x.astype("bool"), y, x), x.reshape((1, 1)), graph.expand(x, shape=(2, 3)), x.astype("f32")]
    )
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    one, some = np.array(1).astype(NUMPY[name]), np.array([0, 1, 1]).astype(NUMPY[name])
    same, chosen, square, wide, single = compiled.run({"x": one, "y": some})
    assert same.shape == () and same.dtype == NUMPY[name] and same == 1
    np.testing.assert_array_equal(chosen, some)
    np.testing.assert_array_equal(square, [[1]])
    np.testing.assert_array_equal(wide, np.ones((2, 3)))
    assert single.shape == () and single.dtype == np.float32 and single == 1


def test_outputs_belong_to_the_caller() -> None:
    graph = rlx.Graph("twice")
    x = graph.input("x", (4,))
    y = x + 1
    graph.set_outputs([x, y, y, x.reshape(2, 2)])
    compiled = rlx.compile(graph)
    inputs = np.arange(4, dtype=np.float32)
    first = compiled.run({"x": inputs})
    for array in first:
        assert array.flags.writeable and array.flags.c_contiguous and not np.shares_memory(array, inputs)
        array[...] = -1
    for array, wanted in zip(
        compiled.run({"x": inputs}), [inputs, inputs + 1, inputs + 1, inputs.reshape(2, 2)], strict=True
    ):
        np.testing.assert_array_equal(array, wanted)


# -- the three kinds of leaves ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", [o.name for o in user_ops() if element_types(o)])
def test_weights_give_what_inputs_give(op: str) -> None:
    """All operands are params: the whole op runs in the bind program."""
    element_type = element_types(registry.get(op))[0]
    case = sample_graph(op, element_type, "param")
    compiled = rlx.compile(case.graph, target=BEST)
    compiled.set_params(case.inputs)
    case.check(compiled.run({}))


@pytest.mark.parametrize("op", [o.name for o in user_ops() if element_types(o) and len(o.schema.operands) > 1])
def test_a_weight_on_the_right_gives_what_an_input_gives(op: str) -> None:
    """The first operand is an input, the others are params: packed, hoisted or read as they are."""
    element_type = element_types(registry.get(op))[0]
    case = sample_graph(op, element_type, "first input")
    compiled = rlx.compile(case.graph, target=BEST)
    compiled.set_params({n: a for n, a in case.inputs.items() if n in compiled.param_types})
    case.check(compiled.run({n: a for n, a in case.inputs.items() if n in compiled.input_types}))


@pytest.mark.parametrize("op", [o.name for o in user_ops() if element_types(o)])
def test_constants_fold_to_what_inputs_give(op: str) -> None:
    element_type = element_types(registry.get(op))[0]
    case = sample_graph(op, element_type, "constant")
    case.check(rlx.compile(case.graph, target=BEST).run({}))
