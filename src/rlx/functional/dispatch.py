"""What NumPy's own functions do with traced arrays: which rlx function runs, and what errors say of the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from rlx.errors import GraphError, nearest
from rlx.functional import linalg, numpy, reductions
from rlx.functional.operands import asarray
from rlx.functional.shapes import reshape
from rlx.functional.tracers import type_of
from rlx.ir.provenance import here

Function = Callable[..., Any]


def _supported(module: Any, functions: Mapping[str, Any]) -> dict[Any, Function]:
    """Return the functions of a NumPy module that have a counterpart of the same name."""
    names = [name for name, function in functions.items() if callable(function) and not name.startswith("_")]
    return {getattr(module, name): functions[name] for name in names if hasattr(module, name)}


FUNCTIONS = _supported(np, vars(numpy)) | _supported(np.linalg, linalg.FUNCTIONS)
BOOLEAN: dict[np.ufunc, Function] = {
    np.bitwise_and: numpy.logical_and,
    np.bitwise_or: numpy.logical_or,
    np.invert: numpy.logical_not,
}
REDUCTIONS: dict[np.ufunc, Function] = {
    np.add: numpy.sum, np.multiply: numpy.prod, np.maximum: numpy.max, np.minimum: numpy.min,
    np.logical_and: numpy.all, np.logical_or: numpy.any, np.logaddexp: reductions.logsumexp,
}  # fmt: skip
CUMULATIVE: dict[np.ufunc, Function] = {
    np.add: numpy.cumsum, np.multiply: numpy.cumprod,
    np.maximum: lambda x, axis: reductions.cumulative_extreme(numpy.maximum, x, axis),
    np.minimum: lambda x, axis: reductions.cumulative_extreme(numpy.minimum, x, axis),
}  # fmt: skip

# What to use for functions that rlx lacks, by what they do.
_IN_PLACE = "arrays do not change in place: x = x.at[key].set(y), or .add(y)"
_SELECTION = "the size of the result depends on data: rlx.where keeps the shape, rlx.numpy.nonzero takes size="
_FOR_EACH = "rlx.vmap maps a function over an axis"
_SETS = "the size of the result depends on data: rlx.numpy.unique takes size="
_PRINT = "rlx.debug.print shows values once they are computed"
_COMPLEX = "rlx has no complex numbers: keep real and imaginary parts as two arrays; docs/numpy.md shows a transform"
_CHOLESKY = (
    "L = rlx.numpy.linalg.cholesky(a); y = rlx.numpy.linalg.solve_triangular(L, b, lower=True); "
    "x = rlx.numpy.linalg.solve_triangular(L, y, trans=1, lower=True)"
)
_SCIPY = "rlx.numpy.linalg has solve_triangular, rlx.logsumexp, rlx.erf, rlx.sigmoid and rlx.softmax are in rlx itself"
_EIGEN = "rlx.numpy.linalg has eigh and eigvalsh, for symmetric matrices"
HINTS = {
    "put": _IN_PLACE, "place": _IN_PLACE, "putmask": _IN_PLACE, "copyto": _IN_PLACE, "fill_diagonal": _IN_PLACE,
    "put_along_axis": _IN_PLACE, "add.at": _IN_PLACE, "extract": _SELECTION, "compress": _SELECTION,
    "apply_along_axis": _FOR_EACH, "apply_over_axes": _FOR_EACH, "vectorize": _FOR_EACH, "union1d": _SETS,
    "intersect1d": _SETS, "setdiff1d": _SETS, "setxor1d": _SETS, "array_repr": _PRINT, "array_str": _PRINT,
    "array2string": _PRINT, "save": "return it from the function, and save the result",
    "lexsort": "rlx.numpy.argsort is stable: sort by the last key first", "partition": "rlx.numpy.sort, or rlx.topk",
    "argpartition": "rlx.numpy.argsort, or rlx.topk", "insert": "rlx.numpy.concatenate of slices",
    "delete": "rlx.numpy.concatenate of slices", "einsum_path": "rlx.numpy.einsum contracts from left to right",
    "roots": _EIGEN, "linalg.eig": _EIGEN, "linalg.eigvals": _EIGEN, "angle": _COMPLEX, "conjugate": _COMPLEX,
    "cho_factor": _CHOLESKY, "cho_solve": _CHOLESKY, "scipy": _SCIPY, "special": _SCIPY,
    "linalg.cond": "rlx.numpy.linalg.svd gives the singular values",
    "reduceat": "rlx.numpy.bincount(weights=) sums by group", "polyfit": "rlx.numpy.linalg.lstsq of rlx.numpy.vander",
}  # fmt: skip


def call_ufunc(ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the counterpart of a ufunc, or of one of its methods."""
    name = f"{ufunc.__name__}.{method}"
    if method == "reduce" and ufunc in REDUCTIONS:
        return _call(name, REDUCTIONS[ufunc], inputs, {"axis": 0, **kwargs})
    if method == "accumulate" and ufunc in CUMULATIVE:
        return _call(name, CUMULATIVE[ufunc], inputs, {"axis": 0, **kwargs})
    function: Function | None = FUNCTIONS.get(ufunc)
    if function is None and all(type_of(x).dtype.is_bool for x in inputs):
        function = BOOLEAN.get(ufunc)
    if function is None or method not in ("__call__", "outer"):
        unsupported(ufunc.__name__ if method == "__call__" else name)
    if kwargs:
        unsupported(f"{ufunc.__name__} with {', '.join(f'{k}=' for k in kwargs)}", "assign the result to a name")
    if method == "outer":
        a, b = inputs
        return function(reshape(asarray(a), (*type_of(a).shape, *(1,) * type_of(b).rank)), b)
    return function(*inputs)


def call_function(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the counterpart of a function of NumPy."""
    name = f"{function.__module__}.{function.__name__}".removeprefix("numpy.")
    counterpart = FUNCTIONS.get(function)
    if counterpart is None:
        unsupported(name)
    return _call(name, counterpart, args, kwargs)


def _call(name: str, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unsupported(name, f"rlx.numpy.{name} takes {_shown(signature)}", f": {error}")
    return function(*args, **kwargs)


def _shown(signature: inspect.Signature) -> str:
    return "(" + ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values()) + ")"


def absent_hint(name: str) -> str | None:
    """Return what to use instead of a function or module of NumPy that rlx lacks; None if there is nothing like it."""
    module, _, last = name.rpartition(".")
    if "fft" in (module, last):
        return _COMPLEX
    if "random" in (module, last):
        return "rlx.random draws under a trace, from explicit keys"
    return HINTS.get(name) or HINTS.get(last)


def missing_name(name: str) -> NoReturn:
    """Raise for an attribute that `rlx.numpy` lacks, with a hint for the names of NumPy."""
    hint = None if name.startswith("_") else absent_hint(name) or nearest(name, [n for n in vars(numpy) if n[0] != "_"])
    raise AttributeError(f"module 'rlx.numpy' has no attribute {name!r}" + (f": {hint}" if hint else ""))


def missing_linalg_name(name: str) -> NoReturn:
    """Raise for an attribute that `rlx.numpy.linalg` lacks, with a hint for the names of NumPy and SciPy."""
    hint = None if name.startswith("_") else absent_hint(f"linalg.{name}") or nearest(name, linalg.FUNCTIONS)
    raise AttributeError(f"module 'rlx.numpy.linalg' has no attribute {name!r}" + (f": {hint}" if hint else ""))


def unsupported(name: str, hint: str | None = None, reason: str = "") -> NoReturn:
    """Raise an error with the full name, and a hint at a function that does something like it."""
    hint = hint or absent_hint(name) or "rlx.numpy has what is supported; docs/numpy.md lists it"
    raise GraphError(f"numpy.{name}: is not supported on traced arrays{reason}", hint=hint, notes=[f"at: {here()}"])
