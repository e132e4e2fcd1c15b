"""`encode_image`: paths, arrays and lists of them, what is refused, looking inside, exports and second starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_encoders import FOLDER, picture, write_folder

import rlx
from rlx.engine.vision_model import VisionModel
from rlx.errors import CapabilityError, FormatError, RequestError

Array = np.ndarray[Any, Any]


def vision(path: Path, **settings: Any) -> VisionModel:
    model = rlx.load(path, **settings)
    assert isinstance(model, VisionModel)
    return model


def write(folder: Path, name: str, **processor: Any) -> None:
    golden: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    golden["processor"] |= processor
    write_folder(folder, golden)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vit")
    write(path, "vit")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> VisionModel:
    return vision(folder)


def close(a: Array, b: Any) -> bool:
    return bool(np.abs(a - np.array(b)).max() < 2e-4 * np.abs(b).max())


# -- images ----------------------------------------------------------------------------------------------------------
def test_paths_arrays_and_lists_give_the_same_vectors(model: VisionModel, tmp_path: Path) -> None:
    image = picture()
    np.save(tmp_path / "a.npy", image)
    (tmp_path / "a.ppm").write_bytes(b"P6 37 24 255\n" + image.tobytes())
    wanted = model.encode_image(image)
    assert wanted.shape == (model.dim,) == (24,) and wanted.dtype == np.float32
    same = [tmp_path / "a.npy", str(tmp_path / "a.ppm"), image, image.transpose(2, 0, 1), image / 255]
    for one in same:
        assert np.array_equal(model.encode_image(one), wanted)
    rows = model.encode_image(same)
    assert rows.shape == (5, 24) and all(np.array_equal(row, wanted) for row in rows)
    assert np.array_equal(model.encode_image(np.stack([image, image])), rows[:2])


def test_neighbours_and_batch_size_change_no_bit(model: VisionModel) -> None:
    images = [np.roll(picture(), i, axis=1) for i in range(5)]
    rows = model.encode_image(images)
    assert len({row.tobytes() for row in rows}) == 5
    for size in (1, 2, 5):
        assert np.array_equal(model.encode_image(images, batch_size=size), rows)
    assert np.array_equal(model.encode_image(iter(images)), rows)


def test_tokens_are_the_class_token_and_the_patches(model: VisionModel) -> None:
    states = model.encode_image(picture(), tokens=True)
    assert states.shape == (10, 24) and np.array_equal(states[0], model.encode_image(picture()))
    assert model.encode_image([picture()] * 3, tokens=True).shape == (3, 10, 24)


def test_vectors_have_length_one_where_that_is_asked(model: VisionModel) -> None:
    unit = model.encode_image([picture()], normalize=True)
    assert np.allclose(np.linalg.norm(unit, axis=1), 1)
    assert np.allclose(unit[0] * np.linalg.norm(model.encode_image(picture())), model.encode_image(picture()))
    assert model.encode_image([]).shape == (0, 24)


def test_images_of_many_shapes_go_through_one_graph(tmp_path: Path) -> None:
    """DINOv2 stretches its positions: whatever the processor makes is read."""
    write(tmp_path, "dinov2", do_center_crop=False, size={"shortest_edge": 16})
    model = vision(tmp_path)
    tall, wide = np.zeros((16, 8, 3), np.uint8), picture()[:8, :8].repeat(3, 1)
    both = model.encode_image([tall, wide])
    assert np.array_equal(both[0], model.encode_image(tall)) and np.array_equal(both[1], model.encode_image(wide))
    assert model.encode_image(tall, tokens=True).shape == (1 + 4 * 2, 24)
    with pytest.raises(RequestError, match="different numbers of tokens"):
        model.encode_image([tall, wide], tokens=True)
    assert model.encode_image(np.zeros((8, 9, 3), np.uint8), tokens=True).shape == (1 + 2 * 2, 24)  # 16 × 18 pixels


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("image", "error", "match"),
    [
        (3, RequestError, "image 0: expected a path or an array, found int"),
        (b"bytes", RequestError, "image 0: expected a path or an array, found bytes"),
        ([[1, 2]], RequestError, "image 0: expected a path or an array, found list"),
        ([None], RequestError, "image 0: expected a path or an array, found NoneType"),
        (np.zeros((4, 4, 2), np.uint8), RequestError, r"image 0: the shape is \[4, 4, 2\]"),
        (np.zeros((4, 4, 3)) - 1, RequestError, "image 0: floats from -1 to -1"),
        ("nowhere.png", FormatError, r"nowhere\.png': cannot be opened"),
    ],
)
def test_what_is_no_image_is_named(model: VisionModel, image: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        model.encode_image(image)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_batches_have_a_whole_number_of_images(model: VisionModel, size: Any) -> None:
    with pytest.raises(RequestError, match="batch_size"):
        model.encode_image(picture(), batch_size=size)


def test_verbs_of_other_models_say_where_they_belong(model: VisionModel) -> None:
    assert not hasattr(model, "embed") and not hasattr(model, "generate")
    with pytest.raises(CapabilityError, match=r"embed: .* is a vision model") as caught:
        model.embed("a text")
    assert caught.value.hint == "use .encode_image(), or load an encoder such as minilm-l6 for .embed()"


def test_a_processor_that_does_not_fit_the_model_says_so(tmp_path: Path) -> None:
    write(tmp_path, "vit", size={"height": 32, "width": 24})
    with pytest.raises(RequestError, match="32 × 24 pixels, the model reads 24 × 24"):
        vision(tmp_path).encode_image(picture())


def test_without_its_file_a_model_loads_and_says_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, "vit")
    (tmp_path / "preprocessor_config.json").unlink()
    model = vision(tmp_path)
    with pytest.raises(FormatError, match=r"no preprocessor_config\.json says how images are preprocessed"):
        model.encode_image(picture())


# -- inside, and other ways to start ---------------------------------------------------------------------------------
def test_values_inside_are_captured_by_path(model: VisionModel) -> None:
    plain = model.run(picture())
    assert set(plain) == {"pooled", "states"} and np.array_equal(plain["pooled"], model.encode_image(picture()))
    values = model.run(picture(), capture=["layers.*", "layers.*.attn", "embed"])
    assert {"layers.0", "layers.1", "layers.0.attn", "layers.1.attn", "embed"} <= set(values)
    assert all(value.shape == (10, 24) for value in values.values())


def test_an_export_gives_the_same_vectors(folder: Path, model: VisionModel, tmp_path: Path) -> None:
    for weights in (False, True):
        path = model.export(tmp_path / f"{weights}.rlxp", weights=weights)
        assert np.array_equal(vision(path).encode_image(picture()), model.encode_image(picture()))


def test_a_second_start_gives_the_same_vectors(folder: Path, model: VisionModel) -> None:
    again = vision(folder)
    assert np.array_equal(again.encode_image(picture()), model.encode_image(picture()))
    assert again.settings == model.settings


def test_a_closed_model_refuses(tmp_path: Path) -> None:
    write(tmp_path, "siglip")
    with vision(tmp_path) as model:
        assert "siglip vision model" in repr(model)
    with pytest.raises(RequestError, match="is closed"):
        model.encode_image(picture())


# -- times and gradients ---------------------------------------------------------------------------------------------
def test_a_report_explains_the_time_of_an_image(model: VisionModel) -> None:
    report = model.report([picture(), picture()])
    phase = report.phases["encode_image"]
    assert phase.runs == 1 and report.host["reading images"] > 0 and "layers.*.attn" in phase.stages
    assert model.report().phases["encode_image"].kernel_seconds > 0


def test_gradients_of_an_image_model(model: VisionModel) -> None:
    image, name = picture(), next(n for n in model.params if n.endswith("layernorm.weight"))
    params = model.float_params(name)

    def total(params: Any) -> Any:
        return np.sum(model.apply(params, image) ** 2)

    step = np.zeros_like(params[name])
    step[2] = 1e-2
    up, down = (float(total({name: params[name] + sign * step})) for sign in (1, -1))
    assert rlx.grad(total)(params)[name][2] == pytest.approx((up - down) / 2e-2, rel=2e-2, abs=1e-2)
    wanted, values = model.run(image, capture="layers.*"), model.apply({}, image, capture="layers.*")
    assert wanted and set(values) == set(wanted)
    assert all(np.allclose(values[path], wanted[path], atol=1e-3) for path in wanted)
