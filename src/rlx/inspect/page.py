"""A graph as a web page: its levels side by side, and on each of them what came from the line under the pointer.

One file that loads nothing from elsewhere. All text of graphs is escaped, and the page allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rlx.backends.base import backend_of
from rlx.inspect.dispatch import dispatch_report
from rlx.inspect.lineage import Lineage, launch_sources, lineage
from rlx.ir.diff import diff
from rlx.ir.graph import Graph, Node
from rlx.ir.registry import HIR, LEAF
from rlx.ir.text import graph_text, node_text, value_text
from rlx.lir.kernels import Kernel
from rlx.lir.program import Launch, Program, launch_text
from rlx.profile import CompileProfile
from rlx.target import Target

SHOWN_ORIGINS = 4  # places that a tooltip names
GOLDEN = 137.508  # degrees: hues of neighbours differ as much as they can


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a level, and the nodes as built that it came from."""

    text: str
    sources: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Column:
    """A level: its title, what it is in a sentence, its lines."""

    title: str
    about: str
    lines: tuple[Line, ...]


def graph_page(graph: Graph, target: Target, *, profile: CompileProfile | None = None, assembly: bool = False) -> str:
    """The page of a graph compiled for a target, as HTML; `assembly` adds the machine code of its kernels."""
    line = lineage(graph, target, profile)
    places = {node.id: str(node.origin) for node in graph.nodes}
    columns = list(levels(line, target, assembly=assembly))
    launches, kernels = len(line.plan.main.launches), len(line.plan.main.kernels())
    about = f"{len(graph)} nodes, {launches} launches of {kernels} kernels, {target.name}"
    parts = [
        f"<header><h1>{escape(graph.name)}</h1><p>{escape(about)}</p>",
        '<p class="help">Point at a line to see what it came from and what became of it; click to keep it.</p>',
        '<input id="find" type="search" placeholder="find" aria-label="find"></header>',
        f'<main style="--columns:{len(columns)}">',
        *(_column_html(column, places) for column in columns),
        "</main>",
        f"<footer>{''.join(_details(line))}</footer>",
    ]
    return _document(graph.name, "\n".join(parts))


# -- levels -----------------------------------------------------------------------------------------------------------
def levels(line: Lineage, target: Target, *, assembly: bool = False) -> Iterator[Column]:
    """The levels that a graph goes through, the highest first."""
    built = "HIR" if line.graph.level == HIR else "MIR"
    yield Column(f"{built}, as built", "what is computed", built_lines(line.graph))
    if line.graph.level == HIR:
        yield Column("MIR, lowered", "blocks written with ops", _graph_lines(line, line.lowered))
    graphs, programs, kernels = ([*each] for each in zip(*_parts(line), strict=True))
    yield Column("MIR, optimised", "after all passes", _joined(graphs))
    yield Column("LIR", "buffers and launches", _joined(programs))
    yield Column("Kernels", "loops over elements", _joined(kernels))
    if assembly:
        yield Column("Assembly", "of the main program", tuple(_assembly_lines(line, target)))


def _parts(line: Lineage) -> Iterator[tuple[tuple[Line, ...], tuple[Line, ...], tuple[Line, ...]]]:
    """Optimised graph, program and kernels: of what runs each time, and of what runs once when weights are set."""
    yield main_part(line)
    if line.bind.outputs:
        note = Line("# once, when weights are set")
        program = tuple(_program_lines(line, line.bind, line.plan.bind))
        yield (note, *_graph_lines(line, line.bind)), (note, *program), tuple(_kernel_lines(line.bind, line.plan.bind))


def main_part(line: Lineage) -> tuple[tuple[Line, ...], tuple[Line, ...], tuple[Line, ...]]:
    """Optimised graph, program and kernels of what runs each time."""
    program = tuple(_program_lines(line, line.main, line.plan.main))
    return _graph_lines(line, line.main), program, tuple(_kernel_lines(line.main, line.plan.main))


def _joined(parts: Sequence[tuple[Line, ...]]) -> tuple[Line, ...]:
    first, *others = parts
    return (*first, *(row for other in others for row in (Line(""), *other)))


def built_lines(graph: Graph) -> tuple[Line, ...]:
    """The graph as it was built."""
    return _framed(graph, lambda node: frozenset({node.id}))


def _graph_lines(line: Lineage, graph: Graph) -> tuple[Line, ...]:
    return _framed(graph, line.sources)


def _framed(graph: Graph, came_from: Callable[[Node], frozenset[int]]) -> tuple[Line, ...]:
    """The nodes of a graph, and what stands around them: its head, its outputs, the closing brace."""
    head = graph_text(graph).split("\n", 1)[0]
    body = [Line(text, came_from(n)) for n in graph.nodes for text in _indented(n)]
    return (Line(head), *body, Line("  return " + ", ".join(value_text(v) for v in graph.outputs)), Line("}"))


def _indented(node: Node) -> list[str]:
    return ("  " + node_text(node, pad="  ")).splitlines()


def _program_lines(line: Lineage, graph: Graph, program: Program) -> Iterator[Line]:
    found = [launch_sources(graph, program, i) for i in range(len(program.launches))]
    named = [n for n in graph.nodes if LEAF in n.definition.traits and "name" in n.attrs]
    leaves = {n.attrs["name"]: line.sources(n) for n in named}
    for launch, ids in zip(program.launches, found, strict=True):
        for view in launch.views(written=True):
            leaves[view.buffer] = leaves.get(view.buffer, frozenset()) | ids
    number = {id(launch): i for i, launch in enumerate(program.launches)}

    def numbered(launch: Launch) -> str:
        return f"{launch_text(launch)}\0{number[id(launch)]}"

    launches = list(program.launch_lines(numbered))
    head = program.text(kernels=False).splitlines()
    for text in head[: len(head) - len(launches)]:
        words = text.split()
        name = words[1].rstrip(":") if len(words) > 1 and text.startswith("  ") else ""
        yield Line(text, leaves.get(name, frozenset()))
    for text in launches:
        shown, _, i = text.partition("\0")
        yield Line(shown, found[int(i)] if i else frozenset())


def _kernel_sources(graph: Graph, program: Program) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    for i, launch in enumerate(program.launches):
        symbol = launch.kernel.symbol
        found[symbol] = found.get(symbol, frozenset()) | launch_sources(graph, program, i)
    return found


def _kernel_lines(graph: Graph, program: Program) -> Iterator[Line]:
    found = _kernel_sources(graph, program)
    for i, (symbol, kernel) in enumerate(program.kernels().items()):
        if i:
            yield Line("")
        yield from (Line(text, found[symbol]) for text in kernel.text().splitlines())


def _assembly_lines(line: Lineage, target: Target) -> Iterator[Line]:
    found = _kernel_sources(line.main, line.plan.main)
    for symbol, kernel in line.plan.main.kernels().items():
        yield Line(f"# {symbol}", found[symbol])
        yield from (Line(text, found[symbol]) for text in assembly_lines(kernel, target))


def assembly_lines(kernel: Kernel, target: Target) -> list[str]:
    """The instructions and labels of a kernel, without directives."""
    text = backend_of(target).kernel_text([kernel], target, assembly=True)
    lines = (line.expandtabs(4) for line in text.splitlines())
    return [x for x in lines if x.strip() and (x.rstrip().endswith(":") or x.lstrip()[0] not in ".#")]


# What an inner loop looks like: multiply-adds, or at least vectors.
BUSY = re.compile(r"vfn?m(add|sub)|fml[as]|llvm\.fma"), re.compile(r"\b[xyz]mm\d|\bv\d+\.| x (float|double|i\d+)>")


def busiest(lines: Sequence[str], count: int) -> list[str]:
    """The `count` lines of LLVM text or assembly that do most of the arithmetic."""
    found = [[len(pattern.findall(line)) for line in lines] for pattern in BUSY]
    hits = next((each for each in found if any(each)), found[-1])
    starts = range(max(1, len(lines) - count + 1))
    best = max(starts, key=lambda at: (sum(hits[at : at + count]), -at))
    return list(lines[best : best + count])


def easiest(program: Program) -> Kernel | None:
    """The kernel that is shown where there is room for one: loops rather than tiles, and the shortest."""
    kernels = program.kernels().values()
    return min(kernels, key=lambda k: (k.kind != "loops", len(k.text())), default=None)


def excerpt(line: Lineage, target: Target, count: int) -> Column:
    """The assembly of one kernel, where it works hardest."""
    kernel = easiest(line.plan.main)
    if kernel is None:
        return Column("Assembly", "there is nothing to compute", ())
    found = _kernel_sources(line.main, line.plan.main)[kernel.symbol]
    lines = busiest(assembly_lines(kernel, target), count)
    return Column("Assembly", kernel.symbol, tuple(Line(text, found) for text in lines))


# -- reports ----------------------------------------------------------------------------------------------------------
def _details(line: Lineage) -> Iterator[str]:
    for (_, before), (name, after) in zip(line.steps, line.steps[1:], strict=False):
        change = diff(before, after)
        if change:
            marked = ((mark, text) for mark, text in change.lines())
            yield _folded(f"pass {name}: {change.summary()}", marked)
    yield _folded("fusion", ((" ", text) for text in str(line.plan.optimised.report).splitlines()))
    yield _folded("dispatch", ((" ", text) for text in str(dispatch_report(line)).splitlines()))


def _folded(title: str, lines: Iterable[tuple[str, str]]) -> str:
    kinds = {"+": "new", "-": "gone"}
    shown = "".join(f'<div class="{kinds.get(m, "same")}">{escape(f"{m} {text}".rstrip())}</div>' for m, text in lines)
    return f"<details><summary>{escape(title)}</summary><pre>{shown}</pre></details>\n"


# -- HTML -------------------------------------------------------------------------------------------------------------
def _column_html(column: Column, places: dict[int, str]) -> str:
    lines = "".join(_line_html(line, places) for line in column.lines)
    head = f"<h2>{escape(column.title)}<small>{escape(column.about)}</small></h2>"
    return f"<section>{head}<pre>{lines}</pre></section>\n"


def _line_html(line: Line, places: dict[int, str]) -> str:
    text = escape(line.text) or "&nbsp;"
    if not line.sources:
        return f"<div>{text}</div>"
    ids = sorted(line.sources)
    hue = round(max(ids) * GOLDEN % 360)
    title = escape(_origins(ids, places), quote=True)
    return f'<div class="l" style="--hue:{hue}" data-s="{" ".join(map(str, ids))}" title="{title}">{text}</div>'


def _origins(ids: Sequence[int], places: dict[int, str]) -> str:
    found = list(dict.fromkeys(f"%{i}  {places[i]}" for i in ids if places[i]))
    more = [f"and {len(found) - SHOWN_ORIGINS} more"] if len(found) > SHOWN_ORIGINS else []
    return "\n".join(found[:SHOWN_ORIGINS] + more)


def _document(title: str, body: str) -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #69737d; --paper: #fff; --panel: #f5f7f9; --edge: #d8dee4;
  --lit: 88%; --new: #116329; --gone: #a40e26; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde3ea; --soft: #8b949e; --paper: #0f1419; --panel: #161c23;
  --edge: #2d353e; --lit: 24%; --new: #56d364; --gone: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0; font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
header { display: flex; gap: 1.2em; align-items: baseline; padding: .6em 1em; flex-wrap: wrap; }
h1 { font-size: 1.15em; margin: 0; } header p { margin: 0; color: var(--soft); } header .help { flex: 1; }
input { font: inherit; padding: .2em .6em; border: 1px solid var(--edge); border-radius: 6px; background: var(--panel);
  color: inherit; }
main { display: flex; height: calc(100vh - 3.4em); border-top: 1px solid var(--edge);
  border-bottom: 1px solid var(--edge); overflow-x: auto; }
section { flex: none; width: max(21em, calc(100% / var(--columns))); overflow: auto; resize: horizontal;
  border-right: 1px solid var(--edge); }
section:last-child { border-right: 0; }
h2 { position: sticky; top: 0; left: 0; margin: 0; padding: .5em .8em; font-size: .95em; background: var(--panel);
  border-bottom: 1px solid var(--edge); z-index: 1; }
h2 small { font-weight: normal; color: var(--soft); margin-left: .8em; }
pre { margin: 0; padding: .5em 0 2em; font: 12px/1.55 ui-monospace, "DejaVu Sans Mono", monospace; width: max-content;
  min-width: 100%; tab-size: 4; }
pre div { padding: 0 .9em; white-space: pre; border-left: 3px solid transparent; }
.l { border-left-color: hsl(var(--hue) 55% 55%); cursor: pointer; }
.l:hover, .l.on { background: hsl(var(--hue) 75% var(--lit)); }
.l.pin { outline: 1px solid hsl(var(--hue) 60% 50%); outline-offset: -1px; }
.has-query pre div:not(.hit) { opacity: .28; }
footer { padding: .8em 1em 3em; } details { margin: .2em 0; } summary { cursor: pointer; padding: .15em 0; }
footer pre { background: var(--panel); border: 1px solid var(--edge); border-radius: 6px; padding: .5em 0;
  overflow-x: auto; width: auto; }
.new { color: var(--new); } .gone { color: var(--gone); } .same { color: var(--soft); }
"""

SCRIPT = """
'use strict';
const lines = [...document.querySelectorAll('.l')];
const from = new Map(lines.map(l => [l, new Set(l.dataset.s.split(' '))]));
const by = new Map();
for (const l of lines) for (const s of from.get(l)) { if (!by.has(s)) by.set(s, []); by.get(s).push(l); }
let pinned = null, lit = [];
function light(line) {
  lit.forEach(l => l.classList.remove('on'));
  lit = line ? [...new Set([...from.get(line)].flatMap(s => by.get(s)))] : [];
  lit.forEach(l => l.classList.add('on'));
}
function show(line) {
  for (const section of document.querySelectorAll('main section')) {
    if (section.contains(line)) continue;
    const first = lit.find(l => section.contains(l));
    if (first) section.scrollTop += first.getBoundingClientRect().top - section.getBoundingClientRect().top - 90;
  }
}
function pin(line) {
  if (pinned) pinned.classList.remove('pin');
  pinned = pinned === line ? null : line;
  if (pinned) { pinned.classList.add('pin'); light(pinned); show(pinned); }
}
const main = document.querySelector('main');
main.addEventListener('mouseover', e => { if (!pinned) light(e.target.closest('.l')); });
main.addEventListener('mouseleave', () => { if (!pinned) light(null); });
main.addEventListener('click', e => {
  const line = e.target.closest('.l');
  if (line && !getSelection().toString()) pin(line);
});
addEventListener('keydown', e => { if (e.key === 'Escape' && pinned) { pin(pinned); light(null); } });
document.getElementById('find').addEventListener('input', e => {
  const word = e.target.value.trim().toLowerCase();
  main.classList.toggle('has-query', word !== '');
  for (const d of main.querySelectorAll('pre div'))
    d.classList.toggle('hit', d.textContent.toLowerCase().includes(word));
});
const start = decodeURIComponent(location.hash.slice(1)).replace('%', '');
if (by.has(start)) { pin(by.get(start)[0]); by.get(start)[0].scrollIntoView({ block: 'center' }); }
"""
