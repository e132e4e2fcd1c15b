"""Awkward sizes: one compiled graph with symbolic sizes, run at 0, 1, primes and the neighbours of vector widths.

Machine code takes sizes at run time, so after the first run nothing may be compiled again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from oracles import NUMPY, Array, assert_matches, expected, magnitude
from sample_graphs import limit
from targets import supported, widths

import rlx
from rlx.backends.base import kernels_compiled
from rlx.ir import registry

SIZES = (0, 1, 2, 3, 5, 7, 15, 16, 17, 31, 37, 63, 64, 65, 127, 131, 257)
FEW = (0, 1, 2, 5, 16, 17, 33, 65)
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Operand:
    """An input: its sizes (numbers, symbols or expressions), its type, its range (`high` may be a symbol)."""

    shape: tuple[int | str, ...]
    dtype: str = ""  # the type under test unless said
    low: float = -3.0
    high: float | str = 3.0

    def array(self, rng: np.random.Generator, sizes: Sizes, default: str) -> Array:
        shape = tuple(_size(d, sizes) for d in self.shape)
        name = self.dtype or default
        high = _size(self.high, sizes) if isinstance(self.high, str) else self.high
        if name == "bool":
            return rng.random(shape) < 0.5
        if name[0] in "iu":
            return rng.integers(int(self.low), max(int(high), int(self.low) + 1), shape).astype(NUMPY[name])
        return rng.uniform(self.low, high, shape).astype(NUMPY[name])


def _size(size: int | str, sizes: Sizes) -> int:
    return size if isinstance(size, int) else int(eval(size, {}, dict(sizes)))


@dataclass(frozen=True)
class Case:
    """An op over symbolic sizes. `view` changes operands on the way in, in the graph and in NumPy alike."""

    name: str
    op: str
    operands: tuple[Operand, ...]
    sizes: tuple[Sizes, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    view: Callable[..., Any] | None = None

    def seen(self, operands: Iterable[Any]) -> list[Any]:
        return list(operands) if self.view is None else list(self.view(*operands))


def each_axis(**usual: int) -> tuple[Sizes, ...]:
    """Every size on each axis in turn, the others as given; and every pair of a few sizes for the first two."""
    alone = [{**usual, axis: size} for axis in usual for size in SIZES]
    first, *more = usual
    pairs = [{**usual, first: a, more[0]: b} for a, b in itertools.product(FEW, FEW)] if more else []
    return tuple({tuple(s.items()): s for s in (*alone, *pairs)}.values())


def transposed(x: Any) -> Any:
    """The last axis first, of a value or an array."""
    return np.transpose(x, (2, 0, 1)) if isinstance(x, np.ndarray) else x.transpose(axes=(2, 0, 1))


def first_two(x: Any) -> Any:
    """The first two axes of three swapped."""
    return np.swapaxes(x, 0, 1) if isinstance(x, np.ndarray) else x.transpose(axes=(1, 0, 2))


def swapped(x: Any) -> Any:
    """The middle axes of four swapped."""
    return np.swapaxes(x, 1, 2) if isinstance(x, np.ndarray) else x.transpose(axes=(0, 2, 1, 3))


def arg(*shape: int | str, dtype: str = "") -> Operand:
    return Operand(shape, dtype)


def idx(*shape: int | str, below: str) -> Operand:
    return Operand(shape, "i32", 0, below)


NM, NMK = arg("n", "m"), arg("n", "m", "k")
TWO, THREE = each_axis(n=5, m=19), each_axis(n=3, m=5, k=18)
ROPE = (arg("b", "s", 3, 24), arg("p", 8), arg("p", 8), idx("b", "s", below="p"))
HEADS = (arg("b", "s", 4, 16), arg("b", "t", 2, 16), arg("b", "t", 2, 16))

SCANS = ("softmax", "sum", "max", "cumsum")

CASES = [
    # -- broadcasting
    Case("same", "add", (NM, NM), TWO),
    Case("row", "add", (NM, arg("m")), TWO),
    Case("column", "add", (NM, arg("n", 1)), TWO),
    Case("outer", "add", (arg("n", 1), arg(1, "m")), TWO),
    Case("scalar", "add", (arg(), NM), TWO),
    Case("middle", "add", (NMK, arg("n", 1, "k")), THREE),
    Case("inner pair", "mul", (NMK, arg("m", "k")), THREE),
    Case("both sides", "sub", (arg("n", 1, "k"), arg("m", 1)), THREE),
    Case("three ways", "where", (arg("n", 1, dtype="bool"), arg("m"), arg(1, "m")), TWO),
    # -- reductions and scans
    *(Case(f"axis {a}", op, (NMK,), THREE, {"axis": a}) for op in SCANS for a in range(3)),
    *(Case(f"axis {a}", "argmax", (NMK,), THREE, {"axis": a, "keepdims": True}) for a in range(3)),
    Case("all axes", "sum", (NMK,), THREE),
    Case("outer axes", "mean", (NMK,), THREE, {"axis": (0, 2)}),
    Case("inner axes", "min", (NMK,), THREE, {"axis": (1, 2), "keepdims": True}),
    Case("all axes", "prod", (Operand(("n", "m"), low=0.9, high=1.1),), TWO),
    Case("transposed", "max", (NMK,), THREE, {"axis": -1}, view=lambda x: [transposed(x)]),
    Case("every other", "sum", (NM,), TWO, {"axis": 1}, view=lambda x: [x[:, ::2]]),
    Case("exclusive", "cumsum", (NM,), TWO, {"axis": 0, "exclusive": True}),
    Case("three", "topk", (NM,), tuple(s for s in TWO if s["m"] >= 3), {"k": 3}),
    # -- norms
    *(Case("scaled", op, (NM, arg("m"), arg("m")), TWO) for op in ("layer_norm", "rms_norm")),
    *(Case("plain", op, (NMK,), THREE) for op in ("layer_norm", "rms_norm")),
    Case("columns", "layer_norm", (NM,), TWO, view=lambda x: [x.mT]),
    # -- products
    Case("plain", "matmul", (arg("m", "k"), arg("k", "n")), each_axis(m=7, k=19, n=33)),
    Case("batched", "matmul", (arg("b", "m", 9), arg("b", 9, "n")), each_axis(b=2, m=3, n=17)),
    Case("shared weight", "matmul", (arg("b", "m", "k"), arg("k", 70)), each_axis(b=2, m=3, k=17)),
    Case("both transposed", "matmul", (arg("k", "m"), arg("n", "k")), each_axis(m=7, k=19, n=33),
         view=lambda a, b: [a.mT, b.mT]),
    Case("parts", "matmul", (arg("m", "k", 3), arg("k", 40)), each_axis(m=7, k=19),
         view=lambda a, b: [a[::2, :, 1], b[:, 3:37]]),
    Case("swapped batch", "matmul", (arg("m", "b", 9), arg(9, "b", "n")), each_axis(b=2, m=3, n=17),
         view=lambda a, b: [first_two(a), first_two(b)]),
    Case("outer batch", "matmul", (arg("b", 1, "m", 5), arg("c", 5, 6)), each_axis(b=2, c=3, m=4)),
    Case("integers", "matmul", (arg("m", "k", dtype="i32"), arg("k", "n", dtype="i32")), each_axis(m=3, k=5, n=17)),
    # -- indexing
    Case("rows", "gather", (arg("t", "m"), idx("n", below="t")), each_axis(n=5, m=19, t=7)),
    Case("columns", "gather", (arg("m", "t"), idx("n", below="t")), each_axis(n=5, m=19, t=7), {"axis": 1}),
    Case("middle", "gather", (arg("m", "t", 3), idx("n", 2, below="t")), each_axis(n=5, m=3, t=7), {"axis": 1}),
    Case("rows", "scatter_add", (arg("t", "m"), idx("n", below="t"), arg("n", "m")),
         each_axis(n=5, m=19, t=7)),
    Case("vector", "scatter_add", (arg("t"), idx("n", below="t"), arg("n")), each_axis(n=5, t=7)),
    Case("views", "gather", (arg("m", "t"), idx("n", 4, below="t")), each_axis(n=5, m=19, t=7),
         view=lambda x, i: [x.mT, i[::2, 1:3]]),
    Case("views", "scatter_add", (arg("m", "t"), idx("n", 2, below="t"), arg("m", "n")),
         each_axis(n=5, m=19, t=7), view=lambda x, i, u: [x.mT, i[:, 1], u.mT]),
    Case("a view", "topk", (arg("m", "n"),), tuple(s for s in TWO if s["m"] >= 3), {"k": 2},
         view=lambda x: [x.mT]),
    # -- moving elements
    Case("rows", "concatenate", (NM, arg(2, "m"), arg("k", "m")), each_axis(n=3, m=5, k=4)),
    Case("columns", "concatenate", (NM, arg("n", "k"), NM), each_axis(n=3, m=5, k=4), {"axis": 1}),
    Case("views", "concatenate", (NM, arg("m", "n")), TWO, view=lambda x, y: [x, y.mT]),
    Case("both sides", "pad", (NM,), TWO, {"low": (1, 3), "high": (2, 0), "value": 2.5}),
    Case("a view", "pad", (NM,), TWO, {"low": (0, 2), "high": (0, 1)}, view=lambda x: [x.mT]),
    Case("plus transposed", "add", (NM, arg("m", "n")), TWO, view=lambda x, y: [x, y.mT]),
    Case("turned about", "mul", (NMK, NMK), THREE, view=lambda x, y: [transposed(x), transposed(y)]),
    Case("steps", "neg", (NM,), TWO, view=lambda x: [x[::2, ::3]]),
    Case("parts", "add", (NM,), tuple(s for s in TWO if s["m"] >= 2), view=lambda x: [x[:, 1:], x[:, :-1]]),
    Case("a column", "exp", (NM,), tuple(s for s in TWO if s["m"] >= 1), view=lambda x: [x[:, 0]]),
    Case("flat", "add", (NMK, arg("k")), THREE,
         view=lambda x, y: [x.reshape(x.shape[0] * x.shape[1], x.shape[2]), y]),
    # -- positions and attention
    *(Case(style, "rope", ROPE, each_axis(b=2, s=5, p=9), {"style": style}) for style in ("halves", "pairs")),
    Case("views", "rope", (arg("b", 5, "s", 24), *ROPE[1:3], idx("s", "b", below="p")), each_axis(b=2, s=5, p=9),
         view=lambda x, c, s, p: [swapped(x)[:, :, 1:4], c, s, p.mT]),
    Case("full", "attention", HEADS, each_axis(s=5, t=7, b=2)),
    Case("causal", "attention", HEADS, each_axis(s=5, t=70, b=1), {"mask_kind": "causal"}),
    Case("sliding", "attention", HEADS, each_axis(s=5, t=70, b=1), {"mask_kind": "sliding(6)"}),
    Case("padding", "attention", (*HEADS, arg("b", "t", dtype="bool")), each_axis(s=5, t=7, b=2),
         {"mask_kind": "custom"}),
    Case("parts of one tensor", "attention", (arg("b", "t", 8, 16),), each_axis(t=7, b=2),
         {"mask_kind": "causal"}, view=lambda x: [x[:, :, :4], x[:, :, 4:6], x[:, :, 6:]]),
    Case("heads first", "attention", (arg("b", 4, "s", 16), arg("b", 2, "t", 16), arg("b", 2, "t", 24)),
         each_axis(s=5, t=7, b=2), view=lambda q, k, v: [swapped(q), swapped(k), swapped(v)]),
    Case("views of masks", "attention", (*HEADS, arg("t", "b", dtype="bool")), each_axis(s=5, t=7, b=2),
         {"mask_kind": "custom"}, view=lambda q, k, v, m: [q, k, v, m.mT]),
    Case("bias of each query", "attention", (*HEADS, arg("s", "t", 2)), each_axis(s=5, t=7, b=2),
         {"mask_kind": "bias"}, view=lambda q, k, v, m: [q, k, v, m[:, :, 1].reshape(1, 1, *m.shape[:2])]),
    Case("bias", "attention", (*HEADS, arg("b", 4, "s", "t")), each_axis(s=5, t=7, b=2), {"mask_kind": "bias"}),
]  # fmt: skip

# The attention oracle takes a query at a time: fewer sizes.
ATTENTION_SIZES = (0, 1, 2, 17, 64, 65, 131)


def cases() -> list[Any]:
    return [pytest.param(c, id=f"{c.op}-{c.name}".replace(" ", "_")) for c in CASES]


def _wanted(case: Case, sizes: Sizes) -> bool:
    if case.op == "attention":
        return all(v in (*ATTENTION_SIZES, 5, 7, 70) for v in sizes.values())
    if "t" in sizes or "p" in sizes:  # an empty table has no index: nothing to look up then
        return sizes.get("t", sizes.get("p")) != 0 or sizes.get("n", sizes.get("s")) == 0
    return True


BEST = supported()[0].name
PLACES = [("reference", "f32"), *((t.name, "f32") for t in widths()), (BEST, "f64"), (BEST, "bf16")]


@pytest.mark.parametrize(("place", "element_type"), PLACES)
@pytest.mark.parametrize("case", cases())
def test_one_compilation_is_right_at_every_size(
    case: Case, place: str, element_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compile once, run at all sizes of the case, compare with the oracle; nothing else gets compiled."""
    if (place, element_type) == (BEST, "f32"):
        monkeypatch.setenv("RLX_CHECK", "1")  # a kernel that leaves its arrays ends the process
    graph = rlx.Graph(case.op)
    inputs = [graph.input(f"x{i}", o.shape, o.dtype or element_type) for i, o in enumerate(case.operands)]
    result = graph.apply(case.op, *case.seen(inputs), **case.attrs)
    graph.set_outputs(result if isinstance(result, tuple) else (result,))
    compiled = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    count = kernels_compiled()
    relative = limit(registry.get(case.op), element_type)
    for trial in trials(CASES.index(case), element_type):
        actual = compiled.run({f"x{i}": a for i, a in enumerate(trial.arrays)})
        for array, exact in zip(actual, trial.exact, strict=True):
            assert_matches(
                array, exact, relative=relative, least=trial.least, where=f"{case.op} {case.name} at {trial.sizes}"
            )
    assert kernels_compiled() == count


@dataclass(frozen=True)
class Trial:
    """A case at one choice of sizes: its numbers and the oracle's answer."""

    sizes: Sizes
    arrays: list[Array]
    exact: tuple[Array, ...]
    least: float


@functools.lru_cache(maxsize=4)  # a case runs in several places one after the other
def trials(index: int, element_type: str) -> list[Trial]:
    case, rng = CASES[index], np.random.default_rng(7)
    actual = []
    for sizes in case.sizes:
        if _wanted(case, sizes):
            arrays = [o.array(rng, sizes, element_type) for o in case.operands]
            seen = case.seen(arrays)
            exact = expected(case.op, seen, case.attrs)
            actual.append(Trial(sizes, arrays, exact, magnitude(case.op, seen, case.attrs)))
    return actual


@pytest.mark.parametrize("target", [t.name for t in supported()])
def test_many_axes(target: str) -> None:
    shape, order = (2, 3, 1, 2, 3, 2, 2, 3), (7, 0, 6, 1, 5, 2, 4, 3)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    graph = rlx.Graph("axes")
    a = graph.input("x", shape)
    reversed_axes = a.transpose(axes=order)
    graph.set_outputs(
        [
            reversed_axes + 1,
            reversed_axes.sum(axis=(1, 3, 5)),
            graph.softmax(reversed_axes, axis=2),
            reversed_axes[:, :, ::2],
        ]
    )
    plus, total, soft, half = rlx.compile(graph, target=target).run({"x": x})
    moved = x.transpose(order)
    np.testing.assert_array_equal(plus, moved + 1)
    np.testing.assert_allclose(total, moved.sum((1, 3, 5)), rtol=1e-6)
    np.testing.assert_allclose(soft, expected("softmax", [moved], {"axis": 2})[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(half, moved[:, :, ::2])
