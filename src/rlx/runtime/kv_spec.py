"""The specification of a decoder's KV cache."""

from __future__ import annotations

from dataclasses import field

from rlx.dtypes import dtype as dtype_of
from rlx.errors import CapabilityError
from rlx.fast_dataclass import dataclass
from rlx.kv_layout import KvLayout
from rlx.types import Size

CACHES = ("auto", "f32", "f16", "bf16", "q8_0")  # types of keys and values that `load` accepts
AUTO = ("f16", "f32")  # types that auto may select
CACHE_HELP = "type of cached keys and values (auto: f16 for quantised weights, otherwise f32)"


@dataclass(frozen=True)
class KvCacheSpec:
    """The cache that a decoder needs: a pool of keys and one of values per layer, and recurrent states.

    `windows` has the attention window of each layer: 0 for full attention, None for a layer without keys and values;
    if empty, all layers have full attention. A layer with a window uses a ring. `states` are names and shapes of
    recurrent states per sequence, in f32. `lengths` are sequence lengths beyond which RoPE has other frequencies, and
    whether these change with every further length (dynamic NTK) or once (longrope). `layout` is the page layout.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "f32"
    windows: tuple[int | None, ...] = ()
    states: tuple[tuple[str, tuple[int, ...]], ...] = ()
    lengths: tuple[tuple[int, bool], ...] = ()
    layout: KvLayout = field(default_factory=KvLayout)

    def __post_init__(self) -> None:
        block = dtype_of(self.dtype).block
        if self.head_dim % block:
            raise CapabilityError(
                f"KV cache: {self.dtype} packs {block} numbers per block, heads of {self.head_dim} do not fit",
                hint="f16 takes heads of any size",
            )

    def rope_of_length(self, length: int) -> tuple[int, ...]:
        """A key of the RoPE frequencies of a sequence of this length: equal keys, equal frequencies."""
        return tuple(max(length - limit, 0) if grows else int(length > limit) for limit, grows in self.lengths)

    def must_prefill_again(self, before: int, after: int) -> bool:
        """Whether growing from `before` to `after` tokens changes the RoPE frequencies of all keys."""
        return any((before > limit) != (after > limit) for limit, grows in self.lengths if not grows)

    def window(self, layer: int) -> int | None:
        """The window of a layer."""
        return self.windows[layer] if self.windows else 0

    def axes(self, kind: str) -> str:
        """The order of axes in pools of `keys` or `values`."""
        return self.layout.axes(kind, dtype_of(self.dtype))

    def pool_shape(self, kind: str, pages: Size) -> tuple[Size, ...]:
        """The shape of a pool of `keys` or `values`, in elements."""
        return self.layout.pool_shape(kind, dtype_of(self.dtype), pages, self.kv_heads, self.head_dim)


def table_name(window: int) -> str:
    """The input with the page table `[batch, blocks]` of layers with a window, or without one (0)."""
    return f"table{window}" if window else "table"
