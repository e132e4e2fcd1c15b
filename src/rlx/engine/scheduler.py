"""A stand-in for the scheduler: requests run one by one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlx.engine.generate import Sequence as TokenSequence
from rlx.engine.sampler import Sampling
from rlx.errors import OverloadedError, RlxError

if TYPE_CHECKING:
    from rlx.engine.language_model import Completion, LanguageModel, TextStream


@dataclass(frozen=True)
class Request:
    tokens: Sequence[int]
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int
    sampling: Sampling
    answer: bool = False
    client: str = ""
    namespace: str = ""
    deadline: float | None = None


OnPiece = Callable[["Ticket", str], None]


class Ticket:
    def __init__(self, stream: TextStream, request: Request, on_piece: OnPiece | None) -> None:
        self._stream, self.request, self.on_piece = stream, request, on_piece
        self.sequence: TokenSequence = stream._sequence
        self.error: RlxError | None = None
        self.done = False
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def completion(self) -> Completion:
        return self._stream.completion


@dataclass
class Statistics:
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Scheduler:
    def __init__(
        self, model: LanguageModel, *, rows: int | None = None, cache_bytes: int | None = None, max_queued: int = 512,
        max_queued_tokens: int | None = None, stall: float = 0.2,
    ) -> None:  # fmt: skip
        self.model, self.rows, self._most = model, rows or 8, max_queued
        self._waiting: deque[Ticket] = deque()
        self._current: Ticket | None = None
        self._event = threading.Event()

    def submit(self, request: Request, on_piece: OnPiece | None = None) -> Ticket:
        if len(self._waiting) >= self._most:
            raise OverloadedError("the queue is full", retry_after=1.0)
        settings = {name: getattr(request.sampling, name) for name in Sampling.__dataclass_fields__}
        stream = self.model.stream(
            list(request.tokens), chat=request.answer, max_tokens=request.max_tokens, stop=request.stop,
            logprobs=request.logprobs, **settings,
        )  # fmt: skip
        ticket = Ticket(stream, request, on_piece)
        self._waiting.append(ticket)
        self._event.set()
        return ticket

    def step(self) -> bool:
        ticket = self._current
        if ticket is None:
            if not self._waiting:
                return False
            ticket = self._current = self._waiting.popleft()
        late = ticket.request.deadline is not None and time.monotonic() > ticket.request.deadline
        try:
            piece = "" if ticket.cancelled or late else next(ticket._stream, "")
        except RlxError as error:
            ticket.error, piece = error, ""
        if not piece:
            ticket._stream.close()
            if late and not ticket.sequence.finish_reason:
                ticket.sequence.finish_reason = "length"
            ticket.done, self._current = True, None
        if ticket.on_piece is not None:
            ticket.on_piece(ticket, piece)
        return True

    def wait(self, timeout: float) -> bool:
        self._event.wait(timeout)
        self._event.clear()
        return bool(self._waiting)

    def statistics(self) -> Statistics:
        return Statistics(int(self._current is not None), len(self._waiting))

    def close(self) -> None:
        for ticket in [*self._waiting, *([self._current] if self._current else [])]:
            ticket._stream.close()
