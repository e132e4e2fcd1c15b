"""Kernel records answer for themselves: which words of their argument blocks are operands, and what they compute."""

from __future__ import annotations

import pytest

from rlx.dtypes import F32, F64
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel, Kernel, MatmulKernel, TileOperand
from rlx.lir.loops import For, LoopKernel, Param

ATTENTION = AttentionKernel(F32, 16, 16, 2, "causal", 0, 0.25, 0.0, None)
TILE = (TileOperand("x0", F32, 1), TileOperand("y1", F32, 1, True))
KERNELS: dict[str, tuple[Kernel, str, str]] = {
    "loops": (LoopKernel("copy", (Param("x", F32), Param("y", F32, True)), ("n",), For("u", 1, ())), "x", "y"),
    "matmul": (MatmulKernel(F32, True, 1, None, TILE), "a b ptr0", "ptr1"),
    "grouped": (MatmulKernel(F32, True, 1, None, TILE, grouped="rows"), "a b index ptr0", "ptr1"),
    "attention": (ATTENTION, "q k v mask", "out"),
    "with lse": (AttentionKernel(F32, 16, 16, 2, "none", 0, 0.25, 0.0, None, lse=True), "q k v mask", "out lse"),
    "cached": (AttentionKernel(F32, 16, 16, 2, "causal", 0, 1.0, 0.0, None, cached=True), "q k v positions", "out"),
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
    assert MatmulKernel(F64, True, 1, None, ()).arithmetic() == "f64"
    assert AttentionGradKernel(AttentionKernel(F64, 8, 8, 1, "none", 0, 1.0, 0.0, None)).arithmetic() == "f64"
