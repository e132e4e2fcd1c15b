"""Faults that kernels find while they run: an index outside its table. They name the kernel and the user's line."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rlx
from rlx.errors import KernelError

f32, i32 = np.float32, np.int32
TABLE = np.arange(20, dtype=f32).reshape(5, 4)
BAD = [[-1], [5], [0, 1, 2, 3, 4, 5], [2**31 - 1], [-(2**31)], [5, -1, 7]]


def gather_graph() -> rlx.Graph:
    g = rlx.Graph("lookup")
    table, ids = g.input("table", ("rows", 4)), g.input("ids", ("n",), "i32")
    return g.set_outputs([table.gather(ids) * 2.0])


def rope_graph() -> rlx.Graph:
    g = rlx.Graph("turn")
    x = g.input("x", (1, "n", 2, 4))
    ids = g.input("ids", ("n",), "i32").reshape(1, "n")
    cos, sin = (g.input(name, ("rows", 2)) for name in ("cos", "sin"))
    return g.set_outputs([g.rope(x, cos, sin, ids) + 1.0])


def scatter_graph() -> rlx.Graph:
    g = rlx.Graph("add")
    table, ids = g.input("table", ("rows", 4)), g.input("ids", ("n",), "i32")
    return g.set_outputs([table.scatter_add(ids, g.input("x", ("n", 4)))])


def inputs_for(build: Callable[[], rlx.Graph], ids: list[int]) -> dict[str, np.ndarray]:
    n = len(ids)
    inputs = {"ids": np.array(ids, i32)}
    if build is rope_graph:
        return inputs | {"x": np.ones((1, n, 2, 4), f32), "cos": TABLE[:, :2].copy(), "sin": TABLE[:, 2:].copy()}
    return inputs | {"table": TABLE} | ({"x": np.ones((n, 4), f32)} if build is scatter_graph else {})


def notes_of(f: rlx.CompiledGraph, inputs: dict[str, np.ndarray]) -> tuple[str, list[str]]:
    with pytest.raises(KernelError) as caught:
        f.run(inputs)
    return str(caught.value), caught.value.notes


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("build", "op"), [(gather_graph, "gather"), (rope_graph, "rope"), (scatter_graph, "scatter_add")]
)
def test_an_index_out_of_range_names_kernel_and_line(build: Callable[[], rlx.Graph], op: str, threads: int) -> None:
    f, right = (rlx.compile(build(), device, threads=threads) for device in ("cpu", "reference"))
    good = inputs_for(build, [0, 4, 2, 2, 1])
    wanted = right.run(good)[0]
    for ids in BAD:
        message, notes = notes_of(f, inputs_for(build, ids))
        at, wrong = next((at, index) for at, index in enumerate(ids) if not 0 <= index < 5)
        of = {"gather": "entries of 'table'", "rope": "positions of the RoPE tables"}.get(op, "entries of its axis")
        assert message.split(": ")[0].startswith(op)
        assert message.endswith(f": index {wrong} (input 'ids' at [{at}]) lies outside the 5 {of}")
        (place,) = [n for n in notes if "test_faults.py:" in n]
        line = int(place.split("test_faults.py:")[1].split(",")[0])
        assert f".{op}(" in linecache.getline(__file__, line)
        np.testing.assert_allclose(f.run(good)[0], wanted, rtol=1e-6)  # the next run is not troubled
        with pytest.raises(KernelError, match=op):
            right.run(inputs_for(build, ids))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_launch_that_fails_is_named(threads: int) -> None:
    g = rlx.Graph("three")
    table, ids = g.input("table", ("rows", 4)), g.input("ids", (3, "n"), "i32")
    parts = []
    with rlx.stage("first"):
        parts.append(table.gather(ids[0]).sum(axis=1))
    with rlx.stage("second"):
        parts.append(table.gather(ids[1]).max(axis=1))
    with rlx.stage("third"):
        parts.append(table.gather(ids[2]).min(axis=1))
    f = rlx.compile(g.set_outputs(parts), threads=threads)
    for bad in ([0], [1], [2], [1, 2], [0, 2], [0, 1, 2]):
        ids_array = np.zeros((3, 40), i32)
        ids_array[bad, 7:] = 9
        _, notes = notes_of(f, {"table": TABLE, "ids": ids_array})
        assert ("first", "second", "third")[bad[0]] in notes[0], bad
    assert f.run({"table": TABLE, "ids": np.ones((3, 2), i32)})[0].tolist() == [22.0, 22.0]


def test_one_bad_index_among_many() -> None:
    f = rlx.compile(gather_graph(), threads=2)
    for at in (0, 1, 4999, 9999):
        ids = np.zeros(10_000, i32)
        ids[at] = 5
        assert f"index 5 (input 'ids' at [{at}])" in notes_of(f, {"table": TABLE, "ids": ids})[0]
        ids[at] = 4
        assert np.array_equal(f.run({"table": TABLE, "ids": ids})[0], TABLE[ids] * 2)


def test_an_empty_table_and_no_indices() -> None:
    f = rlx.compile(gather_graph())
    none = np.zeros((0, 4), f32)
    assert f.run({"table": none, "ids": np.zeros(0, i32)})[0].shape == (0, 4)
    assert "the 0 entries" in notes_of(f, {"table": none, "ids": np.zeros(1, i32)})[0]


def test_a_fault_while_weights_are_bound() -> None:
    g = rlx.Graph("bound")
    g.set_outputs([g.input("x", (2, 4)) + g.param("table", (5, 4)).gather(g.param("ids", (2,), "i32"))])
    f = rlx.compile(g)
    f.set_params({"table": TABLE, "ids": np.array([1, 5], i32)})
    for _ in range(2):
        message, notes = notes_of(f, {"x": TABLE[:2].copy()})
        assert message.startswith("gather") and any("test_faults.py" in n for n in notes)
    f.set_param("ids", np.array([1, 4], i32))
    assert np.array_equal(f.run({"x": TABLE[:2].copy()})[0], TABLE[:2] + TABLE[[1, 4]])


def test_faults_stay_with_the_run_that_has_them() -> None:
    """Good and bad runs of one graph at once: each gets its own answer."""
    f = rlx.compile(gather_graph(), threads=2)

    def work(n: int) -> bool:
        ids = np.full(50, 5 if n % 3 == 0 else n % 5, i32)
        try:
            return np.array_equal(f.run({"table": TABLE, "ids": ids})[0], TABLE[ids] * 2) and n % 3 != 0
        except KernelError as error:
            return n % 3 == 0 and "gather" in str(error)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(600)))


@pytest.mark.parametrize("device", ["cpu", "toy"])
def test_a_label_out_of_range_is_named_and_ignored_ones_are_not(device: str) -> None:
    g = rlx.Graph("loss")
    logits, labels = g.input("x", ("n", 8)), g.input("label", ("n",), "i64")
    f = rlx.compile(g.set_outputs([g.mean(g.cross_entropy(logits, labels, ignore_index=-100))]), device)
    with pytest.raises(KernelError, match=r"index 20 \(input 'label' at \[2\]\) lies outside the 8 classes"):
        f.run({"x": np.ones((3, 8), f32), "label": np.array([-100, 1, 20])})


def test_an_index_that_a_kernel_computed_is_named_if_its_memory_is_intact() -> None:
    """Without an input to name; where later values reuse the memory, no number is named rather than a wrong one."""
    g = rlx.Graph("computed")
    table, ids = g.input("table", (5, 4)), g.input("ids", ("n",), "i32")
    f = rlx.compile(g.set_outputs([table.gather(ids.cumsum(axis=0))]))
    message, _ = notes_of(f, {"table": TABLE, "ids": np.array([1, 2, 3], i32)})
    assert message.endswith(": index 6 lies outside the 5 entries of 'table'")


def test_a_sequence_longer_than_the_rope_tables_names_both_lengths() -> None:
    table = np.ones((8, 8), f32)
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 16)).rope_tables(table, table)
    flow = flow.self_attn_prefill("q", "k", "v", 1, 1, 16)
    f = flow.build(flow.init(rlx.random.key(0))).compile()
    assert f.run({"x": np.ones((1, 8, 16), f32)})[0].shape == (1, 8, 16)
    with pytest.raises(rlx.errors.BindError, match="RoPE tables: seq is 9, more than 8"):
        f.run({"x": np.ones((1, 9, 16), f32)})
