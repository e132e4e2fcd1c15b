"""Sampling: the next token per row of logits.

Bias and penalties come first, then temperature, top-k, top-p and min-p, in the order of Hugging Face.
`rlx/sampling.py` defines it on NumPy arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32, I32
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.independence import never
from rlx.ir.registry import f32, i32, op, sample
from rlx.sampling import MAX_VOCAB, NO_TOKEN, candidates, log_probabilities, penalise, place
from rlx.types import Size, TensorType, require_equal


def _sample_tokens(
    logits: Any, uniform: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, allowed: Any, history: Any,
    prompt_length: Any, repetition_penalty: Any, frequency_penalty: Any, presence_penalty: Any, bias_tokens: Any,
    bias: Any, scored: Any,
) -> tuple[Any, Any]:  # fmt: skip
    tokens, scores = np.full(len(logits), NO_TOKEN, np.int32), np.full(len(logits), np.nan, np.float32)
    for row, raw in enumerate(logits.astype(np.float32)):
        adjusted = raw.copy()
        if allowed is not None:
            adjusted[~_bits(allowed[row], len(raw))] = -np.inf
        if bias is not None:
            valid = (bias_tokens[row] >= 0) & (bias_tokens[row] < len(raw))
            np.add.at(adjusted, bias_tokens[row][valid].astype(np.int64), bias[row][valid].astype(np.float32))
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
            choices, weights = candidates(
                adjusted, temperature=float(temperature[row]), top_k=int(top_k[row]), top_p=float(top_p[row]),
                min_p=float(min_p[row]),
            )  # fmt: skip
            at = place(weights, float(uniform[row]))
            tokens[row] = at if choices is None else choices[at]
        if scored is not None and not scored[row]:
            continue
        with np.errstate(invalid="ignore"):
            scores[row] = log_probabilities(raw)[tokens[row]]
    return tokens, scores


def _bits(words: Any, count: int) -> Array:
    """Bit i of the words, for i below `count`, lowest bit of each word first; bits beyond the last word are set."""
    size = 8 * words.dtype.itemsize
    bits = np.ones(count, bool)
    at = np.arange(min(count, len(words) * size))
    bits[at] = (words[at // size].astype(np.int64) >> at % size & 1).astype(bool)
    return bits


def _occurrences(history: Any, prompt_length: int, vocab: int) -> tuple[Array, Array]:
    """The distinct tokens of a history, and how often each occurs after the prompt."""
    picked = np.arange(len(history)) >= prompt_length
    valid = (history >= 0) & (history < vocab)
    distinct, places = np.unique(history[valid].astype(np.int64), return_inverse=True)
    return distinct, np.bincount(places, picked[valid], len(distinct))


_ROWS = (f32(3, 300), f32(3, low=0, high=1))
_PENALTIES = (f32(3, low=0.5, high=2), f32(3, low=-1, high=1), f32(3, low=-1, high=1))


@op(
    "sample_tokens", independent=never, reference=_sample_tokens,
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
        sample(
            *_ROWS, f32(3, low=0.5, high=2), i32(3, low=0, high=1), f32(3, low=0.5, high=1), f32(3, low=0, high=0),
            None, None, None, None, None, None, i32(3, 40, low=0, high=320), f32(3, 40, low=-5, high=5),
            i32(3, low=0, high=2),
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
    bias_tokens: TensorType | None = None,
    bias: TensorType | None = None,
    scored: TensorType | None = None,
) -> tuple[TensorType, TensorType]:
    """The next token per row of logits `[rows, vocab]`, and its log-probability under the unmodified logits.

    Settings are arrays `[rows]`. Temperature 0 picks the highest logit, the lowest id among ties; otherwise the token
    is where the cumulative sum of weights, in order of ids, passes `uniform` (in [0, 1)) of the total. Candidates are
    the `top_k` highest (0: all; ties of the last stay), of these the smallest set that weighs `top_p`, of these those
    that weigh at least `min_p` of the heaviest. Weights are integers, 2^42 for the highest logit, so their sums are
    exact and tokens are the same on every device; `uniform` and `top_p` are best f64.

    `allowed`: integer words of bits, token t is bit t mod 32 of i32 word t div 32; other tokens are never picked. If
    the number of words is a symbol, tokens beyond the last word are allowed too, so no words allow all. `bias` is added
    to the logits of `bias_tokens`, both `[rows, m]`. `history`: tokens `[rows, n]`, in any order, of which the first
    `prompt_length` of a row are the prompt's. The repetition penalty counts all of them, frequency and presence only
    those after the prompt. Ids outside the vocabulary are padding. A row whose highest logit is not finite, or that has
    no token left, gives token
    -1 and NaN. If the integer `scored` of a row is 0, its log-probability is NaN and costs nothing.
    """
    if logits.rank != 2 or logits.shape[1] == 0:
        raise ShapeError(f"sample_tokens: logits are [rows, vocab], found {logits}")
    rows, vocab = logits.shape
    if isinstance(vocab, int) and vocab > MAX_VOCAB:
        raise ShapeError(f"sample_tokens: {vocab} tokens, at most {MAX_VOCAB} have sums of weights that are exact")
    _check("logits", logits, logits.shape, integers=False)
    for name, setting in (
        ("uniform", uniform), ("temperature", temperature), ("top_p", top_p), ("min_p", min_p),
    ):  # fmt: skip
        _check(name, setting, (rows,), integers=False)
    _check("top_k", top_k, (rows,), integers=True)
    if allowed is not None:
        bits = 8 * allowed.dtype.size
        free = allowed.rank == 2 and not isinstance(allowed.shape[1], int)
        words = allowed.shape[1] if free else (vocab + (bits - 1)) // bits
        _check("allowed", allowed, (rows, words), integers=True)
    penalties = {
        "prompt_length": prompt_length, "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
    }  # fmt: skip
    for name, penalty in penalties.items():
        if (penalty is None) != (history is None):
            missing, other = (name, "history") if penalty is None else ("history", name)
            raise GraphError(f"sample_tokens: {other} is given, {missing} is not", hint="history comes with penalties")
        if penalty is not None:
            _check(name, penalty, (rows,), integers=name == "prompt_length")
    if scored is not None:
        _check("scored", scored, (rows,), integers=True)
    if (bias is None) != (bias_tokens is None):
        missing, present = ("bias", "bias_tokens") if bias is None else ("bias_tokens", "bias")
        raise GraphError(f"sample_tokens: {present} is given, {missing} is not", hint="a bias comes with its tokens")
    for name, tokens in (("history", history), ("bias_tokens", bias_tokens)):
        if tokens is not None:
            if tokens.rank != 2:
                raise ShapeError(f"sample_tokens: {name} is [rows, tokens], found {tokens}")
            _check(name, tokens, (rows, tokens.shape[1]), integers=True)
    if bias is not None and bias_tokens is not None:
        _check("bias", bias, bias_tokens.shape, integers=False)
    return TensorType((rows,), I32), TensorType((rows,), F32)


def _check(name: str, operand: TensorType, shape: tuple[Size, ...], *, integers: bool) -> None:
    if not (operand.dtype.is_integer if integers else operand.dtype.is_float):
        raise DTypeError(f"sample_tokens: {name} takes {'integers' if integers else 'floats'}, found {operand}")
    message = f"sample_tokens: {name} {operand} should have shape [{', '.join(map(str, shape))}]"
    if operand.rank != len(shape):
        raise ShapeError(message)
    for have, want in zip(operand.shape, shape, strict=True):
        require_equal(have, want, message)
