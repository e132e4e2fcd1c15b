"""The scheduler: every request has the bits that it has alone, whatever else runs, ends, fails or waits.

The oracle is the same request alone: `model.generate` in a model of its own with an empty prefix cache, which other
tests compare with NumPy and transformers.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
import tiny_mamba

from rlx.engine.language_model import Completion, LanguageModel
from rlx.engine.sampler import Sampling
from rlx.engine.scheduler import Request, Scheduler, Ticket
from rlx.errors import RequestError

from .conftest import STORIES, language_model
from .test_recurrent import write_hybrid

CONTEXT, VOCAB = 512, 40  # tokens of prompts are below the vocabulary of every model
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
    draw = random.Random(seed)
    beginnings = [[draw.randrange(3, VOCAB) for _ in range(200)] for _ in range(3)]
    pages = draw.choice((7, 12, 40))
    scheduler = Scheduler(
        of.model, rows=draw.choice((1, 2, 4, 7)), cache_bytes=max(pages * page_bytes(of.model), 1 << 16),
        stall=draw.choice((0.0, 0.2, math.inf)),
    )  # fmt: skip
    sizes = draw.choice(((16,), (32, 64), (16, 48, 128, 256), (256,)))
    monkeypatch.setattr(scheduler, "_slice_tokens", lambda: draw.choice(sizes))
    texts: dict[Ticket, str] = {}
    events: Counter[str] = Counter()

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
