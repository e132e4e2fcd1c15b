"""RoBERTa and XLM-RoBERTa: random small models against `transformers`, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
from gguf_writing import finish
from reference_encoders import check, embedded, save

import rlx
from rlx.errors import FormatError
from rlx.models.load import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": len(small_bert.VOCAB), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "intermediate_size": 80, "max_position_embeddings": 162, "type_vocab_size": 1, "pad_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "one type": {},
    "two types, odd heads": {"type_vocab_size": 2, "hidden_size": 60, "num_attention_heads": 3, "layer_norm_eps": 1e-5},
    "padding is token 0": {"pad_token_id": 0, "num_hidden_layers": 3, "hidden_act": "gelu_new"},
    "padding lies far up": {"pad_token_id": 40, "max_position_embeddings": 130},
}


@pytest.mark.parity
@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "Camembert"])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, family: str, name: str) -> None:
    settings = {**SIZES, **CONFIGS[name]}
    check(tmp_path, save(tmp_path, family, **settings), avoid=settings["pad_token_id"])


@pytest.mark.parity
def test_padding_inside_a_text_has_the_position_of_padding(tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, "Roberta", **SIZES))


@pytest.mark.parity
def test_texts_become_the_vectors_of_transformers(tmp_path: Path) -> None:
    model = save(tmp_path, "Roberta", kind="ForMaskedLM", **SIZES)  # its weights lie under `roberta.`
    small_bert.write_tokenizer(tmp_path)
    words = small_bert.WORDS
    texts = [" ".join((words * 2)[i : i + n]) for i, n in enumerate((5, 1, 70, 0, 130))]
    embedded(tmp_path, model.roberta, texts)


def test_the_longest_text_leaves_out_rows_that_no_token_has(tmp_path: Path) -> None:
    small_bert.write(tmp_path, model_type="roberta", pad_token_id=1)
    assert open_checkpoint(tmp_path).config.context == 158


@pytest.mark.parametrize(("pad", "error"), [(159, "160 rows of positions, of which the first is row 160"), (-1, "-1")])
def test_padding_that_leaves_no_rows_is_refused(tmp_path: Path, pad: int, error: str) -> None:
    small_bert.write(tmp_path, model_type="roberta", pad_token_id=pad)
    with pytest.raises(FormatError, match=error):
        open_checkpoint(tmp_path)


# -- GGUF ------------------------------------------------------------------------------------------------------------
def test_gguf_and_hugging_face_files_give_the_same_vectors(tmp_path: Path) -> None:
    """llama.cpp calls it bert, and leaves out the rows of positions up to that of padding."""
    gguf = pytest.importorskip("gguf")
    weights = small_bert.write(tmp_path / "hf", model_type="roberta", pad_token_id=1, type_vocab_size=1)
    config = small_bert.settings()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"] - 2)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    small_bert.add_gguf_vocabulary(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, array in weights.items():
        rows = array[2:] if "position_embeddings" in name else array
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), rows)
    finish(writer)
    ours, theirs = rlx.load(tmp_path / "m.gguf"), rlx.load(tmp_path / "hf")
    assert isinstance(ours, rlx.EmbeddingModel) and isinstance(theirs, rlx.EmbeddingModel)
    texts = ["bal bam", "dal", " ".join(small_bert.WORDS)]
    assert ours.limit == theirs.limit == 158
    assert np.abs(ours.embed(texts) - theirs.embed(texts)).max() < 1e-6
