"""Decode steps of a GPU under other plans: one line per plan, all of which must give the same logits, bit by bit.

    python benchmarks/gpu_decode.py --models 0.6b 8b --kv 512 --parts

Each matmul shape of the model gets other rows per warp, teams, loads and blocks, one shape at a time, with the
planner's choice for the rest. `--parts` also leaves out kinds of launches, which says what they cost in the graph.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from gpu import CONTEXT, SHAPES, config, fill, kv_bytes, read_speed, seconds_of, weight_bytes, write_folder

import rlx
from rlx.backends.cuda import launch_plan
from rlx.backends.cuda.executable import PreparedProgram
from rlx.backends.cuda.gpu import gpu
from rlx.backends.cuda.matmul import generator
from rlx.backends.cuda.matmul.generator import RowsChoice
from rlx.engine.decoder import Decoder

VOCABULARY = 151_936
Shape = tuple[int, int, int]  # n, k, weights
OTHERS = [  # height, teams, loads, resident
    RowsChoice(16, 1), RowsChoice(16, 1, 16, 2), RowsChoice(16, 1, 16, 3), RowsChoice(16, 2), RowsChoice(32, 1),
    RowsChoice(32, 1, 16, 2), RowsChoice(8, 1), RowsChoice(8, 2), RowsChoice(32, 2),
    RowsChoice(32, 1, 32, 1), RowsChoice(16, 1, 32, 1), RowsChoice(16, 1, 8, 3),
]  # fmt: skip


def shapes(name: str) -> dict[str, Shape]:
    hidden, ffn, heads, _, _ = SHAPES[name]
    return {
        "qkv": ((heads + 16) * 128, hidden, 1), "o": (hidden, heads * 128, 1), "gate up": (ffn, hidden, 2),
        "down": (hidden, ffn, 1), "head": (VOCABULARY, hidden, 1),
    }  # fmt: skip


@contextmanager
def chosen(choices: dict[Shape, RowsChoice]) -> Iterator[None]:
    """Plans take these choices for their shapes."""
    own = generator.choose_rows

    def choose(n: int, k: int, weights: int, target: Any, *, once: bool) -> RowsChoice:
        return choices.get((n, k, weights)) or own(n, k, weights, target, once=once)

    with mock.patch.object(generator, "choose_rows", choose):
        launch_plan.plans.clear()
        yield
    launch_plan.plans.clear()


class Step:
    """A decode step after a filled cache, which can be planned again."""

    def __init__(self, model: Any, positions: int, batch: int) -> None:
        decoder = Decoder.start(model.compiled, model.caches.spec, batch, CONTEXT)
        fill(decoder, positions)
        for _ in range(2):
            decoder.decode([7] * batch)
        self.decoder, self.device = decoder, gpu(0)
        self.executable = model.compiled.executable
        self.key = self.executable.latest_key
        inputs = (decoder.step_inputs[name] for name in model.compiled.input_types)
        self.arrays = [model.compiled.allocator.upload(x) if isinstance(x, np.ndarray) else x for x in inputs]

    def time(self, repeats: int = 30, skipped: Callable[[Any], bool] | None = None) -> tuple[float, bytes, Any]:
        """Seconds of a replay, and the logits."""
        self.executable.plans.clear()
        prepared = PreparedProgram(self.executable, self.key)
        if skipped is not None:
            prepared.launch_order = lambda: (
                i for i in range(len(prepared.launches)) if not skipped(prepared.launches[i])
            )  # type: ignore[method-assign]
        for _ in range(2):
            outputs = prepared.run(self.arrays)
        logits = np.asarray(outputs[0]).tobytes()
        seconds = statistics.median(seconds_of(self.device, prepared.replay, repeats))
        prepared.release()
        return seconds, logits, prepared


def sweep(step: Step, name: str, floor: float, parts: bool, others: int) -> None:
    base, logits, prepared = step.time()
    print(f"{name}: {base * 1e3:.4f} ms, {floor / base:.1%} of the floor {floor * 1e3:.3f}", flush=True)
    for launch in prepared.launches[-24:]:
        if launch.plan.passes:
            print("   ", launch)
    print(f"    again {step.time()[0] * 1e3:.4f}")
    with (
        mock.patch.object(launch_plan, "fuse_prologues", lambda planned, *_: list(planned)),
        mock.patch.object(launch_plan, "fuse_chains", lambda planned, *_: list(planned)),
    ):
        seconds, own, _ = step.time()
    print(f"    each launch by itself {seconds * 1e3:.4f}{'' if own == logits else '  OTHER BITS'}", flush=True)
    if parts:
        for kind in ("chain", "attention", "rows", "tile", "sample", "loops"):

            def is_of(launch: Any, kind: str = kind) -> bool:
                passes = launch.plan.passes
                own = launch.kernel.kind == "loops" and "sample" not in launch.kernel.symbol
                return bool(passes) and (launch.kernel.symbol.startswith(kind) or (passes[-1].variant.startswith(kind)
                                         and kind != "loops") or (kind == "loops" and own))  # fmt: skip

            without = step.time(skipped=is_of)[0]
            only = step.time(skipped=lambda x, f=is_of: not f(x))[0]
            print(f"    without {kind:10} {without * 1e3:.4f}   only {only * 1e3:.4f}", flush=True)
    best: dict[Shape, RowsChoice] = {}
    for part, shape in shapes(name).items():
        results = []
        for other in OTHERS[:others]:
            if (shape[2] == 2 and other.height < 16) or other.teams * generator.chunk_count(shape[1]) > 16:
                continue
            try:
                with chosen({shape: other}):
                    seconds, own, _ = step.time()
            except Exception as error:
                print(f"    {part:8} {other}: {type(error).__name__} {str(error)[:150]}", flush=True)
                continue
            mark = "" if own == logits else "  OTHER BITS"
            results.append((seconds, other))
            print(f"    {part:8} {other.height:2}x{other.loads:<2} teams {other.teams} resident {other.resident}: "
                  f"{seconds * 1e3:.4f} ms{mark}", flush=True)  # fmt: skip
        if results and min(results, key=lambda r: r[0])[0] < base * 0.998:
            best[shape] = min(results, key=lambda r: r[0])[1]
    with chosen(best):
        seconds = step.time()[0]
    print(f"  best of each: {seconds * 1e3:.4f} ms, {floor / seconds:.1%}  {best}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["0.6b"])
    parser.add_argument("--kv", nargs="+", type=int, default=[512])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--others", type=int, default=len(OTHERS), help="other plans per shape, at most")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    speed = read_speed(gpu(0))
    print(f"reads {speed / 1e9:,.0f} GB/s", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.models:
            folder = (args.folder or Path(temporary)) / name
            if not folder.exists():
                folder.mkdir(parents=True)
                write_folder(folder, config(name))
            model = rlx.load(folder, device="cuda", context=CONTEXT)
            for positions in args.kv:
                for batch in args.batch:
                    c = config(name)
                    floor = (weight_bytes(c) + batch * kv_bytes(c, positions)) / speed
                    sweep(Step(model, positions, batch), f"{name} kv {positions} batch {batch}".split()[0], floor,
                          args.parts, args.others)  # fmt: skip
            model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
