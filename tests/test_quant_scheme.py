"""Quantisation schemes: names, blocks and bytes, against the `gguf` package where it has them."""

from __future__ import annotations

import pickle

import gguf
import pytest

import rlx
from rlx import QuantScheme
from rlx.errors import GraphError

PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
GGUF = [kind.name for kind in gguf.GGML_QUANT_SIZES if kind.name not in PLAIN]


@pytest.mark.parametrize("name", GGUF)
def test_gguf_schemes_have_the_blocks_of_gguf(name: str) -> None:
    scheme = getattr(QuantScheme, f"GGUF_{name.replace('_K', 'K')}")
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    nbytes = 36 if name == "Q8_1" else nbytes  # the package has the layout of its first days
    assert (scheme.block, scheme.block_bytes, scheme.bits) == (elements, nbytes, nbytes * 8 / elements)
    assert scheme == f"gguf_{name.replace('_K', 'K').lower()}" and scheme.kind == "gguf"
    assert scheme.packed is rlx.dtype(name.lower()) and scheme.storage is scheme.packed


# name, elements of a block, its bytes, bits of an element, type of the tensor: as the reference has them.
OTHERS = [
    (QuantScheme.INT8_BLOCK(32), "int8/32", 32, 32, 8, "i8"),
    (QuantScheme.INT8_BLOCK_ASYM(64), "int8a/64", 64, 64, 8, "i8"),
    (QuantScheme.INT4_BLOCK(32), "int4/32", 32, 16, 4, "u8"),
    (QuantScheme.FP8_E4M3, "fp8e4m3", 1, 1, 8, "u8"),
    (QuantScheme.FP8_E5M2, "fp8e5m2", 1, 1, 8, "u8"),
    (QuantScheme.NVFP4, "nvfp4/16", 16, 8, 4, "u8"),
]


@pytest.mark.parametrize(("scheme", "name", "block", "nbytes", "bits", "storage"), OTHERS, ids=lambda v: str(v))
def test_schemes_with_scales_of_their_own(
    scheme: QuantScheme, name: str, block: int, nbytes: int, bits: int, storage: str
) -> None:
    assert str(scheme) == name and (scheme.block, scheme.block_bytes, scheme.bits) == (block, nbytes, bits)
    assert scheme.packed is None and str(scheme.storage) == storage
    assert scheme.elements_per_byte == (2 if bits == 4 else 1)


def test_a_scheme_is_its_name() -> None:
    assert QuantScheme("int8/32") == QuantScheme.INT8_BLOCK(32) != QuantScheme.INT8_BLOCK(64)
    assert QuantScheme("gguf_q4k") == QuantScheme.GGUF_Q4K and repr(QuantScheme.NVFP4) == "QuantScheme('nvfp4/16')"
    again = pickle.loads(pickle.dumps(QuantScheme.INT4_BLOCK(8)))
    assert type(again) is QuantScheme and again.block == 8
    assert len({QuantScheme.GGUF_Q4K, QuantScheme("gguf_q4k"), QuantScheme.GGUF_Q5K}) == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gguf_q4_k", "gguf_q4k"), ("int8", "int8/32"), ("int4/0", "int4/32"), ("int4/-2", "int4/32"), (3, "")],
)
def test_what_is_no_scheme(name: str, hint: str) -> None:
    with pytest.raises(GraphError, match="is not a scheme") as caught:
        QuantScheme(name)
    assert hint in str(caught.value.hint or "")
    with pytest.raises(GraphError, match="is not a scheme"):
        QuantScheme.INT8_BLOCK(0)
