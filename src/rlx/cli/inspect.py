"""`rlx inspect MODEL_OR_FILE`: shows a model, a graph file or an export at any level from HIR down to assembly.

Repeated layers are shown once; `--stage` shows one of them, `--all` everything, as text that can be parsed. One program
serves every batch size and length; `--phase`, `--batch`, `--seq` and `--past` select the sizes for which shapes, bytes
and flops are shown. Weights are read only with `--time`, which runs the program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

import rlx.hir.blocks  # noqa: F401  registers the ops that files may use
from rlx import hub
from rlx.backends.base import backend_of, device, known_target
from rlx.cli import console
from rlx.cli.console import UsageError
from rlx.cli.loading import load as load_model
from rlx.engine.build import build_checkpoint
from rlx.engine.load_settings import CONTEXT
from rlx.engine.page_pool import ring_blocks
from rlx.engine.sampler import SYMBOLS as SAMPLER_SYMBOLS
from rlx.errors import FormatError, NotFoundError, shortened
from rlx.fast_dataclass import dataclass
from rlx.hir.lower import lower
from rlx.hub.store import show_size
from rlx.inspect.fold_layers import SECTION, Group, Line, fold_lines, lines_of, tree_text
from rlx.inspect.levels import graph_lines, head, launch_lines, plain_interface_lines, stage_of, tail
from rlx.inspect.links import link_text
from rlx.inspect.page import graph_columns, graph_page
from rlx.inspect.profiler import Report
from rlx.ir.graph import Graph
from rlx.ir.provenance import Origin, built_from
from rlx.kv_layout import KvLayout
from rlx.lir import memory
from rlx.lir.program import Launch, Program, launch_text
from rlx.lir.views import View
from rlx.mir.pipeline import optimise
from rlx.models.load import open_checkpoint
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph, stand_in
from rlx.runtime.container import SUFFIX as EXPORT_SUFFIX
from rlx.runtime.export import as_format_errors, from_export, open_export, read_export, source_graph
from rlx.runtime.kv_spec import CACHE_HELP, CACHES
from rlx.runtime.plan import cached_plan, source_line
from rlx.runtime.session import compile
from rlx.target import Target
from rlx.types import evaluate

LEVELS = ("hir", "mir", "lir", "llvm", "asm")
MAX_BYTES = 256 << 20  # of a graph's text
# The levels at which an option shows something, and options that do not go together. Weights are bound, and launches
# are timed, in programs that passes have made; links are those of the main program.
OPTION_LEVELS = {
    "built": ("mir",), "bind": ("mir", "lir", "llvm", "asm"), "links": ("hir", "mir", "lir"), "time": ("lir",),
}  # fmt: skip
CONFLICTS = (("bind", "built"), ("links", "bind"), ("time", "bind"), ("time", "links"))


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("inspect", help="show a model, a graph file or an export at a level")
    command.add_argument(
        "what", metavar="MODEL_OR_FILE", help="a model on this machine, a graph as text (.rlx) or an export (.rlxp)"
    )
    command.add_argument("--level", choices=LEVELS, help="(mir; with --time, lir)")
    command.add_argument("--stage", help="only this part, such as layers.0 or layers.*.attn")
    command.add_argument("--phase", choices=("prefill", "decode"), default="prefill")
    command.add_argument("--batch", type=int, default=1, help="sequences (1)")
    command.add_argument("--seq", type=int, help="tokens per sequence (128; 1 in decode)")
    command.add_argument("--past", type=int, help="cached tokens before them (0; 512 in decode)")
    command.add_argument("--size", action="append", default=[], metavar="NAME=N", help="the size of another symbol")
    command.add_argument("--cache", choices=CACHES, default="auto", help=CACHE_HELP)
    command.add_argument(
        "--device",
        default="cpu",
        help="the device that code is generated for (cpu); it need not exist if --target is set",
    )
    command.add_argument(
        "--target", help="target of the code, such as avx512, also of other machines (the best of this machine)"
    )
    command.add_argument("--built", action="store_true", help="with --level mir: as lowered, before the passes")
    command.add_argument("--bind", action="store_true", help="the bind program of the weights instead of the main one")
    command.add_argument("--all", action="store_true", help="also show repeated layers")
    command.add_argument("--find", metavar="TEXT", help="only lines that contain this")
    command.add_argument("--links", action="store_true", help="annotate each line with its ops and launches")
    command.add_argument("--time", action="store_true", help="run it on this machine, and show the time of each launch")
    command.add_argument("--html", "--page", type=Path, metavar="FILE", help="write all levels to a web page")
    command.add_argument("--fusion", action="store_true", help="first, what was fused, what was missed and why")
    command.set_defaults(run=run)


def _machine(arguments: argparse.Namespace) -> Target:
    """The target that code is generated for. Nothing runs, so it may be one of another machine."""
    if arguments.target is None and arguments.what.endswith(EXPORT_SUFFIX):
        return read_export(arguments.what).target
    named = device(arguments.device)
    return named.backend.target() if arguments.target is None else known_target(arguments.target, named.name)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise if an option would be ignored. A page has all levels, so it takes times with each."""
    names = [name for name in OPTION_LEVELS if getattr(arguments, name)]
    for name in names:
        if arguments.level not in OPTION_LEVELS[name] and not (name == "time" and arguments.html is not None):
            *most, last = OPTION_LEVELS[name]
            levels = f"levels {', '.join(most)} and {last}" if most else f"level {last}"
            raise UsageError(f"inspect: --{name} is for {levels}, found {arguments.level}", hint=f"--level {last}")
    for one, other in CONFLICTS:
        if one in names and other in names:
            raise UsageError(f"inspect: --{one} does not go with --{other}")


def run(arguments: argparse.Namespace) -> int:
    if arguments.level is None:
        arguments.level = "lir" if arguments.time and arguments.html is None else "mir"
    _check_options(arguments)
    machine = _machine(arguments)
    if arguments.time and arguments.target:
        raise UsageError(f"inspect: --time runs on this machine, found --target {arguments.target}")
    graph, profile, about, context = _open_graph(arguments)
    sizes = _sizes(arguments, graph, context)
    report = None
    if arguments.time:
        if context is not None:
            sizes |= dict.fromkeys(SAMPLER_SYMBOLS, 0)  # the graph that runs has a sampler: no masks, history or bias
        report, graph, profile = _profile(arguments, graph, sizes, _tokens(arguments, context)[1])
    if arguments.html is not None:
        page = graph_page(graph, machine, profile=profile, assembly=arguments.level == "asm", report=report)
        arguments.html.write_text(page, "utf-8")
        print(f"{about}: all levels in {arguments.html}", file=sys.stderr)
        return 0
    print(f"# {about}, {machine.name}")
    if sizes:
        phase = "sizes" if context is None else arguments.phase
        print(f"# {phase}: " + ", ".join(f"{name} = {size}" for name, size in sorted(sizes.items())))
    chosen = Selection(arguments.stage, arguments.find, arguments.all)
    if arguments.fusion:
        fusions = optimise(lower(graph), machine, profile).report
        print(f"{fusions.within(lambda where: matches(arguments.stage, stage_of(where)))}\n")
    if arguments.links:
        lines = linked_lines(graph, arguments.level, machine, profile, chosen, built=arguments.built)
    else:
        lines = show(graph, arguments.level, machine, chosen, profile=profile, sizes=sizes, built=arguments.built,
                     bind=arguments.bind, report=report)  # fmt: skip
    for line in lines:
        print(line)
    return 0


# -- the graph -------------------------------------------------------------------------------------------------------
def _open_graph(arguments: argparse.Namespace) -> tuple[Graph, CompileProfile | None, str, int | None]:
    """The graph, its profile, a title, and the model's context."""
    if arguments.what.endswith(".rlx"):
        graph = load(Path(arguments.what))
        return graph, None, f"graph {graph.name}", None
    if arguments.what.endswith(EXPORT_SUFFIX):
        return _open_export(Path(arguments.what))
    checkpoint = open_checkpoint(hub.resolve(arguments.what, offline=True).path)
    family, config = checkpoint.family, checkpoint.config
    with checkpoint.file:
        if family.kind != "decoder" and (arguments.phase == "decode" or arguments.past):
            raise UsageError(f"inspect: {arguments.what} is an encoder: it has neither decode nor a past")
        built = build_checkpoint(checkpoint, arguments.cache)
        about = f"{arguments.what}: {family.name} {family.kind}, {config.layers} layers"
        context = min(CONTEXT, int(config.context)) if family.kind == "decoder" else None
        return built.module, built.profile, about, context


def _open_export(path: Path) -> tuple[Graph, CompileProfile | None, str, int | None]:
    """The graph that an export was compiled from. Its code is not loaded."""
    file = read_export(path)
    file.check(("graph", "origins"))
    with as_format_errors(file):
        graph = source_graph(file).verify()
        profile = CompileProfile.from_toml(file.manifest["profile"]) if file.manifest["profile"] else None
    context = file.manifest["model"]["context"] if file.manifest["kind"] == "decoder" else None
    return graph, profile, f"{path}: export of {graph.name}", context


def load(path: Path) -> Graph:
    """Parse and verify a graph file."""
    try:
        with open(path, "rb") as file:
            text = str(console.read_at_most(file, MAX_BYTES, f"inspect: {path}"), "utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    with built_from(Origin(str(path))):
        return Graph.parse(text).verify()


def phase_sizes(batch: int, seq: int, past: int = 0, symbols: Iterable[str] = ()) -> dict[str, int]:
    """Sizes of the models' symbols for `seq` new tokens after `past` cached ones; of rings, only those in `symbols`."""
    layout = KvLayout()
    blocks = layout.blocks(past + seq)
    windows = {s: int(s[4:]) for s in symbols if s[:4] == "ring" and s[4:].isdecimal()}
    rings = {symbol: min(blocks, ring_blocks(window, layout)) for symbol, window in windows.items()}
    pages = {f"pages{windows[symbol]}": batch * own for symbol, own in rings.items()} | {"pages": batch * blocks}
    return {"batch": batch, "seq": seq, "past_seq": past, "blocks": blocks, "picked": batch, **rings, **pages}


def _tokens(arguments: argparse.Namespace, context: int | None) -> tuple[int, int]:
    """New and cached tokens per sequence."""
    decode = arguments.phase == "decode"
    seq = arguments.seq if arguments.seq is not None else 1 if decode else 128
    default_past = 512 if context is None else max(0, min(512, context - seq))
    return seq, arguments.past if arguments.past is not None else default_past if decode else 0


def _sizes(arguments: argparse.Namespace, graph: Graph, context: int | None) -> dict[str, int]:
    """The requested sizes of the graph's symbols."""
    seq, past = _tokens(arguments, context)
    if arguments.time and context is not None and seq + past > context:
        raise UsageError(f"inspect: --time of {past} + {seq} tokens, the model has a context of {context}")
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


def _profile(
    arguments: argparse.Namespace, graph: Graph, sizes: Mapping[str, int], past: int
) -> tuple[Report, Graph, CompileProfile | None]:
    """A report with times and the graph that was run: a model with its weights, or a graph file with synthetic ones."""
    missing = [symbol for symbol in graph.symbols() if symbol not in sizes]
    if missing:
        raise UsageError(f"inspect: --time needs the size of {', '.join(missing)}", hint=f"--size {missing[0]}=128")
    if arguments.what.endswith(".rlx"):
        compiled = compile(graph, arguments.device)
        compiled.set_params({name: stand_in(type_, sizes) for name, type_ in compiled.param_types.items()})
        return compiled.report(_inputs(compiled, sizes, past)), compiled.graph, compiled.profile
    if arguments.what.endswith(EXPORT_SUFFIX) and read_export(arguments.what).manifest["kind"] == "graph":
        compiled = from_export(open_export(arguments.what))
        return compiled.report(_inputs(compiled, sizes, past)), compiled.graph, compiled.profile
    with load_model(arguments.what, cache=arguments.cache, offline=True, device=arguments.device) as model:
        compiled = model.compiled
        return compiled.report(_inputs(compiled, sizes, past)), compiled.graph, compiled.profile


def _inputs(compiled: CompiledGraph, sizes: Mapping[str, int], past: int) -> dict[str, Any]:
    """Synthetic inputs. Positions of new tokens follow the cached ones, so that attention reads all of the past."""
    inputs = compiled.stand_ins(sizes)
    if "positions" in inputs:
        shape = inputs["positions"].shape
        inputs["positions"] = np.broadcast_to(np.arange(past, past + shape[-1], dtype=np.int32), shape).copy()
    return inputs


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines of a level are printed: those of a stage, those that contain a text, repeated layers."""

    stage: str | None = None
    text: str | None = None
    all: bool = False

    @property
    def is_everything(self) -> bool:
        return self.stage is None and self.text is None

    def of(self, lines: Sequence[Line]) -> list[Line]:
        """The selected lines."""
        in_stage = [x for x in lines if matches(self.stage, x.stage)]
        if not in_stage and self.stage is not None:
            named = ", ".join(dict.fromkeys(x.stage.split(".")[0] for x in lines if x.stage))
            raise UsageError(f"inspect: nothing is in stage {self.stage}", hint=f"there are: {named or 'none'}")
        if self.text is None:
            return in_stage
        word = self.text.lower()
        hits = [x for x in in_stage if word in f"{x.text} {x.stage} {x.place}".lower()]
        if not hits:
            raise UsageError(f"inspect: no line has {shortened(self.text, 80)!r}", hint="--level lir searches launches")
        return hits

    def tree(self, lines: Sequence[Line], text: Callable[[Line], str]) -> Iterator[str]:
        """Lines grouped by stage; repeated layers once."""
        yield from tree_text(fold_lines(lines), lambda x: text(x).removeprefix("  "), all_=self.all, pad="  ")


def matches(pattern: str | None, stage: str) -> bool:
    """Whether a stage path is inside the part that a pattern names."""
    if pattern is None:
        return True
    pattern_parts, path = pattern.split("."), stage.split(".")
    return len(path) >= len(pattern_parts) and all(fnmatchcase(f, w) for f, w in zip(path, pattern_parts, strict=False))


# -- levels ----------------------------------------------------------------------------------------------------------
def show(
    graph: Graph, level: str, machine: Target, shown: Selection, *, profile: CompileProfile | None = None,
    sizes: Mapping[str, int] | None = None, built: bool = False, bind: bool = False, report: Report | None = None,
) -> Iterator[str]:  # fmt: skip
    """The lines of a graph at a level."""
    if level == "hir" or (level == "mir" and built):
        yield from _graph_lines(graph if level == "hir" else lower(graph), shown)
        return
    if level == "mir":
        result = optimise(lower(graph), machine, profile)
        yield from _graph_lines(result.bind if bind else result.main, shown)
    else:
        plan = cached_plan(graph, machine, profile)
        program = plan.bind if bind else plan.main
        lines = launch_lines(program, [stage_of(x.where) for x in program.launches])
        chosen = shown.of(lines)
        if level == "lir":
            yield from _program_lines(program, {x.launch for x in chosen}, sizes or {}, shown, report)
        else:
            kernels = {x.kernel: program.launches[x.launch].kernel for x in chosen if x.launch >= 0}
            text = backend_of(machine).kernel_text(kernels.values(), machine, assembly=level == "asm")
            yield from text.splitlines()


def _graph_lines(graph: Graph, shown: Selection) -> Iterator[str]:
    if shown.is_everything and shown.all:
        yield from graph.text(origins=True).splitlines()
        return
    last = ""

    def text(line: Line) -> str:
        """A line with the pass that made it, and its source line unless the line before has the same."""
        nonlocal last
        place = source_line(line.place)
        note = line.place.removeprefix(place).removeprefix(", ") if place == last else line.place
        last = place
        return f"{line.text}  # {note}" if note else line.text

    lines = shown.of(graph_lines(graph))
    body = shown.tree(lines, text)
    yield from (head(graph), *body, tail(graph), "}") if shown.is_everything else body


def _program_lines(
    program: Program, numbers: set[int], sizes: Mapping[str, int], shown: Selection, report: Report | None
) -> Iterator[str]:
    """A program with these sizes: interface, launches, kernels, totals."""
    is_bound = set(program.symbols) <= set(sizes)
    total = sum(x.seconds for x in report.launches) if report is not None else 0.0
    number = {id(launch): i for i, launch in enumerate(program.launches)}

    def text(launch: Launch) -> str:
        notes = []
        if report is not None and total:
            seconds = report.launches[number[id(launch)]].seconds
            notes.append(f"{seconds * 1e6:.1f} µs {seconds / total:.1%}")
        known = launch
        if is_bound:
            known = bind_launch(launch, sizes, program.loop_symbols())
            notes.append(" -> ".join(_shapes(known.views(written=side)) for side in (False, True)))
            notes.append(f"{show_size(int(known.bytes))}, {evaluate(launch.flops, sizes) / 1e6:.3g} MFLOP")
        stage = f"{stage_of(launch.where)}: " if shown.all and stage_of(launch.where) else ""
        return launch_text(known) + (f"  # {stage}{', '.join(notes)}" if notes or stage else "")

    lines = launch_lines(program, [stage_of(x.where) for x in program.launches], show=text)
    if shown.is_everything:
        first, *declared = plain_interface_lines(program)
        yield first.text
        yield from (x.text for x in declared) if shown.all else shown.tree(declared, lambda x: x.text)
        yield from (x.text for x in lines) if shown.all else shown.tree(lines, lambda x: x.text)
    else:
        yield from shown.tree([x for x in lines if x.launch in numbers], lambda x: x.text)
    launches = [program.launches[i] for i in sorted(numbers - {-1})]
    for kernel in {x.kernel.symbol: x.kernel for x in launches}.values():
        yield from ("", *kernel.text().splitlines())
    if not is_bound:
        return
    runs = program.runs(program.all_steps(sizes))
    counted = [(program.launches[i], runs[i]) for i in sorted(numbers - {-1})]
    moved, flops = (sum(evaluate(getattr(x, name), sizes) * n for x, n in counted) for name in ("bytes", "flops"))
    kernels = len({x.kernel.symbol for x in launches})
    yield ""
    yield f"# {len(launches)} launches of {kernels} kernels: {show_size(moved)} of operands, {flops / 1e6:.4g} MFLOP"
    yield f"# arena of the whole program: {show_size(arena(program, sizes))}"
    if report is not None:
        yield f"# launches take {total * 1e6:.1f} µs together, a run {report.seconds * 1e6:.1f} µs"


def linked_lines(
    graph: Graph, level: str, machine: Target, profile: CompileProfile | None, shown: Selection, *, built: bool = False
) -> Iterator[str]:
    """The lines of a level, each with its lowered ops and launches."""
    line, columns = graph_columns(graph, machine, profile=profile)
    titles = {"hir": ("as built",), "mir": ("lowered", "as built") if built else ("optimised",), "lir": ("LIR",)}
    column = next(c for wanted in titles[level] for c in columns if wanted in c.title)
    bind_groups = [
        x for x in column.items if isinstance(x, Group) and x.kind == SECTION
    ]  # the bind program is left out
    lines = list(lines_of([x for x in column.items if x not in bind_groups]))
    notes = link_text(line, level)

    def text(shown_line: Line) -> str:
        note = notes(shown_line)
        return f"{shown_line.text}  # {note}" if note else shown_line.text

    yield from shown.tree([x for x in shown.of(lines) if x.stage or x.sources or x.launch >= 0], text)


def bind_launch(launch: Launch, sizes: Mapping[str, int], loops: Iterable[str] = ()) -> Launch:
    """A launch with numbers in place of symbols, except loop symbols."""

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
    """Bytes of the planned arena of temporary buffers."""
    lives = memory.lifetimes(program)
    return memory.plan(lives, {x.name: evaluate(program.buffers[x.name].type.bytes, sizes) for x in lives}).size
