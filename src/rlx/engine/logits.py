"""Logits, and captured values, after each token of a sequence: the outputs of a graph, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.arrays import Array
from rlx.engine import call_sizes
from rlx.engine.decoder import Decoder
from rlx.engine.kv_cache import aligned
from rlx.free_memory import require
from rlx.runtime.compiled import CompiledGraph
from rlx.types import TensorType, sym

if TYPE_CHECKING:
    from rlx.engine.language_model import LanguageModel

LOGIT_BYTES = 64 << 20  # of temporary logits per chunk, besides the result


def values_per_token(
    model: LanguageModel, compiled: CompiledGraph, ids: Sequence[int], more: Mapping[str, Array]
) -> list[Array]:
    """The outputs of a graph for one sequence, `[seq, ...]` each; `more` are additional inputs of that shape."""
    decoder = Decoder(compiled, model.caches.new(1))
    chunk = aligned(min(LOGIT_BYTES // (4 * model.facts.vocab), call_sizes.CHUNK), model.caches.spec)
    results: list[Array] = []
    for at in range(0, len(ids), chunk):
        piece = ids[at : at + chunk]
        inputs = {name: array[at : at + len(piece)] for name, array in more.items()}
        inputs = {name: a[None] if _has_rows(compiled.input_types[name]) else a for name, a in inputs.items()}
        every = np.arange(len(piece), dtype=np.int32)
        parts = decoder.run([piece], [at], every, more=inputs, lengths=[len(ids)])
        # Values of stages are [batch, seq, ...]; those after the last-token gather are [seq, ...].
        types = compiled.signature.outputs
        if decoder.samples:
            parts, types = parts[: -decoder.sampled_outputs], types[: -decoder.sampled_outputs]
        parts = [np.asarray(a)[0] if _has_rows(t) else np.asarray(a) for a, t in zip(parts, types, strict=True)]
        if not results:
            size = sum(a[:1].nbytes for a in parts) * len(ids)
            require(f"the values of {len(ids)} tokens", size, hint="fewer tokens, or fewer stages")
            results = [np.empty((len(ids), *a.shape[1:]), a.dtype) for a in parts]
        for array, part in zip(results, parts, strict=True):
            array[at : at + len(piece)] = part
    return results


def _has_rows(type_: TensorType) -> bool:
    """Whether the type is batched: [batch, seq, ...]."""
    return type_.shape[0] == sym.BATCH
