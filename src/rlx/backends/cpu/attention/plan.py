"""The plan of an attention kernel on a target: register sizes, padded extents, scratch map."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence

from rlx.backends.cpu.builder import Builder, Int, Module, Value, vector
from rlx.backends.cpu.routine import HEADER_BYTES
from rlx.backends.cpu.targets import KEY_BLOCK, CpuTarget
from rlx.dtypes import BY_NAME, F32, F64, I32, DType
from rlx.errors import LowerError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.host_memory import LINE
from rlx.lir.forms.quant_blocks import UNIT
from rlx.lir.kernels import AttentionKernel

MASKS = ("none", "causal", "sliding", "custom", "bias")
CACHED_MASKS = ("causal", "sliding")
BOUNDS = 5  # numbers that `segments` stores about rows and a block of keys
UNIT_ROWS = 24  # query rows (positions × heads of a group) per unit, at least one position
ROWS = 192  # query rows that process blocks of keys together, or those of one unit if they are more
PACKED = BY_NAME["q8_0"]  # the packed type that a cache may have: an f16, then one byte per number
SCALAR = {F32: "float", F64: "double"}


LOG2_E = math.log2(math.e)


def read_words(b: Builder, words: Sequence[str], pointers: Container[str], args: Value) -> dict[str, Value]:
    """The words of an argument block."""
    return {
        name: b.load("ptr" if name in pointers else "i64", b.offset(args, 8 * i), align=8)
        for i, name in enumerate(words)
    }


def lay_out_regions(sizes: Mapping[str, int]) -> dict[str, int]:
    """Byte offsets in scratch of regions of these sizes, aligned to cache lines; `end` is the total size."""
    offsets, end = {}, HEADER_BYTES
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // LINE) * LINE
    return offsets | {"end": end}


@dataclass(frozen=True, slots=True)
class Strips:
    """Strips of columns: `count` adjacent ones from vector `first` on, each `vectors` wide."""

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
                f"cpu attention: segments are i32 ids, with masks none, causal and sliding and no cache, "
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
                raise LowerError(f"cpu attention: heads of {sizes} are not multiples of {blocks} ({self.stored})")
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
        """The unit of k's and v's strides: elements, or the units of packed blocks."""
        return UNIT if self.packed else self.stored.size

    def row_bytes(self, extent: int) -> int:
        """Bytes of this many adjacent numbers of k or v."""
        return extent // self.stored.block * self.stored.size

    @property
    def compute(self) -> DType:
        return self.target.native(self.kernel.dtype)

    @property
    def scalar(self) -> str:
        return SCALAR[self.compute]

    @property
    def size(self) -> int:
        """Bytes per element of scratch."""
        return self.compute.size

    @property
    def word(self) -> str:
        """An integer as wide as an element: comparing key numbers then gives masks of the right width."""
        return f"i{8 * self.size}"

    @property
    def lanes(self) -> int:
        return self.target.lanes(self.size)

    @property
    def vector(self) -> str:
        return vector(self.lanes, self.scalar)

    @property
    def panel(self) -> int:
        """Maximum keys that one call of the micro-kernel scores."""
        return self.target.panel(self.size)

    @property
    def head_stride(self) -> int:
        return self.padded(self.kernel.head_dim)

    @property
    def value_stride(self) -> int:
        return self.padded(self.kernel.value_dim)

    @property
    def words(self) -> tuple[str, ...]:
        """The argument block: the address of the routine table, then the launch's words."""
        return "parts", *self.kernel.words

    @property
    def unit_positions(self) -> int:
        """Query positions per unit."""
        return max(1, UNIT_ROWS // self.kernel.group)

    @property
    def joint_units(self) -> int:
        """Adjacent units that process blocks of keys together: the fewer threads, the less is packed."""
        return max(1, ROWS // (self.unit_positions * self.kernel.group))

    @property
    def positions(self) -> int:
        """Maximum query positions of joint units."""
        return self.unit_positions * self.joint_units

    @property
    def rows(self) -> int:
        """Their query rows."""
        return self.positions * self.kernel.group

    @property
    def limited(self) -> bool:
        """Whether rows of a unit see different ranges of keys."""
        return self.kernel.mask in ("causal", "sliding")

    @property
    def clears_outputs(self) -> bool:
        """Whether outputs start at 0, because some rows do not see the first block of keys."""
        return self.limited or self.kernel.segments

    @property
    def checks_values(self) -> bool:
        """Whether V is searched for inf and NaN, because rows of a tile see different keys of a range."""
        return self.kernel.mask == "bias" or self.kernel.segments

    @property
    def copies_queries(self) -> bool:
        """Whether queries are copied: they are read in place unless they need widening or have no common row stride."""
        return self.compute is not self.kernel.dtype or self.kernel.group > 1 or self.kernel.cached

    @property
    def packs_keys(self) -> bool:
        """Whether K is packed: only the blocks of a cache have the layout that the micro-kernel reads."""
        return not self.kernel.cached

    @property
    def widens_keys(self) -> bool:
        return self.kernel.cached and self.stored is not self.compute

    @property
    def packs_values(self) -> bool:
        """Whether V is packed: it is read in place unless it needs widening or padding, or rows of it are masked."""
        ready = self.compute is self.stored and self.kernel.value_dim % self.lanes == 0
        return not ready or self.kernel.mask == "custom" or self.checks_values

    def padded(self, extent: int) -> int:
        return -(-extent // self.lanes) * self.lanes

    @property
    def exponent(self) -> float:
        """A score times this is the base-2 logarithm of its weight.

        Scores keep their unit as long as a greater score means a greater weight, since then nothing needs to be
        computed.
        """
        cap = abs(self.kernel.softcap)
        natural = self.kernel.mask == "bias" or (not cap and self.kernel.scale <= 0)
        return LOG2_E * (1.0 if natural else cap or self.kernel.scale)

    @cached_property
    def strips(self) -> tuple[Strips, ...]:
        """The strips of V's columns."""
        return self.cut(self.kernel.value_dim)

    def cut(self, extent: int) -> tuple[Strips, ...]:
        """Splits columns evenly: the widest strips first, then those one vector narrower."""
        vectors = self.padded(extent) // self.lanes
        count = -(-vectors // self.target.tile_vectors)
        width, wider = divmod(vectors, count)
        cut = (Strips(0, wider, width + 1), Strips(wider * (width + 1), count - wider, width))
        return tuple(s for s in cut if s.count)

    @property
    def spans(self) -> tuple[int, ...]:
        """Key counts that the softmax is compiled for: half a block is for short prompts and causal diagonals."""
        if self.panel < KEY_BLOCK:
            return (KEY_BLOCK,)  # in steps, as many as needed
        return KEY_BLOCK // 2, KEY_BLOCK

    @cached_property
    def regions(self) -> dict[str, int]:
        """Byte offsets in scratch, aligned to cache lines; `end` is the total size."""
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
            "lowest": self.rows * 8 * cached,  # of the limits of a tile, at its first row
            "highest": self.rows * 8 * cached,
            "extremes": 16 * cached,  # the lowest and the highest limit of all
            "present": self.positions * 8 * cached,  # query positions of the units without padding
            "biases": self.rows * 8,  # per row: address of its bias
            "key_rows": KEY_BLOCK * 8 * self.packs_keys,  # per key of the block: its address
            "value_rows": KEY_BLOCK * 8 * self.packs_values,
            "kept": KEY_BLOCK * self.size,  # per key of the block: all ones or 0 of a custom mask, or its segment
            "zeros": self.zero_bytes * packs,  # stands in for masked keys
            **self.segment_regions(self.rows),
        }
        return lay_out_regions(sizes)

    def segment_regions(self, rows: int) -> dict[str, int]:
        """Bytes of what `segments` stores about rows and a block of keys."""
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
        """Adds one of the functions that the nest calls; an example of `signature` is `ptr scratch, i64 count`."""
        arguments = [(type_, name) for type_, name in (argument.split() for argument in signature.split(", "))]
        module.define(f"{self.symbol}.{part}", arguments, emit, result=result, internal=True, noinline=True)
