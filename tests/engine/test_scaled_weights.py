"""Models of 8-bit floats and MXFP4 in use: computing, saving, exporting, starting again, looking inside."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scaled_folders
import small_llama
from safetensors import deserialize
from safetensors.numpy import load_file
from scaled_folders import Array, is_linear, write_fp8, write_mxfp4

from rlx.engine.language_model import LanguageModel
from rlx.formats import open_gguf

from .conftest import language_model

SETTINGS = {**small_llama.SETTINGS, "hidden_size": 128, "intermediate_size": 256}
TOKENS = np.random.default_rng(1).integers(0, 64, 30).tolist()
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    folder = tmp_path_factory.mktemp("fp8")
    return folder, write_fp8(folder, small_llama.random_weights(SETTINGS), SETTINGS)


@pytest.fixture
def folder(fp8: tuple[Path, dict[str, Array]], tmp_path: Path) -> Path:
    shutil.copytree(fp8[0], tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def plain(fp8: tuple[Path, dict[str, Array]]) -> dict[str, Array]:
    """The f32 that the weights stand for."""
    return dict(fp8[1])


@pytest.fixture
def model(folder: Path) -> Iterator[LanguageModel]:
    with language_model(folder) as loaded:
        yield loaded


def settings_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def stored(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of each tensor."""
    tensors = deserialize((folder / "model.safetensors").read_bytes())
    return {name: (of["dtype"], of["shape"], bytes(of["data"])) for name, of in tensors}


def close(logits: Array, weights: dict[str, Array]) -> bool:
    return small_llama.difference(logits, small_llama.forward(SETTINGS, weights, TOKENS)) < 1e-5


def test_a_loaded_model_computes_in_f32(model: LanguageModel, plain: dict[str, Array]) -> None:
    """Nothing is rounded to 8 bits or to half precision, though weights are packed."""
    assert model.cache_dtype == "f32"
    assert close(model.logits(TOKENS), plain)


def test_weights_are_in_memory_once_and_in_8_bits(model: LanguageModel, plain: dict[str, Array]) -> None:
    bound = [a for n, a in model.compiled.host_weights().items() if n not in plain]  # what kernels read
    packed = sum(a.nbytes for a in bound if a.dtype == np.int16)
    linear = sum(w.size for n, w in plain.items() if is_linear(n))
    assert linear * 132 / 128 <= packed < 1.1 * linear * 132 / 128
    assert max(a.size for a in bound if a.dtype == np.float32) < plain[UP].size  # none of them is there in f32 too


def test_a_second_load_uses_the_snapshot_of_the_first(
    folder: Path, plain: dict[str, Array], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    time.sleep(0.1)  # files that changed just now are not trusted to stay as they are
    logits = []
    for _ in range(3):
        with language_model(folder) as model:
            logits.append(model.logits(TOKENS))
            assert model.params[UP].dtype.names == ("d", "codes")
    assert close(logits[0], plain) and logits[0].tobytes() == logits[1].tobytes() == logits[2].tobytes()


@pytest.mark.parametrize("embed", [False, True])
def test_an_export_says_the_same(model: LanguageModel, tmp_path: Path, embed: bool) -> None:
    again = language_model(model.export(tmp_path / "x.rlxp", weights=embed))
    assert again.logits(TOKENS).tobytes() == model.logits(TOKENS).tobytes()


def test_stages_are_captured_and_edited(model: LanguageModel, plain: dict[str, Array]) -> None:
    values = model.run(TOKENS, capture="layers.0")
    wanted = small_llama.values(SETTINGS, plain, TOKENS)
    assert small_llama.difference(np.asarray(values["layers.0"]).reshape(30, -1), wanted["layers.0"]) < 1e-5
    edited = model.run(TOKENS, edit={"layers.0": lambda x: x * 2})
    wanted = small_llama.values(SETTINGS, plain, TOKENS, after={0: lambda x: x * 2})
    assert small_llama.difference(np.asarray(edited["logits"]).reshape(30, -1)[-1:], wanted["logits"][-1:]) < 1e-5


def test_other_parameters_are_applied(model: LanguageModel, plain: dict[str, Array]) -> None:
    assert close(model.apply({}, TOKENS), plain)
    other = plain | {UP: plain[UP] * 0.5}
    assert close(model.apply({UP: other[UP]}, TOKENS), other)
    blocks = model.params[UP].copy()
    blocks["d"] *= 0.5
    assert close(model.apply({UP: blocks}, TOKENS), other)


# -- saving ----------------------------------------------------------------------------------------------------------
def test_a_folder_is_saved_as_it_is(model: LanguageModel, folder: Path, tmp_path: Path) -> None:
    saved = model.save(tmp_path / "saved")
    assert settings_of(saved) == settings_of(folder)
    assert stored(saved) == stored(folder)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_another_type_has_neither_scales_nor_their_configuration(
    model: LanguageModel, plain: dict[str, Array], tmp_path: Path, kind: str
) -> None:
    saved = model.save(tmp_path / "saved", dtype=kind)
    assert "quantization_config" not in settings_of(saved)
    weights = load_file(saved / "model.safetensors")
    wanted = np.dtype(ml_dtypes.bfloat16 if kind == "bf16" else np.float32)
    assert weights.keys() == plain.keys()
    for name, weight in plain.items():
        np.testing.assert_array_equal(weights[name], weight.astype(wanted))


def test_a_weight_that_is_replaced_loses_its_scales_and_is_named(
    model: LanguageModel, plain: dict[str, Array], folder: Path, tmp_path: Path
) -> None:
    saved = model.save(tmp_path / "saved", {UP: plain[UP] * 2})
    after, before = stored(saved), stored(folder)
    del before[f"{UP}_scale_inv"]
    assert after == before | {UP: ("F32", [256, 128], (plain[UP] * 2).tobytes())}
    said = settings_of(saved)["quantization_config"]
    assert said["modules_to_not_convert"] == ["lm_head", UP.removesuffix(".weight")]
    with language_model(saved) as again:
        assert close(again.logits(TOKENS), plain | {UP: plain[UP] * 2})


def test_gguf_has_no_8_bit_floats_so_they_become_f32(
    model: LanguageModel, plain: dict[str, Array], tmp_path: Path
) -> None:
    saved = model.save(tmp_path / "saved.gguf")
    with open_gguf(saved) as file:
        assert {str(file.entry(n).storage) for n in file.names} == {"f32"}
    with language_model(saved) as again:
        assert close(again.logits(TOKENS), plain)


def test_mxfp4_is_saved_as_it_is_and_stays_packed_in_gguf(tmp_path: Path) -> None:
    settings = {
        **SETTINGS, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 64,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {n: w for n, w in small_llama.random_weights(settings).items() if ".mlp." not in n}
    for i in range(2):
        at = f"model.layers.{i}.block_sparse_moe"
        weights[f"{at}.gate.weight"] = rng.standard_normal((2, 128)).astype(np.float32)
        for j, (part, shape) in (
            (j, p) for j in range(2) for p in (("w1", (64, 128)), ("w3", (64, 128)), ("w2", (128, 64)))
        ):
            weights[f"{at}.experts.{j}.{part}.weight"] = (rng.standard_normal(shape) / 9).astype(np.float32)
    plain = write_mxfp4(tmp_path / "packed", weights, settings, lambda name: ".experts." in name)
    scaled_folders.write(tmp_path / "plain", plain, settings)
    with language_model(tmp_path / "plain", precision="f32") as exact:
        wanted = exact.logits(TOKENS)
    with language_model(tmp_path / "packed", precision="f32") as model:
        assert small_llama.difference(model.logits(TOKENS), wanted) < 1e-5
        folder, file = model.save(tmp_path / "saved"), model.save(tmp_path / "saved.gguf")
    assert stored(folder) == stored(tmp_path / "packed")
    with open_gguf(file) as tensors:
        assert str(tensors.entry("blk.0.ffn_gate_exps.weight").storage) == "mxfp4"
    for path in (folder, file):
        with language_model(path, precision="f32") as again:
            assert small_llama.difference(again.logits(TOKENS), wanted) < 1e-5
