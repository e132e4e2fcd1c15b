"""Loaded models: what `rlx.load` gives. `Model` is what language and embedding models share: weights, code, memory."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import numpy as np

import rlx
from rlx.arrays import Array
from rlx.engine.kv_cache import CacheStore
from rlx.engine.load_settings import auto_cache, checked_context, choose, profile_for, session_for, with_precision
from rlx.engine.logs import warn
from rlx.engine.sampler import shown
from rlx.errors import CapabilityError, RequestError
from rlx.fork_safe_locks import Lock
from rlx.formats.tokenizer import Tokenizer
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.kv_spec import CACHES, KvCacheSpec
from rlx.runtime.session import Session

if TYPE_CHECKING:  # imported where a model is built: one that has a snapshot needs no graph
    from rlx.engine.apply import Applied
    from rlx.engine.edits import Edit, Edited
    from rlx.engine.memory import Memory
    from rlx.engine.model_snapshot import SnapshotCheckpoint
    from rlx.flow.flow import BuiltModel, ModelFlow
    from rlx.models.family import Family
    from rlx.models.load import Checkpoint

    Patch = Callable[[ModelFlow], ModelFlow]

Key = TypeVar("Key")
Made = TypeVar("Made")
CAPTURES = 4  # graphs with captured stages, and of those with edited ones, that are kept
NOTHING: Mapping[str, Array] = {}
VERBS = {
    "a decoder": ("generate", "chat", "stream", "logits"), "an encoder": ("embed", "embed_tokens", "similarity"),
    "a vision model": ("encode_image",),
}  # fmt: skip


class WrongVerb(CapabilityError, AttributeError):
    """A verb of another kind of model. An AttributeError too, so that `hasattr` says no."""


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model without opening its files."""

    family: str
    kind: str
    vocab: int
    longest: int  # positions
    dim: int
    notes: tuple[str, ...] = ()  # what is logged as a warning when it is loaded

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelInfo:
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


class Recent(dict[Key, Made]):
    """Graphs that requests made, by what they asked for; the last few are kept."""

    def __init__(self, lock: Lock) -> None:
        super().__init__()
        self._lock = lock  # the model's: its graphs share weights

    def get_or_make(self, key: Key, make: Callable[[], Made]) -> Made:
        with self._lock:
            found = self.pop(key, None)
            if found is None:
                found = make()
            self[key] = found
            while len(self) > CAPTURES:
                del self[next(iter(self))]
        return found


class Model:
    """A model ready to use. Safe from several threads at once."""

    precisions: tuple[str, ...] = ("auto", "f32")  # that `load` may be asked for

    def __init__(
        self, checkpoint: Checkpoint | SnapshotCheckpoint, *, device: str = "cpu", threads: int | None = None,
        context: int | None = None, precision: str = "auto", cache: str = "auto", name: str | None = None,
        profile: CompileProfile | str | Path | None = None, patch: Patch | None = None,
        session: Session | None = None, prepared: Prepared | None = None,
    ) -> None:  # fmt: skip
        self._checkpoint: Checkpoint | SnapshotCheckpoint | None = checkpoint
        kept = getattr(checkpoint, "facts", None)
        self.facts: ModelInfo = ModelInfo.of(self.checkpoint) if kept is None else kept
        choose("precision", precision, self.precisions, f" for {self.facts.kind}s")
        self.context = checked_context(context, self.facts)
        choose("cache", cache, CACHES)
        self.name = name or checkpoint.path.name
        self.profile = with_precision(profile_for(profile, checkpoint.path), precision)
        self.cache_dtype = auto_cache(self.checkpoint, self.profile) if cache == "auto" else cache
        if patch is not None and not callable(patch):
            raise RequestError(f"load: patch is {shown(patch)}, expected a function from a flow to a flow")
        self._patch = patch
        self._session = prepared.session if prepared else session or session_for(device, threads)
        self._lock = Lock()
        self._arrays: dict[str, Array] = {} if prepared is None else dict(prepared.params)
        self._captures: Recent[frozenset[str], tuple[BuiltModel, CompiledGraph]] = Recent(self._lock)
        self._edits: Recent[tuple[frozenset[str], tuple[str, ...]], Edited] = Recent(self._lock)
        self._applications: Recent[frozenset[tuple[str, str]], Applied] = Recent(self._lock)
        # one or none yet: a list, which its blueprint shares
        self._builds: list[BuiltModel] = [] if prepared is None or prepared.built is None else [prepared.built]
        self._compiled: CompiledGraph | None = None if prepared is None else prepared.compiled
        if prepared is None:
            self._compiled = self._compile(self.built)
        spec = self.built.cache if prepared is None else prepared.cache
        self.caches = None if spec is None else CacheStore(spec, self.context, self._session.device.backend.allocator)
        # now: a call may end after the file was closed
        self.digest = self._weights_digest() if prepared is None else prepared.digest

    def _weights_digest(self) -> str:
        from rlx.engine.weights import weights_digest

        return weights_digest(self.checkpoint.file)

    def _flow(self) -> ModelFlow:
        from rlx.engine.build import model_flow

        return model_flow(self.checkpoint, self.context, self.cache_dtype, layout=self._session.target.kv_layout)

    def _patched(self, flow: ModelFlow) -> ModelFlow:
        """A flow by the profile, with the changes of whoever loads the model."""
        from rlx.flow.recipe import ModelRecipe

        recipe = ModelRecipe(self.name, lambda: flow.profile(self.profile))
        return (recipe if self._patch is None else recipe.patch(self._patch)).assemble()

    def _build(self, capture: Sequence[str] | None = None) -> BuiltModel:
        """The graph that is served, or one that gives the captured values."""
        return self.flow.build(self.checkpoint.weights, capture or ())

    def _compile(self, built: BuiltModel) -> CompiledGraph:
        """Code of one of its graphs, with the model's weights in place."""
        from rlx.engine.weights import bind_weights

        # Now: another thread may close the model meanwhile, and then this goes on with what was there.
        arrays, first, checkpoint = self._arrays, self._compiled, self.checkpoint
        compiled = self._session.compile(built.module, profile=built.profile)
        bind_weights(compiled, built, checkpoint, arrays, first)
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
        if isinstance(given, str) and len(self.tokenizer.clip_text(given, self.context)) < len(given):
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
        """Values inside the model by stage path: `capture=["layers.*.attn", "logits"]` returns `[seq, ...]` for each.

        A stage's value is the last one computed in it: `layers.3`, or `layers.3.out`, is the residual stream after
        layer 3. `*` matches anything but a dot, so `layers.*` is the residual stream after every layer. Without
        `capture`, the model's output is returned. `edit={"layers.3": f}` replaces the value of a stage by `f(value)`,
        an array of the same shape and type, and computes the rest of the model from it.
        """
        self._check_usable()
        ids = self.prompt_ids(tokens, "run")
        if not 0 < len(ids) <= self.context:
            raise RequestError(f"run: {len(ids)} tokens, expected 1 to {self.context}")
        from rlx.engine.capture import captured_values

        return captured_values(self, capture, edit, lambda compiled, more: self._values(compiled, ids, more))

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
        from rlx.engine.apply import apply_params

        return apply_params(self, params, lambda compiled: self._values(compiled, ids))

    def _hidden_flow(self) -> ModelFlow:
        """The flow whose main output `apply` gives."""
        return self._flow()

    def _own_array(self, name: str) -> Array:
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
            warn("rlx.load", "%s: %s", self.name, note)

    def export(self, path: str | Path, *, weights: bool = False) -> Path:
        """Write a file that `rlx.load` starts without compiling; with `weights`, those are in it too."""
        from rlx.engine.export import export_model

        return export_model(self, path, embed=weights)

    def memory(self) -> Memory:
        """What the model holds now."""
        from rlx.engine.memory import memory_of

        with self._lock:
            graphs = [self.compiled, *(compiled for _, compiled in self._captures.values())]
            graphs += [graph for edited in self._edits.values() for graph in edited.graphs]
            graphs += [applied.compiled for applied in self._applications.values()]
        return memory_of(graphs, 0 if self.caches is None else self.caches.nbytes)

    def close(self) -> None:
        """Give back memory and files. Calls in progress end well, or as later ones: they are refused."""
        self._compiled = self._checkpoint = None  # first: whoever finds the rest gone is told that it is closed
        self._builds = []
        self._forget()
        if self.caches is not None:
            self.caches.close()

    def _forget(self) -> None:
        """Let go of graphs and weights. A call in progress goes on with those that it has: nothing is taken away."""
        self._captures, self._edits, self._applications = (Recent(self._lock) for _ in range(3))
        self._arrays = {}

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
