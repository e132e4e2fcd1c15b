"""Weights joined with their scales, against `ml_dtypes`, NumPy and `transformers`."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from scaled_folders import E4M3, E8M0, FP4, Array, eight_bits, four_bits

from rlx.dtypes import BF16, BY_NAME, F32
from rlx.errors import CapabilityError, FormatError
from rlx.formats import open_safetensors
from rlx.formats.scaled_weights import ScaledFile, read_quantization, with_scales

rng = np.random.default_rng(0)


def opened(folder: Path, tensors: dict[str, Array], **quantization: Any) -> ScaledFile:
    path = folder / "model.safetensors"
    save_file({name: np.array(array, order="C") for name, array in tensors.items()}, path)
    file = with_scales(open_safetensors(path), {"quant_method": "fp8", **quantization}, "config.json")
    assert isinstance(file, ScaledFile)
    return file


# -- 8-bit floats ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [np.float32, np.float16, BF16.numpy, E8M0], ids=str)
@pytest.mark.parametrize(
    ("shape", "grid", "kind"),
    [
        ((256, 384), (128, 128), "f8e4m3_128"),
        ((200, 160), (128, 128), "f8e4m3_32"),  # the last scales cover partial blocks
        ((70, 96), (128, 128), "f8e4m3_32"),  # rows are shorter than a block
        ((64, 96), (16, 32), "f8e4m3_32"),
        ((5, 256), (1, 256), "f8e4m3_128"),
        ((3, 40, 128), (32, 64), "f8e4m3_32"),  # experts
        ((33, 50), (16, 8), "f32"),  # no block has one scale
    ],
)
def test_a_grid_of_scales(tmp_path: Path, shape: tuple[int, ...], grid: tuple[int, int], kind: str, scale: Any) -> None:
    codes, scales, plain = eight_bits(rng.standard_normal(shape).astype(np.float32), grid, scale)
    other = np.ones(3, np.float32)
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales, "norm": other}
    file = opened(tmp_path, tensors, weight_block_size=list(grid))
    assert file.names == ("a.weight", "norm") and set(file.stored.names) == tensors.keys()
    entry = file.entry("a.weight")
    assert (entry.shape, entry.storage) == (shape, BY_NAME[kind])
    assert file.widened == (("a.weight",) if kind == "f32" else ())
    assert file.parts("a.weight") == ("a.weight", "a.weight_scale_inv") and file.parts("norm") == ("norm",)
    assert not file.array("a.weight").flags.writeable
    np.testing.assert_array_equal(file.dequantised("a.weight"), plain)
    np.testing.assert_array_equal(file.array("norm"), other)


@pytest.mark.parametrize("quantization", [{}, {"weight_block_size": None}, {"quant_method": "fbgemm_fp8"}], ids=str)
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (48,), (48, 1)], ids=str)
def test_a_scale_per_row_or_tensor(
    tmp_path: Path, shape: tuple[int, ...], suffix: str, quantization: dict[str, Any]
) -> None:
    codes = rng.standard_normal((48, 256)).astype(E4M3)
    scales = rng.random(shape).astype(np.float32)
    tensors = {"a.weight": codes, f"a.weight{suffix}": scales, "a.input_scale": np.ones((), np.float32)}
    file = opened(tmp_path, tensors, **quantization)
    assert file.names == ("a.weight",) and file.entry("a.weight").storage is BY_NAME["f8e4m3_128"]
    wanted = codes.astype(np.float32) * (scales.reshape(-1, 1) if scales.size > 1 else scales.item())
    np.testing.assert_array_equal(file.dequantised("a.weight"), wanted.astype(np.float32))


def test_a_scale_per_expert_or_for_all_of_them(tmp_path: Path) -> None:
    codes = rng.standard_normal((3, 8, 32)).astype(E4M3)
    for shape in ((3,), (3, 1, 1), (), (3, 8), (3, 8, 1)):
        scales = rng.random(shape).astype(np.float32)
        file = opened(tmp_path, {"w": codes, "w_scale": scales}, weight_block_size=None)
        wide = scales.reshape(*shape, *[1] * (3 - len(shape)))
        np.testing.assert_array_equal(file.dequantised("w"), codes.astype(np.float32) * wide)


def test_every_code_is_that_of_ml_dtypes(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128).view(E4M3)
    file = opened(tmp_path, {"w": codes, "w_scale_inv": np.full((1, 1), 0.3, np.float32)})
    wanted = codes.astype(np.float32) * np.float32(0.3)
    assert np.isnan(wanted).sum() == 2
    np.testing.assert_array_equal(file.dequantised("w"), wanted)


def test_scales_may_be_exponents_in_bytes(tmp_path: Path) -> None:
    codes = rng.standard_normal((4, 64)).astype(E4M3)
    exponents = np.array([[120], [127], [130], [100]], np.uint8)
    file = opened(tmp_path, {"w": codes, "w_scale": exponents}, weight_block_size=[1, 64])
    wanted = codes.astype(np.float32) * np.ldexp(np.float32(1), exponents.astype(int) - 127)
    np.testing.assert_array_equal(file.dequantised("w"), wanted)


def test_reading_makes_no_numbers_of_the_codes(tmp_path: Path) -> None:
    codes, scales, _ = eight_bits(rng.standard_normal((1024, 2048)).astype(np.float32), (128, 128))
    file = opened(tmp_path, {"w": codes, "w_scale_inv": scales})
    tracemalloc.start()
    try:
        blocks = file.array("w")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert blocks.nbytes == codes.nbytes * 132 // 128
    assert peak < 1.2 * codes.nbytes  # f32 would be 4


# -- MXFP4 -----------------------------------------------------------------------------------------------------------
def test_blocks_and_scales_become_mxfp4(tmp_path: Path) -> None:
    for shape in ((6, 96), (3, 5, 64)):
        blocks, scales, plain = four_bits(rng.standard_normal(shape).astype(np.float32))
        for kind in (np.dtype(np.uint8), E8M0):
            tensors = {"up_blocks": blocks, "up_scales": scales.view(kind), "norm": np.ones(2, np.float32)}
            file = opened(tmp_path, tensors, quant_method="mxfp4")
            assert file.names == ("up", "norm") and file.parts("up") == ("up_blocks", "up_scales")
            assert file.entry("up").storage is BY_NAME["mxfp4"] and file.entry("up").shape == shape
            np.testing.assert_array_equal(file.dequantised("up"), plain)


def test_any_codes_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    codes = rng.integers(0, 16, (40, 3, 32)).astype(np.uint8)
    exponents = rng.integers(0, 255, (40, 3)).astype(np.uint8)
    tensors = {"w_blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "w_scales": exponents}
    file = opened(tmp_path, tensors, quant_method="mxfp4")
    raw = np.ascontiguousarray(file.array("w")).view(np.uint8)
    theirs = gguf.quants.dequantize(raw.reshape(40, -1), gguf.GGMLQuantizationType.MXFP4)
    with np.errstate(over="ignore"):
        wanted = np.ldexp(FP4[codes].astype(np.float64), exponents[..., None].astype(int) - 127).astype(np.float32)
    np.testing.assert_array_equal(theirs, wanted.reshape(40, -1))


# -- transformers ----------------------------------------------------------------------------------------------------
@pytest.mark.parity
def test_numbers_are_those_that_transformers_makes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    for grid in ((128, 128), (64, 32), (256, 384)):
        codes, scales, _ = eight_bits(rng.standard_normal((256, 384)).astype(np.float32), grid)
        file = opened(tmp_path, {"w": codes, "w_scale_inv": scales}, weight_block_size=list(grid))
        weight = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
        theirs = fp8.Fp8Dequantize(None)._dequantize_one(weight, torch.from_numpy(scales), torch.float32)
        np.testing.assert_array_equal(file.dequantised("w"), theirs.numpy())
    blocks, exponents, _ = four_bits(rng.standard_normal((3, 5, 64)).astype(np.float32))
    file = opened(tmp_path, {"w_blocks": blocks, "w_scales": exponents}, quant_method="mxfp4")
    packed = torch.from_numpy(blocks), torch.from_numpy(exponents)
    theirs = mxfp4.convert_moe_packed_tensors(*packed, dtype=torch.float32)  # [experts, in, out]
    np.testing.assert_array_equal(file.dequantised("w"), theirs.numpy().swapaxes(1, 2))


# -- hostile files ---------------------------------------------------------------------------------------------------
CODES, GRID = np.zeros((200, 256), E4M3), np.ones((2, 2), np.float32)
BLOCKS, EXPONENTS = np.zeros((4, 2, 16), np.uint8), np.full((4, 2), 127, np.uint8)
Tensors = dict[str, Array]
FP8: list[tuple[str, Tensors, str]] = [
    ("no scales", {"a.weight": CODES}, r"'a\.weight': its scales: .*'a\.weight_scale'.*found neither"),
    ("two", {"w": CODES, "w_scale": GRID, "w_scale_inv": GRID}, "found 'w_scale_inv' and 'w_scale'"),
    ("too few", {"w": CODES, "w_scale": GRID[:1]}, r"\[200, 256\].*128 x 128.*expected \[2, 2\], found \[1, 2\]"),
    ("one for all", {"w": CODES, "w_scale": GRID[0, 0]}, r"expected \[2, 2\], found \[\]"),
    ("turned", {"w": CODES[:, :128], "w_scale": GRID[:1]}, r"expected \[2, 1\], found \[1, 2\]"),
    ("integers", {"w": CODES, "w_scale": GRID.astype(np.int32)}, "expected floats, or u8 for exponents, found i32"),
    ("a vector", {"w": CODES[0], "w_scale": GRID}, r"expected 2 axes or more, found shape \[256\]"),
    ("no weight", {"a.weight_scale_inv": GRID}, "the weight of these scales: expected one of f8e4m3, found none"),
    ("wide weight", {"a.weight": GRID, "a.weight_scale": GRID}, "expected one of f8e4m3, found one of f32"),
]  # fmt: skip
MX: list[tuple[str, Tensors, str]] = [
    ("no scales", {"w_blocks": BLOCKS}, "its scales: expected tensor 'w_scales', found none"),
    ("no blocks", {"w_scales": EXPONENTS}, "expected tensor 'w_blocks', found none"),
    ("twice", {"w_blocks": BLOCKS, "w_scales": EXPONENTS, "w": GRID}, "'w': expected one tensor or the other"),
    ("short", {"w_blocks": BLOCKS[..., :8], "w_scales": EXPONENTS}, r"16\], found u8\[4, 2, 8\]"),
    ("flat", {"w_blocks": BLOCKS[0], "w_scales": EXPONENTS[0]}, r"16\], found u8\[2, 16\]"),
    ("floats", {"w_blocks": BLOCKS.astype(np.float32), "w_scales": EXPONENTS}, r"found f32\[4, 2, 16\]"),
    ("fewer", {"w_blocks": BLOCKS, "w_scales": EXPONENTS[:3]}, r"expected u8\[4, 2\], one per block, found u8\[3, 2\]"),
    ("wide", {"w_blocks": BLOCKS, "w_scales": EXPONENTS.astype(np.float32)}, r"found f32\[4, 2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), [pytest.param(*rest, id=name) for name, *rest in FP8])
def test_scales_that_do_not_fit_8_bit_floats_are_named(tmp_path: Path, tensors: Tensors, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        opened(tmp_path, tensors, weight_block_size=[128, 128])
    assert "model.safetensors, byte" in str(caught.value) and len(str(caught.value)) <= 500


@pytest.mark.parametrize(("tensors", "message"), [pytest.param(*rest, id=name) for name, *rest in MX])
def test_blocks_of_mxfp4_that_do_not_fit_are_named(tmp_path: Path, tensors: Tensors, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        opened(tmp_path, tensors, quant_method="mxfp4")
    assert "model.safetensors, byte" in str(caught.value) and len(str(caught.value)) <= 500


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    scales = GRID.copy()
    scales[1, 0] = value
    file = opened(tmp_path, {"w": CODES, "w_scale_inv": scales})
    with pytest.raises(FormatError, match=f"'w_scale_inv': a scale: expected a finite number, found {value}"):
        file.array("w")


def test_an_exponent_that_is_nan_is_refused(tmp_path: Path) -> None:
    exponents = EXPONENTS.copy()
    exponents[2, 1] = 255
    file = opened(tmp_path, {"w_blocks": BLOCKS, "w_scales": exponents}, quant_method="mxfp4")
    with pytest.raises(FormatError, match="'w_scales': an exponent: expected 0 to 254, found 255"):
        file.array("w")
    file = opened(tmp_path, {"w": CODES, "w_scale": np.full((2, 2), 255, np.uint8)})
    with pytest.raises(FormatError, match="expected a finite number, found nan"):
        file.array("w")


def test_tensors_of_no_elements_read(tmp_path: Path) -> None:
    for shape in ((0, 128), (128, 0), (0, 4, 128)):
        codes = np.zeros(shape, E4M3)
        scales = np.zeros((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), np.float32)
        assert opened(tmp_path, {"w": codes, "w_scale": scales}).dequantised("w").shape == shape
    tensors = {"w_blocks": BLOCKS[:, :0], "w_scales": EXPONENTS[:, :0]}
    assert opened(tmp_path, tensors, quant_method="mxfp4").dequantised("w").shape == (4, 0)


@given(
    st.lists(st.integers(1, 3), max_size=1), st.integers(1, 70), st.integers(1, 140), st.integers(1, 150),
    st.integers(1, 150), st.tuples(st.integers(-1, 1), st.integers(-1, 1)),
)  # fmt: skip
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_grid_gives_its_numbers_or_a_typed_error(
    tmp_path: Path, lead: list[int], n: int, k: int, rows: int, columns: int, off: tuple[int, int]
) -> None:
    weight = rng.standard_normal((*lead, n, k)).astype(np.float32)
    codes, scales, plain = eight_bits(weight, (rows, columns))
    *_, down, across = scales.shape
    scales = np.resize(scales, (*lead, max(down + off[0], 0), max(across + off[1], 0)))
    if scales.shape[-2:] == (down, across):
        file = opened(tmp_path, {"w": codes, "w_scale": scales}, weight_block_size=[rows, columns])
        np.testing.assert_array_equal(file.dequantised("w"), plain)
        assert file.entry("w").storage is not F32 or k % 32 or min(columns, k) % 32
    else:
        with pytest.raises(FormatError, match="the shape of scales"):
            opened(tmp_path, {"w": codes, "w_scale": scales}, weight_block_size=[rows, columns])


def test_a_closed_file_gives_nothing(tmp_path: Path) -> None:
    file = opened(tmp_path, {"w": CODES, "w_scale_inv": GRID})
    blocks = file.array("w")
    file.close()
    assert file.maps == () and blocks["d"].max() == 1
    with pytest.raises(FormatError, match="closed"):
        file.array("w")


# -- configurations --------------------------------------------------------------------------------------------------
OTHERS = ["awq", "gptq", "bitsandbytes", "compressed-tensors", "aqlm", "hqq", "quanto", "torchao", "modelopt", "quark"]


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_are_named_with_what_to_do_instead(method: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        read_quantization({"quant_method": method, "bits": 4, "group_size": 128}, "config.json")
    assert f"config.json: quantization_config: quant_method is '{method}'" in str(caught.value)
    assert all(word in str(caught.value.hint) for word in ("GGUF", "without quantisation", "fp8", "mxfp4"))


def test_bitsandbytes_is_known_without_its_name() -> None:
    with pytest.raises(CapabilityError, match="quant_method is 'bitsandbytes'"):
        read_quantization({"load_in_8bit": True}, "config.json")


@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"quant_method": 3}, {"quant_method": ["fp8"]}], ids=str)
def test_a_method_that_is_not_named_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError, match=r"quantization_config is \{"):
        read_quantization(settings, "config.json")


@pytest.mark.parametrize(
    "sizes", [[0, 128], [128, -1], [128], [128, 128, 128], "128", 128, [True, 128], [1.5, 2], [1 << 40, 1], {}], ids=str
)
def test_blocks_of_no_size_are_refused(sizes: Any) -> None:
    with pytest.raises(FormatError, match="weight_block_size: expected two sizes from 1 to 16777216, found "):
        read_quantization({"quant_method": "fp8", "weight_block_size": sizes}, "config.json")


@pytest.mark.parametrize(
    ("name", "value"), [("fmt", "e5m2"), ("scale_fmt", "int"), ("expert_dtype", "fp4"), ("activation_scheme", [])]
)
def test_a_switch_that_is_not_known_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(CapabilityError, match=f"quantization_config: {name} is "):
        read_quantization({"quant_method": "fp8", name: value}, "config.json")


@pytest.mark.parametrize("value", ["lm_head", [1], {"a": 1}], ids=str)
def test_modules_are_a_list_of_names(value: Any) -> None:
    for name in ("modules_to_not_convert", "ignored_layers"):
        with pytest.raises(FormatError, match=f"{name}: expected a list of names"):
            read_quantization({"quant_method": "mxfp4", name: value}, "config.json")


def test_floats_of_another_form_are_refused(tmp_path: Path) -> None:
    import ml_dtypes

    with pytest.raises(CapabilityError, match=r"'w' is stored as f8e5m2, expected f8e4m3"):
        opened(tmp_path, {"w": np.zeros((2, 32), ml_dtypes.float8_e5m2), "w_scale": GRID})


def test_a_file_without_a_configuration_is_itself(tmp_path: Path) -> None:
    save_file({"w": GRID}, tmp_path / "x.safetensors")
    file = open_safetensors(tmp_path / "x.safetensors")
    assert with_scales(file, None, "config.json") is file is file.stored and file.parts("w") == ("w",)
    assert with_scales(file, {"quant_method": "fp8"}, "config.json").entry("w").storage is F32
