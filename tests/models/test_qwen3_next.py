"""Qwen3-Next and Qwen3.5: random small models of `transformers`, with both kinds of layers and of feed-forwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp_of_tokens
import numpy as np
import pytest
from reference_models import check, save
from small_llama import difference
from test_golden import Golden, converted, write

from rlx.engine.load import load
from rlx.errors import CapabilityError, FormatError, RlxError
from rlx.models.load import open_checkpoint

SMALL: dict[str, Any] = {
    "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 24, "num_experts_per_tok": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "next, experts": ("Qwen3Next", {**SMALL, **EXPERTS, "num_experts": 5}),
    "next, dense, odd heads, tied, biases": (
        "Qwen3Next",
        {
            **SMALL, "num_experts": 0, "hidden_size": 44, "num_attention_heads": 5, "num_key_value_heads": 1,
            "head_dim": 24, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 12,
            "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "next, some layers dense, other kinds of layers": (
        "Qwen3Next",
        {
            **SMALL, **EXPERTS, "num_experts": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2,
            "norm_topk_prob": False, "num_hidden_layers": 5, "linear_num_value_heads": 6,
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "3.5": ("Qwen3_5", SMALL),
    "3.5, odd heads, tied, wide": (
        "Qwen3_5",
        {
            **SMALL, "hidden_size": 60, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 6,
            "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32, "tie_word_embeddings": True,
        },
    ),
    "3.5, seven heads, biases, other kinds of layers": (
        "Qwen3_5",
        {
            **SMALL, "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 8,
            "num_hidden_layers": 3, "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_conv_kernel_dim": 2, "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "3.5, experts": ("Qwen3_5Moe", {**SMALL, **EXPERTS, "num_experts": 5}),
    "3.5, experts, odd heads, tied": (
        "Qwen3_5Moe",
        {
            **SMALL, **EXPERTS, "num_experts": 3, "hidden_size": 60, "num_attention_heads": 9, "num_key_value_heads": 3,
            "linear_num_key_heads": 1, "linear_num_value_heads": 5, "tie_word_embeddings": True,
        },
    ),
    "3.5, all experts, short": (
        "Qwen3_5Moe",
        {
            **SMALL, **EXPERTS, "num_experts": 2, "num_hidden_layers": 2, "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 1, "attention_bias": True,
        },
    ),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    family, settings = CONFIGS[name]
    check(tmp_path, save(tmp_path, family, **settings))


@pytest.mark.parity
def test_rounded_weights_are_computed_with_as_they_are(tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, "Qwen3Next", dtype="bfloat16", num_experts=0, **SMALL))


WRONG: list[tuple[dict[str, Any], type[RlxError], str]] = [
    ({"layer_types": ["full_attention"]}, FormatError, "layer_types has 1 entries for 4 layers"),
    ({"layer_types": ["sliding_attention"] * 4}, CapabilityError, "a layer type is 'sliding_attention'"),
    ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, FormatError, "3 value heads are no multiple of 2 key"),
    ({"num_experts_per_tok": 9}, FormatError, "9 experts a token are asked for, there are 3"),
    ({"num_experts": 0}, CapabilityError, "would not be used: the configuration leaves it out"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, FormatError, "3 of 16 elements of a head"),
    ({"linear_key_head_dim": 1 << 20}, FormatError, "linear_key_head_dim: expected 1 to 1024, found 1048576"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "says"), WRONG)
def test_what_they_do_not_have_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[RlxError], says: str
) -> None:
    golden = Golden("qwen3_next")
    golden.settings |= changes
    with pytest.raises(error) as caught:
        open_checkpoint(golden.folder(tmp_path))
    assert says in str(caught.value)


_FIRST = "model.layers.0"
_DELTA = f"{_FIRST}.linear_attn"
UNFIT: list[tuple[str, str, tuple[int, ...], str]] = [
    ("qwen3_next", f"{_DELTA}.in_proj_qkvz.weight", (193, 32), "192 rows, 96 for each of 2 heads, found"),
    ("qwen3_next", f"{_DELTA}.in_proj_qkvz.weight", (384, 32), "192 rows, 96 for each of 2 heads, found"),
    ("qwen3_next", f"{_DELTA}.in_proj_ba.weight", (8,), "weight '.*in_proj_b.weight'"),
    ("qwen3_next", f"{_DELTA}.in_proj_ba.weight", (4, 32), r"8 rows, 4 for each .*, found shape \[4, 32\]"),
    ("qwen3_next", f"{_DELTA}.conv1d.weight", (129, 1, 4), r"shape is \[129, 1, 4\], expected \[128, 1, 4\]"),
    ("qwen3_next", f"{_FIRST}.mlp.experts.1.up_proj.weight", (9, 32), r"f16\[8, 32\] as .*, found f32\[9, 32\]"),
    ("qwen3_5_moe", f"{_FIRST}.mlp.experts.gate_up_proj", (48,), r"expected 2 axes or more, found shape \[48\]"),
    ("qwen3_5_moe", f"{_FIRST}.mlp.experts.gate_up_proj", (3, 17, 32), r"shape is \[3, 9, 32\], expected \[3, 8, 32\]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "shape", "says"), UNFIT)
def test_tensors_that_cannot_be_taken_apart_are_named(
    tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...], says: str
) -> None:
    golden = Golden(name)
    if tensor not in golden.weights:
        in_two_tensors(golden)
    golden.weights[tensor] = np.ones(shape, np.float32)
    with pytest.raises(FormatError, match=says) as caught:
        load(golden.folder(tmp_path))
    assert "model.safetensors" in str(caught.value)


def test_experts_that_are_there_in_both_ways_are_refused(tmp_path: Path) -> None:
    golden, both = Golden("qwen3_5_moe"), Golden("qwen3_5_moe")
    in_two_tensors(both)
    golden.weights |= both.weights
    with pytest.raises(FormatError, match=r"expected one tensor or the other, found .*gate_up_proj"):
        load(golden.folder(tmp_path))


def test_which_layers_attend_may_be_said_by_their_distance(tmp_path: Path) -> None:
    golden = Golden("qwen3_next")
    golden.settings |= {"layer_types": None, "full_attention_interval": 4}
    golden.check(open_checkpoint(golden.folder(tmp_path)))


def in_two_tensors(golden: Golden) -> None:
    """The experts of a layer as the published files of Qwen3.5 have them; `transformers` writes them one by one."""
    for i in range(4):
        prefix = f"model.layers.{i}.mlp.experts"
        gate, up, down = (
            np.stack([golden.weights.pop(f"{prefix}.{j}.{name}_proj.weight") for j in range(3)])
            for name in ("gate", "up", "down")
        )
        golden.weights |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}.down_proj": down}


def test_experts_may_lie_in_two_tensors(tmp_path: Path) -> None:
    golden = Golden("qwen3_5_moe")
    in_two_tensors(golden)
    golden.check(open_checkpoint(golden.folder(tmp_path)))
    model = load(tmp_path)
    name = "model.layers.1.mlp.experts.up_proj.weight"
    changed = np.asarray(model.params[name]) * 2
    model.save(tmp_path / "b", {name: changed})
    actual = open_checkpoint(tmp_path / "b")
    assert actual.file.names == open_checkpoint(tmp_path).file.names
    assert (actual.weights.array(name) == changed).all()
    model.save(tmp_path / "m.gguf")
    assert difference(load(tmp_path / "m.gguf").logits(golden.rows[0]), golden.logits[0]) < 2e-4


@pytest.mark.large
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_llama_cpp_reads_what_was_saved(tmp_path: Path, name: str) -> None:
    golden = Golden(name)
    load(golden.folder(tmp_path)).save(tmp_path / "m.gguf", dtype="f32")  # it rounds what it multiplies with f16
    actual = llama_cpp_of_tokens.computed(tmp_path / "m.gguf", golden.rows[0])
    assert difference(actual, golden.logits[0]) < 2e-4


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Newer GGUF files of Qwen3.5 have them behind the others."""
    golden = Golden("qwen3_5")
    tensors = converted(golden)
    golden.settings["num_hidden_layers"] = 5
    more = {
        "blk.4.attn_norm.weight": np.ones(32, np.float32),
        "blk.4.nextn.eh_proj.weight": np.ones((32, 64), np.float32),
    }
    path = write(golden, tmp_path / "m.gguf", tensors | more, guessing=1)
    golden.check(open_checkpoint(path))
    load(path).save(tmp_path / "again.gguf")
    golden.check(open_checkpoint(tmp_path / "again.gguf"))


@pytest.mark.parametrize(
    ("guessing", "says"),
    [
        (4, "qwen35.nextn_predict_layers: expected 0 to 3, found 4"),
        (2**32 - 1, "expected 0 to 3, found 4294967295"),
        (1, "the last 1 layers guess further tokens: expected tensors blk.3.nextn.*, found none"),
    ],
)
def test_layers_that_do_not_guess_are_not_left_out(tmp_path: Path, guessing: int, says: str) -> None:
    golden = Golden("qwen3_5")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(write(golden, tmp_path / "m.gguf", converted(golden), guessing=guessing))
    assert says in str(caught.value) and "m.gguf" in str(caught.value)


GGUF_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"linear_num_key_heads": 0}, "metadata: ssm.group_count: expected 1 to"),
    ({"linear_key_head_dim": 2**31}, "metadata: ssm.state_size: expected 1 to 1024, found 2147483648"),
    ({"linear_conv_kernel_dim": 65}, "metadata: ssm.conv_kernel: expected 1 to 64, found 65"),
    ({"linear_num_value_heads": 3}, "3 value heads are no multiple of 2 key heads"),
    ({"linear_num_key_heads": 1}, "linear_attn.in_proj_qkv.weight': shape is [160, 32], expected [128, 32]"),
    ({"linear_conv_kernel_dim": 3}, "linear_attn.conv1d.weight': shape is [160, 4], expected [160, 3]"),
]


@pytest.mark.parametrize(("changes", "says"), GGUF_WRONG)
def test_numbers_of_a_gguf_file_that_cannot_be_are_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    golden = Golden("qwen3_5")
    tensors = converted(golden)
    golden.settings |= changes
    with pytest.raises(FormatError) as caught:
        load(write(golden, tmp_path / "m.gguf", tensors))
    assert says in str(caught.value) and "m.gguf" in str(caught.value)


@pytest.mark.parametrize("name", ["ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "attn_qkv.weight", "ssm_beta.weight"])
def test_tensors_that_a_gguf_file_lacks_are_named(tmp_path: Path, name: str) -> None:
    golden = Golden("qwen3_5")
    tensors = converted(golden)
    del tensors[f"blk.0.{name}"]
    with pytest.raises(FormatError, match=r"m\.gguf: weight 'model\.layers\.0\.linear_attn\..*' is not in the file"):
        load(write(golden, tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_flow_without_a_cache_gives_the_same(tmp_path: Path, name: str) -> None:
    """As it is trained: all tokens at once, from states of zeros."""
    golden = Golden(name)
    checkpoint = open_checkpoint(golden.folder(tmp_path))
    flow = replace(checkpoint.family.flow(checkpoint.config, 64, None), cache=None)
    f = flow.build(checkpoint.weights).compile()
    tokens = np.array([golden.rows[0]], np.int32)
    (actual,) = f.run({"tokens": tokens, "last_token_idx": np.arange(tokens.size, dtype=np.int32)})
    assert difference(actual, golden.logits[0]) < 2e-4
