"""Kernels of the CPU that read packed weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_writing import finish
from limits import LONGEST_S

from rlx.backends.cpu.forms import linear
from rlx.backends.cpu.forms.block_dots import CODES
from rlx.cli.verify import check_products
from rlx.formats import TensorFile, open_tensors
from rlx.ir.registry import packed
from rlx.ops.activations import WHOLE
from rlx.profile import CompileProfile, Precision

EIGHT_BITS = CompileProfile(precision=Precision(activations="int8"))


def test_kernels_know_the_types_that_passes_round_for() -> None:
    assert set(CODES) == set(WHOLE)


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
    monkeypatch.setattr(linear, "_whole_blocks", linear._whole_blocks.__wrapped__)  # nor the kernels of other tests
    right = CODES["q4_k"]
    assert right.minima is not None
    minima = right.minima
    monkeypatch.setitem(CODES, "q4_k", replace(right, minima=lambda b: minima(b)[::-1]))
    check = check_products(packed_file, EIGHT_BITS)
    assert check.ok is False and "q4_k 512 wide" in check.detail and "q8_0" not in check.detail
