"""What can be done with the inside of a model of any family: edit, apply, init and save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_encoders
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_llama import difference
from test_golden import ARCHITECTURES, Golden, converted, gguf, write

import rlx
from rlx.engine import load as models
from rlx.engine.language_model import LanguageModel
from rlx.engine.vision_model import VisionModel
from rlx.errors import BindError, CapabilityError, DTypeError, GraphError, RequestError, ShapeError
from rlx.flow.init import zeros
from rlx.flow.stage_values import stage_values
from rlx.functional import random
from rlx.models.init import flow_of
from rlx.models.load import open_checkpoint

Array = np.ndarray[Any, Any]
DECODERS = sorted(path.stem for path in (golden_encoders.FOLDER.parent / "models").glob("*.npz"))
ENCODERS = sorted(p.stem for p in golden_encoders.FOLDER.glob("*.json") if p.stem != "mpnet")
ALL = [*DECODERS, *ENCODERS]
WRITTEN = ARCHITECTURES


def load(path: Path) -> Any:
    return models.load(path)


def folder_of(name: str, path: Path) -> Path:
    if name in DECODERS:
        return Golden(name).folder(path)
    golden_encoders.write_folder(path, json.loads((golden_encoders.FOLDER / f"{name}.json").read_text()))
    return path


def opened(name: str, path: Path) -> tuple[Any, Any]:
    """A model and something that it reads."""
    model = load(folder_of(name, path))
    if isinstance(model, VisionModel):
        return model, golden_encoders.picture()
    return model, Golden(name).rows[0] if name in DECODERS else golden_encoders.batch()["tokens"][0].tolist()


# -- editing ---------------------------------------------------------------------------------------------------------
def same(value: Array) -> Array:
    return value


@pytest.mark.parametrize("name", ALL)
def test_identity_edits_leave_every_bit(tmp_path: Path, name: str) -> None:
    model, inputs = opened(name, tmp_path)
    wanted = model.run(inputs)
    actual = model.run(inputs, edit={"layers.0.out": same})
    assert wanted.keys() == actual.keys()
    assert all(actual[n].tobytes() == value.tobytes() for n, value in wanted.items())
    other = model.run(inputs, edit={"layers.0.out": np.zeros_like})
    assert any(np.abs(other[n] - value).max() > 1e-3 for n, value in wanted.items())


@pytest.mark.parametrize("name", ["qwen3", "phi3", "qwen3_moe"])
def test_identity_edits_leave_every_bit_of_packed_models(tmp_path: Path, name: str) -> None:
    model, row = packed(name, tmp_path), Golden(name).rows[0]
    wanted = model.run(row)["logits"]
    assert model.run(row, edit={"layers.*.ffn": same, "layers.0": same})["logits"].tobytes() == wanted.tobytes()


def packed(name: str, folder: Path, cache: str = "auto") -> LanguageModel:
    """A model whose weights are q8_0 where rows are whole blocks."""
    golden = Golden(name)
    tensors = converted(golden)
    kinds = {n: gguf.GGMLQuantizationType.Q8_0 for n, w in tensors.items() if w.ndim > 1 and w.shape[-1] % 32 == 0}
    assert kinds
    model = models.load(write(golden, folder / "m.gguf", tensors, kinds), cache=cache)
    assert isinstance(model, LanguageModel)
    return model


# -- other parameters ------------------------------------------------------------------------------------------------
def main_of(model: Any, inputs: Any) -> Array:
    """What `apply` gives, by the model's own ways."""
    if isinstance(model, LanguageModel):
        return model.logits(inputs)
    if isinstance(model, VisionModel):
        return model.encode_image(inputs, tokens=True)
    values = stage_values(model.built.module)
    last = max((path for path in values if path != "pool"), key=lambda path: values[path].node.id)
    result: Array = model.run(inputs, capture=last)[last]
    return result


@pytest.mark.parametrize("name", ALL)
def test_applying_its_own_parameters_gives_the_same_bits(tmp_path: Path, name: str) -> None:
    model, inputs = opened(name, tmp_path)
    assert not any("rope" in key for key in model.params)
    wanted = main_of(model, inputs)
    assert model.apply({}, inputs).tobytes() == wanted.tobytes()
    assert model.apply(dict(model.params), inputs).tobytes() == wanted.tobytes()
    halved = {key: (value * 0.5).astype(value.dtype) for key, value in model.params.items()}
    assert np.abs(model.apply(halved, inputs) - wanted).max() > 1e-3
    assert len(model.graphs.applications) == 1


def test_other_numbers_are_seen_and_cost_no_compilation(tmp_path: Path) -> None:
    golden = Golden("llama")
    model = load(golden.folder(tmp_path))
    head = model.params["lm_head.weight"].astype(np.float32)
    first = model.apply({"lm_head.weight": head}, golden.rows[0])
    graphs = list(model.graphs.applications.values())
    head *= 2  # in place: the array is the same, its numbers are not
    second = model.apply({"lm_head.weight": head}, golden.rows[0])
    assert difference(second, 2 * first) < 1e-6
    assert list(model.graphs.applications.values()) == graphs
    assert difference(first, golden.logits[0]) < 2e-4


def unpacked(model: LanguageModel) -> dict[str, Array]:
    """The packed weights of a model as numbers, by the package `gguf`."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return {
        name: gguf.quants.dequantize(array.view(np.uint8), kind)
        for name, array in model.params.items()
        if array.dtype.names is not None
    }


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3"])
def test_packed_weights_may_be_given_as_numbers(tmp_path: Path, name: str) -> None:
    row, model = Golden(name).rows[0], packed(name, tmp_path, cache="f32")  # as it is with weights of f32
    wanted = model.apply({}, row)
    assert wanted.tobytes() == model.logits(row).tobytes()
    numbers = unpacked(model)
    model.save(tmp_path / "folder", dtype="f32")
    assert difference(model.apply(numbers, row), load(tmp_path / "folder").logits(row)) < 1e-5
    if name == "qwen3":  # a token near the border of two experts may go to the other one
        one = "model.layers.0.self_attn.q_proj.weight"
        assert difference(model.apply({one: numbers[one]}, row), wanted) < 2e-2


def test_wrong_parameters_are_refused(tmp_path: Path) -> None:
    golden = Golden("llama")
    model = load(golden.folder(tmp_path))
    with pytest.raises(BindError, match=r"no parameter is called 'model\.norm\.weigth'") as caught:
        model.apply({"model.norm.weigth": np.ones(32)}, [1])
    assert "model.norm.weight" in (caught.value.hint or "")
    with pytest.raises(ShapeError, match=r"'model.norm.weight' has shape \[31\], expected \[32\]"):
        model.apply({"model.norm.weight": np.ones(31)}, [1])
    with pytest.raises(DTypeError, match=r"'model\.norm\.weight' is i64"):
        model.apply({"model.norm.weight": np.ones(32, np.int64)}, [1])
    with pytest.raises(BindError, match="expected arrays by name"):
        model.apply([1], [1])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="apply: 0 tokens"):
        model.apply({}, [])


# -- beginning -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL)
def test_a_flow_makes_parameters_that_fit(tmp_path: Path, name: str) -> None:
    model, inputs = opened(name, tmp_path)
    key = random.key(7)
    params = model.flow.init(key)
    assert {n: a.shape for n, a in params.items()} == {n: a.shape for n, a in model.params.items()}
    assert all(a.dtype == np.float32 for a in params.values())
    model.save(tmp_path / "begun", params)
    actual = open_checkpoint(tmp_path / "begun").weights
    assert all(actual.array(n).astype(np.float32).tobytes() == a.tobytes() for n, a in params.items())
    assert np.isfinite(model.apply(params, inputs)).all()


def test_weights_begin_by_the_first_rule_that_matches() -> None:
    flow = flow_of(Golden("llama").settings)
    params = flow.initialised({"*.q_proj.weight": zeros}).init(random.key(0))
    assert not params["model.layers.0.self_attn.q_proj.weight"].any() and params["lm_head.weight"].any()
    assert (params["model.norm.weight"] == 1).all() and not params["model.layers.0.self_attn.q_proj.bias"].any()
    again = flow.init(random.key(0))["lm_head.weight"]
    assert again.tobytes() == params["lm_head.weight"].tobytes() != flow.init(random.key(1))["lm_head.weight"].tobytes()
    big = flow_of(Golden("llama").settings | {"initializer_range": 0.5}).init(random.key(0))["lm_head.weight"]
    assert 0.4 < big.std() < 0.6 and abs(big.mean()) < 0.05


def test_init_says_what_it_needs() -> None:
    flow = rlx.ModelFlow("f").input("x", (2, 3)).linear("w")
    with pytest.raises(BindError, match="no stage says which shape weight 'w' ") as caught:
        flow.init(random.key(0))
    assert "shapes=" in (caught.value.hint or "") and "out=" in (caught.value.hint or "")
    assert flow.init(random.key(0), shapes={"w": (5, 3)})["w"].shape == (5, 3)
    with pytest.raises(GraphError, match="is not a random key"):
        flow.init(0, shapes={"w": (5, 3)})
    with pytest.raises(GraphError, match=r"returned shape \[1\], expected \[5, 3\]"):
        flow.initialised({"w": lambda key, shape: np.ones(1)}).init(random.key(0), shapes={"w": (5, 3)})


INITIAL = {
    "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertModel",
    "modernbert": "ModernBertModel", "nomic_bert": "NomicBertModel", "vit": "ViTModel", "dinov2": "Dinov2Model",
    "dinov2_registers": "Dinov2WithRegistersModel", "siglip": "SiglipVisionModel", "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "roberta": "RobertaModel", "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM", "embeddinggemma": "Gemma3TextModel",
}  # fmt: skip


# Flax cuts these off at two deviations and makes up for it; transformers only makes up for it.
NOT_TRUNCATED = ("embeddings.patch_embedding.weight", "head.attention.out_proj.weight")


@pytest.mark.parity
@pytest.mark.parametrize("name", INITIAL)
def test_models_begin_as_those_of_transformers(tmp_path: Path, name: str) -> None:
    """The same deviation and mean of every weight, for models large enough that these say something."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    said = Golden(name).settings if name in DECODERS else json.loads(
        (golden_encoders.FOLDER / f"{name}.json").read_text()
    )["config"]  # fmt: skip
    said = {n: value for n, value in said.items() if n != "time_step_limit"}  # written with an infinity of its own
    said |= {"head_dim": 96} if name == "mamba2" else {}  # all heads together are twice as wide as the model
    kind = getattr(transformers, INITIAL[name])
    wide = {n: 384 for n in ("hidden_size", "n_embd", "intermediate_size", "n_inner", "moe_intermediate_size")}
    config = kind.config_class.from_dict(
        said | {n: size for n, size in wide.items() if n in said} | {"initializer_range": 0.03}
    )
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path)
    processor = json.loads((golden_encoders.FOLDER / f"{name}.json").read_text()).get("processor") if (
        name in ENCODERS
    ) else None  # fmt: skip
    if processor:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    model = load(tmp_path)
    params = model.flow.init(random.key(0))
    for key, own in model.params.items():
        if key in NOT_TRUNCATED or (own.size < 8 and own.std() > 0):  # a few random numbers say nothing
            continue
        theirs, ours = own.astype(np.float64), params[key].astype(np.float64)
        error = 5 / np.sqrt(own.size) + 1e-6
        assert abs(ours.std() - theirs.std()) <= error * max(theirs.std(), 1e-9), key
        assert abs(ours.mean() - theirs.mean()) <= 2 * error * max(theirs.std(), 1e-9), key
        assert abs(np.abs(ours).max() - np.abs(theirs).max()) <= 0.6 * np.abs(theirs).max(), key


# -- saving ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL)
def test_a_folder_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    model, _ = opened(name, tmp_path / "a")
    assert model.save(tmp_path / "b") == tmp_path / "b"
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir() if p.suffix == ".json"}
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir() if p.suffix == ".json"} == files
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert before.keys() == after.keys() and all(after[n].tobytes() == a.tobytes() for n, a in before.items())


@pytest.mark.parametrize("name", WRITTEN)
def test_decoders_go_from_folder_to_gguf_and_back(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    golden = Golden(name)
    model = load(golden.folder(tmp_path / "a"))
    if name == "gemma3":
        golden.settings["rope_parameters"]["full_attention"] = {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}
    model.save(tmp_path / "m.gguf")
    written = load(tmp_path / "m.gguf")
    for row, wanted in zip(golden.rows, golden.logits, strict=True):
        assert difference(written.logits(row), wanted) < 2e-4
    written.save(tmp_path / "again.gguf")
    assert load(tmp_path / "again.gguf").logits(golden.rows[0]).tobytes() == written.logits(golden.rows[0]).tobytes()
    written.save(tmp_path / "back")
    for row, wanted in zip(golden.rows, golden.logits, strict=True):
        assert difference(load(tmp_path / "back").logits(row), wanted) < 2e-4


def test_packed_tensors_stay_packed_in_gguf_and_become_floats_in_a_folder(tmp_path: Path) -> None:
    model, row = packed("qwen3_moe", tmp_path), Golden("qwen3_moe").rows[0]
    model.save(tmp_path / "again.gguf")
    again = load(tmp_path / "again.gguf")
    assert again.logits(row).tobytes() == model.logits(row).tobytes()
    model.save(tmp_path / "folder", dtype="f16")
    assert difference(load(tmp_path / "folder").logits(row), model.apply(unpacked(model), row)) < 5e-3
    said = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert said["dtype"] == "float16" and (tmp_path / "folder" / "model.safetensors").stat().st_size < 60_000


def test_weights_alone(tmp_path: Path) -> None:
    golden = Golden("gpt2")
    (tmp_path / "a").mkdir()
    model = load(golden.folder(tmp_path / "a"))
    model.save(tmp_path / "w.safetensors")
    actual = load_file(tmp_path / "w.safetensors")
    assert actual.keys() == golden.weights.keys()
    assert all(actual[n].tobytes() == a.tobytes() for n, a in golden.weights.items())


def test_saving_over_itself_is_safe(tmp_path: Path) -> None:
    golden = Golden("llama")
    model = load(golden.folder(tmp_path))
    wanted = model.logits(golden.rows[0])
    model.save(tmp_path)
    assert model.apply({}, golden.rows[0]).tobytes() == wanted.tobytes()
    assert load(tmp_path).logits(golden.rows[0]).tobytes() == wanted.tobytes()


def test_what_cannot_be_saved_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model, _ = opened("vit", tmp_path / "a")
    with pytest.raises(CapabilityError, match="a vit out of a safetensors file is not written as gguf"):
        model.save(tmp_path / "m.gguf")
    model, _ = opened("llama", tmp_path / "b")
    with pytest.raises(RequestError, match="dtype is 'q4_k'"):
        model.save(tmp_path / "m.gguf", dtype="q4_k")
    with pytest.raises(BindError, match="save: no parameter is called 'x'"):
        model.save(tmp_path / "m", {"x": np.ones(3)})
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CapabilityError, match="written by the package gguf") as caught:
        model.save(tmp_path / "m.gguf")
    assert caught.value.hint == "pip install gguf"
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".saving*"))


@pytest.mark.parity
@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_reads_what_was_saved(tmp_path: Path, name: str) -> None:
    """From a folder, and from GGUF by way of a folder."""
    from reference_models import logits

    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    (tmp_path / "a").mkdir()
    golden = Golden(name)
    model = load(golden.folder(tmp_path / "a"))
    model.save(tmp_path / "b")
    model.save(tmp_path / "m.gguf")
    load(tmp_path / "m.gguf").save(tmp_path / "c")
    for folder in ("b", "c"):
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).eval()
        assert difference(logits(other, golden.rows[0]), golden.logits[0]) < 2e-4


HOOKS: dict[str, tuple[str, str]] = {
    "llama": ("AutoModelForCausalLM", "model.layers.0"), "gemma3": ("AutoModelForCausalLM", "model.layers.0"),
    "qwen3_moe": ("AutoModelForCausalLM", "model.layers.0"), "gpt2": ("AutoModelForCausalLM", "transformer.h.0"),
    "bert": ("AutoModel", "encoder.layer.0"), "dinov2": ("AutoModel", "encoder.layer.0"),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", HOOKS)
def test_edits_are_forward_hooks(tmp_path: Path, name: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model, arrays = opened(name, tmp_path)
    kind, path = HOOKS[name]
    other = getattr(transformers, kind).from_pretrained(tmp_path, dtype=torch.float32).eval()

    def half(value: Any) -> Any:
        return value * 0.5 + 0.25

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return (half(output[0]), *output[1:]) if isinstance(output, tuple) else half(output)

    other.get_submodule(path).register_forward_hook(hook)
    with torch.no_grad():
        if isinstance(model, VisionModel):
            wanted = other(torch.from_numpy(model.prepare(arrays)[None])).last_hidden_state[0].numpy()
            actual = model.run(arrays, edit={"layers.0.out": half})["states"]
        elif isinstance(model, LanguageModel):
            wanted = other(torch.tensor([arrays]), use_cache=False).logits[0].numpy()
            actual = model.run(arrays, edit={"layers.0.out": half})["logits"]
        else:
            wanted = other(torch.tensor([arrays])).last_hidden_state[0].numpy()
            last = f"layers.{model.checkpoint.config.layers - 1}"
            actual = model.run(arrays, capture=last, edit={"layers.0.out": half})[last]
    assert difference(actual, wanted) < 2e-4
