"""Online softmax: the scores of a tile become weights, row by row, and references, sums and outputs follow."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlx.backends.cpu.attention import segments
from rlx.backends.cpu.attention.elements import stored_type, sweep, widen
from rlx.backends.cpu.attention.plan import Plan
from rlx.backends.cpu.builder import Builder, Module, Value, const, i64, intrinsic_suffix, vector
from rlx.backends.cpu.math.arithmetic import fma
from rlx.backends.cpu.math.exponential import exp2, tanh
from rlx.backends.cpu.targets import KEY_BLOCK

SLACK = 8.0  # a row's reference moves only for a score 2**8 times heavier: weights stay small, rescaling is rare
CHUNK = 4  # vectors of scores that the softmax holds in registers


def define_softmax(module: Module, plan: Plan) -> None:
    """Scores of `height` rows become weights; references, sums and outputs of the rows follow."""
    for span in plan.spans:

        def emit(
            b: Builder, scratch: Value, first: Value, height: Value, base: Value, count: Value, kept: Value,
            span: int = span,
        ) -> None:  # fmt: skip
            def each_row(step: Callable[[Scorer, Value], None]) -> None:
                def row(i: Value) -> None:
                    scores = plan.region(b, scratch, "scores", b.mul(i, KEY_BLOCK))
                    step(Scorer(b, plan, span, scratch, b.add(first, i), base, count, kept), scores)

                b.loop(0, height, 1, row)

            # Two loops: a weight waits for the greatest score of its row, and meanwhile other rows can go on.
            each_row(_move_reference)
            each_row(_weigh)

        signature = "ptr scratch, i64 first, i64 height, i64 base, i64 count, i64 kept"
        plan.define(module, f"softmax{span}", signature, emit)


def _move_reference(scorer: Scorer, scores: Value) -> None:
    """The reference of a row follows its greatest score; its sums and outputs follow the reference."""
    b, plan, scratch, row = scorer.b, scorer.plan, scorer.scratch, scorer.row

    def several(j: Value) -> Value:
        found = scorer.scored(scores, j)
        if scorer.converts:
            b.store(found, b.offset(scores, j, plan.scalar), align=plan.size)
        return found

    greatest = scorer.over_span(several, scorer.greater, const(scorer.type, -math.inf))
    greatest = b.narrow(greatest, scorer.greater, plan.lanes)
    place = plan.region(b, scratch, "references", row)
    old = b.load(plan.scalar, place, align=plan.size)

    def rescale(peak: Value) -> None:
        factor = scorer.weight(b.splat(old, plan.lanes), b.splat(peak, plan.lanes))

        def scale(place: Value) -> None:
            b.store(b.op("fmul", b.load(plan.vector, place, align=plan.size), factor), place, align=plan.size)

        outputs = plan.region(b, scratch, "outputs", b.mul(row, plan.value_stride))
        sweep(b, plan.value_stride, plan.lanes, lambda start, _: scale(b.offset(outputs, start, plan.scalar)))
        scale(plan.region(b, scratch, "sums", b.mul(row, plan.lanes)))

    def move() -> None:
        peak = b.fold(greatest, scorer.greater)
        b.store(peak, place, align=plan.size)
        b.when(b.fcmp("one", old, const(plan.scalar, -math.inf)), lambda: rescale(peak))

    # A row is at -inf before its first key, and so is a peak of masked scores, for which nothing moves.
    bound = b.splat(b.op("fadd", old, const(plan.scalar, scorer.slack)), plan.lanes)
    beyond = b.convert("bitcast", b.fcmp("ogt", greatest, bound), f"i{plan.lanes}")
    b.when(b.icmp("ne", beyond, 0), move)


def _weigh(scorer: Scorer, scores: Value) -> None:
    """Scores of a row become weights, which its sums count."""
    b, plan = scorer.b, scorer.plan
    reference = b.load(plan.scalar, plan.region(b, scorer.scratch, "references", scorer.row), align=plan.size)
    # Never -inf, so that a masked score less the reference is -inf and not NaN.
    lowest = const(plan.scalar, float(np.finfo(plan.compute.numpy).min))
    reference = b.splat(scorer.greater(reference, lowest), scorer.width)

    def several(j: Value) -> Value:
        found = scorer.load(scores, j) if scorer.converts else scorer.scored(scores, j)
        weights = scorer.weight(found, reference)
        b.store(weights, b.offset(scores, j, plan.scalar), align=plan.size)
        return b.narrow(weights, scorer.plus, plan.lanes)

    fresh = scorer.over_span(several, scorer.plus, const(plan.vector, 0.0))
    sums = plan.region(b, scorer.scratch, "sums", b.mul(scorer.row, plan.lanes))
    b.store(scorer.plus(b.load(plan.vector, sums, align=plan.size), fresh), sums, align=plan.size)


class Scorer:
    """How products of a query and keys become scores, and scores become weights, for one row.

    It takes `width` of them at a time, several registers: their chains of instructions go side by side.
    """

    def __init__(
        self, b: Builder, plan: Plan, span: int, scratch: Value, row: Value, base: Value, count: Value, kept: Value
    ) -> None:
        self.b, self.plan, self.span, self.scratch, self.row = b, plan, span, scratch, row
        self.width = min(CHUNK * plan.lanes, span)
        self.type = vector(self.width, plan.scalar)
        kernel = plan.kernel
        self.begin, self.end, self.kept = i64(0), count, kept
        if plan.limited:
            limit = b.load("i64", plan.region(b, scratch, "limits", row, "i64"), align=8)
            self.end = self.kept = b.sub(limit, base)
        if kernel.mask == "sliding":
            self.begin = b.sub(self.end, kernel.window)
        if kernel.ahead:
            self.end = self.kept = b.min(self.end, count)
        if kernel.segments:
            self.segment = b.load("i64", plan.region(b, scratch, "row_segments", row, "i64"), align=8)
        if kernel.mask == "bias":
            start = b.load("ptr", plan.region(b, scratch, "biases", row, "ptr"), align=8)
            self.bias = b.offset(start, b.mul(base, plan.mask_dtype.size))

    @property
    def slack(self) -> float:
        """SLACK in the unit of scores; bounded, so that -inf plus it stays -inf."""
        return min(SLACK / self.plan.exponent, 1e30)

    def sees_all(self) -> Value:
        """Whether the row sees all keys of the span."""
        b = self.b
        whole = b.icmp("sge", self.kept, self.span)
        if self.plan.kernel.segments:
            of_block = segments.bound(b, self.plan, self.scratch, segments.OF_BLOCK)
            whole = b.op("and", whole, b.icmp("eq", of_block, self.segment))
        if self.plan.kernel.mask != "sliding":
            return whole
        return b.op("and", whole, b.icmp("sle", self.begin, 0))

    def over_span(
        self, body: Callable[[Value], Value], combine: Callable[[Value, Value], Value], start: Value
    ) -> Value:
        """What `body(key)` gives for the keys of the span that the row may see, `width` at a time, all combined."""
        if self.width == self.span:
            return body(i64(0))
        end = self.b.min(self.end, KEY_BLOCK)
        return self.b.loop(0, end, self.width, lambda j, total: [combine(total, body(j))], [start])[0]

    @property
    def converts(self) -> bool:
        """Whether a score is another number than its product."""
        kernel = self.plan.kernel
        return bool(kernel.softcap) or kernel.mask == "bias" or kernel.scale <= 0

    def load(self, scores: Value, j: Value) -> Value:
        return self.b.load(self.type, self.b.offset(scores, j, self.plan.scalar), align=self.plan.size)

    def scored(self, products: Value, j: Value) -> Value:
        """The scores of the keys from j on, -inf for those that the row does not see."""
        loaded = self.load(products, j)
        ways = (lambda: [self.scores(loaded, j, True)], lambda: [self.scores(loaded, j, False)])
        return self.b.when(self.sees_all(), *ways)[0]

    def scores(self, products: Value, j: Value, whole: bool) -> Value:
        """The scores of the keys from j on, -inf for those that the row does not see; `whole`: it sees all."""
        return self.of_bent(self.bent(products), j, whole)

    def bent(self, products: Value) -> Value:
        """tanh of what products are of the cap, if there is one; else the products as they are."""
        b, plan, cap = self.b, self.plan, abs(self.plan.kernel.softcap)
        if not cap:
            return products
        return tanh(b, b.op("fmul", products, const(self.type, plan.kernel.scale / cap)), plan.target)

    def of_bent(self, bent: Value, j: Value, whole: bool) -> Value:
        """Scores of products that are `bent` already."""
        b, kernel, seen = self.b, self.plan.kernel, None if whole else self._seen(j)
        masked, scale = const(self.type, -math.inf), const(self.type, abs(kernel.softcap) or kernel.scale)
        score = bent
        if kernel.mask == "bias":
            bias = self._bias(j, seen)
            score = fma(b, score, scale, bias, self.plan.target)
            score = b.select(b.fcmp("oeq", bias, masked), masked, score)
        elif not kernel.softcap and kernel.scale <= 0:
            score = b.op("fmul", score, scale)
        return score if seen is None else b.select(seen, score, masked)

    def _bias(self, j: Value, seen: Value | None) -> Value:
        """The bias of the keys from j on; where the row does not see all of them, only those are read."""
        b, plan, dtype = self.b, self.plan, self.plan.mask_dtype
        place, type_ = b.offset(self.bias, b.mul(j, dtype.size)), vector(self.width, stored_type(dtype))
        if seen is None:
            return widen(b, plan, b.load(type_, place, align=dtype.size), dtype)
        loaded = b.call(type_, f"llvm.masked.load.{intrinsic_suffix(type_)}.p0", place, seen, const(type_, 0))
        return widen(b, plan, loaded, dtype)

    def _seen(self, j: Value) -> Value:
        """A mask of those keys from j on that the row sees."""
        b, plan = self.b, self.plan
        type_ = vector(self.width, plan.word)
        if plan.kernel.mask == "custom":
            kept = b.load(type_, plan.region(b, self.scratch, "kept", j, plan.word), align=plan.size)
            return b.icmp("ne", kept, const(type_, 0))
        numbers = b.iota(self.width, plan.word)
        seen = b.icmp("slt", numbers, self._in_lanes(b.sub(self.end, j)))
        if plan.kernel.mask == "sliding":
            seen = b.op("and", seen, b.icmp("sge", numbers, self._in_lanes(b.sub(self.begin, j))))
        if plan.kernel.segments:
            ids = b.load(type_, plan.region(b, self.scratch, "kept", j, plan.word), align=plan.size)
            own = b.splat(b.convert("trunc", self.segment, plan.word), self.width)
            seen = b.op("and", seen, b.icmp("eq", ids, own))
        return seen

    def _in_lanes(self, key: Value) -> Value:
        """A key number in every lane, clamped to the block, where it fits a narrow integer."""
        b, plan = self.b, self.plan
        clamped = b.max(b.min(key, KEY_BLOCK), 0)
        return b.splat(b.convert("trunc", clamped, plan.word), self.width)

    def weight(self, scores: Value, reference: Value) -> Value:
        """The weights of scores, given the score whose weight is 1."""
        b, exponent = self.b, const(scores.type, self.plan.exponent)
        return exp2(b, b.op("fmul", b.op("fsub", scores, reference), exponent), self.plan.target)

    def greater(self, x: Value, y: Value) -> Value:
        """One instruction on x86. A NaN may get lost here, but not its weight, which makes the row's sum NaN."""
        return self.b.select(self.b.fcmp("ogt", x, y), x, y)

    def plus(self, x: Value, y: Value) -> Value:
        return self.b.op("fadd", x, y)
