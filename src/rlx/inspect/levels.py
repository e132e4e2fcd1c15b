"""The levels of a graph as lines: nodes, launches and kernels, each with its stage and source ops."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from rlx.inspect.fold_layers import Line
from rlx.inspect.lineage import Lineage, launch_nodes, launch_sources
from rlx.ir.graph import Graph, Node
from rlx.ir.registry import LEAF
from rlx.ir.text import graph_text, node_text, value_text
from rlx.lir.program import Launch, Program, launch_text

_VALUE = re.compile(r"%\d+(\.\d+)?")
_NAME = re.compile(r'\bname="(?:[^"\\]|\\.)*"')
_NUMBER = re.compile(r"\d+")
_PLACE = re.compile(r"(?:.*:\d+|.*\.rlx|from .*|by .*)")  # a source line, a graph file, a block, a pass
SHARED = ("input",)  # belongs to all layers, wherever it is first used


# -- graphs ------------------------------------------------------------------------------------------------------------
def graph_lines(
    graph: Graph,
    stage: Callable[[Node], str] = lambda node: node.origin.stage,
    sources: Callable[[Node], frozenset[int]] = lambda node: frozenset({node.id}),
) -> list[Line]:
    """The nodes of a graph."""
    return [_node_line(node, stage(node), sources(node)) for node in graph.nodes]


def _node_line(node: Node, stage: str, sources: frozenset[int]) -> Line:
    text = node_text(node, pad="  ")
    key = None if node.op in SHARED else _node_key(text)
    reads = tuple(o.node.id for o in node.operands if o is not None)
    place = str(replace(node.origin, stage=""))
    return Line(f"  {text}", sources, stage, key, node.id, reads, LEAF in node.definition.traits, place=place)


def _node_key(text: str) -> str:
    """The text of a node without value numbers and the numbers in its name."""
    return _VALUE.sub("%", _NAME.sub(lambda name: _NUMBER.sub("#", name[0]), text))


def head(graph: Graph) -> str:
    """The first line of a graph's text."""
    return graph_text(graph).partition("\n")[0]


def tail(graph: Graph) -> str:
    """The return line of a graph's text."""
    return "  return " + ", ".join(value_text(v) for v in graph.outputs)


def with_frame(graph: Graph, lines: Sequence[Line]) -> tuple[Line, ...]:
    """The lines of a graph with its first line and its outputs."""
    return (Line(head(graph)), *lines, Line(tail(graph)), Line("}"))


def marked_lines(line: Lineage, graph: Graph) -> list[Line]:
    """The nodes of an optimised graph."""
    return graph_lines(graph, line.stage, line.sources)


# -- programs ----------------------------------------------------------------------------------------------------------
def stage_of(where: str) -> str:
    """The stage path at the beginning of a launch's origin, or an empty string."""
    first = where.split(", ")[0]
    return "" if _PLACE.fullmatch(first) else first


def interface_lines(line: Lineage, graph: Graph, program: Program) -> list[Line]:
    """The declarations of a program. A buffer belongs to the stage that writes it."""
    named = {n.attrs["name"]: n for n in graph.nodes if LEAF in n.definition.traits and "name" in n.attrs}
    sources = {name: line.sources(node) for name, node in named.items()}
    stages = {name: line.stage(node) for name, node in named.items()}
    for number, launch in enumerate(program.launches):
        for view in launch.views(written=True):
            own = launch_sources(graph, program, number)
            sources[view.buffer] = sources.get(view.buffer, frozenset()) | own
            stages.setdefault(view.buffer, _launch_stage(line, graph, program, number))
    lines = []
    for text in program.interface_lines():
        name = buffer_name(text)
        lines.append(_declaration(text, stages.get(name, ""), sources.get(name, frozenset())))
    return lines


def plain_interface_lines(program: Program) -> list[Line]:
    """Like `interface_lines` without lineage: a buffer belongs to the stage that uses it first."""
    stages: dict[str, str] = {}
    for launch in program.launches:
        for view in launch.views():
            stages.setdefault(view.buffer, stage_of(launch.where))
    return [_declaration(text, stages.get(buffer_name(text), "")) for text in program.interface_lines()]


def _declaration(text: str, stage: str, sources: frozenset[int] = frozenset()) -> Line:
    name = buffer_name(text)
    shared = not name or text.split()[0] in SHARED
    return Line(text, sources, stage, None if shared else text.replace(f" {name}:", " #:", 1), declares=True)


def buffer_name(text: str) -> str:
    """The buffer that a line of a program's interface declares."""
    words = re.match(r"  (?:input|output|weight|const|buffer) (.*?): ", text)
    return words[1] if words else ""


def launch_lines(
    program: Program,
    stages: Sequence[str],
    sources: Sequence[frozenset[int]] = (),
    seconds: Sequence[float] = (),
    show: Callable[[Launch], str] = launch_text,
) -> list[Line]:
    """The launches of a program, and the borders of its loops and branches, with the stage of the next launch."""
    number = {id(launch): i for i, launch in enumerate(program.launches)}
    lines: list[Line] = []
    for text in program.launch_lines(lambda launch: f"{show(launch)}\0{number[id(launch)]}"):
        shown, _, i = text.rpartition("\0")
        if not shown:
            lines.append(Line(text, key=text))
            continue
        at = int(i)
        launch = program.launches[at]
        own = sources[at] if sources else frozenset()
        launch_seconds = seconds[at] if seconds else 0.0
        key, symbol = _launch_key(launch), launch.kernel.symbol
        lines.append(Line(shown, own, stages[at], key, kernel=symbol, launch=at, seconds=launch_seconds))
    following = ""
    for at in range(len(lines) - 1, -1, -1):
        following = lines[at].stage if lines[at].launch >= 0 else following
        if lines[at].launch < 0:
            lines[at] = replace(lines[at], stage=following)
    return lines


def _launch_key(launch: Launch) -> Hashable:
    """A key that equivalent launches share. Excludes barriers, which depend on the next launch, not on the layer."""
    views = tuple((view.dtype, view.shape, view.strides, view.offset) for view in launch.views())
    return launch.kernel.symbol, launch.split, launch.units, views


def marked_launch_lines(line: Lineage, graph: Graph, program: Program, seconds: Sequence[float] = ()) -> list[Line]:
    """The launches of a program compiled from a marked graph."""
    numbers = range(len(program.launches))
    stages = [_launch_stage(line, graph, program, i) for i in numbers]
    return launch_lines(program, stages, [launch_sources(graph, program, i) for i in numbers], seconds)


def _launch_stage(line: Lineage, graph: Graph, program: Program, number: int) -> str:
    nodes = launch_nodes(graph, program, number)
    return line.stage(nodes[0]) if nodes else ""


# -- kernels -----------------------------------------------------------------------------------------------------------
def kernel_lines(graph: Graph, program: Program) -> Iterator[Line]:
    """The loops of each kernel."""
    sources = kernel_sources(graph, program)
    for symbol, kernel in program.kernels().items():
        yield from (Line(text, sources[symbol], kernel=symbol) for text in kernel.text().splitlines())


def kernel_sources(graph: Graph, program: Program) -> dict[str, frozenset[int]]:
    """The source ops of each kernel's launches."""
    sources: dict[str, frozenset[int]] = {}
    for i, launch in enumerate(program.launches):
        symbol = launch.kernel.symbol
        sources[symbol] = sources.get(symbol, frozenset()) | launch_sources(graph, program, i)
    return sources
