"""Sequences that the engine generates for one request, seen from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from rlx.engine.logprobs import Logprob
from rlx.engine.request import Request, Ticket
from rlx.engine.sequence import Sequence as TokenSequence
from rlx.fast_dataclass import dataclass
from rlx.server.api_errors import invalid, of_rlx, stopping
from rlx.server.connections import Connection
from rlx.server.engine_thread import EngineThread, Piece, Served


@dataclass
class Row:
    """One sequence of a request: its text, and how much of it was read."""

    index: int
    ticket: Ticket | None = None
    waiting: list[Piece] = field(default_factory=list)  # that nobody has read
    logprobs: list[tuple[int, Logprob]] = field(default_factory=list)  # of text that was read, until they are taken
    ended: bool = False  # the engine has sent all
    finished: bool = False  # the reader has got all

    def take_logprobs(self) -> list[tuple[int, Logprob]]:
        """The log-probabilities of text that was read since the last call, and where in it their tokens begin."""
        taken, self.logprobs = self.logprobs, []
        return taken

    @property
    def sequence(self) -> TokenSequence:
        assert self.ticket is not None
        return self.ticket.sequence


def check_count(served: Served, count: int) -> None:
    """Refuse a request with more sequences than there can ever be room for."""
    assert served.scheduler is not None
    if count > served.scheduler.capacity:
        most = f"at most {served.scheduler.capacity} may run and wait at the same time (--rows and --max-queued)"
        raise invalid(f"n: the request has {count} sequences, {most}", "n", "too_many_sequences")


Batch = list[tuple[Row, str]]  # new text of rows


def _nothing() -> None:
    """Nobody waits for news."""


class Generation:
    """Runs requests; `follow` gives their text as it comes. Close it to cancel what still runs."""

    def __init__(self, engine: EngineThread, served: Served) -> None:
        self._engine, self._served = engine, served
        self.rows: list[Row] = []
        self._on_news: Callable[[], None] = _nothing

    async def start(self, requests: Sequence[Request], *, streams: bool) -> None:
        """Submit the requests; raises ApiError if they are refused. Unless it `streams`, all text comes at the end."""
        check_count(self._served, len(requests))
        self.rows = [Row(i) for i in range(len(requests))]

        def submit() -> None:
            receivers = [self._receiver(row) for row in self.rows]
            tickets = self._engine.submit(self._served, requests, receivers, streams=streams)
            for row, ticket in zip(self.rows, tickets, strict=True):
                row.ticket = ticket

        try:
            await asyncio.to_thread(submit)
        except BaseException:
            self.close()
            raise

    def _receiver(self, row: Row) -> Any:
        def receive(piece: Piece) -> None:
            row.waiting.append(piece)
            if not piece.text:  # the end; the ticket itself may be done while pieces are still on their way here
                row.ended = True
            self._on_news()

        return receive

    def _take(self) -> Batch:
        """New text of rows, as much as there is; a row that has ended comes once more, with `finished` set."""
        batch: Batch = []
        for row in self.rows:
            if row.finished or not (row.waiting or row.ended):
                continue
            text = "".join([piece.text for piece in row.waiting])
            for piece in row.waiting:
                row.logprobs += piece.logprobs
            row.waiting = []
            row.finished = row.ended
            if row.ended:
                self._check(row)
            batch.append((row, text))
        return batch

    async def follow(self, write: Callable[[Batch], None], connection: Connection | None = None) -> None:
        """Call `write` with new text as it comes, until all rows have ended; not while the client reads too slowly.

        The callback that brings the text calls it: a task that awaits text takes two more turns of the event loop.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def news() -> None:
            if ended.done() or (connection is not None and connection.is_paused):
                return
            try:
                if batch := self._take():
                    write(batch)
                if all(row.finished for row in self.rows):
                    ended.set_result(None)
            except Exception as error:
                ended.set_exception(error)

        self._on_news = news
        if connection is not None:
            connection.on_writable = news
        news()
        try:
            await ended
        finally:
            self._on_news = _nothing
            if connection is not None:
                connection.on_writable = _nothing

    async def finish(self) -> None:
        """Wait for the end of all rows."""
        await self.follow(lambda _: None)

    def _check(self, row: Row) -> None:
        assert row.ticket is not None
        error = row.ticket.error
        if error is not None:
            raise of_rlx(error)
        if row.sequence.finish_reason not in ("stop", "length"):
            raise stopping()

    def close(self) -> None:
        """Cancel what still runs."""
        for row in self.rows:
            if row.ticket is not None and not row.ticket.done:
                row.ticket.cancel()

    # -- facts for answers --
    def usage(self, prompts: int = 1) -> dict[str, Any]:
        """Token counts; the rows of one prompt count it once."""
        per_prompt = max(len(self.rows) // prompts, 1)
        firsts = [row.sequence.usage for row in self.rows[::per_prompt]]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(row.sequence.usage.completion_tokens for row in self.rows)
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
        }  # fmt: skip

    def timings(self) -> dict[str, float]:
        """Speeds of the first row."""
        first = self.rows[0].sequence
        times = first.timings
        return {
            "prompt_n": first.usage.prompt_tokens - first.usage.cached_tokens, "cache_n": first.usage.cached_tokens,
            "predicted_n": first.usage.completion_tokens,
            "prompt_ms": round(1000 * times.prompt_seconds, 3), "predicted_ms": round(1000 * times.answer_seconds, 3),
            "prompt_per_second": round(times.prompt_per_second, 3),
            "predicted_per_second": round(times.answer_per_second, 3),
        }  # fmt: skip
