"""Commands with vision models, as a user types them: `embed` of image files, `verify`, `inspect`, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from golden_encoders import FOLDER, picture, write_folder

from rlx.cli.main import main


@pytest.fixture(scope="module", params=["vit", "dinov2", "siglip"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / str(request.param)
    write_folder(folder, json.loads((FOLDER / f"{request.param}.json").read_text()))
    return folder


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    for name, shift in (("a", 0), ("b", 7), ("c", 20)):
        np.save(tmp_path / f"{name}.npy", np.roll(picture(), shift, axis=1))
    return [str(tmp_path / f"{name}.npy") for name in "abc"]


def test_a_vision_model_embeds_image_files(model: Path, images: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "-m", str(model), *images, "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    wanted = json.loads((FOLDER / f"{model.name}.json").read_text())["pooled"]
    assert report["images"] == 3 and np.abs(np.array(report["vectors"][0]) - wanted).max() < 1e-3
    assert "3 images" in said.err and "24 numbers" in said.err


def test_images_are_ranked_by_another(model: Path, images: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "-m", str(model), *images, "--query", images[1]]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"1.0000  {images[1]}"


def test_what_makes_no_sense_for_images_is_refused(
    model: Path, images: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "-m", str(model), *images, "--prompt", "query"]) == 2
    assert "reads images, which have no --prompt" in capsys.readouterr().err
    assert main(["embed", "-m", str(model), "nowhere.png"]) == 4
    assert "nowhere.png" in capsys.readouterr().err
    assert main(["run", "-m", str(model), "-p", "hello"]) == 1
    assert f"run: {model} is a vision model: it gives vectors, not text" in capsys.readouterr().err


@pytest.mark.usefixtures("without_torch")
def test_a_vision_model_is_verified_and_inspected(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model)]) == 0
    said = capsys.readouterr().out
    assert "3×24 finite vectors" in said and "machine code and NumPy" in said and "all fine" in said
    assert main(["inspect", str(model), "--stage", "layers.0.attn"]) == 0
    assert f"{model.name} vision model, 2 layers" in capsys.readouterr().out


@pytest.mark.parity
def test_transformers_agrees(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model)]) == 0
    assert "ok       transformers" in capsys.readouterr().out
