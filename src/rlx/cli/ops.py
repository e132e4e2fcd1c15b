"""`rlx ops [NAME]`: lists the ops by group, or shows one: meaning, samples, and where each of its rules is.

`rlx ops --markdown` writes `docs/ops.md`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import rlx.hir.lower
from rlx import dtypes
from rlx.cli.console import UsageError
from rlx.dtypes import DType
from rlx.errors import RlxError
from rlx.ir import registry
from rlx.ir.graph import Graph
from rlx.ir.registry import OpDef, Sample
from rlx.ir.text import attr_text
from rlx.lir import forms
from rlx.lir.forms.elementwise import scalar_form
from rlx.lir.schedule import loop_form
from rlx.mir.common_forms import common_form
from rlx.runtime.session import Session
from rlx.transforms import rule_tables, rules  # noqa: F401 (rules fills the tables)
from rlx.types import TensorType

FLOATS = tuple(d for d in dtypes.ALL if d.is_float)
INTEGERS = tuple(d for d in dtypes.ALL if d.is_integer)
CLASSES = {
    "numbers and bool": (*FLOATS, *INTEGERS, dtypes.BOOL),
    "numbers": (*FLOATS, *INTEGERS),
    "floats": FLOATS,
    "integers": INTEGERS,
}
EXAMPLES = 2  # per op


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("ops", help="list the ops, or show one")
    command.add_argument("name", nargs="?", help="an op")
    command.add_argument("--markdown", action="store_true", help="all ops as a Markdown page")
    command.add_argument("--module", "-m", help="import this module first, for ops that it declares")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.module:
        import_module(arguments.module, "ops")
    if arguments.markdown:
        print(markdown(), end="")
    elif arguments.name:
        print(describe(registry.get(arguments.name)))
    else:
        for group, members in groups(registry.OPS.values()).items():
            print(f"{group}: {', '.join(o.name for o in members)}")
    return 0


def import_module(module: str, command: str) -> None:
    """Import a module for the ops that it declares."""
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{command}: cannot import {module!r}: {error}") from error


def groups(ops: Iterable[OpDef]) -> dict[str, list[OpDef]]:
    """Ops by the file that declares them, in order of declaration."""
    by_group: dict[str, list[OpDef]] = {}
    for op in ops:
        by_group.setdefault(op.group, []).append(op)
    return dict(sorted(by_group.items()))


# -- one op -----------------------------------------------------------------------------------------------------------
def describe(op: OpDef) -> str:
    """An op: its signature, its docstring, and file and line of each rule."""
    lines = [f"{op.name}{_signature(op)}   [{op.level}, {op.group}]", "", op.doc, ""]
    lines += [f"  {label:12} {text}" for label, text in facts(op)]
    for cell, place in (cells(op) | cells_elsewhere(op)).items():
        lines.append(f"  {cell:12} {place}")
    lines.append(f"  {'samples':12} {len(op.samples)}")
    return "\n".join(lines)


def _signature(op: OpDef) -> str:
    parts = [f"*{n}" if op.schema.variadic and n == op.schema.operands[-1] else n for n in op.schema.operands]
    for i in range(len(parts) - op.schema.optional, len(parts)):
        parts[i] += "=None"
    attrs = [n if d is registry.REQUIRED else f"{n}={d!r}" for n, d in op.schema.attrs.items()]
    star = ["*"] if attrs and not op.schema.variadic else []
    return f"({', '.join([*parts, *star, *attrs])})"


def cells(op: OpDef) -> dict[str, str]:
    """File and line of each rule of an op."""
    forms.load_all()
    places = {"declared": op.place, "type rule": registry.place_of(op.rule)}
    if op.reference is not None:
        places["reference"] = registry.place_of(op.reference)
    if op.name in scalar_form:
        places["scalar form"] = registry.place_of(scalar_form[op.name])
    elif registry.ELEMENTWISE in op.traits:
        places["scalar form"] = f"the emitter's {op.scalar!r}"
    if op.name in loop_form:
        places["loop form"] = registry.place_of(loop_form[op.name])
    if op.decompose is not None:
        places["decomposed"] = registry.place_of(op.decompose)
    if op.name in common_form:
        places["common form"] = registry.place_of(common_form[op.name])
    if op.name in rlx.hir.lower.lowering:
        places["lowering"] = registry.place_of(rlx.hir.lower.lowering[op.name])
    return _short(places)


def cells_elsewhere(op: OpDef) -> dict[str, str]:
    """File and line of an op's derivative and vmap rules, and of the form that the default device has for it."""
    tables: dict[str, registry.RuleTable[Any]] = {
        "partials": rule_tables.partials, "vjp": rule_tables.vjp, "jvp": rule_tables.jvp,
        "linearise": rule_tables.linearise, "push": rule_tables.push, "parts": rule_tables.parts,
        "vmap": rule_tables.batching,
    }  # fmt: skip
    places = {cell: registry.place_of(table[op.name]) for cell, table in tables.items() if op.name in table}
    if not op.is_builtin and "vmap" not in places:
        if registry.ELEMENTWISE in op.traits:
            places["vmap"] = "elementwise: the same op on the batch"
        else:
            places["vmap"] = "of the decomposition" if op.decompose is not None else "a scan over the batch: no rule"
    target = Session().target
    if (form := target.forms().get(op.name)) is not None:
        places[f"{target.device} form"] = f"{form.__module__.replace('.', '/')}.py, {form.__qualname__}"
    return _short(places)


def _short(places: Mapping[str, str]) -> dict[str, str]:
    """Places relative to the folder of the package."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(inspect.getfile(rlx))))
    return {cell: place.removeprefix(root + os.sep) for cell, place in places.items()}


def facts(op: OpDef) -> Iterator[tuple[str, str]]:
    """Facts derived from samples: element types of each operand, and examples."""
    types = operand_types(op)
    if len(set(types.values())) == 1:
        yield "types", next(iter(types.values()))
    elif types:
        yield "types", "; ".join(f"{name}: {text}" for name, text in types.items())
    for text in examples(op):
        yield "example", text


# -- samples ----------------------------------------------------------------------------------------------------------
def examples(op: OpDef) -> list[str]:
    """Samples with their result types, shortest first."""
    texts = [text for s in op.samples if (text := _example(op, s)) is not None]
    return sorted(dict.fromkeys(texts), key=len)[:EXAMPLES]


def _example(op: OpDef, s: Sample) -> str | None:
    operands = [None if o is None else TensorType(o.shape, dtypes.dtype(o.dtype)) for o in s.operands]
    results = _results(op, s, operands)
    if results is None or any(isinstance(v, Graph) for v in s.attrs.values()):
        return None
    arguments = ["none" if t is None else str(t) for t in operands]
    arguments += [f"{k}={attr_text(v if not isinstance(v, list) else tuple(v))}" for k, v in s.attrs.items()]
    return f"{op.name}({', '.join(arguments)}) -> {', '.join(map(str, results))}"


def _results(op: OpDef, s: Sample, operands: list[TensorType | None]) -> tuple[TensorType, ...] | None:
    """The result types for operands of a sample; None if the type rule rejects them."""
    graph = Graph("sample", level=op.level)
    leaves = [None if t is None else graph.param(f"p{i}", t.shape, t.dtype) for i, t in enumerate(operands)]
    try:
        return graph.build(op.name, leaves, dict(s.attrs)).types
    except RlxError:
        return None


def operand_types(op: OpDef) -> dict[str, str]:
    """The element types of each operand that the type rule accepts, in place of those of samples."""
    names = op.schema.operands[:1] if op.schema.variadic else op.schema.operands
    accepted_types = [
        [d for d in dtypes.ALL if any(_accepts(op, s, i, d) for s in op.samples)] for i in range(len(names))
    ]
    needs_number = all(dtypes.BOOL in accepted for accepted in accepted_types) and not _takes_bools(op)
    types = {}
    for position, (name, accepted) in enumerate(zip(names, accepted_types, strict=True)):
        specs = [o for s in op.samples for o in s.operands[position : position + 1] if o is not None]
        packed = sorted({o.dtype for o in specs if dtypes.dtype(o.dtype).is_packed})
        if needs_number:
            numbers = _class_of([d for d in accepted if d is not dtypes.BOOL])
            types[name] = f"{numbers}; bool beside a number"
        elif accepted or packed:
            types[name] = ", ".join(filter(None, [_class_of(accepted), *packed]))
    return types


def _takes_bools(op: OpDef) -> bool:
    """Whether all operands may be bool at the same time."""
    for s in op.samples:
        operands = [None if o is None else TensorType(o.shape, dtypes.BOOL) for o in s.operands]
        if _results(op, s, operands) is not None:
            return True
    return False


def _accepts(op: OpDef, s: Sample, position: int, wanted: DType) -> bool:
    """Whether an operand, and the others with the same type in the sample, may have another type."""
    own = s.operands[position] if position < len(s.operands) else None
    if own is None or dtypes.dtype(own.dtype).is_packed:
        return False
    kinds = [None if o is None else wanted if o.dtype == own.dtype else dtypes.dtype(o.dtype) for o in s.operands]
    pairs = zip(s.operands, kinds, strict=True)
    operands = [None if o is None or kind is None else TensorType(o.shape, kind) for o, kind in pairs]
    return _results(op, s, operands) is not None


def _class_of(accepted: list[DType]) -> str:
    exact = next((name for name, members in CLASSES.items() if set(members) == set(accepted)), None)
    return exact or ", ".join(d.name for d in accepted)


# -- the page ---------------------------------------------------------------------------------------------------------
INTRODUCTION = """# Ops

Every op of rlx, by the file that declares it. This page is written by `rlx ops --markdown` from the declarations
themselves, and a test compares: `pytest --update tests/test_docs.py` writes it again.

Call an op on a graph, on a value, or as a function: `g.softmax(x, axis=-1)`, `x.softmax(axis=-1)` and
`rlx.softmax(x, axis=-1)` build the same; so does NumPy where it has the op elementwise, as in `np.tanh(x)`. Operands
come first and may be Python numbers or arrays; attributes follow by name, with their defaults. Types are those that the
op's own rule accepts: *floats* are f64, f32, f16 and bf16, *integers* i64, i32, i16, i8, u32 and u8, *numbers* both.
Operands of different types promote as in `src/rlx/dtypes.py`. Examples say what types come out. `rlx ops NAME` shows
the lines on which an op is defined.
"""
SECTIONS = {
    "Ops": "The ops that graphs are built from.",
    "Blocks": "Pieces of models, one level above ops: they are lowered to the ops above.",
    "Leaves": "Where values come from.",
    "Made by passes": "Ops of optimised graphs, which only passes create.",
}


def markdown() -> str:
    """All built-in ops as a Markdown page."""
    ops = [op for op in registry.OPS.values() if op.rule.__module__.startswith("rlx.")]
    parts = [INTRODUCTION]
    for title, about in SECTIONS.items():
        members = groups(op for op in ops if _section(op) == title)
        parts.append(f"## {title}\n{about}\n")
        parts.append(
            "\n".join(f"- [{group}](#{group}py): {_links(inside)}" for group, inside in members.items()) + "\n"
        )
        for group, inside in members.items():
            parts.append(f"### {group}.py\n{_about(inside[0])}\n")
            parts += [_entry(op) for op in inside]
    return "\n".join(parts)


def _section(op: OpDef) -> str:
    if op.level == registry.HIR:
        return "Blocks"
    if registry.LEAF in op.traits:
        return "Leaves"
    return "Made by passes" if registry.FUSED in op.traits else "Ops"


def _links(ops: Iterable[OpDef]) -> str:
    return ", ".join(f"[{op.name}](#{op.name})" for op in ops)


def _about(op: OpDef) -> str:
    """The first paragraph of the file that declares an op."""
    module = inspect.getmodule(op.rule)
    return inspect.cleandoc((module.__doc__ if module else None) or "").split("\n\n")[0].replace("\n", " ")


def _entry(op: OpDef) -> str:
    lines = [f"#### {op.name}", f"`{op.name}{_signature(op)}`", "", op.doc, ""]
    kinds = inspect.signature(op.rule).parameters
    for name, default in op.schema.attrs.items():
        default_text = "required" if default is registry.REQUIRED else f"default `{default!r}`"
        lines.append(f"- `{name}`: {_annotation(kinds[name].annotation)}, {default_text}")
    for label, text in facts(op):
        lines.append(f"- {label}: `{text}`" if label == "example" else f"- {label}: {text}")
    lines.append(f"- where: {', '.join(_places(op))}")
    return "\n".join(lines) + "\n"


def _annotation(annotation: object) -> str:
    return f"`{annotation}`" if isinstance(annotation, str) else "any"


def _places(op: OpDef) -> Iterator[str]:
    """Rules of an op as links to files, without lines, which change too often."""
    for cell, place in cells(op).items():
        if cell == "type rule":
            continue  # next to the declaration
        file = place.rpartition(":")[0]
        yield f"[{cell}](../src/{file})" if file.startswith("rlx/") else f"{cell}: {place}"
