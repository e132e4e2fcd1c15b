"""The scheduler: requests join and leave a batch at any step, and each gets the bits that it gets alone.

A step decodes one token of every running row and prefills one slice of a prompt. While anybody decodes, a step takes
about `stall` seconds; bits do not depend on where prompts are cut, so slices may follow the clock, nor on what else is
in a call, so a short slice rides in the call of the rows that decode. `admission` says which requests have a row, and
`prefill_slices` what is prefilled next.

On devices that run behind the host, a decode step starts before the tokens of the step before it are read: they are
inputs of it in device memory, and the host reads text behind the device. A row that turns out to have ended drops the
token that was computed too many.

`model.generate`, `chat` and `stream` step a scheduler of their own in the caller's thread, a server one for all its
requests in a thread of its own, where several models take turns, a step each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlx.engine.admission import Admission
from rlx.engine.counters import Counters
from rlx.engine.decoder import Decoder, DecodeStep, Inputs, Pick
from rlx.engine.kv_cache import CHECKPOINT, last_cut
from rlx.engine.page_pool import PagePool, PoolFull
from rlx.engine.prefill_slices import PrefillSlices, Slice, weight_bytes
from rlx.engine.request import Job, OnPiece, Request, Ticket
from rlx.engine.sampler import BatchSampling, Sampler
from rlx.engine.sequence import Sequence as TokenSequence
from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property

if TYPE_CHECKING:
    from rlx.engine.interventions import Execution
    from rlx.engine.language_model import LanguageModel
    from rlx.engine.statistics import Statistics

Result = TypeVar("Result")
STALL = 0.2  # seconds of a step while anybody decodes
SMALL_MODEL = 600 << 20  # bytes of weights below which more rows pay off


@dataclass
class Underway:
    """A decode step whose tokens have not been read, and the jobs of its rows; None: a row that has ended since."""

    step: DecodeStep
    jobs: list[Job | None]


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
        self.rows = (8 if weight_bytes(model) >= SMALL_MODEL else 16) if rows is None else rows
        self.pool.expect(self.rows)
        self.context = self.pool.longest
        if self.rows < 1 or self.context < 2:
            raise RequestError(
                f"scheduler: {self.rows} rows and {cache_bytes} bytes hold no sequence", hint="a larger cache_bytes"
            )
        self._stall = stall
        self._counters = Counters()
        self._admission = Admission(
            self._execution, self.pool, self.rows, max_queued, max_queued_tokens, self._counters
        )
        self._slices = PrefillSlices(model, self._execution, self.pool, self._admission, stall, self._counters)
        self._sampling, self._ragged_sampling = BatchSampling(), BatchSampling()
        self._underway: Underway | None = None
        self._wakes: SimpleQueue[None] = SimpleQueue()

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
        return self._admission.capacity

    def check_room(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise OverloadedError unless sequences with these prompts can be queued now."""
        self._admission.check_room(prompts)

    def has_room(self, count: int = 1) -> bool:
        """Whether so many sequences can be queued now, if their prompts are short enough. Rows that are free count."""
        return self._admission.has_room(count)

    def _ticket(self, sequence: TokenSequence, **options: Any) -> Ticket:
        return Ticket(self._model, sequence, **options, wake=self.wake)

    def _queue(self, tickets: Sequence[Ticket]) -> None:
        self._admission.queue(tickets)
        self.wake()

    def wake(self) -> None:
        """Make `wait` return. One entry is enough: `wait` looks for work after it has taken it."""
        if self._wakes.empty():
            self._wakes.put(None)

    def statistics(self) -> Statistics:
        used, limit = self.pool.used_bytes, self.pool.limit
        return self._counters.snapshot(
            running=len(self._admission.running), waiting=self._admission.queued,
            tokens_waiting=self._admission.queued_tokens, rows=self.rows, kv_used=used / limit if limit else 0.0,
            kv_bytes=used,
        )  # fmt: skip

    # -- the engine's thread --
    def step(self) -> bool:
        """Decode a token of every row and prefill one slice. Returns False when there is nothing to do."""
        started = time.perf_counter()
        self._admission.receive()
        self._admission.end_stopped()
        self._admission.admit()
        part = self._next_slice()
        if part is None or not (part.ragged or self._stall == math.inf):
            self._decode()
            self._admission.admit()
            part = self._next_slice() if self._stall < math.inf else None
        if part is not None:
            self._prefill(part)
        self._counters.step_seconds.observe(time.perf_counter() - started)
        return self.busy

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended."""
        return self._admission.busy

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
        self._admission.close()
        self._underway = None

    @cached_property
    def _decoder(self) -> Decoder:
        """Created by the first step."""
        execution = self._execution
        return Decoder(execution.compiled, self._admission.cache, execution.execute)

    # -- decode --
    def _decode(self) -> None:
        """Decode one token of every row whose prompt is prefilled."""
        if self._run_ahead():
            return
        self._finish_step()
        jobs = self._admission.compact()
        if not jobs:
            return
        self._count_step(len(jobs))
        alone = [job for job in jobs if job.alone]
        if not alone and self._can_look_ahead(jobs):
            self._underway = self._start_rows(jobs)
            return
        for job in alone:
            self._decode_rows(job.row, [job])
        if len(alone) < len(jobs):
            self._decode_rows(0, [None if job in alone else job for job in jobs] if alone else jobs)

    def _count_step(self, rows: int) -> None:
        self._counters.steps += 1
        self._counters.step_rows.observe(rows)

    def _can_look_ahead(self, jobs: Sequence[Job]) -> bool:
        """Whether a step of these rows may be followed by another before its tokens are read."""
        if not self._decoder.feeds or not self._decoder.can_start([0] * len(jobs), 0):
            return False
        return all(job.sequence.sampler.looks_ahead for job in jobs)

    def _run_ahead(self) -> bool:
        """Start the step after the one under way, whose tokens it takes from the device, then read these.

        Returns False where the host must know the tokens first: if rows join or end, or sampling depends on them.
        """
        before, jobs = self._underway, self._admission.decoding
        if before is None or before.jobs != jobs or [job.row for job in jobs] != list(range(len(jobs))):
            return False
        if not self._can_look_ahead(jobs) or not all(map(self._may_continue, jobs)):
            return False
        try:
            sampling = self._sampling.draw([job.sequence.sampler for job in jobs], ahead=1)
            step = self._decoder.start_step([0] * len(jobs), 0, sampling, before.step)
        except Exception:  # the step with known tokens meets it again, and says whose fault it is
            return False
        self._count_step(len(jobs))
        ahead = self._underway = Underway(step, list(before.jobs))
        self._read(before)
        ahead.jobs = _still_decoding(ahead.jobs)  # those that have ended are not kept alive
        return True

    def _may_continue(self, job: Job) -> bool:
        """Whether a job takes one more step after the one under way, as far as the host can tell."""
        sequence = job.sequence
        known = self._admission.position(job) == len(sequence.prompt) + len(sequence.tokens)
        return known and len(sequence.tokens) + 1 < sequence.limit

    def _start_rows(self, jobs: Sequence[Job]) -> Underway | None:
        """Start a decode step of the first rows."""

        def start() -> DecodeStep:
            tokens, draws = self._step_operands(jobs)
            return self._decoder.start_step(tokens, 0, draws)

        step = self._attempt(start, jobs)
        return None if step is None else Underway(step, _still_decoding(jobs))  # others were preempted to make room

    def _finish_step(self) -> None:
        """Read the tokens of the step under way."""
        before, self._underway = self._underway, None
        if before is not None:
            self._read(before)

    def _read(self, underway: Underway) -> None:
        """Read the tokens of a step; an error undoes it, and the step that was started after it."""
        jobs = _still_decoding(underway.jobs)
        live = [job for job in jobs if job is not None]
        if not live:
            return
        try:
            picks = underway.step.picks()
        except Exception as error:
            underway.step.undo()
            self._underway = None
            self._blame(live, error)
            return
        self._accept(jobs, picks)

    def _accept(self, jobs: Sequence[Job | None], picks: Sequence[Pick]) -> None:
        """Hand the tokens of a decode step to the jobs of its rows."""
        for job, pick in self._with_picks(jobs, picks):
            self._admission.shares.charge(job.ticket.client, 1)
            self._advance(job, pick)

    def _decode_rows(self, first: int, jobs: Sequence[Job | None]) -> None:
        """A decode step of consecutive rows; None skips a row."""
        started = time.perf_counter()

        def call() -> list[Pick]:
            tokens, draws = self._step_operands(jobs)
            picks = [] if max(tokens) < 0 else self._decoder.decode(tokens, first, draws)
            self._slices.decode_seconds = time.perf_counter() - started
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
        fed = self._admission.position(job) - len(sequence.prompt)
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
                self._admission.make_room()
            except Exception as error:
                self._blame(live, error)
                return None

    def _blame(self, live: Sequence[Job], error: Exception) -> None:
        """End the request of a call that failed; of several, find out which one is at fault."""
        for job in live:
            if len(live) == 1:
                self._admission.fail(job, error)
            else:
                job.failed_at = len(job.tokens)  # so that the next calls tell whose fault it is
                if self.pool.spec.states:  # they may have changed before the call failed
                    self._admission.preempt(job)

    def _with_picks(self, jobs: Sequence[Job | None], picks: Sequence[Pick]) -> Iterator[tuple[Job, Pick]]:
        """The jobs that still have a row, with their picks."""
        for job, pick in zip(jobs, picks, strict=bool(picks)):
            if job is not None and job.row >= 0:
                if self._admission.position(job) >= job.failed_at:
                    job.failed_at = 0
                yield job, pick

    def _guarded(self, job: Job, function: Callable[[], object]) -> None:
        """Call a function of a request, such as its grammar; an error ends the request."""
        try:
            function()
        except Exception as error:
            self._admission.fail(job, error)

    def _advance(self, job: Job, pick: Pick) -> None:
        """Accept the token that a call picked for a job, unless its next token is known."""
        sequence = job.sequence
        if self._admission.position(job) < len(sequence.prompt) + len(sequence.tokens):
            return
        before = len(sequence.tokens)
        try:
            piece = sequence.accept(pick)
        except Exception as error:
            self._admission.fail(job, error)
            return
        now = time.perf_counter()
        if before:
            self._counters.between_tokens.observe(now - job.last_token)
        else:
            self._counters.first_token.observe(now - job.ticket.submitted)
        job.last_token = now
        self._counters.generated_tokens += len(sequence.tokens) - before
        self._admission.deliver(job, piece)
        if sequence.finish_reason and not job.ticket.done:
            self._admission.end(job, sequence.finish_reason)
        if job.row >= 0:
            self._admission.cache.resolve(job.row, sequence.tokens[-1])

    # -- prefill --
    def _next_slice(self) -> Slice | None:
        """What to prefill next."""
        if not self._admission.prefilling:
            return None
        self._finish_step()  # text that is known should not wait for a slice
        return self._slices.choose()

    def _prefill(self, part: Slice) -> None:
        """Prefill a slice in one call; rows that decode join a ragged one."""
        jobs, ends = part.jobs, part.ends
        if not part.ragged:
            if len(jobs) > 1:  # rows of a call are consecutive
                for row, job in enumerate(jobs, len(self._admission.compact())):
                    self._admission.move(job, row)
        elif self._stall < math.inf:
            decoding = self._admission.decoding
            self._count_step(len(decoding))
            jobs, ends = [*decoding, *jobs], [*(self._admission.position(job) + 1 for job in decoding), *ends]
        before = [self._admission.position(job) for job in jobs]
        started, call = time.perf_counter(), self._ragged_call if part.ragged else self._padded_call
        for job, pick in self._with_picks(jobs, self._attempt(lambda: call(jobs, ends), jobs) or []):
            count = self._admission.position(job) - before[jobs.index(job)]
            self._admission.shares.charge(job.ticket.client, count)
            if job.decodes:
                self._advance(job, pick)
            else:
                self._after_slice(job, pick)
        count = sum(end - begin for begin, end in zip(before, ends, strict=True))
        self._slices.measure(count, time.perf_counter() - started)

    def _padded_call(self, jobs: Sequence[Job], ends: Sequence[int]) -> list[Pick]:
        """Prefill consecutive rows up to the positions `ends`."""
        first = next(job.row - i for i, job in enumerate(jobs) if job.row >= 0)
        rows, offsets, lengths, samplers = list[list[int]](), list[int](), list[int](), list[Sampler | None]()
        for job, end in zip(jobs, ends, strict=True):
            begin = self._admission.position(job) if job.row >= 0 else 0
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
            [self._next_token(job)[0]] if job.decodes else list(job.prefix[self._admission.position(job) : end])
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
        namespace, count = self._admission.namespace(job), self._admission.position(job)
        if namespace is not None and (count % CHECKPOINT == 0 or count == last_cut(job.prefix)):
            self._admission.cache.keep_state(job.row)
        if count < len(job.prefix):
            return
        job.decodes = True
        if namespace is not None:
            self._guarded(job, lambda: self._admission.cache.publish(job.row, namespace))
        if job.row >= 0:
            self._advance(job, pick)


def _still_decoding(jobs: Sequence[Job | None]) -> list[Job | None]:
    """The jobs of rows, with None for those that have ended or wait again."""
    return [job if job is not None and job.decodes else None for job in jobs]
