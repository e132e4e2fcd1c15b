"""Runs that repeat the one before with other data: one call of a builtin, and nothing else is different."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu import fast_call
from rlx.errors import BindError, KernelError
from rlx.runtime.compiled import CompiledGraph

f32, i32 = np.float32, np.int32
X, IDS = np.arange(8, dtype=f32).reshape(2, 4), np.array([3, 1], i32)
W = np.arange(12, dtype=f32).reshape(4, 3)
pytestmark = pytest.mark.skipif(not fast_call.usable(), reason="objects lie elsewhere in memory here")


def compiled(outputs: Callable[[rlx.Graph], list[rlx.Value]], **params: Any) -> CompiledGraph:
    g = rlx.Graph("small")
    f = rlx.compile(g.set_outputs(outputs(g)), "cpu")
    f.set_params(params)
    return f


@pytest.fixture
def table() -> CompiledGraph:
    """`hidden @ weight` and the rows `ids` of a table, ready to be repeated."""

    def build(g: rlx.Graph) -> list[rlx.Value]:
        hidden, ids = g.input("hidden", ("n", 4)), g.input("ids", ("m",), "i32")
        return [hidden @ g.param("weight", (4, 3)), g.constant(W).gather(ids)]

    return twice(compiled(build, weight=W), {"hidden": X, "ids": IDS})


def twice(f: CompiledGraph, inputs: dict[str, Any] | None) -> CompiledGraph:
    """The second run makes ready for more of the kind; one that comes alone should not take longer for it."""
    for _ in range(2):
        f.run(inputs)
    return f


def good(outputs: list[Any], x: Any = X, ids: Any = IDS) -> bool:
    return np.array_equal(outputs[0], x @ W) and np.array_equal(outputs[1], W[ids])


def forbid(f: CompiledGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, only repeats work."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the run was not repeated")

    monkeypatch.setattr(f, "_prepare", refuse)


# -- what is repeated -----------------------------------------------------------------------------------------------
def test_equal_shapes_are_repeated(table: CompiledGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(table, monkeypatch)
    for i in range(5):
        x, ids = X + i, (IDS + i) % 4
        assert good(table.run({"ids": ids, "hidden": x}), x, ids) and good(table(hidden=x, ids=ids), x, ids)


def test_a_graph_without_inputs_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    f = compiled(lambda g: [g.param("w", (4, 3)) * 2.0, g.constant(3.0).sqrt()], w=W)
    first = twice(f, None).run()
    forbid(f, monkeypatch)
    for again in (f.run(), f.run({}), f()):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_empty_arrays_and_names_made_at_run_time_are_repeated(
    table: CompiledGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = {"hidden": np.zeros((0, 4), f32), "ids": np.zeros(0, i32)}
    twice(table, none)
    forbid(table, monkeypatch)
    assert [a.shape for a in table.run({"".join(list(n)): a for n, a in none.items()})] == [(0, 3), (0, 3)]


def appending(g: rlx.Graph) -> list[rlx.Value]:
    new, at = g.input("new", (1, 1, 1, 8)), g.input("at", (1, 1), "i32")
    return [g.state("cache", (1, 1, 64, 8)).kv_append(new, at, g.constant(np.zeros((1, 1), i32))).sum()]


def test_states_are_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    f, cache = compiled(appending), np.zeros((1, 1, 64, 8), f32)
    for at in range(4):
        f.run({"cache": cache, "new": np.full((1, 1, 1, 8), at + 1, f32), "at": np.array([[at]], i32)})
        if at == 1:
            forbid(f, monkeypatch)
    assert cache[0, 0, :5, 3].tolist() == [1, 2, 3, 4, 0]


def test_new_weights_are_seen(table: CompiledGraph) -> None:
    for factor in (1, 2, 3):
        table.set_param("weight", W * factor)
        for _ in range(3):
            assert np.array_equal(table.run({"hidden": X, "ids": IDS})[0], X @ W * factor)


def test_a_watched_and_a_traced_run_are_not_repeated(table: CompiledGraph, tmp_path: Any) -> None:
    inputs = {"hidden": np.full((2, 4), np.nan, f32), "ids": IDS}
    twice(table, inputs)
    with rlx.debug.nans(), pytest.raises(rlx.errors.NonFiniteError):
        table.run(inputs)
    assert good(table.run({"hidden": X, "ids": IDS}, trace=tmp_path / "t.json")) and (tmp_path / "t.json").exists()


def test_without_the_builtin_everything_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_call, "usable", lambda: False)
    f = compiled(lambda g: [g.input("x", ("n", 4)) @ g.param("w", (4, 3))], w=W)
    for _ in range(3):
        assert np.array_equal(f.run({"x": X})[0], X @ W)
        assert f.executable.run_again({"x": X}) is None


# -- what is not ----------------------------------------------------------------------------------------------------
class Subclass(np.ndarray[Any, Any]):
    pass


class Doubling(dict[str, Any]):
    """A mapping that has its own idea of what it holds."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) * (2 if name == "hidden" else 1)


OTHER: dict[str, Any] = {
    "more rows": {"hidden": np.ones((5, 4), f32), "ids": IDS},
    "columns": {"hidden": np.asfortranarray(X), "ids": IDS},
    "every other": {"hidden": np.repeat(X, 2, axis=1)[:, ::2], "ids": IDS},
    "subclass": {"hidden": X.view(Subclass), "ids": IDS},
    "list": {"hidden": X.tolist(), "ids": IDS.tolist()},
    "ordered": OrderedDict(hidden=X, ids=IDS),
    "proxy": MappingProxyType({"hidden": X, "ids": IDS}),
    "mapping": Doubling(hidden=X, ids=IDS),
}


@pytest.mark.parametrize("kind", OTHER)
def test_other_good_inputs_take_the_long_way(table: CompiledGraph, kind: str) -> None:
    inputs = OTHER[kind]
    for _ in range(2):
        assert table.executable.run_again(inputs) is None
        assert good(table.run({"hidden": X, "ids": IDS}))
        assert good(table.run(inputs), np.asarray(inputs["hidden"], f32))
        assert good(table.run({"hidden": X, "ids": IDS}))


WRONG: dict[str, Any] = {
    "misspelt": {"hiden": X, "ids": IDS}, "one too few": {"hidden": X},
    "one too many": {"hidden": X, "ids": IDS, "c": X},
    "type": {"hidden": X.astype("f8"), "ids": IDS}, "byte order": {"hidden": X.astype(">f4"), "ids": IDS},
    "rank": {"hidden": X[0], "ids": IDS}, "fewer axes": {"hidden": X[:, 0].copy(), "ids": IDS},
    "more axes": {"hidden": np.zeros((2, 4, 2), f32), "ids": IDS},
    "size": {"hidden": np.zeros((2, 5), f32), "ids": IDS},
    "scalar": {"hidden": f32(3), "ids": IDS}, "nothing": {"hidden": None, "ids": IDS}, "no mapping": [X, IDS],
    "swapped": {"hidden": IDS, "ids": X},
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_errors_are_those_of_a_first_run(kind: str) -> None:
    def build(g: rlx.Graph) -> list[rlx.Value]:
        return [g.input("hidden", ("n", 4)) * 2.0, g.input("ids", ("m",), "i32") + 1]

    used, new = compiled(build), compiled(build)
    twice(used, {"hidden": X, "ids": IDS})
    with pytest.raises(BindError) as of_used:
        used.run(WRONG[kind])
    with pytest.raises(BindError) as of_new:
        new.run(WRONG[kind])
    assert used.executable.run_again(WRONG[kind]) is None
    assert str(of_used.value) == str(of_new.value) and of_used.value.hint == of_new.value.hint
    assert np.array_equal(used.run({"hidden": X, "ids": IDS})[0], X * 2)


def test_a_state_that_became_read_only_is_refused() -> None:
    f = compiled(appending)
    inputs = {"cache": np.zeros((1, 1, 64, 8), f32), "new": np.ones((1, 1, 1, 8), f32), "at": np.zeros((1, 1), i32)}
    twice(f, inputs)
    inputs["cache"].flags.writeable = False
    with pytest.raises(BindError, match="state 'cache': is changed in place"):
        f.run(inputs)


class Trap(str):
    """A name that does something when it is compared."""

    action: Callable[[], None]
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        self.action()
        return str.__eq__(self, other)


def test_names_may_change_the_mapping_while_it_is_read(table: CompiledGraph) -> None:
    """The array that was found first is let go of by everybody else, and its memory is asked for again."""
    trap = Trap("ids")
    inputs: dict[str, Any] = {"hidden": np.ones((2, 4), f32), trap: IDS}
    spoiled = []

    def action() -> None:
        inputs["hidden"] = None
        spoiled.extend(np.full((2, 4), np.nan, f32) for _ in range(50))

    trap.action = action
    assert np.array_equal(table.executable.run_again(inputs)[0], np.ones((2, 4), f32) @ W)  # type: ignore[index]
    assert spoiled


def test_an_error_of_a_name_is_the_callers(table: CompiledGraph) -> None:
    trap = Trap("ids")

    def action() -> None:
        raise ZeroDivisionError

    trap.action = action
    assert table.executable.run_again({"hidden": X, trap: IDS}) is None
    with pytest.raises(ZeroDivisionError):
        table.run({"hidden": X, trap: IDS})
    assert good(table.run({"hidden": X, "ids": IDS}))


# -- outputs and references -----------------------------------------------------------------------------------------
def place(array: Any) -> int:
    return int(array.ctypes.data)


HOLDERS: list[Callable[[Any], Any]] = [lambda a: a, lambda a: a.T, lambda a: a[1:], memoryview]


@pytest.mark.parametrize("hold", HOLDERS)
def test_outputs_that_somebody_holds_are_left_alone(table: CompiledGraph, hold: Callable[[Any], Any]) -> None:
    held = hold(table.run({"hidden": X, "ids": IDS})[0])
    for i in range(3):
        table.run({"hidden": X + i, "ids": IDS})
    assert np.array_equal(held, hold(X @ W))


def test_an_output_may_be_the_next_input() -> None:
    f = compiled(lambda g: [g.input("x", (4, 4)) + 1.0])
    inputs = {"x": np.zeros((4, 4), f32)}
    for i in range(6):
        inputs["x"] = f.run(inputs)[0]
        assert (inputs["x"] == i + 1).all()


def test_outputs_that_nobody_holds_are_used_again(table: CompiledGraph) -> None:
    places = {place(table.run({"hidden": X + i, "ids": IDS})[0]) for i in range(1, 50)}
    table.run({"hidden": X, "ids": IDS})
    results = table.executable._contexts[-1].results
    assert len(places) == 1 and results is not None and all(isinstance(a, np.ndarray) for a in results.reused)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda a: setattr(a, "shape", (-1,)),
    "sizes of axes": lambda a: setattr(a, "shape", (3, 2)),
    "type": lambda a: setattr(a, "dtype", i32),
    "strides": lambda a: setattr(a, "strides", (4, 8)),
    "read-only": lambda a: a.setflags(write=False),
    "less memory": lambda a: a.resize((1, 1), refcheck=False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_outputs_that_the_caller_has_changed_are_not_used_again(table: CompiledGraph, change: str) -> None:
    CHANGES[change](table.run({"hidden": X, "ids": IDS})[0])
    for _ in range(2):
        outputs = table.run({"hidden": X, "ids": IDS})
        assert good(outputs) and outputs[0].dtype == f32 and outputs[0].flags.writeable
        del outputs


def test_weak_references_to_outputs_end_with_the_run_after(table: CompiledGraph) -> None:
    """An array that came back would be taken for the one that was looked at before."""
    seen = weakref.ref(table.run({"hidden": X, "ids": IDS})[0])
    outputs = table.run({"hidden": X + 1, "ids": IDS})
    assert good(outputs, X + 1) and seen() is None


def test_large_outputs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    f = compiled(lambda g: [g.input("x", ("n", 64)) * 2.0])
    x = np.ones((1024, 64), f32)
    twice(f, {"x": x})
    forbid(f, monkeypatch)
    assert (f.run({"x": x})[0] == 2).all()
    (context,) = f.executable._contexts
    assert context.results is not None and context.results.reused == [None]


def test_without_memory_for_an_output_nothing_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 0

    def allocate(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        return np.empty(*arguments)

    monkeypatch.setitem(fast_call.OBJECTS, "empty", allocate)
    monkeypatch.setattr(fast_call, "_table", functools.cache(fast_call._table.__wrapped__))
    f = twice(compiled(lambda g: [g.input("x", ("n", 4)) + 1.0, g.named("x") * 2.0]), {"x": X})
    for enough in (2, 0, 1, 1, 0, 2):  # of the two outputs, neither or the first finds memory
        left = enough
        outputs = f.executable.run_again({"x": X.copy()})
        assert (outputs is not None) == (enough == 2)
        f.executable._contexts[-1].results.reused[:] = [None, None]  # type: ignore[union-attr]
        if outputs is not None:
            assert np.array_equal(outputs[0], X + 1) and np.array_equal(outputs[1], X * 2)


def test_no_reference_is_lost_or_kept(table: CompiledGraph) -> None:
    x, ids, bad = X.copy(), IDS.copy(), np.full(2, 9, i32)
    watched: list[Any] = [x, ids, bad, "hidden", "ids", x.dtype, ids.dtype, np.ndarray, dict, np.empty]
    others: list[Any] = [
        {"hidden": x},
        {"hidden": x, "idz": ids},
        {"hidden": x.T, "ids": ids},
        {"hidden": ids, "ids": x},
        [x],
    ]

    def use() -> None:
        assert good(twice(table, {"hidden": x, "ids": ids}).run({"hidden": x, "ids": ids}))
        for inputs in others:
            assert table.executable.run_again(inputs) is None
        with pytest.raises(KernelError):
            table.run({"hidden": x, "ids": bad})
        assert good(table.run({"hidden": x, "ids": ids}))

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(w) for w in [*watched, None, False]]

    use()
    before = counts()
    for _ in range(200):
        use()
    grown = [after - first for after, first in zip(counts(), before, strict=True)]
    assert max(grown, key=abs) in range(-20, 21), grown


def test_what_blocks_point_to_outlives_the_module() -> None:
    """A run at the end of the interpreter comes after modules have been cleared, and caches with them."""
    table = weakref.ref(fast_call._table.__wrapped__())
    assert table() is not None


# -- faults and threads ---------------------------------------------------------------------------------------------
def test_a_fault_is_raised_by_the_run_that_has_it(table: CompiledGraph) -> None:
    for _ in range(5):
        with pytest.raises(KernelError, match="gather"):
            table.run({"hidden": X, "ids": np.array([0, 4], i32)})
        assert good(table.run({"hidden": X, "ids": IDS}))
        assert good(table.run({"hidden": X, "ids": IDS}))


def test_other_threads_go_on_while_a_repeat_runs() -> None:
    """A thread does not let go of the GIL on its own here, only where the code between says so."""
    f = compiled(lambda g: [(g.input("x", (1024, 1024)) @ g.input("y", (1024, 1024))).sum(axis=1)])
    inputs = {"x": np.ones((1024, 1024), f32), "y": np.ones((1024, 1024), f32)}
    twice(f, inputs)
    begun, seen, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        for _ in range(50):  # a busy machine may wake the other one late
            f.executable.run_again(inputs)
            if seen.is_set():
                break
        over.set()

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        thread.start()
        begun.wait()
        in_between = not over.is_set()
        seen.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert in_between
