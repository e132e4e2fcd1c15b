"""Sampling in NumPy, the reference of the op `sample_tokens`: penalties, filters and draws as in Hugging Face.

Weights of tokens are integers, so their sums are exact in any order, and the exponential is a polynomial of f32
multiplications and additions. Kernels that do the same arithmetic therefore pick the same tokens on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from rlx.arrays import Array

COLDEST = 1e-6  # the lowest temperature: only equals of the highest logit have a weight there
WEIGHT_BITS = 42  # the heaviest token weighs 2^42: sums of 2^21 fit into i64, and what rounds to 0 is at most 2^-25
MAX_VOCAB = 2**21
MASK_BITS = 32  # tokens of a word of a bitmask
NO_TOKEN = -1  # the pick of a row whose highest logit is not finite; in lists of tokens, padding
LOWEST = -48.0  # powers of two below it weigh nothing
LOG2_E = 1.4426950408889634
# 2^x for |x| <= 1/2, within 2^-28.9: coefficients of x^6 down to x^0
EXP2 = (0.000153533605, 0.0013398875, 0.00961843692, 0.0555033237, 0.240226477, 0.693147182, 1.0)
ROUNDER = 1.5 * 2**23  # adding and subtracting it makes an f32 an integer, within one unit in its last place


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
    """The tokens that may be picked (None: all of them) and their weights, see `token_weights`.

    The highest logit is finite.
    """
    highest = logits.max()
    tokens: Array | None = None
    if 0 < top_k < len(logits):
        tokens = highest_places(logits, top_k)  # equals of the last one stay, as in Hugging Face
        logits = logits[tokens]
    weights = token_weights(logits, highest, temperature)
    if top_p < 1:
        kept = _nucleus(weights, top_p)
        tokens, weights = kept if tokens is None else tokens[kept], weights[kept]
    if min_p:
        kept = np.flatnonzero(weights >= np.float32(min_p) * np.float32(2**WEIGHT_BITS))
        tokens, weights = kept if tokens is None else tokens[kept], weights[kept]
    return tokens, weights


def token_weights(logits: Array, highest: Any, temperature: float) -> Array:
    """2^42 · exp((logit - highest) / temperature), rounded to integers, in f32.

    Each operation rounds once, as IEEE 754 says; none may be contracted to a fused multiply-add.
    """
    scale = np.float32(LOG2_E) / np.float32(max(temperature, COLDEST))
    with np.errstate(over="ignore"):  # to -inf: never picked
        power = np.maximum((logits - highest) * scale, np.float32(LOWEST))
    exponent = np.rint(power)
    fraction = power - exponent
    mantissa = np.full_like(fraction, EXP2[0])
    for coefficient in EXP2[1:]:
        mantissa = mantissa * fraction + np.float32(coefficient)
    weights: Array = np.ldexp(mantissa, exponent.astype(np.int32) + WEIGHT_BITS) + np.float32(ROUNDER)
    return weights - np.float32(ROUNDER)


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
    wanted = share_of(_total(weights), top_p)
    for count in (256, 4096, len(weights)):  # as a rule few are enough
        heavy = np.sort(weights[highest_places(weights, count)])[::-1]
        sums = np.cumsum(heavy, dtype=np.int64)
        if sums[-1] >= wanted:
            break
    needed = int(np.searchsorted(sums, wanted))
    least = heavy[needed]
    kept = weights >= least
    extra = int(np.count_nonzero(kept)) - needed - 1
    if extra:
        kept[np.flatnonzero(weights == least)[-extra:]] = False
    return np.flatnonzero(kept)


def share_of(total: int, part: float) -> int:
    """The least integer that is `part` of a total, at least 1."""
    return min(max(math.ceil(part * float(total)), 1), total)


def place(weights: Array, part: float) -> int:
    """Where the running sum of the weights passes this part of the total."""
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
