"""Sequences that the engine generates for one request, seen from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import field
from typing import Any

from rlx.engine.logprobs import Logprob
from rlx.engine.request import Request, Ticket
from rlx.engine.sequence import Sequence as TokenSequence
from rlx.fast_dataclass import dataclass
from rlx.server.api_errors import invalid, of_rlx, stopping
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


class Generation:
    """Runs requests, and gives their pieces as they come. Close it to cancel what still runs."""

    def __init__(self, engine: EngineThread, served: Served) -> None:
        self._engine, self._served = engine, served
        self.rows: list[Row] = []
        self._news = asyncio.Event()

    async def start(self, requests: Sequence[Request]) -> None:
        """Submit the requests; raises ApiError if they are refused."""
        check_count(self._served, len(requests))
        self.rows = [Row(i) for i in range(len(requests))]

        def submit() -> None:
            tickets = self._engine.submit(self._served, requests, [self._receiver(row) for row in self.rows])
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
            self._news.set()

        return receive

    async def pieces(self) -> AsyncIterator[list[tuple[Row, str]]]:
        """New text of rows, as much as there is; a row that has ended comes once more, with `finished` set."""
        while not all(row.finished for row in self.rows):
            await self._news.wait()
            self._news.clear()
            batch: list[tuple[Row, str]] = []
            for row in self.rows:
                if row.finished or not (row.waiting or row.ended):
                    continue
                text = "".join(piece.text for piece in row.waiting)
                row.logprobs += [entry for piece in row.waiting for entry in piece.logprobs]
                row.waiting = []
                row.finished = row.ended
                if row.ended:
                    self._check(row)
                batch.append((row, text))
            if batch:
                yield batch

    async def finish(self) -> None:
        """Wait for the end of all rows."""
        async for _ in self.pieces():
            pass

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
