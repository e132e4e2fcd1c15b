"""Kernel records answer for themselves: which words of their argument blocks are operands, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_programs import plan
from targets import AVX2, AVX512

import rlx
from rlx.dtypes import F32, F64, dtype
from rlx.errors import ParseError
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel, EpilogueOperand, Kernel, MatmulKernel
from rlx.lir.loops import For, LoopKernel, Param
from rlx.lir.module import plan_lir
from rlx.lir.parse import parse_kernel
from rlx.lir.program import Launch, launch_text
from rlx.lir.text import kernel_text
from rlx.profile import CompileProfile
from rlx.types import TensorType

ATTENTION = AttentionKernel(F32, 16, 16, 2, "causal", 0, 0.25, 0.0, None)
EPILOGUE_OPERANDS = (EpilogueOperand("x0", F32, True), EpilogueOperand("y1", F32, True, True))
LAYOUT = AVX512.layout(F32, TensorType((8, 8), F32))
KERNELS: dict[str, tuple[Kernel, str, str]] = {
    "loops": (LoopKernel("copy", (Param("x", F32), Param("y", F32, True)), ("n",), For("u", 1, ())), "x", "y"),
    "matmul": (MatmulKernel(F32, LAYOUT, 1, None, EPILOGUE_OPERANDS), "a b x0", "y1"),
    "grouped": (MatmulKernel(F32, LAYOUT, 1, None, EPILOGUE_OPERANDS, grouped="rows"), "a b index x0", "y1"),
    "attention": (ATTENTION, "q k v mask", "out"),
    "with lse": (AttentionKernel(F32, 16, 16, 2, "none", 0, 0.25, 0.0, None, lse=True), "q k v mask", "out lse"),
    "cached": (
        AttentionKernel(F32, 16, 16, 2, "causal", 0, 1.0, 0.0, None, page=64),
        "q k v positions table",
        "out",
    ),
    "gradient": (AttentionGradKernel(ATTENTION), "q k v dy lse delta mask", "dq dk dv"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_says_which_words_are_operands_and_which_it_writes(name: str) -> None:
    kernel, reads, writes = KERNELS[name]
    operands = kernel.operands()
    assert {word for word, written in operands.items() if not written} == set(reads.split())
    assert {word for word, written in operands.items() if written} == set(writes.split())
    assert set(operands) <= set(kernel.words)
    assert kernel.arithmetic() == "f32"


def test_a_kernel_says_what_it_multiplies() -> None:
    assert MatmulKernel(F64, LAYOUT, 1, None, ()).arithmetic() == "f64"
    assert AttentionGradKernel(AttentionKernel(F64, 8, 8, 1, "none", 0, 1.0, 0.0, None)).arithmetic() == "f64"


@pytest.mark.parametrize(("storage", "arithmetic"), [("q4_0", "dot_u7"), ("q8_0", "dot_u8"), ("q4_k", "dot_u7")])
def test_a_layout_of_integers_says_what_is_multiplied(storage: str, arithmetic: str) -> None:
    w = TensorType((64, 512), dtype(storage))
    layouts = [AVX512.layout(F32, w, rounded=rounded) for rounded in (True, False)]
    assert [MatmulKernel(F32, layout, 1, None, ()).arithmetic() for layout in layouts] == [arithmetic, "f32"]


def test_a_field_that_text_leaves_out_has_its_default() -> None:
    """A record may gain fields without breaking saved texts."""
    text = kernel_text(ATTENTION)
    assert ", page 0" in text and ", ragged false" in text
    assert parse_kernel(text.replace(", page 0", "").replace(", ragged false", "")) == ATTENTION
    with pytest.raises(ParseError, match="line 2: fields are missing: group"):
        parse_kernel(text.replace(", group 2", ""))


def test_streams_are_part_of_a_kernel_and_of_its_text() -> None:
    kernel = parse_kernel(
        "kernel copy(x: f32) -> y: f32\n  words x, y, n\n  for i in n vector split by 64:\n    y[i*1] = x[i*1]"
    )
    assert isinstance(kernel, LoopKernel)
    streamed = replace(kernel, streams=("x",))
    assert "(x: f32 streamed) -> y: f32" in kernel_text(streamed)
    assert parse_kernel(kernel_text(streamed)) == streamed
    assert streamed.fingerprint != kernel.fingerprint


# -- launches ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama_packed", "attention_gradient", "moe"])
def test_launches_state_problems_and_backends_cut_them(tmp_path: Path, name: str) -> None:
    """Every word is an operand, a size or a stride; only loops have units, whatever a backend does with others."""
    for target in (AVX512, AVX2):
        (tmp_path / target.name).mkdir()
    wide, narrow = (plan(name, tmp_path / t.name, t).main.launches for t in (AVX512, AVX2))
    for launch in wide:
        left_out = {w for w, value in zip(launch.kernel.words, launch.words, strict=True) if value is None}
        assert left_out <= {"mask"}
        assert (launch.units is None) == (not isinstance(launch.kernel, LoopKernel))
    problems = [[replace(k, layout=None) for k in matmuls(launches)] for launches in (wide, narrow)]
    assert problems[0] == problems[1]
    assert any(k.epilogue is not None for k in problems[0]) == (name != "attention_gradient")


def matmuls(launches: Sequence[Launch]) -> list[MatmulKernel]:
    return [x.kernel for x in launches if isinstance(x.kernel, MatmulKernel)]


def test_an_epilogue_reads_as_an_expression_over_sums() -> None:
    g = rlx.Graph("g")
    x, w, b = g.input("x", ("n", 64)), g.param("w", (64, 64)), g.param("b", (64,))
    gate, up = g.param("gate", (64, 64)), g.param("up", (64, 64))
    h = (x @ w + b).gelu()
    g.set_outputs([(h @ gate).maximum(0.0) * (h @ up)])
    first, second = plan_lir(g, AVX512, CompileProfile()).main.launches
    assert launch_text(first).endswith("  epilogue gelu(acc + b)  barrier")
    assert launch_text(second).endswith("  epilogue max(acc, 0.0) * acc1")
    assert "  split" not in launch_text(first)
    kernel = matmuls([second])[0]
    assert kernel.text().splitlines() == [
        f"kernel {kernel.symbol}(a: f32, b: f32 as cpu.panels(64), 2 weights) -> y0: f32",
        "  epilogue max(acc, 0.0) * acc1",
    ]
    for line in ("matmul dtype f32, layout cpu.panels(64), weights 2,", "epilogue ", "operand y0: f32 written"):
        assert f"\n  {line}" in kernel_text(kernel)


def test_epilogues_must_end_with_what_is_stored() -> None:
    g = rlx.Graph("g")
    g.set_outputs([(g.input("x", ("n", 8)) @ g.param("w", (8, 8))).exp()])
    (launch,) = plan_lir(g, AVX2, CompileProfile()).main.launches
    text = kernel_text(launch.kernel)
    assert parse_kernel(text) == launch.kernel
    plain = text.replace(launch.kernel.symbol, "matmul")
    for change, message in (
        (plain.replace("    y0 = ", "    y1 = "), "ends with the values of y0"),
        (plain.replace("= acc", "= acc["), "line 5"),
        (plain.replace("  operand y0", "  tile y0"), "'tile' is not part of a matmul"),
        (plain.replace("cpu.panels(16)", "cpu.pans(16)"), "line 1: .*pans"),
    ):
        assert change != plain
        with pytest.raises(ParseError, match=message):
            parse_kernel(change)
