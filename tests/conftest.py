"""Shared by all tests: the `--update` option, a cache folder of their own, and a worker for each core."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

# A commit passes or fails by what is in it: examples are drawn the same way each time.
# `pytest --hypothesis-profile=search` draws others. None has a deadline, for machines are busy now and then.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile("repeatable")

# Kernels compiled by one test are good for the next, but nothing of the user's cache is used or changed.
_cache = tempfile.TemporaryDirectory(prefix="rlx-test-cache-")
os.environ.setdefault("RLX_CACHE", _cache.name)

# A shell lets what it starts in the background ignore Ctrl-C, which the commands that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_states: dict[int, Any] = {}  # of generators that modules have, as they were before the first test
MOST_WORKERS = 8
# marks that tests carry themselves
BY_NEED = ("parity", "weights", "fuzz", "cuda", "large", "gpu", "serve", "ray", "kill", "search")
IN_PARALLEL = ("targets", "parity", "weights", "fuzz", "kill")  # and plain `pytest`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite expected outputs of fixtures and docs")
    parser.addoption("--cases", type=int, default=2000, help="number of inputs per test marked fuzz")
    parser.addoption("--first", type=int, default=0, help="seed of the first input of tests marked fuzz")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite takes a process for each core, if pytest-xdist is there; `-n0` takes one.

    Real models (`large`) need the memory, and tests of the GPU the device, for themselves.
    """
    option = config.option
    plain = option.markexpr in config.getini("addopts")
    full_suite = config.args_source is config.ArgsSource.TESTPATHS and (plain or option.markexpr in IN_PARALLEL)
    alone = option.usepdb or option.update or "PYTEST_XDIST_WORKER" in os.environ
    if full_suite and not alone and hasattr(option, "numprocesses") and option.numprocesses is None:
        option.numprocesses = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        option.dist = "worksteal"  # neighbours share what they compile, and nobody waits at the end


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests for instruction sets other than this machine's best with `targets`; ops in f32 stay unmarked."""
    from targets import BY_NAME, best

    others = set(BY_NAME) - {best().name}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        values = set(texts(parameters.values()))
        an_op_in_f32 = "op" in parameters and "f32" in values
        if values & others and not an_op_in_f32 and not any(item.get_closest_marker(mark) for mark in BY_NEED):
            item.add_marker("targets")


def texts(values: Iterable[Any]) -> Iterator[str]:
    """The strings among parameters, and the names of those that have one; tuples are looked into."""
    for value in values:
        text = getattr(value, "name", value)
        if isinstance(text, tuple):
            yield from texts(text)
        elif isinstance(text, str):
            yield text


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest) -> None:
    """Random numbers of a module begin anew for each of its tests: what a test sees does not depend on those before."""
    for generator in vars(request.module).values():
        if isinstance(generator, np.random.Generator):
            state = generator.bit_generator.state
            generator.bit_generator.state = _states.setdefault(id(generator), state)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without torch: importing it takes seconds."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "torch" else find(n, *a))


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools may have more threads than this machine has cores."""
    from cpu_internals import allow_threads

    allow_threads(monkeypatch, 64)


@pytest.fixture
def own_ops() -> Iterator[None]:
    """Ops that a test declares are gone after it."""
    import rlx
    import rlx.lir.forms.custom as custom
    from rlx.ir import registry

    rlx.Graph("any")  # declares those of rlx
    before = set(registry.OPS)
    yield
    for name in set(registry.OPS) - before:
        custom.forget(name)


@pytest.fixture
def own_families() -> Iterator[None]:
    """Model families that a test declares are gone after it."""
    import rlx.models.load  # noqa: F401  declares those of rlx
    from rlx.models.family import FAMILIES

    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Whether expected outputs are rewritten instead of compared."""
    return bool(request.config.getoption("--update"))


@pytest.fixture
def fuzz_seeds(request: pytest.FixtureRequest) -> range:
    """Seeds of a fuzz test, one per input: `pytest -m fuzz --first 100000 --cases 20000` runs others."""
    first = request.config.getoption("--first")
    return range(first, first + request.config.getoption("--cases"))
