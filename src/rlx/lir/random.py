"""Loop forms of random numbers: every element works its own block out, in 64-bit integers."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, F32, I64
from rlx.ir.graph import Node
from rlx.lir.loops import Apply, Const, Expr, For, Index, Let, Load, Ref, Stmt, Store
from rlx.lir.schedule import CHUNK, LoopBuilder, Scheduler, cast, loop_form
from rlx.lir.views import View
from rlx.ops.random import MULTIPLIERS, ROUNDS, WEYL, WORD
from rlx.types import product


def _int(op: str, a: Expr, b: Expr | int) -> Expr:
    return Apply(op, (a, Const(b, I64) if isinstance(b, int) else b), I64)


def _xor(a: Expr, b: Expr) -> Expr:
    return _int("sub", _int("or", a, b), _int("and", a, b))


class _Names:
    """Values that are used more than once get a name."""

    def __init__(self) -> None:
        self.stmts: list[Stmt] = []

    def let(self, value: Expr) -> Ref:
        name = f"r{len(self.stmts)}"
        self.stmts.append(Let(name, value))
        return Ref(name, I64)


def _word(names: _Names, index: Expr, key: list[Expr]) -> Expr:
    """The 32 bits of an element."""
    block = names.let(_int("shr", index, 2))
    zero = Const(0, I64)
    c: list[Expr] = [names.let(_int("and", block, WORD)), names.let(_int("shr", block, 32)), zero, zero]
    k: list[Expr] = list(key)
    for number in range(ROUNDS):
        if number:
            k = [names.let(_int("and", _int("add", word, weyl), WORD)) for word, weyl in zip(k, WEYL, strict=True)]
        low, high = (names.let(_int("mul", c[i], m)) for i, m in zip((0, 2), MULTIPLIERS, strict=True))
        # Products fill 64 bits; a shift brings copies of the sign in, which the mask takes off.
        tops = [_int("and", _int("shr", p, 32), WORD) for p in (low, high)]
        c = [
            names.let(_xor(names.let(_xor(names.let(tops[1]), c[1])), k[0])),
            names.let(_int("and", high, WORD)),
            names.let(_xor(names.let(_xor(names.let(tops[0]), c[3])), k[1])),
            names.let(_int("and", low, WORD)),
        ]
    place = names.let(_int("and", index, 3))
    result = c[3]
    for i in (2, 1, 0):
        here = Apply("eq", (place, Const(i, I64)), BOOL)
        result = Apply("select", (here, c[i], result), I64)
    return result


@loop_form("random_bits", "random_uniform")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    key, out = s.contiguous(s.view(node.operands[0])), s.result(node)
    builder = LoopBuilder(node.op)
    source, target = builder.param(key), builder.param(out, written=True)
    names = _Names()
    words = [names.let(cast(Load(source, ((Const(i, I64), 1),), key.dtype), I64)) for i in range(2)]
    bits = _word(names, Index("j"), list(words))
    value = bits
    if node.op == "random_uniform":
        value = Apply("mul", (cast(_int("shr", bits, 8), F32), Const(2.0**-24, F32)), F32)
    count = product(out.shape)
    body = (*names.stmts, Store(target, ((Index("j"), 1),), value))
    root = For("j", builder.arg("n", count), body, vector=True)
    units = (count + (CHUNK - 1)) // CHUNK
    builder.launch(s, root, units, chunk=CHUNK, split="chunks", flops=count * (8 * ROUNDS))
    return [out]
