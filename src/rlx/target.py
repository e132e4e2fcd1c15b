"""Targets: what code is generated for, as data that passes and generators read. Backends say which ones there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.dtypes import F32, DType
from rlx.operand_layouts import WeightLayout
from rlx.types import Size, TensorType

POOL_AXES = "phsd"  # of a pool of a KV cache: page, head, slot of a page, dimension of a head


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How a backend lays out a KV cache: positions per page, and the order of axes in the pools of keys and values.

    A pool has the axes of `POOL_AXES` in any order. Attention goes over keys page by page.
    """

    page: int = 64
    keys: str = POOL_AXES
    values: str = POOL_AXES

    def blocks(self, positions: int) -> int:
        """Pages that so many positions of a sequence take."""
        return -(-positions // self.page)

    def axes(self, kind: str, dtype: DType) -> str:
        """The order of axes in a pool of `keys` or `values`; packed rows stay contiguous."""
        axes: str = getattr(self, kind)
        return axes.replace("d", "") + "d" if dtype.is_packed else axes

    def pool_shape(self, kind: str, dtype: DType, pages: Size, kv_heads: int, dim: int) -> tuple[Size, ...]:
        """The shape of a pool of `keys` or `values` of this type."""
        sizes: dict[str, Size] = {"p": pages, "h": kv_heads, "s": self.page, "d": dim}
        return tuple(sizes[axis] for axis in self.axes(kind, dtype))


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

    @property
    def kv_layout(self) -> KvLayout:
        """How KV caches are laid out that its attention reads where they are."""
        return KvLayout()

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        """Loop forms (see `lir/schedule.py`) by op name that this target has in place of the default ones."""
        return {}
