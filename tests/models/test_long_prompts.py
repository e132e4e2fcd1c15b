"""Long prompts of models that do not keep everything: windows of Gemma 3, states of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_llama import difference
from test_golden import Golden

from rlx.engine import call_sizes
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load

NAMES = ("gemma3", "qwen3_next", "qwen3_5", "qwen3_5_moe")
LONG = 4096


def opened(folder: Path, name: str, context: int) -> LanguageModel:
    golden = Golden(name)
    golden.settings["max_position_embeddings"] = context
    if name == "gemma3":  # all positions of a text turn by no more than they do in the short ones
        golden.settings["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }  # fmt: skip
    model = load(golden.folder(folder), context=context)
    assert isinstance(model, LanguageModel)
    return model


def prompt(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(count).integers(0, 40, count)]


def told(model: LanguageModel, tokens: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A text and its log-probabilities, from nothing."""
    monkeypatch.setattr(call_sizes, "CHUNK", chunk)
    model.caches.clear()
    completion = model.generate(tokens, max_tokens=6, logprobs=3)
    return completion.tokens, completion.logprobs


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_size_give_the_same(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits from attention; the delta rule adds up tokens of a call that belong together, so it rounds."""
    with opened(tmp_path, name, 1024) as model:
        check_chunks(model, name, prompt(900), (64, 500, 900), monkeypatch)


def check_chunks(
    model: LanguageModel, name: str, tokens: list[int], chunks: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = (told(model, tokens, chunk, monkeypatch) for chunk in chunks)
    wanted = np.array([entry.logprob for entry in first[1]])
    for completion, logprobs in others:
        assert completion == first[0]
        assert np.abs(np.array([entry.logprob for entry in logprobs]) - wanted).max() < 1e-4
        assert name != "gemma3" or logprobs == first[1]


def test_what_layers_with_a_window_keep_does_not_grow(tmp_path: Path) -> None:
    """Of six layers of Gemma 3 only the last keeps all positions."""
    with opened(tmp_path, "gemma3", 4096) as model:
        sizes = []
        for count in (700, 1500, 3000):
            model.caches.clear()
            model.generate(prompt(count), max_tokens=1)
            sizes.append(model.memory().cache)
        one = 2 * 4 * 4  # bytes of a position in one layer: keys and values of a head of 4
        # five layers a window of 5 and 512 more in whole blocks, one everything that was written
        assert sizes == [one * (5 * 576 + count) for count in (704, 1536, 3008)]


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
def test_long_prompts_equal_transformers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    tokens = prompt(LONG)
    with opened(tmp_path, name, 2 * LONG) as model:
        check_chunks(model, name, tokens, (64, 500), monkeypatch)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        with torch.no_grad():
            wanted = theirs(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        assert difference(model.logits(tokens), wanted) < 2e-4
