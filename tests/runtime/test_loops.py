"""Loops and branches at run time: machine code walks them, threads share them, faults end them, reports show them."""

from __future__ import annotations

import itertools
import json
import linecache
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_internals import set_barrier_cost
from graphs import examples
from hypothesis import given, note
from hypothesis import strategies as st
from loop_graphs import loop_graphs, odd_graph

import rlx
from rlx.backends.base import kernels_compiled
from rlx.errors import KernelError
from rlx.lir.program import Loop

Array = np.ndarray[Any, Any]
f32, i32 = np.float32, np.int32
SHARED, SOLO = -1.0, 1e9  # costs of a barrier with which threads always or never share a loop


@pytest.fixture(
    params=[("1 thread", 1, SOLO), ("2 threads", 2, SHARED), ("alone among 2", 2, SOLO)], ids=lambda p: p[0]
)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A number of threads; two either share loops or leave them to one."""
    set_barrier_cost(monkeypatch, request.param[2])
    return int(request.param[1])


def decay(*shape: Any) -> rlx.Graph:
    body = rlx.Graph("decay")
    return body.set_outputs([body.input("c", shape) * 0.5 + 1.0])


def scan_graph(length: int = 10_000, size: int = 8) -> rlx.Graph:
    g = rlx.Graph("steps")
    x = g.input("x", (size,))
    return g.set_outputs([g.scan(x, decay(size), length), g.scan_trajectory(x, decay(size), length)[:3]])


# -- speed ------------------------------------------------------------------------------------------------------------
def test_ten_thousand_steps_run_without_python() -> None:
    f = rlx.compile(scan_graph(), threads=1)
    x = {"x": np.zeros(8, f32)}
    for _ in range(2):  # the second time, it is made ready to be repeated
        f.run(x)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        last, first = f.run(x)
    finally:
        sys.setprofile(None)
    assert calls < 20
    assert (last == 2).all() and np.allclose(first[:, 0], [1, 1.5, 1.75])


def test_the_length_of_a_loop_changes_no_kernel() -> None:
    rlx.compile(scan_graph(7)).run({"x": np.zeros(8, f32)})
    before = kernels_compiled()
    for length in (3, 4, 8, 100, 10_000):
        rlx.compile(scan_graph(length)).run({"x": np.zeros(8, f32)})
    assert kernels_compiled() == before


def test_the_arena_does_not_grow_with_the_steps() -> None:
    def arena(length: int) -> int:
        g = rlx.Graph("g")
        x, w = g.input("x", (4, 64)), g.param("w", (64, 64))
        body = rlx.Graph("body")
        c, m = body.input("c", (4, 64)), body.input("w", (64, 64))
        body.set_outputs([((c @ m).softmax(axis=1) @ m).softmax(axis=1)])
        f = rlx.compile(g.set_outputs([g.scan_with_bcasts_and_xs(x, [w], [], body, length)]))
        f.set_param("w", np.eye(64, dtype=f32))
        return f.report({"x": np.ones((4, 64), f32)}).arena_bytes

    assert arena(2) == arena(5000) <= 5 * 4 * 64 * 4  # the carry twice, and at most three temporaries


# -- faults -----------------------------------------------------------------------------------------------------------
def lookup_graph() -> rlx.Graph:
    body = rlx.Graph("body")
    c, table, at = body.input("c", (40,)), body.input("table", (5,)), body.input("at", (40,), "i32")
    body.set_outputs([c + table.gather(at)])
    g = rlx.Graph("lookup")
    c, table, at = g.input("c", (40,)), g.input("table", (5,)), g.input("at", (9, 40), "i32")
    return g.set_outputs([g.scan_with_bcasts_and_xs(c, [table], [at], body, 9)])


def test_a_fault_in_a_loop_names_the_line_in_its_body(threads: int) -> None:
    f = rlx.compile(lookup_graph(), threads=threads)
    table = np.arange(5, dtype=f32)
    good = {"c": np.zeros(40, f32), "table": table, "at": np.arange(360, dtype=i32).reshape(9, 40) % 5}
    wanted = table[good["at"]].sum(axis=0)
    for step in (0, 3, 8):
        bad = good["at"].copy()
        bad[step, 7] = 5
        with pytest.raises(KernelError, match="index lies outside") as caught:
            f.run(good | {"at": bad})
        (place,) = [n for n in caught.value.notes if "test_loops.py:" in n]
        line = int(place.split("test_loops.py:")[1].split(",")[0])
        assert ".gather(" in linecache.getline(__file__, line)
        assert np.array_equal(f.run(good)[0], wanted), "the next run is not troubled"


def test_a_fault_ends_a_loop_that_would_never_end(threads: int) -> None:
    """The element that was not there counts as 0, so the sum never reaches its goal."""
    names: dict[str, Any] = {"total": ((), "f32"), "table": ((4,), "f32"), "at": ((), "i32")}

    def inputs(g: rlx.Graph) -> list[rlx.Value]:
        return [g.input(n, *s) for n, s in names.items()]

    more, body, g = rlx.Graph("more"), rlx.Graph("body"), rlx.Graph("endless")
    more.set_outputs([inputs(more)[0] < 10.0])
    total, table, at = inputs(body)
    body.set_outputs([total + table.gather(at)])
    total, table, at = inputs(g)
    f = rlx.compile(g.set_outputs([g.while_loop(total, more, body, broadcasts=[table, at])]), threads=threads)
    arrays = {"total": np.array(0, f32), "table": np.array([4, 1, 1, 1], f32)}
    for _ in range(2):
        with pytest.raises(KernelError, match="index lies outside"):
            f.run(arrays | {"at": np.array(4, i32)})
        assert f.run(arrays | {"at": np.array(0, i32)})[0] == 12


# -- threads ----------------------------------------------------------------------------------------------------------
def big_graph() -> rlx.Graph:
    """A body whose launches are worth sharing: matrices, rows, and 5 chunks of elements."""
    body = rlx.Graph("body")
    c, w, x = body.input("c", (40, 512)), body.input("w", (512, 512)), body.input("x", (512,))
    h = (c @ w + x).tanh()
    body.set_outputs([(h * h.softmax(axis=1) + c).rms_norm(eps=1e-5), h.sum(axis=1)])
    g = rlx.Graph("big")
    c, w, xs = g.input("c", (40, 512)), g.param("w", (512, 512)), g.input("xs", (12, 512))
    finals, ys = g.scan_general([c], body, 12, broadcasts=[w], xs=[xs], reverse=True)
    return g.set_outputs([*finals, *ys])


@pytest.mark.usefixtures("many_cores")
def test_threads_share_a_large_loop_and_agree_on_every_bit() -> None:
    rng = np.random.default_rng(1)
    arrays = {"c": rng.standard_normal((40, 512)), "xs": rng.standard_normal((12, 512))}
    inputs = {n: a.astype(f32) for n, a in arrays.items()}
    w = (rng.standard_normal((512, 512)) / 16).astype(f32)
    runs = []
    for count in (1, 2, 3):
        f = rlx.compile(big_graph(), threads=count)
        f.set_param("w", w)
        runs.append(f.run(inputs))
        (solo,) = f.executable.size_plan(()).solo  # type: ignore[attr-defined]
        assert solo == (count == 1)
    for other in runs[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(runs[0], other, strict=True))
    c = inputs["c"].astype(np.float64)
    for x in inputs["xs"][::-1].astype(np.float64):
        h = np.tanh(c @ w + x)
        power = np.exp(h - h.max(axis=1, keepdims=True))
        c = h * power / power.sum(axis=1, keepdims=True) + c
        c = c / np.sqrt((c * c).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(runs[0][0], c, rtol=1e-3, atol=1e-4)


def test_a_small_loop_is_left_to_one_thread() -> None:
    f = rlx.compile(scan_graph(10), threads=2)
    f.run({"x": np.zeros(8, f32)})
    assert f.executable.size_plan(()).solo == [True, True]  # type: ignore[attr-defined]


def test_runs_of_one_loop_at_once_do_not_meet(threads: int) -> None:
    """Each has its own arguments; where the pool is busy, a run stays on its thread."""
    g = rlx.Graph("g")
    n = g.input("n", (), "i32")
    more, step = rlx.Graph("more"), rlx.Graph("step")
    more.set_outputs([more.input("i", (), "i32") < more.input("n", (), "i32")])
    i = step.input("i", (), "i32")
    step.input("n", (), "i32")
    count = g.while_loop(0, more, step.set_outputs([i + 1]), broadcasts=[n])
    f = rlx.compile(g.set_outputs([count]), threads=threads)

    def work(k: int) -> bool:
        return int(f.run({"n": np.array(k, i32)})[0]) == k

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, [k * 37 % 500 for k in range(300)]))


# -- guards, caches, text ---------------------------------------------------------------------------------------------
def test_loops_stay_inside_their_arrays(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    plain = rlx.compile(odd_graph(), threads=threads)
    monkeypatch.setenv("RLX_CHECK", "1")
    checked = rlx.compile(odd_graph(), threads=threads)
    rng = np.random.default_rng(2)
    w = rng.standard_normal((5, 5)).astype(f32)
    for batch, time_ in itertools.product((0, 1, 3), (0, 1, 2, 5)):
        arrays = {"c": rng.standard_normal((batch, 5)), "xs": rng.standard_normal((time_, batch, 5))}
        inputs = {n: a.astype(f32) for n, a in arrays.items()}
        for f in (plain, checked):
            f.set_param("w", w)
        for a, b in zip(plain.run(inputs), checked.run(inputs), strict=True):
            assert a.tobytes() == b.tobytes(), (batch, time_)


def test_programs_with_loops_are_stored_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    inputs = {"c": np.ones((2, 5), f32), "xs": np.ones((3, 2, 5), f32)}
    plans, runs = [], []
    for _ in range(2):
        f = rlx.compile(odd_graph())
        f.set_param("w", np.eye(5, dtype=f32))
        plans.append(f.plan)  # type: ignore[attr-defined]
        runs.append(f.run(inputs))
    first, second = plans
    assert first is not second and first.main.fingerprint() == second.main.fingerprint()
    assert first.main.controls == second.main.controls and len(first.main.controls) == 3
    assert pickle.loads(pickle.dumps(first.main)).text() == first.main.text()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*runs, strict=True))


def test_fingerprints_see_what_loops_do() -> None:
    def fingerprint(length: int, reverse: bool) -> str:
        body = rlx.Graph("body")
        body.set_outputs([body.input("c", (3,)) + body.input("x", (3,))])
        g = rlx.Graph("g")
        x, xs = g.input("x", (3,)), g.input("xs", (9, 3))
        finals, _ = g.scan_general([x], body, length, xs=[xs[:length]], reverse=reverse)
        text: str = rlx.compile(g.set_outputs([*finals])).plan.main.fingerprint()  # type: ignore[attr-defined]
        return text

    assert len({fingerprint(n, r) for n in (7, 9) for r in (False, True)}) == 4


def test_reports_count_every_step(tmp_path: Path, threads: int) -> None:
    f = rlx.compile(scan_graph(50), threads=threads)
    x = {"x": np.zeros(8, f32)}
    unknown = f.report()
    report = f.report(x)
    for measured in (unknown, report):
        runs = {launch.kernel.split(".")[0]: launch.runs for launch in measured.launches}
        assert runs["mul_add"] == 50 and runs["copy"] == 1
        (fused, *_) = [launch for launch in measured.launches if launch.runs == 50]
        assert fused.flops == 50 * 2 * 8 and fused.bytes == 50 * 2 * 32
    assert all(launch.seconds > 0 for launch in report.launches)
    assert sum(launch.seconds for launch in report.launches) <= report.seconds * 1.1
    assert " × 50" in str(report)
    f.run(x, trace=tmp_path / "trace.json")
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    loops = [e for e in events if e["cat"] == "loop" and e["tid"] == 0]
    assert [e["args"]["steps"] for e in loops] == [50, 50]
    for loop in loops:
        inside = [e for e in events if e["args"].get("runs") == 50 and e["tid"] == 0]
        assert (
            any(loop["ts"] <= e["ts"] and e["ts"] + e["dur"] <= loop["ts"] + loop["dur"] for e in inside) or not inside
        )


def test_a_while_loop_reports_the_steps_it_took() -> None:
    g = rlx.Graph("g")
    more, step = rlx.Graph("more"), rlx.Graph("step")
    more.set_outputs([more.input("i", (), "i32") < 13])
    step.set_outputs([step.input("i", (), "i32") + 1])
    f = rlx.compile(g.set_outputs([g.while_loop(g.input("i", (), "i32"), more, step)]))
    report = f.report({"i": np.array(0, i32)})
    assert {launch.runs for launch in report.launches} == {1, 13}


# -- any program ------------------------------------------------------------------------------------------------------
@given(loop_graphs(), st.sampled_from([SHARED, SOLO]))
@examples(40)
def test_any_program_of_loops_and_branches_equals_the_reference(g: rlx.Graph, barrier: float) -> None:
    note(g.text(full=True))
    rng = np.random.default_rng(3)
    arrays = {n: rng.uniform(-1, 1, (3, 4)).astype(f32) for n in ("x0", "x1", "w")}
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        set_barrier_cost(patch, barrier)
        for device, threads, check in (("cpu", 2, "0"), ("cpu", 1, "1"), ("reference", None, "0")):
            patch.setenv("RLX_CHECK", check)
            f = rlx.compile(g, device, threads=threads)
            f.set_param("w", arrays["w"])
            runs.append(f.run({n: arrays[n] for n in ("x0", "x1")}))
    for two, one, wanted in zip(*runs, strict=True):
        assert two.tobytes() == one.tobytes()
        np.testing.assert_allclose(two, wanted, rtol=1e-3, atol=1e-4)
    for control in rlx.compile(g).plan.main.controls:  # type: ignore[attr-defined]
        assert control.end > control.first and (not isinstance(control, Loop) or control.last > control.first)
