"""Leaves: inputs, params and constants."""

from __future__ import annotations

from typing import Any

from rlx.ir.registry import LEAF, op
from rlx.types import TensorType, tensor


@op("input", traits=[LEAF])
def input_(*, name: str) -> TensorType:
    """A tensor passed to each run. Its type is part of the node."""
    return tensor(())


@op("state", traits=[LEAF])
def state(*, name: str) -> TensorType:
    """Memory owned by the caller and updated in place by kernels, such as a KV cache. Its type is part of the node."""
    return tensor(())


@op("param", traits=[LEAF])
def param(*, name: str) -> TensorType:
    """A weight: set once and kept for all runs. Its type is part of the node."""
    return tensor(())


@op("const", traits=[LEAF])
def const(*, value: Any) -> TensorType:
    """Numbers embedded in the graph."""
    return tensor(value.data.shape, value.data.dtype)
