"""Edits and captures while a model generates: against greedy decoding in NumPy, and caches that do not mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
import tiny_mamba

import rlx
from rlx.engine.graph_caches import CAPTURES
from rlx.engine.language_model import LanguageModel
from rlx.errors import GraphError, RequestError, ShapeError

from .conftest import language_model

Array = np.ndarray[Any, Any]
PROMPT = np.random.default_rng(0).integers(0, 97, 40).tolist()
VECTOR = np.random.default_rng(1).normal(size=48).astype(np.float32)
COUNT = 6


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Array]:
    return tiny_llama.write(tmp_path_factory.mktemp("weights"))


def greedy(
    weights: dict[str, Array], after: dict[int, Callable[[Array], Array]], prompt: list[int] = PROMPT
) -> list[int]:
    """The likeliest tokens one by one, in NumPy's float64."""
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(tiny_llama.forward(weights, tokens, after=after)["logits"][-1].argmax()))
    return tokens[len(PROMPT) :]


def steer(strength: float) -> Callable[[Any], Any]:
    return lambda x: x + strength * VECTOR


def test_strengths_are_run_time_numbers(
    tiny: LanguageModel, weights: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for strength in (0.0, 1.0, 4.0, -4.0):
        done = tiny.generate(PROMPT, max_tokens=COUNT, edit={"layers.0": steer(strength)})
        assert done.tokens == greedy(weights, {0: steer(strength)})
        answers.append(tuple(done.tokens))
        # the first one was compiled; from here on nothing may be
        monkeypatch.setattr(tiny, "compile_graph", lambda built: pytest.fail("compiled again"))
    assert len(set(answers)) > 2 and len(tiny.graphs.interventions) == 1


def test_another_function_is_another_graph(tiny: LanguageModel, weights: dict[str, Array]) -> None:
    def without(x: Any) -> Any:
        return x - (x @ VECTOR)[:, None] * (VECTOR / (VECTOR @ VECTOR))

    for function in (without, np.tanh, lambda x: np.where(x > 1, 1, x), lambda x: rlx.at(x)[:, 3].set(2.0)):
        wanted = greedy(weights, {1: lambda x, f=function: np.array(f(x))})
        assert tiny.generate(PROMPT, max_tokens=COUNT, edit={"layers.1": function}).tokens == wanted
    assert len(tiny.graphs.interventions) == CAPTURES


def test_prefix_caches_of_edits_are_their_own(tiny: LanguageModel, weights: dict[str, Array]) -> None:
    plain, edited = greedy(weights, {}), greedy(weights, {0: steer(4.0)})
    for wanted, edit in ((plain, None), (edited, {"layers.0": steer(4.0)}), (plain, None)) * 2:
        assert tiny.generate(PROMPT, max_tokens=COUNT, edit=edit).tokens == wanted
    again = tiny.generate(PROMPT, max_tokens=COUNT, edit={"layers.0": steer(4.0)})
    assert again.usage.cached_tokens == len(PROMPT) - 1
    other = tiny.generate(PROMPT, max_tokens=COUNT, edit={"layers.0": steer(3.9)})
    assert other.usage.cached_tokens == 0
    assert tiny.memory().cache > 0


def test_batches_streams_and_chunks_do_not_show(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = {"layers.*": steer(2.0), "layers.0.attn": lambda x: x * 0.5}
    prompts = [PROMPT, PROMPT[:7], PROMPT[5:], [3]]
    alone = [tiny.generate(prompt, max_tokens=COUNT, edit=edit, logprobs=2) for prompt in prompts]
    for one, many in zip(alone, tiny.generate(prompts, max_tokens=COUNT, edit=edit, logprobs=2), strict=True):
        assert one.tokens == many.tokens and one.logprobs == many.logprobs
    with tiny.stream(PROMPT, max_tokens=COUNT, edit=edit, logprobs=2) as stream:
        list(stream)
    assert stream.completion.tokens == stream.tokens == alone[0].tokens and stream.logprobs == alone[0].logprobs
    monkeypatch.setattr("rlx.engine.call_sizes.CHUNK", 7)
    fresh = tiny.generate(PROMPT, max_tokens=COUNT, edit=edit | {"norm": lambda x: x * 1.0}, logprobs=2)
    assert fresh.tokens == alone[0].tokens


def test_captured_values_are_those_of_numpy(tiny: LanguageModel, weights: dict[str, Array]) -> None:
    after = {0: steer(1.0)}
    done = tiny.generate(
        PROMPT, max_tokens=COUNT, edit={"layers.0": after[0]}, capture=["layers.*", "layers.*.attn", "logits"]
    )
    assert done.captured is not None
    ran = PROMPT + done.tokens[:-1]
    wanted = tiny_llama.forward(weights, ran, after=after)
    assert set(done.captured) == {"layers.0", "layers.1", "layers.0.attn", "layers.1.attn", "logits"}
    for name, value in done.captured.items():
        expected = wanted[name][-COUNT:] if name == "logits" else wanted[name]  # one row per generated token
        assert value.shape == expected.shape
        assert np.abs(value - expected).max() < 2e-5 * np.abs(expected).max(), name


def test_captures_of_several_prompts_and_of_streams(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.engine.call_sizes.CHUNK", 7)
    first, second = tiny.generate([PROMPT, PROMPT[:3]], max_tokens=2, capture="layers.1")
    with tiny.stream(PROMPT, max_tokens=2, capture="layers.1") as stream:
        list(stream)
    assert first.captured is not None and second.captured is not None and stream.completion.captured is not None
    assert first.captured["layers.1"].shape == (41, 48) and second.captured["layers.1"].shape == (4, 48)
    assert np.array_equal(first.captured["layers.1"], stream.completion.captured["layers.1"])
    assert np.array_equal(first.captured["layers.1"][:3], second.captured["layers.1"][:3])
    assert tiny.generate(PROMPT, max_tokens=2).captured is None


def test_a_recurrent_model_is_edited_too(tmp_path: Path) -> None:
    tiny_mamba.write(tmp_path)
    model = language_model(tmp_path)
    vector = np.linspace(-3, 3, tiny_mamba.DIM, dtype=np.float32)
    done = model.generate(PROMPT, max_tokens=COUNT, edit={"layers.0": lambda x: x + vector})
    tokens = list(PROMPT)
    for _ in range(COUNT):
        logits = model.run(tokens, edit={"layers.0": lambda x: x + vector})["logits"]
        tokens.append(int(logits[-1].argmax()))
    assert done.tokens == tokens[len(PROMPT) :]


def test_what_cannot_be_an_edit_says_why(tiny: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"edit 'layers\.0': its function mixes tokens") as caught:
        tiny.generate(PROMPT, edit={"layers.0": lambda x: x - x.mean(0)})
    assert caught.value.hint and "model.run" in caught.value.hint
    with pytest.raises(RequestError, match="mixes tokens"):
        tiny.generate(PROMPT, edit={"layers.0": lambda x: x[::-1]})
    with pytest.raises(ShapeError, match=r"gave f64\[batch\*seq, 48\], expected f32\[batch\*seq, 48\]") as wide:
        tiny.generate(PROMPT, edit={"layers.0": lambda x: x + VECTOR.astype(float)})
    assert wide.value.hint == "cast what it adds: vector.astype(np.float32)"
    with pytest.raises(ShapeError, match=r"sizes batch\*seq and 13 do not broadcast") as several:
        tiny.generate(PROMPT, edit={"layers.0": lambda x: x + np.ones((13, 48), np.float32)})
    assert several.value.hint and "captured[-1] or captured.mean(0)" in several.value.hint
    assert "assume_equal" not in "".join(several.value.notes) and "in the edit of stage 'layers.0'" in str(
        several.value.notes
    )
    with pytest.raises(RequestError, match="its function gave None, expected an array"):
        tiny.generate(PROMPT, edit={"layers.0": lambda x: None})
    with pytest.raises(GraphError, match="truth value") as traced:
        tiny.generate(PROMPT, edit={"layers.0": lambda x: x if x.sum() > 0 else -x})
    assert any("in the edit of stage 'layers.0'" in note for note in traced.value.notes)
    with pytest.raises(RequestError, match=r"no stage of 'llama' matches 'layer\.0'"):
        tiny.generate(PROMPT, edit={"layer.0": lambda x: x})
    with pytest.raises(RequestError, match="expected functions by patterns"):
        tiny.generate(PROMPT, edit={"layers.0": 3.0})  # type: ignore[dict-item]
    with pytest.raises(RequestError, match="no stage of 'llama' matches 'nothing'"):
        tiny.generate(PROMPT, capture="nothing")


def test_a_closed_model_lets_go_of_edited_graphs(tiny: LanguageModel) -> None:
    tiny.generate(PROMPT, max_tokens=1, edit={"layers.0": steer(1.0)})
    tiny.close()
    assert not tiny.graphs.interventions and not tiny.graphs.bases
    with pytest.raises(RequestError, match="the model is closed"):
        tiny.generate(PROMPT, edit={"layers.0": steer(1.0)})
