"""What the toy backend answers: memory of its own, faults, traces, images, kernels as text, and how it is found."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from on_toy import run
from targets import AVX2

import rlx
from rlx.backends import base
from rlx.backends.toy import TOY, ToyBackend, ToyBuffer
from rlx.errors import BindError, CapabilityError, KernelError, LowerError
from rlx.lir.loops import LoopKernel
from rlx.lir.module import plan_lir
from rlx.lir.schedule import schedule
from rlx.profile import CompileProfile
from rlx.runtime import record_json

Array = np.ndarray[Any, Any]


def mlp() -> rlx.Graph:
    g = rlx.Graph("mlp")
    h = (g.input("x", ("rows", 4)) @ g.param("w", (4, 8)) + g.param("b", (8,))).gelu()
    return g.set_outputs([h.softmax(axis=-1), h.sum(axis=-1)])


# -- what it gets -----------------------------------------------------------------------------------------------------
def test_it_sees_only_loops() -> None:
    g = rlx.Graph("all")
    x = g.input("x", (1, 6, 2, 8))
    y = g.attention(x, x, x).reshape(6, 16) @ g.param("w", (16, 16))
    lir = plan_lir(g.set_outputs([y]), TOY, CompileProfile())
    assert {kernel.kind for kernel in lir.main.kernels().values()} == {"loops"}
    cpu = plan_lir(g, AVX2, CompileProfile())
    assert {kernel.kind for kernel in cpu.main.kernels().values()} >= {"matmul", "attention"}


def test_a_program_for_another_target_is_refused() -> None:
    program = plan_lir(mlp(), AVX2, CompileProfile()).main
    with pytest.raises(LowerError, match="'mlp' has a kernel of kind 'matmul'"):
        ToyBackend().compile(program, TOY)


def test_a_weight_that_is_packed_for_another_target_is_refused() -> None:
    optimised = plan_lir(mlp(), AVX2, CompileProfile()).optimised.main
    with pytest.raises(LowerError, match="packed for a target other than toy"):
        schedule(optimised, TOY)


def test_targets_of_different_devices_have_different_keys() -> None:
    alike = replace(TOY, device="other")
    assert str(alike) != str(TOY) and TOY.device == "toy" and AVX2.device == "cpu"


# -- memory -----------------------------------------------------------------------------------------------------------
def test_buffers_are_no_arrays_and_may_be_inputs_of_the_next_run() -> None:
    g = rlx.Graph("step")
    toy = rlx.compile(g.set_outputs([g.input("x", (3,)) * 2.0]), "toy")
    (once,) = toy.run({"x": np.float32([1, 2, 3])})
    (twice,) = toy.run({"x": once})
    assert isinstance(once, ToyBuffer) and not isinstance(once, np.ndarray) and once is not twice
    assert np.asarray(twice).tolist() == [4, 8, 12] and np.from_dlpack(twice).tolist() == [4, 8, 12]
    download = np.asarray(once)
    download[...] = 0
    assert np.asarray(once).tolist() == [2, 4, 6], "a download is a copy"
    with pytest.raises(ValueError, match="copy"):
        np.array(once, copy=False)


def test_the_allocator_copies_parts_and_clears() -> None:
    memory = ToyBackend().allocator
    buffer = memory.upload(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert memory.owns(buffer) and not memory.owns(np.zeros(3))
    memory.copy(np.float32([7, 8]), memory.part(buffer, 1, slice(0, 2)))
    assert memory.download(buffer).tolist() == [[0, 1, 2], [7, 8, 5]]
    other = memory.zeros((2, 3), np.dtype(np.float32))
    memory.copy(buffer, other)
    memory.clear(buffer)
    assert memory.download(other)[1, 0] == 7 and not memory.download(buffer).any()


def test_a_part_with_gaps_is_refused_by_kernels() -> None:
    g = rlx.Graph("sum")
    toy = rlx.compile(g.set_outputs([g.input("x", (2, 2)).sum()]), "toy")
    buffer = toy.allocator.upload(np.ones((2, 3), np.float32))
    with pytest.raises(BindError, match=r"float32\[2, 2\]>: is a strided part of a buffer"):
        toy.run({"x": toy.allocator.part(buffer, slice(None), slice(0, 2))})


def test_a_state_is_written_in_place() -> None:
    g = rlx.Graph("append")
    values = g.state("values", ("pages", 2, 2, 3))
    new, at = g.input("new", (1, "seq", 2, 3)), g.input("positions", (1, "seq"), "i32")
    table = g.constant(np.int32([[2, 0, 1]]))
    toy = rlx.compile(g.set_outputs([g.kv_append(values, new, at, table).sum()]), "toy")
    state = toy.allocator.zeros((3, 2, 2, 3), np.dtype(np.float32))
    for position in (1, 4):
        run(toy, {"values": state, "new": np.full((1, 1, 2, 3), position, np.float32), "positions": [[position]]})
    assert np.asarray(state)[:, 0, :, 0].tolist() == [[0, 0], [4, 0], [0, 1]]


def test_the_arena_is_planned_for_the_sizes_of_a_run() -> None:
    toy = rlx.compile(mlp(), "toy")
    few, many = (toy.executable.memory((rows,)).plan.size for rows in (2, 200))
    assert 0 < few < many
    assert toy.executable.outputs((2,)) == [((2, 8), np.dtype(np.float32)), ((2,), np.dtype(np.float32))]


# -- faults -----------------------------------------------------------------------------------------------------------
def test_an_index_outside_its_axis_is_an_error() -> None:
    g = rlx.Graph("gather")
    toy = rlx.compile(g.set_outputs([g.gather(g.input("x", ("n", 2)), g.input("i", (3,), "i32"))]), "toy")
    run(toy, {"x": np.ones((4, 2), np.float32), "i": np.int32([0, 1, 3])})
    with pytest.raises(
        KernelError, match=r"gather.*: index 4 \(input 'i' at \[1\]\) lies outside the 4 entries of 'x'"
    ):
        run(toy, {"x": np.ones((4, 2), np.float32), "i": np.int32([0, 4, 1])})


def test_a_row_that_chooses_no_matrix_is_an_error() -> None:
    g = rlx.Graph("grouped")
    y = g.grouped_matmul(g.input("x", (2, 4)), g.input("w", ("groups", 4, 3)), g.input("i", (2,), "i32"))
    toy = rlx.compile(g.set_outputs([y]), "toy")
    for groups in (0, 2):
        with pytest.raises(KernelError, match=f"index {groups} .*lies outside the {groups} entries of its axis"):
            arrays = {"x": np.ones((2, 4), np.float32), "w": np.ones((groups, 4, 3), np.float32)}
            run(toy, {**arrays, "i": np.int32([0, groups])})


@pytest.mark.parametrize("ring", [False, True])
def test_a_position_beyond_a_cache_is_an_error(ring: bool) -> None:
    g = rlx.Graph("cached")
    q, keys, values = g.input("q", (1, 2, 2, 8)), g.input("k", (1, 1, 64, 8)), g.input("v", (1, 1, 64, 8))
    options = {"mask_kind": "sliding(40)", "ring": True} if ring else {}
    y = g.cached_attention(q, keys, values, g.input("p", (1, 2), "i32"), g.constant(np.int32([[0]])), **options)
    toy = rlx.compile(g.set_outputs([y]), "toy")
    arrays = {"q": np.ones((1, 2, 2, 8)), "k": np.ones((1, 1, 64, 8)), "v": np.ones((1, 1, 64, 8))}
    inputs: dict[str, Any] = {name: array.astype(np.float32) for name, array in arrays.items()}
    assert np.asarray(run(toy, inputs | {"p": np.int32([[63, -1]])})[0])[0, :, 0, 0].tolist() == [1, 0]
    with pytest.raises(KernelError, match="a position lies outside the capacity of a cache"):
        run(toy, inputs | {"p": np.int32([[10, 80]] if ring else [[3, 64]])})


def test_a_while_loop_that_does_not_end_is_an_error() -> None:
    cond, body = rlx.Graph("cond"), rlx.Graph("body")
    cond.set_outputs([cond.input("n", (), "i32") < 100])
    body.set_outputs([body.input("n", (), "i32") + 1])
    g = rlx.Graph("while")
    (last,) = g.while_loop([g.input("n", (), "i32")], cond, body, max_steps=5)
    toy = rlx.compile(g.set_outputs([g.build("ended", (last, last < 100), {})[0]]), "toy")
    assert run(toy, {"n": np.int32(97)})[0] == 100
    with pytest.raises(KernelError, match="its condition still holds after max_steps"):
        run(toy, {"n": np.int32(3)})


def test_sizes_that_do_not_fit_are_an_error() -> None:
    g = rlx.Graph("sizes")
    x, y = g.input("x", ("n",)), g.input("y", ("m",))
    toy = rlx.compile(g.set_outputs([x.assume_equal(shape=y.shape) + y]), "toy")
    assert run(toy, {"x": np.ones(3, np.float32), "y": np.ones(3, np.float32)})[0].tolist() == [2, 2, 2]
    with pytest.raises(BindError, match="assume_equal: n is 2, m is 3"):
        run(toy, {"x": np.ones(2, np.float32), "y": np.ones(3, np.float32)})


def test_sizes_of_a_branch_must_fit_only_if_it_runs() -> None:
    yes, no = rlx.Graph("yes"), rlx.Graph("no")
    for body in (yes, no):
        x, y = body.input("x", ("n",)), body.input("y", ("m",))
        body.set_outputs([(x.assume_equal(shape=("m",)) + y).sum() if body is yes else y.sum()])
    g = rlx.Graph("sizes")
    x, y = g.input("x", ("n",)), g.input("y", ("m",))
    toy = rlx.compile(g.set_outputs([g.cond(y.sum() > 0.0, [x, y], yes, no)]), "toy")
    x_, y_ = np.ones(2, np.float32), np.ones(3, np.float32)
    assert run(toy, {"x": x_, "y": -y_})[0] == -3
    with pytest.raises(BindError, match="assume_equal: n is 2, m is 3"):
        run(toy, {"x": x_, "y": y_})


# -- looking ----------------------------------------------------------------------------------------------------------
def test_a_trace_says_when_launches_and_loops_ran() -> None:
    body = rlx.Graph("body")
    body.set_outputs([(body.input("c", (3, 3)) @ body.input("w", (3, 3))).tanh()])
    g = rlx.Graph("loop")
    (last,), _ = g.scan_general([g.input("c", (3, 3))], body, 6, broadcasts=[g.input("w", (3, 3))])
    toy = rlx.compile(g.set_outputs([last]), "toy")
    eye = toy.allocator.upload(np.eye(3, dtype=np.float32))
    _, trace = toy.executable.trace((), [eye, eye])
    assert trace.launches.shape == (len(toy.plan.main.launches), 1, 2) and trace.steps == {0: 6}
    assert (trace.launches[..., 0] > 0).all() and (trace.launches[..., 1] >= trace.launches[..., 0]).all()
    assert trace.controls[0, 0, 0] < trace.controls[0, 0, 1]


def test_an_image_runs_in_another_executable() -> None:
    toy, backend = rlx.compile(mlp(), "toy"), base.backend("toy")
    records = record_json.records_of(*backend.image_modules())
    text, arrays = record_json.encode(toy.executable.image(), records)
    again = backend.load(record_json.decode(text, records, arrays, "image"), lambda: toy.plan.main, TOY)
    toy.set_params({"w": np.ones((4, 8), np.float32), "b": np.zeros(8, np.float32)})
    x = np.ones((3, 4), np.float32)
    wanted = run(toy, {"x": x})
    assert again is not None
    again.bind(toy.executable.weights)
    for a, b in zip(again.run((3,), [toy.allocator.upload(x)]), wanted, strict=True):
        assert np.array_equal(np.asarray(a), b)


def test_its_kernels_are_loops_and_shown_as_they_are() -> None:
    backend, kernels = base.backend("toy"), rlx.compile(mlp(), "toy").plan.main.kernels()
    assert all(isinstance(kernel, LoopKernel) for kernel in kernels.values())
    assert backend.kernel_text(kernels.values(), TOY) == "\n\n".join(kernel.text() for kernel in kernels.values())


def test_the_order_of_sums_does_not_depend_on_the_number_of_rows() -> None:
    g = rlx.Graph("rows")
    toy = rlx.compile(g.set_outputs([g.input("x", ("rows", 1000)).sum(axis=1)]), "toy")
    x = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32)
    (together,) = run(toy, {"x": x})
    for row in (0, 7, 299):
        assert run(toy, {"x": x[row : row + 1]})[0].tobytes() == together[row : row + 1].tobytes()


# -- finding it -------------------------------------------------------------------------------------------------------
def test_it_is_found_by_name() -> None:
    backend = base.backend("toy")
    assert isinstance(backend, ToyBackend) and backend.target() is TOY and "toy" in base.available()
    with pytest.raises(CapabilityError, match="'avx2' is not known to toy"):
        backend.target("avx2")


def test_other_packages_give_backends_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"mine": EntryPoint("mine", "rlx.backends.toy:ToyBackend", base.ENTRY_POINTS)}
    points["wrong"] = EntryPoint("wrong", "rlx.backends.toy:TOY", base.ENTRY_POINTS)
    monkeypatch.setattr(base, "_entry_points", lambda: points)
    monkeypatch.setattr(base, "_instances", {})
    assert isinstance(base.backend("mine"), ToyBackend) and base.available()[-2:] == ["mine", "wrong"]
    with pytest.raises(CapabilityError, match="is not a subclass of"):
        base.backend("wrong")
    with pytest.raises(CapabilityError, match="'mime' is not known"):
        base.backend("mime")
