"""The loops of attention: units, blocks of 64 keys, tiles of query rows, and the micro-kernels that they call."""

from __future__ import annotations

import functools
from dataclasses import replace

from rlx.backends.cpu.attention import outputs, packing, rows, segments, softmax
from rlx.backends.cpu.attention.elements import clear, fetch
from rlx.backends.cpu.attention.plan import Plan, read_words
from rlx.backends.cpu.attention.tiles import ahead_step, micro_kernel_address
from rlx.backends.cpu.builder import NULL, Builder, Int, Module, Value, i64
from rlx.backends.cpu.matmul import micro_kernel
from rlx.backends.cpu.routine import NOALIAS_ENTRY_ARGUMENTS, Entry, Routine
from rlx.backends.cpu.targets import KEY_BLOCK, CpuTarget
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import OUTSIDE_POOL, OUTSIDE_TABLE, AttentionKernel

_POINTER_WORDS = ("parts", "q", "k", "v", "out", "mask", "positions", "table", "rows", "lse")


def entry(kernel: AttentionKernel, target: CpuTarget) -> Entry:
    """The loop nest of `kernel`, with the table of micro-kernels that it calls: by width, then by height."""
    plan = Plan(kernel, target)
    widths, heights = range(1, target.tile_vectors + 1), range(1, target.tile_rows + 1)
    parts = tuple(micro_kernel(plan.compute, height, width, target) for width in widths for height in heights)
    return Entry(Routine(plan.symbol, lambda module: _define_entry(module, plan)), {"parts": parts})


def _define_entry(module: Module, plan: Plan) -> None:
    for define in _PARTS:
        define(module, plan)
    segments.define_row_segments(module, plan, plan.kernel.group)
    segments.define_block_segments(module, plan)

    def body(b: Builder, args: Value, low: Value, high: Value, scratch: Value) -> None:
        words = read_words(b, plan.words, _POINTER_WORDS, args)
        if plan.packs_keys or plan.packs_values:
            clear(b, plan.region(b, scratch, "zeros"), i64(plan.zero_bytes))
        units = b.max(b.ceil_div(words["q_len"], plan.unit_positions), 1)  # per key head

        def head(index: Value) -> None:
            batch, key_head = b.sdiv(index, words["kv_heads"]), b.srem(index, words["kv_heads"])
            own = b.mul(index, units)
            end = b.min(b.sub(high, own), units)

            def several(unit: Value) -> None:
                first = b.mul(unit, plan.unit_positions)
                positions = b.mul(b.min(b.sub(end, unit), plan.joint_units), plan.unit_positions)
                positions = b.min(b.sub(words["q_len"], first), positions)
                rows = b.mul(positions, plan.kernel.group)
                joint = Units(b, plan, words, scratch, batch, key_head, first, positions, rows)
                joint.emit_cached() if plan.kernel.cached else joint.emit()

            b.loop(b.max(b.sub(low, own), 0), end, plan.joint_units, several)

        b.loop(b.sdiv(low, units), b.sdiv(b.add(high, b.sub(units, 1)), units), 1, head)

    module.define(plan.symbol, NOALIAS_ENTRY_ARGUMENTS, body)


@dataclass(frozen=True, slots=True)
class Keys:
    """A block of K for the micro-kernel, in panels: `stride` elements between rows, `panel_stride` between panels.

    Each row that is read prefetches at `ahead`, which advances by `ahead_step` bytes.
    """

    first: Value
    stride: int
    panel_stride: int
    ahead: Value
    ahead_step: int


@dataclass(frozen=True, slots=True)
class Units:
    """The code of adjacent units: `positions` query positions from `first` on, in all query heads of a key head.

    Over a cache, padding is left out: `positions` and `rows` count only real tokens.
    """

    b: Builder
    plan: Plan
    words: dict[str, Value]
    scratch: Value
    batch: Value
    key_head: Value
    first: Value
    positions: Value
    rows: Value
    table: Value = NULL  # over a cache: the page numbers of the sequence
    page: Value = NULL  # of the current block
    next_page: Value = NULL  # of the next block, to be prefetched, and its head
    next_head: Value = NULL

    def emit(self) -> None:
        b, kernel, words = self.b, self.plan.kernel, self.words
        # The first key that the first row does not see, ignoring the number of keys.
        limit = b.add(b.add(b.sub(words["k_len"], words["q_len"]), self.first), 1 + kernel.ahead)
        mask = self.mask()
        self.start(mask, words["mask_query"], words["mask_head"], limit)
        if kernel.segments:
            self.call("row_segments", self.scratch, self.positions, b.offset(mask, self.first, "i32"))
        begin, end = i64(0), words["k_len"]
        if self.plan.limited:
            end = b.max(b.sub(b.add(limit, self.positions), 1), 0)
        if kernel.ahead:
            end = b.min(end, words["k_len"])
        if kernel.mask == "sliding":
            begin = b.max(b.sub(limit, kernel.window), 0)
        self.blocks(begin, end, mask)
        self.call("finish", self.scratch, self.positions, *self.results(), *self.lse())

    def emit_cached(self) -> None:
        b, words = self.b, self.words
        index = b.add(b.mul(self.batch, words["positions_batch"]), self.first)
        positions = b.offset(words["positions"], index, "i32")
        row, capacity, newest = self.batch, words["capacity"], i64(0)
        if self.plan.kernel.ragged:
            row = self.number("rows", self.batch)
            known = b.icmp("ult", row, words["table_rows"])
            capacity = b.select(known, capacity, i64(0))
        if self.plan.kernel.ring:
            newest = self.newest(row)
        arguments = positions, self.positions, capacity, newest, *self.results()
        present = self.call("locate", self.scratch, *arguments, result="i64")
        if self.plan.kernel.ragged:  # `locate` has left no room to a sequence that does not exist
            asked = b.icmp("sge", self.number("positions", index), i64(0))
            lost = b.op("and", asked, b.op("xor", known, Value("i1", "true")))
            b.when(lost, lambda: b.store(i64(OUTSIDE_TABLE), self.scratch, align=8))
        table = b.offset(words["table"], b.mul(row, words["table_row"]), "i32")
        unit = replace(self, positions=present, rows=b.mul(present, self.plan.kernel.group), table=table)
        b.when(b.icmp("sgt", present, 0), unit.emit_present)

    def number(self, word: str, index: Value) -> Value:
        """An element of an i32 operand."""
        b = self.b
        return b.convert("sext", b.load("i32", b.offset(self.words[word], index, "i32"), align=4), "i64")

    def newest(self, row: Value) -> Value:
        """The newest position of the sequence in this call."""
        b, words = self.b, self.words
        if self.plan.kernel.ragged:
            arguments = words["positions"], words["batch"], words["positions_batch"], words["rows"], row
        else:
            own = b.offset(words["positions"], b.mul(self.batch, words["positions_batch"]), "i32")
            arguments = own, words["q_len"], i64(1), NULL, i64(0)
        return self.call("newest", *arguments, result="i64")

    def emit_present(self) -> None:
        b, plan = self.b, self.plan
        self.start(NULL, i64(0), i64(0), i64(0))
        places = (plan.region(b, self.scratch, "extremes", i, "i64") for i in range(2))
        lowest, highest = (b.load("i64", place, align=8) for place in places)
        begin = b.max(b.sub(lowest, plan.kernel.window), 0) if plan.kernel.mask == "sliding" else i64(0)
        self.blocks(begin, highest, NULL)
        self.call("finish", self.scratch, self.positions, *self.results(), *self.lse())

    def start(self, mask: Value, mask_query: Value, mask_head: Value, limit: Value) -> None:
        queries = self.place("q", self.query_head, self.first)
        strides = self.words["q_seq"], self.words["q_head"], mask_query, mask_head
        self.call("start", self.scratch, self.positions, queries, mask, *strides, limit)

    def blocks(self, begin: Value, end: Value, mask: Value) -> None:
        """All rows against the keys `begin` .. `end`, block by block."""
        b = self.b

        def block(index: Value, started: Value) -> list[Value]:
            base = b.mul(index, KEY_BLOCK)
            count = b.min(b.sub(end, base), KEY_BLOCK)
            if self.plan.kernel.cached:
                self.page_block(base, count, started, begin, end)
                return [i64(1)]
            return [self.block(base, count, mask, started)]

        # Whether all rows have outputs yet: the first block need not add to zeros.
        started = i64(1 if self.plan.clears_outputs else 0)
        started = b.loop(b.sdiv(begin, KEY_BLOCK), b.ceil_div(end, KEY_BLOCK), 1, block, [started])[0]
        b.when(b.icmp("eq", started, 0), lambda: self.clear_outputs(i64(0), self.rows))

    def clear_outputs(self, row: Value, count: Value) -> None:
        b, stride = self.b, self.plan.value_stride
        clear(
            b, self.plan.region(b, self.scratch, "outputs", b.mul(row, stride)), b.mul(count, stride * self.plan.size)
        )

    @property
    def query_head(self) -> Value:
        """The first query head."""
        return self.b.mul(self.key_head, self.plan.kernel.group)

    def results(self) -> tuple[Value, Value, Value]:
        """Address of the first row's result, and its strides along positions and heads."""
        return self.place("out", self.query_head, self.first), self.words["out_seq"], self.words["out_head"]

    def lse(self) -> tuple[Value, Value]:
        """Address of the first row's lse, and its stride along heads."""
        b, words = self.b, self.words
        if not self.plan.kernel.lse:
            return NULL, i64(0)
        index = b.add(b.mul(self.batch, words["lse_batch"]), b.mul(self.query_head, words["lse_head"]))
        return b.offset(words["lse"], b.add(index, self.first), self.plan.scalar), words["lse_head"]

    def call(self, part: str, *arguments: Value, result: str = "void") -> Value:
        return self.b.call(result, f"{self.plan.symbol}.{part}", *arguments)

    def place(self, operand: str, head: Value, position: Value) -> Value:
        """Address of a row of q, k, v or out."""
        b, index = self.b, i64(0)
        for axis, at in (("batch", self.batch), ("head", head), ("seq", position)):
            index = b.add(index, b.mul(at, self.words[f"{operand}_{axis}"]))
        size = self.plan.stride_bytes if operand in ("k", "v") else self.plan.kernel.dtype.size
        return b.offset(self.words[operand], b.mul(index, size))

    def mask(self) -> Value:
        """Address of this batch row's mask, or of the first query row's bias."""
        b, words, kind = self.b, self.words, self.plan.kernel.mask
        if kind not in ("custom", "bias") and not self.plan.kernel.segments:
            return NULL
        index = b.mul(self.batch, words["mask_batch"])
        if kind == "bias":
            index = b.add(index, b.mul(self.query_head, words["mask_head"]))
            index = b.add(index, b.mul(self.first, words["mask_query"]))
        return b.offset(words["mask"], b.mul(index, self.plan.mask_dtype.size))

    def limit(self, row: Value) -> Value:
        """The first key that a row does not see."""
        return self.b.load("i64", self.plan.region(self.b, self.scratch, "limits", row, "i64"), align=8)

    def block(self, base: Value, count: Value, mask: Value, started: Value) -> Value:
        """All rows against the keys `base` .. `base + count`; returns whether they have outputs now."""
        b = self.b
        if self.plan.kernel.segments:
            self.call("meet", self.scratch, self.rows, b.offset(mask, base, "i32"), count)
            first, end = (segments.bound(b, self.plan, self.scratch, n) for n in (segments.FIRST, segments.END))
            met = b.icmp("slt", first, end)
            b.when(met, lambda: self.visible_block(base, count, count, started, first, end))
            return i64(1)
        if self.plan.kernel.mask != "custom":
            self.visible_block(base, count, count, started)
            return i64(1)
        flags = b.offset(mask, b.mul(base, self.plan.mask_dtype.size))
        visible_keys = self.call("keep", self.scratch, flags, count, result="i64")

        def visible() -> list[Value]:
            self.visible_block(base, count, visible_keys, started)
            return [i64(1)]

        return b.when(b.icmp("sgt", visible_keys, 0), visible, lambda: [started])[0]

    def page_block(self, base: Value, count: Value, started: Value, begin: Value, end: Value) -> None:
        """The block of a cache that starts at position `base`: a page, unless its number is a fault.

        The block after the last one, `end`, is the first one of the next head.
        """
        b = self.b
        last = b.icmp("sge", b.add(base, KEY_BLOCK), end)
        page, following = (self.page_number(at) for at in (base, b.select(last, begin, b.add(base, KEY_BLOCK))))
        next_head = b.add(self.key_head, b.convert("zext", last, "i64"))
        unit = replace(self, page=page, next_page=following, next_head=next_head)
        b.when(
            b.icmp("ult", page, self.words["pages"]),
            lambda: unit.visible_block(base, count, count, started),
            lambda: b.store(i64(OUTSIDE_POOL), self.scratch, align=8),
        )

    def page_number(self, position: Value) -> Value:
        """The page of a position, from the table."""
        b = self.b
        slot = b.srem(position, self.words["capacity"]) if self.plan.kernel.ring else position
        place = b.offset(self.table, b.sdiv(slot, KEY_BLOCK), "i32")
        return b.convert("sext", b.load("i32", place, align=4), "i64")

    def visible_block(
        self, base: Value, count: Value, visible_keys: Value, started: Value, first: Int = 0, end: Value | None = None
    ) -> None:
        """Rows `first` .. `end`, or all of them, against a block."""
        b, plan = self.b, self.plan
        end = self.rows if end is None else end
        keys = self.cached_keys() if plan.kernel.cached else self.packed_keys(base, count)
        if plan.packs_values:
            self.addresses("value_rows", "v", base, count)
            # All 64 rows are searched for inf and NaN, so all must be packed.
            rows = i64(KEY_BLOCK) if plan.checks_values else count
            self.call("pack_values", self.scratch, rows, i64(0) if plan.kernel.cached else self.ahead("v", base))
        finite = self.call("finite", self.scratch, result="i1") if plan.checks_values else None

        def tile(row: Value) -> None:
            height = b.min(b.sub(end, row), plan.target.tile_rows)

            def attend() -> None:
                reach = self.reach(row, height, base, count)

                def weights(span: int) -> None:
                    self.call(f"softmax{span}", self.scratch, row, height, base, count, visible_keys)

                self.scores(keys, row, height, reach)
                if len(plan.spans) == 1:
                    weights(KEY_BLOCK)
                else:
                    b.when(b.icmp("sle", reach, plan.spans[0]), *(functools.partial(weights, s) for s in plan.spans))
                outputs.Outputs(self, row, height, base, count, started).emit(finite)

            if plan.limited:
                b.when(self.sees(row, height, base), attend)
            else:
                attend()

        b.loop(first, end, plan.target.tile_rows, tile)

    def packed_keys(self, base: Value, count: Value) -> Keys:
        plan = self.plan
        self.addresses("key_rows", "k", base, count)
        self.call("pack_keys", self.scratch, self.covering(count), self.ahead("k", base))
        packed = plan.region(self.b, self.scratch, "keys")
        return Keys(packed, plan.panel, plan.head_stride * plan.panel, packed, 0)

    def on_page(self, operand: str, page: Value, head: Value) -> Value:
        """Address of the keys or values of a page."""
        b, words = self.b, self.words
        index = b.add(b.mul(page, words[f"{operand}_page"]), b.mul(head, words[f"{operand}_head"]))
        return b.offset(words[operand], b.mul(index, self.plan.stride_bytes))

    def values(self, base: Value) -> Value:
        """Address of the values of the block at `base`."""
        cached = self.plan.kernel.cached
        return self.on_page("v", self.page, self.key_head) if cached else self.place("v", self.key_head, base)

    def next_values(self, values: Value) -> Value:
        """Address of the next block's values."""
        b, plan = self.b, self.plan
        if plan.kernel.cached:
            return self.on_page("v", self.next_page, self.next_head)
        return b.offset(values, b.mul(self.words["v_seq"], KEY_BLOCK * plan.stride_bytes))

    def cached_keys(self) -> Keys:
        """A page of keys is [head_dim][64], or converted to it: strips of it are panels with strided rows."""
        b, plan = self.b, self.plan
        place = self.on_page("k", self.page, self.key_head)
        following = self.on_page("k", self.next_page, self.next_head)
        if not plan.widens_keys:
            return Keys(place, KEY_BLOCK, plan.panel, following, plan.panel * plan.size)
        self.call("unpack_keys" if plan.packed else "widen_keys", self.scratch, place, following)
        # While one block is multiplied, the next one is prefetched: a share of it with each row that is read.
        share = plan.row_bytes(plan.kernel.head_dim) * plan.panel // plan.kernel.head_dim
        return Keys(plan.region(b, self.scratch, "keys"), KEY_BLOCK, plan.panel, following, share)

    def ahead(self, operand: str, base: Value) -> Value:
        """Bytes from a row of this block to one of the next; from the last block, to the first of the next head."""
        b, words = self.b, self.words
        seq, head, batch = (words[f"{operand}_{axis}"] for axis in ("seq", "head", "batch"))
        others = b.sub(words["kv_heads"], 1)
        next_head = b.select(b.icmp("eq", self.key_head, others), b.sub(batch, b.mul(others, head)), head)
        last = b.icmp("sge", b.add(base, KEY_BLOCK), words["k_len"])
        rows = b.select(last, b.sub(next_head, b.mul(base, seq)), b.mul(seq, KEY_BLOCK))
        return b.mul(rows, self.plan.stride_bytes)

    def addresses(self, region: str, operand: str, base: Value, count: Value) -> None:
        """Stores the addresses of the block's rows; zeros stand in for rows past `count` and masked ones."""
        rows = self.plan.region(self.b, self.scratch, region)
        source = self.values(base) if operand == "v" else self.place(operand, self.key_head, base)
        self.call("addresses", self.scratch, rows, source, self.words[f"{operand}_seq"], count)

    def covering(self, count: Value) -> Value:
        """How many keys to pack, so that vectors which score `count` keys read nothing stale."""
        return self.b.mul(self.b.ceil_div(count, self.plan.lanes), self.plan.lanes)

    def lowest(self, row: Value) -> Value:
        """The lowest limit of a tile's rows. Only over a cache may it differ from the first row's."""
        return self.extreme("lowest", row) if self.plan.kernel.cached else self.limit(row)

    def highest(self, row: Value, height: Value) -> Value:
        last = self.b.sub(self.b.add(row, height), 1)
        return self.extreme("highest", row) if self.plan.kernel.cached else self.limit(last)

    def extreme(self, region: str, row: Value) -> Value:
        return self.b.load("i64", self.plan.region(self.b, self.scratch, region, row, "i64"), align=8)

    def reach(self, row: Value, height: Value, base: Value, count: Value) -> Value:
        """How far into the block the rows of a tile see."""
        if not self.plan.limited:
            return count
        return self.b.min(count, self.b.sub(self.highest(row, height), base))

    def sees(self, row: Value, height: Value, base: Value) -> Value:
        """Whether any row of a tile may see any key of the block."""
        b = self.b
        newest = b.icmp("sgt", self.highest(row, height), base)
        if self.plan.kernel.mask == "causal":
            return newest
        oldest = b.sub(self.lowest(row), self.plan.kernel.window)
        return b.op("and", newest, b.icmp("slt", oldest, b.add(base, KEY_BLOCK)))

    def scores(self, keys: Keys, row: Value, height: Value, reach: Value) -> None:
        """scores[height][keys] = queries · keys, for as many keys as are in reach. Other scores are not written."""
        b, plan, scratch = self.b, self.plan, self.scratch
        queries, stride = plan.region(b, scratch, "queries", b.mul(row, plan.head_stride)), i64(plan.head_stride)
        if not plan.copies_queries:
            queries, stride = self.place("q", self.query_head, b.add(self.first, row)), self.words["q_seq"]
            for i in range(plan.target.tile_rows):  # of the next tile
                following = b.offset(queries, b.mul(stride, plan.target.tile_rows + i), plan.scalar)
                fetch(b, following, plan.kernel.head_dim * plan.size)
        step = ahead_step(b, plan, row, height, plan.target.tile_vectors, i64(keys.ahead_step))
        vectors = b.ceil_div(reach, plan.lanes)

        def panel(index: Value) -> None:
            width = b.min(b.sub(vectors, b.mul(index, plan.target.tile_vectors)), plan.target.tile_vectors)
            tile = micro_kernel_address(b, plan, self.words["parts"], width, height)
            right = b.offset(keys.first, b.mul(index, keys.panel_stride), plan.scalar)
            ahead = b.offset(keys.ahead, b.mul(index, keys.ahead_step * plan.kernel.head_dim))
            scores = plan.region(b, scratch, "scores", b.mul(index, plan.panel))
            b.call_pointer(
                tile, queries, stride, right, i64(keys.stride), i64(plan.kernel.head_dim),
                scores, i64(KEY_BLOCK), ahead, step, i64(0),
            )  # fmt: skip

        if plan.panel == KEY_BLOCK:
            panel(i64(0))
        else:
            b.loop(0, b.ceil_div(reach, plan.panel), 1, panel)


_PARTS = (
    rows.define_newest, rows.define_locate, rows.define_start, packing.define_keep, packing.define_addresses,
    packing.define_pack_keys, packing.define_widen_keys, packing.define_unpack_keys, packing.define_pack_values,
    packing.define_finite, softmax.define_softmax, outputs.define_weigh, rows.define_finish,
)  # fmt: skip
