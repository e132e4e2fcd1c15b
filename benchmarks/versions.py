"""Two versions of rlx against each other, in the work of the other benchmarks: what has a change cost or gained?

    git worktree add ../before COMMIT; python3 -m venv ../before/.venv; ../before/.venv/bin/pip install -e ../before
    python benchmarks/versions.py --before ../before/.venv/bin/python --json benchmarks/results/versions.json

Both run every case in the same rounds, in shuffled order. Prints how many times as fast the new version is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import encoder
import gemm
import llm
import startup
import train
from command import add_minilm, finished, minilm, options, print_rows
from compile import GRAPHS
from embed import Encoder, sentences, shared_folder
from harness import Library, Result, compare, geometric_mean, print_heading
from worker import Case

NEW, OLD = "rlx", "rlx before"
LLM_CASES = ("write 128", "read 128", "read 512")
WORK = {
    "gemm": "gemm:rlx_gemm",
    "encoder f32": "encoder_engines:rlx",
    "encoder int8": "encoder_engines:rlx_int8",
    "llm": "llm_engines:rlx",
    "train": "train_engines:rlx",
    "compile": "compile:engine",
    "startup": "llm_engines:rlx",
}


def cases(work: str, args: argparse.Namespace, folder: Path) -> list[Case]:
    match work:
        case "gemm":
            return [gemm.gemm_case(k, n, m) for k, n in gemm.WEIGHTS for m in gemm.ROWS]
        case "llm":
            return [case for case in llm.cases(llm.model_file(args.llm)) if case.name in LLM_CASES]
        case "train":
            return [train.case_of(train.SIZES | {"losses": 3})]
        case "compile":
            return [Case(f"{graph} {state}", {}, 0.0, 4e6) for graph in GRAPHS for state in ("cold", "warm")]
        case "startup":
            return startup.start_cases(llm.model_file(args.llm))
    return encoder.cases(Encoder(args.model), list(encoder.SHAPES), str(folder), work.split()[1])


def ratios(result: Result) -> dict[str, tuple[float, float]]:
    return {c.case.name: c.ratio(NEW, OLD) for c in result.cases if c.ok(NEW) and c.ok(OLD)}


def print_table(work: str, result: Result) -> None:
    print(f"\n## {work}, {result.threads} thread(s)\n")
    print_heading(result)
    print("\nmilliseconds, and how many times as fast the new version is, as median/best\n")
    by_case = ratios(result)
    rows = []
    for case in result.cases:
        times = [f"{case.timings[n].median * 1e3:.3f}" if case.ok(n) else "-" for n in (NEW, OLD)]
        rows.append([case.case.name, *times, "{:.3f}/{:.3f}".format(*by_case[case.case.name]) if by_case else "-"])
    print_rows(["case", NEW, OLD, "new / old"], rows)
    if by_case:
        print(f"\ngeometric mean: {geometric_mean([usual for usual, _ in by_case.values()]):.3f}")
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def main() -> int:
    parser = options(__doc__, threads=[1, 2], rounds=9)
    add_minilm(parser, "not read, but part of the folder")
    parser.add_argument("--before", required=True, metavar="PATH", help="interpreter that has the old version")
    parser.add_argument("--work", nargs="+", choices=tuple(WORK), default=list(WORK))
    parser.add_argument("--llm", default="smollm2-135m", metavar="NAME", help="of the catalogue, pulled before")
    args = parser.parse_args()
    args.model = minilm(args)

    def runs() -> Iterator[tuple[Result, dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as scratch:
            shared_folder(Path(scratch), args.model, sentences(args.sentences)[0]["distinct"])
            for work in args.work:
                both = [Library(NEW, WORK[work], ("rlx",)), Library(OLD, WORK[work], ("rlx",), args.before)]
                for threads in args.threads:
                    wanted = cases(work, args, Path(scratch))
                    result = compare(both, wanted, threads=threads, rounds=args.rounds)
                    print_table(work, result)
                    content = result.to_json()
                    for case in content["cases"]:
                        del case["subject"]  # a folder of this machine
                    yield result, {"work": work} | content | {"new_over_old": ratios(result)}

    return finished(runs(), args.json)


if __name__ == "__main__":
    sys.exit(main())
