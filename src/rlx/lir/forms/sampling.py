"""Loop form of sampling: a unit is a row, which stays in cache while thresholds are searched for. Nothing is sorted.

Thresholds (the k-th highest logit, the least weight of a nucleus) are found by bisection over the bits of floats. What
lies in blocks whose maximum is below a threshold is never looked at, so a probe costs little where few tokens count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rlx.dtypes import F32, F64, I32, I64, DType
from rlx.ir.graph import Node, Value
from rlx.lir.expressions import Formula
from rlx.lir.loops import (
    Arg,
    Assign,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    Operand,
    Reduce,
    Ref,
    Stmt,
    Store,
    Var,
    number,
)
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.ops.sampling import NO_TOKEN
from rlx.sampling import BLOCK, COLDEST
from rlx.types import TensorType, product

GROUP = 16  # blocks
CHUNK = GROUP * BLOCK  # logits that stay in the nearest cache
ABOVE = 1 + 2.0**-20  # times exp(x), it is above exp(y) for all y up to x, however exp rounds
ROW, Q = Index("u"), Index("q")
LEAST_KEY = -(2**31)  # below what `order` makes of any f32
ONE_BITS = 0x3F800000  # 1.0, the highest weight
STEPS = 32  # halvings after which a range of 2^32 keys is one
PARTS = 3  # f32 numbers whose sum is any f64 of a probability


class _Body:
    """Statements in the order in which they are written; what is named is read through the `Ref` that comes back."""

    def __init__(self) -> None:
        self.stmts: list[Stmt] = []

    def let(self, name: str, value: Expr) -> Ref:
        self.stmts.append(Let(name, value))
        return Ref(name, value.dtype)

    def var(self, name: str, start: Operand, dtype: DType) -> Ref:
        self.stmts.append(Var(name, start.cast(dtype) if isinstance(start, Formula) else number(start, dtype)))
        return Ref(name, dtype)

    def assign(self, variable: Ref, value: Expr) -> None:
        self.stmts.append(Assign(variable.name, value))

    def store(self, target: _Rows, at: Expr, value: Expr) -> None:
        self.stmts.append(Store(target.param, target.place(at), value))

    @contextmanager
    def loop(self, index: str, extent: int | Arg | Ref, *, vector: bool = False) -> Iterator[_Body]:
        inner = _Body()
        yield inner
        self.stmts.append(For(index, extent, tuple(inner.stmts), vector))

    @contextmanager
    def when(self, name: str, condition: Expr) -> Iterator[_Body]:
        """Statements that run where a condition holds."""
        with self.loop(f"{name}_once", self.let(name, condition.cast(I64))) as inner:
            yield inner


class _Rows:
    """A parameter that has a row per unit: `rows[i]` is an element of it."""

    def __init__(self, builder: LoopBuilder, name: str, view: View, *, written: bool = False) -> None:
        self.param = builder.param(view, written=written, name=name)
        self.dtype = view.dtype
        self.stride = builder.stride(self.param, "row", view.strides[0])
        self.step = builder.stride(self.param, "step", view.strides[1], unit=True) if view.rank == 2 else 0

    def place(self, at: Expr) -> tuple[tuple[Expr, int | Arg], ...]:
        terms: list[tuple[Expr, int | Arg]] = [(ROW, self.stride), (at, self.step)]
        return tuple((index, stride) for index, stride in terms if stride != 0)

    def __getitem__(self, at: Expr) -> Expr:
        return Load(self.param, self.place(at), self.dtype)

    @property
    def only(self) -> Expr:
        """The number of a row, of a parameter `[rows]`."""
        return self[Const(0, I64)]


class _Sampler:
    """The kernel while it is written: parameters, scratch rows, and what each step leaves for the next."""

    def __init__(self, s: Scheduler, node: Node) -> None:
        self.s = s
        self.node = node
        self.builder = b = LoopBuilder("sample_tokens")
        logits = s.view(node.operands[0])
        rows, vocab = logits.shape
        blocks = (vocab + (BLOCK - 1)) // BLOCK
        room = (blocks + 1) * BLOCK  # a block of nothing behind the last weight
        self.vocab, self.blocks, self.whole = (
            b.arg("vocab", vocab), b.arg("blocks", blocks), b.arg("whole_blocks", vocab // BLOCK),
        )  # fmt: skip
        self.part_blocks = b.arg("part_blocks", blocks - vocab // BLOCK)
        chunks = vocab // CHUNK
        self.whole_chunks, self.rest = b.arg("whole_chunks", chunks), b.arg("rest", vocab - chunks * CHUNK)
        self.rest_blocks = b.arg("rest_blocks", blocks - chunks * GROUP)
        self.room = b.arg("room", room)
        if logits.dtype is not F32 or logits.strides[1] != 1:
            logits = self._as_f32(logits)
        self.raw = _Rows(b, "logits", logits)
        self.outs = [s.result(node, i) for i in range(2)]
        self.tokens, self.scores = (
            _Rows(b, name, out, written=True) for name, out in zip(("tokens", "scores"), self.outs, strict=True)
        )
        groups = (blocks + (GROUP - 1)) // GROUP
        scratch = {
            "weights": (room, F32), "ids": (room, I32), "sums": (blocks * 2, F32), "tops": (groups * GROUP, F32),
            "peaks": (groups, F32),
        }  # fmt: skip
        self.weights, self.ids, self.sums, self.tops, self.peaks = (
            _Rows(b, name, s.temporary(TensorType((rows, width), dtype)), written=True)
            for name, (width, dtype) in scratch.items()
        )
        self.source = self.raw  # of logits as they are sampled from
        self.body = _Body()

    # -- operands ------------------------------------------------------------------------------------------------------
    def _as_f32(self, view: View) -> View:
        out = self.s.temporary(TensorType(view.shape, F32))
        self.s.copy_into(view, out)
        return out

    def setting(self, position: int, name: str) -> Ref:
        """A setting of the row, by name, as f32."""
        view = self.s.view(self.node.operands[position])
        if view.dtype is F64:  # the widest parameter says how many lanes a kernel has
            view = self._as_f32(view)
        return self.body.let(name, _Rows(self.builder, f"{name}s", view).only.cast(F32))

    def fraction(self, position: int, name: str) -> Ref:
        """A setting of the row to all the bits of f64, without a parameter that wide."""
        view = self.s.view(self.node.operands[position])
        parts = [self.s.temporary(TensorType(view.shape, F32)) for _ in range(PARTS)]

        def split(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
            rest = e.load(0).cast(F64)
            found: list[Expr] = []
            for _ in parts:
                found.append(rest.cast(F32))
                rest = rest - found[-1].cast(F64)
            return (), found

        map_elements(self.s, "split_f64", view.shape, [view], parts, split)
        read = [_Rows(self.builder, f"{name}{i}", part).only.cast(F64) for i, part in enumerate(parts)]
        total = read[0]
        for part in read[1:]:
            total = total + part
        return self.body.let(name, total)

    def integers(self, position: int, name: str) -> _Rows:
        """Integers of rows, as i32; what that does not hold becomes its limits."""
        view = self.s.view(self.node.operands[position])
        if view.dtype.size == 8 or view.dtype.kind == "uint":
            out = self.s.temporary(TensorType(view.shape, I32))

            def clamp(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
                return (), [e.load(0).cast(I64).max(-1).min(2**31 - 1).cast(I32)]

            map_elements(self.s, "clamp_i32", view.shape, [view], [out], clamp)
            view = out
        return _Rows(self.builder, name, view)

    # -- logits as they are sampled from -------------------------------------------------------------------------------
    def adjust(self) -> None:
        """With a mask or penalties, logits are copied to where weights will be, and changed there."""
        operands = self.node.operands
        allowed, history = operands[6:8]
        if allowed is None and history is None:
            return
        self.source = self.weights
        if allowed is None:
            with self.body.loop("j", self.vocab, vector=True) as copy:
                copy.store(self.weights, Index("j"), self.raw[Index("j")])
        else:
            self._mask(allowed)
        if history is not None:
            self._penalise(history)

    def _mask(self, allowed: Value) -> None:
        view = self.s.view(allowed)
        words = _Rows(self.builder, "allowed", view)
        size = 8 * view.dtype.size
        kind = I64 if view.dtype.size == 8 or view.dtype.kind == "uint" else I32
        with self.body.loop("w", self.builder.arg("words", view.shape[1])) as each:
            word = each.let("word", words[Index("w")].cast(kind))
            with each.loop("i", size, vector=True) as bits:
                token = Index("w") * size + Index("i")
                keep = (word >> Index("i").cast(kind) & 1).ne(0) & (token < self.vocab)
                bits.store(self.weights, token, keep.choose(self.raw[token], -math.inf))

    def _penalise(self, history: Value) -> None:
        """Counts how often each token occurs, in scratch of which only these tokens' places are touched."""
        seen = self.integers(7, "history")
        prompt = self.integers(8, "prompt_length").only.cast(I64)
        names = ("repetition", "frequency", "presence")
        repetition, frequency, presence = (self.setting(9 + i, name) for i, name in enumerate(names))
        h, counts = Index("h"), self.ids
        length = self.builder.arg("history_length", self.s.view(history).shape[1])

        token = seen[h].cast(I64)
        at = ((token >= 0) & (token < self.vocab)).select(token, self.vocab)  # padding counts behind the last token
        with self.body.loop("h", length) as clear:
            clear.store(counts, at, Const(0, I32))
        with self.body.loop("h", length) as count:  # the lowest bit: seen; the others: how often it was picked
            where = count.let("counted", at)
            picked = (h >= prompt).select(2, Const(0, I32))
            count.store(counts, where, (counts[where] | 1) + picked)
        with self.body.loop("h", length) as apply:
            where = apply.let("changed", at)
            state, score = apply.let("state", counts[where]), apply.let("score", self.weights[where])
            repeated = (score < 0.0).select(score * repetition, score / repetition)
            times = (state >> 1).cast(F32)
            less = (times > 0.0).select(repeated - (times * frequency + presence), repeated)
            valid = state.ne(0) & (where < self.vocab)
            apply.store(self.weights, where, valid.select(less, score))
            apply.store(counts, where, Const(0, I32))

    # -- the row as it is, and its highest logit -----------------------------------------------------------------------
    def scan(self) -> None:
        """Reads logits once: the highest of each block, and the sum of exp(logit - highest) before any change.

        A chunk is in the nearest cache when its exponentials are added up; what came before is scaled to a new highest.
        """
        body = self.body
        self.raw_top, self.raw_total = body.var("raw_top", -math.inf, F32), body.var("raw_total", 0.0, F64)
        with body.loop("c", self.whole_chunks) as chunk:
            self._scan_chunk(chunk, Index("c"), CHUNK, GROUP)
        with body.when("rest_there", self.rest > 0) as chunk:
            self._scan_chunk(chunk, self.whole_chunks, self.rest, self.rest_blocks)

    def _scan_chunk(self, body: _Body, chunk: Expr, width: int | Arg, blocks: int | Arg) -> None:
        source, first = self.source, body.let("first_of_chunk", chunk * CHUNK)
        with body.loop("g", blocks) as block:
            place = block.let("block_start", first + Index("g") * BLOCK) + Q
            logit = source[place] if width == CHUNK else (place < self.vocab).choose(source[place], -math.inf)
            top = block.let("chunk_block_top", Reduce("max", "q", BLOCK, logit))
            block.store(self.tops, chunk * GROUP + Index("g"), top)
        highest = Reduce("max", "q", width, self.raw[first + Q])
        if source is self.raw:
            highest = Reduce("max", "g", blocks, self.tops[chunk * GROUP + Index("g")])
        top = body.let("chunk_top", highest.max(self.raw_top))
        base = body.let("chunk_base", top.eq(-math.inf).select(0.0, top))
        part = body.let("chunk_part", Reduce("sum", "q", width, (self.raw[first + Q] - base).exp().cast(F64)))
        body.assign(self.raw_total, self.raw_total * (self.raw_top - base).cast(F64).exp() + part)
        body.assign(self.raw_top, top)

    def find_highest(self) -> None:
        """The highest logit, and the first token that has it."""
        body, source, g = self.body, self.source, Index("g")
        self.top = body.let("top", Reduce("max", "g", self.blocks, self.tops[g]))
        self.alive = body.let("alive", (self.top > -math.inf) & (self.top < math.inf))
        first = Reduce("min", "g", self.blocks, self.tops[g].eq(self.top).select(g, self.blocks))
        start = body.let("first_block", first.min(self.blocks - 1).max(0)) * BLOCK
        here = (start + Q < self.vocab).choose(source[start + Q], -math.inf)
        self.first = body.let("first", Reduce("min", "q", BLOCK, here.eq(self.top).select(Q, BLOCK)) + start)

    # -- thresholds ----------------------------------------------------------------------------------------------------
    def bisect(self, name: str, active: Expr, low: Operand, high: Expr, enough: Callable[[_Body, Ref], Expr]) -> Ref:
        """The highest integer that is `enough`, where `low` is and `high` is not; `low` where not `active`."""
        lo, hi = self.body.var(f"{name}_low", low, I64), self.body.var(f"{name}_high", high, I64)
        steps = self.body.let(f"{name}_steps", active.select(STEPS, Const(0, I64)))
        with self.body.loop(f"{name}_step", steps) as each, each.when(f"{name}_open", hi - lo > 1) as step:
            middle = step.let(f"{name}_middle", lo + hi >> 1)
            good = step.let(f"{name}_good", enough(step, middle))
            step.assign(lo, good.select(middle, lo))
            step.assign(hi, good.select(hi, middle))
        return lo

    def take_highest(self, top_k: Expr) -> None:
        """Gathers the k highest logits and equals of the last, in order of ids, or leaves the row as it is.

        Each of the k blocks with the highest maxima has a logit as high as the least of these maxima.
        """
        body, g, source = self.body, Index("g"), self.source
        k = body.let("k", top_k.cast(I64))
        self.limited = body.let("limited", self.drawn & (k > 0) & (k < self.vocab))
        few = body.let("few", self.limited & (k <= self.blocks))
        above = body.let("above_top", self.top.order().cast(I64) + 1)

        def blocks_reach(step: _Body, key: Ref) -> Expr:
            reach = (self.tops[g].order() >= key.cast(I32)).cast(I32)
            return Reduce("sum", "g", self.blocks, reach).cast(I64) >= k

        block_key = self.bisect("block", few, LEAST_KEY, above, blocks_reach)
        reached = (self.tops[g].order() >= block_key.cast(I32)).select(self.tops[g], math.inf)
        least = body.let("least_top", few.select(Reduce("min", "g", self.blocks, reached), -math.inf))
        self.count = body.var("count", 0, I64)
        with body.loop("g", body.let("searched", self.limited.select(self.blocks, Const(0, I64)))) as block:
            size = (self.vocab - g * BLOCK).min(BLOCK)
            width = block.let("width", (self.tops[g] >= least).select(size, Const(0, I64)))
            with block.loop("q", width) as each:
                token = g * BLOCK + Q
                logit = each.let("logit", source[token])
                each.store(self.weights, self.count, logit)
                each.store(self.ids, self.count, token.cast(I32))
                each.assign(self.count, self.count + (logit >= least).cast(I64))
        pad = body.let("pad", self.limited.select(BLOCK, Const(0, I64)))  # so that all blocks are whole
        with body.loop("q", pad, vector=True) as behind:
            behind.store(self.weights, self.count + Q, Const(-math.inf, F32))
        self.listed = body.let("listed", (self.count + (BLOCK - 1)).quot(BLOCK))

        def logits_reach(step: _Body, key: Ref) -> Expr:
            reached = step.var("reached", 0, I32)
            with step.loop("g", self.listed) as block:
                reach = (self.weights[g * BLOCK + Q].order() >= key.cast(I32)).cast(I32)
                block.assign(reached, reached + block.let("reach", Reduce("sum", "q", BLOCK, reach)))
            return reached.cast(I64) >= k

        self.least_key = self.bisect("logit", self.limited, block_key, above, logits_reach)

    def weigh(self, temperature: Expr) -> None:
        """exp((logit - highest) / temperature) of tokens that are left; sums of blocks, and bounds of their weights."""
        body, g = self.body, Index("g")
        heat = body.let("heat", temperature.max(COLDEST))
        self.mass = body.var("mass", 0.0, F64)

        def fill(
            block: _Body, number_: Expr, logit: Callable[[Expr], Expr], kept: Callable[[Expr], Expr] | None
        ) -> None:
            place = number_ * BLOCK + Q
            with block.loop("q", BLOCK, vector=True) as each:
                found = each.let("weighed", logit(place))
                weight = ((found - self.top) / heat).exp()
                each.store(self.weights, place, weight if kept is None else kept(found).select(weight, 0.0))
            total = block.let("block_mass", Reduce("sum", "q", BLOCK, self.weights[place].cast(F64)))
            self._store_sum(block, number_, total)
            block.assign(self.mass, self.mass + total)

        everything = body.let("everything", (self.drawn & ~self.limited).cast(I64))
        with body.loop("g", self.listed) as block:
            highest = block.let("listed_top", Reduce("max", "q", BLOCK, self.weights[g * BLOCK + Q]))
            block.store(self.tops, g, highest)
            fill(block, g, self.weights.__getitem__, lambda logit: logit.order() >= self.least_key.cast(I32))
        with body.loop("g", body.let("whole_weighed", everything * self.whole)) as block:
            fill(block, g, self.source.__getitem__, None)
        with body.loop("g", body.let("part_weighed", everything * self.part_blocks)) as block:
            fill(block, self.whole, lambda at: (at < self.vocab).choose(self.source[at], -math.inf), None)
        self.used = body.let("used", self.listed + everything * self.blocks)
        with body.loop("g", self.used, vector=True) as block:
            block.store(self.tops, g, ((self.tops[g] - self.top) / heat).exp() * ABOVE)
        self.groups = body.let("groups", (self.used + (GROUP - 1)).quot(GROUP))
        with body.loop("c", self.groups) as group:
            block_number = Index("c") * GROUP + g
            top = (block_number < self.used).choose(self.tops[block_number], 0.0)
            group.store(self.peaks, Index("c"), Reduce("max", "g", GROUP, top))

    def _store_sum(self, body: _Body, block: Expr, total: Ref) -> None:
        """The sum of a block to 48 bits, as two f32."""
        high = body.let("sum_high", total.cast(F32))
        body.store(self.sums, block * 2, high)
        body.store(self.sums, block * 2 + 1, total - high.cast(F64))

    def _sum(self, block: Expr) -> Expr:
        return self.sums[block * 2].cast(F64) + self.sums[block * 2 + 1].cast(F64)

    def take_nucleus(self, top_p: Expr) -> None:
        """The least weight of the fewest tokens that weigh top_p, and the last place where that weight still counts."""
        body = self.body
        nucleus = body.let("nucleus", self.drawn & (top_p < 1.0))
        wanted = body.let("wanted", top_p * self.mass)

        def weigh_enough(step: _Body, bits: Ref) -> Expr:
            least = step.let("probe", bits.cast(I32).bits())

            def reaching(place: Expr) -> list[Expr]:
                return [(self.weights[place] >= least).select(self.weights[place], 0.0)]

            (mass,) = self._sums(step, "probe", least, reaching, 1)
            return mass >= wanted

        # All weights below this one together weigh less than what may be missing; a little less, for rounding.
        spare = (self.mass - wanted) / (self.used * BLOCK).max(1).cast(F64) * 0.999
        low = body.let("nucleus_start", spare.max(0.0).min(0.5).cast(F32).order().cast(I64))
        bits = self.bisect("nucleus", nucleus, low, Const(ONE_BITS + 1, I64), weigh_enough)
        self.least = least = body.let("least", nucleus.select(bits.cast(I32).bits(), Const(0.0, F32)))
        wide = least.cast(F64)

        def above_and_equal(place: Expr) -> list[Expr]:
            weight = self.weights[place]
            return [(weight > least).select(weight, 0.0), weight.eq(least).select(1.0, Const(0.0, F32))]

        above, ties = self._sums(body, "tie", nucleus.select(least, Const(math.inf, F32)), above_and_equal, 2)
        fitting = body.let("fitting", ((wanted - above) / wide).cast(I64).max(1).cast(F64))
        short = above + fitting * wide < wanted
        keep = body.let("keep", short.select(fitting + 1.0, fitting))  # of equals, those with lower ids
        self.last = body.var("last", self.room, I64)
        with body.when("cut", nucleus & (keep < ties)) as cut:
            self._find_tie(cut, keep)

    def _sums(
        self, body: _Body, name: str, least: Expr, values: Callable[[Expr], Sequence[Expr]], count: int
    ) -> list[Ref]:
        """Sums in f64 over all places of values that are 0 where the weight is below `least`."""
        sums = [body.var(f"{name}_sum{i}", 0.0, F64) for i in range(count)]
        with (
            body.loop("c", self.groups) as group,
            group.when(f"{name}_group", self.peaks[Index("c")] >= least) as members,
            members.loop("g", GROUP) as block,
        ):
            here = block.let(f"{name}_block", Index("c") * GROUP + Index("g"))
            with block.when(f"{name}_open", (here < self.used) & (self.tops[here] >= least)) as inside:
                parts = [
                    inside.let(f"{name}_part{i}", Reduce("sum", "q", BLOCK, value.cast(F64)))
                    for i, value in enumerate(values(here * BLOCK + Q))
                ]
                for total, part in zip(sums, parts, strict=True):
                    inside.assign(total, total + part)
        return sums

    def _find_tie(self, body: _Body, keep: Ref) -> None:
        """The place of tie number `keep`: its block, then within that."""
        g, block_at, before = Index("g"), body.var("tie_block", 0, I64), body.var("ties_before", 0.0, F64)
        seen = body.var("ties_seen", 0.0, F64)
        with body.loop("g", self.used) as block:
            is_tie = self.weights[g * BLOCK + Q].eq(self.least).cast(F32).cast(F64)
            ties = block.let("ties_here", Reduce("sum", "q", BLOCK, is_tie))
            here = block.let("tie_is_here", (seen < keep) & (seen + ties >= keep))
            block.assign(block_at, here.select(g, block_at))
            block.assign(before, here.select(seen, before))
            block.assign(seen, seen + ties)
        with body.loop("q", BLOCK) as each:
            place = each.let("tie_place", block_at * BLOCK + Q)
            each.assign(before, before + self.weights[place].eq(self.least).cast(F32).cast(F64))
            each.assign(self.last, ((before >= keep) & self.last.eq(self.room)).select(place, self.last))

    # -- the pick ------------------------------------------------------------------------------------------------------
    def draw(self, uniform: Expr, min_p: Expr) -> Ref:
        """The token where the running sum of the weights that are left passes `uniform` of the whole."""
        body = self.body
        floor = body.let("floor", self.least.max(min_p))

        def kept(place: Expr) -> Expr:
            weight = self.weights[place]
            return ((weight >= floor) & ((weight > self.least) | (place <= self.last))).select(weight, 0.0)

        g = Index("g")
        fewer = body.let("fewer", (floor > 0.0).select(self.used, Const(0, I64)))
        with body.loop("g", fewer) as block:
            part = block.var("kept_part", 0.0, F64)
            with block.when("kept_open", self.tops[g] >= floor) as inside:
                inside.assign(part, Reduce("sum", "q", BLOCK, kept(g * BLOCK + Q).cast(F64)))
            self._store_sum(block, g, part)
        whole = body.var("whole", 0.0, F64)
        with body.loop("g", self.used) as block:
            block.assign(whole, whole + self._sum(g))
        left = body.let("left", uniform * whole)
        at, before = self._passes("block", "g", self.used, left, self._sum(g))
        rest = body.let("rest", left - before)
        within, _ = self._passes("token", "q", BLOCK, rest, kept(at * BLOCK + Q).cast(F64))
        slot = body.let("slot", at * BLOCK + within)
        return body.let("picked", self.limited.choose(self.ids[slot].cast(I64), slot))

    def _passes(self, name: str, index: str, extent: int | Ref, limit: Ref, term: Expr) -> tuple[Ref, Ref]:
        """Where a running sum first is above a limit, or last grows, and the sum before that."""
        body = self.body
        running, before = body.var(f"{name}_running", 0.0, F64), body.var(f"{name}_before", 0.0, F64)
        at, done = body.var(f"{name}_at", 0, I64), body.var(f"{name}_done", 0, I64)
        with body.loop(index, extent) as step:
            total = step.let(f"{name}_total", running + step.let(f"{name}_term", term))
            grows = step.let(f"{name}_grows", done.eq(0) & (total > running))
            step.assign(at, grows.select(Index(index), at))
            step.assign(before, grows.select(running, before))
            step.assign(done, (grows & (total > limit)).select(1, done))
            step.assign(running, total)
        return at, before

    def write(self) -> list[View]:
        """The whole kernel, launched."""
        zero = Const(0, I64)
        uniform, temperature = self.fraction(1, "uniform"), self.setting(2, "temperature")
        top_k = self.integers(3, "top_ks").only
        top_p, min_p = self.fraction(4, "top_p"), self.setting(5, "min_p")
        self.adjust()
        self.scan()
        self.find_highest()
        self.drawn = self.body.let("drawn", self.alive & (temperature > 0.0))
        self.take_highest(top_k)
        self.weigh(temperature)
        self.take_nucleus(top_p)
        picked = self.draw(uniform, min_p)
        chosen = self.drawn.select(picked, self.first)
        token = self.body.let("token", self.alive.select(chosen, NO_TOKEN))
        logit = self.alive.choose(self.raw[token], math.nan) - self.raw_top
        self.body.store(self.tokens, zero, token.cast(I32))
        self.body.store(self.scores, zero, logit.cast(F64) - self.raw_total.log())
        shape = self.s.view(self.node.operands[0]).shape
        root = For("u", self.builder.arg("units", shape[0]), tuple(self.body.stmts))
        self.builder.launch(self.s, root, shape[0], flops=product(shape) * 40)
        return self.outs


@loop_form("sample_tokens")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _Sampler(s, node).write()
