"""Kernels of the CPU that read packed weights."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_writing import finish
from limits import LONGEST_S
from targets import AVX512, BY_NAME

import rlx
from rlx.backends.base import backend
from rlx.backends.cpu.forms import quantised_dots
from rlx.backends.cpu.forms.code_words import CodeWords
from rlx.backends.cpu.packing import LAYOUTS
from rlx.backends.cpu.packing.panels import Panels, Quads
from rlx.backends.cpu.packing.quantised_activations import ActivationWords
from rlx.backends.cpu.packing.quantised_weights import Interleaved
from rlx.cli.verify import check_products
from rlx.dtypes import F32, F64, U8, dtype
from rlx.errors import GraphError
from rlx.formats import TensorFile, open_tensors
from rlx.ir.registry import packed
from rlx.lir.loops import INTEGER_DOTS
from rlx.operand_layouts import Layout, WeightLayout, parse_layout
from rlx.ops.quantised_activations import INT8_DOT_TYPES
from rlx.profile import CompileProfile, Precision
from rlx.types import parse_type

EIGHT_BITS = CompileProfile(precision=Precision(activations="int8"))


def test_a_product_needs_no_other_op_to_know_every_type() -> None:
    """In a process of its own: here, some test has imported all there is."""
    code = """
from rlx.dtypes import PACKED
from rlx.backends.cpu.forms import panels
for storage in PACKED:
    panels.unpack_kernel(storage, 16, 16)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONGEST_S)


@pytest.fixture
def packed_file(tmp_path: Path) -> Iterator[TensorFile]:
    """Random packed weights, of which some have no kernel for 8-bit activations."""
    path, rng = tmp_path / "packed.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for name, shape in {"q4_k": (40, 512), "q8_0": (120, 96), "iq4_nl": (3, 50, 64)}.items():
        blocks = packed(name, *shape).array(rng)
        kind = gguf.GGMLQuantizationType[name.upper()]
        writer.add_tensor(f"{name}.weight", blocks.view(np.uint8).reshape(*shape[:-1], -1), raw_dtype=kind)
    finish(writer)
    with open_tensors(path) as file:
        yield file


def test_packed_products_are_those_of_float64(packed_file: TensorFile) -> None:
    check = check_products(packed_file, EIGHT_BITS)
    assert check.ok and "q4_k 512 wide, q8_0 96 wide, iq4_nl 64 wide" in check.detail
    assert "from NumPy in float64, on numbers that 8 bits hold (0.0001 is allowed)" in check.detail


def test_a_wrong_kernel_of_packed_weights_is_found(
    packed_file: TensorFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The minima of a block's halves are exchanged: texts would still come out, if worse ones."""
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        quantised_dots, "block_kernels", quantised_dots.block_kernels.__wrapped__
    )  # nor the kernels of other tests
    minima = CodeWords.minima
    monkeypatch.setattr(CodeWords, "minima", lambda words: minima(words)[::-1])
    check = check_products(packed_file, EIGHT_BITS)
    assert check.ok is False and "q4_k 512 wide" in check.detail and "q8_0" not in check.detail


@pytest.mark.parametrize("storage", INT8_DOT_TYPES)
def test_a_layout_names_the_arithmetic_of_its_kernels(storage: str) -> None:
    target = BY_NAME["avx512vnni"]
    arithmetic = {kernel.arithmetic() for kernel in quantised_dots.block_kernels(dtype(storage), target).kernels}
    layouts = [Interleaved(dtype(storage), 64, 16, integer) for integer in (True, False)]
    assert [x.arithmetic() for x in layouts] == [next(dot for dot in INTEGER_DOTS if dot in arithmetic), None]


# -- layouts ----------------------------------------------------------------------------------------------------------
EVERY_LAYOUT = pytest.mark.parametrize("layout", [
    Panels(64), Quads(16), Interleaved(dtype("q4_k"), 64, 16, True), Interleaved(dtype("q8_0"), 8, 4, False),
    ActivationWords(256),
], ids=str)  # fmt: skip


@EVERY_LAYOUT
def test_the_text_of_a_layout_says_all_of_it(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout
    assert type(layout).name in LAYOUTS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cpu.panel(64)", r"layout cpu\.panel\(64\): cpu has none of that name.*did you mean 'panels'"),
        ("cpu.panels(0)", "'0' is neither a number, a flag nor an element type"),
        ("cpu.panels(64, 2)", "expected width: int"),
        ("cpu.panels(true)", "expected width: int"),
        ("toy.panels(64)", "toy has none of that name"),
    ],
)
def test_a_layout_that_nobody_has_is_named(text: str, says: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse_layout(text)
    assert re.search(says, f"{caught.value} {caught.value.hint}")


def test_a_graph_with_every_layout_is_read_back() -> None:
    g = rlx.Graph("packed")
    x, w = g.input("x", ("n", 256)), g.param("w", (256, 40))
    rows, bytes_ = g.param("rows", (40, 256), "q4_k"), g.param("bytes", (256, 40), "i8")
    blocks = Interleaved(dtype("q4_k"), 64, 16, True)
    g.set_outputs([
        g.one("prepack", w, layout=Panels(64)), g.one("prepack", bytes_, layout=Quads(64)),
        g.one("prepack", rows, layout=blocks), g.one("prepack", x, layout=blocks.left),
    ])  # fmt: skip
    assert rlx.Graph.parse(g.text(full=True)) == g
    assert "layout=cpu.interleaved(q4_k, 64, 16, true)" in g.text()


@pytest.mark.parametrize("layout", [Panels(16), Panels(64), Quads(16)], ids=str)
def test_packed_plain_weights_multiply_as_they_did_before(layout: WeightLayout) -> None:
    """Against NumPy on the matrix itself; the last panel is not full."""
    rng = np.random.default_rng(3)
    integers = isinstance(layout, Quads)
    x = rng.integers(0, 255, (5, 24)).astype(np.uint8 if integers else np.float32)
    w = rng.integers(-128, 127, (24, 21)).astype(np.int8 if integers else np.float32)
    (product,) = layout.products(x, layout.pack(w), 21, 1)
    np.testing.assert_array_equal(product, x.astype(np.int64) @ w.astype(np.int64))


@pytest.mark.parametrize("storage", ["q8_0", "q6_k"])
def test_interleaved_weights_multiply_as_gguf_says(storage: str) -> None:
    rng = np.random.default_rng(4)
    kind = dtype(storage)
    x, rows = rng.normal(size=(3, 512)).astype(np.float32), packed(storage, 10, 512).array(rng)
    layout = Interleaved(kind, 16, 4, False)
    numbers = gguf.quants.dequantize(rows.view(np.uint8), gguf.GGMLQuantizationType[storage.upper()]).reshape(10, 512)
    (product,) = layout.products(x, layout.pack(rows), 10, 1)
    np.testing.assert_allclose(product, x.astype(np.float64) @ numbers.T.astype(np.float64), rtol=2e-5, atol=2e-4)


def test_a_target_without_layouts_reads_weights_as_they_are() -> None:
    plain, bytes_ = parse_type("f32[64, 32]"), parse_type("i8[64, 32]")
    toy, wide = backend("toy").target(), AVX512
    assert toy.layout(F32, plain) is None and not toy.prepacks
    assert wide.layout(F32, plain) == Panels(64) and wide.layout(F64, plain) == Panels(32)
    assert wide.layout(U8, bytes_) == Quads(64) and wide.layout(U8, parse_type("i8[63, 32]")) is None
