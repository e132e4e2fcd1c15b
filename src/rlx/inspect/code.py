"""Machine code of kernels as text, and the part of it that does the work."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlx.backends.base import backend_of
from rlx.lir.kernels import Kernel
from rlx.lir.program import Program
from rlx.target import Target

# What an inner loop looks like: multiply-adds, or at least vectors.
BUSY = re.compile(r"vfn?m(add|sub)|fml[as]|llvm\.fma"), re.compile(r"\b[xyz]mm\d|\bv\d+\.| x (float|double|i\d+)>")


def assembly_lines(kernel: Kernel, target: Target) -> list[str]:
    """The instructions and labels of a kernel, without directives."""
    text = backend_of(target).kernel_text([kernel], target, assembly=True)
    lines = (line.expandtabs(4) for line in text.splitlines())
    return [x for x in lines if x.strip() and (x.rstrip().endswith(":") or x.lstrip()[0] not in ".#")]


def busiest(lines: Sequence[str], count: int) -> list[str]:
    """The `count` lines of LLVM text or assembly that do most of the arithmetic."""
    found = [[len(pattern.findall(line)) for line in lines] for pattern in BUSY]
    hits = next((each for each in found if any(each)), found[-1])
    starts = range(max(1, len(lines) - count + 1))
    best = max(starts, key=lambda at: (sum(hits[at : at + count]), -at))
    return list(lines[best : best + count])


def easiest(program: Program) -> Kernel | None:
    """The kernel that is shown where there is room for one: loops rather than tiles, and the shortest."""
    kernels = program.kernels().values()
    return min(kernels, key=lambda k: (k.kind != "loops", len(k.text())), default=None)
