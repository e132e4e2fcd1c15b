"""Derivatives by differences: the outside oracle of transforms, in float64 on the reference device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import rlx
from rlx.dtypes import F32, F64, DType
from rlx.errors import DTypeError
from rlx.hir.lower import lower
from rlx.ir import registry
from rlx.ir.evaluate import run
from rlx.ir.registry import Sample
from rlx.transforms import jvp, vjp, vmap

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


def evaluate(graph: rlx.Graph, arrays: Arrays, sizes: Mapping[str, int] | None = None) -> list[Array]:
    """The outputs of a verified graph, from arrays of its inputs and params."""
    return run(graph.verify(), arrays, sizes or {})


@dataclass(frozen=True)
class Case:
    """A graph, numbers for its leaves, and the floats among them."""

    graph: rlx.Graph
    arrays: dict[str, Array]

    @property
    def floats(self) -> list[str]:
        return [n for n, a in self.arrays.items() if a.dtype == np.float64]

    def random(self, names: Sequence[str], rng: np.random.Generator) -> dict[str, Array]:
        return {n: drawn(rng, self.arrays[n].shape) for n in names}


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.asarray(rng.uniform(-1, 1, shape))


def sample_case(op: str, sample: Sample) -> Case:
    """One sample of an op in f64, or in f32 if it takes nothing else; what is no float stays what it is."""
    try:
        return _sample_case(op, sample, F64)
    except DTypeError:
        return _sample_case(op, sample, F32)


def _sample_case(op: str, sample: Sample, wide: DType) -> Case:
    rng = np.random.default_rng(zlib.crc32(f"{op} {sample}".encode()))
    graph = rlx.Graph(op, level=registry.get(op).level)
    arrays: dict[str, Array] = {}
    operands: list[Any] = []
    for i, spec in enumerate(sample.operands):
        if spec is None:
            operands.append(None)
            continue
        array = spec.array(rng, wide)
        name = f"x{i}"
        is_packed = rlx.dtype(spec.dtype).is_packed
        operands.append(graph.input(name, spec.shape, spec.dtype if is_packed else array.dtype))
        arrays[name] = array
    results = graph.apply(op, *operands, **sample.attrs)
    return Case(lower(graph.set_outputs(results if isinstance(results, tuple) else [results])), arrays)


def moved(arrays: Arrays, tangents: Arrays, by: float) -> dict[str, Array]:
    return {n: a + by * tangents[n] if n in tangents else a for n, a in arrays.items()}


def by_differences(
    graph: rlx.Graph, arrays: Arrays, tangents: Arrays, sizes: Any = None, step: float = 1e-5
) -> list[Array]:
    """Directional derivatives of the float outputs: central differences, extrapolated once."""

    def slope(h: float) -> list[Array]:
        high, low = (evaluate(graph, moved(arrays, tangents, s), sizes) for s in (h, -h))
        return [(a - b) / (2 * h) for a, b, o in zip(high, low, graph.outputs, strict=True) if o.dtype.is_float]

    fine, coarse = slope(step), slope(2 * step)
    return [(4 * f - c) / 3 for f, c in zip(fine, coarse, strict=True)]


def dot(a: Sequence[Array], b: Sequence[Array]) -> float:
    return float(sum((x * y).sum() for x, y in zip(a, b, strict=True)))


def assert_close(actual: Array, wanted: Array, tolerance: float, where: str = "") -> None:
    assert actual.shape == wanted.shape, (where, actual.shape, wanted.shape)
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    error = float(np.abs(actual - wanted).max(initial=0)) / scale
    assert error <= tolerance, f"{where}: off by {error:.2e}"


def check_forward(case: Case, rng: np.random.Generator, tolerance: float = 1e-6, sizes: Any = None) -> None:
    """The JVP against differences; gives tangents in and out."""
    graph = jvp(case.graph, case.floats)
    tangents = case.random(case.floats, rng)
    inputs = dict(case.arrays) | {f"tangent_{n}": t for n, t in tangents.items()}
    tangents_out = evaluate(graph, inputs, sizes)[len(case.graph.outputs) :]
    wanted = by_differences(case.graph, case.arrays, tangents, sizes)
    assert len(tangents_out) == len(wanted)
    for a, b in zip(tangents_out, wanted, strict=True):
        assert_close(a, b, tolerance, "jvp")


def check_reverse(case: Case, rng: np.random.Generator, sizes: Any = None) -> None:
    """<ct, J t> == <Jᵀ ct, t>."""
    count = len(case.graph.outputs)
    forward, back = jvp(case.graph, case.floats), vjp(case.graph, case.floats)
    tangents = case.random(case.floats, rng)
    pushed = evaluate(forward, dict(case.arrays) | {f"tangent_{n}": t for n, t in tangents.items()}, sizes)[count:]
    shapes = [a.shape for a in pushed]
    cts = {n.attrs["name"]: drawn(rng, s) for n, s in zip(_cotangents(back, case), shapes, strict=True)}
    pulled = evaluate(back, dict(case.arrays) | cts, sizes)[count:]
    a, b = dot(list(cts.values()), pushed), dot(pulled, list(tangents.values()))
    assert abs(a - b) <= 1e-9 * max(1.0, abs(a), *(float(np.abs(p).sum()) for p in pulled)), (a, b)


def _cotangents(graph: rlx.Graph, case: Case) -> list[Any]:
    return [n for n in graph.inputs if n.attrs["name"] not in case.arrays]


def reverse_case(case: Case, rng: np.random.Generator, sizes: Any = None) -> Case:
    """The VJP of a case as a case: gradients as a function of operands and cotangents."""
    back = vjp(case.graph, case.floats)
    outputs = evaluate(case.graph, case.arrays, sizes)
    floats = [a for a, o in zip(outputs, case.graph.outputs, strict=True) if o.dtype.is_float]
    cts = {n.attrs["name"]: drawn(rng, a.shape) for n, a in zip(_cotangents(back, case), floats, strict=True)}
    back.outputs = back.outputs[len(case.graph.outputs) :]
    return Case(back, case.arrays | cts)


def check_vmap(case: Case, rng: np.random.Generator, batched: Sequence[str], size: int = 3) -> None:
    """All lanes at once against one after the other; what is not batched is shared."""
    axes = {n: int(rng.integers(0, case.arrays[n].ndim + 1)) for n in batched}
    lanes = []
    for _ in range(size):
        lane = dict(case.arrays)
        for name in batched:
            array = lane[name]
            lane[name] = rng.permutation(array.reshape(-1)).reshape(array.shape)
        lanes.append(lane)
    stacked = dict(case.arrays) | {n: np.stack([lane[n] for lane in lanes], axes[n]) for n in batched}
    out = [int(rng.integers(0, o.rank + 1)) for o in case.graph.outputs]
    results = evaluate(vmap(case.graph, axes, out, size=size), stacked)
    wanted = [evaluate(case.graph, lane) for lane in lanes]
    for i, (array, axis) in enumerate(zip(results, out, strict=True)):
        want = np.stack([w[i] for w in wanted], axis)
        np.testing.assert_allclose(array.astype(np.float64), want.astype(np.float64), rtol=1e-12, atol=1e-12)
