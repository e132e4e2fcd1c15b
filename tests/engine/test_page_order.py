"""Models over pages in random order: the same bits as over contiguous ones, in prefill and decode."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

from rlx.engine import call_sizes, page_pool
from rlx.engine.language_model import LanguageModel
from rlx.engine.page_table import Pages

from .conftest import language_model

LENGTH, WINDOW = 650, 40
SAMPLING: dict[str, Any] = {"max_tokens": 8, "logprobs": 4, "temperature": 0.9, "seed": 3}


class ShuffledPages(Pages):
    """Hands out free pages at random."""

    def __init__(self, page_bytes: int) -> None:
        super().__init__(page_bytes)
        self.users, self._free = [0] * 200, list(range(200))

    def next_page(self) -> int:
        return 199  # any of them

    def take(self) -> int:
        page = random.Random(len(self._free)).choice(self._free)
        self._free.remove(page)
        self.users[page] = 1
        return page


def prompt(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 97, count)]


def told(model: LanguageModel) -> list[Any]:
    """Logits of a prompt, and texts of prompts of unequal length that share a prefix."""
    model.caches.clear()
    prompts = [prompt(LENGTH), prompt(130, 1), [*prompt(130, 1), 5, 6], prompt(60, 2)]
    texts = [(text.tokens, text.logprobs) for text in model.generate(prompts, **SAMPLING)]
    return [model.logits(prompt(LENGTH)).tobytes(), *texts]


@pytest.mark.parametrize("window", (None, WINDOW))
@pytest.mark.parametrize("cache", ("f32", "q8_0"))
def test_bits_depend_on_neither_the_order_of_pages_nor_on_chunks(
    cache: str, window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"hidden_size": 128, "max_position_embeddings": 2048}
    config |= {"model_type": "mistral", "sliding_window": window} if window else {"model_type": "llama"}
    weights = tiny_llama.write(tmp_path, **config)
    model = language_model(tmp_path, context=2048, cache=cache)
    expected = told(model)
    monkeypatch.setattr(page_pool, "Pages", ShuffledPages)
    model.caches.clear()
    monkeypatch.setattr(call_sizes, "CHUNK", 50)
    assert told(model) == expected
    row = model.caches.new(1)
    assert row.restore(0, [*prompt(LENGTH), 1], ("", "")) == LENGTH
    (table,) = (x for name, x in row.rows(0, 1).items() if name.startswith("table"))
    assert (np.diff(table[0][table[0] >= 0]) != 1).any(), "pages were in another order"
    if cache == "f32":
        logits = np.frombuffer(expected[0], np.float32).reshape(LENGTH, -1)
        wanted = tiny_llama.forward(weights, prompt(LENGTH), **config)["logits"]
        assert (np.abs(logits - wanted).max(-1) / np.abs(wanted).max(-1)).max() < 1e-4
