"""Where a decode step spends its time on a GPU, by kernel: `python benchmarks/gpu_trace.py FOLDER`."""

from __future__ import annotations

import collections
import sys

import numpy as np

import rlx
from rlx.backends.cuda.executable import CudaExecutable
from rlx.backends.cuda.kernel_plan import entry
from rlx.engine.decoder import Decoder

CONTEXT = 4352


def main() -> int:
    model = rlx.load(sys.argv[1], device="cuda", context=CONTEXT)
    decoder = Decoder.start(model.compiled, model.caches.spec, 1, CONTEXT)  # type: ignore[union-attr]
    decoder.prefill([np.random.default_rng(1).integers(0, 1000, 512).tolist()], [0])
    for _ in range(3):
        decoder.decode([7])
    executable = model.compiled.executable
    assert isinstance(executable, CudaExecutable)
    prepared = executable.latest
    arrays = [model.compiled.allocator.upload(x) if isinstance(x, np.ndarray) else x
              for x in (decoder.step_inputs[name] for name in model.compiled.input_types)]  # fmt: skip
    totals: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(5):
        _, trace = prepared.trace(arrays)
        for launch, (begin, end) in zip(prepared.launches, trace.launches[:, 0], strict=True):
            if launch.plan.passes:
                totals[entry(launch.kernel, launch.plan.passes[0].variant)].append(end - begin)
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1])):
        each = np.median(times) * 1e6
        print(f"{sum(times) / 5 * 1e6:9.1f} us in {len(times) // 5:4} launches, {each:7.2f} each  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
