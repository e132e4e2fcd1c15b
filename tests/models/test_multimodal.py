"""Models that also see images: their language model is read out of the folder, under whatever names it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_models import SIZES, check
from safetensors.numpy import load_file
from test_golden import Golden

import rlx
from rlx.errors import CapabilityError, FormatError
from rlx.models.load import open_checkpoint

NAMES = {
    "older": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "newer": {"model.": "model.language_model.", "lm_head.": "lm_head."},
}
TOWER = {"older": "vision_tower.vision_model", "newer": "model.vision_tower.vision_model"}


def seeing(name: str, style: str) -> Golden:
    """A golden model as part of one that sees images too."""
    golden = Golden(name)
    text = dict(golden.settings)
    tied = text.pop("tie_word_embeddings")
    kind = text["model_type"].removesuffix("_text")
    golden.settings = {"model_type": kind, "text_config": text, "vision_config": {}, "tie_word_embeddings": tied}
    prefixes = NAMES[style]
    golden.weights = {
        next(theirs + n.removeprefix(ours) for ours, theirs in prefixes.items() if n.startswith(ours)): w
        for n, w in golden.weights.items()
    } | {f"{TOWER[style]}.encoder.layers.0.mlp.fc1.weight": np.ones((3, 3), np.float32)}
    return golden


@pytest.mark.parametrize("style", NAMES)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "qwen3_5_moe"])
def test_the_language_model_is_read(tmp_path: Path, name: str, style: str) -> None:
    golden = seeing(name, style)
    golden.check(open_checkpoint(golden.folder(tmp_path)))


def test_settings_that_files_leave_out_are_the_published_ones(tmp_path: Path) -> None:
    golden = seeing("gemma3", "older")
    said = golden.settings["text_config"]
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"):
        said.pop(name)
    checkpoint = open_checkpoint(golden.folder(tmp_path))
    c = checkpoint.config
    assert (c.vocab, c.heads, c.kv_heads, c.trained, c.eps) == (262208, 8, 4, 131072, 1e-6)


def test_it_goes_to_gguf_and_back_and_the_tower_stays_in_folders(tmp_path: Path) -> None:
    golden = seeing("gemma3", "newer")
    (tmp_path / "a").mkdir()
    model: Any = rlx.load(golden.folder(tmp_path / "a"))
    model.save(tmp_path / "b")
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == golden.weights.keys()
    model.save(tmp_path / "m.gguf")
    other: Any = rlx.load(tmp_path / "m.gguf")
    assert np.abs(other.logits(golden.rows[0]) - golden.logits[0]).max() < 2e-4 * np.abs(golden.logits[0]).max()


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    golden = seeing("gemma3", "older")
    golden.settings["text_config"] = 3
    with pytest.raises(FormatError, match="text_config: expected an object, found 3"):
        open_checkpoint(golden.folder(tmp_path))
    golden = seeing("gemma3", "older")
    golden.settings["quantization_config"] = {"bits": 4}
    with pytest.raises(CapabilityError, match="quantization_config is"):
        open_checkpoint(golden.folder(tmp_path))


VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


@pytest.mark.parity
def test_gemma_3_equals_transformers(tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    text = {**SIZES, "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).eval().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma3"
    check(tmp_path, transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path).eval())


@pytest.mark.parity
@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_qwen3_5_equals_transformers(tmp_path: Path, family: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20} if "Moe" in family else {}
    text = {
        **SIZES, **experts, "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    tower = {
        "depth": 1, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2, "patch_size": 8,
        "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=tower)
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    kind(config).eval().save_pretrained(tmp_path)
    assert "vision_config" in json.loads((tmp_path / "config.json").read_text())
    check(tmp_path, kind.from_pretrained(tmp_path).eval())
