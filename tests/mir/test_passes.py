"""Every pass on the cases of `tests/fixtures/mir/<pass>.ir`: title, graph before, `---`, what the pass makes of it.

`pytest --update tests/mir` rewrites what comes after. Both sides are also evaluated on the same random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from targets import AVX512

from rlx import Graph
from rlx.dtypes import BF16, DType
from rlx.errors import KernelError
from rlx.ir.evaluate import run
from rlx.ir.registry import packed
from rlx.mir.canonicalize import canonicalize
from rlx.mir.cse import cse
from rlx.mir.dce import dce
from rlx.mir.expand import expand
from rlx.mir.fold_constants import fold_constants
from rlx.mir.fuse_epilogues import fuse_epilogues
from rlx.mir.fuse_norms import fuse_norms
from rlx.mir.fuse_regions import fuse_regions
from rlx.mir.hoist_weights import Hoisted, hoist_weights
from rlx.mir.int8_matmuls import int8_matmuls
from rlx.mir.legalize import legalize
from rlx.mir.merge_gate_up import merge_gate_up
from rlx.mir.merge_matmuls import merge_matmuls
from rlx.mir.merge_ropes import merge_ropes
from rlx.mir.optimise_bodies import optimise_bodies
from rlx.mir.patches_as_matmuls import patches_as_matmuls
from rlx.mir.quantise_activations import quantise_activations
from rlx.mir.quantise_norms import quantise_norms
from rlx.mir.report import FusionReport
from rlx.mir.set_precision import set_precision
from rlx.mir.unfuse import unfuse
from rlx.mir.weights_to_front import weights_to_front
from rlx.mir.widen_late import widen_late
from rlx.types import concrete

FIXTURES = Path(__file__).parent.parent / "fixtures" / "mir"
BINDING = {"n": 3, "b": 2, "s": 5}


def after_regions(graph: Graph, *, report: FusionReport) -> Graph:
    """Epilogues are made of regions."""
    return fuse_epilogues(fuse_regions(graph), report=report)


def hoisted_body(body: Graph, certain: bool) -> Hoisted:
    return hoist_weights(body, AVX512, certain=certain)


# Passes that change numbers on purpose: how far from those before, relative to the largest.
ROUNDING = {"int8_matmuls": 0.02, "quantise_activations": 0.02, "set_precision": 0.02}
PASSES: dict[str, Callable[..., Graph | Hoisted]] = {
    "canonicalize": canonicalize, "fold_constants": fold_constants, "cse": cse, "dce": dce, "legalize": legalize,
    "merge_gate_up": merge_gate_up, "merge_matmuls": merge_matmuls, "merge_ropes": merge_ropes,
    "fuse_norms": fuse_norms, "quantise_norms": quantise_norms, "fuse_regions": fuse_regions,
    "fuse_epilogues": after_regions,
    "hoist_weights": functools.partial(hoist_weights, target=AVX512), "unfuse": unfuse, "expand": expand,
    "widen_late": widen_late, "weights_to_front": weights_to_front, "patches_as_matmuls": patches_as_matmuls,
    "int8_matmuls": int8_matmuls, "quantise_activations": quantise_activations,
    "set_precision": functools.partial(set_precision, compute=BF16, mixed=True),
    "optimise_bodies": functools.partial(optimise_bodies, optimise=hoisted_body),
    "hoist_weights_as_they_are": functools.partial(hoist_weights, target=replace(AVX512, prepacks=False)),
}  # fmt: skip
REPORTS = {
    "merge_gate_up", "merge_matmuls", "merge_ropes", "fuse_norms", "quantise_norms", "fuse_regions", "fuse_epilogues",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    title: str
    before: str
    after: str


def cases(name: str) -> Iterator[Case]:
    for part in (FIXTURES / f"{name}.ir").read_text().split("=== ")[1:]:
        title, _, rest = part.partition("\n")
        before, _, after = rest.partition("\n---\n")
        yield Case(title, before, after.strip("\n"))


def apply(name: str, graph: Graph) -> tuple[str, Graph | Hoisted]:
    """What the pass prints, with its report as comments, and what it gives."""
    report = FusionReport()
    result = PASSES[name](graph, report=report) if name in REPORTS else PASSES[name](graph)
    parts = [result.main, result.bind] if isinstance(result, Hoisted) else [result]
    lines = [part.verify().text(full=True) for part in parts]
    lines += [f"# fused {f.kind}: {' + '.join(f.ops)}" for f in report.fused]
    lines += [f"# missed {m.kind}: {m.op}: {m.why}" for m in report.missed]
    return "\n".join(lines), result


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_does_what_its_fixture_says(name: str, update: bool) -> None:
    rewritten = [Case(c.title, c.before, apply(name, Graph.parse(c.before))[0]) for c in cases(name)]
    if update:
        text = "\n".join(f"=== {c.title}\n{c.before}\n---\n{c.after}\n" for c in rewritten)
        (FIXTURES / f"{name}.ir").write_text(text)
    for have, want in zip(rewritten, cases(name), strict=True):
        assert have == want, have.title
        assert Graph.parse(have.before).text(full=True) == have.before, "before is printed as the printer does"


def numbers(rng: np.random.Generator, shape: tuple[int, ...], d: DType) -> np.ndarray[Any, Any]:
    if d.is_float:
        return rng.uniform(-2, 2, shape).astype(d.numpy)
    if d.is_packed:
        return packed(str(d), *shape).array(rng)
    return rng.integers(0, 2 if d.is_bool else 5, shape).astype(d.numpy)


@pytest.mark.parametrize(
    ("name", "case"), [(n, c) for n in PASSES for c in cases(n)], ids=lambda x: getattr(x, "title", x)
)
def test_a_pass_keeps_what_the_graph_means(name: str, case: Case) -> None:
    graph = Graph.parse(case.before)
    rng = np.random.default_rng(0)
    leaves = {
        n.attrs["name"]: numbers(rng, concrete(n.types[0].shape, BINDING), n.types[0].dtype)
        for n in (*graph.inputs, *graph.params)
    }
    try:
        before = run(graph, leaves, BINDING)
    except KernelError:
        return  # the graph has a fault on purpose
    result = apply(name, graph)[1]
    if isinstance(result, Hoisted):
        leaves |= zip(result.derived, run(result.bind, leaves, BINDING), strict=True)
        result = result.main
    # NumPy's products depend on their widths.
    exact = (
        name not in ("merge_gate_up", "merge_matmuls", "patches_as_matmuls", "optimise_bodies") and "hoist" not in name
    )
    for have, want in zip(run(result, leaves, BINDING), before, strict=True):
        assert have.dtype == want.dtype
        if name in ROUNDING:
            assert np.abs(have.astype(float) - want).max() <= ROUNDING[name] * np.abs(want).max()
            continue
        np.testing.assert_allclose(
            have.astype(float), want.astype(float), rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
        )
