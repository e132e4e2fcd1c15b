"""Loaded models: what `rlx.load` gives. `Model` is what language and embedding models share: weights, code, memory."""

from __future__ import annotations

import fnmatch
import hashlib
import mmap
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

import rlx
from rlx.engine.kvcache import CacheStore
from rlx.engine.sampler import shown
from rlx.errors import CapabilityError, RequestError, nearest
from rlx.flow.flow import BuiltModel, ModelFlow
from rlx.flow.recipe import ModelRecipe
from rlx.formats import TensorFile
from rlx.formats.tokenizer import Tokenizer
from rlx.hub.pull import resolve
from rlx.models.load import Checkpoint, open_checkpoint
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph, CpuGraph
from rlx.runtime.export import SUFFIX
from rlx.runtime.session import Session

if TYPE_CHECKING:
    from rlx.engine.embed import EmbeddingModel
    from rlx.engine.language import LanguageModel

Array = np.ndarray[Any, Any]
CONTEXT = 4096  # positions, where the model has more and nothing else is asked
CAPTURES = 4  # graphs with captured stages that are kept
SAMPLE = 4096  # bytes at both ends of a tensor that tell models apart
PROFILE = "profile.toml"  # beside a model, says how it is compiled
VERBS = {"a decoder": ("generate", "chat", "stream", "logits"), "an encoder": ("embed", "similarity")}
# what other programs call the settings of `load`
ALIENS = {
    "n_ctx": "context", "num_ctx": "context", "max_seq_len": "context", "max_model_len": "context",
    "context_length": "context", "n_threads": "threads", "num_threads": "threads", "num_thread": "threads",
    "dtype": "precision", "torch_dtype": "precision", "type_k": "cache", "type_v": "cache", "kv_cache_dtype": "cache",
    "device_map": "device", "local_files_only": "offline", "model_path": "name", "model": "name",
}  # fmt: skip


Patch = Callable[[ModelFlow], ModelFlow]


class WrongVerb(CapabilityError, AttributeError):
    """A verb of another kind of model. An AttributeError too, so that `hasattr` says no."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a model holds, in bytes. `mapped` are weights read in place from the file, which the system may drop."""

    weights: int
    mapped: int
    cache: int
    arena: int

    @property
    def total(self) -> int:
        return self.weights + self.mapped + self.cache + self.arena

    def __str__(self) -> str:
        parts = {"weights": self.weights, "mapped": self.mapped, "cache": self.cache, "arena": self.arena}
        shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts.items())
        return f"{self.total / 2**20:.1f} MiB ({shown})"


@dataclass(frozen=True)
class Prepared:
    """What an export brings along, so that nothing is built or compiled; the graph has its weights."""

    session: Session
    built: BuiltModel
    compiled: CompiledGraph
    params: Mapping[str, Array]
    digest: str


class Model:
    """A model ready to use. Safe from several threads at once."""

    def __init__(
        self, checkpoint: Checkpoint, *, device: str = "cpu", threads: int | None = None, context: int | None = None,
        precision: str = "auto", cache: str = "f32", name: str | None = None,
        profile: CompileProfile | str | Path | None = None, patch: Patch | None = None,
        prepared: Prepared | None = None,
    ) -> None:  # fmt: skip
        _choose("device", device, ("cpu",))
        _choose("precision", precision, ("auto", "f32"))
        self._checkpoint: Checkpoint | None = checkpoint
        self.family = checkpoint.family
        self.context = _checked_context(context, int(checkpoint.config.context))
        self.cache_dtype = _choose("cache", cache, ("f32", "f16"))
        self.name = name or checkpoint.path.name
        self.profile = _profile(profile, checkpoint.path)
        if patch is not None and not callable(patch):
            raise RequestError(f"load: patch is {shown(patch)}, expected a function from a flow to a flow")
        self._patch = patch
        self._session = Session(device, threads=threads) if prepared is None else prepared.session
        self._lock = threading.Lock()
        self._arrays: dict[str, Array] = {} if prepared is None else dict(prepared.params)
        self._captures: dict[frozenset[str], tuple[BuiltModel, CompiledGraph]] = {}
        built = self._build() if prepared is None else prepared.built
        compiled = self._compile(built) if prepared is None else prepared.compiled
        self._ready: tuple[BuiltModel, CompiledGraph] | None = (built, compiled)
        self.caches = None if built.cache is None else CacheStore(built.cache, self.context)
        # now: a call may end after the file was closed
        self.digest = _digest(checkpoint.file) if prepared is None else prepared.digest

    def _flow(self) -> ModelFlow:
        return self.family.flow(self.checkpoint.config)

    def _build(self, capture: Sequence[str] = ()) -> BuiltModel:
        """The graph by the profile, with the changes of whoever loads the model."""
        recipe = ModelRecipe(self.name, lambda: self._flow().profile(self.profile))
        recipe = recipe if self._patch is None else recipe.patch(self._patch)
        return recipe.assemble().build(self.checkpoint.weights, capture)

    def _compile(self, built: BuiltModel) -> CompiledGraph:
        """Code with its weights in place, so that the first call is as quick as the others.

        All graphs of a model are given the same arrays, so that what is derived from them is shared.
        """
        compiled = self._session.compile(built.module, profile=built.profile)
        for name in compiled.param_types:
            if name not in self._arrays:
                made = built.params.get(name)
                self._arrays[name] = self.checkpoint.weights.array(name) if made is None else made
            compiled.set_param(name, self._arrays[name])
        compiled.prepare()
        self.checkpoint.file.release()  # packed weights have copies of their own
        return compiled

    # -- parts --
    def _open(self) -> tuple[BuiltModel, CompiledGraph]:
        if self._ready is None:
            raise self._closed()
        return self._ready

    def _closed(self) -> RequestError:
        return RequestError(f"{self.name}: the model is closed", hint="load it again")

    @property
    def checkpoint(self) -> Checkpoint:
        """The file, its configuration and its weights."""
        if self._checkpoint is None:
            raise self._closed()
        return self._checkpoint

    @property
    def built(self) -> BuiltModel:
        """The graph and what belongs to it."""
        return self._open()[0]

    @property
    def compiled(self) -> CompiledGraph:
        """The code and the weights."""
        return self._open()[1]

    @property
    def target(self) -> str:
        """What the code was compiled for, such as avx512."""
        return self._session.target.name

    @property
    def threads(self) -> int:
        compiled = self.compiled
        return compiled.threads if isinstance(compiled, CpuGraph) else 1

    @property
    def tokenizer(self) -> Tokenizer:
        found = self.checkpoint.tokenizer
        if found is None:
            raise CapabilityError(f"{self.name}: the model has no tokenizer", hint="put tokenizer.json beside it")
        return found

    def fingerprint(self, seed: int) -> str:
        """What the bits of an answer depend on, beside the request."""
        made = f"rlx {rlx.__version__}, {self.target}, cache {self.cache_dtype}, model {self.digest}"
        made += "" if self.profile == CompileProfile() else f", profile {self.profile.key()}"
        return f"{made}{', patched' if self._patch else ''}, seed {seed}"

    def token_ids(self, given: str | Sequence[int], where: str = "tokens") -> list[int]:
        """A text or token ids as checked token ids."""
        if isinstance(given, str):
            return self.tokenizer.encode(given)
        try:
            if isinstance(given, (bytes, bytearray, Mapping)):  # which have whole numbers in them too
                raise TypeError
            found = [operator.index(token) for token in given]
        except TypeError as error:
            raise RequestError(f"{where}: expected a text or token ids, found {shown(given)}") from error
        vocab = int(self.checkpoint.config.vocab)
        for i, token in enumerate(found):
            if not 0 <= token < vocab:
                raise RequestError(f"{where}: token {shown(token)} at {i} is outside the vocabulary of {vocab} tokens")
        return found

    # -- looking inside --
    def run(self, tokens: str | Sequence[int], capture: Iterable[str] | str | None = ()) -> dict[str, Array]:
        """Values inside the model by stage path: `capture=["layers.*.attn", "logits"]` gives `[seq, ...]` for each.

        A stage's value is the last one computed in it: `layers.3` is the residual stream after layer 3. Without
        `capture`, the model's output.
        """
        self._open()
        ids = self.token_ids(tokens, "run")
        if not 0 < len(ids) <= self.context:
            raise RequestError(f"run: {len(ids)} tokens, expected 1 to {self.context}")
        capture = () if capture is None else capture
        patterns = list(capture) if isinstance(capture, Iterable) and not isinstance(capture, str) else [capture]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise RequestError(f"run: capture is {shown(capture)}, expected patterns of stage paths")
        built, compiled = self._captured(patterns) if patterns else self._open()
        found = dict(zip(built.output_names, self._values(compiled, ids), strict=True))
        return {n: v for n, v in found.items() if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)}

    def _values(self, compiled: CompiledGraph, ids: Sequence[int]) -> list[Array]:
        """The outputs of a graph for one sequence, `[seq, ...]` each."""
        tokens = np.array([ids], np.int32)
        inputs = {
            "tokens": tokens,
            "token_types": np.zeros_like(tokens),
            "positions": np.arange(len(ids), dtype=np.int32)[None],
            "attention_mask": np.ones(tokens.shape, np.float32),
        }
        return [a[0] for a in compiled.run({n: inputs[n] for n in compiled.input_types})]

    def _captured(self, patterns: Sequence[str]) -> tuple[BuiltModel, CompiledGraph]:
        key = frozenset(patterns)
        with self._lock:
            found = self._captures.pop(key, None)
            if found is None:
                built = self._build(list(patterns))
                found = built, self._compile(built)
            self._captures[key] = found
            while len(self._captures) > CAPTURES:
                del self._captures[next(iter(self._captures))]
        return found

    # -- life --
    def export(self, path: str | Path, *, weights: bool = False) -> Path:
        """Write a file that `rlx.load` starts without compiling; with `weights`, those are in it too."""
        from rlx.engine.export import export_model

        return export_model(self, path, embed=weights)

    def memory(self) -> Memory:
        """What the model holds now."""
        weights: dict[int, int] = {}
        mapped: dict[int, int] = {}
        arena = 0
        with self._lock:
            graphs = [self._open(), *self._captures.values()]
        for _, compiled in graphs:
            held = list(compiled._params.values())
            if isinstance(compiled, CpuGraph):  # what went into derived weights was let go of
                held = list(compiled.executable._weights.values())
                arena += sum(i.arena.nbytes + i.scratch.nbytes for i in compiled.executable._instances)
            for array in held:
                owner = _owner(array)
                if isinstance(owner, np.ndarray):
                    weights[id(owner)] = owner.nbytes
                else:
                    mapped[array.ctypes.data] = max(array.nbytes, mapped.get(array.ctypes.data, 0))
        cache = 0 if self.caches is None else self.caches.nbytes
        return Memory(sum(weights.values()), sum(mapped.values()), cache, arena)

    def close(self) -> None:
        """Give back memory and files. Calls in progress end well; later ones are refused."""
        self._ready = None
        self._captures.clear()
        self._arrays.clear()
        if self.caches is not None:
            self.caches.close()
        if self._checkpoint is not None:
            self._checkpoint.file.close()
            self._checkpoint = None  # its metadata has views of the file too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"context {self.context}" if self._ready else "closed"
        return f"<{type(self).__name__} {self.name!r}: {self.family.name} {self.family.kind}, {state}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Only asked for what is not there: the verbs of other kinds of models say where they belong."""
            if any(name in verbs for verbs in VERBS.values()):
                (kind,) = (kind for kind in VERBS if kind.endswith(f" {self.family.kind}"))
                raise WrongVerb(f"{name}: {self.name} is {kind}", hint=f"use .{VERBS[kind][0]}()")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def load(
    name: str | Path, *, device: str = "cpu", threads: int | None = None, context: int | None = None,
    precision: str = "auto", cache: str = "f32", offline: bool = False,
    profile: CompileProfile | str | Path | None = None, patch: Patch | None = None, **unknown: Any,
) -> LanguageModel | EmbeddingModel:  # fmt: skip
    """A model by catalogue name, file, folder or `org/name[:quant]`, or one that was exported (`.rlxp`).

    `context` is how many tokens prompt and answer may have together, `cache` the type of keys and values (f32 or f16),
    `threads` how many cores a call may use (None: all). With `offline` the network is not touched.

    `profile` says how it is compiled: a profile, the name of a preset, or a TOML file; without one, `profile.toml`
    beside the model is honoured. `patch` gets the flow of the model before it is built and returns a changed one.
    """
    from rlx.engine.embed import EmbeddingModel
    from rlx.engine.language import LanguageModel

    for word in unknown:
        ours = ALIENS.get(word)
        known = ("device", "threads", "context", "precision", "cache", "offline", "profile", "patch")
        hint = f"here it is called {ours}" if ours else nearest(word, known) or f"known: {', '.join(known)}"
        raise RequestError(f"load: no setting is called {word!r}", hint=hint)
    files = resolve(name, offline=offline)
    settings: dict[str, Any] = {"device": device, "precision": precision, "cache": cache, "context": context}
    settings |= {"profile": profile, "patch": patch}
    if files.path.suffix == SUFFIX:
        from rlx.engine.export import load_model

        return load_model(files.path, threads, settings)
    checkpoint = open_checkpoint(files.path)
    kind = LanguageModel if checkpoint.family.kind == "decoder" else EmbeddingModel
    return kind(checkpoint, threads=threads, name=None if files.source == "path" else files.name, **settings)


def _digest(file: TensorFile) -> str:
    """Tells models apart: what their tensors are, and the bytes at both ends of each."""
    found = hashlib.blake2b(digest_size=8)
    for name in file.names:
        entry, raw = file.entry(name), file.array(name).reshape(-1).view(np.uint8)
        found.update(f"{name} {entry.shape} {entry.storage.name}\n".encode())
        found.update(raw[:SAMPLE].tobytes() + raw[-SAMPLE:].tobytes())
    return found.hexdigest()


# -- checks --
def _choose(what: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise CapabilityError(f"load: {what} {given!r} is not supported", hint=f"there is: {', '.join(known)}")
    return given


def _profile(given: CompileProfile | str | Path | None, model: Path) -> CompileProfile:
    """What was asked for, or the file beside the model."""
    if isinstance(given, CompileProfile):
        return given
    if given is None:
        beside = (model if model.is_dir() else model.parent) / PROFILE
        return CompileProfile.from_toml(beside) if beside.is_file() else CompileProfile()
    if isinstance(given, str) and not given.endswith(".toml"):
        return CompileProfile.preset(given)
    if not isinstance(given, (str, Path)):
        raise RequestError(f"load: profile is {shown(given)}, expected a profile, a preset's name or a TOML file")
    return CompileProfile.from_toml(given)


def _checked_context(context: int | None, longest: int) -> int:
    if context is None:
        return min(CONTEXT, longest)
    asked = whole(context)
    if asked is None or asked < 1:
        raise RequestError(f"load: context is {shown(context)}, expected a whole number from 1")
    if asked > longest:
        raise RequestError(f"load: context {shown(asked)} is asked for, the model has {longest}")
    return asked


def whole(value: Any) -> int | None:
    """A whole number, NumPy's among them; None for all else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _owner(array: Array) -> Any:
    """The array that owns the memory, or the map of a file."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview) and not isinstance(owner.obj, mmap.mmap):
        return np.frombuffer(owner, np.uint8)
    return owner
