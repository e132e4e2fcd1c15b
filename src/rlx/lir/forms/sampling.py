"""Loop form of sampling: one row per unit. Nothing is sorted.

Thresholds (the k-th highest logit, the least weight of a nucleus) are found by bisection over the bits of floats. A
probe skips blocks whose maximum is below the threshold, so it costs little where few tokens count. Weights and their
sums are those of `rlx/sampling.py` to the bit: integers, which f64 adds exactly within a block and i64 beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlx.dtypes import BOOL, F32, F64, I32, I64
from rlx.ir.graph import Node
from rlx.lir.forms.row_kernels import Body
from rlx.lir.forms.sampling_logits import BLOCK, GROUP, LogitsKernel, Q, exp2
from rlx.lir.loops import Const, Expr, For, Index, Operand, Reduce, Ref, number
from rlx.lir.schedule import Scheduler, loop_form
from rlx.lir.views import View
from rlx.sampling import COLDEST, LOG2_E, NO_TOKEN, ROUNDER, WEIGHT_BITS
from rlx.types import product

ABOVE = 1 + 2.0**-20  # times a weight, plus 1, it is above the weights of all lower logits, however they round
HEAVIEST = 2.0**WEIGHT_BITS
LEAST_KEY = -(2**31)  # below what `order` makes of any f32
STEPS = 32  # halvings after which a range of 2^32 keys is one
WORD = 31  # bits of the lower of two i32 that hold a sum


class _Sampler(LogitsKernel):
    """The kernel under construction; each step stores its results for the next."""

    # -- thresholds ----------------------------------------------------------------------------------------------------
    def bisect(self, name: str, active: Expr, low: Operand, high: Expr, enough: Callable[[Body, Ref], Expr]) -> Ref:
        """The highest integer that is `enough`, given that `low` is and `high` is not; `low` if not `active`."""
        lo, hi = self.body.var(f"{name}_low", low, I64), self.body.var(f"{name}_high", high, I64)
        steps = self.body.let(f"{name}_steps", active.select(STEPS, Const(0, I64)))
        with self.body.loop(f"{name}_step", steps) as each, each.when(f"{name}_open", hi - lo > 1) as step:
            middle = step.let(f"{name}_middle", lo + hi >> 1)
            good = step.let(f"{name}_good", enough(step, middle))
            step.assign(lo, good.select(middle, lo))
            step.assign(hi, good.select(hi, middle))
        return lo

    def take_highest(self, top_k: Ref) -> None:
        """Gather the k highest logits, and ties with the lowest of them, in order of ids, or leave the row unchanged.

        Each of the k blocks with the highest maxima has a logit at least as high as the lowest of these maxima.
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
        pad = body.let("pad", self.limited.select(BLOCK, Const(0, I64)))  # to a multiple of the block size
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
        """Weights of the remaining tokens: block sums and, if needed for `filtered` or top-k, each weight."""
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
        with body.loop("g", body.let("whole_summed", self.summed_only * self.full_blocks)) as block:
            self._sum_block(block, g, lambda at: self.weight(self.source(at)))
        with body.loop("g", body.let("whole_filled", (everything - self.summed_only) * self.full_blocks)) as block:
            self._fill(block, g, self.source)
            self._sum_block(block, g, self.weights.__getitem__)
        with body.loop("g", body.let("part_filled", everything * self.part_blocks)) as block:
            self._fill(block, self.full_blocks, lambda at: (at < self.vocab).choose(self.source(at), -math.inf))
            self._sum_block(block, self.full_blocks, self.weights.__getitem__)
        self.used = body.let("used", self.listed + everything * self.blocks)

    def weight(self, logit: Expr) -> Expr:
        """An integer in f32, see `sampling.token_weights`."""
        return exp2((logit - self.top) * self.scale, WEIGHT_BITS) + ROUNDER - ROUNDER

    def _fill(self, body: Body, block: Expr, logit: Callable[[Expr], Expr], least_key: Ref | None = None) -> None:
        """Store the weights of a block; logits below the lowest key have weight 0."""
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
        """Store a sum as two i32: 64-bit parameters would halve the lanes of the kernel."""
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
        """The lowest weight in the nucleus of top_p, and the last place at which a tie with it still counts."""
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

        # All weights below this one together are less than the mass that may be dropped; with a margin for rounding.
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
        keep = body.let("keep", (wanted - above + each - 1).quot(each))  # of ties, those with lower ids
        self.last = body.var("last", self.room, I64)
        with body.when("cut", nucleus & (keep < ties)) as cut:
            self._find_tie(cut, keep)

    def _sums(
        self, body: Body, name: str, least: Expr, values: Callable[[Expr], Sequence[Expr]], count: int
    ) -> list[Ref]:
        """Sum integers in f32 over all places; they are 0 where the weight is below `least`."""
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
        """The place of tie number `keep`: first its block, then the place within it."""
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
        """The token at which the running sum of the remaining weights exceeds `uniform` times their total."""
        body, g = self.body, Index("g")
        floor = body.let("floor", self.least.max(min_p * HEAVIEST))

        def selected(place: Expr) -> Expr:
            weight = self.weights[place]
            return ((weight >= floor) & ((weight > self.least) | (place <= self.last))).select(weight, 0.0)

        total = body.var("total", self.mass, I64)
        with body.when("fewer", self.bounded > 0) as filtered:
            filtered.assign(total, Const(0, I64))
            with filtered.loop("g", self.bounded) as block:
                part = block.var("kept_part", 0, I64)
                with block.when("kept_open", self.tops[g] >= floor) as inside:
                    inside.assign(part, Reduce("sum", "q", BLOCK, selected(g * BLOCK + Q).cast(F64)).cast(I64))
                self._store_sum(block, g, part)
                block.assign(total, total + part)
        passed = body.let("passed", (uniform * total.cast(F64)).cast(I64).min(total - 1))
        at, before = self._passes("block", "g", self.used, passed, self._sum(g))
        at = body.let("drawn_block", at.min(self.used - 1).max(0))
        with body.when("refilled", (self.summed_only > 0) & (at < self.full_blocks)) as block:
            self._fill(block, at, self.source)
        rest = body.let("rest", passed - before)
        within, _ = self._passes("token", "q", BLOCK, rest, selected(at * BLOCK + Q).cast(I64))
        slot = body.let("slot", at * BLOCK + within.min(BLOCK - 1))
        return body.let("picked", self.limited.choose(self.ids[slot].cast(I64), slot))

    def _passes(self, name: str, index: str, extent: int | Ref, limit: Ref, term: Expr) -> tuple[Ref, Ref]:
        """The index at which a running sum first exceeds a limit, and the sum before it."""
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
        """Build and launch the kernel."""
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
        scored: Expr = Const(True, BOOL)
        if self.node.operands[14] is not None:
            scored = self.integers(14, "scored").only.ne(0)
        scored = body.let("is_scored", scored)
        self.scan(scored & ~shares)
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
        body.store(self.scores, zero, scored.select(logit.cast(F64) - total.log(), math.nan))
        shape = self.s.view(self._operand(0)).shape
        root = For("u", self.builder.arg("units", shape[0]), tuple(body.stmts))
        self.builder.launch(self.s, root, shape[0], flops=product(shape) * 40)
        return self.outs


@loop_form("sample_tokens")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _Sampler(s, node).write()
