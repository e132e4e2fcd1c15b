"""Loop form of vector search: rows are scored in chunks, and only those that may be among the best are kept.

A unit is a run of rows. It scores a chunk for all queries, tile by tile, and appends rows above a query's threshold to
that query's candidates; when there is no room for a further chunk, the k best are kept and the threshold rises to the
least of them. A second kernel, with a unit per query, takes the best of all units. Runs do not depend on the number of
threads, candidates stay in the order of rows, and a score is the same sum in every tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.dtypes import F32, I8, I32, I64, DType
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node, Value
from rlx.lir.forms.row_kernels import ROW, Body, Rows
from rlx.lir.loops import Apply, Const, Expr, For, Index, Load, Reduce, Ref, Store, fma
from rlx.lir.schedule import LoopBuilder, Scheduler, loop_form
from rlx.lir.views import View
from rlx.ops.search import NO_ROW, QUERY_STEPS
from rlx.types import Size, TensorType, contiguous_strides, dim_min, product

RUNS = 128  # units per matrix, at most
RUN_ROWS = 1024  # fewer rows make fewer units
SPARE = 128  # candidates beyond k before the k best are picked
LEAST_KEY = -(2**31)
HALVINGS = 33  # of a range of 2^32 keys
BYTES = 4  # of a word of i8
FLIPPED = 0x80808080 - 2**32  # makes signed bytes unsigned, 128 higher


@dataclass(frozen=True, slots=True)
class Tile:
    """How many rows are scored at once with how many queries, and the partial sums of a score.

    A single query takes one row at a time: a stream in the order of memory, which the hardware prefetches.
    """

    rows: int
    queries: int
    partials: int
    words: bool  # rows of i8 are read four bytes at a time, with dot products of bytes

    @property
    def chunk(self) -> int:
        """Rows that all queries see before the next: few enough to stay in the first-level cache."""
        return 24 if self.partials > 1 else 8


PORTABLE = Tile(rows=1, queries=1, partials=16, words=False)


@loop_form("nearest_rows")
def nearest_rows(s: Scheduler, node: Node) -> Sequence[View]:
    return search(s, node, PORTABLE)


def search(s: Scheduler, node: Node, tile: Tile) -> Sequence[View]:
    """The launches of a search in tiles of this size."""
    problem = _Problem(s, node, tile)
    scores, rows = _score_candidates(problem) if problem.among is not None else _scan(problem)
    outs = [s.result(node, i) for i in range(2)]
    _take_best(problem, scores, rows, outs)
    return outs


class _Problem:
    """Operands as the kernels read them: [matrix, ...] in f32 or bytes, contiguous."""

    def __init__(self, s: Scheduler, node: Node, tile: Tile) -> None:
        self.s = s
        self.metric: str = node.attrs["metric"]
        self.k: int = node.attrs["k"]
        operands: list[Value | None] = [*node.operands, *[None] * (5 - len(node.operands))]
        queries, rows, scales, offsets, among = operands
        assert queries is not None and rows is not None
        *lead, self.q, self.d = queries.type.shape
        self.n = rows.type.shape[-2]
        self.matrices = product(lead)
        self.rows = self._operand(rows, (self.matrices * self.n, self.d), narrow=True)
        self.queries = self._operand(queries, (self.matrices * self.q, self.d))
        self.scales = self._optional(scales, (self.matrices * self.n,))
        self.offsets = self._optional(offsets, (self.matrices * self.n,))
        self.among: View | None = None
        if among is not None:
            self.m = among.type.shape[-1]
            self.among = self._operand(among, (self.matrices * self.q, self.m), I32)
        self.integers = self.rows.dtype is I8
        self.units: View | None = None  # what one integer of each query is worth
        self.sums: View | None = None  # of each query's integers
        words = tile.words and self.integers and isinstance(self.d, int) and self.d % BYTES == 0
        self.tile = tile if words or not tile.words else Tile(tile.rows, tile.queries, tile.partials, False)
        if self.integers:
            _quantise_queries(self)
        if words:
            self.rows, self.queries = _as_words(self.rows), _as_words(self.queries)
            self.d = self.d // BYTES

    def _optional(self, value: Value | None, shape: tuple[Size, ...]) -> View | None:
        return None if value is None else self._operand(value, shape)

    def _operand(self, value: Value, shape: tuple[Size, ...], dtype: DType = F32, *, narrow: bool = False) -> View:
        """An operand in `dtype`; with `narrow`, also in a smaller type."""
        view = self.s.view(value)
        if view.dtype is not dtype and not (narrow and view.dtype.size < dtype.size):
            out = self.s.temporary(TensorType(view.shape, dtype))
            self.s.copy_into(view, out)
            view = out
        view = self.s.contiguous(view)
        return view.with_(shape, contiguous_strides(shape))


def _as_words(view: View) -> View:
    rows, d = view.shape
    shape = (rows, d // BYTES)
    assert isinstance(view.offset, int) and view.offset % BYTES == 0
    return View(view.buffer, I32, shape, contiguous_strides(shape), view.offset // BYTES)


def _quantise_queries(p: _Problem) -> None:
    """Replaces the queries by integers, as `ops.search.quantise_query` makes them."""
    total = p.queries.shape[0]
    codes, units, sums = (
        p.s.temporary(TensorType(shape, dtype))
        for shape, dtype in ((p.queries.shape, I8), ((total, 1), F32), ((total, 1), I32))
    )
    b = LoopBuilder("quantise_queries")
    x = Rows(b, "queries", p.queries)
    y, unit, sum_ = (Rows(b, n, v, written=True) for n, v in (("codes", codes), ("units", units), ("sums", sums)))
    d, j, zero = b.arg("d", p.d), Index("j"), Const(0, I64)
    body = Body()
    peak = body.let("peak", Reduce("max", "j", d, abs(x[j])).max(0.0))
    finite = body.let("finite", peak < math.inf)
    inverse = body.let("inverse", ((peak > 0.0) & finite).select(Const(float(QUERY_STEPS), F32) / peak, 0.0))
    with body.loop("j", d, vector=True) as each:
        code = finite.select(x[j] * inverse, 0.0).nearest()
        each.store(y, j, code.cast(I8))
    body.store(unit, zero, finite.select(peak / float(QUERY_STEPS), math.nan))
    body.store(sum_, zero, Reduce("sum", "j", d, y[j].cast(I32)))
    b.launch(p.s, For("u", b.arg("units_", total), tuple(body.stmts)), total)
    p.queries, p.units, p.sums = codes, units, sums


class _Scorer:
    """Writes the scores of tiles; used inside a kernel whose units have a row of `partial` sums as scratch."""

    def __init__(self, p: _Problem, b: LoopBuilder, units: Size) -> None:
        self.p, self.b = p, b
        tile = p.tile
        self.rows, self.queries = b.param(p.rows, name="rows"), b.param(p.queries, name="queries")
        self.scales, self.offsets, self.units, self.sums = (
            None if v is None else b.param(v, name=name)
            for name, v in (("scales", p.scales), ("offsets", p.offsets), ("units", p.units), ("sums", p.sums))
        )
        room = tile.rows * tile.queries * tile.partials
        kind = I32 if p.integers else F32
        self.partial = Rows(b, "partial", p.s.temporary(TensorType((units, room), kind)), written=True)
        self.d = b.arg("d", p.d)
        self.steps = b.arg("steps", p.d // tile.partials)
        self.divides = isinstance(p.d, int) and p.d % tile.partials == 0

    def _product(self, total: Expr, x: Expr, y: Expr) -> Expr:
        """A term of a score, added: `x` of a row, `y` of a query."""
        p = self.p
        if p.tile.words and p.integers:
            return Apply("dot_u7", (total, x, y), I32)
        if p.integers:
            return total + x.cast(I32) * y.cast(I32)
        if p.metric == "l2":
            difference = x.cast(F32) - y
            return fma(difference, difference, total)
        return fma(x.cast(F32), y, total)

    def sums_of(self, body: Body, rows: Sequence[Expr], queries: Sequence[Expr]) -> None:
        """Writes partial sums of each row with each query: `partials` each, in the order of elements."""
        tile, part = self.p.tile, Index("part")
        kind = I32 if self.p.integers else F32

        def step(inner: Body, at: Expr, prefix: str, inside: Expr | None) -> None:
            def load(param: int, row: Expr) -> Expr:
                dtype = self.b.params[param].dtype
                value: Expr = Load(param, ((row, self.d), (at, 1)), dtype)
                if inside is not None:
                    value = inside.choose(value, Const(0.0 if dtype.is_float else 0, dtype))
                return value

            xs = []
            for r, row in enumerate(rows):
                x = load(self.rows, row)
                x = x ^ FLIPPED if tile.words and self.p.integers else x.cast(F32) if kind is F32 else x
                xs.append(inner.let(f"{prefix}x{r}", x))
            for c, query in enumerate(queries):
                y = inner.let(f"{prefix}y{c}", load(self.queries, query))
                for r, x in enumerate(xs):
                    total = totals[r][c]
                    inner.assign(total, self._product(total, x, y))

        with body.loop("part", tile.partials, vector=True) as across:
            totals = [
                [across.var(f"total{r}_{c}", 0.0 if kind is F32 else 0, kind) for c in range(len(queries))]
                for r in range(len(rows))
            ]
            with across.loop("step", self.steps) as inner:
                step(inner, Index("step") * tile.partials + part, "", None)
            if not self.divides:
                at = across.let("at", self.steps * tile.partials + part)
                step(across, at, "last_", across.let("inside", at < self.d))
            for r in range(len(rows)):
                for c in range(len(queries)):
                    across.store(self.partial, self._pair(r, c, len(queries)) * tile.partials + part, totals[r][c])

    def _pair(self, r: int, c: int, queries: int) -> Expr:
        return Const(r * queries + c, I64)

    def total(self, r: int, c: int, queries: int) -> Expr:
        """The sum of a pair of a tile whose partial sums are written: partials are added in halves.

        Those of a single pair are loaded one by one, because vectors would wait until the vector just written reaches
        the cache, and nothing after them could be read ahead.
        """
        partials, first = self.p.tile.partials, self._pair(r, c, queries) * self.p.tile.partials
        if queries > 1:
            return Reduce("sum", "part", partials, self.partial[first + Index("part")])
        sums = [self.partial[first + part] for part in range(partials)]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [x + y for x, y in zip(sums[:half], sums[half:], strict=True)]
        return sums[0]

    def score(self, total: Expr, row: Expr, query: Expr, valid: Expr) -> Expr:
        """The score of a row from its sum; -inf where not `valid`, or NaN."""
        score = total
        if self.p.integers:
            assert self.units is not None and self.sums is not None
            if self.p.tile.words:
                score = score - Load(self.sums, ((query, 1),), I32) * 128
            score = score.cast(F32) * Load(self.units, ((query, 1),), F32)
        elif self.p.metric == "l2":
            score = -score
        if self.scales is not None:
            score = score * valid.choose(Load(self.scales, ((row, 1),), F32), 0.0)
        if self.offsets is not None:
            score = score + valid.choose(Load(self.offsets, ((row, 1),), F32), 0.0)
        return (valid & (score > -math.inf)).select(score, -math.inf)


def _scan(p: _Problem) -> tuple[View, View]:
    """Candidates of all runs of rows: scores and indices, [queries, runs * k], in the order of rows."""
    s, k, tile = p.s, p.k, p.tile
    chunk = tile.chunk
    most = max(2 * k, k + SPARE) + chunk  # candidates
    runs = dim_min((p.n + (RUN_ROWS - 1)) // RUN_ROWS, RUNS)
    units = p.matrices * runs
    b = LoopBuilder("search_rows")
    scorer = _Scorer(p, b, units)
    scratch = {
        "chunk_sums": (p.q * chunk, I32 if p.integers else F32), "chunk_scores": (chunk, F32),
        "thresholds": (p.q, F32), "counts": (p.q, I32),
        "kept_scores": (p.q * most, F32), "kept_rows": (p.q * most, I32),
    }  # fmt: skip
    chunk_sums, chunk_scores, thresholds, counts, kept_scores, kept_rows = (
        Rows(b, name, s.temporary(TensorType((units, width), dtype)), written=True)
        for name, (width, dtype) in scratch.items()
    )
    total = p.matrices * p.q
    lists = [s.temporary(TensorType((total, runs * k), dtype)) for dtype in (F32, I32)]
    list_scores, list_rows = (
        b.param(v, written=True, name=name) for name, v in zip(("list_scores", "list_rows"), lists, strict=True)
    )
    n, q, k_, runs_ = (b.arg(name, size) for name, size in (("n", p.n), ("q", p.q), ("k", k), ("runs", runs)))
    width, room = b.arg("list_width", runs * k), b.arg("room", most)
    body, of, i, c = Body(), Index("query"), Index("i"), Index("c")

    matrix = body.let("matrix", ROW.quot(runs_))
    run = body.let("run", ROW.rem(runs_))
    run_rows = body.let("run_rows", ((n + runs_ - 1).quot(runs_) + (chunk - 1)).quot(chunk) * chunk)
    start = body.let("start", (run * run_rows).min(n))
    stop = body.let("stop", (start + run_rows).min(n))
    first_row, first_query = body.let("first_row", matrix * n), body.let("first_query", matrix * q)
    with body.loop("query", q, vector=True) as clear:
        clear.store(thresholds, of, Const(-math.inf, F32))
        clear.store(counts, of, Const(0, I32))

    def tiles(outer: Body, base: Ref, query: Expr, queries: int, rows: int) -> None:
        """Sums of the rows of a chunk with neighbouring queries."""
        with outer.loop("tile", chunk // rows) as inner:
            at = [inner.let(f"at{r}", Index("tile") * rows + r) for r in range(rows)]
            row = [inner.let(f"row{r}", first_row + (base + at[r]).min(n - 1)) for r in range(rows)]
            of_tile = [inner.let(f"query{c}", first_query + query + c) for c in range(queries)]
            scorer.sums_of(inner, row, of_tile)
            for r in range(rows):
                for c in range(queries):
                    inner.store(chunk_sums, (query + c) * chunk + at[r], scorer.total(r, c, queries))

    with body.loop("c", body.let("chunks", (stop - start + (chunk - 1)).quot(chunk))) as each:
        base = each.let("base", start + c * chunk)
        tiled = each.let("tiled", q.quot(tile.queries) if tile.queries > 1 else Const(0, I64))
        if tile.queries > 1:
            with each.loop("query_tile", tiled) as outer:
                tiles(outer, base, outer.let("query", Index("query_tile") * tile.queries), tile.queries, tile.rows)
        with each.loop("single", each.let("singles", q - tiled * tile.queries)) as outer:
            tiles(outer, base, outer.let("query", tiled * tile.queries + Index("single")), 1, 1)
        with each.loop("query", q) as inner:
            with inner.loop("i", chunk, vector=True) as each_row:
                valid = each_row.let("valid", base + i < stop)
                score = scorer.score(chunk_sums[of * chunk + i], first_row + base + i, first_query + of, valid)
                each_row.store(chunk_scores, i, score)
            top = inner.let("top", Reduce("max", "i", chunk, chunk_scores[i]))
            threshold = inner.let("threshold", thresholds[of])
            with inner.when("better", top > threshold) as better:
                count = better.var("count", counts[of].cast(I64), I64)
                with better.loop("i", chunk) as append:
                    score = append.let("score", chunk_scores[i])
                    append.store(kept_scores, of * room + count, score)
                    append.store(kept_rows, of * room + count, (base + i).cast(I32))
                    append.assign(count, count + (score > threshold).cast(I64))
                with better.when("full", count > room - chunk) as full:
                    least = _keep_best(full, kept_scores, kept_rows, of * room, count, k_)
                    full.store(thresholds, of, least)
                    full.assign(count, k_)
                better.store(counts, of, count.cast(I32))
    with body.loop("query", q) as inner:
        count = inner.var("count", counts[of].cast(I64), I64)
        with inner.when("many", count > k_) as many:
            _keep_best(many, kept_scores, kept_rows, of * room, count, k_)
            many.assign(count, k_)
        place = inner.let("place", run * k_)
        with inner.loop("i", k_, vector=True) as copy:
            here, at = i < count, ((first_query + of, width), (place + i, 1))
            for rows, param, nothing in ((kept_scores, list_scores, -math.inf), (kept_rows, list_rows, NO_ROW)):
                copy.stmts.append(Store(param, at, here.choose(rows[of * room + i], nothing)))
    flops = p.matrices * p.q * p.n * product(p.rows.shape[-1:]) * 2
    b.launch(s, For("u", b.arg("units_", units), tuple(body.stmts)), units, flops=flops, streams=("rows",))
    return lists[0], lists[1]


def _least_key(body: Body, scores: Rows, first: Expr, count: Expr, k: Expr) -> Ref:
    """The key (see `order`) of the k-th highest of `count` scores, or the least key if there are fewer."""
    i = Index("i")
    extent = body.let("searched", count)
    low, high = body.var("low", LEAST_KEY, I64), body.var("high", 2**31, I64)
    with body.loop("halving", HALVINGS) as each, each.when("open", high - low > 1) as step:
        middle = step.let("middle", low + high >> 1)
        reach = (scores[first + i].order() >= middle.cast(I32)).cast(I32)
        enough = step.let("enough", Reduce("sum", "i", extent, reach).cast(I64) >= k)
        step.assign(low, enough.select(middle, low))
        step.assign(high, enough.select(high, middle))
    return low


def _keep_best(body: Body, scores: Rows, rows: Rows, first: Expr, count: Expr, k: Expr) -> Expr:
    """Moves the k best of more candidates to the front, in order; of equal scores, the first. Returns the least."""
    i = Index("i")
    key = _least_key(body, scores, first, count, k)
    extent = body.let("all", count)
    above = body.let(
        "above", Reduce("sum", "i", extent, (scores[first + i].order() > key.cast(I32)).cast(I32)).cast(I64)
    )
    ties, front = body.var("ties", k - above, I64), body.var("kept", 0, I64)
    least = body.var("least", math.inf, F32)
    with body.loop("i", extent) as each:
        score, row = each.let("moved", scores[first + i]), each.let("moved_row", rows[first + i])
        order = each.let("order", score.order().cast(I64))
        tie = each.let("tie", order.eq(key) & (ties > 0))
        keep = each.let("keep", (order > key) | tie)
        each.store(scores, first + front, score)
        each.store(rows, first + front, row)
        each.assign(front, front + keep.cast(I64))
        each.assign(ties, ties - tie.cast(I64))
        each.assign(least, keep.select(least.min(score), least))
    return least


def _score_candidates(p: _Problem) -> tuple[View, View]:
    """Scores of the rows in `among`, and these rows; both [queries, m]."""
    assert p.among is not None
    s, total = p.s, p.matrices * p.q
    b = LoopBuilder("score_rows")
    scorer = _Scorer(p, b, total)
    among = Rows(b, "among", p.among)
    out = s.temporary(TensorType((total, p.m), F32))
    scores = Rows(b, "scores", out, written=True)
    n, q, m = (b.arg(name, size) for name, size in (("n", p.n), ("q", p.q), ("m", p.m)))
    body = Body()
    first_row = body.let("first_row", ROW.quot(q) * n)
    with body.loop("at", m) as inner:
        at, index = Index("at"), inner.let("index", among[Index("at")].cast(I64))
        valid = inner.let("valid", (index >= 0) & (index < n))
        # A row that does not exist is read as row 0, or not at all if there is none.
        some = inner.let("some", (n > 0).cast(I64))
        row = inner.let("row", first_row + valid.select(index, 0))
        with inner.loop("some_once", some) as existing:
            scorer.sums_of(existing, [row], [ROW])
            existing.store(scores, at, scorer.score(scorer.total(0, 0, 1), row, ROW, valid))
        with inner.loop("none_once", inner.let("none", 1 - some)) as none:
            none.store(scores, at, Const(-math.inf, F32))
    flops = total * p.m * product(p.rows.shape[-1:]) * 2
    b.launch(s, For("u", b.arg("units_", total), tuple(body.stmts)), total, flops=flops)
    return out, p.among


def _take_best(p: _Problem, scores: View, rows: View, outs: Sequence[View]) -> None:
    """The k best of each query's candidates, highest first; of equal scores the lower row comes first."""
    s, k = p.s, p.k
    total, width = scores.shape
    b = LoopBuilder("take_best")
    candidates, indices = Rows(b, "candidates", scores), Rows(b, "indices", rows)
    shape = (total, k)
    best, best_rows = (
        Rows(b, name, v.with_(shape, contiguous_strides(shape)), written=True)
        for name, v in zip(("best", "best_rows"), outs, strict=True)
    )
    near, near_rows = (
        Rows(b, name, s.temporary(TensorType((total, width), dtype)), written=True)
        for name, dtype in (("near", F32), ("near_rows", I32))
    )
    n, k_ = b.arg("width", width), b.arg("k", k)
    body, i, j = Body(), Index("i"), Index("j")
    with body.loop("i", k_, vector=True) as clear:
        clear.store(best, i, Const(-math.inf, F32))
        clear.store(best_rows, i, Const(NO_ROW, I32))
    key = _least_key(body, candidates, Const(0, I64), n, k_)
    count = body.var("near_count", 0, I64)
    with body.loop("i", n) as gather:
        score = gather.let("score", candidates[i])
        reach = (score.order().cast(I64) >= key) & (score > -math.inf)
        with gather.when("reached", reach) as member:
            member.store(near, count, score)
            member.store(near_rows, count, indices[i])
            member.assign(count, count + 1)
    reached = body.let("near_all", count)
    with body.loop("i", reached) as each:
        score, row = each.let("ranked", near[i]), each.let("ranked_row", near_rows[i])
        equal_before = near[j].eq(score) & ((near_rows[j] < row) | (near_rows[j].eq(row) & (j < i)))
        ahead = Reduce("sum", "j", reached, ((near[j] > score) | equal_before).cast(I32))
        rank = each.let("rank", ahead.cast(I64))
        with each.when("placed", rank < k_) as placed:
            placed.store(best, rank, score)
            placed.store(best_rows, rank, row)
    b.launch(s, For("u", b.arg("units_", total), tuple(body.stmts)), total)
