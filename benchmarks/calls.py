"""What one call costs outside of kernels: jitted, un-jitted, created in a loop, op by op, and of methods.

    python benchmarks/calls.py

Each row is the best of 7 rounds, in microseconds per call, for a loss of 4 x 8 weights, whose kernels take about 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import rlx

W, X = np.ones((4, 8), np.float32), np.ones((16, 4), np.float32)


def loss(w: Any, x: Any) -> Any:
    return np.mean(np.tanh(x @ w) ** 2)


def clock_loss(w: Any, x: Any) -> Any:
    return loss(w, x) * float(time.time() > 0)


class Model:
    scale = 1.0

    def loss(self, w: Any, x: Any) -> Any:
        return loss(w, x) * self.scale


def microseconds(call: Callable[[], Any], calls: int = 200, rounds: int = 7) -> float:
    call()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def main() -> None:
    jitted, gradient, model = rlx.jit(rlx.grad(loss)), rlx.grad(loss), Model()
    _, linear = rlx.linearize(lambda w: loss(w, X), W)
    program = rlx.compile(rlx.trace(loss)(W, X))
    rows: dict[str, Callable[[], Any]] = {
        "np.sin(w)": lambda: np.sin(W),
        "rlx.sin(w)": lambda: rlx.sin(W),
        "program.run(...)": lambda: program.run({"w": W, "x": X}),
        "jitted gradient": lambda: jitted(W, X),
        "rlx.grad(f), created once": lambda: gradient(W, X),
        "rlx.grad(f)(w, x)": lambda: rlx.grad(loss)(W, X),
        "rlx.grad of a lambda that reads x": lambda: rlx.grad(lambda w: loss(w, X))(W),
        "rlx.grad(model.loss)(w, x)": lambda: rlx.grad(model.loss)(W, X),
        "a function that must be traced each time": lambda: rlx.grad(clock_loss)(W, X),
        "rlx.jit(f)(w, x)": lambda: rlx.jit(loss)(W, X),
        "rlx.vmap(f)(...)": lambda: rlx.vmap(loss, (None, 0))(W, X[:, None]),
        "rlx.scan of a lambda": lambda: rlx.scan(lambda c, x: (c + x, c), np.float32(0), X[:, 0]),
        "a function of rlx.linearize": lambda: linear(W),
        "rlx.random.normal(key, 3)": lambda: rlx.random.normal(rlx.random.key(0), 3),
    }
    for name, call in rows.items():
        print(f"{name:46} {microseconds(call):8.1f} µs")


if __name__ == "__main__":
    main()
