"""Saving as GGUF: what the package `gguf` finds in the file, what rlx computes from it, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_llama import SETTINGS, difference, random_weights, write_folder

import rlx
from rlx.errors import CapabilityError, RequestError

gguf = pytest.importorskip("gguf")
Array = np.ndarray[Any, Any]
TOKENS = [7, 1, 42, 63, 0, 9, 9, 30, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.9}
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 5.0, 7.0],
}  # fmt: skip


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def tensors(path: Path) -> dict[str, Array]:
    return {tensor.name: np.asarray(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def saved(folder: Path, **changes: Any) -> tuple[Any, Path]:
    """A Llama with these settings, loaded, and its GGUF file."""
    said = {**SETTINGS, **changes}
    write_folder(folder, random_weights(SETTINGS), said)
    model = rlx.load(folder)
    return model, model.save(folder / "m.gguf")


@pytest.mark.parametrize("window", [None, 5])
def test_mistral_is_a_llama_there(tmp_path: Path, window: int | None) -> None:
    model, path = saved(tmp_path, model_type="mistral", sliding_window=window)
    actual = fields(path)
    assert actual["general.architecture"] == "llama"
    assert actual.get("llama.attention.sliding_window") == window
    with rlx.load(path) as again:
        assert difference(again.logits(TOKENS), model.logits(TOKENS)) < 1e-5
    # heads in pairs: rows 0, 4, 1, 5, ... of each head
    q = random_weights(SETTINGS)["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(tensors(path)["blk.0.attn_q.weight"][:4], q[[0, 4, 1, 5]])


def test_llama3_scaling_is_a_tensor_of_factors(tmp_path: Path) -> None:
    model, path = saved(tmp_path, rope_scaling=LLAMA3)
    factors = tensors(path)["rope_freqs.weight"]
    plain = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    turns = 32 * plain / (2 * np.pi)
    assert (factors[turns > 4] == 1).all() and np.allclose(factors[turns < 1], 8)
    with rlx.load(path) as again:
        assert difference(again.logits(TOKENS), model.logits(TOKENS)) < 1e-5


def test_yarn_is_written_in_the_words_of_llama_cpp(tmp_path: Path) -> None:
    model, path = saved(tmp_path, rope_scaling=YARN)
    actual = fields(path)
    assert actual["llama.rope.scaling.type"] == "yarn" and actual["llama.rope.scaling.factor"] == 4.0
    assert actual["llama.rope.scaling.original_context_length"] == 64
    # llama.cpp multiplies by 1 + 0.1 ln(factor) itself
    assert actual["llama.rope.scaling.attn_factor"] == pytest.approx(0.9 / (1 + 0.1 * np.log(4.0)))
    with rlx.load(path) as again:
        assert difference(again.logits(TOKENS), model.logits(TOKENS)) < 1e-5


@pytest.mark.parametrize("length", [16, 17])
def test_longrope_is_two_tensors(tmp_path: Path, length: int) -> None:
    model, path = saved(tmp_path, rope_scaling=LONG)
    actual = tensors(path)
    assert actual["rope_factors_long.weight"].tolist() == LONG["long_factor"]
    assert actual["rope_factors_short.weight"].tolist() == LONG["short_factor"]
    assert fields(path)["llama.rope.scaling.original_context_length"] == 16
    with rlx.load(path) as again:
        assert difference(again.logits(TOKENS[:length]), model.logits(TOKENS[:length])) < 1e-5
        again.save(tmp_path / "back")
    with rlx.load(tmp_path / "back") as back:
        assert difference(back.logits(TOKENS[:length]), model.logits(TOKENS[:length])) < 1e-5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling: type 'dynamic'"),
        ({"model_type": "qwen2", "rope_scaling": LLAMA3}, "rope_scaling: type 'llama3' of a qwen2"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling"),
        ({"hidden_act": "relu"}, "hidden_act ('relu')"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
            "use_sliding_window (True)",
        ),
    ],
)
def test_what_gguf_has_no_words_for_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    weights = random_weights({**SETTINGS, **changes})
    write_folder(tmp_path, weights, {**SETTINGS, **changes})
    with rlx.load(tmp_path) as model, pytest.raises(CapabilityError) as caught:
        model.save(tmp_path / "m.gguf")
    assert named in str(caught.value) and len(str(caught.value)) < 500
    assert not list(tmp_path.glob("*.gguf"))


# -- what is not a format --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.GGUF", "x.h5", "x.json"])
def test_an_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, random_weights(SETTINGS), SETTINGS)
    with rlx.load(tmp_path) as model:
        with pytest.raises(RequestError, match="not a format for saving models"):
            model.save(tmp_path / name)
        assert not (tmp_path / name).exists()
        assert (model.save(tmp_path / "model-1.5") / "config.json").exists()
        assert (model.save(tmp_path / "v2.7B") / "config.json").exists()


def test_a_patch_is_not_dropped_without_a_word(tmp_path: Path) -> None:
    write_folder(tmp_path, random_weights(SETTINGS), SETTINGS)
    with rlx.load(tmp_path, patch=lambda flow: flow.logit_softcap(3.0)) as model:
        for name in ("m", "m.gguf", "m.safetensors"):
            with pytest.raises(CapabilityError, match="was loaded with a patch"):
                model.save(tmp_path / name)
    with rlx.load(tmp_path, patch=lambda flow: flow) as model:  # which changes nothing
        model.save(tmp_path / "m")


# -- transformers' models --------------------------------------------------------------------------------------------
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "mamba": ("Mamba", {"state_size": 6, "time_step_rank": 5, "hidden_size": 48, "intermediate_size": 96}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 12, "n_groups": 1, "state_size": 16, "chunk_size": 8}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "phi3, longrope": (
        "Phi3",
        {
            "rope_parameters": {**LONG, "rope_theta": 1e4}, "original_max_position_embeddings": 16, "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_go_to_gguf_and_back(tmp_path: Path, name: str) -> None:
    from reference_models import TOLERANCE, logits, save

    family, settings = MODELS[name]
    (tmp_path / "a").mkdir()
    wanted = save(tmp_path / "a", family, **settings)
    with rlx.load(tmp_path / "a") as model:
        model.save(tmp_path / "m.gguf", dtype="f32")
        if name != "mixtral":
            assert model.family.architecture == fields(tmp_path / "m.gguf")["general.architecture"]
    with rlx.load(tmp_path / "m.gguf") as model:
        for length in (10, len(TOKENS)):
            assert difference(model.logits(TOKENS[:length]), logits(wanted, TOKENS[:length])) < TOLERANCE
        model.save(tmp_path / "b")
    with rlx.load(tmp_path / "b") as model:
        assert difference(model.logits(TOKENS), logits(wanted, TOKENS)) < TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("Mamba2", {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 16}, "n_groups"),
        ("Gemma", {"head_dim": 8, "attention_bias": True}, "q_proj.bias"),
        ("Mamba", {"hidden_act": "gelu"}, "hidden_act ('gelu')"),
        ("Gemma3", {"head_dim": 8, "query_pre_attn_scalar": 3}, "query_pre_attn_scalar"),
    ],
)
def test_models_that_gguf_cannot_hold_are_refused_by_name(
    tmp_path: Path, family: str, settings: dict[str, Any], named: str
) -> None:
    from reference_models import save

    save(tmp_path, family, **settings)
    with rlx.load(tmp_path) as model, pytest.raises(CapabilityError) as caught:
        model.save(tmp_path / "m.gguf")
    assert named in str(caught.value)
