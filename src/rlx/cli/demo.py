"""`rlx demo`: builds, compiles and runs a small gated feed-forward block, and shows its program."""

from __future__ import annotations

import argparse
import time

import numpy as np

import rlx
from rlx.cli.console import UsageError
from rlx.ir.graph import Graph

HIDDEN, INNER = 384, 1024


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("demo", help="compile and run a small block, and show it")
    command.add_argument("--rows", type=int, default=128, help="rows of the input")
    command.set_defaults(run=run)


def block() -> Graph:
    """x + down(silu(gate(norm x)) · up(norm x))."""
    g = rlx.Graph("gated_ffn")
    x = g.input("x", ("rows", HIDDEN))
    t = g.rms_norm(x, g.param("norm", (HIDDEN,)), eps=1e-6)
    gate, up = t @ g.param("gate", (HIDDEN, INNER)), t @ g.param("up", (HIDDEN, INNER))
    return g.set_outputs([x + (gate.silu() * up) @ g.param("down", (INNER, HIDDEN))])


def run(arguments: argparse.Namespace) -> int:
    if arguments.rows < 0:
        raise UsageError(f"demo: --rows is {arguments.rows}, expected a number from 0")
    graph = block()
    print("A gated feed-forward block as a graph:\n")
    print(graph)
    started = time.perf_counter()
    compiled = rlx.compile(graph)
    print(f"\nCompiled in {(time.perf_counter() - started) * 1e3:.0f} ms. Its program:\n")
    print(compiled.plan.main.text(kernels=False))
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(t.shape, np.float32) / 16 for n, t in compiled.param_types.items()}  # type: ignore[arg-type]
    x = rng.standard_normal((arguments.rows, HIDDEN), np.float32)
    compiled.set_params(params)
    (y,) = compiled.run({"x": x})
    oracle = rlx.compile(graph, device="reference")
    oracle.set_params(params)
    (wanted,) = oracle.run({"x": x})
    print("\nOne run:\n")
    print(compiled.report({"x": x}))
    error = float(np.abs(y - wanted).max() / np.abs(wanted).max())
    print(f"\nLargest difference to NumPy: {error:.1e} of the largest value.")
    return 0 if error < 1e-4 else 1
