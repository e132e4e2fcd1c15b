"""What only run time can know to be wrong: a typed error on every device, before anything outside is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracles import Array
from targets import supported

import rlx
from rlx.errors import BindError, KernelError
from rlx.transforms import vmap

PLACES = ["reference", "toy", *(t.name for t in supported())]
EVERY_PLACE = pytest.mark.parametrize("place", PLACES)
N = rlx.dim("n")


def compiled(place: str, graph: rlx.Graph) -> rlx.CompiledGraph:
    return rlx.compile(graph, place) if place in ("reference", "toy") else rlx.compile(graph, target=place)


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


# -- indices ----------------------------------------------------------------------------------------------------------
INDEXING: dict[str, Callable[[Any, Any], Any]] = {
    "gather rows": lambda g, i: g.gather(g.input("x", ("n", 40)), i),
    "gather columns": lambda g, i: g.gather(g.input("x", (40, "n")), i, axis=1),
    "scatter_add": lambda g, i: g.scatter_add(g.input("x", ("n", 40)), i, g.input("u", (37, 40))),
    "rope": lambda g, i: g.rope(g.input("x", (1, 37, 2, 8)), g.input("c", ("n", 4)), g.input("s", ("n", 4)),
         i.reshape(1, 37)),
}  # fmt: skip


IN_LANES: dict[str, Callable[[Any, Any], Any]] = {
    "gather": lambda g, i: g.gather(g.input("x", (3, 4)), i),
    "scatter": lambda g, i: g.scatter(g.input("x", (3, 4)), i, g.input("u", (2, 4))),
    "scatter_add": lambda g, i: g.scatter_add(g.input("x", (3, 4)), i, g.input("u", (2, 4))),
    "grouped_matmul": lambda g, i: g.grouped_matmul(g.input("x", (2, 4)), g.input("w", (3, 4, 5)), i),
    "grouped_outer": lambda g, i: g.grouped_outer(g.input("x", (2, 4)), g.input("y", (2, 5)), i, groups=3),
    "group_rows": lambda g, i: g.group_rows(i, groups=3)[0],
}


@pytest.mark.parametrize("wrong", [-1, 3])
@pytest.mark.parametrize("name", IN_LANES)
def test_an_index_of_a_lane_does_not_reach_into_another(name: str, wrong: int) -> None:
    graph = rlx.Graph(name)
    graph.set_outputs([IN_LANES[name](graph, graph.input("i", (2,), "i32"))])
    run = rlx.compile(vmap(graph))
    arrays = {n: ones(3, *t.shape[1:]) for n, t in run.input_types.items() if n != "i"}  # type: ignore[arg-type]
    good = np.int32([[0, 2], [1, 1], [2, 0]])
    run.run({**arrays, "i": good})
    good[1, 0] = wrong
    with pytest.raises(KernelError, match="outside"):
        run.run({**arrays, "i": good})


@EVERY_PLACE
@pytest.mark.parametrize("index_type", ("i32", "i64", "i8"))
@pytest.mark.parametrize("name", INDEXING)
def test_an_index_outside_its_axis_is_an_error(name: str, index_type: str, place: str) -> None:
    graph = rlx.Graph(name)
    graph.set_outputs(INDEXING[name](graph, graph.input("i", (37,), index_type)))
    run = compiled(place, graph)
    arrays = {n: ones(*(5 if d == N else d for d in t.shape)) for n, t in run.input_types.items() if n != "i"}
    good = np.arange(37).astype(index_type.replace("i", "int")) % 5
    before = run.run({**arrays, "i": good})
    for position in (0, 15, 16, 36):
        for bad in (5, -1, 100, -128):
            indices = good.copy()
            indices[position] = bad
            with pytest.raises(KernelError, match=r"outside"):
                run.run({**arrays, "i": indices})
    for a, b in zip(before, run.run({**arrays, "i": good}), strict=True):  # an error leaves nothing behind
        np.testing.assert_array_equal(a, b)


@EVERY_PLACE
def test_an_empty_table_has_no_rows(place: str) -> None:
    graph = rlx.Graph("empty")
    graph.set_outputs(graph.gather(graph.input("x", ("n", 4)), graph.input("i", ("m",), "i32")))
    run = compiled(place, graph)
    assert run.run({"x": ones(0, 4), "i": np.zeros(0, np.int32)})[0].shape == (0, 4)
    with pytest.raises(KernelError):
        run.run({"x": ones(0, 4), "i": np.zeros(1, np.int32)})


# -- sizes -----------------------------------------------------------------------------------------------------------
# A graph over x: f32[n], and the least n that it runs with.
SIZES: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "topk": (lambda g, x: x.topk(k=4)[0], 4),
    "first four": (lambda g, x: x[:4], 4),
    "from the third": (lambda g, x: x[3:], 3),
    "last three": (lambda g, x: x[-3:], 3),
    "but the last two": (lambda g, x: x[:-2], 2),
    "one element": (lambda g, x: x[5], 6),
    "two to four": (lambda g, x: g.slice(x, start=(2,), stop=(4,), step=(2,)), 4),
    "cut by a difference": (lambda g, x: g.slice(x, start=(N - 4,), stop=(N - 1,), step=(1,)), 4),
    "padded by a difference": (lambda g, x: g.pad(x, low=(N - 3,), high=(0,)), 3),
}  # fmt: skip


@EVERY_PLACE
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_does_not_fit_is_an_error(name: str, place: str) -> None:
    build, least = SIZES[name]
    graph = rlx.Graph(name.replace(" ", "_"))
    graph.set_outputs(build(graph, graph.input("x", (N,))))
    run = compiled(place, graph)
    for n in range(least):
        with pytest.raises(BindError, match=r"-?\d"):
            run.run({"x": ones(n)})
    for n in (least, least + 1, least + 30):
        run.run({"x": ones(n)})


def test_a_size_that_can_never_fit_is_an_error_at_once() -> None:
    graph = rlx.Graph("never")
    x = graph.input("x", (N,))
    with pytest.raises(rlx.errors.ShapeError, match=r"0:n \+ 1 on axis 0 does not lie within 0:n"):
        graph.slice(x, start=(0,), stop=(N + 1,), step=(1,))
    with pytest.raises(rlx.errors.ShapeError, match=r"n:n - 1 on axis 0"):
        graph.slice(x, start=(N,), stop=(N - 1,), step=(1,))


@EVERY_PLACE
def test_tables_wider_than_a_head_are_an_error(place: str) -> None:
    graph = rlx.Graph("rope")
    operands = (
        graph.input("x", (1, 2, 1, 8)),
        graph.input("c", (3, N)),
        graph.input("s", (3, N)),
        graph.input("p", (1, 2), "i32"),
    )
    graph.set_outputs(graph.rope(*operands))
    run = compiled(place, graph)
    fixed = {"x": ones(1, 2, 1, 8), "p": np.zeros((1, 2), np.int32)}
    for n in (0, 1, 3, 4):
        run.run({**fixed, "c": ones(3, n), "s": ones(3, n)})
    with pytest.raises(BindError, match=r"10.*8|8.*10"):
        run.run({**fixed, "c": ones(3, 5), "s": ones(3, 5)})


@EVERY_PLACE
def test_sizes_assumed_equal_are_checked(place: str) -> None:
    graph = rlx.Graph("assume")
    x, y = graph.input("x", ("n", 3)), graph.input("y", ("m", 3))
    graph.set_outputs(x.assume_equal(shape=y.shape) + y)
    run = compiled(place, graph)
    np.testing.assert_array_equal(run.run({"x": ones(5, 3), "y": ones(5, 3)})[0], 2 * ones(5, 3))
    with pytest.raises(BindError, match=r"2.*4"):
        run.run({"x": ones(2, 3), "y": ones(4, 3)})


WINDOWS: dict[str, Callable[[Any, Any], Any]] = {
    "conv2d": lambda g, x: g.conv2d(x, g.input("w", (2, 2, 3, 3))),
    "padded": lambda g, x: g.conv2d(x, g.input("w", (2, 2, 3, 3)), padding=(0, 1), dilation=(1, 2)),
    "patches": lambda g, x: g.conv2d(x, g.input("w", (2, 2, 3, 3)), stride=3),
    "pool2d": lambda g, x: g.pool2d(x, kind="max", kernel=3),
}


@EVERY_PLACE
@pytest.mark.parametrize("build", WINDOWS.values(), ids=WINDOWS)
def test_windows_must_fit(place: str, build: Any) -> None:
    graph = rlx.Graph("windows")
    graph.set_outputs(build(graph, graph.input("x", (1, 2, "n", 9))))
    run = compiled(place, graph)
    weight = {"w": ones(2, 2, 3, 3)} if graph.has("w") else {}
    assert run.run({"x": ones(1, 2, 3, 9), **weight})[0].shape[2] == 1
    for n in (2, 1, 0):
        with pytest.raises(BindError, match=rf"3.*{n}"):
            run.run({"x": ones(1, 2, n, 9), **weight})
