"""Loop kernels on a GPU: elementwise ops, norms, softmax, reductions and sampling, against the speed of a copy.

    python benchmarks/gpu_loops.py --json results.json

Each case is a graph of one op; its launches are captured as one CUDA graph. Bytes are those of inputs and outputs, each
once. Random numbers; cases of many rows are larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.backends.cuda.gpu import Gpu, gpu
from rlx.backends.cuda.launch_plan import SCRATCH, PlannedLaunch, plan_launches, variants
from rlx.backends.cuda.modules import load_variants
from rlx.lir.module import plan_lir
from rlx.lir.program import Program
from rlx.profile import CompileProfile
from rlx.types import evaluate

REPEATS = 20
VOCABULARY = 151_936
Build = Callable[[rlx.Graph], Any]


@dataclass(frozen=True)
class Case:
    """A graph by name; settings of sampling are inputs with these values."""

    name: str
    build: Build
    values: tuple[tuple[str, float], ...] = ()


def wide(op: str, dtype: str, *shape: int) -> Build:
    return lambda g: getattr(g.input("x", shape, dtype), op)()


def norm(dtype: str, *shape: int) -> Build:
    return lambda g: g.rms_norm(g.input("x", shape, dtype), g.input("gamma", (shape[-1],), dtype))


def reduced(op: str, dtype: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> Build:
    return lambda g: getattr(g.input("x", shape, dtype), op)(axis=axes)


def sampled(g: rlx.Graph) -> Any:
    kinds = (("uniform", "f64"), ("temperature", "f32"), ("top_k", "i32"), ("top_p", "f64"), ("min_p", "f32"))
    operands = [g.input("logits", (1, VOCABULARY)), *(g.input(name, (1,), kind) for name, kind in kinds)]
    return list(g.apply("sample_tokens", *operands))


def sampling(name: str, temperature: float, top_k: int, top_p: float) -> Case:
    settings = {"uniform": 0.4, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": 0.0}
    return Case(f"sample 1 x {VOCABULARY}, {name}", sampled, tuple(settings.items()))


CASES = [
    Case("relu f32 2^27", wide("relu", "f32", 1 << 27)),
    Case("gelu bf16 2^28", wide("gelu", "bf16", 1 << 28)),
    Case("add f32 2^26", lambda g: g.input("x", (1 << 26,)) + g.input("y", (1 << 26,))),
    Case("add bias bf16 65536 x 4096", lambda g: g.input("x", (65536, 4096), "bf16") + g.input("y", (4096,), "bf16")),
    Case("transpose f32 8192 x 8192", lambda g: g.transpose(g.input("x", (8192, 8192)), axes=(1, 0)) * 2.0),
    Case("rms norm bf16 65536 x 4096", norm("bf16", 65536, 4096)),
    Case("rms norm bf16 262144 x 128", norm("bf16", 262144, 128)),
    Case("rms norm bf16 1 x 4096", norm("bf16", 1, 4096)),
    Case("softmax f32 16384 x 4096", lambda g: g.input("x", (16384, 4096)).softmax()),
    Case("softmax f32 4096 x 50257", lambda g: g.input("x", (4096, 50257)).softmax()),
    Case("sum f32 65536 x 2048, rows", reduced("sum", "f32", (65536, 2048), (1,))),
    Case("sum f32 65536 x 2048, columns", reduced("sum", "f32", (65536, 2048), (0,))),
    Case("sum f32 2^27, all", reduced("sum", "f32", (1 << 27,), (0,))),
    Case("max f32 1 x 151936", reduced("max", "f32", (1, VOCABULARY), (1,))),
    sampling("greedy", 0.0, 0, 1.0),
    sampling("all", 1.0, 0, 1.0),
    sampling("top 50", 1.0, 50, 1.0),
    sampling("top 0.9", 1.0, 0, 0.9),
]


class Bench:
    """A program in memory of its own."""

    def __init__(self, case: Case, device: Gpu) -> None:
        graph = rlx.Graph("case")
        outputs = case.build(graph)
        graph.set_outputs(outputs if isinstance(outputs, list) else [outputs])
        self.device = device
        self.program: Program = plan_lir(graph, device.target, CompileProfile()).main
        self.launches = plan_launches(self.program, {}, device.target)
        self.functions = load_variants(list(variants(self.launches)), device.target, device)
        self.addresses: dict[str, int] = {}
        values = dict(case.values)
        for name, buffer in self.program.buffers.items():
            size = evaluate(buffer.type.bytes, {})
            self.addresses[name] = device.allocate(max(size, 8))
            if buffer.value is not None:
                device.upload(self.addresses[name], np.ascontiguousarray(buffer.value.data))
            elif name in self.program.inputs:
                self._fill(name, size, values.get(name))
        self.fault, self.scratch = device.allocate(8), device.allocate(1 << 24)
        device.clear(self.fault, 8)
        device.clear(self.scratch, 1 << 24)
        kinds = (*self.program.inputs, *self.program.outputs)
        self.bytes = sum(evaluate(self.program.buffers[name].type.bytes, {}) for name in kinds)

    def _fill(self, name: str, size: int, value: float | None) -> None:
        """Random numbers, which repeat, or one value."""
        dtype = self.program.buffers[name].type.dtype.numpy
        rng = np.random.default_rng(0)
        numbers = rng.standard_normal(min(size // dtype.itemsize, 1 << 22)) if value is None else np.array([value])
        array = np.ascontiguousarray(numbers.astype(dtype))
        self.device.upload(self.addresses[name], array)
        done = array.nbytes
        while done < size:
            step = min(done, size - done)
            self.device.copy(self.addresses[name] + done, self.addresses[name], step)
            done += step

    def words(self, launch: PlannedLaunch) -> Any:
        words = launch.words.copy()
        for word, buffer in launch.operands:
            words[word] += self.addresses[buffer]
        for word in launch.fault_words:
            words[word] = self.fault
        if launch.plan.scratch:
            words[SCRATCH] = self.scratch
        return words

    def run(self) -> None:
        for launch in self.launches:
            words = self.words(launch)
            for one in launch.plan.passes:
                function = self.functions[launch.kernel.symbol, one.variant]
                self.device.launch(function, one.grid, one.threads, one.shared, words)

    def release(self) -> None:
        for address in (*self.addresses.values(), self.fault, self.scratch):
            self.device.free(address)


def seconds(device: Gpu, work: Callable[[], None]) -> float:
    """The median time of a CUDA graph of some work."""
    device.activate()
    work()
    with device.capture() as graphs:
        work()
    device.replay(graphs[0])
    events = [device.event()]
    for _ in range(REPEATS):
        device.replay(graphs[0])
        events.append(device.event())
    device.synchronize()
    times = sorted(device.seconds(a, b) for a, b in itertools.pairwise(events))
    device.destroy(graphs[0])
    return times[len(times) // 2]


def copy_speed(device: Gpu, size: int = 1 << 30) -> float:
    """Bytes read and written per second by a copy on the device."""
    a, b = device.allocate(size), device.allocate(size)
    time = seconds(device, lambda: device.copy(a, b, size))
    device.free(a)
    device.free(b)
    return 2 * size / time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", type=Path, help="also write results here")
    args = parser.parse_args()
    device = gpu(0)
    speed = copy_speed(device)
    print(f"{device.name}: copies {speed / 1e9:.0f} GB/s")
    results = []
    for case in CASES:
        if args.only not in case.name:
            continue
        bench = Bench(case, device)
        time = seconds(device, bench.run)
        names = ", ".join(one.variant for launch in bench.launches for one in launch.plan.passes)
        share = bench.bytes / time / speed
        print(
            f"{case.name:36} {time * 1e6:9.1f} us {bench.bytes / time / 1e9:7.0f} GB/s {share:5.2f} of a copy  {names}"
        )
        results.append({"case": case.name, "us": time * 1e6, "share_of_copy": share, "variants": names})
        bench.release()
    if args.json:
        args.json.write_text(json.dumps({"device": device.name, "copy": speed, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
