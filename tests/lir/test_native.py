"""Targets say in which type they compute: narrow floats are widened on CPUs, and stay narrow where they are native."""

from __future__ import annotations

from dataclasses import fields

import pytest
from targets import AVX512, BY_NAME

import rlx
from rlx.backends.base import backend
from rlx.dtypes import ALL, BF16, F16, F32, DType
from rlx.errors import LowerError
from rlx.lir.kernels import AttentionGradKernel, MatmulKernel
from rlx.lir.loops import Ref
from rlx.lir.module import plan_lir
from rlx.lir.program import Program
from rlx.lir.views import View
from rlx.mir.legalize import legalize
from rlx.profile import CompileProfile, Precision
from rlx.target import Target


class TensorCores(type(AVX512)):  # type: ignore[misc]
    """A machine that multiplies bf16 by bf16 and adds up in f32."""

    def native(self, dtype: DType) -> DType:
        return dtype if dtype is BF16 else super().native(dtype)


TENSOR_CORES = TensorCores(**{f.name: getattr(AVX512, f.name) for f in fields(AVX512)})


def product(kind: DType = BF16) -> rlx.Graph:
    g = rlx.Graph("product")
    x, w = g.input("x", ("n", 64), kind), g.param("w", (64, 32), kind)
    return g.set_outputs([x @ w])


def main(graph: rlx.Graph, target: Target, profile: CompileProfile | None = None) -> Program:
    return plan_lir(graph, target, profile or CompileProfile()).main


def matmuls(program: Program) -> list[MatmulKernel]:
    return [x.kernel for x in program.launches if isinstance(x.kernel, MatmulKernel)]


def test_cpus_widen_narrow_floats_and_nothing_else() -> None:
    for target in BY_NAME.values():
        assert {d: target.native(d) for d in ALL if target.native(d) is not d} == {F16: F32, BF16: F32}


def test_products_of_narrow_floats_are_cast_where_these_are_not_native() -> None:
    assert "cast" in legalize(product(), target=AVX512).text()
    assert "cast" not in legalize(product(), target=TENSOR_CORES).text()
    assert "cast" in legalize(product(F16), target=TENSOR_CORES).text()
    assert "cast" in legalize(product()).text()  # as the reference computes


def test_products_of_native_narrow_floats_reach_the_kernel_with_wide_sums() -> None:
    program = main(product(), TENSOR_CORES)
    (launch,) = program.launches
    (kernel,) = matmuls(program)
    assert (kernel.dtype, kernel.accumulator) == (BF16, F32)
    assert "(a: bf16, b: bf16 as cpu.panels(128), sums: f32)" in kernel.text()
    assert {view.dtype for view in launch.views()} == {BF16}
    (widened,) = matmuls(main(product(), AVX512))
    assert "(a: f32, b: bf16 as cpu.panels(64))" in widened.text()
    assert Program.parse(program.text(full=True)) == program


def test_an_epilogue_sees_the_wide_sums() -> None:
    g = product()
    (y,) = g.outputs
    program = main(g.set_outputs([(y + g.param("b", (32,), BF16)).relu()]), TENSOR_CORES)
    (kernel,) = matmuls(program)
    assert kernel.epilogue is not None
    assert kernel.epilogue.lets[0].value == Ref("acc", F32)
    assert kernel.epilogue.text() == "max(bf16(acc) + x0, 0.0)"
    assert len(program.launches) == 1


def test_a_precision_of_narrow_floats_reaches_the_kernel() -> None:
    profile = CompileProfile(precision=Precision(compute="bf16"))
    assert {k.dtype for k in matmuls(main(product(F32), TENSOR_CORES, profile))} == {BF16}
    assert {k.dtype for k in matmuls(main(product(F32), AVX512, profile))} == {F32}


def test_loops_compute_in_the_native_type() -> None:
    g = rlx.Graph("sums")
    g.set_outputs([g.input("x", ("n",), BF16) + g.input("y", ("n",), BF16)])
    (narrow,), (wide,) = main(g, TENSOR_CORES).launches, main(g, AVX512).launches
    assert "f32" not in narrow.kernel.text()
    assert "f32(x0[j])" in wide.kernel.text()


def test_gradients_of_attention_read_native_tensors_and_wide_sums() -> None:
    g = rlx.Graph("attention")
    q, k, v = (g.input(name, (2, "seq", 2, 16), BF16) for name in "qkv")
    g.set_outputs([g.one("attention", q, k, v).astype(F32).sum()])
    graph = rlx.transforms.value_and_grad(g, ["q", "k", "v"])
    (launch,) = (x for x in main(graph, TENSOR_CORES).launches if isinstance(x.kernel, AttentionGradKernel))
    types = {name: v.dtype for name, v in zip(launch.kernel.words, launch.words, strict=True) if isinstance(v, View)}
    assert {types[name] for name in ("q", "k", "v", "dy", "dq", "dk", "dv")} == {BF16}
    assert {types[name] for name in ("lse", "delta")} == {F32}
    assert launch.kernel.attention.dtype is BF16
    (launch,) = (x for x in main(graph, AVX512).launches if isinstance(x.kernel, AttentionGradKernel))
    assert {view.dtype for view in launch.views()} == {F32}


def test_sums_and_ops_of_several_roundings_stay_wide() -> None:
    """Ops are defined in f32: what is rounded once, at the end, is not computed in bf16."""
    g = rlx.Graph("rows")
    x = g.input("x", ("n", 64), BF16)
    g.set_outputs([x.sum(axis=1), x.softmax(axis=1), g.one("rms_norm", x, eps=1e-5), x.cumsum(axis=1)])
    for launch in main(g, TENSOR_CORES).launches:
        assert "f32(x0[" in launch.kernel.text()


def test_rounding_knows_how_many_bits_a_native_float_has() -> None:
    g = rlx.Graph("round")
    g.set_outputs([g.input("x", ("n",), BF16).round()])
    (narrow,), (wide,) = main(g, TENSOR_CORES).launches, main(g, AVX512).launches
    assert "+ 128.0)" in narrow.kernel.text()
    assert "+ 8388608.0)" in wide.kernel.text()


def test_cpus_refuse_products_of_narrow_floats() -> None:
    (kernel,) = matmuls(main(product(), TENSOR_CORES))
    with pytest.raises(LowerError, match="no tiles of bf16"):
        backend("cpu").kernel_text([kernel], AVX512)
