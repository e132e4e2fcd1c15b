"""How long a user waits before the first result: import, build, compile, bind weights, first run; cold and warm.

Each measurement is a fresh process. Cold has an empty cache folder (RLX_CACHE), warm is a second process on the same
folder. Binding and the first run are timed too, so that work which is merely put off still shows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = ("import", "build", "compile", "bind", "first run", "second run")
WAIT = ("import", "build", "compile")
GRAPHS: dict[str, dict[str, Any]] = {
    "bert": {"layers": 6, "hidden": 384, "heads": 12, "ffn": 1536},  # MiniLM-L6
    "llama": {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536},  # SmolLM2-135M
}
BATCH, SEQ = 1, 32


def measure(name: str, threads: int) -> dict[str, float]:
    """Seconds of each step, in this process. What rlx imports is not imported before the clock starts."""
    stamps = [time.perf_counter()]

    def lap() -> None:
        stamps.append(time.perf_counter())

    import rlx

    _ = rlx.Graph, rlx.compile, rlx.MaskKind  # rlx loads its parts on first use
    lap()
    import graphs

    size = GRAPHS[name]
    graph = graphs.bert_encoder(**size) if name == "bert" else graphs.llama(**size)
    lap()
    compiled = rlx.compile(graph, device="cpu", threads=threads)
    lap()
    import numpy as np

    inputs: dict[str, np.ndarray] = {}
    if name == "bert":
        shapes = graphs.bert_shapes(size["layers"], size["hidden"], size["ffn"])
        inputs["mask"] = np.ones((BATCH, SEQ), np.float32)
    else:
        shapes = graphs.llama_shapes(**size)
        inputs["positions"] = np.arange(SEQ, dtype=np.int32)[None].repeat(BATCH, 0)
    params = graphs.weights(shapes)
    inputs["x"] = np.random.default_rng(1).standard_normal((BATCH, SEQ, size["hidden"]), dtype=np.float32)
    making_weights = time.perf_counter() - stamps[-1]
    compiled.set_params(params)
    lap()
    compiled.run(inputs)
    lap()
    (result,) = compiled.run(inputs)
    lap()
    if not np.isfinite(result).all():
        raise RuntimeError("the result is not finite")
    seconds = dict(zip(STEPS, (b - a for a, b in itertools.pairwise(stamps)), strict=True))
    return seconds | {"bind": seconds["bind"] - making_weights}


def in_fresh_process(name: str, threads: int, cache: Path, bytecode: Path) -> dict[str, float]:
    """Run `measure` in a new interpreter; its error is ours."""
    environment = os.environ | {"RLX_CACHE": str(cache), "RLX_THREADS": str(threads)}
    # An installed package has bytecode; a source tree gets it here, away from the tree.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    command = [sys.executable, __file__, "--measure", "--graph", name, "--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def engine(case: Any, threads: int) -> Any:
    """For the harness: seconds of a fresh process up to its first result; the case is such as `bert cold`."""
    from worker import Prepared  # here, because a measuring process must start without NumPy

    name, state = case.name.split()
    folder = tempfile.TemporaryDirectory(prefix="rlx-bench-")
    bytecode, warm = Path(folder.name, "bytecode"), Path(folder.name, "warm")
    in_fresh_process(name, threads, warm, bytecode)

    def seconds() -> float:
        with tempfile.TemporaryDirectory(dir=folder.name) as empty:
            steps = in_fresh_process(name, threads, warm if state == "warm" else Path(empty), bytecode)
        return sum(steps[step] for step in STEPS if step != "second run")

    return Prepared(seconds, seconds=seconds)


def cold_and_warm(name: str, threads: int, repetitions: int) -> dict[str, Any]:
    """All repetitions of both, and what the cold process left in the cache."""
    rounds: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="rlx-bench-") as folder:
        bytecode = Path(folder, "bytecode")
        print("first process, not counted: writes bytecode", file=sys.stderr)
        in_fresh_process(name, threads, Path(folder, "first"), bytecode)
        for i in range(repetitions):
            print(f"repetition {i + 1} of {repetitions}", file=sys.stderr)
            cache = Path(folder, f"cache{i}")
            rounds["cold"].append(in_fresh_process(name, threads, cache, bytecode))
            rounds["warm"].append(in_fresh_process(name, threads, cache, bytecode))
        files = [path for path in cache.rglob("*") if path.is_file()]
        left = {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    return {"rounds": rounds, "cache": left}


def print_table(name: str, measured: dict[str, Any]) -> None:
    print(f"{name} {GRAPHS[name]}; milliseconds, median (best); first run at batch {BATCH}, seq {SEQ}\n")
    print("| cache | " + " | ".join((*STEPS, " + ".join(WAIT))) + " |")
    print("|" + "---|" * (len(STEPS) + 2))
    for state, rounds in measured["rounds"].items():
        columns = [[r[step] for r in rounds] for step in STEPS] + [[sum(r[step] for step in WAIT) for r in rounds]]
        cells = [f"{statistics.median(c) * 1e3:.1f} ({min(c) * 1e3:.1f})" for c in columns]
        print(f"| {state} | " + " | ".join(cells) + " |")
    left = measured["cache"]
    print(f"\nthe cold process left {left['files']} files, {left['bytes'] / 1e3:.0f} kB in the cache")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", choices=GRAPHS, default="bert")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.graph, args.threads)))
        return 0
    try:
        measured = cold_and_warm(args.graph, args.threads, args.repetitions)
    except RuntimeError as error:
        print(f"rlx could not be measured:\n{error}", file=sys.stderr)
        return 1
    print_table(args.graph, measured)
    if args.json:
        import harness  # here, because a measuring process must start without NumPy

        machine = harness.describe_machine() | {"date": harness.timestamp(), "command": harness.command()}
        machine["rlx"] = harness.installed(harness.Library("rlx", "", ("rlx",)))
        medians = {
            state: {step: statistics.median(r[step] for r in rounds) for step in STEPS}
            for state, rounds in measured["rounds"].items()
        }
        what = {"graph": args.graph, "size": GRAPHS[args.graph], "threads": args.threads, "median_seconds": medians}
        harness.write_json(args.json, {"machine": machine} | what | measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
