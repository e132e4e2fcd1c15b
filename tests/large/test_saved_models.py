"""A real model from GGUF to a folder of Hugging Face and back to GGUF: llama.cpp reads it and writes the same text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from real_models import Greedy, model_file

import rlx
from rlx.engine.language_model import LanguageModel

pytestmark = pytest.mark.large
PROMPTS = ["The capital of France is", "It's 12345 o'clock;  two spaces,\n\n new lines", "Größe 東京 🙂"]
COUNT = 16


def opened(path: Path) -> LanguageModel:
    model = rlx.load(path, threads=2, context=256, precision="f32")
    assert isinstance(model, LanguageModel)
    return model


def test_a_saved_model_is_the_model(tmp_path: Path, llama_cpp: Greedy) -> None:
    with opened(model_file("smollm2-135m")) as model:
        model.save(tmp_path / "folder")
        wanted = [model.logits(prompt) for prompt in PROMPTS]
        template = model.tokenizer.chat_template
    with opened(tmp_path / "folder") as folder:
        folder.save(tmp_path / "model.gguf")
        for prompt, logits in zip(PROMPTS, wanted, strict=True):
            assert np.abs(folder.logits(prompt) - logits).max() / np.abs(logits).max() < 2e-4
    with opened(tmp_path / "model.gguf") as saved:
        assert saved.tokenizer.chat_template == template
        for prompt, answer in zip(PROMPTS, llama_cpp(tmp_path / "model.gguf", PROMPTS, COUNT), strict=True):
            tokens = saved.token_ids(prompt)
            assert tokens == answer["prompt"]
            ours = saved.generate(tokens, max_tokens=COUNT).tokens
            at = next((i for i, (a, b) in enumerate(zip(ours, answer["tokens"], strict=False)) if a != b), None)
            assert at is None or answer["tops"][at][0] - answer["tops"][at][1] < 1e-3
