"""What sampling reads of a row before it draws: operands, logits after bias and penalties, the highest, their sum.

Logits are read block by block, from the operand or, where a mask, a bias or a penalty changes one of the block, from a
copy of that block. The last block is copied too if the vocabulary does not fill it, so every block is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rlx.dtypes import F32, F64, I32, I64
from rlx.ir.graph import Node, Value
from rlx.lir.forms.row_kernels import Body, Rows
from rlx.lir.loops import Arg, Const, Expr, For, Index, Reduce, Ref, Stmt, Store, fma, number
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, decode_unit, map_elements
from rlx.lir.views import View
from rlx.sampling import EXP2, LOG2_E, LOWEST, ROUNDER
from rlx.types import TensorType

BLOCK = 256  # weights whose sum f64 holds exactly: 2^8 times 2^42 is below 2^53
GROUP = 16  # blocks
CHUNK = GROUP * BLOCK
NEAR = 1024  # weights that are gathered once so few may be the last of a nucleus
EXPONENT_SHIFT = 23  # bits of f32 below its exponent
PARTS = 3  # f32 numbers whose sum is any f64 of a probability
FUSED_EXP2 = (0.00132647273, 0.00967151299, 0.0555073358, 0.240222424, 0.693147004, 1.0)  # as `EXP2`, within 2^-22.6
Q = Index("q")


def exp2(power: Expr, exponent_offset: int = 0, fused: Sequence[float] = ()) -> Expr:
    """2^(power + offset) for powers up to 0, as `sampling.token_weights` computes it; below `LOWEST`, as for that.

    With coefficients for `fused` multiply-adds, faster, but with other last bits.
    """
    return exp2_each([power], lambda name, value: value, exponent_offset, fused)[0]


def exp2_each(
    powers: Sequence[Expr], bind: Callable[[str, Expr], Expr], exponent_offset: int = 0, fused: Sequence[float] = ()
) -> list[Expr]:
    """`exp2` of several powers, each step of all of them before the next step; `bind` names a step's value.

    A power is one long chain of operations. Of chains one after another, a processor's window holds few, and it waits.
    `ROUNDER` plus a power has the nearest integer in its lowest bits, ready to be shifted to where exponents are; the
    offset is in the coefficients, whose products and sums have the same digits at any exponent.
    """

    def step(name: str, values: Iterable[Expr]) -> list[Expr]:
        return [bind(f"{name}_{i}", value) for i, value in enumerate(values)]

    power = step("power", ((p < LOWEST).select(LOWEST, p) for p in powers))
    rounded = step("rounded", (p + ROUNDER for p in power))
    exponent = step("exponent", (r - ROUNDER for r in rounded))
    fraction = step("fraction", (p - e for p, e in zip(power, exponent, strict=True)))
    first, *others = (number(coefficient * 2.0**exponent_offset, F32) for coefficient in fused or EXP2)
    mantissa: list[Expr] = [first] * len(powers)
    for degree, term in enumerate(others, 1):
        pairs = zip(mantissa, fraction, strict=True)
        mantissa = step(f"mantissa{degree}", (fma(m, x, term) if fused else m * x + term for m, x in pairs))
    shifts = ((r.bits() << EXPONENT_SHIFT) for r in rounded)
    return step("exp2", ((m.bits() + shift).bits() for m, shift in zip(mantissa, shifts, strict=True)))


def launch_tops(s: Scheduler, logits: View, tops: View) -> None:
    """The highest logit of each whole block of each row. One unit each: rows are few, so other threads help."""
    builder = LoopBuilder("sample_tops")
    read, written = builder.param(logits), builder.param(tops, written=True)
    rows, blocks = logits.shape[0], logits.shape[1] // BLOCK
    lets = decode_unit(builder, (rows, blocks), ("row", "g"))
    row, g = Ref("row", I64), Ref("g", I64)
    logit = builder.load(read, ((row, builder.stride(read, "row", logits.strides[0])), (g, BLOCK), (Q, 1)))
    place = ((row, builder.stride(written, "row", tops.strides[0])), (g, 1))
    store = Store(written, place, Reduce("max", "q", BLOCK, logit))
    root = For("u", builder.arg("units", rows * blocks), (*lets, store))
    builder.launch(s, root, rows * blocks, flops=rows * blocks * BLOCK)


class LogitsKernel:
    """The first half of the sampling kernel while it is written: parameters, scratch rows, and the highest logit."""

    def __init__(self, s: Scheduler, node: Node) -> None:
        self.s = s
        self.node = node
        self.builder = b = LoopBuilder("sample_tokens")
        logits = s.view(node.operands[0])
        rows, vocab = logits.shape
        blocks = (vocab + (BLOCK - 1)) // BLOCK
        room = (blocks + 1) * BLOCK  # a block of nothing behind the last weight
        groups = (blocks + (GROUP - 1)) // GROUP
        self.vocab, self.blocks, self.full_blocks = (
            b.arg("vocab", vocab), b.arg("blocks", blocks), b.arg("whole_blocks", vocab // BLOCK),
        )  # fmt: skip
        self.part_blocks = b.arg("part_blocks", blocks - vocab // BLOCK)
        self.room = b.arg("room", room)
        if logits.dtype is not F32 or logits.strides[1] != 1:
            logits = self._as_f32(logits)
        self.logits = logits
        self.raw = Rows(b, "logits", logits)
        self.outs = [s.result(node, i) for i in range(2)]
        self.tokens, self.scores = (
            Rows(b, name, out, written=True) for name, out in zip(("tokens", "scores"), self.outs, strict=True)
        )
        scratch = {
            "weights": (room, F32), "ids": (room, I32), "sums": (blocks * 2, I32), "tops": (groups * GROUP, F32),
            "peaks": (groups, F32), "copied": (blocks, I32), "near": (NEAR + 2 * BLOCK, F32),
            "nearest": (blocks, F32),
        }  # fmt: skip
        views = {name: s.temporary(TensorType((rows, width), dtype)) for name, (width, dtype) in scratch.items()}
        self.tops_view = views["tops"]
        self.weights, self.ids, self.sums, self.tops, self.peaks, self.copied, self.near, self.nearest = (
            Rows(b, name, view, written=True) for name, view in views.items()
        )
        self.body = Body()

    def read(self, body: Body, name: str, block: Expr, use: Callable[[Body, Rows], None]) -> None:
        """Statements that use the logits of a block: once for the operand, once for a copy; one of them runs.

        Not a select of two loads: masked loads are slow where memory was never written, as it is behind most blocks.
        """
        copied = body.let(f"{name}_copied", self.copied[block].cast(I64))
        plain = body.let(f"{name}_plain", 1 - copied)
        for count, rows in ((plain, self.raw), (copied, self.weights)):
            with body.loop(f"{count.name}_once", count) as inner:
                use(inner, rows)

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
            terms: list[Expr] = []
            for _ in parts:
                terms.append(rest.cast(F32))
                rest = rest - terms[-1].cast(F64)
            return (), terms

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
        """Copies blocks that a mask, a bias or penalties change, and a short last one, to where weights will be."""
        allowed, history = self.node.operands[6:8]
        bias = self.node.operands[12]
        body, g = self.body, Index("g")
        with body.loop("g", self.blocks, vector=True) as each:
            each.store(self.copied, g, Const(0, I32))
        with body.loop("g", self.part_blocks) as last:
            self._copy(last, self.full_blocks, self.vocab - self.full_blocks * BLOCK)
            with last.loop("q", BLOCK, vector=True) as pad:
                pad.store(self.weights, self.vocab + Q, Const(-math.inf, F32))
        lengths = {
            name: self.builder.arg(f"{name}_length", self.s.view(of).shape[1])
            for name, of in (("allowed", allowed), ("bias", bias), ("history", history))
            if of is not None
        }
        if allowed is not None:
            self._mask(allowed, lengths["allowed"])
        if bias is not None:
            self._bias(lengths["bias"])
        if history is not None:
            self._penalise(lengths["history"])

    def _copy(self, body: Body, block: Expr, size: Expr) -> None:
        """Copies so many logits of a block; none of it where the size is 0."""
        start = block * BLOCK + Q
        with body.loop("q", body.let("copy_size", size), vector=True) as copy:
            copy.store(self.weights, start, self.raw[start])
        body.store(self.copied, block, Const(1, I32))

    def _copy_blocks_of(self, tokens: Rows, length: Arg) -> None:
        """Copies each block that has one of these tokens and is not copied yet."""
        with self.body.loop("h", length) as each:
            token = each.let("copied_token", tokens[Index("h")].cast(I64))
            valid = (token >= 0) & (token < self.vocab)
            block = each.let("copied_block", valid.select(token, 0).quot(BLOCK))
            with each.when("not_yet_copied", valid & self.copied[block].eq(0)) as missing:
                self._copy(missing, block, Const(BLOCK, I64))

    def _mask(self, allowed: Value, words: Arg) -> None:
        """Blocks that have a token which is not allowed: copies where such tokens are -inf."""
        view = self.s.view(allowed)
        masks = Rows(self.builder, "allowed", view)
        size = 8 * view.dtype.size
        unsigned = view.dtype.kind == "uint"
        kind = I64 if view.dtype.size == 8 or unsigned else I32
        everything = 2**size - 1 if unsigned else -1
        g, w, per_block = Index("g"), Index("w"), BLOCK // size

        def mask(word: Expr) -> Expr:
            """Words that are not there allow everything."""
            return (word < words).choose(masks[word].cast(kind), number(everything, kind))

        masked = self.body.let("masked_blocks", (words + (per_block - 1)).quot(per_block).min(self.blocks))
        with self.body.loop("g", masked) as each:
            restricted = mask(g * per_block + w).ne(number(everything, kind)).cast(I32)
            with each.when("restricted", Reduce("sum", "w", per_block, restricted) > 0) as block:
                block.store(self.copied, g, Const(1, I32))
                with block.loop("w", per_block) as of_word:
                    bits = of_word.let("word", mask(g * per_block + w))
                    with of_word.loop("i", size, vector=True) as bit:
                        token = (g * per_block + w) * size + Index("i")
                        keep = (bits >> Index("i").cast(kind) & 1).ne(0) & (token < self.vocab)
                        bit.store(self.weights, token, keep.choose(self.raw[token], -math.inf))

    def _token_place(self, token: Expr) -> Expr:
        """Where a token of an operand counts: what is outside the vocabulary, behind the last token."""
        return ((token >= 0) & (token < self.vocab)).select(token, self.vocab)

    def _bias(self, length: Arg) -> None:
        tokens = self.integers(12, "bias_tokens")
        values = Rows(self.builder, "bias", self.s.view(self._operand(13)))
        self._copy_blocks_of(tokens, length)
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
        self._copy_blocks_of(seen, length)
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
    def scan(self) -> None:
        """The highest logit of each block. Of whole blocks as they came in a launch before, whose units are blocks."""
        launch_tops(self.s, self.logits, self.tops_view)
        body = self.body
        changed = body.let("copied_blocks", Reduce("sum", "g", self.blocks, self.copied[Index("g")]).cast(I64))
        count = body.let("scanned", (changed > self.part_blocks).select(self.blocks, self.part_blocks))
        with body.loop("g", count) as each:
            block = each.let("scanned_block", Index("g") + (self.blocks - count))
            with each.when("was_copied", self.copied[block].ne(0)) as copied:
                highest = Reduce("max", "q", BLOCK, self.weights[block * BLOCK + Q])
                copied.store(self.tops, block, copied.let("highest", highest))

    def add_exponentials(self, needed: Expr) -> None:
        """If needed, the highest of the logits as they came, and the sum of exp(logit - highest).

        In f32 within a group of blocks, in f64 beyond.
        """
        body, g = self.body, Index("g")
        self.raw_top, self.raw_total = body.var("raw_top", -math.inf, F32), body.var("raw_total", 0.0, F64)
        place = g * BLOCK + Q
        inside = place < self.vocab
        with body.when("summed", needed) as sums:
            unchanged = self.copied[g].eq(0).select(self.tops[g], -math.inf)
            sums.assign(self.raw_top, sums.let("unchanged_top", Reduce("max", "g", self.blocks, unchanged)))
            with sums.loop("g", self.blocks) as block, block.when("top_changed", self.copied[g].ne(0)) as copied:
                highest = Reduce("max", "q", BLOCK, inside.choose(self.raw[place], -math.inf))
                copied.assign(self.raw_top, self.raw_top.max(copied.let("raw_highest", highest)))
            base = sums.let("raw_base", self.raw_top.eq(-math.inf).select(0.0, self.raw_top))
            chunks = sums.let("full_chunks", self.full_blocks.quot(GROUP))
            for name, count, start, width in (
                ("chunk", chunks, Index("c") * CHUNK, CHUNK),
                ("block", self.full_blocks - chunks * GROUP, chunks * CHUNK + Index("c") * BLOCK, BLOCK),
            ):
                with sums.loop("c", sums.let(f"summed_{name}s", count)) as each:
                    part = Reduce("sum", "q", width, exp2((self.raw[start + Q] - base) * LOG2_E, fused=FUSED_EXP2))
                    each.assign(self.raw_total, self.raw_total + each.let(f"of_{name}", part).cast(F64))
            with sums.loop("last", self.part_blocks) as block:
                place = self.full_blocks * BLOCK + Q
                inside = place < self.vocab
                power = (inside.choose(self.raw[place], -math.inf) - base) * LOG2_E
                part = Reduce("sum", "q", BLOCK, inside.select(exp2(power, fused=FUSED_EXP2), 0.0))
                block.assign(self.raw_total, self.raw_total + block.let("last_exponentials", part).cast(F64))

    def find_highest(self) -> None:
        """The highest logit, and the first token that has it."""
        body, g = self.body, Index("g")
        self.top = body.let("top", Reduce("max", "g", self.blocks, self.tops[g]))
        self.alive = body.let("alive", (self.top > -math.inf) & (self.top < math.inf))
        first = Reduce("min", "g", self.blocks, self.tops[g].eq(self.top).select(g, self.blocks))
        at = body.let("first_block", first.min(self.blocks - 1).max(0))
        self.first = body.var("first", 0, I64)

        def find(inner: Body, rows: Rows) -> None:
            is_top = rows[at * BLOCK + Q].eq(self.top).select(Q, BLOCK)
            inner.assign(self.first, inner.let("first_place", Reduce("min", "q", BLOCK, is_top)) + at * BLOCK)

        self.read(body, "first_block", at, find)
