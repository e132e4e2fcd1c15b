"""Vision families: random small models against `transformers`, at sizes that they were and were not trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_encoders import TOLERANCE, difference, save

from rlx.errors import CapabilityError, FormatError, RequestError
from rlx.models.load import open_checkpoint
from rlx.models.vision import bicubic

Array = np.ndarray[Any, Any]
VIT: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 80, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
DINO = {name: value for name, value in VIT.items() if name != "intermediate_size"}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", VIT),
    "vit odd": ("ViT", {**VIT, "hidden_size": 60, "num_attention_heads": 3, "image_size": 35, "patch_size": 5}),
    "vit without biases": ("ViT", {**VIT, "qkv_bias": False, "num_hidden_layers": 3, "hidden_act": "gelu_new"}),
    "dinov2": ("Dinov2", DINO),
    "dinov2 odd": ("Dinov2", {**DINO, "hidden_size": 60, "num_attention_heads": 3, "mlp_ratio": 3, "image_size": 40}),
    "dinov2 swiglu": ("Dinov2", {**DINO, "use_swiglu_ffn": True, "qkv_bias": False}),
    "registers": ("Dinov2WithRegisters", DINO),
    "two registers, swiglu": ("Dinov2WithRegisters", {**DINO, "num_register_tokens": 2, "use_swiglu_ffn": True}),
    "registers odd": ("Dinov2WithRegisters", {**DINO, "hidden_size": 60, "num_attention_heads": 5, "image_size": 56}),
    "siglip": ("SiglipVision", VIT),
    "siglip odd": ("SiglipVision", {**VIT, "hidden_size": 60, "num_attention_heads": 3, "image_size": 35}),
    "siglip erf": ("SiglipVision", {**VIT, "hidden_act": "gelu", "num_hidden_layers": 3, "layer_norm_eps": 0.1}),
}  # fmt: skip


def run(folder: Path, pixels: Array, device: str = "cpu") -> tuple[Array, Array]:
    """The pooled vector and the states of each image."""
    checkpoint = open_checkpoint(folder)
    f = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights).compile(device)
    pooled, states = f.run(checkpoint.config.inputs(pixels))
    return pooled, states


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    import torch

    family, settings = CONFIGS[name]
    model = save(tmp_path, family, **settings)
    size, patch = settings["image_size"], settings["patch_size"]
    sizes = [(size, size)] if "Dino" not in family else [
        (size, size), (patch, patch), (2 * patch, 7 * patch), (9 * patch + 5, 3 * patch + patch - 1)
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    for height, width in sizes:
        pixels = rng.standard_normal((3, 3, height, width)).astype(np.float32)
        with torch.no_grad():
            wanted = model(torch.from_numpy(pixels))
        states = wanted.last_hidden_state.numpy()
        pooled = wanted.pooler_output.numpy() if family != "ViT" else states[:, 0]
        for device in ("cpu", "reference"):
            actual = run(tmp_path, pixels, device)
            assert difference(actual[0], pooled) < TOLERANCE
            assert difference(actual[1], states) < TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize(("family", "settings"), [("ViT", VIT), ("Dinov2", DINO), ("Dinov2WithRegisters", DINO)])
def test_a_model_with_a_head_is_read_without_it(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    import torch

    model = save(tmp_path, family, kind="ForImageClassification", **settings)
    pixels = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        wanted = model.base_model(torch.from_numpy(pixels)).last_hidden_state.numpy()
    assert difference(run(tmp_path, pixels)[1], wanted) < TOLERANCE


@pytest.mark.parity
def test_the_tower_of_a_whole_siglip_is_read(tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    text = {"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.SiglipConfig(text_config={**text, **tokens}, vision_config=VIT)
    model = transformers.SiglipModel(config).eval()
    model.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        wanted = model.vision_model(torch.from_numpy(pixels)).pooler_output.numpy()
    assert difference(run(tmp_path, pixels)[0], wanted) < TOLERANCE


# -- positions of another size ---------------------------------------------------------------------------------------
@pytest.mark.parity
@pytest.mark.parametrize("sizes", [(37, 16), (4, 4), (4, 9), (5, 1), (1, 3), (2, 5)])
def test_stretching_is_that_of_torch(sizes: tuple[int, int]) -> None:
    import torch

    from rlx.formats.images import resampling

    size, wanted = sizes
    table = np.random.default_rng(0).standard_normal((1, 1, size, 3))
    for matrix, antialias in ((bicubic(size, wanted), False), (resampling(size, wanted), True)):
        theirs = torch.nn.functional.interpolate(
            torch.from_numpy(table), size=(wanted, 3), mode="bicubic", align_corners=False, antialias=antialias
        )
        assert np.abs(matrix @ table[0, 0] - theirs[0, 0].numpy()).max() < 1e-6


@pytest.mark.parametrize("sizes", [(4, 9), (9, 4), (5, 1), (1, 3), (7, 7)])
def test_a_constant_stays_a_constant_and_the_same_size_changes_nothing(sizes: tuple[int, int]) -> None:
    size, wanted = sizes
    assert np.allclose(bicubic(size, wanted).sum(1), 1)
    assert np.array_equal(bicubic(size, size), np.eye(size))


# -- what is refused -------------------------------------------------------------------------------------------------
def test_images_of_another_size_are_refused_with_both() -> None:
    from rlx.models.dinov2 import Config as Dino
    from rlx.models.vit import Config as ViT

    with pytest.raises(RequestError, match="32 × 16 pixels, the model reads 224 × 224"):
        ViT().inputs(np.zeros((1, 3, 32, 16), np.float32))
    with pytest.raises(RequestError, match="30 × 13 pixels are less than a patch of 14 × 14"):
        Dino().inputs(np.zeros((1, 3, 30, 13), np.float32))


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"model_type": "vit", "num_channels": 1}, CapabilityError, "num_channels is 1"),
        ({"model_type": "vit", "num_attention_heads": 7}, FormatError, "768 does not split into 7 heads"),
        ({"model_type": "vit", "image_size": 8}, FormatError, "patches of 16 pixels in images of 8"),
        ({"model_type": "vit", "image_size": [224, 112]}, CapabilityError, "image_size"),
        ({"model_type": "siglip", "vision_config": [1]}, FormatError, "vision_config: expected an object"),
        ({"model_type": "siglip_vision_model", "vision_use_head": False}, CapabilityError, "vision_use_head is False"),
        ({"model_type": "dinov2", "hidden_act": "prelu"}, CapabilityError, "'prelu'"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path: Path, settings: dict[str, Any], error: Any, match: str) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1, np.float32)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(error, match=match):
        open_checkpoint(tmp_path)
