"""Logits over 512 tokens of WikiText-2 against transformers in float64 on weights dequantised by `gguf`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlx.engine.language import LanguageModel

pytestmark = pytest.mark.large
MARGIN = 1e-3


def test_top_token_is_that_of_float64_wherever_the_margin_exceeds_a_thousandth(
    path: Path, model: LanguageModel, wiki: str
) -> None:
    pytest.importorskip("transformers")
    from float64 import Float64Model

    tokens = model.tokenizer.encode(wiki)[:512]
    assert len(tokens) == 512
    found = model.logits(tokens)
    wanted = Float64Model(path).logits(tokens)
    top = np.partition(wanted, -2, axis=1)[:, -2:]
    clear = top[:, 1] - top[:, 0] > MARGIN
    assert clear.sum() > 500  # else the next line says little
    assert (found.argmax(1) == wanted.argmax(1))[clear].all()
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 2e-4
