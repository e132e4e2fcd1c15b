"""The vector functions of the CPU backend against NumPy, SciPy, mpmath and ml_dtypes, on all targets that run here."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
import scipy.special  # type: ignore[import-untyped]
from targets import BASELINE, BY_NAME, supported

from rlx.backends.cpu.builder import Builder, Module, Value, vector
from rlx.backends.cpu.math import FUNCTIONS, arithmetic, conversions
from rlx.backends.cpu.math.exponential import exp2
from rlx.target import Target

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()

Array = np.ndarray[Any, Any]
Emit = Callable[..., Value]  # (builder, *operands, target) -> result
NUMPY: dict[str, Any] = {
    "float": np.float32, "double": np.float64, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip
DIGITS = {np.dtype(np.float32): 24, np.dtype(np.float64): 53}
LOWEST_EXPONENT = {np.dtype(np.float32): -149, np.dtype(np.float64): -1074}
LONG = np.longdouble
UNARY = ("exp", "exp2", "log", "tanh", "erf", "sin", "cos", "tan", "atan")
EMIT = FUNCTIONS | {"exp2": exp2}
CIRCULAR = ("sin", "cos", "tan")
SCALARS = ("float", "double")

needs_long_double = pytest.mark.skipif(np.finfo(LONG).nmant < 63, reason="long double is no longer than double here")
on_every_target = pytest.mark.parametrize("target", supported(), ids=lambda t: t.name)


# -- compile and call ---------------------------------------------------------------------------------------------
def module_text(emit: Emit, inputs: tuple[str, ...], output: str, lanes: int, target: Target) -> str:
    module = Module()

    def body(b: Builder, *arguments: Value) -> None:
        *sources, destination, count = arguments

        def step(i: Value) -> None:
            operands = [b.load(vector(lanes, t), b.offset(p, i, t)) for p, t in zip(sources, inputs, strict=True)]
            b.store(emit(b, *operands, target), b.offset(destination, i, output))

        b.loop(0, count, lanes, step)

    pointers = [("ptr", f"source{i}") for i in range(len(inputs))]
    module.define("run", [*pointers, ("ptr", "destination"), ("i64", "count")], body)
    return module.text()


def machine(target: Target) -> llvm.TargetMachine:
    triple = llvm.get_process_triple() if target in supported() else f"{target.arch}-unknown-linux-gnu"
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="small"
    )


class Compiled:
    """A vector function as a function on arrays."""

    def __init__(self, emit: Emit, inputs: tuple[str, ...], output: str, lanes: int, target: Target) -> None:
        module = llvm.parse_assembly(module_text(emit, inputs, output, lanes, target))
        self.engine = llvm.create_mcjit_compiler(module, machine(target))
        self.engine.finalize_object()
        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(inputs) + 1), ctypes.c_int64)
        self.function = signature(self.engine.get_function_address("run"))
        self.inputs, self.output, self.lanes = inputs, output, lanes

    def __call__(self, *arrays: Array) -> Array:
        count = len(arrays[0])
        padded = -(-count // self.lanes) * self.lanes
        sources = [np.zeros(padded, NUMPY[t]) for t in self.inputs]
        for source, array in zip(sources, arrays, strict=True):
            source[:count] = array.view(source.dtype) if array.dtype.itemsize == source.itemsize else array
        result = np.empty(padded, NUMPY[self.output])
        self.function(*(s.ctypes.data for s in sources), result.ctypes.data, padded)
        return result[:count]


@functools.cache
def unary(name: str, scalar: str, lanes: int, target: Target) -> Compiled:
    return Compiled(EMIT[name], (scalar,), scalar, lanes, target)


@functools.cache
def power(scalar: str, lanes: int, target: Target) -> Compiled:
    return Compiled(EMIT["pow"], (scalar, scalar), scalar, lanes, target)


def full(target: Target, scalar: str) -> int:
    return target.lanes(np.dtype(NUMPY[scalar]).itemsize)


def undefined_symbols(elf: bytes) -> list[str]:
    """Names that a little-endian 64-bit ELF object wants from elsewhere."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + size * i) for i in range(count)]
    found = []
    for _, kind, _, _, offset, length, link, _, _, _ in sections:
        if kind == 2:  # SHT_SYMTAB
            names = sections[link][4]
            for at in range(offset, offset + length, 24):
                name, _, _, section = struct.unpack_from("<IBBH", elf, at)
                if section == 0 and name:
                    found.append(elf[names + name : elf.index(0, names + name)].decode())
    return found


# -- errors -------------------------------------------------------------------------------------------------------
def ulps(got: Array, exact: Array) -> Array:
    """How far `got` is from a longer `exact`, in units of the last place of the exact value; equal infinities are 0.

    An infinity where the exact value is finite counts as the power of two just above the largest number.
    """
    digits = DIGITS[got.dtype]
    with np.errstate(all="ignore"):
        finite = np.isfinite(exact)
        _, exponent = np.frexp(np.where(finite & (exact != 0), exact, 1))
        scale = np.maximum(exponent - digits, LOWEST_EXPONENT[got.dtype])
        beyond = np.ldexp(exact.dtype.type(1), 1 + np.finfo(got.dtype).maxexp - 1)
        value = np.where(np.isinf(got) & finite, np.copysign(beyond, got), got.astype(exact.dtype))
        value = np.where((np.abs(exact) >= beyond) & np.isinf(got) & (np.sign(got) == np.sign(exact)), exact, value)
        error = np.ldexp(np.abs(value - exact), -scale)
        same = (value == exact) | (np.isnan(got) & np.isnan(exact))
        return np.where(same, 0, np.where(np.isnan(error), np.inf, error))


def same_bits(a: Array, b: Array) -> bool:
    """Equal bits, except that one NaN is as good as another."""
    integer = f"u{a.dtype.itemsize}"
    return bool(np.all((a.view(integer) == b.view(integer)) | (np.isnan(a) & np.isnan(b))))


# Ulps that the docstrings allow: (with FMA, without).
BOUNDS = {
    "float": {
        "exp": (0.9, 1.2), "exp2": (0.9, 1.15), "log": (1.2, 1.3), "tanh": (1.8, 1.95), "erf": (1.7, 2.2),
        "sin": (1.95, 2.2), "cos": (1.95, 2.2), "pow": (0.57, 0.57), "tan": (0.7, 0.7),
        "atan": (0.55, 0.55),
    },
    "double": {
        "exp": (0.95, 1.2), "exp2": (0.95, 1.25), "log": (0.9, 0.9), "tanh": (1.6, 1.9), "erf": (1.9, 2.3),
        "sin": (1.95, 2.0), "cos": (1.95, 2.0), "pow": (1.0, 1.2), "tan": (0.95, 0.95),
        "atan": (0.75, 0.8),
    },
}  # fmt: skip


def bound(name: str, scalar: str, target: Target) -> float:
    return BOUNDS[scalar][name][0 if target.has_fma else 1]


# -- accuracy -----------------------------------------------------------------------------------------------------
REFERENCE: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "tanh": np.tanh, "erf": scipy.special.erf, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "atan": np.arctan,
}  # fmt: skip
# Where the function is neither trivial nor saturated.
BUSY = {
    "exp": (-105.0, 90.0), "exp2": (-152.0, 130.0), "log": (0.0, 4.0), "tanh": (-10.0, 10.0), "erf": (-4.5, 4.5),
    "sin": (-1e6, 1e6), "cos": (-1e6, 1e6), "tan": (-1e6, 1e6), "atan": (-100.0, 100.0),
}  # fmt: skip
BUSY_DOUBLE = BUSY | {"exp": (-750.0, 715.0), "exp2": (-1080.0, 1030.0), "tanh": (-22.0, 22.0), "erf": (-6.5, 6.5)}


@functools.cache
def float_sweep(name: str) -> tuple[Array, Array]:
    """Two million bit patterns over all exponents and half a million numbers that matter, with exact results."""
    rng = np.random.default_rng(7)
    low, high = BUSY[name]
    patterns = np.linspace(0, 2**32 - 1, 2_000_000).astype(np.uint32) ^ rng.integers(0, 2048, 2_000_000, np.uint32)
    x = np.concatenate([patterns.view(np.float32), rng.uniform(low, high, 500_000).astype(np.float32)])
    if name in CIRCULAR:
        x = np.concatenate([x[~(np.abs(x) > 1e6)], rng.uniform(-50, 50, 500_000).astype(np.float32)])
    with np.errstate(all="ignore"):
        exact: Array = REFERENCE[name](x.astype(np.float64))
    return x, exact


@on_every_target
@pytest.mark.parametrize("name", UNARY)
def test_float_results_are_within_their_bound_over_the_whole_range(name: str, target: Target) -> None:
    x, exact = float_sweep(name)
    got = unary(name, "float", full(target, "float"), target)(x)
    error = ulps(got, exact)
    worst = int(np.argmax(error))
    assert error[worst] <= bound(name, "float", target), (x[worst], got[worst], exact[worst])


@functools.cache
def double_points(name: str, count: int) -> Array:
    """Numbers of every size, numbers that matter and, for the circular functions, neighbours of multiples of pi/2."""
    rng = np.random.default_rng(11)
    low, high = BUSY_DOUBLE[name]
    anything = rng.integers(0, 2**64, count, np.uint64).view(np.float64)
    small = np.exp(rng.uniform(-30, 1, count)) * rng.choice([-1.0, 1.0], count)
    x: Array = np.concatenate([anything, rng.uniform(low, high, count), rng.uniform(-2, 2, count), small])
    if name == "log":
        x = np.abs(np.concatenate([x, 1 + small / 16, rng.uniform(0.7, 1.6, count)]))
    if name in CIRCULAR:
        x = np.concatenate([x[np.abs(x) <= 1e6], rng.integers(-600_000, 600_000, count) * (np.pi / 2)])
    finite: Array = x[np.isfinite(x)]
    return finite


@functools.cache
def long_reference(name: str) -> tuple[Array, Array]:
    x = double_points(name, 60_000)
    with np.errstate(all="ignore"):
        return x, REFERENCE[name](x.astype(LONG))


@needs_long_double
@on_every_target
@pytest.mark.parametrize("name", [n for n in UNARY if n != "erf"])
def test_double_results_are_within_their_bound(name: str, target: Target) -> None:
    x, exact = long_reference(name)
    got = unary(name, "double", full(target, "double"), target)(x)
    error = ulps(got, exact)
    worst = int(np.argmax(error))
    assert error[worst] <= bound(name, "double", target), (x[worst], got[worst], exact[worst])


@functools.cache
def mpmath_reference(name: str) -> tuple[Array, Array]:
    mpmath: Any = pytest.importorskip("mpmath")
    x = double_points(name, 400)
    function = {"exp2": lambda v: mpmath.mpf(2) ** v}.get(name) or getattr(mpmath, name)
    with mpmath.workprec(160):
        beyond = mpmath.mpf(10) ** 400  # for a double; a long double goes further
        exact = [function(mpmath.mpf(float(v))) if name != "log" or v > 0 else mpmath.nan for v in x]
        within = [min(e, beyond) if abs(e) * beyond > 1 or e != e else 0 for e in exact]
        return x, np.array([LONG(mpmath.nstr(e, 30)) for e in within])


@needs_long_double
@on_every_target
@pytest.mark.parametrize("name", UNARY)
def test_double_results_agree_with_mpmath(name: str, target: Target) -> None:
    x, exact = mpmath_reference(name)
    got = unary(name, "double", full(target, "double"), target)(x)
    error = ulps(got, exact)
    worst = int(np.argmax(error))
    assert error[worst] <= bound(name, "double", target), (x[worst], got[worst], exact[worst])


@needs_long_double
@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
def test_no_sine_exceeds_1_and_poles_are_met(scalar: str, target: Target) -> None:
    crest = (np.arange(1, 200_000) * (np.pi / 2)).astype(NUMPY[scalar])
    for name in ("sin", "cos"):
        assert np.abs(unary(name, scalar, full(target, scalar), target)(crest)).max() == 1
    tangents = unary("tan", scalar, full(target, scalar), target)(crest)
    assert ulps(tangents, np.tan(crest.astype(LONG))).max() <= bound("tan", scalar, target)


# -- large angles -------------------------------------------------------------------------------------------------
PI_BITS = 1300


@functools.cache
def pi() -> int:
    """π·2^PI_BITS, by Euler's formula: π/4 = arctan(1/2) + arctan(1/3)."""

    def arctan_of_inverse(x: int) -> Fraction:
        total, term, n = 0, (1 << PI_BITS + 64) // x, 1
        while term:
            total += term // n if n % 4 == 1 else -(term // n)
            term, n = term // (x * x), n + 2
        return Fraction(total, 1 << 64)

    return int(4 * (arctan_of_inverse(2) + arctan_of_inverse(3)))


def long_from(n: int) -> Any:
    """An integer of any size, with the 64 bits that a long double has."""
    shift = max(0, abs(n).bit_length() - 64)
    high, low = divmod(abs(n) >> shift, 1 << 32)
    return np.copysign(np.ldexp(LONG(high) * LONG(2**32) + LONG(low), shift), n)


def of_angle(name: str, x: float) -> Any:
    """The sine, cosine or tangent of any double: multiples of π/2 are taken off in integers."""
    numerator, denominator = x.as_integer_ratio()
    scaled, quarter = (numerator << PI_BITS) // denominator, pi() // 2
    n = (2 * scaled + quarter) // (2 * quarter)
    r = np.ldexp(long_from(scaled - n * quarter), -PI_BITS)
    if name == "tan":
        return np.tan(r) if n % 2 == 0 else -1 / np.tan(r)
    n += name == "cos"
    return (np.sin(r), np.cos(r), -np.sin(r), -np.cos(r))[n % 4]


@functools.cache
def large_angles(scalar: str) -> Array:
    """Angles of all exponents from 10^6, both ends, and some of the nearest to multiples of π/2 that there are."""
    kind = np.finfo(NUMPY[scalar])
    rng = np.random.default_rng(11)
    exponents = rng.uniform(20, kind.maxexp, 1500)
    with np.errstate(over="ignore"):
        x = np.ldexp(rng.uniform(0.5, 1, 1500), exponents.astype(int)).astype(NUMPY[scalar])
    near = [(16367173, 72), (13195835, 5)] if scalar == "float" else [(6381956970095103, 797), (5319372648326541, 255)]
    edges = [1e8, 1e9, *np.nextafter(NUMPY[scalar]([1e8, 1e9]), kind.max), kind.max]
    x = np.concatenate([x[np.isfinite(x)], edges, [np.ldexp(float(m), e) for m, e in near]]).astype(NUMPY[scalar])
    return np.concatenate([x, -x])


@needs_long_double
@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("name", CIRCULAR)
def test_angles_of_any_size_are_reduced_exactly(name: str, scalar: str, target: Target) -> None:
    x = large_angles(scalar)
    exact = np.array([of_angle(name, float(v)) for v in x])
    function = unary(name, scalar, full(target, scalar), target)
    error = ulps(function(x), exact)
    worst = int(np.argmax(error))
    assert error[worst] <= bound(name, scalar, target), (x[worst], exact[worst])
    assert same_bits(unary(name, scalar, 1, target)(x), function(x))


@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("name", CIRCULAR)
def test_large_angles_do_not_change_their_neighbours(name: str, scalar: str, target: Target) -> None:
    ordinary = np.random.default_rng(2).uniform(-1e4, 1e4, 256).astype(NUMPY[scalar])
    mixed = ordinary.copy()
    mixed[::3] = 1e30
    mixed[1::30], mixed[4::30], mixed[7::30] = INF, -INF, NAN
    function = unary(name, scalar, full(target, scalar), target)
    found = function(mixed)
    plain = mixed == ordinary
    assert same_bits(found[plain], function(ordinary)[plain])
    assert np.isnan(found[~np.isfinite(mixed)]).all() and np.isfinite(found[np.isfinite(mixed)]).all()


# -- special values -----------------------------------------------------------------------------------------------
INF, NAN = np.inf, np.nan
SPECIAL: dict[str, list[tuple[float, float]]] = {
    "exp": [(0.0, 1), (-0.0, 1), (INF, INF), (-INF, 0.0), (NAN, NAN), (-1e30, 0.0), (1e30, INF), (1e-45, 1)],
    "exp2": [(0.0, 1), (-0.0, 1), (INF, INF), (-INF, 0.0), (NAN, NAN), (10, 1024), (-3, 0.125), (1e30, INF)],
    "log": [(0.0, -INF), (-0.0, -INF), (1, 0.0), (INF, INF), (-1, NAN), (-INF, NAN), (NAN, NAN), (-1e-45, NAN)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (INF, 1), (-INF, -1), (NAN, NAN), (1e30, 1), (-1e30, -1), (1e-45, 1e-45)],
    "erf": [(0.0, 0.0), (-0.0, -0.0), (INF, 1), (-INF, -1), (NAN, NAN), (1e30, 1), (-1e30, -1)],
    "sin": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (1e-45, 1e-45), (-1e-30, -1e-30)],
    "cos": [(0.0, 1), (-0.0, 1), (INF, NAN), (-INF, NAN), (NAN, NAN), (1e-45, 1)],
    "tan": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (1e-45, 1e-45), (-1e-30, -1e-30)],
    "atan": [
        (0.0, 0.0),
        (-0.0, -0.0),
        (INF, np.pi / 2),
        (-INF, -np.pi / 2),
        (NAN, NAN),
        (1e-45, 1e-45),
        (1, np.pi / 4),
        (-1, -np.pi / 4),
        (1e38, np.pi / 2),
    ],
}


@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("name", UNARY)
def test_special_values_are_exact(name: str, scalar: str, target: Target) -> None:
    x, want = np.array(SPECIAL[name], NUMPY[scalar]).T.copy()
    for lanes in (1, full(target, scalar)):
        got = unary(name, scalar, lanes, target)(x)
        assert same_bits(got, want), (x, got, want)


@on_every_target
def test_gelu_is_near_everywhere_and_exact_where_it_is_trivial(target: Target) -> None:
    """Near 0 and above it counts in ulps; below, where the result falls to 0, in absolute terms."""
    rng = np.random.default_rng(7)
    small = 10 ** rng.uniform(-37, 0.8, 200_000)
    x = np.concatenate([np.linspace(-9, 9, 300_001), small, -small]).astype(np.float32)
    exact = x.astype(np.float64) * scipy.special.ndtr(x.astype(np.float64))
    by_table = "+avx512f" in target.features
    for lanes in (1, 3, full(target, "float"), 32):
        got = unary("gelu", "float", lanes, target)(x)
        assert ulps(got, exact)[x > -1].max() < (2.8 if by_table else 3.2)
        assert np.abs(got - exact)[x < 0].max() < (3e-8 if by_table else 2.5e-7)
        assert same_bits(got, unary("gelu", "float", 1, target)(x))
    special = np.array([0.0, np.inf, np.nan, 1e30, -1e30, -6.0], np.float32)
    want = np.array([0.0, np.inf, np.nan, 1e30, 0.0, 0.0], np.float32)
    np.testing.assert_allclose(unary("gelu", "float", full(target, "float"), target)(special), want, atol=1e-8)
    double = np.linspace(-6, 6, 5001)
    error = unary("gelu", "double", full(target, "double"), target)(double) - double * scipy.special.ndtr(double)
    assert np.abs(error).max() < 1e-15


@on_every_target
def test_results_underflow_gradually_and_overflow_to_infinity(target: Target) -> None:
    whole = np.arange(-1080, 1030, dtype=np.float64)
    with np.errstate(all="ignore"):
        double = unary("exp2", "double", full(target, "double"), target)(whole)
        assert same_bits(double, np.exp2(whole))
        single = unary("exp2", "float", full(target, "float"), target)(whole.astype(np.float32))
        assert same_bits(single, np.exp2(whole).astype(np.float32))


@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("name", UNARY)
def test_a_lane_has_the_same_bits_at_every_width(name: str, scalar: str, target: Target) -> None:
    source = float_sweep(name)[0][::25] if scalar == "float" else double_points(name, 20_000)
    x = np.concatenate([source, np.array(SPECIAL[name])[:, 0].astype(source.dtype)])
    alone = unary(name, scalar, 1, target)(x)
    for lanes in (2, 3, 4, 8, 16, 32):
        assert same_bits(unary(name, scalar, lanes, target)(x), alone), lanes


# -- powers -------------------------------------------------------------------------------------------------------
POWER_SPECIAL = [
    0.0, 1, 0.5, 2, 2.5, 3, 7, 1 / 3, INF, 1e-40, 1e10, 3e38, 1e-45, 0.9999999, 1.0000001, 16777215, 16777216,
    8388607.5, 4503599627370497.0, 4503599627370495.5, 9007199254740991.0, 9007199254740992.0, 1e300, 5e-324,
]  # fmt: skip


@functools.cache
def power_points(scalar: str) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(13)
    count = 200_000 if scalar == "float" else 60_000
    span = 88 if scalar == "float" else 709
    anything = np.exp(rng.uniform(-span, span, count))
    near_one = 1 + rng.uniform(-0.5, 1, count) ** 3
    results = rng.uniform(-span - 20, span + 5, (2, count))
    with np.errstate(all="ignore"):
        x = [anything, near_one, rng.uniform(-10, 10, count), anything]
        y = [results[0] / np.log(anything), results[1] / np.log(near_one), rng.integers(-30, 30, count)]
        y.append(rng.choice([0.5, 2, 3, -1, -0.5, 1 / 3, 1.5], count))
        pair = np.concatenate(x).astype(NUMPY[scalar]), np.concatenate(y).astype(NUMPY[scalar])
        longer = np.float64 if scalar == "float" else LONG
        return *pair, np.power(pair[0].astype(longer), pair[1].astype(longer))


@needs_long_double
@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
def test_powers_are_within_their_bound(scalar: str, target: Target) -> None:
    x, y, exact = power_points(scalar)
    got = power(scalar, full(target, scalar), target)(x, y)
    error = ulps(got, exact)
    worst = int(np.argmax(error))
    assert error[worst] <= bound("pow", scalar, target), (x[worst], y[worst], got[worst], exact[worst])
    some = slice(0, None, 20)
    assert same_bits(power(scalar, 1, target)(x[some], y[some]), got[some])


@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
def test_powers_of_special_values_follow_numpy(scalar: str, target: Target) -> None:
    with np.errstate(all="ignore"):
        values = np.array([*POWER_SPECIAL, *(-v for v in POWER_SPECIAL), NAN]).astype(NUMPY[scalar])
        x, y = (a.ravel() for a in np.meshgrid(values, values))
        want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype)
    got = power(scalar, full(target, scalar), target)(x, y)
    assert ulps(got, want.astype(np.float64)).max() <= 1
    assert np.array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])
    assert np.all(got[(x == 1) | (y == 0)] == 1)


# -- rounding, extremes, FMA --------------------------------------------------------------------------------------
@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
def test_round_even_is_rint_for_every_number(scalar: str, target: Target) -> None:
    def emit(b: Builder, x: Value, _: Target) -> Value:
        return arithmetic.round_even(b, x)

    dtype = NUMPY[scalar]
    halves = np.arange(-5000, 5000, dtype=dtype) / 2
    digits = DIGITS[np.dtype(dtype)]
    edges = np.array([2.0 ** (digits - k) + d for k in (0, 1, 2, 3) for d in (-1, -0.5, 0, 0.5, 1, 1.5)], dtype)
    special = np.array([0.0, -0.0, INF, -INF, NAN, 1e30, -0.3, 0.49999997, np.finfo(dtype).tiny], dtype)
    x = np.concatenate([halves, edges, -edges, special])
    assert same_bits(Compiled(emit, (scalar,), scalar, full(target, scalar), target)(x), np.rint(x))


@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
def test_max_and_min_propagate_nan(scalar: str, target: Target) -> None:
    values = np.array([0.0, 1, -1, INF, -INF, NAN, 3.5, np.finfo(NUMPY[scalar]).tiny], NUMPY[scalar])
    x, y = (a.ravel() for a in np.meshgrid(values, values))
    for emit, reference in ((arithmetic.max, np.maximum), (arithmetic.min, np.minimum)):

        def without_target(b: Builder, p: Value, q: Value, _: Target, emit: Emit = emit) -> Value:
            return emit(b, p, q)

        got = Compiled(without_target, (scalar, scalar), scalar, full(target, scalar), target)(x, y)
        assert np.array_equal(got, reference(x, y), equal_nan=True)


@on_every_target
def test_fma_rounds_once_where_the_target_has_it(target: Target) -> None:
    rng = np.random.default_rng(17)
    x, y, z = rng.standard_normal((3, 10_000)).astype(np.float32)
    got = Compiled(arithmetic.fma, ("float",) * 3, "float", full(target, "float"), target)(x, y, z)
    exact = x.astype(LONG) * y.astype(LONG) + z.astype(LONG)
    assert np.array_equal(got, exact.astype(np.float32) if target.has_fma else x * y + z)


# -- narrow floats ------------------------------------------------------------------------------------------------
PATTERNS = np.arange(65536, dtype=np.uint16)
NARROW: dict[str, Any] = {"half": np.dtype(np.float16), "bfloat": np.dtype(ml_dtypes.bfloat16)}


def hard_to_round(dtype: Any) -> Array:
    """Every number of a narrow type as f32, every midpoint of two neighbours, and the neighbours of all those."""
    with np.errstate(all="ignore"):
        values = PATTERNS.view(dtype).astype(np.float32)
        upper = (PATTERNS + np.uint16(1)).view(dtype).astype(np.float32)
        middle = (values.astype(np.float64) / 2 + upper.astype(np.float64) / 2).astype(np.float32)
        points = np.concatenate([values, middle])
        random = np.random.default_rng(19).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
        neighbours = [np.nextafter(points, np.float32(INF)), np.nextafter(points, np.float32(-INF))]
        return np.concatenate([points, *neighbours, random])


def check_patterns(got: Array, want: Array, dtype: Any) -> None:
    """Equal bits; NaN only has to be NaN, of the same sign."""
    got, want = got.view(np.uint16), want.view(np.uint16)
    nan = np.isnan(want.view(dtype).astype(np.float32))
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan(got[nan].view(dtype).astype(np.float32)).all()
    assert np.array_equal(got[nan] >> 15, want[nan] >> 15)


@on_every_target
@pytest.mark.parametrize("name", NARROW)
def test_all_narrow_floats_widen_exactly(name: str, target: Target) -> None:
    want = PATTERNS.view(NARROW[name]).astype(np.float32)
    for lanes in (1, full(target, "float"), 16):
        got = Compiled(getattr(conversions, f"{name}_to_float"), ("i16",), "float", lanes, target)(PATTERNS)
        assert same_bits(got, want)


@on_every_target
@pytest.mark.parametrize("name", NARROW)
def test_floats_narrow_to_the_nearest_and_ties_to_even(name: str, target: Target) -> None:
    x = hard_to_round(NARROW[name])
    with np.errstate(all="ignore"):
        want = x.astype(NARROW[name])
    for lanes in (1, full(target, "float"), 16):
        got = Compiled(getattr(conversions, f"float_to_{name}"), ("float",), "i16", lanes, target)(x)
        check_patterns(got, want, NARROW[name])


@on_every_target
@pytest.mark.parametrize("name", NARROW)
def test_doubles_narrow_with_a_single_rounding(name: str, target: Target) -> None:
    dtype = NARROW[name]
    points = hard_to_round(dtype)
    points = points[np.isfinite(points)][::3].astype(np.float64)
    # Through float these would be rounded to the midpoint first, and then to even.
    x = np.concatenate([points, points * (1 + 2.0**-40), points * (1 - 2.0**-40), [INF, -INF, NAN, 1e300, -1e-300]])
    got = Compiled(getattr(conversions, f"float_to_{name}"), ("double",), "i16", full(target, "double"), target)(x)
    with np.errstate(all="ignore"):
        check_patterns(got, nearest_narrow(x, dtype), dtype)


def nearest_narrow(x: Array, dtype: Any) -> Array:
    """Doubles rounded once: ml_dtypes goes through float, so its answer is corrected by the true distances."""
    near = x.astype(dtype).view(np.uint16)
    infinity = np.array([INF]).astype(dtype).view(np.uint16)
    largest, second = (float((infinity - np.uint16(k)).view(dtype)[0]) for k in (1, 2))
    best, best_distance = near, np.full(len(x), INF)
    for offset in (0, 1, 65535):
        candidate = near + np.uint16(offset)
        value = candidate.view(dtype).astype(np.float64)
        value = np.where(np.isinf(value), np.copysign(2 * largest - second, value), value)
        comparable = (np.signbit(value) == np.signbit(x)) & ~np.isnan(value)
        distance = np.where(comparable, np.abs(value - x), INF)
        better = (distance < best_distance) | ((distance == best_distance) & (candidate % 2 == 0) & (best % 2 == 1))
        best = np.where(better & np.isfinite(x), candidate, best)
        best_distance = np.where(better, distance, best_distance)
    return best


# -- integers -----------------------------------------------------------------------------------------------------
@on_every_target
@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("signed", (True, False))
@pytest.mark.parametrize("integer", ("i8", "i16", "i32", "i64"))
def test_floats_become_integers_by_truncation_and_saturation(
    integer: str, signed: bool, scalar: str, target: Target
) -> None:
    def emit(b: Builder, x: Value, t: Target) -> Value:
        return conversions.float_to_int(b, x, integer, t, signed=signed)

    width = int(integer[1:])
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if signed else (0, 2**width - 1)
    rng = np.random.default_rng(23)
    edges = np.array([low, high, low - 1, high + 1, low - 0.5, high + 0.5, 0.0, -0.0, 0.99, -0.99, INF, -INF, NAN])
    sizes = np.exp(rng.uniform(-3, 50, 3000)) * rng.choice([-1, 1], 3000)
    x = np.concatenate([edges, sizes, rng.uniform(low, high, 3000)]).astype(NUMPY[scalar])
    x = np.concatenate([x, np.nextafter(x, NUMPY[scalar](INF)), np.nextafter(x, NUMPY[scalar](-INF))])
    clipped = np.clip(np.nan_to_num(x.astype(LONG), nan=0, posinf=2.0**70, neginf=-(2.0**70)), low, high)
    want = [int(v) for v in clipped]
    for lanes in (1, full(target, scalar)):
        got = Compiled(emit, (scalar,), integer, lanes, target)(x)
        assert [int(g) % 2**width for g in got] == [w % 2**width for w in want]


# -- no calls -----------------------------------------------------------------------------------------------------
def every_function() -> list[tuple[str, Emit, tuple[str, ...], str]]:
    def lifted(function: Emit) -> Emit:
        return lambda b, *operands: function(b, *operands[:-1])

    def to_int(integer: str, signed: bool) -> Emit:
        return lambda b, x, t: conversions.float_to_int(b, x, integer, t, signed=signed)

    rows: list[tuple[str, Emit, tuple[str, ...], str]] = []
    for scalar in SCALARS:
        rows += [(name, EMIT[name], (scalar,), scalar) for name in UNARY]
        rows += [("pow", EMIT["pow"], (scalar, scalar), scalar), ("fma", arithmetic.fma, (scalar,) * 3, scalar)]
        rows += [(n, lifted(getattr(arithmetic, n)), (scalar, scalar), scalar) for n in ("max", "min")]
        rows.append(("round_even", lifted(arithmetic.round_even), (scalar,), scalar))
        rows += [(f"float_to_{n}", getattr(conversions, f"float_to_{n}"), (scalar,), "i16") for n in NARROW]
        rows += [(f"to {i}", to_int(i, s), (scalar,), i) for i in ("i8", "i16", "i32", "i64") for s in (True, False)]
    rows += [(f"{n}_to_float", getattr(conversions, f"{n}_to_float"), ("i16",), "float") for n in NARROW]
    return rows


@pytest.mark.parametrize("target", BY_NAME.values(), ids=lambda t: t.name)
def test_nothing_becomes_a_call_on_any_target(target: Target) -> None:
    for name, emit, inputs, output in every_function():
        for lanes in (1, target.lanes(4), 16):
            module = llvm.parse_assembly(module_text(emit, inputs, output, lanes, target))
            module.triple = f"{target.arch}-unknown-linux-gnu"
            assert undefined_symbols(machine(target).emit_object(module)) == [], (name, inputs, lanes)


def test_the_symbol_reader_sees_a_call() -> None:
    text = module_text(lambda b, x, _: b.intrinsic("sin", x), ("float",), "float", 1, BASELINE)
    module = llvm.parse_assembly(text)
    module.triple = "x86_64-unknown-linux-gnu"
    machine_ = llvm.Target.from_triple(module.triple).create_target_machine(cpu="x86-64", opt=3)
    assert undefined_symbols(machine_.emit_object(module)) == ["sinf"]
