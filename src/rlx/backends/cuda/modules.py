"""Kernels on a GPU: CUDA C of the variants that a plan needs, compiled in a few translation units and loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlx.backends.cuda.generators import generator
from rlx.backends.cuda.gpu import Function, Gpu
from rlx.backends.cuda.kernel_plan import entry
from rlx.backends.cuda.nvrtc import Cubin, compile_source
from rlx.backends.cuda.prelude import PRELUDE
from rlx.backends.cuda.targets import CudaTarget
from rlx.lir.kernels import Kernel

Variant = tuple[Kernel, str, int]  # kernel, variant, most dynamic shared memory
MOST_UNITS = 8  # translation units compiled at the same time


def source(kernel: Kernel, variant: str, target: CudaTarget) -> str:
    """CUDA C of one variant, in a namespace of its own."""
    name = entry(kernel, variant)
    return f"namespace ns_{name} {{\n{generator(kernel).source(kernel, variant, target)}\n}}\n"


def compile_variants(variants: Sequence[Variant], target: CudaTarget) -> list[tuple[Cubin, list[Variant]]]:
    """Compiles variants for a target, spread over translation units. Needs no GPU."""
    if not variants:
        return []
    count = max(1, min(MOST_UNITS, os.cpu_count() or 1, len(variants)))
    ordered = sorted(variants, key=lambda v: (v[0].kind, entry(v[0], v[1])))  # the slow kinds spread evenly
    units = [ordered[i::count] for i in range(count)]
    texts = [PRELUDE + "".join(source(kernel, name, target) for kernel, name, _ in unit) for unit in units]
    with ThreadPoolExecutor(count) as pool:
        cubins = list(pool.map(lambda text: compile_source(text, target.arch), texts))
    return list(zip(cubins, units, strict=True))


def load_variants(variants: Sequence[Variant], target: CudaTarget, device: Gpu) -> dict[tuple[str, str], Function]:
    """The functions of variants on a GPU, by kernel symbol and variant; compiles and loads what is missing."""
    with device.lock:
        missing = [v for v in variants if device.function(_key(v)) is None]
        for cubin, unit in compile_variants(missing, target):
            device.load(cubin.code, {_key(v): v[2] for v in unit})
    functions: dict[tuple[str, str], Function] = {}
    for variant in variants:
        function = device.function(_key(variant))
        assert function is not None, "it has just been loaded"
        functions[variant[0].symbol, variant[1]] = function
    return functions


def _key(variant: Variant) -> str:
    return entry(variant[0], variant[1])
