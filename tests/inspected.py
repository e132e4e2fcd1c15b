"""Graphs that reports and pages are tested with."""

from __future__ import annotations

import rlx
from rlx.ir.graph import Graph


def looped() -> Graph:
    """A scan, a branch and a sum."""
    step = rlx.Graph("step")
    carry, x = step.input("carry", (4,)), step.input("x", (4,))
    after = (carry * 0.5 + x).tanh()
    step.set_outputs([after, after * 2.0])
    then, other = rlx.Graph("then"), rlx.Graph("other")
    then.set_outputs([then.input("a", (4,)).exp()])
    other.set_outputs([other.input("a", (4,)) * 3.0])
    g = rlx.Graph("looped")
    last, all_ = g.apply("scan", g.input("c", (4,)), g.input("xs", (10, 4)), body=step, length=10, carries=1)
    chosen = g.apply("cond", g.input("p", (), "bool"), last, then_body=then, else_body=other)
    return g.set_outputs([chosen, all_.sum(axis=0)])


def stacked(layers: int, *, level: str = "hir", odd: tuple[int, ...] = ()) -> Graph:
    """Layers of two blocks each, by stages; the odd ones have another activation."""
    g = rlx.Graph("stacked", level=level)
    with rlx.stage("embed"):
        x = g.input("x", ("rows", 16)) * 2.0
    for i in range(layers):
        with rlx.stage(f"layers.{i}"):
            with rlx.stage("norm"):
                normed = x.rms_norm(g.param(f"layers.{i}.gamma", (16,)), eps=1e-6)
            with rlx.stage("ffn"):
                wide, narrow = g.param(f"layers.{i}.up", (16, 32)), g.param(f"layers.{i}.down", (32, 16))
                activation = "silu" if i in odd else "gelu"
                if level == "hir":
                    y = g.linear(g.linear(normed, wide, activation=activation), narrow)
                else:
                    y = g.one(activation, normed @ wide) @ narrow
            x = x + y
    with rlx.stage("head"):
        g.set_outputs([x.softmax(axis=-1)])
    return g
