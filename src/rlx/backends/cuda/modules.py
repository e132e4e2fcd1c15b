"""Kernels on a GPU: CUDA C of the variants that a plan needs, compiled in a few translation units and loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlx.backends.cuda.generators import generator
from rlx.backends.cuda.gpu import Function, Gpu
from rlx.backends.cuda.kernel_plan import AnyKernel, entry
from rlx.backends.cuda.prelude import PRELUDE
from rlx.backends.cuda.targets import CudaTarget

Variant = tuple[AnyKernel, str, int]  # kernel, variant, most dynamic shared memory
MOST_UNITS = 8  # translation units compiled at the same time


def source(kernel: AnyKernel, variant: str, target: CudaTarget) -> str:
    """CUDA C of one variant, in a namespace of its own."""
    name = entry(kernel, variant)
    return f"namespace ns_{name} {{\n{generator(kernel).source(kernel, variant, target)}\n}}\n"


def translation_units(variants: Sequence[Variant], target: CudaTarget) -> list[tuple[str, list[Variant]]]:
    """CUDA C of variants, spread over translation units that compile at the same time."""
    count = min(MOST_UNITS, os.cpu_count() or 1, len(variants))
    ordered = sorted(variants, key=lambda v: (v[0].kind, entry(v[0], v[1])))  # the slow kinds spread evenly
    units = [ordered[i::count] for i in range(count)]
    return [(PRELUDE + "".join(source(kernel, name, target) for kernel, name, _ in unit), unit) for unit in units]


def load_variants(variants: Sequence[Variant], target: CudaTarget, device: Gpu) -> dict[tuple[str, str], Function]:
    """The functions of variants on a GPU, by kernel symbol and variant; compiles and loads what is missing."""
    with device.lock:
        missing = [v for v in variants if device.function(entry(v[0], v[1])) is None]
        units = translation_units(missing, target)
        with ThreadPoolExecutor(max(len(units), 1)) as pool:
            built = list(pool.map(lambda unit: device.build(unit[0], target.arch), units))
        for code, (_, unit) in zip(built, units, strict=True):
            device.load(code, {entry(kernel, name): shared for kernel, name, shared in unit})
    functions: dict[tuple[str, str], Function] = {}
    for kernel, name, shared in variants:
        function = device.function(entry(kernel, name))
        device.allow_shared(entry(kernel, name), shared)  # another launch may need more
        assert function is not None, "it has just been loaded"
        functions[kernel.symbol, name] = function
    return functions
