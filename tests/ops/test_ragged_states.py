"""Recurrences of ragged tokens: each row has the bits that it has alone, however the rows interleave."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rlx
from rlx.errors import DTypeError, GraphError, KernelError, ShapeError

Array = npt.NDArray[Any]
DEVICES = ("reference", "toy", "cpu")
ROWS = 5
# of an op: the shapes of its operands, where tokens lead those of a capital name, that of a state, and attributes
OPS: dict[str, tuple[dict[str, tuple[int, ...]], tuple[int, ...], dict[str, int]]] = {
    "selective_scan_carry": (
        {"X": (40,), "Delta": (40,), "a": (40, 3), "B": (3,), "C": (3,), "state": (), "d": (40,)},
        (40, 3), {"state_size": 3},
    ),
    "gated_delta_net_carry": (
        {"Q": (2, 16), "K": (2, 16), "V": (2, 16), "G": (2,), "Beta": (2,), "state": ()},
        (2, 16, 16), {"state_size": 16},
    ),
    "gated_linear_attention_carry": (
        {"Q": (1, 5), "K": (1, 5), "V": (3, 20), "G": (3,), "state": ()}, (3, 5, 20), {},
    ),
    "depthwise_conv1d_causal_carry": ({"X": (40,), "weight": (40, 4), "state": ()}, (3, 40), {"kernel_size": 4}),
}  # fmt: skip
EVERY_OP = pytest.mark.parametrize("op", OPS)
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)


def graph_of(op: str, ragged: bool, leaf: str = "input") -> rlx.Graph:
    shapes, state, attrs = OPS[op]
    graph, lead = rlx.Graph(op), ("tokens",) if ragged else ("batch", "seq")
    operands: dict[str, rlx.Value] = {}
    for name, shape in shapes.items():
        if name == "state":
            operands[name] = getattr(graph, leaf)(name, ("rows" if ragged else "batch", *state))
        else:
            operands[name.lower()] = graph.input(name, (*lead, *shape) if name[0].isupper() else shape)
    if ragged:
        operands["rows"] = graph.input("rows", lead, "i32")
    elif "lengths" in rlx.ir.registry.get(op).schema.operands:
        operands["lengths"] = graph.input("lengths", ("batch",), "i32")
    return graph.set_outputs(graph.apply(op, **operands, **attrs))


@functools.cache
def compiled(op: str, device: str, ragged: bool) -> rlx.CompiledGraph:
    return rlx.compile(graph_of(op, ragged), device)


def numbers(op: str, count: int, seed: int = 0) -> dict[str, Array]:
    """Operands for so many tokens, and states of all rows; gates are below 0, keys short."""
    rng, (shapes, state, _) = np.random.default_rng([seed, count]), OPS[op]
    result = {}
    for name, shape in shapes.items():
        size = (ROWS, *state) if name == "state" else (count, *shape) if name[0].isupper() else shape
        result[name] = (rng.uniform(-1, 0, size) if name in ("G", "a") else rng.uniform(0, 0.4, size)).astype(
            np.float32
        )
    return result


def alone(op: str, device: str, arrays: dict[str, Array], rows: Array, batch: list[int]) -> tuple[Array, Array]:
    """Outputs and states of some rows with equally many tokens, as a rectangular call gives them."""
    own = [rows == row for row in batch]
    inputs = {n: np.stack([x[mine] for mine in own]) if n[0].isupper() else x for n, x in arrays.items()}
    inputs["state"] = arrays["state"][batch]
    if op == "depthwise_conv1d_causal_carry":
        inputs["lengths"] = np.array([mine.sum() for mine in own], np.int32)
    y, after = compiled(op, device, ragged=False).run(inputs)
    return np.asarray(y), np.asarray(after)


def interleaved(counts: tuple[int, ...], padding: int = 0, seed: int = 0) -> Array:
    """Row numbers of tokens in random order, some of them padding."""
    rows = np.repeat(np.arange(-1, len(counts)), (padding, *counts)).astype(np.int32)
    return np.random.default_rng(seed).permutation(rows)


# -- bits -------------------------------------------------------------------------------------------------------------
@EVERY_DEVICE
@EVERY_OP
def test_a_row_has_the_bits_that_it_has_alone(op: str, device: str) -> None:
    """Also a row of many tokens beside one of few, of which the CPU takes chunks of the first only."""
    for counts in ((70, 0, 1, 32, 31), (1, 1, 0, 1, 1), (2, 3, 0, 0, 1)):
        rows = interleaved(counts, padding=3)
        arrays = numbers(op, len(rows))
        y, after = (np.asarray(x) for x in compiled(op, device, ragged=True).run({**arrays, "rows": rows}))
        for row, count in enumerate(counts):
            if count:
                wanted = alone(op, device, arrays, rows, [row])
                np.testing.assert_array_equal(y[rows == row], wanted[0][0], f"row {row} of {counts}")
                np.testing.assert_array_equal(after[row], wanted[1][0], f"state {row} of {counts}")
            else:
                np.testing.assert_array_equal(after[row], arrays["state"][row], f"state {row} of {counts}")
        np.testing.assert_array_equal(y[rows < 0], 0)


@EVERY_DEVICE
@EVERY_OP
@pytest.mark.parametrize("width", (1, 7, 40))
def test_ragged_tokens_have_the_bits_of_rectangular_ones(op: str, width: int, device: str) -> None:
    rows = interleaved((width,) * ROWS, seed=width)
    arrays = numbers(op, len(rows))
    y, after = (np.asarray(x) for x in compiled(op, device, ragged=True).run({**arrays, "rows": rows}))
    wanted = alone(op, device, arrays, rows, [*range(ROWS)])
    for row in range(ROWS):
        np.testing.assert_array_equal(y[rows == row], wanted[0][row])
    np.testing.assert_array_equal(after, wanted[1])


@pytest.mark.parametrize("device", ("toy", "cpu"))
@EVERY_OP
def test_states_of_the_runtime_are_carried_on_in_place(op: str, device: str) -> None:
    graph = graph_of(op, ragged=True, leaf="state")
    graph.set_outputs(graph.outputs[:1])
    rows = interleaved((40, 0, 3, 1, 0), padding=1)
    arrays = numbers(op, len(rows))
    wanted = compiled(op, device, ragged=True).run({**arrays, "rows": rows})
    f = rlx.compile(graph, device)
    state = f.allocator.zeros(arrays["state"].shape, np.float32)
    f.allocator.copy(arrays["state"], state)
    (y,) = f.run({**arrays, "rows": rows, "state": state})
    np.testing.assert_array_equal(np.asarray(y), np.asarray(wanted[0]))
    np.testing.assert_array_equal(np.asarray(state), np.asarray(wanted[1]))


@EVERY_DEVICE
@EVERY_OP
def test_no_tokens_and_no_rows(op: str, device: str) -> None:
    arrays, run = numbers(op, 4), compiled(op, device, ragged=True).run
    none = {n: x[:0] if n[0].isupper() else x for n, x in arrays.items()}
    y, after = run({**none, "rows": np.zeros(0, np.int32)})
    assert np.asarray(y).size == 0
    np.testing.assert_array_equal(np.asarray(after), arrays["state"])
    y, after = run({**arrays, "state": arrays["state"][:0], "rows": np.full(4, -1, np.int32)})
    assert np.asarray(after).size == 0
    np.testing.assert_array_equal(np.asarray(y), 0)


def test_layers_share_one_list_of_tokens() -> None:
    graph, (_, state, attrs) = rlx.Graph("layers"), OPS["depthwise_conv1d_causal_carry"]
    x, rows = graph.input("x", ("tokens", 40)), graph.input("rows", ("tokens",), "i32")
    for i in range(3):
        before = graph.state(f"state{i}", ("rows", *state))
        x = graph.depthwise_conv1d_causal_carry(x, graph.param(f"w{i}", (40, 4)), before, rows=rows, **attrs)[0]
    launches = rlx.compile(graph.set_outputs([x])).plan.main.launches
    assert sum("list_tokens" in launch.kernel.name for launch in launches) == 1


def test_memory_of_chunks_is_for_rows_that_can_have_one() -> None:
    """Of 64 rows, 70 tokens make whole chunks of two at most."""
    graph = graph_of("gated_delta_net_carry", ragged=True)
    sizes = [max(b.bytes for b in rlx.compile(graph).memory({"tokens": 70, "rows": n}).buffers) for n in (2, 64)]
    states = 64 * 2 * 16 * 16 * 4
    assert sizes[1] <= max(sizes[0], states)


# -- faults -----------------------------------------------------------------------------------------------------------
@EVERY_DEVICE
@EVERY_OP
@pytest.mark.parametrize("bad", (ROWS, 2**31 - 1))
def test_a_row_outside_the_states_is_an_error(op: str, bad: int, device: str) -> None:
    with pytest.raises(KernelError, match=r"row .* outside the state"):
        compiled(op, device, ragged=True).run({**numbers(op, 3), "rows": np.array([0, bad, 1], np.int32)})


def test_rows_that_do_not_fit_are_refused() -> None:
    g = rlx.Graph("faults")
    x, weight, state = g.input("x", (6, 4)), g.input("w", (4, 3)), g.input("state", (2, 2, 4))
    rows, ids, lengths = g.input("rows", (6,), "i32"), g.input("ids", (6,), "i32"), g.input("n", (2,), "i32")
    conv = functools.partial(g.depthwise_conv1d_causal_carry, x, weight, state, kernel_size=3)
    with pytest.raises(GraphError, match="lengths or rows, found both"):
        conv(lengths, rows)
    with pytest.raises(GraphError, match="lengths or rows, found neither"):
        conv()
    with pytest.raises(DTypeError, match="row numbers are integers"):
        conv(rows=rows.astype("f32"))
    with pytest.raises(ShapeError, match=r"rows is i32\[5\], expected \[6\]"):
        conv(rows=rows[:5])
    a, b = g.input("a", (4, 3)), g.input("b", (6, 3))
    scan = functools.partial(g.selective_scan_carry, x, x, a, b, b, g.input("h", (2, 4, 3)), state_size=3)
    with pytest.raises(GraphError, match="segments or rows, found both"):
        scan(None, ids, rows)
    with pytest.raises(ShapeError, match=r"x is \[batch, seq, channels\]"):
        scan()
