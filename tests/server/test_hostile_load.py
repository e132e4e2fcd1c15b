"""Many hostile requests, and many random ones under load. `fuzz_http.py` and `load.py` run more by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stand_ins

import rlx
from rlx.server.serve import Server, running
from rlx.server.settings import ServerSettings

from .fuzz_http import fuzz, write_models
from .load import compare

pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folders = write_models(tmp_path_factory.mktemp("models"))
    loaders = {name: lambda path=path: rlx.load(path) for name, path in folders.items()}
    with running(loaders, ServerSettings(port=0, matryoshka=True)) as server:
        yield server


@pytest.mark.parametrize("part", range(4))
def test_hostile_requests_are_refused_or_answered(target: Server, part: int) -> None:
    outcomes = fuzz(target, iter(range(3000 * part, 3000 * (part + 1))))
    assert outcomes["200"] > 300 and outcomes["400"] > 300, outcomes  # else mutations are too strong or too weak


def test_random_requests_under_load_get_the_answers_they_get_alone(tmp_path: Path) -> None:
    events = compare(stand_ins.write_chat(tmp_path), 0, 300)
    assert events["cached"] and events["structured"] > 50 and events["cancelled"], events
