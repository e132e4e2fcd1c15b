"""The type of keys and values that nobody asked for, and where weights lie after the first load of a packed model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_internals import forget_code
from test_golden import Golden, converted, gguf, write

from rlx.backends import cache_folder as cache_folder
from rlx.cli.main import main
from rlx.engine import load as models
from rlx.engine import model_snapshot
from rlx.engine.language_model import LanguageModel
from rlx.errors import CapabilityError, RequestError
from rlx.profile import CompileProfile, Precision
from rlx.runtime import compiled as graphs

NAME = "qwen3"
TABLE = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, in which files count as settled at once."""
    monkeypatch.setattr(model_snapshot, "SETTLED_NS", -(10**12))
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    forget_code(monkeypatch)
    return tmp_path / "cache" / cache_folder.SNAPSHOTS


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A file whose matrices are q8_0."""
    golden = Golden(NAME)
    tensors = converted(golden)
    kinds = {n: gguf.GGMLQuantizationType.Q8_0 for n, w in tensors.items() if w.ndim > 1 and w.shape[-1] % 32 == 0}
    return write(golden, tmp_path / "packed.gguf", tensors, kinds)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The same weights in f32."""
    path = tmp_path / "plain"
    path.mkdir()
    return Golden(NAME).folder(path)


def load(path: Path, **settings: Any) -> LanguageModel:
    model = models.load(path, **settings)
    assert isinstance(model, LanguageModel)
    return model


def bits(model: LanguageModel) -> bytes:
    return model.logits(Golden(NAME).rows[0]).tobytes()


def kept_in(model: LanguageModel) -> set[str]:
    """The types of the cache: what the model says, what its store makes, and what the graph takes."""
    types = {str(t.dtype) for n, t in model.compiled.input_types.items() if n in model.compiled.signature.states}
    return {model.cache_dtype, model.caches.new(1).spec.dtype} | types


# -- which type -----------------------------------------------------------------------------------------------------
def test_packed_weights_have_a_cache_of_f16_and_others_of_f32(packed: Path, plain: Path) -> None:
    assert kept_in(load(packed)) == {"f16"} and kept_in(load(plain)) == {"f32"}
    assert bits(load(packed)) == bits(load(packed, cache="f16")) != bits(load(packed, cache="f32"))
    assert bits(load(plain)) == bits(load(plain, cache="f32")) != bits(load(plain, cache="f16"))
    assert "cache f16" in load(packed).fingerprint(0) and "cache f32" in load(plain).fingerprint(0)


def test_exact_products_have_an_exact_cache(packed: Path) -> None:
    assert kept_in(load(packed, precision="f32")) == {"f32"}
    exact = CompileProfile(precision=Precision(activations="f32"))
    assert kept_in(load(packed, profile=exact)) == {"f32"}
    assert kept_in(load(packed, profile=exact, cache="f16")) == {"f16"}


def test_an_unknown_type_hears_of_all(packed: Path) -> None:
    for wrong in ("f8", ["f16"]):
        with pytest.raises(CapabilityError, match=r"cache .* is not supported") as caught:
            load(packed, cache=wrong)
        assert caught.value.hint == "there is: auto, f32, f16, bf16, q8_0"


def test_an_export_keeps_what_auto_has_become(packed: Path, tmp_path: Path) -> None:
    model = load(packed)
    again = load(model.export(tmp_path / "m.rlxp"))
    assert kept_in(again) == {"f16"} and bits(again) == bits(model)
    assert load(tmp_path / "m.rlxp", cache="f16").cache_dtype == "f16"
    with pytest.raises(RequestError, match="cache is 'f32', but exported with f16"):
        load(tmp_path / "m.rlxp", cache="f32")


def test_inspect_shows_the_type_that_a_load_has(packed: Path, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, wanted in ((packed, "f16"), (plain, "f32")):
        assert main(["inspect", str(path), "--level", "hir"]) == 0
        assert set(re.findall(r"= state.* : (\w+)\[", capsys.readouterr().out)) == {wanted}


@pytest.mark.usefixtures("without_torch")
def test_verify_compares_what_is_exact(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(packed)]) == 0
    assert "ok       reference " in capsys.readouterr().out


# -- snapshots ------------------------------------------------------------------------------------------------------
def test_a_start_is_that_of_the_type_however_it_was_asked_for(folder: Path, packed: Path, plain: Path) -> None:
    for path, kind in ((packed, "f16"), (plain, "f32")):
        before = set(folder.glob("*"))
        load(path)
        assert load(path, cache=kind).cache_dtype == load(path).cache_dtype == kind
        assert len(set(folder.glob("*")) - before) == 1


def test_a_start_that_was_asked_for_by_name_is_not_that_of_auto(folder: Path, packed: Path, plain: Path) -> None:
    for path, named in ((packed, "f32"), (plain, "f16")):
        before = set(folder.glob("*"))
        assert load(path, cache=named).cache_dtype == named
        (start,) = set(folder.glob("*")) - before
        assert load(path).cache_dtype != named and start.exists()
        assert load(path, cache=named).cache_dtype == named


# -- where weights lie ----------------------------------------------------------------------------------------------
def test_the_first_load_maps_its_weights_as_the_next_one_does(
    packed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(packed)
    assert first.memory().weights == 0 < first.memory().mapped
    assert first.memory() == load(packed).memory()
    monkeypatch.setenv("RLX_CACHE", "off")
    alone = load(packed)
    assert alone.memory().weights > 0 and bits(alone) == bits(first)
    assert alone.memory().total == pytest.approx(first.memory().total, abs=4096)  # they are aligned in other ways


def test_a_snapshot_that_cannot_be_opened_costs_only_time(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bits(load(packed))
    monkeypatch.setattr(model_snapshot, "open_snapshot", lambda *_: None)
    assert bits(load(packed)) == expected


def test_further_graphs_share_the_weights_of_the_cached_one(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = load(packed), Golden(NAME).rows[0]
    before = model.memory()
    actual = model.run(row, capture=["layers.0", "logits"])
    assert actual["logits"].tobytes() == bits(model)
    monkeypatch.setenv("RLX_CACHE", "off")
    alone = load(packed).run(row, capture=["layers.0", "logits"])
    assert alone["layers.0"].tobytes() == actual["layers.0"].tobytes()
    after = model.memory()
    assert (after.weights, after.mapped) == (before.weights, before.mapped)


def test_a_prompt_leaves_no_table_in_memory(packed: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[np.ndarray[Any, Any]] = []
    monkeypatch.setattr(graphs, "release", released.append)
    model = load(packed)
    held: dict[str, Any] = model.compiled.executable.weights  # type: ignore[attr-defined]
    model.generate(Golden(NAME).rows[0], max_tokens=3)
    assert len(released) == 1 and released[0] is held[TABLE]  # for the prompt, not for each token
    narrow = load(plain)  # of 16 bits: its table is read from the file, too
    narrow.generate(Golden(NAME).rows[0], max_tokens=3)
    assert len(released) == 2 and released[1] is narrow.compiled.executable.weights[TABLE]
