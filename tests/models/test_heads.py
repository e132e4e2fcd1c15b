"""Heads beside tied token tables: `transformers` keeps a head of its own where the file has one that differs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_models import TOLERANCE, logits
from small_llama import SETTINGS, difference, forward, random_weights, write_folder

import rlx

TOKENS = [7, 1, 42, 63, 0, 9, 9, 30]
TIED = {**SETTINGS, "tie_word_embeddings": True}
UNTIED = {**SETTINGS, "tie_word_embeddings": False}


def test_a_head_that_differs_is_used_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = random_weights(UNTIED)
    write_folder(tmp_path, weights, TIED)
    for _ in range(2):  # the second model starts from what the first one left
        with caplog.at_level(logging.WARNING), rlx.load(tmp_path) as model:
            assert difference(model.logits(TOKENS), forward(UNTIED, weights, TOKENS)) < TOLERANCE
        assert "tie_word_embeddings is true, but lm_head.weight differs" in caplog.text
        caplog.clear()


def test_a_saved_model_says_that_its_head_is_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = random_weights(UNTIED)
    (tmp_path / "from").mkdir()
    write_folder(tmp_path / "from", weights, TIED)
    with rlx.load(tmp_path / "from") as model:
        model.save(tmp_path / "to")
    caplog.clear()
    assert json.loads((tmp_path / "to" / "config.json").read_text())["tie_word_embeddings"] is False
    with caplog.at_level(logging.WARNING), rlx.load(tmp_path / "to") as model:
        assert difference(model.logits(TOKENS), forward(UNTIED, weights, TOKENS)) < TOLERANCE
    assert not caplog.text


def test_an_equal_head_is_no_second_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = random_weights(TIED)
    write_folder(tmp_path, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()}, TIED)
    with caplog.at_level(logging.WARNING), rlx.load(tmp_path) as model:
        assert "lm_head.weight" not in model.params
        assert difference(model.logits(TOKENS), forward(TIED, weights, TOKENS)) < TOLERANCE
    assert not caplog.text


def test_a_head_alone_is_the_token_table_too(tmp_path: Path) -> None:
    weights = random_weights(TIED)
    moved = dict(weights)
    moved["lm_head.weight"] = moved.pop("model.embed_tokens.weight")
    write_folder(tmp_path, moved, TIED)
    with rlx.load(tmp_path) as model:
        assert difference(model.logits(TOKENS), forward(TIED, weights, TOKENS)) < TOLERANCE


def test_a_new_token_table_of_a_tied_model_is_saved_for_both(tmp_path: Path) -> None:
    source, weights = tmp_path / "a", random_weights(TIED)
    source.mkdir()
    write_folder(source, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()}, TIED)
    table = np.flip(weights["model.embed_tokens.weight"], 0).copy()
    with rlx.load(source) as model:
        model.save(tmp_path / "b", {"model.embed_tokens.weight": table})
    with rlx.load(tmp_path / "b") as model:
        wanted = forward(TIED, weights | {"model.embed_tokens.weight": table}, TOKENS)
        assert difference(model.logits(TOKENS), wanted) < TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize("case", ["differs", "equal", "alone"])
def test_transformers_reads_these_files_in_the_same_way(tmp_path: Path, case: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    weights: dict[str, Any] = random_weights(UNTIED)
    if case == "equal":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    elif case == "alone":
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    write_folder(tmp_path, weights, TIED)
    wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with rlx.load(tmp_path) as model:
        assert difference(model.logits(TOKENS), logits(wanted, TOKENS)) < TOLERANCE
