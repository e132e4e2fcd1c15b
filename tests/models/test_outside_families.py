"""Families declared outside of rlx: they are found, checked, and never served from a snapshot."""

import importlib.metadata
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny_llama

import rlx
from rlx.errors import CapabilityError, GraphError
from rlx.flow import ModelFlow
from rlx.models import family, llama

pytestmark = pytest.mark.usefixtures("own_families")


def declare(change: Callable[[ModelFlow], Any], name: str = "own_llama") -> None:
    @family.family(name, kind="decoder", hf=["own_llama"], config=llama.Config, weights=llama.WEIGHTS)
    def own(c: Any, context: int, factors: Any = None) -> Any:
        return change(llama.llama.flow(c, context, factors))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rlx.engine.model_snapshot.SETTLED_NS", -(10**12))
    path = tmp_path / "model"
    tiny_llama.write(path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"own_llama"'))
    return path


def test_a_changed_flow_changes_the_result(folder: Path) -> None:
    declare(lambda flow: flow)
    plain = rlx.load(folder).logits([1, 2, 3])
    assert not list((folder.parent / "cache").rglob("starts/*"))
    family.FAMILIES.pop("own_llama")  # another process, after its source was edited
    declare(lambda flow: flow.logit_softcap(0.01))
    assert np.abs(rlx.load(folder).logits([1, 2, 3])).max() <= 0.01 < np.abs(plain).max()


def test_families_of_installed_packages_are_imported_when_they_are_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("own_families_of_a_package")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__getattr__ = lambda name: declare(lambda flow: flow)  # type: ignore[method-assign]
    points = [EntryPoint("own", f"{module.__name__}:declared", family.ENTRY_POINTS)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    family.load_installed.cache_clear()
    assert rlx.load(folder).logits([1]).shape == (1, tiny_llama.CONFIG["vocab_size"])
    assert not list((folder.parent / "cache").rglob("starts/*"))

    family.FAMILIES.pop("own_llama")
    points[:] = [EntryPoint("own", "no_such_module", family.ENTRY_POINTS)]
    family.load_installed.cache_clear()
    with pytest.raises(CapabilityError, match="family 'own' of package 'no_such_module' cannot be imported"):
        rlx.load(folder)
    family.load_installed.cache_clear()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "llama"}, "family 'llama': is declared already, by rlx.models.llama.llama"),
        ({"kind": "encodr"}, "family 'own': kind is 'encodr'"),
    ],
)
def test_a_declaration_is_checked(settings: dict[str, Any], problem: str) -> None:
    declared: dict[str, Any] = {"name": "own", "kind": "encoder", "config": llama.Config, "weights": {}, **settings}
    with pytest.raises(GraphError, match=problem):
        family.family(**declared)(lambda c: ModelFlow("own"))


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        (lambda flow: flow.logit_sofcap(1.0), "'ModelFlow' object has no attribute 'logit_sofcap'"),
        (lambda flow: flow.custom(lambda emit, x: emit.tnah(x)), "Emit has no op 'tnah'"),
        (lambda flow: flow.custom(lambda emit, x: x.node.no_such), "no attribute 'no_such'"),
        (lambda flow: None, "a patch returned a NoneType"),
    ],
)
def test_errors_inside_a_build_come_out(folder: Path, patch: Any, problem: str) -> None:
    declare(lambda flow: flow)
    with pytest.raises((AttributeError, GraphError), match=problem):
        rlx.load(folder, patch=patch)


def test_a_family_without_return_is_named(folder: Path) -> None:
    declare(lambda flow: None)
    with pytest.raises(GraphError, match="family 'own_llama': its function returned a NoneType"):
        rlx.load(folder)
