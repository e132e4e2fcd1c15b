"""Loop form of sampling: one row per unit. Nothing is sorted.

Thresholds (the k-th highest logit, the least weight of a nucleus) are found by bisection over the bits of floats. A
probe skips blocks whose maximum is below the threshold, so it costs little where few tokens count. Weights and their
sums are those of `rlx/sampling.py` to the bit: integers, which f64 adds exactly within a block and i64 beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlx.dtypes import BOOL, F32, F64, I32, I64
from rlx.ir.graph import Node, Value
from rlx.lir.forms.row_kernels import Body, Rows
from rlx.lir.loops import Arg, Const, Expr, For, Index, Operand, Reduce, Ref, Stmt, number
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.sampling import COLDEST, EXP2, LOG2_E, LOWEST, NO_TOKEN, ROUNDER, WEIGHT_BITS
from rlx.types import TensorType, product

BLOCK = 256  # weights whose sum f64 holds exactly: 2^8 times 2^42 is below 2^53
GROUP = 16  # blocks
CHUNK = GROUP * BLOCK  # logits that stay in the nearest cache
ABOVE = 1 + 2.0**-20  # times exp2(x), plus 1, it is above exp2(y) for all y up to x, however they round
HEAVIEST = 2.0**WEIGHT_BITS
Q = Index("q")
LEAST_KEY = -(2**31)  # below what `order` makes of any f32
STEPS = 32  # halvings after which a range of 2^32 keys is one
PARTS = 3  # f32 numbers whose sum is any f64 of a probability
WORD = 31  # bits of the lower of two i32 that hold a sum


def exp2(power: Expr, exponent_offset: int = 0) -> Expr:
    """2^(power + offset), as `sampling.token_weights` computes it: powers below `LOWEST` count as that, NaN stays."""
    power = (power < LOWEST).select(LOWEST, power)
    exponent = power.nearest()
    fraction = power - exponent.cast(F32)
    mantissa: Expr = number(EXP2[0], F32)
    for coefficient in EXP2[1:]:
        mantissa = mantissa * fraction + coefficient
    return mantissa * (exponent + (127 + exponent_offset) << 23).bits()


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
        self.raw = Rows(b, "logits", logits)
        self.outs = [s.result(node, i) for i in range(2)]
        self.tokens, self.scores = (
            Rows(b, name, out, written=True) for name, out in zip(("tokens", "scores"), self.outs, strict=True)
        )
        groups = (blocks + (GROUP - 1)) // GROUP
        scratch = {
            "weights": (room, F32), "ids": (room, I32), "sums": (blocks * 2, I32), "tops": (groups * GROUP, F32),
            "peaks": (groups, F32),
        }  # fmt: skip
        self.weights, self.ids, self.sums, self.tops, self.peaks = (
            Rows(b, name, s.temporary(TensorType((rows, width), dtype)), written=True)
            for name, (width, dtype) in scratch.items()
        )
        self.adjusted: Ref | None = None  # whether logits are changed before they are sampled from
        self.body = Body()

    def source(self, at: Expr) -> Expr:
        """A logit as it is sampled from: adjusted ones are where weights will be."""
        return self.raw[at] if self.adjusted is None else self.adjusted.choose(self.weights[at], self.raw[at])

    # -- operands ------------------------------------------------------------------------------------------------------
    def _operand(self, position: int) -> Value:
        value = self.node.operands[position]
        assert value is not None
        return value

    def _as_f32(self, view: View) -> View:
        out = self.s.temporary(TensorType(view.shape, F32))
        self.s.copy_into(view, out)
        return out

    def setting(self, position: int, name: str) -> Ref:
        """A setting of the row, by name, as f32."""
        view = self.s.view(self._operand(position))
        if view.dtype is F64:  # the widest parameter says how many lanes a kernel has
            view = self._as_f32(view)
        return self.body.let(name, Rows(self.builder, f"{name}s", view).only.cast(F32))

    def fraction(self, position: int, name: str) -> Ref:
        """A setting of the row to all the bits of f64, without a parameter that wide."""
        view = self.s.view(self._operand(position))
        parts = [self.s.temporary(TensorType(view.shape, F32)) for _ in range(PARTS)]

        def split(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
            rest = e.load(0).cast(F64)
            found: list[Expr] = []
            for _ in parts:
                found.append(rest.cast(F32))
                rest = rest - found[-1].cast(F64)
            return (), found

        map_elements(self.s, "split_f64", view.shape, [view], parts, split)
        read = [Rows(self.builder, f"{name}{i}", part).only.cast(F64) for i, part in enumerate(parts)]
        total = read[0]
        for part in read[1:]:
            total = total + part
        return self.body.let(name, total)

    def integers(self, position: int, name: str) -> Rows:
        """Integers of rows, as i32; what that does not hold becomes its limits."""
        view = self.s.view(self._operand(position))
        if view.dtype.size == 8 or view.dtype.kind == "uint":
            out = self.s.temporary(TensorType(view.shape, I32))

            def clamp(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
                return (), [e.load(0).cast(I64).max(-1).min(2**31 - 1).cast(I32)]

            map_elements(self.s, "clamp_i32", view.shape, [view], [out], clamp)
            view = out
        return Rows(self.builder, name, view)

    # -- logits as they are sampled from -------------------------------------------------------------------------------
    def adjust(self) -> None:
        """With a mask, a bias or penalties, logits are copied to where weights will be, and changed there."""
        allowed, history = self.node.operands[6:8]
        bias = self.node.operands[12]
        if allowed is None and history is None and bias is None:
            return
        body = self.body
        changes = [
            self.builder.arg(name, self.s.view(of).shape[1])
            for name, of in (("history_length", history), ("bias_length", bias))
            if of is not None
        ]
        needed: Expr = Const(True, BOOL)
        if allowed is None:
            needed = changes[0] > 0 if len(changes) == 1 else (changes[0] > 0) | (changes[1] > 0)
        self.adjusted = body.let("adjusted", needed)
        if allowed is None:
            with body.loop("j", body.let("copied", needed.select(self.vocab, Const(0, I64))), vector=True) as copy:
                copy.store(self.weights, Index("j"), self.raw[Index("j")])
        else:
            self._mask(allowed)
        if bias is not None:
            self._bias(changes[-1])
        if history is not None:
            self._penalise(changes[0])

    def _mask(self, allowed: Value) -> None:
        view = self.s.view(allowed)
        words = Rows(self.builder, "allowed", view)
        size = 8 * view.dtype.size
        kind = I64 if view.dtype.size == 8 or view.dtype.kind == "uint" else I32
        with self.body.loop("w", self.builder.arg("words", view.shape[1])) as each:
            word = each.let("word", words[Index("w")].cast(kind))
            with each.loop("i", size, vector=True) as bits:
                token = Index("w") * size + Index("i")
                keep = (word >> Index("i").cast(kind) & 1).ne(0) & (token < self.vocab)
                bits.store(self.weights, token, keep.choose(self.raw[token], -math.inf))

    def _token_place(self, token: Expr) -> Expr:
        """Where a token of an operand counts: what is outside the vocabulary, behind the last token."""
        return ((token >= 0) & (token < self.vocab)).select(token, self.vocab)

    def _bias(self, length: Arg) -> None:
        tokens = self.integers(12, "bias_tokens")
        values = Rows(self.builder, "bias", self.s.view(self._operand(13)))
        with self.body.loop("h", length) as each:
            at = each.let("biased", self._token_place(tokens[Index("h")].cast(I64)))
            each.store(self.weights, at, self.weights[at] + values[Index("h")].cast(F32))

    def _penalise(self, length: Arg) -> None:
        """Counts how often each token occurs, in scratch of which only these tokens' places are touched."""
        seen = self.integers(7, "history")
        prompt = self.integers(8, "prompt_length").only.cast(I64)
        names = ("repetition", "frequency", "presence")
        repetition, frequency, presence = (self.setting(9 + i, name) for i, name in enumerate(names))
        h, counts = Index("h"), self.ids
        at = self._token_place(seen[h].cast(I64))
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
    def scan(self, needed: Expr) -> None:
        """Reads logits once: the highest of each block, and, if needed, the sum of exp(logit - highest) of raw ones.

        A chunk is in the nearest cache when its exponentials are added up; what came before is scaled to a new highest.
        """
        body = self.body
        self.raw_top, self.raw_total = body.var("raw_top", -math.inf, F32), body.var("raw_total", 0.0, F64)
        self.summed = body.let("summed", needed)
        with body.loop("c", self.whole_chunks) as chunk:
            self._scan_chunk(chunk, Index("c"), CHUNK, GROUP)
        with body.when("rest_there", self.rest > 0) as chunk:
            self._scan_chunk(chunk, self.whole_chunks, self.rest, self.rest_blocks)

    def _scan_chunk(self, body: Body, chunk: Expr, width: int | Arg, blocks: int | Arg) -> None:
        first = body.let("first_of_chunk", chunk * CHUNK)
        with body.loop("g", blocks) as block:
            place = block.let("block_start", first + Index("g") * BLOCK) + Q
            logit = self.source(place) if width == CHUNK else (place < self.vocab).choose(self.source(place), -math.inf)
            top = block.let("chunk_block_top", Reduce("max", "q", BLOCK, logit))
            block.store(self.tops, chunk * GROUP + Index("g"), top)
        highest = Reduce("max", "q", width, self.raw[first + Q])
        if self.adjusted is None:
            highest = Reduce("max", "g", blocks, self.tops[chunk * GROUP + Index("g")])
        top = body.let("chunk_top", highest.max(self.raw_top))
        with body.when("summed_here", self.summed) as sums:
            base = sums.let("chunk_base", top.eq(-math.inf).select(0.0, top))
            value = exp2((self.raw[first + Q] - base) * LOG2_E).cast(F64)
            part = sums.let("chunk_part", Reduce("sum", "q", width, value))
            sums.assign(self.raw_total, self.raw_total * (self.raw_top - base).cast(F64).exp() + part)
        body.assign(self.raw_top, top)

    def find_highest(self) -> None:
        """The highest logit, and the first token that has it."""
        body, g = self.body, Index("g")
        self.top = body.let("top", Reduce("max", "g", self.blocks, self.tops[g]))
        self.alive = body.let("alive", (self.top > -math.inf) & (self.top < math.inf))
        first = Reduce("min", "g", self.blocks, self.tops[g].eq(self.top).select(g, self.blocks))
        start = body.let("first_block", first.min(self.blocks - 1).max(0)) * BLOCK
        here = (start + Q < self.vocab).choose(self.source(start + Q), -math.inf)
        self.first = body.let("first", Reduce("min", "q", BLOCK, here.eq(self.top).select(Q, BLOCK)) + start)

    # -- thresholds ----------------------------------------------------------------------------------------------------
    def bisect(self, name: str, active: Expr, low: Operand, high: Expr, enough: Callable[[Body, Ref], Expr]) -> Ref:
        """The highest integer that is `enough`, where `low` is and `high` is not; `low` where not `active`."""
        lo, hi = self.body.var(f"{name}_low", low, I64), self.body.var(f"{name}_high", high, I64)
        steps = self.body.let(f"{name}_steps", active.select(STEPS, Const(0, I64)))
        with self.body.loop(f"{name}_step", steps) as each, each.when(f"{name}_open", hi - lo > 1) as step:
            middle = step.let(f"{name}_middle", lo + hi >> 1)
            good = step.let(f"{name}_good", enough(step, middle))
            step.assign(lo, good.select(middle, lo))
            step.assign(hi, good.select(hi, middle))
        return lo

    def take_highest(self, top_k: Ref) -> None:
        """Gathers the k highest logits and equals of the last, in order of ids, or leaves the row as it is.

        Each of the k blocks with the highest maxima has a logit as high as the least of these maxima.
        """
        body, g = self.body, Index("g")
        k = top_k
        self.limited = body.let("limited", self.drawn & (k > 0) & (k < self.vocab))
        few = body.let("few", self.limited & (k <= self.blocks))
        above = body.let("above_top", self.top.order().cast(I64) + 1)

        def blocks_reach(step: Body, key: Ref) -> Expr:
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
                logit = each.let("logit", self.source(token))
                each.store(self.weights, self.count, logit)
                each.store(self.ids, self.count, token.cast(I32))
                each.assign(self.count, self.count + (logit >= least).cast(I64))
        pad = body.let("pad", self.limited.select(BLOCK, Const(0, I64)))  # so that all blocks are whole
        with body.loop("q", pad, vector=True) as behind:
            behind.store(self.weights, self.count + Q, Const(-math.inf, F32))
        self.listed = body.let("listed", (self.count + (BLOCK - 1)).quot(BLOCK))

        def logits_reach(step: Body, key: Ref) -> Expr:
            reached = step.var("reached", 0, I32)
            with step.loop("g", self.listed) as block:
                reach = (self.weights[g * BLOCK + Q].order() >= key.cast(I32)).cast(I32)
                block.assign(reached, reached + block.let("reach", Reduce("sum", "q", BLOCK, reach)))
            return reached.cast(I64) >= k

        self.least_key = self.bisect("logit", self.limited, block_key, above, logits_reach)

    def weigh(self, temperature: Expr, filtered: Expr) -> None:
        """Weights of tokens that are left: sums of blocks and, where `filtered` or top-k ask for them, each weight."""
        body, g = self.body, Index("g")
        self.scale = body.let("scale", number(LOG2_E, F32) / temperature.max(COLDEST))
        self.mass = body.var("mass", 0, I64)
        everything = body.let("everything", (self.drawn & ~self.limited).cast(I64))
        self.summed_only = body.let("summed_only", everything * (~filtered).cast(I64))
        with body.loop("g", self.listed) as block:
            highest = block.let("listed_top", Reduce("max", "q", BLOCK, self.weights[g * BLOCK + Q]))
            block.store(self.tops, g, highest)
            self._fill(block, g, self.weights.__getitem__, self.least_key)
            self._sum_block(block, g, self.weights.__getitem__)
        with body.loop("g", body.let("whole_summed", self.summed_only * self.whole)) as block:
            self._sum_block(block, g, lambda at: self.weight(self.source(at)))
        with body.loop("g", body.let("whole_filled", (everything - self.summed_only) * self.whole)) as block:
            self._fill(block, g, self.source)
            self._sum_block(block, g, self.weights.__getitem__)
        with body.loop("g", body.let("part_filled", everything * self.part_blocks)) as block:
            self._fill(block, self.whole, lambda at: (at < self.vocab).choose(self.source(at), -math.inf))
            self._sum_block(block, self.whole, self.weights.__getitem__)
        self.used = body.let("used", self.listed + everything * self.blocks)

    def weight(self, logit: Expr) -> Expr:
        """An integer in f32, see `sampling.token_weights`."""
        return exp2((logit - self.top) * self.scale, WEIGHT_BITS) + ROUNDER - ROUNDER

    def _fill(self, body: Body, block: Expr, logit: Callable[[Expr], Expr], least_key: Ref | None = None) -> None:
        """Writes the weights of a block; logits below the least key weigh nothing."""
        place = block * BLOCK + Q
        with body.loop("q", BLOCK, vector=True) as each:
            value = each.let("weighed", logit(place))
            weight = self.weight(value)
            if least_key is not None:
                weight = (value.order() >= least_key.cast(I32)).select(weight, 0.0)
            each.store(self.weights, place, weight)

    def _sum_block(self, body: Body, block: Expr, weight: Callable[[Expr], Expr]) -> None:
        total = body.let("block_mass", Reduce("sum", "q", BLOCK, weight(block * BLOCK + Q).cast(F64)).cast(I64))
        self._store_sum(body, block, total)
        body.assign(self.mass, self.mass + total)

    def _store_sum(self, body: Body, block: Expr, total: Ref) -> None:
        """In two i32: parameters of 64 bits would halve the lanes of the kernel."""
        body.store(self.sums, block * 2, (total & 2**WORD - 1).cast(I32))
        body.store(self.sums, block * 2 + 1, (total >> WORD).cast(I32))

    def _sum(self, block: Expr) -> Expr:
        return (self.sums[block * 2 + 1].cast(I64) << WORD) + self.sums[block * 2].cast(I64)

    def bound(self, filtered: Expr) -> None:
        """Upper bounds of the weights of each block, and of each group of blocks, for filters."""
        body, g = self.body, Index("g")
        self.bounded = body.let("bounded", filtered.select(self.used, Const(0, I64)))
        with body.loop("g", self.bounded, vector=True) as block:
            block.store(self.tops, g, self.weight(self.tops[g]) * ABOVE + 1.0)
        self.groups = body.let("groups", (self.bounded + (GROUP - 1)).quot(GROUP))
        with body.loop("c", self.groups) as group:
            block_number = Index("c") * GROUP + g
            top = (block_number < self.used).choose(self.tops[block_number], 0.0)
            group.store(self.peaks, Index("c"), Reduce("max", "g", GROUP, top))

    def take_nucleus(self, nucleus: Expr, top_p: Expr) -> None:
        """The least weight of the fewest tokens that weigh top_p, and the last place where that weight still counts."""
        body = self.body
        share = body.let("share", top_p * self.mass.cast(F64))
        below = body.let("share_below", share.cast(I64))
        wanted = body.let("wanted", (below + (below.cast(F64) < share).cast(I64)).min(self.mass).max(1))

        def weigh_enough(step: Body, bits: Ref) -> Expr:
            least = step.let("probe", bits.cast(I32).bits())

            def reaching(place: Expr) -> list[Expr]:
                return [(self.weights[place] >= least).select(self.weights[place], 0.0)]

            (mass,) = self._sums(step, "probe", least, reaching, 1)
            return mass >= wanted

        # All weights below this one together weigh less than what may be missing; a little less, for rounding.
        spare = (self.mass - wanted).cast(F64) / (self.used * BLOCK).max(1).cast(F64) * 0.999
        low = body.let("nucleus_start", spare.max(0.0).cast(F32).order().cast(I64))
        high = number(HEAVIEST, F32).order().cast(I64) + 1
        bits = self.bisect("nucleus", nucleus, low, high, weigh_enough)
        self.least = least = body.let("least", nucleus.select(bits.cast(I32).bits(), Const(0.0, F32)))

        def above_and_equal(place: Expr) -> list[Expr]:
            weight = self.weights[place]
            return [(weight > least).select(weight, 0.0), weight.eq(least).select(1.0, Const(0.0, F32))]

        above, ties = self._sums(body, "tie", nucleus.select(least, Const(math.inf, F32)), above_and_equal, 2)
        each = body.let("tie_weight", least.cast(I64).max(1))
        keep = body.let("keep", (wanted - above + each - 1).quot(each))  # of equals, those with lower ids
        self.last = body.var("last", self.room, I64)
        with body.when("cut", nucleus & (keep < ties)) as cut:
            self._find_tie(cut, keep)

    def _sums(
        self, body: Body, name: str, least: Expr, values: Callable[[Expr], Sequence[Expr]], count: int
    ) -> list[Ref]:
        """Sums over all places of integers in f32 that are 0 where the weight is below `least`."""
        sums = [body.var(f"{name}_sum{i}", 0, I64) for i in range(count)]
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
                    inside.assign(total, total + part.cast(I64))
        return sums

    def _find_tie(self, body: Body, keep: Ref) -> None:
        """The place of tie number `keep`: its block, then within that."""
        g, block_at, before = Index("g"), body.var("tie_block", 0, I64), body.var("ties_before", 0, I64)
        seen = body.var("ties_seen", 0, I64)
        with body.loop("g", self.used) as block:
            is_tie = self.weights[g * BLOCK + Q].eq(self.least).cast(I32)
            ties = block.let("ties_here", Reduce("sum", "q", BLOCK, is_tie).cast(I64))
            here = block.let("tie_is_here", (seen < keep) & (seen + ties >= keep))
            block.assign(block_at, here.select(g, block_at))
            block.assign(before, here.select(seen, before))
            block.assign(seen, seen + ties)
        with body.loop("q", BLOCK) as each:
            place = each.let("tie_place", block_at * BLOCK + Q)
            each.assign(before, before + self.weights[place].eq(self.least).cast(I64))
            each.assign(self.last, ((before >= keep) & self.last.eq(self.room)).select(place, self.last))

    # -- the pick ------------------------------------------------------------------------------------------------------
    def draw(self, uniform: Expr, min_p: Expr) -> Ref:
        """The token where the running sum of the weights that are left passes `uniform` of their total."""
        body, g = self.body, Index("g")
        floor = body.let("floor", self.least.max(min_p * HEAVIEST))

        def kept(place: Expr) -> Expr:
            weight = self.weights[place]
            return ((weight >= floor) & ((weight > self.least) | (place <= self.last))).select(weight, 0.0)

        total = body.var("total", self.mass, I64)
        with body.when("fewer", self.bounded > 0) as filtered:
            filtered.assign(total, Const(0, I64))
            with filtered.loop("g", self.bounded) as block:
                part = block.var("kept_part", 0, I64)
                with block.when("kept_open", self.tops[g] >= floor) as inside:
                    inside.assign(part, Reduce("sum", "q", BLOCK, kept(g * BLOCK + Q).cast(F64)).cast(I64))
                self._store_sum(block, g, part)
                block.assign(total, total + part)
        passed = body.let("passed", (uniform * total.cast(F64)).cast(I64).min(total - 1))
        at, before = self._passes("block", "g", self.used, passed, self._sum(g))
        at = body.let("drawn_block", at.min(self.used - 1).max(0))
        with body.when("refilled", (self.summed_only > 0) & (at < self.whole)) as block:
            self._fill(block, at, self.source)
        rest = body.let("rest", passed - before)
        within, _ = self._passes("token", "q", BLOCK, rest, kept(at * BLOCK + Q).cast(I64))
        slot = body.let("slot", at * BLOCK + within.min(BLOCK - 1))
        return body.let("picked", self.limited.choose(self.ids[slot].cast(I64), slot))

    def _passes(self, name: str, index: str, extent: int | Ref, limit: Ref, term: Expr) -> tuple[Ref, Ref]:
        """Where a running sum first is above a limit, and the sum before that."""
        body = self.body
        running, before = body.var(f"{name}_running", 0, I64), body.var(f"{name}_before", 0, I64)
        at = body.var(f"{name}_at", 0, I64)
        with body.loop(index, extent) as step:
            step.assign(running, running + term)
            below = step.let(f"{name}_below", running <= limit)
            step.assign(at, at + below.cast(I64))
            step.assign(before, below.select(running, before))
        return at, before

    def write(self) -> list[View]:
        """The whole kernel, launched."""
        body = self.body
        uniform, temperature = self.fraction(1, "uniform"), self.setting(2, "temperature")
        top_k = body.let("k", self.integers(3, "top_ks").only.cast(I64))
        top_p, min_p = self.fraction(4, "top_p"), self.setting(5, "min_p")
        self.adjust()
        # Weights at temperature 1 are the exponentials that log-probabilities need.
        shares = (
            Const(False, BOOL)
            if self.adjusted is not None
            else temperature.eq(1.0) & ((top_k < 1) | (top_k >= self.vocab))
        )
        shares = body.let("shares", shares)
        self.scan(~shares)
        self.find_highest()
        self.drawn = body.let("drawn", self.alive & (temperature > 0.0))
        nucleus = body.let("nucleus", self.drawn & (top_p < 1.0))
        filtered = body.let("filtered", nucleus | self.drawn & (min_p > 0.0))
        self.take_highest(top_k)
        self.weigh(temperature, filtered)
        self.bound(filtered)
        self.take_nucleus(nucleus, top_p)
        picked = self.draw(uniform, min_p)
        chosen = self.drawn.select(picked, self.first)
        token = body.let("token", self.alive.select(chosen, NO_TOKEN))
        logit = self.alive.choose(self.raw[token], math.nan) - self.raw_top
        total = shares.select(self.mass.cast(F64) * 2.0**-WEIGHT_BITS, self.raw_total)
        zero = Const(0, I64)
        body.store(self.tokens, zero, token.cast(I32))
        body.store(self.scores, zero, logit.cast(F64) - total.log())
        shape = self.s.view(self._operand(0)).shape
        root = For("u", self.builder.arg("units", shape[0]), tuple(body.stmts))
        self.builder.launch(self.s, root, shape[0], flops=product(shape) * 40)
        return self.outs


@loop_form("sample_tokens")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _Sampler(s, node).write()
