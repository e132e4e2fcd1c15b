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
    """One kind of machine. `tile_rows` × `tile_vectors` is the matmul micro-kernel; a panel is one tile wide."""

    name: str
    arch: str = ""  # of a processor: x86_64 or aarch64
    vector_bytes: int = 16
    tile_rows: int = 1
    tile_vectors: int = 1
    has_fma: bool = False
    cpu: str = ""
    features: str = ""  # LLVM feature string, "" = those of `cpu`
    has_dot: bool = False  # multiplies bytes and adds four products in one instruction
    device: str = "cpu"  # the backend that generates code for it
    prepacks: bool = True  # the matmul kernel reads weights in a layout of its own, made when weights are bound

    def native(self, dtype: DType) -> DType:
        """The type in which arithmetic on `dtype` is done: floats of fewer than 32 bits are widened on load."""
        return F32 if dtype.is_float and dtype.size < F32.size else dtype

    def lanes(self, element_bytes: int) -> int:
        """Elements of one vector register."""
        return self.vector_bytes // element_bytes

    def panel(self, element_bytes: int) -> int:
        """Columns of a packed weight panel."""
        return self.lanes(element_bytes) * self.tile_vectors

    def layout(self, x: DType, w: TensorType, *, rounded: bool = False) -> WeightLayout | None:
        """The layout that matmuls of x want weights in: numbers [..., k, n], or packed rows [..., n, k].

        `rounded` says that x is 8-bit numbers with a scale per block, as `round_blocks` gives. None: as they are.
        """
        return None

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        """Loop forms (see `lir/schedule.py`) by op name that this target has in place of the default ones."""
        return {}
