"""What the commands of the benchmarks share: options, tables, and results that are written as they come."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import CaseResult, Result, write_json
from worker import Case

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).resolve().parents[2] / "shared" / "assets"))


def options(about: str | None, *, threads: int | list[int], rounds: int, peers: str = "") -> argparse.ArgumentParser:
    """A parser with what every command takes; one number of threads, or several; where the `peers` are, if any."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    several: dict[str, Any] = {"nargs": "+"} if isinstance(threads, list) else {"choices": (1, 2)}
    parser.add_argument("--threads", type=int, default=threads, **several)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, metavar="PATH")
    if peers:
        parser.add_argument("--python", default=os.environ.get("RLX_PEERS_PYTHON", sys.executable), metavar="PATH",
                            help=f"interpreter that has {peers}; RLX_PEERS_PYTHON unless given")  # fmt: skip
    return parser


def add_minilm(parser: argparse.ArgumentParser, sentences_are: str) -> None:
    """Options of the benchmarks of an encoder: its folder, and sentences."""
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="minilm-l6 of the catalogue unless given")
    parser.add_argument("--sentences", type=Path, default=ASSETS / "text" / "stsb-en-test.csv", metavar="CSV",
                        help=sentences_are)  # fmt: skip


def minilm(args: argparse.Namespace) -> Path:
    """The folder of the encoder."""
    if args.model is not None:
        return Path(args.model)
    from rlx.hub.pull import resolve

    return resolve("minilm-l6").path.parent


def chosen(cases: Iterable[Case], pattern: str) -> list[Case]:
    """The cases whose names match; none is a mistake of who asked."""
    selected = [case for case in cases if re.search(pattern, case.name)]
    if not selected:
        print(f"no case matches {pattern!r}", file=sys.stderr)
        raise SystemExit(2)
    return selected


def one_run(result: Result, summary: Sequence[str], path: Path | None) -> int:
    """Write the only run, if that is wanted; gives the exit code of the command."""
    if path is not None:
        write_json(path, result.to_json() | {"summary": summary})
    return 1 if result.problems() else 0


def finished(runs: Iterable[tuple[Result, dict[str, Any]]], path: Path | None) -> int:
    """Write runs as they end, since a long benchmark may be broken off; gives the exit code of the command."""
    written: list[dict[str, Any]] = []
    problems = 0
    for result, content in runs:
        problems += len(result.problems())
        written.append(content)
        if path is not None:
            write_json(path, {"runs": written})
    return 1 if problems else 0


def print_rows(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table in Markdown."""
    print("| " + " | ".join(heading) + " |\n|" + "---|" * len(heading))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def pair(values: tuple[float, float], digits: int) -> str:
    """Of the median and of the best."""
    return "/".join(f"{value:.{digits}f}" for value in values)


def times_as_fast(case: CaseResult, ours: str, peers: Sequence[str]) -> dict[str, tuple[float, float]]:
    """How many times as fast we are as each peer, and as the best of them."""
    if not case.ok(ours):
        return {}
    ratios = {peer: case.ratio(ours, peer) for peer in peers if case.ok(peer)}
    best = case.best_peer(peers)
    return ratios | ({"best peer": ratios[best]} if best else {})


def comparison(result: Result, case: CaseResult, ours: str, peers: Sequence[str]) -> list[str]:
    """Cells: how many times as fast we are as each peer and as the best of them, and our part of the roof."""
    ratios, roof = times_as_fast(case, ours, peers), result.ceilings.roof(case.case) / 1e9
    cells = [pair(ratios[name], 2) if name in ratios else "-" for name in (*peers, "best peer")]
    part = "/".join(f"{rate / roof:.2f}" for rate in case.gflops(ours)) if case.ok(ours) else "-"
    return [*cells, part]
