"""The first half of the sampling kernel: operands, logits after bias and penalties, their maximum and sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.dtypes import BOOL, F32, F64, I32, I64
from rlx.ir.graph import Node, Value
from rlx.lir.forms.row_kernels import Body, Rows
from rlx.lir.loops import Arg, Const, Expr, Index, Reduce, Ref, Stmt, number
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, map_elements
from rlx.lir.views import View
from rlx.sampling import EXP2, LOG2_E, LOWEST
from rlx.types import TensorType

BLOCK = 256  # weights whose sum f64 holds exactly: 2^8 times 2^42 is below 2^53
GROUP = 16  # blocks
CHUNK = GROUP * BLOCK  # logits that fit the L1 cache
PAGE = 1024  # f32 numbers of a page of memory
PARTS = 3  # f32 numbers whose sum is any f64 of a probability
Q = Index("q")


def exp2(power: Expr, exponent_offset: int = 0) -> Expr:
    """2^(power + offset), as `sampling.token_weights` computes it: powers below `LOWEST` count as that, NaN stays."""
    power = (power < LOWEST).select(LOWEST, power)
    exponent = power.nearest()
    fraction = power - exponent.cast(F32)
    mantissa: Expr = number(EXP2[0], F32)
    for coefficient in EXP2[1:]:
        mantissa = mantissa * fraction + coefficient
    return mantissa * (exponent + (127 + exponent_offset) << 23).bits()


class LogitsKernel:
    """The first half of the sampling kernel under construction: parameters, scratch rows, and the highest logit."""

    def __init__(self, s: Scheduler, node: Node) -> None:
        self.s = s
        self.node = node
        self.builder = b = LoopBuilder("sample_tokens")
        logits = s.view(node.operands[0])
        rows, vocab = logits.shape
        blocks = (vocab + (BLOCK - 1)) // BLOCK
        room = (blocks + 1) * BLOCK  # an empty block after the last weight
        self.vocab, self.blocks, self.full_blocks = (
            b.arg("vocab", vocab), b.arg("blocks", blocks), b.arg("whole_blocks", vocab // BLOCK),
        )  # fmt: skip
        self.part_blocks = b.arg("part_blocks", blocks - vocab // BLOCK)
        chunks = vocab // CHUNK
        self.whole_chunks, self.rest = b.arg("whole_chunks", chunks), b.arg("rest", vocab - chunks * CHUNK)
        self.rest_blocks = b.arg("rest_blocks", blocks - chunks * GROUP)
        self.room = b.arg("room", room)
        self.pages = b.arg("pages", (room + (PAGE - 1)) // PAGE)
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
        self.adjusted: Ref | None = None  # whether logits are adjusted before sampling
        self.body = Body()

    def source(self, at: Expr) -> Expr:
        """A logit to sample from; adjusted logits are stored in the row of weights."""
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
        if view.dtype is F64:  # the widest parameter determines the number of lanes
            view = self._as_f32(view)
        return self.body.let(name, Rows(self.builder, f"{name}s", view).only.cast(F32))

    def fraction(self, position: int, name: str) -> Ref:
        """A setting of the row in full f64 precision, without a 64-bit parameter."""
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
        """Integers per row as i32; wider ones are clamped."""
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
        """With a mask, a bias or penalties, copy the logits to the row of weights and adjust them there."""
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
            # Masked loads from untouched memory are slow: one write per page makes the memory resident.
            pages = body.let("touched_pages", needed.select(Const(0, I64), self.pages))
            with body.loop("j", pages) as touch:
                touch.store(self.weights, Index("j") * PAGE, Const(0.0, F32))
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
        """The place that counts a token of an operand; tokens outside the vocabulary count after the last one."""
        return ((token >= 0) & (token < self.vocab)).select(token, self.vocab)

    def _bias(self, length: Arg) -> None:
        tokens = self.integers(12, "bias_tokens")
        values = Rows(self.builder, "bias", self.s.view(self._operand(13)))
        with self.body.loop("h", length) as each:
            at = each.let("biased", self._token_place(tokens[Index("h")].cast(I64)))
            each.store(self.weights, at, self.weights[at] + values[Index("h")].cast(F32))

    def _penalise(self, length: Arg) -> None:
        """Count how often each token occurs, touching only the scratch entries of these tokens."""
        seen = self.integers(7, "history")
        prompt = self.integers(8, "prompt_length").only.cast(I64)
        names = ("repetition", "frequency", "presence")
        repetition, frequency, presence = (self.setting(9 + i, name) for i, name in enumerate(names))
        h, counts = Index("h"), self.ids
        at = self._token_place(seen[h].cast(I64))
        with self.body.loop("h", length) as clear:
            clear.store(counts, at, Const(0, I32))
        with self.body.loop("h", length) as count:  # lowest bit: seen; other bits: how often it was picked
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
        """Read the logits once: the maximum of each block and, if needed, the sum of exp(logit - max) of raw logits.

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
