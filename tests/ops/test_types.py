"""Element types: what two types become, and every cast between any two, the hard numbers included."""

from __future__ import annotations

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from oracles import EXACT, FLOATS, INTEGERS, NUMPY, Array, assert_matches, expected, magnitude, rounded, tolerance, wide
from targets import widths

import rlx
from rlx import dtypes

PLACES = ["reference", *(t.name for t in widths())]
EVERY_PLACE = pytest.mark.parametrize("place", PLACES)
NAMES = tuple(NUMPY)

# Rows and columns are the operands. An integer never widens a float; signed and unsigned meet in the next wider type.
PROMOTION = """
        f64  f32  f16  bf16 i64  i32  i16  i8   u32  u8   bool
f64     f64  f64  f64  f64  f64  f64  f64  f64  f64  f64  f64
f32     f64  f32  f32  f32  f32  f32  f32  f32  f32  f32  f32
f16     f64  f32  f16  f32  f16  f16  f16  f16  f16  f16  f16
bf16    f64  f32  f32  bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16
i64     f64  f32  f16  bf16 i64  i64  i64  i64  i64  i64  i64
i32     f64  f32  f16  bf16 i64  i32  i32  i32  i64  i32  i32
i16     f64  f32  f16  bf16 i64  i32  i16  i16  i64  i16  i16
i8      f64  f32  f16  bf16 i64  i32  i16  i8   i64  i16  i8
u32     f64  f32  f16  bf16 i64  i64  i64  i64  u32  u32  u32
u8      f64  f32  f16  bf16 i64  i32  i16  i16  u32  u8   u8
bool    f64  f32  f16  bf16 i64  i32  i16  i8   u32  u8   bool
"""


def promotions() -> dict[tuple[str, str], str]:
    head, *rows = PROMOTION.strip().splitlines()
    columns = head.split()
    return {(row.split()[0], c): t for row in rows for c, t in zip(columns, row.split()[1:], strict=True)}


def test_the_oracles_know_every_element_type() -> None:
    assert {d.name: d.numpy for d in dtypes.ALL} == NUMPY


def test_promotion_is_the_table() -> None:
    actual = {(a, b): str(dtypes.promote(rlx.dtype(a), rlx.dtype(b))) for a, b in itertools.product(NAMES, NAMES)}
    assert actual == promotions()


def numbers(name: str, count: int = 37) -> Array:
    rng = np.random.default_rng(len(name))
    if name == "bool":
        return rng.random(count) < 0.5
    low = 0 if name.startswith("u") else -9
    integers = rng.integers(low, 10, count)
    return (integers if name in INTEGERS else integers / 4).astype(NUMPY[name])


@EVERY_PLACE
def test_operands_of_two_types_meet_in_the_promoted_one(place: str) -> None:
    pairs = [(a, b) for a, b in itertools.product(NAMES, NAMES) if (a, b) != ("bool", "bool")]
    graph = rlx.Graph("pairs")
    values = {n: graph.input(n, (37,), n) for n in NAMES}
    arrays = {n: numbers(n) for n in NAMES}
    outputs = [values[a] + values[b] for a, b in pairs] + [graph.less(values[a], values[b]) for a, b in pairs]
    graph.set_outputs(outputs)
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    actual = compiled.run(arrays)
    for (a, b), total, less in zip(pairs, actual, actual[len(pairs) :], strict=False):
        assert total.dtype == NUMPY[promotions()[a, b]], f"{a} + {b}"
        x, y = (arrays[n].astype(np.float64) for n in (a, b))
        assert_matches(total, x + y, relative=0, where=f"{a} + {b}")
        np.testing.assert_array_equal(less, x < y, err_msg=f"{a} < {b}")


# -- casts -----------------------------------------------------------------------------------------------------------
@functools.cache
def hard(name: str) -> Array:
    """Numbers of a type that are hard to cast: ends of other types' ranges, ties, neighbours of both."""
    if name == "bool":
        return np.array([True, False] * 9)
    if name in INTEGERS:
        info = np.iinfo(NUMPY[name])
        ends = {
            s * 2**e + d
            for e in (0, 7, 8, 11, 15, 16, 23, 24, 25, 31, 32, 52, 53, 62, 63)
            for s in (1, -1)
            for d in (-1, 0, 1)
        }
        return np.array(sorted(n for n in ends if info.min <= n <= info.max), NUMPY[name])
    ends = [
        0.5,
        1.5,
        0.1,
        1e-3,
        3.7,
        65504.0,
        65519.99,
        65520.0,
        1e-8,
        2.0**-24,
        2.0**-25,
        2.0**-133,
        2.0**-134,
        1e-45,
        3.4e38,
        3.39e38,
    ]
    ends += [2.0**e for e in (7, 8, 15, 16, 24, 31, 32, 53, 63, 64, 100)] + [2.0**e - 1 for e in (7, 8, 15, 16, 31, 32)]
    # Half-way between two f16, bf16 and f32, and a touch to either side, which only a single rounding sees.
    ties = [1 + (2 * n + 1) * 2.0**-d for d in (8, 11, 24) for n in (0, 1, 2, 3)]
    values = np.array([*ends, *ties], np.float64)
    nudged = np.concatenate([values, np.nextafter(values, 0), np.nextafter(values, np.inf)])
    special = [0.0, np.inf, np.nan, float(np.finfo(np.float64).max)]
    both = np.concatenate([nudged, special, -nudged, np.negative(special)])
    return rounded(both, name).astype(NUMPY[name])


@EVERY_PLACE
@pytest.mark.parametrize("source", NAMES)
def test_every_cast(source: str, place: str) -> None:
    graph = rlx.Graph("casts")
    x = graph.input("x", hard(source).shape, source)
    graph.set_outputs([x.astype(wanted) for wanted in NAMES])
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    for wanted, array in zip(NAMES, compiled.run({"x": hard(source)}), strict=True):
        assert array.dtype == NUMPY[wanted]
        exact = expected("cast", [hard(source)], {"dtype": wanted})[0]
        assert_matches(array, exact, relative=0, where=f"{source} to {wanted}")
        if source in FLOATS and wanted in FLOATS:
            np.testing.assert_array_equal(
                np.signbit(array), np.signbit(hard(source)), err_msg=f"{source} to {wanted}: signs"
            )


@EVERY_PLACE
@pytest.mark.parametrize("source", ("f16", "bf16"))
def test_every_narrow_float_survives_widening(source: str, place: str) -> None:
    """All 65536 bit patterns to f32 and back, and to the other narrow type."""
    other = "bf16" if source == "f16" else "f16"
    patterns = np.arange(2**16, dtype=np.uint16).view(NUMPY[source])
    graph = rlx.Graph("patterns")
    x = graph.input("x", patterns.shape, source)
    graph.set_outputs([x.astype("f32"), x.astype("f32").astype(source), x.astype(other), x.astype("f64")])
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    single, back, across, widest = compiled.run({"x": patterns})
    exact = wide(patterns)
    number = ~np.isnan(exact)
    np.testing.assert_array_equal(wide(single), exact)
    np.testing.assert_array_equal(widest, exact)
    np.testing.assert_array_equal(back[number].view(np.uint16), patterns[number].view(np.uint16))
    assert np.isnan(wide(back)[~number]).all()
    assert_matches(across, exact, relative=0)


@EVERY_PLACE
def test_f32_rounds_to_narrow_floats_once(place: str) -> None:
    """Random bit patterns of all exponents."""
    bits = np.random.default_rng(5).integers(0, 2**32, 200_000, dtype=np.uint32)
    x = bits.view(np.float32)
    graph = rlx.Graph("narrow")
    value = graph.input("x", x.shape)
    graph.set_outputs([value.astype("f16"), value.astype("bf16")])
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    for array in compiled.run({"x": x}):
        assert_matches(array, wide(x), relative=0)


def test_the_rounding_of_the_oracle_is_that_of_numpy() -> None:
    x = wide(np.random.default_rng(6).integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32))
    with np.errstate(over="ignore"):
        for name in ("f16", "f32"):
            np.testing.assert_array_equal(
                rounded(x * 1.0000001, name), (x * 1.0000001).astype(NUMPY[name]).astype(np.float64)
            )
        narrow = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(rounded(x, "bf16"), narrow)


# -- ops whose operands may differ in type ----------------------------------------------------------------------------
def _uniform(shape: tuple[int, ...], name: str, low: float = -2, high: float = 2) -> Array:
    x = np.random.default_rng(sum(shape)).uniform(low, high, shape)
    return (x > 0) if name == "bool" else x.astype(NUMPY[name])


# Op, shapes of its operands, choices of their types, attributes.
MIXED: list[tuple[str, list[tuple[int, ...]], list[str], dict[str, str]]] = [
    ("layer_norm", [(3, 33), (33,), (33,)], ["f16 f32 f32", "f32 f16 bf16", "f64 f32 f16", "f32 f64 f64"], {}),
    ("rms_norm", [(3, 33), (33,)], ["bf16 f32", "f32 bf16", "f64 f32", "f32 f64"], {}),
    ("matmul", [(5, 17), (17, 40)], ["f16 f32", "f32 bf16", "f16 bf16", "f64 f16", "i32 f16", "bf16 i8", "u8 i8"], {}),
    ("concatenate", [(3, 5), (4, 5)], ["f16 bf16", "f32 f64", "i8 u8", "bool f16", "i64 bf16", "bool i32"], {}),
    ("where", [(3, 5), (3, 5), (5,)], ["bool f16 bf16", "bool i8 f32", "bool u8 i8", "bool bool i32"], {}),
    ("gather", [(7, 5), (4,)], ["f16 u8", "bool i64", "i16 u32", "f64 i16"], {}),
    ("attention", [(1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16), (1, 2, 5, 7)],
     ["f32 f32 f32 f16", "f16 f16 f16 f32", "bf16 bf16 bf16 f64", "f64 f64 f64 f32"], {"mask_kind": "bias"}),
    ("attention", [(1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16), (1, 7)],
     [f"f32 f32 f32 {mask}" for mask in ("f32", "f16", "bf16", "f64", "i32", "i64", "i8", "u8", "u32", "i16")],
     {"mask_kind": "custom"}),
]  # fmt: skip


@EVERY_PLACE
@pytest.mark.parametrize("number", range(len(MIXED)), ids=[f"{m[0]}-{len(m[2])}" for m in MIXED])
def test_operands_may_differ_in_type(number: int, place: str) -> None:
    op, shapes, choices, attrs = MIXED[number]
    for choice in choices:
        names = choice.split()
        low = 0 if op == "gather" or any(n.startswith("u") for n in names) else -2
        high = 4 if op == "gather" else 2
        arrays = [_uniform(s, n, low if n[0] in "ui" else -2, high) for s, n in zip(shapes, names, strict=True)]
        graph = rlx.Graph(op)
        values = [graph.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
        graph.set_outputs(graph.apply(op, *values, **attrs))
        compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
        (actual,) = compiled.run({f"x{i}": a for i, a in enumerate(arrays)})
        assert actual.dtype == graph.outputs[0].dtype.numpy
        name = str(graph.outputs[0].dtype)
        relative = 0.0 if op in EXACT or name not in FLOATS else tolerance(name, 1e-5)
        exact, least = expected(op, arrays, attrs)[0], magnitude(op, arrays, attrs)
        assert_matches(actual, exact, relative=relative, least=least, where=f"{op} of {choice}")


@EVERY_PLACE
@pytest.mark.parametrize("style", ("halves", "pairs"))
@pytest.mark.parametrize("names", ("f16 f32 f32", "f32 f16 f16", "f32 f32 f16", "f32 bf16 f64", "f64 f32 f16"))
def test_rope_tables_may_differ_in_type(names: str, style: str, place: str) -> None:
    x, cos, sin = (_uniform(s, n) for s, n in zip(((2, 3, 2, 10), (9, 4), (9, 4)), names.split(), strict=True))
    positions = np.array([[0, 8, 3], [1, 1, 7]], np.int64)
    arrays = {"x": x, "c": cos, "s": sin, "p": positions}
    graph = rlx.Graph("rope")
    graph.set_outputs(graph.rope(*(graph.input(n, a.shape, a.dtype) for n, a in arrays.items()), style=style))
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    (actual,) = compiled.run(arrays)
    exact = expected("rope", [x, cos, sin, positions], {"style": style})[0]
    assert_matches(actual, exact, relative=tolerance(names.split()[0], 2e-6))
