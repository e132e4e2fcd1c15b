"""Sampling in NumPy, the reference for the op `sample_tokens`: penalties, filters and draws as in Hugging Face.

Token weights are integers, so their sums are exact in any order, and the exponential is a polynomial of f32
multiplications and additions. Kernels with the same arithmetic thus pick the same tokens on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from rlx.arrays import Array

COLDEST = 1e-6  # lowest temperature: only ties of the highest logit have weight
WEIGHT_BITS = 42  # heaviest token: sums of 2^21 fit in i64, and weights that round to 0 are at most 2^-25
MAX_VOCAB = 2**21
MASK_BITS = 32  # tokens of a word of a bitmask
NO_TOKEN = -1  # the pick of a row whose highest logit is not finite; in lists of tokens, padding
LOWEST = -48.0  # powers of two below it have no weight
LOG2_E = 1.4426950408889634
# 2^x for |x| <= 1/2, within 2^-28.9: coefficients of x^6 down to x^0
EXP2 = (0.000153533605, 0.0013398875, 0.00961843692, 0.0555033237, 0.240226477, 0.693147182, 1.0)
ROUNDER = 1.5 * 2**23  # adding and subtracting it rounds an f32 to an integer, within one ulp


def penalise(
    logits: Array, tokens: Array, counts: Array, *, repetition: float, frequency: float, presence: float
) -> None:
    """Apply penalties in place to distinct `tokens`; `counts` says how often each was generated, 0 for prompt tokens.

    The repetition penalty makes a token less likely whatever the sign of its logit, as in arXiv 1909.05858.
    """
    scores, penalty = logits[tokens], np.float32(repetition)
    scores = np.where(scores < 0, scores * penalty, scores / penalty)
    less = counts.astype(np.float32) * np.float32(frequency) + np.float32(presence)
    logits[tokens] = np.where(counts > 0, scores - less, scores)


def candidates(
    logits: Array, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Array | None, Array]:
    """The tokens that may be sampled (None: all) and their weights, see `token_weights`.

    The highest logit must be finite.
    """
    highest = logits.max()
    tokens: Array | None = None
    if 0 < top_k < len(logits):
        tokens = highest_places(logits, top_k)  # ties of the last one stay, as in Hugging Face
        logits = logits[tokens]
    weights = token_weights(logits, highest, temperature)
    if top_p < 1:
        nucleus = _nucleus(weights, top_p)
        tokens, weights = nucleus if tokens is None else tokens[nucleus], weights[nucleus]
    if min_p:
        nucleus = np.flatnonzero(weights >= np.float32(min_p) * np.float32(2**WEIGHT_BITS))
        tokens, weights = nucleus if tokens is None else tokens[nucleus], weights[nucleus]
    return tokens, weights


def token_weights(logits: Array, highest: Any, temperature: float) -> Array:
    """2^42 · exp((logit - highest) / temperature), rounded to integers, in f32.

    Each operation rounds once, as IEEE 754 says; none may be contracted to a fused multiply-add.
    """
    scale = np.float32(LOG2_E) / np.float32(max(temperature, COLDEST))
    with np.errstate(over="ignore"):  # to -inf: never sampled
        power = np.maximum((logits - highest) * scale, np.float32(LOWEST))
    exponent = np.rint(power)
    fraction = power - exponent
    mantissa = np.full_like(fraction, EXP2[0])
    for coefficient in EXP2[1:]:
        mantissa = mantissa * fraction + np.float32(coefficient)
    weights: Array = np.ldexp(mantissa, exponent.astype(np.int32) + WEIGHT_BITS) + np.float32(ROUNDER)
    return weights - np.float32(ROUNDER)


def highest_places(values: Array, count: int) -> Array:
    """Indices of the `count` highest values, including ties of the last one, in ascending order. Without a full sort.

    Each of the `count` blocks with the highest maxima has a value that reaches the smallest of these maxima, so only
    values that reach it need to be compared.
    """
    if count >= len(values):
        return np.arange(len(values))
    near = np.arange(len(values))
    width = min(len(values) // (4 * count), 64)
    if width > 1:
        tops = np.maximum.reduceat(values, near[::width])
        near = np.flatnonzero(values >= _nth_highest(tops, count))
    close = values[near]
    places: Array = near[close >= _nth_highest(close, count)]
    return places


def _nth_highest(values: Array, n: int) -> Any:
    return np.partition(values, len(values) - n)[len(values) - n]


def _nucleus(weights: Array, top_p: float) -> Array:
    """Indices of the smallest set of tokens that weighs top_p of the total; among ties, lower ids first."""
    wanted = share_of(_total(weights), top_p)
    for count in (256, 4096, len(weights)):  # usually few are enough
        heavy = np.sort(weights[highest_places(weights, count)])[::-1]
        sums = np.cumsum(heavy, dtype=np.int64)
        if sums[-1] >= wanted:
            break
    needed = int(np.searchsorted(sums, wanted))
    threshold = heavy[needed]
    chosen = weights >= threshold
    extra = int(np.count_nonzero(chosen)) - needed - 1
    if extra:
        chosen[np.flatnonzero(weights == threshold)[-extra:]] = False
    return np.flatnonzero(chosen)


def share_of(total: int, part: float) -> int:
    """The smallest integer that is `part` of a total, at least 1."""
    return min(max(math.ceil(part * float(total)), 1), total)


def place(weights: Array, part: float) -> int:
    """Index at which the cumulative weight passes this part of the total."""
    sums = np.cumsum(weights, dtype=np.int64)
    total = int(sums[-1])
    passed = min(math.floor(part * float(total)), total - 1)
    return int(np.searchsorted(sums, passed, side="right"))


def token_bits(tokens: Iterable[int], vocab: int) -> Array:
    """The bitmask that allows these tokens: i32 words, token t is bit t mod 32 of word t div 32."""
    keep = np.zeros(mask_words(vocab) * MASK_BITS, bool)
    keep[list(tokens)] = True
    return np.packbits(keep, bitorder="little").view(np.int32)


def mask_words(vocab: int) -> int:
    """Words of a bitmask of a vocabulary."""
    return -(-vocab // MASK_BITS)


def _total(weights: Array) -> int:
    return int(weights.sum(dtype=np.int64))


def log_probabilities(logits: Array) -> Array:
    """log softmax in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - math.log(np.exp(wide).sum())
