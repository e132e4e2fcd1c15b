"""How long a fresh process takes to its first token, and how much memory: rlx against llama-cpp-python.

Every number is that of a new Python process, the two libraries taking turns, with files and caches warm (rlx has
started the model once before): from the start of the process to the token after a prompt of 32, and peak memory
(VmHWM) up to there and after a prompt of 512 and 32 more tokens. `rlx run` is the same on the command line. Prints
median/best; `--json` keeps every round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm_engines
from command import finished, options
from harness import CaseResult, Library, Result, compare, print_heading
from llm import MODELS, OURS, PEER, cases, model_file, peak_bytes, rates
from worker import Case, Prepared

COMMAND = "rlx run"
MEMORY = {"first": "peak memory, first token", "memory": "peak memory, 512 + 32 tokens"}
REPETITIONS = 3  # of a memory figure: it hardly varies


def rlx_run(case: Case, threads: int) -> Prepared:
    """The command, up to the first bytes of its answer."""
    words = ["-m", "rlx", "run", "-m", case.subject, "-p", llm_engines.TEXT, "--raw", "--max-tokens", "1"]
    words += ["--temperature", "0", "--threads", str(threads), "--context", str(llm_engines.CONTEXT)]

    def seconds() -> float:
        begin = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert child.stdout is not None
        first = child.stdout.read(1)
        taken = time.perf_counter() - begin
        _, said = child.communicate()
        if not first or child.returncode:
            raise RuntimeError(f"rlx run: {said.decode(errors='replace').strip().splitlines()[-1]}")
        return taken

    return Prepared(seconds, seconds=seconds)


def start_cases(path: Path) -> list[Case]:
    return [case for case in cases(path) if "first" in case.dims]


def peaks(libraries: list[Library], path: Path, threads: int) -> dict[str, dict[str, list[int]]]:
    """Bytes by what is done and library, the libraries taking turns."""
    peaks_by_library: dict[str, dict[str, list[int]]] = {what: {x.name: [] for x in libraries} for what in MEMORY}
    for what in MEMORY:
        for _ in range(REPETITIONS):
            for library in libraries:
                size = peak_bytes(library, path, threads, what)
                if size is not None:
                    peaks_by_library[what][library.name].append(size)
    return peaks_by_library


def shown(sizes: list[int]) -> str:
    return f"{statistics.median(sizes) / 1e6:.0f}/{min(sizes) / 1e6:.0f} MB" if sizes else "-"


def share(ours: list[int], theirs: list[int]) -> tuple[float, float] | None:
    """How much of the peer's it is: the ratio of medians, and that of bests."""
    if not ours or not theirs:
        return None
    return statistics.median(ours) / statistics.median(theirs), min(ours) / min(theirs)


def time_share(case: CaseResult, name: str) -> tuple[float, float] | None:
    """The time over the peer's: the median of the ratios of each round, and the ratio of the bests."""
    if not (case.ok(name) and case.ok(PEER)):
        return None
    median, best = case.ratio(name, PEER)
    return 1 / median, 1 / best


def pair(ratio: tuple[float, float] | None) -> str:
    return "-" if ratio is None else f"{ratio[0]:.2f}/{ratio[1]:.2f}"


def print_table(name: str, result: Result, memory: dict[str, dict[str, list[int]]]) -> None:
    print(f"\n## {name}, {result.threads} thread(s)\n")
    print_heading(result)
    print("\n| | rlx | llama.cpp | rlx of llama.cpp |\n|---|---|---|---|")
    for case in result.cases:
        for row, ours in ((case.case.name, OURS), (COMMAND, COMMAND)):
            cells = [row, rates(case, ours), rates(case, PEER), pair(time_share(case, ours))]
            print("| " + " | ".join(cells) + " |")
    for what, row in MEMORY.items():
        ours, theirs = (memory[what].get(library, []) for library in (OURS, PEER))
        print("| " + " | ".join([row, shown(ours), shown(theirs), pair(share(ours, theirs))]) + " |")
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def to_json(name: str, path: Path, result: Result, memory: dict[str, dict[str, list[int]]]) -> dict[str, Any]:
    content = result.to_json()
    for case in content["cases"]:
        case["subject"] = path.name
    ratios = {library: time_share(c, library) for c in result.cases for library in (OURS, COMMAND)}
    sizes = {what: share(memory[what].get(OURS, []), memory[what].get(PEER, [])) for what in MEMORY}
    return {"model": name} | content | {"peak_bytes": memory, "time_of_peer": ratios, "memory_of_peer": sizes}


def main() -> int:
    parser = options(__doc__, threads=[2], rounds=11, peers="llama-cpp-python")
    models = MODELS[:1]
    parser.add_argument("--models", nargs="+", default=models, metavar="NAME", help="of the catalogue, pulled before")
    args = parser.parse_args()
    libraries = (
        Library(OURS, "llm_engines:rlx", ("rlx",)),
        Library(COMMAND, "startup:rlx_run", ("rlx",)),
        Library(PEER, "llm_engines:llama_cpp", ("llama_cpp",), args.python),
    )

    def runs() -> Iterator[tuple[Result, dict[str, Any]]]:
        for name in args.models:
            path = model_file(name)
            for threads in args.threads:
                result = compare(libraries, start_cases(path), threads=threads, rounds=args.rounds)
                present = [x for x in libraries if not result.libraries[x.name].startswith("absent")]
                memory = peaks([x for x in present if x.name != COMMAND], path, threads)
                print_table(name, result, memory)
                yield result, to_json(name, path, result, memory)

    return finished(runs(), args.json)


if __name__ == "__main__":
    sys.exit(main())
