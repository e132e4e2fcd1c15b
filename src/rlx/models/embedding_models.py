"""Decoders used as text embedders, such as Qwen3-Embedding: the stages up to the final norm, without cache and head.

Attention is causal and padding comes last, so no mask is needed. The model's files say how to pool, usually the last
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx.flow.flow import ModelFlow
from rlx.flow.stages import GatherLastToken
from rlx.models.family import FAMILIES, Family

SUFFIX = "-embedding"


def embedder(base: Family) -> Family:
    """Declare the embedding family of a decoder. Files next to the weights tell it from the decoder."""

    def flow(c: Any) -> ModelFlow:
        decoder = base.flow(c, c.context)
        end = next(i for i, stage in enumerate(decoder.stages) if isinstance(stage, GatherLastToken))
        return replace(decoder.with_stages(decoder.stages[:end]), cache=None, output_name="output")

    declared = replace(base, name=base.name + SUFFIX, kind="encoder", gguf=(), hf=(), flow=flow)
    FAMILIES[declared.name] = declared
    return declared


def is_embedding_model(family: Family, folder: Path) -> bool:
    """Whether a Hugging Face folder holds an embedding model: sentence-transformers stores a list of modules there."""
    return family.name + SUFFIX in FAMILIES and (folder / "modules.json").exists()


def without_pooling(family: Family, metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The metadata of a GGUF file without its pooling type, as the decoder reads it; None if it has no pooling type."""
    name = f"{metadata.get('general.architecture')}.pooling_type"
    if family.name + SUFFIX not in FAMILIES or metadata.get(name, 0) == 0:
        return None
    return {key: value for key, value in metadata.items() if key != name}
