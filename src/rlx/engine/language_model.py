"""Language models. `generate` continues a raw text, `chat` answers through the model's chat template."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from rlx.arrays import Array
from rlx.engine import generate as generation
from rlx.engine.generate import Cancel, Cancelled, Decoder, Logprob, generate_loop
from rlx.engine.generate import Sequence as TokenSequence
from rlx.engine.generate import Timings as Timings
from rlx.engine.generate import Usage as Usage
from rlx.engine.kv_cache import CacheStore
from rlx.engine.load_settings import as_int
from rlx.engine.model import NOTHING, Model
from rlx.engine.sampler import Sampler, Sampling, short_repr
from rlx.errors import CapabilityError, FormatError, RequestError, ResourceError, RlxError, shortened
from rlx.fork_safe_locks import cached_property
from rlx.formats.tokenizer import CHARS_PER_ID
from rlx.free_memory import require
from rlx.runtime.compiled import CompiledGraph
from rlx.types import TensorType, sym

if TYPE_CHECKING:
    from rlx.flow.flow import BuiltModel
    from rlx.formats.chat import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
MAX_CHARS = 256  # of messages per token of the context: templates drop some text, but not that much
SHORT = 64  # characters: a text that is not too long for any template
LOGIT_BYTES = 64 << 20  # of temporary logits per chunk, besides the result


@dataclass(frozen=True)
class Completion:
    """A generated text with its tokens, usage and timings. `str(completion)` is the text."""

    text: str
    tokens: list[int]  # including those of a stop string and the end-of-text token
    finish_reason: str  # "stop": the model or a stop string ended it; "length"; "closed": a stream was closed early
    usage: Usage
    timings: Timings
    seed: int  # reproduces the text
    fingerprint: str
    logprobs: list[Logprob] | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<completion {shortened(self.text, 60)!r}: {len(self.tokens)} tokens, {self.finish_reason}>"

    def _repr_html_(self) -> str:
        from rlx.notebook import box, note, prose  # few programs need it

        usage, times = self.usage, self.timings
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        counts = (
            f"{usage.prompt_tokens} prompt tokens{cached}, {usage.completion_tokens} generated, {self.finish_reason}"
        )
        speed = f"; {times.answer_per_second:.1f} tokens/s" if times.answer_per_second else ""
        return box("completion", prose(self.text), note(f"{counts}{speed}; seed {self.seed}"))


class TextStream(Iterator[str]):
    """Iterates over pieces of a text while it is generated. Use it in `with`, or close it, to stop early.

    Closing, from any thread, stops the computation within one decode step or prefill chunk. `completion` is available
    once the stream has ended or was closed.
    """

    def __init__(self, model: LanguageModel, sequence: TokenSequence) -> None:
        self._model = model
        self._sequence = sequence
        self._cancel = Cancel()
        self._pieces = _pieces(model, sequence, self._cancel)

    def __repr__(self) -> str:
        state = "ended" if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED else "running"
        return f"<text stream of {self._model!r}, {state}>"

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating and release the cache for other calls."""
        self._cancel.wanted = True
        with suppress(ValueError):  # the generator runs in another thread and ends by itself
            self._pieces.close()

    @property
    def completion(self) -> Completion:
        """The text so far, its tokens, usage and timings. Raises RequestError while the stream is running."""
        if inspect.getgeneratorstate(self._pieces) != inspect.GEN_CLOSED:
            raise RequestError("stream: it has not ended", hint="read it to its end or close it")
        return self._model._completion(self._sequence)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(model: LanguageModel, sequence: TokenSequence, cancel: Cancel) -> Generator[str, None, None]:
    """Not a method: that would keep the stream alive, so leaving a loop by `break` would not close it."""
    try:
        model._check_usable()  # again: the stream may start long after it was created
        with model._decoder([sequence], cancel) as decoder, suppress(Cancelled):
            for _, piece in generate_loop(decoder, [sequence], model.caches):
                if piece:
                    yield piece
    finally:
        sequence.close()


class LanguageModel(Model):
    """A decoder. Thread-safe: each call has its own KV cache, and later prompts with the same prefix reuse it."""

    caches: CacheStore

    def _build(self, capture: Sequence[str] | None = None) -> BuiltModel:
        """The main graph also samples; graphs with captures do not."""
        from rlx.engine.sampling_graph import with_sampler  # a warm start builds no graph

        built = super()._build(capture)
        return with_sampler(built, self.vocab_size) if capture is None else built

    # -- parts --
    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the model has none."""
        from rlx.formats.chat import ChatTemplate  # jinja2 is slow to import, and raw text does not need it

        source = self.tokenizer.chat_template
        if source is None:
            return None
        tokens = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        named = {k: self.tokenizer.token_bytes(v).decode() for k, v in tokens.items() if v is not None}
        return ChatTemplate(source, **named)

    @cached_property
    def vocab_size(self) -> int:
        """Size of the vocabulary. The model may have logits for more tokens, as padding."""
        logits = self.facts.vocab
        tokenizer = self.checkpoint.tokenizer
        return logits if tokenizer is None else min(logits, tokenizer.vocab_size)

    def chat_tokens(self, messages: str | Messages) -> list[int]:
        """Token ids of a message or conversation, rendered by the chat template."""
        if self.template is None:
            raise CapabilityError(f"chat: {self.name} has no chat template", hint="use generate(...)")
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        size = _characters(messages)
        if size > MAX_CHARS * self.context:
            raise self._too_long("chat", f"{size:,} characters have")
        try:
            if size > CHARS_PER_ID * self.context:
                prompt = self.template.render(messages)
                if len(self.tokenizer.clip_text(prompt, self.context, parse_special=True)) < len(prompt):
                    raise self._too_long("chat", f"the conversation of {size:,} characters has")
            return self.template.encode(self.tokenizer, messages)
        except FormatError as error:
            if size <= SHORT or not self._renders(_shorten(messages)):
                raise
            raise RequestError(
                f"chat: {size:,} characters are more than the model's chat template takes: {error}",
                hint="shorten the conversation",
            ) from error

    def _renders(self, messages: Messages) -> bool:
        """Whether the chat template renders a conversation without error."""
        try:
            assert self.template is not None
            self.template.render(messages)
        except RlxError:
            return False
        return True

    # -- verbs --
    @overload
    def generate(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = 256, stop: str | Sequence[str] = (),
        logprobs: int = 0, **sampling: Any,
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], *, max_tokens: int | None = 256,
        stop: str | Sequence[str] = (), logprobs: int = 0, **sampling: Any,
    ) -> list[Completion]: ...  # fmt: skip

    def generate(
        self, prompt: Any, *, max_tokens: int | None = 256, stop: str | Sequence[str] = (), logprobs: int = 0,
        **sampling: Any,
    ) -> Completion | list[Completion]:  # fmt: skip
        """Continue a text or token ids, without a chat template. A list of prompts returns a list of completions.

        `max_tokens` limits the length (None: as long as the context allows). If the context has less room than that,
        the text is cut there and a warning is logged. The text ends before the first `stop` string. `logprobs=n`
        returns the n likeliest tokens at each position. The other keywords are those of `Sampling`: temperature, top_k,
        top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, logit_bias, allowed, seed.
        """
        self._check_usable()
        many = _is_batch(prompt)
        settings = _Settings.of(max_tokens, stop, logprobs, sampling)
        places = [f"generate: prompt {i}" for i in range(len(prompt))] if many else ["generate"]
        tokens = [self.prompt_ids(p, where) for p, where in zip(prompt if many else [prompt], places, strict=True)]
        completions = self._complete([self._new_sequence(t, settings, w) for t, w in zip(tokens, places, strict=True)])
        return completions if many else completions[0]

    def chat(
        self, messages: str | Messages, *, max_tokens: int | None = 256, stop: str | Sequence[str] = (),
        logprobs: int = 0, **sampling: Any,
    ) -> Completion:  # fmt: skip
        """Answer a message or a conversation through the model's chat template; the keywords are those of `generate`.

        A conversation is a list of messages such as `{"role": "user", "content": "Hello"}`; append each answer with the
        role `assistant` to continue it. Earlier turns come from the prefix cache.
        """
        self._check_usable()
        settings = _Settings.of(max_tokens, stop, logprobs, sampling)
        return self._complete([self._new_sequence(self.chat_tokens(messages), settings, "chat", answer=True)])[0]

    def stream(
        self, prompt: str | Sequence[int] | Messages, *, chat: bool = False, max_tokens: int | None = 256,
        stop: str | Sequence[str] = (), logprobs: int = 0, **sampling: Any,
    ) -> TextStream:  # fmt: skip
        """Generate a text piece by piece: the continuation of a text or token ids, or the answer to messages.

        `chat=True` treats a text as a user's message, and token ids as a rendered conversation that is to be answered.
        The other keywords are those of `generate`.
        """
        self._check_usable()
        settings = _Settings.of(max_tokens, stop, logprobs, sampling)
        is_chat = _is_conversation(prompt) or (chat and isinstance(prompt, str))
        tokens = self.chat_tokens(prompt) if is_chat else self.prompt_ids(prompt, "stream")  # type: ignore[arg-type]
        return TextStream(self, self._new_sequence(tokens, settings, "stream", answer=chat or is_chat))

    def logits(self, prompt: str | Sequence[int]) -> Array:
        """Logits `[seq, vocab]` after each token of the prompt."""
        self._check_usable()
        compiled = self.compiled
        return self._values(compiled, self._check_fits(self.prompt_ids(prompt, "logits"), 0, "logits"))[0]

    def _values(self, compiled: CompiledGraph, ids: Sequence[int], more: Mapping[str, Array] = NOTHING) -> list[Array]:
        decoder = Decoder(compiled, self.caches.new(1))
        chunk = max(min(LOGIT_BYTES // (4 * self.facts.vocab), generation.CHUNK), 1)
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
                parts, types = parts[:-2], types[:-2]  # the next tokens and their log-probabilities
            parts = [np.asarray(a)[0] if _has_rows(t) else np.asarray(a) for a, t in zip(parts, types, strict=True)]
            if not results:
                size = sum(a[:1].nbytes for a in parts) * len(ids)
                require(f"the values of {len(ids)} tokens", size, hint="fewer tokens, or fewer stages")
                results = [np.empty((len(ids), *a.shape[1:]), a.dtype) for a in parts]
            for array, part in zip(results, parts, strict=True):
                array[at : at + len(piece)] = part
        return results

    # -- inside --
    def _check_fits(self, tokens: list[int], max_tokens: int | None, where: str) -> list[int]:
        if not tokens:
            raise RequestError(f"{where}: there are no tokens", hint="give a text or token ids")
        size, room = len(tokens), self.context - len(tokens)
        if room < 0 or (room == 0 and max_tokens != 0):
            raise RequestError(
                f"{where}: the prompt has {size} token{'s' * (size != 1)}, the context holds {self.context}"
                + (" and an answer needs room too" if room == 0 else ""),
                hint="shorten the prompt or load the model with a larger context=",
            )
        return tokens

    def _new_sequence(self, tokens: list[int], settings: _Settings, where: str, answer: bool = False) -> TokenSequence:
        self._check_fits(tokens, settings.max_tokens, where)
        tokenizer = self.checkpoint.tokenizer
        room = self.context - len(tokens)
        text, stop_ids = None, frozenset[int]()
        if tokenizer is not None:
            # An answer is a new text; a continuation keeps the space before its first word.
            continues = not answer and not tokenizer.special_ids.issuperset(tokens)
            text, stop_ids = tokenizer.stream(skip_special=True, continues=continues), frozenset(tokenizer.stop_ids)
        sampler = Sampler(settings.sampling, tokens, self.vocab_size, scored=settings.logprobs > 0)
        return TokenSequence(
            tokens, sampler, vocab=self.vocab_size, text=text,
            limit=room if settings.max_tokens is None else min(settings.max_tokens, room),
            asked=settings.max_tokens, stop=settings.stop, stop_ids=stop_ids, top=settings.logprobs,
        )  # fmt: skip

    @contextmanager
    def _decoder(self, sequences: Sequence[TokenSequence], cancel: Cancel | None = None) -> Iterator[Decoder]:
        """A decoder for some sequences; its KV cache goes to the prefix cache afterwards."""
        compiled = self.compiled
        if len(sequences) > 1:
            batch = self.caches.new(min(len(sequences), generation.ROWS))
            yield Decoder(compiled, batch, cancel)
            with suppress(ResourceError):  # the answers are complete without it
                self.caches.release_rows(batch)
            return
        cache = self.caches.acquire(sequences[0].prompt)
        try:
            yield Decoder(compiled, cache, cancel)
        finally:
            self.caches.release(cache)

    def _complete(self, sequences: list[TokenSequence]) -> list[Completion]:
        with self._decoder(sequences) as decoder:
            for _ in generate_loop(decoder, sequences, self.caches):
                pass
        return [self._completion(s) for s in sequences]

    def _completion(self, s: TokenSequence) -> Completion:
        return Completion(
            s.text, s.tokens, s.finish_reason or "closed", s.usage, s.timings, s.sampler.seed,
            self.fingerprint(s.sampler.seed), s.logprobs,
        )  # fmt: skip


@dataclass(frozen=True)
class _Settings:
    """The checked settings of a request."""

    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int
    sampling: Sampling

    @classmethod
    def of(cls, max_tokens: Any, stop: Any, logprobs: Any, sampling: Mapping[str, Any]) -> _Settings:
        stop = () if stop is None else stop
        strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (None,)
        if not all(isinstance(s, str) and s for s in strings):
            raise RequestError(f"stop: expected texts that are not empty, found {short_repr(stop)}")
        limit = None if max_tokens is None else _count("max_tokens", max_tokens)
        return cls(limit, strings, _count("logprobs", logprobs), Sampling.of(sampling))


def _has_rows(type_: TensorType) -> bool:
    """Whether the type is batched: [batch, seq, ...]."""
    return type_.shape[0] == sym.BATCH


def _count(name: str, value: Any) -> int:
    count = as_int(value)
    if count is None or count < 0:
        raise RequestError(f"{name}: expected a whole number from 0, found {short_repr(value)}")
    return count


def _is_batch(prompt: Any) -> bool:
    """Whether a prompt is a list of prompts."""
    if isinstance(prompt, str):
        return False
    listed = hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__") and getattr(prompt, "shape", None) != ()
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not listed:
        raise RequestError(f"generate: expected a text, token ids or a list of them, found {type(prompt).__name__}")
    if _is_conversation(prompt):
        raise RequestError("generate: messages are for chat", hint="use chat(messages)")
    first = prompt[0] if len(prompt) else None
    return isinstance(first, str) or hasattr(first, "__len__")


def _characters(value: Any, depth: int = 32) -> int:
    """Number of characters in messages."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(_characters(v, depth - 1) for v in inner) if depth else 0


def _shorten(value: Any) -> Any:
    """Messages with their texts truncated to SHORT characters."""
    if isinstance(value, str):
        return value[:SHORT]
    if isinstance(value, Mapping):
        return {key: _shorten(inner) for key, inner in value.items()}
    return [_shorten(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
