"""The scheduler: requests join and leave a batch at any step, and each gets the bits that it gets alone.

A step decodes one token of every running row and prefills one slice of a prompt. While anybody decodes, a step takes
about `stall` seconds; bits do not depend on where prompts are cut, so slices may follow the clock, nor on what else is
in a call, so a short slice rides in the call of the rows that decode. Prompts share pages with earlier ones that begin
alike (`prefix_tree`). If pages run out, the youngest row is preempted: its prompt and text are prefilled again later,
which the text does not show.

On devices that run behind the host, a decode step starts before the tokens of the step before it are read: they are
inputs of it in device memory, and the host reads text behind the device. A row that turns out to have ended drops the
token that was computed too many.

`model.generate`, `chat` and `stream` step a scheduler of their own in the caller's thread, a server one for all its
requests in a thread of its own, where several models take turns, a step each.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlx.engine import call_sizes
from rlx.engine.counters import Counters
from rlx.engine.decoder import Decoder, DecodeStep, Inputs, Pick
from rlx.engine.fair_shares import FairShares
from rlx.engine.kv_cache import CHECKPOINT, CUT, KvCache
from rlx.engine.page_pool import PagePool, PoolFull
from rlx.engine.prefix_tree import common
from rlx.engine.request import Job, OnPiece, Request, Ticket
from rlx.engine.sampler import BatchSampling, Sampler
from rlx.engine.sequence import Sequence as TokenSequence
from rlx.errors import KernelError, OverloadedError, RequestError, ResourceError, RlxError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock, cached_property

if TYPE_CHECKING:
    from rlx.engine.interventions import Execution
    from rlx.engine.language_model import LanguageModel
    from rlx.engine.statistics import Statistics

Result = TypeVar("Result")
STALL = 0.2  # seconds of a step while anybody decodes
LEAST, SLICE = 4, 16  # tokens: slices are multiples of the first, longer ones of the second, or of CUT
WATERMARK = 0.05  # of the pool stays free when a request is admitted, so that others can grow
WORTH_WAITING = 32  # tokens that a prompt must share with one that is being prefilled
LOOKAHEAD = 16  # waiting requests of a client that may be admitted before one that waits for a prompt like its own
READ_AGAIN = 0.5  # of the weights: keys and values that a ragged call may read more often than one per prompt would
SMALL_MODEL = 600 << 20  # bytes of weights below which more rows pay off
SMOOTHING = 0.3  # of the moving average of prefill speed


@dataclass
class Underway:
    """A decode step whose tokens have not been read, and the jobs of its rows; None: a row that has ended since."""

    step: DecodeStep
    jobs: list[Job | None]


@dataclass(frozen=True, slots=True)
class Slice:
    """Parts of prompts that one call prefills, up to the positions `ends`.

    A `ragged` call has no padding, and rows that decode join it.
    """

    jobs: list[Job]
    ends: list[int]
    ragged: bool


class Scheduler:
    """Generates any number of sequences with one model. `submit`, `cancel` and `statistics` are for any thread.

    `rows` bounds the sequences that run at once, `cache_bytes` the keys and values of sequences and prefix cache;
    without it the scheduler shares the model's pool and takes memory as needed. `max_queued` and `max_queued_tokens`
    bound the requests that wait and their prompts. `stall` is how many seconds a step may take while rows decode; with
    `math.inf`, prompts are prefilled before anything is decoded. `execution` runs an edited model.
    """

    def __init__(
        self, model: LanguageModel, *, rows: int | None = None, cache_bytes: int | None = None, max_queued: int = 512,
        max_queued_tokens: int | None = None, stall: float = STALL, execution: Execution | None = None,
    ) -> None:  # fmt: skip
        from rlx.engine.interventions import execution as execution_of

        self._model = model
        self._execution = execution_of(model, None, None)() if execution is None else execution
        shared = self._execution.pool
        self.pool = shared if cache_bytes is None else PagePool(shared.spec, shared.context, shared.memory, cache_bytes)
        self.rows = (8 if _weight_bytes(model) >= SMALL_MODEL else 16) if rows is None else rows
        self.pool.expect(self.rows)
        self.context = _longest(self.pool)
        if self.rows < 1 or self.context < 2:
            raise RequestError(
                f"scheduler: {self.rows} rows and {cache_bytes} bytes hold no sequence", hint="a larger cache_bytes"
            )
        self._limits = max_queued, max_queued_tokens
        self._stall = stall
        self._plain = not (self.pool.spec.states or self.pool.spec.lengths)  # prefill and decode give equal bits
        self._ragged = self._plain and self.pool.memory.is_host and self._execution.captures is None
        self._inbox: deque[Job] = deque()  # of other threads
        self._waiting: list[Job] = []  # in order of arrival; a preempted job goes back to its place
        self._rows: list[Job | None] = [None] * self.rows  # those that decode come first
        self._shares = FairShares()
        self._sampling, self._ragged_sampling = BatchSampling(), BatchSampling()
        self._underway: Underway | None = None
        self._speed = 0.0  # of prefill, tokens per second: of the last slice if it was slow, else a moving average
        self._decode_seconds = 0.0  # of the last decode call
        self._queued = self._queued_tokens = self._submitted = 0
        self._counters = Counters()
        self._lock = Lock()  # of the numbers that `submit` counts
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._closed = False

    # -- any thread --
    def submit(self, request: Request, on_piece: OnPiece | None = None) -> Ticket:
        """Queue a request. `on_piece(ticket, text)` is called by `step` with new text, and with "" at the end.

        Raises RequestError if the request is invalid, OverloadedError if too much is queued.
        """
        return self.submit_all([request], [on_piece])[0]

    def submit_all(self, requests: Sequence[Request], on_pieces: Sequence[OnPiece | None]) -> list[Ticket]:
        """Queue requests that belong together: all of them, or none if one is invalid or too much is queued."""
        tickets = [
            self._ticket(
                self._model.new_sequence(request, "submit", context=self.context), client=request.client,
                namespace=request.namespace, deadline=request.deadline, on_piece=on_piece,
            )
            for request, on_piece in zip(requests, on_pieces, strict=True)
        ]  # fmt: skip
        self._queue(tickets)
        return tickets

    def add(
        self, sequence: TokenSequence, *, client: str = "", namespace: str = "", deadline: float | None = None,
        on_piece: OnPiece | None = None,
    ) -> Ticket:  # fmt: skip
        """Queue a sequence."""
        ticket = self._ticket(sequence, client=client, namespace=namespace, deadline=deadline, on_piece=on_piece)
        self._queue([ticket])
        return ticket

    @property
    def capacity(self) -> int:
        """Sequences that may run and wait at the same time."""
        return self.rows + self._limits[0]

    def check_room(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise OverloadedError unless sequences with these prompts can be queued now."""
        with self._lock:
            self._check_room(len(prompts), sum(map(len, prompts)))

    def has_room(self, count: int = 1) -> bool:
        """Whether so many sequences can be queued now, if their prompts are short enough. Rows that are free count."""
        most = self._limits[0]
        return self._queued < most and self._queued + count <= most + sum(job is None for job in self._rows)

    def _ticket(self, sequence: TokenSequence, **options: Any) -> Ticket:
        return Ticket(self._model, sequence, **options, wake=self.wake)

    def _queue(self, tickets: Sequence[Ticket]) -> None:
        tokens = sum(len(ticket.sequence.prompt) for ticket in tickets)
        with self._lock:
            self._check_room(len(tickets), tokens)
            self._queued, self._queued_tokens = self._queued + len(tickets), self._queued_tokens + tokens
            first = self._submitted + 1
            self._submitted += len(tickets)
        self._inbox.extend(Job(ticket, first + i) for i, ticket in enumerate(tickets))
        if self._closed:  # meanwhile, by another thread
            self.close()
        self.wake()

    def _check_room(self, count: int, tokens: int) -> None:
        """Raise unless so many sequences can be queued, with so many tokens of prompts."""
        if self._closed:
            raise RequestError("scheduler: it is closed")
        most, most_tokens = self._limits
        if count > self.capacity:
            raise RequestError(f"scheduler: {count} sequences, and at most {self.capacity} may run and wait")
        if not self.has_room(count):
            raise self._overloaded("requests", f"{self._queued} requests wait, the limit is {most}")
        if most_tokens is not None and self._queued and self._queued_tokens + tokens > most_tokens:
            waiting = f"{self._queued_tokens} prompt tokens wait, the limit is {most_tokens}"
            raise self._overloaded("tokens", waiting)

    def _overloaded(self, reason: str, message: str) -> OverloadedError:
        self._counters.rejected[reason] += 1
        seconds = self._queued_tokens / self._speed if self._speed else 1.0
        return OverloadedError(
            f"scheduler: {message}", retry_after=max(seconds, 1.0), hint=f"try again in {math.ceil(seconds)} s"
        )

    def wake(self) -> None:
        """Make `wait` return. One entry is enough: `wait` looks for work after it has taken it."""
        if self._wakes.empty():
            self._wakes.put(None)

    def statistics(self) -> Statistics:
        used, limit = self.pool.used_bytes, self.pool.limit
        return self._counters.snapshot(
            running=sum(job is not None for job in self._rows), waiting=self._queued,
            tokens_waiting=self._queued_tokens, rows=self.rows, kv_used=used / limit if limit else 0.0, kv_bytes=used,
            speed=self._speed,
        )  # fmt: skip

    # -- the engine's thread --
    def step(self) -> bool:
        """Decode a token of every row and prefill one slice. Returns False when there is nothing to do."""
        started = time.perf_counter()
        self._receive()
        self._end_stopped()
        self._admit()
        part = self._next_slice()
        if part is None or not (part.ragged or self._stall == math.inf):
            self._decode()
            self._admit()
            part = self._next_slice() if self._stall < math.inf else None
        if part is not None:
            self._prefill(part)
        self._counters.step_seconds.observe(time.perf_counter() - started)
        return self.busy

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._inbox or self._waiting) or any(self._rows)

    def wait(self, timeout: float | None) -> bool:
        """Wait for work, at most `timeout` seconds. Returns whether there is some."""
        if not self.busy:
            try:
                self._wakes.get(timeout=timeout)
            except Empty:
                return self.busy
        while not self._wakes.empty():
            self._wakes.get()
        return self.busy

    def close(self) -> None:
        """End all requests; they keep the text they have. Never waits: the garbage collector may close a stream."""
        self._closed = True
        for job in [*self._inbox, *self._waiting, *(job for job in self._rows if job is not None)]:
            self._end(job, "closed")
        self._inbox.clear()
        self._waiting.clear()
        self._underway = None

    @cached_property
    def _decoder(self) -> Decoder:
        """Created by the first step."""
        execution = self._execution
        return Decoder(execution.compiled, self.pool.new(self.rows), execution.execute)

    @cached_property
    def _cache(self) -> KvCache:
        return self._decoder.cache

    def _receive(self) -> None:
        """Move submitted requests to the queue."""
        while self._inbox:
            self._waiting.append(self._inbox.popleft())

    def _end_stopped(self) -> None:
        """End requests that were cancelled or are past their deadline."""
        now = time.monotonic()
        for job in [job for job in (*self._waiting, *self._rows) if job is not None and job.ticket.must_end(now)]:
            if job.ticket.cancelled:
                self._counters.cancelled[job.phase] += 1
                self._end(job, "closed")
            else:
                self._deliver(job, job.sequence.close("length"))
                self._end(job, "length")

    # -- decode --
    def _decode(self) -> None:
        """Decode one token of every row whose prompt is prefilled."""
        if self._run_ahead():
            return
        self._finish_step()
        count = self._compact()
        if not count:
            return
        self._count_step(count)
        jobs = self._rows[:count]
        alone = [job for job in jobs if job is not None and job.alone]
        if not alone and self._can_look_ahead(jobs):
            self._underway = self._start_rows(jobs)
            return
        for job in alone:
            self._decode_rows(job.row, [job])
        if len(alone) < count:
            self._decode_rows(0, [None if job in alone else job for job in jobs] if alone else jobs)

    def _count_step(self, rows: int) -> None:
        self._counters.steps += 1
        self._counters.step_rows.observe(rows)

    def _can_look_ahead(self, jobs: Sequence[Job | None]) -> bool:
        """Whether a step of these rows may be followed by another before its tokens are read."""
        if not self._decoder.feeds or not self._decoder.can_start([0] * len(jobs), 0):
            return False
        return all(job is not None and job.sequence.sampler.looks_ahead for job in jobs)

    def _run_ahead(self) -> bool:
        """Start the step after the one under way, whose tokens it takes from the device, then read these.

        Returns False where the host must know the tokens first: if rows join or end, or sampling depends on them.
        """
        before = self._underway
        decoding = [job for job in self._rows if job is not None and job.decodes]
        if before is None or before.jobs != decoding or [job.row for job in decoding] != list(range(len(decoding))):
            return False
        jobs, fed = decoding, [0] * len(decoding)
        if not self._can_look_ahead(jobs) or not all(map(self._may_continue, jobs)):
            return False
        try:
            sampling = self._sampling.draw([job.sequence.sampler for job in jobs], ahead=1)
            step = self._decoder.start_step(fed, 0, sampling, before.step)
        except Exception:  # the step with known tokens meets it again, and says whose fault it is
            return False
        self._count_step(len(jobs))
        self._underway = Underway(step, list(before.jobs))
        self._read(before)
        return True

    def _may_continue(self, job: Job) -> bool:
        """Whether a job takes one more step after the one under way, as far as the host can tell."""
        sequence = job.sequence
        known = len(self._cache.tokens[job.row]) == len(sequence.prompt) + len(sequence.tokens)
        return known and len(sequence.tokens) + 1 < sequence.limit

    def _start_rows(self, jobs: list[Job | None]) -> Underway | None:
        """Start a decode step of the first rows."""

        def start() -> DecodeStep:
            tokens, draws = self._step_operands(jobs)
            return self._decoder.start_step(tokens, 0, draws)

        step = self._attempt(start, jobs)
        # an attempt may preempt jobs to make room
        return (
            None
            if step is None
            else Underway(step, [job if job is not None and job.row >= 0 else None for job in jobs])
        )

    def _finish_step(self) -> None:
        """Read the tokens of the step under way."""
        before, self._underway = self._underway, None
        if before is not None:
            self._read(before)

    def _read(self, underway: Underway) -> None:
        """Read the tokens of a step; an error undoes it, and the step that was started after it."""
        live = [job for job in underway.jobs if job is not None]
        if not live:
            return
        try:
            picks = underway.step.picks()
        except Exception as error:
            underway.step.undo()
            self._underway = None
            self._blame(live, error)
            return
        self._accept(underway.jobs, picks)

    def _accept(self, jobs: Sequence[Job | None], picks: Sequence[Pick]) -> None:
        """Hand the tokens of a decode step to the jobs of its rows."""
        for job, pick in self._with_picks(jobs, picks):
            self._shares.charge(job.ticket.client, 1)
            self._advance(job, pick)

    def _compact(self) -> int:
        """Move rows that decode to the front; returns how many there are."""
        decoding = [job for job in self._rows if job is not None and job.decodes]
        count = len(decoding)
        if count and decoding[-1].row >= count:
            late = [job for job in decoding if job.row >= count]
            for row in range(count):
                occupant = self._rows[row]
                if occupant is None or not occupant.decodes:
                    self._move(late.pop(), row)
        return count

    def _move(self, job: Job, row: int) -> None:
        """Give a job another row; its occupant takes the old one."""
        other, old = self._rows[row], job.row
        self._cache.swap(old, row)
        self._rows[row], self._rows[old] = job, other
        job.row = row
        if other is not None:
            other.row = old

    def _decode_rows(self, first: int, jobs: list[Job | None]) -> None:
        """A decode step of consecutive rows; None skips a row."""
        started = time.perf_counter()

        def call() -> list[Pick]:
            tokens, draws = self._step_operands(jobs)
            picks = [] if max(tokens) < 0 else self._decoder.decode(tokens, first, draws)
            self._decode_seconds = time.perf_counter() - started
            return picks

        self._accept(jobs, self._attempt(call, jobs) or [])

    def _step_operands(self, jobs: Sequence[Job | None]) -> tuple[list[int], Inputs]:
        """The tokens of a decode step, -1 for rows that skip it, and its draws."""
        tokens: list[int] = [-1] * len(jobs)
        samplers: list[Sampler | None] = [None] * len(jobs)
        for i, job in enumerate(jobs):
            if job is not None and job.row >= 0:
                tokens[i], samplers[i] = self._next_token(job)
        return tokens, self._sampling.draw(samplers)

    def _next_token(self, job: Job) -> tuple[int, Sampler | None]:
        """The token that a job decodes next, and the sampler of the one after it.

        After a preemption, tokens that were picked before are decoded again: nothing is drawn for them.
        """
        sequence = job.sequence
        fed = len(self._cache.tokens[job.row]) - len(sequence.prompt)
        return sequence.tokens[fed], sequence.sampler if fed == len(sequence.tokens) - 1 else None

    def _attempt(self, call: Callable[[], Result], jobs: Sequence[Job | None]) -> Result | None:
        """Run a call for some rows. An error ends the request at fault alone, and gives None."""
        for job in jobs:
            if job is not None and job.sequence.sampler.changes:
                self._guarded(job, job.sequence.sampler.draw)
        while True:
            live = [job for job in jobs if job is not None and job.row >= 0]
            try:
                return call() if live else None
            except PoolFull:
                self._make_room()
            except Exception as error:
                self._blame(live, error)
                return None

    def _blame(self, live: Sequence[Job], error: Exception) -> None:
        """End the request of a call that failed; of several, find out which one is at fault."""
        for job in live:
            if len(live) == 1:
                self._fail(job, error)
            else:
                job.failed_at = len(job.tokens)  # so that the next calls tell whose fault it is
                if self.pool.spec.states:  # they may have changed before the call failed
                    self._preempt(job)

    def _with_picks(self, jobs: Sequence[Job | None], picks: Sequence[Pick]) -> Iterator[tuple[Job, Pick]]:
        """The jobs that still have a row, with their picks."""
        for job, pick in zip(jobs, picks, strict=bool(picks)):
            if job is not None and job.row >= 0:
                if len(self._cache.tokens[job.row]) >= job.failed_at:
                    job.failed_at = 0
                yield job, pick

    def _guarded(self, job: Job, function: Callable[[], object]) -> None:
        """Call a function of a request, such as its grammar; an error ends the request."""
        try:
            function()
        except Exception as error:
            self._fail(job, error)

    def _make_room(self) -> None:
        """Preempt the youngest running request: pages are needed, and all are in use."""
        jobs = sorted((job for job in self._rows if job is not None), key=lambda job: job.number)
        if len(jobs) > 1:
            self._preempt(jobs[-1])
        else:
            self._fail(jobs[0], ResourceError("KV cache: no page is left", hint="a larger cache_bytes"))

    def _preempt(self, job: Job) -> None:
        """Take the row of a job; it goes back to its place in the queue. Its pages may survive in the prefix cache."""
        self._counters.preemptions += 1
        self._release(job)
        place = next((i for i, other in enumerate(self._waiting) if other.number > job.number), len(self._waiting))
        self._waiting.insert(place, job)
        with self._lock:
            self._queued, self._queued_tokens = self._queued + 1, self._queued_tokens + len(job.sequence.prompt)

    def _advance(self, job: Job, pick: Pick) -> None:
        """Accept the token that a call picked for a job, unless its next token is known."""
        sequence = job.sequence
        if len(self._cache.tokens[job.row]) < len(sequence.prompt) + len(sequence.tokens):
            return
        before = len(sequence.tokens)
        try:
            piece = sequence.accept(pick)
        except Exception as error:
            self._fail(job, error)
            return
        now = time.perf_counter()
        if before:
            self._counters.between_tokens.observe(now - job.last_token)
        else:
            self._counters.first_token.observe(now - job.ticket.submitted)
        job.last_token = now
        self._counters.generated_tokens += len(sequence.tokens) - before
        self._deliver(job, piece)
        if sequence.finish_reason and not job.ticket.done:
            self._end(job, sequence.finish_reason)
        if job.row >= 0:
            self._cache.resolve(job.row, sequence.tokens[-1])

    # -- admission --
    def _admit(self) -> None:
        """Give rows to waiting requests: by turns between clients, in order of arrival within a client."""
        if not self._waiting:
            return
        while (job := self._next_waiting()) is not None:
            row = self._free_row(job)
            if row is None or not self._start(job, row):
                return

    def _next_waiting(self) -> Job | None:
        """The request to admit next; None if all wait for a prompt that begins alike."""
        full = None not in self._rows  # then only clients without a row may get one
        seen = {job.ticket.client: LOOKAHEAD for job in self._rows if full and job is not None}
        ready: dict[str, Job] = {}
        for job in self._waiting:
            client = job.ticket.client
            if client not in ready and seen.get(client, 0) < LOOKAHEAD:
                seen[client] = seen.get(client, 0) + 1
                if not self._worth_waiting(job):
                    ready[client] = job
        return ready[self._shares.choose(ready)] if ready else None

    def _worth_waiting(self, job: Job) -> bool:
        """Whether a prompt that is being prefilled begins like this one, and its pages are not cached yet."""
        spec, prompt = self.pool.spec, job.sequence.prompt
        for other in self._rows:
            if other is None or other.decodes or other.ticket.namespace != job.ticket.namespace:
                continue
            if spec.rope_of_length(len(other.sequence.prompt)) != spec.rope_of_length(len(prompt)):
                continue
            shared = min(common(other.sequence.prompt, prompt), len(prompt) - 1)
            if spec.states:
                shared = min(shared, _last_cut(other.sequence.prompt)) // CUT * CUT
            if shared >= WORTH_WAITING and shared >= self._known(job) + WORTH_WAITING:
                return True
        return False

    def _known(self, job: Job) -> int:
        """Length of the cached prefix of a prompt."""
        prompt, namespace = job.sequence.prompt, self._namespace(job)
        if namespace is None:
            return len(prompt)
        with self.pool.changing():
            return self.pool.find((*namespace, self.pool.spec.rope_of_length(len(prompt))), prompt[:-1])[1]

    def _namespace(self, job: Job) -> tuple[str, ...] | None:
        """The namespace of the prefix cache; None if nothing is cached, because every token must run."""
        return None if self._execution.captures is not None else (self._execution.digest, job.ticket.namespace)

    def _free_row(self, job: Job) -> int | None:
        """A free row; a client without one may take that of a client with more than its share."""
        if None in self._rows:
            return self._rows.index(None)
        held: dict[str, list[Job]] = {}
        for running in self._rows:
            if running is not None:
                held.setdefault(running.ticket.client, []).append(running)
        most = max(held.values(), key=len)
        if job.ticket.client in held or len(most) == 1 or len(most) * (len(held) + 1) <= self.rows:
            return None
        youngest = max(most, key=lambda each: each.number)
        row = youngest.row
        self._preempt(youngest)
        return row

    def _start(self, job: Job, row: int) -> bool:
        """Begin the prefill of a request in a row; False if there are too few pages."""
        prompt, running = job.sequence.prompt, [j.row for j in self._rows if j is not None]
        prefix = job.tokens if self._plain else list(prompt)
        limit = self.pool.limit
        if limit is not None and running:
            room = limit - self._cache.page_bytes(running) - WATERMARK * limit
            if self.pool.bytes_for(len(job.sequence.prompt) + len(job.sequence.tokens) + 1) > room:
                return False
        namespace, cached = self._namespace(job), 0
        if namespace is not None:
            try:
                cached = self._cache.restore(row, prefix, namespace)
            except PoolFull:
                return False
        self._waiting.remove(job)
        with self._lock:
            self._queued, self._queued_tokens = self._queued - 1, self._queued_tokens - len(prompt)
        self._rows[row], job.row, job.prefix, job.decodes = job, row, prefix, False
        if not job.started:
            job.started = True
            job.sequence.begin(cached)
            self._counters.queue.observe(time.perf_counter() - job.ticket.submitted)
            self._counters.prompt_tokens += len(prompt)
            self._counters.cached_tokens += cached
        return True

    # -- prefill --
    def _next_slice(self) -> Slice | None:
        """What to prefill next: part of the prompt whose turn it is, with others if they fit."""
        jobs = [job for job in self._rows if job is not None and not job.decodes]
        if not jobs:
            return None
        self._finish_step()  # text that is known should not wait for a slice
        jobs.sort(key=lambda job: job.number)
        client = self._shares.choose({job.ticket.client for job in jobs}) if len(jobs) > 1 else jobs[0].ticket.client
        first = next(job for job in jobs if job.ticket.client == client)
        budget = self._slice_tokens()
        part = Slice([first], [self._slice_end(first, budget)], False)
        for job in jobs:
            if job is not first and not job.alone and not first.alone:
                part = self._with(part, job, budget)
        joins = self._stall < math.inf and any(job is not None and job.decodes for job in self._rows)
        return replace(part, ragged=True) if joins and self._gains(part) else part

    def _with(self, part: Slice, job: Job, budget: int) -> Slice:
        """The slice with another job, if its prompt fits: of similar length, or without padding."""
        larger = Slice([*part.jobs, job], [*part.ends, self._slice_end(job, budget)], part.ragged)
        widths = self._widths(larger)
        waste = 1.0 if self.pool.spec.states else call_sizes.WASTE  # the delta rule's way depends on the width
        if not part.ragged and max(widths) * len(widths) <= min(budget, waste * sum(widths)):
            return larger
        return replace(larger, ragged=True) if sum(widths) <= budget and self._gains(larger) else part

    def _widths(self, part: Slice) -> list[int]:
        """Tokens of each job in a slice."""
        return [end - len(self._cache.tokens[job.row]) for job, end in zip(part.jobs, part.ends, strict=True)]

    def _gains(self, part: Slice) -> bool:
        """Whether a ragged call is faster than several: it reads the weights once, but keys and values per token."""
        if not self._ragged or any(job is not None and job.alone for job in self._rows):
            return False
        again = sum(n * self.pool.bytes_for(end) for n, end in zip(self._widths(part), part.ends, strict=True))
        return again <= READ_AGAIN * self._weight_bytes

    @cached_property
    def _weight_bytes(self) -> int:
        return _weight_bytes(self._model)

    def _slice_tokens(self) -> int:
        """Tokens of the next slice: full chunks while nobody decodes, otherwise what is left of `stall` seconds."""
        chunk = call_sizes.chunk_tokens(self._execution.compiled.target, self.pool.spec)
        if self._stall == math.inf or not any(job is not None and job.decodes for job in self._rows):
            return chunk
        seconds = max(self._stall - self._decode_seconds, self._stall / 4)
        count = int(self._speed * seconds) if self._speed else 2 * SLICE
        unit = LEAST if count < SLICE else SLICE if count < CUT else CUT
        return min(max(count // unit * unit, LEAST), chunk)

    def _slice_end(self, job: Job, budget: int) -> int:
        """The position at which a slice of a job ends. With recurrent states, cuts do not depend on the budget."""
        begin, end = len(self._cache.tokens[job.row]), len(job.prefix)
        if not self.pool.spec.states:
            return min(begin + budget, end)
        cuts = {begin + max(budget // CUT * CUT, CUT), (begin // CHECKPOINT + 1) * CHECKPOINT, end}
        if (last := _last_cut(job.prefix)) > begin:
            cuts.add(last)
        return min(cuts)

    def _prefill(self, part: Slice) -> None:
        """Prefill a slice in one call; rows that decode join a ragged one."""
        jobs, ends = part.jobs, part.ends
        if not part.ragged:
            if len(jobs) > 1:  # rows of a call are consecutive
                free = self._compact()
                for i, job in enumerate(jobs):
                    self._move(job, free + i)
        elif self._stall < math.inf:
            decoding = [job for job in self._rows if job is not None and job.decodes]
            self._count_step(len(decoding))
            jobs, ends = [*decoding, *jobs], [*(len(self._cache.tokens[job.row]) + 1 for job in decoding), *ends]
        before = [len(self._cache.tokens[job.row]) for job in jobs]
        started, call = time.perf_counter(), self._ragged_call if part.ragged else self._padded_call
        for job, pick in self._with_picks(jobs, self._attempt(lambda: call(jobs, ends), jobs) or []):
            count = len(self._cache.tokens[job.row]) - before[jobs.index(job)]
            self._shares.charge(job.ticket.client, count)
            if job.decodes:
                self._advance(job, pick)
            else:
                self._after_slice(job, pick)
        self._measure(sum(end - begin for begin, end in zip(before, ends, strict=True)), started)

    def _padded_call(self, jobs: Sequence[Job], ends: Sequence[int]) -> list[Pick]:
        """Prefill consecutive rows up to the positions `ends`."""
        first = next(job.row - i for i, job in enumerate(jobs) if job.row >= 0)
        rows, offsets, lengths, samplers = list[list[int]](), list[int](), list[int](), list[Sampler | None]()
        for job, end in zip(jobs, ends, strict=True):
            begin = len(self._cache.tokens[job.row]) if job.row >= 0 else 0
            rows.append(list(job.prefix[begin:end]) if job.row >= 0 else [])
            offsets.append(begin)
            lengths.append(len(job.prefix))
            samplers.append(self._sampler_after(job, end))
        width = max(len(row) for row in rows)
        places = np.array([i * width + max(len(row) - 1, 0) for i, row in enumerate(rows)], np.int32)
        sampling = BatchSampling().draw(samplers)
        outputs = self._decoder.run(
            rows, offsets, places, first, lengths=lengths, sampling=sampling, pads=self._execution.captures is None
        )
        return self._decoder.picks(outputs)

    def _ragged_call(self, jobs: Sequence[Job], ends: Sequence[int]) -> list[Pick]:
        """Decode rows, and prefill others up to the positions `ends`."""
        live = [(job, end) for job, end in zip(jobs, ends, strict=True) if job.row >= 0]
        rows = [job.row for job, _ in live]
        tokens = [
            [self._next_token(job)[0]] if job.decodes else list(job.prefix[len(self._cache.tokens[job.row]) : end])
            for job, end in live
        ]
        sampling = self._ragged_sampling.draw([self._sampler_after(job, end) for job, end in live])
        picks = dict(zip(rows, self._decoder.run_ragged(rows, tokens, sampling), strict=True))
        return [picks.get(job.row, picks[rows[0]]) for job in jobs]

    def _sampler_after(self, job: Job, end: int) -> Sampler | None:
        """The sampler of a job, if the token after position `end` is not known."""
        sequence = job.sequence
        return sequence.sampler if job.row >= 0 and end == len(sequence.prompt) + len(sequence.tokens) else None

    def _after_slice(self, job: Job, pick: Pick) -> None:
        """Keep what later prompts can reuse; a prompt that is complete gets its first token."""
        namespace, count = self._namespace(job), len(self._cache.tokens[job.row])
        if namespace is not None and (count % CHECKPOINT == 0 or count == _last_cut(job.prefix)):
            self._cache.keep_state(job.row)
        if count < len(job.prefix):
            return
        job.decodes = True
        if namespace is not None:
            self._guarded(job, lambda: self._cache.publish(job.row, namespace))
        if job.row >= 0:
            self._advance(job, pick)

    def _measure(self, tokens: int, started: float) -> None:
        if tokens >= LEAST:
            speed = tokens / max(time.perf_counter() - started, 1e-9)
            smooth = (1 - SMOOTHING) * self._speed + SMOOTHING * speed
            self._speed = min(smooth, speed) if self._speed else speed

    # -- ends --
    def _deliver(self, job: Job, piece: str) -> None:
        """Hand over new text; an error of the receiver ends the request."""
        if piece and job.ticket.on_piece is not None and not job.ticket.done:
            try:
                job.ticket.on_piece(job.ticket, piece)
            except Exception as error:
                self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        """End a request with an error."""
        job.ticket.exception = error
        if not isinstance(error, RlxError):
            cause = error
            error = KernelError(f"request: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        job.ticket.error = error
        self._end(job, "error")

    def _end(self, job: Job, reason: str) -> None:
        """End a request and release its row."""
        ticket = job.ticket
        if ticket.done:
            return
        if job.row >= 0:
            self._release(job)
        else:
            if job in self._waiting:
                self._waiting.remove(job)
            with self._lock:
                self._queued, self._queued_tokens = self._queued - 1, self._queued_tokens - len(job.sequence.prompt)
        job.sequence.close()
        ticket.done = True
        self._shares.keep({job.ticket.client for job in (*self._waiting, *self._rows) if job is not None})
        self._counters.requests[reason] += 1
        self._counters.request.observe(time.perf_counter() - ticket.submitted)
        if ticket.on_piece is not None:
            try:
                ticket.on_piece(ticket, "")
            except Exception as error:
                ticket.error = ticket.error or KernelError(f"on_piece: {type(error).__name__}: {error}")

    def _release(self, job: Job) -> None:
        """Free the row of a job; its pages go to the prefix cache."""
        row, job.row = job.row, -1
        self._rows[row] = None
        if self._underway is not None:
            self._underway.jobs = [None if other is job else other for other in self._underway.jobs]
        self._cache.release(row, None if isinstance(job.ticket.error, KernelError) else self._namespace(job))


def _last_cut(tokens: Sequence[int]) -> int:
    """The last position before the end of a prompt at which it may be cut and its state reused."""
    return max(len(tokens) - 1, 0) // CUT * CUT


def _longest(pool: PagePool) -> int:
    """The longest sequence that the pool has pages for, with one to spare for a copy."""
    if pool.limit is None or not pool.pages:
        return pool.context
    page, limit = pool.spec.layout.page, pool.limit - pool.bytes_for(1)
    blocks = next((n for n in range(pool.max_blocks, 0, -1) if pool.bytes_for(n * page) <= limit), 0)
    return min(pool.context, blocks * page)


def _weight_bytes(model: LanguageModel) -> int:
    return sum(buffer.nbytes for buffer in model.compiled.executable.weights.values())
