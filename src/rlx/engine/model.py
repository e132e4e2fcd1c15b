"""Loaded models, returned by `rlx.load`. `Model` is the base class: weights, code, memory."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import numpy as np

from rlx.arrays import Array
from rlx.engine.graph_caches import GraphCaches
from rlx.engine.load_settings import auto_cache, checked_context, choose, profile_for, session_for, with_precision
from rlx.engine.logs import warn
from rlx.engine.page_pool import PagePool
from rlx.engine.sampler import short_repr
from rlx.errors import CapabilityError, ContextError, RequestError, UnknownAttribute
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock
from rlx.formats.tokenizer import Tokenizer
from rlx.free_memory import writable
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.kv_spec import CACHES, KvCacheSpec
from rlx.runtime.session import Session
from rlx.version import __version__

if TYPE_CHECKING:  # imported when a model is built: a snapshot needs no graphs
    from rlx.engine.edits import Edit
    from rlx.engine.memory import Memory
    from rlx.engine.model_snapshot import SnapshotCheckpoint
    from rlx.flow.built import BuiltModel
    from rlx.flow.flow import ModelFlow
    from rlx.functional.tracers import HeldArray
    from rlx.inspect.call_report import CallRecorder, CallReport
    from rlx.models.family import Family
    from rlx.models.load import Checkpoint

    Patch = Callable[[ModelFlow], ModelFlow]

Result = TypeVar("Result")
NOTHING: Mapping[str, Array] = {}
# Members of a model that other files of the engine use, and its users need not know.
INTERNAL = frozenset((
    "blueprint", "build_graph", "check_usable", "compile_graph", "compile_without_weights", "graphs", "held_weight",
    "hidden_flow", "own_array", "patched_flow", "too_long", "unpatched_flow", "warn_of_notes",
))  # fmt: skip
VERBS = {
    "a decoder": ("generate", "chat", "stream", "score", "logits"),
    "an encoder": ("embed", "embed_tokens", "similarity"),
    "a vision model": ("encode_image",),
}  # fmt: skip
EXAMPLES = {
    "a decoder": "a decoder such as smollm2-135m", "an encoder": "an encoder such as minilm-l6",
    "a vision model": "a vision model",
}  # fmt: skip


class WrongVerb(CapabilityError, AttributeError):
    """A method of another kind of model. Also an AttributeError, so that `hasattr` returns False."""


@dataclass(frozen=True)
class ModelInfo:
    """Properties of a model that are known without opening its files."""

    family: str
    kind: str
    vocab: int
    longest: int  # positions
    dim: int
    notes: tuple[str, ...] = ()  # logged as warnings when it is loaded
    layers: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelInfo:
        c, family = checkpoint.config, checkpoint.family
        sizes = ("vocab", "context", "dim", "layers")  # one may be absent
        vocab, longest, dim, layers = (int(getattr(c, size, 0)) for size in sizes)
        return cls(family.name, family.kind, vocab, longest, dim, checkpoint.notes, layers)


@dataclass(frozen=True)
class Prepared:
    """Compiled parts of an export or snapshot, with weights bound."""

    session: Session
    built: BuiltModel | None  # None: built on demand
    compiled: CompiledGraph
    params: Mapping[str, Array]
    digest: str
    cache: KvCacheSpec | None


class Model:
    """A loaded model. Thread-safe."""

    precisions: tuple[str, ...] = ("auto", "f32")  # accepted by `load`

    def __init__(
        self, checkpoint: Checkpoint | SnapshotCheckpoint, *, device: str = "cpu", threads: int | None = None,
        context: int | None = None, precision: str = "auto", cache: str = "auto", name: str | None = None,
        profile: CompileProfile | str | Path | None = None, patch: Patch | None = None,
        session: Session | None = None, prepared: Prepared | None = None,
    ) -> None:  # fmt: skip
        self._checkpoint: Checkpoint | SnapshotCheckpoint | None = checkpoint
        stored = getattr(checkpoint, "facts", None)
        self.facts: ModelInfo = ModelInfo.of(self.checkpoint) if stored is None else stored
        choose("precision", precision, self.precisions, f" for {self.facts.kind}s")
        self.context = checked_context(context, self.facts)
        choose("cache", cache, CACHES)
        self.name = name or checkpoint.path.name
        self.profile = with_precision(profile_for(profile, checkpoint.path), precision)
        if patch is not None and not callable(patch):
            raise RequestError(f"load: patch is {short_repr(patch)}, expected a function from a flow to a flow")
        self._patch = patch
        self._session = prepared.session if prepared else session or session_for(device, threads)
        target = self._session.target
        self.cache_dtype = auto_cache(self.checkpoint, self.profile, target) if cache == "auto" else cache
        self._lock = Lock()
        self._drop_graphs()  # begins without any
        self._arrays: dict[str, Array] = {} if prepared is None else dict(prepared.params)
        # empty or one: a list, because its blueprint shares it
        self._builds: list[BuiltModel] = [] if prepared is None or prepared.built is None else [prepared.built]
        self._compiled: CompiledGraph | None = None if prepared is None else prepared.compiled
        if prepared is None:
            self._check_patch()
            self._compiled = self.compile_graph(self.built)
        spec = self.built.cache if prepared is None else prepared.cache
        self.caches = None if spec is None else PagePool(spec, self.context, self._session.device.backend.allocator)
        # now: the file may be closed before a call ends
        self.digest = self._weights_digest() if prepared is None else prepared.digest

    def _weights_digest(self) -> str:
        from rlx.engine.weights import weights_digest

        return weights_digest(self.checkpoint.file)

    def unpatched_flow(self) -> ModelFlow:
        """The stages of the model without the patch given to `load`."""
        from rlx.engine.build import model_flow

        return model_flow(self.checkpoint, self.context, self.cache_dtype, layout=self._session.target.kv_layout)

    def patched_flow(self, flow: ModelFlow) -> ModelFlow:
        """A flow of the model with the model's profile and the patch given to `load`."""
        from rlx.flow.recipe import ModelRecipe

        recipe = ModelRecipe(self.name, lambda: flow.profile(self.profile))
        return (recipe if self._patch is None else recipe.patch(self._patch)).assemble()

    @property
    def is_patched(self) -> bool:
        """Whether `load` was given a patch."""
        return self._patch is not None

    def _check_patch(self) -> None:
        """Raise if the patch of a decoder mixes tokens, which are computed in pieces."""
        if self._patch is not None and self.facts.kind == "decoder":
            from rlx.engine.check_token_independence import check_flow

            check_flow(self.flow.build(self.checkpoint.weights))

    def build_graph(self, capture: Sequence[str] | None = None) -> BuiltModel:
        """Build the main graph, or one with captured values as outputs."""
        return self.flow.build(self.checkpoint.weights, capture or ())

    def compile_without_weights(self, built: BuiltModel) -> CompiledGraph:
        """Compile a graph of the model, for callers that bind its weights."""
        return self._session.compile(built.module, profile=built.profile)

    def compile_graph(self, built: BuiltModel) -> CompiledGraph:
        """Compile a graph of the model and bind its weights."""
        from rlx.engine.weights import bind_weights

        # Read once: if another thread closes the model meanwhile, this call finishes with the old values.
        arrays, first, checkpoint = self._arrays, self._compiled, self.checkpoint
        compiled = self.compile_without_weights(built)
        bind_weights(compiled, built, checkpoint, arrays, first)
        return compiled

    def blueprint(self) -> Self:
        """A copy without compiled code, which may reference it without a cycle to rebuild the graph on demand."""
        blueprint = copy.copy(self)
        blueprint._compiled = blueprint.caches = None
        blueprint._drop_graphs()
        return blueprint

    # -- parts --
    def check_usable(self) -> None:
        """Raise if the model is closed or its files have changed. Called once per request."""
        checkpoint = self._checkpoint
        if self._compiled is None or checkpoint is None:
            raise self._closed_error()
        for mapped in checkpoint.maps:
            mapped.check()

    def _closed_error(self) -> RequestError:
        return RequestError(f"{self.name}: the model is closed", hint="load it again")

    @property
    def checkpoint(self) -> Checkpoint:
        """The file, its configuration and its weights."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise self._closed_error()
        return checkpoint  # type: ignore[return-value]  # a snapshot's opens the files on demand

    @property
    def family(self) -> Family:
        """How models of this architecture are read and assembled."""
        import rlx.models.load  # noqa: F401  declares the families
        from rlx.models.family import FAMILIES

        return FAMILIES[self.facts.family]

    @property
    def flow(self) -> ModelFlow:
        """The stages of the model. `model.flow.init(rlx.random.key(0))` returns random parameters for it."""
        return self.patched_flow(self.unpatched_flow())

    @property
    def built(self) -> BuiltModel:
        """The graph with its weights, output names, cache spec and profile."""
        builds = self._builds
        if self._checkpoint is None:
            raise self._closed_error()
        if not builds:
            builds.append(self.build_graph())
        return builds[0]

    @property
    def stages(self) -> list[str]:
        """The paths of all stages and their parts, in the order in which they end, for `capture` and `edit`."""
        from rlx.flow.stage_values import stage_values

        return list(stage_values(self.built.module))

    @property
    def compiled(self) -> CompiledGraph:
        """The compiled graph with its weights."""
        compiled = self._compiled
        if compiled is None:
            raise self._closed_error()
        return compiled

    @property
    def target(self) -> str:
        """The target that the code was compiled for, such as avx512."""
        return self._session.target.name

    @property
    def runs_behind(self) -> bool:
        """Whether calls return while the device still works."""
        return self._session.target.runs_behind

    @property
    def threads(self) -> int:
        return self.compiled.threads

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.checkpoint.tokenizer
        if tokenizer is None:
            raise CapabilityError(f"{self.name}: the model has no tokenizer", hint="put tokenizer.json into its folder")
        return tokenizer

    def fingerprint(self, seed: int) -> str:
        """Everything that the bits of an answer depend on besides the request."""
        text = f"rlx {__version__}, {self.target}, cache {self.cache_dtype}, model {self.digest}"
        default = with_precision(CompileProfile(), "auto")
        text += "" if self.profile == default else f", profile {self.profile.key()}"
        return f"{text}{', patched' if self._patch else ''}, seed {seed}"

    def token_ids(self, tokens: str | Iterable[int], where: str = "tokens") -> list[int]:
        """Encode a text, or check token ids."""
        if isinstance(tokens, str):
            return self.tokenizer.encode(tokens)
        try:
            if isinstance(tokens, (bytes, bytearray, Mapping)):  # iterating over these gives ints too
                raise TypeError
            # tolist is faster than iterating over NumPy scalars.
            listed = tokens.tolist() if isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu" else tokens
            ids = [operator.index(token) for token in listed]
        except TypeError as error:
            is_chat = isinstance(tokens, Sequence) and len(tokens) > 0 and isinstance(tokens[0], Mapping)
            from rlx.engine.foreign_names import one_prompt_hint  # only errors need it

            chat_hint = "model.chat_tokens(messages) are the token ids of a conversation"
            hint = chat_hint if is_chat else one_prompt_hint(where, tokens)
            message = f"{where}: expected a text or token ids, found {short_repr(tokens)}"
            raise RequestError(message, hint=hint) from error
        vocab = self.facts.vocab
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            i, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab)
            raise RequestError(f"{where}: token {short_repr(token)} at {i} is outside the vocabulary of {vocab} tokens")
        return ids

    def prompt_ids(self, prompt: str | Iterable[int], where: str) -> list[int]:
        """`token_ids` of a prompt; raises for a text that is far too long without encoding all of it."""
        if isinstance(prompt, str) and len(self.tokenizer.clip_text(prompt, self.context)) < len(prompt):
            raise self.too_long(where, f"the prompt of {len(prompt):,} characters has")
        return self.token_ids(prompt, where)

    def too_long(self, where: str, subject: str) -> RequestError:
        """The error for an input with more tokens than the context."""
        return ContextError(
            f"{where}: {subject} more tokens than the context, which holds {self.context}",
            context=self.context,
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
        self.check_usable()
        from rlx.engine.capture import captured_values, check_not_traced

        check_not_traced(tokens)
        ids = self.prompt_ids(tokens, "run")
        if not 0 < len(ids) <= self.context:
            raise RequestError(f"run: {len(ids)} tokens, expected 1 to {self.context}")
        return captured_values(self, capture, edit, lambda compiled, more: self._values(compiled, ids, more))

    def _values(self, compiled: CompiledGraph, ids: Sequence[int], more: Mapping[str, Array] = NOTHING) -> list[Array]:
        """The outputs of a graph for one sequence, `[seq, ...]` each; `more` are additional inputs of that shape."""
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
        """The weights by name, as stored in the file; read on access."""
        from rlx.flow.built import Params

        return Params(self.built.module, {}, self.checkpoint.weights)

    def apply(
        self, params: Mapping[str, Any], tokens: str | Sequence[int] | Any, *, edit: Mapping[str, Edit] | None = None,
        capture: Iterable[str] | str | None = None,
    ) -> Any:  # fmt: skip
        """Run the model with other parameters: returns logits `[seq, vocab]`, or the hidden states of an encoder.

        Missing parameters are the model's own. New values need no compilation; a new dtype of a weight, such as f32 for
        a quantised one, compiles once.

        Under `rlx.grad`, `rlx.jit` or `rlx.vmap`, parameters and token ids `[seq]` may be traced arrays: the model is
        part of the traced function. `edit={"embed": f}` replaces the value of a stage by `f(value)`, which may read
        traced arrays. Activations are f32 then, whatever the model's precision. With `capture`, the result is a dict of
        values by stage path, as `run` returns it, which may be differentiated.
        """
        self.check_usable()
        from rlx.engine.apply import apply_params, traced_outputs
        from rlx.functional.tracers import Traced, current

        if isinstance(tokens, (Traced, np.ndarray)) and len(tokens.shape) != 1:
            hint = "rlx.vmap(lambda ids: model.apply(params, ids))(tokens) runs a batch of equal lengths"
            raise RequestError(f"apply: tokens have shape {list(tokens.shape)}, expected [seq]", hint=hint)
        if isinstance(tokens, (list, tuple)) and any(isinstance(x, Traced) for x in tokens):
            hint = "pass an array, np.array(ids, np.int32), to the traced function"
            raise RequestError(f"apply: tokens are a {type(tokens).__name__} of traced numbers", hint=hint)
        if current() is None and not edit and not capture:
            ids = self._checked_tokens(tokens)
            return apply_params(self, params, lambda compiled: self._values(compiled, ids))
        ids_array = tokens if isinstance(tokens, Traced) else np.array(self._checked_tokens(tokens), np.int32)
        outputs, captured = traced_outputs(self, params, self._sequence_inputs(ids_array), edit, capture)
        return captured if capture else self._one_result(outputs)

    def _checked_tokens(self, tokens: str | Sequence[int]) -> list[int]:
        ids = self.prompt_ids(tokens, "apply")
        if not 0 < len(ids) <= self.context:
            raise RequestError(f"apply: {len(ids)} tokens, expected 1 to {self.context}")
        return ids

    def _sequence_inputs(self, tokens: Any) -> dict[str, Any]:
        """Graph inputs of one sequence of token ids `[seq]`, which may be traced."""
        (size,) = tokens.shape
        if not isinstance(size, int):
            hint = "without dims=, pad tokens at the end to one length, and read position len - 1"
            raise RequestError("apply: tokens need a fixed length under a trace", hint=hint)
        positions = np.arange(size, dtype=np.int32)
        return {
            "tokens": tokens[None],
            "token_types": np.zeros((1, size), np.int32),
            "positions": positions[None],
            "attention_mask": np.ones((1, size), np.float32),
            "last_token_idx": positions,  # logits of all tokens
        }

    def _one_result(self, outputs: Sequence[Any]) -> Any:
        """The main output of a batch of one."""
        return outputs[0] if self.facts.kind == "decoder" else outputs[0][0]

    def hidden_flow(self) -> ModelFlow:
        """The flow whose main output `apply` returns."""
        return self.unpatched_flow()

    def own_array(self, name: str) -> Array:
        """A weight of the model; the same array object for all graphs."""
        arrays = self._arrays
        if name not in arrays:
            arrays[name] = self.checkpoint.weights.array(name)
        return arrays[name]

    def held_weight(self, built: BuiltModel, name: str) -> HeldArray:
        """A weight as traced functions read it; the same object in all of them."""
        from rlx.functional.tracers import HeldArray

        with self._lock:
            held = self.graphs.held_weights.get(name)
            if held is None:
                computed = built.params.computed
                array = computed[name] if name in computed else self.own_array(name)
                type_ = next(node.types[0] for node in built.module.params if node.attrs["name"] == name)
                held = self.graphs.held_weights[name] = HeldArray(name, array, type_)
        return held

    def float_params(self, patterns: str | Iterable[str] = "**") -> dict[str, Array]:
        """The weights that match patterns of names, as f32 arrays: quantised ones are dequantised.

        `*` matches anything but a dot, `**` anything.
        """
        from rlx.engine.apply import float_params

        return float_params(self, [patterns] if isinstance(patterns, str) else list(patterns))

    def save(self, path: str | Path, params: Mapping[str, Any] | None = None, *, dtype: str | None = None) -> Path:
        """Write the model for other programs: a `.gguf` file, a `.safetensors` file, or a Hugging Face folder.

        `params` replace the model's own. Weights keep their type unless `dtype` is f32, f16 or bf16; safetensors cannot
        store GGUF's quantised blocks, which become f32.
        """
        from rlx.engine.save import save_model

        self.check_usable()
        return save_model(self, Path(path), params or {}, dtype)

    # -- times --
    def _recorded(self, trace: str | Path | None, verb: str, call: Callable[[CallRecorder | None], Result]) -> Result:
        """Make a call; with `trace`, also write its timeline."""
        if trace is None:
            return call(None)
        from rlx.inspect.call_report import CallRecorder

        if not isinstance(trace, (str, os.PathLike)):
            raise RequestError(
                f"{verb}: trace is {short_repr(trace)}, expected the path of a file", hint='trace="t.json"'
            )
        path, recorder = writable(trace), CallRecorder(lambda inputs: verb)
        result = call(recorder)
        recorder.finish()
        recorder.write_trace(path, f"{verb} of {self.name}")
        return result

    def _measured(self, verb: str, call: Callable[[CallRecorder], object]) -> CallReport:
        """The report of a call, which is made twice: the first time warms up caches."""
        from rlx.inspect.call_report import CallRecorder

        call(CallRecorder())
        recorder = CallRecorder(lambda inputs: verb)
        call(recorder)
        recorder.finish()
        return recorder.report(f"{verb} of {self.name}")

    # -- life --
    def warn_of_notes(self) -> None:
        """Log warnings about missing or contradictory settings in the model's files."""
        for note in self.facts.notes:
            warn("rlx.load", "%s: %s", self.name, note)

    def export(self, path: str | Path, *, weights: bool = False) -> Path:
        """Write a file that `rlx.load` loads without compiling; `weights` embeds the weights."""
        from rlx.engine.export import export_model

        return export_model(self, path, embed=weights)

    def memory(self) -> Memory:
        """Current memory use."""
        from rlx.engine.memory import memory_of

        with self._lock:
            graphs = [self.compiled, *self.graphs.compiled]
        return memory_of(graphs, 0 if self.caches is None else self.caches.nbytes)

    def close(self) -> None:
        """Release memory and files. Calls in progress either finish or raise, as later calls do."""
        self._compiled = self._checkpoint = None  # first, so that calls that miss the rest raise "closed"
        self._builds = []
        if self.caches is not None:
            self.caches.close()
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        """Drop references to graphs and weights. Calls in progress keep their own."""
        self.graphs = GraphCaches(self._lock)
        self._arrays = {}

    def __dir__(self) -> list[str]:
        """Names for users: without those that only other files of the engine use."""
        return [name for name in super().__dir__() if name not in INTERNAL]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self._size_text() if self._compiled else "closed"
        state += ", patched" if self._patch else ""
        return f"<{type(self).__name__} {self.name!r}: {self.facts.family} {self.facts.kind}, {state}>"

    def _size_text(self) -> str:
        return f"context {self.context}"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for missing attributes: methods of other kinds of models raise an explanation."""
            if hasattr(type(self), name):  # a property that raised AttributeError: compute it again, for its own error
                return object.__getattribute__(self, name)
            if any(name in verbs for verbs in VERBS.values()):
                (kind,) = (kind for kind in VERBS if kind.endswith(f" {self.facts.kind}"))
                example = next(EXAMPLES[other] for other, verbs in VERBS.items() if name in verbs)
                hint = f"use .{VERBS[kind][0]}(), or load {example} for .{name}()"
                raise WrongVerb(f"{name}: {self.name} is {kind}", hint=hint)
            if not name.startswith("_"):
                from rlx.engine.foreign_names import attribute_hint  # only errors need it

                hint = attribute_hint(name, self.facts.kind)
                if hint is not None:
                    raise UnknownAttribute(f"{name}: {type(self).__name__} has no such attribute", hint=hint)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an explanation: a model has several verbs."""
        verbs = ", ".join(
            f".{verb}()" for kind, all_ in VERBS.items() if kind.endswith(self.facts.kind) for verb in all_
        )
        raise RequestError(f"{self.name}: a model is not called", hint=f"use {verbs}")
