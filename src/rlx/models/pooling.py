"""Pooling: from token vectors to one vector per text. The stage, and the settings in a model's files.

sentence-transformers stores it as a list of modules next to the weights, GGUF in `<architecture>.pooling_type`. Without
settings, tokens are averaged. A folder without modules gives unnormalised vectors, as sentence-transformers does; a
GGUF file, which cannot say, gives vectors of length 1, as llama.cpp's tools do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32
from rlx.errors import CapabilityError, FormatError
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage
from rlx.flow.state import FlowValue
from rlx.formats import TensorFile, open_tensors
from rlx.formats.tensor_file import broken, quoted
from rlx.ir.graph import Value
from rlx.models.load import Checkpoint, read_json
from rlx.models.sidecar_json import JsonObject
from rlx.types import sym

# -- kinds -----------------------------------------------------------------------------------------------------------
# Named as in sentence-transformers.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # models' names of the prompt for texts that are searched in
KINDS = ("mean", "mean_sqrt_len_tokens", "weightedmean", "cls", "lasttoken", "max")
# Older configurations have one boolean per kind.
_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_GGUF_KINDS = {1: "mean", 2: "cls", 3: "lasttoken"}
_GGUF_OTHERS = {0: "none: a vector for each token", 4: "rank: a score for a pair of texts"}


@dataclass(frozen=True)
class Pool(FlowStage):
    """[batch, seq, hidden] to [batch, hidden]: a weighted sum over the tokens of each text, or their maximum.

    Padding has weight zero and comes last, and tokens are summed in order, so the result does not depend on the amount
    of padding, bit for bit.
    """

    kind: str

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "Pool")
        rows = (sym.BATCH, sym.SEQ)
        mask, positions = ctx.mask_input("attention_mask", rows), ctx.input("positions", rows, "i32")
        mask = mask if mask.dtype.is_float else mask.astype("f32")
        if self.kind == "max":
            return ctx.wrap((_column(mask) > 0).where(x, -np.inf).max(axis=1))
        counts = self._counts(mask, positions)
        total = counts.sum(axis=1, keepdims=True)
        divisor = total.sqrt() if self.kind == "mean_sqrt_len_tokens" else total
        return ctx.wrap((x * _column(counts)).sum(axis=1) / divisor)

    def _counts(self, mask: Value, positions: Value) -> Value:
        """[batch, seq] weight of each token."""
        nth: Value = (positions + 1).astype("f32")
        counts = mask
        match self.kind:
            case "cls":
                counts = nth.equal(1.0).where(mask, 0.0)
            case "lasttoken":
                counts = nth.equal(mask.sum(axis=1, keepdims=True)).where(mask, 0.0)
            case "weightedmean":
                counts = nth * mask
        return counts

    @property
    def path(self) -> str:
        return "pool"


@dataclass(frozen=True)
class Dense(FlowStage):
    """[batch, in] to [batch, out]: a linear layer after the pooling."""

    name: str
    weight: Array  # [out, in]
    bias: Array | None
    activation: str

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "Dense")
        y = x @ ctx.synth_param(f"{self.name}.weight", self.weight).mT
        if self.bias is not None:
            y = y + ctx.synth_param(f"{self.name}.bias", self.bias)
        return ctx.wrap(y.tanh() if self.activation == "Tanh" else y)

    @property
    def path(self) -> str:
        return self.name


def pooled(flow: ModelFlow, checkpoint: Checkpoint, settings: EmbedSettings) -> ModelFlow:
    """Append pooling, dense layers and normalisation to the flow of a model's tokens."""
    flow = flow.stage(Pool(settings.kind))
    width = checkpoint.config.dim
    for i, (path, name, activation, size) in enumerate(settings.dense):
        file = open_tensors(path) if path else checkpoint.file
        for tensor in (f"{name}.weight", f"{name}.bias"):
            storage = file.entry(tensor).storage if tensor in file else F32
            if not (storage.is_float or storage.is_packed):
                raise CapabilityError(f"{file.path}: tensor {quoted(tensor)} is stored as {storage}, not as floats")
        weight = file.dequantised(f"{name}.weight")
        bias = file.dequantised(f"{name}.bias") if f"{name}.bias" in file else None
        if weight.shape != (size, width) or (bias is not None and bias.shape != (size,)):
            shapes = [list(a.shape) for a in (weight, bias) if a is not None]
            raise FormatError(f"{file.path}: dense layer of {width} to {size} numbers: its weights are {shapes}")
        flow, width = flow.stage(Dense(f"dense.{i}", weight, bias, activation)), size
    return flow


def _column(x: Value) -> Value:
    return x.reshape(*x.shape, 1)


# -- settings in files -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EmbedSettings:
    """Text embedding settings from a model's files."""

    kind: str = "mean"
    normalize: bool = False
    limit: int | None = None  # tokens per text, including special ones
    lower: bool = False  # lowercase the text first
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True  # whether prompt tokens are pooled too
    similarity: str = "cosine"
    source: str = ""  # the file with the pooling settings; empty if there is none
    # dense layers after pooling: the tensors' file (empty: the model's own), tensor name, activation, output size
    dense: tuple[tuple[str, str, str, int], ...] = ()

    @property
    def query_prompt(self) -> str | None:
        """The name of the prompt for texts that are searched for; None if the model has none."""
        return "query" if "query" in self.prompts else None

    @property
    def document_prompt(self) -> str | None:
        """The name of the prompt for texts that are searched in; None if the model has none."""
        return next((name for name in DOCUMENT_PROMPTS if name in self.prompts), None)


def read_settings(checkpoint: Checkpoint) -> EmbedSettings:
    """Reads the embedding settings of an opened model. Unsupported modules and kinds raise CapabilityError."""
    if checkpoint.file.format == "gguf":
        settings = _from_gguf(checkpoint.path, checkpoint.file.metadata)
        return replace(settings, dense=tuple(_dense_of_gguf(checkpoint.file)))
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return _from_folder(folder)


def _from_gguf(path: Path, metadata: Mapping[str, Any]) -> EmbedSettings:
    key = f"{metadata.get('general.architecture')}.pooling_type"
    code = metadata.get(key)
    if code is None:
        return EmbedSettings(normalize=True)
    if isinstance(code, bool) or not isinstance(code, int) or code not in (*_GGUF_KINDS, *_GGUF_OTHERS):
        raise FormatError(f"{path}: {key}: expected a number from 0 to 4, found {quoted(code)}")
    if code in _GGUF_OTHERS:
        raise CapabilityError(f"{path}: {key} is {code} ({_GGUF_OTHERS[code]}), which rlx does not have")
    return EmbedSettings(_GGUF_KINDS[code], normalize=True, source=str(path))


def _dense_of_gguf(file: TensorFile) -> Iterator[tuple[str, str, str, int]]:
    """Dense layers in the file, checked against the metadata: dropping one would give a different vector."""
    for name in ("dense_2", "dense_3"):
        tensor, key = f"{name}.weight", f"{file.metadata.get('general.architecture')}.{name}_feat_out"
        shape = file.entry(tensor).shape if tensor in file else ()
        said = file.metadata.get(key)
        if said is not None and (not shape or said != shape[0]):
            stored = f"shape {list(shape)}" if shape else "none"
            raise broken(
                file.path, f"tensor {quoted(tensor)}", expected=f"{quoted(said)} rows, by {key}", actual=stored
            )
        if shape:
            yield "", name, "Identity", shape[0]


def _from_folder(folder: Path) -> EmbedSettings:
    settings = EmbedSettings()
    tokenizer = JsonObject.read(folder / "tokenizer_config.json")
    longest = tokenizer.get("model_max_length", int, float)  # some files have a float, 1e30 for no limit
    if longest is not None and 0 < longest < 1 << 31:
        settings = replace(settings, limit=int(longest))
    settings = _with_prompts(settings, JsonObject.read(folder / "config_sentence_transformers.json"))
    modules = folder / "modules.json"
    if not modules.exists():
        return settings
    before = _ORDER[0]
    for i, entry in enumerate(read_json(modules, list)):
        if not isinstance(entry, dict):
            raise broken(modules, f"module {i}", expected="an object", actual=quoted(entry))
        module = JsonObject(modules, entry)
        name = module.need("type", str).rpartition(".")[2]
        place = folder / _subfolder(modules, module.get("path", str) or "")
        apply = _MODULES.get(name)
        if apply is None:
            raise CapabilityError(
                f"{modules}: module {i} is a {quoted(name)}, which rlx does not have",
                hint=f"known: {', '.join(_MODULES)}",
            )
        if name in _ORDER[: _ORDER.index(before) + (before != "Dense")]:
            raise CapabilityError(
                f"{modules}: module {i} is a {quoted(name)} behind a {quoted(before)}, which rlx does not have",
                hint=_HINT,
            )
        settings, before = apply(settings, place), name if name in _ORDER else before
    return settings


def _with_prompts(settings: EmbedSettings, config: JsonObject) -> EmbedSettings:
    prompts = config.get("prompts", dict) or {}
    for name, text in prompts.items():
        if text is not None and not isinstance(text, str):
            raise broken(config.path, f"prompt {quoted(name)}", expected="a string", actual=quoted(text))
    default = config.get("default_prompt_name", str)
    if default is not None and default not in prompts:
        raise broken(config.path, "default_prompt_name", expected="one of the prompts", actual=quoted(default))
    prompts = {name: text or "" for name, text in prompts.items()}
    similarity = config.get("similarity_fn_name", str) or "cosine"
    return replace(settings, prompts=prompts, default_prompt=default, similarity=similarity)


# -- modules of sentence-transformers --------------------------------------------------------------------------------
def _transformer(settings: EmbedSettings, place: Path) -> EmbedSettings:
    """The encoder itself. Its settings file is named after the original kind of model."""
    for path in sorted(place.glob("sentence_*_config.json")):
        config = JsonObject.read(path)
        limit = config.get("max_seq_length", int)
        if limit is not None and not 0 < limit < 1 << 31:
            raise broken(path, "max_seq_length", expected="a number above 0", actual=quoted(limit))
        lower = config.get("do_lower_case", bool) or False
        return replace(settings, limit=limit if limit is not None else settings.limit, lower=lower)
    return settings


def _pooling(settings: EmbedSettings, place: Path) -> EmbedSettings:
    path = place / "config.json"
    if not path.exists():
        raise broken(path, "not there, though modules.json names it")
    config = JsonObject.read(path)
    kinds = _kinds(config)
    unknown = [k for k in kinds if k not in KINDS]
    if unknown or len(kinds) > 1:
        raise CapabilityError(
            f"{path}: pooling by {' and '.join(map(quoted, unknown or kinds))}, which rlx does not have",
            hint=f"one of {', '.join(KINDS)}",
        )
    include = config.get("include_prompt", bool)
    kind = kinds[0] if kinds else "mean"
    return replace(settings, kind=kind, include_prompt=include is not False, source=str(path))


def _kinds(config: JsonObject) -> Sequence[str]:
    mode = config.get("pooling_mode", str, list)
    if mode is None:
        return [kind for flag, kind in _FLAGS.items() if config.get(flag, bool)]
    kinds = [mode] if isinstance(mode, str) else mode
    for kind in kinds:
        if not isinstance(kind, str):
            raise broken(config.path, "pooling_mode", expected="names", actual=quoted(kind))
    return kinds


def _dense(settings: EmbedSettings, place: Path) -> EmbedSettings:
    path, weights = place / "config.json", place / "model.safetensors"
    for needed in (path, weights):
        if not needed.exists():
            hint = "download the whole folder; weights are read from model.safetensors"
            raise broken(needed, "not there, though modules.json names it", hint=hint)
    if not settings.source:
        raise CapabilityError(f"{path}: a dense layer before the pooling, which rlx does not have", hint=_HINT)
    config = JsonObject.read(path)
    activation = (config.get("activation_function", str) or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise CapabilityError(f"{path}: activation {quoted(activation)} is not supported", hint="known: Identity, Tanh")
    source = config.get("module_input_name", str)
    if source not in (None, "sentence_embedding"):
        raise CapabilityError(f"{path}: reads {quoted(source)}, which rlx does not have")
    sizes = config.need("in_features", int), config.need("out_features", int)
    _check_dense(weights, sizes, config.get("bias", bool) is not False)
    return replace(settings, dense=(*settings.dense, (str(weights), "linear", activation, sizes[1])))


def _check_dense(path: Path, sizes: tuple[int, int], biased: bool) -> None:
    """Check that the file has exactly the tensors that the configuration names."""
    with open_tensors(path) as file:
        wanted = {"linear.weight": sizes[::-1]} | ({"linear.bias": sizes[1:]} if biased else {})
        shapes = {name: file.entry(name).shape for name in file.names}
    if shapes != wanted:
        raise broken(path, "tensors of a dense layer", expected=quoted(wanted), actual=quoted(shapes))


def _normalize(settings: EmbedSettings, place: Path) -> EmbedSettings:
    path = place / "config.json"
    source = JsonObject.read(path).get("module_input_name", str)
    if source not in (None, "sentence_embedding"):
        raise CapabilityError(f"{path}: normalises {quoted(source)}, which rlx does not have")
    return replace(settings, normalize=True)


def _skip(settings: EmbedSettings, place: Path) -> EmbedSettings:
    return settings


_MODULES: Mapping[str, Callable[[EmbedSettings, Path], EmbedSettings]] = {
    "Transformer": _transformer, "Pooling": _pooling, "Dense": _dense, "Normalize": _normalize,
    "Dropout": _skip,
}  # fmt: skip
_ORDER = ("", "Transformer", "Pooling", "Dense", "Normalize")
_HINT = "the order is Transformer, Pooling, Dense, Normalize; there may be several Dense"


def _subfolder(path: Path, name: str) -> PurePosixPath:
    """A folder named in a file, which must lie below it."""
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or set(name) & set("\0\\:") or len(name) > 255:
        raise broken(path, "a module's path", expected="a folder beside it", actual=quoted(name))
    return place
