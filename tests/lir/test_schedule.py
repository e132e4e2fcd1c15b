"""Scheduling: launches, barriers, buffers, outputs, and a program as text."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from graphs import examples, float_graphs
from hypothesis import given
from layers import Bert, Llama, bert_graph, llama_graph
from targets import AVX2, AVX512

import rlx
from rlx import Graph
from rlx.errors import LowerError
from rlx.lir.barriers import place_barriers
from rlx.lir.program import ARENA, CONST, INPUT, OUTPUT, WEIGHT, Program
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise


def program(g: Graph) -> Program:
    return schedule(optimise(g, AVX512).main, AVX512)


BERT, LLAMA = Bert(64, 4, 96), Llama(64, 4, 2, 16, 96)
LAYERS = {
    "bert": bert_graph(BERT), "llama": llama_graph(LLAMA), "decode": llama_graph(LLAMA, past=True),
}  # fmt: skip


# -- barriers ---------------------------------------------------------------------------------------------------------
def conflicts(p: Program, i: int, j: int) -> bool:
    """Whether launch j must wait for launch i."""
    reads = [{v.buffer for v in x.views(written=False)} for x in p.launches]
    writes = [{v.buffer for v in x.views(written=True)} for x in p.launches]
    return bool(writes[i] & (reads[j] | writes[j]) or reads[i] & writes[j])


def check_barriers(p: Program) -> None:
    pairs = [(i, j) for j in range(len(p.launches)) for i in range(j) if conflicts(p, i, j)]
    barriers = [i for i, x in enumerate(p.launches) if x.barrier]
    for i, j in pairs:
        assert any(i <= b < j for b in barriers), f"launch {j} needs what launch {i} does"
    for b in barriers:
        alone = [(i, j) for i, j in pairs if i <= b < j and sum(i <= c < j for c in barriers) == 1]
        assert alone, f"nothing needs the barrier after launch {b}"


@pytest.mark.parametrize("name", LAYERS)
def test_barriers_stand_exactly_where_they_are_needed(name: str) -> None:
    p = program(LAYERS[name])
    check_barriers(p)
    assert not p.launches[-1].barrier, "the end of a run is a barrier anyway"


@given(float_graphs(dtype="f32"))
@examples(60)
def test_barriers_of_random_graphs_stand_exactly_where_they_are_needed(g: Graph) -> None:
    done = optimise(g, AVX512)
    for part in (done.main, done.bind):
        check_barriers(schedule(part, AVX512))


def test_independent_launches_run_without_a_barrier() -> None:
    g = Graph("g")
    x, y = g.input("x", ("n", 64)), g.input("y", ("m", 64))
    a, b = x.cumsum(), y.cumsum()
    p = program(g.set_outputs([a.sum(axis=1), b.sum(axis=1)]))
    assert [launch.barrier for launch in p.launches] == [False, True, False, False]


def test_a_buffer_is_not_overwritten_while_it_is_read() -> None:
    g = Graph("g")
    x, at, new = g.input("x", (4, 8)), g.input("at", (2,), "i32"), g.input("new", (2, 8))
    p = program(g.set_outputs([g.scatter_add(x, at, new)]))  # copies x, then adds to the copy
    assert [launch.barrier for launch in p.launches] == [True, False]
    stripped = Program(p.name, p.target, p.symbols, {}, p.buffers, list(reversed(p.launches)))
    place_barriers(stripped)
    assert stripped.launches[0].barrier


# -- buffers ----------------------------------------------------------------------------------------------------------
def test_layers_take_few_launches() -> None:
    assert [x.kernel.kind for x in program(LAYERS["bert"]).launches] == [
        "matmul", "attention", "matmul", "loops", "matmul", "matmul", "loops"
    ]  # fmt: skip
    assert [x.kernel.symbol.split(".")[0] for x in program(LAYERS["llama"]).launches] == [
        "rms_norm", "matmul", "rope_halves", "attention", "matmul", "rms_norm", "matmul", "matmul"
    ]  # fmt: skip


def test_many_layers_have_the_kernels_of_one() -> None:
    one, three = (program(llama_graph(Llama(64, 4, 2, 16, 96, layers=n))) for n in (1, 3))
    assert len(three.launches) == 3 * len(one.launches)
    assert set(three.kernels()) == set(one.kernels())


@pytest.mark.parametrize("name", ["t2", "t3", "t4", "output0", "output1", "const1", "c3", "c5", "@0", "x0", "t1.0"])
@pytest.mark.parametrize("leaf", ["input", "param"])
def test_buffers_never_take_a_name_of_the_user(name: str, leaf: str) -> None:
    g = Graph("g")
    x, w = getattr(g, leaf)(name, (4, 4)), g.param("w", (4, 4))
    y = (x + g.constant([1.0, 2.0, 3.0, 4.0])).cumsum(axis=0)
    top, _ = y.topk(k=4)
    g.set_outputs([top.cumsum(axis=0) + x.cumsum(axis=1), (x @ w).cumsum(axis=0), x])
    done = optimise(g, AVX512)
    p = schedule(done.main, AVX512)
    kinds = {
        kind: [b.name for b in p.buffers.values() if b.kind == kind] for kind in (INPUT, WEIGHT, OUTPUT, ARENA, CONST)
    }
    assert len(p.buffers) == sum(map(len, kinds.values()))
    assert kinds[INPUT] == p.inputs and set(kinds[WEIGHT]) == set(p.weights) and kinds[OUTPUT] == p.outputs
    assert p.inputs == [n.attrs["name"] for n in done.main.inputs]
    written = [v.buffer for x in p.launches for v in x.views(written=True)]
    assert all(p.buffers[b].kind in (ARENA, OUTPUT) for b in written)
    arrays = {n: np.arange(16, dtype=np.float32).reshape(4, 4) / 8 for n in (name, "w")}
    runs = []
    for device in ("cpu", "reference"):
        f = rlx.compile(g, device)
        f.set_params({n: arrays[n] for n in f.param_types})
        runs.append(f.run({n: arrays[n] for n in f.input_types}))
    for have, want in zip(*runs, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_outputs_that_are_views_or_inputs_are_copied_out() -> None:
    g = Graph("g")
    x, w = g.input("x", ("n", 4)), g.param("w", (3,))
    y = x.cumsum()
    p = program(g.set_outputs([x, x.mT, w, y, y, y[:, :2]]))
    assert p.outputs == [f"output{i}" for i in range(6)]
    assert [str(p.buffers[o].type) for o in p.outputs] == [str(v.type) for v in g.outputs]
    writers = [v.buffer for launch in p.launches for v in launch.views(written=True)]
    assert sorted(writers) == sorted(p.outputs), "each output is written once, nothing else is"


def test_assumptions_limits_and_symbols_are_part_of_the_program() -> None:
    g = Graph("g")
    a, b = g.input("a", (rlx.dim("n", max=9), 2)), g.input("b", ("m", 2))
    p = program(g.set_outputs([a + b.assume_equal(shape=("n", 2))]))
    assert p.symbols == ("m", "n") and p.limits == {"n": 9}
    assert [(str(x.a), str(x.b)) for x in p.assertions] == [("m", "n")]
    assert "  assert m == n  # test_schedule.py:" in p.text() and "  limit n <= 9" in p.text()


def test_an_op_without_a_loop_form_says_where_it_belongs() -> None:
    g = Graph("g")
    with pytest.raises(LowerError, match="op tanh: has no loop form") as caught:
        schedule(g.set_outputs([g.input("x", (2,)).tanh()]), AVX512)  # not optimised: tanh stands alone
    assert caught.value.hint == "add it in src/rlx/lir/forms/elementwise.py"


# -- text, fingerprints, pickles --------------------------------------------------------------------------------------
def small() -> Graph:
    g = Graph("small")
    x, w, b = g.input("x", ("n", 4)), g.param("w", (4, 6)), g.param("b", (6,))
    h = (x @ w + b).tanh()
    return g.set_outputs([g.rms_norm(h[:, :4] + x, eps=1e-5) * g.constant([1.0, 2.0, 3.0, 4.0])])


GOLDEN = """\
program @small(n)  # avx512
  weight @0: f32[1, 4, 64] as cpu.panels(64)
  weight b: f32[6]
  const const2: f32[4] = @6b29353c39a5
  input x: f32[n, 4]
  buffer t4: f32[n, 6]
  buffer t6.0: f32[n, 4]
  buffer t6.1: f32[n, 4]
  output output0: f32[n, 4]
  entries of n are independent
  launch matmul.b0a1a1d0(x, @0, b) -> t4  epilogue tanh(acc + b)  barrier
  launch residual_rms_norm.ff2a5b1c(t4<6, 1>, x) -> t6.1, t6.0  split rows(n)  barrier
  launch mul.8c2f52bd(t6.0, const2) -> output0  split rows(n)"""


def test_a_small_program_reads_well() -> None:
    done = optimise(small(), AVX512)
    text = schedule(done.main, AVX512, notes={"@0": "cpu.panels(64)"}).text(kernels=False)
    digest = re.compile(r"\b([a-z_]+)\.[0-9a-f]{8}\b")  # kernels may change, the form of the text does not
    assert digest.sub(r"\1.*", text) == digest.sub(r"\1.*", GOLDEN)


def test_the_kernels_follow_the_program() -> None:
    p = program(small())
    for symbol in p.kernels():
        assert f"\n\nkernel {symbol}(" in p.text()
    assert "  s = " not in p.text(kernels=False)


def test_a_long_epilogue_is_named_instead_of_written_out() -> None:
    g = Graph("g")
    y = g.input("x", ("n", 4)) @ g.param("w", (4, 4))
    for _ in range(40):
        y = y * y + y
    p = program(g.set_outputs([y]))
    (line,) = (x for x in p.text(kernels=False).splitlines() if "epilogue" in x)
    assert "epilogue mul_add_mul_add" in line and len(line) < 200
    assert len(p.fingerprint()) == 32


def test_fingerprints_tell_programs_apart() -> None:
    def pad(low: int) -> str:
        g = Graph("g")
        return program(g.set_outputs([g.input("x", ("n",)).pad(low=(low,), high=(3 - low,))])).fingerprint()

    assert pad(1) == pad(1)
    assert len({pad(0), pad(1), pad(2)}) == 3, "numbers that the text does not show count too"
    assert program(small()).fingerprint() == program(small()).fingerprint()
    done = optimise(small(), AVX2)
    assert schedule(done.main, AVX2).fingerprint() != program(small()).fingerprint()


def test_fingerprints_see_large_constants() -> None:
    def with_constant(last: float) -> str:
        g = Graph("g")
        data = np.zeros(100, np.float32)
        data[-1] = last
        return program(g.set_outputs([g.input("x", ("n", 100)) * g.constant(data)])).fingerprint()

    assert with_constant(1.0) != with_constant(2.0)


@pytest.mark.parametrize("name", LAYERS)
def test_programs_survive_pickling(name: str) -> None:
    p = program(LAYERS[name])
    again: Program = pickle.loads(pickle.dumps(p))
    assert again == p
    assert again.text() == p.text() and again.fingerprint() == p.fingerprint()
    assert again.kernels().keys() == p.kernels().keys()


def test_the_manifest_lists_the_interface() -> None:
    assert program(small()).manifest() == {
        "inputs": {"x": "f32[n, 4]"},
        "weights": {"b": "f32[6]", "@0": "f32[1, 4, 64]"},
        "outputs": {"output0": "f32[n, 4]"},
    }


def test_a_launch_knows_its_bytes_and_flops() -> None:
    g = Graph("g")
    x, b = g.input("x", ("n", 4)), g.input("b", (4,))
    (launch,) = program(g.set_outputs([x + b])).launches
    n = rlx.dim("n")
    assert launch.bytes == 2 * 16 * n + 16
    assert launch.flops == 4 * n
    assert [v.buffer for v in launch.views(written=False)] == ["x", "b"]


def test_nothing_is_left_of_views() -> None:
    g = Graph("g")
    x = g.input("x", ("b", "s", 12))
    y = x.reshape("b", "s", 3, 4).transpose(axes=(0, 2, 1, 3))[:, 1:, ::2]
    p = program(g.set_outputs([y.expand(shape=(2, *y.shape)) * 2.0]))
    assert len(p.launches) == 1 and not [b for b in p.buffers.values() if b.kind == ARENA]
