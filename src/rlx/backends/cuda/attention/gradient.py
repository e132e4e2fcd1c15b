"""CUDA C of `AttentionGradKernel`: a pass for dq, with a tile of queries per block, and one for dk and dv, of keys."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cuda.attention import gradient_code, instructions, rows_code
from rlx.backends.cuda.attention.code_constants import C_TYPE, constants, mask_type
from rlx.backends.cuda.kernel_plan import KernelPlan, Pass, entry, words_struct
from rlx.backends.cuda.targets import CudaTarget
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel, Kernel

TILE, THREADS = 16, 128


class AttentionGradGenerator:
    """Writes CUDA C for `AttentionGradKernel`."""

    def plan(self, kernel: Kernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        assert isinstance(kernel, AttentionGradKernel)
        attention = kernel.attention
        units = words["batch"] * words["kv_heads"]
        shared = shared_bytes(attention)
        rows = {"queries": words["q_len"] * attention.group, "keys": words["k_len"]}
        blocks = {name: units * -(-count // TILE) * _slices(attention, name) for name, count in rows.items()}
        return KernelPlan(tuple(Pass(name, (n, 1, 1), THREADS, shared) for name, n in blocks.items() if n))

    def source(self, kernel: Kernel, variant: str, target: CudaTarget) -> str:
        assert isinstance(kernel, AttentionGradKernel)
        attention = kernel.attention
        text = "\n".join(
            [
                constants(attention, {"KEYS": variant == "keys"}, tensor=False), _words(kernel), instructions.SCALAR,
                rows_code.ROWS, rows_code.DENSE_ROWS, rows_code.MASKS, gradient_code.TILES,
            ]
        )  # fmt: skip
        return text.replace("ENTRY(", f"{entry(kernel, variant)}(")


def _words(kernel: AttentionGradKernel) -> str:
    attention = kernel.attention
    element, wide = C_TYPE[attention.dtype], C_TYPE[attention.dtype.wide]
    pointers = dict.fromkeys(("q", "k", "v", "dy"), f"const {element}*") | {"mask": f"const {mask_type(attention)}*"}
    pointers |= dict.fromkeys(("dq", "dk", "dv"), f"{element}*") | dict.fromkeys(("lse", "delta"), f"const {wide}*")
    return words_struct({name: pointers.get(name, "i64") for name in kernel.words})


def _width(size: int) -> int:
    """Columns per block: as many threads have a row of the results."""
    return next((width for width in (8, 16, 32, 64) if size <= width), 128)


def _slices(attention: AttentionKernel, variant: str) -> int:
    """Blocks per tile, each with some columns of the results."""
    if variant == "queries":
        return -(-attention.head_dim // _width(attention.head_dim))
    width = _width(max(attention.head_dim, attention.value_dim))
    return -(-attention.head_dim // width) + -(-attention.value_dim // width)


def shared_bytes(attention: AttentionKernel) -> int:
    """Bytes of the fixed rows."""
    pitches = -(-attention.head_dim // 4) * 4 + -(-attention.value_dim // 4) * 4
    return TILE * pitches * max(4, attention.dtype.size)
