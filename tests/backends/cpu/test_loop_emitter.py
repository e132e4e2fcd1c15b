"""What loops become: one pass for reductions of one row, plain loads of table rows, bytes in few instructions."""

from __future__ import annotations

import numpy as np
import pytest
from targets import AVX512

import rlx
from rlx import Graph
from rlx.backends.cpu import loops
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.forms.quantised_dots import dot_kernel
from rlx.dtypes import dtype
from rlx.lir.loops import LoopKernel
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise


def emitted(g: Graph) -> str:
    """The LLVM IR of the only kernel of a graph."""
    (kernel,) = schedule(optimise(g, AVX512).main, AVX512).kernels().values()
    assert isinstance(kernel, LoopKernel)
    module = Module()
    loops.routine(kernel, AVX512).emit(module)
    return module.text()


def test_the_range_of_a_row_is_found_in_one_pass() -> None:
    g = Graph("g")
    text = emitted(g.set_outputs(list(g.apply("quantise_rows", g.input("x", ("n", 384))))))
    loads = text.count("load <16 x float>")
    # Four chains, the vectors after them, and what is written; the rest of a row is masked.
    assert loads == 4 + 1 + 1, loads


def test_rows_of_a_table_are_loaded_as_vectors() -> None:
    g = Graph("g")
    text = emitted(g.set_outputs([g.gather(g.param("table", (100, 384)), g.input("at", ("n",), "i32"))]))
    assert "masked.gather" not in text and "masked.load.v16f32" in text


def test_an_index_for_each_lane_is_gathered() -> None:
    g = Graph("g")
    assert "masked.gather" in emitted(g.set_outputs([g.gather(g.param("t", (100,)), g.input("at", ("n",), "i32"))]))


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0"])
def test_streamed_weights_are_prefetched_by_few_instructions(name: str) -> None:
    """Each load of weights prefetches further ones; the parts of a long block are a loop, not more loads."""
    module = Module()
    loops.routine(dot_kernel(dtype(name), 64, AVX512, 4), AVX512).emit(module)
    prefetches = module.text().count("call void @llvm.prefetch")
    assert prefetches == {"q4_k": 3 + 16, "q6_k": 1 + 12, "q8_0": 8}[name]


@pytest.mark.parametrize("target", ["avx512", "avx2", "baseline"])
def test_floats_become_bytes_as_numpy_clips_them(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_TARGET", target)
    g = Graph("g")
    f = rlx.compile(g.set_outputs([g.cast(g.input("x", ("n",)), "u8")]))
    assert f.target.name == target
    edges = np.array([0.0, -0.0, 0.5, 0.99, 1.0, 254.99, 255.0, 255.5, 256.0, 1e9, 3e38, -0.5, -1.0, -3e38], np.float32)
    x = np.concatenate([edges, [np.inf, -np.inf, np.nan, -np.nan], np.linspace(-300, 600, 999)]).astype(np.float32)
    wanted = np.clip(np.trunc(np.nan_to_num(x, nan=0.0, posinf=255, neginf=0)), 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(f.run({"x": x})[0], wanted)


def test_reductions_that_need_each_other_stay_apart_and_sums_keep_their_bits() -> None:
    """A norm's variance needs its mean; its bits are those of the sum written as four chains of lanes."""
    g = Graph("g")
    x = g.input("x", ("n", 100))
    f = rlx.compile(g.set_outputs([x.sum(axis=1), x.layer_norm()]))
    data = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32)
    total, normed = f.run({"x": data})
    lanes = [np.zeros((5, 16), np.float32) for _ in range(4)]
    for i in range(6):
        chain = i if i < 4 else 0
        lanes[chain] = lanes[chain] + data[:, 16 * i : 16 * i + 16]
    lanes[0] = lanes[0] + np.pad(data[:, 96:], ((0, 0), (0, 12)))
    both = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    while both.shape[1] > 1:
        both = both[:, : both.shape[1] // 2] + both[:, both.shape[1] // 2 :]
    if f.target.vector_bytes == 64:  # type: ignore[attr-defined]
        np.testing.assert_array_equal(total, both[:, 0])
    exact = data.astype(np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normed, exact, atol=1e-5)
