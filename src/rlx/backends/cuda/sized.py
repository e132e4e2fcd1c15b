"""Kernels with sizes as constants: strides, depths and heads that a model fixes are not read at run time.

Code that is short and waits for nothing starts its loads a microsecond earlier. A size is a constant if every run of
the program has the same, and, in launches of one token, if it is 1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from rlx.backends.cuda.kernel_plan import AnyKernel, KernelPlan, entry
from rlx.backends.cuda.targets import CudaTarget
from rlx.fast_dataclass import dataclass

Sizes = tuple[tuple[str, int], ...]  # words of a kernel and their values


@dataclass(frozen=True)
class SizedKernel:
    """A kernel some of whose words are constants. Its launches pass them all the same."""

    kernel: AnyKernel
    sizes: Sizes

    @property
    def kind(self) -> str:
        return self.kernel.kind

    @property
    def words(self) -> tuple[str, ...]:
        return self.kernel.words

    @property
    def symbol(self) -> str:
        return f"{self.kernel.symbol}.{digest(self.sizes)}"


class SizedGenerator:
    """Writes CUDA C for sized kernels, from that for all sizes."""

    def plan(self, kernel: SizedKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        raise AssertionError("kernels get their sizes after their plans")

    def source(self, kernel: SizedKernel, variant: str, target: CudaTarget) -> str:
        from rlx.backends.cuda.generators import generator

        text = generator(kernel.kernel).source(kernel.kernel, variant, target)
        return with_sizes(text.replace(entry(kernel.kernel, variant), entry(kernel, variant)), kernel.sizes)


def digest(sizes: Sizes) -> str:
    return hashlib.blake2b(repr(sizes).encode(), digest_size=4).hexdigest()


def with_sizes(source: str, sizes: Sizes) -> str:
    """CUDA C in which these fields of the parameter struct are constants."""
    head, struct, rest = re.split(r"(^struct Words\w* \{$.*?^\};$)", source, maxsplit=1, flags=re.MULTILINE | re.DOTALL)
    for name, value in sizes:
        constant = f"  i64 word_{name};\n  static constexpr i64 {name} = {value};"
        struct = struct.replace(f"\n  i64 {name};", f"\n{constant}")
    return head + struct + rest
