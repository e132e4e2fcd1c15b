"""Decoding on a device that runs behind the host: steps start before the tokens of the step before are read.

The device is the CPU with a target that says so, whose runs end at once, so every order of starting and reading is that
of a real one. The oracle is the same model on the CPU itself, one step after the other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.backends.base import Enqueued
from rlx.engine.decoder import Decoder, DecodeStep
from rlx.engine.language_model import LanguageModel
from rlx.engine.request import Request
from rlx.engine.sampler import Sampler, Sampling
from rlx.engine.scheduler import Scheduler
from rlx.errors import KernelError
from rlx.models.load import open_checkpoint
from rlx.runtime.session import Session
from rlx.target import Target

from . import test_scheduler
from .test_scheduler import (
    CONTEXT,
    KINDS,
    Alone,
    assert_nothing_leaks,
    finish,
    fuzz,
    is_same,
    plain_requests,
    write,
)


def behind_target(own: Target) -> Target:
    """The target, with results that are read later and calls that are padded."""

    class BehindTarget(type(own)):  # type: ignore[misc]
        __slots__ = ()
        runs_behind = property(lambda self: True)

        def padded(self, tokens: int) -> int:
            return -(-tokens // 8) * 8

    target: Target = BehindTarget(**{f.name: getattr(own, f.name) for f in fields(own)})
    return target


class Behind(Alone):
    """A model on the target above, and the same one on the CPU."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(kind, folder)
        session = Session("cpu", threads=1, target=behind_target(Session("cpu").target))
        self.model = LanguageModel(open_checkpoint(write(kind, folder)), context=CONTEXT, session=session)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Behind]:
    models: dict[str, Behind] = {}

    def get(kind: str) -> Behind:
        if kind not in models:
            models[kind] = Behind(kind, tmp_path_factory.mktemp(kind))
        return models[kind]

    return get


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts decode steps: those that start with known tokens, and those that start ahead."""
    counts: Counter[str] = Counter()
    start = Decoder.start_step

    def counted(self: Decoder, tokens: Any, first: int, sampling: Any, before: DecodeStep | None = None) -> DecodeStep:
        counts["known" if before is None else "ahead"] += 1
        return start(self, tokens, first, sampling, before)

    monkeypatch.setattr(Decoder, "start_step", counted)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests_have_the_bits_they_have_alone(
    kind: str, behind: Callable[[str], Behind], steps: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of them without penalties, which need the tokens: otherwise few batches would look ahead."""
    with_penalties = test_scheduler.random_request

    def request(draw: random.Random, beginnings: list[list[int]], **more: Any) -> Request:
        plain = with_penalties(draw, beginnings, **more)
        sampling = replace(plain.sampling, repetition_penalty=1.0, presence_penalty=0.0)
        return replace(plain, sampling=sampling) if draw.random() < 0.9 else plain

    monkeypatch.setattr(test_scheduler, "random_request", request)
    events: Counter[str] = Counter()
    for seed in range(2):
        events += fuzz(behind(kind), seed, 14, monkeypatch)
    assert events["cached"] and steps["ahead"] and steps["known"]


def test_a_text_runs_ahead_from_its_second_token_to_its_last(
    behind: Callable[[str], Behind], steps: Counter[str]
) -> None:
    of = behind("llama")
    for sampling in (Sampling(), Sampling(temperature=0.9, top_k=20, seed=3, logit_bias={7: 2.0})):
        request = Request([5, 6, 7], 20, (), 2, sampling)
        wanted = of.answer(request)
        steps.clear()
        scheduler = Scheduler(of.model, rows=1)
        ticket = scheduler.submit(request)
        finish(scheduler)
        assert is_same(ticket, wanted)
        assert steps == {
            "known": 1,
            "ahead": 18,
        }  # the first of 20 tokens comes from prefill; none is computed too many


def test_a_stopped_text_drops_the_token_computed_too_many(behind: Callable[[str], Behind], steps: Counter[str]) -> None:
    of = behind("stories")
    request = Request(of.model.token_ids("Once upon a time"), 60, ("the",))
    wanted = of.answer(request)
    assert wanted.finish_reason == "stop"
    steps.clear()
    scheduler = Scheduler(of.model, rows=1)
    ticket = scheduler.submit(request)
    finish(scheduler)
    assert is_same(ticket, wanted) and steps.total() == len(wanted.tokens)
    known = scheduler.pool.find(("", "", ()), [*request.tokens, *wanted.tokens])[1]
    assert known == len(request.tokens) + len(wanted.tokens) - 1  # as without looking ahead: the last one was not fed
    assert_nothing_leaks(scheduler)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"allowed": "function"}])
def test_what_depends_on_the_tokens_is_sampled_after_them(
    settings: dict[str, Any], behind: Callable[[str], Behind], steps: Counter[str]
) -> None:
    of = behind("llama")
    if "allowed" in settings:
        settings = {"allowed": lambda picked: {3 + len(picked) % 5, 20, 21}}
    request = Request([5, 6, 7], 12, (), 0, Sampling(**settings))
    scheduler = Scheduler(of.model, rows=2)
    ticket = scheduler.submit(request)
    finish(scheduler)
    assert ticket.completion().tokens == of._oracle.generate([5, 6, 7], max_tokens=12, **settings).tokens
    assert not steps["ahead"]


@pytest.mark.parametrize("kind", ("llama", "hybrid"))
def test_a_fault_that_is_found_late_ends_one_request_alone(
    kind: str, behind: Callable[[str], Behind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails when it is read, after the next one has started."""
    of = behind(kind)
    requests = plain_requests(5)
    requests[2] = Request([9, 4] * 75, 20, (), 2, Sampling(temperature=1.0, seed=3))  # the only one to reach 155
    enqueue = of.model.compiled.enqueue

    def faulty(inputs: Any, read: Any) -> Enqueued:
        run, at_fault = enqueue(inputs, read), bool((np.asarray(inputs["positions"]) == 155).any())

        class Late(Enqueued):
            def read(self) -> list[Any]:
                if at_fault:
                    raise KernelError("a fault")
                return super().read()

        return Late(run.outputs, read)

    scheduler = Scheduler(of.model, rows=4)
    tickets = [scheduler.submit(request) for request in requests]
    monkeypatch.setattr(of.model.compiled, "enqueue", faulty)
    finish(scheduler)
    monkeypatch.undo()
    assert isinstance(tickets[2].error, KernelError)
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket is tickets[2] or is_same(ticket, of.answer(request))
    assert_nothing_leaks(scheduler)


def test_draws_come_in_order_however_far_ahead() -> None:
    numbers = [Sampler(Sampling(temperature=1.0, seed=5)) for _ in range(2)]
    plain: list[float] = []
    for _ in range(4):
        plain.append(numbers[0].draw()[0])
        numbers[0].accept(1)
    ahead = [numbers[1].draw(1)[0], numbers[1].draw(0)[0]]
    numbers[1].accept(1)
    assert [ahead[1], ahead[0], numbers[1].draw(1)[0]] == plain[:3]


def test_values_inside_and_scores_ignore_the_output_that_feeds(behind: Callable[[str], Behind]) -> None:
    of = behind("llama")
    np.testing.assert_array_equal(of.model.logits([3, 4, 5, 6]), of._oracle.logits([3, 4, 5, 6]))
    assert of.model.score([3, 4, 5, 6]).tokens == of._oracle.score([3, 4, 5, 6]).tokens
    edited = [m.generate([3, 4, 5], max_tokens=5, capture=["layers.0"]) for m in (of.model, of._oracle)]
    assert edited[0].tokens == edited[1].tokens
    np.testing.assert_array_equal(*(c.captured["layers.0"] for c in edited if c.captured is not None))
