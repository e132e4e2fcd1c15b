"""Functions of arrays: NumPy's (`rlx.functional.numpy`), and those of machine learning that NumPy lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.functional.elementwise import erf as erf
from rlx.functional.elementwise import gelu as gelu
from rlx.functional.elementwise import mul as mul
from rlx.functional.elementwise import relu as relu
from rlx.functional.elementwise import rsqrt as rsqrt
from rlx.functional.elementwise import sigmoid as sigmoid
from rlx.functional.elementwise import silu as silu
from rlx.functional.elementwise import softplus as softplus
from rlx.functional.elementwise import sub as sub
from rlx.functional.indexing import At as At
from rlx.functional.indexing import at as at
from rlx.functional.indexing import dynamic_slice as dynamic_slice
from rlx.functional.indexing import dynamic_update_slice as dynamic_update_slice
from rlx.functional.indexing import index as index
from rlx.functional.indexing import one_hot as one_hot
from rlx.functional.indexing import topk as topk
from rlx.functional.numpy import *  # noqa: F403
from rlx.functional.numpy import swapaxes, transpose
from rlx.functional.reductions import cross_entropy as cross_entropy
from rlx.functional.reductions import log_softmax as log_softmax
from rlx.functional.reductions import logsumexp as logsumexp
from rlx.functional.reductions import softmax as softmax
from rlx.functional.reductions import stop_gradient as stop_gradient

PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "T": lambda x: transpose(x), "mT": lambda x: swapaxes(x, -1, -2), "at": At,
}  # fmt: skip
# Methods of traced arrays, as NumPy's arrays have them.
_METHODS = (
    "all any argmax argmin argsort astype clip copy cumprod cumsum diagonal dot max mean min nonzero prod ravel repeat "
    "reshape round searchsorted sort squeeze std sum swapaxes take transpose var"
)
METHODS = {name: name for name in _METHODS.split()}
METHODS |= {"flatten": "ravel"}
