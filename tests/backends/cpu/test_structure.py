"""What whole layers become: how many launches and kernels, that nothing is left unfused, what the code needs to link.

Numbers are exact on purpose. A change that alters one should say why, here.
"""

from __future__ import annotations

import functools

import pytest
from layers import (
    MINILM,
    SMOLLM,
    Bert,
    Llama,
    bert_graph,
    bert_inputs,
    compiled,
    llama_graph,
    llama_inputs,
    weights,
)
from targets import BY_NAME, supported

from rlx.backends.cpu.driver import AHEAD, driver_text
from rlx.backends.cpu.kernel_generators import kernel_text
from rlx.backends.cpu.toolchain import compile_text, undefined_symbols
from rlx.lir.loops import LoopKernel
from rlx.lir.program import WEIGHT, Program
from rlx.lir.views import View
from rlx.runtime.plan import CompiledPlan, make_plan
from rlx.types import evaluate

TARGETS = [t.name for t in supported()]
LIBC = {"memcpy", "memset"}
DECODER = Llama(hidden=24, heads=3, kv_heads=1, head_dim=8, ffn=40)
ENCODER = Bert(hidden=24, heads=3, ffn=40)


@functools.cache
def plan(sizes: Bert | Llama, past: bool = False, target: str = TARGETS[0]) -> CompiledPlan:
    graph = bert_graph(sizes) if isinstance(sizes, Bert) else llama_graph(sizes, past=past)
    return make_plan(graph, BY_NAME[target])


def kinds(program: Program) -> list[str]:
    """The launches in order; loop kernels by name."""
    return [x.kernel.name if isinstance(x.kernel, LoopKernel) else x.kernel.kind for x in program.launches]


@pytest.mark.parametrize("target", TARGETS)
def test_a_bert_layer_is_seven_launches(target: str) -> None:
    assert kinds(plan(ENCODER, target=target).main) == [
        "matmul", "attention", "matmul", "layer_norm", "matmul", "matmul", "layer_norm"
    ]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_llama_layer_is_eight_launches(target: str) -> None:
    assert kinds(plan(DECODER, target=target).main) == [
        "rms_norm", "matmul", "rope_halves", "attention", "matmul", "rms_norm", "matmul", "matmul"
    ]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_llama_layer_with_a_past_is_nine_launches(target: str) -> None:
    # The one more puts new keys and values behind the old ones: the only launch here that copies.
    assert kinds(plan(DECODER, past=True, target=target).main) == [
        "rms_norm", "matmul", "rope_halves", "concatenate2", "attention", "matmul", "rms_norm", "matmul", "matmul"
    ]  # fmt: skip


@pytest.mark.parametrize("past", [False, True])
def test_layers_add_up(past: bool) -> None:
    one, many = (plan(Llama(24, 3, 1, 8, 40, layers=n), past) for n in (1, 30))
    assert len(many.main.launches) == 30 * len(one.main.launches)


@pytest.mark.parametrize("past", [False, True])
def test_thirty_layers_have_the_kernels_of_two(past: bool) -> None:
    two, thirty = (plan(Llama(24, 3, 1, 8, 40, layers=n), past) for n in (2, 30))
    assert thirty.main.kernels().keys() == two.main.kernels().keys()
    assert thirty.bind.kernels().keys() == two.bind.kernels().keys()
    assert len(thirty.main.kernels()) == (7 if past else 6)


def test_a_six_layer_encoder_is_nine_kernels() -> None:
    encoder = plan(Bert(hidden=384, heads=12, ffn=1536, layers=6))
    assert len(encoder.main.launches) == 6 * 7
    assert len(encoder.main.kernels()) == 5  # QKV, the two with residual, GELU; attention; layer norm
    assert len(encoder.bind.kernels()) == 4  # concatenated weights and biases, panels of both


def test_prefill_and_decode_differ_in_one_kernel() -> None:
    prefill, decode = plan(DECODER).main.kernels().keys(), plan(DECODER, past=True).main.kernels().keys()
    assert prefill < decode and len(decode - prefill) == 1


@pytest.mark.parametrize("sizes", [ENCODER, DECODER], ids=["bert", "llama"])
def test_every_launch_is_native_and_nothing_missed_a_fusion(sizes: Bert | Llama) -> None:
    f = compiled(bert_graph(sizes) if isinstance(sizes, Bert) else llama_graph(sizes), weights(sizes))
    report = f.report()
    assert set(report.dispatch.values()) == {"native"}
    assert len(report.dispatch) == len(report.launches)
    assert {x.kind for x in report.launches} == {"matmul", "attention", "loops"}
    assert "missed 0" in report.fusion


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", [ENCODER, DECODER], ids=["bert", "llama"])
def test_objects_need_nothing_but_memcpy_and_memset(sizes: Bert | Llama, target: str) -> None:
    program = plan(sizes, isinstance(sizes, Llama), target)
    kernels = program.main.kernels() | program.bind.kernels()
    text = kernel_text(kernels.values(), BY_NAME[target], level="llvm")
    assert set(undefined_symbols(compile_text(text, BY_NAME[target]))) <= LIBC


@pytest.mark.parametrize("target", TARGETS)
def test_the_driver_needs_nothing(target: str) -> None:
    assert undefined_symbols(compile_text(driver_text(BY_NAME[target]), BY_NAME[target])) == []


# -- bytes --------------------------------------------------------------------------------------------------------
def weight_bytes(program: Program, tables: tuple[str, ...] = ()) -> int:
    """Bytes of weights that all launches read, each launch counted; rotary tables aside, of which a row is read."""
    read = 0
    for launch in program.launches:
        names = {v.buffer for v in launch.views(written=False)}
        buffers = [program.buffers[n] for n in names if n not in tables]
        read += sum(evaluate(b.type.bytes, {}) for b in buffers if b.kind == WEIGHT)
    return read


@pytest.mark.parametrize(
    ("sizes", "past"), [(MINILM, False), (SMOLLM, False), (SMOLLM, True)], ids=["bert", "llama", "decode"]
)
def test_a_run_reads_each_weight_once(sizes: Bert | Llama, past: bool) -> None:
    stored = sum(w.nbytes for n, w in weights(sizes).items() if n not in ("cos", "sin"))
    assert weight_bytes(plan(sizes, past).main, ("cos", "sin")) == stored  # these sizes fill their panels


def test_a_decoded_token_moves_weights_and_past_and_little_else() -> None:
    """One token, 100 before it: weights once, the past read and written by the copy and read by attention."""
    f = compiled(llama_graph(SMOLLM, past=True), weights(SMOLLM))
    inputs = llama_inputs(SMOLLM, 1, 1, 100)
    launches = f.report(inputs).launches
    stored = sum(w.nbytes for w in weights(SMOLLM).values())
    past = inputs["k0"].nbytes + inputs["v0"].nbytes
    moved = sum(x.bytes for x in launches)
    # A fourth time, because a concatenation counts each of its two sources as long as their sum.
    assert stored + 3 * past <= moved <= stored + 4 * past + 64 * 1024


def test_the_arena_does_not_grow_with_the_past() -> None:
    f = compiled(llama_graph(DECODER, past=True), weights(DECODER))
    short, long = (f.report(llama_inputs(DECODER, 1, 1, past)).arena_bytes for past in (1, 2000))
    assert short == long


def test_the_arena_is_as_small_as_lifetimes_allow() -> None:
    f = compiled(bert_graph(MINILM), weights(MINILM))
    report = f.report(bert_inputs(MINILM, 1, 64))
    assert report.arena_bytes == report.arena_bound


def test_what_is_read_ahead_is_what_the_next_product_reads() -> None:
    sizes = DECODER
    graph = compiled(llama_graph(sizes), weights(sizes))
    graph.run(llama_inputs(sizes, 1, 1))
    executable = graph.executable
    (context,) = executable._contexts
    walk, program = executable.records.walk, executable.program
    products = [n for n, launch in enumerate(program.launches) if launch.kernel.kind == "matmul"]
    told = [(record, mark.number) for record, mark in enumerate(walk) if mark.kind == AHEAD]
    assert [number for _, number in told] == products  # the first one at the start, each other before the one before it
    assert walk[0].kind == AHEAD
    assert [walk[record + 1].number for record, _ in told[1:]] == products[:-1]
    for record, number in told:
        launch = program.launches[number]
        view = launch.words[launch.kernel.words.index("b")]
        assert isinstance(view, View)
        array = executable._weights[view.buffer]
        address, size, units, _ = context.records[record].tolist()
        assert address == array.ctypes.data
        assert size * units == array.nbytes

    graph.run(llama_inputs(sizes, 1, 9))  # rows enough to keep the processor busy
    assert not any(context.records[record, 2] for record, _ in told)
