"""Decoders that make vectors of texts, such as Qwen3-Embedding: the stages up to the last norm, without cache and head.

A text sees itself from left to right, and padding comes after it, so no mask is needed; what is pooled, usually the
last token, is what the model's files say.
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
    """Declare the family of a decoder's embedding models. It is told from the decoder by files beside the weights."""

    def flow(c: Any) -> ModelFlow:
        whole = base.flow(c, c.context)
        end = next(i for i, stage in enumerate(whole.stages) if isinstance(stage, GatherLastToken))
        return replace(whole.with_stages(whole.stages[:end]), cache=None, output_name="output")

    made = replace(base, name=base.name + SUFFIX, kind="encoder", gguf=(), hf=(), flow=flow)
    FAMILIES[made.name] = made
    return made


def is_for_vectors(family: Family, folder: Path) -> bool:
    """Whether a folder of Hugging Face has an embedding model: sentence-transformers keeps a list of modules there."""
    return family.name + SUFFIX in FAMILIES and (folder / "modules.json").exists()


def without_pooling(family: Family, metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The metadata of a GGUF file as the decoder's configuration reads it, if the file says how to pool."""
    name = f"{metadata.get('general.architecture')}.pooling_type"
    if family.name + SUFFIX not in FAMILIES or metadata.get(name, 0) == 0:
        return None
    return {key: value for key, value in metadata.items() if key != name}
