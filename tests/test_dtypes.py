"""Element types: names, promotion against JAX's published table, weak scalars, pickling."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx import Graph, dtypes
from rlx.dtypes import ALL, BOOL, F32, F64, I32, DType, WeakScalar, dtype, promote
from rlx.errors import DTypeError

# JAX's table (docs.jax.dev/en/latest/jep/9407-type-promotion.html), for the types that rlx has. The last three columns
# are weakly typed Python scalars; `*` marks results that JAX keeps weak and that are strong in a graph.
TABLE = """
        bool  u8    u32   i8    i16   i32   i64   bf16  f16   f32   f64   int   float
bool    bool  u8    u32   i8    i16   i32   i64   bf16  f16   f32   f64   i32*  f32*
u8      u8    u8    u32   i16   i16   i32   i64   bf16  f16   f32   f64   u8    f32*
u32     u32   u32   u32   i64   i64   i64   i64   bf16  f16   f32   f64   u32   f32*
i8      i8    i16   i64   i8    i16   i32   i64   bf16  f16   f32   f64   i8    f32*
i16     i16   i16   i64   i16   i16   i32   i64   bf16  f16   f32   f64   i16   f32*
i32     i32   i32   i64   i32   i32   i32   i64   bf16  f16   f32   f64   i32   f32*
i64     i64   i64   i64   i64   i64   i64   i64   bf16  f16   f32   f64   i64   f32*
bf16    bf16  bf16  bf16  bf16  bf16  bf16  bf16  bf16  f32   f32   f64   bf16  bf16
f16     f16   f16   f16   f16   f16   f16   f16   f32   f16   f32   f64   f16   f16
f32     f32   f32   f32   f32   f32   f32   f32   f32   f32   f32   f64   f32   f32
f64     f64   f64   f64   f64   f64   f64   f64   f64   f64   f64   f64   f64   f64
"""


def cells() -> list[tuple[str, str, str]]:
    head, *rows = TABLE.strip("\n").splitlines()
    return [
        (row.split()[0], column, result.rstrip("*"))
        for row in rows
        for column, result in zip(head.split(), row.split()[1:], strict=True)
    ]


def operand(name: str) -> DType | WeakScalar:
    return WeakScalar(name) if name in ("int", "float") else dtype(name)


@pytest.mark.parametrize(("a", "b", "result"), cells())
def test_promotion_follows_the_published_table(a: str, b: str, result: str) -> None:
    assert promote(operand(a), operand(b)) is dtype(result)
    assert promote(operand(b), operand(a)) is dtype(result)


def test_promotion_does_not_depend_on_grouping() -> None:
    for a, b, c in itertools.product(ALL, repeat=3):
        assert promote(promote(a, b), c) is promote(a, promote(b, c)) is promote(a, b, c)


def test_weak_scalars_alone_have_default_types() -> None:
    assert promote(WeakScalar("bool")) is BOOL
    assert promote(WeakScalar("int"), WeakScalar("bool")) is I32
    assert promote(WeakScalar("int"), WeakScalar("float")) is F32


@pytest.mark.parametrize(
    ("like", "name"),
    [
        ("f32", "f32"), ("float32", "f32"), (np.float32, "f32"), (np.dtype("float32"), "f32"),
        ("bf16", "bf16"), ("bfloat16", "bf16"), (ml_dtypes.bfloat16, "bf16"), ("f16", "f16"), (np.half, "f16"),
        ("float64", "f64"), (np.float64, "f64"), ("i8", "i8"), ("int8", "i8"), (np.uint8, "u8"), ("uint32", "u32"),
        (np.int64, "i64"), ("bool", "bool"), (np.bool_, "bool"), (bool, "bool"), (float, "f32"), (int, "i32"),
        ("float", "f32"), ("int", "i32"), (np.array([1], np.int16).dtype, "i16"),
    ],
)  # fmt: skip
def test_every_spelling_names_one_record(like: Any, name: str | None) -> None:
    if name is None:
        with pytest.raises(DTypeError):
            dtype(like)
    else:
        assert dtype(like) is dtypes.BY_NAME[name]


@pytest.mark.parametrize(
    "like", ["f31", "", "float128", None, np.complex64, np.dtype(">f4"), "U3", object, 3, [1], np.uint16]
)
def test_what_is_no_element_type_is_an_error(like: Any) -> None:
    with pytest.raises(DTypeError, match="dtype: "):
        dtype(like)


def test_a_near_miss_gets_a_hint() -> None:
    with pytest.raises(DTypeError, match="no element type is called 'fp32'") as caught:
        dtype("fp32")
    assert caught.value.hint and "'f32'" in caught.value.hint


@pytest.mark.parametrize("d", ALL, ids=str)
def test_a_dtype_survives_pickling_as_itself(d: DType) -> None:
    assert pickle.loads(pickle.dumps(d)) is d
    assert d.numpy.itemsize == d.size


def test_narrow_floats_compute_in_f32() -> None:
    assert {d.name: d.wide.name for d in ALL if d.wide is not d} == {"f16": "f32", "bf16": "f32"}


# -- scalars in graphs ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tensor", "number", "result"),
    [
        ("f16", 2, "f16"), ("f16", 2.5, "f16"), ("bf16", 0.1, "bf16"), ("f64", 1.5, "f64"), ("i64", 3, "i64"),
        ("u8", 3, "u8"), ("i32", 0.5, "f32"), ("i64", 0.5, "f32"), ("bool", 2, "i32"), ("f32", True, "f32"),
        ("f32", np.float64(2), "f32"), ("i8", np.int32(2), "i8"), ("bf16", np.sqrt(2), "bf16"),
        ("f32", np.array(2.0), "f64"), ("i8", np.array(2, "int32"), "i32"), ("f16", np.array([1.0], "float32"), "f32"),
    ],
)  # fmt: skip
def test_numbers_are_weak_and_arrays_are_not(tensor: str, number: Any, result: str) -> None:
    x = Graph().input("x", (1,), tensor)
    assert (x + number).dtype is dtype(result)
    assert (number + x).dtype is dtype(result)
    assert (x < number).dtype is BOOL


def test_the_condition_of_where_does_not_promote() -> None:
    g = Graph()
    x, keep = g.input("x", (2,), "f16"), g.input("keep", (2,), "bool")
    assert g.where(keep, x, 0.0).dtype.name == "f16"
    assert g.where(keep, 1, 2).dtype is I32
    assert g.where(keep, 1.0, 2).dtype is F32


def test_constants_of_python_numbers_have_default_types() -> None:
    g = Graph()
    assert g.constant(1.5).dtype is F32
    assert g.constant([1, 2]).dtype is I32
    assert g.constant([[True], [False]]).dtype is BOOL
    assert g.constant([1, 2.5]).dtype is F32
    assert g.constant([]).type.shape == (0,)
    assert g.constant(np.array([1.0])).dtype is F64
    assert g.constant([1, 2], dtype="i64").dtype.name == "i64"


@pytest.mark.parametrize(("tensor", "number"), [("u8", -1), ("u8", 256), ("i8", 128), ("i32", 2**31), ("bool", 2**40)])
def test_a_number_that_does_not_fit_is_an_error(tensor: str, number: int) -> None:
    with pytest.raises(DTypeError, match="does not fit"):
        Graph().input("x", (1,), tensor) + number


@pytest.mark.parametrize("data", ["text", [object()], 1j, [2**40], 2**70, [[1], [2, 3]]])
def test_what_is_no_number_is_no_constant(data: Any) -> None:
    with pytest.raises(DTypeError, match="constant: "):
        Graph().constant(data)
