"""Exported models: program, machine code, tokenizer and settings in one file that loads without compiling.

Weights are either referenced (path and SHA-256 of the model's file; packed when loaded) or embedded, packed and ready
to be mapped. Everything else is in the export, so only tensors are read from other files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlx.arrays import Array
from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.flow_model import FlowModel, flow_family
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import class_of
from rlx.engine.model import Model, Prepared
from rlx.engine.vision_model import VisionModel
from rlx.errors import CapabilityError, FormatError, NotFoundError, RequestError
from rlx.flow.built import BuiltModel, Params
from rlx.flow.flow import KvCacheSpec, ModelFlow
from rlx.fork_safe_locks import cached_property
from rlx.formats import TensorFile, open_tensors
from rlx.formats.bpe import check_tables
from rlx.formats.special_tokens import SpecialIds
from rlx.formats.tensor_file import PathLike, broken, quoted
from rlx.formats.tokenizer import Tokenizer
from rlx.functional.jitted import Jitted
from rlx.ir.graph import Graph
from rlx.kv_layout import KvLayout
from rlx.models.config import record_types
from rlx.models.family import FAMILIES, Family, FileWeights, load_installed
from rlx.models.image_preprocessing import ImageSettings
from rlx.models.load import Checkpoint
from rlx.models.pooling import EmbedSettings
from rlx.models.weight_views import weights_of
from rlx.profile import CompileProfile
from rlx.runtime import record_json
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.export import (
    WEIGHTS,
    Content,
    ExportFile,
    Extras,
    as_format_errors,
    export_graph,
    from_export,
    leaves,
    open_export,
)
from rlx.runtime.kv_spec import CACHES
from rlx.runtime.session import Session
from rlx.types import TensorType

AnyModel = LanguageModel | EmbeddingModel | VisionModel
# Settings of `load` that are fixed in an export, and their defaults.
_DEFAULTS = {"device": "cpu", "precision": "auto", "cache": "auto", "context": None, "profile": None, "patch": None}
_ROPE_FACTORS = "rope_freqs.weight"
FLOW = "flow"  # in place of a family: a flow of one's own


def export(what: CompiledGraph | Jitted | Model, path: PathLike, *, weights: bool = False) -> Path:
    """Write a compiled graph or a loaded model to a file that loads without compiling; `weights` embeds the weights.

    Of a function made by `rlx.jit`, the program of its last call is written.
    """
    if isinstance(what, CompiledGraph):
        return what.export(Path(path), weights=weights)
    if isinstance(what, Model):
        return export_model(what, path, embed=weights)
    if isinstance(what, Jitted):
        return what.export(Path(path))
    hint = None
    if isinstance(what, (Graph, BuiltModel, ModelFlow)):
        built = "flow.build(params)" if isinstance(what, ModelFlow) else "it"
        hint = f"compile it first: rlx.export(rlx.compile({built}), path)"
    kind = type(what).__name__
    raise RequestError(f"export: takes a compiled graph, a jitted function or a model, found {kind}", hint=hint)


def load_exported(
    path: PathLike, *, threads: int | None = None, model: PathLike | None = None, verify: bool = False
) -> CompiledGraph | AnyModel:
    """Load a compiled graph or a model from a file written by `export`. It contains machine code: load trusted files.

    `model` is the path of the model's weights, if they have moved. `verify` checks the digest of embedded weights,
    which are otherwise mapped and read on demand.
    """
    file = open_export(path, verify=verify)
    if file.manifest["kind"] == "graph":
        compiled = from_export(file, threads=threads)
        if "function" in file.manifest:
            from rlx.functional.exported import ExportedCall  # models do not need it

            record, outputs = file.manifest["function"], len(compiled.signature.outputs)
            compiled.convention = ExportedCall.from_json(record, str(file.path), outputs)
        return compiled
    return _model(file, threads, model)


def load_model(path: PathLike, threads: int | None, settings: Mapping[str, Any]) -> AnyModel:
    """Load an exported model for `rlx.load`; settings must be the defaults or those of the export."""
    file = open_export(path)
    if file.manifest["kind"] == "graph":
        name = file.manifest["name"]
        raise FormatError(f"{path}: holds the graph {name!r}, no model", hint=f"rlx.load_exported({str(path)!r})")
    known = file.manifest["model"]
    for setting, value in settings.items():
        if value not in (_DEFAULTS[setting], known.get(setting, _DEFAULTS[setting])):
            reason = f"exported with {known[setting]}" if setting in known else "fixed when it was exported"
            raise RequestError(
                f"{path}: {setting} is {value!r}, but {reason}", hint="export it again with other settings"
            )
    return _model(file, threads, None)


# -- writing ---------------------------------------------------------------------------------------------------------
def export_model(model: Model, path: PathLike, *, embed: bool = False) -> Path:
    """Write a loaded model to a file; `embed` adds its weights, packed for the kernels."""
    model.check_usable()
    built, compiled, checkpoint = model.built, model.compiled, model.checkpoint
    if isinstance(built, _Built):
        raise CapabilityError(f"export: {model.name} is itself an export", hint="export the original model")
    tokenizer = checkpoint.tokenizer
    settings = getattr(model, "settings", None)  # of texts or images, where the model makes vectors
    described = None if tokenizer is None else tokenizer.describe()
    records = {"config": checkpoint.config, "cache": built.cache, "embed": settings, "tokenizer": described}
    text, arrays = record_json.encode(records, _classes(model.family))
    about = {
        "name": model.name,
        "family": FLOW if isinstance(model, FlowModel) else model.family.name,
        "context": model.context,
        "cache": model.cache_dtype,
        "digest": model.digest,
        "patched": model.is_patched,
        "outputs": built.output_names,
        "path": os.fsencode(checkpoint.path.absolute()).decode(errors="replace"),
        "files": [] if isinstance(model, FlowModel) else list(_files(checkpoint.file)),
    }
    contents: dict[str, Content] = {
        "records": text.encode(),
        "records.arrays": {str(i): a for i, a in enumerate(arrays)},
        "made": {} if embed else {n: a for n, a in built.params.computed.items() if n in compiled.param_types},
    }
    if tokenizer is not None:
        contents["tokenizer"], contents["tokenizer.tables"] = tokenizer.pack()
    return export_graph(compiled, path, embed=embed, extras=Extras(model.family.kind, {"model": about}, contents))


def _classes(family: Family) -> dict[str, type]:
    records = (*record_types(family.config), KvCacheSpec, KvLayout, EmbedSettings, ImageSettings, SpecialIds)
    return {c.__name__: c for c in records}


def _files(tensors: TensorFile) -> Iterator[dict[str, Any]]:
    """The weight files, with what is needed to detect changes."""
    tensors = tensors.stored
    for path in sorted({tensors.entry(name).file for name in tensors.names}):
        status = path.stat()
        yield {"name": path.name, "bytes": status.st_size, "modified": status.st_mtime_ns, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- reading ---------------------------------------------------------------------------------------------------------
def _model(file: ExportFile, threads: int | None, moved: PathLike | None) -> AnyModel:
    about = file.manifest["model"]
    family, records = _read_records(file)
    checkpoint = _checkpoint(file, family, records, moved)
    session = Session(file.target.device, threads=threads, target=file.target)
    compiled = from_export(file, threads=session.threads, store=session.weights)
    computed = file.arrays("made")
    own = leaves(file)
    params = Params(own, computed, checkpoint.weights)
    known = {} if WEIGHTS in file.manifest["sections"] else dict(params)
    if known:
        compiled.set_params(known)
        compiled.prepare()
    profile = compiled.profile or CompileProfile()
    built = _Built(own, compiled, params, about["outputs"], records["cache"], profile)
    with as_format_errors(file):
        model_class = FlowModel if about["family"] == FLOW else class_of(family.kind)
        model = model_class(
            checkpoint, context=about["context"], cache=about["cache"], name=about["name"], profile=profile,
            patch=_lost_patch if about["patched"] else None,
            prepared=Prepared(session, built, compiled, known, about["digest"], records["cache"]),
        )  # fmt: skip
    if not isinstance(model, LanguageModel):
        model.settings = records["embed"]
    return model


def _read_records(file: ExportFile) -> tuple[Family, dict[str, Any]]:
    """The family and the records of a model, checked against the manifest."""
    manifest, about = file.manifest, file.manifest["model"]
    if about["family"] not in (FLOW, *FAMILIES):
        load_installed()
    known = [FLOW, *(family.name for family in FAMILIES.values() if family.kind == manifest["kind"])]
    if about["family"] not in known:
        raise broken(
            file.path, "manifest: model.family", expected=f"a {manifest['kind']}", actual=quoted(about["family"])
        )
    if about["cache"] not in CACHES or about["cache"] == "auto":
        raise broken(file.path, "manifest: model.cache", expected=", ".join(CACHES), actual=quoted(about["cache"]))
    if len(about["outputs"]) != len(manifest["outputs"]):
        outputs = f"{len(manifest['outputs'])} names"
        raise broken(file.path, "manifest: model.outputs", expected=outputs, actual=quoted(about["outputs"]))
    family = flow_family(about["name"], None) if about["family"] == FLOW else FAMILIES[about["family"]]
    arrays = list(file.arrays("records.arrays").values())
    records = record_json.decode(file.section("records"), _classes(family), arrays, f"{file.path}: records")
    wanted: dict[str, Any] = {
        "config": family.config, "cache": KvCacheSpec | None, "embed": EmbedSettings | ImageSettings | None,
        "tokenizer": dict | None,
    }  # fmt: skip
    if not isinstance(records, dict) or not all(isinstance(records.get(n), kind) for n, kind in wanted.items()):
        raise broken(file.path, "records", expected=", ".join(wanted), actual=quoted(records))
    spec = records["cache"]
    if spec is not None and spec.dtype != about["cache"]:
        raise broken(file.path, "manifest: model.cache", expected=quoted(spec.dtype), actual=quoted(about["cache"]))
    longest = int(getattr(records["config"], "context", about["context"]))
    if about["context"] > max(longest, 1):
        raise broken(file.path, "manifest: model.context", expected=f"at most {longest}", actual=about["context"])
    return family, records


def _checkpoint(file: ExportFile, family: Family, records: Mapping[str, Any], moved: PathLike | None) -> Checkpoint:
    """The checkpoint of an exported model. Only tensors are read from the model's files, none if they are embedded."""
    config, tokenizer = records["config"], _tokenizer(file, records["tokenizer"])
    if WEIGHTS in file.manifest["sections"]:
        nothing = TensorFile(file.path, "rlxp", [], {}, [])
        packed = _Packed(nothing, {}, 0)
        return Checkpoint(file.path, nothing, family, config, packed, tokenizer, others=tuple(file.maps))
    path = _find_weights(file, moved)
    tensors = open_tensors(path)
    factors = tensors.dequantised(_ROPE_FACTORS) if _ROPE_FACTORS in tensors else None
    weights = weights_of(family, config, tensors)
    return Checkpoint(path, weights.file, family, config, weights, tokenizer, factors, others=tuple(file.maps))


class _Built(BuiltModel):
    """The built model of an export; its graph is parsed on demand."""

    def __init__(
        self, own: Graph, compiled: CompiledGraph, params: Params, output_names: list[str], cache: KvCacheSpec | None,
        profile: CompileProfile,
    ) -> None:  # fmt: skip
        super().__init__(own, params, output_names, cache, profile)
        self.__dict__["compiled"] = compiled
        del self.__dict__["module"]

    @cached_property
    def module(self) -> Graph:
        graph: Graph = self.__dict__["compiled"].graph
        return graph


class _Packed(FileWeights):
    """Embedded weights, which are available only in the kernels' layout."""

    def _refuse(self) -> NoReturn:
        raise CapabilityError(
            f"{self.file.path}: has the weights only in the kernels' layout, not as in the model's file",
            hint="load the model itself, or an export without --weights",
        )

    def has(self, key: str) -> bool:
        return True  # reading it raises the explanation

    def type(self, key: str) -> TensorType:
        self._refuse()

    def array(self, key: str) -> Array:
        self._refuse()

    def keys(self) -> Iterable[str]:
        return ()


def _lost_patch(flow: ModelFlow) -> ModelFlow:
    raise CapabilityError(f"flow {flow.name!r}: the export does not have the patch that the model was loaded with")


def _find_weights(file: ExportFile, moved: PathLike | None) -> Path:
    """The path of the model's file or folder, with weights unchanged since the export."""
    about = file.manifest["model"]
    recorded = Path(about["path"])
    places = [Path(moved)] if moved is not None else [recorded, file.path.parent / recorded.name]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise NotFoundError(
            f"{file.path}: the weights of {about['name']} are not there",
            notes=[f"looked at: {place}" for place in places],
            hint="rlx.load_exported(..., model=PATH) says where they are; rlx export --weights embeds them",
        )
    single = len(about["files"]) == 1 and path.is_file()
    folder = path if path.is_dir() else path.parent
    for known in about["files"]:
        _check_unchanged(file.path, path if single else folder / known["name"], known)
    return path


def _check_unchanged(export: Path, path: Path, known: Mapping[str, Any]) -> None:
    """Compare a file with its recorded state. Its SHA-256 is computed only if the modification time differs."""
    try:
        status = path.stat()
        was, now = f"{known['bytes']} bytes", f"{status.st_size} bytes"
        if was == now and status.st_mtime_ns != known["modified"]:
            was, now = f"SHA-256 {known['sha256']}", f"SHA-256 {_sha256(path)}"
    except OSError as error:
        raise NotFoundError(f"{export}: {path} cannot be read: {error.strerror}") from error
    if was != now:
        raise FormatError(f"{export}: {path} has changed: it had {was}, now {now}", hint="export the model again")


def _tokenizer(file: ExportFile, described: Mapping[str, Any] | None) -> Tokenizer | None:
    if described is None:
        return None
    tables, where = file.arrays("tokenizer.tables"), str(file.path)
    if tables:
        check_tables(tables, described["vocab_size"], f"{where}: tokenizer.tables")
    with as_format_errors(file):
        return Tokenizer.restore(described, file.section("tokenizer"), tables, where)
