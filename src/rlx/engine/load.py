"""`rlx.load`: from the name of a model to the model, from its snapshot where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlx.engine.load_settings import choose, profile_for, session_for
from rlx.errors import RequestError, nearest
from rlx.garbage import paused
from rlx.hub.pull import resolve
from rlx.profile import CompileProfile
from rlx.runtime.container import SUFFIX
from rlx.runtime.kv_spec import CACHES
from rlx.runtime.session import Session

if TYPE_CHECKING:  # imported where a model is built: one that has a snapshot needs no graph
    from rlx.engine.embedding_model import EmbeddingModel
    from rlx.engine.language_model import LanguageModel
    from rlx.engine.model import Patch
    from rlx.engine.model_snapshot import ModelSnapshot
    from rlx.engine.vision_model import VisionModel

    Loaded: TypeAlias = LanguageModel | EmbeddingModel | VisionModel

# What other programs call the settings of `load`
FOREIGN_SETTINGS = {
    "n_ctx": "context", "num_ctx": "context", "max_seq_len": "context", "max_model_len": "context",
    "context_length": "context", "n_threads": "threads", "num_threads": "threads", "num_thread": "threads",
    "dtype": "precision", "torch_dtype": "precision", "type_k": "cache", "type_v": "cache", "kv_cache_dtype": "cache",
    "device_map": "device", "local_files_only": "offline", "model_path": "name", "model": "name",
}  # fmt: skip


def load(
    name: str | Path, *, device: str = "cpu", threads: int | None = None, context: int | None = None,
    precision: str = "auto", cache: str = "auto", offline: bool = False,
    profile: CompileProfile | str | Path | None = None, patch: Patch | None = None, **unknown: Any,
) -> Loaded:  # fmt: skip
    """A model by catalogue name, file, folder or `org/name[:quant]`, or one that was exported (`.rlxp`).

    `context` is how many tokens prompt and answer may have together, `cache` the type of keys and values (f32, f16,
    q8_0, or auto: f16 where products with packed weights are rounded to 8 bits, f32 elsewhere), `threads` how many
    cores a call may use (None: all). With `offline` the network is not touched. `precision` is auto (what the profile
    says; without one, what meets packed weights is rounded to 8 bits a block, and all else is f32), f32 (all of it) or,
    for embedding models, int8: weights too are rounded to 8-bit integers.

    `profile` says how it is compiled: a profile, the name of a preset, or a TOML file; without one, `profile.toml`
    beside the model is honoured. `patch` gets the flow of the model before it is built and returns a changed one.
    """
    for word in unknown:
        ours = FOREIGN_SETTINGS.get(word)
        known = ("device", "threads", "context", "precision", "cache", "offline", "profile", "patch")
        hint = f"here it is called {ours}" if ours else nearest(word, known) or f"known: {', '.join(known)}"
        raise RequestError(f"load: no setting is called {word!r}", hint=hint)
    files = resolve(name, offline=offline)
    settings: dict[str, Any] = {"device": device, "precision": precision, "cache": cache, "context": context}
    settings |= {"profile": profile, "patch": patch}
    if files.path.suffix == SUFFIX:
        from rlx.engine.export import load_model

        return load_model(files.path, threads, settings)
    with paused():
        model = _load_files(files.path, None if files.source == "path" else files.name, threads, settings)
    model._warn()
    return model


def _load_files(path: Path, name: str | None, threads: int | None, settings: dict[str, Any]) -> Loaded:
    """The model as it was kept the last time; without that, from its files, and kept for the next time."""
    from rlx.engine import model_snapshot

    choose("cache", settings["cache"], CACHES)
    session = session_for(settings["device"], threads)
    found: Mapping[str, ModelSnapshot] = {}
    if settings["patch"] is None:
        settings["profile"] = profile_for(settings["profile"], path)
        found = model_snapshot.find(path, session, settings)
        for snapshot in found.values():
            restored = model_snapshot.open_snapshot(snapshot, name, settings)
            if restored is not None:
                return restored
    model = open_model(path, name, session, settings)
    mine = found.get(model.cache_dtype)
    if mine is not None and model_snapshot.keep(model, mine):
        model.close()  # before its weights are mapped: they are in memory once, and the system may drop them
        model = model_snapshot.open_snapshot(mine, name, settings) or open_model(path, name, session, settings)
    session.device.backend.trim()
    return model


def open_model(path: Path, name: str | None, session: Session, settings: Mapping[str, Any]) -> Loaded:
    """The model from its files."""
    from rlx.models.load import open_checkpoint

    checkpoint = open_checkpoint(path)
    return class_of(checkpoint.family.kind)(checkpoint, name=name, session=session, **settings)


def class_of(kind: str) -> type[Loaded]:
    """What a model of a kind of family becomes."""
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
