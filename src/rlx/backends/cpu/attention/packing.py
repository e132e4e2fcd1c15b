"""Making a block of K and V ready for the micro-kernels: transposed, widened, padded, or without what a mask drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.backends.cpu.attention.elements import fetch, load, load_packed, load_scales, load_stored, sweep, unpack, widen
from rlx.backends.cpu.attention.plan import Plan, Strips
from rlx.backends.cpu.builder import Builder, Module, Value, const, i64, intrinsic_suffix, lanes_of, vector
from rlx.backends.cpu.targets import KEY_BLOCK
from rlx.dtypes import DType
from rlx.host_memory import LINE
from rlx.lir.forms.quant_blocks import UNIT


def define_keep(module: Module, plan: Plan) -> None:
    """The keys of a block that a custom mask keeps, as words of ones, and how many they are."""
    if plan.kernel.mask != "custom":
        return

    def emit(b: Builder, scratch: Value, flags: Value, count: Value) -> Value:
        dtype, lanes = plan.mask_dtype, plan.lanes
        type_ = vector(lanes, f"i{8 * dtype.size}")

        def keys(j: Value, kept: Value) -> list[Value]:
            place, there = b.offset(flags, b.mul(j, dtype.size)), b.lane_mask(b.sub(count, j), lanes)
            bits = b.call(type_, f"llvm.masked.load.{intrinsic_suffix(type_)}.p0", place, there, const(type_, 0))
            flag = _is_kept(b, dtype, bits)
            ones = b.convert("sext", flag, vector(lanes, plan.word))
            b.store(ones, plan.region(b, scratch, "kept", j, plan.word), align=plan.size)
            number = b.intrinsic("ctpop", b.convert("bitcast", flag, f"i{lanes}"))
            return [b.add(kept, b.convert("zext", number, "i64"))]

        return b.loop(0, KEY_BLOCK, lanes, keys, [i64(0)])[0]

    plan.define(module, "keep", "ptr scratch, ptr flags, i64 count", emit, result="i64")


def _is_kept(b: Builder, dtype: DType, bits: Value) -> Value:
    """Which mask elements are true or at least 0.5; of 0, this is false.

    Floats compare as integers: positive ones have the same order.
    """
    if not dtype.is_float:
        return b.icmp("sgt" if dtype.kind == "int" else "ne", bits, const(bits.type, 0))
    half, infinity = (const(bits.type, int(np.array(x, dtype.numpy).view(f"i{dtype.size}"))) for x in (0.5, np.inf))
    return b.op("and", b.icmp("sge", bits, half), b.icmp("sle", bits, infinity))


def define_addresses(module: Module, plan: Plan) -> None:
    """Where the 64 rows of a block lie, for the packing parts; rows that do not count lie in the zeros."""
    if not (plan.packs_keys or plan.packs_values):
        return
    lanes = plan.target.lanes(8)

    def emit(b: Builder, scratch: Value, rows: Value, source: Value, stride: Value, count: Value) -> None:
        zeros = b.splat(b.convert("ptrtoint", plan.region(b, scratch, "zeros"), "i64"), lanes)
        first, apart = b.convert("ptrtoint", source, "i64"), b.mul(stride, plan.stride_bytes)
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

    plan.define(module, "addresses", "ptr scratch, ptr rows, ptr source, i64 stride, i64 count", emit)


def define_pack_keys(module: Module, plan: Plan) -> None:
    """K of the block into panels [head_dim][keys of a panel]."""
    if plan.packs_keys:
        define_turned(module, plan, "pack_keys", "key_rows", "keys", plan.kernel.head_dim)


def define_turned(module: Module, plan: Plan, part: str, rows_at: str, panels: str, extent: int) -> None:
    """Rows of the block, `extent` columns each, into panels [column][keys of a panel], `lanes` keys at a time.

    What lies `ahead` bytes after a row is fetched.
    """
    dtype, lanes = plan.stored, plan.lanes
    square = 16 // plan.size  # keys and columns of one transposition: 128 bits, which x86 inserts while it loads

    def emit(b: Builder, scratch: Value, count: Value, ahead: Value) -> None:
        def several(key: Value) -> None:
            where = plan.region(b, scratch, rows_at, key, "ptr")
            rows = [b.load("ptr", b.offset(where, 8 * i), align=8) for i in range(lanes)]
            panel, column = b.sdiv(key, plan.panel), b.srem(key, plan.panel)
            place = plan.region(b, scratch, panels, b.add(b.mul(panel, plan.padded(extent) * plan.panel), column))

            def squares(at: Value, live: int) -> None:
                offset, sides = b.mul(at, dtype.size), []
                for i in range(square):
                    pieces = [load_stored(b, dtype, b.offset(r, offset), square, live) for r in rows[i::square]]
                    sides.append(widen(b, plan, _join(b, pieces), dtype))
                # Also the lines past the extent, for which there is padding: LLVM 22 moves interleavings of which only
                # the low halves are used to before the widening of f16, and gets them wrong.
                for i, line in enumerate(_transpose(b, sides, square)):
                    b.store(line, b.offset(place, b.mul(b.add(at, i), plan.panel), plan.scalar), align=plan.size)

            def line(at: Value, live: int) -> None:
                steps = range(0, live, square)
                share = -(-lanes // len(steps))
                for n, step in enumerate(steps):
                    for row in rows[n * share : (n + 1) * share]:
                        # Into L2, which can have more lines under way than L1: 1.3 times as fast from memory.
                        b.prefetch(b.offset(b.offset(row, b.mul(at, dtype.size)), ahead), locality=2)
                    squares(b.add(at, step), min(square, live - step))

            sweep(b, extent, LINE // dtype.size, line, unroll=1)

        b.loop(0, count, lanes, several)

    plan.define(module, part, "ptr scratch, i64 count, i64 ahead", emit)


def define_widen_keys(module: Module, plan: Plan) -> None:
    """A block of a cache of narrow keys, [head_dim][64] as it is."""
    if not plan.widens_keys or plan.packed:
        return
    dtype, lanes = plan.stored, plan.lanes
    elements = plan.kernel.head_dim * KEY_BLOCK

    def emit(b: Builder, scratch: Value, keys: Value, following: Value) -> None:
        def line(at: Value, live: int) -> None:
            source = b.offset(keys, b.mul(at, dtype.size))
            b.prefetch(b.offset(following, b.mul(at, dtype.size)), locality=2)  # of the next page
            for n in range(0, live, lanes):
                widened = load(b, plan, dtype, b.offset(source, n * dtype.size), lanes)
                b.store(widened, plan.region(b, scratch, "keys", b.add(at, n)), align=plan.size)

        sweep(b, elements, LINE // dtype.size, line)

    plan.define(module, "widen_keys", "ptr scratch, ptr keys, ptr following", emit)


def define_unpack_keys(module: Module, plan: Plan) -> None:
    """64 packed rows of a cache as [head_dim][64]. They are turned while they are bytes: a vector holds most then."""
    if not plan.packed:
        return
    storage, lanes, square = plan.stored, plan.lanes, 16  # bytes: what x86 interleaves within
    row = plan.row_bytes(plan.kernel.head_dim)

    def emit(b: Builder, scratch: Value, keys: Value, following: Value) -> None:
        def block(index: Value) -> None:
            first, fetched = (b.offset(page, b.mul(index, storage.size)) for page in (keys, following))
            blocks = [b.offset(first, j * row) for j in range(KEY_BLOCK)]
            for j in range(KEY_BLOCK):  # of the next page
                b.prefetch(b.offset(fetched, j * row), locality=2)
            scales = [load_scales(b, plan, blocks[j : j + lanes], lanes) for j in range(0, KEY_BLOCK, lanes)]
            for part in range(0, storage.block, square):
                pieces = [b.load(vector(square, "i8"), b.offset(p, UNIT + part), align=1) for p in blocks]
                lines = _transpose(b, [_join(b, pieces[i::square]) for i in range(square)], square)
                for i, line in enumerate(lines):
                    at = b.mul(b.add(b.mul(index, storage.block), part + i), KEY_BLOCK)
                    for n, scale in enumerate(scales):
                        numbers = b.shuffle(line, line, range(n * lanes, (n + 1) * lanes))
                        place = plan.region(b, scratch, "keys", b.add(at, n * lanes))
                        b.store(unpack(b, plan, numbers, scale), place, align=plan.size)

        b.loop(0, plan.kernel.head_dim // storage.block, 1, block)

    plan.define(module, "unpack_keys", "ptr scratch, ptr keys, ptr following", emit)


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


def define_pack_values(module: Module, plan: Plan) -> None:
    """V of the block into strips [key][columns of a strip], as the micro-kernels of the strips read them."""
    if not plan.packs_values:
        return
    dtype, lanes = plan.stored, plan.lanes

    def emit(b: Builder, scratch: Value, count: Value, ahead: Value) -> None:
        def key(j: Value) -> None:
            row = b.load("ptr", plan.region(b, scratch, "value_rows", j, "ptr"), align=8)
            if not plan.kernel.cached:  # there, the first tile fetches
                fetch(b, b.offset(row, ahead), plan.row_bytes(plan.kernel.value_dim), locality=2)

            def strip(first: Value, vectors: int, live: int) -> None:
                index = b.add(b.mul(first, KEY_BLOCK * lanes), b.mul(j, vectors * lanes))
                place = plan.region(b, scratch, "values", index)
                for v in range(vectors):
                    column = b.mul(b.add(first, v), lanes)
                    if plan.packed:
                        loaded = load_packed(b, plan, row, column)
                    else:
                        at = b.mul(column, dtype.size)
                        loaded = load(b, plan, dtype, b.offset(row, at), live if v == vectors - 1 else lanes)
                    b.store(loaded, b.offset(place, v * lanes, plan.scalar), align=plan.size)

            each_strip(b, plan, strip)

        b.loop(0, count, 1, key)

    plan.define(module, "pack_values", "ptr scratch, i64 count, i64 ahead", emit)


def each_strip(b: Builder, plan: Plan, body: Callable[[Value, int, int], None]) -> None:
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


def define_finite(module: Module, plan: Plan) -> None:
    """Whether the packed V has no inf and no NaN: those times 0 are NaN, and NaN stays."""
    if not plan.checks_values:
        return

    def emit(b: Builder, scratch: Value) -> Value:
        zero = const(plan.vector, 0.0)

        def piece(at: Value, total: Value) -> list[Value]:
            loaded = b.load(plan.vector, plan.region(b, scratch, "values", at), align=plan.size)
            return [b.op("fadd", total, b.op("fmul", loaded, zero))]

        total = b.loop(0, KEY_BLOCK * plan.value_stride, plan.lanes, piece, [zero])[0]
        folded = b.fold(total, lambda x, y: b.op("fadd", x, y))
        return b.fcmp("ord", folded, folded)

    plan.define(module, "finite", "ptr scratch", emit, result="i1")
