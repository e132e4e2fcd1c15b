"""What a target makes of an attention kernel: register sizes, padded extents, the map of scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from rlx.backends.cpu.builder import Builder, Int, Module, Value, vector
from rlx.backends.cpu.routine import HEADER_BYTES
from rlx.backends.cpu.targets import KEY_BLOCK, CpuTarget
from rlx.dtypes import BY_NAME, F32, F64, I32, DType
from rlx.errors import LowerError
from rlx.fork_safe_locks import cached_property
from rlx.host_memory import LINE
from rlx.lir.forms.quant_blocks import UNIT
from rlx.lir.kernels import AttentionKernel

MASKS = ("none", "causal", "sliding", "custom", "bias")
CACHED_MASKS = ("causal", "sliding")
BOUNDS = 5  # numbers that `segments` notes about rows and a block of keys
UNIT_ROWS = 24  # query rows (positions × heads of a group) of one unit, at least one position
ROWS = 192  # query rows that go over blocks of keys together, or those of one unit if they are more
PACKED = BY_NAME["q8_0"]  # the packed type that a cache may have: an f16, then a byte a number
SCALAR = {F32: "float", F64: "double"}


LOG2_E = math.log2(math.e)


def read_words(b: Builder, words: Sequence[str], pointers: Container[str], args: Value) -> dict[str, Value]:
    """The words of an argument block."""
    return {
        name: b.load("ptr" if name in pointers else "i64", b.offset(args, 8 * i), align=8)
        for i, name in enumerate(words)
    }


def laid_out(sizes: Mapping[str, int]) -> dict[str, int]:
    """Byte offsets in scratch of regions of these sizes, each on a cache line; `end` is the size of all."""
    offsets, end = {}, HEADER_BYTES
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // LINE) * LINE
    return offsets | {"end": end}


@dataclass(frozen=True, slots=True)
class Strips:
    """Strips of columns: `count` of them side by side from vector `first` on, each `vectors` wide."""

    first: int
    count: int
    vectors: int


@dataclass(frozen=True)
class Plan:
    """Sizes and offsets, all known when the kernel is emitted."""

    kernel: AttentionKernel
    target: CpuTarget

    def __post_init__(self) -> None:
        kernel = self.kernel
        if not kernel.dtype.is_float:
            raise LowerError(f"cpu attention: no kernel for {kernel.dtype}", hint="convert the operands to f32 first")
        if kernel.mask not in MASKS:
            raise LowerError(f"cpu attention: mask {kernel.mask!r} is not one of {', '.join(MASKS)}")
        if kernel.mask in ("custom", "bias") and kernel.mask_dtype is None:
            raise LowerError(f"cpu attention: a {kernel.mask} mask needs its element type")
        if kernel.mask == "bias" and not self.mask_dtype.is_float:
            raise LowerError(f"cpu attention: a bias is of a float type, not {kernel.mask_dtype}")
        if kernel.segments and (kernel.mask in ("custom", "bias") or kernel.mask_dtype is not I32 or kernel.cached):
            raise LowerError(
                f"cpu attention: segments are ids of i32 beside masks none, causal and sliding without a cache, "
                f"found {kernel.mask_dtype} and mask {kernel.mask!r}"
            )
        if kernel.ahead and (kernel.mask != "sliding" or kernel.cached):
            raise LowerError(f"cpu attention: keys ahead are of a sliding window, not of mask {kernel.mask!r}")
        if kernel.page not in (0, KEY_BLOCK):
            raise LowerError(f"cpu attention: a cache has pages of {KEY_BLOCK} positions, not of {kernel.page}")
        if kernel.cached and kernel.mask not in CACHED_MASKS:
            raise LowerError(f"cpu attention: a cache goes with masks {', '.join(CACHED_MASKS)}, not {kernel.mask!r}")
        if kernel.cache_dtype is not None and not kernel.cached:
            raise LowerError(f"cpu attention: without a cache, there is none of {kernel.cache_dtype}")
        if kernel.ring and not (kernel.cached and kernel.mask == "sliding"):
            raise LowerError(f"cpu attention: a ring is a cache with a sliding window, not with mask {kernel.mask!r}")
        if self.packed:
            blocks = self.stored.block
            if self.stored is not PACKED or self.compute is not F32:
                raise LowerError(f"cpu attention: queries of {kernel.dtype} over a cache of {self.stored}")
            if kernel.head_dim % blocks or kernel.value_dim % blocks:
                sizes = f"{kernel.head_dim} and {kernel.value_dim}"
                raise LowerError(f"cpu attention: heads of {sizes} are no whole blocks of {blocks} ({self.stored})")
        elif not self.stored.is_float or self.target.native(self.stored) is not self.compute:
            raise LowerError(f"cpu attention: queries of {kernel.dtype} over a cache of {self.stored}")

    @property
    def symbol(self) -> str:
        return f"attention.{self.kernel.fingerprint}"

    @property
    def mask_dtype(self) -> DType:
        assert self.kernel.mask_dtype is not None, "asked for only where the kernel has a mask operand"
        return self.kernel.mask_dtype

    @property
    def stored(self) -> DType:
        """The element type of k and v in memory."""
        return self.kernel.cache_dtype or self.kernel.dtype

    @property
    def packed(self) -> bool:
        """Whether k and v are rows of quantised blocks."""
        return self.stored.is_packed

    @property
    def stride_bytes(self) -> int:
        """What strides of k and v count: elements, or the units of packed blocks."""
        return UNIT if self.packed else self.stored.size

    def row_bytes(self, extent: int) -> int:
        """Bytes of so many neighbouring numbers of k or v."""
        return extent // self.stored.block * self.stored.size

    @property
    def compute(self) -> DType:
        return self.target.native(self.kernel.dtype)

    @property
    def scalar(self) -> str:
        return SCALAR[self.compute]

    @property
    def size(self) -> int:
        """Bytes of an element of scratch."""
        return self.compute.size

    @property
    def word(self) -> str:
        """An integer as wide as an element: compares of key numbers then give masks of the right width."""
        return f"i{8 * self.size}"

    @property
    def lanes(self) -> int:
        return self.target.lanes(self.size)

    @property
    def vector(self) -> str:
        return vector(self.lanes, self.scalar)

    @property
    def panel(self) -> int:
        """Keys that one call of the micro-kernel scores at most."""
        return self.target.panel(self.size)

    @property
    def head_stride(self) -> int:
        return self.padded(self.kernel.head_dim)

    @property
    def value_stride(self) -> int:
        return self.padded(self.kernel.value_dim)

    @property
    def words(self) -> tuple[str, ...]:
        """The argument block: the address of the table of routines, then what a launch gives."""
        return "parts", *self.kernel.words

    @property
    def unit_positions(self) -> int:
        """Query positions of one unit."""
        return max(1, UNIT_ROWS // self.kernel.group)

    @property
    def together(self) -> int:
        """Neighbouring units that go over blocks of keys together: the fewer threads, the less is packed."""
        return max(1, ROWS // (self.unit_positions * self.kernel.group))

    @property
    def positions(self) -> int:
        """Query positions of units that go together, at most."""
        return self.unit_positions * self.together

    @property
    def rows(self) -> int:
        """Query rows of them."""
        return self.positions * self.kernel.group

    @property
    def limited(self) -> bool:
        """Whether rows of a unit see different ranges of keys."""
        return self.kernel.mask in ("causal", "sliding")

    @property
    def clears_outputs(self) -> bool:
        """Whether outputs start at 0, because the first block of keys is not one that all rows see."""
        return self.limited or self.kernel.segments

    @property
    def checks_values(self) -> bool:
        """Whether V is searched for inf and NaN, because rows of a tile see different keys of a range."""
        return self.kernel.mask == "bias" or self.kernel.segments

    @property
    def copies_queries(self) -> bool:
        """Queries are read where they lie unless they need widening or their rows have no common stride."""
        return self.compute is not self.kernel.dtype or self.kernel.group > 1 or self.kernel.cached

    @property
    def packs_keys(self) -> bool:
        """Only the blocks of a cache lie as the micro-kernel reads them."""
        return not self.kernel.cached

    @property
    def widens_keys(self) -> bool:
        return self.kernel.cached and self.stored is not self.compute

    @property
    def packs_values(self) -> bool:
        """V is read where it lies unless it needs widening or padding, or some of its rows have to be left out."""
        ready = self.compute is self.stored and self.kernel.value_dim % self.lanes == 0
        return not ready or self.kernel.mask == "custom" or self.checks_values

    def padded(self, extent: int) -> int:
        return -(-extent // self.lanes) * self.lanes

    @property
    def exponent(self) -> float:
        """A score times this is the logarithm of its weight in base 2.

        Scores stay in the unit in which they come as long as a greater one is a heavier one, because then there is
        nothing to compute.
        """
        cap = abs(self.kernel.softcap)
        natural = self.kernel.mask == "bias" or (not cap and self.kernel.scale <= 0)
        return LOG2_E * (1.0 if natural else cap or self.kernel.scale)

    @cached_property
    def strips(self) -> tuple[Strips, ...]:
        """Those of V's columns."""
        return self.cut(self.kernel.value_dim)

    def cut(self, extent: int) -> tuple[Strips, ...]:
        """So many columns cut evenly: the widest strips first, then those one vector narrower."""
        vectors = self.padded(extent) // self.lanes
        count = -(-vectors // self.target.tile_vectors)
        width, wider = divmod(vectors, count)
        cut = (Strips(0, wider, width + 1), Strips(wider * (width + 1), count - wider, width))
        return tuple(s for s in cut if s.count)

    @property
    def spans(self) -> tuple[int, ...]:
        """How many keys of a block the softmax takes: half a block is for short prompts and causal diagonals."""
        if self.panel < KEY_BLOCK:
            return (KEY_BLOCK,)  # in steps, as many as are needed
        return KEY_BLOCK // 2, KEY_BLOCK

    @cached_property
    def regions(self) -> dict[str, int]:
        """Byte offsets in scratch, each on a cache line; `end` is its size."""
        packs, cached = self.packs_keys or self.packs_values, self.kernel.cached
        sizes = {
            # [panel][head_dim][keys of a panel], or as in a cache: [head_dim][keys]
            "keys": KEY_BLOCK * self.head_stride * self.size * (self.packs_keys or self.widens_keys),
            "values": KEY_BLOCK * self.value_stride * self.size * self.packs_values,  # [strip][key][columns]
            "scores": self.target.tile_rows * KEY_BLOCK * self.size,  # [row of a tile][key], later their weights
            "queries": self.rows * self.head_stride * self.size * self.copies_queries,
            "outputs": self.rows * self.value_stride * self.size,
            "sums": self.rows * self.lanes * self.size,  # a row's sum of weights stays in lanes until the end
            "references": self.rows * self.size,  # per row: the score whose weight is 1; -inf before the first
            "limits": self.rows * 8,  # per row: the first key that it does not see
            "lowest": self.rows * 8 * cached,  # of the limits of a tile, where its first row would be
            "highest": self.rows * 8 * cached,
            "extremes": 16 * cached,  # the lowest and the highest limit of all
            "present": self.positions * 8 * cached,  # query positions of the units without those of padding
            "biases": self.rows * 8,  # per row: where its bias lies
            "key_rows": KEY_BLOCK * 8 * self.packs_keys,  # per key of the block: where it lies
            "value_rows": KEY_BLOCK * 8 * self.packs_values,
            "kept": KEY_BLOCK * self.size,  # per key of the block: all ones or 0 of a custom mask, or its segment
            "zeros": self.zero_bytes * packs,  # stands in for keys that do not count
            **self.segment_regions(self.rows),
        }
        return laid_out(sizes)

    def segment_regions(self, rows: int) -> dict[str, int]:
        """Bytes of what `segments` notes about rows and a block of keys."""
        return {"row_segments": rows * 8, "segment_bounds": BOUNDS * 8} if self.kernel.segments else {}

    @property
    def zero_bytes(self) -> int:
        return self.row_bytes(max(self.kernel.head_dim, self.kernel.value_dim))

    def region(self, b: Builder, scratch: Value, name: str, index: Int = 0, unit: str | None = None) -> Value:
        """The address of element `index` of a region of scratch."""
        return b.offset(b.offset(scratch, self.regions[name]), index, unit or self.scalar)

    def define(
        self, module: Module, part: str, signature: str, emit: Callable[..., Value | None], result: str = "void"
    ) -> None:
        """Add one of the functions that the nest calls: `signature` is such as `ptr scratch, i64 count`."""
        arguments = [(type_, name) for type_, name in (argument.split() for argument in signature.split(", "))]
        module.define(f"{self.symbol}.{part}", arguments, emit, result=result, internal=True, noinline=True)
