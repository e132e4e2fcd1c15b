"""Random numbers with explicit keys: equal keys give equal numbers on every device, traced or eager.

A shape may be a single number: `normal(key, 3)` is `normal(key, (3,))`. Distributions with parameters, such as
`bernoulli(key, p)`, have the shape of the parameters unless a shape is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from rlx.errors import GraphError, ShapeError, nearest
from rlx.functional.arrays import (
    abs,
    argmax,
    argsort,
    asarray,
    astype,
    broadcast_to,
    cumsum,
    erf,
    expand_dims,
    less,
    less_equal,
    log,
    log1p,
    logical_or,
    maximum,
    minimum,
    moveaxis,
    reshape,
    sign,
    sqrt,
    stack,
    sum,
    take,
    take_along_axis,
    tan,
    topk,
    where,
    zeros,
)
from rlx.functional.arrays import (
    split as split_array,
)
from rlx.functional.operands import is_traced
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.types import as_shape, axis_index, broadcast, product

Shape = int | Sequence[Any]


def _shape(shape: Any) -> tuple[Any, ...]:
    """Return a shape, which may be given as one number, as a tuple."""
    return tuple(as_shape((shape,) if isinstance(shape, (int, np.integer)) else shape))


def _shape_or(shape: Any, *parameters: Any) -> tuple[Any, ...]:
    """Return the shape, or if it is None the one that the parameters broadcast to."""
    own = broadcast(*(type_of(p).shape for p in parameters), where="random")
    if shape is None:
        return own
    wanted = _shape(shape)
    if broadcast(own, wanted, where="random") != wanted:
        raise ShapeError(f"random: parameters of shape {list(own)} do not broadcast to {list(wanted)}")
    return wanted


def key(seed: int) -> Any:
    """Make a key from an integer seed."""
    if is_traced(seed):
        hint = "make keys outside and pass them in, or derive one: rlx.random.fold_in(key, data)"
        raise GraphError("random.key: the seed is a traced number, expected a Python integer", hint=hint)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**64:
        raise GraphError(f"random.key: seed is {seed!r}, expected an integer from 0 to 2^64 - 1")
    return np.array([int(seed) & 0xFFFFFFFF, int(seed) >> 32], np.uint32)


@eager
def split(key: Any, num: int = 2) -> Any:
    """Split a key into `num` new ones, [num, 2]; do not use the old key again."""
    return apply("random_bits", key, shape=(num, 2))


@eager
def fold_in(key: Any, data: Any) -> Any:
    """Derive a key from a key and an integer, such as a step number; the integer may be traced."""
    base = apply("random_bits", key, shape=(2,))
    number = astype(data, "u32")
    return apply("random_bits", base + stack([number, zeros((), "u32")]), shape=(2,))


# -- bits and uniform numbers -----------------------------------------------------------------------------------------
@eager
def bits(key: Any, shape: Shape = ()) -> Any:
    """Random 32-bit words."""
    return apply("random_bits", key, shape=_shape(shape))


@eager
def uniform(key: Any, shape: Shape = (), dtype: Any = "f32", minval: Any = 0.0, maxval: Any = 1.0) -> Any:
    """Uniform floats in [minval, maxval)."""
    values = astype(apply("random_uniform", key, shape=_shape(shape)), dtype)
    return values * (maxval - minval) + minval


def _between(key: Any, shape: Any) -> Any:
    """Uniform f32 numbers in (0, 1), both ends excluded: odd multiples of 2^-25."""
    return apply("random_uniform", key, shape=_shape(shape)) + 2.0**-25


@eager
def randint(key: Any, shape: Shape, minval: Any, maxval: Any, dtype: Any = "i32") -> Any:
    """Integers in [minval, maxval), uniform up to the bias of a 32-bit modulo; the bounds may be arrays."""
    for name, value in (("minval", minval), ("maxval", maxval)):
        if isinstance(value, bool) or not type_of(value).dtype.is_integer:
            raise GraphError(f"random.randint: {name} is {value!r}, expected an integer")
    if isinstance(minval, int) and isinstance(maxval, int) and not 0 < maxval - minval <= 2**31:
        raise GraphError(f"random.randint: from {minval} to {maxval} is not a range of 1 to 2^31 numbers")
    wide = astype(apply("random_bits", key, shape=_shape(shape)), "i64")
    low = minval if isinstance(minval, int) else astype(minval, "i64")
    high = maxval if isinstance(maxval, int) else astype(maxval, "i64")
    return astype(wide % (high - low) + low, dtype)


@eager
def bernoulli(key: Any, p: Any = 0.5, shape: Shape | None = None) -> Any:
    """True with probability p."""
    return less(apply("random_uniform", key, shape=_shape_or(shape, p)), p)


@eager
def rademacher(key: Any, shape: Shape = (), dtype: Any = "i32") -> Any:
    """-1 or 1, each with probability 1/2."""
    return astype(less(apply("random_uniform", key, shape=_shape(shape)), 0.5), dtype) * 2 - 1


# -- continuous distributions -----------------------------------------------------------------------------------------
@eager
def normal(key: Any, shape: Shape = (), dtype: Any = "f32") -> Any:
    """Standard normal floats."""
    return astype(apply("random_normal", key, shape=_shape(shape)), dtype)


@eager
def truncated_normal(key: Any, lower: Any, upper: Any, shape: Shape | None = None, dtype: Any = "f32") -> Any:
    """Standard normal floats, given that they lie between `lower` and `upper`."""
    wanted = _shape_or(shape, lower, upper)
    low, high = (erf(astype(asarray(x), "f64") / math.sqrt(2.0)) for x in (lower, upper))
    position = low + (high - low) * astype(_between(key, wanted), "f64")
    values = math.sqrt(2.0) * _erfinv(position)
    bounds = [astype(asarray(x), "f64") for x in (lower, upper)]
    return astype(minimum(maximum(values, bounds[0]), bounds[1]), dtype)


# Giles, "Approximating the erfinv function" (2010), single precision; highest power first.
_ERFINV_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def _erfinv(x: Any) -> Any:
    """The inverse of erf, by polynomials; relative error about 1e-6."""
    w = -log1p(-x * x)

    def polynomial(coefficients: Sequence[float], at: Any) -> Any:
        total: Any = coefficients[0]
        for c in coefficients[1:]:
            total = total * at + c
        return total

    return x * where(less(w, 5.0), polynomial(_ERFINV_CENTRE, w - 2.5), polynomial(_ERFINV_TAIL, sqrt(w) - 3.0))


@eager
def exponential(key: Any, shape: Shape = (), dtype: Any = "f32") -> Any:
    """Exponentially distributed floats with mean 1."""
    return astype(-log(_between(key, shape)), dtype)


@eager
def gumbel(key: Any, shape: Shape = (), dtype: Any = "f32") -> Any:
    """Gumbel noise: -log(-log(u)) of uniform u."""
    return astype(-log(-log(_between(key, shape))), dtype)


@eager
def laplace(key: Any, shape: Shape = (), dtype: Any = "f32") -> Any:
    """Floats with density exp(-|x|) / 2."""
    u = 2.0 * _between(key, shape) - 1.0
    return astype(-sign(u) * log1p(-abs(u)), dtype)


@eager
def logistic(key: Any, shape: Shape = (), dtype: Any = "f32") -> Any:
    """Floats whose sigmoid is uniform."""
    u = _between(key, shape)
    return astype(log(u) - log1p(-u), dtype)


@eager
def cauchy(key: Any, shape: Shape = (), dtype: Any = "f32") -> Any:
    """Floats with density 1 / (pi (1 + x^2))."""
    return astype(tan(math.pi * (_between(key, shape) - 0.5)), dtype)


@eager
def gamma(key: Any, a: Any, shape: Shape | None = None, dtype: Any = "f32") -> Any:
    """Gamma-distributed floats of shape parameter `a` and scale 1. They have no gradient with respect to `a`."""
    from rlx.functional.control import while_loop  # control flow is built on arrays

    wanted = _shape_or(shape, a)
    a = broadcast_to(astype(asarray(a), "f32"), wanted)
    boosted = where(less(a, 1.0), a + 1.0, a)  # a gamma of a + 1, times u ** (1 / a), is one of a
    d = boosted - 1.0 / 3.0
    c = 1.0 / sqrt(9.0 * d)

    def attempt(state: Any) -> Any:  # Marsaglia and Tsang, "A simple method for generating gamma variables" (2000)
        step, accepted, values = state
        noise_key, level_key = split(fold_in(key, step))
        x = normal(noise_key, wanted)
        v = (1.0 + c * x) ** 3
        is_good = less(log(_between(level_key, wanted)), 0.5 * x * x + d - d * v + d * log(maximum(v, 1e-30)))
        is_good = less(0.0, v) & is_good
        return step + 1, logical_or(accepted, is_good), where(accepted, values, where(is_good, d * v, values))

    start = (np.int32(1), broadcast_to(asarray(False), wanted), zeros(wanted, "f32"))
    _, _, values = while_loop(lambda state: ~(state[1].all()), attempt, start)
    power = log(_between(fold_in(key, 0), wanted)) / a
    return astype(values * where(less(a, 1.0), _exp(power), 1.0), dtype)


def _exp(x: Any) -> Any:
    return apply("exp", x)


@eager
def beta(key: Any, a: Any, b: Any, shape: Shape | None = None, dtype: Any = "f32") -> Any:
    """Beta-distributed floats, in (0, 1)."""
    wanted = _shape_or(shape, a, b)
    first, second = split(key)
    x, y = gamma(first, a, wanted), gamma(second, b, wanted)
    return astype(x / (x + y), dtype)


@eager
def dirichlet(key: Any, alpha: Any, shape: Shape | None = None, dtype: Any = "f32") -> Any:
    """Dirichlet-distributed rows, on the last axis, which add up to 1; `shape` is that of the other axes."""
    type_ = type_of(alpha)
    if type_.rank == 0:
        raise ShapeError(f"random.dirichlet: alpha is {type_}, expected an axis of classes")
    rows = type_.shape[:-1] if shape is None else _shape(shape)
    values = gamma(key, alpha, (*rows, type_.shape[-1]))
    return astype(values / sum(values, -1, keepdims=True), dtype)


# -- choices ----------------------------------------------------------------------------------------------------------
@eager
def categorical(key: Any, logits: Any, axis: int = -1, shape: Shape | None = None) -> Any:
    """Sample indices with probabilities softmax(logits); `shape` is that of the result, by default one per row."""
    type_ = type_of(logits)
    at = axis_index(axis, type_.rank, "random.categorical")
    rows = (*type_.shape[:at], *type_.shape[at + 1 :])
    wanted = rows if shape is None else _shape(shape)
    leading = wanted[: len(wanted) - len(rows)]
    if wanted[len(leading) :] != rows:
        raise ShapeError(f"random.categorical: shape {list(wanted)} does not end in {list(rows)}, the rows of {type_}")
    return argmax(logits + gumbel(key, (*leading, *type_.shape)), at + len(leading))


def _random_order(key: Any, shape: Sequence[Any]) -> Any:
    """Random orders of the last axis, by sorting 62-bit numbers, which practically never tie."""
    high, low = split_array(astype(apply("random_bits", key, shape=(2, *shape)), "i64"), 2)
    return argsort(reshape(high // 2 * 2**31 + low // 2, shape), -1)


@eager
def permutation(key: Any, x: Any, axis: int = 0, independent: bool = False) -> Any:
    """Shuffle an array along an axis, or the numbers 0 to x - 1; with `independent`, each row by itself."""
    if isinstance(x, int):
        return astype(_random_order(key, (x,)), "i32")
    shape = type_of(x).shape
    at = axis_index(axis, len(shape), "random.permutation")
    if not independent:
        return take(x, _random_order(key, (shape[at],)), at)
    rows = moveaxis(asarray(x), at, -1)
    return moveaxis(take_along_axis(rows, _random_order(key, type_of(rows).shape), -1), -1, at)


@eager
def choice(key: Any, a: Any, shape: Shape = (), replace: bool = True, p: Any = None, axis: int = 0) -> Any:
    """Choose among the entries of an array along an axis, or among 0 to a - 1, with probabilities p (None: equal)."""
    is_count = isinstance(a, int)
    at = 0 if is_count else axis_index(axis, type_of(a).rank, "random.choice")
    size = a if is_count else type_of(a).shape[at]
    wanted = _shape(shape)
    count = product(wanted)
    if p is not None and type_of(p).shape != (size,):
        raise ShapeError(f"random.choice: p is {type_of(p)}, there are {size} entries")
    if not replace and isinstance(count, int) and isinstance(size, int) and count > size:
        raise ShapeError(f"random.choice: {count} of {size} entries without replacement", hint="replace=True")
    if p is None and replace:
        indices = randint(key, wanted, 0, size)
    elif p is None:
        indices = reshape(_random_order(key, (size,))[:count], wanted)
    elif replace:
        steps = cumsum(astype(asarray(p), "f64"), 0)
        position = expand_dims(astype(apply("random_uniform", key, shape=wanted), "f64") * steps[-1], len(wanted))
        indices = minimum(sum(astype(less_equal(steps, position), "i32"), -1), size - 1)
    else:
        _, indices = topk(log(astype(asarray(p), "f32")) + gumbel(key, (size,)), int(count))
        indices = reshape(indices, wanted)
    indices = astype(indices, "i32")
    return indices if is_count else take(a, indices, at)


_PUBLIC = (
    "bernoulli beta bits categorical cauchy choice dirichlet exponential fold_in gamma gumbel key laplace logistic "
    "normal permutation rademacher randint split truncated_normal uniform"
)
_NAMES = _PUBLIC.split()
_ELSEWHERE = {
    "PRNGKey": "it is called rlx.random.key here",
    "shuffle": "it is called rlx.random.permutation here",
    "seed": "it is called rlx.random.key here",
    "key_data": "a key is a NumPy array already",
    "wrap_key_data": "a key is a NumPy array already",
    "multivariate_normal": "mean + np.linalg.cholesky(covariance) @ rlx.random.normal(key, mean.shape)",
    "orthogonal": "np.linalg.qr(rlx.random.normal(key, (n, n)))[0]",
    "ball": "x / np.linalg.norm(x) * rlx.random.uniform(key) ** (1 / n) of a normal x is uniform in the ball",
    "poisson": "not there: NumPy's default_rng(seed).poisson draws outside of traced functions",
    "t": "not there: NumPy's default_rng(seed).standard_t draws outside of traced functions",
}


def __getattr__(name: str) -> NoReturn:
    hint = _ELSEWHERE.get(name) or nearest(name, _NAMES)
    raise AttributeError(f"module 'rlx.random' has no attribute {name!r}" + (f": {hint}" if hint else ""))


def __dir__() -> list[str]:
    return list(_NAMES)
