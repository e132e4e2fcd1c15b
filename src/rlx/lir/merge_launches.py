"""Merges adjacent loop launches over the same units: independent launches of one kernel, or producer and consumer.

For example, one launch appends both keys and values to a cache, and the unit that writes a normalised row also
quantises it to 8 bits.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.lir.loops import (
    Apply,
    Arg,
    Assign,
    Check,
    Choose,
    Expr,
    For,
    Index,
    Let,
    Load,
    Lookup,
    LoopKernel,
    Param,
    Place,
    Reduce,
    Ref,
    Stmt,
    Store,
    Var,
)
from rlx.lir.program import Launch, Program
from rlx.lir.views import View
from rlx.types import Size


def merge_launches(program: Program, *, independent: bool = True) -> None:
    """Merge each launch into its predecessor if possible; never across the edge of a loop or branch.

    Launches of one kernel that do not depend on each other are merged if `independent`.
    """
    edges = {edge for control in program.controls for edge in control.edges}
    merged: list[Launch] = []
    places: list[int] = []  # the new index of each launch
    for number, launch in enumerate(program.launches):
        joined = _join(merged[-1], launch, independent) if merged and number not in edges else None
        if joined is None:
            places.append(len(merged))
            merged.append(launch)
        else:
            places.append(len(merged) - 1)
            merged[-1] = joined
    places.append(len(merged))
    program.launches = [replace(launch, shares={}) for launch in merged]  # no longer needed
    program.controls = [control.renumbered(places.__getitem__) for control in program.controls]


MAX_MERGED = 8  # launches per merged kernel, so that kernels stay readable


def _join(a: Launch, b: Launch, independent: bool) -> Launch | None:
    if not isinstance(a.kernel, LoopKernel) or not isinstance(b.kernel, LoopKernel) or len(a.also) >= MAX_MERGED:
        return None
    if a.units != b.units or a.kernel.root.index != b.kernel.root.index:
        return None
    if a.kernel.chunk or b.kernel.chunk or a.kernel.lets or b.kernel.lets:
        return None
    writes_a, writes_b = ({v.buffer for v in x.views(written=True)} for x in (a, b))
    touches_a, touches_b = ({v.buffer for v in x.views()} for x in (a, b))
    shared, alike = writes_a & touches_b, a.kernel.name == b.kernel.name
    if writes_b & touches_a or (not shared and not (alike and independent)):
        return None
    for buffer in shared:
        shares = _shares(a, buffer) | _shares(b, buffer)
        if len(shares) != 1 or None in shares:
            return None
    suffix = chr(ord("b") + len(a.also))  # a different one for each merged launch
    renamed = _Renamer(a.kernel.root.index, len(a.kernel.params), suffix)
    second = b.kernel
    params = a.kernel.params + tuple(Param(f"{p.name}{suffix}", p.dtype, p.written) for p in second.params)
    args = a.kernel.args + tuple(f"{n}{suffix}" for n in second.args)
    body = a.kernel.root.body + tuple(renamed.stmt(s) for s in second.root.body)
    name = f"{a.kernel.name}{2 if alike else f'_{second.name}'}"
    kernel = LoopKernel(name, params, args, replace(a.kernel.root, body=body))
    cut_a, cut_b = len(a.kernel.params), len(second.params)
    words = a.words[:cut_a] + b.words[:cut_b] + a.words[cut_a:] + b.words[cut_b:]
    own = {**a.shares, **{f"{name}{suffix}": size for name, size in b.shares.items()}}
    also = (*a.also, b.node, *b.also)
    return replace(a, kernel=kernel, words=words, flops=a.flops + b.flops, also=also, shares=own)


def _shares(launch: Launch, buffer: str) -> set[Size | None]:
    """The bytes of a buffer private to each unit, for each view that the launch has of it; None if not private."""
    shares: set[Size | None] = set()
    for name, view in zip(launch.kernel.words, launch.words, strict=True):
        if isinstance(view, View) and view.buffer == buffer:
            covers_buffer = view.is_contiguous() and view.offset == 0
            shares.add(launch.shares.get(name) if covers_buffer else None)
    return shares


class _Renamer:
    """Renames the second kernel's body so that its names do not clash with the first's."""

    def __init__(self, root: str, params: int, suffix: str) -> None:
        self.root = root
        self.params = params
        self.suffix = suffix

    def name(self, name: str) -> str:
        return name if name == self.root else f"{name}{self.suffix}"

    def extent(self, extent: int | Arg | Ref) -> int | Arg | Ref:
        match extent:
            case Arg():
                return Arg(f"{extent.name}{self.suffix}")
            case Ref():
                return Ref(f"{extent.name}{self.suffix}", extent.dtype)
        return extent

    def stride(self, stride: int | Arg) -> int | Arg:
        return stride if isinstance(stride, int) else Arg(f"{stride.name}{self.suffix}")

    def at(self, at: Place) -> Place:
        return tuple((self.expr(i), self.stride(s)) for i, s in at)

    def expr(self, e: Expr) -> Expr:
        match e:
            case Index():
                return Index(self.name(e.name))
            case Arg():
                return Arg(f"{e.name}{self.suffix}")
            case Ref():
                return Ref(f"{e.name}{self.suffix}", e.dtype)
            case Load():
                return Load(e.param + self.params, self.at(e.at), e.dtype)
            case Apply():
                return Apply(e.op, tuple(self.expr(a) for a in e.args), e.dtype)
            case Choose():
                return Choose(self.expr(e.condition), self.expr(e.then), self.expr(e.other))
            case Reduce():
                return Reduce(e.op, self.name(e.index), self.extent(e.extent), self.expr(e.value))
            case Lookup():
                return Lookup(e.table, self.expr(e.index))
            case _:
                return e

    def stmt(self, s: Stmt) -> Stmt:
        match s:
            case Let():
                return Let(f"{s.name}{self.suffix}", self.expr(s.value))
            case Var():
                return Var(f"{s.name}{self.suffix}", self.expr(s.start))
            case Assign():
                return Assign(f"{s.name}{self.suffix}", self.expr(s.value))
            case Store():
                return Store(s.param + self.params, self.at(s.at), self.expr(s.value))
            case Check():
                return Check(self.expr(s.condition), s.code)
            case For():
                return For(self.name(s.index), self.extent(s.extent), tuple(map(self.stmt, s.body)), s.vector)
