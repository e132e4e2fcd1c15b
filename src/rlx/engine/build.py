"""Builds the graph of a checkpoint, as `rlx.load` does."""

from __future__ import annotations

from rlx.engine.load_settings import auto_cache, default_context, profile_for, with_precision
from rlx.flow.built import BuiltModel
from rlx.flow.flow import ModelFlow
from rlx.kv_layout import KvLayout
from rlx.models.load import Checkpoint
from rlx.models.pooling import EmbedSettings, pooled, read_settings


def model_flow(
    checkpoint: Checkpoint, context: int, cache: str, settings: EmbedSettings | None = None,
    layout: KvLayout | None = None,
) -> ModelFlow:  # fmt: skip
    """The flow of a model: a decoder with its KV cache, or an encoder with pooling from `settings` or its files."""
    family, config = checkpoint.family, checkpoint.config
    match family.kind:
        case "decoder":
            flow = family.flow(config, context, checkpoint.rope_factors).cache_dtype(cache)
            return flow if layout is None else flow.cache_layout(layout)
        case "vision model":
            return family.flow(config)
        case _:
            return pooled(family.flow(config), checkpoint, settings or read_settings(checkpoint))


def build_checkpoint(checkpoint: Checkpoint, cache: str = "auto") -> BuiltModel:
    """The graph of a model with default settings and its own `profile.toml`. Reads only the types of weights."""
    profile = profile_for(None, checkpoint.path)
    if cache == "auto":
        cache = auto_cache(checkpoint, with_precision(profile, "auto"))
    context = default_context(checkpoint.family.kind, int(checkpoint.config.context))
    return model_flow(checkpoint, context, cache).profile(profile).build(checkpoint.weights)
