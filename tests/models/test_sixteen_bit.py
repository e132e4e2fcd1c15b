"""Weights of 16 bits stay 16-bit, and models compute with them what they compute with the same numbers in f32.

Products are f32 in both cases, one chain of multiply-adds per result, so everything here is equal to the bit. That the
numbers are right is for `transformers` to say (test_golden.py has folders of f16) and for NumPy's float64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import small_llama
from golden_encoders import FOLDER as ENCODERS
from golden_encoders import PROCESSORS, batch
from golden_encoders import weights as encoder_weights
from safetensors.numpy import save_file
from small_llama import Driver, difference
from test_golden import ARCHITECTURES, NAMES, Golden, converted, write
from test_golden_encoders import TEXTS

import rlx
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.models.load import Checkpoint, open_checkpoint
from rlx.runtime.compiled import CompiledGraph
from rlx.transforms import value_and_grad

gguf = pytest.importorskip("gguf")
Array = np.ndarray[Any, Any]
TYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
EITHER_TYPE = pytest.mark.parametrize("stored", TYPES)
SETTINGS = small_llama.SETTINGS | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "head_dim": 64}


def rounded(weights: Mapping[str, Array], stored: str) -> dict[str, Array]:
    return {name: array.astype(TYPES[stored]) for name, array in weights.items()}


def folders(path: Path, weights: Mapping[str, Array], settings: Mapping[str, Any], stored: str) -> list[Path]:
    """A folder of 16-bit weights, and one of the same numbers in f32."""
    narrow = rounded(weights, stored)
    result = []
    for name, arrays in (("narrow", narrow), ("wide", {n: a.astype(np.float32) for n, a in narrow.items()})):
        folder = path / name
        folder.mkdir()
        save_file(arrays, str(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(settings))
        result.append(folder)
    return result


def matrices(compiled: CompiledGraph) -> dict[str, Array]:
    """What products read: all weights of two axes or more, but for tables that the model makes itself."""
    weights = compiled.host_weights()
    return {n: a for n, a in weights.items() if a.ndim > 1 and not n.startswith("rope") and a.dtype.kind != "i"}


def same_bits(first: Array, second: Array) -> bool:
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


# -- every family -----------------------------------------------------------------------------------------------------
def check_decoder(golden: Golden, narrow: Checkpoint, wide: Checkpoint) -> None:
    """The whole prompt, token by token, and in chunks."""
    first, second = Driver.of(narrow), Driver.of(wide)
    row = golden.rows[0]
    for chunk in (len(row), 1, 7):
        assert same_bits(first.by_chunks(row, chunk), second.by_chunks(row, chunk))


@pytest.mark.parametrize("name", NAMES)
def test_decoders_of_bf16_compute_as_those_of_f32(tmp_path: Path, name: str) -> None:
    golden = Golden(name)
    narrow, wide = folders(tmp_path, golden.weights, golden.settings, "bf16")
    check_decoder(golden, open_checkpoint(narrow), open_checkpoint(wide))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "qwen3_moe", "gpt2"])
def test_decoders_of_f16_compute_as_those_of_f32(tmp_path: Path, name: str) -> None:
    golden = Golden(name)
    narrow, wide = folders(tmp_path, golden.weights, golden.settings, "f16")
    check_decoder(golden, open_checkpoint(narrow), open_checkpoint(wide))


@pytest.mark.parametrize(
    ("name", "stored"), [*((name, "bf16") for name in (*TEXTS, *PROCESSORS)), ("bert", "f16"), ("vit", "f16")]
)
def test_encoders_compute_as_those_of_f32(tmp_path: Path, name: str, stored: str) -> None:
    golden = json.loads((ENCODERS / f"{name}.json").read_text())
    inputs = {**batch(), "pixels": np.array([golden.get("pixels", 0)], np.float32)}
    actual = []
    for folder in folders(tmp_path, encoder_weights(golden["shapes"]), golden["config"], stored):
        checkpoint = open_checkpoint(folder)
        if name in PROCESSORS:
            inputs |= checkpoint.config.inputs(inputs["pixels"])
        f = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights).compile()
        actual.append(f.run({n: inputs[n] for n in f.input_types}))
    for first, second in zip(*actual, strict=True):
        assert same_bits(first, second)


@EITHER_TYPE
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "qwen3_5"])
def test_gguf_files_compute_as_those_of_f32(tmp_path: Path, name: str, stored: str) -> None:
    golden = Golden(name)
    kind = gguf.GGMLQuantizationType[stored.upper()]
    tensors = converted(golden)
    packed = {n: kind for n, a in tensors.items() if a.ndim > 1}
    assert packed and name in ARCHITECTURES
    wide = tensors | {n: tensors[n].astype(TYPES[stored]).astype(np.float32) for n in packed}
    narrow_file, wide_file = tmp_path / "narrow.gguf", tmp_path / "wide.gguf"
    checkpoint = open_checkpoint(write(golden, narrow_file, tensors, packed))
    assert {checkpoint.file.entry(n).storage.name for n in packed} == {stored}
    check_decoder(golden, checkpoint, open_checkpoint(write(golden, wide_file, wide)))


# -- memory -----------------------------------------------------------------------------------------------------------
@EITHER_TYPE
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "qwen3_moe", "qwen3_next"])
def test_products_read_two_bytes_per_element(tmp_path: Path, name: str, stored: str) -> None:
    golden = Golden(name)
    narrow, _ = folders(tmp_path, golden.weights, golden.settings, stored)
    driver = Driver.of(open_checkpoint(narrow))
    driver.by_chunks(golden.rows[0], 7)
    panels = {n: a for n, a in matrices(driver.f).items() if n.startswith("@") and a.ndim > 2 and a.shape[-1] >= 16}
    assert panels and {a.dtype for a in panels.values()} == {np.dtype(TYPES[stored])}


@EITHER_TYPE
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_memory_is_that_of_the_file(tmp_path: Path, stored: str, tied: bool) -> None:
    """As loaded, as it starts again, and as an export: weights that are not mapped pages of the file are no more."""
    settings = SETTINGS | {"tie_word_embeddings": tied}
    weights = small_llama.random_weights(settings)
    narrow, wide = folders(tmp_path, weights, settings, stored)
    size = (narrow / "model.safetensors").stat().st_size
    table = weights["model.embed_tokens.weight"].size * 2
    prompt = [7, 1, 42, 63, 0, 9]
    with load(wide) as model:
        assert isinstance(model, LanguageModel)
        wanted = model.logits(prompt)
    for again in range(2):
        with load(narrow) as model:
            assert isinstance(model, LanguageModel)
            assert same_bits(model.logits(prompt), wanted)
            memory = model.memory()
            assert memory.weights + memory.mapped <= 1.1 * size + (table if tied else 0)
            assert not again or same_bits(model.logits(prompt), wanted)
            if again:
                exported = model.export(tmp_path / "model.rlxp", weights=True)
    assert exported.stat().st_size <= 1.1 * size + (table if tied else 0) + (1 << 20)  # code is in it too
    with load(exported) as model:
        assert isinstance(model, LanguageModel)
        assert same_bits(model.logits(prompt), wanted)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell which pages are resident")
def test_a_tied_table_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Matmuls read a packed copy of a tied table: rows that a prompt reads from the file are released again."""
    settings = SETTINGS | {"tie_word_embeddings": True, "vocab_size": 8192, "max_position_embeddings": 512}
    narrow, _ = folders(tmp_path, small_llama.random_weights(settings), settings, "bf16")
    load(narrow).close()  # what starts again maps its packed weights from a snapshot
    prompt = np.random.default_rng(0).integers(0, 8192, 300).tolist()
    with load(narrow) as model:
        assert isinstance(model, LanguageModel)
        for call in (model.logits, model.score, lambda tokens: model.generate(tokens, max_tokens=1)):
            call(prompt)
            assert resident_bytes("model.safetensors") < 1 << 20  # the table has 4 MB


def resident_bytes(name: str) -> int:
    """Bytes of mapped files of this name that are in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(f"/narrow/{name}")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@EITHER_TYPE
def test_rounding_values_to_16_bits_halves_the_weights(stored: str) -> None:
    """A precision of 16 bits rounds weights as well: they are kept as they are multiplied."""
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", ("n", 128)) @ g.param("w", (128, 192))])
    f = rlx.compile(g, profile=rlx.CompileProfile(precision=rlx.profile.Precision(compute=stored)))
    w = np.random.default_rng(0).standard_normal((128, 192)).astype(np.float32)
    f.set_param("w", w)
    x = np.random.default_rng(1).standard_normal((3, 128)).astype(TYPES[stored]).astype(np.float32)
    wanted = x.astype(np.float64) @ w.astype(TYPES[stored]).astype(np.float64)
    assert np.abs(f.run({"x": x})[0] - wanted).max() < 2 ** (-7 if stored == "bf16" else -10) * np.abs(wanted).max()
    assert sum(a.nbytes for a in f.host_weights().values()) == 2 * w.size


# -- devices ----------------------------------------------------------------------------------------------------------
@EITHER_TYPE
def test_a_device_without_panels_reads_the_file_as_it_is(tmp_path: Path, stored: str) -> None:
    settings = small_llama.SETTINGS | {"num_hidden_layers": 1}
    weights = small_llama.random_weights(settings)
    narrow, _ = folders(tmp_path, weights, settings, stored)
    tokens = [7, 1, 42, 63]
    exact = {n: a.astype(np.float32) for n, a in rounded(weights, stored).items()}
    with load(narrow, device="toy") as model:
        assert isinstance(model, LanguageModel)
        assert difference(model.logits(tokens), small_llama.forward(settings, exact, tokens)) < 1e-4
        assert {a.dtype for a in matrices(model.compiled).values()} == {np.dtype(TYPES[stored])}


# -- gradients --------------------------------------------------------------------------------------------------------
@EITHER_TYPE
def test_gradients_go_through_frozen_weights_of_16_bits(stored: str) -> None:
    """dx of sum((x Wᵀ)²), with W as it is stored, and the gradient of a weight that is trained beside it."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((96, 80)).astype(TYPES[stored])
    values = {"x": rng.standard_normal((5, 80)).astype(np.float32), "a": rng.standard_normal(96).astype(np.float32)}
    actual = []
    for kind in (stored, "f32"):
        g = rlx.Graph("g")
        frozen = g.param("w", w.shape, kind)
        wide = frozen if kind == "f32" else frozen.astype("f32")
        y = g.input("x", (5, 80)) @ wide.mT * g.input("a", (96,))
        g.set_outputs([(y * y).sum()])
        f = rlx.compile(value_and_grad(g, ["x", "a"]))
        f.set_param("w", w.astype(np.float32) if kind == "f32" else w)
        actual.append(f.run(values))
        kinds = {a.dtype for a in matrices(f).values() if a.ndim > 2}
        assert kinds == {np.dtype(TYPES.get(kind, np.float32))}
    for first, second in zip(*actual, strict=True):
        assert same_bits(first, second)
    x, a, exact = (n.astype(np.float64) for n in (values["x"], values["a"], w))
    product = x @ exact.T
    loss, dx, da = actual[0]
    np.testing.assert_allclose(loss, (product * a).__pow__(2).sum(), rtol=1e-5)
    np.testing.assert_allclose(dx, 2 * (product * a * a) @ exact, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(da, (2 * product * product * a).sum(0), rtol=1e-4, atol=1e-3)


@EITHER_TYPE
def test_weights_of_16_bits_have_gradients_of_their_own(stored: str) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((96, 80)).astype(TYPES[stored])
    x = rng.standard_normal((5, 80)).astype(np.float32)
    g = rlx.Graph("g")
    y = g.input("x", (5, 80)) @ g.param("w", w.shape, stored).astype("f32").mT
    g.set_outputs([(y * y).sum()])
    f = rlx.compile(value_and_grad(g, ["w"]))
    f.set_param("w", w)
    _, dw = f.run({"x": x})
    exact = 2 * (x.astype(np.float64) @ w.astype(np.float64).T).T @ x
    assert dw.dtype == w.dtype
    error = np.abs(dw.astype(np.float64) - exact) / np.abs(exact).max()
    assert error.max() < (2**-8 if stored == "bf16" else 2**-11)
