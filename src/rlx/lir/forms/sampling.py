"""Loop form of sampling: one row per unit. Nothing is sorted.

Thresholds (the k-th highest logit, the least weight of a nucleus) are found by bisection over the bits of floats. A
probe skips blocks whose maximum is below the threshold, so it costs little where few tokens count. Weights and their
sums are those of `rlx/sampling.py` to the bit: integers, which f64 adds exactly within a block and i64 beyond.

Most blocks of a row have light tokens only, and few draws depend on the last bits of their sums. So these sums are
estimated first, with bounds, and a token counts as drawn if it is the same for any sums within them. Otherwise the
weights of light blocks are computed too, and the token is drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rlx.dtypes import BOOL, F32, F64, I32, I64
from rlx.ir.graph import Node
from rlx.lir.forms.row_kernels import Body, Rows
from rlx.lir.forms.sampling_logits import BLOCK, CHUNK, GROUP, NEAR, LogitsKernel, Q, exp2, exp2_each
from rlx.lir.loops import Const, Expr, For, Index, Operand, Reduce, Ref, number
from rlx.lir.schedule import Scheduler, loop_form
from rlx.lir.views import View
from rlx.sampling import COLDEST, LOG2_E, NO_TOKEN, ROUNDER, WEIGHT_BITS
from rlx.types import product

ABOVE = 1 + 2.0**-20  # times a weight, plus 1, it is above the weights of all lower logits, however they round
HEAVIEST = 2.0**WEIGHT_BITS
LIGHT = 2.0 ** (WEIGHT_BITS - 14)  # tokens that are lighter decide few draws
ROUGH_EXP2 = (0.00957010314, 0.0559178628, 0.240247443, 0.693121791, 0.999999285)  # as `EXP2`, within 2^-18.5
ROUGH_ERROR = 2.0**-17  # of sums of such weights
LEAST_KEY = -(2**31)  # below what `order` makes of any f32
FLAT = 4096  # times the heaviest: with more mass than that, many tokens are in a nucleus
GUESSES = 12  # halvings of the range of keys by a guess
CELL_BLOCKS = 4
CELL = CELL_BLOCKS * BLOCK  # weights whose sum f64 still holds exactly
STREAMS = 4  # weights of a chunk that are computed at once
PART = 16  # weights of a block that are passed over at once where none is of interest
MARGIN = 2**16  # keys: about as far a guess by samples is from the truth
ATTEMPTS = 4  # at an estimate that is near enough
FAR = 512  # tokens: an estimate that far off is made again
WALK = 1024  # most steps from an estimate to the least weight of a nucleus
OCTAVE = 2**23  # keys from a weight to its double
AIMED = 16  # steps that may be better than halving
MOST_OCTAVES = 8  # 2^8 octaves are more than f32 has
STEPS = 48  # more than the steps toward a guess and the halvings of a range of 2^32 keys
WORD = 31  # bits of the lower of two i32 that hold a sum


class _Sampler(LogitsKernel):
    """The whole kernel while it is written; each step leaves its results for the next."""

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
            width = block.let("width", (self.tops[g] >= least).select(BLOCK, Const(0, I64)))

            def gather(inner: Body, rows: Rows, width: Ref = width) -> None:
                with inner.loop("q", width) as each:
                    token = g * BLOCK + Q
                    logit = each.let("logit", rows[token])
                    each.store(self.weights, self.count, logit)
                    each.store(self.ids, self.count, token.cast(I32))
                    each.assign(self.count, self.count + (logit >= least).cast(I64))

            self.read(block, "gather", g, gather)
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

    def weigh_listed(self) -> None:
        """Weights and sums of the tokens that top-k leaves."""
        body, g = self.body, Index("g")
        with body.loop("g", self.listed) as block:
            highest = block.let("listed_top", Reduce("max", "q", BLOCK, self.weights[g * BLOCK + Q]))
            block.store(self.tops, g, highest)
            self._fill(block, g, self.weights, self.least_key)
            self._sum_block(block, g)

    def weigh(self, attempt: Expr, nucleus: Expr, floor: Ref) -> None:
        """Sums of all blocks, where top-k left all tokens, and the weights of blocks that may matter.

        With min-p and without a nucleus, blocks below its floor do not matter. Otherwise the first attempt computes
        about what light blocks weigh, so the sum of all weights is at least `mass` and at most `spread` more. The
        second attempt computes the weights of these blocks too.
        """
        body, g = self.body, Index("g")
        by_floor = body.let("by_floor", (floor > 0.0) & ~nucleus)
        limit = body.let("light_limit", by_floor.select(floor, Const(LIGHT, F32)))
        estimates = body.let("estimates", attempt.eq(0) & ~by_floor)
        with body.loop("g", body.let("weighed_blocks", self.everything * self.blocks)) as block:
            light = block.let("is_light", self._is_light(g, limit))
            with block.when("is_rough", light & estimates) as rough:
                power = (self.raw[g * BLOCK + Q] - self.top) * self.scale
                weight = exp2(power, WEIGHT_BITS, fused=ROUGH_EXP2)
                rough.store(self.nearest, g, rough.let("about", Reduce("sum", "q", BLOCK, weight)))
            with block.when("is_exact", light.ne(attempt.eq(0))) as exact:
                self.read(exact, "fill", g, lambda inner, rows: self._fill(inner, g, rows))
                self._sum_block(exact, g)
        estimated = body.let("estimated_blocks", (estimates & self.everything.ne(0)).select(self.blocks, 0))
        was_rough, about = self._is_light(g, limit), self.nearest[g].cast(F64)
        error = about * ROUGH_ERROR + BLOCK
        least = was_rough.select((about - error).max(0.0).cast(I64), 0)
        with body.loop("g", estimated, vector=True) as block:
            low, high = self._words(least)
            block.store(self.sums, g, was_rough.select(low, self.sums[g]))
            block.store(self.sums, g + self.blocks, was_rough.select(high, self.sums[g + self.blocks]))
        light_mass = body.let("light_mass", Reduce("sum", "g", estimated, least))
        most = was_rough.select((about + error).cast(I64) + 1, 0)
        self.spread = body.let("spread", Reduce("sum", "g", estimated, most) - light_mass)
        self.mass = body.let("mass", self.known_mass + light_mass)

    def _is_light(self, block: Expr, limit: Expr) -> Expr:
        return (self.tops[block] < limit) & self.copied[block].eq(0)

    def weight(self, logit: Expr) -> Expr:
        """An integer in f32, see `sampling.token_weights`."""
        return exp2((logit - self.top) * self.scale, WEIGHT_BITS) + ROUNDER - ROUNDER

    def _fill(self, body: Body, block: Expr, rows: Rows, least_key: Ref | None = None) -> None:
        """Writes the weights of a block; logits below the least key weigh nothing."""
        with body.loop("q", BLOCK // STREAMS, vector=True) as each:
            places = [block * BLOCK + (Q + i * (BLOCK // STREAMS)) for i in range(STREAMS)]
            values = [each.let(f"weighed_{i}", rows[place]) for i, place in enumerate(places)]
            powers = [(value - self.top) * self.scale for value in values]
            for place, value, power in zip(places, values, exp2_each(powers, each.let, WEIGHT_BITS), strict=True):
                weight = power + ROUNDER - ROUNDER
                if least_key is not None:
                    weight = (value.order() >= least_key.cast(I32)).select(weight, 0.0)
                each.store(self.weights, place, weight)

    def _sum_block(self, body: Body, block: Expr) -> None:
        weight = self.weights[block * BLOCK + Q]
        total = body.let("block_mass", Reduce("sum", "q", BLOCK, weight.cast(F64)).nearest())
        self._store_sum(body, block, total)
        body.assign(self.known_mass, self.known_mass + total)

    def _store_sum(self, body: Body, block: Expr, total: Ref) -> None:
        low, high = self._words(total)
        body.store(self.sums, block, low)
        body.store(self.sums, block + self.blocks, high)

    def _words(self, total: Expr) -> tuple[Expr, Expr]:
        """A sum in two i32: parameters of 64 bits would halve the lanes of the kernel."""
        return (total & 2**WORD - 1).cast(I32), (total >> WORD).cast(I32)

    def _sum(self, block: Expr) -> Expr:
        return (self.sums[block + self.blocks].cast(I64) << WORD) + self.sums[block].cast(I64)

    def bound(self) -> None:
        """Upper bounds of the weights of each block, and of each group of blocks."""
        body, g = self.body, Index("g")
        with body.loop("g", self.used, vector=True) as block:
            block.store(self.tops, g, self.weight(self.tops[g]) * ABOVE + 1.0)
        self.groups = body.let("groups", (self.used + (GROUP - 1)).quot(GROUP))
        with body.loop("c", self.groups) as group:
            block_number = Index("c") * GROUP + g
            top = (block_number < self.used).choose(self.tops[block_number], 0.0)
            group.store(self.peaks, Index("c"), Reduce("max", "g", GROUP, top))

    def take_nucleus(self, nucleus: Expr, top_p: Expr) -> Expr:
        """The least weight of the fewest tokens that weigh top_p, and the last place where that weight still counts.

        Returns whether they are certain: the same for any sum of all weights that is possible, and no token of a light
        block among them.

        Where many tokens count, as in nearly uniform rows, a walk from an estimate finds it. Elsewhere, and where that
        fails, probes of whole rows narrow the range of keys until few weights are left; these are gathered and probed.
        """
        body = self.body

        def share_of(name: str, mass: Expr) -> Ref:
            share = body.let(f"share_of_{name}", top_p * mass.cast(F64))
            below = body.let(f"below_{name}", share.cast(I64))
            return body.let(name, (below + (below.cast(F64) < share).cast(I64)).min(mass).max(1))

        wanted, most_wanted = share_of("wanted", self.mass), share_of("most_wanted", self.mass + self.spread)
        # All weights below this one together weigh less than what may be missing; a little less, for rounding.
        spare = (self.mass - wanted).cast(F64) / (self.used * BLOCK).max(1).cast(F64) * 0.999
        # Below `heavy`, not all weights are known.
        heavy = self.spread.eq(0).select(Const(0.0, F32), Const(LIGHT, F32))
        start = body.let("nucleus_start", spare.max(0.0).cast(F32).max(heavy).order().cast(I64))
        end = body.let("nucleus_end", number(HEAVIEST, F32).order().cast(I64) + 1)
        flat = body.let("flat", nucleus & self.spread.eq(0) & (self.mass > int(HEAVIEST) * FLAT))
        guess = self._guess(flat, nucleus, wanted, start, end)
        # Weights from `low` on weigh `reached`, enough; those from `high` on weigh `above`, too little.
        low, high = body.var("nucleus_low", start, I64), body.var("nucleus_high", end, I64)
        reached, above = body.var("reached", self.mass, I64), body.var("above", 0, I64)
        self.last = body.var("last", self.room, I64)
        self.settled = body.var("settled", 0, I64)
        with body.when("estimated", flat) as estimated:
            least, total = self._walk(estimated, self._estimate(estimated, guess, wanted), wanted)
            estimated.assign(self.settled, (total >= wanted).cast(I64))
            done, key = self.settled.ne(0), estimated.let("walk_key", least.order().cast(I64))
            for variable, value in ((low, key), (high, key + 1), (reached, total), (above, total)):
                estimated.assign(variable, done.select(value, variable))
        self.settled_mass = body.let("settled_mass", above)

        def narrow(name: str, active: Expr, crowded: Expr, middle: Expr, mass: Callable[[Body, Ref], Expr]) -> None:
            steps = body.let(f"{name}_steps", active.select(STEPS, Const(0, I64)))
            with (
                body.loop(f"{name}_step", steps) as each,
                each.when(f"{name}_open", crowded & (high - low > 1)) as step,
            ):
                key = step.let(f"{name}_key", middle.min(high - 1).max(low + 1))
                weight = step.let(f"{name}_mass", mass(step, step.let(f"{name}_probe", key.cast(I32).bits())))
                enough = step.let(f"{name}_enough", weight >= wanted)
                for variable, value, changes in (
                    (low, key, enough), (reached, weight, enough), (high, key, ~enough), (above, weight, ~enough),
                ):  # fmt: skip
                    step.assign(variable, changes.select(value, variable))

        halfway, step = low + high >> 1, Index("row_step")
        searching = flat.select(step < 2, low.eq(start))
        first = flat.select(guess + (step * 4 - 2) * MARGIN, guess - (OCTAVE << step.min(MOST_OCTAVES)))
        # As if weights lay evenly between the keys: slightly below that key, then above, so that both ends come near.
        part = (wanted - above).cast(F64) / (reached - above).max(1).cast(F64)
        aim = high - ((high - low).cast(F64) * part).cast(I64)
        aside = high - low >> 4
        near = (step < AIMED).select((step & 1).eq(0).select(aim - aside, aim + aside), halfway)
        around = searching.select(first, near)
        many = (reached - above).cast(F64) > low.cast(I32).bits().cast(F64) * NEAR  # else at most NEAR are in between
        narrow("row", nucleus, many, around, lambda inner, least: self._mass(inner, "probe", least))
        gathered = body.let("gathered", nucleus & (high - low > 1))
        count = self._gather(gathered, low, high)
        heavier = body.let("heavier", above)

        def of_gathered(inner: Body, least: Ref) -> Expr:
            total = inner.var("near_total", heavier, I64)
            with inner.loop("g", count) as block:
                weight = self.near[Index("g") * BLOCK + Q]
                part = Reduce("sum", "q", BLOCK, (weight >= least).select(weight, 0.0).cast(F64))
                block.assign(total, total + block.let("near_part", part).nearest())
            return total

        narrow("near", gathered, Const(True, BOOL), halfway, of_gathered)
        self.least = body.let("least", nucleus.select(low.cast(I32).bits(), Const(0.0, F32)))
        each = body.let("tie_weight", self.least.cast(I64).max(1))
        keep = body.let("keep", (wanted - above + each - 1).quot(each))  # of equals, those with lower ids
        most_kept = body.let("most_kept", (most_wanted - above + each - 1).quot(each))
        with body.when("cut", nucleus & (keep * each < reached - above)) as cut:
            self._find_tie(cut, keep)
        return ~nucleus | self.spread.eq(0) | ((low > start) & (most_wanted <= reached) & keep.eq(most_kept))

    def _estimate(self, body: Body, guess: Ref, wanted: Ref) -> Ref:
        """The sum of the weights from a key on that is slightly above that of the least weight, as a rule.

        Two masses of the row, as f32 adds them, say by how much the guess is wrong: between them and a little beyond,
        tokens lie evenly, but for chance and the slope of their density. Then the mass of the estimate, which is exact,
        is what later estimates start from. Leaves sums of cells, each as that of its first block, and the heaviest of
        the other weights of each.
        """
        c, g = Index("c"), Index("g")
        self.cells = body.let("cells", (self.used + (CELL_BLOCKS - 1)).quot(CELL_BLOCKS))
        keys = [body.let(f"key_{name}", guess + way * MARGIN) for name, way in (("before", -1), ("behind", 1))]
        masses = [body.var(f"mass_{key.name}", 0.0, F64) for key in keys]
        probes = [body.let(f"{key.name}_probe", key.max(1).cast(I32).bits()) for key in keys]
        with body.loop("c", self.groups) as chunk:
            width = chunk.let("chunk_width", (self.used * BLOCK - c * CHUNK).min(CHUNK))
            for mass, probe in zip(masses, probes, strict=True):
                weight = self.weights[c * CHUNK + Q]
                part = Reduce("sum", "q", width, (weight >= probe).select(weight, 0.0))
                chunk.assign(mass, mass + chunk.let(f"part_of_{mass.name}", part).cast(F64))
        between = body.let("mass_between", (masses[0] - masses[1]).max(1.0))
        unit = body.let("usual_weight", guess.max(1).cast(I32).bits().cast(F64).max(1.0))
        count = body.let("tokens_between", (between / unit).max(1.0))
        keys_per_token = body.let("keys_per_token", number(2.0 * MARGIN, F64) / count)
        ahead = body.let("tokens_ahead", count.sqrt() * 0.625 + count * (1 / 96) + 4.0)
        total, limit = body.var("estimated_mass", 0, I64), body.var("limit", keys[0], I64)
        missing = body.var("tokens_missing", (wanted.cast(F64) - masses[0]) / unit, F64)
        is_open = body.var("estimate_open", 1, I64)
        with body.loop("attempt", ATTEMPTS) as each, each.when("attempted", is_open > 0) as attempt:
            moved = ((ahead - missing) * keys_per_token).max(-(2.0**WORD)).min(2.0**WORD)
            attempt.assign(limit, (limit + moved.cast(I64)).max(1).min(number(HEAVIEST, F32).order().cast(I64)))
            least = attempt.let("estimate", limit.cast(I32).bits())
            attempt.assign(total, Const(0, I64))
            with attempt.loop("g", self.used, vector=True) as block:
                for word in (g, g + self.blocks):
                    block.store(self.sums, word, Const(0, I32))
            with attempt.loop("c", self.cells) as cell:
                width, weight = cell.let("cell_width", self._cell_width(c)), self.weights[c * CELL + Q]
                heavy = (weight >= least).select(weight, 0.0).cast(F64)
                cell_weight = cell.let("cell_weight", Reduce("sum", "q", width, heavy))
                cell.store(self.nearest, c, self._heaviest_below(cell, weight, least, width))
                cell_mass = cell.let("cell_mass", cell_weight.cast(I64))
                self._store_sum(cell, c * CELL_BLOCKS, cell_mass)
                cell.assign(total, total + cell_mass)
            attempt.assign(missing, (wanted - total).cast(F64) / unit)
            attempt.assign(is_open, ((missing <= 0.0) | (missing > FAR)).cast(I64))
        return total

    def _heaviest_below(self, body: Body, weight: Expr, limit: Expr, width: Ref) -> Expr:
        """Of `width` weights, the heaviest below a limit; by their bits, which sort alike and are never NaN."""
        below = (weight < limit).select(weight, 0.0).bits()
        return body.let("heaviest_below", Reduce("max", "q", width, below)).bits()

    def _cell_width(self, cell: Expr) -> Expr:
        """The last cell may be shorter."""
        return (self.used * BLOCK - cell * CELL).min(CELL)

    def _walk(self, body: Body, total: Ref, wanted: Ref) -> tuple[Ref, Ref]:
        """Adds weights to an estimate, heaviest first, until they weigh what is wanted: the last one, and their sum.

        Leaves the sums of cells, and the place of the last one. The sum is below what is wanted if the way is too long
        or if the estimate is not below it.
        """
        c = Index("c")
        least = body.var("walk_weight", 0.0, F32)
        at, taken = body.var("walk_cell", 0, I64), body.var("walk_taken", 0, I64)
        body.assign(total, (total < wanted).select(total, Const(-1, I64)))
        with (
            body.loop("walk_step", body.let("walk_steps", (total >= 0).select(WALK, Const(0, I64)))) as each,
            each.when("walk_open", total < wanted) as step,
        ):
            step.assign(least, step.let("walk_next", Reduce("max", "c", self.cells, self.nearest[c])))
            first = Reduce("min", "c", self.cells, self.nearest[c].eq(least).select(c.cast(I32), 2**WORD - 1))
            step.assign(at, step.let("walk_first", first).cast(I64).min(self.cells - 1))
            width, weight = step.let("walk_width", self._cell_width(at)), self.weights[at * CELL + Q]
            ties = step.let("walk_ties", Reduce("sum", "q", width, weight.eq(least).cast(I32)).cast(I64))
            unit = step.let("walk_unit", least.cast(I64).max(1))
            step.assign(taken, ties.min((wanted - total + unit - 1).quot(unit)))  # of equals, those with lower ids
            step.assign(total, total + taken * unit)
            self._store_sum(step, at * CELL_BLOCKS, step.let("walk_sum", self._sum(at * CELL_BLOCKS) + taken * unit))
            step.store(self.nearest, at, self._heaviest_below(step, weight, least, width))
        seen = body.var("walk_seen", 0, I64)
        with body.loop("q", body.let("last_width", (total >= wanted).select(self._cell_width(at), 0))) as each:
            place = each.let("walk_place", at * CELL + Q)
            each.assign(seen, seen + self.weights[place].eq(least).cast(I64))
            each.assign(self.last, ((seen >= taken) & self.last.eq(self.room)).select(place, self.last))
        return least, total

    def _guess(self, flat: Ref, nucleus: Expr, wanted: Ref, start: Ref, end: Ref) -> Ref:
        """About the key of the least weight, without a look at the whole row.

        Where many tokens count, as if each group of blocks were like its first. Elsewhere, as if all weights of a block
        were as heavy as its heaviest, which is too heavy by some octaves.
        """
        body, c, g = self.body, Index("c"), Index("g")
        low, high = body.var("guess_low", start, I64), body.var("guess_high", end, I64)
        groups = body.let("whole_groups", self.used.quot(GROUP))
        samples = body.let("samples", flat.select(groups, Const(0, I64)))
        sampled = body.var("sampled", 0, I64)
        with body.loop("c", samples) as block:
            block.assign(sampled, sampled + self._sum(c * GROUP))
        share = flat.select(sampled.cast(F64) / self.mass.max(1).cast(F64), 2.0**-WORD)
        target = body.let("guess_wanted", wanted.cast(F64) * share)
        with body.loop("guess_step", body.let("guess_steps", nucleus.select(GUESSES, Const(0, I64)))) as step:
            key = step.let("guess_key", low + high >> 1)
            probe = step.let("guess_probe", key.cast(I32).bits())
            total = step.var("guess_total", 0.0, F64)
            with step.loop("c", samples) as block:
                weight = self.weights[c * (GROUP * BLOCK) + Q]
                part = Reduce("sum", "q", BLOCK, (weight >= probe).select(weight, 0.0))
                block.assign(total, total + block.let("guess_part", part).cast(F64))
            with step.when("by_blocks", ~flat) as blocks:
                reaches = (g < self.used) & (self.tops[g] >= probe)
                mass = reaches.select(self.sums[g + self.blocks].cast(F32), 0.0).cast(F64)
                blocks.assign(total, blocks.let("guess_blocks", Reduce("sum", "g", self.blocks, mass)))
            enough = step.let("guess_enough", total >= target)
            step.assign(low, enough.select(key, low))
            step.assign(high, enough.select(high, key))
        return low

    def _gather(self, needed: Ref, low: Ref, high: Ref) -> Ref:
        """Weights from one key to below another, in whole blocks, of which it returns the number."""
        body = self.body
        count = body.var("near_count", 0, I64)
        least = body.let("near_least", needed.select(low.cast(I32).bits(), Const(math.inf, F32)))
        limit = body.let("near_limit", high.cast(I32).bits())
        with self._reaching(body, "near", least) as (block, here), block.loop("p", BLOCK // PART) as part:
            weight = self.weights[here * BLOCK + Index("p") * PART + Q]
            near = (weight >= least) & (weight < limit)
            with (
                part.when("near_any", Reduce("sum", "q", PART, near.cast(I32)) > 0) as some,
                some.loop("q", PART) as each,
            ):
                each.store(self.near, count, weight)
                each.assign(count, count + near.cast(I64))
        with body.loop("q", body.let("near_pad", needed.select(BLOCK, Const(0, I64))), vector=True) as behind:
            behind.store(self.near, count + Q, Const(0.0, F32))
        return body.let("near_blocks", (count + (BLOCK - 1)).quot(BLOCK))

    @contextmanager
    def _reaching(self, body: Body, name: str, least: Expr) -> Iterator[tuple[Body, Ref]]:
        """Statements for each block that may have weights from `least` on."""
        with (
            body.loop("c", self.groups) as group,
            group.when(f"{name}_group", self.peaks[Index("c")] >= least) as members,
            members.loop("g", GROUP) as block,
        ):
            here = block.let(f"{name}_block", Index("c") * GROUP + Index("g"))
            with block.when(f"{name}_reaches", (here < self.used) & (self.tops[here] >= least)) as inside:
                yield inside, here

    def _mass(self, body: Body, name: str, least: Ref) -> Ref:
        """The sum of all weights from `least` on."""
        total = body.var(f"{name}_total", 0, I64)
        with self._reaching(body, name, least) as (block, here):
            weight = self.weights[here * BLOCK + Q]
            part = Reduce("sum", "q", BLOCK, (weight >= least).select(weight, 0.0).cast(F64))
            block.assign(total, total + block.let(f"{name}_part", part).nearest())
        return total

    def _find_tie(self, body: Body, keep: Ref) -> None:
        """The place of tie number `keep`: its block, then within that."""
        block_at, before = body.var("tie_block", 0, I64), body.var("ties_before", 0, I64)
        seen = body.var("ties_seen", 0, I64)
        with self._reaching(body, "equals", self.least) as (block, here):
            is_tie = self.weights[here * BLOCK + Q].eq(self.least).cast(I32)
            ties = block.let("ties_here", Reduce("sum", "q", BLOCK, is_tie).cast(I64))
            is_here = block.let("tie_is_here", (seen < keep) & (seen + ties >= keep))
            block.assign(block_at, is_here.select(here, block_at))
            block.assign(before, is_here.select(seen, before))
            block.assign(seen, seen + ties)
        with body.loop("q", BLOCK) as each:
            place = each.let("tie_place", block_at * BLOCK + Q)
            each.assign(before, before + self.weights[place].eq(self.least).cast(I64))
            each.assign(self.last, ((before >= keep) & self.last.eq(self.room)).select(place, self.last))

    # -- the pick ------------------------------------------------------------------------------------------------------
    def draw(self, uniform: Expr, floor_of_min_p: Ref, filtered: Expr, is_certain: Expr) -> tuple[Ref, Expr]:
        """The token where the running sum of the weights that are left passes `uniform` of their total.

        And whether that is certain, if the filters are: the same for any sums that are possible.
        """
        body, g = self.body, Index("g")
        floor = body.let("floor", self.least.max(floor_of_min_p))

        def selected(block: Expr) -> Expr:
            weight = self.weights[block * BLOCK + Q]
            counts = Q.cast(I32) <= (self.last - block * BLOCK).cast(I32)
            return ((weight >= floor) & ((weight > self.least) | counts)).select(weight, 0.0)

        total = body.var("total", self.mass, I64)
        settled = body.let("sums_settled", self.settled.ne(0) & (floor <= self.least))
        body.assign(total, settled.select(self.settled_mass, total))
        with body.when("fewer", filtered & ~settled & is_certain) as fewer:
            fewer.assign(total, Const(0, I64))
            with fewer.loop("g", self.used) as block:
                part = block.var("kept_part", 0, I64)
                with block.when("kept_open", self.tops[g] >= floor) as inside:
                    inside.assign(part, Reduce("sum", "q", BLOCK, selected(g).cast(F64)).nearest())
                self._store_sum(block, g, part)
                block.assign(total, total + part)
        spread = body.let("drawn_spread", filtered.select(0, self.spread))

        def share_of(mass: Expr) -> Expr:
            return (uniform * mass.cast(F64)).cast(I64).min(mass - 1)

        passed = body.let("passed", share_of(total))
        later = body.let("passed_later", share_of(total + spread) - passed)
        at, before = self._passes("block", "g", self.used, passed, self._sum(g))
        at = body.let("drawn_block", at.min(self.used - 1).max(0))
        unknown = body.let("drawn_unknown", (spread > 0) & self._is_light(at, Const(LIGHT, F32)))
        rest = body.let("rest", passed - before)
        end = (at + settled.select(CELL_BLOCKS, Const(1, I64))).min(self.used) * BLOCK
        width = body.let("drawn_width", unknown.select(0, end - at * BLOCK))
        within, lighter = self._passes("token", "q", width, rest, selected(at).cast(I64))
        slot = body.let("slot", at * BLOCK + within.min(width - 1).max(0))
        weight = unknown.select(0.0, self.weights[slot]).cast(I64)
        certain = spread.eq(0) | ((rest - spread >= lighter) & (rest + later < lighter + weight))
        return body.let("picked", self.limited.choose(self.ids[slot].cast(I64), slot)), certain

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
        scored: Expr = Const(True, BOOL)
        if self.node.operands[14] is not None:
            scored = self.integers(14, "scored").only.ne(0)
        scored = body.let("is_scored", scored)
        self.scan()
        # Weights at temperature 1 would do, if no row of the batch had changed logits: bits must not depend on others.
        self.add_exponentials(scored)
        self.find_highest()
        self.drawn = body.let("drawn", self.alive & (temperature > 0.0))
        nucleus = body.let("nucleus", self.drawn & (top_p < 1.0))
        filtered = body.let("filtered", nucleus | self.drawn & (min_p > 0.0))
        self.take_highest(top_k)
        floor = body.let("floor_of_min_p", min_p * HEAVIEST)
        self.scale = body.let("scale", number(LOG2_E, F32) / temperature.max(COLDEST))
        self.everything = body.let("everything", (self.drawn & ~self.limited).cast(I64))
        self.used = body.let("used", self.listed + self.everything * self.blocks)
        self.known_mass = body.var("known_mass", 0, I64)
        self.weigh_listed()
        self.bound()
        picked, is_open = body.var("picked_token", 0, I64), body.var("is_open", 1, I64)
        with body.loop("attempt", 2) as each, each.when("attempted", is_open > 0) as attempt:
            self.body = attempt
            self.weigh(Index("attempt"), nucleus, floor)
            is_certain = attempt.let("is_certain", self.take_nucleus(nucleus, top_p))
            token, is_drawn = self.draw(uniform, floor, filtered, is_certain)
            attempt.assign(picked, token)
            attempt.assign(is_open, (~(is_certain & is_drawn)).cast(I64))
        self.body = body
        chosen = self.drawn.select(picked, self.first)
        token = body.let("token", self.alive.select(chosen, NO_TOKEN))
        logit = self.alive.choose(self.raw[token], math.nan) - self.raw_top
        zero = Const(0, I64)
        body.store(self.tokens, zero, token.cast(I32))
        body.store(self.scores, zero, scored.select(logit.cast(F64) - self.raw_total.log(), math.nan))
        shape = self.s.view(self._operand(0)).shape
        root = For("u", self.builder.arg("units", shape[0]), tuple(body.stmts))
        self.builder.launch(self.s, root, shape[0], flops=product(shape) * 40)
        return self.outs


@loop_form("sample_tokens")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return _Sampler(s, node).write()
