"""The attention generator: the matmul micro-kernel twice around an online softmax.

In comes an `AttentionKernel` and a target, out comes an `Entry`. Keys are taken in blocks of 64 cut at absolute
positions, each packed once for all query rows of a unit; a row's bits depend on its own query and on the keys that it
sees, never on its neighbours in a tile, a chunk or a batch. A score of -inf is a masked key, any finite one is real.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlx.backends.cpu.builder import NULL, Builder, Int, Module, Value, const, i64, intrinsic_suffix, lanes_of, vector
from rlx.backends.cpu.math import bfloat_to_float, exp2, float_to_bfloat, float_to_half, fma, half_to_float, tanh
from rlx.backends.cpu.matmul import HEADER_BYTES, micro_kernel
from rlx.backends.cpu.routine import Entry, Routine
from rlx.dtypes import BF16, F16, F32, F64, DType
from rlx.errors import LowerError
from rlx.lir.kernels import KEY_BLOCK, AttentionKernel
from rlx.target import Target

MASKS = ("none", "causal", "sliding", "custom", "bias")
SLACK = 8.0  # a row's reference moves only for a score 2**8 times heavier: weights stay small, rescaling is rare
CHUNK = 4  # vectors of scores that the softmax holds in registers
LINE = 64  # bytes of a cache line
LOG2_E = math.log2(math.e)

_SCALAR = {F32: "float", F64: "double"}
_ENTRY_ARGUMENTS = (("ptr noalias", "args"), ("i64", "lo"), ("i64", "hi"), ("ptr noalias", "scratch"))
_POINTER_WORDS = ("parts", "q", "k", "v", "out", "mask")


def entry(kernel: AttentionKernel, target: Target) -> Entry:
    """The loop nest of `kernel`, with the table of micro-kernels that it calls: by width, then by height from 1."""
    plan = Plan(kernel, target)
    heights = range(1, target.tile_rows + 1)
    parts = tuple(micro_kernel(plan.compute, height, width, target) for width in plan.widths for height in heights)
    return Entry(Routine(plan.symbol, lambda module: _define_entry(module, plan)), {"parts": parts})


def scratch_bytes(kernel: AttentionKernel, target: Target) -> int:
    """Scratch that a launch needs, the driver's header included."""
    return Plan(kernel, target).regions["end"]


@dataclass(frozen=True, slots=True)
class Strips:
    """Strips of V's columns: `count` of them side by side from vector `first` on, each `vectors` wide."""

    first: int
    count: int
    vectors: int


@dataclass(frozen=True)
class Plan:
    """What a target makes of a kernel: register sizes, padded extents and the map of scratch."""

    kernel: AttentionKernel
    target: Target

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

    @property
    def symbol(self) -> str:
        return f"attention.{self.kernel.fingerprint}"

    @property
    def mask_dtype(self) -> DType:
        assert self.kernel.mask_dtype is not None, "asked for only where the kernel has a mask operand"
        return self.kernel.mask_dtype

    @property
    def compute(self) -> DType:
        return self.kernel.dtype.compute

    @property
    def scalar(self) -> str:
        return _SCALAR[self.compute]

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
        """Keys of a packed panel of K."""
        return self.target.panel(self.size)

    @property
    def head_stride(self) -> int:
        return self.padded(self.kernel.head_dim)

    @property
    def value_stride(self) -> int:
        return self.padded(self.kernel.value_dim)

    @property
    def rows(self) -> int:
        """Query rows of a unit at most."""
        return self.kernel.positions * self.kernel.group

    @property
    def limited(self) -> bool:
        """Whether rows of a unit see different ranges of keys."""
        return self.kernel.mask in ("causal", "sliding")

    @property
    def packs_values(self) -> bool:
        """V is read where it lies unless it needs widening or padding, or some of its rows have to be left out."""
        ready = self.compute is self.kernel.dtype and self.kernel.value_dim % self.lanes == 0
        return not ready or self.kernel.mask in ("custom", "bias")

    def padded(self, extent: int) -> int:
        return -(-extent // self.lanes) * self.lanes

    @functools.cached_property
    def strips(self) -> tuple[Strips, ...]:
        """V's columns cut evenly: the widest strips first, then those one vector narrower."""
        vectors = self.value_stride // self.lanes
        count = -(-vectors // self.target.tile_vectors)
        width, wider = divmod(vectors, count)
        cut = (Strips(0, wider, width + 1), Strips(wider * (width + 1), count - wider, width))
        return tuple(s for s in cut if s.count)

    @property
    def spans(self) -> tuple[int, ...]:
        """How many keys of a block one step can score: half a block is for short prompts and causal diagonals."""
        if self.panel < KEY_BLOCK:
            return (KEY_BLOCK,)  # in panels, as many as are needed
        return KEY_BLOCK // 2, KEY_BLOCK

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Widths of the micro-kernels in `parts`: those of the spans of keys and of the strips of V."""
        scored = (min(span, self.panel) // self.lanes for span in self.spans)
        return tuple(dict.fromkeys((*scored, *(s.vectors for s in self.strips))))

    @functools.cached_property
    def regions(self) -> dict[str, int]:
        """Byte offsets in scratch, each on a cache line; `end` is its size."""
        sizes = {
            "keys": KEY_BLOCK * self.head_stride * self.size,  # [panel][head_dim][keys of a panel]
            "values": KEY_BLOCK * self.value_stride * self.size * self.packs_values,  # [strip][key][columns]
            "scores": self.target.tile_rows * KEY_BLOCK * self.size,  # [row of a tile][key], later their weights
            "queries": self.rows * self.head_stride * self.size,
            "outputs": self.rows * self.value_stride * self.size,
            "sums": self.rows * self.lanes * self.size,  # a row's sum of weights stays in lanes until the end
            "references": self.rows * self.size,  # per row: the score whose weight is 1; -inf before the first
            "limits": self.rows * 8,  # per row: the first key that it does not see
            "biases": self.rows * 8,  # per row: where its bias lies
            "key_rows": KEY_BLOCK * 8,  # per key of the block: where it lies
            "value_rows": KEY_BLOCK * 8,
            "kept": KEY_BLOCK * self.size,  # per key of the block, for a custom mask: all ones, or 0
            "zeros": self.zero_bytes,  # stands in for keys that do not count
        }
        offsets, end = {}, HEADER_BYTES
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // LINE) * LINE
        return offsets | {"end": end}

    @property
    def zero_bytes(self) -> int:
        return max(self.kernel.head_dim, self.kernel.value_dim) * self.kernel.dtype.size

    def region(self, b: Builder, scratch: Value, name: str, index: Int = 0, unit: str | None = None) -> Value:
        """The address of element `index` of a region of scratch."""
        return b.offset(b.offset(scratch, self.regions[name]), index, unit or self.scalar)


# -- the nest ---------------------------------------------------------------------------------------------------------
def _define_entry(module: Module, plan: Plan) -> None:
    for define in _PARTS:
        define(module, plan)

    def body(b: Builder, args: Value, low: Value, high: Value, scratch: Value) -> None:
        words = {
            name: b.load("ptr" if name in _POINTER_WORDS else "i64", b.offset(args, 8 * i), align=8)
            for i, name in enumerate(plan.kernel.words)
        }
        _clear(b, plan.region(b, scratch, "zeros"), i64(plan.zero_bytes))
        blocks = b.ceil_div(words["q_len"], plan.kernel.positions)

        def unit(index: Value) -> None:
            head = b.sdiv(index, blocks)
            batch, key_head = b.sdiv(head, words["kv_heads"]), b.srem(head, words["kv_heads"])
            first = b.mul(b.srem(index, blocks), plan.kernel.positions)
            positions = b.min(b.sub(words["q_len"], first), plan.kernel.positions)
            rows = b.mul(positions, plan.kernel.group)
            Unit(b, plan, words, scratch, batch, key_head, first, positions, rows).emit()

        b.loop(low, high, 1, unit)

    module.define(plan.symbol, _ENTRY_ARGUMENTS, body)


@dataclass(frozen=True, slots=True)
class Unit:
    """The code of one unit: `positions` query positions from `first` on, in all query heads of a key head."""

    b: Builder
    plan: Plan
    words: dict[str, Value]
    scratch: Value
    batch: Value
    key_head: Value
    first: Value
    positions: Value
    rows: Value

    def emit(self) -> None:
        b, kernel, words = self.b, self.plan.kernel, self.words
        # The first key that the first row does not see, were there keys without end.
        limit = b.add(b.add(b.sub(words["k_len"], words["q_len"]), self.first), 1)
        query_head = b.mul(self.key_head, kernel.group)
        mask = self.mask(query_head)
        strides = words["q_seq"], words["q_head"], words["mask_query"], words["mask_head"]
        queries = self.place("q", query_head, self.first)
        self.call("start", self.scratch, self.positions, queries, mask, *strides, limit)
        begin, end = i64(0), words["k_len"]
        if self.plan.limited:
            end = b.max(b.sub(b.add(limit, self.positions), 1), 0)
        if kernel.mask == "sliding":
            begin = b.sdiv(b.max(b.sub(limit, kernel.window), 0), KEY_BLOCK)

        def block(index: Value) -> None:
            base = b.mul(index, KEY_BLOCK)
            self.block(base, b.min(b.sub(end, base), KEY_BLOCK), mask)

        b.loop(begin, b.ceil_div(end, KEY_BLOCK), 1, block)
        out = self.place("out", query_head, self.first)
        self.call("finish", self.scratch, self.positions, out, words["out_seq"], words["out_head"])

    def call(self, part: str, *arguments: Value, result: str = "void") -> Value:
        return self.b.call(result, f"{self.plan.symbol}.{part}", *arguments)

    def place(self, operand: str, head: Value, position: Value) -> Value:
        """Where a row of q, k, v or out lies."""
        b, index = self.b, i64(0)
        for axis, at in (("batch", self.batch), ("head", head), ("seq", position)):
            index = b.add(index, b.mul(at, self.words[f"{operand}_{axis}"]))
        return b.offset(self.words[operand], b.mul(index, self.plan.kernel.dtype.size))

    def mask(self, query_head: Value) -> Value:
        """Where the mask of this batch row, or the bias of the first query row, lies."""
        b, words, kind = self.b, self.words, self.plan.kernel.mask
        if kind not in ("custom", "bias"):
            return NULL
        index = b.mul(self.batch, words["mask_batch"])
        if kind == "bias":
            index = b.add(index, b.mul(query_head, words["mask_head"]))
            index = b.add(index, b.mul(self.first, words["mask_query"]))
        return b.offset(words["mask"], b.mul(index, self.plan.mask_dtype.size))

    def limit(self, row: Value) -> Value:
        """The first key that a row does not see."""
        return self.b.load("i64", self.plan.region(self.b, self.scratch, "limits", row, "i64"), align=8)

    def block(self, base: Value, count: Value, mask: Value) -> None:
        """All rows against the keys `base` .. `base + count`."""
        b = self.b
        if self.plan.kernel.mask != "custom":
            self.visible_block(base, count, count)
            return
        flags = b.offset(mask, b.mul(base, self.plan.mask_dtype.size))
        kept = self.call("keep", self.scratch, flags, count, result="i64")
        b.when(b.icmp("sgt", kept, 0), lambda: self.visible_block(base, count, kept))

    def visible_block(self, base: Value, count: Value, kept: Value) -> None:
        b, plan = self.b, self.plan
        self.addresses("key_rows", "k", base, count)
        self.call("pack_keys", self.scratch, self.covering(count), self.words["k_seq"])
        if plan.packs_values:
            self.addresses("value_rows", "v", base, count)
            # A bias looks for inf and NaN in all 64 rows, so all have to be there.
            self.call("pack_values", self.scratch, i64(KEY_BLOCK) if plan.kernel.mask == "bias" else count)
        finite = self.call("finite", self.scratch, result="i1") if plan.kernel.mask == "bias" else None

        def tile(row: Value) -> None:
            height = b.min(b.sub(self.rows, row), plan.target.tile_rows)

            def attend() -> None:
                reach = self.reach(row, height, base, count)

                def weights(span: int) -> None:
                    self.scores(row, height, reach, span)
                    self.call(f"softmax{span}", self.scratch, row, height, base, count, kept)

                if len(plan.spans) == 1:
                    weights(KEY_BLOCK)
                else:
                    b.when(b.icmp("sle", reach, plan.spans[0]), *(functools.partial(weights, s) for s in plan.spans))
                Outputs(self, row, height, base, count).emit(finite)

            if plan.limited:
                b.when(self.sees(row, height, base), attend)
            else:
                attend()

        b.loop(0, self.rows, plan.target.tile_rows, tile)

    def addresses(self, region: str, operand: str, base: Value, count: Value) -> None:
        """Note where the rows of the block lie; zeros stand in for those past `count` and those not kept."""
        rows, source = self.plan.region(self.b, self.scratch, region), self.place(operand, self.key_head, base)
        self.call("addresses", self.scratch, rows, source, self.words[f"{operand}_seq"], count)

    def covering(self, count: Value) -> Value:
        """How many keys to pack, so that a step that scores `count` keys reads nothing stale."""
        b, least = self.b, self.plan.spans[0]
        if self.plan.panel < KEY_BLOCK:
            return b.mul(b.ceil_div(count, self.plan.panel), self.plan.panel)
        return b.select(b.icmp("sle", count, least), i64(least), i64(KEY_BLOCK))

    def reach(self, row: Value, height: Value, base: Value, count: Value) -> Value:
        """How far into the block the rows of a tile see."""
        b = self.b
        if not self.plan.limited:
            return count
        return b.min(count, b.sub(self.limit(b.sub(b.add(row, height), 1)), base))

    def sees(self, row: Value, height: Value, base: Value) -> Value:
        """Whether any row of a tile sees any key of the block."""
        b = self.b
        newest = b.icmp("sgt", self.limit(b.sub(b.add(row, height), 1)), base)
        if self.plan.kernel.mask == "causal":
            return newest
        oldest = b.sub(self.limit(row), self.plan.kernel.window)
        return b.op("and", newest, b.icmp("slt", oldest, b.add(base, KEY_BLOCK)))

    def scores(self, row: Value, height: Value, reach: Value, span: int) -> None:
        """scores[height][keys] = queries · keys, for as many keys as are in reach."""
        b, plan, scratch = self.b, self.plan, self.scratch
        queries = plan.region(b, scratch, "queries", b.mul(row, plan.head_stride))
        vectors = min(span, plan.panel) // plan.lanes
        tile = _micro_kernel(b, plan, self.words["parts"], vectors, height)

        def panel(index: Value) -> None:
            keys = plan.region(b, scratch, "keys", b.mul(index, plan.head_stride * plan.panel))
            scores = plan.region(b, scratch, "scores", b.mul(index, plan.panel))
            b.call_pointer(
                tile, queries, i64(plan.head_stride), keys, i64(plan.panel), i64(plan.kernel.head_dim),
                scores, i64(KEY_BLOCK), keys, i64(0), i64(0),
            )  # fmt: skip

        if plan.panel == KEY_BLOCK:
            panel(i64(0))
        else:
            b.loop(0, b.ceil_div(reach, plan.panel), 1, panel)


@dataclass(frozen=True, slots=True)
class Outputs:
    """outputs[height] += weights · values, for one tile. A key that a row does not see is not multiplied: 0 · inf
    is no zero. Whatever goes together, each row adds its keys in order."""

    unit: Unit
    row: Value
    height: Value
    base: Value
    count: Value

    def emit(self, finite: Value | None) -> None:
        """`finite`, for a bias: whether V has no inf and no NaN, so that it does not matter which keys are masked."""
        if self.unit.plan.limited:
            self.limited()
        elif finite is None:
            self.weigh(0, self.height, 0, self.count)
        else:
            self.unit.b.when(finite, lambda: self.weigh(0, self.height, 0, self.count), self.sparse)

    def weigh(self, first: Int, height: Int, begin: Int, end: Int) -> None:
        """Rows `first` .. of the tile and keys `begin` .. `end` of the block."""
        unit, plan, b = self.unit, self.unit.plan, self.unit.b
        weights = plan.region(b, unit.scratch, "scores", b.mul(i64(first), KEY_BLOCK))
        outputs = plan.region(b, unit.scratch, "outputs", b.mul(b.add(self.row, first), plan.value_stride))
        if plan.packs_values:
            values, stride = plan.region(b, unit.scratch, "values"), i64(0)
        else:
            values, stride = unit.place("v", unit.key_head, self.base), unit.words["v_seq"]
        keys = i64(begin), i64(end)
        unit.call("weigh", unit.words["parts"], weights, i64(height), *keys, values, stride, outputs)

    def limited(self) -> None:
        """Keys that all rows of the tile see go together, those before and after them row by row."""
        b, sliding = self.unit.b, self.unit.plan.kernel.mask == "sliding"
        begin = self.seen(b.sub(self.height, 1))[0]
        end = b.max(self.seen(0)[1], begin)

        def before(i: Value) -> None:
            own_begin, own_end = self.seen(i)
            self.alone(i, own_begin, b.min(own_end, begin))

        def after(i: Value) -> None:
            self.alone(i, end, self.seen(i)[1])

        if sliding:
            b.when(b.icmp("sgt", begin, 0), lambda: b.loop(0, b.sub(self.height, 1), 1, before))
        b.when(b.icmp("slt", begin, end), lambda: self.weigh(0, self.height, begin, end))
        b.when(b.icmp("slt", end, self.count), lambda: b.loop(1, self.height, 1, after))

    def seen(self, i: Int) -> tuple[Value, Value]:
        """The keys of the block that a row of the tile sees."""
        b, kernel = self.unit.b, self.unit.plan.kernel
        limit = b.sub(self.unit.limit(b.add(self.row, i)), self.base)
        oldest = b.max(b.sub(limit, kernel.window), 0) if kernel.mask == "sliding" else i64(0)
        return b.min(oldest, self.count), b.max(b.min(limit, self.count), 0)

    def alone(self, i: Value, begin: Value, end: Value) -> None:
        b = self.unit.b
        b.when(b.icmp("slt", begin, end), lambda: self.weigh(i, 1, begin, end))

    def sparse(self) -> None:
        """The slow way for a block with an inf or NaN in V that a bias may hide: keys of weight 0 are left out."""
        unit, plan, b = self.unit, self.unit.plan, self.unit.b

        def row(i: Value) -> None:
            def key(j: Value) -> None:
                place = plan.region(b, unit.scratch, "scores", b.add(b.mul(i, KEY_BLOCK), j))
                weight = b.load(plan.scalar, place, align=plan.size)
                heavy = b.fcmp("une", weight, const(plan.scalar, 0.0))
                b.when(heavy, lambda: self.weigh(i, 1, j, b.add(j, 1)))

            b.loop(0, self.count, 1, key)

        b.loop(0, self.height, 1, row)


def _micro_kernel(b: Builder, plan: Plan, parts: Value, width: int, height: Value) -> Value:
    """The address of the micro-kernel of `width` vectors and `height` rows."""
    index = b.add(height, plan.widths.index(width) * plan.target.tile_rows - 1)
    return b.load("ptr", b.offset(parts, index, "ptr"), align=8)


# -- parts: functions of the kernel's own object ----------------------------------------------------------------------
def _define(
    module: Module, plan: Plan, part: str, signature: str, emit: Callable[..., Value | None], result: str = "void"
) -> None:
    arguments = [(type_, name) for type_, name in (argument.split() for argument in signature.split(", "))]
    module.define(f"{plan.symbol}.{part}", arguments, emit, result=result, internal=True, noinline=True)


def _define_start(module: Module, plan: Plan) -> None:
    """Queries into scratch, widened; outputs and sums at 0; references, limits and places of the bias per row."""
    kernel = plan.kernel

    def emit(
        b: Builder, scratch: Value, positions: Value, queries: Value, mask: Value, q_seq: Value, q_head: Value,
        mask_query: Value, mask_head: Value, limit: Value,
    ) -> None:  # fmt: skip
        rows = b.mul(positions, kernel.group)
        _clear(b, plan.region(b, scratch, "outputs"), b.mul(rows, plan.value_stride * plan.size))
        _clear(b, plan.region(b, scratch, "sums"), b.mul(rows, plan.lanes * plan.size))

        def row(index: Value, i: Value, g: Value) -> None:
            source = b.offset(queries, b.mul(b.add(b.mul(i, q_seq), b.mul(g, q_head)), kernel.dtype.size))
            place = plan.region(b, scratch, "queries", b.mul(index, plan.head_stride))

            def piece(at: Value, live: int) -> None:
                loaded = _load(b, plan, kernel.dtype, b.offset(source, b.mul(at, kernel.dtype.size)), live)
                b.store(loaded, b.offset(place, at, plan.scalar), align=plan.size)

            _sweep(b, kernel.head_dim, plan.lanes, piece)
            reference = plan.region(b, scratch, "references", index)
            b.store(const(plan.scalar, -math.inf), reference, align=plan.size)
            if plan.limited:
                b.store(b.add(limit, i), plan.region(b, scratch, "limits", index, "i64"), align=8)
            if kernel.mask == "bias":
                offset = b.mul(b.add(b.mul(i, mask_query), b.mul(g, mask_head)), plan.mask_dtype.size)
                b.store(b.offset(mask, offset), plan.region(b, scratch, "biases", index, "ptr"), align=8)

        _each_row(b, plan, positions, row)

    _define(
        module, plan, "start", "ptr scratch, i64 positions, ptr queries, ptr mask, i64 q_seq, i64 q_head, "
        "i64 mask_query, i64 mask_head, i64 limit", emit,
    )  # fmt: skip


def _each_row(b: Builder, plan: Plan, positions: Value, body: Callable[[Value, Value, Value], None]) -> None:
    """`body(row, position, head)` for the rows of a unit: the heads of a position are neighbours."""

    def position(i: Value) -> None:
        def head(g: Value) -> None:
            body(b.add(b.mul(i, plan.kernel.group), g), i, g)

        if plan.kernel.group == 1:
            head(i64(0))
        else:
            b.loop(0, plan.kernel.group, 1, head)

    b.loop(0, positions, 1, position)


def _sweep(b: Builder, extent: int, step: int, body: Callable[[Value, int], None], unroll: int = 4) -> None:
    """`body(start, live)` for each `step` elements of a constant extent; the last ones may be fewer."""
    whole = extent // step
    while whole % unroll:
        unroll //= 2

    def several(start: Value) -> None:
        for n in range(unroll):
            body(b.add(start, n * step), step)

    if whole == unroll:
        several(i64(0))
    elif whole:
        b.loop(0, whole * step, unroll * step, several)
    if extent % step:
        body(i64(whole * step), extent % step)


def _clear(b: Builder, place: Value, size: Value) -> None:
    b.call("void", "llvm.memset.p0.i64", place, Value("i8", "0"), size, Value("i1", "false"))


def _define_keep(module: Module, plan: Plan) -> None:
    """The keys of a block that a custom mask keeps, as words of ones, and how many they are."""
    if plan.kernel.mask != "custom":
        return

    def emit(b: Builder, scratch: Value, flags: Value, count: Value) -> Value:
        _clear(b, plan.region(b, scratch, "kept"), i64(KEY_BLOCK * plan.size))

        def key(j: Value, kept: Value) -> list[Value]:
            flag = _is_kept(b, plan.mask_dtype, b.offset(flags, b.mul(j, plan.mask_dtype.size)))
            ones = b.convert("sext", flag, plan.word)
            b.store(ones, plan.region(b, scratch, "kept", j, plan.word), align=plan.size)
            return [b.add(kept, b.convert("zext", flag, "i64"))]

        return b.loop(0, count, 1, key, [i64(0)])[0]

    _define(module, plan, "keep", "ptr scratch, ptr flags, i64 count", emit, result="i64")


def _is_kept(b: Builder, dtype: DType, place: Value) -> Value:
    """Whether a mask element is true or at least 0.5. Floats compare as integers: positive ones have the same order."""
    bits = b.load(f"i{8 * dtype.size}", place, align=dtype.size)
    if not dtype.is_float:
        return b.icmp("sgt" if dtype.kind == "int" else "ne", bits, 0)
    half, infinity = (int(np.array(x, dtype.numpy).view(f"i{dtype.size}")) for x in (0.5, np.inf))
    return b.op("and", b.icmp("sge", bits, half), b.icmp("sle", bits, infinity))


def _define_addresses(module: Module, plan: Plan) -> None:
    """Where the 64 rows of a block lie, for the packing parts; rows that do not count lie in the zeros."""
    lanes = plan.target.lanes(8)

    def emit(b: Builder, scratch: Value, rows: Value, source: Value, stride: Value, count: Value) -> None:
        zeros = b.splat(b.convert("ptrtoint", plan.region(b, scratch, "zeros"), "i64"), lanes)
        first, apart = b.convert("ptrtoint", source, "i64"), b.mul(stride, plan.kernel.dtype.size)
        places = b.splat(first, lanes)
        for lane in range(1, lanes):
            places = b.insert(places, b.add(first, b.mul(apart, lane)), lane)
        step = b.splat(b.mul(apart, lanes), lanes)

        def several(j: Value, places: Value) -> list[Value]:
            if plan.kernel.mask == "custom":
                kept = b.load(vector(lanes, plan.word), plan.region(b, scratch, "kept", j, plan.word), align=plan.size)
                counts = b.icmp("ne", kept, const(kept.type, 0))
            else:
                counts = b.lane_mask(b.sub(count, j), lanes)
            b.store(b.select(counts, places, zeros), b.offset(rows, j, "i64"), align=8)
            return [b.op("add", places, step)]

        b.loop(0, KEY_BLOCK, lanes, several, [places])

    _define(module, plan, "addresses", "ptr scratch, ptr rows, ptr source, i64 stride, i64 count", emit)


def _define_pack_keys(module: Module, plan: Plan) -> None:
    """K of the block into panels [head_dim][keys of a panel], `lanes` keys at a time."""
    dtype, lanes = plan.kernel.dtype, plan.lanes
    square = 16 // plan.size  # keys and columns of one transposition: 128 bits, which x86 inserts while it loads

    def emit(b: Builder, scratch: Value, count: Value, stride: Value) -> None:
        next_block = b.mul(stride, KEY_BLOCK * dtype.size)

        def several(key: Value) -> None:
            where = plan.region(b, scratch, "key_rows", key, "ptr")
            rows = [b.load("ptr", b.offset(where, 8 * i), align=8) for i in range(lanes)]
            panel, column = b.sdiv(key, plan.panel), b.srem(key, plan.panel)
            place = plan.region(b, scratch, "keys", b.add(b.mul(panel, plan.head_stride * plan.panel), column))

            def squares(at: Value, live: int) -> None:
                offset, sides = b.mul(at, dtype.size), []
                for i in range(square):
                    pieces = [_load_stored(b, dtype, b.offset(r, offset), square, live) for r in rows[i::square]]
                    sides.append(_widen(b, plan, _join(b, pieces), dtype))
                # Also the lines past head_dim, for which there is padding: LLVM 22 moves interleavings of which only
                # the low halves are used to before the widening of f16, and gets them wrong.
                for i, line in enumerate(_transpose(b, sides, square)):
                    b.store(line, b.offset(place, b.mul(b.add(at, i), plan.panel), plan.scalar), align=plan.size)

            def line(at: Value, live: int) -> None:
                steps = range(0, live, square)
                share = -(-lanes // len(steps))
                for n, step in enumerate(steps):
                    for row in rows[n * share : (n + 1) * share]:
                        # Into L2, which can have more lines under way than L1: 1.3 times as fast from memory.
                        b.prefetch(b.offset(b.offset(row, b.mul(at, dtype.size)), next_block), locality=2)
                    squares(b.add(at, step), min(square, live - step))

            _sweep(b, plan.kernel.head_dim, LINE // dtype.size, line, unroll=1)

        b.loop(0, count, lanes, several)

    _define(module, plan, "pack_keys", "ptr scratch, i64 count, i64 stride", emit)


def _join(b: Builder, pieces: Sequence[Value]) -> Value:
    """Vectors end to end."""
    while len(pieces) > 1:
        width = 2 * lanes_of(pieces[0].type)
        pieces = [b.shuffle(x, y, range(width)) for x, y in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def _transpose(b: Builder, rows: list[Value], square: int) -> list[Value]:
    """Transpose the squares that lie side by side in the rows, each `square` lanes wide."""
    if len(rows) == 1:
        return rows
    half, lanes = len(rows) // 2, lanes_of(rows[0].type)

    def interleave(first: int) -> list[Value]:
        starts = range(first, lanes, square)
        pattern = [lane + side for s in starts for lane in range(s, s + square // 2) for side in (0, lanes)]
        return [b.shuffle(x, y, pattern) for x, y in zip(rows[:half], rows[half:], strict=True)]

    return _transpose(b, interleave(0), square) + _transpose(b, interleave(square // 2), square)


def _define_pack_values(module: Module, plan: Plan) -> None:
    """V of the block into strips [key][columns of a strip], as the micro-kernels of the strips read them."""
    if not plan.packs_values:
        return
    dtype, lanes = plan.kernel.dtype, plan.lanes

    def emit(b: Builder, scratch: Value, count: Value) -> None:
        def key(j: Value) -> None:
            row = b.load("ptr", plan.region(b, scratch, "value_rows", j, "ptr"), align=8)

            def strip(first: Value, vectors: int, live: int) -> None:
                index = b.add(b.mul(first, KEY_BLOCK * lanes), b.mul(j, vectors * lanes))
                place = plan.region(b, scratch, "values", index)
                for v in range(vectors):
                    at = b.mul(b.add(first, v), lanes * dtype.size)
                    loaded = _load(b, plan, dtype, b.offset(row, at), live if v == vectors - 1 else lanes)
                    b.store(loaded, b.offset(place, v * lanes, plan.scalar), align=plan.size)

            _each_strip(b, plan, strip)

        b.loop(0, count, 1, key)

    _define(module, plan, "pack_values", "ptr scratch, i64 count", emit)


def _each_strip(b: Builder, plan: Plan, body: Callable[[Value, int, int], None]) -> None:
    """`body(first vector, vectors, live lanes of the last vector)` for each strip of V."""
    final = plan.strips[-1]
    for strips in plan.strips:

        def strip(index: Value, strips: Strips = strips) -> None:
            body(b.add(b.mul(index, strips.vectors), strips.first), strips.vectors, plan.lanes)

        whole = strips.count - (strips is final)
        if whole == 1:
            strip(i64(0))
        elif whole:
            b.loop(0, whole, 1, strip)
    live = plan.kernel.value_dim - (plan.value_stride - plan.lanes)
    body(i64(final.first + (final.count - 1) * final.vectors), final.vectors, live)


def _define_finite(module: Module, plan: Plan) -> None:
    """Whether the packed V has no inf and no NaN: those times 0 are NaN, and NaN stays."""
    if plan.kernel.mask != "bias":
        return

    def emit(b: Builder, scratch: Value) -> Value:
        zero = const(plan.vector, 0.0)

        def piece(at: Value, total: Value) -> list[Value]:
            loaded = b.load(plan.vector, plan.region(b, scratch, "values", at), align=plan.size)
            return [b.op("fadd", total, b.op("fmul", loaded, zero))]

        total = b.loop(0, KEY_BLOCK * plan.value_stride, plan.lanes, piece, [zero])[0]
        folded = b.fold(total, lambda x, y: b.op("fadd", x, y))
        return b.fcmp("ord", folded, folded)

    _define(module, plan, "finite", "ptr scratch", emit, result="i1")


def _define_weigh(module: Module, plan: Plan) -> None:
    """outputs[height] += weights[height][begin..end] · values[begin..end], strip by strip."""

    def emit(
        b: Builder, parts: Value, weights: Value, height: Value, begin: Value, end: Value, values: Value,
        stride: Value, outputs: Value,
    ) -> None:  # fmt: skip
        left, keys = b.offset(weights, begin, plan.scalar), b.sub(end, begin)

        def strip(first: Value, vectors: int, _: int) -> None:
            column = b.mul(first, plan.lanes)
            apart, start = stride, column
            if plan.packs_values:
                apart, start = i64(vectors * plan.lanes), b.mul(column, KEY_BLOCK)
            right = b.offset(values, b.add(start, b.mul(begin, apart)), plan.scalar)
            ahead, step = b.offset(right, b.mul(apart, KEY_BLOCK), plan.scalar), b.mul(apart, plan.size)
            if plan.packs_values:
                ahead, step = right, i64(0)
            b.call_pointer(
                _micro_kernel(b, plan, parts, vectors, height), left, i64(KEY_BLOCK), right, apart, keys,
                b.offset(outputs, column, plan.scalar), i64(plan.value_stride), ahead, step, i64(1),
            )  # fmt: skip

        _each_strip(b, plan, strip)

    _define(
        module, plan, "weigh", "ptr parts, ptr weights, i64 height, i64 begin, i64 end, ptr values, i64 stride, "
        "ptr outputs", emit,
    )  # fmt: skip


def _define_finish(module: Module, plan: Plan) -> None:
    """Outputs over sums of weights, rounded to the stored type; zeros for a row that saw no key."""
    kernel = plan.kernel

    def emit(b: Builder, scratch: Value, positions: Value, out: Value, out_seq: Value, out_head: Value) -> None:
        def row(index: Value, i: Value, g: Value) -> None:
            sums = b.load(plan.vector, plan.region(b, scratch, "sums", b.mul(index, plan.lanes)), align=plan.size)
            total = b.fold(sums, lambda x, y: b.op("fadd", x, y))
            zero, one = const(plan.scalar, 0.0), const(plan.scalar, 1.0)
            share = b.splat(b.select(b.fcmp("oeq", total, zero), zero, b.op("fdiv", one, total)), plan.lanes)
            source = plan.region(b, scratch, "outputs", b.mul(index, plan.value_stride))
            place = b.offset(out, b.mul(b.add(b.mul(i, out_seq), b.mul(g, out_head)), kernel.dtype.size))

            def piece(at: Value, live: int) -> None:
                loaded = b.load(plan.vector, b.offset(source, at, plan.scalar), align=plan.size)
                # Adding 0 makes -0 a 0: which of them an underflow leaves depends on how many keys were multiplied.
                result = b.op("fadd", b.op("fmul", loaded, share), const(plan.vector, 0.0))
                _store(b, plan, result, b.offset(place, b.mul(at, kernel.dtype.size)), live)

            _sweep(b, kernel.value_dim, plan.lanes, piece)

        _each_row(b, plan, positions, row)

    _define(module, plan, "finish", "ptr scratch, i64 positions, ptr out, i64 out_seq, i64 out_head", emit)


# -- softmax ----------------------------------------------------------------------------------------------------------
def _define_softmax(module: Module, plan: Plan) -> None:
    """Scores of `height` rows become weights; references, sums and outputs of the rows follow."""
    for span in plan.spans:

        def emit(
            b: Builder, scratch: Value, first: Value, height: Value, base: Value, count: Value, kept: Value,
            span: int = span,
        ) -> None:  # fmt: skip
            def row(i: Value) -> None:
                _softmax_row(Scorer(b, plan, span, scratch, b.add(first, i), base, count, kept), i)

            b.loop(0, height, 1, row)

        signature = "ptr scratch, i64 first, i64 height, i64 base, i64 count, i64 kept"
        _define(module, plan, f"softmax{span}", signature, emit)


_PARTS = (
    _define_start, _define_keep, _define_addresses, _define_pack_keys, _define_pack_values, _define_finite,
    _define_softmax, _define_weigh, _define_finish,
)  # fmt: skip


def _softmax_row(scorer: Scorer, i: Value) -> None:
    """One row. If its scores fill few registers they stay there, else they go back to scratch between the passes."""
    b, plan, scratch, row = scorer.b, scorer.plan, scorer.scratch, scorer.row
    scores = plan.region(b, scratch, "scores", b.mul(i, KEY_BLOCK))
    vectors = min(CHUNK, scorer.span // plan.lanes)
    step = vectors * plan.lanes
    in_registers = step == scorer.span

    def at(j: Value, n: int) -> Value:
        return b.offset(scores, b.add(j, n * plan.lanes), plan.scalar)

    def load(j: Value) -> list[Value]:
        return [b.load(plan.vector, at(j, n), align=plan.size) for n in range(vectors)]

    def save(j: Value, values: list[Value]) -> None:
        for n, value in enumerate(values):
            b.store(value, at(j, n), align=plan.size)

    def scan(whole: bool) -> list[Value]:
        """The greatest scores, lane by lane, and all scores if they stay in registers."""
        if in_registers:
            found = scorer.scores(load(i64(0)), i64(0), whole)
            return [_tree(found, scorer.greater), *found]

        def several(j: Value, greatest: Value) -> list[Value]:
            found = scorer.scores(load(j), j, whole)
            save(j, found)
            return [_tree([greatest, *found], scorer.greater)]

        return b.loop(0, scorer.end_within_block(), step, several, [const(plan.vector, -math.inf)])

    greatest, *held = b.when(scorer.sees_all(), lambda: scan(True), lambda: scan(False))
    peak = b.fold(greatest, scorer.greater)
    place = plan.region(b, scratch, "references", row)
    old = b.load(plan.scalar, place, align=plan.size)
    # A row is at -inf before its first key, and so is a peak of masked scores, for which nothing moves.
    moved = b.fcmp("ogt", peak, b.op("fadd", old, const(plan.scalar, scorer.slack)))
    new = b.select(moved, peak, old)
    b.store(new, place, align=plan.size)
    # Never -inf, so that a masked score less the reference is -inf and not NaN.
    lowest = const(plan.scalar, float(np.finfo(plan.compute.numpy).min))
    reference = b.splat(scorer.greater(new, lowest), plan.lanes)

    def weigh(j: Value, found: list[Value]) -> Value:
        weights = [scorer.weight(b.op("fsub", score, reference)) for score in found]
        save(j, weights)
        return _tree(weights, scorer.plus)

    if in_registers:
        fresh = weigh(i64(0), held)
    else:
        end, zero = scorer.end_within_block(), const(plan.vector, 0.0)
        fresh = b.loop(0, end, step, lambda j, total: [scorer.plus(total, weigh(j, load(j)))], [zero])[0]
    sums = plan.region(b, scratch, "sums", b.mul(row, plan.lanes))
    before = b.load(plan.vector, sums, align=plan.size)

    def rescale() -> list[Value]:
        factor = scorer.weight(b.op("fsub", b.splat(old, plan.lanes), reference))
        outputs = plan.region(b, scratch, "outputs", b.mul(row, plan.value_stride))

        def piece(start: Value, _: int) -> None:
            place = b.offset(outputs, start, plan.scalar)
            b.store(b.op("fmul", b.load(plan.vector, place, align=plan.size), factor), place, align=plan.size)

        _sweep(b, plan.value_stride, plan.lanes, piece)
        return [b.op("fmul", before, factor)]

    heavier = b.op("and", moved, b.fcmp("one", old, const(plan.scalar, -math.inf)))
    scaled = b.when(heavier, rescale, lambda: [before])[0]
    b.store(scorer.plus(scaled, fresh), sums, align=plan.size)


class Scorer:
    """How products of a query and keys become scores, and scores become weights, for one row."""

    def __init__(
        self, b: Builder, plan: Plan, span: int, scratch: Value, row: Value, base: Value, count: Value, kept: Value
    ) -> None:
        self.b, self.plan, self.span, self.scratch, self.row = b, plan, span, scratch, row
        kernel = plan.kernel
        self.begin, self.end, self.kept = i64(0), count, kept
        if plan.limited:
            limit = b.load("i64", plan.region(b, scratch, "limits", row, "i64"), align=8)
            self.end = self.kept = b.sub(limit, base)
        if kernel.mask == "sliding":
            self.begin = b.sub(self.end, kernel.window)
        if kernel.mask == "bias":
            start = b.load("ptr", plan.region(b, scratch, "biases", row, "ptr"), align=8)
            self.bias = b.offset(start, b.mul(base, plan.mask_dtype.size))
        # A score times `exponent` is the logarithm of its weight in base 2. Scores stay in the unit in which they come
        # as long as a greater one is a heavier one, because then there is nothing to compute.
        cap = abs(kernel.softcap)
        natural = kernel.mask == "bias" or (not cap and kernel.scale <= 0)
        self.exponent = LOG2_E * (1.0 if natural else cap or kernel.scale)

    @property
    def slack(self) -> float:
        """SLACK in the unit of scores; bounded, so that -inf plus it stays -inf."""
        return min(SLACK / self.exponent, 1e30)

    def sees_all(self) -> Value:
        """Whether the row sees all keys of the span."""
        b = self.b
        whole = b.icmp("sge", self.kept, self.span)
        if self.plan.kernel.mask != "sliding":
            return whole
        return b.op("and", whole, b.icmp("sle", self.begin, 0))

    def end_within_block(self) -> Value:
        return self.b.min(self.end, KEY_BLOCK)

    def scores(self, products: list[Value], j: Value, whole: bool) -> list[Value]:
        """The scores of the keys from j on, -inf for those that the row does not see; `whole`: it sees all."""
        seen: Sequence[Value | None] = [None] * len(products) if whole else self._seen(j, len(products))
        places = [self.b.add(j, n * self.plan.lanes) for n in range(len(products))]
        return [self._score(*each) for each in zip(products, places, seen, strict=True)]

    def _score(self, product: Value, j: Value, seen: Value | None) -> Value:
        b, plan, kernel = self.b, self.plan, self.plan.kernel
        masked, cap = const(plan.vector, -math.inf), abs(kernel.softcap)
        score, scale = product, kernel.scale
        if cap:
            score = tanh(b, b.op("fmul", score, const(plan.vector, scale / cap)), plan.target)
            scale = cap
        if kernel.mask == "bias":
            bias = self._bias(j, seen)
            score = fma(b, score, const(plan.vector, scale), bias, plan.target)
            score = b.select(b.fcmp("oeq", bias, masked), masked, score)
        elif scale <= 0:
            score = b.op("fmul", score, const(plan.vector, scale))
        return score if seen is None else b.select(seen, score, masked)

    def _bias(self, j: Value, seen: Value | None) -> Value:
        """The bias of the keys from j on; where the row does not see all of them, only those are read."""
        b, plan, dtype = self.b, self.plan, self.plan.mask_dtype
        place = b.offset(self.bias, b.mul(j, dtype.size))
        if seen is None:
            return _load(b, plan, dtype, place, plan.lanes)
        type_ = vector(plan.lanes, _stored(dtype))
        loaded = b.call(type_, f"llvm.masked.load.{intrinsic_suffix(type_)}.p0", place, seen, const(type_, 0))
        return _widen(b, plan, loaded, dtype)

    def _seen(self, j: Value, vectors: int) -> list[Value]:
        """Masks of those keys from j on that the row sees, one a vector."""
        b, plan, lanes = self.b, self.plan, self.plan.lanes
        type_ = vector(lanes, plan.word)
        if plan.kernel.mask == "custom":
            kept = plan.region(b, self.scratch, "kept", j, plan.word)
            flags = [b.load(type_, b.offset(kept, n * lanes, plan.word), align=plan.size) for n in range(vectors)]
            return [b.icmp("ne", flag, const(type_, 0)) for flag in flags]
        numbers = [b.op("add", b.iota(lanes, plan.word), const(type_, n * lanes)) for n in range(vectors)]
        end = self._in_lanes(b.sub(self.end, j))
        seen = [b.icmp("slt", number, end) for number in numbers]
        if plan.kernel.mask == "sliding":
            begin = self._in_lanes(b.sub(self.begin, j))
            seen = [b.op("and", s, b.icmp("sge", number, begin)) for s, number in zip(seen, numbers, strict=True)]
        return seen

    def _in_lanes(self, key: Value) -> Value:
        """A key number in every lane, clamped to the block, where it fits a narrow integer."""
        b, plan = self.b, self.plan
        clamped = b.max(b.min(key, KEY_BLOCK), 0)
        return b.splat(b.convert("trunc", clamped, plan.word), plan.lanes)

    def weight(self, difference: Value) -> Value:
        """The weight of a score, given how far it is from the reference."""
        scaled = self.b.op("fmul", difference, const(self.plan.vector, self.exponent))
        return exp2(self.b, scaled, self.plan.target)

    def greater(self, x: Value, y: Value) -> Value:
        """One instruction on x86. A NaN may get lost here, but not its weight, which makes the row's sum NaN."""
        return self.b.select(self.b.fcmp("ogt", x, y), x, y)

    def plus(self, x: Value, y: Value) -> Value:
        return self.b.op("fadd", x, y)


def _tree(values: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """All values combined pairwise."""
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        values = [*(combine(x, y) for x, y in zip(values[::2], values[1::2], strict=False)), *odd]
    return values[0]


# -- elements ---------------------------------------------------------------------------------------------------------
# Partial vectors are moved lane by lane, not under a mask: LLVM joins neighbouring lanes by itself, also where the
# target has no masks, and LLVM 22 turns a masked store of one narrowed lane into a store of its wide original.
def _stored(dtype: DType) -> str:
    """The LLVM type in which an element is moved."""
    return f"i{8 * dtype.size}" if dtype.size < 4 else _SCALAR[dtype]


def _load(b: Builder, plan: Plan, dtype: DType, pointer: Value, live: int) -> Value:
    """`live` stored elements as a vector of the compute type, zeros in the other lanes, which are not read."""
    return _widen(b, plan, _load_stored(b, dtype, pointer, plan.lanes, live), dtype)


def _load_stored(b: Builder, dtype: DType, pointer: Value, lanes: int, live: int) -> Value:
    type_ = vector(lanes, _stored(dtype))
    if live >= lanes:
        return b.load(type_, pointer, align=dtype.size)
    loaded = const(type_, 0)
    for lane in range(live):
        element = b.load(_stored(dtype), b.offset(pointer, lane * dtype.size), align=dtype.size)
        loaded = b.insert(loaded, element, lane)
    return loaded


def _widen(b: Builder, plan: Plan, stored: Value, dtype: DType) -> Value:
    """A stored vector in the compute type of the kernel."""
    if dtype is F16:
        stored = half_to_float(b, stored, plan.target)
    elif dtype is BF16:
        stored = bfloat_to_float(b, stored, plan.target)
    if dtype.compute is plan.compute:
        return stored
    return b.convert("fpext" if plan.compute is F64 else "fptrunc", stored, vector(lanes_of(stored.type), plan.scalar))


def _store(b: Builder, plan: Plan, value: Value, pointer: Value, live: int) -> None:
    """The first `live` lanes, rounded to the stored type."""
    dtype = plan.kernel.dtype
    if dtype is F16:
        value = float_to_half(b, value, plan.target)
    elif dtype is BF16:
        value = float_to_bfloat(b, value, plan.target)
    if live >= plan.lanes:
        b.store(value, pointer, align=dtype.size)
        return
    for lane in range(live):
        b.store(b.extract(value, lane), b.offset(pointer, lane * dtype.size), align=dtype.size)
