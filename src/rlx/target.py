"""Targets: what code is generated for, as data that passes and generators read. Backends say which ones there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.dtypes import F32, DType
from rlx.layouts import WeightLayout
from rlx.types import TensorType


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of machine, as far as passes and portable forms need to know it."""

    name: str
    device: str  # the backend that generates code for it
    prepacks: bool = False  # matmuls want weights in layouts of its own, made when weights are bound

    def native(self, dtype: DType) -> DType:
        """The type in which arithmetic on `dtype` is done: floats of fewer than 32 bits are widened on load."""
        return F32 if dtype.is_float and dtype.size < F32.size else dtype

    def layout(self, x: DType, w: TensorType, *, rounded: bool = False) -> WeightLayout | None:
        """The layout that matmuls of x want weights in: numbers [..., k, n], or packed rows [..., n, k].

        `rounded` says that x is 8-bit numbers with a scale per block, as `round_blocks` gives. None: as they are.
        """
        return None

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        """Loop forms (see `lir/schedule.py`) by op name that this target has in place of the default ones."""
        return {}
