"""RoPE: the frequencies of each kind of scaling against `transformers`, and what files may say of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writing import finish

from rlx.errors import CapabilityError, FormatError
from rlx.formats import open_tensors
from rlx.models.rope import Rope, rope_tables, scaling_of_gguf, scaling_of_hf

gguf = pytest.importorskip("gguf")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 300,
    "short_factor": [1.0 + 0.07 * i for i in range(12)], "long_factor": [1.3 + 0.9 * i for i in range(12)],
}  # fmt: skip
# name: scaling, rope_theta, max_position_embeddings, context
CASES: dict[str, tuple[dict[str, Any], float, int, int]] = {
    "default": ({"rope_type": "default"}, 10000.0, 512, 512),
    "none": ({}, 77777.5, 512, 100),
    "linear": ({"rope_type": "linear", "factor": 3.7}, 12345.0, 512, 512),
    "linear, older name": ({"type": "linear", "factor": 2}, 10000.0, 512, 512),
    "dynamic within": ({"rope_type": "dynamic", "factor": 2.5}, 10000.0, 512, 300),
    "dynamic beyond": ({"rope_type": "dynamic", "factor": 2.5}, 10000.0, 512, 1111),
    "llama3": ({"rope_type": "llama3", **LLAMA3}, 500000.0, 131072, 4096),
    "llama3, odd": (
        {"rope_type": "llama3", "factor": 3.3, "low_freq_factor": 1.7, "high_freq_factor": 9.1,
         "original_max_position_embeddings": 333}, 777.0, 999, 999,
    ),
    "llama3, length by default": (
        {"rope_type": "llama3", "factor": 3.3, "low_freq_factor": 1.7, "high_freq_factor": 9.1}, 777.0, 999, 999,
    ),
    "yarn": (YARN, 10000.0, 2048, 2048),
    "yarn, betas": (YARN | {"beta_fast": 17.0, "beta_slow": 2.5}, 10000.0, 2048, 2048),
    "yarn, attention factor": (YARN | {"attention_factor": 0.83}, 1e6, 2048, 2048),
    "yarn, mscale": (YARN | {"mscale": 0.707, "mscale_all_dim": 1.3}, 1e6, 2048, 2048),
    "yarn, one mscale": (YARN | {"mscale": 0.707}, 1e6, 2048, 2048),
    "yarn, not truncated": (YARN | {"truncate": False, "factor": 1.3}, 1e6, 2048, 2048),
    "yarn, shrinking": (YARN | {"factor": 0.8}, 1e6, 2048, 2048),
    "yarn, equal bounds": (YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}, 1e4, 2048, 2048),
    "yarn, tiny length": (YARN | {"original_max_position_embeddings": 3}, 1e4, 2048, 2048),
    "longrope, short": (LONG, 10000.0, 4000, 300),
    "longrope, long": (LONG, 10000.0, 4000, 301),
    "longrope, factor": (LONG | {"factor": 7.5}, 10000.0, 4000, 4000),
    "longrope, attention factor": (LONG | {"factor": 7.5, "attention_factor": 1.1}, 10000.0, 4000, 4000),
    "longrope, no stretch": (LONG | {"original_max_position_embeddings": 4000}, 10000.0, 4000, 4000),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    scaling, theta, trained, context = CASES[name]
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=72, num_attention_heads=3, max_position_embeddings=trained,
        rope_parameters={**scaling, "rope_theta": theta},
    )  # fmt: skip
    kind = config.rope_parameters["rope_type"]
    init = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    wanted, attention = init(config) if kind == "default" else init(config, torch.device("cpu"), seq_len=context)
    actual, factor = Rope(24, theta, trained, scaling).frequencies(context)
    assert np.abs(actual / wanted.numpy() - 1).max() < 2e-6
    assert factor == pytest.approx(attention, rel=1e-12)


@pytest.mark.parity
def test_all_kinds_of_transformers_are_here() -> None:
    """But for the one that belongs to a family of its own: `proportional` of Gemma 4."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kinds = {Rope(24, 1e4, 512, s).kind for s, *_ in CASES.values()}
    assert set(ROPE_INIT_FUNCTIONS) - {"proportional"} <= kinds


def test_tables_are_cosines_and_sines_of_position_times_frequency() -> None:
    scaling, theta, trained, _ = CASES["yarn, attention factor"]
    rope = Rope(24, theta, trained, scaling)
    frequencies, attention = rope.frequencies(50)
    cos, sin = rope_tables(rope, 50)
    assert cos.shape == sin.shape == (50, 12) and cos.dtype == np.float32
    for position in (0, 1, 49):
        for i in (0, 5, 11):
            angle = position * float(frequencies[i])
            assert cos[position, i] == pytest.approx(0.83 * math.cos(angle), abs=1e-7)
            assert sin[position, i] == pytest.approx(0.83 * math.sin(angle), abs=1e-7)
    assert attention == 0.83


def test_factors_divide_the_frequencies() -> None:
    rope, factors = Rope(8, 1e4, 512, {}), np.array([1, 2, 4, 8], np.float32)
    cos, _ = rope_tables(rope, 10, factors)
    assert cos[9] == pytest.approx(np.cos(9 * rope.frequencies(10)[0] / factors))
    with pytest.raises(FormatError, match="expected 4 numbers above 0"):
        rope_tables(rope, 10, factors[:3])
    with pytest.raises(FormatError, match="expected 4 numbers above 0"):
        rope_tables(rope, 10, factors * 0)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({}, 512), ({"rope_type": "llama3", **LLAMA3}, 512), (LONG, 512), (YARN, 2048),
        (YARN | {"original_max_position_embeddings": 64}, 512),
        ({"rope_type": "dynamic", "factor": 2.5}, 1280), ({"rope_type": "linear", "factor": 4}, 2048),
    ],
)  # fmt: skip
def test_some_kinds_stretch_the_context(scaling: dict[str, Any], longest: int) -> None:
    assert Rope(24, 1e4, 512, scaling).longest == longest


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "type 'linear' has no 'factor'"),
        ({"rope_type": "linear", "factor": -2}, "factor: expected a number above 0, found -2"),
        ({"rope_type": "linear", "factor": "2"}, "factor: expected a number above 0, found '2'"),
        ({"rope_type": "linear", "factor": True}, "factor: expected a number above 0, found True"),
        ({"rope_type": "linear", "factor": math.inf}, "factor: expected a number above 0, found inf"),
        ({"rope_type": "linear", "factor": 1e-320}, "out of range"),
        ({"rope_type": "dynamic"}, "type 'dynamic' has no 'factor'"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor below high_freq_factor"),
        (YARN | {"truncate": "no"}, "truncate: expected true or false"),
        (YARN | {"original_max_position_embeddings": 0}, "expected a number above 0, found 0"),
        (LONG | {"long_factor": [1.0]}, "long_factor: expected 12 numbers, found 1"),
        (LONG | {"long_factor": None}, "long_factor: expected 12 numbers, found None"),
        (LONG | {"short_factor": [1.0] * 11 + [0]}, "short_factor: expected numbers above 0, found 0"),
        (LONG | {"original_max_position_embeddings": 1}, "expected above 1, found 1"),
    ],
)
def test_a_scaling_that_cannot_be_is_a_format_error(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        Rope(24, 1e4, 512, scaling).frequencies(512)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["mrope", "proportional", "yarnn", 3, None, ["yarn"]])
def test_an_unknown_kind_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(CapabilityError, match="is not supported") as caught:
        Rope(24, 1e4, 512, {"rope_type": kind}).frequencies(512)
    assert repr(kind) in str(caught.value)


@pytest.mark.parametrize("base", [0.0, math.inf])
def test_a_base_is_above_zero(base: float) -> None:
    with pytest.raises(FormatError, match="rope_theta: expected a number above 0"):
        Rope(24, base, 512, {}).frequencies(512)


# -- configurations of Hugging Face ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "theta", "scaling"),
    [
        ({}, None, {}),
        ({"rope_theta": 5.0, "rope_scaling": None}, 5.0, {}),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}}, 5.0, {"type": "linear", "factor": 2}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, {"rope_type": "default"}),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_type": "default"}}, 5.0, {"rope_type": "default"}),
        (
            {"rope_parameters": YARN, "original_max_position_embeddings": 99}, None,
            YARN | {"original_max_position_embeddings": 99},
        ),
    ],
)  # fmt: skip
def test_both_places_of_a_configuration_are_read(settings: dict[str, Any], theta: Any, scaling: dict[str, Any]) -> None:
    actual = scaling_of_hf(settings, "c")
    assert actual == {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": None}


@pytest.mark.parametrize(
    "settings", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_the_rotary_part_is_read_from_both_places(settings: dict[str, Any]) -> None:
    assert scaling_of_hf(settings, "c")["partial_rotary_factor"] == 0.5


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(FormatError, match="c: rope_scaling: expected an object, found 'yarn'"):
        scaling_of_hf({"rope_scaling": "yarn"}, "c")
    with pytest.raises(CapabilityError, match="differs by the kind of layer"):
        scaling_of_hf({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "c")


# -- GGUF ------------------------------------------------------------------------------------------------------------
def gguf_scaling(folder: Path, keys: dict[str, Any], tensors: dict[str, list[float]] | None = None) -> Any:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for name, value in keys.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.rope.{name}", value)
    for name, values in (tensors or {"x": [1.0]}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    finish(writer)
    file = open_tensors(folder / "m.gguf")
    return scaling_of_gguf(file.metadata, file)


def test_gguf_without_a_scaling(tmp_path: Path) -> None:
    assert gguf_scaling(tmp_path, {}) is None
    assert gguf_scaling(tmp_path, {"scaling.type": "none", "scaling.factor": 4.0}) is None
    assert gguf_scaling(tmp_path, {"scaling.type": "linear", "scaling.factor": 0.0}) is None


@pytest.mark.parametrize("keys", [{"scaling.type": "linear", "scaling.factor": 4.0}, {"scale_linear": 4.0}])
def test_gguf_linear(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert gguf_scaling(tmp_path, keys) == {"rope_type": "linear", "factor": 4.0}


def test_gguf_yarn_gives_the_tables_of_transformers_yarn(tmp_path: Path) -> None:
    keys = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 512.0}
    wanted = Rope(24, 1e4, 2048, YARN).frequencies(2048)
    actual = Rope(24, 1e4, 2048, gguf_scaling(tmp_path, keys)).frequencies(2048)
    assert actual[0].tolist() == wanted[0].tolist() and actual[1] == wanted[1]
    more = {"scaling.attn_factor": 2.0, "scaling.yarn_beta_fast": 16.0}
    wanted = Rope(24, 1e4, 2048, YARN | {"beta_fast": 16.0}).frequencies(2048)
    actual = Rope(24, 1e4, 2048, gguf_scaling(tmp_path, keys | more)).frequencies(2048)
    assert actual[0].tolist() == wanted[0].tolist() and actual[1] == pytest.approx(2 * wanted[1])


def test_gguf_longrope_reads_the_tensors(tmp_path: Path) -> None:
    keys = {"scaling.type": "longrope", "scaling.attn_factor": 1.25, "scaling.original_context_length": 300.0}
    tensors = {"rope_factors_long.weight": [8.0] * 12, "rope_factors_short.weight": [2.0] * 12}
    rope = Rope(24, 1e4, 4000, gguf_scaling(tmp_path, keys, tensors))
    plain = Rope(24, 1e4, 4000, {}).frequencies(1)[0]
    for context, factor in ((300, 2), (301, 8)):
        actual, attention = rope.frequencies(context)
        assert actual == pytest.approx(plain / factor) and attention == 1.25
    with pytest.raises(FormatError, match="rope_factors_short"):
        gguf_scaling(tmp_path, keys, {"rope_factors_long.weight": [8.0] * 12})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scaling.type": "mrope"}, "llama.rope.scaling.type is 'mrope'"),
        ({"scaling.type": "yarn", "scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_attn_factor": 1.5}, "yarn_attn_factor is 1.5"),
        ({"scaling.factor": 4.0, "scaling.attn_factor": 1.5}, "attn_factor is 1.5"),
        ({"scaling.type": "longrope", "scaling.factor": 4.0}, "scaling.factor is 4.0"),
    ],
)
def test_gguf_scalings_that_would_be_ignored_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        gguf_scaling(tmp_path, keys)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, "4"])
def test_gguf_numbers_are_checked(tmp_path: Path, value: Any) -> None:
    with pytest.raises(FormatError, match=r"scaling\.factor: expected a number of 0 or more"):
        gguf_scaling(tmp_path, {"scaling.factor": value})
