"""Looking inside: the values of stages by path, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

from rlx.engine.graph_caches import CAPTURES
from rlx.engine.language_model import LanguageModel
from rlx.errors import RequestError

TOKENS = np.random.default_rng(0).integers(0, 97, 90).tolist()


def test_stages_have_the_values_of_numpy(tiny: LanguageModel, tmp_path: Path) -> None:
    wanted = tiny_llama.forward(tiny_llama.write(tmp_path), TOKENS)
    values = tiny.run(TOKENS, capture=["layers.*.attn", "layers.?", "norm", "logits"])
    assert set(values) == set(wanted)
    for path, value in wanted.items():
        assert values[path].shape == value.shape, path
        assert np.abs(values[path] - value).max() / np.abs(value).max() < 2e-5, path


def test_without_capture_it_is_the_output(tiny: LanguageModel) -> None:
    values = tiny.run(TOKENS)
    assert list(values) == ["logits"] and values["logits"].tobytes() == tiny.logits(TOKENS).tobytes()


def test_chunks_do_not_show(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    unchunked = tiny.run(TOKENS, capture="layers.*")
    monkeypatch.setattr("rlx.engine.call_sizes.CHUNK", 7)
    assert all(v.tobytes() == unchunked[k].tobytes() for k, v in tiny.run(TOKENS, capture="layers.*").items())


def test_a_single_pattern_may_be_a_string(tiny: LanguageModel) -> None:
    assert list(tiny.run([1, 2, 3], capture="layers.1")) == ["layers.1"]


def test_an_unknown_pattern_names_the_nearest_stages(tiny: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"no stage of 'llama' matches 'layer\.1\.atn'") as caught:
        tiny.run([1], capture=["logits", "layer.1.atn"])
    assert "layers.1.attn" in (caught.value.hint or "")
    with pytest.raises(RequestError, match=r"no stage of 'llama' matches 'layers\.99\.attn'") as caught:
        tiny.run([1], capture="layers.99.attn")
    assert caught.value.hint == f"layers are 0 to {tiny.facts.layers - 1}"
    with pytest.raises(RequestError, match="edit: no stage") as caught:
        tiny.run([1], edit={"layers.99": lambda x: x})
    assert caught.value.hint == f"layers are 0 to {tiny.facts.layers - 1}"


@pytest.mark.parametrize("capture", [5, [5], {3: 4}])
def test_what_is_no_pattern_is_refused(tiny: LanguageModel, capture: Any) -> None:
    with pytest.raises(RequestError, match="expected patterns of stage paths"):
        tiny.run([1], capture=capture)
    assert list(tiny.run([1], capture=None)) == ["logits"]


@pytest.mark.parametrize("count", [0, 257])
def test_too_few_or_too_many_tokens_are_refused(tiny: LanguageModel, count: int) -> None:
    with pytest.raises(RequestError, match=f"{count} tokens, expected 1 to 256"):
        tiny.run([1] * count)


def test_a_graph_is_built_once_for_its_patterns(tiny: LanguageModel) -> None:
    tiny.run([1], capture="norm")
    graphs = dict(tiny.graphs.captures)
    tiny.run([1, 2], capture=["norm"])
    assert dict(tiny.graphs.captures) == graphs
    for i in range(CAPTURES + 1):
        tiny.run([1], capture=["norm", "layers.*", f"*{'?' * i}"])
    assert len(tiny.graphs.captures) == CAPTURES
