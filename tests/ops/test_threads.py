"""The number of threads changes nothing: one and several give the same bits, for work large enough to be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from targets import supported

import rlx

ROWS, COLUMNS = 517, 1031  # primes: parts are uneven, and no chunk is whole
Build = Callable[[Any, Any, Any], Any]

WORK: dict[str, Build] = {
    "add": lambda g, x, i: x + x * 0.5,
    "broadcast": lambda g, x, i: x[:, :1] * x[:1],
    "gelu": lambda g, x, i: x.gelu(),
    "softmax": lambda g, x, i: x.softmax(),
    "softmax of columns": lambda g, x, i: x.softmax(axis=0),
    "sum": lambda g, x, i: x.sum(axis=1),
    "sum of columns": lambda g, x, i: x.sum(axis=0),
    "sum of all": lambda g, x, i: x.sum(),
    "max of columns": lambda g, x, i: x.max(axis=0),
    "argmax": lambda g, x, i: x.argmax(),
    "topk": lambda g, x, i: x.topk(k=3)[1],
    "cumsum": lambda g, x, i: x.cumsum(axis=0),
    "layer_norm": lambda g, x, i: x.layer_norm(),
    "rms_norm": lambda g, x, i: x.rms_norm(),
    "matmul": lambda g, x, i: x @ x.mT,
    "matmul and more": lambda g, x, i: (x.mT @ x[:, :70] + 1).silu(),
    "batched matmul": lambda g, x, i: x[:512, :1024].reshape(8, 64, 1024) @ x[:512, :1024].reshape(8, 64, 1024).mT,
    "gather": lambda g, x, i: g.gather(x, i),
    "scatter_add": lambda g, x, i: g.scatter_add(x, i, x),
    "concatenate": lambda g, x, i: g.concatenate([x, x * 2], axis=1),
    "transpose": lambda g, x, i: x.mT,
    "attention": lambda g, x, i: g.attention(
        *(x[:512, :1024].reshape(2, 256, 8, 128) * c for c in (0.1, 0.2, 1.0)), mask_kind="causal"
    ),
    "chain": lambda g, x, i: ((x.layer_norm() @ x.mT).softmax() @ x + x).rms_norm().sum(axis=0),
}


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("target", [t.name for t in supported()])
@pytest.mark.parametrize("name", WORK)
def test_one_thread_and_several_give_the_same_bits(name: str, target: str) -> None:
    rng = np.random.default_rng(11)
    arrays = {
        "x": rng.uniform(-2, 2, (ROWS, COLUMNS)).astype(np.float32),
        "i": rng.integers(0, ROWS, ROWS).astype(np.int32),
    }
    graph = rlx.Graph(name.replace(" ", "_"))
    x, i = graph.input("x", (ROWS, COLUMNS)), graph.input("i", (ROWS,), "i32")
    graph.set_outputs(WORK[name](graph, x, i))
    results = [rlx.compile(graph, target=target, threads=n).run(arrays)[0] for n in (1, 2, 3)]
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
