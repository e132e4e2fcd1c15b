"""Targets: what code is generated for, as data that passes and generators read. Backends say which ones there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.dtypes import F32, DType
from rlx.layouts import WeightLayout
from rlx.types import TensorType


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How a backend lays out a KV cache: positions per page, and the order of keys inside a page.

    A page holds the keys, or the values, of `page` positions for every key head. Attention goes over keys page by page.
    """

    page: int = 64
    transposed_keys: bool = True  # a page of plain keys is [head_dim, page], as vector units read it

    def blocks(self, positions: int) -> int:
        """Pages that so many positions of a sequence take."""
        return -(-positions // self.page)

    def transposes(self, kind: str, dtype: DType) -> bool:
        """Whether a page of `keys` or `values` is [dim, page]: packed rows stay rows."""
        return kind == "keys" and self.transposed_keys and not dtype.is_packed

    def page_shape(self, kind: str, dtype: DType, kv_heads: int, dim: int) -> tuple[int, int, int]:
        """The axes of a page of `keys` or `values` of this type."""
        return (kv_heads, dim, self.page) if self.transposes(kind, dtype) else (kv_heads, self.page, dim)


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of machine, as far as passes and portable forms need to know it."""

    name: str
    device: str  # the backend that generates code for it
    prepacks: bool = False  # matmuls want weights in layouts of its own, made when weights are bound

    def native(self, dtype: DType) -> DType:
        """The type in which arithmetic on `dtype` is done: floats of fewer than 32 bits are widened on load."""
        return F32 if dtype.is_float and dtype.size < F32.size else dtype

    def span(self, dtype: DType) -> int:
        """How many elements next to each other go together, as a hint for the grain of loops."""
        return 16 // dtype.size

    def accumulators(self) -> int:
        """How many such spans of sums a loop keeps at hand, as a hint."""
        return 1

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
