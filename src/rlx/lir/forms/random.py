"""Loop forms of random numbers: each element computes its own Philox block in 64-bit integers."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import F32, I64
from rlx.ir.graph import Node
from rlx.lir.loops import Const, Expr, For, Index, Let, Load, Ref, Stmt, Store
from rlx.lir.schedule import CHUNK, LoopBuilder, Scheduler, loop_form
from rlx.lir.views import View
from rlx.ops.random import MULTIPLIERS, ROUNDS, WEYL, WORD
from rlx.types import product


class _Names:
    """Names values that are used more than once."""

    def __init__(self) -> None:
        self.stmts: list[Stmt] = []

    def let(self, value: Expr) -> Ref:
        name = f"r{len(self.stmts)}"
        self.stmts.append(Let(name, value))
        return Ref(name, I64)


def _word(names: _Names, index: Expr, key: list[Expr]) -> Expr:
    """The 32 bits of an element."""
    block = names.let(index >> 2)
    zero = Const(0, I64)
    c: list[Expr] = [names.let(block & WORD), names.let(block >> 32), zero, zero]
    k: list[Expr] = list(key)
    for number in range(ROUNDS):
        if number:
            k = [names.let(word + weyl & WORD) for word, weyl in zip(k, WEYL, strict=True)]
        low, high = (names.let(c[i] * m) for i, m in zip((0, 2), MULTIPLIERS, strict=True))
        # Products fill 64 bits; the shift sign-extends, which the mask undoes.
        tops = [p >> 32 & WORD for p in (low, high)]
        c = [
            names.let(names.let(names.let(tops[1]) ^ c[1]) ^ k[0]),
            names.let(high & WORD),
            names.let(names.let(names.let(tops[0]) ^ c[3]) ^ k[1]),
            names.let(low & WORD),
        ]
    place = names.let(index & 3)
    result = c[3]
    for i in (2, 1, 0):
        result = place.eq(i).select(c[i], result)
    return result


@loop_form("random_bits", "random_uniform")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    key, out = s.contiguous(s.view(node.operands[0])), s.result(node)
    builder = LoopBuilder(node.op)
    source, target = builder.param(key), builder.param(out, written=True)
    names = _Names()
    words = [names.let(Load(source, ((Const(i, I64), 1),), key.dtype).cast(I64)) for i in range(2)]
    bits = _word(names, Index("j"), list(words))
    value = bits
    if node.op == "random_uniform":
        value = (bits >> 8).cast(F32) * 2.0**-24
    count = product(out.shape)
    body = (*names.stmts, Store(target, ((Index("j"), 1),), value))
    root = For("j", builder.arg("n", count), body, vector=True)
    units = (count + (CHUNK - 1)) // CHUNK
    builder.launch(s, root, units, chunk=CHUNK, split="chunks", flops=count * (8 * ROUNDS))
    return [out]
