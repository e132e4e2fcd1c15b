"""Settings that few files have, one by one, against `transformers`; test_random_configurations.py mixes them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_encoders
from reference_models import TOLERANCE, check, save
from small_bert import write as write_bert
from small_llama import SETTINGS, Driver, difference, forward, random_weights, write_folder

import rlx
from rlx.errors import CapabilityError
from rlx.hir.activations import NAMED as ACTIVATIONS
from rlx.models.load import open_checkpoint

IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"], **IDS,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma's attention has biases": ("Gemma", {"head_dim": 8, "attention_bias": True, **IDS}),
    "the exact GELU in Gemma": ("Gemma", {"head_dim": 8, "hidden_act": "gelu", **IDS}),
    "the exact GELU in Gemma 2": ("Gemma2", {"head_dim": 8, "hidden_activation": "gelu", **IDS}),
    "the exact GELU in Gemma 3": ("Gemma3", {"head_dim": 8, "hidden_activation": "gelu", **IDS}),
    "a cap of scores in Gemma 3": ("Gemma3", {"head_dim": 8, "attn_logit_softcapping": 1.0, **IDS}),
    "a window in Qwen3-MoE": ("Qwen3Moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 7, **IDS}),
    "another activation in Mamba": ("Mamba", {"hidden_act": "gelu", "state_size": 6, **IDS}),
    "heads of 7 in GPT-2": ("GPT2", {"n_embd": 42, "n_head": 6, "n_positions": 256, **IDS}),
    "truncate inside a kind of layers, where transformers does not look": (
        "Gemma3",
        {
            "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], **IDS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 77.5},
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "truncate": False,
                    "original_max_position_embeddings": 20,
                },
            },
        },
    ),
    "wide values in delta nets": ("Qwen3_5", {**DELTA, "linear_key_head_dim": 4, "linear_value_head_dim": 10}),
    "narrow values in delta nets": (
        "Qwen3Next",
        {**DELTA, **EXPERTS, "linear_key_head_dim": 12, "linear_value_head_dim": 6,
         "shared_expert_intermediate_size": 8},
    ),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", ODD)
def test_odd_settings_equal_transformers(tmp_path: Path, name: str) -> None:
    family, settings = ODD[name]
    check(tmp_path, save(tmp_path, family, **settings))


@pytest.mark.parity
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_encoders_that_read_from_the_left_equal_transformers(tmp_path: Path, family: str) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 90, "is_decoder": True, "pad_token_id": 1}
    model = reference_encoders.save(tmp_path, family, **sizes)
    reference_encoders.check(tmp_path, model, avoid=1)


@pytest.mark.parity
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "gelu_tanh"])
def test_activations_are_those_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    x = np.linspace(-12, 12, 401, dtype=np.float32)
    g = rlx.Graph("g")
    g.set_outputs(ACTIVATIONS[name](g.input("x", (401,))))
    (actual,) = rlx.compile(g).run({"x": x})
    wanted = ACT2FN[name](torch.from_numpy(x)).numpy()
    assert np.abs(actual - wanted).max() < 2e-5


def test_an_activation_with_weights_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, random_weights(SETTINGS), {**SETTINGS, "hidden_act": "xielu"})
    with pytest.raises(CapabilityError, match="hidden_act is 'xielu'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("absent", [True, False])
def test_a_llama_that_does_not_say_its_epsilon_has_that_of_transformers(tmp_path: Path, absent: bool) -> None:
    weights = random_weights(SETTINGS)
    weights["model.embed_tokens.weight"] *= 1e-3  # so small that the epsilon is seen
    said = {**SETTINGS, "rms_norm_eps": None}
    write_folder(tmp_path, weights, {n: v for n, v in said.items() if v is not None or not absent})
    checkpoint = open_checkpoint(tmp_path)
    tokens = [7, 1, 42, 63, 0, 9]
    wanted = forward({**SETTINGS, "rms_norm_eps": 1e-6}, weights, tokens)
    assert difference(Driver.of(checkpoint).forward([tokens], [0])[0], wanted) < TOLERANCE


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu", "transformers_version": "4.38.1"}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": "relu"}, "relu"),
        ({}, "gelu_pytorch_tanh"),
    ],
)
def test_the_activation_of_the_first_gemma_is_that_of_the_version_that_wrote_the_file(
    said: dict[str, Any], wanted: str
) -> None:
    from rlx.models.load import read_config

    sizes = {n: v for n, v in SETTINGS.items() if n not in ("hidden_act", "model_type")}
    assert read_config({**sizes, "model_type": "gemma", **said}, "c")[1].activation == wanted


def test_token_ids_are_embedded_without_a_tokenizer(tmp_path: Path) -> None:
    write_bert(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (tmp_path / name).unlink(missing_ok=True)
    logging.disable(logging.WARNING)
    try:
        with rlx.load(tmp_path) as model:
            vectors = model.embed_tokens([[2, 5, 7], [2, 5]])
            assert vectors.shape == (2, model.dim) and np.isfinite(vectors).all()
            with pytest.raises(CapabilityError, match="no tokenizer"):
                model.embed("text")
    finally:
        logging.disable(logging.NOTSET)
