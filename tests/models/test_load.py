"""Opening models: what is refused, and why; GGUF and Hugging Face files of one model give the same numbers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import llama_cpp_of_tokens
import numpy as np
import pytest
from gguf_writing import finish
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_llama import SETTINGS, Driver, difference, forward, random_weights, write_folder

from rlx.errors import CapabilityError, FormatError, RlxError
from rlx.models import config as configs
from rlx.models import llama, qwen2
from rlx.models.load import Checkpoint, open_checkpoint

gguf = pytest.importorskip("gguf")
Array = np.ndarray[Any, Any]
TOKENS = [7, 1, 42, 63, 0, 9, 9, 30]
BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 24, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    "type_vocab_size": 2,
}  # fmt: skip
REMOVED = object()


def folder_of(path: Path, **changes: Any) -> Path:
    """A Llama of Hugging Face with these settings changed, weights left as they were."""
    said = {k: v for k, v in {**SETTINGS, **changes}.items() if v is not REMOVED}
    return write_folder(path, random_weights(SETTINGS), said)


def built(checkpoint: Checkpoint) -> Any:
    return checkpoint.family.flow(checkpoint.config, 64, checkpoint.rope_factors).build(checkpoint.weights)


# -- configurations that cannot be -----------------------------------------------------------------------------------
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
WRONG: list[Any] = [
    *((name, value) for name in SIZES for value in (0, -1, "32", 32.0, True, None, [], 10**9, 10**30, REMOVED)),
    *(("num_key_value_heads", value) for value in (0, -2, 3, "2", 10**9)),
    *(("head_dim", value) for value in (0, -2, 7, "8", 10**6)),
    *(("max_position_embeddings", value) for value in (0, -1, "256", None, 2**40, REMOVED)),
    *(("rms_norm_eps", value) for value in ("1e-5", -1e-5, True)),
    *(("rope_theta", value) for value in (0, -1.0, "1e4", [1e4])),
    *(("rope_scaling", value) for value in ("linear", [1], {"type": "linear"}, {"type": "linear", "factor": "2"})),
    *(("tie_word_embeddings", value) for value in ("yes", 1)),
    *(("attention_bias", value) for value in ("yes", 1)),
    pytest.param("rms_norm_eps", 10**400, id="a long number"),
    ("num_attention_heads", 5), ("model_type", None), ("model_type", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_configuration_that_cannot_be_is_a_format_error(tmp_path: Path, name: str, value: Any) -> None:
    folder = folder_of(tmp_path, **{name: value})
    begin = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            open_checkpoint(folder)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000 and time.process_time() - begin < 2
    finally:
        tracemalloc.stop()
    assert "config.json" in f"{caught.value} {caught.value.notes}"


@pytest.mark.parametrize("text", ['{"rms_norm_eps": NaN}', '{"rms_norm_eps": 1e999, "model_type": "llama"}', "[]", "{"])
def test_a_file_that_is_no_configuration_is_a_format_error(tmp_path: Path, text: str) -> None:
    folder_of(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_an_infinite_number_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("1e-05", "1e999"))
    with pytest.raises(FormatError, match="rms_norm_eps: expected a number of 0 or more, found inf"):
        open_checkpoint(tmp_path)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_keys = st.sampled_from([
    *SETTINGS, "head_dim", "attention_bias", "mlp_bias", "rope_scaling", "rope_parameters", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "quantization_config", "partial_rotary_factor",
    "original_max_position_embeddings", "hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping",
    "attn_logit_softcapping", "sliding_window_pattern", "rope_local_base_freq", "num_experts", "num_experts_per_tok",
    "num_local_experts", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "n_embd", "n_inner",
])  # fmt: skip
_kinds = st.sampled_from([
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "mixtral", "gpt2",
])  # fmt: skip


@given(st.dictionaries(_keys, _json, min_size=1, max_size=4), _kinds)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_configuration_gives_a_model_or_a_typed_error(
    tmp_path: Path, changes: dict[str, Any], kind: str
) -> None:  # fmt: skip
    if not (tmp_path / "model.safetensors").exists():
        write_folder(tmp_path, random_weights(SETTINGS), {})
    (tmp_path / "config.json").write_text(json.dumps({**SETTINGS, "model_type": kind, **changes}))
    begin = time.process_time()
    with contextlib.suppress(RlxError):
        built(open_checkpoint(tmp_path))
    assert time.process_time() - begin < 3


# -- switches that would be ignored ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config"),
        ({"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "type 'proportional'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs by the kind of layer"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "llama4"}, "architecture 'llama4'"),
    ],
)
def test_a_switch_that_would_be_ignored_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        open_checkpoint(folder_of(tmp_path, **changes))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"hidden_act": "prelu"}, "hidden_act is 'prelu'"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_a_bert_that_is_no_plain_encoder_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:  # fmt: skip
    with pytest.raises(CapabilityError) as caught:
        open_checkpoint(write_folder(tmp_path, bert_weights(), {**BERT, **changes}))
    assert named in str(caught.value)


def test_neutral_settings_change_nothing(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, quantization_config=None, pretraining_tp=2, rope_scaling=None, partial_rotary_factor=1.0,
        head_dim=None, hidden_act="swish", attention_dropout=0.1, sliding_window=3, use_cache=False,
    )  # fmt: skip
    checkpoint = open_checkpoint(folder)
    wanted = forward(SETTINGS, random_weights(SETTINGS), TOKENS)
    assert difference(Driver.of(checkpoint).forward([TOKENS], [0])[0], wanted) < 1e-5


def test_windows_go_by_family() -> None:
    def windows(kind: Any, **changes: Any) -> list[int | None]:
        config = configs.from_hf(kind, {**SETTINGS, "num_hidden_layers": 3, **changes}, "c")
        return [config.window(i) for i in range(3)]

    assert windows(llama.Config, sliding_window=5) == [None] * 3  # transformers' Llama has none
    assert windows(llama.MistralConfig) == [4096] * 3  # its default
    assert windows(llama.MistralConfig, sliding_window=None) == [None] * 3
    assert windows(llama.MistralConfig, sliding_window=5) == [5] * 3
    assert windows(qwen2.Config, sliding_window=5) == [None] * 3
    assert windows(qwen2.Config, sliding_window=5, use_sliding_window=True) == [None] * 3  # from layer 28 on
    assert windows(qwen2.Config, sliding_window=5, use_sliding_window=True, max_window_layers=1) == [None, 5, 5]
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(qwen2.Config, sliding_window=5, use_sliding_window=True, layer_types=types) == [5, None, None]
    for wrong in ({"layer_types": types}, {"layer_types": types[:2]}, {"layer_types": "full_attention"}):
        with pytest.raises(FormatError, match="layer_types"):
            windows(qwen2.Config, **wrong)


# -- tensors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.1.self_attn.q_norm.weight", "a llama model has no such weight"),
        ("model.layers.2.input_layernorm.weight", "the configuration has 2 layers"),
        ("model.layers.0.self_attn.q_proj.bias", "the configuration leaves it out"),
        ("model.layers.0.mlp.down_proj.bias", "the configuration leaves it out"),
        ("model.layers.0.block_sparse_moe.gate.weight", "a llama model has no such weight"),
        ("lm_head.bias", "a llama model has no such weight"),
        pytest.param(f"model.layers.{'9' * 5000}.norm.weight", "a llama model has no such weight", id="a long number"),
    ],
)
def test_a_tensor_that_would_not_be_used_is_refused(tmp_path: Path, name: str, why: str) -> None:
    weights = random_weights(SETTINGS) | {name: np.zeros(3, np.float32)}
    with pytest.raises(CapabilityError) as caught:
        open_checkpoint(write_folder(tmp_path, weights, SETTINGS))
    assert name[:30] in str(caught.value) and why in str(caught.value)


def test_tensors_that_say_nothing_new_are_passed_over(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "v_head.summary.weight": np.zeros((1, 32), np.float32),
    }
    open_checkpoint(write_folder(tmp_path, random_weights(SETTINGS) | extra, SETTINGS))


def test_names_without_the_prefix_are_found(tmp_path: Path) -> None:
    weights = {name.removeprefix("model."): value for name, value in random_weights(SETTINGS).items()}
    checkpoint = open_checkpoint(write_folder(tmp_path, weights, SETTINGS))
    wanted = forward(SETTINGS, random_weights(SETTINGS), TOKENS)
    assert difference(Driver.of(checkpoint).forward([TOKENS], [0])[0], wanted) < 1e-5


def test_weights_are_checked_before_anything_is_computed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_of(tmp_path, num_key_value_heads=4))
    with pytest.raises(FormatError, match=r"safetensors: weight 'model\.layers\.0\.self_attn\.k_proj\.weight'"):
        built(checkpoint)
    checkpoint = open_checkpoint(folder_of(tmp_path, num_hidden_layers=3))
    with pytest.raises(FormatError, match=r"'model\.layers\.2\.input_layernorm\.weight' is not in the file"):
        built(checkpoint)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    weights = random_weights(SETTINGS)
    weights["model.layers.0.mlp.up_proj.weight"] = np.ones((48, 32), np.int8)  # type: ignore[assignment]
    with pytest.raises(CapabilityError, match="is stored as i8"):
        open_checkpoint(write_folder(tmp_path, weights, SETTINGS))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_plain_8_bit_floats_are_the_numbers_that_they_are(tmp_path: Path, kind: str) -> None:
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, kind))
    rounded = {name: value.astype(dtype) for name, value in random_weights(SETTINGS).items()}
    header, data = {}, b""
    for name, value in rounded.items():
        stored = "F8_E4M3" if "e4m3" in kind else "F8_E5M2"
        ends = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": stored, "shape": list(value.shape), "data_offsets": ends}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    wanted = forward(SETTINGS, {n: v.astype(np.float32) for n, v in rounded.items()}, TOKENS)
    assert difference(Driver.of(open_checkpoint(tmp_path)).forward([TOKENS], [0])[0], wanted) < 1e-5


# -- files beside the weights ----------------------------------------------------------------------------------------
def test_a_folder_without_a_configuration_says_what_is_missing(tmp_path: Path) -> None:
    os.remove(folder_of(tmp_path) / "config.json")
    with pytest.raises(FormatError, match=r"config\.json: is not there"):
        open_checkpoint(tmp_path)


def test_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    os.remove(folder_of(tmp_path) / "config.json")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FormatError, match="a regular file, found a pipe"):
        open_checkpoint(tmp_path)


def words(count: int, special: int = 0) -> str:
    """A tokenizer.json of so many words; the last ones are special."""
    vocab = {f"w{i}": i for i in range(count - special)}
    added = [
        {"id": i, "content": f"<|s{i}|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for i in range(count - special, count)
    ]  # fmt: skip
    return json.dumps({
        "version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None, "decoder": None, "truncation": None, "padding": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    })  # fmt: skip


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text(words(65))
    with pytest.raises(FormatError, match="the tokenizer has 65 tokens, the model 64"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("count", "special"), [(64, 0), (10, 0), (66, 2)])
def test_a_tokenizer_may_have_fewer_tokens_or_special_ones_beyond(tmp_path: Path, count: int, special: int) -> None:
    folder_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text(words(count, special))
    assert open_checkpoint(tmp_path).tokenizer is not None


def test_ends_of_text_are_gathered_from_all_files(tmp_path: Path) -> None:
    folder_of(tmp_path, eos_token_id=3)
    (tmp_path / "tokenizer.json").write_text(words(64))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    tokenizer = open_checkpoint(tmp_path).tokenizer
    assert tokenizer is not None and tokenizer.stop_ids >= {3, 4, 5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 64, 128009]}))
    tokenizer = open_checkpoint(tmp_path).tokenizer  # 64 rows: the model cannot say the others
    assert tokenizer is not None and tokenizer.stop_ids >= {3, 4} and max(tokenizer.stop_ids) < 64
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["</s>"]}))
    with pytest.raises(FormatError, match="eos_token_id: expected token ids"):
        open_checkpoint(tmp_path)


# -- GGUF ------------------------------------------------------------------------------------------------------------
KINDS = {str: "add_string", bool: "add_bool", int: "add_uint32", float: "add_float32", list: "add_array"}


def write_gguf(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Array]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in keys.items():
        if value is not REMOVED:
            getattr(writer, KINDS[type(value)])(
                name if name.startswith("tokenizer.") else f"{architecture}.{name}", value
            )
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    finish(writer)
    return path


def gguf_keys(c: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "embedding_length": c["hidden_size"], "block_count": c["num_hidden_layers"],
        "attention.head_count": c["num_attention_heads"], "feed_forward_length": c["intermediate_size"],
        "context_length": c["max_position_embeddings"],
    }  # fmt: skip
    if c["model_type"] == "bert":
        return keys | {"attention.layer_norm_epsilon": c["layer_norm_eps"], "attention.causal": False}
    return keys | {
        "attention.head_count_kv": c["num_key_value_heads"], "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": c["rope_theta"],
    }  # fmt: skip


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_tensors(c: dict[str, Any], weights: dict[str, Array]) -> dict[str, Array]:
    """As llama.cpp's converter writes them: of a Llama, rows of q and k lie so that neighbours turn together."""
    tensors = {}
    for name, value in weights.items():
        if c["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = c["num_attention_heads"] if "q_proj" in name else c["num_key_value_heads"]
            split = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = np.ascontiguousarray(split.swapaxes(1, 2).reshape(value.shape))
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = value
    return tensors


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2"}, {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 4},
    ],
)  # fmt: skip
def test_gguf_gives_the_numbers_of_the_model_that_was_converted(tmp_path: Path, changes: dict[str, Any]) -> None:
    c = {**SETTINGS, **changes}
    weights = random_weights(c)
    path = write_gguf(tmp_path / "m.gguf", c["model_type"], gguf_keys(c), gguf_tensors(c, weights))
    actual = Driver.of(open_checkpoint(path)).forward([TOKENS], [0])[0]
    assert difference(actual, forward(c, weights, TOKENS)) < 1e-5


def test_gguf_of_mistral_has_its_window(tmp_path: Path) -> None:
    weights = random_weights(SETTINGS)
    keys = gguf_keys(SETTINGS) | {"attention.sliding_window": 3}
    path = write_gguf(tmp_path / "m.gguf", "llama", keys, gguf_tensors(SETTINGS, weights))
    actual = Driver.of(open_checkpoint(path)).forward([TOKENS], [0])[0]
    assert difference(actual, forward(SETTINGS, weights, TOKENS, window=3)) < 1e-5


def test_gguf_head_sizes_and_sizes_by_layer(tmp_path: Path) -> None:
    c = {**SETTINGS, "head_dim": 10}
    weights = random_weights(c)
    keys = gguf_keys(c) | {
        "attention.key_length": 10, "attention.value_length": 10, "rope.dimension_count": 10,
        "attention.head_count_kv": [2, 2], "feed_forward_length": [48, 48],
    }  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", "llama", keys, gguf_tensors(c, weights))
    actual = Driver.of(open_checkpoint(path)).forward([TOKENS], [0])[0]
    assert difference(actual, forward(c, weights, TOKENS)) < 1e-5


def test_gguf_factors_of_frequencies_turn_more_slowly(tmp_path: Path) -> None:
    """All factors the same: the same as positions divided by it, so as a Llama of linear scaling."""
    weights = random_weights(SETTINGS)
    tensors = gguf_tensors(SETTINGS, weights)
    plain = write_gguf(
        tmp_path / "a.gguf", "llama",
        gguf_keys(SETTINGS) | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, tensors,
    )  # fmt: skip
    factors = tensors | {"rope_freqs.weight": np.full(4, 4, np.float32)}
    path = write_gguf(tmp_path / "b.gguf", "llama", gguf_keys(SETTINGS), factors)
    one, other = (Driver.of(open_checkpoint(p), context=256).forward([TOKENS], [0])[0] for p in (plain, path))
    assert difference(one, other) < 1e-6 and difference(one, forward(SETTINGS, weights, TOKENS)) > 0.01


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", [8, 8]), ("attention.scale", 0.5), ("logit_scale", 0.25), ("embedding_scale", 12.0),
        ("residual_scale", 0.2), ("attention.causal", False), ("pooling_type", 3), ("rope.dimension_count", 4),
        ("attention.value_length", 16), ("attention.head_count_kv", [2, 1]), ("rope.scaling.type", "mrope"),
        ("attention.clamp_kqv", 8.0), ("final_logit_softcapping", 30.0), ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.dimension_sections", [1, 1, 2, 0]),
    ],
)  # fmt: skip
def test_gguf_settings_that_would_be_ignored_are_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    keys = gguf_keys(SETTINGS) | {key: value}
    path = write_gguf(tmp_path / "m.gguf", "llama", keys, gguf_tensors(SETTINGS, random_weights(SETTINGS)))
    with pytest.raises(CapabilityError) as caught:
        open_checkpoint(path)
    assert key in str(caught.value)


def test_gguf_of_qwen2_does_not_say_where_the_windows_are(tmp_path: Path) -> None:
    c = {**SETTINGS, "model_type": "qwen2"}
    keys = gguf_keys(c) | {"attention.sliding_window": 3}
    path = write_gguf(tmp_path / "m.gguf", "qwen2", keys, gguf_tensors(c, random_weights(c)))
    with pytest.raises(CapabilityError, match=r"attention\.sliding_window is 3"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0), ("block_count", 10**9), ("block_count", "2"), ("block_count", REMOVED),
        ("attention.head_count", 0), ("attention.head_count", 5), ("attention.head_count", 2.0),
        ("attention.layer_norm_rms_epsilon", math.nan), ("attention.layer_norm_rms_epsilon", -1.0),
        ("rope.freq_base", math.inf), ("rope.freq_base", 0.0), ("context_length", 0), ("embedding_length", True),
        ("rope.scaling.factor", math.nan), ("attention.key_length", 7),
    ],
)  # fmt: skip
def test_gguf_metadata_that_cannot_be_is_a_format_error(tmp_path: Path, key: str, value: Any) -> None:
    keys = gguf_keys(SETTINGS) | {key: value}
    path = write_gguf(tmp_path / "m.gguf", "llama", keys, gguf_tensors(SETTINGS, random_weights(SETTINGS)))
    begin = time.process_time()
    with pytest.raises(FormatError, match=r"m\.gguf"):
        open_checkpoint(path)
    assert time.process_time() - begin < 1


_values = st.integers(0, 2**32 - 1) | st.floats(width=32) | st.booleans() | st.text(max_size=4)
_values = (
    _values
    | st.lists(st.integers(0, 99), min_size=1, max_size=3)
    | st.lists(st.text(max_size=3), min_size=1, max_size=2)
)
_gguf_keys = st.sampled_from([
    *gguf_keys(SETTINGS), "rope.scaling.type", "rope.scaling.factor", "rope.scaling.yarn_ext_factor", "expert_count",
    "rope.scaling.original_context_length", "attention.key_length", "attention.sliding_window", "rope.scale_linear",
    "tokenizer.ggml.model", "pooling_type", "rope.scaling.attn_factor",
])  # fmt: skip


@given(st.dictionaries(_gguf_keys, _values, min_size=1, max_size=3))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_gguf_metadata_gives_a_model_or_a_typed_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    tensors = gguf_tensors(SETTINGS, random_weights(SETTINGS))
    path = tmp_path / "m.gguf"
    path.unlink(missing_ok=True)
    write_gguf(path, "llama", gguf_keys(SETTINGS) | changes, tensors)
    begin = time.process_time()
    with contextlib.suppress(RlxError):
        built(open_checkpoint(path))
    assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.2.attn_q.weight", "token_embd_norm.weight", "output.bias"]
)
def test_gguf_tensors_that_would_not_be_used_are_refused(tmp_path: Path, name: str) -> None:
    tensors = gguf_tensors(SETTINGS, random_weights(SETTINGS)) | {name: np.zeros(32, np.float32)}
    with pytest.raises(CapabilityError, match="would not be used"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", gguf_keys(SETTINGS), tensors))


@pytest.mark.parametrize("shape", [REMOVED, (32,), (0, 32)])
def test_gguf_without_a_token_table_is_a_format_error(tmp_path: Path, shape: Any) -> None:
    tensors = gguf_tensors(SETTINGS, random_weights(SETTINGS))
    del tensors["token_embd.weight"]
    if shape is not REMOVED:
        tensors["token_embd.weight"] = np.zeros(shape, np.float32)
    with pytest.raises(FormatError, match=r"token_embd\.weight"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", gguf_keys(SETTINGS), tensors))


_LONG = {f"rope_factors_{n}.weight": np.linspace(1, m, 16, dtype=np.float32) for n, m in (("long", 9), ("short", 3))}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Array]]] = {
    "none": ({}, {}),
    "linear": ({"type": "linear", "factor": 4.0}, {}),
    "yarn": ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, {}),
    "yarn, attention": ({"type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 1.3}, {}),
    "longrope, short": ({"type": "longrope", "original_context_length": 256, "attn_factor": 1.3}, _LONG),
    "longrope, long": ({"type": "longrope", "original_context_length": 128, "attn_factor": 1.3}, _LONG),
    "factors": ({}, {"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}),
}


@pytest.mark.large
@pytest.mark.parametrize("name", ROPES)
def test_gguf_scalings_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    said, more = ROPES[name]
    c = {**SETTINGS, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokenizer = {
        "model": "llama", "tokens": ["<unk>", "<s>", "</s>", *(f"▁w{i}" for i in range(61))], "scores": [0.0] * 64,
        "token_type": [2, 3, 3] + [1] * 61, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    keys = gguf_keys(c) | {"vocab_size": 64} | {f"rope.scaling.{k}": v for k, v in said.items()}
    keys |= {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", keys, gguf_tensors(c, random_weights(c)) | more)
    tokens = np.random.default_rng(0).integers(3, 64, 100).tolist()
    actual = Driver.of(open_checkpoint(path), context=256).forward([tokens], [0])[0]
    assert difference(actual, llama_cpp_of_tokens.computed(path, tokens)) < 1e-5


# -- BERT ------------------------------------------------------------------------------------------------------------
BERT_NAMES = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer": "blk", "attention.self.query": "attn_q", "attention.self.key": "attn_k",
    "attention.self.value": "attn_v", "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up", "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}  # fmt: skip


def bert_weights() -> dict[str, Array]:
    rng, dim, ffn = np.random.default_rng(0), BERT["hidden_size"], BERT["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (40, dim), "embeddings.position_embeddings.weight": (24, dim),
        "embeddings.token_type_embeddings.weight": (2, dim),
    }  # fmt: skip
    linear = {"intermediate.dense": (ffn, dim), "output.dense": (dim, ffn), "attention.output.dense": (dim, dim)}
    linear |= {f"attention.self.{n}": (dim, dim) for n in ("query", "key", "value")}
    for name, shape in linear.items():
        for i in range(2):
            shapes |= {f"encoder.layer.{i}.{name}.weight": shape, f"encoder.layer.{i}.{name}.bias": shape[:1]}
    norms = ["embeddings.LayerNorm"]
    norms += [f"encoder.layer.{i}.{n}.LayerNorm" for i in range(2) for n in ("attention.output", "output")]
    shapes |= {f"{name}.{part}": (dim,) for name in norms for part in ("weight", "bias")}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def hidden_states(checkpoint: Checkpoint) -> Array:
    import rlx

    model = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    f = rlx.compile(model.module)
    f.set_params({name: checkpoint.weights.array(name) for name in f.param_types})
    tokens = np.array([[3, 1, 39, 0, 7]], np.int32)
    inputs = {"tokens": tokens, "token_types": tokens % 2, "positions": np.arange(5, dtype=np.int32)[None]}
    result: Array = f.run({**inputs, "attention_mask": np.ones((1, 5), np.float32)})[0]
    return result


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_gguf_of_a_bert_is_the_bert_of_its_folder(tmp_path: Path, prefix: str) -> None:
    """That the folder's numbers are right is for the parity tests to say."""
    weights, tensors = bert_weights(), {}
    for name, value in weights.items():
        for ours, theirs in BERT_NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = value
    named = {f"{prefix}{name}": value for name, value in weights.items()}
    extra = {"bert.pooler.dense.weight": np.zeros((2, 2), np.float32), "cls.predictions.bias": np.zeros(2, np.float32)}
    folder = open_checkpoint(write_folder(tmp_path, named | extra, BERT))
    other = open_checkpoint(write_gguf(tmp_path / "b.gguf", "bert", gguf_keys(BERT), tensors))
    assert other.config.vocab == 40 and other.config.types == 2 and other.config.context == 24
    assert np.abs(hidden_states(folder) - hidden_states(other)).max() < 1e-6


@pytest.mark.parity
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations_of_a_bert_are_those_of_transformers(tmp_path: Path, activation: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**BERT, "hidden_act": activation, "layer_norm_eps": 0.01})
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.4)
    model.save_pretrained(tmp_path)
    tokens = torch.tensor([[3, 1, 39, 0, 7]])
    with torch.no_grad():
        wanted = model(tokens, token_type_ids=tokens % 2).last_hidden_state.numpy()
    actual = hidden_states(open_checkpoint(tmp_path))
    assert np.abs(actual - wanted).max() / np.abs(wanted).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", 30), ("num_attention_heads", 0), ("type_vocab_size", -1), ("max_position_embeddings", 10**12)],
)
def test_a_bert_that_cannot_be_is_a_format_error(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(FormatError):
        open_checkpoint(write_folder(tmp_path, bert_weights(), {**BERT, name: value}))


def test_tables_of_a_bert_are_checked(tmp_path: Path) -> None:
    for name in ("vocab_size", "type_vocab_size", "max_position_embeddings", "intermediate_size"):
        checkpoint = open_checkpoint(write_folder(tmp_path, bert_weights(), {**BERT, name: BERT[name] + 1}))
        with pytest.raises(FormatError, match="expected"):
            checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
