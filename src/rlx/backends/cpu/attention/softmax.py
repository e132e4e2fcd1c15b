"""Online softmax: the scores of a tile become weights, row by row, and references, sums and outputs follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlx.backends.cpu.attention.elements import load, stored_type, sweep, widen
from rlx.backends.cpu.attention.plan import Plan
from rlx.backends.cpu.builder import Builder, Module, Value, const, i64, intrinsic_suffix, vector
from rlx.backends.cpu.math import exp2, fma, tanh
from rlx.lir.kernels import KEY_BLOCK

SLACK = 8.0  # a row's reference moves only for a score 2**8 times heavier: weights stay small, rescaling is rare
CHUNK = 4  # vectors of scores that the softmax holds in registers


def define_softmax(module: Module, plan: Plan) -> None:
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
        plan.define(module, f"softmax{span}", signature, emit)


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

        sweep(b, plan.value_stride, plan.lanes, piece)
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

    @property
    def slack(self) -> float:
        """SLACK in the unit of scores; bounded, so that -inf plus it stays -inf."""
        return min(SLACK / self.plan.exponent, 1e30)

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
        return self.of_bent([self.bent(product) for product in products], j, whole)

    def bent(self, product: Value) -> Value:
        """tanh of what a product is of the cap, if there is one; else the product as it is."""
        b, plan, cap = self.b, self.plan, abs(self.plan.kernel.softcap)
        if not cap:
            return product
        return tanh(b, b.op("fmul", product, const(plan.vector, plan.kernel.scale / cap)), plan.target)

    def of_bent(self, bent: Sequence[Value], j: Value, whole: bool) -> list[Value]:
        """Scores of products that are `bent` already."""
        seen: Sequence[Value | None] = [None] * len(bent) if whole else self._seen(j, len(bent))
        places = [self.b.add(j, n * self.plan.lanes) for n in range(len(bent))]
        return [self._score(*each) for each in zip(bent, places, seen, strict=True)]

    def _score(self, score: Value, j: Value, seen: Value | None) -> Value:
        b, plan, kernel = self.b, self.plan, self.plan.kernel
        masked, scale = const(plan.vector, -math.inf), abs(kernel.softcap) or kernel.scale
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
            return load(b, plan, dtype, place, plan.lanes)
        type_ = vector(plan.lanes, stored_type(dtype))
        loaded = b.call(type_, f"llvm.masked.load.{intrinsic_suffix(type_)}.p0", place, seen, const(type_, 0))
        return widen(b, plan, loaded, dtype)

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
        scaled = self.b.op("fmul", difference, const(self.plan.vector, self.plan.exponent))
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
