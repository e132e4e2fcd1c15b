"""Sampling on the host: what a sequence's sampler picks by the reference of `sample_tokens`."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.engine.sampler import OPERANDS, BatchSampling, Sampler, no_token, operand_input
from rlx.ir import registry
from rlx.sampling import penalise

Array = np.ndarray[Any, Any]


def pick(sampler: Sampler, logits: Array) -> int:
    """The next token; logits are `[vocab]`."""
    inputs = BatchSampling().draw([sampler])
    operands: list[Any] = [inputs[operand_input(name)] for name in OPERANDS]
    reference: Any = registry.get("sample_tokens").reference
    token = int(reference(logits[None], *operands)[0][0])
    if token < 0:
        raise no_token(logits)
    sampler.accept(token)
    return token


def adjusted(sampler: Sampler, logits: Array) -> Array:
    """Logits with the bias and the penalties of a sequence."""
    s, result = sampler.settings, logits.copy()
    for token, bias in s.logit_bias.items():
        result[token] += np.float32(bias)
    generated = sampler.history[sampler.prompt_length :]
    tokens = np.array(sorted(set(sampler.history)), np.int64)
    counts = np.array([generated.count(t) for t in tokens])
    if len(tokens):
        penalise(
            result, tokens, counts, repetition=s.repetition_penalty, frequency=s.frequency_penalty,
            presence=s.presence_penalty,
        )  # fmt: skip
    return result
