"""Images made ready for a model: against the processors of `transformers`, and against formulas."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx.errors import CapabilityError, FormatError
from rlx.models.image_preprocessing import ImageSettings, centre_crop, read_image_settings

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
SMALL: dict[str, Any] = {
    "size": {"height": 20, "width": 24},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.5, 1.5],
}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", SMALL),
    "vit bicubic": ("ViT", {**SMALL, "resample": 3}),
    "vit lanczos": ("ViT", {**SMALL, "resample": 1}),
    "vit nearest": ("ViT", {**SMALL, "resample": 0}),
    "vit as it is": ("ViT", {**SMALL, "do_resize": False}),
    "vit plain numbers": ("ViT", {**SMALL, "do_normalize": False, "do_rescale": False}),
    "vit other numbers": ("ViT", {**SMALL, "rescale_factor": 0.01}),
    "siglip": ("Siglip", {"size": {"height": 32, "width": 32}}),
    "dinov2": ("Bit", {"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}}),
    "dinov2 too small": ("Bit", {"size": {"shortest_edge": 16}, "crop_size": {"height": 28, "width": 29}}),
    "bit without cutting": ("Bit", {"size": {"shortest_edge": 16}, "do_center_crop": False}),
    "deit": ("DeiT", {"size": {"height": 32, "width": 32}, "crop_size": {"height": 29, "width": 28}}),
}
SHAPES = [(40, 60), (60, 41), (33, 33), (100, 17), (7, 9)]


def read(folder: Path, said: Any, name: str = "preprocessor_config.json") -> ImageSettings:
    (folder / name).write_text(said if isinstance(said, str) else json.dumps(said))
    checkpoint: Any = SimpleNamespace(path=folder)
    return read_image_settings(checkpoint)


def photo(height: int, width: int) -> Array:
    """Something smooth with edges, in all colours."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(y / 3) + np.cos(x / 4), np.sin((x + y) / 5) * 2, np.where(x > width / 3, 2.0, -2.0)]
    return ((np.stack(waves, -1) + 2) * 63).astype(np.uint8)


@pytest.mark.parity
@pytest.mark.parametrize("name", PROCESSORS)
def test_images_are_those_of_the_processors_of_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("PIL")
    transformers = pytest.importorskip("transformers")
    kind, said = PROCESSORS[name]
    name = f"{kind}ImageProcessor"  # older versions have this one with Pillow, newer ones with torchvision
    processor = getattr(transformers, f"{name}Pil", getattr(transformers, name))(**said)
    processor.save_pretrained(tmp_path)
    checkpoint: Any = SimpleNamespace(path=tmp_path)
    settings = read_image_settings(checkpoint)
    for height, width in SHAPES:
        image = photo(height, width)
        wanted = np.asarray(processor(image, input_data_format="channels_last")["pixel_values"][0])
        actual = settings.prepare(image)
        assert actual.shape == wanted.shape
        # Pillow may resize columns before rows, from which bytes differ by 1 or 2
        step = 2.01 * settings.scale / min(settings.std)
        assert np.abs(actual - wanted).max() <= step
        assert (np.abs(actual - wanted) > 1e-5).mean() < 0.25


# -- without transformers --------------------------------------------------------------------------------------------
def test_colours_become_numbers_by_mean_and_spread(tmp_path: Path) -> None:
    settings = read(tmp_path, {**SMALL, "do_resize": False})
    image = photo(5, 7)
    wanted = (image / 255 - SMALL["image_mean"]) / SMALL["image_std"]
    assert np.abs(settings.prepare(image) - wanted.transpose(2, 0, 1)).max() < 1e-6
    flipped = read(tmp_path, {**SMALL, "do_resize": False, "do_flip_channel_order": True})
    wanted = (image[:, :, ::-1] / 255 - SMALL["image_mean"]) / SMALL["image_std"]
    assert np.abs(flipped.prepare(image) - wanted.transpose(2, 0, 1)).max() < 1e-6


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"size": 24}, {"size": (24, 24), "resample": 2}),
        ({"size": [24, 20]}, {"size": (24, 20)}),
        ({"size": 24, "feature_extractor_type": "CLIPFeatureExtractor"}, {"shorter": 24, "resample": 3}),
        ({"size": 24, "image_processor_type": "SiglipImageProcessor"}, {"size": (24, 24), "resample": 3}),
        ({"size": {"shortest_edge": 24}, "do_center_crop": True, "crop_size": 20}, {"shorter": 24, "crop": (20, 20)}),
        ({"do_resize": False}, {"size": None, "shorter": None}),
        ({"size": 24, "image_mean": 0.5, "image_std": 2}, {"mean": (0.5,) * 3, "std": (2.0,) * 3}),
        ({"size": 24, "do_normalize": False}, {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
        ({"size": 24, "do_rescale": False}, {"scale": 1.0}),
    ],
)
def test_sizes_are_read_in_all_words(tmp_path: Path, said: dict[str, Any], wanted: dict[str, Any]) -> None:
    actual = read(tmp_path, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **said})
    assert {name: getattr(actual, name) for name in wanted} == wanted
    assert actual.source == str(tmp_path / "preprocessor_config.json")


def test_settings_may_lie_in_the_file_of_the_processor(tmp_path: Path) -> None:
    actual = read(tmp_path, {"image_processor": {**SMALL, "resample": 3}}, "processor_config.json")
    assert (actual.size, actual.resample) == ((20, 24), 3)


def test_a_folder_that_says_nothing_has_no_source(tmp_path: Path) -> None:
    checkpoint: Any = SimpleNamespace(path=tmp_path)
    assert read_image_settings(checkpoint) == ImageSettings()


@pytest.mark.parametrize("wanted", [(4, 4), (3, 8), (9, 9), (5, 12), (10, 3)])
def test_the_middle_is_cut_out_or_lies_in_black(wanted: tuple[int, int]) -> None:
    image = photo(6, 7) | 1  # nothing is black
    actual = centre_crop(image, *wanted)
    assert actual.shape == (*wanted, 3)
    overlap = tuple(min(a, b) for a, b in zip(wanted, (6, 7), strict=True))
    assert (actual > 0).all(-1).sum() == overlap[0] * overlap[1]
    inner = actual[(actual > 0).all(-1)].reshape(*overlap, 3)
    top, left = ((6 - overlap[0]) // 2, (7 - overlap[1]) // 2)
    assert np.array_equal(inner, image[top : top + overlap[0], left : left + overlap[1]])


@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        ({}, FormatError, "'size' is missing"),
        ({"size": 0}, FormatError, "size: expected 1 to"),
        ({"size": {"height": "4", "width": 4}}, FormatError, "size: expected 1 to"),
        ({"size": {"longest_edge": 4}}, CapabilityError, "size is"),
        ({"size": {"shortest_edge": 4, "longest_edge": 9}}, CapabilityError, "size is"),
        ({"size": 4, "resample": 9}, FormatError, "resample: expected 0 to 5"),
        ({"size": 4, "do_pad": True}, CapabilityError, "do_pad is True"),
        ({"size": 4, "image_mean": [0.5]}, FormatError, "image_mean: expected a number for each"),
        ({"size": 4, "image_std": [0, 1, 1]}, FormatError, "image_std: expected numbers other than 0"),
        ({"size": 4, "do_center_crop": True}, FormatError, "'crop_size' is missing"),
        ({"size": 4, "do_center_crop": True, "crop_size": {"shortest_edge": 3}}, FormatError, "crop_size: expected"),
        ({"size": 4, "do_resize": "yes"}, FormatError, "do_resize"),
        ({"size": 4, "rescale_factor": "x"}, FormatError, "rescale_factor"),
        ("[]", FormatError, "expected a dict"),
        ("{", FormatError, "preprocessor_config"),
    ],
)
def test_files_that_cannot_mean_it_are_named(tmp_path: Path, said: Any, error: Any, match: str) -> None:
    rest = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "x": 1}
    with pytest.raises(error, match=match) as caught:
        read(tmp_path, said if isinstance(said, str) else {**rest, **said})
    assert str(tmp_path) in str(caught.value)


def test_a_very_long_image_is_refused_before_it_is_made() -> None:
    with pytest.raises(CapabilityError, match="1 × 5000 pixels would become"):
        ImageSettings(shorter=224).prepare(np.zeros((1, 5000, 3), np.uint8))
