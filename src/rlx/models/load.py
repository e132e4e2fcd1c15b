"""Opens checkpoints: a path becomes a file, its family, its configuration, its named weights and its tokenizer.

Anything that would be computed wrongly is refused here: settings the family does not implement, tensors it does not
use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import rlx.models.bert
import rlx.models.dinov2
import rlx.models.embedding_gemma
import rlx.models.gemma
import rlx.models.gpt2
import rlx.models.llama
import rlx.models.mamba
import rlx.models.mamba2
import rlx.models.modernbert
import rlx.models.moe
import rlx.models.nomic_bert
import rlx.models.phi3
import rlx.models.qwen2
import rlx.models.qwen3
import rlx.models.qwen3_5
import rlx.models.qwen3_next
import rlx.models.roberta
import rlx.models.siglip
import rlx.models.vit  # noqa: F401  declares the family
from rlx.arrays import Array
from rlx.dtypes import FLOAT8_PACKED
from rlx.errors import CapabilityError, FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats import TensorFile, open_tensors
from rlx.formats.mapped_file import FileMap
from rlx.formats.scaled_weights import ALTERNATIVES, METHODS, ScaledFile
from rlx.formats.strict_json import parse_json
from rlx.formats.tensor_file import broken, open_bytes, quoted
from rlx.formats.tokenizer import Tokenizer
from rlx.models import config as configs
from rlx.models import embedding_models
from rlx.models.family import FAMILIES, Family, FileWeights, find
from rlx.models.rope import scaling_of_gguf, scaling_of_hf
from rlx.models.weight_views import weights_of

# Tensors that are read elsewhere, that are redundant, or that belong to heads and image towers not used here.
_NOT_WEIGHTS = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|.*rotary_emb\.inv_freq|.*\bposition_ids|(.*\.)?attn\.(masked_)?bias|.*\bmask_token|cls\..*"
    r"|dense_[23]\.weight|(model\.)?(vision_tower|visual|multi_modal_projector)\..*"
)
_LAYER = re.compile(r"\.([0-9]{1,9})\.")
_OF_FILES = (
    "quantization_config",
    "compression_config",
)  # apply to all weights of a file
HEAD = "lm_head.weight"
COMPARED_BYTES = 1 << 22  # compared at a time, per tensor


@dataclass(frozen=True)
class Checkpoint:
    """An opened model."""

    path: Path
    file: TensorFile
    family: Family
    config: Any
    weights: FileWeights
    tokenizer: Tokenizer | None
    rope_factors: Array | None = None
    notes: tuple[str, ...] = ()  # warnings to show when it is loaded
    others: tuple[FileMap, ...] = ()  # mapped files besides the weights

    @property
    def maps(self) -> tuple[FileMap, ...]:
        """All mapped files of the model."""
        return self.file.maps + self.others


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, a llama2.c file or a Hugging Face folder."""
    where = Path(path)
    file = open_tensors(where)
    try:
        match file.format:
            case "gguf":
                return _from_gguf(where, file)
            case "llama2c":
                tokenizer = _llama2c_tokenizer(where, file.metadata["vocab_size"])
                return _from_hf(where, file, file.metadata, tokenizer, str(where))
            case _:
                folder = where if where.is_dir() else where.parent
                return _from_hf(where, file, *_read_sidecars(folder), str(folder / "config.json"))
    except BaseException:
        file.close()
        raise


def _from_gguf(path: Path, file: TensorFile) -> Checkpoint:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise FormatError(f"{path}: the metadata has no general.architecture")
    family = find(architecture, "gguf", metadata)
    rest = embedding_models.without_pooling(family, metadata)
    known = _infer_from_tensors(family, file)
    config: Any = configs.from_gguf(family.config, rest or metadata, f"{path}: metadata", known)
    weights = weights_of(family, config, file)
    factors = file.dequantised("rope_freqs.weight") if "rope_freqs.weight" in file else None
    if rest is not None:
        if factors is not None:
            raise CapabilityError(f"{path}: rope_freqs.weight is not supported in a model that makes vectors")
        family = FAMILIES[family.name + embedding_models.SUFFIX]
    model = metadata.get("tokenizer.ggml.model")
    absent = model is None or (isinstance(model, str) and model in ("none", "no_vocab"))
    tokenizer = None if absent else Tokenizer.from_gguf(metadata, source=path)
    return _check(Checkpoint(path, file, family, config, weights, tokenizer, factors))


def _infer_from_tensors(family: Family, file: TensorFile) -> dict[str, Any]:
    """Fields that GGUF metadata does not contain, inferred from the tensors."""
    known: dict[str, Any] = {"vocab": _rows(file, "token_embd.weight")}
    if family.kind == "encoder" and not issubclass(family.config, configs.DecoderConfig):
        return known | ({"types": _rows(file, "token_types.weight")} if "token_types.weight" in file else {})
    known |= {"tied": "output.weight" not in file, "rope_scaling": scaling_of_gguf(file.metadata, file)}
    return known | family.config.inferred_from_gguf(file)


def _rows(file: TensorFile, name: str) -> int:
    shape = file.entry(name).shape
    if len(shape) != 2 or not shape[0]:
        raise FormatError(f"{file.path}: tensor {name!r}: expected a table, found shape {list(shape)}")
    return shape[0]


def _from_hf(
    path: Path, file: TensorFile, settings: Mapping[str, Any], tokenizer: Tokenizer | None, where: str
) -> Checkpoint:
    family, config = read_config(settings, where, {"pairs": True} if file.format == "llama2c" else {})
    weights = weights_of(family, config, file)
    if embedding_models.is_embedding_model(family, Path(where).parent):
        family = FAMILIES[family.name + embedding_models.SUFFIX]
    notes = _widening_notes(weights.file)
    return _check(_untie_head(Checkpoint(path, weights.file, family, config, weights, tokenizer, notes=notes)))


def _widening_notes(file: TensorFile) -> tuple[str, ...]:
    """A note for packed weights that have to be read as f32."""
    names = file.widened if isinstance(file, ScaledFile) else ()
    if not names:
        return ()
    block = min(kind.block for kind in FLOAT8_PACKED)
    first = f"{quoted(names[0])} {list(file.entry(names[0]).shape)}"
    why = f"the rows or scales of {first} are not whole blocks of {block}"
    return (f"{len(names)} weights of 8-bit floats take the memory of f32: {why}",)


def _untie_head(checkpoint: Checkpoint) -> Checkpoint:
    """Untie the head if the file has both a head and a token table that differ: as in `transformers`, the file wins.

    If it has only the head, the head is also the token table.
    """
    config, weights = checkpoint.config, checkpoint.weights
    if checkpoint.family.kind != "decoder" or not config.tied or not weights.has(HEAD):
        return checkpoint
    table = token_table(checkpoint.family)
    if not weights.has(table):
        weights.alias(table, HEAD)
        return checkpoint
    if _same(checkpoint.file, weights.entry(table).name, weights.entry(HEAD).name):
        return checkpoint
    note = (
        f"tie_word_embeddings is true, but {HEAD} differs from {table}: the file's own head is used; "
        "set tie_word_embeddings to false in config.json to silence this warning"
    )
    return replace(checkpoint, config=replace(config, tied=False), notes=(*checkpoint.notes, note))


def token_table(family: Family) -> str:
    """The name of a decoder's token embedding table."""
    return next(ours for ours, theirs in family.weights.items() if theirs == "token_embd.weight")


def repeated_head(checkpoint: Checkpoint) -> str | None:
    """The tensor that duplicates a tied decoder's token table, if the file has one."""
    family, config, weights = checkpoint.family, checkpoint.config, checkpoint.weights
    if family.kind != "decoder" or not config.tied or not weights.has(HEAD):
        return None
    head = weights.entry(HEAD).name
    return None if head == weights.entry(token_table(family)).name else head


def _same(file: TensorFile, first: str, second: str) -> bool:
    """Whether two tensors hold equal numbers; compared in pieces, to avoid copying large tables."""
    a, b = file.array(first), file.array(second)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    rows = max(1, COMPARED_BYTES // max(a[:1].nbytes, 1))
    return all(np.array_equal(a[at : at + rows], b[at : at + rows]) for at in range(0, len(a), rows))


def read_config(settings: Mapping[str, Any], where: str, known: Mapping[str, Any] | None = None) -> tuple[Family, Any]:
    """Reads the family and configuration of a `config.json`; `known` supplies fields that it does not contain."""
    kind = settings.get("model_type")
    if not isinstance(kind, str):
        raise FormatError(f"{where}: expected a model_type, found {quoted(kind)}")
    family = find(kind, "hf", settings)
    if family.settings is not None:
        stored = {name: settings[name] for name in _OF_FILES if name in settings}
        settings = {**family.settings(settings, where), **stored}
    if issubclass(family.config, configs.DecoderConfig):
        settings = {**settings, **scaling_of_hf(settings, where)}
    return family, configs.from_hf(family.config, settings, where, known)


# -- checks ----------------------------------------------------------------------------------------------------------
def _check(checkpoint: Checkpoint) -> Checkpoint:
    _check_tensors(checkpoint)
    tokenizer = checkpoint.tokenizer
    if tokenizer is not None and checkpoint.family.kind != "vision model":
        rows = checkpoint.config.vocab
        # a model may lack rows for special tokens added later, since no text encodes to them
        beyond = next((i for i in range(rows, tokenizer.vocab_size) if i not in tokenizer.special_ids), None)
        if beyond is not None:
            raise FormatError(
                f"{tokenizer.source}: the tokenizer has {tokenizer.vocab_size} tokens, the model {rows}",
                hint="is it another model's tokenizer?",
            )
        tokenizer.stop_ids = frozenset(i for i in tokenizer.stop_ids if i < rows)  # those the model has
    return checkpoint


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Refuse model tensors that the flow would ignore, and weights that are not numbers."""
    file, family, config = checkpoint.file, checkpoint.family, checkpoint.config
    gguf = file.format == "gguf"
    names = {theirs if gguf else ours: ours for ours, theirs in family.weights.items()}
    roots = {name.split(".")[0] for name in names} | {"layers", "embed_tokens", "norm"}
    omitted_weights, extra = config.omitted_weights(), getattr(config, "extra_layers", 0)
    for name in file.names:
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        plain = name if gguf else _plain(name, family)
        pattern, layer = _LAYER.sub(".{i}.", plain, count=1), _LAYER.search(plain)
        if gguf and layer is not None and int(layer[1]) in range(config.layers, config.layers + extra):
            continue
        spellings = (prefix + p for p in (pattern, _LAYER.sub(".{j}.", pattern, count=1)) for prefix in ("", "model."))
        ours = next((names[p] for p in spellings if p in names), None)
        if ours is None:
            if gguf or pattern.split(".")[0] in roots:
                raise _unused(file, name, f"a {family.name} model has no such weight", _foreign_quantization(name))
        elif ours in omitted_weights:
            raise _unused(file, name, "the configuration leaves it out")
        elif layer is not None and int(layer[1]) >= config.layers:
            raise _unused(file, name, f"the configuration has {config.layers} layers")
        elif not ((storage := file.entry(name).storage).is_float or storage.is_packed):
            raise CapabilityError(
                f"{file.path}: tensor {quoted(name)} is stored as {storage}, which is not supported",
                hint="save the model without quantisation, or as GGUF",
            )


def _plain(name: str, family: Family) -> str:
    """A tensor's name without the prefix of a model with a head; older BERTs use TensorFlow's norm names."""
    for prefix in family.prefixes:
        name = name.removeprefix(prefix)
    return re.sub(r"\bgamma$", "weight", re.sub(r"\bbeta$", "bias", name))


def _unused(file: TensorFile, name: str, why: str, hint: str | None = None) -> CapabilityError:
    return CapabilityError(f"{file.path}: tensor {quoted(name)} would not be used: {why}", hint=hint)


def _foreign_quantization(name: str) -> str | None:
    """A hint for AWQ and GPTQ tensors, whose folders may not mention it in config.json."""
    if not name.endswith((".qweight", ".qzeros", ".g_idx")):
        return None
    return f"a weight of AWQ or GPTQ, which are not supported: {ALTERNATIVES.format(', '.join(METHODS))}"


# -- files next to the weights ---------------------------------------------------------------------------------------
def _read_sidecars(folder: Path) -> tuple[Mapping[str, Any], Tokenizer | None]:
    settings: Mapping[str, Any] = read_json(folder / "config.json")
    path = folder / "tokenizer.json"
    if not path.exists():
        return settings, None
    tokenizer = Tokenizer.from_json(path)
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    tokenizer.stop_ids |= _eos_ids(settings, folder) | _eos_ids(generation, folder)
    return settings, tokenizer


def _eos_ids(settings: Mapping[str, Any], folder: Path) -> frozenset[int]:
    """Ids of the end-of-sequence tokens in these settings."""
    setting = settings.get("eos_token_id")
    listed = setting if isinstance(setting, list) else [] if setting is None else [setting]
    if not all(type(i) is int and i >= 0 for i in listed):
        raise FormatError(f"{folder}: eos_token_id: expected token ids, found {quoted(setting)}")
    return frozenset(listed)


def read_json(path: Path, kind: type = dict) -> Any:
    """Reads a JSON file next to the weights and checks its top-level type."""
    if not path.exists():
        raise FormatError(f"{path}: is not there", hint="a folder of Hugging Face has it beside the weights")
    parsed = parse_json(open_bytes(path).view, path, infinity=True)
    if not isinstance(parsed, kind):
        raise broken(path, "JSON", expected=f"a {kind.__name__}", actual=type(parsed).__name__)
    return parsed


def _llama2c_tokenizer(path: Path, vocab: int) -> Tokenizer | None:
    """llama2.c stores the vocabulary next to the model."""
    for name in (f"tok{vocab}.bin", "tokenizer.bin"):
        if (path.parent / name).exists():
            return Tokenizer.from_tok512(path.parent / name, vocab)
    return None
