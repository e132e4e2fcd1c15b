"""From a graph to programs: lowering, the MIR pipeline and scheduling, with the program cache in front of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlx import types
from rlx.backends import cache
from rlx.backends.cpu.library import library
from rlx.classes import dataclass
from rlx.dtypes import dtype
from rlx.errors import FormatError
from rlx.ir.graph import Graph
from rlx.lir import kernels, loops, program, views
from rlx.lir.program import Program
from rlx.mir import report
from rlx.mir.report import FusionReport
from rlx.profile import CompileProfile
from rlx.runtime import codec, weights
from rlx.runtime.weights import Recipe, recipes
from rlx.target import Target

if TYPE_CHECKING:
    from rlx.module import LirModule


@dataclass(frozen=True)
class CompiledPlan:
    """The main program, the bind program of its weights, and what the passes did."""

    main: Program
    bind: Program
    derived: list[str]
    recipes: list[Recipe]  # of the derived weights
    fusion: FusionReport
    main_text: str  # optimised MIR, for people
    bind_text: str
    origins: tuple[str, ...]  # where the nodes of the graph were built


def make_plan(graph: Graph, target: Target, profile: CompileProfile | None = None) -> CompiledPlan:
    """Compile a graph to programs, without the cache."""
    from rlx.module import plan_lir  # all passes; a plan from the cache needs none

    return planned(plan_lir(graph, target, profile or CompileProfile()), graph)


def _begun(graph: Graph, target: Target, profile: CompileProfile) -> CompiledPlan:
    """`make_plan` for a graph that will run: its kernels are compiled meanwhile, as far as there is a meanwhile."""
    code = library(target)
    code.prepare()
    from rlx.module import plan_lir

    lir = plan_lir(graph, target, profile)
    for part in (lir.main, lir.bind) if lir.optimised.derived else (lir.main,):
        code.begin(part.kernels().values())
    return planned(lir, graph)


def planned(lir: LirModule, graph: Graph) -> CompiledPlan:
    """What running a planned module needs; `graph` is what it was built as."""
    done = lir.optimised
    texts = done.main.text(), done.bind.text()
    return CompiledPlan(lir.main, lir.bind, done.derived, recipes(done.bind), done.report, *texts, _origins(graph))


def _origins(graph: Graph) -> tuple[str, ...]:
    return tuple(str(node.origin) for node in graph.nodes)


def cached_plan(
    graph: Graph, target: Target, profile: CompileProfile | None = None, *, run: bool = False
) -> CompiledPlan:
    """The plan from the program cache, or made and stored there: not with users' ops, whose source it does not know.

    With `run`, the kernels of a plan that had to be made are being compiled when it comes.
    """
    store = cache.current()
    profile = profile or CompileProfile()
    make = _begun if run else make_plan
    if store.folder is None or not is_builtin(graph):
        return make(graph, target, profile)
    text = f"{graph.fingerprint()}|{graph.name}|{target}|{profile.key()}|{cache.source_digest()}"
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    data = None if profile.passes.verbose else store.read("programs", key)  # what is read has no passes to tell of
    if data is not None:
        with contextlib.suppress(FormatError, struct.error, TypeError, ValueError):  # written by something else
            moved = relocated(read_plan(data), _origins(graph))
            if moved is not None:
                return moved
    plan = make(graph, target, profile)
    store.write("programs", key, write_plan(plan))
    return plan


@functools.cache
def plan_records() -> Mapping[str, type]:
    """The records that plans are made of, by name."""
    return codec.records_of(types, loops, kernels, views, program, report, weights) | {"CompiledPlan": CompiledPlan}


_SIZES = struct.Struct("<QQ")  # bytes of the index of constants, bytes of the records


def write_plan(plan: CompiledPlan) -> bytes:
    """A plan as bytes: an index of its constants, its records as text, the constants."""
    text, arrays = codec.encode(plan, plan_records())
    index = json.dumps([[dtype(a.dtype).name, a.shape] for a in arrays]).encode()
    records = text.encode()
    constants = (np.ascontiguousarray(a).tobytes() for a in arrays)
    return b"".join([_SIZES.pack(len(index), len(records)), index, records, *constants])


def read_plan(data: bytes) -> CompiledPlan:
    """The plan that `write_plan` wrote."""
    index_bytes, record_bytes = _SIZES.unpack_from(data)
    at = _SIZES.size + index_bytes
    index, records = json.loads(data[_SIZES.size : at]), data[at : at + record_bytes]
    at += record_bytes
    constants = []
    for name, shape in index:
        count = math.prod(shape)
        array = np.frombuffer(data, dtype(name).numpy, count, at).reshape(shape)
        constants.append(array)
        at += array.nbytes
    plan = codec.decode(records, plan_records(), constants, "program cache")
    if not isinstance(plan, CompiledPlan):
        raise FormatError(f"program cache: expected a plan, found {type(plan).__name__}")
    return plan


def is_builtin(graph: Graph) -> bool:
    """Whether all ops are those of rlx, in bodies too."""
    return all(
        node.definition.is_builtin and all(is_builtin(v) for v in node.attrs.values() if isinstance(v, Graph))
        for node in graph.nodes
    )


def relocated(plan: CompiledPlan, origins: tuple[str, ...]) -> CompiledPlan | None:
    """The plan of an equal graph that was built on other lines; None where what was one line now is several.

    Launches carry source lines to errors and reports, and those should be the lines of the graph at hand.
    """
    if plan.origins == origins:
        return plan
    places: dict[str, str] = {}
    for old, new in zip(map(_line, plan.origins), map(_line, origins), strict=True):
        if places.setdefault(old, new) != new:
            return None
    fusion = FusionReport(
        [replace(f, where=_moved(f.where, places)) for f in plan.fusion.fused],
        [replace(m, where=_moved(m.where, places)) for m in plan.fusion.missed],
    )
    main, bind = (_moved_program(p, places) for p in (plan.main, plan.bind))
    return replace(plan, main=main, bind=bind, fusion=fusion, origins=origins)


def _moved_program(program: Program, places: Mapping[str, str]) -> Program:
    launches = [replace(x, where=_moved(x.where, places)) for x in program.launches]
    assertions = [replace(a, where=_moved(a.where, places)) for a in program.assertions]
    return replace(program, launches=launches, assertions=assertions)


def _moved(where: str, places: Mapping[str, str]) -> str:
    line = _line(where)
    return places.get(line, line) + where[len(line) :]


def _line(origin: str) -> str:
    """The part that the user's source decides, without what lowering and passes have added."""
    return re.split(r", (?=from |by )", origin, maxsplit=1)[0]
