"""Assembly of kernels as text, and its inner loops."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlx.backends.base import backend_of
from rlx.lir.kernels import Kernel
from rlx.lir.program import Program
from rlx.target import Target

# Patterns of inner loops: multiply-adds, or at least vector instructions.
BUSY = re.compile(r"vfn?m(add|sub)|fml[as]|llvm\.fma"), re.compile(r"\b[xyz]mm\d|\bv\d+\.| x (float|double|i\d+)>")


def assembly_lines(kernel: Kernel, target: Target) -> list[str]:
    """The instructions and labels of a kernel, without directives."""
    text = backend_of(target).kernel_text([kernel], target, assembly=True)
    lines = (line.expandtabs(4) for line in text.splitlines())
    return [x for x in lines if x.strip() and (x.rstrip().endswith(":") or x.lstrip()[0] not in ".#")]


def busiest(lines: Sequence[str], count: int) -> list[str]:
    """The `count` consecutive lines of LLVM text or assembly with the most arithmetic."""
    counts = [[len(pattern.findall(line)) for line in lines] for pattern in BUSY]
    hits = next((each for each in counts if any(each)), counts[-1])
    offsets = range(max(1, len(lines) - count + 1))
    best = max(offsets, key=lambda at: (sum(hits[at : at + count]), -at))
    return list(lines[best : best + count])


def easiest(program: Program) -> Kernel | None:
    """The easiest kernel to read: the shortest one, loops before tiles."""
    kernels = program.kernels().values()
    return min(kernels, key=lambda k: (k.kind != "loops", len(k.text())), default=None)
