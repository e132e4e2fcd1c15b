"""The gated delta net chunk by chunk: products of small matrices in place of a pass over the state for each token.

A unit is a head. Inside a chunk, b is the product of the gates up to a token, D[t, s] that of those after s up to t,
and w the last row of D. With A = D ∘ KKᵀ below the diagonal and P = D ∘ QKᵀ up to it, what the state lacks is
V - b K S - A C, the changes C are beta times that, the outputs b Q S + P C, and the next state is b S + (w K)ᵀ C
(Yang et al., "Gated Delta Networks", section 3.3). The way back transposes each of these. Nothing is divided by gates,
so that gates of zero are as good as any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.forms.delta_head import (
    FIRST,
    LATE,
    REST,
    TOKEN,
    Affine,
    B,
    Finish,
    H,
    Head,
    J,
    R,
    S,
    T,
    Term,
    one,
)
from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.loops import Assign, Expr, For, Index, Let, Place, Reduce, Ref, Stmt, Store, Var, fma, known
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View
from rlx.types import Size


def forward(
    s: Scheduler, node: Node, out: View, chunk: int, times: Size, *, state: View | None, last: View | None,
    kept: Sequence[View] = (),
) -> None:  # fmt: skip
    """The launch that does the whole sequence, with `times` as many units as there are heads.

    `kept` are the states before each chunk, and what is missing in them.
    """
    head = Head(s, node, out, chunk, times, f"{node.op}_chunks")
    head.matrices(chunk, head.n, "miss", "C", "wC", "out")
    operands, columns, tokens = head.operands, head.columns, head.chunk
    head.read(node, "q", "k", "v", "g", "beta")
    operands.write("y", head.own.rectangular(out))
    if state is not None and last is not None:
        operands.carry(state, last)
    for name, view in zip(("states", "misses"), kept, strict=False):
        operands.write(name, view)
    head.open()

    def lacking(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        seen = head.get("b", (), row) * total
        at = row, columns.column(v)
        return [head.put("miss", head.get("miss", *at) - seen, *at)]

    def read(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        return [Assign(total.name, head.get("b", (), row) * total)]

    results = [operands.store("y", head.get("out", one(T), one(J)), head.entry, TOKEN, H, J)]
    before: list[Stmt] = []
    if kept:
        results.append(operands.store("misses", head.get("miss", one(T), one(J)), B, TOKEN, H, J))
        before.append(
            head.each_of_state(
                lambda j, row: operands.store("states", head.get("state", row, one(J)), B, H, Ref("chunk", I64), R, j)
            )
        )
    walk = [
        *before,
        *head.gates(),
        *head.rows({"K": head.of_token("k"), "Q": head.scale * head.of_token("q"), "miss": head.of_token("v")}),
        head.transposed("KT", "K"),
        *head.scores(),
        head.product(tokens, columns, [head.by_state("K")], lacking),
        head.solved("miss", one(T), head.get("A", one(T), one(S)), "C", one(S), "wC", head.get("w", (), one(T))),
        head.product(tokens, columns, [head.by_state("Q", then=read), head.before("P", "C")], head.stored("out")),
        head.product(head.n, columns, [head.turned("K", "wC")], head.advance),
        head.each_token(columns=results),
    ]

    def start(j: Expr, row: Affine) -> Store:
        return head.put("state", head.zero if state is None else operands.load("state", B, H, R, j), row, one(J))

    def end(j: Expr, row: Affine) -> Store:
        return operands.store("final", head.get("state", row, one(J)), B, H, R, j)

    after = [] if last is None else [head.each_of_state(end)]
    head.launch([head.each_of_state(start)], walk, after, backwards=False)


def backward(s: Scheduler, node: Node, results: Sequence[View]) -> None:
    """The gradients of all operands from those of outputs and last state, from the last chunk to the first."""
    chunk = node.attrs["chunk"]
    head = Head(s, node, results[0], chunk, 1, node.op)
    n, columns, tokens, operands, kind = head.n, head.columns, head.tokens, head.operands, head.kind
    head.matrices(chunk, n, "dO", "bdO", "C", "wKdS", "E", "dV", "bdV", "dQ", "dK", "gap")
    head.matrices(n, chunk, "CT", "dOT", "dVT", "QS", "KS", "CS")
    head.matrices(chunk, chunk, "dP", "dA")
    head.matrices(1, chunk, "dG")
    head.matrices(1, columns.width, "both")
    head.read(node, "q", "k", "g", "beta", "states", "misses", "d_out", "d_last")
    for name, view in zip(("dq", "dk", "dv", "dg", "dbeta", "d_state"), results, strict=True):
        operands.write(name, view)
    head.open()

    def through_state(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        scaled = head.get("w", (), row) * total
        return [Assign(total.name, scaled), head.put("wKdS", total, row, columns.column(v))]

    def along_tokens(into: str, *, by: str = "") -> Finish:
        """A product that has tokens along the vector loop."""

        def finish(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
            column = tokens.column(v)
            return [head.put(into, total * head.get(by, (), column) if by else total, row, column)]

        return finish

    def of_start(right: str) -> Term:
        """The state before the chunk, times a matrix that has tokens along the vector loop."""
        return Term(
            [("s", n)],
            lambda row: operands.load_at(
                "states", ((Ref("states_base", I64), 1), *((e, m * n) for e, m in row), (S, 1))
            ),
            lambda v: head.get(right, one(S), tokens.column(v)),
        )

    of_gradient = Term(
        [("strip", columns.strips), ("s", columns.width)],
        lambda row: head.get("state", head.strip_row(row, Index("strip")), one(S)),
        lambda v: head.get("CT", ((Index("strip"), columns.width), (S, 1)), tokens.column(v)),
    )

    def queries(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        column = columns.column(v)
        return [head.put("dQ", total + head.get("QS", column, row), row, column)]

    def readers(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        column = columns.column(v)
        return [head.put("dK", total + head.get("KS", column, row), row, column)]

    def writers(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        """Keys as they are written with; `gap` is how far those that read are from them."""
        at = row, columns.column(v)
        wrote, had = Ref(f"wrote{total.name}", kind), Ref(f"had{total.name}", kind)
        return [
            Let(wrote.name, total + head.get("CS", at[1], row)),
            Let(had.name, head.get("dK", *at)),
            head.put("gap", had - wrote, *at),
            head.put("dK", had + wrote, *at),
        ]

    def dot(left: Callable[[Expr], Expr], right: str) -> Expr:
        """Of two rows of a token."""
        i = Index("x")
        return Reduce("sum", "x", n, left(i) * head.get(right, one(T), one(i)))

    def row_of(name: str) -> Callable[[Expr], Expr]:
        return lambda i: head.get(name, one(T), one(i))

    results_of_token: list[Stmt] = [
        operands.store("dq", head.scale * head.get("dQ", one(T), one(J)), B, TOKEN, H, J),
        operands.store("dk", head.get("dK", one(T), one(J)), B, TOKEN, H, J),
        operands.store("dv", head.get("dV", one(T), one(J)), B, TOKEN, H, J),
    ]
    gate_of_token = dot(row_of("Q"), "dQ") + dot(row_of("K"), "gap")
    rate_of_token = dot(lambda i: operands.load("misses", B, TOKEN, H, i), "E")
    after = one(LATE, known(1, I64), S)
    minus_b = -head.get("b", (), one(LATE))
    walk: list[Stmt] = [
        operands.base("states", B, H, Ref("chunk", I64), known(0, I64), known(0, I64)),
        *head.gates(),
        *head.rows({
            "K": head.of_token("k"), "Q": head.scale * head.of_token("q"), "dO": head.of_token("d_out"),
            "bdO": head.get("b", (), one(T)) * head.of_token("d_out"),
            "C": head.get("rate", (), one(T)) * head.of_token("misses"),
        }),
        head.transposed("KT", "K"),
        head.transposed("CT", "C"),
        head.transposed("dOT", "bdO"),
        *head.scores(),
        head.product(chunk, columns, [head.by_state("K", then=through_state), head.after("P", "dO")], head.stored("E")),
        head.solved("E", one(LATE), head.get("A", after, one(LATE)), "dV", after, "bdV", minus_b),
        head.transposed("dVT", "bdV"),
        head.product(chunk, tokens, [head.plain("dO", "CT")], head.gated("D", "dP")),
        head.product(chunk, tokens, [head.plain("dV", "CT")], head.gated("below", "dA", minus=True)),
        head.product(n, tokens, [of_start("dOT")], along_tokens("QS")),
        head.product(n, tokens, [of_start("dVT")], along_tokens("KS")),
        head.product(n, tokens, [of_gradient], along_tokens("CS", by="w")),
        head.product(chunk, columns, [head.before("dP", "K")], queries),
        head.product(chunk, columns, [head.before("dA", "K")], readers),
        head.product(chunk, columns, [head.after("dP", "Q"), head.after("dA", "K")], writers),
        head.each_token(
            head.put("dG", gate_of_token, (), one(T)), operands.store("dbeta", rate_of_token, B, TOKEN, H),
            columns=results_of_token,
        ),
        *_of_ends(head),
        For("t", REST, (
            Let("late", REST - 1 - T),
            Assign("of_gates", head.unless_closed(Ref("of_gates", kind) + head.get("dG", (), one(LATE)))),
            operands.store("dg", Ref("of_gates", kind), B, FIRST + LATE, H),
        )),
        head.product(n, columns, [head.turned("Q", "bdO"), head.turned("K", "bdV")], head.advance),
    ]  # fmt: skip
    start = head.each_of_state(lambda j, row: head.put("state", operands.load("d_last", B, H, R, j), row, one(J)))
    end = head.each_of_state(lambda j, row: operands.store("d_state", head.get("state", row, one(J)), B, H, R, j))
    head.launch([start], walk, [end], backwards=True)


def _of_ends(head: Head) -> list[Stmt]:
    """`of_gates` as it is after the chunk: the state there times its gradient."""
    columns, kind, n = head.columns, head.kind, head.n
    sums = [Ref(f"sum{v}", kind) for v in range(columns.vectors)]

    def start_at(v: int) -> Place:
        return ((Ref("states_base", I64), 1), (R, n), *columns.column(v))

    row: list[Stmt] = []
    for v, x in enumerate(sums):
        gradient = head.get("state", head.strip_row(one(R)), columns.within(v))
        row.append(Assign(x.name, fma(head.operands.load_at("states", start_at(v)), gradient, x)))
    adding = [
        head.put("both", head.get("both", (), columns.within(v)) + x, (), columns.within(v)) for v, x in enumerate(sums)
    ]
    inner = For(
        "j", columns.span, (*(Var(x.name, head.zero) for x in sums), For("r", n, tuple(row)), *adding), vector=True
    )
    clear = For("j", columns.width, (head.put("both", head.zero, (), one(J)),), vector=True)
    each = one(Index("x"))
    kept = Reduce("sum", "x", columns.width, head.get("both", (), each))
    changed = Reduce("sum", "x", head.chunk * n, head.get("wKdS", (), each) * head.get("C", (), each))
    whole = head.get("b", (), one(known(head.chunk - 1, I64)))
    return [clear, For("tile", columns.strips, (inner,)), Var("of_gates", fma(whole, kept, changed))]
