"""Quantisation schemes: how weights are stored in fewer bits, and the size of their blocks.

A scheme is its name (`gguf_q4k`, `int8/32`), so it prints, parses and compares as text. GGUF schemes keep scales inside
the blocks and are element types of tensors; the others have scales in separate tensors.
"""

from __future__ import annotations

import re
from typing import ClassVar, NamedTuple

from rlx.dtypes import GGUF_PACKED, I8, U8, DType
from rlx.errors import GraphError, nearest

_GGUF = {f"gguf_{d.name.replace('_k', 'k')}": d for d in GGUF_PACKED}  # gguf_q4_0, ..., gguf_q4k, ...
_FLOATS = {"fp8e4m3": 8, "fp8e5m2": 8, "nvfp4/16": 4}  # bits per element
_BLOCKS = {"int8": 8, "int8a": 8, "int4": 4}
_BLOCK = re.compile(r"(int8a?|int4)/([1-9]\d{0,8})")


class SmallFloat(NamedTuple):
    """The bit layout of a small float, and the largest number it can hold."""

    exponent: int
    mantissa: int
    bias: int
    largest: float
    infinities: bool = False  # and NaN above them


SMALL_FLOATS = {  # by kind of scheme
    "fp8e4m3": SmallFloat(4, 3, 7, 448.0),
    "fp8e5m2": SmallFloat(5, 2, 15, 57344.0, infinities=True),
    "nvfp4": SmallFloat(2, 1, 1, 6.0),
}


class QuantScheme(str):
    """One scheme: `GGUF_Q4_0` to `GGUF_NVFP4`, `FP8_E4M3`, `FP8_E5M2`, `NVFP4`, and for blocks of any size
    `INT8_BLOCK(size)`, `INT8_BLOCK_ASYM(size)`, which has zero points, and `INT4_BLOCK(size)`.

    >>> QuantScheme.GGUF_Q4K.block, QuantScheme.GGUF_Q4K.block_bytes, QuantScheme.GGUF_Q4K.bits
    (256, 144, 4.5)
    >>> str(QuantScheme.INT8_BLOCK(32)), QuantScheme("int4/32") == QuantScheme.INT4_BLOCK(32)
    ('int8/32', True)
    """

    __slots__ = ()
    GGUF_Q4_0: ClassVar[QuantScheme]
    GGUF_Q4_1: ClassVar[QuantScheme]
    GGUF_Q5_0: ClassVar[QuantScheme]
    GGUF_Q5_1: ClassVar[QuantScheme]
    GGUF_Q8_0: ClassVar[QuantScheme]
    GGUF_Q2K: ClassVar[QuantScheme]
    GGUF_Q3K: ClassVar[QuantScheme]
    GGUF_Q4K: ClassVar[QuantScheme]
    GGUF_Q5K: ClassVar[QuantScheme]
    GGUF_Q6K: ClassVar[QuantScheme]
    GGUF_Q8K: ClassVar[QuantScheme]
    GGUF_Q8_1: ClassVar[QuantScheme]
    GGUF_Q1_0: ClassVar[QuantScheme]
    GGUF_Q2_0: ClassVar[QuantScheme]
    GGUF_TQ1_0: ClassVar[QuantScheme]
    GGUF_TQ2_0: ClassVar[QuantScheme]
    GGUF_IQ1_S: ClassVar[QuantScheme]
    GGUF_IQ1_M: ClassVar[QuantScheme]
    GGUF_IQ2_XXS: ClassVar[QuantScheme]
    GGUF_IQ2_XS: ClassVar[QuantScheme]
    GGUF_IQ2_S: ClassVar[QuantScheme]
    GGUF_IQ3_XXS: ClassVar[QuantScheme]
    GGUF_IQ3_S: ClassVar[QuantScheme]
    GGUF_IQ4_NL: ClassVar[QuantScheme]
    GGUF_IQ4_XS: ClassVar[QuantScheme]
    GGUF_MXFP4: ClassVar[QuantScheme]
    GGUF_NVFP4: ClassVar[QuantScheme]
    FP8_E4M3: ClassVar[QuantScheme]
    FP8_E5M2: ClassVar[QuantScheme]
    NVFP4: ClassVar[QuantScheme]

    def __new__(cls, name: str) -> QuantScheme:
        block = _BLOCK.fullmatch(name) if isinstance(name, str) else None
        if block is None and name not in _GGUF and name not in _FLOATS:
            known = [*_GGUF, *_FLOATS, *(f"{kind}/32" for kind in _BLOCKS)]
            raise GraphError(f"QuantScheme: {name!r} is not a scheme", hint=nearest(str(name), known))
        return super().__new__(cls, name)

    @staticmethod
    def INT8_BLOCK(size: int) -> QuantScheme:
        """Bytes with one scale per `size` elements along k: (q - zero point, if any) * scale."""
        return QuantScheme(f"int8/{size}")

    @staticmethod
    def INT8_BLOCK_ASYM(size: int) -> QuantScheme:
        """`INT8_BLOCK` with mandatory zero points."""
        return QuantScheme(f"int8a/{size}")

    @staticmethod
    def INT4_BLOCK(size: int) -> QuantScheme:
        """Signed nibbles, two per byte, low one first, with one scale per `size` elements along k."""
        return QuantScheme(f"int4/{size}")

    @property
    def kind(self) -> str:
        """`gguf`, `int8`, `int8a`, `int4`, `fp8e4m3`, `fp8e5m2` or `nvfp4`."""
        return "gguf" if self in _GGUF else self.partition("/")[0]

    @property
    def packed(self) -> DType | None:
        """The packed element type whose blocks include the scales; None if scales are separate tensors."""
        return _GGUF.get(self)

    @property
    def storage(self) -> DType:
        """The element type of the weight tensor."""
        return self.packed or (I8 if self.kind in ("int8", "int8a") else U8)

    @property
    def block(self) -> int:
        """Elements along k that share a scale; 1 if scales are per column."""
        return self.packed.block if self.packed else int(self.partition("/")[2] or 1)

    @property
    def block_bytes(self) -> int:
        """Bytes per block, without separate scales."""
        return self.packed.size if self.packed else -(-self.block * self._element_bits // 8)

    @property
    def bits(self) -> float:
        """Bits per element, including scales inside the block."""
        return self.block_bytes * 8 / self.block

    @property
    def elements_per_byte(self) -> int:
        """Elements per byte of the weight tensor."""
        return 2 if self.packed is None and self._element_bits == 4 else 1

    @property
    def _element_bits(self) -> int:
        return _FLOATS.get(self) or _BLOCKS[self.kind]

    def __repr__(self) -> str:
        return f"QuantScheme({str(self)!r})"


for _name in _GGUF:
    setattr(QuantScheme, _name.upper(), QuantScheme(_name))
QuantScheme.FP8_E4M3, QuantScheme.FP8_E5M2, QuantScheme.NVFP4 = map(QuantScheme, _FLOATS)
