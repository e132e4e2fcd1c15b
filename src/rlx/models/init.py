"""Initialisers per family, as in their published implementations.

`flow_of(config).init(rlx.random.key(0))` initialises the parameters of an untrained model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.flow.init import (
    Initialiser,
    lecun_normal,
    normal,
    ones,
    truncated_normal,
    uniform,
    usual,
    vectors_of_norms,
    xavier_uniform,
    zeros,
)

if TYPE_CHECKING:
    from rlx.flow.flow import ModelFlow

Table = dict[str, Initialiser]


def _residual_std(c: Any) -> float:
    """Standard deviation of the two projections per layer that write to the residual stream."""
    return float(c.initializer_range / math.sqrt(2 * c.layers))


def _gemma(c: Any) -> Table:
    """Norms multiply by 1 + weight, unless the weight includes the 1."""
    return {"*norm.weight": zeros if c.unit_offset else ones}


def _gpt2(c: Any) -> Table:
    """Projections into the residual stream start smaller, by the number of additions (Radford et al., 2019)."""
    return {"*.c_proj.weight": normal(_residual_std(c))}


def _modernbert(c: Any) -> Table:
    inner, outer = (truncated_normal(std, 2.0) for std in (c.initializer_range, _residual_std(c)))
    return {"*Wo.weight": outer, "*norm*.weight": ones, "*.bias": zeros, "*": inner}


def _dinov2(c: Any) -> Table:
    return {"*.register_tokens": zeros}  # layer scales are 1, the default for vectors


def _siglip(c: Any) -> Table:
    """As in SigLIP's training code."""
    return {
        "*.position_embedding.weight": normal(c.dim**-0.5), "*.mlp.fc?.bias": normal(1e-6), "*bias": zeros,
        "*norm*.weight": ones, "head.attention.out_proj.weight": lecun_normal,
        "embeddings.patch_embedding.weight": lecun_normal, "*": xavier_uniform,
    }  # fmt: skip


def _mamba(c: Any) -> Table:
    """Decay rates 1, 2, 3 ..., and step sizes from 0.001 to 0.1 (Gu and Dao, 2023)."""
    rates = _arange if c.rates else _log_arange
    table: Table = {"*.A_log": rates, "*.dt_proj.bias": _steps, "*.dt_bias": _steps}
    if hasattr(c, "rank"):
        table["*.dt_proj.weight"] = uniform(-(c.rank**-0.5), c.rank**-0.5)
    return table | {"*.conv1d.bias": zeros, "*.conv1d.weight": _by_inputs, "*.out_proj.weight": _by_inputs}


def _log_arange(key: Any, shape: Sequence[int]) -> Array:
    return np.log(-_arange(key, shape))


def _arange(key: Any, shape: Sequence[int]) -> Array:
    return np.broadcast_to(-np.arange(1, shape[-1] + 1, dtype=np.float32), tuple(shape))


def _steps(key: Any, shape: Sequence[int]) -> Array:
    """Inverse softplus of step sizes that are log-uniform."""
    steps = np.exp(uniform(math.log(1e-3), math.log(1e-1))(key, shape))
    return steps + np.log(-np.expm1(-steps))


def _by_inputs(key: Any, shape: Sequence[int]) -> Array:
    """Uniform, scaled by fan-in, as torch initialises its layers."""
    bound = math.prod(shape[1:]) ** -0.5
    return uniform(-bound, bound)(key, shape)


def _qwen3_next(c: Any) -> Table:
    """Norms multiply by 1 + weight, except in the delta nets."""
    drawn = uniform(0.01, 16.0)
    rates = lambda key, shape: -drawn(key, shape) if c.delta.rates else np.log(drawn(key, shape))
    norms = zeros if c.unit_offset else ones
    return {"*.A_log": rates, "*.dt_bias": ones, "*.linear_attn.norm.weight": ones, "*norm.weight": norms}


PUBLISHED: dict[str, Callable[[Any], Table]] = {
    "gemma": _gemma, "gemma2": _gemma, "gemma3": _gemma, "embeddinggemma": _gemma,
    "gpt2": _gpt2, "modernbert": _modernbert, "dinov2": _dinov2,
    "dinov2-registers": _dinov2, "siglip": _siglip, "mamba": _mamba, "mamba2": _mamba, "qwen3next": _qwen3_next,
    "qwen3.5": _qwen3_next, "qwen3.5moe": _qwen3_next,
}  # fmt: skip


def initialisers(family: str, config: Any) -> Table:
    """The initialisers of a family by name pattern, first match first."""
    own = PUBLISHED[family](config) if family in PUBLISHED else {}
    rest = usual(config.initializer_range) | {"*": vectors_of_norms(config.initializer_range)}
    return own | {pattern: rule for pattern, rule in rest.items() if pattern not in own}


def flow_of(config: Mapping[str, Any] | str | Path, context: int | None = None) -> ModelFlow:
    """Build the flow of a Hugging Face configuration (a mapping or a file); `context` sets a decoder's positions."""
    from rlx.models.load import read_config, read_json

    settings = config if isinstance(config, Mapping) else read_json(Path(config))
    family, c = read_config(settings, "config" if isinstance(config, Mapping) else str(config))
    return family.flow(c, c.context if context is None else context) if family.kind == "decoder" else family.flow(c)
