"""Graphs with loops and branches: random ones, and one that has everything."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import rlx


def odd_graph() -> rlx.Graph:
    """A loop of unknown length over rows of unknown size, with a branch and a loop inside."""
    inner = rlx.Graph("inner")
    c, x = inner.input("c", ("batch", 5)), inner.input("x", ("batch",))
    inner.set_outputs([c + x.reshape("batch", 1), c[:, 0]])
    yes, no = rlx.Graph("yes"), rlx.Graph("no")
    yes.set_outputs([yes.input("c", ("batch", 5)).softmax(axis=1)])
    no.set_outputs([no.input("c", ("batch", 5)) * 0.5])
    body = rlx.Graph("body")
    c, w, x = body.input("c", ("batch", 5)), body.input("w", (5, 5)), body.input("x", ("batch", 5))
    (h,), (seen,) = body.scan_general([(c @ w).tanh()], inner, 5, xs=[x.mT])
    body.set_outputs([body.cond(h.sum() > 0.0, [h], yes, no), seen.sum(axis=0)])
    g = rlx.Graph("odd")
    c, w, xs = g.input("c", ("batch", 5)), g.param("w", (5, 5)), g.input("xs", ("time", "batch", 5))
    finals, ys = g.scan_general([c], body, rlx.dim("time"), broadcasts=[w], xs=[xs])
    return g.set_outputs([*finals, *ys])


@st.composite
def loop_graphs(draw: Any) -> rlx.Graph:
    """Random graphs of [3, 4] tensors with loops and branches in each other, up to three deep."""
    g = rlx.Graph("random")
    values = [g.input(f"x{i}", (3, 4)) for i in range(2)] + [g.param("w", (3, 4))]
    _grow(draw, g, values, depth=0)
    return g.set_outputs([values[-1], *values[3:6]])


def _grow(draw: Any, g: rlx.Graph, values: list[rlx.Value], depth: int) -> None:
    for _ in range(draw(st.integers(1, 4 if depth else 6))):
        a, b = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        match draw(st.integers(0, 11 if depth < 3 else 7)):
            case 0 | 1:
                values.append((a + b * 0.5).tanh())
            case 2:
                values.append(a.softmax(axis=draw(st.sampled_from([0, 1]))))
            case 3:
                values.append(((a @ b.mT) @ a).tanh())
            case 4:
                values.append(a.sum(axis=1, keepdims=True).tanh() + b)
            case 5:
                values.append(g.concatenate(a[1:], b[:1], axis=0))
            case 6:
                values.append(a.cumsum(axis=0) * 0.25)
            case 7:
                values.append(g.where(a > b, a, b))
            case 8 | 9:
                length = draw(st.integers(1, 4))
                body = _body(draw, depth, ["c0", "c1", "w", "x"], outputs=4)
                rows = g.concatenate(*[v.reshape(1, 3, 4) for v in (a, b, a, b)[:length]], axis=0)
                finals, ys = g.scan_general([a, b], body, length, broadcasts=[values[0]], xs=[rows], reverse=length > 2)
                values += [*finals, ys[0][0], ys[1].sum(axis=0).tanh()]
            case 10:
                yes, no = (_body(draw, depth, ["a", "b"], outputs=2) for _ in range(2))
                far = a[0, 0] > b[0, 0] + 0.0137  # rounding decides nothing
                values += g.cond(far, [a, b], yes, no)
            case 11:
                limit = draw(st.integers(0, 4))
                more = rlx.Graph("more")
                total, _, _ = more.input("i", ()), more.input("c", (3, 4)), more.input("w", (3, 4))
                more.set_outputs([total < float(draw(st.integers(0, 4)))])
                body = rlx.Graph("while")
                i, *inner = body.input("i", ()), body.input("c", (3, 4)), body.input("w", (3, 4))
                _grow(draw, body, inner, depth + 1)
                body.set_outputs([i + 1.0, inner[-1]])
                values.append(g.while_loop((0.0, a), more, body, broadcasts=[b], max_steps=limit)[1])


def _body(draw: Any, depth: int, names: list[str], outputs: int) -> rlx.Graph:
    g = rlx.Graph("body")
    values = [g.input(n, (3, 4)) for n in names]
    _grow(draw, g, values, depth + 1)
    return g.set_outputs([values[draw(st.integers(0, len(values) - 1))] for _ in range(outputs - 1)] + [values[-1]])
