"""Every op in every element type on the toy device, on its samples: against outside oracles."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from on_toy import run
from oracles import expected
from sample_graphs import element_types, sample_graph, user_ops

import rlx
from rlx.backends import base
from rlx.backends.toy import TOY
from rlx.dtypes import BF16, DType
from rlx.lir.kernels import Kernel
from rlx.lir.loops import LoopKernel, Reduce, expressions
from rlx.lir.module import plan_lir
from rlx.profile import CompileProfile
from rlx.target import Target

EVERY_CASE = [(op.name, name) for op in user_ops() for name in element_types(op)]


@pytest.mark.parametrize(("op", "element_type"), EVERY_CASE)
def test_an_op_gives_what_its_oracle_says(op: str, element_type: str) -> None:
    case = sample_graph(op, element_type)
    case.check(run(rlx.compile(case.graph, "toy"), case.inputs))


VIEWS = [(op, leaf) for op in ("matmul", "grouped_matmul") for leaf in ("strided", "sized", "param")]
VIEWS += [(op, leaf) for op in ("attention", "attention_grad", "cached_attention") for leaf in ("strided", "param")]


@pytest.mark.parametrize(("op", "leaf"), VIEWS)
def test_portable_forms_read_views_and_weights(op: str, leaf: str) -> None:
    case = sample_graph(op, "f32", leaf)
    toy = rlx.compile(case.graph, "toy")
    if leaf == "param":
        toy.set_params(case.inputs)
    case.check(run(toy, None if leaf == "param" else case.inputs))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 70), (1, 5, 2), (0, 3, 3), (2, 0, 4)])
def test_attention_has_sizes_of_run_time(sizes: tuple[int, int, int]) -> None:
    batch, queries, keys = sizes
    g = rlx.Graph("attention")
    q = g.input("q", ("batch", "queries", 4, 8))
    k, v = (g.input(n, ("batch", "keys", 2, 8)) for n in "kv")
    g.set_outputs(g.attention_lse(q, k, v, mask_kind="causal"))
    rng = np.random.default_rng(keys)
    shapes = {"q": (batch, queries, 4, 8), "k": (batch, keys, 2, 8), "v": (batch, keys, 2, 8)}
    arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    attrs = {"mask_kind": "causal", "scale": None, "softcap": None}
    wanted = expected("attention_lse", [*arrays.values(), None], attrs)
    for a, b in zip(run(rlx.compile(g, "toy"), arrays), wanted, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Narrow(Target):
    """A machine that computes with bf16 as it is."""

    def native(self, dtype: DType) -> DType:
        return dtype if dtype is BF16 else super().native(dtype)


@pytest.mark.parametrize("op", ["matmul", "attention", "attention_grad", "grouped_matmul"])
def test_sums_of_narrow_floats_are_wide_even_where_those_are_native(op: str) -> None:
    case = sample_graph(op, "bf16")
    target = Narrow(**{f.name: getattr(TOY, f.name) for f in fields(TOY)})
    program = plan_lir(case.graph, target, CompileProfile()).main
    assert all(e.dtype is not BF16 for k in program.kernels().values() for e in reductions(k))
    backend = base.backend("toy")
    buffers = [backend.allocator.upload(case.inputs[name]) for name in program.inputs]
    case.check([np.asarray(y) for y in backend.compile(program, target).run((), buffers)])


def reductions(kernel: Kernel) -> list[Reduce]:
    assert isinstance(kernel, LoopKernel)
    return [e for e in expressions(kernel.root) if isinstance(e, Reduce)]
