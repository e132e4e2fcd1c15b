"""The stages of flows: a list, one of them in detail, or all as a page.

Signatures, formulas and settings come from the classes; weights and inputs are recorded while an example is built.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import cache
from typing import Any

from rlx.cli.console import UsageError
from rlx.cli.stage_examples import EXAMPLES, LAYERS, Example
from rlx.errors import nearest
from rlx.fast_dataclass import dataclass
from rlx.flow import FlowCtx, ModelFlow, SideOutputs, stages
from rlx.flow.init import WantedWeights
from rlx.flow.layers import StageList
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.structure import emit_stage
from rlx.flow.state import CacheBindings, FlowValue
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import HIR
from rlx.types import ShapeLike, Size, TensorType


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("stages", help="list the stages that models are assembled from, or show one")
    command.add_argument("name", nargs="?", help="a stage or a group, such as RmsNorm, swiglu or attention")
    command.add_argument("--markdown", action="store_true", help="all stages as a page")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    known = all_stages()
    if arguments.markdown:
        print(markdown(), end="")
    elif arguments.name is None:
        for group, members in _groups().items():
            print(f"{group}: {', '.join(stage.__name__ for stage in members)}")
    elif chosen := _chosen(arguments.name, known):
        print("\n".join(map(_entry, chosen)).rstrip())
    else:
        hint = nearest(arguments.name, known) or "`rlx stages` lists them"
        raise UsageError(f"stages: no stage is called {arguments.name!r}", hint=hint)
    return 0


def _chosen(name: str, known: dict[str, type[FlowStage]]) -> Sequence[type[FlowStage]]:
    """The stage called so, or like the method of flows (`swiglu`), or those of a group."""
    plain = name.replace("_", "").lower()
    return [stage for key, stage in known.items() if plain == key.lower()] or _groups().get(name, ())


def all_stages() -> dict[str, type[FlowStage]]:
    """Every stage of `rlx.flow.stages` by name."""
    public = {name: item for name, item in vars(stages).items() if inspect.isclass(item)}
    return {name: item for name, item in public.items() if issubclass(item, FlowStage) and item is not FlowStage}


# -- what a build tells -----------------------------------------------------------------------------------------------
@dataclass
class Record:
    """What a stage read and declared while it was built."""

    result: Value | None = None
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)  # read from the source
    computed: dict[str, tuple[int, ...]] = field(default_factory=dict)  # params that the stage computes
    read: dict[str, TensorType] = field(default_factory=dict)  # inputs that the flow has to declare
    declared: dict[str, TensorType] = field(default_factory=dict)  # inputs that the stage declares
    states: dict[str, TensorType] = field(default_factory=dict)
    side: dict[str, TensorType] = field(default_factory=dict)


class _Inputs(FlowCtx):
    """Notes the inputs that stages ask for."""

    asked: dict[str, Value]

    def input(self, name: str, shape: ShapeLike | TensorType, dtype: Any = "f32") -> Value:
        self.asked[name] = super().input(name, shape, dtype)
        return self.asked[name]

    def flow_input(self, name: str) -> FlowValue:
        value = super().flow_input(name)
        self.asked[name] = value.id
        return value


@cache
def _record(name: str) -> Record:
    return record((EXAMPLES | LAYERS)[name])


def record(example: Example) -> Record:
    """Build an example, and note what its stage asks for."""
    graph, weights = Graph("example", level=HIR), WantedWeights(example.shapes)
    ctx = _Inputs(graph, weights=weights)
    ctx.asked = {}
    if example.cache is not None:
        ctx.state.cache = CacheBindings(graph, example.cache)
    value = None if example.value is None else ctx.wrap(ctx.input("value", example.value, example.dtype))
    for name, (shape, kind) in example.inputs.items():
        ctx.input(name, shape, kind)
    for stage in example.before:
        value = emit_stage(ctx, stage, value)
    known, params = dict(ctx.state.inputs), set(ctx.params)
    ctx.asked, weights.asked = {}, {}
    value = emit_stage(ctx, example.stage, value)
    types = {name: asked.type for name, asked in ctx.asked.items()}
    inputs = {node.attrs["name"]: node.types[0] for node in graph.inputs if node.op != "state"}
    return Record(
        None if value is None else value.id,
        weights.asked,
        {name: array.shape for name, array in ctx.params.items() if name not in params},
        {name: type_ for name, type_ in types.items() if name in known},
        {name: type_ for name, type_ in inputs.items() if name not in known},
        {node.attrs["name"]: node.types[0] for node in graph.inputs if node.op == "state"},
        {name: pushed.type for side in _sides(example.stage) for name, pushed in side.drain()},
    )


def _sides(stage: FlowStage) -> Iterator[SideOutputs]:
    for f in fields(stage):  # type: ignore[arg-type]
        if isinstance(side := getattr(stage, f.name), SideOutputs):
            yield side


def _shape(shape: Sequence[Size | str], names: Mapping[int, str]) -> str:
    """Sizes by their names."""
    return "[" + ", ".join(names.get(size, str(size)) if isinstance(size, int) else str(size) for size in shape) + "]"


def _type(type_: TensorType, names: Mapping[int, str]) -> str:
    return f"{type_.dtype.name}{_shape(type_.shape, names)}"


# -- what classes tell ------------------------------------------------------------------------------------------------
FIELD = re.compile(r"^    (?P<name>\w+): [^#\n]*#(?P<text>[^\n]*)$", re.M)
CALLED = re.compile(r"\bself\.(\w+)\(")


def _comments(stage: type) -> dict[str, str]:
    """The comments behind the fields of a class, its bases' included."""
    comments: dict[str, str] = {}
    for base in reversed(stage.__mro__):
        if base.__module__.startswith("rlx."):
            comments |= {m["name"]: m["text"].strip() for m in FIELD.finditer(inspect.getsource(base))}
    return comments


def _signature(function: Any) -> str:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(plain))


def _constructors(stage: type[FlowStage]) -> Iterator[tuple[str, str]]:
    """Other constructors, and what each says about itself."""
    for name in dir(stage):
        method = inspect.getattr_static(stage, name)
        if isinstance(method, classmethod) and not name.startswith("_"):
            yield f"{stage.__name__}.{name}{_signature(getattr(stage, name))}", inspect.getdoc(method) or ""


@cache
def flow_methods() -> dict[str, tuple[str, ...]]:
    """Methods that append stages, and the names of those, read from the source of each method."""
    public = {n: m for cls in (StageList, ModelFlow) for n, m in vars(cls).items() if n[0] != "_" and callable(m)}
    methods = {name: inspect.getsource(method) for name, method in public.items()}
    known = "|".join(sorted(all_stages(), key=len, reverse=True))
    appended = {n: tuple(dict.fromkeys(re.findall(rf"\b({known})\b[(.]", s))) for n, s in methods.items()}

    def through(name: str) -> tuple[str, ...]:
        if name in LAYERS:
            return tuple(_used(LAYERS[name].stage))
        return appended[name] or next((through(m) for m in CALLED.findall(methods[name]) if m in methods), ())

    return {name: stages for name in methods if name not in ("build", "edit") and (stages := through(name))}


ANY_STAGE = {
    "stage": "the stage that it is given",
    "plugin": "the stage that it is given, or the one registered under this name",
}  # methods whose source names no class


# -- the page ---------------------------------------------------------------------------------------------------------
INTRODUCTION = """# Stages

Every stage that models are assembled from, by the file that declares it, and the methods of a flow that append them.
This page is written by `rlx stages --markdown`: signatures, formulas and settings come from the classes, weights and
inputs from building one example of each stage. `pytest --update tests/test_docs.py` writes it again. [Assembling
models](flow.md) explains how stages work together; `rlx stages NAME` shows one of them.

In formulas x is the value that flows into the stage and y the value that flows on. Linear weights are stored
`[out, in]`, as in files, so `x @ wᵀ` is a linear map. Weight names are those of the example, which is the first layer
of a model in the naming of Hugging Face; the keys and prefixes that you pass decide them. *Weights* are read from the
weight source, *params* are computed by the stage, *declares* are graph inputs that the stage adds, and *reads* are
inputs that the flow must have declared. In shapes, `inner` is the width of a feed-forward.
"""
MANY = 3  # names beyond which a common prefix is said once
ORDER = (
    "embed", "norm", "ffn", "attention", "decoder", "encoder", "vision", "moe", "hybrid", "parts", "rope_by_length",
    "structure", "streams", "custom",
)  # fmt: skip


def _groups() -> dict[str, list[type[FlowStage]]]:
    """Stages by the file that declares them, in its order."""
    groups: dict[str, list[type[FlowStage]]] = {name: [] for name in ORDER}
    for stage in all_stages().values():
        groups[stage.__module__.rpartition(".")[2]].append(stage)
    return {group: sorted(members, key=lambda s: inspect.getsourcelines(s)[1]) for group, members in groups.items()}


def markdown() -> str:
    """All stages as a page."""
    groups = _groups()
    parts = [INTRODUCTION]
    links = {group: ", ".join(f"[{s.__name__}](#{s.__name__.lower()})" for s in m) for group, m in groups.items()}
    parts.append("\n".join(f"- [{group}](#{group}py): {text}" for group, text in links.items()) + "\n")
    for group, members in groups.items():
        module = inspect.getmodule(members[0])
        about = inspect.cleandoc((module.__doc__ if module else None) or "").split("\n\n")[0].replace("\n", " ")
        parts.append(f"## {group}.py\n{about}\n")
        parts += [_entry(stage, "### ") for stage in members]
    parts += [_layers(), _methods()]
    return "\n".join(parts)


def _entry(stage: type[FlowStage], heading: str = "") -> str:
    """What is known of a stage: a section of the page, or text for a terminal if there is no heading."""
    name, comments = stage.__name__, _comments(stage)
    lines = [f"{heading}{name}", f"`{name}{_signature(stage)}`", "", inspect.getdoc(stage) or "", ""]
    base = next((b for b in stage.__mro__[1:] if b.__name__ in EXAMPLES), None)
    inherited = _comments(base) if base else {}
    for f in fields(stage):  # type: ignore[arg-type]
        if f.init and f.name in comments and comments[f.name] != inherited.get(f.name):
            lines.append(f"- `{f.name}`: {comments[f.name]}")
    if base:
        shown = f"[{base.__name__}](#{base.__name__.lower()})" if heading else base.__name__
        lines.append(f"- other settings: as in {shown}")
    lines += [f"- also `{call}`: {doc}" for call, doc in _constructors(stage)]
    lines += _facts(_record(name), EXAMPLES[name])
    methods = [f"`{method}`" for method, appended in flow_methods().items() if appended == (name,)]
    if methods:
        lines.append(f"- methods of a flow: {', '.join(methods)}")
    file = f"{stage.__module__.replace('.', '/')}.py"
    place = f"[{stage.__module__}](../src/{file})" if heading else f"{file}:{inspect.getsourcelines(stage)[1]}"
    lines.append(f"- declared in: {place}")
    return "\n".join(lines) + "\n"


def _facts(record: Record, example: Example) -> Iterator[str]:
    names = example.names
    before = "nothing" if example.value is None else f"`{example.dtype}{_shape(example.value, names)}`"
    after = "nothing" if record.result is None else f"`{_type(record.result.type, names)}`"
    yield "- value: any, unchanged" if before == after == "nothing" else f"- value: {before} to {after}"
    for label, shapes in {"weights": record.weights, "params": record.computed}.items():
        yield from _listed(label, {name: _shape(shape, names) for name, shape in shapes.items()})
    typed = {"reads": record.read, "declares": record.declared, "states": record.states, "side outputs": record.side}
    for label, types in typed.items():
        yield from _listed(label, {name: _type(type_, names) for name, type_ in types.items()})


def _listed(label: str, items: Mapping[str, str]) -> Iterator[str]:
    """Names with their shapes or types on one line, or under their common prefix where there are many."""
    if not items:
        return
    prefix = _common_prefix(items) if len(items) > MANY else ""
    own = {name.removeprefix(f"{prefix}."): text for name, text in items.items()} if prefix else items
    under = f" under `{prefix}`" if prefix else ""
    yield f"- {label}{under}: {', '.join(f'`{name}` `{text}`' for name, text in own.items())}"


def _common_prefix(names: Iterable[str]) -> str:
    """The dotted prefix that all names have."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns))


def _layers() -> str:
    """Layers that are assembled from the stages above."""
    parts = [
        "## Layers of several stages\nMethods of a flow that append a layer, or several, made of the stages above.\n"
    ]
    for name, example in LAYERS.items():
        method = getattr(ModelFlow, name)
        used = ", ".join(f"[{s}](#{s.lower()})" for s in _used(example.stage))
        lines = [f"### {name}", f"`{name}{_signature(method)}`", "", inspect.getdoc(method) or "", ""]
        lines += [f"- stages: {used}", *_facts(_record(name), example)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _used(stage: FlowStage) -> list[str]:
    """The classes of the stages inside of one, each once, in order."""
    inner: Iterable[FlowStage] = ()
    match stage:
        case stages.Sequence():
            inner = stage.stages
        case stages.Named():
            inner = (stage.inner,)
        case stages.Repeat():
            inner = (stage.at(0),)
        case _:
            return [type(stage).__name__]
    return list(dict.fromkeys(name for part in inner for name in _used(part)))


def _methods() -> str:
    lines = [
        "## Methods of a flow",
        "Each returns a longer flow. `LayerStack` has the same ones, except `lm_head`.",
        "",
    ]
    lines += ["| method | appends |", "| --- | --- |"]
    rows = {name: ", ".join(f"[{s}](#{s.lower()})" for s in appended) for name, appended in flow_methods().items()}
    for name, links in (ANY_STAGE | rows).items():
        signature = _signature(getattr(ModelFlow, name)).replace("|", "\\|")
        lines.append(f"| `{name}{signature}` | {links} |")
    return "\n".join(lines) + "\n"
