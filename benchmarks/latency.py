"""Latency as people meet it: in a loop, after a pause, and beside a process that spins. rlx, ONNX Runtime, llama.cpp.

    python benchmarks/latency.py --json benchmarks/results/latency.json

A call embeds one sentence with MiniLM, writes 16 tokens with SmolLM2, or multiplies a vector by a matrix. Calls follow
each other at once, or after 150 ms of rest; in some cases another process keeps a core busy. rlx also runs with one
thread, and with its threads pinned to different cores. Prints the median milliseconds, and what a pause and a busy core
cost; `--json` keeps every round.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command import add_minilm, finished, minilm, options, print_rows
from embed import sentences, shared_folder
from harness import Library, Result, compare, print_heading
from llm import model_file
from worker import Case

OURS, ALONE, PINNED = "rlx", "rlx, 1 thread", "rlx, pinned"
PEERS = {
    "embed": ("onnxruntime", "embed_onnxruntime", ("onnxruntime", "torch", "transformers")),
    "write": ("llama.cpp", "write_llama_cpp", ("llama_cpp",)),
    "matvec": ("numpy", "matvec_numpy", ("numpy",)),
}
# Milliseconds before each call, and processes that spin.
PATTERNS = {
    "steady": {"pause_ms": 0, "spinners": 0},
    "after a pause": {"pause_ms": 150, "spinners": 0},
    "beside a spinner": {"pause_ms": 0, "spinners": 1},
    "beside a spinner, after a pause": {"pause_ms": 150, "spinners": 1},
}
# Calls of which the median is taken: after pauses, and in a loop, which lasts about a second.
PAUSED, IN_A_LOOP = 15, {"embed": 300, "write": 30, "matvec": 20_000}


def libraries(work: str, python: str) -> list[Library]:
    peer, function, packages = PEERS[work]
    ours = {OURS: "", ALONE: "_alone", PINNED: "_pinned"}
    libraries_of_rlx = [Library(name, f"latency_engines:{work}_rlx{suffix}", ("rlx",)) for name, suffix in ours.items()]
    return [
        *libraries_of_rlx,
        Library(peer, f"latency_engines:{function}", packages, sys.executable if work == "matvec" else python),
    ]


def run(work: str, subject: str, threads: int, rounds: int, python: str) -> Result:
    cases = [
        Case(name, dims | {"calls": PAUSED if dims["pause_ms"] else IN_A_LOOP[work]}, 0.0, 4e6, subject)
        for name, dims in PATTERNS.items()
    ]
    return compare(libraries(work, python), cases, threads=threads, rounds=rounds)


def medians(result: Result) -> dict[str, dict[str, float]]:
    """Milliseconds of each library, by pattern."""
    return {
        case.case.name: {name: case.timings[name].median * 1e3 for name in result.libraries if case.ok(name)}
        for case in result.cases
    }


def judged(result: Result) -> dict[str, float]:
    """What is promised: after a pause and beside a spinner, against a loop and against one thread, round by round."""
    times = medians(result)
    steady, paused = times["steady"].get(OURS), times["after a pause"].get(OURS)
    judged = {}
    if steady is not None and paused is not None:  # otherwise `problems` says why the engine failed
        judged["after a pause / (1.25 x steady + 0.3 ms)"] = paused / (1.25 * steady + 0.3)
    for case in result.cases:
        if case.ok(OURS) and case.ok(ALONE):
            pairs = zip(case.timings[ALONE].seconds, case.timings[OURS].seconds, strict=True)
            judged[f"{case.case.name}: times as fast as one thread"] = statistics.median(a / b for a, b in pairs)
    return judged


def print_table(work: str, result: Result) -> None:
    print(f"\n## {work}, {result.threads} threads\n")
    print_heading(result)
    print("\nmilliseconds, medians\n")
    times, names = medians(result), list(result.libraries)
    print_rows(
        ["pattern", *names],
        ([pattern, *(f"{row[n]:.3f}" if n in row else "-" for n in names)] for pattern, row in times.items()),
    )
    print()
    for name, value in judged(result).items():
        print(f"{name}: {value:.2f}")
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def main() -> int:
    parser = options(__doc__, threads=[2], rounds=7, peers="the peers")
    add_minilm(parser, "not read, but part of the folder")
    parser.add_argument("--work", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    args = parser.parse_args()

    def runs() -> Iterator[tuple[Result, dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as scratch:
            if "embed" in args.work:
                shared_folder(Path(scratch), minilm(args), sentences(args.sentences)[0]["distinct"])
            subjects = {"embed": scratch, "write": str(model_file("smollm2-135m")), "matvec": "matvec"}
            for work in args.work:
                for threads in args.threads:
                    result = run(work, subjects[work], threads, args.rounds, args.python)
                    print_table(work, result)
                    content = result.to_json()
                    for case in content["cases"]:
                        del case["subject"]  # a folder of this machine
                    yield result, {"work": work} | content | {"milliseconds": medians(result), "judged": judged(result)}

    return finished(runs(), args.json)


if __name__ == "__main__":
    sys.exit(main())
