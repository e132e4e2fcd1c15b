"""Model snapshots: a loaded model in the cache folder, so that the next process need not build, compile or pack.

The first process switches to its snapshot too: its packed weights are in memory once, as pages that the system may
evict. A snapshot holds the image of the compiled program, the weights in the kernels' layout, the tokenizer, and the
location of the machine code. Weights that kernels read in the layout of the model's file are mapped from there instead.
A snapshot belongs to one state of the model's files, one set of settings, one target, one LLVM and one version of the
sources of rlx; a damaged one, or one whose code is gone, is removed, and the model is loaded from its files.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.backends import cache_folder
from rlx.dtypes import dtype
from rlx.engine.load import class_of
from rlx.engine.load_settings import auto_cache, with_precision
from rlx.engine.model import Model, ModelInfo, Prepared
from rlx.errors import FormatError, ResourceError, RlxError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock
from rlx.formats import special_tokens
from rlx.formats.mapped_file import FileMap
from rlx.formats.tensor_file import PART_NAME, FileBytes, open_bytes
from rlx.formats.tokenizer import Tokenizer
from rlx.host_memory import address, root_buffer
from rlx.runtime import container, record_json
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.container import Container
from rlx.runtime.inputs import has_symbols
from rlx.runtime.kv_spec import AUTO
from rlx.runtime.session import Session
from rlx.runtime.snapshot import from_snapshot, snapshot_records

if TYPE_CHECKING:
    from rlx.engine.load import Loaded
    from rlx.models.load import Checkpoint

KIND = "snapshot"
KINDS = ("decoder", "encoder")  # of families that snapshots support
WEIGHTS, TABLES = "weights", "tokenizer.tables"  # mapped sections, of which a warm start reads only parts
MAX_FILES = 256  # a folder with more is not a model folder
ENDS = 4096  # bytes at both ends of a file that its digest covers
SETTLED_NS = 50_000_000  # resolution of file times: a recent file may change again within the same tick
SAMPLES, SAMPLE = 256, 4096  # number and bytes of the weight samples in the digest


@dataclass(frozen=True)
class ModelSnapshot:
    """The key and location of a model's snapshot, for the current state of its files."""

    cache_dtype: str
    store: cache_folder.Cache
    key: str  # digests of the model and settings, and of the state
    path: Path  # of the model
    files: tuple[Path, ...]
    state: str  # of the files
    session: Session
    began: int  # time in nanoseconds
    file_id: str  # identity of the existing snapshot file at that time


def find(path: Path, session: Session, settings: Mapping[str, Any]) -> dict[str, ModelSnapshot]:
    """The possible snapshots of a model with these settings, by KV cache type; empty if it cannot have one.

    With `cache="auto"` the type is known only after opening the files, so there is one per possible type.
    """
    store, profile = cache_folder.current(), settings["profile"]
    if store.folder is None or session.device.backend.interprets or _has_foreign_families():
        return {}
    if profile.shows_passes or cache_folder.has_foreign_passes():
        return {}
    began = time.time_ns()
    try:
        files = tuple(_files(path))
        if len(files) > MAX_FILES:
            return {}
        state = _state(files)
        requested = " ".join(f"{name}={settings[name]!r}" for name in ("context", "precision"))
    except (OSError, ValueError):  # opening the model reports the error
        return {}
    identity = session.device.backend.identity(session.target)  # the compiler and its instruction set
    made_by = f"{cache_folder.source_digest()}|{identity}"
    snapshots = {}
    for kind in AUTO if settings["cache"] == "auto" else (settings["cache"],):
        owner = f"{session.target}|{os.path.realpath(path)}|{profile.key()}|{requested} cache={kind}"
        key = f"{_digest(owner)}-{_digest(f'{made_by}|{state}|{owner}')}"
        existing = store.snapshot(key)
        file_id = "" if existing is None else cache_folder.file_of(existing)
        snapshots[kind] = ModelSnapshot(kind, store, key, path, files, state, session, began, file_id)
    return snapshots


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _has_foreign_families() -> bool:
    """Whether there are user-defined families, whose source the key does not cover."""
    known = sys.modules.get("rlx.models.family")
    return known is not None and not all(f.is_builtin for f in known.FAMILIES.values())


def _files(path: Path) -> Iterator[Path]:
    """All files that a model may be read from: a GGUF with its parts, or all files of a folder."""
    if path.suffix == ".gguf" and path.is_file():
        part = PART_NAME.fullmatch(path.name)
        parts = [path] if part is None else sorted(path.parent.glob(f"*-of-{part['count']}.gguf"))
        yield from parts
        yield path.parent / "profile.toml"
        return
    top = path if path.is_dir() else path.parent
    names = (Path(folder, name) for folder, _, names in os.walk(top, followlinks=True) for name in names)
    yield from sorted(itertools.islice(names, MAX_FILES + 1))


def _state(files: Sequence[Path]) -> str:
    """A digest that changes when a file is changed, added or removed."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            # opening a pipe must not block
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    digest.update(b"absent")
                    continue
                digest.update(
                    f"{os.path.realpath(path)}|{cache_folder.identity(status)}|".encode(errors="surrogateescape")
                )
                digest.update(file.read(ENDS))
                file.seek(max(status.st_size - ENDS, 0))
                digest.update(file.read(ENDS))
        except FileNotFoundError:
            digest.update(b"absent")
    return digest.hexdigest()


# -- writing ---------------------------------------------------------------------------------------------------------
def write(model: Model, snapshot: ModelSnapshot) -> bool:
    """Write the snapshot of a model that was just loaded. Returns False if that is not possible."""
    compiled, checkpoint = model.compiled, model.checkpoint
    if model.facts.kind not in KINDS or not checkpoint.family.is_builtin or not _is_settled(snapshot):
        return False
    if any(map(has_symbols, compiled.param_types.values())):
        return False
    image = compiled.executable.image()
    if image is None or not _is_builtin(compiled):
        return False
    bound = compiled.host_weights()
    in_place = _mapped_weights(snapshot, checkpoint, bound)
    weights = {n: a for n, a in bound.items() if n not in in_place}
    tokenizer = checkpoint.tokenizer
    packed, tables = (b"", {}) if tokenizer is None else tokenizer.pack()
    if _exists(snapshot):
        return True
    path = snapshot.store.room(snapshot.key, sum(a.nbytes for a in (*weights.values(), *tables.values())))
    if path is None:
        return False
    records: dict[str, Any] = {
        "signature": compiled.signature,
        "image": image,
        "derived": compiled.parts.derived,
        "cache": model.built.cache,
        "tokenizer": None if tokenizer is None else tokenizer.describe(),
        "embed": getattr(model, "settings", None),
    }
    text, arrays = record_json.encode(records, _classes(model.facts.kind, snapshot.session))
    manifest = {
        "kind": KIND,
        "key": snapshot.key,
        "facts": asdict(model.facts),
        "digest": model.digest,
        "auto": auto_cache(checkpoint, model.profile, snapshot.session.target),
        "in_place": in_place,
        "sampled": [_sample_digest(weights), _sample_digest(tables)],
    }
    contents: dict[str, container.Content] = {
        "records": text.encode(),
        "records.arrays": {str(i): a for i, a in enumerate(arrays)},
        "tokenizer": packed,
        TABLES: tables,
        WEIGHTS: weights,
    }
    try:
        container.write(path, manifest, contents, mode=0o600)
    except OSError:  # without a snapshot, the next load is only slower
        return False
    return True


def _exists(snapshot: ModelSnapshot) -> bool:
    """Whether another process has written it meanwhile. One that existed before was unusable."""
    path = snapshot.store.snapshot(snapshot.key) if snapshot.store.writable else None
    return path is not None and cache_folder.file_of(path) not in ("", snapshot.file_id)


def _is_settled(snapshot: ModelSnapshot) -> bool:
    """Whether the files have not changed since before the model was opened, nor within a clock tick before that."""
    try:
        times = [
            t for path in snapshot.files if path.exists() for t in (path.stat().st_mtime_ns, path.stat().st_ctime_ns)
        ]
        return (
            max(times, default=snapshot.began) + SETTLED_NS < snapshot.began
            and _state(snapshot.files) == snapshot.state
        )
    except OSError:  # removed meanwhile
        return False


def _is_builtin(compiled: CompiledGraph) -> bool:
    from rlx.runtime.program_cache import is_builtin

    return is_builtin(compiled.graph)


Place = tuple[int, int, str, list[int]]  # number of the file, offset, element type, shape


def _mapped_weights(snapshot: ModelSnapshot, checkpoint: Checkpoint, bound: Mapping[str, Array]) -> dict[str, Place]:
    """The locations of weights that are mapped from the model's files."""
    places: dict[str, Place] = {}
    numbers = {os.path.realpath(path): i for i, path in enumerate(snapshot.files)}
    source = checkpoint.weights
    for name, array in bound.items():
        if source.has(name) and isinstance(getattr(root_buffer(array), "obj", None), mmap.mmap):
            entry = source.entry(name)
            number = numbers.get(os.path.realpath(entry.file))
            same = address(array) == address(source.file.array(entry.name)) and array.nbytes == entry.nbytes
            if number is not None and same:
                places[name] = number, entry.offset, dtype(array.dtype).name, list(array.shape)
    return places


def _classes(kind: str, session: Session) -> dict[str, type]:
    classes = {**snapshot_records(session.device.name), **record_json.records_of(special_tokens)}
    if kind == "encoder":
        from rlx.models.pooling import EmbedSettings

        classes["EmbedSettings"] = EmbedSettings
    return classes


def _sample_digest(weights: Mapping[str, Array]) -> str:
    """A digest of samples, which is fast and detects a file whose pages never reached the disk."""
    digest = hashlib.blake2b(digest_size=16)
    step = max(SAMPLE, sum(a.nbytes for a in weights.values()) // SAMPLES)
    for name, array in weights.items():
        raw = array.reshape(-1).view(np.uint8)
        digest.update(f"{name} {raw.size}\n".encode())
        for at in range(0, raw.size, step):
            digest.update(raw[at : at + SAMPLE].data)
    return digest.hexdigest()


# -- opening ---------------------------------------------------------------------------------------------------------
def open_snapshot(snapshot: ModelSnapshot, name: str | None, settings: Mapping[str, Any]) -> Loaded | None:
    """Load a model from its snapshot; None if there is none, or if it is unusable."""
    path = snapshot.store.snapshot(snapshot.key)
    if path is None:
        return None
    file_id = cache_folder.file_of(path)
    try:
        file = container.read(path, "a snapshot")
        if settings["cache"] == "auto" and file.manifest["auto"] != snapshot.cache_dtype:
            return None  # written for an explicit cache type
        model = _restore(snapshot, file, name, settings)
    except ResourceError:
        raise
    except (RlxError, LookupError, TypeError, ValueError, AttributeError, OSError):
        snapshot.store.drop(path, file_id)  # damaged, or its code is gone
        return None
    snapshot.store.used(path)
    return model


def _restore(snapshot: ModelSnapshot, file: Container, name: str | None, settings: Mapping[str, Any]) -> Loaded:
    manifest, session = file.manifest, snapshot.session
    if (manifest["kind"], manifest["key"]) != (KIND, snapshot.key):
        raise FormatError(f"{file.path}: expected the snapshot {snapshot.key}, found {manifest['key']}")
    file.check(name for name in manifest["sections"] if name not in (WEIGHTS, TABLES))
    facts = ModelInfo(**manifest["facts"])
    arrays = list(file.arrays("records.arrays").values())
    records = record_json.decode(file.section("records"), _classes(facts.kind, session), arrays, str(file.path))
    weights = file.arrays(WEIGHTS)
    if [_sample_digest(weights), _sample_digest(file.arrays(TABLES))] != manifest["sampled"]:
        raise FormatError(f"{file.path}: its weights or tables are damaged")
    files = {number: open_bytes(snapshot.files[number]) for number in {p[0] for p in manifest["in_place"].values()}}
    weights |= _map_weights(files, manifest["in_place"])
    maps = [*file.maps, *(m for bytes_ in files.values() for m in bytes_.maps)]
    checkpoint = SnapshotCheckpoint(snapshot.path, facts, manifest["digest"], file, records["tokenizer"], maps)

    def source() -> tuple[Any, Mapping[str, Array]]:
        built = blueprint.built  # builds it on demand
        return built.module, built.params

    profile = with_precision(settings["profile"], settings["precision"])
    graph = from_snapshot(records["signature"], records["image"], records["derived"], weights, session, profile, source)
    if graph is None:
        raise FormatError(f"{file.path}: its machine code is gone")
    params = {name: weights[name] for name in graph.param_types if name in weights}  # other graphs reuse these maps
    prepared = Prepared(session, None, graph, params, manifest["digest"], records["cache"])
    passed = {n: settings[n] for n in ("context", "precision", "profile")}
    model = class_of(facts.kind)(checkpoint, name=name, cache=snapshot.cache_dtype, prepared=prepared, **passed)
    if records["embed"] is not None:
        model.__dict__["settings"] = records["embed"]
    blueprint = model.blueprint()
    return model


def _map_weights(maps: Mapping[int, FileBytes], places: Mapping[str, Any]) -> dict[str, Array]:
    """Map weights from the model's files."""
    weights = {}
    for name, (number, offset, kind, shape) in places.items():
        element = dtype(kind).numpy
        size = int(np.prod(shape)) * element.itemsize
        weights[name] = maps[number].array(offset, offset + size).view(element).reshape(shape)
    return weights


class SnapshotCheckpoint:
    """The checkpoint of a model loaded from a snapshot. Its files are opened on demand."""

    def __init__(
        self, path: Path, facts: ModelInfo, digest: str, file: Container, described: Mapping[str, Any] | None,
        maps: list[FileMap],
    ) -> None:  # fmt: skip
        self.path = path
        self.facts = facts
        self.digest = digest  # of the weights
        parts = file.section("tokenizer"), file.arrays(TABLES), str(file.path)
        self.tokenizer = None if described is None else Tokenizer.restore(described, *parts)
        self.maps = maps  # more when the files are opened
        self._lock = Lock()
        self._opened: Checkpoint | None = None

    def __repr__(self) -> str:
        return f"<checkpoint {str(self.path)!r}, loaded from a snapshot>"

    def open_files(self) -> Checkpoint:
        from rlx.engine.weights import weights_digest
        from rlx.models.load import open_checkpoint

        with self._lock:
            if self._opened is None:
                checkpoint = open_checkpoint(self.path)
                if (
                    weights_digest(checkpoint.file) != self.digest
                ):  # kernels use the old weights, so new graphs would not match
                    message = f"{self.path}: its weights have changed since it was loaded"
                    raise FormatError(message, hint="load it again")
                self.maps.extend(checkpoint.maps)
                self._opened = checkpoint
            return self._opened

    def __getattr__(self, name: str) -> Any:
        """Called for missing attributes: the configuration, the tensors, the family."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.open_files(), name)
