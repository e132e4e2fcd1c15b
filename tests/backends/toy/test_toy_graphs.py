"""Whole graphs on the toy device: loops, branches, quantised weights, a Llama with its caches, gradients."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from graphs import examples
from hypothesis import given
from loop_graphs import loop_graphs, odd_graph
from on_toy import run
from oracles import ORACLES
from small_llama import SETTINGS, difference, forward, random_weights

import rlx
from rlx.dtypes import PACKED, DType
from rlx.flow.weights import MapWeights
from rlx.ir import evaluate
from rlx.ir.registry import packed
from rlx.kv_layout import KvLayout
from rlx.models import config as configs
from rlx.models import llama
from rlx.profile import CompileProfile, Precision
from rlx.transforms import grad

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(11)


def numbers(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


# -- loops and branches -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [0, 1, 4, 7])
def test_a_scan_of_any_length_gives_what_numpy_gives(steps: int) -> None:
    body = rlx.Graph("body")
    c, x = body.input("c", (3,)), body.input("x", (3,))
    body.set_outputs([c * 0.5 + x, c * x])
    g = rlx.Graph("scan")
    finals, ys = g.scan_general([g.input("c", (3,))], body, rlx.dim("t"), xs=[g.input("x", ("t", 3))], reverse=True)
    c, x = numbers(3), numbers(steps, 3)
    last, rows = run(rlx.compile(g.set_outputs([*finals, *ys]), "toy"), {"c": c, "x": x})
    wanted = np.zeros((steps, 3), np.float32)
    for t in reversed(range(steps)):
        wanted[t] = c * x[t]
        c = c * np.float32(0.5) + x[t]
    np.testing.assert_allclose(last, c, rtol=1e-6)
    np.testing.assert_allclose(rows, wanted, rtol=1e-6)


@pytest.mark.parametrize("start", [1, 30, 1000])
def test_a_while_loop_ends_when_its_condition_says_so(start: int) -> None:
    cond, body = rlx.Graph("cond"), rlx.Graph("body")
    cond.set_outputs([cond.input("n", (), "i32") < 100])
    n = body.input("n", (), "i32")
    body.set_outputs([n * 3 + 1])
    g = rlx.Graph("while")
    (last,) = g.while_loop([g.input("n", (), "i32")], cond, body)
    wanted = start
    while wanted < 100:
        wanted = wanted * 3 + 1
    assert run(rlx.compile(g.set_outputs([last]), "toy"), {"n": np.int32(start)})[0] == wanted


@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_only_one_side_of_a_branch_runs(value: float) -> None:
    yes, no = rlx.Graph("yes"), rlx.Graph("no")
    yes.set_outputs([yes.gather(yes.input("x", (3,)), yes.constant(np.int32([2, 0])))])
    no.set_outputs([no.gather(no.input("x", (3,)), no.constant(np.int32([7, 7])))])  # a fault, if it ran
    g = rlx.Graph("cond")
    x = g.input("x", (3,))
    toy = rlx.compile(g.set_outputs([g.cond(x.sum() > 0.0, [x], yes, no)]), "toy")
    if value < 0:
        with pytest.raises(rlx.errors.KernelError, match="index 7 lies outside the 3 entries"):
            run(toy, {"x": np.full(3, value, np.float32)})
    else:
        assert run(toy, {"x": np.float32([1, 2, 3])})[0].tolist() == [3, 1]


def test_loops_in_loops_with_branches_in_them() -> None:
    graph = odd_graph()
    toy = rlx.compile(graph, "toy")
    w = numbers(5, 5)
    toy.set_params({"w": w})
    for batch, time in ((1, 1), (3, 4), (2, 5)):
        inputs = {"c": numbers(batch, 5), "xs": numbers(time, batch, 5)}
        wanted = evaluate.run(graph, {**inputs, "w": w}, {"batch": batch, "time": time})
        for a, b in zip(run(toy, inputs), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@examples(15)
@given(graph=loop_graphs())
def test_random_loops_and_branches(graph: rlx.Graph) -> None:
    arrays = {name: np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4) for name in ("x0", "x1", "w")}
    toy = rlx.compile(graph, "toy")
    toy.set_params({"w": arrays["w"]})
    outputs = run(toy, {name: arrays[name] for name in ("x0", "x1")})
    for a, b in zip(outputs, evaluate.run(graph, arrays, {}), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# -- quantised weights ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("storage", PACKED, ids=str)
def test_a_matmul_reads_the_blocks_of_a_file(storage: DType) -> None:
    g = rlx.Graph("product")
    w = g.param("w", (5, 2 * storage.block), storage)
    y = g.input("x", ("rows", 2 * storage.block)) @ w.dequantise().mT
    toy = rlx.compile(g.set_outputs([y + 1.0]), "toy")
    assert not toy.plan.derived, "blocks are read as they are"
    blocks, x = packed(str(storage), 5, 2 * storage.block).array(rng), numbers(3, 2 * storage.block)
    toy.set_params({"w": blocks})
    wanted = x.astype(np.float64) @ ORACLES["dequantise"](blocks).astype(np.float64).T + 1
    np.testing.assert_allclose(run(toy, {"x": x})[0], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_a_matmul_by_a_transposed_weight_reads_it_where_it_is() -> None:
    g = rlx.Graph("product")
    y = g.input("x", (2, 4)) @ g.param("w", (3, 4)).mT
    toy = rlx.compile(g.set_outputs([y]), "toy")
    assert not toy.plan.derived
    x, w = numbers(2, 4), numbers(3, 4)
    toy.set_params({"w": w})
    np.testing.assert_allclose(run(toy, {"x": x})[0], x @ w.T, rtol=1e-5)


@pytest.mark.parametrize("precision", [Precision(compute="int8"), Precision(activations="int8")])
def test_integer_precisions_come_near_without_packed_words(precision: Precision) -> None:
    g = rlx.Graph("product")
    dense = g.input("x", (4, 64)) @ g.param("w", (64, 64))
    g.set_outputs([dense @ g.param("blocks", (96, 64), "q8_0").dequantise().mT])
    toy = rlx.compile(g, "toy", profile=CompileProfile(precision=precision))
    x, w = numbers(4, 64), numbers(64, 64)
    blocks = gguf.quants.quantize(numbers(96, 64), gguf.GGMLQuantizationType.Q8_0)
    toy.set_params({"w": w, "blocks": blocks.view(rlx.dtype("q8_0").numpy)})
    wanted = x @ w @ gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0).T
    assert np.abs(run(toy, {"x": x})[0] - wanted).max() < 0.03 * np.abs(wanted).max()
    names = {launch.kernel.name for launch in (*toy.plan.main.launches, *toy.plan.bind.launches)}
    assert not {"pack_panels", "pack_bytes", "interleave_blocks", "activation_blocks"} & names


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("grouped", [False, True])
def test_gate_and_up_are_one_launch_over_both_weights(kind: str, grouped: bool) -> None:
    storage, groups, rows, n, k = rlx.dtype(kind), 3, 7, 5, 256
    g = rlx.Graph("gate")
    x, index = g.input("x", (rows, k)), g.input("index", (rows,), "i32")
    shape = (groups, n, k) if grouped else (n, k)
    weights = [g.param(name, shape, storage) for name in ("gate", "up")]
    sides = [w.dequantise().mT if storage.is_packed else w.mT for w in weights]
    gate, up = (g.grouped_matmul(x, w, index) if grouped else x @ w for w in sides)
    toy = rlx.compile(g.set_outputs([gate.silu() * up]), "toy")
    assert len(toy.plan.main.launches) == 1 and not toy.plan.derived and "weights=2" in toy.plan.main_text
    stored = [packed(kind, *shape).array(rng) if storage.is_packed else numbers(*shape) for _ in range(2)]
    wide = [(ORACLES["dequantise"](w) if storage.is_packed else w).astype(np.float64) for w in stored]
    largest = max(np.abs(w).max() for w in wide)
    a, at = numbers(rows, k) / np.float32(largest), rng.integers(0, groups, rows).astype(np.int32)
    toy.set_params(dict(zip(("gate", "up"), stored, strict=True)))
    left, right = (np.einsum("rk,rnk->rn", a, w[at] if grouped else w[None].repeat(rows, 0)) for w in wide)
    wanted = left / (1 + np.exp(-left)) * right
    (output,) = run(toy, {"x": a, "index": at})
    np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


# -- models -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [None, "q8_0", "q4_0"])
def test_a_llama_with_caches_equals_its_forward_pass_in_numpy(kind: str | None) -> None:
    settings = SETTINGS | {"intermediate_size": 64}
    plain = random_weights(settings)
    weights: dict[str, Array] = dict(plain)
    if kind is not None:
        ggml = gguf.GGMLQuantizationType[kind.upper()]
        for name in (n for n, w in plain.items() if w.ndim == 2):
            blocks = gguf.quants.quantize(plain[name], ggml)
            weights[name] = blocks.view(rlx.dtype(kind).numpy)
            plain[name] = gguf.quants.dequantize(blocks, ggml)
    config = configs.from_hf(llama.Config, settings, "test")
    built = llama.llama.flow(config, 128).cache_layout(KvLayout()).build(MapWeights(weights))
    toy = rlx.compile(built.module, "toy")
    params: dict[str, Any] = weights | dict(built.params)
    toy.set_params({node.attrs["name"]: params[node.attrs["name"]] for node in built.module.params})
    spec = built.cache
    assert spec is not None
    zeros = toy.allocator.zeros
    caches: dict[str, Any] = {}
    for i in range(spec.layers):
        for of in ("keys", "values"):
            caches[f"{of}.{i}"] = zeros(spec.pool_shape(of, 3), np.dtype(np.float32))
    caches["table"] = np.int32([[2, 0]])
    tokens = [7, 1, 42, 63, 0, 9, 9, 30]
    logits = []
    for first, last in ((0, 5), (5, 6), (6, 8)):  # prefill, then decode
        rows = np.int32([tokens[first:last]])
        inputs = {"tokens": rows, "positions": np.arange(first, last, dtype=np.int32)[None]}
        inputs |= {"last_token_idx": np.arange(last - first, dtype=np.int32)}
        logits.append(run(toy, {**inputs, **caches})[0])
    assert difference(np.concatenate(logits), forward(settings, plain, tokens)) < 1e-4


def test_gradients_of_attention_are_those_of_finite_differences() -> None:
    g = rlx.Graph("loss")
    q, k, v = (g.input(n, (1, 5, h, 4), "f64") for n, h in (("q", 4), ("k", 2), ("v", 2)))
    y = g.attention(q, k, v, mask_kind="causal", softcap=3.0)
    g.set_outputs([(y * y).sum()])
    backward, loss = rlx.compile(grad(g, ["q", "k", "v"]), "toy"), rlx.compile(g, "toy")
    arrays = {n: rng.standard_normal((1, 5, h, 4)) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    for name, gradient in zip("qkv", run(backward, arrays), strict=True):
        step = np.zeros_like(arrays[name])
        for at in ((0, 1, 0, 2), (0, 4, 1, 3)):
            step[...] = 0
            step[at] = 1e-5
            up, down = (run(loss, arrays | {name: arrays[name] + s})[0] for s in (step, -step))
            np.testing.assert_allclose(gradient[at], (up - down) / 2e-5, rtol=1e-6, atol=1e-8)


def test_masked_keys_have_no_part_in_attention_or_its_gradients() -> None:
    g = rlx.Graph("loss")
    q, k, v = (g.input(n, (2, 3, 2, 4)) for n in "qkv")
    y = g.attention(q, k, v, g.input("mask", (2, 3), "bool"), mask_kind="custom")
    toy = rlx.compile(grad(g.set_outputs([(y * y).sum()]), ["q", "k", "v"]), "toy")
    arrays = {n: numbers(2, 3, 2, 4) for n in "qkv"} | {"mask": np.array([[True, False, True], [False, False, False]])}
    clean = run(toy, arrays)
    hidden = ~arrays["mask"][..., None, None]
    dirty = run(toy, arrays | {n: np.where(hidden, np.float32(np.nan), arrays[n]) for n in "kv"})
    for a, b in zip(clean, dirty, strict=True):
        assert a.tobytes() == b.tobytes() and np.isfinite(a).all()


def test_a_ring_gives_the_bits_of_a_cache_of_everything() -> None:
    """Positions 0 to 299 through a ring of 128 places with a window of 50, and through a cache of 320."""
    graphs = []
    for ring, places in ((True, 128), (False, 320)):
        g = rlx.Graph("cached")
        q, at = g.input("q", (1, "n", 2, 8)), g.input("p", (1, "n"), "i32")
        keys, values = (g.state(name, (places // 64, 1, 64, 8)) for name in "kv")
        table = g.input("table", (1, places // 64), "i32")
        keys = g.kv_append(keys, g.input("new_k", (1, "n", 1, 8)), at, table, ring=ring)
        values = g.kv_append(values, g.input("new_v", (1, "n", 1, 8)), at, table, ring=ring)
        y = g.cached_attention(q, keys, values, at, table, mask_kind="sliding(50)", ring=ring)
        graphs.append(rlx.compile(g.set_outputs([y]), "toy"))
    zeros = graphs[0].allocator.zeros
    f32 = np.dtype(np.float32)
    caches: list[dict[str, Any]] = [{name: zeros((n // 64, 1, 64, 8), f32) for name in "kv"} for n in (128, 320)]
    for cache, pages in zip(caches, ([1, 0], [3, 0, 4, 1, 2]), strict=True):
        cache["table"] = np.int32([pages])
    for first in range(0, 300, 60):
        inputs = {"q": numbers(1, 60, 2, 8), "new_k": numbers(1, 60, 1, 8), "new_v": numbers(1, 60, 1, 8)}
        positions = np.arange(first, first + 60, dtype=np.int32)[None]
        outputs = [run(g, {**inputs, **c, "p": positions})[0] for g, c in zip(graphs, caches, strict=True)]
        assert outputs[0].tobytes() == outputs[1].tobytes() and np.isfinite(outputs[0]).all()
