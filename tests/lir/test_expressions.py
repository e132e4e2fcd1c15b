"""Operators of LIR expressions: what they build, fold and refuse, against Python's integers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.dtypes import BOOL, F32, F64, I8, I32, I64, U8, DType
from rlx.errors import LowerError
from rlx.lir.expressions import compare, number
from rlx.lir.loops import Apply, Arg, Choose, Const, Expr, Index, Load, Param, Ref, expr_text, fma, known

J, N, X, I = Index("j"), Arg("n"), Ref("x", F32), Ref("i", I32)  # noqa: E741
PARAMS = (Param("a", F32),)


def shown(expr: Expr) -> str:
    return expr_text(expr, PARAMS)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (J * N + 3, "((j * n) + 3)"),
        (1 - J, "(1 - j)"),
        (1.0 / (-X).exp(), "(1.0 / exp(neg(x)))"),
        (X / 2, "(x / 2.0)"),
        ((I >> 4 & 15) | I << 2, "(((i >> 4) & 15) | (i << 2))"),
        (I ^ 5, "(i ^ 5)"),
        (2 << I, "(2 << i)"),
        (J // 4 + J % 4, "((j // 4) + (j % 4))"),
        (J.quot(4) + J.rem(N), "(quot(j, 4) + rem(j, n))"),
        ((J >= 0) & (J < N), "((j >= 0) & (j < n))"),
        (~(J <= N) | J.eq(3) | J.ne(N), "((not((j <= n)) | (j == 3)) | (j != n))"),
        ((J > N).select(X, 0), "select((j > n), x, 0.0)"),
        ((J > N).choose(Load(0, ((J, 1),), F32), 0), "(a[j] if (j > n) else 0.0)"),
        (abs(X).sqrt().max(0.5).min(X), "min(max(sqrt(abs(x)), 0.5), x)"),
        (fma(X, X, X.tanh() - X.log()), "fma(x, x, (tanh(x) - log(x)))"),
        (X.cast(F32), "x"),
        (J.cast(F32), "f32(j)"),
        (X.nearest() + I.bits().order(), "(nearest(x) + order(bits(i)))"),
    ],
)
def test_expressions_are_formulas(expr: Expr, text: str) -> None:
    assert shown(expr) == text


def test_results_have_the_type_that_they_should() -> None:
    assert (J < N).dtype is BOOL
    assert (X * 2).dtype is F32
    assert X.order().dtype is I32
    assert Ref("d", F64).nearest().dtype is I64
    assert I.bits().dtype is F32
    assert X.bits().dtype is I32
    assert (J.eq(N)).select(I, 3).dtype is I32


SAME: list[Callable[[Expr], Expr]] = [
    lambda x: x + 0, lambda x: 0 + x, lambda x: x - 0, lambda x: x * 1, lambda x: 1 * x, lambda x: x | 0,
    lambda x: x ^ 0, lambda x: x << 0, lambda x: x >> 0, lambda x: x // 1, lambda x: x.quot(1),
]  # fmt: skip


@pytest.mark.parametrize("same", SAME)
def test_neutral_integers_vanish(same: Callable[[Expr], Expr]) -> None:
    assert same(J) is J
    assert same(I) is I


def test_integers_times_zero_are_zero() -> None:
    for zero in (J * 0, 0 * J, J & 0, 0 & J):
        assert zero == Const(0, I64)


def test_floats_that_are_not_known_are_computed_as_they_are_written() -> None:
    """-0.0 + 0.0 is 0.0, and nan * 0.0 is nan."""
    assert shown(X + 0) == "(x + 0.0)"
    assert shown(X * 0) == "(x * 0.0)"
    assert shown(X * 1) == "(x * 1.0)"


@given(st.sampled_from(["+", "-", "*", "/"]), st.sampled_from([F32, F64]), st.data())
def test_known_floats_are_computed_as_numpy_rounds_them(name: str, kind: DType, data: st.DataObject) -> None:
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    a, b = (data.draw(st.floats(width=8 * kind.size)) for _ in range(2))  # type: ignore[arg-type]
    with np.errstate(all="ignore"):
        wanted = signs[name](np.array(a, kind.numpy), np.array(b, kind.numpy))
    folded = signs[name](Const(a, kind), b)
    assert isinstance(folded, Const)
    assert np.array(folded.value, kind.numpy).tobytes() == wanted.tobytes() or np.isnan(wanted)


def test_conditions_that_are_known_vanish() -> None:
    yes, no, test = Const(True, BOOL), Const(False, BOOL), J < N
    assert yes & test is test
    assert test | no is test
    assert test & no is no
    assert yes | test is yes


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "|": operator.or_,
    "^": operator.xor, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
SIZES = {I32: np.int32, I64: np.int64, U8: np.uint8}


@given(st.sampled_from(list(OPERATORS)), st.sampled_from([I32, I64, U8]), st.data())
def test_known_integers_are_computed_modulo_their_type(name: str, kind: Any, data: st.DataObject) -> None:
    limits = np.iinfo(SIZES[kind])
    a, b = (data.draw(st.integers(int(limits.min), int(limits.max))) for _ in range(2))
    if name in ("//", "%"):
        b = abs(b) or 1
        b = b if b <= limits.max else 1
    wanted = np.array(OPERATORS[name](a, b) % 2 ** (8 * kind.size), np.uint64).astype(SIZES[kind])
    assert OPERATORS[name](Const(a, kind), Const(b, kind)) == Const(int(wanted), kind)


def test_what_has_no_value_is_not_folded() -> None:
    for op, right in (("floordiv", 0), ("mod", 0), ("shl", 32), ("shr", -1)):
        signs: dict[str, Callable[[Any, Any], Any]] = {
            "floordiv": operator.floordiv, "mod": operator.mod, "shl": operator.lshift, "shr": operator.rshift,
        }  # fmt: skip
        assert signs[op](Const(3, I32), right) == Apply(op, (Const(3, I32), Const(right, I32)), I32)


def test_counts_of_shifts_take_the_type_of_what_is_shifted() -> None:
    assert Apply("shr", (I, Apply("cast", (J,), I32)), I32) == I >> J


def test_equality_is_structural() -> None:
    assert Apply("add", (J, Const(1, I64)), I64) == J + 1
    assert J + 1 != J + 2
    assert len({J * N, J * N, N * J}) == 2
    assert isinstance((J < N).choose(X, X), Choose)


def test_known_integers_become_constants_of_a_type() -> None:
    assert known(3, I32) == Const(3, I32)
    assert known(J, I64) is J


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: J + X, "add of i64 and f32"),
        (lambda: J < I, "lt of i64 and i32"),
        (lambda: (J < N).select(X, J), "select of f32 and i64"),
        (lambda: J + 0.5, "0.5 is not representable in i64"),
        (lambda: I & 0xFFFFFFFF, "4294967295 is not representable in i32"),
        (lambda: bool(J < N), "no truth value"),
    ],
)
def test_mixtures_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(LowerError, match=message) as error:
        build()
    assert error.value.hint


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("kind", [I32, F32], ids=str)
@given(data=st.data())
def test_known_comparisons_are_conditions(name: str, kind: DType, data: st.DataObject) -> None:
    numbers = st.integers(-3, 3) if kind is I32 else st.sampled_from([0.0, -0.0, 0.1, 1.0, np.inf, np.nan])
    a, b = data.draw(numbers), data.draw(numbers)
    folded = compare(name, number(a, kind), number(b, kind))
    expected = bool(getattr(operator, name)(kind.numpy.type(a), kind.numpy.type(b)))
    assert folded == Const(expected, BOOL)


@pytest.mark.parametrize("into", [I8, I32, I64, F32, F64, BOOL], ids=str)
@pytest.mark.parametrize("value", [number(-129, I32), number(200, I64), number(0, I32), number(True, BOOL)], ids=str)
def test_known_integers_are_cast_as_numpy_casts_them(value: Const, into: DType) -> None:
    expected = np.asarray(value.value, value.dtype.numpy).astype(into.numpy).item()
    assert value.cast(into) == Const(expected, into)


def test_known_numbers_are_negated_and_rounded_to_their_type() -> None:
    assert -number(-128, I8) == number(-128, I8) and abs(number(-3, I32)) == number(3, I32)
    assert -number(0.0, F32) == number(-0.0, F32) and ~number(5, I32) == number(-6, I32)
    assert ~number(True, BOOL) == number(False, BOOL)
    assert number(0.1, F32).cast(F64) == Const(float(np.float32(0.1)), F64)
    unknown = number(1e9, F32).cast(I8)  # saturates on the machine
    assert unknown == Apply("cast", (Const(1e9, F32),), I8)


def test_known_conditions_choose() -> None:
    a, b = Ref("a", F32), Ref("b", F32)
    for value, expected in ((True, a), (False, b)):
        assert Const(value, BOOL).select(a, b) is expected and Const(value, BOOL).choose(a, b) is expected


def test_numbers_come_first_too() -> None:
    i = Index("i")
    reflected = {"floordiv": 7 // i, "mod": 7 % i, "shr": 7 >> i, "xor": 7 ^ i}
    for name, expr in reflected.items():
        assert expr == Apply(name, (Const(7, I64), i), I64)
    assert i + np.int64(3) == i + 3


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: number(1e300, F32), "1e\\+300 is not representable in f32"),
        (lambda: number(np.float64(1.5), I32), "1.5.* is not representable in i32"),
        (lambda: Ref("a", F32) << 1, "shl of f32"),
        (lambda: Ref("a", F32) & Ref("b", F32), "and of f32"),
        (lambda: Ref("a", I64).select(Ref("b", F32), 1.0), "select by i64, expected a condition"),
        (lambda: Ref("a", I64).choose(Ref("b", F32), 1.0), "choose by i64, expected a condition"),
        (lambda: fma(Ref("a", F32), Ref("b", F64), Ref("c", F32)), "fma of f32, f64 and f32"),
    ],
)
def test_types_of_operands_are_checked(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(LowerError, match=message):
        build()
