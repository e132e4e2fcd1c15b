"""`rlx.load`: resolves the name of a model and loads it, from its snapshot if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from rlx.backends.base import automatic
from rlx.engine.load_settings import choose, profile_for, session_for
from rlx.errors import RequestError, nearest
from rlx.garbage import paused
from rlx.hub.pull import resolve
from rlx.profile import CompileProfile
from rlx.runtime.container import SUFFIX
from rlx.runtime.kv_spec import CACHES
from rlx.runtime.session import Session

if TYPE_CHECKING:  # imported when a model is built: a snapshot needs no graphs
    from rlx.engine.embedding_model import EmbeddingModel
    from rlx.engine.language_model import LanguageModel
    from rlx.engine.model import Patch
    from rlx.engine.model_snapshot import ModelSnapshot
    from rlx.engine.vision_model import VisionModel
    from rlx.flow.built import BuiltModel
    from rlx.flow.flow import ModelFlow
    from rlx.formats.tokenizer import Tokenizer

    Loaded: TypeAlias = LanguageModel | EmbeddingModel | VisionModel

    class AnyModel(LanguageModel, EmbeddingModel, VisionModel):  # type: ignore[misc]
        """One of the three, for type checkers: which one depends on the file. Other verbs raise WrongVerb."""


# Names of other programs for the settings of `load`
ROOM = 1.3  # free bytes of a device per byte of a model's files that `device="auto"` asks for
FOREIGN_SETTINGS = {
    "n_ctx": "context", "num_ctx": "context", "max_seq_len": "context", "max_model_len": "context",
    "context_length": "context", "n_threads": "threads", "num_threads": "threads", "num_thread": "threads",
    "dtype": "precision", "torch_dtype": "precision", "type_k": "cache", "type_v": "cache", "kv_cache_dtype": "cache",
    "device_map": "device", "local_files_only": "offline", "model_path": "name", "model": "name",
}  # fmt: skip


def load(
    name: str | Path | ModelFlow | BuiltModel, *, device: str = "cpu", threads: int | None = None,
    context: int | None = None, precision: str = "auto", cache: str = "auto", offline: bool = False,
    profile: CompileProfile | str | Path | None = None, patch: Patch | None = None,
    params: Mapping[str, Any] | None = None, tokenizer: Tokenizer | str | Path | None = None, **unknown: Any,
) -> AnyModel:  # fmt: skip
    """Load a model by catalogue name, file, folder or `org/name[:quant]`, or an exported one (`.rlxp`).

    `device` is where it runs: cpu, cuda, cuda:1, or auto: a GPU with room for it if there is one, else the CPU.
    `context` is the maximum number of tokens, prompt and answer together. `cache` is the type of keys and values:
    f32, f16, bf16, q8_0, or auto (f16 if quantised weights meet int8 activations, on GPUs that of 16-bit weights,
    otherwise f32). `threads` is the number of cores per call (None: all). `offline` disables network access.
    `precision` is auto (what the profile says; by default int8 activations, quantised per block, for quantised
    weights, and f32 for the rest), f32 for everything, or int8 for embedding models, which also quantises weights to
    int8.

    `profile` says how to compile: a profile, the name of a preset, or a TOML file; the default is `profile.toml` in the
    model's folder, if there is one. `patch` is a function that gets the model's flow and returns a changed one.

    A flow of your own, from token ids to logits, becomes a model with its weights `params` (those of a built flow by
    default) and, for texts, a `tokenizer`: rlx's, or the path of a tokenizer.json. A KV cache and the selection of
    tokens are added unless the flow has them.
    """
    for word in unknown:
        own_name = FOREIGN_SETTINGS.get(word)
        known = ("device", "threads", "context", "precision", "cache", "offline", "profile", "patch", "params")
        hint = f"here it is called {own_name}" if own_name else nearest(word, known) or f"known: {', '.join(known)}"
        raise RequestError(f"load: no setting is called {word!r}", hint=hint)
    settings: dict[str, Any] = {"device": device, "precision": precision, "cache": cache, "context": context}
    settings |= {"profile": profile, "patch": patch}
    source: Any = name
    if hasattr(source, "as_function"):  # a flow, or a built one
        from rlx.engine.flow_model import load_flow

        return cast("AnyModel", load_flow(source, params, tokenizer, threads, settings))
    if params is not None or tokenizer is not None:
        raise RequestError("load: params and tokenizer are those of a flow of your own, a model's are in its files")
    files = resolve(source, offline=offline)
    if device == "auto":
        settings["device"] = str(automatic(round(ROOM * _file_bytes(files.path))))
    if files.path.suffix == SUFFIX:
        from rlx.engine.export import load_model

        return cast("AnyModel", load_model(files.path, threads, settings))
    with paused():
        model = _load_files(files.path, None if files.source == "path" else files.name, threads, settings)
    model.warn_of_notes()
    return cast("AnyModel", model)


def _file_bytes(path: Path) -> int:
    """Bytes of a model's files."""
    files = path.parent.iterdir() if path.suffix in (".safetensors", ".json") else [path]
    files = path.iterdir() if path.is_dir() else files
    return sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".gguf", ".bin", path.suffix))


def _load_files(path: Path, name: str | None, threads: int | None, settings: dict[str, Any]) -> Loaded:
    """Load the model's snapshot; without one, load its files and write a snapshot for the next time."""
    from rlx.engine import model_snapshot

    choose("cache", settings["cache"], CACHES)
    session = session_for(settings["device"], threads)
    snapshots: Mapping[str, ModelSnapshot] = {}
    if settings["patch"] is None:
        settings["profile"] = profile_for(settings["profile"], path)
        snapshots = model_snapshot.find(path, session, settings)
        for snapshot in snapshots.values():
            restored = model_snapshot.open_snapshot(snapshot, name, settings)
            if restored is not None:
                return restored
    model = open_model(path, name, session, settings)
    own_snapshot = snapshots.get(model.cache_dtype)
    if own_snapshot is not None and model_snapshot.write(model, own_snapshot):
        model.close()  # before mapping its weights: they are in memory once, as pages that the system may drop
        model = model_snapshot.open_snapshot(own_snapshot, name, settings) or open_model(path, name, session, settings)
    session.device.backend.trim()
    return model


def open_model(path: Path, name: str | None, session: Session, settings: Mapping[str, Any]) -> Loaded:
    """Load the model from its files."""
    from rlx.engine.weights import require_room
    from rlx.models.load import open_checkpoint

    checkpoint = open_checkpoint(path)
    require_room(checkpoint, session.device)
    return class_of(checkpoint.family.kind)(checkpoint, name=name, session=session, **settings)


def class_of(kind: str) -> type[Loaded]:
    """The model class for a kind of family."""
    match kind:
        case "decoder":
            from rlx.engine.language_model import LanguageModel

            return LanguageModel
        case "vision model":
            from rlx.engine.vision_model import VisionModel

            return VisionModel
        case _:
            from rlx.engine.embedding_model import EmbeddingModel

            return EmbeddingModel
