"""The functional API (`rlx.jit`, `rlx.grad`, ...): Python functions of arrays, traced into graphs, transformed and run.

Every op of the registry is also a function here, whether or not NumPy has a name for it: `rlx.attention(q, k, v)`.
"""

from typing import Any

from rlx.functional import random as random
from rlx.functional import tree as tree
from rlx.functional.arrays import *  # noqa: F403  NumPy's names
from rlx.functional.control import associative_scan as associative_scan
from rlx.functional.control import cond as cond
from rlx.functional.control import fori_loop as fori_loop
from rlx.functional.control import scan as scan
from rlx.functional.control import switch as switch
from rlx.functional.control import while_loop as while_loop
from rlx.functional.custom import custom_jvp as custom_jvp
from rlx.functional.custom import custom_vjp as custom_vjp
from rlx.functional.jitted import explain as explain
from rlx.functional.jitted import jit as jit
from rlx.functional.tracing import eval_shape as eval_shape
from rlx.functional.tracing import trace as trace  # type: ignore[assignment]  # NumPy's is in rlx.numpy
from rlx.functional.transforms import checkpoint as checkpoint
from rlx.functional.transforms import grad as grad
from rlx.functional.transforms import hessian as hessian
from rlx.functional.transforms import hvp as hvp
from rlx.functional.transforms import jacfwd as jacfwd
from rlx.functional.transforms import jacrev as jacrev
from rlx.functional.transforms import jvp as jvp
from rlx.functional.transforms import linearize as linearize
from rlx.functional.transforms import value_and_grad as value_and_grad
from rlx.functional.transforms import vjp as vjp
from rlx.functional.transforms import vmap as vmap


def __getattr__(name: str) -> Any:
    from rlx.functional.operands import function_of

    function = None if name.startswith("_") else function_of(name)
    if function is None:
        raise AttributeError(f"module 'rlx.functional' has no attribute {name!r}")
    return function
