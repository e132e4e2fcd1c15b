"""The constants and types that the CUDA C of an attention kernel starts with."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlx.backends.cuda.kernel_plan import words_struct
from rlx.dtypes import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, U32, DType
from rlx.lir.kernels import BEYOND_CAPACITY, OUTSIDE_POOL, OUTSIDE_TABLE, AttentionKernel

C_TYPE = {
    F64: "double", F32: "float", F16: "f16", BF16: "bf16", I64: "i64", I32: "i32", I16: "i16", I8: "i8", U32: "u32",
    U8: "u8", BOOL: "bool",
}  # fmt: skip
ONE = {F16: 0x3C00, BF16: 0x3F80}  # bits of 1.0
EXPONENT = {F16: 0x7C00, BF16: 0x7F80}  # bits that are all set in infinities and NaN


def stored(kernel: AttentionKernel) -> DType:
    """The type of keys and values."""
    return kernel.cache_dtype or kernel.dtype


def on_tensor_cores(kernel: AttentionKernel) -> bool:
    """Whether keys and values are of 16 bits, and rows fit into tiles."""
    return stored(kernel) in ONE and kernel.dtype is not F64 and max(kernel.head_dim, kernel.value_dim) <= 256


def raw_scores(kernel: AttentionKernel) -> bool:
    """Whether products of queries and keys are kept as scores: the weights include the scale."""
    return on_tensor_cores(kernel) and kernel.scale > 0 and not kernel.softcap and kernel.mask != "bias"


def words(kernel: AttentionKernel) -> str:
    """The struct of parameters."""
    element, result, packed = C_TYPE[kernel.dtype], C_TYPE[kernel.result or kernel.dtype], stored(kernel).is_packed
    cache = "u16" if packed else C_TYPE[stored(kernel)]
    pointers = {
        "q": f"const {element}*", "k": f"const {cache}*", "v": f"const {cache}*", "out": f"{result}*",
        "mask": f"const {mask_type(kernel)}*", "lse": f"{C_TYPE[kernel.dtype.wide]}*", "positions": "const i32*",
        "table": "const i32*", "rows": "const i32*",
    }  # fmt: skip
    return words_struct({name: pointers.get(name, "i64") for name in kernel.words})


def mask_type(kernel: AttentionKernel) -> str:
    """The C type of elements of the mask operand."""
    return "u8" if kernel.mask_dtype is None else C_TYPE[kernel.mask_dtype]


def constants(kernel: AttentionKernel, more: Mapping[str, int | bool], *, tensor: bool) -> str:
    """Types, then numbers: those of the kernel and `more`; `tensor` says whether products are on tensor cores."""
    limited = kernel.mask in ("causal", "sliding")
    # Scores of tensor cores are products, or in base 2; others are natural.
    raw = tensor and raw_scores(kernel)
    unit = kernel.scale / math.log(2) if raw else 1.0 if tensor else 1 / math.log(2)
    natural = kernel.scale if raw else math.log(2) if tensor else 1.0
    numbers: dict[str, int | bool | float] = {
        "HEAD_DIM": kernel.head_dim, "VALUE_DIM": kernel.value_dim, "GROUP": kernel.group, "PAGE": kernel.page or 64,
        "WINDOW": kernel.window if kernel.mask == "sliding" else 0, "AHEAD": kernel.ahead,
        "RING": kernel.ring, "RAGGED": kernel.ragged, "SINGLE": False, "LIMITED": limited, "SEGMENTS": kernel.segments,
        "CUSTOM": kernel.mask == "custom", "BIAS": kernel.mask == "bias", "LSE": kernel.lse,
        "RAW": raw, "SCALE": float(kernel.scale), "SOFTCAP": float(kernel.softcap),
        "INVERSE_SOFTCAP": 1 / kernel.softcap if kernel.softcap else 0.0,
        "UNIT": float(unit), "NATURAL": float(natural), "BEYOND_CAPACITY": BEYOND_CAPACITY,
        "OUTSIDE_TABLE": OUTSIDE_TABLE, "OUTSIDE_POOL": OUTSIDE_POOL,
    }  # fmt: skip
    numbers |= more
    if stored(kernel) in ONE:
        numbers |= {"STORED_ONE": ONE[stored(kernel)], "STORED_EXPONENT": EXPONENT[stored(kernel)]}
    packed = stored(kernel).is_packed
    types = {
        "Real": C_TYPE[F64 if kernel.dtype is F64 else F32], "Query": C_TYPE[kernel.dtype],
        "Result": C_TYPE[kernel.result or kernel.dtype],
        "Stored": "u16" if packed else C_TYPE[stored(kernel)], "Mask": mask_type(kernel),
    }  # fmt: skip
    # Some variants do not need all constants.
    lines = ["#pragma nv_diag_suppress 177"] + [f"typedef {value} {name};" for name, value in types.items()]
    return "\n".join([*lines, *(_constant(name, value) for name, value in numbers.items())])


def _constant(name: str, value: float | bool) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    if isinstance(value, int):
        # 16-bit patterns are shifted and compared as unsigned words.
        return f"constexpr {'u32' if name.startswith('STORED') else 'int'} {name} = {value};"
    return f"constexpr double {name} = {value!r};"
