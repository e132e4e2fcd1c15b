"""Sampling settings and their checks, and the operands of the op `sample_tokens` for a batch.

Temperature 0 is argmax, with the lowest id among equals. A picked token depends only on the logits, the tokens before
it and the seed.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from numbers import Real
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import dtype
from rlx.errors import KernelError, RequestError, shortened
from rlx.fast_dataclass import dataclass
from rlx.sampling import NO_TOKEN, highest_places, mask_words, token_bits

ID_TYPES = (set, frozenset, list, tuple, range)  # of token ids; arrays are bitmasks
MAX_BIAS = 1e30  # limit of bias and penalties: their sum does not overflow float32

# setting -> minimum, maximum, and the range in words. No value in range overflows float32.
RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 1e4, "a number from 0 to 10000"),
    "top_k": (0, 2**53, "a whole number from 0, where 0 is no limit"),
    "top_p": (math.ulp(0.0), 1, "a number above 0, up to 1"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "repetition_penalty": (1e-6, 1e6, "a number from 1e-6 to 1e6, where 1 is none"),
    "frequency_penalty": (-MAX_BIAS, MAX_BIAS, f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"),
    "presence_penalty": (-MAX_BIAS, MAX_BIAS, f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"),
}
# Token ids or a bitmask of tokens, or what returns them (None: all tokens) for the tokens that were picked so far.
Tokens = Collection[int] | Array
Allowed = Tokens | Callable[[Sequence[int]], Tokens | None]

# From the tokens that were picked so far, and logits, to other logits.
LogitsProcessor = Callable[[Sequence[int], Array], Array]


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked. Defaults are greedy.

    The repetition penalty counts prompt and answer, as in Hugging Face; the frequency and presence penalties count
    what was picked, as in the OpenAI API. `logit_bias` is added first: -inf bans a token. Without a temperature,
    `top_k`, `top_p` and `min_p` are refused: the likeliest token is picked whatever they say.

    `allowed` restricts the next token, as a grammar does: a set or list of token ids, or 32-bit words in which token t
    is bit t mod 32 of word t div 32 (`rlx.sampling.token_bits` makes them); or a function that gets the tokens picked
    so far before each step and returns one of these, or None where all tokens are allowed.

    `logits_processor` is a function of the tokens picked so far and the logits `[vocab]`, a copy in f32, which returns
    other logits. Bias, penalties, `allowed` and the filters come after it, in NumPy: each step then costs a copy of the
    logits and about a millisecond per 100,000 tokens of vocabulary.
    """

    temperature: float | None = None  # None: 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Allowed | None = field(default=None, compare=False)
    logits_processor: LogitsProcessor | None = field(default=None, compare=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high, wanted) in RANGES.items():
            value = getattr(self, name)
            if value is None and name == "temperature":
                continue
            number = _number(value)
            if not low <= number <= high or (name == "top_k" and number % 1):
                raise RequestError(f"sampling: {name} is {short_repr(value)}, expected {wanted}")
            object.__setattr__(self, name, int(number) if name == "top_k" else number)
        if self.temperature is None:
            for name, idle in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
                if (value := getattr(self, name)) != idle:
                    raise RequestError(
                        f"sampling: {name} is {value}, which needs a temperature above 0", hint="temperature=1.0"
                    )
        if self.seed is not None and (not _is_index(self.seed) or not 0 <= self.seed < 2**128):
            raise RequestError(f"sampling: seed is {short_repr(self.seed)}, expected an integer from 0, below 2**128")
        if self.allowed is not None and not callable(self.allowed):
            ids = isinstance(self.allowed, ID_TYPES)
            object.__setattr__(self, "allowed", _checked_ids(self.allowed) if ids else _as_words(self.allowed))
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise RequestError(
                f"sampling: logits_processor is {short_repr(self.logits_processor)}, expected a function"
            )
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"sampling: logit_bias is {short_repr(self.logit_bias)}, expected a mapping from token ids"
            )
        for token, bias in self.logit_bias.items():
            if not _is_index(token):
                raise RequestError(f"sampling: logit_bias has {short_repr(token)}, expected a token id")
            if not abs(_number(bias)) <= MAX_BIAS and _number(bias) != -math.inf:
                raise RequestError(
                    f"sampling: logit_bias of token {short_repr(token)} is {short_repr(bias)}, "
                    f"expected -inf or a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
                )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sampling:
        """From keywords; the error for another program's name of a setting says the name here."""
        for name in settings:
            if name not in cls.__dataclass_fields__:
                from rlx.engine.foreign_names import REQUEST_SETTINGS, setting_hint  # only errors need it

                known = (*cls.__dataclass_fields__, *REQUEST_SETTINGS)
                raise RequestError(f"sampling: no setting is called {name!r}", hint=setting_hint(name, known))
        return cls(**settings)


def short_repr(value: object) -> str:
    """The `repr` of a value, shortened for messages."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print ints of several thousand digits
        text = f"a huge {type(value).__name__}"
    return shortened(text, 80)


def _number(value: Any) -> float:
    """The value as a float; NaN if it is not a real number or too large."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _checked_ids(tokens: Any, vocab: int | None = None) -> frozenset[int]:
    for token in tokens:
        if not _is_index(token) or token < 0 or (vocab is not None and token >= vocab):
            limit = "" if vocab is None else f" below {vocab}"
            raise RequestError(f"sampling: allowed has {short_repr(token)}, expected token ids{limit}")
    return frozenset(tokens)


def _as_words(mask: Any, vocab: int | None = None) -> Array:
    """A bitmask of tokens, or token ids, as i32 words, checked."""
    if isinstance(mask, ID_TYPES) and vocab is not None:
        return token_bits(_checked_ids(mask, vocab), vocab)
    words = np.asarray(mask)
    if words.ndim != 1 or words.dtype not in (np.int32, np.uint32):
        raise RequestError(
            f"sampling: allowed is {words.dtype} {list(words.shape)}, expected 32-bit words [vocabulary / 32]",
            hint="a set of token ids, or rlx.sampling.token_bits(tokens, vocabulary)",
        )
    if vocab is not None and len(words) != mask_words(vocab):
        raise RequestError(
            f"sampling: allowed has {len(words)} words, the vocabulary of {vocab} tokens takes {mask_words(vocab)}"
        )
    return words.view(np.int32)


def _is_index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


class Sampler:
    """The sampling state of one sequence: settings, random numbers that depend only on the seed, and a history."""

    def __init__(
        self, settings: Sampling, prompt: Sequence[int] = (), vocab: int | None = None, scored: bool = False
    ) -> None:
        if vocab is None and settings.allowed is not None:
            raise RequestError("sampling: allowed needs the size of the vocabulary")
        self.settings = settings
        self.scored = scored  # whether log-probabilities are needed
        for token in settings.logit_bias:
            if vocab is not None and not 0 <= token < vocab:
                raise RequestError(
                    f"sampling: logit_bias has token {short_repr(token)}, the vocabulary has {vocab} tokens"
                )
        self.vocab = vocab or 0
        self._fixed_mask = None
        if settings.allowed is not None and not callable(settings.allowed):
            self._fixed_mask = _as_words(settings.allowed, vocab)
        self._picked: list[int] = []  # for functions of the tokens so far
        self._drawn: list[tuple[float, Array | None]] = []  # for the next tokens, in order
        self.seed = _fresh_seed() if settings.seed is None else int(settings.seed)
        self._random = np.random.Generator(np.random.Philox(self.seed)) if settings.temperature else None
        repeats = settings.repetition_penalty != 1
        self._keeps_history = bool(repeats or settings.frequency_penalty or settings.presence_penalty)
        self._keeps_picked = callable(settings.allowed) or settings.logits_processor is not None
        # whether operands of `sample_tokens` change from step to step
        self.changes = bool(settings.temperature or settings.allowed is not None or self._keeps_history)
        self.history = list(dict.fromkeys(prompt)) if repeats else []  # tokens that penalties apply to
        self.prompt_length = len(self.history)

    def uniform(self) -> float:
        """The random number of the next token; greedy ones need none."""
        return 0.0 if self._random is None else self._random.random()

    def pick_processed(self, logits: Array) -> int:
        """The next token by processed logits `[vocab]`, on the host: -1 if no logit is finite."""
        assert self.settings.logits_processor is not None
        processed = np.asarray(self.settings.logits_processor(list(self._picked), logits.copy()))
        if processed.shape != logits.shape:
            raise RequestError(
                f"sampling: logits_processor returned {list(processed.shape)}, expected {list(logits.shape)}"
            )
        return self._pick_on_host(processed.astype(np.float32))

    def _pick_on_host(self, logits: Array) -> int:
        """The reference of the op `sample_tokens`, with the random number that the step has drawn."""
        from rlx.ir import registry
        from rlx.ops import sampling  # noqa: F401  declares the op

        inputs = BatchSampling().draw([self])
        operands: list[Any] = [inputs[operand_input(name)] for name in OPERANDS]
        reference: Any = registry.get("sample_tokens").reference
        return int(reference(logits[None], *operands)[0][0])

    def allowed(self) -> Array | None:
        """The bitmask of the next token; None allows all."""
        if callable(self.settings.allowed):
            mask = self.settings.allowed(self._picked)
            return None if mask is None else _as_words(mask, self.vocab)
        return self._fixed_mask

    @property
    def looks_ahead(self) -> bool:
        """Whether a token can be sampled before the one before it is known to the host."""
        by_tokens = callable(self.settings.allowed) or self.settings.logits_processor is not None
        return not (by_tokens or self._keeps_history)

    def draw(self, ahead: int = 0) -> tuple[float, Array | None]:
        """The random number and the bitmask of the next token, or of a later one: the same until it is accepted."""
        while len(self._drawn) <= ahead:
            self._drawn.append((self.uniform(), self.allowed()))
        return self._drawn[ahead]

    def accept(self, token: int) -> None:
        """Add a picked token to the history."""
        del self._drawn[:1]
        if self._keeps_history:
            self.history.append(token)
        if self._keeps_picked:
            self._picked.append(token)


# Operands of `sample_tokens` after the logits, in its order: element type, and what the second axis counts.
OPERANDS: dict[str, tuple[str, str | None]] = {
    "uniform": ("f64", None), "temperature": ("f32", None), "top_k": ("i32", None), "top_p": ("f64", None),
    "min_p": ("f32", None), "allowed": ("i32", "allowed"), "history": ("i32", "history"),
    "prompt_length": ("i32", None), "repetition_penalty": ("f32", None), "frequency_penalty": ("f32", None),
    "presence_penalty": ("f32", None), "bias_tokens": ("i32", "bias"), "bias": ("f32", "bias"), "scored": ("i32", None),
}  # fmt: skip
SYMBOLS = tuple(dict.fromkeys(f"sampling_{width}" for _, width in OPERANDS.values() if width is not None))
GREEDY = Sampling()
ALL_BITS = -1  # a word of a bitmask that allows its tokens
HISTORY_STEP = 256  # a history grows by so many tokens at once: another width is another shape to bind


def operand_input(name: str) -> str:
    """The name of the decoder's input for an operand of its sampler."""
    return f"sampling.{name}"


class BatchSampling:
    """The operands of `sample_tokens` for a batch, in arrays that steps reuse."""

    def __init__(self) -> None:
        self._samplers: tuple[Sampler | None, ...] = ()
        self._changing: list[tuple[int, Sampler]] = []  # rows whose operands change from step to step
        self._arrays: dict[str, Array] = {}
        self._written: list[int] = []  # tokens per history already in its array

    def draw(self, samplers: Sequence[Sampler | None], ahead: int = 0) -> dict[str, Array]:
        """Inputs of the next call, with a random number per row; None is an unused row.

        `ahead` is the number of tokens per row that are picked but not known yet.
        """
        rows = tuple(samplers)
        longest = max([len(sampler.history) for _, sampler in self._changing], default=0)
        if rows != self._samplers or (longest and longest > self._history.shape[1]):
            self._allocate(rows)
        for row, sampler in self._changing:
            self._uniform[row], mask = sampler.draw(ahead)
            if sampler.settings.allowed is not None:
                self._allowed[row] = ALL_BITS if mask is None else mask
            tokens, written = sampler.history, self._written[row]
            if written < len(tokens):
                self._history[row, written : len(tokens)] = tokens[written:]
                self._written[row] = len(tokens)
        return self._arrays

    def _allocate(self, rows: tuple[Sampler | None, ...]) -> None:
        settings = [GREEDY if s is None else s.settings for s in rows]
        longest = max((len(s.history) for s in rows if s is not None), default=0)
        widths = {"history": -(-longest // HISTORY_STEP) * HISTORY_STEP}
        widths["bias"] = max(len(s.logit_bias) for s in settings)
        masked = [s.vocab for s in rows if s is not None and s.settings.allowed is not None]
        widths["allowed"] = mask_words(max(masked, default=0))
        arrays: dict[str, Array] = {}
        for name, (kind, width) in OPERANDS.items():
            shape = (len(rows),) if width is None else (len(rows), widths[width])
            arrays[name] = np.zeros(shape, dtype(kind).numpy)
        arrays["history"][:] = arrays["bias_tokens"][:] = NO_TOKEN
        arrays["allowed"][:] = ALL_BITS
        for row, (sampler, s) in enumerate(zip(rows, settings, strict=True)):
            for name in ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
                arrays[name][row] = getattr(s, name)
            arrays["temperature"][row] = s.temperature or 0.0
            arrays["top_k"][row] = min(s.top_k, 2**31 - 1)
            arrays["scored"][row] = sampler is not None and sampler.scored
            arrays["prompt_length"][row] = 0 if sampler is None else sampler.prompt_length
            arrays["bias_tokens"][row, : len(s.logit_bias)] = list(s.logit_bias)
            arrays["bias"][row, : len(s.logit_bias)] = list(s.logit_bias.values())
        self._samplers, self._written = rows, [0] * len(rows)
        self._changing = [(row, s) for row, s in enumerate(rows) if s is not None and s.changes]
        self._uniform, self._allowed, self._history = (arrays[name] for name in ("uniform", "allowed", "history"))
        self._arrays = {operand_input(name): array for name, array in arrays.items()}


def no_token(logits: Array) -> RequestError | KernelError:
    """The error for logits from which no token can be picked."""
    highest = float(logits.max())
    if highest < math.inf:
        return RequestError("sampling: no token is left to pick", hint="logit_bias or allowed bans them all")
    hint = "the file may be damaged (rlx verify), or what is kept of it for fast starts (rlx cache --verify)"
    return KernelError(f"sampling: the highest logit of the model is {highest}", hint=hint)


def most_likely(values: Array, count: int) -> list[int]:
    """The indices of the highest values, highest first; among equals, the lower index first."""
    if count == 0:
        return []
    places = highest_places(values, count)
    return [int(i) for i in places[np.argsort(-values[places], kind="stable")[:count]]]


def _fresh_seed() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1  # not numpy.random, which greedy sampling does not import
