"""Logits over WikiText-2 against transformers in float64 on weights dequantised by `gguf`.

Without 8-bit activations they are those of float64. With them they are not: llama.cpp rounds activations too, and not
to the same numbers, so neither can be asked to agree with the other; but ours may be no further from float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from real_models import Ask

import rlx
from rlx.engine.language_model import LanguageModel

pytestmark = pytest.mark.large
MARGIN = 1e-3


def test_top_token_is_that_of_float64_wherever_the_margin_exceeds_a_thousandth(
    path: Path, model: LanguageModel, wiki: str
) -> None:
    pytest.importorskip("transformers")
    from float64 import Float64Model

    tokens = model.tokenizer.encode(wiki)[:512]
    assert len(tokens) == 512
    logits = model.logits(tokens)
    wanted = Float64Model(path).logits(tokens)
    top = np.partition(wanted, -2, axis=1)[:, -2:]
    clear = top[:, 1] - top[:, 0] > MARGIN
    assert clear.sum() > 500  # else the next line says little
    assert (logits.argmax(1) == wanted.argmax(1))[clear].all()
    assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 2e-4


def divergence(wanted: np.ndarray, logits: np.ndarray) -> float:
    """Kullback-Leibler divergence of what logits say from what the wanted ones say, in nats, over all places."""
    p, q = (x - x.max(1, keepdims=True) for x in (wanted, logits.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(1).mean())


def test_rounded_activations_are_no_further_from_float64_than_those_of_llama_cpp(
    path: Path, wiki: str, ask_llama_cpp: Ask, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from float64 import Float64Model

    with rlx.load(path, threads=2, context=256) as rounded:
        assert isinstance(rounded, LanguageModel)
        tokens = rounded.tokenizer.encode(wiki)[:96]
        ours = rounded.logits(tokens)
    ask_llama_cpp({"model": str(path), "text": tokens, "file": str(tmp_path / "logits.npy")})
    theirs = np.load(tmp_path / "logits.npy")
    wanted = Float64Model(path).logits(tokens)
    own_divergence, limit = divergence(wanted, ours), divergence(wanted, theirs)
    assert 0 < own_divergence < 1.2 * limit, f"{own_divergence:.5f} nats from float64, llama.cpp's are {limit:.5f}"
