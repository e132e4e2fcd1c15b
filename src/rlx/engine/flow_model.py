"""Language models of one's own: `rlx.load(flow, params=..., tokenizer=...)`, without files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F64
from rlx.engine.check_token_independence import check_flow
from rlx.engine.language_model import LanguageModel
from rlx.engine.load_settings import CONTEXT, session_for
from rlx.errors import BindError, CapabilityError, GraphError, RequestError
from rlx.fast_dataclass import dataclass
from rlx.flow.built import BuiltModel
from rlx.flow.flow import ModelFlow
from rlx.flow.generation import INPUTS, for_generation, for_sequences
from rlx.flow.stages.embed import RopeTables
from rlx.flow.weights import MapWeights
from rlx.formats.tensor_file import TensorEntry, TensorFile
from rlx.formats.tokenizer import Tokenizer
from rlx.models.family import Family, FileWeights
from rlx.models.load import Checkpoint
from rlx.types import concrete

KIND = "decoder"
OTHERWISE = "Flows that do not generate text run with flow.build(params).compile() or flow.as_function(params)"


class ArrayFile(TensorFile):
    """Tensors in memory, in place of a file."""

    def __init__(self, name: str, arrays: Mapping[str, Array]) -> None:
        source, path = MapWeights(arrays), Path(name)
        types = {key: source.type(key) for key in arrays}
        entries = [TensorEntry(k, concrete(t.shape, {}), t.dtype, 0, arrays[k].nbytes, path) for k, t in types.items()]
        super().__init__(path, "arrays", entries, {}, [])
        self._arrays = arrays

    def array(self, name: str) -> Array:
        return self._arrays[self.entry(name).name]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a flow that a loaded model knows of."""

    vocab: int
    context: int  # positions
    dim: int = 0


class FlowModel(LanguageModel):
    """A language model whose flow and weights are the caller's."""

    @property
    def family(self) -> Family:
        """The flow, in place of a registered family."""
        return self.checkpoint.family

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the flow was loaded with."""
        tokenizer = self.checkpoint.tokenizer
        if tokenizer is None:
            hint = "rlx.load(flow, params=..., tokenizer=...), or use token ids"
            raise CapabilityError(f"{self.name}: has no tokenizer", hint=hint)
        return tokenizer

    def _no_files(self, verb: str, hint: str) -> NoReturn:
        raise CapabilityError(f"{verb}: {self.name!r} is a flow of your own, other programs do not know it", hint=hint)

    def save(self, path: str | Path, params: Mapping[str, Any] | None = None, *, dtype: str | None = None) -> Path:
        """Raise: only models of known families have a file format."""
        self._no_files(
            "save", "export(path, weights=True) writes it for rlx; np.savez(path, **model.params) writes its params"
        )

    def export(self, path: str | Path, *, weights: bool = False) -> Path:
        """Write the compiled model to a file, with its weights: it has no other files that an export could refer to."""
        if not weights:
            hint = "export(path, weights=True)"
            raise CapabilityError(f"export: the weights of flow {self.name!r} are in no file", hint=hint)
        return super().export(path, weights=True)


def load_flow(
    source: ModelFlow | BuiltModel, params: Mapping[str, Any] | None, tokenizer: Tokenizer | str | Path | None,
    threads: int | None, settings: Mapping[str, Any],
) -> FlowModel:  # fmt: skip
    """Load a flow with its weights as a language model; see `rlx.load`."""
    flow, weights = _parts(source, params)
    built = for_sequences(flow).build(weights)
    logits = built.module.outputs[0]
    if logits.rank != 3 or not isinstance(logits.shape[-1], int) or not logits.dtype.is_float:
        wanted = "logits [batch, seq, vocab]"
        hint = f"end it with lm_head(vocab, hidden, tied=...). {OTHERWISE}"
        raise GraphError(f"load: flow {flow.name!r} ends in {logits.type}, expected {wanted}", hint=hint)
    flow = for_generation(flow, built)
    generating = flow.build(weights, strict=False)
    _check_inputs(generating)
    check_flow(generating)
    if not any(node.op == "state" for node in generating.module.nodes):
        hint = 'tokens read earlier ones by attention, or by a state: "Stages with a state" in docs/flow.md'
        raise GraphError(f"load: flow {flow.name!r} has no attention stage and no state", hint=hint)
    file = ArrayFile(flow.name, weights)
    sizes = Sizes(logits.shape[-1], _positions(flow, settings["context"]))
    family = flow_family(flow.name, flow)
    names = FileWeights(file, {name: name for name in weights}, 0)
    checkpoint = Checkpoint(file.path, file, family, sizes, names, _tokenizer(tokenizer, sizes.vocab))
    chosen = {**settings, "profile": settings["profile"] or flow.compile_profile}
    session = session_for(settings["device"], threads)
    return FlowModel(checkpoint, name=flow.name, session=session, **chosen)


def flow_family(name: str, flow: ModelFlow | None) -> Family:
    """The stand-in for a family: one flow for all settings. An export has no flow, only what was compiled from it."""

    def assemble(config: Sizes, context: int, factors: Array | None) -> ModelFlow:
        if flow is None:
            hint = "rlx.load(flow, params=...) has it"
            raise CapabilityError(f"{name}: the export does not have the flow that it was compiled from", hint=hint)
        return flow

    return Family(name, KIND, (), (), Sizes, {}, assemble)  # type: ignore[arg-type]


def _parts(source: ModelFlow | BuiltModel, params: Mapping[str, Any] | None) -> tuple[ModelFlow, dict[str, Array]]:
    """The flow and its weights as arrays; f64 becomes f32."""
    if isinstance(source, BuiltModel):
        if source.flow is None:
            raise GraphError(f"load: {source!r} was not built from a flow", hint="rlx.load(flow, params=...)")
        own = {name: source.params[name] for name in source.params if name not in source.params.computed}
        flow, params = source.flow, own if params is None else params
    else:
        flow = source
    if not isinstance(params, Mapping):
        problem = "has no params" if params is None else f"has params of type {type(params).__name__}"
        hint = "rlx.load(flow, params=weights); flow.init(rlx.random.key(0)) makes random ones"
        raise BindError(f"load: flow {flow.name!r} {problem}", hint=hint)
    arrays = {name: np.asarray(value) for name, value in params.items()}
    narrow = {name: a.astype(np.float32) for name, a in arrays.items() if a.dtype == F64.numpy}
    return flow, {**arrays, **narrow}


def _positions(flow: ModelFlow, context: int | None) -> int:
    """The most positions that a flow can have: the rows of its RoPE tables, otherwise as many as are asked for."""
    rows = [len(stage.cos) for stage in flow.stages if isinstance(stage, RopeTables)]
    if rows and isinstance(context, int) and context > min(rows):
        problem = (
            f"load: context {context} is asked for, the RoPE tables of flow {flow.name!r} have {min(rows)} positions"
        )
        raise RequestError(problem, hint=f"flow.rope({context}, head_dim)")
    return min(rows) if rows else context or CONTEXT


def _tokenizer(source: Tokenizer | str | Path | None, vocab: int) -> Tokenizer | None:
    if source is None:
        return None
    if isinstance(source, (str, Path)):
        path = Path(source)
        source = Tokenizer.from_json(path / "tokenizer.json" if path.is_dir() else path)
    if not isinstance(source, Tokenizer):
        hint = "a path of tokenizer.json, or rlx.formats.Tokenizer"
        raise RequestError(f"load: tokenizer is a {type(source).__name__}", hint=hint)
    if source.vocab_size > vocab:
        raise RequestError(f"load: the tokenizer has {source.vocab_size} tokens, the flow {vocab}")
    return source


def _check_inputs(built: BuiltModel) -> None:
    """Raise if the flow has inputs that generation does not set."""
    names = [str(node.attrs["name"]) for node in built.module.inputs if node.op == "input"]
    others = [name for name in names if name not in INPUTS and not name.startswith("table")]
    if others:
        raise GraphError(
            f"load: flow {built.module.name!r} has an input {others[0]!r}, which generation does not set",
            hint="generation sets tokens and positions",
        )
