"""Writes GGUF: tensors, configuration and tokenizer of a decoder, with llama.cpp's keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F16, F32
from rlx.engine.save_check import atomic_path, check_same
from rlx.engine.save_tensors import FLOATS, Source, Tensor
from rlx.errors import CapabilityError
from rlx.formats.gguf_quants import GGUF_TYPES
from rlx.models.config import DecoderConfig, leaves
from rlx.models.load import Checkpoint

# RoPE scalings stored as tensors, and the architectures for which llama.cpp reads them.
TENSORS_OF_ROPE = {"llama3": ("llama",), "longrope": ("llama", "phi3")}


def write_gguf(source: Source, names: Sequence[str], path: Path, kind: str | None) -> None:
    try:
        import gguf
    except ImportError as error:
        raise CapabilityError("save: GGUF files are written by the package gguf", hint="pip install gguf") from error
    checkpoint = source.checkpoint
    same = checkpoint.file.format == "gguf"
    tensors = source.in_format("gguf", names)
    if kind is not None:
        tensors = {n: t if _must_be_f32(n, t) else t.as_type(FLOATS[kind]) for n, t in tensors.items()}
    known = set(GGUF_TYPES.values())  # without 8-bit floats
    tensors = {n: t if t.type.dtype in known else t.as_type(F32) for n, t in tensors.items()}
    if not same:
        tensors |= {name: Tensor.of(array) for name, array in rope_tensors(checkpoint).items()}
    with atomic_path(path) as at:
        writer = gguf.GGUFWriter(at, _architecture(checkpoint))
        if same:
            _copy_metadata(gguf, writer, checkpoint.file.path)
        else:
            _write_metadata(writer, checkpoint)
        for name, tensor in tensors.items():
            storage = tensor.type.dtype
            array = np.ascontiguousarray(tensor.read())
            if storage in (F32, F16):
                writer.add_tensor(name, array)
            else:
                raw = array.reshape(*array.shape[:-1], -1).view(np.uint8)
                writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[storage.name.upper()])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if not same:
            check_same(checkpoint, checkpoint.config.changed(**checkpoint.config.IN_GGUF), at)


def _architecture(checkpoint: Checkpoint) -> str:
    """The architecture of the model's file, or of its family if it comes from another format."""
    if checkpoint.file.format == "gguf":
        return str(checkpoint.file.metadata["general.architecture"])
    return str(checkpoint.family.architecture)


def _copy_metadata(gguf: Any, writer: Any, path: Path) -> None:
    for field in gguf.GGUFReader(path).fields.values():
        # written by the writer itself, or about the parts of a split file
        if field.name.startswith(("GGUF.", "split.")) or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)


def _must_be_f32(name: str, tensor: Tensor) -> bool:
    """Whether llama.cpp expects a tensor as f32, whatever the type of the others."""
    return len(tensor.type.shape) == 1 or any(part in name for part in ("ssm_a", "ssm_d", "ssm_norm", "ssm_conv1d"))


def _write_metadata(writer: Any, checkpoint: Checkpoint) -> None:
    """Write a decoder's configuration and tokenizer with GGUF's keys."""
    c, prefix = checkpoint.config, _architecture(checkpoint)
    writer.add_name(checkpoint.path.name)
    metadata: dict[str, Any] = {"vocab_size": c.vocab}
    if isinstance(c, DecoderConfig):
        metadata["attention.head_count_kv"] = c.kv_heads
        if c.head_dim * c.heads != c.dim or c.stated_head_dim is not None:
            metadata |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
        if c.rotary != c.head_dim or prefix in ("llama", "phi3"):
            metadata["rope.dimension_count"] = c.rotary
    for leaf in leaves(type(c)):
        place, value = leaf.metadata.get("gguf"), c.value(leaf)
        if place and value is not None:
            metadata[place] = value
    if isinstance(c, DecoderConfig) and c.uses_rope:
        metadata |= rope_settings(c)
    for place, value in (metadata | c.gguf_only_settings()).items():
        _add(writer, f"{prefix}.{place}", value)
    if checkpoint.tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        from rlx.engine.save_vocab import write_vocab

        write_vocab(writer, checkpoint.tokenizer)


# -- RoPE ------------------------------------------------------------------------------------------------------------
def rope_settings(c: DecoderConfig) -> dict[str, Any]:
    """GGUF keys of a RoPE scaling. Raises CapabilityError for one that GGUF cannot express."""
    rope = c.rope
    match rope.kind:
        case "default" | "llama3":  # llama3 is a tensor
            return {}
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.number("factor")}
        case "yarn":
            _, attention = rope.frequencies(c.context)
            usual = 0.1 * math.log(rope.stretch) + 1.0 if rope.stretch > 1 else 1.0  # llama.cpp multiplies by it
            return {
                "rope.scaling.type": "yarn", "rope.scaling.factor": rope.stretch,
                "rope.scaling.original_context_length": int(rope.original),
                "rope.scaling.attn_factor": attention / usual,
                "rope.scaling.yarn_beta_fast": rope.optional("beta_fast", 32.0),
                "rope.scaling.yarn_beta_slow": rope.optional("beta_slow", 1.0),
            }  # fmt: skip
        case "longrope":
            _, attention = rope.frequencies(c.context)
            return {
                "rope.scaling.type": "longrope", "rope.scaling.attn_factor": attention,
                "rope.scaling.original_context_length": int(rope.original),
            }  # fmt: skip
        case other:
            raise CapabilityError(
                f"save: rope_scaling: type {other!r} is not written as GGUF",
                hint="known: default, linear, llama3, yarn, longrope",
            )


def rope_tensors(checkpoint: Checkpoint) -> dict[str, Array]:
    """Divisors of RoPE frequencies that GGUF stores as tensors: those of Llama 3 and longrope."""
    c = checkpoint.config
    if not isinstance(c, DecoderConfig) or not c.uses_rope or c.rope.kind not in TENSORS_OF_ROPE:
        return {}
    known = TENSORS_OF_ROPE[c.rope.kind]
    if checkpoint.family.architecture not in known:
        raise CapabilityError(
            f"save: rope_scaling: type {c.rope.kind!r} of a {checkpoint.family.name} is not written as GGUF",
            hint=f"architectures that have it: {', '.join(known)}",
        )
    if c.rope.kind == "llama3":
        return {"rope_freqs.weight": (c.rope.plain() / c.rope.frequencies(c.context)[0]).astype(np.float32)}
    sets = {length: c.rope.each(f"{length}_factor").astype(np.float32) for length in ("short", "long")}
    return {f"rope_factors_{length}.weight": factors for length, factors in sets.items()}


def _add(writer: Any, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)
        case _:
            raise CapabilityError(f"save: {name} is {value!r}, which is not written as GGUF")
