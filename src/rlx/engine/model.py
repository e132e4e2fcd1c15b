"""Loaded models: what `rlx.load` gives. `Model` is what language and embedding models share: weights, code, memory."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import logging
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, TypeVar

import numpy as np

import rlx
from rlx.dtypes import FLOAT8_PACKED
from rlx.engine.kvcache import CacheStore
from rlx.engine.sampler import shown
from rlx.errors import CapabilityError, RequestError, nearest
from rlx.formats.tokenizer import Tokenizer
from rlx.host_memory import address, owner
from rlx.hub.pull import resolve
from rlx.locks import Lock
from rlx.profile import CompileProfile, Precision
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.container import SUFFIX
from rlx.runtime.kv_cache import CACHES, KvCacheSpec
from rlx.runtime.session import Session

if TYPE_CHECKING:  # imported where a model is built: one that was started before needs no graph
    from rlx.engine.apply import Applied
    from rlx.engine.edits import Edit, Edited
    from rlx.engine.embed import EmbeddingModel
    from rlx.engine.language import LanguageModel
    from rlx.engine.starts import KeptCheckpoint
    from rlx.engine.vision import VisionModel
    from rlx.flow.flow import BuiltModel, ModelFlow
    from rlx.formats import TensorFile
    from rlx.models.family import Family
    from rlx.models.load import Checkpoint

    Patch = Callable[[ModelFlow], ModelFlow]
    Loaded: TypeAlias = LanguageModel | EmbeddingModel | VisionModel

Array = np.ndarray[Any, Any]
Key = TypeVar("Key")
Made = TypeVar("Made")
CONTEXT = 4096  # positions, where the model has more and nothing else is asked
CAPTURES = 4  # graphs with captured stages, and of those with edited ones, that are kept
NOTHING: Mapping[str, Array] = {}
SAMPLE = 4096  # bytes at both ends of a tensor that tell models apart
log = logging.getLogger("rlx.load")
PROFILE = "profile.toml"  # beside a model, says how it is compiled
VERBS = {
    "a decoder": ("generate", "chat", "stream", "logits"), "an encoder": ("embed", "embed_tokens", "similarity"),
    "a vision model": ("encode_image",),
}  # fmt: skip
# what other programs call the settings of `load`
ALIENS = {
    "n_ctx": "context", "num_ctx": "context", "max_seq_len": "context", "max_model_len": "context",
    "context_length": "context", "n_threads": "threads", "num_threads": "threads", "num_thread": "threads",
    "dtype": "precision", "torch_dtype": "precision", "type_k": "cache", "type_v": "cache", "kv_cache_dtype": "cache",
    "device_map": "device", "local_files_only": "offline", "model_path": "name", "model": "name",
}  # fmt: skip


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
class Facts:
    """What is known of a model without opening its files."""

    family: str
    kind: str
    vocab: int
    longest: int  # positions
    dim: int
    notes: tuple[str, ...] = ()  # what is logged as a warning when it is loaded

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Facts:
        c, family = checkpoint.config, checkpoint.family
        vocab, longest, dim = (int(getattr(c, size, 0)) for size in ("vocab", "context", "dim"))  # one may be absent
        return cls(family.name, family.kind, vocab, longest, dim, checkpoint.notes)


@dataclass(frozen=True)
class Prepared:
    """What an export or a start brings along, so that nothing is compiled; the graph has its weights."""

    session: Session
    built: BuiltModel | None  # None: when it is asked for
    compiled: CompiledGraph
    params: Mapping[str, Array]
    digest: str
    cache: KvCacheSpec | None


class Model:
    """A model ready to use. Safe from several threads at once."""

    precisions: tuple[str, ...] = ("auto", "f32")  # that `load` may be asked for

    def __init__(
        self, checkpoint: Checkpoint | KeptCheckpoint, *, device: str = "cpu", threads: int | None = None,
        context: int | None = None, precision: str = "auto", cache: str = "auto", name: str | None = None,
        profile: CompileProfile | str | Path | None = None, patch: Patch | None = None,
        session: Session | None = None, prepared: Prepared | None = None,
    ) -> None:  # fmt: skip
        self._checkpoint: Checkpoint | KeptCheckpoint | None = checkpoint
        kept = getattr(checkpoint, "facts", None)
        self.facts: Facts = Facts.of(self.checkpoint) if kept is None else kept
        _choose("precision", precision, self.precisions, f" for {self.facts.kind}s")
        self.context = _checked_context(context, self.facts)
        _choose("cache", cache, CACHES)
        self.name = name or checkpoint.path.name
        self.profile = with_precision(_profile(profile, checkpoint.path), precision)
        self.cache_dtype = auto_cache(self.checkpoint, self.profile) if cache == "auto" else cache
        if patch is not None and not callable(patch):
            raise RequestError(f"load: patch is {shown(patch)}, expected a function from a flow to a flow")
        self._patch = patch
        self._session = prepared.session if prepared else session or _session(device, threads)
        self._lock = Lock()
        self._arrays: dict[str, Array] = {} if prepared is None else dict(prepared.params)
        self._captures: dict[frozenset[str], tuple[BuiltModel, CompiledGraph]] = {}
        self._applications: dict[frozenset[tuple[str, str]], Applied] = {}
        self._edits: dict[tuple[frozenset[str], tuple[str, ...]], Edited] = {}
        # one or none yet: a list, which its blueprint shares
        self._builds: list[BuiltModel] = [] if prepared is None or prepared.built is None else [prepared.built]
        self._compiled: CompiledGraph | None = None if prepared is None else prepared.compiled
        if prepared is None:
            self._compiled = self._compile(self.built)
        spec = self.built.cache if prepared is None else prepared.cache
        self.caches = None if spec is None else CacheStore(spec, self.context, self._session.device.backend.allocator)
        # now: a call may end after the file was closed
        self.digest = weights_digest(checkpoint.file) if prepared is None else prepared.digest

    def _flow(self) -> ModelFlow:
        return self.family.flow(self.checkpoint.config)

    def _patched(self, flow: ModelFlow) -> ModelFlow:
        """A flow by the profile, with the changes of whoever loads the model."""
        from rlx.flow.recipe import ModelRecipe

        recipe = ModelRecipe(self.name, lambda: flow.profile(self.profile))
        return (recipe if self._patch is None else recipe.patch(self._patch)).assemble()

    def _build(self, capture: Sequence[str] | None = None) -> BuiltModel:
        """The graph that is served, or one that gives the captured values."""
        return self.flow.build(self.checkpoint.weights, capture or ())

    def _compile(self, built: BuiltModel) -> CompiledGraph:
        """Code with its weights in place, so that the first call is as quick as the others.

        All graphs of a model are given the same arrays, so that what is derived from them is shared.
        """
        # Now: another thread may close the model meanwhile, and then this goes on with what was there.
        arrays, kept, checkpoint = self._arrays, self._compiled, self.checkpoint
        compiled = self._session.compile(built.module, profile=built.profile)
        for name in compiled.param_types:
            if name not in arrays:
                made = built.params.get(name)
                arrays[name] = checkpoint.weights.array(name) if made is None else made
            compiled.set_param(name, arrays[name])
        if kept is not None:
            kept.lend(dict(arrays))
        with _releasing(checkpoint.file):
            compiled.prepare()
        return compiled

    def _blueprint(self) -> Self:
        """The same model with nothing but what its graph is built from: its code may hold this, and makes no cycle."""
        plain = copy.copy(self)
        plain._compiled = plain.caches = None
        plain._forget()
        return plain

    # -- parts --
    def _check_usable(self) -> None:
        """Refuse a request to a model that is closed, or whose files have changed. Every request calls it once."""
        checkpoint = self._checkpoint
        if self._compiled is None or checkpoint is None:
            raise self._closed()
        for mapped in checkpoint.maps:
            mapped.check()

    def _closed(self) -> RequestError:
        return RequestError(f"{self.name}: the model is closed", hint="load it again")

    @property
    def checkpoint(self) -> Checkpoint:
        """The file, its configuration and its weights."""
        found = self._checkpoint
        if found is None:
            raise self._closed()
        return found  # type: ignore[return-value]  # a kept one opens the file when it must

    @property
    def family(self) -> Family:
        """How models of its kind are read and assembled."""
        import rlx.models.load  # noqa: F401  declares the families
        from rlx.models.family import FAMILIES

        return FAMILIES[self.facts.family]

    @property
    def flow(self) -> ModelFlow:
        """The stages that it is assembled from. `model.flow.init(rlx.random.key(0))` makes other parameters for it."""
        return self._patched(self._flow())

    @property
    def built(self) -> BuiltModel:
        """The graph and what belongs to it."""
        builds = self._builds
        if self._checkpoint is None:
            raise self._closed()
        if not builds:
            builds.append(self._build())
        return builds[0]

    @property
    def compiled(self) -> CompiledGraph:
        """The code and the weights."""
        found = self._compiled
        if found is None:
            raise self._closed()
        return found

    @property
    def target(self) -> str:
        """What the code was compiled for, such as avx512."""
        return self._session.target.name

    @property
    def threads(self) -> int:
        return self.compiled.threads

    @property
    def tokenizer(self) -> Tokenizer:
        found = self.checkpoint.tokenizer
        if found is None:
            raise CapabilityError(f"{self.name}: the model has no tokenizer", hint="put tokenizer.json beside it")
        return found

    def fingerprint(self, seed: int) -> str:
        """What the bits of an answer depend on, beside the request."""
        made = f"rlx {rlx.__version__}, {self.target}, cache {self.cache_dtype}, model {self.digest}"
        usual = with_precision(CompileProfile(), "auto")
        made += "" if self.profile == usual else f", profile {self.profile.key()}"
        return f"{made}{', patched' if self._patch else ''}, seed {seed}"

    def token_ids(self, given: str | Iterable[int], where: str = "tokens") -> list[int]:
        """A text or token ids as checked token ids."""
        if isinstance(given, str):
            return self.tokenizer.encode(given)
        try:
            if isinstance(given, (bytes, bytearray, Mapping)):  # which have whole numbers in them too
                raise TypeError
            # At once, where that can be: each number of NumPy's would be an object.
            listed = given.tolist() if isinstance(given, np.ndarray) and given.dtype.kind in "iu" else given
            found = [operator.index(token) for token in listed]
        except TypeError as error:
            raise RequestError(f"{where}: expected a text or token ids, found {shown(given)}") from error
        vocab = self.facts.vocab
        if found and (min(found) < 0 or max(found) >= vocab):
            i, token = next((i, token) for i, token in enumerate(found) if not 0 <= token < vocab)
            raise RequestError(f"{where}: token {shown(token)} at {i} is outside the vocabulary of {vocab} tokens")
        return found

    def prompt_ids(self, given: str | Iterable[int], where: str) -> list[int]:
        """`token_ids` of a prompt; a text that is far too long is refused before all of it is encoded."""
        if isinstance(given, str) and len(self.tokenizer.beginning(given, self.context)) < len(given):
            raise self._too_long(where, f"the prompt of {len(given):,} characters has")
        return self.token_ids(given, where)

    def _too_long(self, where: str, what: str) -> RequestError:
        return RequestError(
            f"{where}: {what} more tokens than the context, which holds {self.context}",
            hint="shorten it, or load the model with a larger context (context=..., --context)",
        )

    # -- looking inside --
    def run(
        self, tokens: str | Sequence[int], capture: Iterable[str] | str | None = (),
        edit: Mapping[str, Edit] | None = None,
    ) -> dict[str, Array]:  # fmt: skip
        """Values inside the model by stage path: `capture=["layers.*.attn", "logits"]` gives `[seq, ...]` for each.

        A stage's value is the last one computed in it: `layers.3`, or `layers.3.out`, is the residual stream after
        layer 3. Without `capture`, the model's output. `edit={"layers.3.out": f}` goes on with `f(value)`, which is of
        the same shape and type, in place of a stage's value; a pattern may match several.
        """
        self._check_usable()
        ids = self.prompt_ids(tokens, "run")
        if not 0 < len(ids) <= self.context:
            raise RequestError(f"run: {len(ids)} tokens, expected 1 to {self.context}")
        return self._looked_at(capture, edit, lambda compiled, more: self._values(compiled, ids, more))

    def _looked_at(
        self, capture: Iterable[str] | str | None, edit: Mapping[str, Edit] | None,
        values: Callable[[CompiledGraph, Mapping[str, Array]], list[Array]],
    ) -> dict[str, Array]:  # fmt: skip
        """The values that patterns ask for, of a graph that has them as outputs."""
        compiled = self.compiled
        capture = () if capture is None else capture
        patterns = list(capture) if isinstance(capture, Iterable) and not isinstance(capture, str) else [capture]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise RequestError(f"run: capture is {shown(capture)}, expected patterns of stage paths")
        if edit:
            from rlx.engine.edits import checked_edits

            edits = checked_edits(edit)
            found = self._edited(patterns, list(edits)).run(edits, values)
        else:
            built, compiled = self._captured(patterns) if patterns else (self.built, compiled)
            outputs = values(compiled, {})
            found = dict(zip(built.output_names[: len(outputs)], outputs, strict=True))
        return {n: v for n, v in found.items() if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)}

    def _values(self, compiled: CompiledGraph, ids: Sequence[int], more: Mapping[str, Array] = NOTHING) -> list[Array]:
        """The outputs of a graph for one sequence, `[seq, ...]` each; `more` are inputs of such a kind."""
        tokens = np.array([ids], np.int32)
        inputs = {
            "tokens": tokens,
            "token_types": np.zeros_like(tokens),
            "positions": np.arange(len(ids), dtype=np.int32)[None],
            "attention_mask": np.ones(tokens.shape, np.float32),
            **{name: array[None] for name, array in more.items()},
        }
        return [a[0] for a in compiled.run({n: inputs[n] for n in compiled.input_types})]

    def _edited(self, patterns: Sequence[str], edited: Sequence[str]) -> Edited:
        from rlx.engine.edits import cut

        key = frozenset(patterns), tuple(edited)
        return self._lately(self._edits, key, lambda: cut(self._build(list(patterns)), edited, self._compile))

    def _captured(self, patterns: Sequence[str]) -> tuple[BuiltModel, CompiledGraph]:
        def make() -> tuple[BuiltModel, CompiledGraph]:
            built = self._build(list(patterns))
            return built, self._compile(built)

        return self._lately(self._captures, frozenset(patterns), make)

    def _lately(self, known: dict[Key, Made], key: Key, make: Callable[[], Made]) -> Made:
        """What was made lately, or is made now; the last few are kept."""
        with self._lock:
            found = known.pop(key, None)
            if found is None:
                found = make()
            known[key] = found
            while len(known) > CAPTURES:
                del known[next(iter(known))]
        return found

    # -- parameters --
    @property
    def params(self) -> Mapping[str, Array]:
        """Its weights by name, as the file stores them; each is read when it is asked for."""
        from rlx.flow.flow import Params

        return Params(self.built.module, {}, self.checkpoint.weights)

    def apply(self, params: Mapping[str, Any], tokens: str | Sequence[int]) -> Array:
        """What the model computes with other parameters: logits `[seq, vocab]`, or the hidden states of an encoder.

        Those that are not given are the model's own. Other numbers cost no compilation; another type of a weight, such
        as f32 where the file has blocks, costs one.
        """
        self._check_usable()
        ids = self.prompt_ids(tokens, "apply")
        if not 0 < len(ids) <= self.context:
            raise RequestError(f"apply: {len(ids)} tokens, expected 1 to {self.context}")
        return self._applied(params, lambda compiled: self._values(compiled, ids))

    def _hidden_flow(self) -> ModelFlow:
        """The flow whose main output `apply` gives."""
        return self._flow()

    def _applied(self, params: Mapping[str, Any], values: Callable[[CompiledGraph], list[Array]]) -> Array:
        from rlx.engine.apply import Applied, checked_params

        given, kinds = checked_params(params, self.checkpoint.weights, self.params)

        def make() -> Applied:
            flow = self._patched(self._hidden_flow())
            built = flow.build_with(self.checkpoint.weights, {name: given[name] for name in kinds})
            return Applied(self._session.compile(built.module, profile=built.profile), built.params.made)

        found = self._lately(self._applications, frozenset(kinds.items()), make)
        return found.run(given, self._own, values)

    def _own(self, name: str) -> Array:
        """A weight of the model, the same array for all its graphs."""
        arrays = self._arrays
        if name not in arrays:
            arrays[name] = self.checkpoint.weights.array(name)
        return arrays[name]

    def save(self, path: str | Path, params: Mapping[str, Any] | None = None, *, dtype: str | None = None) -> Path:
        """Write the model for other programs: a `.gguf` file, a `.safetensors` file, or a folder of Hugging Face.

        With `params`, those are written in place of the model's own. Weights are stored as they are, unless `dtype`
        says f32, f16 or bf16; safetensors has no blocks, which become f32.
        """
        from rlx.engine.save import save_model

        self._check_usable()
        return save_model(self, Path(path), params or {}, dtype)

    # -- life --
    def _warn(self) -> None:
        """Log what its files leave open, or contradict."""
        for note in self.facts.notes:
            log.warning("%s: %s", self.name, note)

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
            graphs = [self.compiled, *(compiled for _, compiled in self._captures.values())]
            graphs += [graph for edited in self._edits.values() for graph in edited.graphs]
            graphs += [applied.compiled for applied in self._applications.values()]
        for compiled in graphs:
            arena += compiled.executable.reserved_bytes()
            for buffer in compiled.executable.weights.values():  # what went into derived weights was released
                held_by = owner(buffer)
                if isinstance(held_by, np.ndarray):
                    weights[address(held_by)] = held_by.nbytes
                elif isinstance(buffer, np.ndarray):
                    mapped[address(buffer)] = max(buffer.nbytes, mapped.get(address(buffer), 0))
                else:  # in memory of a device
                    weights[id(buffer)] = buffer.nbytes
        cache = 0 if self.caches is None else self.caches.nbytes
        return Memory(sum(weights.values()), sum(mapped.values()), cache, arena)

    def close(self) -> None:
        """Give back memory and files. Calls in progress end well, or as later ones: they are refused."""
        self._compiled = self._checkpoint = None  # first: whoever finds the rest gone is told that it is closed
        self._builds = []
        self._forget()
        if self.caches is not None:
            self.caches.close()

    def _forget(self) -> None:
        """Let go of graphs and weights. A call in progress goes on with those that it has: nothing is taken away."""
        self._captures, self._edits, self._applications, self._arrays = {}, {}, {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"context {self.context}" if self._compiled else "closed"
        return f"<{type(self).__name__} {self.name!r}: {self.facts.family} {self.facts.kind}, {state}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Only asked for what is not there: the verbs of other kinds of models say where they belong."""
            if any(name in verbs for verbs in VERBS.values()):
                (kind,) = (kind for kind in VERBS if kind.endswith(f" {self.facts.kind}"))
                raise WrongVerb(f"{name}: {self.name} is {kind}", hint=f"use .{VERBS[kind][0]}()")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def load(
    name: str | Path, *, device: str = "cpu", threads: int | None = None, context: int | None = None,
    precision: str = "auto", cache: str = "auto", offline: bool = False,
    profile: CompileProfile | str | Path | None = None, patch: Patch | None = None, **unknown: Any,
) -> LanguageModel | EmbeddingModel | VisionModel:  # fmt: skip
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
    model = _load(files.path, None if files.source == "path" else files.name, threads, settings)
    model._warn()
    return model


def _load(path: Path, name: str | None, threads: int | None, settings: dict[str, Any]) -> Loaded:
    """The model as it was kept the last time; without that, from its files, and kept for the next time."""
    from rlx.engine import starts

    _choose("cache", settings["cache"], CACHES)
    session = _session(settings["device"], threads)
    found: Mapping[str, starts.Start] = {}
    if settings["patch"] is None:
        settings["profile"] = _profile(settings["profile"], path)
        found = starts.find(path, session, settings)
        for start in found.values():
            kept = starts.opened(start, name, settings)
            if kept is not None:
                return kept
    model = _made(path, name, session, settings)
    mine = found.get(model.cache_dtype)
    if mine is not None and starts.keep(model, mine):
        model.close()  # before its weights are mapped: they are in memory once, and the system may drop them
        model = starts.opened(mine, name, settings) or _made(path, name, session, settings)
    session.device.backend.trim()
    return model


def _made(path: Path, name: str | None, session: Session, settings: Mapping[str, Any]) -> Loaded:
    """The model from its files."""
    from rlx.models.load import open_checkpoint

    checkpoint = open_checkpoint(path)
    return class_of(checkpoint.family.kind)(checkpoint, name=name, session=session, **settings)


def class_of(kind: str) -> type[Loaded]:
    """What a model of a kind of family becomes."""
    match kind:
        case "decoder":
            from rlx.engine.language import LanguageModel

            return LanguageModel
        case "vision model":
            from rlx.engine.vision import VisionModel

            return VisionModel
        case _:
            from rlx.engine.embed import EmbeddingModel

            return EmbeddingModel


def weights_digest(file: TensorFile) -> str:
    """Tells models apart: what their tensors are, and the bytes at both ends of each."""
    found = hashlib.blake2b(digest_size=8)
    file = file.stored
    for name in file.names:
        entry, raw = file.entry(name), file.array(name).reshape(-1).view(np.uint8)
        found.update(f"{name} {entry.shape} {entry.storage.name}\n".encode())
        found.update(raw[:SAMPLE].tobytes() + raw[-SAMPLE:].tobytes())
    return found.hexdigest()


@contextmanager
def _releasing(file: TensorFile) -> Iterator[None]:
    """Keep letting go of the file's pages while weights are packed, which have copies of their own then.

    All of them are packed in one call, and at its end the whole file would be in memory beside its copy.
    """
    done = threading.Event()

    def sweep() -> None:
        while not done.wait(0.02):
            file.release()

    sweeper = threading.Thread(target=sweep, name="rlx-release", daemon=True)
    sweeper.start()
    try:
        yield
    finally:
        done.set()
        sweeper.join()
        file.release()


# -- checks --
def _session(device: str, threads: int | None) -> Session:
    session = Session(device, threads=threads)
    if session.device.backend.interprets:
        hint = "rlx verify MODEL compares a model with the reference, op by op"
        raise CapabilityError(f"load: device {device!r} is the oracle for graphs, and runs no models", hint=hint)
    return session


def _choose(what: str, given: str, known: Sequence[str], of: str = "") -> str:
    if given not in known:
        raise CapabilityError(f"load: {what} {given!r} is not supported{of}", hint=f"there is: {', '.join(known)}")
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


def with_precision(profile: CompileProfile, asked: str) -> CompileProfile:
    """The profile, which is overruled where a precision is asked for."""
    chosen = profile.precision if asked == "auto" else Precision(asked)
    if chosen.activations == "auto":  # as fast as packed weights allow, unless it is to be exact
        chosen = replace(chosen, activations="f32" if asked == "f32" else "int8")
    return replace(profile, precision=chosen)


def auto_cache(checkpoint: Checkpoint, profile: CompileProfile) -> str:
    """What keys and values are kept in where nobody says: half precision where products are rounded more than that."""
    weights = checkpoint.weights
    kinds = {weights.type(key).dtype for key in weights.keys()}  # noqa: SIM118  it is no mapping
    # products by 8-bit floats are those of f32
    packed = any(kind.is_packed and kind not in FLOAT8_PACKED for kind in kinds)
    return "f16" if packed and profile.precision.activations == "int8" else "f32"


def _checked_context(context: int | None, facts: Facts) -> int:
    longest = facts.longest
    if context is None:  # a cache takes memory for each position; without one, any text may be as long as it can
        return min(CONTEXT, longest) if facts.kind == "decoder" else longest
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
