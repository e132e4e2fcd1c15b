"""The life of a model: its memory goes with its last user, and whoever closes it does not disturb calls in progress."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
import tiny_llama
from cpu_internals import forget_code
from limits import LONGEST_S
from runtime.test_caches import source

from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.engine.model import INTERNAL
from rlx.engine.model_snapshot import SnapshotCheckpoint
from rlx.errors import RequestError

from .conftest import language_model
from .test_model_snapshot import settle

MAPS = Path("/proc/self/maps")
TOKENS = [3, 14, 15]
CHILD = """
import gc, sys, weakref
sys.path.insert(0, {source!r})
gc.disable()
import rlx

def used():
    model = rlx.load({path!r})
    model.run([3, 14, 15], capture=["layers.0"])
    assert "rlx.models.load" in sys.modules
    return weakref.ref(model)

print(used()())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder and an encoder."""
    path = tmp_path_factory.mktemp("life")
    tiny_llama.write(path / "decoder")
    small_bert.write(path / "encoder", files=small_bert.sentence_transformers("cls"))
    settle()
    return path


@pytest.fixture(params=["cold", "warm", "off"])
def start(request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """How models are loaded: for the first time, from a snapshot, or with nothing kept."""
    settings = {"cold": str(tmp_path), "warm": str(folder / "cache"), "off": "off"}
    monkeypatch.setenv("RLX_CACHE", settings[request.param])
    forget_code(monkeypatch)
    if request.param == "warm":
        for kind in ("decoder", "encoder"):
            load(folder / kind)
    mode: str = request.param
    return mode


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def write_and_look_inside(model: Any) -> None:
    assert isinstance(model, LanguageModel)
    model.generate(TOKENS, max_tokens=3)
    model.generate([TOKENS, [1]], max_tokens=2)
    next(model.stream(TOKENS, max_tokens=3), None)
    look_inside(model, TOKENS)


def embed_and_look_inside(model: Any) -> None:
    assert isinstance(model, EmbeddingModel)
    model.embed(["bal bam", "dal"])
    look_inside(model, "bal bam")


def look_inside(model: LanguageModel | EmbeddingModel, tokens: Any) -> None:
    model.run(tokens)
    model.run(tokens, capture=["layers.0"])
    model.run(tokens, edit={"layers.0.out": lambda value: value * 2})
    model.apply({}, tokens)
    model.compiled.report()
    with pytest.raises(IndexError):
        model.run(tokens, edit={"layers.0.out": lambda value: value[9:][0]})


# -- memory -------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("uncollected")
@pytest.mark.skipif(not MAPS.exists(), reason=f"{MAPS} is absent")
@pytest.mark.parametrize(
    ("kind", "use"),
    [("decoder", write_and_look_inside), ("encoder", embed_and_look_inside)],
)
def test_a_model_that_nobody_has_any_more_gives_its_memory_back(
    folder: Path, start: str, kind: str, use: Callable[[Any], None]
) -> None:
    for do in (lambda model: None, use):
        model = load(folder / kind)
        compiled = model.compiled
        assert isinstance(model._checkpoint, SnapshotCheckpoint) == (start != "off")
        do(model)
        weights = [weakref.ref(array) for array in compiled.executable.weights.values()]
        others = [weakref.ref(x) for x in (model, compiled, model._session, model.checkpoint)]
        assert str(folder) in MAPS.read_text()
        del model, compiled
        assert all(ref() is None for ref in weights + others)
        lines = [line for line in MAPS.read_text().splitlines() if "/objects/" not in line]  # code may be used again
        assert not [line for line in lines if str(folder) in line or os.environ["RLX_CACHE"] + "/" in line]


def test_modules_that_a_call_imports_do_not_hold_its_model(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "RLX_CACHE": str(tmp_path)}
    child = [sys.executable, "-c", CHILD.format(source=source(), path=str(folder / "decoder"))]
    for _ in range(2):  # the second has its model before it imports what builds graphs
        result = subprocess.run(child, env=environment, text=True, capture_output=True, timeout=LONGEST_S)
        assert result.stdout == "None\n", result.stderr


@pytest.mark.parametrize("start", ["warm"], indirect=True)
def test_a_graph_may_outlive_its_model(folder: Path, start: str) -> None:
    for close in (False, True):
        model = language_model(folder / "decoder")
        compiled, wanted = model.compiled, len(model.compiled.report().launches)
        if close:
            model.close()
        del model
        fresh = language_model(folder / "decoder").compiled  # whose model is gone before anything was built
        for graph in (compiled, fresh):
            assert len(graph.report().launches) == wanted and graph.dispatch().counts
            graph.set_param("model.norm.weight", np.full(48, 0.5, np.float32))
            graph.prepare()


# -- closing ------------------------------------------------------------------------------------------------------
def close_in_compile(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    """Have the model closed by somebody else when a graph is compiled."""
    compile = model._session.compile

    def closing(*args: Any, **options: Any) -> Any:
        if not after:
            model.close()
        compiled = compile(*args, **options)
        model.close()
        return compiled

    monkeypatch.setattr(model._session, "compile", closing)


@pytest.mark.parametrize("start", ["warm", "off"], indirect=True)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_closing_while_a_graph_is_compiled_lets_the_call_end(
    folder: Path, start: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = language_model(folder / "decoder").run(TOKENS, capture=["layers.*"])
    model = language_model(folder / "decoder")
    graph = weakref.ref(model.compiled)
    close_in_compile(model, monkeypatch, after=after)
    values = model.run(TOKENS, capture=["layers.*"])
    assert values.keys() == wanted.keys()
    assert all(values[name].tobytes() == wanted[name].tobytes() for name in wanted)
    assert graph() is None and not model.graphs.captures and not model._arrays and not model._builds
    with pytest.raises(RequestError, match="the model is closed"):
        model.run(TOKENS, capture=["layers.*"])


@pytest.mark.parametrize("start", ["warm", "off"], indirect=True)
@pytest.mark.parametrize(
    "call",
    [lambda m: m.run(TOKENS, edit={"layers.?.out": lambda v: v}), lambda m: m.apply({}, TOKENS)],
    ids=["edit", "apply"],
)
def test_what_needs_more_of_a_model_that_was_closed_meanwhile_says_so(
    folder: Path, start: str, call: Callable[[LanguageModel], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language_model(folder / "decoder")
    close_in_compile(model, monkeypatch, after=True)
    with pytest.raises(RequestError, match="the model is closed"):
        call(model)
    assert not model.graphs.edits and not model.graphs.applications and not model._arrays


def test_what_only_the_engine_needs_of_a_model_is_not_listed(folder: Path) -> None:
    model = language_model(folder / "decoder")
    assert all(hasattr(model, name) for name in INTERNAL)
    assert not INTERNAL & set(dir(model)) and {"generate", "compiled", "facts"} <= set(dir(model))
