"""Exports: a compiled graph in one file, which runs elsewhere, or later, without compiling anything.

A file is a head, a manifest (JSON: what it is, what it needs, what is in it) and sections: the program, the graph as
text, machine code, and weights, each with its length and digest. Weights lie as the kernels read them, so they are
mapped, not read. The file is executable code: load only what you would also run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import rlx
from rlx.arrays import Array
from rlx.backends import cache_folder
from rlx.backends.base import Device, backend, backend_of
from rlx.backends.reports import Code
from rlx.errors import BindError, CapabilityError, FormatError, GraphError, LowerError
from rlx.formats.tensor_file import PathLike, quoted
from rlx.free_memory import writable
from rlx.ir import provenance
from rlx.ir.graph import Graph
from rlx.ir.provenance import Origin
from rlx.profile import CompileProfile
from rlx.runtime import container, plan, record_json
from rlx.runtime.compiled import CompiledGraph, link
from rlx.runtime.container import SUFFIX as SUFFIX
from rlx.runtime.container import Container
from rlx.runtime.container import Content as Content
from rlx.runtime.inputs import as_array, check_fixed, has_symbols
from rlx.runtime.manifest import EXPORT, EXPORTED_MODEL, check
from rlx.runtime.signature import Signature
from rlx.runtime.weights import WeightStore
from rlx.target import Target
from rlx.types import parse_type

WEIGHTS = "weights"  # the section of weights as kernels read them
PLACES = record_json.records_of(provenance)


@dataclass(frozen=True)
class Extras:
    """What goes into a file besides the compiled graph."""

    kind: str = "graph"
    about: Mapping[str, Any] = field(default_factory=dict)  # for the manifest
    contents: Mapping[str, Content] = field(default_factory=dict)


# -- writing ---------------------------------------------------------------------------------------------------------
def export_graph(compiled: CompiledGraph, path: PathLike, *, embed: bool = False, extras: Extras | None = None) -> Path:
    """Write a compiled graph to a file; with `embed` its weights too, as the kernels read them."""
    path = writable(path)
    extras = extras or Extras()
    text, constants = record_json.encode(compiled.plan, plan.plan_records())
    programs = compiled.plan.main, compiled.plan.bind
    backend = backend_of(compiled.target)
    code = backend.code(programs, compiled.target)
    graph = compiled.graph
    origins, _ = record_json.encode([_placed(n.origin) for n in graph.nodes], PLACES)
    contents: dict[str, Content] = {
        "program": text.encode(),
        "constants": {str(i): a for i, a in enumerate(constants)},
        "graph": graph.text(full=True).encode(),
        "origins": origins.encode(),
        **code.sections,
        **extras.contents,
    }
    if embed:
        contents[WEIGHTS] = _embedded(compiled)
    manifest = {
        "kind": extras.kind,
        "name": graph.name,
        "rlx": rlx.__version__,
        "source": cache_folder.source_digest(),
        "versions": dict(backend.versions()),
        "target": asdict(compiled.target),
        "profile": compiled.profile.to_toml() if compiled.profile else None,
        "level": graph.level,
        "limits": graph.limits,
        "inputs": [[n.op, n.attrs["name"], str(n.types[0])] for n in graph.inputs],
        "params": {n.attrs["name"]: str(n.types[0]) for n in graph.params},
        "outputs": [str(v.type) for v in graph.outputs],
        "kernels": sorted({k for p in programs for k in p.kernels()}),
        "routines": code.symbols,
        "code": list(code.sections),
        **extras.about,
    }
    return container.write(path, manifest, contents)


def _placed(origin: Origin) -> Origin:
    """A place without the folders of the machine that it was on."""
    return replace(origin, file=os.path.basename(origin.file), merged=tuple(map(_placed, origin.merged)))


def _embedded(compiled: CompiledGraph) -> dict[str, Array]:
    """All that the main program reads, and the weights by whose shapes sizes are known."""
    compiled.prepare()
    return compiled.host_weights() | {
        name: compiled.known_params()[name] for name, type_ in compiled.param_types.items() if has_symbols(type_)
    }


# -- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExportFile(Container):
    """An opened export."""

    @property
    def target(self) -> Target:
        """What the code is for."""
        record = self.manifest["target"]
        return backend(record["device"]).target_from(record)


def open_export(path: PathLike, *, verify: bool = False) -> ExportFile:
    """Open an export for use: it is whole, made by this rlx, and this machine runs its code.

    Weights are compared with their digest only if `verify` says so: they are mapped, and read when they are used.
    """
    file = read_export(path)
    _check_mode(file.path)
    _check_source(file)
    _check_target(file)
    file.check(name for name in file.manifest["sections"] if verify or name != WEIGHTS)
    return file


def read_export(path: PathLike) -> ExportFile:
    """Open an export to look at: its manifest is whole, and its length is right."""
    found = container.read(path)
    check(found.manifest, EXPORT if found.manifest.get("kind") == "graph" else EXPORTED_MODEL, found.path)
    return ExportFile(found.path, found.manifest, found.data)


def _check_mode(path: Path) -> None:
    """Refuse what anybody may write: it is code that we would run."""
    mode = path.stat().st_mode
    if os.name == "posix" and mode & stat.S_IWOTH:
        raise CapabilityError(
            f"{path}: everybody may write it (mode {stat.S_IMODE(mode):o}), and it holds code that would be run",
            hint=f"if you trust it: chmod o-w {path}",
        )


def _check_source(file: ExportFile) -> None:
    made, here = (file.manifest["rlx"], file.manifest["source"]), (rlx.__version__, cache_folder.source_digest())
    if made != here:
        made_by, this = (f"rlx {version} (sources {source[:12]})" for version, source in (made, here))
        hint = "export it again with this version, or use the one that made it"
        raise FormatError(f"{file.path}: made by {made_by}, this is {this}", hint=hint)


def _check_target(file: ExportFile) -> None:
    """Refuse code that this machine does not run, or that is not what it was told to run."""
    target, forced = file.target, os.environ.get("RLX_TARGET")
    if forced and forced != target.name:
        raise CapabilityError(f"{file.path}: its code is for {target.name}, RLX_TARGET asks for {forced}")
    backend_of(target).check_runs(target, str(file.path))


# -- running ---------------------------------------------------------------------------------------------------------
def from_export(file: ExportFile, *, threads: int | None = None, store: WeightStore | None = None) -> CompiledGraph:
    """The compiled graph of a file. The graph that it was built from is read when somebody asks for it."""
    found, manifest, target = _program(file), file.manifest, file.target
    profile = CompileProfile.from_toml(manifest["profile"]) if manifest["profile"] else None
    signature = replace(Signature.of(leaves(file)), outputs=tuple(map(parse_type, manifest["outputs"])))
    own = backend_of(target)
    with consistent(file):
        sections = {name: file.section(name) for name in manifest["code"]}
        own.adopt(Code(tuple(manifest["routines"]), sections), target)
        parts = link(found, signature, functools.cache(lambda: _graph(file)), own, target, threads)
    weights = file.arrays(WEIGHTS) if WEIGHTS in manifest["sections"] else None
    if weights is not None:
        _check_weights(file, found, weights)
        parts.executable.bind({n: own.allocator.upload(weights[n]) for n in found.main.weights})
    params = {n: weights[n] for n in signature.params if n in weights} if weights is not None else None
    shared = store or WeightStore(own.allocator)
    return CompiledGraph(signature, parts, Device(own.name), shared, profile, bound=weights is not None, params=params)


def _graph(file: ExportFile) -> Graph:
    """The graph, as it was built."""
    import rlx.hir.blocks  # noqa: F401  the ops and blocks that the text may name
    from rlx.ir.rewrite import with_origins

    graph = Graph.parse(file.section("graph").decode())
    origins = record_json.decode(file.section("origins"), PLACES, [], f"{file.path}: origins")
    return with_origins(graph, origins)  # text does not say where nodes were built


def _program(file: ExportFile) -> plan.CompiledPlan:
    """The programs of an export, which take and give what its manifest says."""
    constants = list(file.arrays("constants").values())
    found = record_json.decode(file.section("program"), plan.plan_records(), constants, f"{file.path}: program")
    if not isinstance(found, plan.CompiledPlan):
        raise FormatError(f"{file.path}: program: expected a plan, found {type(found).__name__}")
    manifest = file.manifest
    with consistent(file):
        main, bind = found.main.manifest(), found.bind.manifest()
        given = {name: type_ for _, name, type_ in manifest["inputs"]}
        params = manifest["params"]
        named = set(found.derived) | set(params)
        said = {
            "inputs": (main["inputs"], given),
            "outputs": (list(main["outputs"].values()), manifest["outputs"]),
            "kernels": (sorted({*found.main.kernels(), *found.bind.kernels()}), manifest["kernels"]),
            "weights": (sorted(set(main["weights"]) - named), []),
            "params": ({n: t for n, t in bind["weights"].items() if params.get(n) != t}, {}),
            "target": (found.main.target, manifest["target"]["name"]),
        }
    for what, (wanted, has) in said.items():
        if wanted != has:
            raise FormatError(f"{file.path}: {what}: its program says {quoted(wanted)}, its manifest {quoted(has)}")
    return found


def _check_weights(file: ExportFile, found: plan.CompiledPlan, arrays: Mapping[str, Array]) -> None:
    """Refuse weights of other shapes and types than the program reads."""
    for name, text in found.main.manifest()["weights"].items():
        type_ = parse_type(text)
        if name not in arrays:
            raise FormatError(f"{file.path}: {WEIGHTS}: there is no {quoted(name)}")
        try:
            check_fixed("weight", name, as_array("weight", name, arrays[name], type_), type_)
        except BindError as error:
            raise FormatError(f"{file.path}: {error}") from error


@contextlib.contextmanager
def consistent(file: ExportFile) -> Iterator[None]:
    """What goes wrong inside is the file's fault: its parts were made for each other."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, GraphError, LowerError) as error:
        why = f"{type(error).__name__}: {error}"
        raise FormatError(f"{file.path}: its parts do not fit together: {why}", hint="export it again") from error


def leaves(file: ExportFile) -> Graph:
    """A graph of inputs and params only: all that checks of arrays need."""
    manifest = file.manifest
    graph = Graph(manifest["name"], level=manifest["level"])
    for op, name, type_ in [*manifest["inputs"], *(("param", n, t) for n, t in manifest["params"].items())]:
        graph.append(op, (), {"name": name}, (parse_type(type_),), Origin())
    graph.limits = dict(manifest["limits"])
    return graph
