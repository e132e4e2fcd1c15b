"""Mistakes that systems of this kind are known to make: each has a test that shows the right answer, on both devices.

The answers are worked out by hand or in NumPy. What each part does beyond that is tested where the part is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import erf  # type: ignore[import-untyped]

import rlx
from rlx import CompileProfile, FusionPolicy, Graph, MaskKind, Value
from rlx.errors import ShapeError
from rlx.profile import Fusion, Precision

Array = np.ndarray[Any, Any]
device = pytest.fixture(params=("reference", "cpu"))(lambda request: request.param)
rng = np.random.default_rng(0)


def run(device: str, build: Callable[..., Any], profile: CompileProfile | None = None, **arrays: Array) -> list[Array]:
    """What a graph of these inputs gives; an array called `w...` is a weight."""
    g = Graph("g")
    values = {
        n: (g.param if n.startswith("w") else g.input)(n, a.shape, rlx.dtype(a.dtype).name) for n, a in arrays.items()
    }
    built = build(**values)
    g.set_outputs(built if isinstance(built, (tuple, list)) else [built])
    f = rlx.compile(g, device, profile=profile)
    f.set_params({n: arrays.pop(n) for n in list(arrays) if n.startswith("w")})
    return f.run(arrays)


def floats(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


# -- numbers ----------------------------------------------------------------------------------------------------------
def test_a_cast_converts(device: str) -> None:
    x = np.array([-2.7, 0.3, 1.5, 300.0, np.nan, 1e20], np.float32)
    integer, half, wide = run(device, lambda x: (x.cast("i32"), x.cast("f16"), x.cast("f64")), x=x)
    assert integer.tolist() == [-2, 0, 1, 300, 0, 2**31 - 1] and wide.dtype == np.float64
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, x.astype(np.float16))
    np.testing.assert_array_equal(wide, x.astype(np.float64))


def test_halves_round_to_even(device: str) -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 1e10], np.float32)
    assert run(device, lambda x: x.round(), x=x)[0].tolist() == [-2, -2, 0, 0, 2, 2, 4, 1e10]


def test_types_promote_whatever_the_order(device: str) -> None:
    i, x, y = np.array([1, 2], np.int32), np.array([0.5, 0.25], np.float32), np.array([1e-9, 1], np.float64)
    for actual in run(device, lambda i, x: (i + x, x + i), i=i, x=x):
        assert actual.dtype == np.float32 and actual.tolist() == [1.5, 2.25]
    for actual in run(device, lambda x, y: (x + y, y + x), x=x, y=y):
        assert actual.dtype == np.float64 and actual.tolist() == [0.5 + 1e-9, 1.25]


def test_eight_bit_floats_go_on_beyond_240(device: str) -> None:
    """E4M3 has no infinities: exponent 15 holds numbers up to 448, and one NaN."""
    bits = np.array([[0x78, 0x7E, 0xF9, 0x7F, 0x08, 0x01]], np.uint8).T.copy()
    scale = np.ones(1, np.float32)
    (actual,) = run(device, lambda b, s: b.graph.dequantise(b, s, scheme="fp8e4m3"), b=bits, s=scale)
    np.testing.assert_array_equal(actual, bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert actual[:3, 0].tolist() == [256, 448, -288] and np.isnan(actual[3, 0])


def test_four_bit_integers_have_a_sign_and_a_zero_point(device: str) -> None:
    low, high = np.arange(-8, 8), np.arange(7, -9, -1)
    packed = ((low & 15) | (high & 15) << 4).astype(np.uint8)[:, None]  # [16, 1]: two columns
    scale, zero = np.full((1, 2), 0.5, np.float32), np.array([[0, 2]], np.float32)
    (plain,) = run(device, lambda b, s: b.graph.dequantise(b, s, scheme="int4/16"), b=packed, s=scale)
    np.testing.assert_array_equal(plain, np.stack([low, high], 1) * 0.5)
    (moved,) = run(device, lambda b, s, z: b.graph.dequantise(b, s, z, scheme="int4/16"), b=packed, s=scale, z=zero)
    np.testing.assert_array_equal(moved, (np.stack([low, high], 1) - [0, 2]) * 0.5)


@pytest.mark.parametrize("element_type", ["f32", "f64"])
def test_constants_fold_by_the_meaning_of_their_op(element_type: str) -> None:
    """Both GELUs, in both types, and integers: nothing passes through f32 on the way."""
    dtype = rlx.dtype(element_type).numpy
    x = np.linspace(-3, 3, 13).astype(dtype)
    g = Graph("fold")
    c, n = g.constant(x), g.constant(np.array([2**24 + 1, 7], np.int32))
    g.set_outputs([c.gelu(), c.gelu_tanh(), c.silu(), n * 3])
    f = rlx.compile(g)
    assert "gelu" not in f.plan.main_text + f.plan.bind_text, "folded"  # type: ignore[attr-defined]
    wide = x.astype(np.float64)
    exact = [
        0.5 * wide * (1 + erf(wide / np.sqrt(2))),
        0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))),
        wide / (1 + np.exp(-wide)),
    ]
    *actual, integer = f.run({})
    for have, want in zip(actual, exact, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=4 * np.finfo(dtype).eps)
    assert integer.tolist() == [3 * (2**24 + 1), 21]


@pytest.mark.parametrize("compute", ["f16", "bf16"])
def test_narrow_precision_leaves_indices_alone(device: str, compute: str) -> None:
    """Neither type can count to 4097."""
    table = np.arange(5000, dtype=np.float32)[:, None] % 100
    ids = np.array([2049, 4097, 257], np.int32)
    profile = CompileProfile(precision=Precision(compute))
    (actual,) = run(device, lambda wt, i: wt.gather(i), profile, wt=table, i=ids)
    assert actual[:, 0].tolist() == [49, 97, 57]


# -- shapes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_gather_keeps_the_axes_before_its_own(device: str, axis: int) -> None:
    x, i = floats(3, 4, 5), np.array([[2, 0], [1, 1]], np.int32)
    (actual,) = run(device, lambda x, i: x.gather(i, axis=axis), x=x, i=i)
    np.testing.assert_array_equal(actual, np.take(x, i, axis=axis))


def test_channels_broadcast_along_channels(device: str) -> None:
    """12 divides 144, but element i of the vector is not at i modulo 12."""
    x, c = floats(2, 3, 4, 6), floats(1, 3, 1, 1)
    (actual,) = run(device, lambda x, c: ((x * c).tanh() + c) * 2.0, x=x, c=c)
    np.testing.assert_allclose(actual, (np.tanh(x.astype(float) * c) + c) * 2, rtol=1e-6, atol=1e-6)


def test_sizes_that_differ_are_refused() -> None:
    g = Graph("g")
    x, y = g.input("x", ("n", 4)), g.input("y", ("m", 4))
    for build in (lambda: x + y, lambda: g.matmul(x, g.input("w", ("m", 4))), lambda: g.concatenate(x, y, axis=1)):
        with pytest.raises(ShapeError):
            build()


def test_every_axis_can_be_reduced(device: str) -> None:
    x = floats(3, 4, 5, 2)
    axes = (0, 1, (0, 2), (1, 3), (0, 1, 2, 3), -2)
    for actual, axis in zip(run(device, lambda x: [x.sum(axis=a) for a in axes], x=x), axes, strict=True):
        np.testing.assert_allclose(actual, x.astype(float).sum(axis=axis), rtol=1e-5, atol=1e-5)


# -- graphs -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", FusionPolicy)
def test_a_product_that_is_an_output_too_stays_what_it_is(device: str, policy: FusionPolicy) -> None:
    def build(x: Value, w: Value, wb: Value) -> list[Value]:
        product = x @ w
        return [product, product + wb, (product + wb).gelu(), product.silu()]

    x, w, b = floats(3, 5), floats(5, 7), floats(7)
    plain, biased, active, gated = run(device, build, CompileProfile(Fusion(policy=policy)), x=x, w=w, wb=b)
    exact = x.astype(float) @ w
    np.testing.assert_allclose(plain, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(biased, exact + b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(active, 0.5 * (exact + b) * (1 + erf((exact + b) / np.sqrt(2))), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gated, exact / (1 + np.exp(-exact)), rtol=1e-5, atol=1e-5)


def test_graphs_and_loops_compare_by_what_is_in_them(device: str) -> None:
    def looped(op: str) -> Graph:
        body, g = Graph("body"), Graph("g")
        body.set_outputs([body.apply(op, body.input("c", (4,)))])
        return g.set_outputs([g.scan(g.input("x", (4,)), body, 3)])

    assert looped("tanh") == looped("tanh") != looped("sin")
    bodies = [looped(op).nodes[-1].attrs["body"] for op in ("tanh", "sin")]
    g = Graph("both")
    x = g.input("x", (4,))
    g.set_outputs([g.scan(x, body, 3) for body in bodies])
    actual = rlx.compile(g, device).run({"x": np.full(4, 0.5, np.float32)})
    for have, f in zip(actual, (np.tanh, np.sin), strict=True):
        np.testing.assert_allclose(have, f(f(f(np.full(4, 0.5)))), rtol=1e-6)


def test_a_checkpointed_scan_gives_the_last_carry(device: str) -> None:
    body = Graph("body")
    body.set_outputs([body.input("c", (3,)) * 1.5 + 1.0])
    x = floats(3)
    exact = x.astype(float)
    for _ in range(7):
        exact = exact * 1.5 + 1
    for k in (1, 3, 7):
        (actual,) = run(device, lambda x, k=k: x.graph.scan_checkpointed(x, body, 7, k), x=x)
        np.testing.assert_allclose(actual, exact, rtol=1e-5)


def test_bodies_may_be_changed_after_they_were_used(device: str) -> None:
    """Scan, while, cond and custom functions keep the body that they were given."""

    def body(name: str, build: Callable[[Value], Any]) -> Graph:
        g = Graph(name)
        return g.set_outputs([build(g.input("c", (2,)))])

    step, other, fn = body("step", lambda c: c + 1.0), body("other", lambda c: c - 1.0), body("fn", lambda c: c * 2.0)
    more = body("more", lambda c: c.max() < 5.0)
    g = Graph("g")
    x = g.input("x", (2,))
    g.set_outputs([
        g.scan(x, step, 3), g.while_loop(x, more, step), g.cond(g.constant(False), [x], step, other),
        g.custom_fn([x], fn),
    ])  # fmt: skip
    before, text = g.fingerprint(), g.text()
    for inner in (step, other, fn):
        inner.set_outputs([inner.outputs[0] * 100.0])
        inner.input("late", (3,))
    more.set_outputs([more.constant(False)])
    assert (g.fingerprint(), g.text()) == (before, text)
    actual = rlx.compile(g, device).run({"x": np.array([0, 1], np.float32)})
    assert [y.tolist() for y in actual] == [[3, 4], [4, 5], [-1, 0], [0, 2]]


def test_a_graph_may_be_built_on_after_it_was_compiled(device: str) -> None:
    g = Graph("g")
    y = g.input("x", (2,)) + 1.0
    f = rlx.compile(g.set_outputs([y]), device)
    g.set_outputs([y * g.input("late", (2,))])
    x = np.array([1, 2], np.float32)
    assert f.run({"x": x})[0].tolist() == [2, 3]
    assert rlx.compile(g, device).run({"x": x, "late": x})[0].tolist() == [2, 6]
    assert f.dispatch().rows and f.run({"x": x})[0].tolist() == [2, 3]


# -- attention and recurrences ----------------------------------------------------------------------------------------
def test_a_sliding_window_counts_the_token_itself(device: str) -> None:
    q = np.zeros((1, 5, 1, 4), np.float32)  # all visible keys weigh the same
    v = np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1) * np.ones((1, 1, 1, 4), np.float32)
    for window, wanted in ((1, [0, 1, 2, 3, 4]), (2, [0, 0.5, 1.5, 2.5, 3.5]), (9, [0, 0.5, 1, 1.5, 2])):
        kind = MaskKind.sliding(window)
        (actual,) = run(device, lambda q, v, kind=kind: q.graph.attention(q, q, v, mask_kind=kind), q=q, v=v)
        np.testing.assert_allclose(actual[0, :, 0, 0], wanted, rtol=1e-6)


@pytest.mark.parametrize("kind", ["none", "causal", "sliding(3)", "custom", "bias"])
@pytest.mark.parametrize("queries", [1, 6, 70])
def test_scale_and_softcap_count_under_every_mask(device: str, kind: str, queries: int) -> None:
    heads, kv, dim, keys, scale, cap = 4, 2, 8, queries + 3, 0.7, 1.5
    q, k, v = (floats(2, n, h, dim) for n, h in ((queries, heads), (keys, kv), (keys, kv)))
    age = np.arange(queries)[:, None] + keys - queries - np.arange(keys)  # of a key, seen from a query
    seen = np.ones((2, 1, queries, keys), bool)
    mask = {"custom": rng.random((2, keys)) < 0.7, "bias": floats(2, heads, queries, keys)}.get(kind)
    if kind == "custom":
        mask[:, 0] = True
        seen = seen & mask[:, None, None]
    if kind in ("causal", "sliding(3)"):
        seen = seen & (age >= 0) & (age < (3 if kind != "causal" else keys))
    wide = [np.repeat(a.astype(float), heads // a.shape[2], axis=2) for a in (q, k, v)]
    scores = cap * np.tanh(np.einsum("bqhd,bkhd->bhqk", wide[0], wide[1]) * scale / cap)
    scores = np.where(seen, scores + (mask if kind == "bias" else 0), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), wide[2])

    def build(q: Value, k: Value, v: Value, mask: Value | None = None) -> Value:
        return q.graph.one("attention", q, k, v, mask, mask_kind=kind, scale=scale, softcap=cap)

    arrays = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
    np.testing.assert_allclose(run(device, build, **arrays)[0], exact, rtol=1e-5, atol=2e-6)


def test_a_carried_state_counts_wherever_it_lies(device: str) -> None:
    """Also as the first buffer of all."""
    state = floats(1, 1, 2, 2)
    rows = {n: np.zeros((1, 1, 1, 2), np.float32) for n in ("k", "v")} | {"q": np.ones((1, 1, 1, 2), np.float32)}
    rates = {n: np.zeros((1, 1, 1), np.float32) for n in ("g", "beta")}

    def build(a: Value, q: Value, k: Value, v: Value, g: Value, beta: Value) -> Any:
        return q.graph.gated_delta_net_carry(q, k, v, g, beta, a, state_size=2)

    out, last = run(device, build, a=state, **rows, **rates)
    np.testing.assert_allclose(out[0, 0, 0], state[0, 0].sum(0) / np.sqrt(2), rtol=1e-6)
    np.testing.assert_array_equal(last, state)


def test_random_bits_are_those_of_philox(device: str) -> None:
    """The published answer for a counter and a key of zeros."""
    (actual,) = run(device, lambda k: k.graph.random_bits(k, shape=(4,)), k=np.zeros(2, np.uint32))
    assert [int(x) for x in actual] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
