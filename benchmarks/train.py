"""A training step of a Llama with 8.4 million parameters: rlx against torch, torch.compile and JAX.

    python benchmarks/train.py --threads 2 --json benchmarks/results/train-2t.json

Forward, backward and AdamW on 8 x 256 tokens in f32. All start from the same weights; before anything is timed, the
losses of the first steps are compared with torch's. Prints milliseconds as median/best, how many times as fast rlx is
as each peer, the seconds of the first step and peak memory. `--json` keeps every round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import CaseResult, Library, Result, compare, print_heading, write_json
from worker import Case

OURS = "rlx"
PEERS = {
    "torch": ("torch_eager", ("torch",)),
    "torch.compile": ("torch_compile", ("torch",)),
    "jax": ("jax", ("jax",)),
}
SIZES = {"dim": 256, "layers": 8, "heads": 8, "ffn": 688, "vocab": 4096, "batch": 8, "seq": 256}
LOSS_TOLERANCE = 1e-3  # of the losses themselves, which begin near 8.3
Array = np.ndarray[Any, Any]


def case_of(dims: dict[str, int]) -> Case:
    """FLOPs are those of the matrix products and of the attention that is seen, forward and twice that backward.

    Bytes are those of parameters, gradients and both moments: read, and all but gradients written.
    """
    dim, layers, tokens = dims["dim"], dims["layers"], dims["batch"] * dims["seq"]
    read = layers * (4 * dim * dim + 3 * dim * dims["ffn"]) + dims["vocab"] * dim
    size = read + dims["vocab"] * dim + (2 * layers + 1) * dim
    flops = 6.0 * tokens * read + 6.0 * tokens * dims["seq"] * dim * layers
    return Case(f"{size / 1e6:.1f}M, {dims['batch']} x {dims['seq']}", dims, flops, 4.0 * 7 * size)


def torch_losses(python: str, threads: int) -> Callable[[Case], Array]:
    """What torch gives in a process of its own."""

    def losses(case: Case) -> Array:
        script = str(Path(__file__).with_name("train_engines.py"))
        command = [python, script, str(threads), json.dumps(case.dims)]
        return np.array(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))

    return losses


def run(args: argparse.Namespace, threads: int) -> Result:
    libraries = [Library(OURS, "train_engines:rlx", ("rlx",))]
    for name in args.peers:
        function, packages = PEERS[name]
        libraries.append(
            Library(name, f"train_engines:{function}", packages, args.jax if name == "jax" else args.python)
        )
    case = case_of(SIZES | {"batch": args.batch, "seq": args.seq, "losses": args.losses})
    reference = torch_losses(args.python, threads)
    # The harness divides by the largest loss, which is the first: about the logarithm of the vocabulary.
    tolerance = LOSS_TOLERANCE / np.log(case.dims["vocab"])
    return compare(libraries, [case], threads=threads, rounds=args.rounds, reference=reference, max_error=tolerance)


def print_table(result: Result) -> None:
    print(f"\n## {result.threads} thread(s)\n")
    print_heading(result)
    (case,) = result.cases
    print(f"\n{case.case.name}: milliseconds a step, tokens a second and GFLOPS, as median/best\n")
    heading = ["library", "ms", "tok/s", "GFLOPS", "rlx is faster", "losses differ", "first step and memory"]
    print("| " + " | ".join(heading) + " |\n|" + "---|" * len(heading))
    for name in (OURS, *PEERS):
        print("| " + " | ".join(row(case, name)) + " |")
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def row(case: CaseResult, name: str) -> list[str]:
    timing = case.timings.get(name)
    if timing is None or not case.ok(name):
        return [name, *["-"] * 5, "" if timing is None else timing.note]
    tokens = case.case.dims["batch"] * case.case.dims["seq"]
    seconds = (timing.median, timing.best)
    faster = "{:.2f}/{:.2f}".format(*case.ratio(OURS, name)) if name != OURS and case.ok(OURS) else ""
    error = "-" if timing.error is None else f"{timing.error * np.log(case.case.dims['vocab']):.0e}"
    return [
        name, "/".join(f"{s * 1e3:.0f}" for s in seconds), "/".join(f"{tokens / s:,.0f}" for s in seconds),
        "/".join(f"{g:.0f}" for g in case.gflops(name)), faster, error, timing.note,
    ]  # fmt: skip


def main() -> int:
    here = os.environ.get("RLX_PEERS_PYTHON", sys.executable)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--batch", type=int, default=SIZES["batch"])
    parser.add_argument("--seq", type=int, default=SIZES["seq"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="those that are timed")
    parser.add_argument("--losses", type=int, default=50, help="steps whose losses are compared")
    parser.add_argument("--python", default=here, metavar="PATH", help="interpreter that has torch")
    parser.add_argument("--jax", default=here, metavar="PATH", help="interpreter that has JAX")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    runs, problems = [], 0
    for threads in args.threads:
        result = run(args, threads)
        print_table(result)
        problems += len(result.problems())
        runs.append(result.to_json())
    if args.json:
        write_json(args.json, {"runs": runs})
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
