"""The scheduler: every request has the bits that it has alone, whatever else runs, ends, fails or waits.

The oracle is the same request alone: `model.generate` in a model of its own with an empty prefix cache, which other
tests compare with NumPy and transformers.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
import tiny_mamba
from limits import LONGEST_S

from rlx.engine import page_pool
from rlx.engine.decoder import Decoder
from rlx.engine.language_model import Completion, LanguageModel
from rlx.engine.request import Request, Ticket
from rlx.engine.sampler import Sampling
from rlx.engine.scheduler import Scheduler
from rlx.errors import KernelError, OverloadedError, RequestError, RlxError
from rlx.sampling import token_bits

from .conftest import STORIES, language_model
from .test_recurrent import write_hybrid

CONTEXT, VOCAB = 512, 40  # tokens of prompts are below the vocabulary of every model
SOON = 0.05  # seconds: nothing is expected to happen within them
KINDS = ("llama", "window", "longrope", "dynamic", "mamba", "hybrid", "stories")


def write(kind: str, folder: Path) -> Path:
    """A model of one of the kinds of caches."""
    if kind == "stories":
        if not STORIES.exists():
            pytest.skip(f"{STORIES} is absent")
        return STORIES
    sizes: dict[str, Any] = {"max_position_embeddings": CONTEXT}
    if kind == "mamba":
        tiny_mamba.write(folder)
    elif kind == "hybrid":
        write_hybrid(folder)
    elif kind == "window":
        tiny_llama.write(folder, model_type="mistral", sliding_window=40, **sizes)
    elif kind == "dynamic":
        tiny_llama.write(folder, rope_scaling={"rope_type": "dynamic", "factor": 8.0}, **sizes | {
            "max_position_embeddings": 96})  # fmt: skip
    elif kind == "longrope":
        factors = {"short_factor": [1.0] * 6, "long_factor": [1.5] * 6}
        scaling = {"rope_type": "longrope", "original_max_position_embeddings": 100, **factors}
        tiny_llama.write(folder, rope_scaling=scaling, **sizes)
    else:
        tiny_llama.write(folder, **sizes)
    return folder


class Alone:
    """A model, and what it answers to each request alone."""

    def __init__(self, kind: str, folder: Path) -> None:
        path = write(kind, folder)
        self.model, self._oracle = (language_model(path, context=CONTEXT, threads=1) for _ in range(2))

    def answer(self, request: Request, context: int = CONTEXT) -> Completion:
        """The answer of a model whose context is as long as this."""
        self._oracle.caches.clear()
        sampling = {name: getattr(request.sampling, name) for name in Sampling.__dataclass_fields__}
        if request.sampling.temperature is None:
            sampling = {name: sampling[name] for name in ("seed", "logit_bias", "repetition_penalty")}
        return self._oracle.generate(
            list(request.tokens), max_tokens=min(request.max_tokens or 0, context - len(request.tokens)),
            stop=request.stop, logprobs=request.logprobs, **sampling,
        )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Alone]:
    models: dict[str, Alone] = {}

    def get(kind: str) -> Alone:
        if kind not in models:
            models[kind] = Alone(kind, tmp_path_factory.mktemp(kind))
        return models[kind]

    return get


def random_request(draw: random.Random, beginnings: list[list[int]], **more: Any) -> Request:
    """A request of any length; many begin like others."""
    start = draw.choice(beginnings)[: draw.choice((0, 5, 64, 70, 128, 999))] if draw.random() < 0.6 else []
    tokens = [*start, *(draw.randrange(3, VOCAB) for _ in range(draw.choice((1, 2, 7, 20, 63, 65, 150))))]
    seed, penalty = draw.randrange(1000), draw.choice((1.0, 1.3))
    sampling = Sampling(seed=seed, repetition_penalty=penalty)
    if draw.random() < 0.6:
        sampling = Sampling(
            temperature=draw.choice((0.3, 1.0, 2.0)), top_k=draw.choice((0, 5)), top_p=draw.choice((1.0, 0.8)),
            seed=seed, repetition_penalty=penalty, presence_penalty=draw.choice((0.0, 0.7)),
        )  # fmt: skip
    stop = draw.choice(((), (), ("e",), (" the", "ing")))
    count = draw.choice((0, 1, 2, 9, 30, 70))
    return Request(tokens, count, stop, draw.choice((0, 0, 1, 3)), sampling, **more)


def page_bytes(model: LanguageModel) -> int:
    return model.caches.bytes_for(1)


def is_same(ticket: Ticket, wanted: Completion) -> bool:
    """Equal tokens, text and bits of log-probabilities; of a cancelled request, as far as it went."""
    sequence = ticket.sequence
    count = len(sequence.tokens)
    if ticket.cancelled and not sequence.finish_reason:
        logprobs = None if wanted.logprobs is None else wanted.logprobs[:count]
        return (
            sequence.tokens == wanted.tokens[:count] and wanted.text.startswith(sequence.text)
            and sequence.logprobs == logprobs
        )  # fmt: skip
    done = ticket.completion()
    return (done.tokens, done.text, done.logprobs, done.finish_reason) == (
        wanted.tokens, wanted.text, wanted.logprobs, wanted.finish_reason
    )  # fmt: skip


def fuzz(of: Alone, seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Random requests that arrive at random steps; returns what happened to them."""
    monkeypatch.setattr(page_pool, "SPARE", 256)  # so that rings wrap around within the context
    draw = random.Random(seed)
    beginnings = [[draw.randrange(3, VOCAB) for _ in range(200)] for _ in range(3)]
    pages = draw.choice((7, 12, 40))
    scheduler = Scheduler(
        of.model, rows=draw.choice((1, 2, 4, 7)), cache_bytes=max(pages * page_bytes(of.model), 1 << 16),
        stall=draw.choice((0.0, 0.2, math.inf)),
    )  # fmt: skip
    sizes = draw.choice(((16,), (32, 64), (16, 48, 128, 256), (256,)))
    monkeypatch.setattr(scheduler._slices, "slice_tokens", lambda: draw.choice(sizes))
    weights = draw.choice((0, 1 << 19, 1 << 40))  # no, some, only ragged calls
    monkeypatch.setattr(scheduler._slices, "weight_bytes", weights)
    texts: dict[Ticket, str] = {}
    events: Counter[str] = Counter()
    run_ragged = Decoder.run_ragged

    def counting(decoder: Decoder, *operands: Any) -> Any:
        events["ragged"] += 1
        return run_ragged(decoder, *operands)

    monkeypatch.setattr(Decoder, "run_ragged", counting)

    def on_piece(ticket: Ticket, piece: str) -> None:
        texts[ticket] = texts.get(ticket, "") + piece
        events["ends"] += not piece

    tickets: list[tuple[Ticket, Request]] = []
    while len(tickets) < count or scheduler.busy:
        while len(tickets) < count and draw.random() < 0.3:
            space = {"client": draw.choice("ab"), "namespace": draw.choice(("", "", "other"))}
            request = random_request(draw, beginnings, **space)
            try:
                tickets += [(scheduler.submit(request, on_piece), request) for _ in range(draw.choice((1, 1, 1, 3)))]
            except RequestError as error:
                assert "context holds" in str(error)
                events["too long"] += 1
        if tickets and draw.random() < 0.02:
            draw.choice(tickets)[0].cancel()
        scheduler.step()
    for ticket, request in tickets:
        wanted = of.answer(request, scheduler.context)
        assert is_same(ticket, wanted), f"{request} of seed {seed}"
        assert texts.get(ticket, "") == ticket.sequence.text
        events["cached"] += ticket.sequence.cached > 0
        events["cancelled"] += ticket.cancelled
    statistics = scheduler.statistics()
    events["preempted"] = statistics.preemptions_total
    assert events["ends"] == len(tickets) == sum(statistics.requests_total.values())
    assert statistics.requests_running == statistics.requests_waiting == statistics.tokens_waiting == 0
    assert_nothing_leaks(scheduler)
    events["requests"] = len(tickets)
    return events


def assert_nothing_leaks(scheduler: Scheduler) -> None:
    """All pages are free once the prefix cache is empty."""
    scheduler.pool.clear()
    assert scheduler.pool.used_bytes == 0 and scheduler.pool.tree.nbytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests_under_load_have_the_bits_they_have_alone(
    kind: str, alone: Callable[[str], Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: Counter[str] = Counter()
    for seed in range(3):
        events += fuzz(alone(kind), seed, 14, monkeypatch)
    assert events["cached"] and events["cancelled"]
    assert bool(events["ragged"]) == (kind in ("llama", "window", "stories"))


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_requests_under_load_have_the_bits_they_have_alone(
    kind: str, alone: Callable[[str], Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: Counter[str] = Counter()
    seed = 100
    while events["requests"] < 300:
        events += fuzz(alone(kind), seed, 25, monkeypatch)
        seed += 1
    assert events["cached"] and events["cancelled"] and (events["preempted"] or kind == "mamba")


# -- failures ---------------------------------------------------------------------------------------------------------
def plain_requests(count: int, tokens: int = 20, seed: int = 0, **settings: Any) -> list[Request]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(5, 90))] for _ in range(count)]
    return [Request(p, tokens, (), 2, Sampling(temperature=1.0, seed=i), **settings) for i, p in enumerate(prompts)]


def finish(scheduler: Scheduler) -> int:
    """Steps until nothing is left to do."""
    steps = 1
    while scheduler.step():
        steps += 1
        assert steps < 5000
    return steps


@pytest.mark.parametrize("kind", ("llama", "hybrid"))
@pytest.mark.parametrize("fault", ("prefill", "decode", "memory"))
def test_a_failure_ends_one_request_alone(
    kind: str, fault: str, alone: Callable[[str], Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call fails as long as one request is in it: with its prompt, or with a token of its text."""
    of = alone(kind)
    requests = plain_requests(6)
    broken = requests[3] = Request([9, 4] * 75, 20, (), 2, Sampling(temperature=1.0, seed=3))  # longer than the others
    at = 155 if fault == "decode" else 140
    run = of.model.compiled.run

    def faulty(inputs: Any) -> Any:
        outputs = run(inputs)
        if (inputs["positions"] == at).any():
            raise MemoryError("not enough") if fault == "memory" else KernelError("a fault")
        return outputs

    scheduler = Scheduler(of.model, rows=4)
    tickets = [scheduler.submit(request) for request in requests]
    assert max(len(r.tokens) for r in requests if r is not broken) + 20 < at
    monkeypatch.setattr(of.model.compiled, "run", faulty)
    finish(scheduler)
    monkeypatch.undo()
    error = tickets[3].error
    assert isinstance(error, KernelError) and tickets[3].done and scheduler.statistics().requests_total["error"] == 1
    if fault == "memory":
        assert "MemoryError: not enough" in str(error) and isinstance(error.__cause__, MemoryError)
    with pytest.raises(RlxError):
        tickets[3].completion()
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket is tickets[3] or is_same(ticket, of.answer(request))
    assert_nothing_leaks(scheduler)


def test_errors_of_masks_and_receivers_end_their_request(alone: Callable[[str], Alone]) -> None:
    of = alone("llama")
    requests = plain_requests(5)

    def mask(picked: Any) -> Any:
        if len(picked) == 3:
            raise ValueError("no such rule")
        return None

    def receiver(ticket: Ticket, piece: str) -> None:
        raise OSError("gone")

    for verb in (of.model.generate, lambda tokens, **more: list(of.model.stream(tokens, **more))):
        with pytest.raises(ValueError, match="no such rule"):  # in the caller's thread it is the error itself
            verb(list(requests[0].tokens), max_tokens=20, allowed=mask)
    scheduler = Scheduler(of.model, rows=5)
    grammar = scheduler.submit(Request(requests[1].tokens, 20, sampling=Sampling(allowed=mask)))
    nothing = scheduler.submit(Request(requests[1].tokens, 20, sampling=Sampling(allowed=token_bits([], 97))))
    gone = scheduler.submit(requests[2], receiver)
    others = [scheduler.submit(request) for request in requests[3:]]
    finish(scheduler)
    assert len(grammar.sequence.tokens) == 3 and "ValueError: no such rule" in str(grammar.error)
    assert "no token is left" in str(nothing.error) and "gone" in str(gone.error)
    assert all(is_same(t, of.answer(r)) for t, r in zip(others, requests[3:], strict=True))
    assert_nothing_leaks(scheduler)


# -- cancellation and limits ------------------------------------------------------------------------------------------
def test_cancelling_frees_the_row_within_a_step(alone: Callable[[str], Alone]) -> None:
    of = alone("llama")
    requests = plain_requests(4, seed=1)
    scheduler = Scheduler(of.model, rows=3, stall=1e-9)
    long = Request([5] * 300, 5)
    tickets = [scheduler.submit(r) for r in (*requests[:2], long, requests[2])]
    while len(tickets[1].sequence.tokens) < 3:
        scheduler.step()
    admission = scheduler._admission
    phases = {job.ticket: job.phase for job in (*admission.running, *admission.waiting)}
    assert [phases[t] for t in tickets] == ["decode", "decode", "prefill", "waiting"]
    for ticket in tickets[1:]:
        ticket.cancel()
    assert not any(ticket.done for ticket in tickets)
    scheduler.step()
    assert [ticket.done for ticket in tickets] == [False, True, True, True]
    statistics = scheduler.statistics()
    assert statistics.requests_running == 1 and statistics.requests_waiting == 0
    assert statistics.cancelled_total == {"decode": 1, "prefill": 1, "waiting": 1}
    assert tickets[1].completion().finish_reason == "closed" and len(tickets[1].completion().tokens) >= 3
    finish(scheduler)
    assert is_same(tickets[0], of.answer(requests[0]))
    assert_nothing_leaks(scheduler)


def test_too_many_requests_or_tokens_are_refused(alone: Callable[[str], Alone]) -> None:
    scheduler = Scheduler(alone("llama").model, rows=1, max_queued=3, max_queued_tokens=100)
    request = Request([5] * 40, 2)
    tickets = [scheduler.submit(request) for _ in range(2)]
    with pytest.raises(OverloadedError, match="80 prompt tokens wait, the limit is 100") as overload:
        scheduler.submit(request)
    assert overload.value.retry_after >= 1 and isinstance(overload.value, RequestError)
    tickets.append(scheduler.submit(Request([5] * 20, 2)))
    with pytest.raises(OverloadedError, match="3 requests wait, the limit is 3"):
        scheduler.submit(Request([5], 2))
    assert scheduler.statistics().rejected_total == {"tokens": 1, "requests": 1}
    finish(scheduler)
    assert all(ticket.done and not ticket.error for ticket in tickets)
    with pytest.raises(RequestError, match="the prompt has 600 tokens, the context holds 512"):
        scheduler.submit(Request([5] * 600, 2))
    scheduler.close()
    with pytest.raises(RequestError, match="closed"):
        scheduler.submit(request)


def test_requests_that_belong_together_are_queued_together(alone: Callable[[str], Alone]) -> None:
    scheduler = Scheduler(alone("llama").model, rows=2, max_queued=2)
    request = Request([5] * 10, 2)
    tickets = scheduler.submit_all([request] * 4, [None] * 4)  # two rows are free
    with pytest.raises(OverloadedError, match="4 requests wait, the limit is 2"):
        scheduler.submit(request)
    finish(scheduler)
    assert [ticket.completion().tokens for ticket in tickets] == [tickets[0].sequence.tokens] * 4
    with pytest.raises(RequestError, match="5 sequences, and at most 4 may run and wait"):
        scheduler.submit_all([request] * 5, [None] * 5)
    with pytest.raises(RequestError, match="600 tokens"):
        scheduler.submit_all([request, Request([5] * 600, 2)], [None] * 2)
    assert not scheduler.busy and scheduler.statistics().requests_waiting == 0
    scheduler.submit_all([request] * 3, [None] * 3)
    scheduler.step()
    with pytest.raises(OverloadedError, match="1 requests wait, the limit is 2"):
        scheduler.submit_all([request] * 2, [None] * 2)
    assert scheduler.statistics().requests_waiting == 1
    scheduler.close()


def test_a_deadline_ends_a_text_in_any_phase(alone: Callable[[str], Alone]) -> None:
    of = alone("llama")
    request = plain_requests(1)[0]
    scheduler = Scheduler(of.model, rows=1)
    first = scheduler.submit(Request(request.tokens, 50, (), 2, request.sampling, deadline=time.monotonic() + 1000))
    waiting = scheduler.submit(Request(request.tokens, 50, deadline=time.monotonic() - 1))
    while len(first.sequence.tokens) < 4:
        scheduler.step()
    assert waiting.completion().finish_reason == "length" and waiting.completion().tokens == []
    first.deadline = time.monotonic()
    finish(scheduler)
    done, wanted = first.completion(), of.answer(request)
    assert done.finish_reason == "length" and done.tokens == wanted.tokens[: len(done.tokens)]
    assert 4 <= len(done.tokens) <= 5


# -- order of work ----------------------------------------------------------------------------------------------------
def counted_calls(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes [rows, tokens] of all calls from now on."""
    shapes: list[tuple[int, int]] = []
    compiled = scheduler._execution.compiled
    run = compiled.run

    def counting(inputs: Any) -> Any:
        shapes.append(inputs["tokens"].shape)
        return run(inputs)

    monkeypatch.setattr(compiled, "run", counting)
    return shapes


def test_a_step_is_one_decode_call_and_one_slice(
    alone: Callable[[str], Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever decodes gets a token in every step, however long the prompt that arrives."""
    model = alone("llama").model
    scheduler = Scheduler(model, rows=4, stall=1e-9, cache_bytes=64 * page_bytes(model))
    scheduler._slices.weight_bytes = 0  # ragged calls do not pay off
    tickets = [scheduler.submit(Request([7 + i] * 9, 60)) for i in range(3)]
    while not all(t.sequence.tokens for t in tickets):
        scheduler.step()
    shapes = counted_calls(scheduler, monkeypatch)
    late = scheduler.submit(Request([5, 6] * 25, 4))
    for step in range(1, 13):
        before = [len(t.sequence.tokens) for t in tickets]
        scheduler.step()
        assert [len(t.sequence.tokens) for t in tickets] == [n + 1 for n in before]
        assert shapes == [(3, 1), (1, 4)] * step, "slices are as small as can be: stall is 0"
    scheduler.step()
    assert shapes[24:] == [(3, 1), (1, 2)] and len(late.sequence.tokens) == 1
    scheduler.step()
    assert shapes[26:] == [(4, 1)]


def test_rows_that_decode_join_the_call_of_a_short_slice(
    alone: Callable[[str], Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call, in which every token is a row, until keys and values that are read per token outweigh the weights."""
    of = alone("llama")
    scheduler = Scheduler(of.model, rows=4, stall=1e-9, cache_bytes=64 * page_bytes(of.model))
    scheduler._slices.weight_bytes = 2 * 4 * of.model.caches.bytes_for(128)
    requests = plain_requests(3, 60)
    tickets = [scheduler.submit(request) for request in requests]
    while not all(t.sequence.tokens for t in tickets):
        scheduler.step()
    shapes = counted_calls(scheduler, monkeypatch)
    requests.append(Request([5, 6] * 75, 4, (), 2))
    tickets.append(scheduler.submit(requests[3]))
    for _ in range(38):
        before = [len(t.sequence.tokens) for t in tickets[:3]]
        scheduler.step()
        assert [len(t.sequence.tokens) for t in tickets[:3]] == [n + 1 for n in before]
    assert shapes == [(7, 1)] * 32 + [(3, 1), (1, 4)] * 5 + [(5, 1)], "the last slice has 2 tokens"
    monkeypatch.undo()
    finish(scheduler)
    assert all(is_same(t, of.answer(r)) for t, r in zip(tickets, requests, strict=True))


def test_prompts_of_unequal_lengths_are_prefilled_without_padding(
    alone: Callable[[str], Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = alone("llama")
    draw = random.Random(5)
    requests = [
        Request([draw.randrange(3, VOCAB) for _ in range(n)], 4, (), 2, Sampling(temperature=1.0, seed=n))
        for n in (100, 60, 7, 90)
    ]
    for weights, wanted in ((1 << 40, [(167, 1), (1, 90), (4, 1)]), (0, [(2, 100), (1, 7), (1, 90), (4, 1)])):
        scheduler = Scheduler(of.model, rows=4, stall=math.inf, cache_bytes=64 * page_bytes(of.model))
        scheduler._slices.weight_bytes = weights
        shapes = counted_calls(scheduler, monkeypatch)
        tickets = [scheduler.submit(request) for request in requests]
        finish(scheduler)
        monkeypatch.undo()
        assert shapes[: len(wanted)] == wanted
        assert all(is_same(t, of.answer(r)) for t, r in zip(tickets, requests, strict=True))


def test_slices_follow_the_clock(alone: Callable[[str], Alone]) -> None:
    scheduler = Scheduler(alone("llama").model, rows=2, stall=0.2)
    assert scheduler._slices.slice_tokens() == 256, "nobody decodes"
    scheduler.submit(Request([7] * 9, 60))
    scheduler.step()
    sizes = []
    for speed in (0.0, 10.0, 100.0, 170.0, 250.0, 700.0, 1e5):
        scheduler._counters.prefill_speed = speed
        sizes.append(scheduler._slices.slice_tokens())
    assert sizes == [32, 4, 16, 32, 48, 128, 256]
    scheduler.close()


def test_prompts_that_begin_alike_are_prefilled_once(
    alone: Callable[[str], Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = alone("llama")
    scheduler = Scheduler(of.model, rows=8, stall=math.inf, cache_bytes=64 * page_bytes(of.model))
    prompt = [random.Random(3).randrange(3, VOCAB) for _ in range(200)]
    requests = [Request(prompt, 5, (), 2, Sampling(temperature=1.0, seed=i)) for i in range(8)]
    shapes = counted_calls(scheduler, monkeypatch)
    tickets = [scheduler.submit(request) for request in requests]
    finish(scheduler)
    assert shapes[:2] == [(1, 200), (7, 1)] and len(shapes) == 2 + 4
    monkeypatch.undo()
    assert [t.sequence.cached for t in tickets] == [0] + [199] * 7
    assert all(is_same(t, of.answer(r)) for t, r in zip(tickets, requests, strict=True))


def test_namespaces_share_nothing(alone: Callable[[str], Alone]) -> None:
    of = alone("llama")
    scheduler = Scheduler(of.model, rows=1, cache_bytes=64 * page_bytes(of.model))
    cached = []
    for namespace in ("a", "a", "b", "", "b"):
        ticket = scheduler.submit(Request([5, 6, 7] * 30, 2, namespace=namespace))
        finish(scheduler)
        cached.append(ticket.sequence.cached)
    assert cached == [0, 89, 0, 0, 89]


def test_a_client_with_many_prompts_does_not_hold_up_another(alone: Callable[[str], Alone]) -> None:
    """The other one waits at most twice as many steps as alone, and one slice."""
    of = alone("llama")
    request = Request([9, 8, 7] * 60, 3, (), 1, client="small")

    def steps_to_first_token(busy: bool) -> int:
        scheduler = Scheduler(of.model, rows=4, stall=1e-9, cache_bytes=200 * page_bytes(of.model))
        flood = plain_requests(50, 400, seed=4, client="big") if busy else []
        tickets = [scheduler.submit(each) for each in flood]
        scheduler.submit(Request([4] * 30, 450, client="third"))  # so that slices are small in both cases
        for _ in range(60 if busy else 5):
            scheduler.step()
        ticket, steps = scheduler.submit(request), 0
        while not ticket.sequence.tokens:
            scheduler.step()
            steps += 1
        if busy:
            assert not any(t.done for t in tickets[4:]), "most of the others still wait"
            finished = ticket
            while not finished.done:
                scheduler.step()
            assert is_same(finished, of.answer(request))
        scheduler.close()
        return steps

    free, busy = steps_to_first_token(False), steps_to_first_token(True)
    assert free > 5 and busy <= 2 * free + 1


def test_two_clients_share_prefill_by_tokens(alone: Callable[[str], Alone]) -> None:
    of = alone("llama")
    scheduler = Scheduler(of.model, rows=4, stall=1e-9, cache_bytes=200 * page_bytes(of.model))
    scheduler.submit(Request([4] * 30, 450, client="third"))
    scheduler.step()
    draw = random.Random(8)
    prompts = {c: [draw.randrange(3, VOCAB) for _ in range(500)] for c in "ab"}
    for client in "aab":
        scheduler.submit(Request([*prompts[client], draw.randrange(3, VOCAB)], 1, client=client))
    counts = []
    for _ in range(40):
        scheduler.step()
        fed = Counter[str]()
        for job in scheduler._admission.prefilling:
            fed[job.ticket.client] += scheduler._admission.position(job)
        counts.append(abs(fed["a"] - fed["b"]))
    assert max(counts) <= 256 + 16, "never further apart than a turn and a slice"
    scheduler.close()


# -- threads and models -----------------------------------------------------------------------------------------------
def test_requests_of_many_threads_are_served_by_one(alone: Callable[[str], Alone]) -> None:
    of = alone("llama")
    requests = plain_requests(24, 12, seed=5)
    wanted = [of.answer(request) for request in requests]
    scheduler = Scheduler(of.model, rows=5)
    tickets: dict[int, Ticket] = {}
    ended: SeenEnds = SeenEnds()
    stopping = threading.Event()

    def engine() -> None:
        while not stopping.is_set():
            if scheduler.wait(SOON):
                scheduler.step()

    def client(first: int) -> None:
        for i in range(first, 24, 8):
            tickets[i] = scheduler.submit(requests[i], ended)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    worker = threading.Thread(target=engine)
    for thread in (worker, *threads):
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    until = time.monotonic() + LONGEST_S
    while len(ended.tickets) < 24 and time.monotonic() < until:
        time.sleep(0.005)
    stopping.set()
    worker.join(LONGEST_S)
    assert all(is_same(tickets[i], wanted[i]) for i in range(24))


class SeenEnds:
    """A receiver that notes which requests have ended."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []

    def __call__(self, ticket: Ticket, piece: str) -> None:
        if not piece:
            assert ticket.done
            self.tickets.append(ticket)


def test_waiting_ends_with_work_or_time(alone: Callable[[str], Alone]) -> None:
    scheduler = Scheduler(alone("llama").model, rows=1)
    started = time.monotonic()
    assert not scheduler.wait(SOON) and time.monotonic() - started >= 0.04
    timer = threading.Timer(0.02, lambda: scheduler.submit(Request([5], 1)))
    timer.start()
    assert scheduler.wait(LONGEST_S)
    finish(scheduler)
    assert not scheduler.busy and not scheduler.step()


def test_wakes_that_nobody_waits_for_are_not_kept(alone: Callable[[str], Alone]) -> None:
    """A server steps its schedulers without waiting for them."""
    scheduler = Scheduler(alone("llama").model, rows=1)
    for _ in range(20):
        scheduler.submit(Request([5], 1)).cancel()
    assert scheduler._wakes.qsize() == 1
    assert scheduler.wait(LONGEST_S) and scheduler._wakes.qsize() == 0
    finish(scheduler)


def test_models_take_turns(alone: Callable[[str], Alone]) -> None:
    parts = [alone("llama"), alone("mamba")]
    schedulers = [Scheduler(of.model, rows=2) for of in parts]
    requests = plain_requests(3, 8, seed=6)
    tickets = [[scheduler.submit(request) for request in requests] for scheduler in schedulers]
    while any([scheduler.step() for scheduler in schedulers]):
        pass
    for of, own in zip(parts, tickets, strict=True):
        assert all(is_same(ticket, of.answer(request)) for ticket, request in zip(own, requests, strict=True))


def test_calls_of_the_model_go_on_beside_a_scheduler(alone: Callable[[str], Alone]) -> None:
    """They share the pool of the model."""
    of = alone("llama")
    requests = plain_requests(4, 10, seed=7)
    scheduler = Scheduler(of.model, rows=4)
    tickets = [scheduler.submit(request) for request in requests]
    for _ in range(3):
        scheduler.step()
    wanted = of.answer(requests[0])
    other = of.model.generate(list(requests[0].tokens), max_tokens=10, logprobs=2, temperature=1.0, seed=0)
    assert (other.tokens, other.logprobs) == (wanted.tokens, wanted.logprobs) and other.usage.cached_tokens
    finish(scheduler)
    assert all(is_same(t, of.answer(r)) for t, r in zip(tickets, requests, strict=True))


def test_statistics_count_what_happened(alone: Callable[[str], Alone]) -> None:
    of = alone("llama")
    scheduler = Scheduler(of.model, rows=2, cache_bytes=40 * page_bytes(of.model))
    for request in plain_requests(3, 6, seed=8):
        scheduler.submit(request)
    steps = finish(scheduler)
    s = scheduler.statistics()
    assert s.generation_tokens_total == 18 and s.requests_total == {"length": 3}
    assert s.prompt_tokens_total == sum(len(r.tokens) for r in plain_requests(3, 6, seed=8))
    assert s.time_to_first_token_seconds.count == s.request_queue_seconds.count == s.request_seconds.count == 3
    assert s.inter_token_latency_seconds.count == 15 and s.step_seconds.count == steps
    assert s.step_rows.sum == 15 and s.step_rows.count == s.steps_total and 0 < s.kv_used_ratio <= 1
    assert s.time_to_first_token_seconds.sum <= s.request_seconds.sum and s.prompt_tokens_per_second > 0


def test_a_cache_that_holds_no_sequence_is_refused(alone: Callable[[str], Alone]) -> None:
    with pytest.raises(RequestError, match="hold no sequence"):
        Scheduler(alone("llama").model, rows=2, cache_bytes=100)
