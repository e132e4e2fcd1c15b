"""Folders of 8-bit floats and MXFP4: models whose weights stay packed and compute what their numbers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scaled_folders
from reference_models import save
from scaled_folders import E4M3, Array, eight_bits, is_linear, write_fp8, write_mxfp4
from small_llama import SETTINGS, Driver, difference, forward, random_weights, write_folder

from rlx.dtypes import BY_NAME, F32
from rlx.errors import CapabilityError, FormatError
from rlx.formats.scaled_weights import ScaledFile
from rlx.models.load import open_checkpoint

WIDE = {**SETTINGS, "hidden_size": 128, "intermediate_size": 256}
TOKENS = np.random.default_rng(5).integers(0, 64, 40).tolist()
PHI: dict[str, Any] = {**WIDE, "model_type": "phi3", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MOE: dict[str, Any] = {
    **WIDE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "head_dim": 32, "norm_topk_prob": True,
}  # fmt: skip
EXPERTS = "model.layers.1.mlp.experts.gate_proj.weight"
MIXTRAL: dict[str, Any] = {**WIDE, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}


def storage_of(folder: Path) -> dict[str, str]:
    weights = open_checkpoint(folder).weights
    return {name: str(weights.type(name).dtype) for name in weights.keys()}  # noqa: SIM118


def logits_of(folder: Path, tokens: list[int] = TOKENS, chunk: int = 40) -> Array:
    return Driver.of(open_checkpoint(folder)).by_chunks(tokens, chunk)


# -- 8-bit floats ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "grid", "kind"),
    [
        (WIDE, (128, 128), "f8e4m3_128"),
        (WIDE, (64, 32), "f8e4m3_32"),
        (SETTINGS | {"intermediate_size": 64}, (128, 128), "f8e4m3_32"),
        ({**WIDE, "hidden_size": 192, "intermediate_size": 320}, (128, 128), "f8e4m3_32"),  # one and a half blocks
    ],
)
def test_a_model_of_8_bit_floats_stays_packed_and_is_its_numbers(
    tmp_path: Path, settings: dict[str, Any], grid: tuple[int, int], kind: str
) -> None:
    plain = write_fp8(tmp_path, random_weights(settings), settings, grid)
    actual = storage_of(tmp_path)
    assert {name: kind if is_linear(name) else "f32" for name in plain} == actual
    wanted = forward(settings, plain, TOKENS)
    for chunk in (40, 7, 1):
        assert difference(logits_of(tmp_path, chunk=chunk), wanted) < 1e-5


def test_embeddings_and_head_of_8_bits_are_read_by_rows(tmp_path: Path) -> None:
    plain = write_fp8(tmp_path, random_weights(WIDE), WIDE, chosen=lambda name: "norm" not in name)
    assert storage_of(tmp_path)["model.embed_tokens.weight"] == "f8e4m3_128"
    assert difference(logits_of(tmp_path), forward(WIDE, plain, TOKENS)) < 1e-5


def test_rows_that_are_no_whole_blocks_are_f32_and_the_user_is_told(tmp_path: Path) -> None:
    plain = write_fp8(tmp_path, random_weights(SETTINGS), SETTINGS, (128, 128))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.weights.type("model.layers.0.mlp.down_proj.weight").dtype is F32  # of 48 numbers
    assert checkpoint.weights.type("model.layers.0.mlp.up_proj.weight").dtype is BY_NAME["f8e4m3_32"]
    (note,) = checkpoint.notes
    assert "2 weights of 8-bit floats take the memory of f32" in note and "down_proj" in note and "of 32" in note
    assert difference(logits_of(tmp_path), forward(SETTINGS, plain, TOKENS)) < 1e-5


def test_weights_that_a_file_joins_are_parts_of_packed_ones(tmp_path: Path) -> None:
    """Phi-3 has queries, keys and values in one tensor, gate and up in another."""
    apart = random_weights(WIDE)
    weights = {n: w for n, w in apart.items() if not any(f".{p}_proj" in n for p in ("q", "k", "v", "gate", "up"))}
    for i in range(2):
        at = f"model.layers.{i}"
        weights[f"{at}.self_attn.qkv_proj.weight"] = np.concatenate(
            [apart[f"{at}.self_attn.{p}_proj.weight"] for p in "qkv"]
        )
        weights[f"{at}.mlp.gate_up_proj.weight"] = np.concatenate(
            [apart[f"{at}.mlp.{p}_proj.weight"] for p in ("gate", "up")]
        )
    plain = write_fp8(tmp_path / "packed", weights, PHI)
    scaled_folders.write(tmp_path / "plain", plain, PHI)
    assert storage_of(tmp_path / "packed")["model.layers.1.self_attn.k_proj.weight"] == "f8e4m3_128"
    assert difference(logits_of(tmp_path / "packed"), logits_of(tmp_path / "plain")) < 1e-5


# -- experts ---------------------------------------------------------------------------------------------------------
def experts_of(settings: dict[str, Any]) -> dict[str, Array]:
    """Weights of a mixture, one by one as folders have them."""
    rng = np.random.default_rng(3)
    weights = random_weights(settings, seed=1)
    dim, qwen = settings["hidden_size"], settings["model_type"] == "qwen3_moe"
    count = settings["num_experts" if qwen else "num_local_experts"]
    ffn = settings["moe_intermediate_size" if qwen else "intermediate_size"]
    result = {name: w for name, w in weights.items() if ".mlp." not in name}
    for i in range(settings["num_hidden_layers"]):
        at = f"model.layers.{i}.{'mlp' if qwen else 'block_sparse_moe'}"
        parts = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
        result[f"{at}.gate.weight"] = rng.standard_normal((count, dim)).astype(np.float32)
        for j in range(count):
            for part, shape in zip(parts, ((ffn, dim), (ffn, dim), (dim, ffn)), strict=True):
                values = rng.standard_normal(shape) / shape[1] ** 0.5
                result[f"{at}.experts.{j}.{part}.weight"] = values.astype(np.float32)
        if qwen:
            for part in ("q_norm", "k_norm"):
                result[f"model.layers.{i}.self_attn.{part}.weight"] = np.ones(settings["head_dim"], np.float32)
    return result


def is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("settings", [MOE, MIXTRAL], ids=["qwen", "mixtral"])
@pytest.mark.parametrize("kind", ["mxfp4", "f8e4m3_128", "f8e4m3_32"])
def test_experts_stay_packed_and_are_their_numbers(tmp_path: Path, settings: dict[str, Any], kind: str) -> None:
    weights = experts_of(settings)
    if kind == "mxfp4":
        plain = write_mxfp4(tmp_path / "packed", weights, settings, is_expert)
    else:
        plain = write_fp8(tmp_path / "packed", weights, settings, (int(kind[7:]),) * 2, chosen=is_expert)
    scaled_folders.write(tmp_path / "plain", plain, settings)
    checkpoint = open_checkpoint(tmp_path / "packed")
    type_ = checkpoint.weights.type(EXPERTS)
    assert str(type_.dtype) == kind and len(type_.shape) == 3
    assert not checkpoint.weights.array(EXPERTS).flags.writeable  # so that graphs share what is made of it
    assert difference(logits_of(tmp_path / "packed"), logits_of(tmp_path / "plain")) < 1e-5


def test_experts_that_are_stacked_in_the_file_become_mxfp4(tmp_path: Path) -> None:
    weights = experts_of(MOE)
    stacked = {name: w for name, w in weights.items() if not is_expert(name)}
    for i in range(2):
        at = f"model.layers.{i}.mlp.experts"
        for part in ("gate_proj", "up_proj", "down_proj"):
            stacked[f"{at}.{part}.weight"] = np.stack([weights[f"{at}.{j}.{part}.weight"] for j in range(4)])
    write_mxfp4(tmp_path / "stacked", stacked, MOE, is_expert)
    write_mxfp4(tmp_path / "apart", weights, MOE, is_expert)
    assert storage_of(tmp_path / "stacked")["model.layers.0.mlp.experts.up_proj.weight"] == "mxfp4"
    assert logits_of(tmp_path / "stacked").tobytes() == logits_of(tmp_path / "apart").tobytes()


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_mixtures_equal_transformers_with_the_same_numbers(tmp_path: Path, name: str, kind: str) -> None:
    import torch
    from reference_models import logits
    from safetensors.numpy import load_file

    own = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        if name == "Qwen3Moe"
        else {"num_local_experts": 3}
    )
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}
    model = save(tmp_path / "given", name, **sizes, **own)
    weights = load_file(tmp_path / "given" / "model.safetensors")
    settings = json.loads((tmp_path / "given" / "config.json").read_text())
    if kind == "mxfp4":
        plain = write_mxfp4(tmp_path / "packed", weights, settings, is_expert)
    else:
        plain = write_fp8(tmp_path / "packed", weights, settings, (32, 32), chosen=is_expert)
    scaled_folders.write(tmp_path / "plain", plain, settings)
    wanted = type(model).from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    tokens = np.random.default_rng(2).integers(0, 96, 50).tolist()
    assert difference(logits_of(tmp_path / "packed", tokens), logits(wanted, tokens)) < 2e-4


# -- refusals --------------------------------------------------------------------------------------------------------
def test_gpt_oss_is_refused_by_its_name_and_not_for_its_format(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": np.zeros((2, 64, 1, 16), np.uint8),
        "model.layers.0.mlp.experts.gate_up_proj_scales": np.full((2, 64, 1), 127, np.uint8),
    }
    settings = {**SETTINGS, "model_type": "gpt_oss"}
    with pytest.raises(CapabilityError, match="architecture 'gpt_oss' is not supported") as caught:
        open_checkpoint(scaled_folders.write(tmp_path, tensors, settings, quant_method="mxfp4"))
    assert "mxfp4" not in str(caught.value)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "bert"])
def test_other_methods_are_refused_by_name_in_every_family(tmp_path: Path, method: str, kind: str) -> None:
    settings = {**MOE, "model_type": kind, "layer_norm_eps": 1e-12}
    folder = scaled_folders.write(tmp_path, {"x": np.ones(1, np.float32)}, settings, quant_method=method, bits=4)
    with pytest.raises(CapabilityError, match=rf"config\.json: quantization_config: quant_method is '{method}'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("part", ["vision_config", "text_config"])
def test_the_configuration_of_the_whole_model_counts_for_its_parts(tmp_path: Path, part: str) -> None:
    inner = {**WIDE, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
    settings = {"model_type": "siglip" if part == "vision_config" else "gemma3", part: inner}
    folder = scaled_folders.write(tmp_path, {"x": np.ones(1, np.float32)}, settings, quant_method="awq")
    with pytest.raises(CapabilityError, match="quant_method is 'awq'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("end", ["qweight", "qzeros", "g_idx"])
def test_weights_of_gptq_are_known_without_a_configuration(tmp_path: Path, end: str) -> None:
    weights = random_weights(SETTINGS)
    weights[f"model.layers.0.mlp.up_proj.{end}"] = np.zeros((4, 48), np.int32)  # type: ignore[assignment]
    with pytest.raises(CapabilityError, match=f"up_proj.{end}") as caught:
        open_checkpoint(write_folder(tmp_path, weights, SETTINGS))
    assert "AWQ or GPTQ" in str(caught.value.hint)


def test_a_scale_that_is_missing_names_the_weight(tmp_path: Path) -> None:
    weights: dict[str, Any] = random_weights(WIDE)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].astype(E4M3)
    with pytest.raises(FormatError, match=rf"'{name}': its scales: .*found neither"):
        open_checkpoint(scaled_folders.write(tmp_path, weights, WIDE, quant_method="fp8"))


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    weights = random_weights(WIDE)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name][:, :0]
    write_fp8(tmp_path, weights, WIDE)
    with pytest.raises(FormatError, match=rf"{name}.*\[256, 0\].*\[256, 128\]"):
        logits_of(tmp_path)


def test_transposed_weights_of_8_bit_floats_are_refused(tmp_path: Path) -> None:
    """GPT-2 has them `[in, out]`: blocks would run along the wrong axis."""
    codes, scales, _ = eight_bits(np.ones((32, 96), np.float32), (32, 32))
    settings = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    tensors = {"h.0.attn.c_attn.weight": codes, "h.0.attn.c_attn.weight_scale_inv": scales}
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    checkpoint = open_checkpoint(scaled_folders.write(tmp_path, tensors, settings, **quantization))
    with pytest.raises(FormatError, match=r"c_attn.*transposed: expected plain floats, found f8e4m3_32"):
        checkpoint.weights.type("h.0.attn.q.weight")


def test_a_model_that_was_widened_but_still_says_fp8_is_read_as_it_is(tmp_path: Path) -> None:
    weights = random_weights(SETTINGS)
    folder = scaled_folders.write(tmp_path, weights, SETTINGS, quant_method="fp8", weight_block_size=[128, 128])
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint.file, ScaledFile) and checkpoint.notes == ()
    assert difference(logits_of(folder), forward(SETTINGS, weights, TOKENS)) < 1e-5
