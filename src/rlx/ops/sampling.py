"""Sampling: from the logits of a row to its next token.

Penalties come first, then temperature, top-k, top-p and min-p, in the order of Hugging Face. The functions on NumPy
arrays say what sampling means; `engine/sampler.py` picks tokens with them on the host.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.dtypes import F32, I32
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.registry import f32, i32, op, sample
from rlx.types import Size, TensorType, require_equal

Array = np.ndarray[Any, Any]
COLDEST = 1e-6  # below it, quotients might overflow, and only equals of the highest are left anyway
BLOCK = 256  # weights whose sum is one step when a token is drawn
NO_TOKEN = -1  # the pick of a row whose highest logit is not finite


# -- on the host ------------------------------------------------------------------------------------------------------
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
def _sample_tokens(
    logits: Any, uniform: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, allowed: Any, history: Any,
    prompt_length: Any, repetition_penalty: Any, frequency_penalty: Any, presence_penalty: Any,
) -> tuple[Any, Any]:  # fmt: skip
    tokens, scores = np.full(len(logits), NO_TOKEN, np.int32), np.full(len(logits), np.nan, np.float32)
    for row, raw in enumerate(logits.astype(np.float32)):
        adjusted = raw.copy()
        if allowed is not None:
            adjusted[~_bits(allowed[row], len(raw))] = -np.inf
        if history is not None:
            distinct, counts = _occurrences(history[row], int(prompt_length[row]), len(raw))
            penalise(
                adjusted, distinct, counts, repetition=repetition_penalty[row], frequency=frequency_penalty[row],
                presence=presence_penalty[row],
            )  # fmt: skip
        if not np.isfinite(adjusted.max(initial=-np.inf)):
            continue
        tokens[row] = adjusted.argmax()
        if temperature[row] > 0:
            found, weights = candidates(
                adjusted, temperature=float(temperature[row]), top_k=int(top_k[row]), top_p=float(top_p[row]),
                min_p=float(min_p[row]),
            )  # fmt: skip
            at = place(weights, float(uniform[row]))
            tokens[row] = at if found is None else found[at]
        with np.errstate(invalid="ignore"):
            scores[row] = log_probabilities(raw)[tokens[row]]
    return tokens, scores


def _bits(words: Any, count: int) -> Array:
    """Bit i of the words, for i below `count`, the lowest bit of each word first."""
    size = 8 * words.dtype.itemsize
    at = np.arange(count)
    found: Array = (words[at // size].astype(np.int64) >> at % size & 1).astype(bool)
    return found


def _occurrences(history: Any, prompt_length: int, vocab: int) -> tuple[Array, Array]:
    """The distinct tokens of a history, and how often each occurs behind the prompt."""
    picked = np.arange(len(history)) >= prompt_length
    valid = (history >= 0) & (history < vocab)
    distinct, places = np.unique(history[valid].astype(np.int64), return_inverse=True)
    return distinct, np.bincount(places, picked[valid], len(distinct))


_ROWS = (f32(3, 300), f32(3, low=0, high=1))
_PENALTIES = (f32(3, low=0.5, high=2), f32(3, low=-1, high=1), f32(3, low=-1, high=1))


@op(
    "sample_tokens", reference=_sample_tokens,
    samples=[
        sample(
            f32(3, 7), f32(3, low=0, high=1), f32(3, low=0.5, high=2), i32(3, low=0, high=9), f32(3, low=0.3, high=1),
            f32(3, low=0, high=0.3), i32(3, 1, low=65, high=127), i32(3, 5, low=0, high=9), i32(3, low=0, high=5),
            *_PENALTIES,
        ),
        sample(*_ROWS, f32(3, low=0.2, high=2), i32(3, low=1, high=90), f32(3, low=0.3, high=1), f32(3, low=0, high=0)),
        sample(*_ROWS, f32(3, low=0, high=0), i32(3, low=0, high=5), f32(3, low=1, high=1), f32(3, low=0, high=0)),
        sample(*_ROWS, f32(3, low=1, high=9), i32(3, low=0, high=1), f32(3, low=1, high=1), f32(3, low=0, high=0.2)),
        sample(
            *_ROWS, f32(3, low=0.5, high=2), i32(3, low=0, high=1), f32(3, low=0.5, high=1), f32(3, low=0, high=0),
            None, i32(3, 9, low=0, high=99), i32(3, low=0, high=9), *_PENALTIES,
        ),
    ],
)  # fmt: skip
def sample_tokens(
    logits: TensorType,
    uniform: TensorType,
    temperature: TensorType,
    top_k: TensorType,
    top_p: TensorType,
    min_p: TensorType,
    allowed: TensorType | None = None,
    history: TensorType | None = None,
    prompt_length: TensorType | None = None,
    repetition_penalty: TensorType | None = None,
    frequency_penalty: TensorType | None = None,
    presence_penalty: TensorType | None = None,
) -> tuple[TensorType, TensorType]:
    """The next token of each row of logits `[rows, vocab]`, and the log-probability that the logits alone give it.

    Settings are arrays `[rows]`. Temperature 0 picks the highest logit, the lowest id among equals; else the token is
    where the running sum of weights, in order of ids, passes `uniform` (from 0, below 1) of the whole. Kept are the
    `top_k` highest (0: all; equals of the last stay), of these the fewest that weigh `top_p`, of these those that
    weigh `min_p` of the heaviest. Numbers are computed in f32 and added up in f64, `uniform` and `top_p` are best f64.

    `allowed`: integer words of bits, token t is bit t mod 32 of i32 word t div 32; others are never picked. `history`:
    tokens `[rows, n]`, any order, the first `prompt_length` of a row the prompt's; ids outside the vocabulary are
    padding. The repetition penalty counts them all, frequency and presence those after the prompt. A row whose highest
    logit is not finite, or that has no token left, gives token -1 and NaN.
    """
    if logits.rank != 2 or logits.shape[1] == 0:
        raise ShapeError(f"sample_tokens: logits are [rows, vocab], found {logits}")
    rows, vocab = logits.shape
    _check("logits", logits, logits.shape, integers=False)
    for name, setting in (
        ("uniform", uniform), ("temperature", temperature), ("top_p", top_p), ("min_p", min_p),
    ):  # fmt: skip
        _check(name, setting, (rows,), integers=False)
    _check("top_k", top_k, (rows,), integers=True)
    if allowed is not None:
        bits = 8 * allowed.dtype.size
        _check("allowed", allowed, (rows, (vocab + (bits - 1)) // bits), integers=True)
    penalties = {
        "prompt_length": prompt_length, "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
    }  # fmt: skip
    for name, penalty in penalties.items():
        if (penalty is None) != (history is None):
            missing, there = (name, "history") if penalty is None else ("history", name)
            raise GraphError(f"sample_tokens: {there} is given, {missing} is not", hint="history comes with penalties")
        if penalty is not None:
            _check(name, penalty, (rows,), integers=name == "prompt_length")
    if history is not None:
        if history.rank != 2:
            raise ShapeError(f"sample_tokens: history is [rows, tokens], found {history}")
        _check("history", history, (rows, history.shape[1]), integers=True)
    return TensorType((rows,), I32), TensorType((rows,), F32)


def _check(name: str, found: TensorType, shape: tuple[Size, ...], *, integers: bool) -> None:
    if not (found.dtype.is_integer if integers else found.dtype.is_float):
        raise DTypeError(f"sample_tokens: {name} takes {'integers' if integers else 'floats'}, found {found}")
    message = f"sample_tokens: {name} {found} should have shape [{', '.join(map(str, shape))}]"
    if found.rank != len(shape):
        raise ShapeError(message)
    for have, want in zip(found.shape, shape, strict=True):
        require_equal(have, want, message)
