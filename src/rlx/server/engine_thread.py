"""The engine thread: loads the models, runs their schedulers in turns, and embeds what waits in one call.

Requests come from any thread; what they produce goes to the event loop once per step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.fair_shares import FairShares
from rlx.engine.language_model import LanguageModel
from rlx.engine.logprobs import Logprob
from rlx.engine.page_pool import PagePool
from rlx.engine.request import OnPiece, Request, Ticket
from rlx.engine.scheduler import Scheduler
from rlx.errors import OverloadedError, RequestError, RlxError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.free_memory import available
from rlx.server.api_errors import stopping

LOG = logging.getLogger("rlx.server")
EMBED_TOKENS = 2048  # per call: while it runs, answers of the call before are written, and other models wait
LOOKAHEAD = 4  # calls among whose rows those of similar length are chosen
MAX_EMBEDDINGS = 512  # requests that wait, and
MAX_EMBEDDING_TOKENS = 1 << 22  # their tokens; one request may have more
MAX_CACHE = 8 << 30  # bytes of keys and values, unless a setting says otherwise, and
CACHE_SHARE = 4  # at most a quarter of the free memory
IDLE_S = 0.5
MAX_FAILURES = 3  # steps in a row that may raise before the server is not ready
STUCK_S = 60.0  # a step that takes longer is stuck: the server is not ready

Loader = Callable[[], Any]
Deliver = Callable[[Any], None]  # on the event loop


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a sequence, with the log-probabilities of its tokens and where in the text these begin.

    The last piece has no text.
    """

    text: str
    logprobs: Sequence[tuple[int, Logprob]] = ()


@dataclass(eq=False)
class EmbeddingJob:
    """Rows of token ids of one request."""

    rows: Sequence[Sequence[int]]
    done: Callable[[Array | BaseException], None]  # called on the event loop
    client: str = ""  # for fair shares
    cancelled: bool = False  # its client has left
    vectors: dict[int, Array] = field(default_factory=dict)  # by row

    @property
    def left(self) -> Iterator[int]:
        """Rows that are not embedded."""
        return (i for i in range(len(self.rows)) if i not in self.vectors)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.rows))


class EmbeddingQueue:
    """Embeds the rows of all requests that wait in one call."""

    def __init__(self, model: EmbeddingModel) -> None:
        self._model = model
        self._waiting: dict[EmbeddingJob, None] = {}  # in order of arrival
        self._tokens = 0  # of their rows
        self._lock = threading.Lock()
        self._shares = FairShares()
        self._closed = False

    def submit(self, job: EmbeddingJob) -> None:
        with self._lock:
            if self._closed:
                raise stopping()
            if len(self._waiting) >= MAX_EMBEDDINGS:
                raise OverloadedError(f"{MAX_EMBEDDINGS} requests wait already", retry_after=1.0)
            if self._tokens and self._tokens + job.tokens > MAX_EMBEDDING_TOKENS:
                raise OverloadedError(f"{self._tokens} tokens wait to be embedded already", retry_after=1.0)
            self._waiting[job] = None
            self._tokens += job.tokens

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def step(self, deliver: Callable[[Deliver, Any], None]) -> bool:
        """Embed what waits, up to a number of tokens; whether there was anything. A large job takes several steps."""
        rows = self._next_rows()
        if not rows:
            return False
        jobs = dict.fromkeys(job for job, _ in rows)
        try:
            vectors = self._model.embed_tokens([job.rows[i] for job, i in rows])
        except Exception as error:
            for job in jobs:
                self._remove(job)
                deliver(job.done, error)
            return True
        for (job, i), vector in zip(rows, vectors, strict=True):
            job.vectors[i] = vector
        for job in jobs:
            if len(job.vectors) == len(job.rows):
                self._remove(job)
                deliver(job.done, np.stack([job.vectors[i] for i in range(len(job.rows))]))
        return True

    def _next_rows(self) -> list[tuple[EmbeddingJob, int]]:
        """The next rows, as many as one call takes: the first by turns between clients, then those of similar length.

        They are chosen among the next rows by turns, in order of arrival within a client, that fill several calls: rows
        of similar length need little padding. Jobs whose client has left are dropped.
        """
        with self._lock:
            jobs = list(self._waiting)
        for job in [job for job in jobs if job.cancelled]:
            self._remove(job)
            jobs.remove(job)
        queues: dict[str, list[EmbeddingJob]] = {}
        for job in jobs:
            queues.setdefault(job.client, []).append(job)
        if not queues:
            return []
        self._shares.keep(queues)
        self._shares.choose(queues)  # gives clients that are new their credit
        turns, size, following = self._shares.copy(), 0, list[tuple[EmbeddingJob, int]]()
        left = {client: ((job, i) for job in of for i in job.left) for client, of in queues.items()}
        while left and size < LOOKAHEAD * EMBED_TOKENS:
            client = turns.choose(left)
            row = next(left[client], None)
            if row is None:
                del left[client]
                continue
            following.append(row)
            turns.charge(client, _tokens(row))
            size += _tokens(row)
        first, size, rows = following[0], 0, list[tuple[EmbeddingJob, int]]()
        for row in sorted(following, key=lambda row: abs(_tokens(row) - _tokens(first))):
            size += _tokens(row)
            if rows and size > EMBED_TOKENS:
                break
            rows.append(row)
            self._shares.charge(row[0].client, _tokens(row))
        return rows

    def close(self, deliver: Callable[[Deliver, Any], None]) -> None:
        """End the jobs that wait: the server stops."""
        with self._lock:
            self._closed = True
            jobs, self._waiting, self._tokens = self._waiting, {}, 0
        for job in jobs:
            deliver(job.done, stopping())

    def _remove(self, job: EmbeddingJob) -> None:
        with self._lock:
            if job in self._waiting:
                del self._waiting[job]
                self._tokens -= job.tokens


def _tokens(row: tuple[EmbeddingJob, int]) -> int:
    job, i = row
    return len(job.rows[i])


@dataclass(eq=False)
class _Job:
    """Work between two steps of the engine."""

    steps: Iterator[int]  # each says how many tokens it took
    future: asyncio.Future[None]
    client: str
    tokens: int  # that are left


@dataclass
class Served:
    """A model, and what runs its requests."""

    name: str
    model: Any
    scheduler: Scheduler | None = None
    embeddings: EmbeddingQueue | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    reserved: int = 0  # requests that are read and will be queued, counted on the event loop

    @property
    def has_room(self) -> bool:
        """Whether another request can be queued, with all that are being read."""
        return self.scheduler is None or self.scheduler.has_room(self.reserved + 1)

    @property
    def language(self) -> LanguageModel:
        if not isinstance(self.model, LanguageModel):
            raise RequestError(f"model: {self.name} gives vectors, not text", hint="use /v1/embeddings")
        return self.model

    @property
    def embedding(self) -> EmbeddingModel:
        if not isinstance(self.model, EmbeddingModel):
            raise RequestError(f"model: {self.name} generates text and has no embeddings", hint="serve an encoder")
        return self.model


class EngineThread:
    """Owns the models. `start` returns at once; `loaded` is set when requests are taken."""

    def __init__(
        self, loaders: Mapping[str, Loader], *, rows: int | None = None, cache_bytes: int | None = None,
        max_queued: int = 512, max_queued_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._loaders = loaders
        self._options: dict[str, Any] = {
            "rows": rows, "cache_bytes": cache_bytes, "max_queued": max_queued, "max_queued_tokens": max_queued_tokens,
        }  # fmt: skip
        self.served: dict[str, Served] = {}
        self.loaded = threading.Event()
        self.failure: BaseException | None = None  # of loading
        self.active = 0  # requests, counted on the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: list[tuple[Deliver, Any]] = []
        self._jobs: list[_Job] = []
        self._jobs_lock = threading.Lock()
        self._job_shares = FairShares()
        self._wake = threading.Event()
        self._stopping = False
        self._step_began = 0.0  # clock; 0: no step runs
        self._failures: Counter[str] = Counter()  # steps in a row that raised, by model
        self._thread = threading.Thread(target=self._run, name="rlx-engine", daemon=True)

    # -- event loop --
    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its step, and close the models."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, and the engine is alive."""
        began = self._step_began
        stuck = bool(began) and time.monotonic() - began > STUCK_S
        broken = max(self._failures.values(), default=0) >= MAX_FAILURES
        return self.loaded.is_set() and self._thread.is_alive() and not (stuck or broken or self._stopping)

    def submit(
        self, served: Served, requests: Sequence[Request], receivers: Sequence[Callable[[Piece], None]], *,
        streams: bool,
    ) -> list[Ticket]:  # fmt: skip
        """Run all of the requests, or raise; from any thread.

        Their pieces are delivered to the receivers on the event loop: one at the end that has no text, and before it
        all others, if it `streams`.
        """
        assert served.scheduler is not None

        def on_piece(deliver: Callable[[Piece], None]) -> OnPiece:
            def post(ticket: Ticket, text: str) -> None:
                if streams or not text:
                    # log-probabilities are taken here: the sequence is ahead of what the event loop has seen of it
                    self._post(deliver, Piece(text, ticket.sequence.take_logprobs()))

            return post

        try:
            tickets = served.scheduler.submit_all(requests, [on_piece(deliver) for deliver in receivers])
        except RequestError:
            if self._stopping:  # the scheduler is closed
                raise stopping() from None
            raise
        self._wake.set()
        return tickets

    def embed(self, served: Served, job: EmbeddingJob) -> None:
        assert served.embeddings is not None
        served.embeddings.submit(job)
        self._wake.set()

    async def run(self, steps: Iterator[int], client: str = "", tokens: int = 0) -> None:
        """Run an iterator to its end, one item between two steps of the engine, or until nobody awaits it.

        Each item says how many tokens it took, of `tokens` in all: clients take turns by them. Raises OverloadedError
        if as many wait as may.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        most, most_tokens = self._options["max_queued"], self._options["max_queued_tokens"]
        with self._jobs_lock:
            if self._stopping:
                raise stopping()
            waiting = sum(job.tokens for job in self._jobs)
            too_many = most_tokens is not None and self._jobs and waiting + tokens > most_tokens
            if len(self._jobs) >= most or too_many:
                message = f"{len(self._jobs)} prompts with {waiting} tokens wait for their log-probabilities"
                raise OverloadedError(f"engine: {message}", retry_after=1.0)
            self._jobs.append(_Job(steps, future, client, tokens))
        self._wake.set()
        await future

    # -- engine thread --
    def _post(self, deliver: Deliver, item: Any) -> None:
        self._outbox.append((deliver, item))

    def _run(self) -> None:
        try:
            for name, loader in self._loaders.items():
                self._add(name, loader())
        except BaseException as error:
            self.failure = error
            self.loaded.set()
            return
        self.loaded.set()
        try:
            while not self._stopping:
                if not self._turn():
                    self._wake.wait(IDLE_S)
                    self._wake.clear()
        finally:
            self._close()

    def _close(self) -> None:
        """End all requests, and close the models."""
        self._stopping = True
        with self._jobs_lock:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            self._post(_resolve, (job.future, stopping()))
        for served in self.served.values():
            if served.scheduler is not None:
                served.scheduler.close()
            if served.embeddings is not None:
                served.embeddings.close(self._post)
        self._flush()
        for served in self.served.values():
            served.model.close()

    def _add(self, name: str, model: Any) -> None:
        if isinstance(model, LanguageModel):
            options = dict(self._options)
            if options["cache_bytes"] is None:
                options["cache_bytes"] = default_cache_bytes(model.caches, len(self._loaders))
            self.served[name] = Served(name, model, scheduler=Scheduler(model, **options))
        elif isinstance(model, EmbeddingModel):
            self.served[name] = Served(name, model, embeddings=EmbeddingQueue(model))
        else:
            raise RequestError(f"serve: {name} is a {model.facts.kind}, expected a decoder or an encoder")

    def _turn(self) -> bool:
        """One step of every model, then one job; whether there was any work."""
        busy = False
        self._step_began = time.monotonic()
        for served in self.served.values():
            try:
                if served.scheduler is not None:
                    busy |= served.scheduler.step()
                elif served.embeddings is not None:
                    busy |= served.embeddings.step(self._post)
                self._failures[served.name] = 0
            except Exception as error:  # a defect: requests that it belongs to time out, the others go on
                self._failures[served.name] += 1
                LOG.error("%s: a step failed: %s", served.name, type(error).__name__, exc_info=not_private(error))
        busy |= self._step_job()
        self._step_began = 0.0
        self._flush()
        return busy

    def _step_job(self) -> bool:
        """One item of the job whose turn it is: by turns between clients, then between the jobs of a client."""
        with self._jobs_lock:
            self._jobs = [job for job in self._jobs if not job.future.cancelled()]
            if not self._jobs:
                return False
            clients = {job.client for job in self._jobs}
            self._job_shares.keep(clients)
            client = self._job_shares.choose(clients)
            job = next(job for job in self._jobs if job.client == client)
            self._jobs.remove(job)
        try:
            tokens = next(job.steps)
        except StopIteration:
            self._post(_resolve, (job.future, None))
        except Exception as error:
            self._post(_resolve, (job.future, error))
        else:
            self._job_shares.charge(client, tokens)
            job.tokens -= tokens
            with self._jobs_lock:
                self._jobs.append(job)
        return True

    def _flush(self) -> None:
        if self._outbox and self._loop is not None and not self._loop.is_closed():
            items, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_deliver, items)


def default_cache_bytes(pool: PagePool, models: int = 1) -> int:
    """Bytes of keys and values of one of several models, where none are given; at least one whole context.

    Without a limit, requests would be admitted until the process is killed for its memory.
    """
    free = available() if pool.memory.is_host else pool.memory.free_bytes()
    wanted = MAX_CACHE if free is None else min(max(free, 0) // CACHE_SHARE, MAX_CACHE)
    return max(wanted // max(models, 1), pool.bytes_for(pool.context) + pool.bytes_for(1))


def _resolve(outcome: tuple[asyncio.Future[None], Exception | None]) -> None:
    future, error = outcome
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _deliver(items: Sequence[tuple[Deliver, Any]]) -> None:
    for deliver, item in items:
        deliver(item)


def not_private(error: BaseException) -> BaseException | bool:
    """The error for a log, unless its message may quote a request."""
    return False if isinstance(error, RlxError) else error
