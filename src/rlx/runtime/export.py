"""Exports: a compiled graph in one file, which runs elsewhere, or later, without compiling anything.

A file is a head, a manifest (JSON: what it is, what it needs, what is in it) and sections: the program, the graph as
text, machine code, and weights, each with its length and digest. Weights lie as the kernels read them, so they are
mapped, not read. The file is executable code: load only what you would also run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

import rlx
from rlx import target as targets
from rlx.backends import cache
from rlx.backends.cpu.library import Code, library
from rlx.backends.cpu.toolchain import llvm_version
from rlx.dtypes import dtype
from rlx.errors import CapabilityError, FormatError
from rlx.formats.strict_json import parse_json
from rlx.formats.tensors import PathLike, broken, open_bytes
from rlx.ir import provenance
from rlx.ir.graph import Graph
from rlx.ir.provenance import Origin
from rlx.profile import CompileProfile
from rlx.runtime import codec, plan
from rlx.runtime.compiled import CpuGraph
from rlx.runtime.inputs import has_symbols
from rlx.runtime.resources import writable
from rlx.runtime.weights import WeightStore
from rlx.target import Target
from rlx.types import parse_type

Array = np.ndarray[Any, Any]
Content = bytes | Mapping[str, Array]  # of a section
SUFFIX = ".rlxp"
WEIGHTS = "weights"  # the section of weights as kernels read them
MAGIC, VERSION = b"RLXP", 1
_DIGEST = 32  # bytes
_HEAD = struct.Struct(f"<4sIQ{_DIGEST}s")  # magic, version, bytes of the manifest, its digest
_LINE = 64  # sections and arrays begin on a cache line
PLACES = codec.records_of(provenance)


@dataclass(frozen=True)
class Parts:
    """What goes into a file beside the compiled graph."""

    kind: str = "graph"
    about: Mapping[str, Any] = field(default_factory=dict)  # for the manifest
    contents: Mapping[str, Content] = field(default_factory=dict)


# -- writing ---------------------------------------------------------------------------------------------------------
def export_graph(compiled: CpuGraph, path: PathLike, *, embed: bool = False, parts: Parts | None = None) -> Path:
    """Write a compiled graph to a file; with `embed` its weights too, as the kernels read them."""
    path = writable(path)
    parts = parts or Parts()
    text, constants = codec.encode(compiled.plan, plan.plan_records())
    programs = compiled.plan.main, compiled.plan.bind
    code = library(compiled.target).code({s: k for p in programs for s, k in p.kernels().items()}.values())
    graph = compiled.graph
    origins, _ = codec.encode([_placed(n.origin) for n in graph.nodes], PLACES)
    contents: dict[str, Content] = {
        "program": text.encode(),
        "constants": {str(i): a for i, a in enumerate(constants)},
        "graph": graph.text(full=True).encode(),
        "origins": origins.encode(),
        "code": code.routines,
        "driver": code.driver,
        **parts.contents,
    }
    if embed:
        contents[WEIGHTS] = _embedded(compiled)
    manifest = {
        "kind": parts.kind,
        "name": graph.name,
        "rlx": rlx.__version__,
        "source": cache.source_digest(),
        "llvm": llvm_version(),
        "target": asdict(compiled.target),
        "profile": compiled.profile.to_toml() if compiled.profile else None,
        "level": graph.level,
        "limits": graph.limits,
        "inputs": [[n.op, n.attrs["name"], str(n.types[0])] for n in graph.inputs],
        "params": {n.attrs["name"]: str(n.types[0]) for n in graph.params},
        "outputs": [str(v.type) for v in graph.outputs],
        "kernels": sorted({k for p in programs for k in p.kernels()}),
        "routines": code.symbols,
        **parts.about,
    }
    return _write(path, manifest, contents)


def _placed(origin: Origin) -> Origin:
    """A place without the folders of the machine that it was on."""
    return replace(origin, file=os.path.basename(origin.file), merged=tuple(map(_placed, origin.merged)))


def _embedded(compiled: CpuGraph) -> dict[str, Array]:
    """All that the main program reads, and the weights by whose shapes sizes are known."""
    compiled.prepare()
    held = dict(compiled.executable._weights)
    return held | {n: compiled._params[n] for n, t in compiled.param_types.items() if has_symbols(t)}


def _write(path: Path, manifest: Mapping[str, Any], contents: Mapping[str, Content]) -> Path:
    sections: dict[str, dict[str, Any]] = {}
    pieces: list[tuple[int, memoryview]] = []  # and where they lie
    end = 0
    for name, content in contents.items():
        arrays = content if isinstance(content, Mapping) else {"": np.frombuffer(content, np.uint8)}
        at = end = _round_up(end)
        index: list[tuple[str, str, tuple[int, ...], int]] = []
        digest = hashlib.blake2b(digest_size=_DIGEST)
        for key, array in arrays.items():
            data, place = _bytes(array), _round_up(end)
            index.append((key, dtype(array.dtype).name, array.shape, place - at))
            pieces.append((place, data))
            digest.update(bytes(place - end))
            digest.update(data)
            end = place + len(data)
        sections[name] = {"at": at, "bytes": end - at, "digest": digest.hexdigest()}
        if isinstance(content, Mapping):
            sections[name]["arrays"] = index
    written = json.dumps({**manifest, "bytes": end, "sections": sections}, indent=1).encode()
    with _replaced(path) as file:
        file.write(_HEAD.pack(MAGIC, VERSION, len(written), hashlib.blake2b(written, digest_size=_DIGEST).digest()))
        file.write(written)
        for place, data in pieces:
            file.seek(_start(written) + place)
            file.write(data)
        file.truncate(_start(written) + end)
    return path


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is whole."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            yield file
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _round_up(n: int) -> int:
    return -(-n // _LINE) * _LINE


def _start(manifest: bytes | memoryview) -> int:
    """Where the sections begin."""
    return _round_up(_HEAD.size + len(manifest))


# -- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExportFile:
    """An opened export: its manifest, and the bytes behind it."""

    path: Path
    manifest: Mapping[str, Any]
    data: memoryview

    @property
    def target(self) -> Target:
        """What the code is for."""
        return Target(**self.manifest["target"])

    def section(self, name: str) -> bytes:
        return bytes(self._bytes(name))

    def arrays(self, name: str) -> dict[str, Array]:
        """Arrays by name, mapped from the file; none where there is no such section."""
        found = {}
        for key, kind, shape, at in self.manifest["sections"].get(name, {}).get("arrays", ()):
            element = dtype(kind).numpy
            data = self._bytes(name)[at : at + math.prod(shape) * element.itemsize]
            found[key] = np.frombuffer(data, np.uint8).view(element).reshape(shape)
        return found

    def check(self, names: Iterable[str]) -> None:
        """Refuse sections whose bytes are not those that were written."""
        for name in names:
            found = hashlib.blake2b(self._bytes(name), digest_size=_DIGEST).hexdigest()
            if found != self.manifest["sections"][name]["digest"]:
                raise broken(self.path, f"section {name!r} is damaged", hint="export it again, or copy it again")

    def _bytes(self, name: str) -> memoryview:
        found = self.manifest["sections"][name]
        return self.data[found["at"] : found["at"] + found["bytes"]]


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
    file = open_bytes(path)
    if file.size < _HEAD.size or bytes(file.view[:4]) != MAGIC:
        raise broken(file.path, "not an export of rlx", at=0, expected=MAGIC, found=bytes(file.view[:4]))
    _, version, size, digest = _HEAD.unpack_from(file.view)
    if version != VERSION:
        hint = "another version of rlx made it: export it again with this one"
        raise broken(file.path, "version of the format", at=4, expected=VERSION, found=version, hint=hint)
    written = file.view[_HEAD.size : _HEAD.size + size]
    if hashlib.blake2b(written, digest_size=_DIGEST).digest() != digest:
        hint = "export it again, or copy it again"
        raise broken(file.path, "the manifest is damaged or cut short", at=_HEAD.size, hint=hint)
    manifest = parse_json(written, file.path)
    whole = _start(written) + manifest["bytes"]
    if file.size != whole:
        hint = "it was not copied whole"
        raise broken(file.path, "length", expected=f"{whole} bytes", found=f"{file.size} bytes", hint=hint)
    return ExportFile(file.path, manifest, file.view[_start(written) :])


def _check_mode(path: Path) -> None:
    """Refuse what anybody may write: it is code that we would run."""
    mode = path.stat().st_mode
    if os.name == "posix" and mode & stat.S_IWOTH:
        raise CapabilityError(
            f"{path}: everybody may write it (mode {stat.S_IMODE(mode):o}), and it holds code that would be run",
            hint=f"if you trust it: chmod o-w {path}",
        )


def _check_source(file: ExportFile) -> None:
    made, here = (file.manifest["rlx"], file.manifest["source"]), (rlx.__version__, cache.source_digest())
    if made != here:
        made_by, this = (f"rlx {version} (sources {source[:12]})" for version, source in (made, here))
        hint = "export it again with this version, or use the one that made it"
        raise FormatError(f"{file.path}: made by {made_by}, this is {this}", hint=hint)


def _check_target(file: ExportFile) -> None:
    """Refuse code that this machine does not run, or that is not what it was told to run."""
    target, forced = file.target, os.environ.get("RLX_TARGET")
    if forced and forced != target.name:
        raise CapabilityError(f"{file.path}: its code is for {target.name}, RLX_TARGET asks for {forced}")
    needed = set(filter(None, target.features.split(",")))
    runs = targets.supported()
    if not any(t.arch == target.arch and needed <= set(t.features.split(",")) for t in runs):
        raise CapabilityError(
            f"{file.path}: its code is for {target.name} ({target.arch} {target.features}), this machine runs "
            + ", ".join(t.name for t in runs),
            hint=f"export it on this machine, or with RLX_TARGET={runs[0].name} where it was made",
        )


# -- running ---------------------------------------------------------------------------------------------------------
class ExportedGraph(CpuGraph):
    """A compiled graph from a file. The graph that it was built from is read when somebody asks for it."""

    def __init__(self, file: ExportFile, *, threads: int | None = None, store: WeightStore | None = None) -> None:
        self._file = file
        constants = list(file.arrays("constants").values())
        found: plan.CompiledPlan = codec.decode(
            file.section("program"), plan.plan_records(), constants, f"{file.path}: program"
        )
        routines = tuple(file.manifest["routines"])
        library(file.target).adopt(Code(file.section("code"), routines, file.section("driver")))
        profile = CompileProfile.from_toml(file.manifest["profile"]) if file.manifest["profile"] else None
        self.leaves = _leaves(file.manifest)
        super().__init__(self.leaves, found, file.target, threads, store or WeightStore(), profile)
        del self.graph
        if WEIGHTS in file.manifest["sections"]:
            arrays = file.arrays(WEIGHTS)
            self._params = {n: arrays[n] for n in self.param_types if n in arrays}
            self.executable.bind({n: arrays[n] for n in found.main.weights})
            self._stale = False

    @functools.cached_property
    def graph(self) -> Graph:  # type: ignore[override]
        """The graph, as it was built."""
        import rlx.hir.blocks  # noqa: F401  the ops and blocks that the text may name

        graph = Graph.parse(self._file.section("graph").decode())
        origins = codec.decode(self._file.section("origins"), PLACES, [], f"{self._file.path}: origins")
        for node, origin in zip(graph.nodes, origins, strict=True):
            object.__setattr__(node, "origin", origin)  # text does not say where nodes were built
        return graph


def _leaves(manifest: Mapping[str, Any]) -> Graph:
    """A graph of inputs and params only: all that checks of arrays need."""
    graph = Graph(manifest["name"], level=manifest["level"])
    leaves = [*manifest["inputs"], *(("param", n, t) for n, t in manifest["params"].items())]
    for op, name, type_ in leaves:
        graph.append(op, (), {"name": name}, (parse_type(type_),), Origin())
    graph.limits = dict(manifest["limits"])
    return graph
