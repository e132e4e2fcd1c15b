"""NumPy's everyday functions: eager on arrays, recorded in the graph while a function is traced.

Names, arguments and semantics are NumPy's; dtypes promote as in rlx (an int never widens a float).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.functional.elementwise import abs as abs
from rlx.functional.elementwise import add as add
from rlx.functional.elementwise import arange as arange
from rlx.functional.elementwise import arctan as arctan
from rlx.functional.elementwise import ceil as ceil
from rlx.functional.elementwise import clip as clip
from rlx.functional.elementwise import cos as cos
from rlx.functional.elementwise import divide as divide
from rlx.functional.elementwise import equal as equal
from rlx.functional.elementwise import erf as erf
from rlx.functional.elementwise import exp as exp
from rlx.functional.elementwise import expm1 as expm1
from rlx.functional.elementwise import eye as eye
from rlx.functional.elementwise import floor as floor
from rlx.functional.elementwise import floor_divide as floor_divide
from rlx.functional.elementwise import full as full
from rlx.functional.elementwise import gelu as gelu
from rlx.functional.elementwise import greater as greater
from rlx.functional.elementwise import greater_equal as greater_equal
from rlx.functional.elementwise import isfinite as isfinite
from rlx.functional.elementwise import isinf as isinf
from rlx.functional.elementwise import isnan as isnan
from rlx.functional.elementwise import less as less
from rlx.functional.elementwise import less_equal as less_equal
from rlx.functional.elementwise import linspace as linspace
from rlx.functional.elementwise import log as log
from rlx.functional.elementwise import log1p as log1p
from rlx.functional.elementwise import logaddexp as logaddexp
from rlx.functional.elementwise import logical_and as logical_and
from rlx.functional.elementwise import logical_not as logical_not
from rlx.functional.elementwise import logical_or as logical_or
from rlx.functional.elementwise import maximum as maximum
from rlx.functional.elementwise import minimum as minimum
from rlx.functional.elementwise import mod as mod
from rlx.functional.elementwise import mul as mul
from rlx.functional.elementwise import multiply as multiply
from rlx.functional.elementwise import negative as negative
from rlx.functional.elementwise import not_equal as not_equal
from rlx.functional.elementwise import ones as ones
from rlx.functional.elementwise import ones_like as ones_like
from rlx.functional.elementwise import power as power
from rlx.functional.elementwise import reciprocal as reciprocal
from rlx.functional.elementwise import relu as relu
from rlx.functional.elementwise import round as round
from rlx.functional.elementwise import rsqrt as rsqrt
from rlx.functional.elementwise import sigmoid as sigmoid
from rlx.functional.elementwise import sign as sign
from rlx.functional.elementwise import silu as silu
from rlx.functional.elementwise import sin as sin
from rlx.functional.elementwise import softplus as softplus
from rlx.functional.elementwise import sqrt as sqrt
from rlx.functional.elementwise import square as square
from rlx.functional.elementwise import sub as sub
from rlx.functional.elementwise import subtract as subtract
from rlx.functional.elementwise import tan as tan
from rlx.functional.elementwise import tanh as tanh
from rlx.functional.elementwise import where as where
from rlx.functional.elementwise import zeros as zeros
from rlx.functional.elementwise import zeros_like as zeros_like
from rlx.functional.indexing import At as At
from rlx.functional.indexing import argsort as argsort
from rlx.functional.indexing import at as at
from rlx.functional.indexing import dynamic_slice as dynamic_slice
from rlx.functional.indexing import dynamic_update_slice as dynamic_update_slice
from rlx.functional.indexing import index as index
from rlx.functional.indexing import one_hot as one_hot
from rlx.functional.indexing import sort as sort
from rlx.functional.indexing import take as take
from rlx.functional.indexing import take_along_axis as take_along_axis
from rlx.functional.indexing import topk as topk
from rlx.functional.linalg import dot as dot
from rlx.functional.linalg import einsum as einsum
from rlx.functional.linalg import matmul as matmul
from rlx.functional.linalg import outer as outer
from rlx.functional.linalg import tensordot as tensordot
from rlx.functional.operands import asarray as asarray
from rlx.functional.operands import astype as astype
from rlx.functional.reductions import all as all
from rlx.functional.reductions import any as any
from rlx.functional.reductions import argmax as argmax
from rlx.functional.reductions import argmin as argmin
from rlx.functional.reductions import cross_entropy as cross_entropy
from rlx.functional.reductions import cumsum as cumsum
from rlx.functional.reductions import log_softmax as log_softmax
from rlx.functional.reductions import logsumexp as logsumexp
from rlx.functional.reductions import max as max
from rlx.functional.reductions import mean as mean
from rlx.functional.reductions import min as min
from rlx.functional.reductions import prod as prod
from rlx.functional.reductions import softmax as softmax
from rlx.functional.reductions import std as std
from rlx.functional.reductions import stop_gradient as stop_gradient
from rlx.functional.reductions import sum as sum
from rlx.functional.reductions import var as var
from rlx.functional.shapes import broadcast_to as broadcast_to
from rlx.functional.shapes import concatenate as concatenate
from rlx.functional.shapes import expand_dims as expand_dims
from rlx.functional.shapes import flip as flip
from rlx.functional.shapes import moveaxis as moveaxis
from rlx.functional.shapes import pad as pad
from rlx.functional.shapes import ravel as ravel
from rlx.functional.shapes import repeat as repeat
from rlx.functional.shapes import reshape as reshape
from rlx.functional.shapes import roll as roll
from rlx.functional.shapes import split as split
from rlx.functional.shapes import squeeze as squeeze
from rlx.functional.shapes import stack as stack
from rlx.functional.shapes import swapaxes as swapaxes
from rlx.functional.shapes import tile as tile
from rlx.functional.shapes import transpose as transpose
from rlx.functional.shapes import tril as tril
from rlx.functional.shapes import triu as triu

PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "T": lambda x: transpose(x), "mT": lambda x: swapaxes(x, -1, -2), "at": At,
}  # fmt: skip


def _same(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


# Methods of traced arrays, and the rlx functions that NumPy's own dispatch to when called with one.
_REDUCTIONS = "sum prod mean max min var std any all argmax argmin cumsum"
METHODS = _same(
    f"{_REDUCTIONS} reshape ravel transpose swapaxes squeeze round astype clip repeat take sort argsort dot"
)
METHODS |= {"flatten": "ravel"}
UFUNCS = _same("add subtract multiply divide floor_divide power maximum minimum logical_and logical_or logical_not")
UFUNCS |= _same("equal not_equal less less_equal greater greater_equal exp log sqrt sin cos tan tanh arctan square")
UFUNCS |= _same("reciprocal sign floor ceil log1p expm1 logaddexp isnan isinf isfinite negative matmul")
UFUNCS |= {"true_divide": "divide", "remainder": "mod", "absolute": "abs", "rint": "round", "float_power": "power"}
UFUNC_METHODS = {
    "add.reduce": "np.sum", "multiply.reduce": "np.prod", "maximum.reduce": "np.max", "minimum.reduce": "np.min",
    "add.accumulate": "np.cumsum", "multiply.outer": "np.outer", "add.at": "x.at[key].add(y)",
}  # fmt: skip
FUNCTIONS = _same(f"{_REDUCTIONS} reshape ravel transpose swapaxes moveaxis expand_dims squeeze broadcast_to round")
FUNCTIONS |= _same("concatenate stack split pad flip roll repeat tile tril triu where clip zeros_like ones_like")
FUNCTIONS |= _same("dot outer tensordot einsum matmul take take_along_axis sort argsort")
FUNCTIONS |= {"amax": "max", "amin": "min"}
