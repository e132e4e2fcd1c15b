"""`rlx inspect MODEL_OR_FILE`: a model, or a graph as text, at any level from HIR down to assembly.

One program serves every batch, length and past; `--phase`, `--batch`, `--seq` and `--past` say for which of them sizes,
bytes and flops are shown. Weights are neither read nor packed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import rlx.hir.blocks  # noqa: F401  declares the ops that files may use
from rlx import hub
from rlx.backends.base import backend, backend_of
from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.engine.build import build_checkpoint
from rlx.engine.kvcache import ring_blocks
from rlx.errors import FormatError, NotFoundError
from rlx.hir.lower import lower
from rlx.hub.store import show_size
from rlx.inspect.page import graph_page
from rlx.ir.graph import Graph, Node
from rlx.ir.text import node_text
from rlx.lir import memory
from rlx.lir.program import Launch, Program, launch_text
from rlx.lir.views import View
from rlx.mir.pipeline import optimise
from rlx.models.load import open_checkpoint
from rlx.profile import CompileProfile
from rlx.runtime.kv_cache import CACHE_HELP, CACHES
from rlx.runtime.plan import cached_plan
from rlx.target import KvLayout, Target
from rlx.types import evaluate

LEVELS = ("hir", "mir", "lir", "llvm", "asm")
MAX_BYTES = 256 << 20  # of a graph's text


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("inspect", help="show a model or a graph file at a level")
    command.add_argument("what", metavar="MODEL_OR_FILE", help="a model on this machine, or a graph as text (.rlx)")
    command.add_argument("--level", choices=LEVELS, default="mir")
    command.add_argument("--stage", help="only this part, such as layers.0 or layers.*.attn")
    command.add_argument("--phase", choices=("prefill", "decode"), default="prefill")
    command.add_argument("--batch", type=int, default=1, help="sequences at once (1)")
    command.add_argument("--seq", type=int, help="tokens of each (128; 1 in decode)")
    command.add_argument("--past", type=int, help="tokens before them (0; 512 in decode)")
    command.add_argument("--size", action="append", default=[], metavar="NAME=N", help="the size of another symbol")
    command.add_argument("--cache", choices=CACHES, default="auto", help=CACHE_HELP)
    command.add_argument("--target", help="what to generate code for (default: the best here; `rlx env` lists them)")
    command.add_argument("--built", action="store_true", help="with --level mir: before the passes")
    command.add_argument("--bind", action="store_true", help="the bind program of the weights instead of the main one")
    command.add_argument("--html", type=Path, metavar="FILE", help="all levels side by side as a web page")
    command.add_argument("--fusion", action="store_true", help="what was fused, what was missed and why")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    machine = backend("cpu").target(arguments.target)
    graph, profile, about = _opened(arguments)
    if arguments.html is not None:
        page = graph_page(graph, machine, profile=profile, assembly=arguments.level == "asm")
        arguments.html.write_text(page, "utf-8")
        print(f"{about}: all levels in {arguments.html}", file=sys.stderr)
        return 0
    sizes = _sizes(arguments, graph)
    print(f"# {about}, {machine.name}")
    if sizes:
        print(f"# {arguments.phase}: " + ", ".join(f"{name} = {size}" for name, size in sorted(sizes.items())))
    for line in show(graph, arguments.level, machine, profile=profile, stage=arguments.stage, sizes=sizes,
                     built=arguments.built, bind=arguments.bind, fusion=arguments.fusion):  # fmt: skip
        print(line)
    return 0


# -- what is looked at -----------------------------------------------------------------------------------------------
def _opened(arguments: argparse.Namespace) -> tuple[Graph, CompileProfile | None, str]:
    if arguments.what.endswith(".rlx"):
        graph = load(Path(arguments.what))
        return graph, None, f"graph {graph.name}"
    checkpoint = open_checkpoint(hub.resolve(arguments.what, offline=True).path)
    family, config = checkpoint.family, checkpoint.config
    with checkpoint.file:
        if family.kind != "decoder" and (arguments.phase == "decode" or arguments.past):
            raise UsageError(f"inspect: {arguments.what} is an encoder: it has neither decode nor a past")
        made = build_checkpoint(checkpoint, arguments.cache)
        about = f"{arguments.what}: {family.name} {family.kind}, {config.layers} layers"
        return made.module, made.profile, about


def load(path: Path) -> Graph:
    """The graph in a file, checked."""
    try:
        with open(path, "rb") as file:
            text = str(console.read_at_most(file, MAX_BYTES, f"inspect: {path}"), "utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    return Graph.parse(text).verify()


def phase_sizes(batch: int, seq: int, past: int = 0, symbols: Iterable[str] = ()) -> dict[str, int]:
    """The sizes of the symbols that models use, for `seq` new tokens after `past` others; of rings, those named."""
    layout = KvLayout()
    blocks = layout.blocks(past + seq)
    windows = {s: int(s[4:]) for s in symbols if s[:4] == "ring" and s[4:].isdecimal()}
    rings = {symbol: min(blocks, ring_blocks(window, layout)) for symbol, window in windows.items()}
    pages = {f"pages{windows[symbol]}": batch * own for symbol, own in rings.items()} | {"pages": batch * blocks}
    return {"batch": batch, "seq": seq, "past_seq": past, "blocks": blocks, "picked": batch, **rings, **pages}


def _sizes(arguments: argparse.Namespace, graph: Graph) -> dict[str, int]:
    """The binding that was asked for, of the symbols that the graph has."""
    decode = arguments.phase == "decode"
    seq = arguments.seq if arguments.seq is not None else 1 if decode else 128
    past = arguments.past if arguments.past is not None else 512 if decode else 0
    if arguments.batch < 1 or seq < 1 or past < 0:
        raise UsageError(f"inspect: batch {arguments.batch}, seq {seq}, past {past}: expected 1, 1 and 0 at least")
    known = phase_sizes(arguments.batch, seq, past, graph.symbols())
    for text in arguments.size:
        name, _, size = text.partition("=")
        if name not in graph.symbols() or not size.isdecimal():
            symbols = ", ".join(graph.symbols()) or "none"
            raise UsageError(f"inspect: --size {text}: expected NAME=N of a symbol; there are: {symbols}")
        known[name] = int(size)
    return {name: known[name] for name in graph.symbols() if name in known}


def matches(pattern: str | None, where: str) -> bool:
    """Whether a stage path, or an origin that begins with one, lies in the part that a pattern names."""
    if pattern is None:
        return True
    wanted, found = pattern.split("."), where.split(", ")[0].split(".")
    return len(found) >= len(wanted) and all(fnmatchcase(f, w) for f, w in zip(found, wanted, strict=False))


# -- levels ----------------------------------------------------------------------------------------------------------
def show(
    graph: Graph, level: str, machine: Target, *, profile: CompileProfile | None = None,
    stage: str | None = None, sizes: Mapping[str, int] | None = None, built: bool = False, bind: bool = False,
    fusion: bool = False,
) -> Iterator[str]:  # fmt: skip
    """The graph at a level, line by line."""
    if level == "hir" or (level == "mir" and built):
        yield from _graph_lines(graph if level == "hir" else lower(graph), stage)
        return
    if level == "mir":
        result = optimise(lower(graph), machine, profile)
        yield from _graph_lines(result.bind if bind else result.main, stage)
        report = str(result.report)
    else:
        plan = cached_plan(graph, machine, profile)
        program = plan.bind if bind else plan.main
        launches = [x for x in program.launches if matches(stage, x.where)]
        _need(launches, stage, (x.where for x in program.launches))
        if level == "lir":
            yield from _program_lines(program, launches, sizes or {}, whole=stage is None)
        else:
            kernels = {x.kernel.symbol: x.kernel for x in launches}
            text = backend_of(machine).kernel_text(kernels.values(), machine, assembly=level == "asm")
            yield from text.splitlines()
        report = str(plan.fusion)
    if fusion:
        yield f"\n{report}"


def _graph_lines(graph: Graph, stage: str | None) -> Iterator[str]:
    if stage is None:
        yield from graph.text(origins=True).splitlines()
        return
    nodes = [n for n in graph.nodes if matches(stage, str(n.origin))]
    _need(nodes, stage, (str(n.origin) for n in graph.nodes))
    for node in nodes:
        yield f"{node_text(node)}  # {node.origin}"


def _need(found: list[Launch] | list[Node], stage: str | None, places: Iterable[str]) -> None:
    if not found and stage is not None:
        known = dict.fromkeys(place.split(", ")[0].split(".")[0] for place in places)
        named = ", ".join(name for name in known if name.isidentifier())
        raise UsageError(f"inspect: nothing is in stage {stage}", hint=f"there are: {named or 'none'}")


def _program_lines(program: Program, launches: list[Launch], sizes: Mapping[str, int], *, whole: bool) -> Iterator[str]:
    """The program under a binding: interface, launches with concrete sizes, kernels, and the sum of it."""
    if not set(program.symbols) <= set(sizes):
        yield from program.text().splitlines() if whole else map(launch_text, launches)
        return

    def line(launch: Launch) -> str:
        known = bound(launch, sizes, program.loop_symbols())
        shapes = " -> ".join(_shapes(known.views(written=side)) for side in (False, True))
        work = f"{show_size(int(known.bytes))}, {evaluate(launch.flops, sizes) / 1e6:.3g} MFLOP"
        return f"{launch_text(known)}  # {launch.where.split(', ')[0]}: {shapes}, {work}"

    if whole:
        yield from (*program.interface_lines(), *program.launch_lines(line))
    else:
        yield from (f"  {line(launch)}" for launch in launches)
    for kernel in {x.kernel.symbol: x.kernel for x in launches}.values():
        yield from ("", *kernel.text().splitlines())
    runs = zip(program.launches, program.runs(program.all_steps(sizes)), strict=True)
    often = [(x, times) for x, times in runs if x in launches]
    moved, flops = (sum(evaluate(getattr(x, name), sizes) * n for x, n in often) for name in ("bytes", "flops"))
    kernels = len({x.kernel.symbol for x in launches})
    yield ""
    yield f"# {len(launches)} launches of {kernels} kernels: {show_size(moved)} of operands, {flops / 1e6:.4g} MFLOP"
    yield f"# arena of the whole program: {show_size(arena(program, sizes))}"


def bound(launch: Launch, sizes: Mapping[str, int], loops: Iterable[str] = ()) -> Launch:
    """A launch with numbers in place of symbols; those of loops stay."""

    def number(word: object) -> object:
        match word:
            case View():
                return word.bound(sizes, loops)
            case None:
                return None
            case _:
                return evaluate(word, sizes)  # type: ignore[arg-type]

    words = tuple(number(w) for w in launch.words)
    units = None if launch.units is None else evaluate(launch.units, sizes)
    return replace(launch, words=words, units=units)  # type: ignore[arg-type]


def _shapes(views: Iterable[View]) -> str:
    return " ".join("×".join(map(str, v.shape)) or "1" for v in views)


def arena(program: Program, sizes: Mapping[str, int]) -> int:
    """Bytes of the temporary buffers together, as the planner lays them."""
    lives = memory.lifetimes(program)
    return memory.plan(lives, {x.name: evaluate(program.buffers[x.name].type.bytes, sizes) for x in lives}).size
