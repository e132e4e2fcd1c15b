"""Recurrences over long sequences: gradients of any length, from states at chunk ends alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numeric import Array, assert_close, evaluate

import rlx
from rlx.transforms import grad, vjp

rng = np.random.default_rng(5)
CHUNK = 64
N = 3  # of a state


def selective(seq: Any) -> rlx.Graph:
    g = rlx.Graph("selective")
    x, delta = (g.input(n, (2, seq, 4), "f64") for n in ("x", "delta"))
    a, b, c = g.input("a", (4, N), "f64"), g.input("b", (2, seq, N), "f64"), g.input("c", (2, seq, N), "f64")
    y, last = g.selective_scan_carry(x, delta, a, b, c, g.input("state", (2, 4, N), "f64"), state_size=N)
    return g.set_outputs([(y * y).sum() + last.sum()])


def delta_net(seq: Any) -> rlx.Graph:
    g = rlx.Graph("delta")
    q, k, v = (g.input(n, (1, seq, 2, N), "f64") for n in "qkv")
    gate, beta = (g.input(n, (1, seq, 2), "f64") for n in ("g", "beta"))
    y, last = g.gated_delta_net_carry(q, k, v, gate, beta, g.input("state", (1, 2, N, N), "f64"), state_size=N)
    return g.set_outputs([(y * y).sum() + last.sum()])


def arrays(graph: rlx.Graph, seq: int) -> dict[str, Array]:
    values = {}
    for node in graph.inputs:
        shape = [seq if isinstance(d, rlx.Dim) else d for d in node.types[0].shape]
        values[node.attrs["name"]] = rng.uniform(-0.5, 0.5, shape)
    for name, low in (("delta", 0.1), ("beta", 0.5), ("g", -0.6), ("a", -0.9)):
        if name in values:
            values[name] = values[name] * 0.5 + low
    return values


KINDS: list[Callable[[Any], rlx.Graph]] = [selective, delta_net]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_does_not_depend_on_how_a_sequence_is_cut(kind: Callable[[Any], rlx.Graph]) -> None:
    """Of unknown length, where everything is cut and padded, against one chunk, which is not; and at other lengths."""
    symbolic = grad(kind("seq"), [n.attrs["name"] for n in kind(1).inputs])
    for seq in (0, 1, 7, CHUNK):
        inputs = arrays(kind("seq"), seq)
        results = evaluate(symbolic, inputs, {"seq": seq})
        for a, b in zip(results, evaluate(grad(kind(seq), list(inputs)), inputs), strict=True):
            assert_close(a, b, 1e-12)
    for seq in (65, 128, 131):
        inputs = arrays(kind("seq"), seq)
        together = evaluate(symbolic, inputs, {"seq": seq})
        for a, b in zip(together, evaluate(grad(kind(seq), list(inputs)), inputs), strict=True):
            assert_close(a, b, 1e-12)
        names = list(inputs)
        direction = {n: rng.normal(size=a.shape) for n, a in inputs.items()}
        slope = sum(float((direction[n] * d).sum()) for n, d in zip(names, together, strict=True))
        h = 1e-6
        high, low = (
            float(evaluate(kind(seq), {n: a + s * direction[n] for n, a in inputs.items()})[0]) for s in (h, -h)
        )
        assert abs((high - low) / (2 * h) - slope) < 1e-6 * max(1.0, abs(slope))


def test_linear_attention_keeps_states_at_chunk_ends_only() -> None:
    seq = 5 * CHUNK
    g = rlx.Graph("attention")
    q, k, v = (g.input(n, (2, seq, 4, N), "f64") for n in "qkv")
    gate, state = g.input("g", (2, seq, 4), "f64"), g.input("state", (2, 4, N, N), "f64")
    y, last = g.gated_linear_attention_carry(q, k, v, gate, state)
    gradient = vjp(g.set_outputs([(y * y).sum() + last.sum()]), "state")
    scans = [n for n in gradient.nodes if n.op == "scan"]
    saved = sum(int(n.attrs["length"]) for n in scans for o in n.attrs["body"].outputs[n.attrs["carries"] :]
               if o.shape == (2, 4, N, N))  # fmt: skip
    assert saved == seq // CHUNK
    forward, back = scans
    assert forward.attrs["length"] == back.attrs["length"] == 5
    inside = [n for n in back.attrs["body"].nodes if n.op == "scan"]
    assert [n.attrs["length"] for n in inside] == [CHUNK, CHUNK]
    ops = {n.op for n in forward.attrs["body"].nodes}
    assert "gated_linear_attention_carry" in ops, "the forward pass runs the op itself on each chunk"
