"""Gradients of attention on the CPU: against formulas in float64, differences and torch; memory, bits and masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import widths

import rlx
from rlx.transforms import vjp

Array = npt.NDArray[Any]
EVERY_TARGET = pytest.mark.parametrize("target", [t.name for t in widths()])


def causal(queries: int, keys: int, window: int = 0) -> Array:
    """Which keys a query sees, [queries, keys]: both end together."""
    gap = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
    return (gap >= 0) & ((gap < window) if window else True)


def forward(q: Array, k: Array, v: Array, seen: Array, bias: Array, scale: float, cap: float | None) -> tuple[Any, ...]:
    """Weights and results in float64, and how scores grow with q · k; heads of k are repeated for those of q."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores, slope = np.einsum("bqhd,bkhd->bhqk", q, k) * scale, np.array(scale)
    if cap is not None:
        slope = scale * (1 - np.tanh(scores / cap) ** 2)
        scores = cap * np.tanh(scores / cap)
    seen = np.broadcast_to(seen, scores.shape)
    scores = np.where(seen, scores + bias, -1e300)
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300)), 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    return q, k, v, weights, np.einsum("bhqk,bkhe->bqhe", weights, v), slope


def gradients(
    q: Array, k: Array, v: Array, dy: Array, *, seen: Array | bool = True, bias: Array | float = 0.0, scale: float,
    cap: float | None = None,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """dq, dk, dv and the gradient of scores after the cap, by the chain rule with all weights at hand."""
    shape, bias = (*k.shape[:3], q.shape[2] // k.shape[2]), np.asarray(bias, np.float64)
    q, k, v, weights, _, slope = forward(q, k, v, np.asarray(seen), bias, scale, cap)
    dy = dy.astype(np.float64)
    share = np.einsum("bqhe,bkhe->bhqk", dy, v)
    scores = weights * (share - (weights * share).sum(-1, keepdims=True))
    dk = np.einsum("bhqk,bqhd->bkhd", scores * slope, q).reshape(*shape, q.shape[3]).sum(3)
    dv = np.einsum("bhqk,bqhe->bkhe", weights, dy).reshape(*shape, v.shape[3]).sum(3)
    return np.einsum("bhqk,bkhd->bqhd", scores * slope, k), dk, dv, scores


def operands(
    batch: int, queries: int, keys: int, heads: int, kv: int, dim: int, value: int, dtype: str = "f32", seed: int = 0
) -> dict[str, Array]:
    rng = np.random.default_rng([seed, queries, keys, dim])
    shapes = {
        "q": (batch, queries, heads, dim), "k": (batch, keys, kv, dim), "v": (batch, keys, kv, value),
        "dy": (batch, queries, heads, value),
    }  # fmt: skip
    return {n: rng.standard_normal(s).astype(rlx.dtype(dtype).numpy) for n, s in shapes.items()}


def program(
    shapes: Mapping[str, Any], wanted: tuple[str, ...] = ("q", "k", "v"), **attrs: Any
) -> rlx.Graph:  # fmt: skip
    """attention and the gradients of `wanted`; `shapes` are (shape, element type) by name."""
    graph = rlx.Graph("attention")
    inputs = {n: graph.input(n, shape, dtype) for n, (shape, dtype) in shapes.items() if n != "dy"}
    graph.set_outputs([graph.attention(inputs["q"], inputs["k"], inputs["v"], inputs.get("mask"), **attrs)])
    return vjp(graph, list(wanted))


def run(arrays: dict[str, Array], wanted: tuple[str, ...] = ("q", "k", "v"), *, target: str | None = None,
        threads: int = 1, **attrs: Any) -> list[Array]:  # fmt: skip
    """The gradients, given `dy`."""
    graph = program({n: (a.shape, str(rlx.dtype(a.dtype))) for n, a in arrays.items()}, wanted, **attrs)
    compiled = rlx.compile(graph, target=target, threads=threads)
    return compiled.run(seeded(graph, arrays))[1:]


def seeded(graph: rlx.Graph, arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays, with `dy` under the name that the cotangent has."""
    (name,) = (n.attrs["name"] for n in graph.inputs if n.attrs["name"] not in arrays)
    return {n: a for n, a in arrays.items() if n != "dy"} | {name: arrays["dy"]}


def assert_near(actual: Array, exact: Array, tolerance: float) -> None:
    assert actual.shape == exact.shape
    np.testing.assert_allclose(actual, exact, rtol=0, atol=tolerance * max(1.0, np.abs(exact).max(initial=0)))


# -- numbers ----------------------------------------------------------------------------------------------------------
SHAPES = {  # queries, keys, heads, kv_heads, head_dim, value_dim
    "one": (1, 1, 1, 1, 1, 1),
    "one block": (64, 64, 2, 2, 64, 64),
    "grouped, uneven": (67, 67, 6, 2, 20, 33),
    "several blocks of rows": (200, 200, 2, 1, 64, 64),
    "a past": (9, 130, 4, 2, 128, 64),
    "wide heads": (33, 70, 1, 1, 256, 80),
}
KINDS = ("none", "causal", "sliding(1)", "sliding(37)", "custom", "bias")


def masked(kind: str, arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The mask operand of a kind, and what it means."""
    (batch, queries, heads), keys = arrays["q"].shape[:3], arrays["k"].shape[1]
    rng = np.random.default_rng(5)
    match kind:
        case "none":
            return {}, {}
        case "causal":
            return {}, {"seen": causal(queries, keys)}
        case "custom":
            keep = rng.random((batch, keys)) < 0.6
            return {"mask": keep}, {"seen": keep[:, None, None, :]}
        case "bias":
            bias = rng.standard_normal((batch, heads, queries, keys)).astype(np.float32)
            bias[rng.random(bias.shape) < 0.2] = -np.inf
            return {"mask": bias}, {"seen": bias > -np.inf, "bias": np.where(bias > -np.inf, bias, 0)}
        case _:
            return {}, {"seen": causal(queries, keys, int(kind[8:-1]))}


@EVERY_TARGET
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_formulas(kind: str, target: str) -> None:
    first = KINDS.index(kind)
    for number in (first, (first + 3) % len(SHAPES)):  # each kind with two shapes, each shape with two kinds
        dtype = "f64" if number == 2 else "f32"
        arrays = operands(2, *list(SHAPES.values())[number], dtype)
        mask, meaning = masked(kind, arrays)
        cap = 3.0 if number % 2 else None
        exact = gradients(**arrays, **meaning, scale=0.3, cap=cap)
        results = run(arrays | mask, target=target, mask_kind=kind, scale=0.3, softcap=cap)
        for ours, theirs in zip(results, exact, strict=False):
            assert_near(ours, theirs, 1e-12 if dtype == "f64" else 2e-5)


@settings(max_examples=20)
@given(
    st.integers(0, 2), st.integers(0, 210), st.integers(0, 140),
    st.sampled_from([(1, 1, 16, 7, None), (4, 2, 5, 16, 2.0)]), st.sampled_from(KINDS), st.integers(0, 9),
)  # fmt: skip
def test_gradients_of_any_shape(
    batch: int, queries: int, keys: int, heads: tuple[int, int, int, int, float | None], kind: str, seed: int
) -> None:
    dim, cap = heads[2], heads[4]
    arrays = operands(batch, queries, keys, *heads[:4], seed=seed)
    mask, meaning = masked(kind, arrays)
    exact = gradients(**arrays, **meaning, scale=dim**-0.5, cap=cap)
    for ours, theirs in zip(run(arrays | mask, mask_kind=kind, softcap=cap), exact, strict=False):
        assert_near(ours, theirs, 2e-5)


def test_gradients_are_limits_of_differences() -> None:
    arrays = operands(1, 5, 7, 2, 1, 3, 4, "f64")
    dy, step = arrays["dy"], 1e-6

    def result(**moved: Array) -> float:
        inputs = {n: moved.get(n, arrays[n]) for n in "qkv"}
        y = forward(**inputs, seen=causal(5, 7), bias=np.zeros(1), scale=3**-0.5, cap=1.5)[4]
        return float((y * dy).sum())

    for name, gradient in zip("qkv", run(arrays, mask_kind="causal", softcap=1.5), strict=True):
        for at in np.ndindex(gradient.shape):
            moved = np.zeros(gradient.shape)
            moved[at] = step
            slope = (result(**{name: arrays[name] + moved}) - result(**{name: arrays[name] - moved})) / (2 * step)
            assert abs(slope - gradient[at]) < 1e-8


def test_one_program_serves_all_lengths() -> None:
    sizes = {"q": ("b", "s", 4, 16), "k": ("b", "t", 2, 16), "v": ("b", "t", 2, 24)}
    graph = program({n: (s, "f32") for n, s in sizes.items()}, mask_kind="causal")
    compiled = rlx.compile(graph)
    for queries, keys in ((1, 1), (3, 70), (130, 130), (65, 200)):
        arrays = operands(2, queries, keys, 4, 2, 16, 24)
        exact = gradients(**arrays, seen=causal(queries, keys), scale=0.25)
        for ours, theirs in zip(compiled.run(seeded(graph, arrays))[1:], exact, strict=False):
            assert_near(ours, theirs, 5e-6)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_floats_are_differentiated_in_f32(dtype: str) -> None:
    arrays = operands(1, 70, 70, 4, 2, 16, 16, dtype)
    exact = gradients(**arrays, seen=causal(70, 70), scale=0.25)
    for ours, theirs in zip(run(arrays, mask_kind="causal"), exact, strict=False):
        assert str(rlx.dtype(ours.dtype)) == dtype
        assert_near(ours.astype(np.float64), theirs, 1e-3 if dtype == "f16" else 1e-2)


def test_padding_has_no_part_in_gradients() -> None:
    """Whatever lies in keys that are masked out: the others have the bits that they have without it."""
    arrays = operands(2, 70, 100, 4, 2, 16, 16)
    keep = np.arange(100) < np.array([[80], [3]])
    clean = run(arrays | {"mask": keep}, mask_kind="custom")
    for name in ("k", "v"):
        arrays[name] = np.where(keep[..., None, None], arrays[name], np.float32(np.nan))
    dirty = run(arrays | {"mask": keep}, mask_kind="custom")
    assert [x.tobytes() for x in clean] == [x.tobytes() for x in dirty]
    assert not dirty[1][1, 3:].any() and not dirty[2][1, 3:].any()


def test_queries_without_keys_have_no_gradient() -> None:
    dq, dk, dv = run(operands(1, 9, 4, 2, 1, 8, 8), mask_kind="causal")
    assert not dq[:, :5].any() and dq[:, 6:].any() and np.isfinite(dk).all() and np.isfinite(dv).all()


def test_the_gradient_of_a_bias_is_that_of_the_scores() -> None:
    arrays = operands(2, 9, 17, 4, 2, 8, 8)
    bias = np.random.default_rng(1).standard_normal((1, 4, 9, 17)).astype(np.float32)
    exact = gradients(**arrays, bias=bias, scale=8**-0.5, cap=2.0)
    results = run(arrays | {"mask": bias}, ("q", "k", "v", "mask"), mask_kind="bias", softcap=2.0)
    for ours, theirs in zip(results, (*exact[:3], exact[3].sum(0, keepdims=True)), strict=True):
        assert_near(ours, theirs, 1e-5)


# -- bits, memory, kernels --------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("many_cores")
@EVERY_TARGET
def test_the_number_of_threads_changes_no_bit(target: str) -> None:
    arrays = operands(3, 200, 200, 6, 2, 64, 64)
    results = [run(arrays, target=target, threads=n, mask_kind="causal") for n in (1, 2, 3)]
    assert len({tuple(x.tobytes() for x in result) for result in results}) == 1


def ops_of(graph: rlx.Graph) -> set[str]:
    return {node.op for node in graph.nodes}


@pytest.mark.parametrize("kind", ["none", "causal", "sliding(100)", "custom"])
def test_nothing_as_large_as_the_scores_is_kept(kind: str) -> None:
    seq = 1024
    shapes: dict[str, Any] = {n: ((1, "s", 2, 16), "f32") for n in "qkv"}
    if kind == "custom":
        shapes["mask"] = ((1, "s"), "bool")
    graph = program(shapes, mask_kind=kind)
    compiled = rlx.compile(graph, threads=1)
    report = compiled.memory({"s": seq})
    assert max(buffer.bytes for buffer in report.buffers) == 4 * seq * 2 * 16  # that of q
    assert report.scratch < 4 * seq * seq / 4
    assert [x.kernel.kind for x in compiled.executable.program.launches].count("attention_grad") == 1


def test_only_the_gradient_of_a_bias_is_made_of_plain_ops() -> None:
    heads = ((1, 5, 2, 4), "f32")
    shapes: dict[str, Any] = {"q": heads, "k": heads, "v": heads, "mask": ((1, 2, 5, 5), "f32")}
    assert {"attention_lse", "attention_grad"} <= ops_of(program(shapes, mask_kind="bias"))
    assert not {"attention_lse", "attention_grad"} & ops_of(program(shapes, ("q", "mask"), mask_kind="bias"))


# -- torch ------------------------------------------------------------------------------------------------------------
@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_torch_has_these_gradients(kind: str) -> None:
    torch = pytest.importorskip("torch")
    arrays = operands(2, 130, 130, 6, 2, 64, 32)
    mask, meaning = masked(kind, arrays)
    q, k, v, dy = (torch.from_numpy(arrays[n]).transpose(1, 2) for n in ("q", "k", "v", "dy"))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    seen = np.broadcast_to(np.asarray(meaning.get("seen", True)), (2, 6, 130, 130))
    added = torch.from_numpy(np.where(seen, meaning.get("bias", 0.0), -np.inf).astype(np.float32))
    attend = torch.nn.functional.scaled_dot_product_attention
    wide = (x.repeat_interleave(3, dim=1) for x in (k, v))
    attend(q, *wide, attn_mask=added, scale=0.3).backward(dy)
    for ours, theirs in zip(run(arrays | mask, mask_kind=kind, scale=0.3), (q, k, v), strict=True):
        assert_near(ours, theirs.grad.transpose(1, 2).numpy(), 5e-6)
