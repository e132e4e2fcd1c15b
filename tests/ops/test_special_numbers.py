"""NaN, infinities, zeros of both signs, denormals and the ends of integer ranges, through every op they can pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracles import EXACT, FLOATS, INTEGERS, NUMPY, Array, assert_matches, expected, rounded
from sample_graphs import user_ops
from targets import widths

import rlx
from rlx.ir import registry
from rlx.ir.registry import ELEMENTWISE

PLACES = ["reference", "toy", *(t.name for t in widths())]
EVERY_PLACE = pytest.mark.parametrize("place", PLACES)
EVERY_FLOAT = pytest.mark.parametrize("element_type", FLOATS)
EVERY_INTEGER = pytest.mark.parametrize("element_type", INTEGERS)

Results = dict[str, Array]


def run(place: str, build: Callable[..., Sequence[Any]], **arrays: Array) -> list[Array]:
    """The outputs of a small graph whose inputs are these arrays."""
    graph = rlx.Graph("special")
    graph.set_outputs(build(graph, *(graph.input(n, a.shape, a.dtype) for n, a in arrays.items())))
    is_device = place in ("reference", "toy")
    compiled = rlx.compile(graph, place) if is_device else rlx.compile(graph, target=place)
    return [np.asarray(output) for output in compiled.run(arrays)]


@functools.cache
def specials(element_type: str) -> Array:
    """Special floats of a type, and some ordinary ones: more than two vectors of any target, and a rest."""
    info = ml_dtypes.finfo(NUMPY[element_type])
    tiny, least, largest = float(info.smallest_subnormal), float(info.smallest_normal), float(info.max)
    sizes = [
        0.0, np.inf, np.nan, tiny, 3 * tiny, least, least - tiny, largest, 1.0, 1.0 + float(info.eps), 0.5, 1.5, 2.0,
             2.5,
        3.0, 10.0, 30.0, 1e-3, 255.0,
    ]  # fmt: skip
    return np.array([s * v for v in sizes for s in (1, -1)]).astype(NUMPY[element_type])


def elementwise(operands: int, *, floats: bool) -> list[str]:
    """Elementwise ops of so many operands that take floats."""
    result = []
    for op in user_ops():
        first = op.samples[0].operands[0] if op.samples else None
        if ELEMENTWISE in op.traits and len(op.schema.operands) == operands and op.name != "cast" and first is not None:
            result += [op.name] if (first.dtype == "f32") == floats else []
    return result


# Where a result may be far smaller than what it is made from, errors are relative to that: x for gelu, whose tail is a
# difference of halves of x; 1 for sine and cosine.
_SCALE: dict[str, Callable[[Array], Array]] = {
    "gelu": np.abs, "gelu_tanh": np.abs, "sin": np.ones_like, "cos": np.ones_like,
}  # fmt: skip
_CIRCULAR = ("sin", "cos", "tan")
_SIGNED_ZERO = ("neg", "abs", "sqrt", "tanh", "erf", "tan", "atan", "mul", "div", "add", "sub")


def check_each(op: str, actual: Array, exact: Array, x: Array) -> None:
    """Each number by itself: close to the oracle's relative to its own size, special where that is special."""
    name = str(rlx.dtype(actual.dtype))
    if op in EXACT or name not in FLOATS:
        assert_matches(actual, exact, relative=0, where=op)
    else:
        near, result = rounded(exact, name), actual.astype(np.float64)
        finite = np.isfinite(near)
        np.testing.assert_array_equal(result[~finite], near[~finite], err_msg=f"{op}: NaN and infinities")
        info = ml_dtypes.finfo(NUMPY[name])
        scale = np.maximum(np.abs(exact), _SCALE.get(op, np.zeros_like)(x.astype(np.float64)))[finite]
        relative = registry.get(op).tolerance * (2.0**-28 if name == "f64" else 1) + (
            float(info.eps) if "16" in name else 0
        )
        # Results below the normal numbers may be lost: sigmoid(-100) is 1 / inf in f32.
        allowed = relative * scale + float(info.smallest_normal)
        worst = np.max(np.abs(result[finite] - near[finite]) - allowed, initial=-np.inf)
        assert worst <= 0, f"{op}: {worst} too far off"
    if op in _SIGNED_ZERO:
        zero = exact == 0
        np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(exact[zero]), err_msg=f"{op}: sign of zero")


@EVERY_PLACE
@EVERY_FLOAT
def test_special_floats_pass_every_unary_op(element_type: str, place: str) -> None:
    ops, x = elementwise(1, floats=True), specials(element_type)
    actual = run(place, lambda g, a: [g.apply(op, a) for op in ops], x=x)
    for op, array in zip(ops, actual, strict=True):
        check_each(op, array, expected(op, [x], {})[0], x)


@EVERY_PLACE
@pytest.mark.parametrize("element_type", ["f64", "f32", "bf16"])
def test_angles_may_be_as_large_as_numbers(element_type: str, place: str) -> None:
    rng, top = np.random.default_rng(4), float(ml_dtypes.finfo(NUMPY[element_type]).max)
    x = (10 ** rng.uniform(0, np.log10(top), 500) * rng.choice([-1, 1], 500)).astype(NUMPY[element_type])
    for op, array in zip(_CIRCULAR, run(place, lambda g, v: [v.sin(), v.cos(), v.tan()], x=x), strict=True):
        check_each(op, array, expected(op, [x], {})[0], x)


@EVERY_PLACE
@EVERY_FLOAT
def test_the_sine_of_negative_zero_is_negative_zero(element_type: str, place: str) -> None:
    (actual,) = run(place, lambda g, v: [v.sin()], x=np.array([-0.0, 0.0] * 9).astype(NUMPY[element_type]))
    np.testing.assert_array_equal(np.signbit(actual), [True, False] * 9)


@EVERY_PLACE
@EVERY_FLOAT
def test_special_floats_pass_every_binary_op(element_type: str, place: str) -> None:
    ops, x = elementwise(2, floats=True), specials(element_type)
    a, b = x[:, None], x[None, :]
    actual = run(place, lambda g, p, q: [g.apply(op, p, q) for op in ops], a=a, b=b)
    for op, array in zip(ops, actual, strict=True):
        check_each(op, array, expected(op, [a, b], {})[0], a)


@EVERY_PLACE
@EVERY_FLOAT
def test_where_does_not_mix_in_what_it_does_not_take(element_type: str, place: str) -> None:
    x = specials(element_type)
    keep = np.arange(x.size) % 3 == 0
    (actual,) = run(place, lambda g, c, a: [g.where(c, a, 1.0)], keep=keep, x=x)
    assert actual.dtype == x.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), np.where(keep, x, np.ones_like(x)).view(np.uint8))


@EVERY_PLACE
@EVERY_FLOAT
def test_moving_elements_keeps_their_bits(element_type: str, place: str) -> None:
    """NaN aside, whose payload a conversion may change."""
    x = specials(element_type)
    x = x[~np.isnan(x.astype(np.float64))].reshape(6, 6)

    def build(g: Any, v: Any) -> list[Any]:
        rows = g.constant(np.arange(6, dtype=np.int32))
        moved = [v.mT.mT[:, :], g.gather(v, rows), g.concatenate([v[:2], v[2:]]), g.pad(v, low=(0, 0), high=(0, 0))]
        return [*moved, g.pad(v[:, 1:], low=(0, 1), high=(0, 0), value=0.0)[:, 1:], v.reshape(36).reshape(6, 6)]

    for array in run(place, build, x=x):
        wanted = x if array.shape == x.shape else x[:, 1:]
        np.testing.assert_array_equal(array.view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8))


# -- reductions ------------------------------------------------------------------------------------------------------
def planted(value: float, element_type: str, n: int = 41) -> Array:
    """Row i has `value` at column i, and numbers from -2 to 2 elsewhere: every lane and every rest once."""
    x = np.random.default_rng(3).uniform(-2, 2, (n, n))
    np.fill_diagonal(x, value)
    return x.astype(NUMPY[element_type])


@EVERY_PLACE
@EVERY_FLOAT
@pytest.mark.parametrize("axis", (0, 1))
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_a_special_number_anywhere_reaches_the_reduction(
    value: float, axis: int, element_type: str, place: str
) -> None:
    x = planted(value, element_type)

    def build(g: Any, v: Any) -> list[Any]:
        simple = [g.apply(op, v, axis=axis) for op in ("sum", "mean", "prod", "max", "min")]
        return [*simple, v.argmax(axis=axis), v.softmax(axis=axis), v.cumsum(axis=axis), *v.topk(k=2)]

    total, mean, product, most, least, at, soft, running, top, top_at = run(place, build, x=x)
    wide, diagonal = x.astype(np.float64), np.arange(len(x))
    full = functools.partial(np.testing.assert_array_equal)
    for array in (total, mean):
        full(array.astype(np.float64), np.full(len(x), value))
    full(np.isnan(product), np.full(len(x), np.isnan(value)))
    full(np.isinf(product.astype(np.float64)), np.full(len(x), np.isinf(value)))
    full(most.astype(np.float64), wide.max(axis))
    full(least.astype(np.float64), wide.min(axis))
    full(at, np.argmax(wide, axis))
    if value != -np.inf:
        full(at, diagonal)
        full(top_at[:, 0], diagonal)
        full(top[:, 0].astype(np.float64), np.full(len(x), value))
    if value == -np.inf:
        full(soft[diagonal, diagonal].astype(np.float64), np.zeros(len(x)))
        assert np.isfinite(soft.astype(np.float64)).all()
    else:
        assert np.isnan(soft.astype(np.float64)).any(axis).all()
    seen = np.cumsum(wide, axis)
    full(np.isfinite(running.astype(np.float64)), np.isfinite(seen))


@EVERY_PLACE
@EVERY_FLOAT
def test_rows_of_infinities(element_type: str, place: str) -> None:
    x = np.full((4, 19), -np.inf)
    x[1, 7], x[2, :], x[3, 3] = 2.0, np.inf, np.inf
    x = x.astype(NUMPY[element_type])
    soft, across, most, least = run(
        place, lambda g, v: [v.softmax(), v.mT.softmax(axis=0), v.max(axis=1), v.min(axis=1)], x=x
    )
    for array in (soft, across.T):
        assert np.isnan(array[0].astype(np.float64)).all()
        np.testing.assert_array_equal(array[1].astype(np.float64), np.arange(19) == 7)
        assert np.isnan(array[2].astype(np.float64)).all() and np.isnan(float(array[3, 3]))
    np.testing.assert_array_equal(most.astype(np.float64), [-np.inf, 2.0, np.inf, np.inf])
    np.testing.assert_array_equal(least.astype(np.float64), [-np.inf, -np.inf, np.inf, -np.inf])


@EVERY_PLACE
@pytest.mark.parametrize("element_type", ("f32", "f64"))
def test_denormals_are_numbers(element_type: str, place: str) -> None:
    info = np.finfo(NUMPY[element_type])
    tiny = info.smallest_subnormal
    x = np.full((3, 37), tiny)
    total, running, product, doubled, most, scaled = run(
        place,
        lambda g, v: [
            v.sum(axis=1),
            v.cumsum(),
            v @ g.constant(np.ones((37, 5), info.dtype)),
            v + v,
            v.max(),
            v * 1e30,
        ],
        x=x,
    )
    np.testing.assert_array_equal(total, np.full(3, 37 * tiny))
    np.testing.assert_array_equal(running, np.broadcast_to(np.arange(1, 38) * tiny, (3, 37)))
    np.testing.assert_array_equal(product, np.full((3, 5), 37 * tiny))
    np.testing.assert_array_equal(doubled, x * 2)
    assert most == tiny
    np.testing.assert_array_equal(scaled, x * info.dtype.type(1e30))


@EVERY_PLACE
def test_equal_numbers_rank_in_order(place: str) -> None:
    x = np.array([[1, -0.0, 0.0, 1, np.nan, 0.0, np.nan, -np.inf]] * 3, np.float32)
    values, at, first, column = run(place, lambda g, v: [*v.topk(k=8), v.argmax(), v.mT.argmax(axis=0)], x=x)
    np.testing.assert_array_equal(at, [[4, 6, 0, 3, 1, 2, 5, 7]] * 3)
    np.testing.assert_array_equal(values, np.take_along_axis(x, at.astype(np.int64), 1))
    np.testing.assert_array_equal(first, [4] * 3)
    np.testing.assert_array_equal(column, [4] * 3)


@EVERY_PLACE
@pytest.mark.parametrize("op", ("layer_norm", "rms_norm"))
def test_norms_keep_rows_apart(op: str, place: str) -> None:
    """A row with a NaN or an infinity is spoiled, its neighbours are not; a constant row has no variance."""
    x = np.random.default_rng(1).uniform(-2, 2, (5, 35)).astype(np.float32)
    x[1, 34], x[2, 0], x[3] = np.nan, np.inf, 4.0
    (actual,) = run(place, lambda g, v: [g.apply(op, v)], x=x)
    exact = expected(op, [x], {})[0]
    assert np.isnan(actual[1]).all() and np.isnan(actual[2, 0]) and np.isfinite(actual[[0, 3, 4]]).all()
    assert_matches(actual[[0, 3, 4]], exact[[0, 3, 4]], relative=3e-6)


# -- products and attention ------------------------------------------------------------------------------------------
@EVERY_PLACE
@pytest.mark.parametrize("element_type", FLOATS)
def test_a_product_spreads_special_numbers_along_rows_and_columns(element_type: str, place: str) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.uniform(1, 2, s).astype(NUMPY[element_type]) for s in ((13, 21), (21, 70)))
    a[3, 20], a[7, 0], b[5, 69] = np.nan, np.inf, -np.inf
    (actual,) = run(place, lambda g, x, y: [x @ y], a=a, b=b)
    assert_matches(actual, expected("matmul", [a, b], {})[0], relative=1e-2)


def heads(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


@EVERY_PLACE
def test_a_query_that_sees_no_key_gets_zeros(place: str) -> None:
    q, k, v = heads(2, 5, 4, 16), heads(2, 3, 2, 16, seed=1), heads(2, 3, 2, 16, seed=2)
    keep = np.array([[False] * 3, [True, False, True]])
    bias = np.zeros((1, 4, 5, 3), np.float32)
    bias[0, 1, 2] = bias[0, 3, :, :2] = -np.inf
    bias[0, 3, 4] = -np.inf

    def build(g: Any, *x: Any) -> list[Any]:
        a, b, c, mask, added = x
        return [
            g.attention(a, b, c, mask_kind="causal"), g.attention(a, b, c, mask_kind="sliding(1)"),
            g.attention(a, b, c, mask, mask_kind="custom"), g.attention(a, b, c, added, mask_kind="bias"),
            g.attention(a, b[:, :0], c[:, :0]),
        ]  # fmt: skip

    causal, sliding, custom, biased, none = run(place, build, q=q, k=k, v=v, keep=keep, bias=bias)
    for array in (causal, sliding):  # five queries end with three keys: the first two come before all of them
        np.testing.assert_array_equal(array[:, :2], 0)
        assert (array[:, 2:] != 0).any(axis=(2, 3)).all()
    np.testing.assert_array_equal(custom[0], 0)
    np.testing.assert_array_equal(biased[:, 2, 1], 0)
    np.testing.assert_array_equal(biased[:, 4, 3], 0)
    np.testing.assert_array_equal(none, 0)
    cases = [
        (causal, [q, k, v], {"mask_kind": "causal"}), (sliding, [q, k, v], {"mask_kind": "sliding(1)"}),
        (custom, [q, k, v, keep], {"mask_kind": "custom"}), (biased, [q, k, v, bias], {"mask_kind": "bias"}),
    ]  # fmt: skip
    for array, operands, attrs in cases:
        assert_matches(array, expected("attention", operands, attrs)[0], relative=1e-5)


@EVERY_PLACE
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_a_masked_key_contributes_nothing_whatever_it_holds(value: float, place: str) -> None:
    q, k, v = heads(1, 67, 2, 20), heads(1, 67, 2, 20, seed=1), heads(1, 67, 2, 20, seed=2)
    keep = np.ones((1, 67), bool)
    keep[0, [0, 9, 66]] = False
    bias = np.where(keep, 0, -np.inf).astype(np.float32).reshape(1, 1, 1, 67)
    spoiled_k, spoiled_v = k.copy(), v.copy()
    spoiled_k[~keep], spoiled_v[~keep] = value, value

    def build(g: Any, a: Any, b: Any, c: Any, mask: Any, added: Any) -> list[Any]:
        return [g.attention(a, b, c, mask, mask_kind="custom"), g.attention(a, b, c, added, mask_kind="bias")]

    actual = run(place, build, q=q, k=spoiled_k, v=spoiled_v, keep=keep, bias=bias)
    exact = expected("attention", [q, k, v, keep], {"mask_kind": "custom"})[0]
    for array in actual:
        assert_matches(array, exact, relative=1e-5)


@EVERY_PLACE
@pytest.mark.parametrize("kind", ("causal", "sliding(5)"))
def test_later_keys_contribute_nothing_whatever_they_hold(kind: str, place: str) -> None:
    q, k, v = heads(1, 9, 2, 16), heads(1, 70, 1, 16, seed=1), heads(1, 70, 1, 16, seed=2)
    k[0, 66:], v[0, 66:] = np.nan, np.nan
    (actual,) = run(place, lambda g, a, b, c: [g.attention(a, b, c, mask_kind=kind)], q=q, k=k, v=v)
    exact = expected("attention", [q, k, v], {"mask_kind": kind})[0]
    assert np.isfinite(actual[0, :5]).all() and np.isnan(actual[0, 5:]).all()
    assert_matches(actual, exact, relative=1e-5)


# -- integers --------------------------------------------------------------------------------------------------------
def integers(element_type: str) -> Array:
    """All numbers of an 8-bit type; of others the ends, zero and a few between."""
    info = np.iinfo(NUMPY[element_type])
    if info.bits == 8:
        return np.arange(info.min, int(info.max) + 1).astype(NUMPY[element_type])
    near = [0, 1, 2, 3, 5, 7, 8, 100, 2**15 - 1, 2**15]
    result = {
        int(info.min),
        int(info.min) + 1,
        int(info.max),
        int(info.max) - 1,
        int(info.max) // 2,
        *near,
        *(-n for n in near),
    }
    return np.array(sorted(n for n in result if info.min <= n <= info.max), NUMPY[element_type])


@EVERY_PLACE
@EVERY_INTEGER
def test_integers_wrap_and_floor(element_type: str, place: str) -> None:
    """Pairs of all special integers: `//` and `%` round down, a zero divisor gives 0, the least by -1 wraps."""
    x = integers(element_type)
    a, b = x[:, None], x[None, :]
    ops = [*elementwise(2, floats=False), *elementwise(2, floats=True)]
    ops = [op for op in ops if op not in ("div", "pow") and not op.startswith("logical")]
    assert {"floor_divide", "mod", "add", "mul", "maximum", "less"} <= set(ops)
    actual = run(place, lambda g, p, q: [g.apply(op, p, q) for op in ops], a=a, b=b)
    for op, array in zip(ops, actual, strict=True):
        assert_matches(array, expected(op, [a, b], {})[0], relative=0, where=f"{op} of {element_type}")


@EVERY_PLACE
@EVERY_INTEGER
def test_integers_reduce_and_rank(element_type: str, place: str) -> None:
    x = np.stack([np.roll(integers(element_type), i) for i in range(5)])
    ops = ("sum", "prod", "max", "min", "argmax", "cumsum", "neg", "abs", "topk")
    attrs: dict[str, dict[str, Any]] = {op: {"axis": 1} for op in ops[:6]} | {"neg": {}, "abs": {}, "topk": {"k": 4}}
    values = run(place, lambda g, v: [r for op in ops for r in _results(g.apply(op, v, **attrs[op]))], x=x)
    exact = [e for op in ops for e in expected(op, [x], attrs[op])]
    for array, wanted in zip(values, exact, strict=True):
        assert_matches(array, wanted, relative=0)


def _results(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)
