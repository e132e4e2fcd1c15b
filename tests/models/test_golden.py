"""Every decoder family against logits that `transformers` has computed (make_golden.py), from both kinds of files.

GGUF files are written with the names that the `gguf` package knows, and changed as llama.cpp's converter changes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import converted_hybrids
import numpy as np
import pytest
from gguf_writing import finish
from safetensors.numpy import save_file
from small_llama import Driver, difference

from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.errors import CapabilityError, FormatError, RlxError
from rlx.models.load import Checkpoint, open_checkpoint

gguf = pytest.importorskip("gguf")
Array = np.ndarray[Any, Any]
FOLDER = Path(__file__).parents[1] / "fixtures" / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
TOLERANCE = 2e-4


class Golden:
    """A model of a golden file: what it is and what it says."""

    def __init__(self, name: str) -> None:
        self.name = name
        with np.load(FOLDER / f"{name}.npz") as file:
            arrays = dict(file)
        self.settings: dict[str, Any] = json.loads(str(arrays.pop("config")))
        self.rows = [arrays.pop(f"tokens.{i}").tolist() for i in range(2)]
        self.logits = [arrays.pop(f"logits.{i}") for i in range(2)]
        self.weights: dict[str, Array] = arrays

    def folder(self, path: Path) -> Path:
        save_file(self.weights, str(path / "model.safetensors"))
        (path / "config.json").write_text(json.dumps(self.settings))
        return path

    def check(self, checkpoint: Checkpoint, tolerance: float = TOLERANCE) -> None:
        """Both texts side by side, then each token of the first by itself and in chunks."""
        driver = Driver.of(checkpoint)
        for chunk in (len(self.rows[0]), 1, 7):  # each from the beginning: what the cache holds later is not looked at
            assert difference(driver.by_chunks(self.rows[0], chunk), self.logits[0]) < tolerance
        for actual, wanted in zip(Driver.of(checkpoint, batch=2).forward(self.rows, [0, 0]), self.logits, strict=True):
            assert difference(actual, wanted) < tolerance


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_hugging_face_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    golden = Golden(name)
    golden.check(open_checkpoint(golden.folder(tmp_path)))


@pytest.mark.parametrize("name", NAMES)
def test_generation_goes_on_from_there_alone_and_in_company(tmp_path: Path, name: str) -> None:
    golden = Golden(name)
    with load(golden.folder(tmp_path)) as model:
        assert isinstance(model, LanguageModel)
        together = model.generate(golden.rows, max_tokens=6, logprobs=1)
        for row, wanted, completion in zip(golden.rows, golden.logits, together, strict=True):
            assert completion.tokens[0] == wanted[-1].argmax()
            model.caches.clear()
            alone = model.generate(row, max_tokens=6, logprobs=1)
            assert (alone.tokens, alone.logprobs) == (completion.tokens, completion.logprobs)  # the same bits


WRONG: list[tuple[str, dict[str, Any], type[RlxError], str]] = [
    ("gemma3", {"use_bidirectional_attention": "all"}, CapabilityError, "use_bidirectional_attention is 'all'"),
    ("gemma3", {"layer_types": ["full_attention"]}, FormatError, "layer_types has 1 entries for 6 layers"),
    ("gemma3", {"sliding_window": None}, FormatError, "layer_types has sliding_attention, and no window is set"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "spiral"}}}, CapabilityError, "'spiral'"),
    ("gemma2", {"query_pre_attn_scalar": 0}, FormatError, "query_pre_attn_scalar is 0"),
    ("gemma2", {"layer_types": ["full_attention", "other"]}, CapabilityError, "a layer type is 'other'"),
    ("phi3", {"partial_rotary_factor": 0.4, "rope_parameters": None}, FormatError, "elements of a head turn"),
    ("qwen3", {"partial_rotary_factor": 0.5}, CapabilityError, "partial_rotary_factor is 0.5"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, FormatError, "9 experts a token are asked for, there are 3"),
    ("mixtral", {"num_experts_per_tok": 4}, FormatError, "4 experts a token are asked for, there are 3"),
    ("gpt2", {"add_cross_attention": True}, CapabilityError, "add_cross_attention is True"),
    ("gpt2", {"activation_function": "gelu_other"}, CapabilityError, "'gelu_other'"),
    ("gpt2", {"n_embd": None}, FormatError, "n_embd"),
    ("mamba", {"hidden_act": "spiral"}, CapabilityError, "hidden_act is 'spiral'"),
    ("mamba", {"use_conv_bias": False}, CapabilityError, "conv1d.bias' would not be used: the configuration leaves it"),
    ("mamba", {"state_size": 100000}, FormatError, "state_size: expected 1 to 256, found 100000"),
    ("mamba2", {"num_heads": 7}, FormatError, "64 channels do not split into 7 heads of 8"),
    ("mamba2", {"n_groups": 3}, FormatError, "8 heads are no multiple of 3 groups"),
    ("mamba2", {"time_step_limit": [0]}, FormatError, "time_step_limit: expected two numbers, found [0]"),
    ("mamba2", {"time_step_limit": [0, "much"]}, FormatError, "expected float, found 'much'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "error", "says"), WRONG)
def test_what_a_family_does_not_have_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], error: type[RlxError], says: str
) -> None:
    golden = Golden(name)
    golden.settings |= changes
    with pytest.raises(error) as caught:
        open_checkpoint(golden.folder(tmp_path))
    assert says in str(caught.value)


# -- GGUF ------------------------------------------------------------------------------------------------------------
ARCHITECTURES = {
    "qwen2": "QWEN2", "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE", "gemma": "GEMMA", "gemma2": "GEMMA2",
    "gemma3": "GEMMA3", "phi3": "PHI3", "gpt2": "GPT2", "mixtral": "LLAMA", "llama": "LLAMA",
    "qwen3_next": "QWEN3NEXT", "qwen3_5": "QWEN35", "qwen3_5_moe": "QWEN35MOE",
}  # fmt: skip


HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def converted(golden: Golden, legacy: bool = False) -> dict[str, Array]:
    """Weights as llama.cpp's converter has them: GGUF's names, Llama's halves as pairs, Gemma's norms plus 1."""
    arch = gguf.MODEL_ARCH[ARCHITECTURES[golden.name]]
    layers = golden.settings.get("num_hidden_layers") or golden.settings["n_layer"]
    table = gguf.get_tensor_name_map(arch, layers)
    stacks: dict[str, list[Array]] = {}
    result: dict[str, Array] = {}
    weights = golden.weights
    if golden.name in HYBRIDS:
        kind = {"rounds": golden.name != "qwen3_next", "legacy": legacy}
        pairs = [converted_hybrids.converted(n, value, golden.settings, **kind) for n, value in weights.items()]
        weights = {n: value for pair in pairs for n, value in pair.items()}
    for name, value in weights.items():
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            stacks.setdefault(f"{before}.experts.{after.split('.')[1]}.weight", []).append(value)
            continue
        value = value.astype(np.float32)
        if golden.name.startswith("gemma") and "norm" in name:
            value = value + 1
        if ARCHITECTURES[golden.name] == "LLAMA" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = golden.settings["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if golden.name == "gpt2" and value.ndim == 2 and ".c_" in name:
            value = value.T
        result[table.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(value)
    for name, values in stacks.items():
        result[table.get_name(name, try_suffixes=(".weight",))] = np.stack(values).astype(np.float32)
    return result


def write(
    golden: Golden, path: Path, tensors: dict[str, Array], packed: dict[str, Any] | None = None, pooled: bool = False,
    guessing: int = 0,
) -> Path:  # fmt: skip
    s = golden.settings
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[ARCHITECTURES[golden.name]]])
    if golden.name == "gpt2":
        writer.add_context_length(s["n_positions"])
        writer.add_embedding_length(s["n_embd"])
        writer.add_block_count(s["n_layer"])
        writer.add_feed_forward_length(s["n_inner"])
        writer.add_head_count(s["n_head"])
        writer.add_layer_norm_eps(s["layer_norm_epsilon"])
    else:
        writer.add_context_length(s["max_position_embeddings"])
        writer.add_embedding_length(s["hidden_size"])
        writer.add_block_count(s["num_hidden_layers"])
        if "intermediate_size" in s:
            writer.add_feed_forward_length(s["intermediate_size"])
        writer.add_head_count(s["num_attention_heads"])
        writer.add_head_count_kv(s["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(s["rms_norm_eps"])
        if golden.name == "phi3":
            writer.add_rope_dimension_count(8)
            writer.add_sliding_window(0)
        elif "head_dim" in s:
            writer.add_key_length(s["head_dim"])
            writer.add_value_length(s["head_dim"])
        rope = s["rope_parameters"]
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if golden.name in ("gemma2", "gemma3"):
        writer.add_sliding_window(s["sliding_window"])
    if golden.name == "gemma2":
        writer.add_attn_logit_softcapping(s["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(s["final_logit_softcapping"])
    if golden.name == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if golden.name in ("qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        writer.add_expert_count(3)
        writer.add_expert_used_count(s["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(s["moe_intermediate_size"])
    if golden.name in HYBRIDS:
        writer.add_ssm_conv_kernel(s["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(s["linear_key_head_dim"])
        writer.add_ssm_group_count(s["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(s["linear_num_value_heads"])
        writer.add_ssm_inner_size(s["linear_value_head_dim"] * s["linear_num_value_heads"])
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_count(int(s["head_dim"] * rope["partial_rotary_factor"]))
        if golden.name != "qwen3_next":
            writer.add_rope_dimension_sections([11, 11, 10, 0])
        if golden.name != "qwen3_5":
            writer.add_expert_shared_feed_forward_length(s["shared_expert_intermediate_size"])
    if golden.name == "mixtral":
        writer.add_expert_count(s["num_local_experts"])
        writer.add_expert_used_count(s["num_experts_per_tok"])
    if guessing:
        writer.add_nextn_predict_layers(guessing)
    if pooled:
        writer.add_pooling_type(gguf.PoolingType.LAST)
    for name, value in tensors.items():
        kind = (packed or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    finish(writer)
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_gives_the_same(tmp_path: Path, name: str) -> None:
    golden = Golden(name)
    golden.check(open_checkpoint(write(golden, tmp_path / "m.gguf", converted(golden))))


def test_the_first_files_of_qwen3_next_have_projections_as_hugging_face(tmp_path: Path) -> None:
    golden = Golden("qwen3_next")
    golden.check(open_checkpoint(write(golden, tmp_path / "m.gguf", converted(golden, legacy=True))))


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen3_moe", "gpt2", "qwen3_next", "qwen3_5_moe"])
def test_packed_weights_are_computed_with_as_they_are(tmp_path: Path, name: str) -> None:
    """q8_0 where rows are whole blocks, and the same numbers in f32; parts of fused weights stay packed."""
    golden = Golden(name)
    tensors = converted(golden)
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = {n: kind for n, w in tensors.items() if w.ndim > 1 and w.shape[-1] % 32 == 0}
    assert packed
    plain = tensors | {n: gguf.quants.dequantize(gguf.quants.quantize(tensors[n], kind), kind) for n in packed}
    files = (("packed.gguf", tensors, packed), ("plain.gguf", plain, None))
    first, second = (
        Driver.of(open_checkpoint(write(golden, tmp_path / file, *rest))).by_chunks(golden.rows[0], 9)
        for file, *rest in files
    )
    assert difference(first, second) < TOLERANCE


def test_a_gguf_file_that_says_how_to_pool_makes_vectors(tmp_path: Path) -> None:
    golden = Golden("qwen3")
    assert golden.settings["tie_word_embeddings"]
    checkpoint = open_checkpoint(write(golden, tmp_path / "m.gguf", converted(golden), pooled=True))
    assert (checkpoint.family.name, checkpoint.family.kind) == ("qwen3-embedding", "encoder")
    built = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    (states,) = built.compile().run({"tokens": np.array([golden.rows[0]], np.int32)})
    table = golden.weights["model.embed_tokens.weight"].astype(np.float64)
    assert built.cache is None and difference(states[0] @ table.T, golden.logits[0]) < TOLERANCE
