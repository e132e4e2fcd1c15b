"""What embeddings cannot be asked for: every mistake is named, none is an exception of NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
from small_bert import sentence_transformers

from rlx.engine.embed import EmbeddingModel
from rlx.engine.model import load
from rlx.errors import FormatError, RequestError

DIM = 24


def encoder(path: Path, **options: Any) -> EmbeddingModel:
    model = load(path, **options)
    assert isinstance(model, EmbeddingModel)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("bert")
    small_bert.write(found)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> EmbeddingModel:
    return encoder(folder)


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        (np.array("bal"), {}, "found ndarray"),
        (np.array(3), {}, "found ndarray"),
        (5, {}, "found int"),
        ("bal", {"prompt": 5}, "prompt is 5, expected the name of one"),
        ("bal", {"prompt": ["a"]}, "prompt is"),
        ("bal", {"normalize": "no"}, "normalize is 'no', expected True, False or None"),
        ("bal", {"normalize": 1}, "normalize is 1"),
        ("bal", {"batch_size": True}, "batch_size is True"),
        ("bal", {"batch_size": 0}, "batch_size is 0"),
        ("bal", {"batch_size": 2.5}, "batch_size is 2.5"),
    ],
)
def test_a_request_that_cannot_be_says_why(
    model: EmbeddingModel, texts: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        model.embed(texts, **settings)


def test_numbers_of_numpy_are_fine(model: EmbeddingModel) -> None:
    found = model.embed(["bal", "dam"], batch_size=np.int64(1), normalize=np.bool_(False))  # type: ignore[arg-type]
    assert np.array_equal(found, model.embed(["bal", "dam"], normalize=False))


@pytest.mark.parametrize("shape", [(), (5,), (2, DIM + 1), (1, 2, DIM)])
def test_vectors_that_do_not_fit_are_refused_with_both_shapes(model: EmbeddingModel, shape: tuple[int, ...]) -> None:
    for sides in ((np.zeros(shape), "bal"), ("bal", np.zeros(shape))):
        with pytest.raises(RequestError, match="similarity: the sides have the shapes") as caught:
            model.similarity(*sides)
        assert str(list(shape)) in str(caught.value) and f"[{DIM}]" in str(caught.value)


def test_a_context_without_room_for_text_is_the_mistake_of_whoever_asked(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="at most 2 tokens, of which 2 are special") as caught:
        encoder(folder, context=2).embed("bal")
    assert "larger context" in (caught.value.hint or "")
    small_bert.write(tmp_path, files=sentence_transformers(max_seq_length=1))
    with pytest.raises(FormatError, match="at most 1 token, of which 2 are special"):
        encoder(tmp_path).embed("bal")
