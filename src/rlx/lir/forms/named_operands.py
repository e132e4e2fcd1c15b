"""Kernel parameters by name, addressed by one index per axis."""

from __future__ import annotations

from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.aliasing import may_write
from rlx.lir.loops import Const, Expr, Let, Place, Store
from rlx.lir.schedule import LoopBuilder, Scheduler
from rlx.lir.views import View


def state_after(s: Scheduler, node: Node, state: View) -> View:
    """The buffer of a node's second result, its updated state: in place if the node may write the state."""
    return state if state.is_contiguous() and may_write(s, node, state) else s.result(node, 1)


class Operands:
    """Contiguous parameters by name."""

    def __init__(self, s: Scheduler, name: str) -> None:
        self.scheduler = s
        self.builder = LoopBuilder(name)
        self.numbers: dict[str, int] = {}

    def read(self, name: str, view: View) -> None:
        self.numbers[name] = self.builder.param(self.scheduler.contiguous(view), name=name)

    def write(self, name: str, view: View) -> None:
        self.numbers[name] = self.builder.param(view, written=True, name=name)

    def carry(self, state: View, after: View) -> None:
        """Add `state`, which is read, and `final`, which is written; they may share memory."""
        if after == state:
            self.write("state", state)
            self.numbers["final"] = self.numbers["state"]
        else:
            self.read("state", state)
            self.write("final", after)

    def place(self, name: str, *indices: Expr) -> Place:
        """The address of an element; the last axis has stride 1."""
        strides = self.builder.views[self.numbers[name]].strides
        steps = [self.builder.arg(f"{name}_{i}", stride) for i, stride in enumerate(strides[:-1])]
        return (*zip(indices[:-1], steps, strict=True), (indices[-1], 1))

    def load(self, name: str, *indices: Expr) -> Expr:
        return self.load_at(name, self.place(name, *indices))

    def load_at(self, name: str, place: Place) -> Expr:
        return self.builder.load(self.numbers[name], place)

    def store(self, name: str, value: Expr, *indices: Expr) -> Store:
        return self.store_at(name, value, self.place(name, *indices))

    def store_at(self, name: str, value: Expr, place: Place) -> Store:
        return Store(self.numbers[name], place, value)

    def base(self, name: str, *indices: Expr) -> Let:
        """Define `{name}_base`, an address computed once outside inner loops."""
        total: Expr = Const(0, I64)
        for index, stride in self.place(name, *indices):
            total = total + index * stride
        return Let(f"{name}_base", total)
