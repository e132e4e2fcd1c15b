"""Sampling on the host: penalties, filters and draws on NumPy arrays, in the order of Hugging Face.

They say what sampling means: `engine/sampler.py` picks tokens with them, and the op `sample_tokens` is equal to them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.arrays import Array

COLDEST = 1e-6  # below it, quotients might overflow, and only equals of the highest are left anyway
BLOCK = 256  # weights whose sum is one step when a token is drawn


def penalise(
    logits: Array, tokens: Array, counts: Array, *, repetition: float, frequency: float, presence: float
) -> None:
    """Apply penalties in place to distinct `tokens`; `counts` says how often each was picked, 0 for the prompt's.

    Repetition makes a token less likely whatever its sign, as in arXiv 1909.05858.
    """
    scores, penalty = logits[tokens], np.float32(repetition)
    scores = np.where(scores < 0, scores * penalty, scores / penalty)
    less = counts.astype(np.float32) * np.float32(frequency) + np.float32(presence)
    logits[tokens] = np.where(counts > 0, scores - less, scores)


def candidates(
    logits: Array, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Array | None, Array]:
    """The tokens that may be picked (None: all of them) and how likely each is, up to a common factor.

    The highest logit is finite.
    """
    highest = logits.max()
    tokens: Array | None = None
    if 0 < top_k < len(logits):
        tokens = highest_places(logits, top_k)  # equals of the last one stay, as in Hugging Face
        logits = logits[tokens]
    weights = logits - highest
    with np.errstate(over="ignore"):  # to -inf: never picked
        weights /= np.float32(max(temperature, COLDEST))
    np.exp(weights, out=weights)
    if top_p < 1:
        kept = _nucleus(weights, top_p)
        tokens, weights = kept if tokens is None else tokens[kept], weights[kept]
    if min_p:
        kept = np.flatnonzero(weights >= np.float32(min_p))  # the likeliest weighs 1
        tokens, weights = kept if tokens is None else tokens[kept], weights[kept]
    return tokens, weights


def highest_places(values: Array, count: int) -> Array:
    """The places of the `count` highest values and of equals of the last of them, in order. Without a full sort.

    Each of the `count` blocks with the highest maxima has a value as high as the least of these maxima, so only values
    that reach it need a closer look.
    """
    if count >= len(values):
        return np.arange(len(values))
    near = np.arange(len(values))
    width = min(len(values) // (4 * count), 64)
    if width > 1:
        tops = np.maximum.reduceat(values, near[::width])
        near = np.flatnonzero(values >= _nth_highest(tops, count))
    close = values[near]
    found: Array = near[close >= _nth_highest(close, count)]
    return found


def _nth_highest(values: Array, n: int) -> Any:
    return np.partition(values, len(values) - n)[len(values) - n]


def _nucleus(weights: Array, top_p: float) -> Array:
    """The places of the fewest tokens that weigh top_p of all; of equals, those with lower ids."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    for count in (256, 4096, len(weights)):  # as a rule few are enough
        heavy = np.sort(weights[highest_places(weights, count)])[::-1]
        sums = np.cumsum(heavy, dtype=np.float64)
        if sums[-1] >= wanted:
            break
    needed = min(int(np.searchsorted(sums, wanted)), len(sums) - 1)
    least = heavy[needed]
    kept = weights >= least
    extra = int(np.count_nonzero(kept)) - needed - 1
    if extra:
        kept[np.flatnonzero(weights == least)[-extra:]] = False
    return np.flatnonzero(kept)


def place(weights: Array, part: float) -> int:
    """Where the running sum of the weights passes this part of the whole: sums of blocks first, then within one."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64).cumsum()
    left = part * sums[-1]
    block = _passes(sums, left)
    inner = weights[BLOCK * block : BLOCK * (block + 1)].cumsum(dtype=np.float64)
    return BLOCK * block + _passes(inner, left - (sums[block - 1] if block else 0.0))


def _passes(sums: Array, value: float) -> int:
    """The first place where a running sum is above a value; by rounding it may never be, then where it ends to grow."""
    at = int(np.searchsorted(sums, value, side="right"))
    return at if at < len(sums) else int(np.searchsorted(sums, sums[-1]))


def log_probabilities(logits: Array) -> Array:
    """log softmax in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - math.log(np.exp(wide).sum())


# -- the op -----------------------------------------------------------------------------------------------------------
