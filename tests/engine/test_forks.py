"""Models in forked children: they work whatever the other threads of the parent were doing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
import tiny_llama
from cpu_internals import forget_code
from forked import in_child
from test_fork_safe_locks import held

import rlx
from rlx import fork_safe_locks
from rlx.engine.load import load
from rlx.train import sgd

from . import fork_load
from .test_model_snapshot import settle

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


@pytest.fixture(params=["off", "warm"])
def models(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A decoder and an encoder, from their files or from a cached start."""
    tiny_llama.write(tmp_path / "decoder")
    small_bert.write(tmp_path / "encoder", files=small_bert.sentence_transformers("cls"))
    settle()
    monkeypatch.setenv("RLX_CACHE", "off" if request.param == "off" else str(tmp_path / "cache"))
    forget_code(monkeypatch)
    for _ in range(2):
        loaded: list[Any] = [load(tmp_path / kind) for kind in ("decoder", "encoder")]
    return loaded


def test_a_child_uses_models_whose_locks_other_threads_hold(models: list[Any]) -> None:
    todo = fork_load.jobs(*models)
    wanted = {name: job() for name, job in todo.items()}
    step = training()
    step.run({"x": np.ones(3, np.float32)})
    taken = [lock for lock in fork_safe_locks.alive() if lock.waits is None]
    owners = [*models, *(m.compiled for m in models), *(m._session.weights for m in models), models[0].caches]
    assert {id(o._lock) for o in owners} <= {id(lock) for lock in taken}

    def work() -> bool:
        wrong = [name for name, job in todo.items() if job() != wanted[name]]
        step.run({"x": np.ones(3, np.float32)})
        return not wrong and step.steps == 2

    with held(*taken):
        assert in_child(work) == 0


def training() -> Any:
    g = rlx.Graph("loss")
    g.set_outputs([(g.param("w", (3,)) * g.input("x", (3,))).sum()])
    step = rlx.train.step(g, sgd(0.1))
    step.set_params({"w": np.ones(3, np.float32)})
    assert step._lock.waits is not None  # a child would have half of an update
    return step


def test_caches_that_lost_threads_had_checked_out_do_not_matter(models: list[Any]) -> None:
    decoder = models[0]
    wanted = decoder.generate(fork_load.TOKENS, max_tokens=8).tokens
    streams = [decoder.stream([i, 2, 3], max_tokens=20) for i in range(8)]  # each has a cache of its own
    for stream in streams:
        next(stream, None)

    def work() -> bool:
        return decoder.generate(fork_load.TOKENS, max_tokens=8).tokens == wanted and len(decoder.caches.tree) > 0

    with held(decoder.caches._lock):
        assert in_child(work) == 0


def test_forks_under_load(tmp_path: Path) -> None:
    assert fork_load.run(tmp_path, forks=3, threads=2, limit=300) == []


@pytest.mark.large
def test_many_forks_under_load(tmp_path: Path) -> None:
    assert fork_load.run(tmp_path, forks=200, threads=6, limit=300) == []
