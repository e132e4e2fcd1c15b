"""Which requests run, and in which rows of the cache: the queue, its limits, admission, preemption and ends.

Clients take turns by fair shares; within a client, requests are admitted in order of arrival, but a prompt that begins
like one that is being prefilled waits for its pages. If pages run out, the youngest row is preempted: its prompt and
text are prefilled again later, which the text does not show.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from rlx.engine.counters import Counters
from rlx.engine.fair_shares import FairShares
from rlx.engine.interventions import Execution
from rlx.engine.kv_cache import CUT, KvCache, last_cut
from rlx.engine.page_pool import PagePool, PoolFull
from rlx.engine.prefix_tree import common
from rlx.engine.request import Job, Ticket
from rlx.errors import KernelError, OverloadedError, RequestError, ResourceError, RlxError
from rlx.fork_safe_locks import Lock, cached_property

WATERMARK = 0.05  # of the pool stays free when a request is admitted, so that others can grow
WORTH_WAITING = 32  # tokens that a prompt must share with one that is being prefilled
LOOKAHEAD = 16  # waiting requests of a client that may be admitted before one that waits for a prompt like its own


class Admission:
    """The requests that wait, and those that have a row. `queue` and what it counts are for any thread."""

    def __init__(
        self, execution: Execution, pool: PagePool, rows: int, max_queued: int, max_queued_tokens: int | None,
        counters: Counters,
    ) -> None:  # fmt: skip
        self._execution, self._pool, self._counters = execution, pool, counters
        self._limits = max_queued, max_queued_tokens
        self.plain = not (pool.spec.states or pool.spec.lengths)  # prefill and decode give equal bits
        self.rows: list[Job | None] = [None] * rows  # those that decode come first
        self.waiting: list[Job] = []  # in order of arrival; a preempted job goes back to its place
        self.shares = FairShares()
        self._inbox: deque[Job] = deque()  # of other threads
        self.queued = self.queued_tokens = self._submitted = 0
        self._lock = Lock()  # of the numbers that `queue` counts
        self._closed = False

    # -- any thread --
    def queue(self, tickets: Sequence[Ticket]) -> None:
        """Queue requests: all of them, or none if too much is queued."""
        tokens = sum(len(ticket.sequence.prompt) for ticket in tickets)
        with self._lock:
            self._check_room(len(tickets), tokens)
            self.queued, self.queued_tokens = self.queued + len(tickets), self.queued_tokens + tokens
            first = self._submitted + 1
            self._submitted += len(tickets)
        self._inbox.extend(Job(ticket, first + i) for i, ticket in enumerate(tickets))
        if self._closed:  # meanwhile, by another thread
            self.close()

    @property
    def capacity(self) -> int:
        """Sequences that may run and wait at the same time."""
        return len(self.rows) + self._limits[0]

    def check_room(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise OverloadedError unless sequences with these prompts can be queued now."""
        with self._lock:
            self._check_room(len(prompts), sum(map(len, prompts)))

    def has_room(self, count: int) -> bool:
        """Whether so many sequences can be queued now, if their prompts are short enough. Rows that are free count."""
        most = self._limits[0]
        return self.queued < most and self.queued + count <= most + self.rows.count(None)

    def _check_room(self, count: int, tokens: int) -> None:
        """Raise unless so many sequences can be queued, with so many tokens of prompts."""
        if self._closed:
            raise RequestError("scheduler: it is closed")
        most, most_tokens = self._limits
        if count > self.capacity:
            raise RequestError(f"scheduler: {count} sequences, and at most {self.capacity} may run and wait")
        if not self.has_room(count):
            raise self._overloaded("requests", f"{self.queued} requests wait, the limit is {most}")
        if most_tokens is not None and self.queued and self.queued_tokens + tokens > most_tokens:
            waiting = f"{self.queued_tokens} prompt tokens wait, the limit is {most_tokens}"
            raise self._overloaded("tokens", waiting)

    def _overloaded(self, reason: str, message: str) -> OverloadedError:
        self._counters.rejected[reason] += 1
        seconds = self.queued_tokens / self._counters.prefill_speed if self._counters.prefill_speed else 1.0
        return OverloadedError(
            f"scheduler: {message}", retry_after=max(seconds, 1.0), hint=f"try again in {math.ceil(seconds)} s"
        )

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._inbox or self.waiting) or any(self.rows)

    def close(self) -> None:
        """End all requests, and take no others."""
        self._closed = True
        for job in [*self._inbox, *self.waiting, *self.running]:
            self.end(job, "closed")
        self._inbox.clear()
        self.waiting.clear()

    # -- the engine's thread --
    @cached_property
    def cache(self) -> KvCache:
        """Created by the first step."""
        return self._pool.new(len(self.rows))

    @property
    def running(self) -> list[Job]:
        """The jobs that have a row, in order of rows."""
        return [job for job in self.rows if job is not None]

    @property
    def decoding(self) -> list[Job]:
        """The jobs whose prompts are prefilled, in order of rows."""
        return [job for job in self.rows if job is not None and job.decodes]

    @property
    def prefilling(self) -> list[Job]:
        """The jobs whose prompts are not prefilled to their ends, in order of rows."""
        return [job for job in self.rows if job is not None and not job.decodes]

    def receive(self) -> None:
        """Move submitted requests to the queue."""
        while self._inbox:
            self.waiting.append(self._inbox.popleft())

    def end_stopped(self) -> None:
        """End requests that were cancelled or are past their deadline."""
        now = time.monotonic()
        for job in [job for job in (*self.waiting, *self.running) if job.ticket.must_end(now)]:
            if job.ticket.cancelled:
                self._counters.cancelled[job.phase] += 1
                self.end(job, "closed")
            else:
                self.deliver(job, job.sequence.close("length"))
                self.end(job, "length")

    def admit(self) -> None:
        """Give rows to waiting requests: by turns between clients, in order of arrival within a client."""
        if not self.waiting:
            return
        while (job := self._next_waiting()) is not None:
            row = self._free_row(job)
            if row is None or not self._start(job, row):
                return

    def _next_waiting(self) -> Job | None:
        """The request to admit next; None if all wait for a prompt that begins alike."""
        full = None not in self.rows  # then only clients without a row may get one
        seen = {job.ticket.client: LOOKAHEAD for job in self.running if full}
        ready: dict[str, Job] = {}
        for job in self.waiting:
            client = job.ticket.client
            if client not in ready and seen.get(client, 0) < LOOKAHEAD:
                seen[client] = seen.get(client, 0) + 1
                if not self._worth_waiting(job):
                    ready[client] = job
        return ready[self.shares.choose(ready)] if ready else None

    def _worth_waiting(self, job: Job) -> bool:
        """Whether a prompt that is being prefilled begins like this one, and its pages are not cached yet."""
        spec, prompt = self._pool.spec, job.sequence.prompt
        for other in self.prefilling:
            if other.ticket.namespace != job.ticket.namespace:
                continue
            if spec.rope_of_length(len(other.sequence.prompt)) != spec.rope_of_length(len(prompt)):
                continue
            shared = min(common(other.sequence.prompt, prompt), len(prompt) - 1)
            if spec.states:
                shared = min(shared, last_cut(other.sequence.prompt)) // CUT * CUT
            if shared >= WORTH_WAITING and shared >= self._known(job) + WORTH_WAITING:
                return True
        return False

    def _known(self, job: Job) -> int:
        """Length of the cached prefix of a prompt."""
        prompt, namespace = job.sequence.prompt, self.namespace(job)
        if namespace is None:
            return len(prompt)
        with self._pool.changing():
            return self._pool.find((*namespace, self._pool.spec.rope_of_length(len(prompt))), prompt[:-1])[1]

    def namespace(self, job: Job) -> tuple[str, ...] | None:
        """The namespace of the prefix cache; None if nothing is cached, because every token must run."""
        return None if self._execution.captures is not None else (self._execution.digest, job.ticket.namespace)

    def _free_row(self, job: Job) -> int | None:
        """A free row; a client without one may take that of a client with more than its share."""
        if None in self.rows:
            return self.rows.index(None)
        held: dict[str, list[Job]] = {}
        for running in self.running:
            held.setdefault(running.ticket.client, []).append(running)
        most = max(held.values(), key=len)
        if job.ticket.client in held or len(most) == 1 or len(most) * (len(held) + 1) <= len(self.rows):
            return None
        youngest = max(most, key=lambda each: each.number)
        row = youngest.row
        self.preempt(youngest)
        return row

    def _start(self, job: Job, row: int) -> bool:
        """Begin the prefill of a request in a row; False if there are too few pages."""
        prompt, running = job.sequence.prompt, [j.row for j in self.running]
        prefix = job.tokens if self.plain else list(prompt)
        limit = self._pool.limit
        if limit is not None and running:
            room = limit - self.cache.page_bytes(running) - WATERMARK * limit
            if self._pool.bytes_for(len(job.sequence.prompt) + len(job.sequence.tokens) + 1) > room:
                return False
        namespace, cached = self.namespace(job), 0
        if namespace is not None:
            try:
                cached = self.cache.restore(row, prefix, namespace)
            except PoolFull:
                return False
        self.waiting.remove(job)
        self._count_queued(job, -1)
        self.rows[row], job.row, job.prefix = job, row, prefix
        if not job.started:
            job.started = True
            job.sequence.begin(cached)
            self._counters.queue.observe(time.perf_counter() - job.ticket.submitted)
            self._counters.prompt_tokens += len(prompt)
            self._counters.cached_tokens += cached
        return True

    def _count_queued(self, job: Job, change: int) -> None:
        """Count a job that joins the queue (1) or leaves it (-1)."""
        with self._lock:
            self.queued += change
            self.queued_tokens += change * len(job.sequence.prompt)

    # -- rows --
    def position(self, job: Job) -> int:
        """The position of the next token of a running job: how many of its tokens are in the cache."""
        return len(self.cache.tokens[job.row])

    def compact(self) -> list[Job]:
        """Move the jobs that decode to the first rows, and return them."""
        decoding = self.decoding
        late = [job for job in decoding if job.row >= len(decoding)]
        if not late:
            return decoding
        for row in range(len(decoding)):
            occupant = self.rows[row]
            if occupant is None or not occupant.decodes:
                self.move(late.pop(), row)
        return self.decoding

    def move(self, job: Job, row: int) -> None:
        """Give a job another row; its occupant takes the old one."""
        other, old = self.rows[row], job.row
        self.cache.swap(old, row)
        self.rows[row], self.rows[old] = job, other
        job.row = row
        if other is not None:
            other.row = old

    def make_room(self) -> None:
        """Preempt the youngest running request: pages are needed, and all are in use."""
        jobs = sorted(self.running, key=lambda job: job.number)
        if len(jobs) > 1:
            self.preempt(jobs[-1])
        else:
            self.fail(jobs[0], ResourceError("KV cache: no page is left", hint="a larger cache_bytes"))

    def preempt(self, job: Job) -> None:
        """Take the row of a job; it goes back to its place in the queue. Its pages may survive in the prefix cache."""
        self._counters.preemptions += 1
        self._release(job)
        place = next((i for i, other in enumerate(self.waiting) if other.number > job.number), len(self.waiting))
        self.waiting.insert(place, job)
        self._count_queued(job, 1)

    def _release(self, job: Job) -> None:
        """Free the row of a job; its pages go to the prefix cache."""
        row, job.row, job.decodes = job.row, -1, False
        self.rows[row] = None
        self.cache.release(row, None if isinstance(job.ticket.error, KernelError) else self.namespace(job))

    # -- ends --
    def deliver(self, job: Job, piece: str) -> None:
        """Hand over new text; an error of the receiver ends the request."""
        if piece and job.ticket.on_piece is not None and not job.ticket.done:
            try:
                job.ticket.on_piece(job.ticket, piece)
            except Exception as error:
                self.fail(job, error)

    def fail(self, job: Job, error: Exception) -> None:
        """End a request with an error."""
        job.ticket.exception = error
        if not isinstance(error, RlxError):
            cause = error
            error = KernelError(f"request: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        job.ticket.error = error
        self.end(job, "error")

    def end(self, job: Job, reason: str) -> None:
        """End a request and release its row."""
        ticket = job.ticket
        if ticket.done:
            return
        if job.row >= 0:
            self._release(job)
        else:
            if job in self.waiting:
                self.waiting.remove(job)
            self._count_queued(job, -1)
        job.sequence.close()
        ticket.done = True
        self.shares.keep({job.ticket.client for job in (*self.waiting, *self.running)})
        self._counters.requests[reason] += 1
        self._counters.request.observe(time.perf_counter() - ticket.submitted)
        if ticket.on_piece is not None:
            try:
                ticket.on_piece(ticket, "")
            except Exception as error:
                ticket.error = ticket.error or KernelError(f"on_piece: {type(error).__name__}: {error}")
