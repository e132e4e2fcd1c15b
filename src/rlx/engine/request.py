"""A request to generate one sequence, its ticket, and the job that the scheduler makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlx.engine.sampler import GREEDY, Sampling
from rlx.engine.sequence import Sequence as TokenSequence
from rlx.errors import RequestError, RlxError
from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:
    from rlx.engine.language_model import Completion, LanguageModel


@dataclass(frozen=True)
class Request:
    """One sequence to generate."""

    tokens: Sequence[int]
    max_tokens: int | None = 256  # None: as long as the context allows
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    sampling: Sampling = GREEDY
    answer: bool = False  # an answer to a conversation, not a continuation
    client: str = ""  # for fair shares
    namespace: str = ""  # of the prefix cache
    deadline: float | None = None  # time.monotonic(); after it the text ends with finish_reason "length"


OnPiece = Callable[["Ticket", str], None]


class Ticket:
    """A submitted request. May be read and cancelled from any thread.

    `sequence` has the text, tokens and log-probabilities so far; `error` says why a request failed.
    """

    def __init__(
        self, model: LanguageModel, sequence: TokenSequence, *, client: str = "", namespace: str = "",
        deadline: float | None = None, on_piece: OnPiece | None = None, wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.sequence = sequence
        self.error: RlxError | None = None
        self.exception: Exception | None = None  # `error`, or what it was before it became an RlxError
        self.done = False
        self.cancelled = False
        self.client, self.namespace, self.deadline = client, namespace, deadline
        self.on_piece = on_piece
        self.submitted = time.perf_counter()
        self._model, self._wake = model, wake

    def cancel(self) -> None:
        """Stop the request within one step, in whatever phase it is. Its text ends with finish_reason "closed"."""
        self.cancelled = True
        self._wake()

    def must_end(self, now: float) -> bool:
        """Whether the request was cancelled, or is past its deadline."""
        return self.cancelled or (self.deadline is not None and now >= self.deadline)

    def completion(self) -> Completion:
        """The completion; raises the request's error, or RequestError if it has not ended."""
        if self.error is not None:
            raise self.error
        if not self.done:
            raise RequestError("ticket: the request has not ended", hint="step the scheduler until ticket.done")
        return self._model.completion_of(self.sequence)

    def __repr__(self) -> str:
        state = "failed" if self.error else self.sequence.finish_reason or ("closed" if self.done else "running")
        return f"<ticket: {len(self.sequence.prompt)} + {len(self.sequence.tokens)} tokens, {state}>"


class Job:
    """A request inside the scheduler."""

    def __init__(self, ticket: Ticket, number: int) -> None:
        self.ticket = ticket
        self.sequence = ticket.sequence
        self.number = number  # in order of arrival
        self.row = -1  # of the cache; -1: it waits
        self.prefix: Sequence[int] = ()  # tokens to prefill: the prompt, after a preemption also the text
        self.decodes = False  # prefill is complete
        self.failed_at = 0  # tokens known when a call with others failed: until it is past them, its calls are its own
        self.started = False
        self.last_token = 0.0  # clock

    @property
    def tokens(self) -> list[int]:
        """All tokens that are known: prompt and text."""
        return [*self.sequence.prompt, *self.sequence.tokens]

    @property
    def alone(self) -> bool:
        """Whether it runs in calls of its own."""
        return self.failed_at > 0

    @property
    def phase(self) -> str:
        return "waiting" if self.row < 0 else "decode" if self.decodes else "prefill"
