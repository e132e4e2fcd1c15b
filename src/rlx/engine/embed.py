"""Embeddings: texts to vectors, pooled and normalised as the model's files say, in batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.formats.tokenizer import Tokenizer
from rlx.runtime.compiled import CompiledGraph

Array = np.ndarray[Any, Any]
TOKENS = 2048  # of one batch: enough to fill the matmuls, small enough for the caches


def embed_texts(compiled: CompiledGraph, tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> Array:
    """[texts, hidden] mean-pooled, L2-normalised vectors. Texts are sorted by length, so that padding is rare."""
    encoded = [row[:limit] for row in tokenizer.encode_batch(texts)]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    result: Array | None = None
    at = 0
    while at < len(order):
        longest, end = 0, at
        while end < len(order) and max(longest, len(encoded[order[end]])) * (end - at + 1) <= max(TOKENS, limit):
            longest = max(longest, len(encoded[order[end]]))
            end += 1
        rows = order[at : max(end, at + 1)]
        vectors = _embed_batch(compiled, [encoded[i] for i in rows])
        if result is None:
            result = np.empty((len(texts), vectors.shape[1]), np.float32)
        result[rows] = vectors
        at += len(rows)
    return np.zeros((0, 0), np.float32) if result is None else result


def _embed_batch(compiled: CompiledGraph, rows: Sequence[Sequence[int]]) -> Array:
    width = max(len(row) for row in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, : len(row)] = 1
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    inputs = {"tokens": tokens, "token_types": np.zeros_like(tokens), "positions": positions, "attention_mask": mask}
    (hidden,) = compiled.run(inputs)
    pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    norms = np.linalg.norm(pooled, axis=1, keepdims=True)
    vectors: Array = pooled / np.maximum(norms, 1e-12)
    return vectors
