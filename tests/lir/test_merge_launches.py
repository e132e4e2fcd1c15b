"""Merging launches: only neighbours of one kind over the same units that do not need each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layers import Llama, llama_graph
from targets import AVX512

import rlx
from rlx import Graph
from rlx.dtypes import F32
from rlx.lir.loops import Arg, For, Index, Let, Load, LoopKernel, Param, Ref, Store
from rlx.lir.merge_launches import merge_launches
from rlx.lir.program import Launch, Program
from rlx.lir.schedule import schedule
from rlx.lir.views import View
from rlx.mir.pipeline import optimise
from rlx.types import Size, dim

N = dim("n")


def view(name: str) -> View:
    return View(name, F32, (N,), (1,))


def launch(
    source: str, target: str, *, units: Size = N, name: str = "copy", chunk: int = 0, lets: bool = False
) -> Launch:
    """A copy, one element a unit."""
    at = ((Index("u"), Arg("step")),)
    body = (Let("v", Load(0, at, F32)), Store(1, at, Ref("v", F32)))
    kernel = LoopKernel(
        name, (Param("x0", F32), Param("y1", F32, True)), ("step",), For("u", Arg("units"), body), chunk,
        (Let("z", Arg("step")),) if lets else (),
    )  # fmt: skip
    return Launch(kernel, (view(source), view(target), 1), units, "rows", flops=units)


def merged(*launches: Launch) -> list[Launch]:
    p = Program("p", "avx512", ("n",), {}, {}, list(launches))
    merge_launches(p)
    return p.launches


def by_rows(launch_: Launch, *names: str) -> Launch:
    """A launch each of whose units has one element of its operands to itself."""
    return replace(launch_, shares=dict.fromkeys(names or ("x0", "y1"), 4))


def test_what_one_unit_writes_the_same_unit_may_read() -> None:
    """Row by row, whatever the kinds; not where a unit may need what another one writes."""
    first, second = launch("a", "b", name="norm"), launch("b", "c", name="round")
    (both,) = merged(by_rows(first), by_rows(second))
    assert both.kernel.symbol.startswith("norm_round.")
    assert [v.buffer for v in both.views(written=True)] == ["b", "c"]
    assert len(merged(by_rows(first), second)) == len(merged(first, by_rows(second))) == 2
    assert len(merged(by_rows(first), by_rows(second, "y1"))) == 2  # all of it is read by every unit
    assert len(merged(by_rows(first), replace(second, shares={"x0": 8, "y1": 8}))) == 2  # other rows
    strided = replace(by_rows(second), words=(View("b", F32, (N,), (2,)), *second.words[1:]))
    assert len(merged(by_rows(first), strided)) == 2
    assert len(merged(by_rows(first), by_rows(launch("b", "a", name="back")))) == 2
    assert len(merged(by_rows(first), by_rows(launch("d", "c", name="apart")))) == 2
    (three,) = merged(by_rows(first), by_rows(second), by_rows(launch("c", "d", name="cut")))
    assert len(set(three.kernel.words)) == len(three.kernel.words) == 9


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_one_launch_are_not_columns_of_the_next(threads: int) -> None:
    rng = np.random.default_rng(3)

    def norm(x: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def softmax(x: Any, axis: int) -> Any:
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    square, wide = rng.normal(size=(8, 8)), rng.normal(size=(256, 512))
    cases: list[tuple[Any, Callable[[Any], Any], Any]] = [
        (square, lambda x: x.transpose(axes=(1, 0)).softmax(axis=0).rms_norm(eps=1e-6), norm(softmax(square.T, 0))),
        (square, lambda x: x.rms_norm(x.mean(axis=-1), eps=1e-6), norm(square) * square.mean(-1)),
        (square, lambda x: x.softmax(axis=-1).rms_norm(eps=1e-6), norm(softmax(square, -1))),
        (
            wide, lambda x: x.rms_norm(eps=1e-6)[:128].reshape(256, 256).rms_norm(eps=1e-6),
            norm(norm(wide)[:128].reshape(256, 256)),
        ),
        (
            wide, lambda x: x[:, :8].rms_norm(x.rms_norm(eps=1e-6)[0][:8], eps=1e-6),
            norm(wide[:, :8]) * norm(wide)[0][:8],
        ),
    ]  # fmt: skip
    for x, build, wanted in cases:
        g = Graph("rows")
        g.set_outputs([build(g.input("x", x.shape))])
        f = rlx.compile(g, threads=threads)
        for _ in range(5):
            np.testing.assert_allclose(f.run({"x": x.astype(np.float32)})[0], wanted, rtol=2e-4, atol=2e-5)


def test_independent_neighbours_become_one() -> None:
    (both,) = merged(launch("a", "b"), launch("c", "d"))
    assert isinstance(both.kernel, LoopKernel) and both.kernel.name == "copy2"
    assert both.flops == 2 * N and both.units == N
    assert [v.buffer for v in both.views(written=False)] == ["a", "c"]
    assert [v.buffer for v in both.views(written=True)] == ["b", "d"]
    assert dict(zip(both.kernel.words, both.words, strict=True)) == {
        "x0": view("a"), "y1": view("b"), "x0b": view("c"), "y1b": view("d"), "step": 1, "stepb": 1
    }  # fmt: skip
    assert both.kernel.text().splitlines()[1:] == [
        "  for u in units split:",
        "    v = x0[u*step]",
        "    y1[u*step] = v",
        "    vb = x0b[u*stepb]",
        "    y1b[u*stepb] = vb",
    ]


def test_one_source_may_be_read_by_both() -> None:
    assert len(merged(launch("a", "b"), launch("a", "c"))) == 1


@pytest.mark.parametrize(
    "pair",
    [
        (launch("a", "b"), launch("b", "c")),  # reads what the first writes
        (launch("a", "b"), launch("c", "a")),  # writes what the first reads
        (launch("a", "b"), launch("c", "b")),  # writes what the first writes
        (launch("a", "b"), launch("c", "d", units=N + 1)),
        (launch("a", "b"), launch("c", "d", name="other")),
        (launch("a", "b", chunk=64), launch("c", "d", chunk=64)),
        (launch("a", "b", lets=True), launch("c", "d")),
        (launch("a", "b"), launch("c", "d", lets=True)),
    ],
    ids=["read-after-write", "write-after-read", "write-after-write", "units", "kind", "chunks", "lets", "lets-too"],
)
def test_what_depends_or_differs_stays_apart(pair: tuple[Launch, Launch]) -> None:
    assert merged(*pair) == list(pair)


def test_only_neighbours_merge() -> None:
    between = launch("b", "e", name="other")
    assert len(merged(launch("a", "b"), between, launch("c", "d"))) == 3


def test_keys_and_values_of_a_cache_are_one_launch_and_right() -> None:
    sizes = Llama(64, 4, 2, 16, 96)
    p = schedule(optimise(llama_graph(sizes, past=True), AVX512).main, AVX512)
    names = [x.kernel.symbol.split(".")[0] for x in p.launches]
    assert [n for n in names if "concatenate" in n] == ["concatenate2"]
    g = Graph("g")
    a, b, c, d = (g.input(n, ("b", "s" if n in "ac" else "t", 2, 4)) for n in "abcd")
    f = rlx.compile(g.set_outputs([g.concatenate(a, b, axis=1), g.concatenate(c, d, axis=1)]))
    rng = np.random.default_rng(0)
    for s, t in ((3, 2), (0, 4), (1, 0)):
        arrays = {n: rng.standard_normal((2, s if n in "ac" else t, 2, 4)).astype(np.float32) for n in "abcd"}
        first, second = f.run(arrays)
        np.testing.assert_array_equal(first, np.concatenate([arrays["a"], arrays["b"]], 1))
        np.testing.assert_array_equal(second, np.concatenate([arrays["c"], arrays["d"]], 1))


def test_unit_indices_are_shared_and_everything_else_is_renamed() -> None:
    (both,) = merged(launch("a", "b"), launch("c", "d"))
    assert isinstance(both.kernel, LoopKernel)
    names = [s.name for s in both.kernel.root.body if isinstance(s, Let)]
    assert names == ["v", "vb"] and both.kernel.root.index == "u"
