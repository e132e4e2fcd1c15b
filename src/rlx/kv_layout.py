"""The layout of KV caches: pools of pages, and the order of their axes. Backends choose it (`Target.kv_layout`)."""

from __future__ import annotations

from rlx.dtypes import DType
from rlx.fast_dataclass import dataclass
from rlx.types import Size

KV_PAGE = 64  # positions per page of a KV cache
POOL_AXES = "phsd"  # axes of a KV-cache pool: page, head, slot in the page, element of the head


@dataclass(frozen=True, slots=True)
class KvLayout:
    """A backend's KV-cache layout: positions per page, and the order of axes in the pools of keys and values.

    A pool has the axes of `POOL_AXES` in any order. Attention reads keys page by page.
    """

    page: int = KV_PAGE
    keys: str = POOL_AXES
    values: str = POOL_AXES

    def blocks(self, positions: int) -> int:
        """Pages needed for this many positions of a sequence."""
        return -(-positions // self.page)

    def axes(self, kind: str, dtype: DType) -> str:
        """The order of axes in a pool of `keys` or `values`; packed rows stay contiguous."""
        axes: str = getattr(self, kind)
        return axes.replace("d", "") + "d" if dtype.is_packed else axes

    def pool_shape(self, kind: str, dtype: DType, pages: Size, kv_heads: int, dim: int) -> tuple[Size, ...]:
        """The shape of a pool of `keys` or `values` of this type."""
        sizes: dict[str, Size] = {"p": pages, "h": kv_heads, "s": self.page, "d": dim}
        return tuple(sizes[axis] for axis in self.axes(kind, dtype))
