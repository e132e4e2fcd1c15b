"""A sequence while it is generated: its tokens, their text up to a stop string, and what was counted and timed."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

from rlx.engine.decoder import Pick
from rlx.engine.logs import warn
from rlx.engine.sampler import Sampler, no_token, short_repr
from rlx.fast_dataclass import dataclass
from rlx.formats.tokenizer import Stream

if TYPE_CHECKING:
    from rlx.engine.logprobs import Logprob, TokenBytes
    from rlx.inspect.call_report import CallRecorder


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a completion; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds until the first token, seconds from the first to the last, and tokens per second."""

    prompt_seconds: float
    answer_seconds: float
    prompt_per_second: float  # of tokens that were prefilled; cached ones cost nothing
    answer_per_second: float  # of tokens after the first; 0 if there is only one

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for missing attributes: names of other libraries raise an explanation."""
            from rlx.engine.foreign_names import missing_attribute  # only errors need it

            raise missing_attribute(self, name)


class Sequence:
    """One sequence while it is generated: its prompt, its tokens, their text up to a stop string, and statistics."""

    def __init__(
        self, prompt: abc.Sequence[int], sampler: Sampler, *, limit: int, vocab: int, stop: abc.Sequence[str] = (),
        stop_ids: Iterable[int] = (), text: Stream | None = None, top: int = 0, asked: int | None = None,
        token_bytes: TokenBytes | None = None,
    ) -> None:  # fmt: skip
        self.prompt = prompt
        self.tokens: list[int] = []  # generated
        self.sampler = sampler
        self.limit = limit  # of tokens to generate
        self.requested = limit if asked is None else asked  # may be more than the context has room for
        self.vocab = vocab  # logits beyond it are padding
        self.text = ""
        self.logprobs: list[Logprob] | None = [] if top else None
        self.finish_reason = ""  # until it ends
        self.cached = 0  # tokens of the prompt that came from a cache
        self._started = self._first_token = self._last_token = 0.0  # clocks; 0: not yet
        self._stop, self._stop_ids = stop, frozenset(stop_ids)
        self._stream, self._top, self._bytes = text, top, token_bytes
        self._held = ""  # may turn out to be the start of a stop string
        self._decoded = 0  # characters of all tokens: the text, what is held, and a stop string
        self._positions: list[int | None] = []  # per log-probability: where its text begins; None: it has none
        self._taken = 0  # log-probabilities that `take_logprobs` has passed

    def begin(self, cached: int) -> None:
        self.cached = cached
        self._started = perf_counter()

    def watch(self, recorder: CallRecorder) -> None:
        """Record the time of sampling in Python, and of decoding text."""
        recorder.watch(self.sampler, ("draw", "accept"), "sampling in Python")
        if self._stream is not None:
            recorder.watch(self._stream, ("push", "flush"), "text of tokens")

    def close(self, reason: str = "") -> str:
        """End a sequence early; returns the rest of its text. Without a first token, prefill took until now."""
        if self._started and not self._first_token:
            self._last_token = perf_counter()
        return self._finish(reason) if reason and not self.finish_reason else ""

    def accept(self, pick: Pick) -> str:
        """Append the next token; returns the new text, without what may begin a stop string."""
        if not self._first_token:
            self._first_token = self._last_token = perf_counter()
            if self.limit == 0:
                return self._end("length")
        token = pick.token
        if self.sampler.settings.logits_processor is not None:
            token = self.sampler.pick_processed(pick.logits[: self.vocab])
        if token < 0:
            raise no_token(pick.logits[: self.vocab])
        self.sampler.accept(token)
        self.tokens.append(token)
        if self.logprobs is not None:
            from rlx.engine.logprobs import logprob_of  # a warm start needs no log-probabilities

            logits, logprob = pick.logits[: self.vocab], pick.logprob
            if token != pick.token:  # of processed logits; log-probabilities are the model's
                logprob += float(logits[token]) - float(logits[pick.token])
            self.logprobs.append(logprob_of(logits, token, logprob, self._top, self._bytes))
            hidden = token in self._stop_ids or (self._stream is not None and self._stream.skips(token))
            self._positions.append(None if hidden else self._decoded)
        self._last_token = perf_counter()
        if token in self._stop_ids:
            return self._end("stop")
        piece = "" if self._stream is None else self._stream.push(token)
        self._decoded += len(piece)
        if self._stop and piece:
            piece = self._held + piece
            stops = [at for at in map(piece.find, self._stop) if at >= 0]
            if stops:
                self._held, self._stream = piece[: min(stops)], None
                return self._end("stop")
            pending = max(_overlap(piece, s) for s in self._stop)
            piece, self._held = piece[: len(piece) - pending], piece[len(piece) - pending :]
        self.text += piece
        return piece + self._end("length") if len(self.tokens) >= self.limit else piece

    def _end(self, reason: str) -> str:
        if reason == "length" and self.requested > self.limit:
            count = f"{self.limit} token{'s' * (self.limit != 1)}"
            warn(
                "rlx.generate",
                "the context is full: the text was cut after %s, max_tokens is %s",
                count,
                short_repr(self.requested),
            )
        return self._finish(reason)

    def _finish(self, reason: str) -> str:
        self.finish_reason = reason
        last = self._held + ("" if self._stream is None else self._stream.flush())
        self.text += last
        return last

    def take_logprobs(self) -> list[tuple[int, Logprob]]:
        """The log-probabilities of tokens whose text was returned since the last call, and where in it they begin.

        A token counts as returned with the first character of its text. Tokens outside the text have none: special
        ones, and those of a stop string.
        """
        taken: list[tuple[int, Logprob]] = []
        complete = bool(self.finish_reason) and self._decoded <= len(self.text)  # no stop string was cut off
        for start in self._positions[self._taken :]:
            if start is not None and start >= len(self.text) and not complete:
                break
            if start is not None and self.logprobs is not None:
                taken.append((start, self.logprobs[self._taken]))
            self._taken += 1
        return taken

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), self.cached, len(self.tokens))

    @property
    def timings(self) -> Timings:
        first = self._first_token or self._last_token  # 0 if the stream was closed during prefill
        prefill, decode = first - self._started, self._last_token - first
        prefilled = len(self.prompt) - self.cached if self._first_token else 0  # otherwise unknown
        decoded = max(len(self.tokens) - 1, 0)
        return Timings(
            prefill, decode, prefilled / prefill if prefill > 0 else 0.0, decoded / decode if decode > 0 else 0.0
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
