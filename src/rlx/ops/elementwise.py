"""Elementwise ops: arithmetic, comparisons, activations, casts. Operands broadcast; types promote as in `dtypes`.

Most ops are one line: their name, their NumPy reference, the scalar operation of their loop form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.dtypes import BOOL, DType, cast_array, promote
from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError
from rlx.ir.registry import ELEMENTWISE, OpDef, Sample, boolean, f32, i32, op, sample
from rlx.types import TensorType, broadcast

Kind = Callable[[DType], bool]


def is_float(d: DType) -> bool:
    """Floats."""
    return d.is_float


def is_integer(d: DType) -> bool:
    """Integers."""
    return d.is_integer


def is_number(d: DType) -> bool:
    """Floats and integers."""
    return not d.is_bool


def is_bool(d: DType) -> bool:
    """Booleans."""
    return d.is_bool


def is_any(d: DType) -> bool:
    """Any type."""
    return True


def _require(name: str, kind: Kind, d: DType) -> None:
    if not kind(d):
        wanted = (kind.__doc__ or "").rstrip(".").lower()
        raise DTypeError(f"{name}: takes {wanted}, found {d}", hint="cast with x.astype(...)")


def unary(
    name: str,
    reference: Callable[..., Any],
    *,
    doc: str,
    scalar: str = "",
    kind: Kind = is_float,
    samples: tuple[Sample, ...] = (sample(f32(5, 7)), sample(f32(3, 1, 65))),
    tolerance: float = 1e-6,
) -> OpDef:
    """Declare an op with one operand whose result has the operand's type."""

    def rule(x: TensorType) -> TensorType:
        _require(name, kind, x.dtype)
        return x

    return op(
        name,
        reference=reference,
        traits=[ELEMENTWISE],
        scalar=scalar or name,
        doc=doc,
        samples=samples,
        tolerance=tolerance,
    )(rule)


def binary(
    name: str,
    reference: Callable[..., Any],
    *,
    doc: str,
    scalar: str = "",
    kind: Kind = is_number,
    result: DType | None = None,
    samples: tuple[Sample, ...] = (),
    tolerance: float = 1e-6,
) -> OpDef:
    """Declare an op with two operands that broadcast and promote to one type."""

    def rule(a: TensorType, b: TensorType) -> TensorType:
        common = promote(a.dtype, b.dtype)
        _require(name, kind, common)
        return TensorType(broadcast(a.shape, b.shape, where=name), result or common)

    def promoted(a: Any, b: Any) -> Any:
        common = promote(dtype_of(a.dtype), dtype_of(b.dtype)).wide.numpy
        return reference(a.astype(common), b.astype(common))

    default = (sample(f32(4, 5), f32(4, 5)), sample(f32(3, 1, 65), f32(2, 1)), sample(f32(7), f32()))
    return op(
        name,
        reference=promoted,
        traits=[ELEMENTWISE],
        scalar=scalar or name,
        doc=doc,
        samples=samples or default,
        tolerance=tolerance,
    )(rule)


_INTS = (sample(i32(4, 5), i32(4, 5)), sample(i32(3, 1, 33), i32(2, 1)))
_BOTH = (sample(f32(4, 5), f32(4, 5)), *_INTS, sample(i32(3, 1, 65), f32(2, 1)))
_POSITIVE = (sample(f32(5, 7, low=1e-3, high=9.0)), sample(f32(65, low=1e-3, high=1e6)))
_BOOLS = (sample(boolean(4, 5), boolean(4, 5)), sample(boolean(3, 1, 65), boolean(2, 1)))


def _floor_divide(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))


def _mod(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, np.mod(a, np.where(b == 0, 1, b)))


add = binary("add", np.add, doc="Sum.", samples=_BOTH)
sub = binary("sub", np.subtract, doc="Difference.", samples=_BOTH)
mul = binary("mul", np.multiply, doc="Product.", samples=_BOTH)
div = binary("div", np.divide, kind=is_float, doc="Quotient of floats; integers use `floor_divide`.")
floor_divide = binary(
    "floor_divide",
    _floor_divide,
    scalar="floordiv",
    kind=is_integer,
    samples=_INTS,
    doc="Quotient of integers, rounded down; a zero divisor gives 0.",
)
mod = binary(
    "mod",
    _mod,
    kind=is_integer,
    samples=_INTS,
    doc="Remainder of integers with the sign of the divisor; a zero divisor gives 0.",
)
pow = binary(
    "pow",
    np.power,
    kind=is_float,
    doc="`a` to the power `b`, for floats.",
    samples=(
        sample(f32(4, 5, low=0.01), f32(4, 5)),
        sample(
            f32(3, 33),
            f32(),
        ),
        sample(f32(5, low=0.1), f32(4, 1)),
    ),
)
maximum = binary("maximum", np.maximum, scalar="max", doc="The larger; NaN if either is NaN.", samples=_BOTH)
minimum = binary("minimum", np.minimum, scalar="min", doc="The smaller; NaN if either is NaN.", samples=_BOTH)

equal = binary("equal", np.equal, scalar="eq", kind=is_any, result=BOOL, doc="Whether equal.", samples=_BOTH + _BOOLS)
not_equal = binary(
    "not_equal", np.not_equal, scalar="ne", kind=is_any, result=BOOL, doc="Whether different.", samples=_BOTH + _BOOLS
)
less = binary("less", np.less, scalar="lt", result=BOOL, doc="Whether a < b.", samples=_BOTH)
less_equal = binary("less_equal", np.less_equal, scalar="le", result=BOOL, doc="Whether a <= b.", samples=_BOTH)
greater = binary("greater", np.greater, scalar="gt", result=BOOL, doc="Whether a > b.", samples=_BOTH)
greater_equal = binary(
    "greater_equal", np.greater_equal, scalar="ge", result=BOOL, doc="Whether a >= b.", samples=_BOTH
)
logical_and = binary("logical_and", np.logical_and, scalar="and", kind=is_bool, doc="Both.", samples=_BOOLS)
logical_or = binary("logical_or", np.logical_or, scalar="or", kind=is_bool, doc="Either.", samples=_BOOLS)
logical_not = unary(
    "logical_not", np.logical_not, scalar="not", kind=is_bool, doc="The opposite.", samples=(sample(boolean(5, 7)),)
)

_NUMBERS = (sample(f32(5, 7)), sample(i32(3, 33)))
neg = unary("neg", np.negative, kind=is_number, doc="The negative.", samples=_NUMBERS)
abs = unary("abs", np.abs, kind=is_number, doc="The magnitude.", samples=_NUMBERS)
exp = unary("exp", np.exp, doc="e raised to x.")
log = unary("log", np.log, doc="Natural logarithm.", samples=_POSITIVE)
sqrt = unary("sqrt", np.sqrt, doc="Square root.", samples=_POSITIVE)
rsqrt = unary("rsqrt", lambda x: 1 / np.sqrt(x), doc="One over the square root.", samples=_POSITIVE)
sin = unary("sin", np.sin, doc="Sine, of angles in radians of any size; NaN of infinities.")
cos = unary("cos", np.cos, doc="Cosine, of angles in radians of any size; NaN of infinities.")
tan = unary("tan", np.tan, doc="Tangent, of angles in radians of any size; NaN of infinities.", tolerance=2e-6)
atan = unary("atan", np.arctan, doc="Inverse tangent, within ±π/2.")
tanh = unary("tanh", np.tanh, doc="Hyperbolic tangent.")
relu = unary("relu", lambda x: np.maximum(x, 0), doc="x where positive, else 0.")
round = unary("round", np.rint, doc="The nearest whole number; a half goes to the even one.")


def _erf(x: Any) -> Any:
    """Error function without SciPy: Python's own, element by element (a reference may be slow)."""
    return np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64)).astype(x.dtype)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


erf = unary("erf", _erf, doc="Error function.")
sigmoid = unary("sigmoid", _sigmoid, doc="1 / (1 + e^-x).")
silu = unary("silu", lambda x: x * _sigmoid(x), doc="x · sigmoid(x), also called swish.")
gelu = unary(
    "gelu",
    lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    tolerance=2e-6,
    doc="Gaussian error linear unit by the error function: x · (1 + erf(x / √2)) / 2.",
)
gelu_tanh = unary(
    "gelu_tanh",
    _gelu_tanh,
    tolerance=2e-6,
    doc="Gaussian error linear unit by its tanh form: x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2.",
)


def _where(condition: Any, a: Any, b: Any) -> Any:
    common = promote(dtype_of(a.dtype), dtype_of(b.dtype)).wide.numpy
    return np.where(condition, a.astype(common), b.astype(common))


@op(
    "where",
    reference=_where,
    traits=[ELEMENTWISE],
    scalar="select",
    samples=[
        sample(boolean(4, 5), f32(4, 5), f32(4, 5)),
        sample(boolean(3, 1, 65), f32(2, 1), f32()),
        sample(boolean(5), i32(5), f32(3, 5)),
        sample(boolean(3, 1), i32(17), i32(3, 17)),
        sample(boolean(4), boolean(3, 4), boolean()),
    ],
)
def where(condition: TensorType, a: TensorType, b: TensorType) -> TensorType:
    """`a` where the condition holds, else `b`."""
    _require("where", is_bool, condition.dtype)
    return TensorType(broadcast(condition.shape, a.shape, b.shape, where="where"), promote(a.dtype, b.dtype))


@op(
    "cast",
    reference=cast_array,
    traits=[ELEMENTWISE],
    scalar="cast",
    samples=[
        sample(f32(5, 7), dtype=dtype_of("i32")),
        sample(i32(5, 7), dtype=dtype_of("f32")),
        sample(f32(3, 65, low=-1e12, high=1e12), dtype=dtype_of("i8")),
        sample(boolean(9), dtype=dtype_of("f32")),
        sample(f32(65), dtype=dtype_of("f16")),
        sample(f32(65), dtype=dtype_of("bf16")),
        sample(f32(17), dtype=dtype_of("f64")),
        sample(i32(33, high=300), dtype=dtype_of("u8")),
        sample(f32(33), dtype=dtype_of("bool")),
        sample(i32(21), dtype=dtype_of("i64")),
    ],
)
def cast(x: TensorType, *, dtype: DType) -> TensorType:
    """Casts `x` to another element type, rounding to nearest even; integers reach narrow floats via f32.

    Float to integer truncates and saturates, NaN becomes 0; integer to integer wraps; to bool is `!= 0`.
    """
    return x.with_dtype(dtype)
