"""Loops and branches: what they mean, on both devices, against NumPy in float64 and against the same steps unrolled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np
import pytest
from cpu_internals import set_barrier_cost
from graphs import examples
from hypothesis import given
from hypothesis import strategies as st

import rlx
from rlx.errors import BindError, DTypeError, GraphError, ShapeError
from rlx.ir.rewrite import inline

Array = np.ndarray[Any, Any]
f32 = np.float32
rng = np.random.default_rng(4)


def numbers(*shape: int) -> Array:
    return rng.uniform(-1, 1, shape).astype(f32)


def body_of(name: str, inputs: dict[str, Any], build: Callable[..., Any]) -> rlx.Graph:
    """A body: inputs by name with a shape, or a shape and an element type."""
    g = rlx.Graph(name)
    values = [g.input(n, *s) if s and isinstance(s[-1], str) and isinstance(s[0], tuple) else g.input(n, s)
              for n, s in inputs.items()]  # fmt: skip
    built = build(*values)
    return g.set_outputs(built if isinstance(built, (tuple, list)) else [built])


def run_everywhere(g: rlx.Graph, inputs: dict[str, Array], params: dict[str, Array] | None = None) -> list[Array]:
    """What the CPU gives on 1 thread; on 2 the same bits, from the reference the same numbers.

    Loops as small as these run on one thread even where there are 2, unless barriers cost nothing.
    """
    results = []
    for device, threads, barrier in (("cpu", 1, 200.0), ("cpu", 2, 200.0), ("cpu", 2, -1.0), ("reference", None, 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            set_barrier_cost(patch, barrier)
            f = rlx.compile(g, device, threads=threads)
            f.set_params(params or {})
            results += [f.run(inputs), f.run(inputs)]  # the second finds everything as the first found it
    *machine, wanted, _ = results
    for actual in machine:
        for a, b, c in zip(actual, results[0], wanted, strict=True):
            assert a.dtype == b.dtype == c.dtype and a.shape == b.shape == c.shape
            assert a.tobytes() == b.tobytes(), "neither threads nor runs before change a bit"
            np.testing.assert_allclose(a.astype(np.float64), c.astype(np.float64), rtol=2e-5, atol=2e-6)
    return results[0]


def close(actual: Array, wanted: Any, tolerance: float = 1e-5) -> None:
    wanted = np.asarray(wanted)
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(actual.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


# -- scans ------------------------------------------------------------------------------------------------------------
def decay() -> rlx.Graph:
    return body_of("decay", {"c": (3,)}, lambda c: c * 0.5 + 1.0)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 65])
def test_a_scan_gives_the_last_carry_and_a_trajectory_all(length: int) -> None:
    g = rlx.Graph("g")
    x = g.input("x", (3,))
    g.set_outputs([g.scan(x, decay(), length), g.scan_trajectory(x, decay(), length)])
    start = numbers(3)
    last, all_ = run_everywhere(g, {"x": start})
    carry, rows = start.astype(np.float64), []
    for _ in range(length):
        carry = carry * 0.5 + 1
        rows.append(carry)
    close(last, carry)
    close(all_, np.array(rows).reshape(length, 3))
    assert length == 0 or all_[-1].tobytes() == last.tobytes()


@pytest.mark.parametrize("reverse", [False, True])
def test_carries_broadcasts_xs_and_ys(reverse: bool) -> None:
    """An LSTM-like cell: two carries, a weight matrix, a bias, inputs; the hidden states come out too."""
    length, n, d = 7, 3, 5

    def cell(h: Any, c: Any, w: Any, bias: Any, x: Any) -> list[Any]:
        gates = h.graph.concatenate(h, x, axis=1) @ w + bias
        keep, add = gates[:, :d].sigmoid(), gates[:, d:].tanh()
        c = c * keep + add
        h = c.tanh()
        return [h, c, h, gates.sum(axis=1)]

    body = body_of("cell", {"h": (n, d), "c": (n, d), "w": (d + 4, 2 * d), "bias": (2 * d,), "x": (n, 4)}, cell)
    g = rlx.Graph("g")
    h, c, xs = g.input("h", (n, d)), g.input("c", (n, d)), g.input("xs", (length, n, 4))
    w, bias = g.param("w", (d + 4, 2 * d)), g.param("bias", (2 * d,))
    finals, ys = g.scan_general([h, c], body, length, broadcasts=[w, bias], xs=[xs], reverse=reverse)
    assert [str(v.type) for v in (*finals, *ys)] == ["f32[3, 5]", "f32[3, 5]", "f32[7, 3, 5]", "f32[7, 3]"]
    g.set_outputs([*finals, *ys])
    inputs = {"h": numbers(n, d), "c": numbers(n, d), "xs": numbers(length, n, 4)}
    weights = {"w": numbers(d + 4, 2 * d), "bias": numbers(2 * d)}
    actual = run_everywhere(g, inputs, weights)

    hh, cc, xx = (inputs[k].astype(np.float64) for k in ("h", "c", "xs"))
    ww, bb = (weights[k].astype(np.float64) for k in ("w", "bias"))
    hidden, sums = np.zeros((length, n, d)), np.zeros((length, n))
    for t in reversed(range(length)) if reverse else range(length):
        gates = np.concatenate([hh, xx[t]], axis=1) @ ww + bb
        cc = cc / (1 + np.exp(-gates[:, :d])) + np.tanh(gates[:, d:])
        hh = np.tanh(cc)
        hidden[t], sums[t] = hh, gates.sum(axis=1)
    for have, want in zip(actual, [hh, cc, hidden, sums], strict=True):
        close(have, want)


def test_a_scan_without_carries_is_a_map() -> None:
    body = body_of("square", {"x": (4,)}, lambda x: [x * x, x.sum(axis=0)])
    g = rlx.Graph("g")
    _, ys = g.scan_general([], body, 6, xs=[g.input("xs", (6, 4))])
    xs = numbers(6, 4)
    squares, sums = run_everywhere(g.set_outputs(list(ys)), {"xs": xs})
    close(squares, xs.astype(np.float64) ** 2)
    close(sums, xs.astype(np.float64).sum(axis=1))


def test_outputs_that_are_inputs_views_and_constants() -> None:
    """A carry that never changes, two that change places, a transposed carry, a row handed on, a constant."""

    def step(same: Any, a: Any, b: Any, transposed: Any, row: Any, x: Any) -> list[Any]:
        g = same.graph
        ys = [same, a, x, g.constant([1.5, 2.5]), transposed.mT[0], same + x]
        return [same, b, a, transposed.mT, x, *ys]

    shapes = {"same": (2,), "a": (2,), "b": (2,), "turned": (3, 3), "row": (2,), "x": (2,)}
    body = body_of("step", shapes, step)
    g = rlx.Graph("g")
    inits = [g.input(n, s) for n, s in shapes.items() if n != "x"]
    finals, ys = g.scan_general(inits, body, 5, xs=[g.input("xs", (5, 2))])
    g.set_outputs([*finals, *ys])
    inputs = {n: numbers(*s) for n, s in shapes.items() if n != "x"} | {"xs": numbers(5, 2)}
    actual = run_everywhere(g, inputs)
    same, a, b, transposed, xs = (inputs[n] for n in ("same", "a", "b", "turned", "xs"))
    first = [transposed.T[0] if t % 2 == 0 else transposed[0] for t in range(5)]
    wanted = [
        same, b, a, transposed.T, xs[4], np.tile(same, (5, 1)), np.array([a, b, a, b, a]), xs, [[1.5, 2.5]] * 5, first,
        same + xs,
    ]  # fmt: skip
    for have, want in zip(actual, wanted, strict=True):
        close(have, want, 0)


@pytest.mark.parametrize("element_type", ["f32", "f64", "f16", "bf16", "i32", "i64", "u8", "bool"])
def test_element_types(element_type: str) -> None:
    length = 6
    dtype = rlx.dtype(element_type).numpy

    def step(c: Any, x: Any) -> list[Any]:
        if element_type == "bool":
            new = c.graph.logical_or(~c, x)
        elif dtype.kind in "iu":
            new = c * 3 + x
        else:
            new = c * 0.5 + x
        return [new, new]

    body = body_of("step", {"c": ((3,), element_type), "x": ((3,), element_type)}, step)
    g = rlx.Graph("g")
    c, xs = g.input("c", (3,), element_type), g.input("xs", (length, 3), element_type)
    finals, ys = g.scan_general([c], body, length, xs=[xs])
    start, rows = rng.integers(0, 2, 3).astype(dtype), rng.integers(0, 2, (length, 3)).astype(dtype)
    last, actual = run_everywhere(g.set_outputs([*finals, *ys]), {"c": start, "xs": rows})
    carry = start
    for t in range(length):
        if element_type == "bool":
            carry = ~carry | rows[t]
        elif dtype.kind in "iu":
            carry = (carry * dtype.type(3) + rows[t]).astype(dtype)
        else:  # powers of two: exact in every float type
            carry = (carry.astype(np.float64) * 0.5 + rows[t].astype(np.float64)).astype(dtype)
        assert np.array_equal(actual[t], carry)
    assert np.array_equal(last, carry)


def test_symbolic_sizes_and_a_symbolic_length() -> None:
    body = body_of("step", {"c": ("batch", 4), "w": (4, 4), "x": ("batch", 4)}, lambda c, w, x: [c @ w + x, c.sum()])
    g = rlx.Graph("g")
    c, w, xs = g.input("c", ("batch", 4)), g.param("w", (4, 4)), g.input("xs", ("time", "batch", 4))
    finals, ys = g.scan_general([c], body, rlx.dim("time"), broadcasts=[w], xs=[xs])
    assert [str(v.type) for v in (*finals, *ys)] == ["f32[batch, 4]", "f32[time]"]
    g.set_outputs([*finals, *ys])
    weight = numbers(4, 4) / 4  # else 65 steps blow up errors too
    f = rlx.compile(g)
    f.set_param("w", weight)
    for batch, time in [(1, 1), (3, 4), (2, 7), (5, 0), (0, 3), (3, 65)]:
        inputs = {"c": numbers(batch, 4), "xs": numbers(time, batch, 4)}
        last, sums = f.run(inputs)
        carry, wanted = inputs["c"].astype(np.float64), []
        for row in inputs["xs"]:
            wanted.append(carry.sum())
            carry = carry @ weight + row
        close(last, carry)
        close(sums, np.array(wanted))


def test_scans_inside_scans() -> None:
    """Rows of rows: an inner scan over each outer row, its result carried on; three deep."""
    innermost = body_of("innermost", {"c": (2,), "x": (2,)}, lambda c, x: [c * 0.9 + x, c])

    def middle_step(c: Any, k: Any, x: Any) -> list[Any]:
        (last,), (seen,) = c.graph.scan_general([c], innermost, 3, xs=[x])
        return [last * k, seen.sum(axis=0)]

    middle = body_of("middle", {"c": (2,), "k": (2,), "x": (3, 2)}, middle_step)

    def outer_step(c: Any, k: Any, x: Any) -> list[Any]:
        (last,), (seen,) = c.graph.scan_general([c], middle, 4, broadcasts=[k], xs=[x], reverse=True)
        return [last + seen[0], last]

    outer = body_of("outer", {"c": (2,), "k": (2,), "x": (4, 3, 2)}, outer_step)
    g = rlx.Graph("g")
    c, k, xs = g.input("c", (2,)), g.input("k", (2,)), g.input("xs", (5, 4, 3, 2))
    finals, ys = g.scan_general([c], outer, 5, broadcasts=[k], xs=[xs])
    inputs = {"c": numbers(2), "k": numbers(2), "xs": numbers(5, 4, 3, 2)}
    last, rows = run_everywhere(g.set_outputs([*finals, *ys]), inputs)
    carry, kk, xx = (inputs[n].astype(np.float64) for n in ("c", "k", "xs"))
    wanted = []
    for t in range(5):
        seen_rows: dict[int, Array] = {}
        for u in reversed(range(4)):
            seen = np.zeros(2)
            for v in range(3):
                seen += carry
                carry = carry * 0.9 + xx[t, u, v]
            carry, seen_rows[u] = carry * kk, seen
        wanted.append(carry)
        carry = carry + seen_rows[0]
    close(last, carry)
    close(rows, wanted)


def test_matmul_softmax_norms_and_reductions_in_a_body() -> None:
    """Attention of a state over a memory, for a batch: everything but the state is the same in every step."""
    batch, keys, d, length = 2, 6, 8, 4

    def step(state: Any, memory: Any, w: Any, gamma: Any) -> list[Any]:
        scores = (state @ w) @ memory.mT
        read = (scores * d**-0.5).softmax(axis=-1) @ memory
        new = (state + read).rms_norm(gamma, eps=1e-5)
        return [new, new.max(axis=-1)]

    shapes = {"state": (batch, 1, d), "memory": (batch, keys, d), "w": (d, d), "gamma": (d,)}
    g = rlx.Graph("g")
    state, memory = (g.input(n, shapes[n]) for n in ("state", "memory"))
    w, gamma = (g.param(n, shapes[n]) for n in ("w", "gamma"))
    finals, ys = g.scan_general([state], body_of("step", shapes, step), length, broadcasts=[memory, w, gamma])
    arrays = {n: numbers(*s) for n, s in shapes.items()}
    inputs, params = ({n: arrays[n] for n in names} for names in (("state", "memory"), ("w", "gamma")))
    actual = run_everywhere(g.set_outputs([*finals, *ys]), inputs, params)
    s, m, ww, ga = (a.astype(np.float64) for a in arrays.values())
    tops = []
    for _ in range(length):
        scores = (s @ ww) @ m.swapaxes(1, 2) * d**-0.5
        power = np.exp(scores - scores.max(axis=-1, keepdims=True))
        s = s + power / power.sum(axis=-1, keepdims=True) @ m
        s = s / np.sqrt((s * s).mean(axis=-1, keepdims=True) + 1e-5) * ga
        tops.append(s.max(axis=-1))
    close(actual[0], s)
    close(actual[1], tops)


def test_a_scan_whose_result_another_reads() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (3,))
    rows = g.scan_trajectory(x * 2.0, decay(), 4)
    add = body_of("add", {"c": (3,), "x": (3,)}, lambda c, x: c + x)
    last = g.scan_with_xs(rows[0], [rows * 3.0], add, 4)
    start = numbers(3)
    (actual,) = run_everywhere(g.set_outputs([last + x]), {"x": start})
    carry, seen = start.astype(np.float64) * 2, []
    for _ in range(4):
        carry = carry * 0.5 + 1
        seen.append(carry)
    close(actual, seen[0] + 3 * sum(seen) + start)


def test_weights_alone_are_scanned_once() -> None:
    """A scan of nothing but weights belongs to the bind program."""
    g = rlx.Graph("g")
    w = g.scan(g.param("w", (3,)), decay(), 5)
    g.set_outputs([g.input("x", (3,)) + w])
    start, x = numbers(3), numbers(3)
    (actual,) = run_everywhere(g, {"x": x}, {"w": start})
    carry = start.astype(np.float64)
    for _ in range(5):
        carry = carry * 0.5 + 1
    close(actual, x + carry)
    f = rlx.compile(g)
    assert not f.plan.main.controls and f.plan.bind.controls  # type: ignore[attr-defined]


def test_a_cache_in_a_body_is_carried_by_value() -> None:
    """Appending writes in place, but not into what a loop has from outside."""

    def step(cache: Any, fixed: Any, new: Any, at: Any) -> list[Any]:
        g = cache.graph
        table = g.constant(np.zeros((1, 1), np.int32))
        other = g.kv_append(fixed, new, at, table)
        return [g.kv_append(cache, new, at, table), other.sum(axis=(0, 1, 3))]

    shapes: dict[str, Any] = {"cache": (1, 2, 6, 3), "fixed": (1, 2, 6, 3), "new": (1, 1, 2, 3)}
    body = body_of("step", shapes | {"at": ((1, 1), "i32")}, step)
    g = rlx.Graph("g")
    cache, fixed = g.input("cache", shapes["cache"]), g.input("fixed", shapes["fixed"])
    news, ats = g.input("new", (4, *shapes["new"])), g.input("at", (4, 1, 1), "i32")
    finals, ys = g.scan_general([cache], body, 4, broadcasts=[fixed * 1.5], xs=[news, ats])
    arrays = {n: numbers(*((4,) if n == "new" else ()), *s) for n, s in shapes.items()}
    places = np.array([2, 0, 5, 2], np.int32).reshape(4, 1, 1)
    last, sums = run_everywhere(g.set_outputs([*finals, *ys]), arrays | {"at": places})
    wanted, seen = arrays["cache"].astype(np.float64), []
    for new, at in zip(arrays["new"], places.ravel(), strict=True):
        wanted[0, :, at] = new[0, 0]
        once = arrays["fixed"] * 1.5
        once[0, :, at] = new[0, 0]
        seen.append(once.sum(axis=(0, 1, 3)))
    close(last, wanted, 0)
    close(sums, seen)


def test_packed_weights_in_a_body_stay_packed() -> None:
    k, n = 64, 48
    body = rlx.Graph("step")
    c, w = body.input("c", (2, k)), body.input("w", (n, k), "q8_0")
    body.set_outputs([(c @ w.dequantise().mT).tanh().pad(low=(0, 0), high=(0, k - n))])
    g = rlx.Graph("g")
    g.set_outputs([g.scan_with_bcasts_and_xs(g.input("c", (2, k)), [g.param("w", (n, k), "q8_0")], [], body, 3)])
    values = numbers(n, k)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    start = numbers(2, k)
    (actual,) = run_everywhere(g, {"c": start}, {"w": blocks})
    plain = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0).astype(np.float64)
    carry = start.astype(np.float64)
    for _ in range(3):
        carry = np.pad(np.tanh(carry @ plain.T), ((0, 0), (0, k - n)))
    close(actual, carry, 1e-4)
    main = rlx.compile(g).plan.main  # type: ignore[attr-defined]
    assert all(b.type.dtype is rlx.dtype("i16") for b in main.buffers.values() if b.kind == "weight")


def test_graphs_with_bodies_are_printed_parsed_pickled_and_told_apart() -> None:
    def graph(factor: float) -> rlx.Graph:
        g = rlx.Graph("g")
        constant = np.full(100, factor, f32)  # too long to be printed, unless all is asked for
        body = body_of("step", {"c": (100,)}, lambda c: c * c.graph.constant(constant))
        x = g.input("x", (100,))
        more = body_of("more", {"c": (100,)}, lambda c: c.sum() > 1.0)
        return g.set_outputs([g.scan(x, body, 3), g.while_loop(x, more, body), g.cond(x.sum() > 0.0, [x], body, body)])

    g = graph(0.5)
    assert rlx.Graph.parse(g.text(full=True)) == g == pickle.loads(pickle.dumps(g)) == graph(0.5) != graph(0.25)


def test_limits_inside_bodies_hold_for_the_graph() -> None:
    n = rlx.dim("n", max=4)
    g = rlx.Graph("g")
    body = body_of("step", {"c": (n,)}, lambda c: c * 2.0)
    f = rlx.compile(g.set_outputs([g.scan(g.input("c", ("n",)), body, 2)]))
    assert f.run({"c": np.ones(4, f32)})[0].tolist() == [4.0] * 4
    with pytest.raises(BindError, match="5"):
        f.run({"c": np.ones(5, f32)})


# -- while and if -----------------------------------------------------------------------------------------------------
def collatz_graph(max_steps: int | None = None) -> rlx.Graph:
    inputs: dict[str, Any] = {"n": ((), "i64"), "steps": ((), "i32")}
    more = body_of("more", inputs, lambda n, steps: n > 1)

    def step(n: Any, steps: Any) -> list[Any]:
        g = n.graph
        return [g.where((n % 2).equal(0), n // 2, n * 3 + 1), steps + 1]

    g = rlx.Graph("collatz")
    n, steps = g.while_loop((g.input("n", (), "i64"), 0), more, body_of("step", inputs, step), max_steps=max_steps)
    return g.set_outputs([n, steps])


def collatz(n: int) -> int:
    steps = 0
    while n > 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


@pytest.mark.parametrize("start", [1, 2, 3, 7, 27, 97, 871])
def test_while_counts_collatz_steps(start: int) -> None:
    n, steps = run_everywhere(collatz_graph(), {"n": np.array(start, np.int64)})
    assert n.item() == 1 and steps.item() == collatz(start)


@pytest.mark.parametrize("limit", [0, 1, 2, 110, 111, 112, 1000])
def test_while_ends_at_its_limit(limit: int) -> None:
    _, steps = run_everywhere(collatz_graph(limit), {"n": np.array(27, np.int64)})
    assert steps.item() == min(limit, 111)


def test_while_finds_roots_by_newton() -> None:
    """Square roots of a batch until all are right; the numbers are a broadcast of unknown size."""
    inputs = {"x": ("n",), "a": ("n",)}
    more = body_of("more", inputs, lambda x, a: abs(x * x - a).max() > 1e-6)
    step = body_of("step", inputs, lambda x, a: (x + a / x) * 0.5)
    g = rlx.Graph("newton")
    a = g.input("a", ("n",))
    g.set_outputs([g.while_loop(a, more, step, broadcasts=[a])])
    for n in (1, 5, 1000):
        numbers_ = rng.uniform(0.5, 2, n).astype(f32)
        (actual,) = run_everywhere(g, {"a": numbers_})
        close(actual, np.sqrt(numbers_.astype(np.float64)), 1e-6)


def test_while_in_scan_in_while() -> None:
    """Greatest common divisors of pairs, one pair a step, as often as a counter says."""
    pair: dict[str, Any] = {"a": ((), "i32"), "b": ((), "i32")}
    euclid = body_of("euclid", pair, lambda a, b: [b, a % b])
    until = body_of("until", pair, lambda a, b: b > 0)

    def step(total: Any, x: Any) -> list[Any]:
        g = total.graph
        a, _ = g.while_loop((x[0], x[1]), until, euclid)
        return [total + a, a]

    scan = body_of("scan", {"total": ((), "i32"), "x": ((2,), "i32")}, step)

    def again(i: Any, total: Any, pairs: Any) -> list[Any]:
        (total,), _ = i.graph.scan_general([total], scan, 4, xs=[pairs])
        return [i - 1, total]

    outer: dict[str, Any] = {"i": ((), "i32"), "total": ((), "i32"), "pairs": ((4, 2), "i32")}
    g = rlx.Graph("g")
    i, pairs = g.input("i", (), "i32"), g.input("pairs", (4, 2), "i32")
    left = body_of("left", outer, lambda i, total, pairs: i > 0)
    finals = g.while_loop((i, 0), left, body_of("again", outer, again), broadcasts=[pairs])
    inputs = np.array([[12, 18], [35, 21], [17, 5], [0, 4]], np.int32)
    for times in (0, 1, 3):
        i_last, total = run_everywhere(g.set_outputs(list(finals)), {"i": np.array(times, np.int32), "pairs": inputs})
        assert (i_last.item(), total.item()) == (0, times * int(np.gcd(inputs[:, 0], inputs[:, 1]).sum()))


def test_while_looks_at_a_carry_itself_or_at_a_constant() -> None:
    """The predicate is where the carry is, which alternates; a constant one leaves it to the limit."""
    inputs: dict[str, Any] = {"go": ((), "bool"), "i": ((), "i32")}
    step = body_of("step", inputs, lambda go, i: [i < 4, i + 1])
    g = rlx.Graph("g")
    go, i = g.input("go", (), "bool"), g.input("i", (), "i32")
    carried = g.while_loop((go, i), body_of("more", inputs, lambda go, i: go), step)
    always = body_of("always", inputs, lambda go, i: go.graph.constant(True))
    limited = g.while_loop((go, i), always, step, max_steps=3)
    g.set_outputs([*carried, *limited])
    for start, first in ((0, True), (3, True), (9, True), (2, False)):
        actual = run_everywhere(g, {"go": np.array(first), "i": np.array(start, np.int32)})
        more, at = first, start
        while more:
            more, at = at < 4, at + 1
        assert [v.item() for v in actual] == [more, at, start + 2 < 4, start + 3]


@pytest.mark.parametrize("flag", [True, False])
def test_if_runs_one_branch(flag: bool) -> None:
    """The other branch would fault: an index out of range."""
    inputs: dict[str, Any] = {"x": (4,), "at": ((2,), "i32")}
    risky = body_of("risky", inputs, lambda x, at: [x.gather(at), x.sum()])
    safe = body_of("safe", inputs, lambda x, at: [x[1:3] * 2.0, x[0]])
    g = rlx.Graph("g")
    x, at, which = g.input("x", (4,)), g.input("at", (2,), "i32"), g.input("which", (), "bool")
    g.set_outputs(list(g.cond(which, [x, at], risky, safe)))
    arrays = {"x": numbers(4), "at": np.array([3, 0] if flag else [99, -5], np.int32), "which": np.array(flag)}
    actual = run_everywhere(g, arrays)
    x_ = arrays["x"]
    for have, want in zip(actual, [x_[[3, 0]], x_.sum()] if flag else [x_[1:3] * 2, x_[0]], strict=True):
        close(have, want)


def test_if_in_scan_takes_the_branch_of_the_step() -> None:
    """One side hands its operand on as it is; predicates are a row of xs, so they move with the step."""
    inputs: dict[str, Any] = {"c": (3,), "w": (3, 3)}
    double = body_of("double", inputs, lambda c, w: (c.reshape(1, 3) @ w).reshape(3))
    keep = body_of("keep", inputs, lambda c, w: c)

    def step(c: Any, w: Any, which: Any) -> list[Any]:
        new = c.graph.cond(which, [c, w], double, keep)
        return [new, new + 1.0]

    body = body_of("step", {"c": (3,), "w": (3, 3), "which": ((), "bool")}, step)
    g = rlx.Graph("g")
    c, w, which = g.input("c", (3,)), g.param("w", (3, 3)), g.input("which", (6,), "bool")
    finals, ys = g.scan_general([c], body, 6, broadcasts=[w], xs=[which])
    start, weight = numbers(3), numbers(3, 3)
    choices = np.array([True, False, False, True, True, False])
    last, rows = run_everywhere(g.set_outputs([*finals, *ys]), {"c": start, "which": choices}, {"w": weight})
    carry, wanted = start.astype(np.float64), []
    for choice in choices:
        carry = carry @ weight if choice else carry
        wanted.append(carry + 1)
    close(last, carry)
    close(rows, wanted)


# -- the way back -----------------------------------------------------------------------------------------------------
def tanh_vjp() -> rlx.Graph:
    """c -> tanh(c * x) backwards; `d_output` stands between the other inputs."""

    def build(c: Any, d: Any, x: Any) -> list[Any]:
        y = (c * x).tanh()
        inner = d * (1.0 - y * y)
        return [inner * x, inner * c]

    return body_of("vjp", {"c": (3,), "d_output": (3,), "x": (3,)}, build)


def backward_in_numpy(init: Array, xs: Array, upstream: Array, all_rows: bool) -> tuple[Array, Array]:
    length = len(xs)
    carries = [init.astype(np.float64)]
    for x in xs.astype(np.float64):
        carries.append(np.tanh(carries[-1] * x))
    d, dxs = (np.zeros_like(carries[0]) if all_rows else upstream.astype(np.float64)), np.zeros((length, 3))
    for t in reversed(range(length)):
        total = d + upstream[t] if all_rows else d
        inner = total * (1 - carries[t + 1] ** 2)
        d, dxs[t] = inner * xs[t], inner * carries[t]
    return d, dxs


@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize(("length", "checkpoints"), [(1, 0), (6, 0), (6, 6), (6, 1), (6, 2), (7, 3), (10, 4), (5, 4)])
def test_a_scan_backwards_gives_all_gradients_in_one_sweep(length: int, checkpoints: int, all_rows: bool) -> None:
    forward = body_of("forward", {"c": (3,), "x": (3,)}, lambda c, x: (c * x).tanh())
    g = rlx.Graph("g")
    init, xs = g.input("init", (3,)), g.input("xs", (length, 3))
    upstream = g.input("upstream", (length, 3) if all_rows else (3,))
    both = rlx.Graph("both")
    c, x = both.input("c", (3,)), both.input("x", (3,))
    both.set_outputs([(c * x).tanh(), (c * x).tanh()])
    (_,), (trajectory,) = g.scan_general([init], both, length, xs=[xs])
    if checkpoints in (0, length):
        operands = (init, trajectory, upstream, [xs], tanh_vjp(), length)
        results = [
            g.scan_backward(*operands, save_trajectory=all_rows),
            g.scan_backward_xs(*operands, 0, save_trajectory=all_rows),
        ]
    else:
        ends = [-(-(k + 1) * length // checkpoints) - 1 for k in range(checkpoints)]
        stored = trajectory.gather(np.array(ends, np.int32))
        operands = (init, stored, upstream, [xs], tanh_vjp(), length)
        results = [
            g.scan_backward_with_checkpoints(*operands, checkpoints, forward, save_trajectory=all_rows),
            g.scan_backward_xs_with_checkpoints(*operands, 0, checkpoints, forward, save_trajectory=all_rows),
        ]
    g.set_outputs(results)
    arrays = {n: numbers(*(int(d) for d in g.named(n).shape)) for n in ("init", "xs", "upstream")}
    actual = run_everywhere(g, arrays)
    wanted = backward_in_numpy(arrays["init"], arrays["xs"], arrays["upstream"], all_rows)
    for have, want in zip(actual, wanted, strict=True):
        close(have, want)
    controls = rlx.compile(g).plan.main.controls  # type: ignore[attr-defined]
    assert len(controls) == (2 if checkpoints in (0, length) else 4), "both gradients come from one sweep"


def test_a_checkpointed_scan_is_a_scan_that_remembers() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (3,))
    checkpointed, plain = g.scan_checkpointed(x, decay(), 9, 4), g.scan(x, decay(), 9)
    a, b = run_everywhere(g.set_outputs([checkpointed, plain]), {"x": numbers(3)})
    assert a.tobytes() == b.tobytes()
    assert (checkpointed.node.attrs["checkpoints"], plain.node.attrs["checkpoints"]) == (4, 0)
    for wrong in (0, -1, 10):
        with pytest.raises(GraphError, match=f"{wrong} checkpoints for 9 steps"):
            g.scan_checkpointed(x, decay(), 9, wrong)


# -- what is refused --------------------------------------------------------------------------------------------------
def refused(error: type[GraphError], says: str, build: Callable[[rlx.Graph, rlx.Value], Any]) -> None:
    g = rlx.Graph("g")
    with pytest.raises(GraphError) as caught:
        build(g, g.input("x", (3,)))
    assert type(caught.value) is error, caught.value
    for part in says.split(";"):
        assert part.strip() in str(caught.value), f"{part.strip()!r} is not in: {caught.value}"


def with_param() -> rlx.Graph:
    g = rlx.Graph("weighted")
    return g.set_outputs([g.input("c", (3,)) + g.param("w", (3,))])


TWO = {"c": (3,), "x": (3,)}
BAD: list[tuple[str, type[GraphError], str, Callable[[rlx.Graph, rlx.Value], Any]]] = [
    ("carry shape", ShapeError, "input 'c' of graph 'b' is f32[4]; carry 0 is f32[3]",
     lambda g, x: g.scan(x, body_of("b", {"c": (4,)}, lambda c: c), 2)),
    ("carry type", DTypeError, "input 'c' of graph 'b' is i32[3]; carry 0 is f32[3]",
     lambda g, x: g.scan(x, body_of("b", {"c": ((3,), "i32")}, lambda c: c), 2)),
    ("carry that grows", ShapeError, "output 0 of graph 'b' is f32[]; carry 0 is f32[3]",
     lambda g, x: g.scan(x, body_of("b", {"c": (3,)}, lambda c: c.sum()), 2)),
    ("too few inputs", GraphError, "graph 'b' has 1 inputs; given 2: carry 0, a row of xs 0",
     lambda g, x: g.scan_with_xs(x, [g.input("xs", (2, 3))], body_of("b", {"c": (3,)}, lambda c: c), 2)),
    ("too many inputs", GraphError, "graph 'b' has 2 inputs; given 1",
     lambda g, x: g.scan(x, body_of("b", TWO, lambda c, x: c), 2)),
    ("rows", ShapeError, "xs 0 has 5 rows; length is 2",
     lambda g, x: g.scan_with_xs(x, [g.input("xs", (5, 3))], body_of("b", TWO, lambda c, x: c), 2)),
    ("rowless", ShapeError, "xs 0 is f32[]",
     lambda g, x: g.scan_with_xs(x, [g.input("xs", ())], body_of("b", TWO, lambda c, x: c), 2)),
    ("row shape", ShapeError, "input 'x' of graph 'b' is f32[3]; a row of xs 0 is f32[4]",
     lambda g, x: g.scan_with_xs(x, [g.input("xs", (2, 4))], body_of("b", TWO, lambda c, x: c), 2)),
    ("broadcast", ShapeError, "input 'x' of graph 'b' is f32[3]; broadcast 0 is f32[2, 3]",
     lambda g, x: g.scan_with_bcasts_and_xs(x, [g.input("w", (2, 3))], [], body_of("b", TWO, lambda c, x: c), 2)),
    ("length", ShapeError, "size -1 is negative", lambda g, x: g.scan(x, decay(), -1)),
    ("several values", GraphError, "graph 'b' gives 2 values; one carry",
     lambda g, x: g.scan(x, body_of("b", {"c": (3,)}, lambda c: [c, c]), 2)),
    ("no outputs", GraphError, "graph 'b' gives nothing",
     lambda g, x: g.scan_general([], rlx.Graph("b"), 2)),
    ("param", GraphError, "graph 'weighted' has the param 'w'", lambda g, x: g.scan(x, with_param(), 2)),
    ("no graph", GraphError, "its body is a int", lambda g, x: g.scan_general([x], 3, 2)),  # type: ignore[arg-type]
    ("packed carry", DTypeError, "carry 0 is q8_0[2, 32], which is packed",
     lambda g, x: g.scan(g.param("w", (2, 32), "q8_0"), decay(), 2)),
    ("packed rows", DTypeError, "xs 0 is q8_0[2, 32], which is packed",
     lambda g, x: g.scan_with_xs(x, [g.param("w", (2, 32), "q8_0")], decay(), 2)),
    ("cond gives floats", DTypeError, "what cond gives is one bool; f32[3]",
     lambda g, x: g.while_loop(x, decay(), decay())),
    ("cond gives many", DTypeError, "one bool; bool[3]",
     lambda g, x: g.while_loop(x, body_of("m", {"c": (3,)}, lambda c: c > 0), decay())),
    ("cond gives two", GraphError, "cond gives one bool; has 2 outputs",
     lambda g, x: g.while_loop(x, body_of("m", {"c": (3,)}, lambda c: [c, c]), decay())),
    ("no carry", GraphError, "needs a carry", lambda g, x: g.while_loop((), decay(), decay())),
    ("max_steps", GraphError, "max_steps is -1",
     lambda g, x: g.while_loop(x, body_of("m", {"c": (3,)}, lambda c: c.sum() > 0), decay(), max_steps=-1)),
    ("body of while", GraphError, "1 carries; has 2 outputs",
     lambda g, x: g.while_loop(x, body_of("m", {"c": (3,)}, lambda c: c.sum() > 0),
                               body_of("b", {"c": (3,)}, lambda c: [c, c]))),
    ("predicate", DTypeError, "the predicate is one bool; f32[3]", lambda g, x: g.cond(x, [x], decay(), decay())),
    ("branches", ShapeError, "output 0 of then_body is f32[3]; that of else_body is f32[]",
     lambda g, x: g.cond(x.sum() > 0, [x], decay(), body_of("b", {"c": (3,)}, lambda c: c.sum()))),
    ("branch count", GraphError, "then_body has 1 outputs; else_body has 2",
     lambda g, x: g.cond(x.sum() > 0, [x], decay(), body_of("b", {"c": (3,)}, lambda c: [c, c]))),
    ("no d_output", GraphError, "no input called 'd_output' among ['c']",
     lambda g, x: g.scan_backward(x, g.input("t", (2, 3)), x, [], decay(), 2, save_trajectory=False)),
    ("vjp inputs", GraphError, "has 3 inputs, expected 2",
     lambda g, x: g.scan_backward(x, g.input("t", (2, 3)), x, [], tanh_vjp(), 2, save_trajectory=False)),
    ("trajectory", ShapeError, "trajectory is f32[4, 3], expected f32[2, 3]",
     lambda g, x: g.scan_backward(x, g.input("t", (4, 3)), x, [g.input("xs", (2, 3))], tanh_vjp(), 2,
                                  save_trajectory=False)),
    ("upstream", ShapeError, "upstream is f32[3], expected f32[2, 3]",
     lambda g, x: g.scan_backward(x, g.input("t", (2, 3)), x, [g.input("xs", (2, 3))], tanh_vjp(), 2,
                                  save_trajectory=True)),
    ("xs_idx", GraphError, "xs_idx is 1, there are 1 xs",
     lambda g, x: g.scan_backward_xs(x, g.input("t", (2, 3)), x, [g.input("xs", (2, 3))], tanh_vjp(), 2, 1,
                                     save_trajectory=False)),
    ("forward_body", GraphError, "2 checkpoints need a forward_body",
     lambda g, x: g.scan_backward_with_checkpoints(x, g.input("t", (2, 3)), x, [g.input("xs", (4, 3))], tanh_vjp(), 4,
                                                   2, save_trajectory=False)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says", "build"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_what_does_not_fit_is_named(error: type[GraphError], says: str, build: Callable[..., Any]) -> None:
    refused(error, says, build)


# -- any body ---------------------------------------------------------------------------------------------------------
@st.composite
def bodies(draw: Any) -> tuple[rlx.Graph, int, int, int]:
    """A random body over [2, 3] tensors: numbers of carries, broadcasts and xs."""
    counts = draw(st.integers(0, 3)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    g = rlx.Graph("random")
    values = [g.input(f"i{i}", (2, 3)) for i in range(sum(counts))] or [g.constant(np.ones((2, 3), f32))]
    makers: Sequence[Callable[[Any, Any], Any]] = [
        lambda a, b: a + b, lambda a, b: a * b * 0.5, lambda a, b: a.tanh(), lambda a, b: a.softmax(axis=-1),
        lambda a, b: (a @ b.mT @ a).tanh(), lambda a, b: a - b.sum(axis=0, keepdims=True).tanh(),
        lambda a, b: a.reshape(3, 2).mT, lambda a, b: a.cumsum(axis=1) * 0.25,
        lambda a, b: a.graph.where(a > b, a, b), lambda a, b: a.graph.constant(np.full((2, 3), 0.25, f32)),
        lambda a, b: b, lambda a, b: a.mean(axis=1, keepdims=True).expand(shape=(2, 3)),
    ]  # fmt: skip
    for _ in range(draw(st.integers(0, 6))):
        a, b = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        values.append(draw(st.sampled_from(makers))(a, b))
    outputs = draw(st.integers(0 if counts[0] else 1, 2)) + counts[0]
    picked = [values[draw(st.integers(0, len(values) - 1))] for _ in range(outputs)]
    return g.set_outputs(picked), *counts


@given(bodies(), st.integers(0, 5), st.booleans(), st.booleans())
@examples(60)
def test_any_scan_equals_its_steps_unrolled(
    drawn: tuple[rlx.Graph, int, int, int], length: int, reverse: bool, weights: bool
) -> None:
    body, n, m, k = drawn
    shapes = {f"c{i}": (2, 3) for i in range(n)} | {f"b{i}": (2, 3) for i in range(m)}
    shapes |= {f"x{i}": (length, 2, 3) for i in range(k)}  # type: ignore[dict-item]

    def leaves(g: rlx.Graph) -> list[rlx.Value]:
        return [(g.param if weights and name[0] == "b" else g.input)(name, s) for name, s in shapes.items()]

    looped, unrolled = rlx.Graph("looped"), rlx.Graph("unrolled")
    values = leaves(looped)
    finals, ys = looped.scan_general(
        values[:n], body, length, broadcasts=values[n : n + m], xs=values[n + m :], reverse=reverse
    )
    looped.set_outputs([*finals, *ys])
    values = leaves(unrolled)
    state, rows = values[:n], {}
    for t in reversed(range(length)) if reverse else range(length):
        results = inline(unrolled, body, [*state, *values[n : n + m], *(x[t] for x in values[n + m :])])
        state, rows[t] = list(results[:n]), results[n:]
    stacked = []
    for i in range(len(body.outputs) - n):
        parts = [rows[t][i].reshape(1, 2, 3) for t in range(length)]
        stacked.append(unrolled.concatenate(*parts, axis=0) if parts else unrolled.constant(np.zeros((0, 2, 3), f32)))
    unrolled.set_outputs([*state, *stacked])
    arrays = {name: rng.uniform(-1, 1, s).astype(f32) for name, s in shapes.items()}
    params = {name: arrays[name] for name in shapes if weights and name[0] == "b"}
    inputs = {name: arrays[name] for name in shapes if name not in params}
    straight = rlx.compile(unrolled)
    straight.set_params(params)
    for have, want in zip(run_everywhere(looped, inputs, params), straight.run(inputs), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


def test_numbers_of_steps_and_bodies_are_checked_when_a_loop_is_built() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (2,))
    body = body_of("body", {"c": (2,)}, lambda c: c + 1.0)
    more = body_of("more", {"c": (2,)}, lambda c: c.sum() < 3.0)
    wrong: list[Callable[[], Any]] = [
        lambda: g.while_loop(x, more, body, max_steps=2.5),  # type: ignore[arg-type]
        lambda: g.scan_checkpointed(x, body, 4.0, 2),  # type: ignore[arg-type]
        lambda: g.scan_checkpointed(x, body, 4, "2"),  # type: ignore[arg-type]
        lambda: g.scan_checkpointed(x, body, 4, True),
        lambda: g.scan(x, None, 3),  # type: ignore[arg-type]
        lambda: g.scan_backward(x, g.input("t", (3, 2)), x, [], None, 3, save_trajectory=False),  # type: ignore[arg-type]
    ]
    for make in wrong:
        with pytest.raises(GraphError):
            make()
