"""Exports: a compiled graph in one file, which loads and runs without compiling anything.

The file is a container: a JSON manifest (what it is, needs and holds) and sections for the program, the graph as text,
machine code and weights, each with its length and digest. Weights are stored in the kernels' layout, so they are mapped
rather than read. The file is executable code: load only files that you would also run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from rlx.arrays import Array
from rlx.backends import cache_folder
from rlx.backends.base import Device, backend, backend_of
from rlx.backends.reports import Code
from rlx.errors import BindError, CapabilityError, FormatError, GraphError, LowerError, NotFoundError
from rlx.fast_dataclass import dataclass
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
from rlx.version import __version__

WEIGHTS = "weights"  # section of weights in the kernels' layout
FIXED = "fixed"  # section of params that a flow computed itself, such as RoPE tables, if weights are not embedded
ORIGIN_RECORDS = record_json.records_of(provenance)


@dataclass(frozen=True)
class Extras:
    """Additional contents of the file, for exported models."""

    kind: str = "graph"
    about: Mapping[str, Any] = field(default_factory=dict)  # for the manifest
    contents: Mapping[str, Content] = field(default_factory=dict)


# -- writing ---------------------------------------------------------------------------------------------------------
def export_graph(compiled: CompiledGraph, path: PathLike, *, embed: bool = False, extras: Extras | None = None) -> Path:
    """Write a compiled graph to a file; `embed` adds its weights in the kernels' layout."""
    path = writable(path)
    extras = extras or Extras()
    text, constants = record_json.encode(compiled.plan, plan.plan_records())
    programs = compiled.plan.main, compiled.plan.bind
    backend = backend_of(compiled.target)
    code = backend.code(programs, compiled.target)
    graph = compiled.graph
    origins, _ = record_json.encode([_without_folders(n.origin) for n in graph.nodes], ORIGIN_RECORDS)
    contents: dict[str, Content] = {
        "program": text.encode(),
        "constants": {str(i): a for i, a in enumerate(constants)},
        "graph": graph.text(full=True).encode(),
        "origins": origins.encode(),
        **code.sections,
        **extras.contents,
    }
    if embed:
        contents[WEIGHTS] = _weights_to_embed(compiled)
    elif extras.kind == "graph":  # a model computes its tables again
        contents[FIXED] = {name: array for name, array in compiled.fixed_params().items()}
    manifest = {
        "kind": extras.kind,
        "name": graph.name,
        "rlx": __version__,
        "source": cache_folder.source_digest(),
        "versions": dict(backend.versions()),
        "target": asdict(compiled.target),
        "profile": compiled.profile.to_toml() if compiled.profile else None,
        "level": graph.level,
        "limits": graph.limits,
        "inputs": [[n.op, n.attrs["name"], str(n.types[0])] for n in graph.inputs],
        "params": {n.attrs["name"]: str(n.types[0]) for n in graph.params},
        "outputs": [str(v.type) for v in graph.outputs],
        "output_names": compiled.output_names,
        "kernels": sorted({k for p in programs for k in p.kernels()}),
        "routines": code.symbols,
        "code": list(code.sections),
        **extras.about,
    }
    return container.write(path, manifest, contents)


def _without_folders(origin: Origin) -> Origin:
    """The origin with file names only, without folders of the exporting machine."""
    return replace(origin, file=os.path.basename(origin.file), merged=tuple(map(_without_folders, origin.merged)))


def _weights_to_embed(compiled: CompiledGraph) -> dict[str, Array]:
    """All weights that the main program reads, and those whose shapes determine symbol sizes."""
    compiled.prepare()
    return compiled.host_weights() | {
        name: compiled.known_params()[name] for name, type_ in compiled.param_types.items() if has_symbols(type_)
    }


# -- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExportFile(Container):
    """An open export."""

    @property
    def target(self) -> Target:
        """The target that the code was generated for."""
        record = self.manifest["target"]
        return backend(record["device"]).target_from(record)


def open_export(path: PathLike, *, verify: bool = False) -> ExportFile:
    """Open an export to run it: checks that it is intact, written by this rlx, and for a target of this machine.

    The digest of the weights is checked only with `verify`, because they are mapped and read on demand.
    """
    if not Path(path).exists():
        raise NotFoundError(f"{path}: no such file", hint="export writes one: model.export(path), f.export(path)")
    file = read_export(path)
    _check_mode(file.path)
    _check_source(file)
    _check_target(file)
    file.check(name for name in file.manifest["sections"] if verify or name != WEIGHTS)
    return file


def read_export(path: PathLike) -> ExportFile:
    """Open an export to inspect it; checks its manifest and length only."""
    file = container.read(path)
    check(file.manifest, EXPORT if file.manifest.get("kind") == "graph" else EXPORTED_MODEL, file.path)
    return ExportFile(file.path, file.manifest, file.data)


def _check_mode(path: Path) -> None:
    """Raise CapabilityError for a world-writable file: it holds code that would be run."""
    mode = path.stat().st_mode
    if os.name == "posix" and mode & stat.S_IWOTH:
        raise CapabilityError(
            f"{path}: everybody may write it (mode {stat.S_IMODE(mode):o}), and it holds code that would be run",
            hint=f"if you trust it: chmod o-w {path}",
        )


def _check_source(file: ExportFile) -> None:
    written_by, current = (
        (file.manifest["rlx"], file.manifest["source"]),
        (__version__, cache_folder.source_digest()),
    )
    if written_by != current:
        made_by, this = (f"rlx {version} (sources {source[:12]})" for version, source in (written_by, current))
        hint = "export it again with this version, or use the one that made it"
        raise FormatError(f"{file.path}: made by {made_by}, this is {this}", hint=hint)


def _check_target(file: ExportFile) -> None:
    """Raise CapabilityError for a target that this machine cannot run, or other than RLX_TARGET."""
    target, forced = file.target, os.environ.get("RLX_TARGET")
    if forced and forced != target.name:
        raise CapabilityError(f"{file.path}: its code is for {target.name}, RLX_TARGET asks for {forced}")
    backend_of(target).check_runs(target, str(file.path))


# -- running ---------------------------------------------------------------------------------------------------------
def from_export(file: ExportFile, *, threads: int | None = None, store: WeightStore | None = None) -> CompiledGraph:
    """The compiled graph of an export. Its source graph is parsed on demand."""
    loaded, manifest, target = _program(file), file.manifest, file.target
    profile = CompileProfile.from_toml(manifest["profile"]) if manifest["profile"] else None
    signature = replace(Signature.of(leaves(file)), outputs=tuple(map(parse_type, manifest["outputs"])))
    device_backend = backend_of(target)
    with as_format_errors(file):
        sections = {name: file.section(name) for name in manifest["code"]}
        device_backend.adopt(Code(tuple(manifest["routines"]), sections), target)
        parts = link(loaded, signature, functools.cache(lambda: source_graph(file)), device_backend, target, threads)
    weights = file.arrays(WEIGHTS) if WEIGHTS in manifest["sections"] else None
    if weights is not None:
        _check_weights(file, loaded, weights)
        parts.executable.bind({n: device_backend.allocator.upload(weights[n]) for n in loaded.main.weights})
    params = {n: weights[n] for n in signature.params if n in weights} if weights is not None else None
    shared = store or WeightStore(device_backend.allocator)
    compiled = CompiledGraph(
        signature, parts, Device(device_backend.name), shared, profile, bound=weights is not None, params=params
    )
    compiled.output_names = list(manifest["output_names"])
    if FIXED in manifest["sections"]:
        with as_format_errors(file):
            compiled.set_params(file.arrays(FIXED))
    return compiled


def source_graph(file: ExportFile) -> Graph:
    """The graph that an export was compiled from."""
    import rlx.hir.blocks  # noqa: F401  registers the ops and blocks that the text may name
    from rlx.ir.rewrite import with_origins

    graph = Graph.parse(file.section("graph").decode())
    origins = record_json.decode(file.section("origins"), ORIGIN_RECORDS, [], f"{file.path}: origins")
    return with_origins(graph, origins)  # the text has no origins


def _program(file: ExportFile) -> plan.CompiledPlan:
    """The programs of an export, checked against its manifest."""
    constants = list(file.arrays("constants").values())
    loaded = record_json.decode(file.section("program"), plan.plan_records(), constants, f"{file.path}: program")
    if not isinstance(loaded, plan.CompiledPlan):
        raise FormatError(f"{file.path}: program: expected a plan, found {type(loaded).__name__}")
    manifest = file.manifest
    with as_format_errors(file):
        main, bind = loaded.main.manifest(), loaded.bind.manifest()
        inputs = {name: type_ for _, name, type_ in manifest["inputs"]}
        params = manifest["params"]
        named = set(loaded.derived) | set(params)
        compared = {
            "inputs": (main["inputs"], inputs),
            "outputs": (list(main["outputs"].values()), manifest["outputs"]),
            "kernels": (sorted({*loaded.main.kernels(), *loaded.bind.kernels()}), manifest["kernels"]),
            "weights": (sorted(set(main["weights"]) - named), []),
            "params": ({n: t for n, t in bind["weights"].items() if params.get(n) != t}, {}),
            "target": (loaded.main.target, manifest["target"]["name"]),
        }
    for member, (in_program, in_manifest) in compared.items():
        if in_program != in_manifest:
            raise FormatError(
                f"{file.path}: {member}: its program says {quoted(in_program)}, its manifest {quoted(in_manifest)}"
            )
    return loaded


def _check_weights(file: ExportFile, loaded: plan.CompiledPlan, arrays: Mapping[str, Array]) -> None:
    """Raise FormatError for weights that are missing or have another shape or type than the program reads."""
    for name, text in loaded.main.manifest()["weights"].items():
        type_ = parse_type(text)
        if name not in arrays:
            raise FormatError(f"{file.path}: {WEIGHTS}: there is no {quoted(name)}")
        try:
            check_fixed("weight", name, as_array("weight", name, arrays[name], type_), type_)
        except BindError as error:
            raise FormatError(f"{file.path}: {error}") from error


@contextlib.contextmanager
def as_format_errors(file: ExportFile) -> Iterator[None]:
    """Turn errors of the block into a FormatError of the file: its parts do not match each other."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, GraphError, LowerError) as error:
        why = f"{type(error).__name__}: {error}"
        raise FormatError(f"{file.path}: its parts do not fit together: {why}", hint="export it again") from error


def leaves(file: ExportFile) -> Graph:
    """A graph with only inputs and params, enough to check arrays."""
    manifest = file.manifest
    graph = Graph(manifest["name"], level=manifest["level"])
    for op, name, type_ in [*manifest["inputs"], *(("param", n, t) for n, t in manifest["params"].items())]:
        graph.append(op, (), {"name": name}, (parse_type(type_),), Origin())
    graph.limits = dict(manifest["limits"])
    return graph
