"""Which parts of which prompts the next call prefills: as many tokens as the time of a step allows, in turns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rlx.engine import call_sizes
from rlx.engine.admission import Admission
from rlx.engine.counters import Counters
from rlx.engine.interventions import Execution
from rlx.engine.kv_cache import CHECKPOINT, CUT, last_cut
from rlx.engine.page_pool import PagePool
from rlx.engine.request import Job
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property

if TYPE_CHECKING:
    from rlx.engine.language_model import LanguageModel

LEAST, SLICE = 4, 16  # tokens: slices are multiples of the first, longer ones of the second, or of CUT
READ_AGAIN = 0.5  # of the weights: keys and values that a ragged call may read more often than one per prompt would
SMOOTHING = 0.3  # of the moving average of prefill speed


@dataclass(frozen=True, slots=True)
class Slice:
    """Parts of prompts that one call prefills, up to the positions `ends`.

    A `ragged` call has no padding, and rows that decode join it.
    """

    jobs: list[Job]
    ends: list[int]
    ragged: bool


class PrefillSlices:
    """Chooses slices. While rows decode, a step takes about `stall` seconds, by the measured speed of prefill."""

    def __init__(
        self, model: LanguageModel, execution: Execution, pool: PagePool, admission: Admission, stall: float,
        counters: Counters,
    ) -> None:  # fmt: skip
        self._model, self._pool, self._admission, self._counters = model, pool, admission, counters
        self._target = execution.compiled.target
        self._stall = stall
        self._ragged = admission.plain and pool.memory.is_host and execution.captures is None
        self.decode_seconds = 0.0  # of the last decode call

    def choose(self) -> Slice | None:
        """What to prefill next: part of the prompt whose turn it is, with others if they fit."""
        jobs = sorted(self._admission.prefilling, key=lambda job: job.number)
        if not jobs:
            return None
        clients = {job.ticket.client for job in jobs}
        client = self._admission.shares.choose(clients) if len(jobs) > 1 else jobs[0].ticket.client
        first = next(job for job in jobs if job.ticket.client == client)
        budget = self.slice_tokens()
        part = Slice([first], [self._slice_end(first, budget)], False)
        for job in jobs:
            if job is not first and not job.alone and not first.alone:
                part = self._with(part, job, budget)
        joins = self._stall < math.inf and self._admission.decoding
        return replace(part, ragged=True) if joins and self._gains(part) else part

    def _with(self, part: Slice, job: Job, budget: int) -> Slice:
        """The slice with another job, if its prompt fits: of similar length, or without padding."""
        larger = Slice([*part.jobs, job], [*part.ends, self._slice_end(job, budget)], part.ragged)
        widths = self._widths(larger)
        waste = 1.0 if self._pool.spec.states else call_sizes.WASTE  # the delta rule's way depends on the width
        if not part.ragged and max(widths) * len(widths) <= min(budget, waste * sum(widths)):
            return larger
        return replace(larger, ragged=True) if sum(widths) <= budget and self._gains(larger) else part

    def _widths(self, part: Slice) -> list[int]:
        """Tokens of each job in a slice."""
        return [end - self._admission.position(job) for job, end in zip(part.jobs, part.ends, strict=True)]

    def _gains(self, part: Slice) -> bool:
        """Whether a ragged call is faster than several: it reads the weights once, but keys and values per token."""
        if not self._ragged or any(job.alone for job in self._admission.running):
            return False
        again = sum(n * self._pool.bytes_for(end) for n, end in zip(self._widths(part), part.ends, strict=True))
        return again <= READ_AGAIN * self.weight_bytes

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights that a call reads."""
        return weight_bytes(self._model)

    def slice_tokens(self) -> int:
        """Tokens of the next slice: full chunks while nobody decodes, otherwise what is left of `stall` seconds."""
        chunk = call_sizes.chunk_tokens(self._target, self._pool.spec)
        if self._stall == math.inf or not self._admission.decoding:
            return chunk
        seconds, speed = max(self._stall - self.decode_seconds, self._stall / 4), self._counters.prefill_speed
        count = int(speed * seconds) if speed else 2 * SLICE
        unit = LEAST if count < SLICE else SLICE if count < CUT else CUT
        return min(max(count // unit * unit, LEAST), chunk)

    def _slice_end(self, job: Job, budget: int) -> int:
        """The position at which a slice of a job ends. With recurrent states, cuts do not depend on the budget."""
        begin, end = self._admission.position(job), len(job.prefix)
        if not self._pool.spec.states:
            return min(begin + budget, end)
        cuts = {begin + max(budget // CUT * CUT, CUT), (begin // CHECKPOINT + 1) * CHECKPOINT, end}
        if (last := last_cut(job.prefix)) > begin:
            cuts.add(last)
        return min(cuts)

    def measure(self, tokens: int, seconds: float) -> None:
        """Record how long the prefill of so many tokens took."""
        if tokens >= LEAST:
            speed, before = tokens / max(seconds, 1e-9), self._counters.prefill_speed
            smooth = (1 - SMOOTHING) * before + SMOOTHING * speed
            self._counters.prefill_speed = min(smooth, speed) if before else speed


def weight_bytes(model: LanguageModel) -> int:
    """Bytes of the weights of a model, as its kernels read them."""
    return sum(buffer.nbytes for buffer in model.compiled.executable.weights.values())
