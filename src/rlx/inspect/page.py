"""A graph as a web page: a tree of its stages next to its levels, fold and searchable, with lines linked across levels.

The page is one file without external resources. The graph is JSON in it, of which the script renders the visible rows
as text; a content security policy allows only the page's own script and style.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.inspect import levels
from rlx.inspect.code import assembly_lines
from rlx.inspect.dispatch import dispatch_report
from rlx.inspect.fold_layers import FOLD, SECTION, STAGE, Group, Item, Line, fold_lines
from rlx.inspect.lineage import Lineage, lineage, lowered_blocks
from rlx.inspect.profiler import Report
from rlx.ir.diff import diff
from rlx.ir.graph import Graph
from rlx.ir.registry import HIR
from rlx.profile import CompileProfile
from rlx.target import Target

# Flags of rows; the script has the same constants.
OPENS, IS_OPEN, IS_FOLD, NEW, GONE, IS_STAGE = 1, 2, 4, 8, 16, 32
OPEN_LINES = 60  # sections with more lines are initially closed


@dataclass(frozen=True, slots=True)
class Column:
    """A level of the page. `links` says how its lines are linked to others: by source ops, launches or kernel."""

    title: str
    about: str
    items: tuple[Item, ...]
    links: str = "ops"
    indent: str = "  "  # removed from its lines, because the tree indents them


def graph_page(
    graph: Graph,
    target: Target,
    *,
    profile: CompileProfile | None = None,
    assembly: bool = False,
    report: Report | None = None,
) -> str:
    """The page of a graph compiled for a target, as HTML.

    `assembly` adds the machine code of its kernels. With a `report` with times, of the same compiled graph, launches
    are coloured by their share of the time.
    """
    line, columns = graph_columns(graph, target, profile=profile, assembly=assembly, report=report)
    program = line.plan.main
    launches, kernels = _count(len(program.launches), "launch"), _count(len(program.kernels()), "kernel")
    about = f"{_count(len(graph), 'node')}, {launches} of {kernels}, {target.name}"
    if report is not None and report.seconds:
        about += f", {report.threads} thread{'s' * (report.threads != 1)}, a run takes {report.seconds * 1e6:.0f} µs"
    writer = _Writer()
    *other_columns, passes = (writer.column(column) for column in columns)
    empty: dict[str, Any] = {name: type(value)() for name, value in passes.items()}
    placeholder = empty | {
        "title": passes["title"],
        "about": passes["about"],
        "links": passes["links"],
        "later": "passes",
    }
    data = {
        "name": graph.name, "about": about, "columns": [*other_columns, placeholder], "sets": list(writer.sets),
        "places": _places(line.graph),
    }  # fmt: skip
    return _document(graph.name, data, passes)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


# -- columns -----------------------------------------------------------------------------------------------------------
def graph_columns(
    graph: Graph, target: Target, *, profile: CompileProfile | None = None, assembly: bool = False,
    report: Report | None = None,
) -> tuple[Lineage, list[Column]]:  # fmt: skip
    """The levels of a graph. Lines are linked by their source ops, at MIR before the passes."""
    mir, blocks = lowered_blocks(graph, profile)
    line = lineage(mir, target, profile)
    return line, list(_columns(graph, blocks, line, target, assembly=assembly, seconds=_seconds(line, report)))


def _seconds(line: Lineage, report: Report | None) -> list[float]:
    """The times of the launches; empty without a report."""
    if report is None:
        return []
    own = [launch.kernel.symbol for launch in line.plan.main.launches]
    reported = [launch.kernel for launch in report.launches]
    if own != reported:
        raise GraphError(
            f"page of {line.graph.name!r}: the report has {len(reported)} launches, this graph {len(own)}, or of other "
            f"kernels",
            hint="give the report of the same compiled graph: f.page(path, report=f.report(inputs))",
        )
    return [launch.seconds for launch in report.launches]


def _columns(
    graph: Graph, blocks: Sequence[frozenset[int]], line: Lineage, target: Target, *, assembly: bool,
    seconds: Sequence[float],
) -> Iterator[Column]:  # fmt: skip
    ops: dict[int, set[int]] = {}
    for op, nodes in enumerate(blocks):
        for node in nodes:
            ops.setdefault(node, set()).add(op)
    built = levels.graph_lines(graph, sources=lambda node: frozenset(ops.get(node.id, ())))
    main, bind = line.plan.main, line.plan.bind
    launches = levels.marked_launch_lines(line, line.main, main, seconds)
    yield Column("Stages", "the parts of the model", tuple(_stages(built, launches)))
    has_blocks = any(node.definition.level == HIR for node in graph.nodes)
    about = "blocks" if has_blocks else "ops"
    yield Column(f"{graph.level.upper()}, as built", about, _framed(graph, built))
    if has_blocks:
        lowered = levels.graph_lines(line.graph)
        yield Column("MIR, lowered", "blocks written as ops", _framed(line.graph, lowered))
    optimised = _framed(line.main, levels.marked_lines(line, line.main))
    program = _program(line, line.main, "buffers", launches)
    kernels = [*levels.kernel_lines(line.main, main)]
    if line.bind.outputs:
        binding = _framed(line.bind, levels.marked_lines(line, line.bind))
        optimised += (_section("once, when weights are set", binding),)
        bind_program = _program(line, line.bind, "buffers", levels.marked_launch_lines(line, line.bind, bind))
        program += (_section("once, when weights are set", bind_program),)
        known = main.kernels()
        kernels += [each for each in levels.kernel_lines(line.bind, bind) if each.kernel not in known]
    yield Column("MIR, optimised", "after all passes", optimised)
    yield Column("LIR", "buffers and launches", program, "launches")
    yield Column("Kernels", "loops over elements", _by_kernel(kernels, launches), "kernel", "")
    if assembly:
        sources = levels.kernel_sources(line.main, main)
        code = [
            Line(text, sources[symbol], kernel=symbol)
            for symbol, kernel in main.kernels().items()
            for text in assembly_lines(kernel, target)
        ]
        yield Column("Assembly", "of the main program", _by_kernel(code, launches), "kernel", "")
    yield Column("Passes", "what each pass changed", tuple(_passes(line)))


def _framed(graph: Graph, lines: Sequence[Line]) -> tuple[Item, ...]:
    return Line(levels.head(graph)), *fold_lines(lines), Line(levels.tail(graph).strip())


def _program(line: Lineage, graph: Graph, title: str, launches: Sequence[Line]) -> tuple[Item, ...]:
    program = line.plan.main if graph is line.main else line.plan.bind
    first, *declared = levels.interface_lines(line, graph, program)
    return first, _section(title, fold_lines(declared)), *fold_lines(launches)


def _section(title: str, items: Sequence[Item]) -> Group:
    group = Group(title, tuple(items), SECTION)
    count = sum(1 for _ in group.lines())
    return Group(title, group.items, SECTION, f"{count} lines", is_open=count <= OPEN_LINES)


def _stages(built: Sequence[Line], launches: Sequence[Line]) -> tuple[Group, ...]:
    """The tree of stages without lines; a stage has the total time of its launches."""
    seconds: dict[str, float] = {}
    for launch in launches:
        path = launch.stage.split(".")
        for depth in range(1, len(path) + 1):
            stage = ".".join(path[:depth])
            seconds[stage] = seconds.get(stage, 0.0) + launch.seconds

    def shown(items: Iterable[Item]) -> Iterator[Group]:
        for item in items:
            if isinstance(item, Group) and item.kind in (STAGE, FOLD):
                lines = list(item.lines())
                inside = tuple(shown(item.items))
                total_seconds = (
                    sum(each.seconds for each in inside) if item.kind == FOLD else seconds.get(item.name, 0.0)
                )
                sources = frozenset().union(*(each.sources for each in lines))
                note = item.note or _count(len(lines), "node")
                yield replace(item, items=inside, note=note, sources=sources, seconds=total_seconds)

    return tuple(shown(fold_lines([replace(each, declares=True) for each in built if each.stage])))


def _by_kernel(lines: Sequence[Line], launches: Sequence[Line]) -> tuple[Item, ...]:
    """A section per kernel, with the number of its launches."""
    sections: list[Item] = []
    for symbol, inside in groupby(lines, key=lambda each: each.kernel):
        own = [launch for launch in launches if launch.kernel == symbol]
        note = _count(len(own), "launch") if own else "once, when weights are set"
        total_seconds = sum(launch.seconds for launch in own)
        sections.append(Group(symbol, tuple(inside), SECTION, note, kernel=symbol, seconds=total_seconds))
    return tuple(sections)


def _passes(line: Lineage) -> Iterator[Group]:
    """The diff of each pass, then the fusion and dispatch reports."""
    for (_, before), (name, after) in zip(line.steps, line.steps[1:], strict=False):
        # Comparing graphs is much faster than a diff.
        if after != before and (change := diff(before, after)):
            lines = tuple(Line(text, mark=mark) for mark, text in change.lines())
            yield Group(name, lines, SECTION, change.summary(), is_open=False)
    for title, report in (("fusion", line.plan.optimised.report), ("dispatch", dispatch_report(line))):
        lines = tuple(Line(text) for text in str(report).splitlines())
        yield Group(title, lines, SECTION, _count(len(lines), "line"), is_open=False)


# -- data --------------------------------------------------------------------------------------------------------------
@dataclass
class _Writer:
    """Writes columns as lists of numbers and strings. Rows are in tree order, with depth and number of descendants;
    sets of ops are deduplicated lists of ranges."""

    sets: dict[tuple[int, ...], int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)

    def column(self, column: Column) -> dict[str, Any]:
        rows = _Rows(self, column.indent)
        rows.add(column.items, 0)
        return {
            "title": column.title, "about": column.about, "links": column.links, "text": rows.text, "note": rows.note,
            "depth": rows.depth, "inside": rows.inside, "flags": rows.flags, "set": rows.sets, "kernel": rows.kernels,
            "micros": rows.micros,
        }  # fmt: skip

    def set_number(self, sources: frozenset[int]) -> int:
        """The number of a set of ops; -1 if it is empty."""
        return self.sets.setdefault(ranges(sources), len(self.sets)) if sources else -1

    def kernel_number(self, symbol: str) -> int:
        return self.kernels.setdefault(symbol, len(self.kernels)) if symbol else -1


def ranges(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers as ranges: first, count, first, count ...

    >>> ranges({1, 2, 3, 7})
    (1, 3, 7, 1)
    """
    pairs: list[int] = []
    for number in sorted(numbers):
        if pairs and number == pairs[-2] + pairs[-1]:
            pairs[-1] += 1
        else:
            pairs += [number, 1]
    return tuple(pairs)


class _Rows:
    """The rows of a column, as parallel lists."""

    def __init__(self, writer: _Writer, indent: str) -> None:
        self.writer, self.indent = writer, indent
        self.text: list[str] = []
        self.depth: list[int] = []
        self.inside: list[int] = []
        self.flags: list[int] = []
        self.sets: list[int] = []
        self.kernels: list[int] = []
        self.note: dict[int, str] = {}
        self.micros: dict[int, float] = {}

    def add(self, items: Iterable[Item], depth: int) -> tuple[frozenset[int], float]:
        """Append items; returns their source ops and seconds."""
        sources: set[int] = set()
        seconds = 0.0
        for item in items:
            own, own_seconds = self.group(item, depth) if isinstance(item, Group) else self.line(item, depth)
            sources |= own
            seconds += own_seconds
        return frozenset(sources), seconds

    def line(self, line: Line, depth: int) -> tuple[frozenset[int], float]:
        first, *body = line.text.removeprefix(self.indent).split("\n")
        flags = {"+": NEW, "-": GONE}.get(line.mark, 0)
        text = f"{first} … {body[-1].strip()}" if body else first
        self.row(text, depth, flags | (OPENS if body else 0), line.sources, line.kernel, line.seconds)
        self.inside[-1] = len(body[:-1])
        for inner in body[:-1]:
            self.row(inner.removeprefix("    "), depth + 1, flags, line.sources, line.kernel, 0.0)
        return line.sources, line.seconds

    def group(self, group: Group, depth: int) -> tuple[frozenset[int], float]:
        number = len(self.text)
        flags = OPENS if group.items else 0
        flags |= (IS_OPEN if group.is_open else 0) | (IS_FOLD if group.is_fold else 0)
        self.row(group.name, depth, flags | (IS_STAGE if group.kind == STAGE else 0), frozenset(), group.kernel, 0.0)
        sources, seconds = self.add(group.items, depth + 1)
        sources, seconds = group.sources or sources, group.seconds or seconds
        self.inside[number] = len(self.text) - number - 1
        self.sets[number] = self.writer.set_number(sources)
        if group.note:
            self.note[number] = group.note
        if seconds:
            self.micros[number] = round(seconds * 1e6, 2)
        return sources, seconds

    def row(self, text: str, depth: int, flags: int, sources: frozenset[int], kernel: str, seconds: float) -> None:
        if seconds:
            self.micros[len(self.text)] = round(seconds * 1e6, 2)
        self.text.append(text)
        self.depth.append(depth)
        self.inside.append(0)
        self.flags.append(flags)
        self.sets.append(self.writer.set_number(sources))
        self.kernels.append(self.writer.kernel_number(kernel))


def _places(graph: Graph) -> dict[str, Any]:
    """Source lines of ops: the distinct lines, and the number of each op's line."""
    numbers: dict[str, int] = {}
    of = [numbers.setdefault(str(node.origin), len(numbers)) for node in graph.nodes]
    return {"text": list(numbers), "of": of}


# -- HTML --------------------------------------------------------------------------------------------------------------
def _document(title: str, data: dict[str, Any], passes: dict[str, Any]) -> str:
    """The HTML page. The data of passes follows the script, so that the rest renders first."""
    style, script = (files("rlx.inspect").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; "
        f"form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n"
        f'<body>\n<noscript>This page needs its script.</noscript>\n<script type="application/json" id="data">'
        f"{as_script(data)}</script>\n<script>{script}</script>\n"
        f'<script type="application/json" id="passes">{as_script(passes)}</script>\n</body></html>\n'
    )


def as_script(data: Any) -> str:
    """JSON that is safe inside a script element, with markup characters escaped."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
