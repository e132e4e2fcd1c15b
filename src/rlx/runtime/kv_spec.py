"""What a decoder says of the cache that the runtime keeps for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlx.dtypes import dtype as dtype_of
from rlx.errors import CapabilityError
from rlx.target import KvLayout
from rlx.types import Size

CACHES = ("auto", "f32", "f16", "q8_0")  # what keys and values may be asked to be kept in
AUTO = ("f16", "f32")  # what auto may become
CACHE_HELP = "how keys and values are kept (auto: f16 where weights are packed, f32 where not)"


@dataclass(frozen=True)
class KvCacheSpec:
    """The cache that a decoder needs: a pool of keys and one of values per layer, and recurrent states.

    `windows` has for each layer how many of the last positions it looks at, 0 where it looks at all, None where it
    keeps nothing; without any, all layers look at all. A layer with a window has a ring. `states` are the names of
    recurrent states and their sizes for one sequence: f32, and as large after a million tokens as after one.
    `lengths` are the limits of sequence length beyond which keys turn by other frequencies, and whether these change
    with every length beyond it (dynamic NTK) or once (longrope). `layout` is that of the pages of keys and values.
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
                f"KV cache: {self.dtype} packs {block} numbers a block, heads of {self.head_dim} are not whole blocks",
                hint="f16 takes heads of any size",
            )

    def rope_of_length(self, length: int) -> tuple[int, ...]:
        """What tells apart the frequencies that keys of a sequence of this length turn by."""
        return tuple(max(length - limit, 0) if grows else int(length > limit) for limit, grows in self.lengths)

    def must_read_again(self, before: int, after: int) -> bool:
        """Whether keys of a sequence that grows to another length would all have to turn by other frequencies."""
        return any((before > limit) != (after > limit) for limit, grows in self.lengths if not grows)

    def window(self, layer: int) -> int | None:
        """That of a layer."""
        return self.windows[layer] if self.windows else 0

    def axes(self, kind: str) -> str:
        """The order of axes in pools of `keys` or `values`."""
        return self.layout.axes(kind, dtype_of(self.dtype))

    def pool_shape(self, kind: str, pages: Size) -> tuple[Size, ...]:
        """The shape of a pool of `keys` or `values`, in elements."""
        return self.layout.pool_shape(kind, dtype_of(self.dtype), pages, self.kv_heads, self.head_dim)


def table_name(window: int) -> str:
    """The input with the pages of layers with a window, or without one (0): `[batch, blocks]`."""
    return f"table{window}" if window else "table"
