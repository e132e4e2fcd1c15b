"""NumPy's names under a trace: values, derivatives and vmap against NumPy; what is absent is named in full."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy_checks import check, close, leaves

import rlx
import rlx.numpy as rnp
from rlx.errors import GraphError, RlxError, ShapeError
from rlx.functional import dispatch

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)
X, Y = RNG.uniform(-2, 2, (2, 3, 4))
UNIT = RNG.uniform(-0.9, 0.9, (3, 4))
ABOVE = RNG.uniform(1.1, 3.0, (3, 4))
V, W = RNG.standard_normal(7), RNG.standard_normal(4)
SORTED = np.sort(RNG.uniform(-3, 3, 7))
CUBE = RNG.standard_normal((2, 3, 4))
POINTS = RNG.standard_normal((5, 3))
INTEGERS = RNG.integers(0, 5, (3, 4)).astype(np.int32)
HOLES = X.copy()
HOLES[0, 1] = HOLES[2, 3] = np.nan

# Smooth functions: values, JVP, VJP and vmap. NumPy's own function is called with traced arrays.
SMOOTH: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
    **{name: (getattr(np, name), (UNIT,)) for name in ("arcsin", "arccos", "arctanh")},
    **{name: (getattr(np, name), (X,)) for name in (
        "sinh", "cosh", "arcsinh", "exp2", "cbrt", "deg2rad", "rad2deg", "radians", "degrees", "sinc", "positive",
        "fabs", "absolute", "diag", "diagonal", "trace", "diff", "ediff1d", "gradient", "trapezoid", "median", "ptp",
        "cov", "corrcoef", "cumprod", "ravel", "flipud", "fliplr", "rot90", "atleast_3d", "copy", "nansum", "nanprod",
        "nanmean", "nanstd", "nanvar", "nanmedian", "nancumsum", "nancumprod", "nan_to_num",
        "unstack", "matrix_transpose", "std", "var", "amax", "amin")},
    **{name: (getattr(np, name), (ABOVE,)) for name in ("arccosh", "log2", "log10", "log1p", "expm1", "reciprocal")},
    **{name: (getattr(np, name), (X, Y)) for name in (
        "arctan2", "hypot", "logaddexp2", "copysign", "fmod", "remainder", "divmod", "fmax", "fmin", "inner", "vdot",
        "kron", "vecdot", "append", "true_divide")},
    "hstack": (lambda a, b: np.hstack([a, b]), (X, Y)), "vstack": (lambda a, b: np.vstack([a, b]), (X, W)),
    "dstack": (lambda a, b: np.dstack([a, b]), (X, Y)), "column_stack": (lambda a: np.column_stack([a, a]), (W,)),
    "block": (lambda a, b: np.block([[a, b], [b, a]]), (X, Y)), "concat": (lambda a, b: np.concat([a, b]), (X, Y)),
    "stack": (lambda a, b: np.stack([a, b], -1), (X, Y)),
    "modf": (np.modf, (X,)), "float_power": (np.float_power, (ABOVE, Y)), "pow": (np.pow, (ABOVE, Y)),
    "diag of a vector": (lambda v: np.diag(v, -2), (W,)), "diagflat": (lambda v: np.diagflat(v, 1), (W,)),
    "diagonal of a batch": (lambda x: np.diagonal(x, -1, 1, 2), (CUBE,)),
    "trace of a batch": (lambda x: np.trace(x, 1, 0, 2), (CUBE,)),
    "diff, twice": (lambda x: np.diff(x, 2, 0), (CUBE,)),
    "diff with ends": (lambda x: np.diff(x, prepend=1.0, append=x[:, :1]), (X,)),
    "array_split": (lambda v: np.array_split(v, 3), (V,)), "hsplit": (lambda x: np.hsplit(x, 2), (X,)),
    "split at indices": (lambda v: np.split(v, [2, 5]), (V,)), "meshgrid": (np.meshgrid, (V, W)),
    "meshgrid by index": (lambda v, w: np.meshgrid(v, w, indexing="ij"), (V, W)),
    "cross": (np.cross, (POINTS, POINTS[::-1] + 1)), "convolve": (np.convolve, (V, W)),
    "convolve, same": (lambda v, w: np.convolve(v, w, "same"), (V, W)),
    "convolve, valid": (lambda v, w: np.convolve(w, v, "valid"), (V, W)),
    "correlate": (lambda v, w: np.correlate(v, w, "full"), (V, W)),
    "interp": (np.interp, (UNIT, SORTED, V)),
    "quantile": (lambda x: np.quantile(x, [0.1, 0.6], axis=1), (X,)),
    "percentile": (lambda x: np.percentile(x, 30.0, axis=(0, 2), keepdims=True), (CUBE,)),
    "median of rows": (lambda x: np.median(x, 1), (X,)),
    "average": (lambda x, w: np.average(x, 1, w), (X, W**2 + 1)),
    "average of squares": (lambda x, w: np.average(x, weights=w, returned=True), (X, Y**2)),
    "std, unbiased": (lambda x: np.std(x, 1, ddof=1), (X,)), "polyval": (np.polyval, (W, X)),
    "polyder": (np.polyder, (W,)), "polyint": (np.polyint, (W,)), "vander": (lambda v: np.vander(v, 3), (W,)),
    "trapezoid at points": (lambda x, v: np.trapezoid(x, v), (X, W)),
    "gradient at points": (lambda x, v: np.gradient(x, v, axis=1), (X, np.sort(W))),
    "piecewise": (lambda x: np.piecewise(x, [x < 0, x > 1], [np.sin, lambda x: x * x, 3.0]), (X,)),
    "select": (lambda x, y: np.select([x > 1, x > 0], [y, 2 * x], -1.0), (X, Y)),
    "tile": (lambda x: np.tile(x, (2, 1, 2)), (X,)), "repeat": (lambda x: np.repeat(x, 2), (X,)),
    "roll": (lambda x: np.roll(x, (1, -2), (0, 1)), (X,)), "roll all": (lambda x: np.roll(x, 3), (X,)),
    "pad, reflect": (lambda x: np.pad(x, ((1, 2), (0, 3)), "reflect"), (X,)),
    "pad, edge": (lambda x: np.pad(x, 1, "edge"), (X,)), "pad, wrap": (lambda v: np.pad(v, (2, 3), "wrap"), (V,)),
    "moveaxis": (lambda x: np.moveaxis(x, (0, 1), (-1, 0)), (CUBE,)),
    "rollaxis": (lambda x: np.rollaxis(x, 2), (CUBE,)),
    "broadcast_arrays": (lambda x, w: np.broadcast_arrays(x, w), (X, W)),
    "linspace": (lambda x: np.linspace(x[0, 0], x[1, 1], 5), (X,)), "vsplit": (lambda x: np.vsplit(x, 3), (X,)),
    "full_like": (lambda x: np.full_like(x, 2.5), (X,)),
    "add.reduce": (np.add.reduce, (X,)), "multiply.reduce": (lambda x: np.multiply.reduce(x, axis=1), (X,)),
    "maximum.reduce": (lambda x: np.maximum.reduce(x, axis=(0, 1)), (CUBE,)),
    "logaddexp.reduce": (np.logaddexp.reduce, (X,)), "add.accumulate": (np.add.accumulate, (X,)),
    "multiply.accumulate": (lambda x: np.multiply.accumulate(x, axis=1), (X,)),
    "maximum.accumulate": (lambda x: np.maximum.accumulate(x, axis=1), (X,)),
    "minimum.accumulate": (np.minimum.accumulate, (V,)),
    "multiply.outer": (np.multiply.outer, (X, V)), "arctan2.outer": (np.arctan2.outer, (W, V)),
    "sum of a part": (lambda x: np.sum(x, 0, where=np.array([True, False, True, True])), (X,)),
    "max of a part": (lambda x: np.max(x, 1, where=X > 0, initial=-1.0), (X,)),
    "mean of a part": (lambda x: np.mean(x, where=X > 0), (X,)),
}  # fmt: skip

# Steps, counts and positions: values and vmap.
STEPS: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
    **{name: (getattr(np, name), (3 * X,)) for name in ("trunc", "fix", "rint", "signbit", "floor", "ceil")},
    **{name: (functools.partial(getattr(np, name), axis=1), (HOLES,)) for name in (
        "nansum", "nanprod", "nanmean", "nanvar", "nanstd", "nanmax", "nanmin", "nanargmax", "nanargmin", "nanmedian",
        "nancumsum", "nancumprod")},
    "nanquantile": (lambda x: np.nanquantile(x, [0.2, 0.9], axis=0), (HOLES,)),
    "nanpercentile": (lambda x: np.nanpercentile(x, 40.0), (HOLES,)), "median with NaN": (np.median, (HOLES,)),
    "nan_to_num": (lambda x: np.nan_to_num(x, nan=7.0), (HOLES,)), "fmax with NaN": (np.fmax, (HOLES, Y)),
    "heaviside": (lambda x: np.heaviside(np.round(x), 0.5), (X,)),
    "logical_xor": (lambda x: np.logical_xor(x > 0, x > 1), (X,)),
    "isclose": (lambda x, y: np.isclose(x, y, rtol=0.5), (X, Y)),
    "allclose": (lambda x: np.allclose(x, x + 1e-9), (X,)),
    "array_equal": (np.array_equal, (X, X)), "array_equal of other shapes": (lambda x: np.array_equal(x, x[0]), (X,)),
    "count_nonzero": (lambda x: np.count_nonzero(x > 0, 1), (X,)),
    "searchsorted": (np.searchsorted, (SORTED, X)),
    "searchsorted, right": (lambda v, x: np.searchsorted(v, x, "right"), (SORTED, SORTED[::2])),
    "digitize": (np.digitize, (X, SORTED)), "histogram": (lambda x: np.histogram(x, 5, (-2.0, 2.0)), (X,)),
    "histogram of densities": (lambda x: np.histogram(x, SORTED, density=True), (X,)),
    "argmax": (lambda x: np.argmax(x, 1), (X,)), "isin": (lambda x: np.isin(np.round(x), [0.0, 1.0]), (X,)),
    "ldexp": (lambda x: np.ldexp(x, INTEGERS), (X,)),
    "shape": (np.shape, (X,)), "ndim": (np.ndim, (X,)), "size": (np.size, (X,)),
    "logical_and.reduce": (lambda x: np.logical_and.reduce(x > -1), (X,)),
    "methods": (lambda x: (x.cumprod(1), x.diagonal(), x.copy()), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_values_derivatives_and_vmap_are_those_of_numpy(name: str) -> None:
    function, operands = SMOOTH[name]
    check(function, function, *operands, relative=2e-9)


@pytest.mark.parametrize("name", STEPS)
def test_values_and_vmap_are_those_of_numpy(name: str) -> None:
    function, operands = STEPS[name]
    batched = name not in ("shape", "ndim", "size", "array_equal of other shapes", "histogram of densities")
    check(function, function, *operands, smooth=False, batched=batched)


def test_derivatives_at_the_seams_of_formulas() -> None:
    """Where a formula changes branches or would divide by zero."""
    slopes = {"arcsinh": 1.0, "sinh": 1.0, "sinc": 0.0, "arctanh": 1.0, "arcsin": 1.0, "expm1": 1.0, "log1p": 1.0}
    for name, slope in slopes.items():
        assert rlx.grad(getattr(rnp, name))(np.float64(0)) == pytest.approx(slope, abs=1e-12), name
    assert [float(d) for d in rlx.grad(rnp.hypot, argnums=(0, 1))(0.0, 0.0)] == [0, 0]
    assert rlx.grad(rnp.arctan2)(np.float64(0), np.float64(2)) == pytest.approx(0.5)


def test_elementary_functions_are_accurate_over_their_domains() -> None:
    tiny, huge = np.logspace(-300, -1, 40), np.logspace(1, 300, 40)
    signed = np.concatenate([tiny, huge, -tiny, -huge])
    for name in ("arcsinh", "cbrt", "arctan"):
        close(getattr(rnp, name)(signed), getattr(np, name)(signed), name, 1e-14, 0)
    inside = np.concatenate([tiny, -tiny, [0.999999, -1.0, 1.0]])
    for name in ("arcsin", "arccos", "arctanh"):
        with np.errstate(divide="ignore"):
            close(getattr(rnp, name)(inside), getattr(np, name)(inside), name, 2e-15, 0)
    close(rnp.arccosh(1 + tiny), np.arccosh(1 + tiny), "arccosh", 1e-13, 0)
    close(rnp.arccosh(huge), np.arccosh(huge), "arccosh", 1e-15, 0)
    wide = np.linspace(-700, 700, 999)
    for name in ("sinh", "cosh", "exp2"):
        close(getattr(rnp, name)(wide), getattr(np, name)(wide), name, 1e-13, 0)
    close(rnp.hypot(huge, huge[::-1]), np.hypot(huge, huge[::-1]), "hypot", 1e-15, 0)
    assert rnp.log2(np.float64(2.0 ** np.arange(-20, 20))).tolist() == list(range(-20, 20))


def test_arctan2_and_copysign_know_signed_zeros_and_infinities() -> None:
    ends = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan])
    y, x = (a.ravel() for a in np.meshgrid(ends, ends))
    close(rnp.arctan2(y, x), np.arctan2(y, x), "arctan2")
    assert np.array_equal(np.signbit(rnp.arctan2(y, x)), np.signbit(np.arctan2(y, x)))
    numbers = ends[:-1]
    assert np.array_equal(np.signbit(rnp.copysign(2.0, numbers)), np.signbit(numbers))
    close(rnp.hypot(y, x), np.hypot(y, x), "hypot")


# -- sizes that depend on data ----------------------------------------------------------------------------------------
def test_unique_elements_with_a_static_size() -> None:
    wanted = np.unique(INTEGERS, return_index=True, return_inverse=True, return_counts=True)
    actual = rlx.jit(lambda x: rnp.unique(x, True, True, True, size=7, fill_value=-1))(INTEGERS)
    count = len(wanted[0])
    assert actual[0].tolist() == wanted[0].tolist() + [-1] * (7 - count)
    assert actual[1][:count].tolist() == wanted[1].tolist()
    assert actual[2].tolist() == wanted[2].tolist()
    assert actual[3].tolist() == wanted[3].tolist() + [0] * (7 - count)
    assert rlx.jit(lambda x: rnp.unique(x, size=2))(INTEGERS).tolist() == wanted[0][:2].tolist()
    assert rnp.unique(INTEGERS).tolist() == wanted[0].tolist()


def test_counts_and_places_with_a_static_size() -> None:
    flat = INTEGERS.ravel()
    assert rlx.jit(lambda x: np.bincount(x, minlength=6))(flat).tolist() == np.bincount(flat, minlength=6).tolist()
    assert rnp.bincount(flat).tolist() == np.bincount(flat).tolist()
    weights = RNG.standard_normal(len(flat))
    close(rlx.jit(lambda w: rnp.bincount(flat, w, length=5))(weights), np.bincount(flat, weights, 5), "bincount")
    gradient = rlx.grad(lambda w: (rnp.bincount(flat, w, length=5) ** 2).sum())(weights)
    close(gradient, 2 * np.bincount(flat, weights, 5)[flat], "gradient", 1e-6)
    rows, columns = rlx.jit(lambda x: rnp.nonzero(x > 2, size=9, fill_value=7))(INTEGERS)
    wanted = np.nonzero(INTEGERS > 2)
    assert rows.tolist() == [*wanted[0], *[7] * 9][:9] and columns.tolist() == [*wanted[1], *[7] * 9][:9]
    assert rnp.argwhere(INTEGERS).tolist() == np.argwhere(INTEGERS).tolist()
    close(rnp.histogram(X, 4)[1], np.histogram(X, 4)[1], "edges of the data")


@pytest.mark.parametrize("call", [rnp.unique, rnp.nonzero, rnp.bincount])
def test_a_size_that_depends_on_data_is_asked_for(call: Callable[..., Any]) -> None:
    with pytest.raises(GraphError, match="depends on data") as caught:
        rlx.jit(call)(INTEGERS.ravel())
    assert "size=" in str(caught.value.hint) or "length=" in str(caught.value.hint)


def test_sorting_is_stable_and_puts_nan_last() -> None:
    x = np.array([[2.0, np.nan, -np.inf, 2.0, np.inf, -0.0, 0.0, np.nan, 2.0]])
    close(rnp.sort(x), np.sort(x), "sort")
    assert rnp.argsort(x).tolist() == np.argsort(x, stable=True).tolist()
    least = np.array([5, np.iinfo(np.int32).min, 0], np.int32)
    assert rnp.sort(least).tolist() == np.sort(least).tolist()


# -- arrays from traced values ----------------------------------------------------------------------------------------
def test_arrays_are_made_of_traced_values() -> None:
    matrix = rlx.jit(lambda x, y: rnp.array([[x, 2 * y], [0.0, 1.0]]))(1.5, 2.0)
    assert matrix.tolist() == [[1.5, 4.0], [0.0, 1.0]]
    close(rlx.jit(lambda x: rnp.asarray([x, 2 * x]))(W), np.stack([W, 2 * W]), "rows")
    copy = rnp.array(W)
    copy[0] = 9
    assert W[0] != 9
    with pytest.raises(GraphError, match="has no values for NumPy") as caught:
        rlx.jit(lambda x: np.array([x, 2 * x]))(W)
    assert "rlx.numpy.array" in str(caught.value.hint)
    for read in (lambda i: W[i], lambda i: np.take(W, i)):
        with pytest.raises(GraphError) as caught:
            rlx.jit(read)(1)
        assert "rlx.take(array, i)" in str(caught.value.hint)
    assert rlx.jit(lambda i: rlx.take(W, i))(1) == W[1]


# -- what is absent ---------------------------------------------------------------------------------------------------
ABSENT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "numpy.fft.rfft": (np.fft.rfft, "complex"), "numpy.linalg.eigvals": (np.linalg.eigvals, "eigh"),
    "numpy.put": (lambda x: np.put(x, 0, 1.0), "x.at"), "numpy.union1d": (lambda x: np.union1d(x, x), "unique"),
    "numpy.add.at": (lambda x: np.add.at(x, 0, 1.0), "x.at"),
    "numpy.add.reduceat": (lambda x: np.add.reduceat(x, [0, 2]), "bincount"),
    "numpy.apply_along_axis": (lambda x: np.apply_along_axis(np.sum, 0, x), "rlx.vmap"),
    "numpy.frexp": (np.frexp, "docs/numpy.md"),
    "numpy.subtract.reduce": (np.subtract.reduce, "docs/numpy.md"),
}  # fmt: skip


@pytest.mark.parametrize("name", ABSENT)
def test_an_absent_function_is_named_in_full_with_a_hint_by_meaning(name: str) -> None:
    call, hint = ABSENT[name]
    with pytest.raises(GraphError, match=f"^{re.escape(name)}: is not supported on traced arrays") as caught:
        rlx.jit(call)(W)
    assert hint in str(caught.value.hint)
    assert "sort'" not in str(caught.value.hint)


def test_an_argument_that_is_not_supported_is_named() -> None:
    with pytest.raises(GraphError, match=r"numpy\.linalg\.norm: is not supported .* 'flavour'") as caught:
        rlx.jit(lambda x: dispatch.call_function(np.linalg.norm, (x,), {"flavour": 3}))(W)
    assert "ord=None, axis=None" in str(caught.value.hint)
    with pytest.raises(GraphError, match=r"numpy\.add with out="):
        rlx.jit(lambda x: np.add(x, x, out=W))(W)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rnp.quantile(X, 1.5), "quantile: q is 1.5"),
        (lambda: rnp.quantile(X, 0.5, method="odd"), "quantile: method is 'odd'"),
        (lambda: rnp.split(V, 2), "split: 7 elements are not 2 equal parts"),
        (lambda: rnp.cross(X, Y), "cross: vectors have 3 components, found 4"),
        (lambda: rnp.convolve(V, W, "other"), "convolve: mode is 'other'"),
        (lambda: rnp.pad(X, 1, "median"), "pad: mode is 'median'"),
        (lambda: rnp.select([X > 0], [X, Y]), "select: 1 conditions for 2 choices"),
        (lambda: rnp.searchsorted(V, X, "middle"), "searchsorted: side is 'middle'"),
        (lambda: rnp.diag(CUBE), "diag: takes a vector or a matrix"),
        (lambda: rnp.meshgrid(V, V, indexing="yx"), "meshgrid: indexing is 'yx'"),
        (lambda: rnp.max(X, where=X > 0), "max: where needs initial"),
        (lambda: rnp.where(X > 0), "where: takes a condition and two choices"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((GraphError, ShapeError), match=re.escape(message)):
        call()


# -- the namespace ----------------------------------------------------------------------------------------------------
def test_the_namespace_has_functions_of_numpys_names_alone() -> None:
    functions = {name: f for name, f in vars(rnp).items() if inspect.isfunction(f) and name[0] != "_"}
    own, of_scipy = {"astype", "svdvals"}, {"solve_triangular"}
    assert len(functions) > 190
    assert not [name for name in functions if not hasattr(np, name) and name not in own]
    assert not [
        name
        for name, f in vars(rnp.linalg).items()
        if inspect.isfunction(f) and name[0] != "_" and not hasattr(np.linalg, name) and name not in of_scipy
    ]
    assert all(f.__doc__ and f.__doc__.rstrip().endswith(".") for f in functions.values())


def test_every_function_takes_lists_and_returns_arrays() -> None:
    assert isinstance(rnp.sinh([0.0, 1.0]), np.ndarray)
    assert leaves(rnp.meshgrid([1, 2], [3, 4]))[0].tolist() == [[1, 2], [1, 2]]
    assert issubclass(GraphError, RlxError)
