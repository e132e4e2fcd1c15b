"""Outside oracles: what every op means, in NumPy and SciPy alone, and how close an implementation has to come.

`ORACLES[op]` takes float64, int64 and bool arrays (None where an operand is left out) and attributes,
     with element types
as names, and gives one array or a tuple. Nothing here calls rlx: a test that uses it proves meaning, not plumbing.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import scipy.linalg
import scipy.signal
import scipy.special

from rlx.dtypes import dtype as dtype_of

Array = np.ndarray[Any, Any]
Oracle = Callable[..., Any]
ORACLES: dict[str, Oracle] = {}

NUMPY: dict[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16), "i64": np.dtype(np.int64), "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16), "i8": np.dtype(np.int8), "u32": np.dtype(np.uint32), "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}  # fmt: skip
NAMES = {numpy: name for name, numpy in NUMPY.items()}
FLOATS = ("f32", "f64", "f16", "bf16")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u32")

# Ops whose result is one of their operands' numbers, or IEEE arithmetic rounded once: they have to be exact.
EXACT = frozenset((
    "add", "sub", "mul", "div", "sqrt", "neg", "abs", "relu", "maximum", "minimum", "max", "min", "where", "cast",
    "reshape", "transpose", "slice", "expand", "assume_equal", "concatenate", "pad", "gather", "topk", "argmax",
    "kv_append", "round", "scatter", "assign",
))  # fmt: skip


def oracle(*names: str) -> Callable[[Oracle], Oracle]:
    """Decorator: the meaning of one or several ops."""

    def add(function: Oracle) -> Oracle:
        ORACLES.update(dict.fromkeys(names, function))
        return function

    return add


# -- numbers --------------------------------------------------------------------------------------------------------
# Significant bits, least exponent of a normal number, largest number.
_FORMATS = {
    "f32": (24, -126, float(np.finfo(np.float32).max)), "f16": (11, -14, 65504.0),
    "bf16": (8, -126, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
}  # fmt: skip
_EPSILON = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


def rounded(x: Array, name: str) -> Array:
    """float64 numbers rounded once to a float type, ties to even: in float64 arithmetic, without any cast."""
    if name == "f64":
        return x
    digits, least, largest = _FORMATS[name]
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))
        step = np.ldexp(1.0, np.maximum(exponent - 1, least) - (digits - 1))
        near = np.rint(x / step) * step
        near = np.where(np.abs(near) > largest, np.copysign(np.inf, x), near)
        return np.where(np.isfinite(x), near, x)


def saturated(x: Array, name: str) -> Array:
    """Floats cut off toward zero, kept within an integer type; NaN is 0. Python integers, so nothing overflows."""
    limits = np.iinfo(NUMPY[name])

    def one(v: float) -> int:
        if math.isnan(v):
            return 0
        if math.isinf(v):
            return int(limits.max if v > 0 else limits.min)
        return min(max(int(v), int(limits.min)), int(limits.max))

    return np.array([one(float(v)) for v in np.ravel(x)], NUMPY[name]).reshape(np.shape(x))


def wide(array: Array) -> Array:
    """An array as oracles take it."""
    if array.dtype == np.bool_:
        return array
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return array.astype(np.float64)


def expected(op: str, operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> tuple[Array, ...]:
    """The exact results of an op on arrays of any element type: float64, int64 or bool."""
    plain = {k: str(v) if type(v).__name__ == "DType" else v for k, v in attrs.items()}
    with np.errstate(all="ignore"):
        outputs = ORACLES[op](*(None if o is None else wide(o) for o in operands), **plain)
    return tuple(np.asarray(r) for r in (outputs if isinstance(outputs, tuple) else (outputs,)))


def tolerance(name: str, f32: float) -> float:
    """How far results of an element type may lie from the oracle's, relative to the largest, given what f32 may.

    f64 computes as f32 does, with epsilon 2^-29 times as large; twice that is allowed, because the oracle rounds
    as well. Narrow floats compute in f32 and round once more, by at most half their epsilon.
    """
    if name == "f64":
        return 2 * f32 * _EPSILON["f64"] / _EPSILON["f32"]
    return f32 if name == "f32" else f32 + _EPSILON[name] / 2


def magnitude(op: str, operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> float:
    """What errors are relative to where that is more than the largest result; 0 elsewhere."""
    first = operands[0]
    assert first is not None
    x = wide(first)
    with np.errstate(all="ignore"):
        if op in ("sum", "mean", "cumsum", "matmul", "scatter_add", "linear"):  # terms that cancel leave their errors
            sizes = [o if o is None or o.dtype.kind in "iu" else np.abs(wide(o)) for o in operands]
            actual = expected(op, sizes, {k: v for k, v in attrs.items() if k != "activation"})[0]
        elif op == "prod":  # every factor rounds once: 16 of them are what the tolerance is made for
            actual = expected(op, operands, attrs)[0]
            actual = actual * max(1.0, x.size / max(actual.size, 1) / 16)
        elif op == "layer_norm":  # the mean is rounded relative to x, not to the differences from it
            gamma = 1.0 if len(operands) == 1 or operands[1] is None else wide(operands[1])
            actual = x / np.sqrt(np.var(x, -1, keepdims=True) + attrs.get("eps", 1e-5)) * gamma if x.size else x
        else:
            return 0.0
    return float(np.max(np.abs(actual), initial=0.0, where=np.isfinite(actual)))


def assert_matches(actual: Array, exact: Array, *, relative: float, least: float = 0.0, where: str = "") -> None:
    """`actual` is `exact` in its own element type: integers and booleans to the bit, floats within `relative` of the
    largest finite number (or of `least`); 0 means rounded once. NaN and infinities are where they should be."""
    assert actual.shape == exact.shape, f"{where}: shape {actual.shape}, expected {exact.shape}"
    name = NAMES[actual.dtype]
    if name not in FLOATS:
        np.testing.assert_array_equal(actual, exact.astype(actual.dtype), err_msg=where)
        return
    near = rounded(exact.astype(np.float64), name)
    computed = wide(actual)
    finite = np.isfinite(near)
    np.testing.assert_array_equal(computed[~finite], near[~finite], err_msg=f"{where}: NaN and infinities")
    if relative == 0:
        np.testing.assert_array_equal(computed[finite], near[finite], err_msg=f"{where}: rounded once")
        return
    largest = np.max(np.abs(near[finite]), initial=least)
    error = np.max(np.abs(computed[finite] - exact[finite]), initial=0.0)
    allowed = relative * largest
    assert error <= allowed, f"{where}: off by {error:.3g}, {allowed:.3g} allowed (largest {largest:.3g})"


# -- elementwise ----------------------------------------------------------------------------------------------------
def sigmoid(x: Array) -> Array:
    return np.asarray(scipy.special.expit(x))


ORACLES |= {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "logical_and": lambda a, b: a & b,
    "logical_or": lambda a, b: a | b,
    "logical_not": lambda a: ~a,
    "where": np.where,
    "neg": lambda x: -x,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "atan": np.arctan,
    "tanh": np.tanh,
    "erf": scipy.special.erf,
    "sigmoid": sigmoid,
    "relu": lambda x: np.where(x < 0, 0.0, x),
    "round": np.rint,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * scipy.special.ndtr(x),
    # 1 + tanh(z) is 2 · sigmoid(2z).
    "gelu_tanh": lambda x: x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)),
}


def _python_division(a: Array, b: Array, part: int) -> Array:
    """Python's own divmod, element by element: it floors. A zero divisor gives 0."""
    x, y = np.broadcast_arrays(a, b)
    pairs = [divmod(int(p), int(q))[part] if q else 0 for p, q in zip(x.ravel(), y.ravel(), strict=True)]
    return np.array([(v + 2**63) % 2**64 - 2**63 for v in pairs], np.int64).reshape(x.shape)


ORACLES["floor_divide"] = lambda a, b: _python_division(a, b, 0)
ORACLES["mod"] = lambda a, b: _python_division(a, b, 1)


@oracle("cast")
def _cast(x: Array, *, dtype: str) -> Array:
    """The result has the wanted type already: casts are exact."""
    if dtype == "bool":
        return x != 0
    is_float = x.dtype == np.float64
    if dtype in INTEGERS:
        return saturated(x, dtype) if is_float else x.astype(NUMPY[dtype])
    if is_float:
        return rounded(x, dtype)
    # Integers reach narrow floats by way of f32.
    near = x.astype(np.float64 if dtype == "f64" else np.float32).astype(np.float64)
    return rounded(near, dtype)


# -- reductions -----------------------------------------------------------------------------------------------------
def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    axes = range(rank) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(a % rank for a in axes)


def _fold(combine: np.ufunc, start: Callable[[Array], Any]) -> Oracle:
    def run(x: Array, *, axis: Any = None, keepdims: bool = False) -> Array:
        return np.asarray(combine.reduce(x, axis=_axes(axis, x.ndim), keepdims=keepdims, initial=start(x)))

    return run


def _least(x: Array) -> Any:
    return -np.inf if x.dtype == np.float64 else np.iinfo(x.dtype).min


def _largest(x: Array) -> Any:
    return np.inf if x.dtype == np.float64 else np.iinfo(x.dtype).max


ORACLES["sum"] = _fold(np.add, lambda x: 0)
ORACLES["prod"] = _fold(np.multiply, lambda x: 1)
ORACLES["max"] = _fold(np.maximum, _least)
ORACLES["min"] = _fold(np.minimum, _largest)


@oracle("mean")
def _mean(x: Array, *, axis: Any = None, keepdims: bool = False) -> Array:
    axes = _axes(axis, x.ndim)
    count = math.prod(x.shape[a] for a in axes)
    return np.asarray(np.add.reduce(x, axis=axes, keepdims=keepdims) / np.float64(count))


def _ranking(row: Array) -> list[int]:
    """Indices by falling value: NaN before everything, the first of equals first. Python's sort is stable."""
    values = row.tolist()
    return sorted(
        range(len(values)), key=lambda i: (values[i] == values[i], -values[i] if values[i] == values[i] else 0)
    )


@oracle("argmax")
def _argmax(x: Array, *, axis: int = -1, keepdims: bool = False) -> Array:
    moved = np.moveaxis(x, axis, -1)
    rows = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    best = [_ranking(row)[0] if len(row) else 0 for row in rows]
    indices = np.array(best, np.int64).reshape(moved.shape[:-1])
    return np.expand_dims(indices, axis) if keepdims else indices


@oracle("topk")
def _topk(x: Array, *, k: int) -> tuple[Array, Array]:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    at = np.array([_ranking(row)[:k] for row in rows], np.int64).reshape(*x.shape[:-1], k)
    return np.take_along_axis(x, at, -1), at


@oracle("sample_tokens")
def _sample_tokens(logits: Array, *settings: Array | None) -> tuple[Array, Array]:
    """Token by token in the order of likelihood, with Python's sort and its fractions of a list."""
    picks, silent = [], []
    for row, raw in enumerate(logits):
        of_row = [None if s is None else s[row] for s in settings]
        of_row += [None] * (14 - len(of_row))
        uniform, temperature, top_k, top_p, min_p, allowed, *penalties, bias_tokens, bias, scored = of_row
        silent.append(scored is not None and scored == 0)
        scores = [float(x) for x in raw]
        for token, value in () if bias is None else zip(bias_tokens, bias, strict=True):
            if 0 <= token < len(scores):
                scores[int(token)] += float(value)
        if penalties[0] is not None:
            history, prompt, repetition, frequency, presence = penalties
            for token in {int(t) for t in history if 0 <= t < len(scores)}:
                scores[token] *= repetition if scores[token] < 0 else 1 / repetition
                count = list(history[int(prompt) :]).count(token)
                scores[token] -= count * frequency + presence if count else 0.0
        ranked = [t for t in _ranking(np.array(scores)) if allowed is None or int(allowed[t // 32]) >> t % 32 & 1]
        if temperature == 0:
            picks.append(ranked[0])
            continue
        if top_k:
            ranked = [t for t in ranked if scores[t] >= scores[ranked[min(int(top_k), len(ranked)) - 1]]]
        weights = {t: math.exp((scores[t] - scores[ranked[0]]) / temperature) for t in ranked}
        sums = np.cumsum([weights[t] for t in ranked])
        nucleus = ranked[: int(np.searchsorted(sums, top_p * sums[-1])) + 1] if top_p < 1 else ranked
        candidates = sorted(t for t in nucleus if weights[t] >= min_p)
        sums = np.cumsum([weights[t] for t in candidates])
        picks.append(candidates[min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(candidates) - 1)])
    likely = scipy.special.log_softmax(logits, -1)
    scores = np.take_along_axis(likely, np.array(picks)[:, None], -1)[:, 0]
    return np.array(picks, np.int64), np.where(silent, np.nan, scores)


@oracle("nearest_rows")
def _nearest_rows(
    queries: Array, rows: Array, scales: Array | None = None, offsets: Array | None = None, among: Array | None = None,
    *, k: int, metric: str = "dot",
) -> tuple[Array, Array]:  # fmt: skip
    """Row by row, with Python's sort. Queries against rows of int8 are rounded to 64ths of their peak, in f32."""
    scores = np.full((*queries.shape[:-1], k), -np.inf)
    best_rows = np.full(scores.shape, -1, np.int64)
    for place in np.ndindex(*queries.shape[:-1]):
        query, unit, matrix = queries[place].astype(np.float64), 1.0, rows[place[:-1]]
        if rows.dtype.kind == "i":
            narrow = queries[place].astype(np.float32)
            peak = np.abs(narrow).max()
            query, unit = np.rint(narrow * (np.float32(64) / peak)).astype(np.float64), float(peak) / 64
        ranking = []
        for row in range(len(matrix)) if among is None else among[place].tolist():
            if not 0 <= row < len(matrix):
                continue
            x = matrix[row].astype(np.float64)
            score = float(x @ query) * unit if metric == "dot" else -float(((x - query) ** 2).sum())
            score *= 1.0 if scales is None else float(scales[place[:-1]][row])
            score += 0.0 if offsets is None else float(offsets[place[:-1]][row])
            ranking.append((-score, row))
        for i, (score, row) in enumerate(sorted(ranking)[:k]):
            scores[place][i], best_rows[place][i] = -score, row
    return scores, best_rows


@oracle("softmax")
def _softmax(x: Array, *, axis: int = -1) -> Array:
    return np.asarray(scipy.special.softmax(x, axis=axis)) if x.size else x


@oracle("scatter")
def _scatter(x: Array, indices: Array, updates: Array) -> Array:
    result = x.copy()
    for place in np.ndindex(*indices.shape):
        result[indices[place]] = updates[place]
    return result


@oracle("cross_entropy")
def _cross_entropy(logits: Array, labels: Array, *, ignore_index: int = -100) -> Array:
    counts = labels != ignore_index
    at = np.where(counts, labels, 0)[..., None]
    picked = np.take_along_axis(logits, at, -1)[..., 0]
    return np.asarray(np.where(counts, scipy.special.logsumexp(logits, axis=-1) - picked, 0))


@oracle("cross_entropy_grad")
def _cross_entropy_grad(logits: Array, labels: Array, dy: Array, *, ignore_index: int = -100) -> Array:
    counts = labels != ignore_index
    probabilities = np.asarray(scipy.special.softmax(logits, axis=-1))
    at = np.where(counts, labels, 0)[..., None]
    np.put_along_axis(probabilities, at, np.take_along_axis(probabilities, at, -1) - 1, -1)
    return np.asarray(probabilities * np.where(counts, dy, 0)[..., None])


@oracle("assign")
def _assign(x: Array, value: Array) -> Array:
    return value


@oracle("adamw_update")
def _adamw_update(
    p: Array, m: Array, v: Array, grad: Array, rate: Array, decay: Array, root: Array, scale: Array | None = None, *,
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Loshchilov and Hutter 2019, algorithm 2, with corrections of the moments in `rate` and `root`."""
    g = grad * (1.0 if scale is None else scale)
    first, second = m + (1 - beta1) * (g - m), v + (1 - beta2) * (g**2 - v)
    return p - (1 - decay) * p - rate * first / (second**0.5 / root + eps), first, second


@oracle("sgd_update")
def _sgd_update(
    p: Array, grad: Array, rate: Array, velocity: Array | None = None, scale: Array | None = None, *,
    momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0,
) -> Any:  # fmt: skip
    g = grad * (1.0 if scale is None else scale) + weight_decay * p
    if velocity is None:
        return p - rate * g
    u = momentum * velocity + g
    return p - rate * (momentum * u + g if nesterov else u), u


@oracle("cumsum")
def _cumsum(x: Array, *, axis: int = -1, exclusive: bool = False) -> Array:
    total = np.add.accumulate(x, axis=axis)
    return _shifted(total, axis) if exclusive else total


def _shifted(total: Array, axis: int) -> Array:
    """One step later along the axis, 0 first."""
    if total.shape[axis] == 0:
        return total
    before = np.zeros_like(np.take(total, [0], axis))
    return np.concatenate([before, np.take(total, range(total.shape[axis] - 1), axis)], axis)


# -- shapes and indices -----------------------------------------------------------------------------------------------
@oracle("slice")
def _slice(x: Array, *, start: Sequence[int], stop: Sequence[int], step: Sequence[int]) -> Array:
    for axis, bounds in enumerate(zip(start, stop, step, strict=True)):
        x = np.take(x, range(*bounds), axis)
    return x


@oracle("pad")
def _pad(x: Array, *, low: Sequence[int], high: Sequence[int], value: float = 0.0) -> Array:
    result = np.full([a + d + b for a, d, b in zip(low, x.shape, high, strict=True)], value, x.dtype)
    result[tuple(slice(a, a + d) for a, d in zip(low, x.shape, strict=True))] = x
    return result


@oracle("concatenate")
def _concatenate(*xs: Array, axis: int = 0) -> Array:
    return np.concatenate(xs, axis)


def _token_by_token(
    carry: Callable[[Sequence[Array], Array], tuple[Array, Array]], tokens: Sequence[Array], state: Array, rows: Array
) -> tuple[Array, Array]:
    """Ragged tokens of a recurrence, in the order of the call: a row goes on by a sequence of one token."""
    out, state = np.zeros_like(tokens[0]), state.copy()
    for t, row in enumerate(rows):
        if row >= 0:
            output, state[row : row + 1] = carry([x[None, t : t + 1] for x in tokens], state[row : row + 1])
            out[t] = output[0, 0]
    return out, state


@oracle("selective_scan_carry")
def _selective_scan_carry(
    x: Array, delta: Array, a: Array, b: Array, c: Array, state: Array, d: Array | None = None,
    segments: Array | None = None, rows: Array | None = None, *, state_size: int,
) -> tuple[Array, Array]:  # fmt: skip
    """One channel after the other, one number of state after the other."""
    if rows is not None:
        return _token_by_token(
            lambda t, s: _selective_scan_carry(t[0], t[1], a, t[2], t[3], s, d, state_size=state_size),
            (x, delta, b, c), state, rows,
        )  # fmt: skip
    y, state = np.zeros_like(x), state.copy()
    for batch, channel in np.ndindex(x.shape[0], x.shape[2]):
        h = state[batch, channel]
        for t in range(x.shape[1]):
            h *= _carried(segments, batch, t)
            for n in range(state_size):
                step = delta[batch, t, channel]
                h[n] = math.exp(step * a[channel, n]) * h[n] + step * b[batch, t, n] * x[batch, t, channel]
            y[batch, t, channel] = h @ c[batch, t] + (0 if d is None else d[channel] * x[batch, t, channel])
    return y, state


@oracle("selective_scan")
def _selective_scan(
    x: Array, delta: Array, a: Array, b: Array, c: Array, d: Array | None = None, segments: Array | None = None, *,
    state_size: int,
) -> Array:  # fmt: skip
    start = np.zeros((x.shape[0], x.shape[2], state_size))
    return _selective_scan_carry(x, delta, a, b, c, start, d, segments, state_size=state_size)[0]


def _carried(segments: Array | None, batch: int, t: int) -> float:
    """What of the state before a token is left for it: 0 where a segment starts."""
    return 1.0 if segments is None or t == 0 or segments[batch, t] == segments[batch, t - 1] else 0.0


@oracle("gated_delta_net_carry")
def _gated_delta_net_carry(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, segments: Array | None = None,
    rows: Array | None = None, *, state_size: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Householder-like form: S (I exp(g)) minus what the key recalls, plus what it is to recall."""
    if rows is not None:
        return _token_by_token(
            lambda t, s: _gated_delta_net_carry(*t, s, state_size=state_size), (q, k, v, g, beta), state, rows
        )
    out, state = np.zeros_like(v), state.copy()
    for batch, head in np.ndindex(q.shape[0], q.shape[2]):
        s = state[batch, head]
        for t in range(q.shape[1]):
            key, rate = k[batch, t, head], beta[batch, t, head]
            forget = (np.eye(state_size) - rate * np.outer(key, key)) * math.exp(g[batch, t, head])
            s = forget @ s * _carried(segments, batch, t) + rate * np.outer(key, v[batch, t, head])
            out[batch, t, head] = q[batch, t, head] @ s / math.sqrt(state_size)
        state[batch, head] = s
    return out, state


@oracle("gated_delta_net")
def _gated_delta_net(
    q: Array, k: Array, v: Array, g: Array, beta: Array, segments: Array | None = None, *, state_size: int
) -> Array:
    start = np.zeros((q.shape[0], q.shape[2], state_size, state_size))
    return _gated_delta_net_carry(q, k, v, g, beta, start, segments, state_size=state_size)[0]


@oracle("depthwise_conv1d_causal")
def _depthwise_conv1d_causal(
    x: Array, weight: Array, left_pad: Array, segments: Array | None = None, *, kernel_size: int
) -> Array:
    taps, y = weight.reshape(len(weight), kernel_size), np.zeros_like(x)
    if segments is not None:  # the tokens of each id on their own, with zeros in place of the others
        for batch, number in ((b, n) for b in range(len(x)) for n in set(segments[b])):
            own = (segments[batch] == number)[:, None]
            pad = left_pad[batch] * (segments[batch, 0] == number)
            row = _depthwise_conv1d_causal((x[batch] * own)[None], weight, pad[None], kernel_size=kernel_size)[0]
            y[batch] += row * own
        return y
    for batch, channel in np.ndindex(x.shape[0], x.shape[2]):
        line = np.concatenate([left_pad[batch, :, channel], x[batch, :, channel]])
        y[batch, :, channel] = np.convolve(line, taps[channel][::-1], mode="valid")
    return y


@oracle("depthwise_conv1d_causal_carry")
def _depthwise_conv1d_causal_carry(
    x: Array, weight: Array, state: Array, lengths: Array | None = None, rows: Array | None = None, *, kernel_size: int
) -> tuple[Array, Array]:
    if rows is not None:
        one = np.array([1])
        return _token_by_token(
            lambda t, s: _depthwise_conv1d_causal_carry(t[0], weight, s, one, kernel_size=kernel_size),
            (x,),
            state,
            rows,
        )
    assert lengths is not None
    y, after = _depthwise_conv1d_causal(x, weight, state, kernel_size=kernel_size), state.copy()
    for batch, length in enumerate(lengths):
        line = np.concatenate([state[batch], x[batch, :length]])
        after[batch] = line[len(line) - kernel_size + 1 :]
    return y, after


def _in_runs(
    carry: Callable[..., tuple[Array, Array]], rows: Sequence[Array], state: Array, segments: Array
) -> tuple[Array, Array]:
    """A recurrence whose runs of equal ids are sequences of their own."""
    out, after = np.zeros_like(rows[2]), state.copy()
    for batch, ids in enumerate(segments):
        edges = [0, *(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
        for low, high in itertools.pairwise(edges):
            start = state[batch : batch + 1] if low == 0 else np.zeros_like(state[:1])
            out[batch : batch + 1, low:high], after[batch : batch + 1] = carry(
                *(x[batch : batch + 1, low:high] for x in rows), start
            )
    return out, after


@oracle("gated_linear_attention_carry")
def _gated_linear_attention_carry(
    q: Array, k: Array, v: Array, g: Array, state: Array, segments: Array | None = None, rows: Array | None = None
) -> tuple[Array, Array]:
    """Attention without a softmax: every earlier token counts by the gates that came after it."""
    if rows is not None:
        return _token_by_token(
            lambda t, s: _gated_linear_attention_carry(t[1], t[2], t[0], t[3], s), (v, q, k, g), state, rows
        )
    if segments is not None:  # run by run, from nothing after the first
        return _in_runs(_gated_linear_attention_carry, (q, k, v, g), state, segments)
    out, after = np.zeros_like(v), np.zeros_like(state)
    share = v.shape[2] // q.shape[2]
    for batch, head in np.ndindex(v.shape[0], v.shape[2]):
        queries, keys = q[batch, :, head // share], k[batch, :, head // share]
        gates = np.cumsum(g[batch, :, head])
        for t in range(len(gates)):
            scores = keys[: t + 1] @ queries[t] * np.exp(gates[t] - gates[: t + 1])
            out[batch, t, head] = (
                scores @ v[batch, : t + 1, head] + math.exp(gates[t]) * queries[t] @ state[batch, head]
            )
        decayed = np.exp(gates[-1] - gates)[:, None] * keys
        after[batch, head] = math.exp(gates[-1]) * state[batch, head] + decayed.T @ v[batch, :, head]
    return out, after


def _two(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


@oracle("conv2d")
def _conv2d(
    x: Array, weight: Array, bias: Array | None = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Array:  # fmt: skip
    """Spread the kernel out by its dilation, correlate every pair of planes, keep every stride-th result."""
    (sy, sx), (py, px), (dy, dx) = map(_two, (stride, padding, dilation))
    wide = np.zeros((*weight.shape[:2], dy * (weight.shape[2] - 1) + 1, dx * (weight.shape[3] - 1) + 1))
    wide[:, :, ::dy, ::dx] = weight
    padded = np.pad(x, ((0, 0), (0, 0), (py, py), (px, px)))
    outs, inside = weight.shape[0], weight.shape[1]
    planes = []
    for image in padded:
        for out in range(outs):
            first = out // (outs // groups) * inside
            total = sum(scipy.signal.correlate2d(image[first + i], wide[out, i], mode="valid") for i in range(inside))
            planes.append(np.asarray(total)[::sy, ::sx] + (0 if bias is None else bias[out]))
    return np.stack(planes).reshape(len(x), outs, *planes[0].shape)


@oracle("conv1d")
def _conv1d(
    x: Array, weight: Array, bias: Array | None = None, *, stride: int = 1, padding: int = 0, dilation: int = 1,
    groups: int = 1,
) -> Array:  # fmt: skip
    """Every pair of lines by NumPy's own correlation."""
    wide = np.zeros((*weight.shape[:2], dilation * (weight.shape[2] - 1) + 1))
    wide[:, :, ::dilation] = weight
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding)))
    outs, inside = weight.shape[:2]
    lines = []
    for image in padded:
        for out in range(outs):
            first = out // (outs // groups) * inside
            total = sum(np.correlate(image[first + i], wide[out, i], mode="valid") for i in range(inside))
            lines.append(np.asarray(total)[::stride] + (0 if bias is None else bias[out]))
    return np.stack(lines).reshape(len(x), outs, -1)


@oracle("pool2d")
def _pool2d(x: Array, *, kind: str, kernel: Any, stride: Any = None, padding: Any = 0) -> Array:
    (ky, kx), (py, px) = _two(kernel), _two(padding)
    sy, sx = (ky, kx) if stride is None else _two(stride)
    padded = np.pad(x, ((0, 0), (0, 0), (py, py), (px, px)), constant_values=-np.inf if kind == "max" else 0)
    height, width = (padded.shape[2] - ky) // sy + 1, (padded.shape[3] - kx) // sx + 1
    y = np.empty((*x.shape[:2], height, width))
    for r, c in np.ndindex(height, width):
        seen = padded[:, :, r * sy : r * sy + ky, c * sx : c * sx + kx]
        y[:, :, r, c] = seen.max((2, 3)) if kind == "max" else seen.mean((2, 3))
    return y


@oracle("pool1d")
def _pool1d(x: Array, *, kind: str, kernel: int, stride: int | None = None, padding: int = 0) -> Array:
    step = stride or kernel
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding)), constant_values=-np.inf if kind == "max" else 0)
    offsets = range(0, padded.shape[2] - kernel + 1, step)
    seen = [padded[:, :, i : i + kernel] for i in offsets]
    return np.stack([w.max(2) if kind == "max" else w.mean(2) for w in seen], axis=2)


def _repeated(scales: Array, rank: int, axis: int | None, scheme: str | None) -> Array:
    """Scales of a tensor, of an axis, or of blocks of rows, as they meet the numbers."""
    if scheme is not None and "/" in scheme:
        return np.repeat(scales, int(scheme.split("/")[1]), axis=-2)
    return scales if axis is None else np.expand_dims(scales, [a for a in range(rank) if a != axis % rank])


def _halves(x: Array) -> Array:
    """Bytes as their nibbles, the low one first."""
    return np.stack([x % 16, x // 16], axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])


def _tiny(x: Array, kind: str) -> Array:
    """Integers as the floats of few bits that have these bits: what `ml_dtypes` says they are."""
    types = {"fp8e4m3": "float8_e4m3fn", "fp8e5m2": "float8_e5m2", "nvfp4/16": "float4_e2m1fn"}
    return x.astype(np.uint8).view(getattr(ml_dtypes, types[kind])).astype(np.float64)


@oracle("random_bits")
def _random_bits(key: Array, *, shape: Any) -> Array:
    """Philox 4x32-10 as its paper has it, in Python's own integers, one element after the other."""
    words = []
    for index in range(math.prod(shape)):
        counter, k = [index // 4, 0, 0, 0], [int(x) for x in key]
        for _ in range(10):
            first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            left, right = second >> 32 ^ counter[1] ^ k[0], first >> 32 ^ counter[3] ^ k[1]
            counter = [left, second % 2**32, right, first % 2**32]
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        words.append(counter[index % 4])
    return np.array(words, np.int64).reshape(shape)


@oracle("random_uniform")
def _random_uniform(key: Array, *, shape: Any) -> Array:
    return np.asarray((_random_bits(key, shape=shape) // 256) / 2**24)


@oracle("random_normal")
def _random_normal(key: Array, *, shape: Any) -> Array:
    """Two uniform numbers as a complex one whose real part is normal."""
    u = _random_uniform(key, shape=(*shape, 2))
    return np.asarray((np.sqrt(-2 * np.log1p(-u[..., 0])) * np.exp(2j * np.pi * u[..., 1])).real)


@oracle("dequantise")
def _dequantise(
    x: Array, scale: Array | None = None, zp: Array | None = None, *, axis: int | None = None, scheme: str | None = None
) -> Array:
    if x.dtype.fields is not None:
        return _unpacked(x)
    if scheme in ("fp8e4m3", "fp8e5m2"):
        return _tiny(x, scheme) * (1.0 if scale is None else scale)
    assert scale is not None
    if scheme == "nvfp4/16":
        scale = _repeated(_tiny(scale, "fp8e4m3"), x.ndim, None, scheme)
        return _tiny(_halves(x), scheme) * scale * (1.0 if zp is None else zp)
    if scheme is not None and scheme.startswith("int4"):
        x = _halves(x)
        x = np.where(x > 7, x - 16, x)
    shift = 0 if zp is None else _repeated(zp, x.ndim, axis, scheme)
    return (x - shift) * _repeated(scale, x.ndim, axis, scheme)


def _nearest_tiny(x: Array, kind: str) -> Array:
    """The bits of the nearest of all numbers there are; of two equally near ones those that are even."""
    bits = np.arange(16 if kind == "nvfp4/16" else 256)
    sizes = _tiny(bits[: len(bits) // 2], kind)
    sizes = sizes[np.isfinite(sizes)]  # they rise with their bits
    after = np.searchsorted(sizes, np.abs(x)).clip(1, len(sizes) - 1)
    low, high = np.abs(x) - sizes[after - 1], sizes[after] - np.abs(x)
    nearest = after - (low < high) - ((low == high) & (after % 2 == 1))
    return nearest + np.signbit(x) * (len(bits) // 2)


@oracle("quantise")
def _quantise(
    x: Array, scale: Array, zp: Array | None = None, *, axis: int | None = None, dtype: str = "i8",
    scheme: str | None = None,
) -> Array:  # fmt: skip
    if scheme in ("fp8e4m3", "fp8e5m2"):
        return _nearest_tiny(x / scale, scheme)
    if scheme == "nvfp4/16":
        step = _repeated(_tiny(scale, "fp8e4m3"), x.ndim, None, scheme) * (1.0 if zp is None else zp)
        nibbles = _nearest_tiny(np.divide(x, step, out=np.zeros(x.shape), where=step != 0), scheme)
        return nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    integers = np.rint(x / _repeated(scale, x.ndim, axis, scheme))
    integers = integers + (0 if zp is None else _repeated(zp, x.ndim, axis, scheme))
    if scheme is None or not scheme.startswith("int4"):
        return saturated(integers, dtype)
    nibbles = np.clip(integers, -8, 7).astype(np.int64) % 16
    return nibbles[..., 0::2] + 16 * nibbles[..., 1::2]


@oracle("quant_scale")
def _quant_scale(x: Array, *, axis: int | None = None, scheme: str | None = None) -> Array:
    if scheme is None:
        rows = x.reshape(1, -1) if axis is None else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
        return (np.abs(rows).max(1) / 127).reshape(() if axis is None else (-1,))
    kind, _, size = scheme.partition("/")
    if not size:
        return np.abs(x).reshape(-1, x.shape[-1]).max(0) / (448 if kind == "fp8e4m3" else 57344)
    parts = [np.abs(x[..., i : i + int(size), :]).max(-2) for i in range(0, x.shape[-2], int(size))]
    return np.stack(parts, axis=-2) / {"int4": 7, "nvfp4": 6}.get(kind, 127)


def _fake_step(x: Array, scale: Array | None, bits: int, axis: int | None) -> Array:
    """A scale for each element of x."""
    if scale is None:
        others = None if axis is None else tuple(a for a in range(x.ndim) if a != axis % x.ndim)
        scale = np.abs(x).max(others) / (2 ** (bits - 1) - 1)
    return np.broadcast_to(_repeated(scale, x.ndim, axis, None), x.shape)


@oracle("quantise_rows")
def _quantise_rows(x: Array) -> tuple[Array, Array, Array]:
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = np.maximum((high - low) / 255, 1e-12)
    return saturated(np.rint((x - low) / scale), "u8"), scale, low


@oracle("round_blocks")
def _round_blocks(x: Array, *, block: int) -> Array:
    parts = x.reshape(-1, block)
    scales = np.array([max(abs(v) for v in part) / 127 for part in parts])[:, None]
    codes = np.rint(np.divide(parts, scales, out=np.zeros_like(parts), where=scales > 0))
    return (codes * scales).reshape(x.shape)


@oracle("fake_quantise")
def _fake_quantise(x: Array, scale: Array | None = None, *, bits: int = 8, axis: int | None = None) -> Array:
    step, top = _fake_step(x, scale, bits, axis), 2 ** (bits - 1) - 1
    return np.clip(np.rint(x / step), -top, top) * step


@oracle("running_scale")
def _running_scale(x: Array, state: Array, *, bits: int = 8, axis: int | None = None, decay: float = 0.99) -> Array:
    steps = _fake_step(x, None, bits, axis)
    now = steps.flat[0] if axis is None else np.moveaxis(steps, axis, 0).reshape(x.shape[axis], -1)[:, 0]
    return np.where(state > 0, decay * state + (1 - decay) * now, now)


@oracle("fake_quantise_grad")
def _fake_quantise_grad(
    x: Array, dy: Array, scale: Array | None = None, *, bits: int = 8, axis: int | None = None, ste: str = "identity"
) -> Array:
    z, top = x / _fake_step(x, scale, bits, axis), 2 ** (bits - 1) - 1
    inside = np.abs(z) <= top * (1 + 1e-12)
    slopes = {"identity": np.ones_like(z), "clipped": inside, "tanh": 1 / np.cosh(z) ** 2,
              "hard_tanh": np.where(inside, 1 - np.abs(z) / top, 0)}  # fmt: skip
    return dy * slopes[ste]


@oracle("fake_quantise_scale_grad")
def _fake_quantise_scale_grad(x: Array, scale: Array, dy: Array, *, bits: int = 8, axis: int | None = None) -> Array:
    z, top = x / _fake_step(x, scale, bits, axis), 2 ** (bits - 1) - 1
    terms = dy * np.where(np.abs(z) <= top, np.rint(z) - z, np.sign(z) * top)
    return terms.sum() if axis is None else np.moveaxis(terms, axis, 0).reshape(x.shape[axis], -1).sum(1)


@oracle("dequant_matmul")
def _dequant_matmul(x: Array, w: Array, scale: Array | None = None, zp: Array | None = None, *, scheme: str) -> Array:
    packed = scheme.startswith("gguf")
    return x @ (_unpacked(w).T.astype(np.float64) if packed else _dequantise(w, scale, zp, scheme=scheme))


def _unpacked(x: Array) -> Array:
    """The reader of the `gguf` package, on the bytes; what it has none for is d times small integers or floats."""
    name = dtype_of(x.dtype).name
    if name.startswith("f8e4m3"):
        numbers = x["codes"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return (numbers * x["d"][..., None]).reshape(*x.shape[:-1], -1)
    if name in ("q8_k", "q8_1", "q1_0", "q2_0"):
        parts = {"q1_0": lambda: np.unpackbits(x["bits"], axis=-1, bitorder="little") * 2.0 - 1,
                 "q2_0": lambda: np.stack([x["pairs"] // 4**i % 4 - 1.0 for i in range(4)], axis=-1)}  # fmt: skip
        numbers = parts.get(name, lambda: x["qs"])().astype(np.float32).reshape(*x.shape, -1)
        return (x["d"].astype(np.float32)[..., None] * numbers).reshape(*x.shape[:-1], -1)
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape[:-1], -1)
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()]))


@oracle("gather")
def _gather(table: Array, indices: Array, *, axis: int = 0) -> Array:
    rows = np.moveaxis(table, axis, 0)[indices]  # the axes of `indices`, then the others of the table
    return np.moveaxis(rows, range(indices.ndim), range(axis % table.ndim, axis % table.ndim + indices.ndim))


@oracle("grouped_matmul")
def _grouped_matmul(x: Array, w: Array, index: Array) -> Array:
    return np.stack([row.astype(np.float64) @ w[at].astype(np.float64) for row, at in zip(x, index, strict=True)])


@oracle("group_rows")
def _group_rows(index: Array, *, groups: int) -> tuple[Array, ...]:
    rows = [i for group in range(groups) for i, at in enumerate(index) if at == group]
    offsets = [sum(at < group for at in index) for group in range(groups + 1)]
    order = np.array(rows, np.int32)
    return order, np.argsort(order).astype(np.int32), np.array(offsets, np.int32)


@oracle("grouped_outer")
def _grouped_outer(x: Array, y: Array, index: Array, *, groups: int) -> Array:
    sums = np.zeros((groups, x.shape[1], y.shape[1]))
    for left, right, at in zip(x.astype(np.float64), y.astype(np.float64), index, strict=True):
        sums[at] += np.outer(left, right)
    return sums


@oracle("scatter_add")
def _scatter_add(x: Array, indices: Array, updates: Array) -> Array:
    result = x.copy()
    for at in np.ndindex(indices.shape):
        result[indices[at]] += updates[at]
    return result


ORACLES |= {
    "reshape": lambda x, *, shape: np.reshape(x, shape),
    "assume_equal": lambda x, *, shape: np.reshape(x, shape),
    "transpose": lambda x, *, axes: np.transpose(x, axes),
    "expand": lambda x, *, shape: np.broadcast_to(x, shape),
}


# -- linear algebra, norms, positions ---------------------------------------------------------------------------------
# -- matrices ---------------------------------------------------------------------------------------------------------
def _for_each_matrix(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of one matrix, for batches of them."""

    @functools.wraps(function)
    def batched(*operands: Array, **attrs: Any) -> Any:
        lead = operands[0].shape[:-2]
        results = [function(*(x[at] for x in operands), **attrs) for at in np.ndindex(*lead)]
        if isinstance(results[0], tuple):
            return tuple(np.stack(r).reshape(*lead, *r[0].shape) for r in zip(*results, strict=True))
        return np.stack(results).reshape(*lead, *results[0].shape)

    return batched


def _positive_sums(vectors: Array) -> Array:
    return np.where(vectors.sum(0) < 0, -1.0, 1.0)


@oracle("cholesky")
@_for_each_matrix
def _cholesky(x: Array) -> Array:
    return scipy.linalg.cholesky(x, lower=True)


@oracle("triangular_solve")
@_for_each_matrix
def _triangular_solve(
    a: Array, b: Array, *, lower: bool = True, transpose: bool = False, unit_diagonal: bool = False
) -> Array:
    return scipy.linalg.solve_triangular(a, b, trans=int(transpose), lower=lower, unit_diagonal=unit_diagonal)


@oracle("lu")
@_for_each_matrix
def _lu(x: Array) -> tuple[Array, ...]:
    lu, pivots = scipy.linalg.lu_factor(x)
    order = np.arange(len(x))
    for row, other in enumerate(pivots):
        order[[row, other]] = order[[other, row]]
    return lu, pivots.astype(np.int64), order


@oracle("qr")
@_for_each_matrix
def _qr(x: Array, *, complete: bool = False) -> tuple[Array, ...]:
    return tuple(scipy.linalg.qr(x, mode="full" if complete else "economic"))


@oracle("eigh")
@_for_each_matrix
def _eigh(x: Array) -> tuple[Array, ...]:
    values, vectors = scipy.linalg.eigh(x, lower=True)
    return values, vectors * _positive_sums(vectors)


@oracle("svd")
@_for_each_matrix
def _svd(x: Array) -> tuple[Array, ...]:
    u, values, vt = scipy.linalg.svd(x, full_matrices=False)
    signs = _positive_sums(vt.T)
    return u * signs, values, vt.T * signs


@oracle("matmul")
def _matmul(a: Array, b: Array) -> Array:
    return np.einsum("...mk,...kn->...mn", a, b)


def _scaled(y: Array, gamma: Array | None, beta: Array | None) -> Array:
    return y * (1.0 if gamma is None else gamma) + (0.0 if beta is None else beta)


@oracle("layer_norm")
def _layer_norm(x: Array, gamma: Array | None = None, beta: Array | None = None, *, eps: float = 1e-5) -> Array:
    count = np.float64(x.shape[-1])
    mean = x.sum(-1, keepdims=True) / count
    variance = ((x - mean) ** 2).sum(-1, keepdims=True) / count
    return _scaled((x - mean) / np.sqrt(variance + eps), gamma, beta)


@oracle("norm_grad")
def _norm_grad(x: Array, dy: Array, gamma: Array | None = None, *, kind: str, eps: float) -> tuple[Array, Array, Array]:
    """Row by row, with the whole matrix of derivatives of the normalised row."""
    n, dx, dgamma = x.shape[-1], np.zeros(x.shape), np.zeros(x.shape[-1])
    for at in np.ndindex(x.shape[:-1]):
        centre = np.eye(n) - (1 / n if kind == "layer" else 0)  # derivative of the row without its mean
        row = centre @ x[at]
        deviation = np.sqrt((row**2).mean() + eps)
        slope = centre / deviation - np.outer(row, row @ centre) / (n * deviation**3)
        dx[at] = (dy[at] * (1 if gamma is None else gamma)) @ slope
        dgamma += dy[at] * row / deviation
    return dx, dgamma, dy.reshape(-1, n).sum(axis=0)


@oracle("rms_norm")
def _rms_norm(x: Array, gamma: Array | None = None, beta: Array | None = None, *, eps: float = 1e-6) -> Array:
    square = (x**2).sum(-1, keepdims=True) / np.float64(x.shape[-1])
    return _scaled(x / np.sqrt(square + eps), gamma, beta)


@oracle("rope")
def _rope(x: Array, cos: Array, sin: Array, positions: Array, *, style: str = "halves") -> Array:
    """Each pair is a complex number, turned by multiplying with cos + i·sin of its position."""
    n = cos.shape[1]
    first, second = (slice(0, n), slice(n, 2 * n)) if style == "halves" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    result = x.copy()
    for batch, seq in np.ndindex(positions.shape):
        turn = cos[positions[batch, seq]] + 1j * sin[positions[batch, seq]]
        rotated = (x[batch, seq, :, first] + 1j * x[batch, seq, :, second]) * turn
        result[batch, seq, :, first], result[batch, seq, :, second] = rotated.real, rotated.imag
    return result


def _each_query(
    q: Array, k: Array, mask: Array | None, mask_kind: str, scale: float | None, softcap: float | None
) -> Iterator[tuple[int, int, Array, Array, Array, Array, Array]]:
    """Batch, query, heads that see the same keys, their key heads, these keys, scores, how they grow with q · k."""
    batch, q_len, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    factor = dim**-0.5 if scale is None else scale
    for b, i in np.ndindex(batch, q_len):
        at = keys - q_len + i  # the position of the query: both sequences end together
        near = _sees(mask_kind.removesuffix("+segments"), at, np.arange(keys))
        if mask is not None and mask_kind.endswith("segments"):
            near &= (mask[b] == mask[b, i]) & (mask[b, i] >= 0)
        if mask is not None and mask_kind == "custom":
            near &= mask[b] >= 0.5
        bias = np.zeros((heads, keys))
        if mask_kind == "bias":
            bias = np.broadcast_to(mask, (batch, heads, q_len, keys))[b, :, i]
        apart = np.isneginf(bias).any()  # a head may not see the keys that the next one sees
        for group in np.arange(heads).reshape((heads, 1) if apart else (1, heads)):
            seen = np.flatnonzero(near & ~np.isneginf(bias[group[0]]))
            own = group * kv_heads // heads
            scores = np.einsum("jhd,hd->hj", k[b][np.ix_(seen, own)], q[b, i, group]) * factor
            slope = np.full(scores.shape, factor)
            if softcap is not None:
                slope = factor / np.cosh(scores / softcap) ** 2
                scores = softcap * np.tanh(scores / softcap)
            yield b, i, group, own, seen, scores + bias[np.ix_(group, seen)], slope


@oracle("attention")
def _attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    mask_kind: str = "none",
    scale: float | None = None,
    softcap: float | None = None,
    num_heads: int | None = None,
    head_dim: int | None = None,
) -> Array:
    """One query at a time: the keys it sees are picked out first, so nothing has to be masked afterwards."""
    return _attention_lse(q, k, v, mask, mask_kind=mask_kind, scale=scale, softcap=softcap)[0]


@oracle("attention_lse")
def _attention_lse(
    q: Array, k: Array, v: Array, mask: Array | None = None, *, mask_kind: str = "none", scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    batch, q_len, heads, _ = q.shape
    result, lse = np.zeros((batch, q_len, heads, v.shape[3])), np.full((batch, heads, q_len), -np.inf)
    for b, i, group, own, seen, scores, _ in _each_query(q, k, mask, mask_kind, scale, softcap):
        if len(seen):
            lse[b, group, i] = scipy.special.logsumexp(scores, axis=1)
            weights = scipy.special.softmax(scores, axis=1)
            result[b, i, group] = np.einsum("hj,jhd->hd", weights, v[b][np.ix_(seen, own)])
    return result, lse


@oracle("attention_grad")
def _attention_grad(
    q: Array, k: Array, v: Array, dy: Array, lse: Array, delta: Array, mask: Array | None = None, *,
    mask_kind: str = "none", scale: float | None = None, softcap: float | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One query at a time: what its weights are, then by the chain rule what each of its keys gets."""
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b, i, group, own, seen, scores, slope in _each_query(q, k, mask, mask_kind, scale, softcap):
        for h, kv, weights, slopes in zip(group, own, np.exp(scores - lse[b, group, i, None]), slope, strict=True):
            inner = weights * (v[b, seen, kv] @ dy[b, i, h] - delta[b, h, i]) * slopes
            dq[b, i, h] = inner @ k[b, seen, kv]
            dk[b, seen, kv] += np.outer(inner, q[b, i, h])
            dv[b, seen, kv] += np.outer(weights, dy[b, i, h])
    return dq, dk, dv


def _sees(kind: str, query: int, keys: Array) -> Array:
    window = re.fullmatch(r"sliding\((\d+)\)", kind)
    if window:
        return (query - int(window[1]) < keys) & (keys <= query)
    if reach := re.fullmatch(r"near\((\d+)\)", kind):
        return abs(keys - query) <= int(reach[1])
    return keys <= query if kind == "causal" else keys >= 0


# -- the KV cache -----------------------------------------------------------------------------------------------------
@oracle("kv_append")
def _kv_append(
    pool: Array, new: Array, positions: Array, table: Array, rows: Array | None = None, *, axes: str = "phsd",
    ring: bool = False,
) -> Array:  # fmt: skip
    """Token by token."""
    result = pool.copy()
    by_slot = result.transpose(tuple(map(axes.index, "pshd")))
    page, capacity = by_slot.shape[1], by_slot.shape[1] * table.shape[1]
    for token in np.ndindex(positions.shape):
        if (p := positions[token]) >= 0:
            block, slot = divmod(p % capacity if ring else p, page)
            by_slot[table[token[0] if rows is None else rows[token], block], slot] = new[token]
    return result


@oracle("cached_attention")
def _cached_attention(
    q: Array, keys: Array, values: Array, positions: Array, table: Array, rows: Array | None = None, *,
    mask_kind: str = "causal", scale: float | None = None, softcap: float | None = None, key_axes: str = "phsd",
    value_axes: str = "phsd", ring: bool = False,
) -> Array:  # fmt: skip
    """Attention of each query by itself, over the keys up to its position; in a ring the old ones are not looked at."""
    keys, values = np.einsum(f"{key_axes}->phsd", keys), np.einsum(f"{value_axes}->phsd", values)
    result, page = np.zeros((*q.shape[:-1], values.shape[3])), values.shape[2]
    for token in np.ndindex(positions.shape):
        past = np.arange(positions[token] + 1)
        if ring:
            past %= page * table.shape[1]
        if len(past):
            pages = table[token[0] if rows is None else rows[token]][past // page]
            k, v = (pool[pages, :, past % page][None] for pool in (keys, values))  # [1, keys, heads, dim]
            query = q[token][None, None]
            result[token] = _attention(query, k, v, mask_kind=mask_kind, scale=scale, softcap=softcap)[0, 0]
    return result


# -- blocks ----------------------------------------------------------------------------------------------------------
@oracle("swiglu_ffn")
def _swiglu_ffn(x: Array, up: Array, gate: Array, down: Array) -> Array:
    return _matmul(ORACLES["silu"](_matmul(x, gate)) * _matmul(x, up), down)


@oracle("residual_rms_norm")
def _residual_rms_norm(x: Array, residual: Array, gamma: Array, beta: Array | None = None, *, eps: float) -> Array:
    return _rms_norm(x + residual, gamma, beta, eps=eps)


@oracle("linear_fused")
def _linear_fused(x: Array, weight: Array, bias: Array, *, activation: str | None = None) -> Array:
    y = _scaled(_matmul(x, weight), None, bias)
    return np.asarray(ORACLES[activation](y)) if activation else y


@oracle("shared_linear_pair")
def _shared_linear_pair(x: Array, first: Array, second: Array) -> tuple[Array, Array]:
    return _matmul(x, first), _matmul(x, second)


@oracle("attention_block")
def _attention_block(
    q: Array, k: Array, v: Array, mask: Array | None = None, *, num_heads: int, head_dim: int, mask_kind: str = "none",
    scale: float | None = None, softcap: float | None = None,
) -> Array:  # fmt: skip
    swap = q.ndim == 4 and q.shape[2] != num_heads
    if swap:
        split = [t.swapaxes(1, 2) for t in (q, k, v)]
    else:
        split = [t.reshape(*t.shape[:2], -1, head_dim) for t in (q, k, v)]
    seen = _attention(*split, mask, mask_kind=mask_kind, scale=scale, softcap=softcap)
    return seen.swapaxes(1, 2) if swap else seen.reshape(q.shape)


@oracle("rope_block")
def _rope_block(
    x: Array, cos: Array, sin: Array, positions: Array | None = None, *, head_dim: int, n_rot: int | None = None
) -> Array:
    half = (head_dim if n_rot is None else n_rot) // 2
    at = np.tile(np.arange(x.shape[1]), (len(x), 1)) if positions is None else positions
    return _rope(x.reshape(*x.shape[:2], -1, head_dim), cos[:, :half], sin[:, :half], at).reshape(x.shape)


@oracle("llama_decoder_block")
def _llama_decoder_block(
    x: Array, input_norm: Array, q: Array, k: Array, v: Array, o: Array, post_norm: Array, gate: Array, up: Array,
    down: Array, cos: Array, sin: Array, input_beta: Array | None = None, post_beta: Array | None = None,
    mask: Array | None = None, *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float,
    mask_kind: str = "causal",
) -> Array:  # fmt: skip
    h = _rms_norm(x, input_norm, input_beta, eps=eps)
    queries, keys = (_rope_block(h @ w, cos, sin, head_dim=head_dim) for w in (q, k))
    seen = _attention_block(queries, keys, h @ v, mask, num_heads=num_heads, head_dim=head_dim, mask_kind=mask_kind)
    x = x + seen @ o
    return x + _swiglu_ffn(_rms_norm(x, post_norm, post_beta, eps=eps), up, gate, down)


@oracle("qwen35_mtp_head")
def _qwen35_mtp_head(
    x: Array, ids: Array, last: Array, embed: Array, hidden_norm: Array, embed_norm: Array, eh_proj: Array,
    input_norm: Array, q: Array, k: Array, v: Array, o: Array, q_norm: Array, k_norm: Array, cos: Array, sin: Array,
    post_norm: Array, gate: Array, up: Array, down: Array, norm: Array, head: Array, *, num_heads: int,
    num_kv_heads: int, head_dim: int, eps: float, n_rot: int | None = None,
) -> Array:  # fmt: skip
    x = np.concatenate([_rms_norm(embed[ids], embed_norm, eps=eps), _rms_norm(x, hidden_norm, eps=eps)], -1) @ eh_proj
    h = _rms_norm(x, input_norm, eps=eps)
    queries, gates = np.split((h @ q).reshape(*x.shape[:2], num_heads, -1), 2, axis=-1)
    keys = _rms_norm((h @ k).reshape(*x.shape[:2], num_kv_heads, head_dim), k_norm, eps=eps)
    queries = _rms_norm(queries, q_norm, eps=eps)
    queries, keys = (_rope_block(t, cos, sin, head_dim=head_dim, n_rot=n_rot) for t in (queries, keys))
    values = (h @ v).reshape(keys.shape)
    seen = _attention(queries, keys, values, mask_kind="causal") * sigmoid(gates)
    x = x + seen.reshape(*x.shape[:2], -1) @ o
    x = x + _swiglu_ffn(_rms_norm(x, post_norm, eps=eps), up, gate, down)
    chosen = np.stack([row[i] for row, i in zip(x, last, strict=True)])
    return _rms_norm(chosen, norm, eps=eps) @ head


import block_oracles  # noqa: E402, F401  registers the blocks of models, which are put together from oracles of ops
