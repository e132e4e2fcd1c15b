"""Targets: what code is generated for, as data that passes and generators read. Backends say which ones there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.dtypes import F32, DType


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

    @property
    def kv_layout(self) -> KvLayout:
        """How KV caches are laid out that its attention reads where they are."""
        return KvLayout()

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        """Loop forms (see `lir/schedule.py`) by op name that this target has in place of the default ones."""
        return {}
