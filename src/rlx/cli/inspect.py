"""`rlx inspect FILE`: a graph file at any level, from HIR down to assembly."""

from __future__ import annotations

import argparse
from pathlib import Path

import rlx.hir.blocks  # noqa: F401  declares the ops that files may use
from rlx import target
from rlx.backends.cpu.library import kernel_text
from rlx.errors import FormatError
from rlx.hir.lower import lower
from rlx.ir.graph import Graph
from rlx.runtime.plan import make_plan

LEVELS = ("hir", "mir", "lir", "llvm", "asm")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("inspect", help="show a graph file at a level")
    command.add_argument("file", type=Path, help="a graph as text (.rlx)")
    command.add_argument("--level", choices=LEVELS, default="mir")
    command.add_argument("--target", help="avx512, avx2 or baseline (default: the best here)")
    command.add_argument("--built", action="store_true", help="with --level mir: before the passes")
    command.add_argument("--bind", action="store_true", help="the bind program of the weights instead of the main one")
    command.add_argument("--fusion", action="store_true", help="what was fused, what was missed and why")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    graph = load(arguments.file)
    machine = target.named(arguments.target) if arguments.target else target.host()
    print(show(graph, arguments.level, machine, built=arguments.built, bind=arguments.bind, fusion=arguments.fusion))
    return 0


def load(path: Path) -> Graph:
    """The graph in a file, checked."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    return Graph.parse(text).verify()


def show(
    graph: Graph, level: str, machine: target.Target, *, built: bool = False, bind: bool = False, fusion: bool = False
) -> str:
    """The graph at a level, as text."""
    if level == "hir":
        return graph.text()
    if level == "mir" and built:
        return lower(graph).text()
    plan = make_plan(graph, machine)
    program = plan.bind if bind else plan.main
    match level:
        case "mir":
            text = plan.bind_text if bind else plan.main_text
        case "lir":
            text = program.text()
        case _:
            text = kernel_text(program.kernels().values(), machine, level=level)
    return f"{text}\n\n{plan.fusion}" if fusion else text
