"""Changing values inside a model: against NumPy and `transformers`, and bits that stay where nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

from rlx.engine.graph_caches import CAPTURES
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.errors import RequestError, ShapeError
from rlx.flow.stage_values import stage_values

Array = np.ndarray[Any, Any]
TOKENS = np.random.default_rng(0).integers(0, 97, 90).tolist()


def same(value: Array) -> Array:
    return value


def test_identity_edits_leave_every_bit(tiny: LanguageModel) -> None:
    wanted = tiny.run(TOKENS, capture="*")
    for path in stage_values(tiny.built.module):
        values = tiny.run(TOKENS, capture="*", edit={path: same})
        assert all(values[name].tobytes() == value.tobytes() for name, value in wanted.items()), path
    values = tiny.run(TOKENS, edit={"*": same})
    assert values["logits"].tobytes() == wanted["logits"].tobytes()


@pytest.mark.parametrize("at", ["layers.0", "layers.0.out", "layers.?"])
def test_the_model_goes_on_with_what_the_function_gave(tiny: LanguageModel, tmp_path: Path, at: str) -> None:
    """A layer's value without one direction: the rest of the model, in NumPy, from there."""
    direction = np.random.default_rng(1).normal(size=48).astype(np.float32)
    seen: list[tuple[int, ...]] = []

    def without(value: Array) -> Array:
        seen.append(value.shape)
        return value - np.outer(value @ direction, direction) / (direction @ direction)

    weights = tiny_llama.write(tmp_path)
    changed: Any = {0: without, 1: without} if "?" in at else {0: without}
    wanted = tiny_llama.forward(weights, TOKENS, after=changed)["logits"]
    seen.clear()
    logits = tiny.run(TOKENS, edit={at: without})["logits"]
    assert seen == [(90, 48)] * len(changed)
    assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 2e-5
    assert np.abs(logits - tiny.logits(TOKENS)).max() / np.abs(wanted).max() > 1e-2


def test_chunks_do_not_show(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate(value: Array) -> Array:
        return np.ascontiguousarray(value[::-1])  # what a token's value becomes is another's

    unchunked = tiny.run(TOKENS, edit={"layers.0.attn": rotate})["logits"]
    monkeypatch.setattr("rlx.engine.call_sizes.CHUNK", 7)
    assert tiny.run(TOKENS, edit={"layers.0.attn": rotate})["logits"].tobytes() == unchunked.tobytes()


def test_later_edits_see_what_earlier_ones_did(tiny: LanguageModel) -> None:
    zero, seen = np.zeros_like, {}

    def look(value: Array) -> Array:
        seen["norm"] = value.copy()
        value[:] = 7  # its own copy
        return value

    values = tiny.run(TOKENS, capture=["norm", "layers.1"], edit={"norm": look, "layers.1": zero})
    assert not values["layers.1"].any() and not seen["norm"].any() and (values["norm"] == 7).all()


def test_two_functions_for_one_stage_run_in_the_order_given(tiny: LanguageModel) -> None:
    values = tiny.run([1, 2], capture="norm", edit={"nor?": np.ones_like, "norm": lambda value: value + 1})
    assert (values["norm"] == 2).all()


def test_the_output_may_be_edited(tiny: LanguageModel) -> None:
    assert (tiny.run([1, 2], edit={"logits": np.ones_like})["logits"] == np.ones((2, 97))).all()


def test_a_result_of_another_kind_is_refused(tiny: LanguageModel) -> None:
    with pytest.raises(ShapeError, match=r"edit 'norm': its function gave float32\[1, 48\], expected float32\[2, 48\]"):
        tiny.run([1, 2], edit={"norm": lambda value: value[:1]})
    with pytest.raises(ShapeError, match=r"gave float64\[2, 48\], expected float32\[2, 48\]"):
        tiny.run([1, 2], edit={"norm": lambda value: value.astype(np.float64)})
    with pytest.raises(RequestError, match="edit 'norm': its function gave None, expected an array"):
        tiny.run([1, 2], edit={"norm": lambda value: None})  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("edit", [5, ["norm"], {"norm": 3}, {3: same}])
def test_what_is_no_edit_is_refused(tiny: LanguageModel, edit: Any) -> None:
    with pytest.raises(RequestError, match="expected functions by patterns of stage paths"):
        tiny.run([1], edit=edit)


def test_an_unknown_stage_names_the_nearest_ones(tiny: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"edit: no stage of 'llama' matches 'layer\.1\.atn'") as caught:
        tiny.run([1], edit={"layer.1.atn": same})
    assert "layers.1.attn" in (caught.value.hint or "")


def test_graphs_are_compiled_once_and_few_are_kept(tiny: LanguageModel) -> None:
    tiny.run([1, 2])
    before = tiny.memory()
    tiny.run([1, 2], edit={"norm": same})
    cached, after = dict(tiny.graphs.edits), tiny.memory()
    # its graphs work in memory of their own, and read the same weights, in the file or packed
    assert after.arena > before.arena and (after.weights, after.mapped) == (before.weights, before.mapped)
    tiny.run([1, 2], edit={"norm": np.ones_like})
    assert dict(tiny.graphs.edits) == cached and tiny.memory() == after
    for i in range(CAPTURES + 1):
        tiny.run([1], edit={f"{'?' * i}*": same})
    assert len(tiny.graphs.edits) == CAPTURES


def test_a_model_that_speaks(stories: LanguageModel) -> None:
    wanted = stories.run("Once upon a time")["logits"]
    assert stories.run("Once upon a time", edit={"layers.?": same})["logits"].tobytes() == wanted.tobytes()


def test_loading_from_a_start_changes_nothing(tiny_folder: Path) -> None:
    for _ in range(2):
        model = load(tiny_folder)
        logits = model.run(TOKENS, edit={"layers.0": same})["logits"]
        assert logits.tobytes() == model.run(TOKENS)["logits"].tobytes()
