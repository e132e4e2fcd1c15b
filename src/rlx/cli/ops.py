"""`rlx ops [NAME]`: the ops by group, or everything about one: meaning, samples, and where each of its rules is."""

from __future__ import annotations

import argparse
import inspect
import os

import rlx.hir.lower
import rlx.lir.forms
from rlx.ir import registry
from rlx.lir.elementwise import scalar_form
from rlx.lir.schedule import loop_form


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("ops", help="list the ops, or show one")
    command.add_argument("name", nargs="?", help="an op")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name:
        print(describe(registry.get(arguments.name)))
        return 0
    groups: dict[str, list[registry.OpDef]] = {}
    for op in registry.OPS.values():
        groups.setdefault(op.group, []).append(op)
    for group, members in groups.items():
        print(f"{group}: {', '.join(o.name for o in members)}")
    return 0


def describe(op: registry.OpDef) -> str:
    """One op: its signature, its text, its cells with file and line."""
    lines = [f"{op.name}{_signature(op)}   [{op.level}, {op.group}]", "", op.doc, ""]
    for cell, place in cells(op).items():
        lines.append(f"  {cell:12} {place}")
    lines.append(f"  {'samples':12} {len(op.samples)}")
    return "\n".join(lines)


def _signature(op: registry.OpDef) -> str:
    parts = [f"*{n}" if op.schema.variadic and n == op.schema.operands[-1] else n for n in op.schema.operands]
    for i in range(len(parts) - op.schema.optional, len(parts)):
        parts[i] += "=None"
    attrs = [n if d is registry.REQUIRED else f"{n}={d!r}" for n, d in op.schema.attrs.items()]
    return f"({', '.join(parts + (['*', *attrs] if attrs else []))})"


def cells(op: registry.OpDef) -> dict[str, str]:
    """Where each thing that is known of an op is written."""
    found = {"declared": op.place, "type rule": registry.place_of(op.rule)}
    if op.reference is not None:
        found["reference"] = registry.place_of(op.reference)
    if op.name in scalar_form:
        found["scalar form"] = registry.place_of(scalar_form[op.name])
    elif registry.ELEMENTWISE in op.traits:
        found["scalar form"] = f"the emitter's {op.scalar!r}"
    if op.name in loop_form:
        found["loop form"] = registry.place_of(loop_form[op.name])
    if op.name in rlx.hir.lower.lowering:
        found["lowering"] = registry.place_of(rlx.hir.lower.lowering[op.name])
    root = os.path.dirname(os.path.dirname(os.path.abspath(inspect.getfile(rlx))))
    return {cell: os.path.relpath(place, root) if place.startswith("/") else place for cell, place in found.items()}
