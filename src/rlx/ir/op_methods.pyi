# Written by scripts/stubs.py from the registry of ops; do not edit.
# fmt: off
# ruff: noqa: E501
"""Ops as methods, for type checkers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from rlx.dtypes import DType, DTypeLike
from rlx.ir.custom import MultiOutputHandle
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.provenance import Origin
from rlx.module import GraphModule
from rlx.operand_layouts import Layout
from rlx.types import ShapeLike, Size, TensorType

class _HoldsValue(Protocol):
    def __rlx_value__(self) -> Value: ...

# Numbers and arrays become constants.
Operand: TypeAlias = Value | _HoldsValue | float | np.ndarray[Any, Any] | np.generic | Sequence[Any]


class _Builders:
    def attention_lse(
        self, q: Operand, k: Operand, v: Operand, mask: Operand | None = None, *, mask_kind: str | Enum = 'none',
        scale: float | None = None, softcap: float | None = None, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """`attention`, and per query the logsumexp of its scores, [batch, heads, seq], -inf without keys.

        The gradient of `attention` stores it instead of the weights. For narrow floats it is f32.
        """
    def attention_grad(
        self, q: Operand, k: Operand, v: Operand, dy: Operand, lse: Operand, delta: Operand,
        mask: Operand | None = None, *, mask_kind: str | Enum = 'none', scale: float | None = None,
        softcap: float | None = None, out_shape: Any = None
    ) -> tuple[Value, Value, Value]:
        """Gradients of q, k and v from `dy`, the gradient of the result of `attention_lse`.

        `lse` is its second result, `delta` the sum of dy · result per query, minus the gradient of its lse; both are
        [batch, heads, seq]. Weights are recomputed block by block: no memory grows with seq · keys.
        """
    def depthwise_conv1d_causal_carry(
        self, x: Operand, weight: Operand, state: Operand, lengths: Operand | None = None, rows: Operand | None = None,
        *, kernel_size: int, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """`depthwise_conv1d_causal` after the tokens in `state`, and the state after the last token.

        The state has the last kernel_size - 1 tokens, [batch, kernel_size - 1, channels]. The first `lengths[b]` tokens of
        a row count; the rest is padding and does not enter the state.

        With `rows` [tokens] in place of lengths, x is [tokens, channels] and the state is
        [rows, kernel_size - 1, channels]: the previous tokens are those of the same row, as in `selective_scan_carry`.
        """
    def ended(self, x: Operand, more: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """`x`, a result of a while loop with `max_steps`; an error at run time if `more`, its condition, still holds.
        """
    def conv2d(
        self, x: Operand, weight: Operand, bias: Operand | None = None, *, stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Cross-correlation of x [batch, channels, height, width] with weight [out, channels / groups, kernel_y, kernel_x].

        `stride`, `padding` (zeros on both sides) and `dilation` are one number, or one per axis.
        """
    def pool2d(
        self, x: Operand, *, kind: str | Enum, kernel: int | Sequence[int], stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0, out_shape: ShapeLike | None = None
    ) -> Value:
        """The largest (`kind` max) or mean number of each window of x [batch, channels, height, width].

        `stride` defaults to the kernel's size. Padding counts as zeros in a mean and never as the largest.
        """
    def conv1d(
        self, x: Operand, weight: Operand, bias: Operand | None = None, *, stride: int = 1, padding: int = 0,
        dilation: int = 1, groups: int = 1, out_shape: ShapeLike | None = None
    ) -> Value:
        """Cross-correlation of x [batch, channels, length] with weight [out, channels / groups, kernel]."""
    def pool1d(
        self, x: Operand, *, kind: str | Enum, kernel: int, stride: int | None = None, padding: int = 0,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """The largest (`kind` max) or mean number of each window of x [batch, channels, length], as `pool2d` does it.
        """
    def add(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Sum."""
    def sub(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Difference."""
    def mul(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Product."""
    def div(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Quotient of floats; integers use `floor_divide`."""
    def floor_divide(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Quotient of integers, rounded down; a zero divisor gives 0."""
    def mod(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Remainder of integers with the sign of the divisor; a zero divisor gives 0."""
    def pow(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """`a` to the power `b`, for floats."""
    def maximum(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """The larger; NaN if either is NaN."""
    def minimum(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """The smaller; NaN if either is NaN."""
    def equal(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Whether equal."""
    def not_equal(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Whether different."""
    def less(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Whether a < b."""
    def less_equal(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Whether a <= b."""
    def greater(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Whether a > b."""
    def greater_equal(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Whether a >= b."""
    def logical_and(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Both."""
    def logical_or(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Either."""
    def logical_not(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """The opposite."""
    def neg(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """The negative."""
    def abs(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """The magnitude."""
    def exp(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """e raised to x."""
    def log(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Natural logarithm."""
    def sqrt(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Square root."""
    def rsqrt(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """One over the square root."""
    def sin(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Sine, of angles in radians of any size; NaN of infinities."""
    def cos(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Cosine, of angles in radians of any size; NaN of infinities."""
    def tan(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Tangent, of angles in radians of any size; NaN of infinities."""
    def atan(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Inverse tangent, within ±π/2."""
    def tanh(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Hyperbolic tangent."""
    def relu(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """x where positive, else 0."""
    def round(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """The nearest whole number; a half goes to the even one."""
    def erf(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Error function."""
    def sigmoid(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """1 / (1 + e^-x)."""
    def silu(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """x · sigmoid(x), also called swish."""
    def gelu(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Gaussian error linear unit by the error function: x · (1 + erf(x / √2)) / 2."""
    def gelu_tanh(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Gaussian error linear unit by its tanh form: x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    def where(self, condition: Operand, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """`a` where the condition holds, else `b`."""
    def matmul(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Matrix product over the last axis of `a` and the second-to-last of `b`; leading axes broadcast."""
    def integer_matmul(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Matrix product of 8-bit integers, u8 by i8, accumulated in i32."""
    def dequantise(
        self, x: Operand, scale: Operand | None = None, zp: Operand | None = None, *, axis: int | None = None,
        scheme: str | Enum | None = None, out_shape: ShapeLike | None = None
    ) -> Value:
        """Converts quantised numbers to f32, or to f64 if scales are f64.

        Packed blocks contain all they need. Integers i8 and u8 are (x - zp) · scale: one scale for all, or one per index of
        `axis`. With a scheme, `x` is the stored weight. Blocks of integers are [..., k, n] and have scales and zero points
        [..., k / block, n]; two signed int4 share a byte, [..., k, n / 2], low nibble first. 8-bit floats (E4M3 has NaN but
        no infinities, and ends at 448) may have one scale per column. Blocks of NVFP4, packed like int4, have 8-bit floats
        as scales, and one f32 for all as `zp`.
        """
    def quant_scale(
        self, x: Operand, *, axis: int | None = None, scheme: str | Enum | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """The smallest scale with which `quantise` clips nothing: the largest magnitude / 127 (int4: 7).

        Per tensor, per index of `axis`, or per block along k with a scheme. Zeros have a scale of 1e-12. 8-bit floats have
        scales per column (the largest magnitude / 448 or 57344); NVFP4 divides by 6.
        """
    def fake_quantise(
        self, x: Operand, scale: Operand | None = None, *, bits: int = 8, axis: int | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Quantises x to integers of `bits` bits and back, with a symmetric scale per tensor or per index of `axis`.

        Rounds to nearest, ties to even; integers are clipped to ±(2^(bits - 1) - 1). An explicit scale is fixed, learned
        (`fake_quantise_scale_grad`) or follows the numbers (`running_scale`); without one it is computed from x: the
        largest magnitude / (2^(bits - 1) - 1). Scales are at least 1e-12.
        """
    def running_scale(
        self, x: Operand, state: Operand, *, bits: int = 8, axis: int | None = None, decay: float = 0.99,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """The next state of a scale that follows x: decay · state + (1 - decay) · the scale of x alone.

        A state that is not positive is uninitialised and becomes the scale of x. Scales are those of `fake_quantise`.
        """
    def fake_quantise_grad(
        self, x: Operand, dy: Operand, scale: Operand | None = None, *, bits: int = 8, axis: int | None = None,
        ste: str | Enum = 'identity', out_shape: ShapeLike | None = None
    ) -> Value:
        """The gradient of `fake_quantise` for x by a straight-through estimator, since rounding itself has none.

        `identity` is dy; `clipped` is dy where x was not clipped, else 0; with z = x / scale, `tanh` is dy · (1 - tanh(z)²)
        and `hard_tanh` is dy · max(0, 1 - |z| / (2^(bits - 1) - 1)).
        """
    def fake_quantise_scale_grad(
        self, x: Operand, scale: Operand, dy: Operand, *, bits: int = 8, axis: int | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """The gradient of `fake_quantise` for a learned scale (LSQ, Esser et al. 2020, equation 3).

        The sum of dy · (round(z) - z), where z = x / scale; where z is clipped, of dy · ±(2^(bits - 1) - 1).
        """
    def grouped_matmul(self, x: Operand, w: Operand, index: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Row i of `x` times the matrix `w[index[i]]`; other matrices are not read.

        `x` is [rows, k], `w` is [groups, k, n], `index` is [rows]; an index outside the groups is an error at run time.
        Consecutive rows with the same index share one read of their matrix, so many rows are fastest in the order of
        `group_rows`.
        """
    def group_rows(self, index: Operand, *, groups: Size | str, out_shape: Any = None) -> tuple[Value, Value, Value]:
        """Sorts rows by group: the order of rows, its inverse, and the offset of each group.

        The first result says which row comes at each place, group by group, stable within a group. The second one is its
        inverse. Rows of group g are at places `offsets[g]` to `offsets[g + 1]`, the third result. An index outside the
        groups is an error at run time.
        """
    def grouped_outer(
        self, x: Operand, y: Operand, index: Operand, *, groups: Size | str, out_shape: ShapeLike | None = None
    ) -> Value:
        """Per group, the sum of the outer products of its rows, xᵀ y: the gradient of the matrices of `grouped_matmul`.

        `x` is [rows, k], `y` is [rows, n], `index` is [rows]; the result is [groups, k, n], zeros for a group without rows.
        Each row is multiplied once. An index outside the groups is an error at run time.
        """
    def outer_of_runs(self, x: Operand, y: Operand, offsets: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """x[:, s:e] @ y[s:e] from each offset to the next: [k, rows] and [rows, n] give [offsets - 1, k, n]."""
    def layer_norm(
        self, x: Operand, gamma: Operand | None = None, beta: Operand | None = None, *, eps: float = 1e-05,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """(x - mean) / √(variance + eps) · gamma + beta over the last axis."""
    def norm_grad(
        self, x: Operand, dy: Operand, gamma: Operand | None = None, *, kind: str | Enum, eps: float,
        out_shape: Any = None
    ) -> tuple[Value, Value, Value]:
        """Gradients of x, gamma and beta from `dy`, the gradient of the result of `layer_norm` or `rms_norm` (by `kind`).

        Reads x and dy once for the gradient of x, and once for the others. With narrow floats, those of gamma and beta are
        f32.
        """
    def region(self, *xs: Operand | Sequence[Operand], body: Graph, out_shape: Any = None) -> Any:
        """Elementwise ops in one kernel: each element is loaded once, computed in registers, stored once."""
    def prepack(self, *ws: Operand | Sequence[Operand], layout: Layout, out_shape: ShapeLike | None = None) -> Value:
        """Weights, or the left operand of a matmul, in the layout that a target's kernels read."""
    def fused_matmul(
        self, x: Operand, *rest: Operand | Sequence[Operand], body: Graph, weights: int, columns: Size | str,
        layout: Layout | None = None, out_shape: Any = None
    ) -> Any:
        """x times one or two weights, with elementwise work on the sums while they are in registers.

        Operands are x, the weights, then the body's other inputs. `columns` is the width of each product. With a `layout`,
        the weights are one tensor made by `prepack`, and x may have to be packed too; otherwise they are matrices [k, n],
        possibly of 16-bit floats, which are widened to the type of x, or packed rows [n, k], as in files.
        """
    def fused_grouped(
        self, x: Operand, *rest: Operand | Sequence[Operand], body: Graph, weights: int, columns: Size | str,
        layout: Layout | None = None, out_shape: Any = None
    ) -> Any:
        """`fused_matmul` in which each row of x has its own matrix, as in `grouped_matmul`.

        Weights have one more leading axis; after them comes the index into it of each row.
        """
    def residual_norm(
        self, x: Operand, residual: Operand, gamma: Operand | None = None, beta: Operand | None = None, *,
        kind: str | Enum, eps: float, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """x + residual, normalised (`kind` is layer or rms), and the sum itself."""
    def gated_delta_net_with_states(
        self, q: Operand, k: Operand, v: Operand, g: Operand, beta: Operand, state: Operand,
        segments: Operand | None = None, *, state_size: int, chunk: int = 32, out_shape: Any = None
    ) -> tuple[Value, Value, Value, Value]:
        """`gated_delta_net_carry` that also returns the values stored for its gradient.

        These are the state before each chunk of tokens, [batch, heads, chunks, n, n], and the error of each token, v - kᵀ
        S.
        """
    def gated_delta_net_backward(
        self, q: Operand, k: Operand, g: Operand, beta: Operand, states: Operand, misses: Operand, d_out: Operand,
        d_last: Operand, segments: Operand | None = None, *, state_size: int, chunk: int = 32, out_shape: Any = None
    ) -> tuple[Value, Value, Value, Value, Value, Value]:
        """Gradients of q, k, v, g, beta and state of `gated_delta_net_carry`, from those of its results.

        `states` and `misses` are the results of `gated_delta_net_with_states` for the same chunk; states inside a chunk are
        recomputed.
        """
    def gated_linear_attention_carry(
        self, q: Operand, k: Operand, v: Operand, g: Operand, state: Operand, segments: Operand | None = None,
        rows: Operand | None = None, *, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """Gated linear attention; each head has a state matrix S from keys to values. Used by Mamba 2, among others.

        Per token, S = exp(g) S + k ⊗ v, and the output is qᵀ S. q and k are [batch, seq, groups, n], v is [batch, seq,
        heads, m], g (the logarithm of the gate) is [batch, seq, heads]; adjacent heads share a group. Starts from `state`
        [batch, heads, n, m] and also returns the state after the last token. Where the ids `segments` [batch, seq] change
        from one token to the next, S is reset to zero.

        With `rows` [tokens], other operands have the axis `tokens` in place of batch and seq, and the state is
        [rows, heads, n, m]: a token continues from the state of its row, as in `selective_scan_carry`.
        """
    def gather(self, table: Operand, indices: Operand, *, axis: int = 0, out_shape: ShapeLike | None = None) -> Value:
        """Slices of `table` along an axis, one per index, like `np.take`. An index outside it is an error at run time.

        From a packed table only rows can be taken (axis 0 of two); they are returned as f32.
        """
    def scatter_add(
        self, x: Operand, indices: Operand, updates: Operand, *, out_shape: ShapeLike | None = None
    ) -> Value:
        """`x` with row `updates[i]` added to row `indices[i]` of its first axis; equal indices accumulate, in order.

        Takes numbers, as `add` does.
        """
    def scatter(self, x: Operand, indices: Operand, updates: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """`x` with row `indices[i]` of its first axis replaced by row `updates[i]`; of equal indices the last wins."""
    def quantise_rows(self, x: Operand, *, out_shape: Any = None) -> tuple[Value, Value, Value]:
        """x as u8, with a scale and an offset per row of the last axis: x ≈ u8 · scale + offset.

        The offset is the smallest number of the row, the scale (largest - smallest) / 255, at least 1e-12. (x - offset) ·
        (1 / scale) is rounded to the nearest integer, ties to even. The scale of a row with a NaN or an infinity is not
        finite either; its integers are 0.
        """
    def quantised_norm(
        self, x: Operand, residual: Operand | None = None, gamma: Operand | None = None, beta: Operand | None = None,
        even: Operand | None = None, *, kind: str | Enum, eps: float, keep: bool, out_shape: Any = None
    ) -> tuple[Value, ...]:
        """The norm (`kind` is layer or rms) of x, or of x + residual, times `even`, as rows of u8 with scales and offsets.

        With `keep`, the norm itself is the next result, and the sum, if there is one, the last.
        """
    def kv_append(
        self, pool: Operand, new: Operand, positions: Operand, table: Operand, rows: Operand | None = None, *,
        axes: str | Enum = 'phsd', ring: bool = False, out_shape: ShapeLike | None = None
    ) -> Value:
        """Writes each new token to its position of its row in the pool, rounded to the pool's type.

        `axes` is the order of the axes of `pool`: p (pages), h (kv_heads), s (positions per page), d (dim). `table` is
        [rows, blocks] and holds page numbers. `new` is [batch, seq, kv_heads, dim] with `positions` [batch, seq], where
        batch entry b uses row b; or [tokens, kv_heads, dim] with `positions` and `rows` [tokens].

        A negative position is padding and skipped; of equal positions of a row the last wins. A position beyond the
        capacity (blocks · page) is an error at run time, unless the cache is a `ring`, where it overwrites the position one
        capacity earlier. A row or page number that does not exist is an error too, if a token uses it. Rows may share pages
        as long as no token is written there.

        The operand `pool` is consumed: on the CPU the result of appending to a state is the state itself, written in place,
        and its old contents must not be read again. An input, a weight or a constant is copied instead.
        """
    def cached_attention(
        self, q: Operand, keys: Operand, values: Operand, positions: Operand, table: Operand,
        rows: Operand | None = None, *, mask_kind: str | Enum = 'causal', scale: float | None = None,
        softcap: float | None = None, key_axes: str | Enum = 'phsd', value_axes: str | Enum = 'phsd',
        ring: bool = False, out_shape: ShapeLike | None = None
    ) -> Value:
        """softmax(scale · q kᵀ, softcapped and masked) v per head, over the keys and values of cached sequences.

        `q` is [batch, seq, heads, head_dim] with `positions` [batch, seq], or [tokens, heads, head_dim] with `positions`
        and `rows` [tokens]; heads are a multiple of kv_heads. `keys` and `values` are pools of pages of one size with their
        axes in the order of `key_axes` and `value_axes`; `table` [rows, blocks] has the page numbers of both (see
        kv_append). A query attends to the keys of its row up to and including its position, or to the last w of them (mask
        kind sliding(w)); page contents at other positions do not matter. A negative position is padding and gives zeros. A
        position beyond the capacity, a row, or a page that is needed and does not exist is an error at run time. The scale
        defaults to 1/√head_dim.

        `ring` caches require sliding windows. From the oldest key that a query of a row attends to up to the newest query
        of the row there must be at most as many positions as the ring holds; more are an error at run time.
        """
    def cholesky(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Lower triangular L with x = L Lᵀ, from the lower triangle of x; NaN where x is not positive definite."""
    def triangular_solve(
        self, a: Operand, b: Operand, *, lower: bool = True, transpose: bool = False, unit_diagonal: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """x with A x = b, where A is a triangle of `a`, transposed if `transpose`; its diagonal may count as ones."""
    def lu(self, x: Operand, *, out_shape: Any = None) -> tuple[Value, Value, Value]:
        """L and U in one matrix, with x[order] = L U: L has a unit diagonal, which is left out.

        The second result says which row each row was swapped with, in turn; the third is `order`, the rows of x after all
        swaps. Both are i32.
        """
    def qr(self, x: Operand, *, complete: bool = False, out_shape: Any = None) -> tuple[Value, Value]:
        """Q with orthonormal columns and upper triangular R, with x = Q R, by Householder reflections.

        Q has as many columns as the smaller size of x; with `complete`, as many as x has rows.
        """
    def eigh(self, x: Operand, *, out_shape: Any = None) -> tuple[Value, Value]:
        """Eigenvalues, in ascending order, and eigenvectors (columns) of symmetric matrices, from their lower triangle.

        The components of each eigenvector add up to a number that is not negative.
        """
    def orthogonalise(self, w: Operand, v: Operand, *, out_shape: Any = None) -> tuple[Value, Value, Value]:
        """Rotates the rows of `w`, and those of `v` alike, until those of `w` are orthogonal; and their norms.

        The norms are in descending order. One-sided Jacobi rotations.
        """
    def svd(self, x: Operand, *, out_shape: Any = None) -> tuple[Value, Value, Value]:
        """U, the singular values in descending order, and V, with x = U diag(values) Vᵀ, of matrices with rows >= columns.

        The components of each column of V add up to a number that is not negative.
        """
    def cross_entropy(
        self, logits: Operand, labels: Operand, *, ignore_index: int = -100, out_shape: ShapeLike | None = None
    ) -> Value:
        """logsumexp(logits) - logits[label] per row of the last axis: the negative log-probability of the label.

        A row whose label is `ignore_index` has a loss of 0, which a plain mean counts:
        `np.mean(losses, where=rlx.not_equal(labels, -100))` is the mean of the others. Any other label outside the row is
        an error at run time. Narrow floats give f32.
        """
    def cross_entropy_grad(
        self, logits: Operand, labels: Operand, dy: Operand, *, ignore_index: int = -100,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """The gradient of `cross_entropy` for the logits: softmax(logits), minus 1 at the label, times dy of the row.
        """
    def round_blocks(self, x: Operand, *, block: int, out_shape: ShapeLike | None = None) -> Value:
        """x rounded to 8-bit numbers with one scale per `block` of them along the last axis, and back."""
    def random_bits(self, key: Operand, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Value:
        """Random 32-bit words. Element i is word i mod 4 of Philox 4x32-10 at counter i div 4, whatever the shape."""
    def random_uniform(self, key: Operand, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Value:
        """Random f32 numbers in [0, 1): the upper 24 of the 32 bits of `random_bits`, as a fraction."""
    def random_normal(self, key: Operand, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Value:
        """Random f32 numbers from the standard normal distribution (Box and Muller 1958).

        Element i uses two numbers u of `random_uniform`: sqrt(-2 log(1 - u[2i])) cos(2π u[2i + 1]).
        """
    def sum(
        self, x: Operand, *, axis: int | Sequence[int] | None = None, keepdims: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Sum over axes, in the element type of `x`."""
    def prod(
        self, x: Operand, *, axis: int | Sequence[int] | None = None, keepdims: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Product over axes."""
    def mean(
        self, x: Operand, *, axis: int | Sequence[int] | None = None, keepdims: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Mean over axes, of floats; NaN over an empty axis."""
    def max(
        self, x: Operand, *, axis: int | Sequence[int] | None = None, keepdims: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Largest element over axes; NaN if there is one.

        Over an axis that is empty at run time it is the smallest number of the type.
        """
    def min(
        self, x: Operand, *, axis: int | Sequence[int] | None = None, keepdims: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Smallest element over axes; NaN if there is one.

        Over an axis that is empty at run time it is the largest number of the type.
        """
    def argmax(
        self, x: Operand, *, axis: int = -1, keepdims: bool = False, out_shape: ShapeLike | None = None
    ) -> Value:
        """Index of the largest element along an axis, as i32; the first of equals; a NaN counts as largest.

        Along an axis that is empty at run time it is 0.
        """
    def topk(self, x: Operand, *, k: int, out_shape: Any = None) -> tuple[Value, Value]:
        """The `k` largest along the last axis, largest first, and their indices as i32; the first of equals comes first.
        """
    def cumsum(
        self, x: Operand, *, axis: int = -1, exclusive: bool = False, out_shape: ShapeLike | None = None
    ) -> Value:
        """Cumulative sum along an axis; `exclusive` leaves out the element itself. Summed in index order."""
    def optimization_barrier(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """Identity that blocks CSE: passes do not merge computations across it (as in JAX)."""
    def sample_tokens(
        self, logits: Operand, uniform: Operand, temperature: Operand, top_k: Operand, top_p: Operand, min_p: Operand,
        allowed: Operand | None = None, history: Operand | None = None, prompt_length: Operand | None = None,
        repetition_penalty: Operand | None = None, frequency_penalty: Operand | None = None,
        presence_penalty: Operand | None = None, bias_tokens: Operand | None = None, bias: Operand | None = None,
        scored: Operand | None = None, *, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """The next token per row of logits `[rows, vocab]`, and its log-probability under the unmodified logits.

        Settings are arrays `[rows]`. Temperature 0 picks the highest logit, the lowest id among ties; otherwise the token
        is where the cumulative sum of weights, in order of ids, passes `uniform` (in [0, 1)) of the total. Candidates are
        the `top_k` highest (0: all; ties of the last stay), of these the smallest set that weighs `top_p`, of these those
        that weigh at least `min_p` of the heaviest. Weights are integers, 2^42 for the highest logit, so their sums are
        exact and tokens are the same on every device; `uniform` and `top_p` are best f64.

        `allowed`: integer words of bits, token t is bit t mod 32 of i32 word t div 32; other tokens are never picked. If
        the number of words is a symbol, tokens beyond the last word are allowed too, so no words allow all. `bias` is added
        to the logits of `bias_tokens`, both `[rows, m]`. `history`: tokens `[rows, n]`, in any order, of which the first
        `prompt_length` of a row are the prompt's. The repetition penalty counts all of them, frequency and presence only
        those after the prompt. Ids outside the vocabulary are padding. A row whose highest logit is not finite, or that has
        no token left, gives token
        -1 and NaN. If the integer `scored` of a row is 0, its log-probability is NaN and costs nothing.
        """
    def nearest_rows(
        self, queries: Operand, rows: Operand, scales: Operand | None = None, offsets: Operand | None = None,
        among: Operand | None = None, *, k: int, metric: str | Enum = 'dot', out_shape: Any = None
    ) -> tuple[Value, Value]:
        """The `k` rows of a matrix with the highest scores for each query: scores (f32), highest first, and indices (i32).

        `queries` is [..., q, d], `rows` [..., n, d]. The score of a row is its dot product with the query, or minus their
        squared distance (`metric="l2"`), times the row's scale, plus its offset; both are [..., n]. Sums are f32. Of equal
        scores the lower row comes first. Rows with a score of -inf or NaN are left out; places without a row have the score
        -inf and the index -1. With `among`, [..., q, m], only these rows are scored; those that do not exist are left out.
        Rows of i8 take the dot product with the query rounded to integers from -64 to 64, which is exact in integers.
        """
    def selective_scan(
        self, x: Operand, delta: Operand, a: Operand, b: Operand, c: Operand, d: Operand | None = None,
        segments: Operand | None = None, *, state_size: int, out_shape: ShapeLike | None = None
    ) -> Value:
        """Mamba's scan: h = exp(delta a) h + delta b x along the sequence, y = c · h + d x.

        x and delta are [batch, seq, channels], a is [channels, n], b and c are [batch, seq, n], d (optional) is [channels].
        Where the ids `segments` [batch, seq] change from one token to the next, h is reset to zero.
        """
    def selective_scan_carry(
        self, x: Operand, delta: Operand, a: Operand, b: Operand, c: Operand, state: Operand, d: Operand | None = None,
        segments: Operand | None = None, rows: Operand | None = None, *, state_size: int, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """`selective_scan` from `state` [batch, channels, n] that also returns the state after the last token.

        With `rows` [tokens], x and delta are [tokens, channels], b and c are [tokens, n], and the state is [rows, channels,
        n]: a token continues from the state of its row, and a row without tokens keeps its state. Tokens of a row are in
        order, those of different rows may interleave. A negative row is padding, which changes no state and gives zeros; a
        row that does not exist is an error at run time.
        """
    def selective_scan_with_states(
        self, x: Operand, delta: Operand, a: Operand, b: Operand, c: Operand, state: Operand,
        segments: Operand | None = None, *, state_size: int, chunk: int = 32, out_shape: Any = None
    ) -> tuple[Value, Value, Value]:
        """`selective_scan_carry` without d that also returns the state before each chunk, [batch, chunks, n, channels].
        """
    def selective_scan_backward(
        self, x: Operand, delta: Operand, a: Operand, b: Operand, c: Operand, states: Operand, d_out: Operand,
        d_last: Operand, segments: Operand | None = None, *, state_size: int, chunk: int = 32, out_shape: Any = None
    ) -> tuple[Value, Value, Value, Value, Value, Value]:
        """Gradients of x, delta, a, b, c and state of `selective_scan_carry` without d, from those of its results.

        `states` is the result of `selective_scan_with_states` for the same chunk; states inside a chunk are recomputed.
        """
    def transpose(self, x: Operand, *, axes: Sequence[int], out_shape: ShapeLike | None = None) -> Value:
        """Permutes axes: axis i of the result is axis `axes[i]` of `x`."""
    def slice(
        self, x: Operand, *, start: ShapeLike, stop: ShapeLike, step: Sequence[int], out_shape: ShapeLike | None = None
    ) -> Value:
        """Elements start, start + step, ... below stop on each axis; run time checks that bounds lie inside the axis.
        """
    def expand(self, x: Operand, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Value:
        """`x` repeated along its size-1 axes (and new leading ones) to a shape; no data is copied."""
    def assume_equal(self, x: Operand, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Value:
        """`x` with a shape that is equal to its own, axis by axis, which is checked at each run."""
    def concatenate(self, *xs: Operand | Sequence[Operand], axis: int = 0, out_shape: ShapeLike | None = None) -> Value:
        """Tensors joined along an axis; their other sizes are equal."""
    def pad(
        self, x: Operand, *, low: ShapeLike, high: ShapeLike, value: float = 0.0, out_shape: ShapeLike | None = None
    ) -> Value:
        """`x` with `low` elements before and `high` after it on each axis, filled with `value`."""
    def softmax(self, x: Operand, *, axis: int = -1, out_shape: ShapeLike | None = None) -> Value:
        """exp(x) divided by its sum along an axis. A row of only -inf gives NaN."""
    def assign(self, x: Operand, value: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """`value`, in the memory of `x`: sets the next contents of a state."""
    def adamw_update(
        self, p: Operand, m: Operand, v: Operand, grad: Operand, rate: Operand, decay: Operand, root: Operand,
        scale: Operand | None = None, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-08,
        out_shape: Any = None
    ) -> tuple[Value, Value, Value]:
        """One step of AdamW: the new parameter, first moment and second moment, each written in place.

        m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g², with g = scale · grad; then
        p = decay · p - rate · m / (sqrt(v) / root + eps). For step t of a learning rate lr, the numbers are
        rate = lr / (1 - beta1^t), root = sqrt(1 - beta2^t), and decay = 1 - lr · weight_decay.
        """
    def sgd_update(
        self, p: Operand, grad: Operand, rate: Operand, velocity: Operand | None = None, scale: Operand | None = None,
        *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, out_shape: Any = None
    ) -> tuple[Value, ...]:
        """One step of gradient descent: the new parameter, and the new velocity if there is one, written in place.

        g = scale · grad + weight_decay · p, then p = p - rate · g. With a velocity, u = momentum · u + g replaces g in the
        last step, or g + momentum · u if `nesterov`.
        """
    def read_before_update(self, x: Operand, *, out_shape: ShapeLike | None = None) -> Value:
        """A copy of `x` outside states, so that a value computed before a state's update can be read after it."""
    def depends_on(self, x: Operand, *done: Operand | Sequence[Operand], out_shape: ShapeLike | None = None) -> Value:
        """`x`, computed after all of `done`: keeps state updates alive whose results nobody reads."""
    def attention_block(
        self, q: Operand, k: Operand, v: Operand, mask: Operand | None = None, *, num_heads: int, head_dim: int,
        mask_kind: str | Enum = 'none', scale: float | None = None, softcap: float | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Attention over [batch, seq, heads * head_dim], [batch, seq, heads, head_dim] or [batch, heads, seq, head_dim].

        k and v may have fewer heads than q. The result has q's layout. Masks, scale and softcap are those of `attention`.
        """
    def rope_block(
        self, x: Operand, cos: Operand, sin: Operand, positions: Operand | None = None, *, head_dim: int,
        n_rot: int | None = None, out_shape: ShapeLike | None = None
    ) -> Value:
        """Rotate the first `n_rot` elements of each head (default: all) by the angle of its position.

        `x` is [batch, seq, heads * head_dim] or [batch, seq, heads, head_dim]; tables are [positions, n_rot / 2] or wider.
        Positions count from 0 along the sequence, unless passed as [batch, seq].
        """
    def llama_decoder_block(
        self, x: Operand, input_norm: Operand, q: Operand, k: Operand, v: Operand, o: Operand, post_norm: Operand,
        gate: Operand, up: Operand, down: Operand, cos: Operand, sin: Operand, input_beta: Operand | None = None,
        post_beta: Operand | None = None, mask: Operand | None = None, *, num_heads: int, num_kv_heads: int,
        head_dim: int, eps: float, mask_kind: str | Enum = 'causal', out_shape: ShapeLike | None = None
    ) -> Value:
        """A Llama layer without a cache: x + attention(rms_norm x), then + swiglu(rms_norm ·).

        `x` is [batch, seq, hidden], weights are [in, out], tables [positions, head_dim / 2]; positions count from 0.
        """
    def qwen35_mtp_head(
        self, x: Operand, ids: Operand, last: Operand, embed: Operand, hidden_norm: Operand, embed_norm: Operand,
        eh_proj: Operand, input_norm: Operand, q: Operand, k: Operand, v: Operand, o: Operand, q_norm: Operand,
        k_norm: Operand, cos: Operand, sin: Operand, post_norm: Operand, gate: Operand, up: Operand, down: Operand,
        norm: Operand, head: Operand, *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float,
        n_rot: int | None = None, out_shape: ShapeLike | None = None
    ) -> Value:
        """The multi-token-prediction head of Qwen3.5: logits of the token after next, [batch, vocab].

        `x` is the trunk's [batch, seq, hidden], `ids` the token after each of them, `last[b]` the index in row b to predict
        from. Normed embeddings and normed x are concatenated and go through `eh_proj` into one layer of gated attention
        (`q` gives queries and gates, [hidden, heads * 2 * head_dim], adjacent per head; queries and keys are normed per
        head; the first `n_rot` elements are rotated) and SwiGLU, then through `norm` and `head`.
        """
    def linear_stored(
        self, x: Operand, weight: Operand, bias: Operand | None = None, *, activation: str | Enum | None = None,
        transposed: bool = True, heads: int | None = None, out_shape: ShapeLike | None = None
    ) -> Value:
        """activation(x @ weight + bias) with a weight and bias as files store them: quantised, or of any element type.

        They are converted to f32 (f64 if x is f64). The weight is [out, in] if `transposed`, else [in, out]. With `heads`,
        the last axis of the result is split into [..., heads, head_dim].
        """
    def norm(
        self, x: Operand, weight: Operand, bias: Operand | None = None, *, kind: str | Enum, eps: float,
        unit_offset: bool = False, out_shape: ShapeLike | None = None
    ) -> Value:
        """RMSNorm (`kind="rms"`) or LayerNorm (`kind="layer"`) over the last axis, times a stored weight, plus a bias.

        `unit_offset` multiplies by 1 + weight, as in Gemma's files.
        """
    def gated_ffn(
        self, x: Operand, gate: Operand, up: Operand, down: Operand, gate_bias: Operand | None = None,
        up_bias: Operand | None = None, down_bias: Operand | None = None, *, activation: str | Enum = 'silu',
        out_shape: ShapeLike | None = None
    ) -> Value:
        """down(activation(gate(x)) * up(x)) by stored weights [out, in]: SwiGLU, GeGLU and their relatives."""
    def fused_gated_ffn(
        self, x: Operand, both: Operand, down: Operand, both_bias: Operand | None = None,
        down_bias: Operand | None = None, *, activation: str | Enum = 'silu', out_shape: ShapeLike | None = None
    ) -> Value:
        """`gated_ffn` whose gate and up are the two halves of one weight, [2 * inner, in]."""
    def moe_ffn(
        self, x: Operand, router: Operand, gate: Operand, up: Operand, down: Operand,
        shared_router: Operand | None = None, shared_gate: Operand | None = None, shared_up: Operand | None = None,
        shared_down: Operand | None = None, *, chosen: int, normalise: bool = True, activation: str | Enum = 'silu',
        out_shape: ShapeLike | None = None
    ) -> Value:
        """A mixture of experts: the sum of p * gated_ffn(x) over the `chosen` most likely experts of each token.

        `x` is [batch, seq, hidden], `router` [experts, hidden]; expert weights are stacked, [experts, out, in].
        Probabilities are a softmax over all experts; `normalise` rescales those of the chosen ones to sum to 1. With a
        shared expert, which all tokens go through, sigmoid(x @ shared_router.T) * gated_ffn(x) of its weights is added;
        `shared_router` is [1, hidden].
        """
    def patch_embedding(
        self, pixels: Operand, weight: Operand, bias: Operand | None = None, *, out_shape: ShapeLike | None = None
    ) -> Value:
        """One vector per patch: [batch, channels, height, width] to [batch, patches, dim], row by row.

        `weight` is [dim, channels, side, side].
        """
    def split_qkv(self, qkv: Operand, *, num_heads: int, out_shape: Any = None) -> tuple[Value, Value, Value]:
        """Splits a fused projection into queries, keys and values [batch, seq, heads, head_dim]."""
    def normed_heads(
        self, x: Operand, weight: Operand, norm: Operand, bias: Operand | None = None, cos: Operand | None = None,
        sin: Operand | None = None, rows: Operand | None = None, positions: Operand | None = None, *, heads: int,
        eps: float, unit_offset: bool = False, style: str | Enum = 'halves', out_shape: ShapeLike | None = None
    ) -> Value:
        """Queries or keys with a norm of their own: rms_norm(x @ weight.T + bias) per head, [batch, seq, heads, head_dim].

        `weight` is [heads * head_dim, hidden], `norm` [head_dim]; `unit_offset` multiplies by 1 + norm. With `cos` and
        `sin`, heads are rotated after the norm, as in `self_attention`.
        """
    def gated_queries(
        self, x: Operand, weight: Operand, bias: Operand | None = None, norm: Operand | None = None, *, heads: int,
        eps: float = 1e-06, unit_offset: bool = False, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """Queries [batch, seq, heads, head_dim] and the gates of attention's output, [batch, seq, heads * head_dim].

        One weight [heads * 2 * head_dim, hidden] gives the query and then the gate of each head. With `norm` [head_dim],
        queries are normed per head, as in `normed_heads`.
        """
    def self_attention(
        self, q: Operand, k: Operand, v: Operand, mask: Operand | None = None, cos: Operand | None = None,
        sin: Operand | None = None, rows: Operand | None = None, positions: Operand | None = None,
        kept_tokens: Operand | None = None, gate: Operand | None = None, *, mask_kind: str | Enum = 'none',
        scale: float | None = None, softcap: float | None = None, style: str | Enum = 'halves',
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Attention of heads [batch, seq, heads, head_dim], joined to [batch, seq, heads * head_dim].

        With `cos` and `sin` queries and keys are rotated first: by the rows of these tables that `rows` picks, else by
        `positions` (a negative one is padding), else by positions that count from 0. Masks, scale and softcap are those of
        `attention`, styles those of `rope`. `kept_tokens` [batch, seq], true or at least 0.5 except for padding, also hides
        padding; it goes with mask kinds that take no mask. The result is multiplied by sigmoid(gate).
        """
    def cached_self_attention(
        self, q: Operand, k: Operand, v: Operand, keys: Operand, values: Operand, positions: Operand, table: Operand,
        cos: Operand | None = None, sin: Operand | None = None, rows: Operand | None = None,
        token_rows: Operand | None = None, gate: Operand | None = None, *, mask_kind: str | Enum = 'causal',
        scale: float | None = None, softcap: float | None = None, style: str | Enum = 'halves',
        key_axes: str | Enum = 'phsd', value_axes: str | Enum = 'phsd', out_shape: ShapeLike | None = None
    ) -> Value:
        """`self_attention` over a cache: appends k and v at `positions`, then attends over the cache.

        `keys` and `values` are page pools and `table` maps sequences to pages, as in `kv_append`. Pools are written in
        place; with a window they are ring buffers. With `token_rows` [tokens], the batch is one
        sequence of ragged tokens, and `token_rows` is the table row of each. The result is multiplied by sigmoid(gate).
        """
    def attention_pool(
        self, x: Operand, weight: Operand, bias: Operand, probe: Operand, *, heads: int,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Attention of one learned query, `probe` [1, 1, dim], over all tokens: [batch, seq, dim] to [batch, dim].

        `weight` [3 * dim, dim] and `bias` [3 * dim] project to the query, the keys and the values, in this order.
        """
    def mamba_block(
        self, both: Operand, conv: Operand, mix: Operand, step: Operand, step_bias: Operand, rates: Operand,
        skip: Operand, conv_bias: Operand | None = None, conv_state: Operand | None = None,
        state: Operand | None = None, positions: Operand | None = None, token_rows: Operand | None = None, *,
        activation: str | Enum = 'silu', log_rates: bool = True, out_shape: ShapeLike | None = None
    ) -> Value:
        """Mamba between its input and its output projection: scan(activation(conv(x))) * silu(gate).

        `both` is [batch, seq, 2 * inner]: x and the gate. `mix` [rank + 2 * n, inner] projects x to the low-rank step, b
        and c; `step` [inner, rank] and `step_bias` project the step to its full width. `rates` [inner, n] are log decay
        rates unless `log_rates` is false; `skip` [inner] scales the part of x that bypasses the scan.
        """
    def mamba2_block(
        self, mixed: Operand, conv: Operand, step_bias: Operand, rates: Operand, skip: Operand, norm: Operand,
        conv_bias: Operand | None = None, conv_state: Operand | None = None, state: Operand | None = None,
        positions: Operand | None = None, token_rows: Operand | None = None, *, groups: int, eps: float,
        activation: str | Enum = 'silu', log_rates: bool = True, least_step: float = 0.0,
        most_step: float | None = None, norm_groups: int = 1, out_shape: ShapeLike | None = None
    ) -> Value:
        """Mamba 2 between its projections: rms_norm(gated_linear_attention(activation(conv(x))) * silu(gate)).

        `mixed` is [batch, seq, inner + channels + heads]: the gate, the convolution's input (values per head, keys and
        queries per group), and a step per head. `step_bias`, `rates` and `skip` have one number per head, `norm` one per
        channel; the norm is over all channels, or over each of `norm_groups` parts.
        """
    def delta_net_block(
        self, qkv: Operand, z: Operand, b: Operand, a: Operand, conv: Operand, rates: Operand, step_bias: Operand,
        norm: Operand, conv_state: Operand | None = None, state: Operand | None = None,
        positions: Operand | None = None, token_rows: Operand | None = None, *, state_size: int, eps: float,
        tiled: bool = False, activation: str | Enum = 'silu', log_rates: bool = True, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """The gated delta rule (Yang et al., 2024) between its projections: the layer's output, and the state after it.

        `qkv` [batch, seq, channels] are queries, keys and values before the convolution; `z` [batch, seq, heads * size]
        gates the output, after a norm per head; `b` and `a` [batch, seq, heads] determine update strength and decay. Query
        and key heads have `state_size` elements and are shared by adjacent value heads, or, if `tiled`, by every n-th.
        States are square, with the larger of both sizes, zero-padded. Returns [batch, seq, heads * size].
        """
    def quantize(
        self, x: Value, scale: Any = None, zp: Any = None, *, axis: int | None = None, dtype: DTypeLike | None = None,
        scheme: str | None = None, out_shape: Any = None
    ) -> Any:
        """Quantises x to i8, u8 or a scheme's blocks. Without a scale, computes one (`quant_scale`) and returns it too.

        NVFP4 has two: E4M3 scales per block, and one f32 scale that maps the largest of them to 448.
        """
    def dequantize(
        self, x: Operand, scale: Operand | None = None, zp: Operand | None = None, *, axis: int | None = None,
        scheme: str | Enum | None = None, out_shape: ShapeLike | None = None
    ) -> Value:
        """Converts quantised numbers to f32, or to f64 if scales are f64.

        Packed blocks contain all they need. Integers i8 and u8 are (x - zp) · scale: one scale for all, or one per index of
        `axis`. With a scheme, `x` is the stored weight. Blocks of integers are [..., k, n] and have scales and zero points
        [..., k / block, n]; two signed int4 share a byte, [..., k, n / 2], low nibble first. 8-bit floats (E4M3 has NaN but
        no infinities, and ends at 448) may have one scale per column. Blocks of NVFP4, packed like int4, have 8-bit floats
        as scales, and one f32 for all as `zp`.
        """
    def fake_quantize(
        self, x: Operand, scale: Operand | None = None, *, bits: int = 8, axis: int | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Quantises x to integers of `bits` bits and back, with a symmetric scale per tensor or per index of `axis`.

        Rounds to nearest, ties to even; integers are clipped to ±(2^(bits - 1) - 1). An explicit scale is fixed, learned
        (`fake_quantise_scale_grad`) or follows the numbers (`running_scale`); without one it is computed from x: the
        largest magnitude / (2^(bits - 1) - 1). Scales are at least 1e-12.
        """


class GraphOps(_Builders):
    def attention(
        self, q: Operand, k: Operand, v: Operand, mask: Operand | None = None, *, mask_kind: str | Enum = 'none',
        scale: float | None = None, softcap: float | None = None, num_heads: int | None = None,
        head_dim: int | None = None, out_shape: ShapeLike | None = None
    ) -> Value:
        """softmax(scale · q kᵀ, softcapped and masked) v per head.

        `q` is [batch, seq, heads, head_dim], `k` and `v` are [batch, keys, kv_heads, ...], heads a multiple of kv_heads.
        Queries and keys end at the same position. A `custom` mask is [batch, keys]: true or >= 0.5 keeps a key; a `bias`
        [batch, heads, seq, keys] (1 broadcasts) is added to the scores. With `segments`, alone or as in `causal+segments`,
        the mask holds ids [batch, seq], integers in the range of i32, of sequences packed into a row: a query attends to
        keys with its own id; ids below 0 are padding, which attends to nothing and is masked. `near(r)` allows r keys on
        each side. The scale defaults to 1/√head_dim. A query without keys gives zeros. `num_heads` and `head_dim` only
        check the shapes.
        """
    def depthwise_conv1d_causal(
        self, x: Operand, weight: Operand, left_pad: Operand, segments: Operand | None = None, *, kernel_size: int,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """y[t, c] = sum over k of weight[c, k] x[t + k - (kernel_size - 1), c], for each channel c.

        x is [batch, seq, channels]; `left_pad` [batch, kernel_size - 1, channels] holds the previous tokens: zeros at the
        start, otherwise the last tokens of the previous piece. The weight is [channels, kernel_size]; axes of size 1
        between them, as in files, are accepted. With ids `segments` [batch, seq], tokens outside the segment of t count as
        zeros.
        """
    def rms_norm(
        self, x: Operand, gamma: Operand | None = None, beta: Operand | None = None, *, eps: float = 1e-06,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """x / √(mean of squares + eps) · gamma + beta over the last axis."""
    def gated_delta_net(
        self, q: Operand, k: Operand, v: Operand, g: Operand, beta: Operand, segments: Operand | None = None, *,
        state_size: int, out_shape: ShapeLike | None = None
    ) -> Value:
        """Linear attention with the gated delta rule; each head has a state matrix S from keys to values.

        Per token, S = exp(g) S, then S += k ⊗ beta (v - kᵀ S), and the output is qᵀ S / sqrt(state_size). q, k and v are
        [batch, seq, heads, state_size], g (the logarithm of the gate) and beta are [batch, seq, heads]. Where the ids
        `segments` [batch, seq] change from one token to the next, S is reset to zero.
        """
    def gated_delta_net_carry(
        self, q: Operand, k: Operand, v: Operand, g: Operand, beta: Operand, state: Operand,
        segments: Operand | None = None, rows: Operand | None = None, *, state_size: int, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """`gated_delta_net` from `state` [batch, heads, n, n] that also returns the state after the last token.

        With `rows` [tokens], other operands have the axis `tokens` in place of batch and seq, and the state is
        [rows, heads, n, n]: a token continues from the state of its row, as in `selective_scan_carry`.
        """
    def rope(
        self, x: Operand, cos: Operand, sin: Operand, positions: Operand, *, style: str | Enum = 'halves',
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Rotate pairs of each head by the angle of its position.

        `x` is [batch, seq, heads, head_dim], `cos` and `sin` are [positions, n] tables, `positions` is [batch, seq]. The
        first 2n elements of a head are rotated, the rest is copied. Pairs are (i, i + n) in style `halves` and (2i, 2i + 1)
        in style `pairs`.
        """
    def linear(
        self, x: Operand, weight: Operand, bias: Operand | None = None, *, activation: str | Enum | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """activation(x @ weight + bias); `weight` is [in, out]."""
    def linear_fused(
        self, x: Operand, weight: Operand, bias: Operand, *, activation: str | Enum | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """activation(x @ weight + bias) as a single MIR op under every fusion policy."""
    def shared_linear_pair(
        self, x: Operand, first: Operand, second: Operand, *, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """x @ first and x @ second, reading x once."""
    def swiglu_ffn(
        self, x: Operand, up: Operand, gate: Operand, down: Operand, *, out_shape: ShapeLike | None = None
    ) -> Value:
        """(silu(x @ gate) * (x @ up)) @ down."""
    def residual_rms_norm(
        self, x: Operand, residual: Operand, gamma: Operand, beta: Operand | None = None, *, eps: float,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """rms_norm(x + residual)."""


class ModuleOps(_Builders):
    def scan(self, init: Any, body: Graph, length: Size) -> Value:
        """The carry after `length` steps of `body`, which maps a carry to the next one."""
    def while_loop(
        self, init: Any, cond: Graph, body: Graph, *, broadcasts: Sequence[Any] = (), max_steps: int | None = None
    ) -> Any:
        """The carries once `cond` returns false, or after `max_steps` steps; one value, or a tuple for a tuple."""
    def cond(self, predicate: Any, operands: Sequence[Any], then_body: Graph, else_body: Graph) -> Any:
        """The outputs of `then_body` if the predicate is true, else those of `else_body`; only one of them runs."""
    def custom_fn(
        self, inputs: Sequence[Any], fwd_body: Graph, vjp_body: Graph | None = None, jvp_body: Graph | None = None
    ) -> Value:
        """Applies `fwd_body` to the inputs, with custom derivative rules; see the op `custom_fn`."""
    def cast(self, x: Value, dtype: DTypeLike) -> Value:
        """`x` with another element type."""
    def quantise(
        self, x: Value, scale: Any = None, zp: Any = None, *, axis: int | None = None, dtype: DTypeLike | None = None,
        scheme: str | None = None, out_shape: Any = None
    ) -> Any:
        """Quantises x to i8, u8 or a scheme's blocks. Without a scale, computes one (`quant_scale`) and returns it too.

        NVFP4 has two: E4M3 scales per block, and one f32 scale that maps the largest of them to 448.
        """
    def reshape(self, x: Value, shape: ShapeLike) -> Value:
        """`x` with another shape of the same number of elements; one size may be -1."""
    level: str
    nodes: list[Node]
    outputs: tuple[Value, ...]
    limits: dict[str, int]
    fixed: set[str]
    stages: dict[str, Value]
    def append(
        self, op: str, operands: tuple[Value | None, ...], attrs: Mapping[str, Any], types: tuple[TensorType, ...],
        origin: Origin | None = None
    ) -> Node:
        """Append a node whose types are known, for passes and parsers. Users call the ops."""
    def apply(self, op: str, *operands: Any, **attrs: Any) -> Any:
        """Append one op. Numbers and arrays among the operands become constants; result types are inferred."""
    def build(self, op: str, operands: Sequence[Any], attrs: dict[str, Any], origin: Origin | None = None) -> Node:
        """The node that `apply` appends; passes supply the origin."""
    def copy(self) -> Graph:
        """An independent copy of the graph."""
    def custom_fn_multi(
        self, inputs: Sequence[Any], fwd_body: Graph, vjp_body: Graph | None = None, jvp_body: Graph | None = None
    ) -> MultiOutputHandle:
        """`custom_fn` with any number of outputs, of any shapes and types."""
    def fingerprint(self) -> str:
        """A digest of level, ops, attributes, types, edges, outputs and leaf names, stable across processes."""
    def has(self, name: str) -> bool:
        """Whether an input or param has this name."""
    @property
    def inputs(self) -> list[Node]:
        """The inputs and states, in declaration order."""
    def leaf(self, op: str, name: str, shape: ShapeLike | TensorType, like: DTypeLike) -> Value:
        """An input, state or param, by `op`."""
    def one(self, op: str, *operands: Any, **attrs: Any) -> Value:
        """`apply` for an op with one result."""
    @property
    def params(self) -> list[Node]:
        """The weights, in declaration order."""
    @staticmethod
    def parse(text: str) -> Graph:
        """Parses a graph."""
    def reachable(self, values: Iterable[Value]) -> set[Node]:
        """All nodes that `values` depend on."""
    def redeclare(self, leaf: Value, type_: TensorType) -> None:
        """Change the type of an input or param that nothing reads yet; the value stays the same handle."""
    def scan_backward(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: Size, *,
        save_trajectory: bool, out_shape: ShapeLike | None = None
    ) -> Value:
        """The gradient of `init`, by one scan from the last step to the first.

        `trajectory` is the result of `scan_trajectory`. `upstream` is the gradient of all its rows (`save_trajectory`),
        or of the last carry. `body_vjp` takes the inputs of the body and `d_output`, and returns the gradients of the
        carry and of a row of each xs.
        """
    def scan_backward_with_checkpoints(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: int,
        num_checkpoints: int, forward_body: Graph | None = None, *, save_trajectory: bool,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """`scan_backward` from K = `num_checkpoints` carries; those in between are recomputed with `forward_body`.

        `trajectory` is `[K, *carry]`: row k is the carry after the first ceil((k + 1) * length / K) steps. A K of 0 or
        `length` means all rows.
        """
    def scan_backward_xs(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: Size, xs_idx: int,
        *, save_trajectory: bool, out_shape: ShapeLike | None = None
    ) -> Value:
        """The gradient of `xs[xs_idx]`, `[length, *step]`; shares a scan with `scan_backward` of the same operands."""
    def scan_backward_xs_with_checkpoints(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: int, xs_idx: int,
        num_checkpoints: int, forward_body: Graph | None = None, *, save_trajectory: bool,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """`scan_backward_xs` from checkpoints, as in `scan_backward_with_checkpoints`."""
    def scan_checkpointed(self, init: Any, body: Graph, length: int, num_checkpoints: int) -> Value:
        """The result of `scan`. Its gradient stores `num_checkpoints` carries and recomputes the others."""
    def scan_general(
        self, carries: Sequence[Any], body: Graph, length: Size, *, broadcasts: Sequence[Any] = (),
        xs: Sequence[Any] = (), reverse: bool = False, checkpoints: int = 0
    ) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The general scan: returns the last carries, and ys `[length, *y]` stacked from the body's other outputs."""
    def scan_trajectory(self, init: Any, body: Graph, length: Size) -> Value:
        """The carries after each step, `[length, *carry]`; the last row is the result of `scan`."""
    def scan_with_bcasts_and_xs(
        self, init: Any, bcasts: Sequence[Any], xs: Sequence[Any], body: Graph, length: Size
    ) -> Value:
        """`scan_with_xs` with additional inputs that every step sees in full."""
    def scan_with_xs(self, init: Any, xs: Sequence[Any], body: Graph, length: Size) -> Value:
        """`scan` with inputs `[length, *step]`; step t sees row t."""
    def scope(self, origin: Origin) -> AbstractContextManager[None]:
        """Nodes appended inside come from `origin`, overriding their own; the outermost scope wins."""
    def symbols(self) -> list[str]:
        """Names of all symbols in the types of inputs and params, sorted."""
    def text(self, *, full: bool = False, origins: bool = False) -> str:
        """Formats the graph as text that `Graph.parse` reads back; `full` writes out large constants."""
    def users(self) -> dict[Value, list[Node]]:
        """For each value, the nodes that read it, once per use."""
    def verify(self) -> Graph:
        """Raise VerifyError if anything is inconsistent; returns the graph."""


class EmitOps(_Builders):
    def attention(
        self, q: Operand, k: Operand, v: Operand, mask: Operand | None = None, *, mask_kind: str | Enum = 'none',
        scale: float | None = None, softcap: float | None = None, num_heads: int | None = None,
        head_dim: int | None = None, out_shape: ShapeLike | None = None
    ) -> Value:
        """softmax(scale · q kᵀ, softcapped and masked) v per head.

        `q` is [batch, seq, heads, head_dim], `k` and `v` are [batch, keys, kv_heads, ...], heads a multiple of kv_heads.
        Queries and keys end at the same position. A `custom` mask is [batch, keys]: true or >= 0.5 keeps a key; a `bias`
        [batch, heads, seq, keys] (1 broadcasts) is added to the scores. With `segments`, alone or as in `causal+segments`,
        the mask holds ids [batch, seq], integers in the range of i32, of sequences packed into a row: a query attends to
        keys with its own id; ids below 0 are padding, which attends to nothing and is masked. `near(r)` allows r keys on
        each side. The scale defaults to 1/√head_dim. A query without keys gives zeros. `num_heads` and `head_dim` only
        check the shapes.
        """
    def depthwise_conv1d_causal(
        self, x: Operand, weight: Operand, left_pad: Operand, segments: Operand | None = None, *, kernel_size: int,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """y[t, c] = sum over k of weight[c, k] x[t + k - (kernel_size - 1), c], for each channel c.

        x is [batch, seq, channels]; `left_pad` [batch, kernel_size - 1, channels] holds the previous tokens: zeros at the
        start, otherwise the last tokens of the previous piece. The weight is [channels, kernel_size]; axes of size 1
        between them, as in files, are accepted. With ids `segments` [batch, seq], tokens outside the segment of t count as
        zeros.
        """
    def scan(self, init: Any, body: Graph, length: Size) -> Value:
        """The carry after `length` steps of `body`, which maps a carry to the next one."""
    def while_loop(
        self, init: Any, cond: Graph, body: Graph, *, broadcasts: Sequence[Any] = (), max_steps: int | None = None
    ) -> Any:
        """The carries once `cond` returns false, or after `max_steps` steps; one value, or a tuple for a tuple."""
    def cond(self, predicate: Any, operands: Sequence[Any], then_body: Graph, else_body: Graph) -> Any:
        """The outputs of `then_body` if the predicate is true, else those of `else_body`; only one of them runs."""
    def custom_fn(
        self, inputs: Sequence[Any], fwd_body: Graph, vjp_body: Graph | None = None, jvp_body: Graph | None = None
    ) -> Value:
        """Applies `fwd_body` to the inputs, with custom derivative rules; see the op `custom_fn`."""
    def cast(self, x: Value, dtype: DTypeLike) -> Value:
        """`x` with another element type."""
    def quantise(
        self, x: Value, scale: Any = None, zp: Any = None, *, axis: int | None = None, dtype: DTypeLike | None = None,
        scheme: str | None = None, out_shape: Any = None
    ) -> Any:
        """Quantises x to i8, u8 or a scheme's blocks. Without a scale, computes one (`quant_scale`) and returns it too.

        NVFP4 has two: E4M3 scales per block, and one f32 scale that maps the largest of them to 448.
        """
    def dequant_matmul(
        self, x: Value, w: Value, scale: Any = None, zp: Any = None, *, scheme: Any, out_shape: Any = None
    ) -> Value:
        """x times a quantised weight; see the op. A plain param is redeclared if the scheme has GGUF blocks."""
    def rms_norm(
        self, x: Operand, gamma: Operand | None = None, beta: Operand | None = None, *, eps: float = 1e-06,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """x / √(mean of squares + eps) · gamma + beta over the last axis."""
    def gated_delta_net(
        self, q: Operand, k: Operand, v: Operand, g: Operand, beta: Operand, segments: Operand | None = None, *,
        state_size: int, out_shape: ShapeLike | None = None
    ) -> Value:
        """Linear attention with the gated delta rule; each head has a state matrix S from keys to values.

        Per token, S = exp(g) S, then S += k ⊗ beta (v - kᵀ S), and the output is qᵀ S / sqrt(state_size). q, k and v are
        [batch, seq, heads, state_size], g (the logarithm of the gate) and beta are [batch, seq, heads]. Where the ids
        `segments` [batch, seq] change from one token to the next, S is reset to zero.
        """
    def gated_delta_net_carry(
        self, q: Operand, k: Operand, v: Operand, g: Operand, beta: Operand, state: Operand,
        segments: Operand | None = None, rows: Operand | None = None, *, state_size: int, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """`gated_delta_net` from `state` [batch, heads, n, n] that also returns the state after the last token.

        With `rows` [tokens], other operands have the axis `tokens` in place of batch and seq, and the state is
        [rows, heads, n, n]: a token continues from the state of its row, as in `selective_scan_carry`.
        """
    def rope(
        self, x: Operand, cos: Operand, sin: Operand, positions: Operand, *, style: str | Enum = 'halves',
        out_shape: ShapeLike | None = None
    ) -> Value:
        """Rotate pairs of each head by the angle of its position.

        `x` is [batch, seq, heads, head_dim], `cos` and `sin` are [positions, n] tables, `positions` is [batch, seq]. The
        first 2n elements of a head are rotated, the rest is copied. Pairs are (i, i + n) in style `halves` and (2i, 2i + 1)
        in style `pairs`.
        """
    def reshape(self, x: Value, shape: ShapeLike) -> Value:
        """`x` with another shape of the same number of elements; one size may be -1."""
    def linear(
        self, x: Operand, weight: Operand, bias: Operand | None = None, *, activation: str | Enum | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """activation(x @ weight + bias); `weight` is [in, out]."""
    def linear_fused(
        self, x: Operand, weight: Operand, bias: Operand, *, activation: str | Enum | None = None,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """activation(x @ weight + bias) as a single MIR op under every fusion policy."""
    def shared_linear_pair(
        self, x: Operand, first: Operand, second: Operand, *, out_shape: Any = None
    ) -> tuple[Value, Value]:
        """x @ first and x @ second, reading x once."""
    def swiglu_ffn(
        self, x: Operand, up: Operand, gate: Operand, down: Operand, *, out_shape: ShapeLike | None = None
    ) -> Value:
        """(silu(x @ gate) * (x @ up)) @ down."""
    def residual_rms_norm(
        self, x: Operand, residual: Operand, gamma: Operand, beta: Operand | None = None, *, eps: float,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """rms_norm(x + residual)."""
    name: str
    level: str
    nodes: list[Node]
    outputs: tuple[Value, ...]
    limits: dict[str, int]
    fixed: set[str]
    stages: dict[str, Value]
    def append(
        self, op: str, operands: tuple[Value | None, ...], attrs: Mapping[str, Any], types: tuple[TensorType, ...],
        origin: Origin | None = None
    ) -> Node:
        """Append a node whose types are known, for passes and parsers. Users call the ops."""
    def apply(self, op: str, *operands: Any, **attrs: Any) -> Any:
        """Append one op. Numbers and arrays among the operands become constants; result types are inferred."""
    def build(self, op: str, operands: Sequence[Any], attrs: dict[str, Any], origin: Origin | None = None) -> Node:
        """The node that `apply` appends; passes supply the origin."""
    def constant(self, data: Any, dtype: DTypeLike | None = None) -> Value:
        """Numbers embedded in the graph. Python floats are f32 and Python ints i32, unless `dtype` says otherwise."""
    def copy(self) -> Graph:
        """An independent copy of the graph."""
    def custom_fn_multi(
        self, inputs: Sequence[Any], fwd_body: Graph, vjp_body: Graph | None = None, jvp_body: Graph | None = None
    ) -> MultiOutputHandle:
        """`custom_fn` with any number of outputs, of any shapes and types."""
    @staticmethod
    def define(name: str, build: Callable[[GraphModule], Any]) -> GraphModule:
        """Builds an HIR module with a function that takes it and returns its output, or a tuple of outputs."""
    def fingerprint(self) -> str:
        """A digest of level, ops, attributes, types, edges, outputs and leaf names, stable across processes."""
    def has(self, name: str) -> bool:
        """Whether an input or param has this name."""
    @property
    def inputs(self) -> list[Node]:
        """The inputs and states, in declaration order."""
    def leaf(self, op: str, name: str, shape: ShapeLike | TensorType, like: DTypeLike) -> Value:
        """An input, state or param, by `op`."""
    def one(self, op: str, *operands: Any, **attrs: Any) -> Value:
        """`apply` for an op with one result."""
    def param(self, name: str, shape: ShapeLike | TensorType, dtype: DTypeLike = 'f32') -> Value:
        """A weight: set once and kept for all runs."""
    @staticmethod
    def parse(text: str) -> Graph:
        """Parses a graph."""
    def reachable(self, values: Iterable[Value]) -> set[Node]:
        """All nodes that `values` depend on."""
    def redeclare(self, leaf: Value, type_: TensorType) -> None:
        """Change the type of an input or param that nothing reads yet; the value stays the same handle."""
    def scan_backward(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: Size, *,
        save_trajectory: bool, out_shape: ShapeLike | None = None
    ) -> Value:
        """The gradient of `init`, by one scan from the last step to the first.

        `trajectory` is the result of `scan_trajectory`. `upstream` is the gradient of all its rows (`save_trajectory`),
        or of the last carry. `body_vjp` takes the inputs of the body and `d_output`, and returns the gradients of the
        carry and of a row of each xs.
        """
    def scan_backward_with_checkpoints(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: int,
        num_checkpoints: int, forward_body: Graph | None = None, *, save_trajectory: bool,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """`scan_backward` from K = `num_checkpoints` carries; those in between are recomputed with `forward_body`.

        `trajectory` is `[K, *carry]`: row k is the carry after the first ceil((k + 1) * length / K) steps. A K of 0 or
        `length` means all rows.
        """
    def scan_backward_xs(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: Size, xs_idx: int,
        *, save_trajectory: bool, out_shape: ShapeLike | None = None
    ) -> Value:
        """The gradient of `xs[xs_idx]`, `[length, *step]`; shares a scan with `scan_backward` of the same operands."""
    def scan_backward_xs_with_checkpoints(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: int, xs_idx: int,
        num_checkpoints: int, forward_body: Graph | None = None, *, save_trajectory: bool,
        out_shape: ShapeLike | None = None
    ) -> Value:
        """`scan_backward_xs` from checkpoints, as in `scan_backward_with_checkpoints`."""
    def scan_checkpointed(self, init: Any, body: Graph, length: int, num_checkpoints: int) -> Value:
        """The result of `scan`. Its gradient stores `num_checkpoints` carries and recomputes the others."""
    def scan_general(
        self, carries: Sequence[Any], body: Graph, length: Size, *, broadcasts: Sequence[Any] = (),
        xs: Sequence[Any] = (), reverse: bool = False, checkpoints: int = 0
    ) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The general scan: returns the last carries, and ys `[length, *y]` stacked from the body's other outputs."""
    def scan_trajectory(self, init: Any, body: Graph, length: Size) -> Value:
        """The carries after each step, `[length, *carry]`; the last row is the result of `scan`."""
    def scan_with_bcasts_and_xs(
        self, init: Any, bcasts: Sequence[Any], xs: Sequence[Any], body: Graph, length: Size
    ) -> Value:
        """`scan_with_xs` with additional inputs that every step sees in full."""
    def scan_with_xs(self, init: Any, xs: Sequence[Any], body: Graph, length: Size) -> Value:
        """`scan` with inputs `[length, *step]`; step t sees row t."""
    def scope(self, origin: Origin) -> AbstractContextManager[None]:
        """Nodes appended inside come from `origin`, overriding their own; the outermost scope wins."""
    def set_outputs(self, outputs: Iterable[Value] | Value) -> Graph:
        """Set the graph's outputs; returns the graph."""
    def symbols(self) -> list[str]:
        """Names of all symbols in the types of inputs and params, sorted."""
    def text(self, *, full: bool = False, origins: bool = False) -> str:
        """Formats the graph as text that `Graph.parse` reads back; `full` writes out large constants."""
    def users(self) -> dict[Value, list[Node]]:
        """For each value, the nodes that read it, once per use."""
    def verify(self) -> Graph:
        """Raise VerifyError if anything is inconsistent; returns the graph."""


class ValueOps:
    def attention(
        self, k: Operand, v: Operand, mask: Operand | None = None, *, mask_kind: str | Enum = 'none',
        scale: float | None = None, softcap: float | None = None, num_heads: int | None = None,
        head_dim: int | None = None, out_shape: ShapeLike | None = None
    ) -> Self:
        """softmax(scale · q kᵀ, softcapped and masked) v per head.

        `q` is [batch, seq, heads, head_dim], `k` and `v` are [batch, keys, kv_heads, ...], heads a multiple of kv_heads.
        Queries and keys end at the same position. A `custom` mask is [batch, keys]: true or >= 0.5 keeps a key; a `bias`
        [batch, heads, seq, keys] (1 broadcasts) is added to the scores. With `segments`, alone or as in `causal+segments`,
        the mask holds ids [batch, seq], integers in the range of i32, of sequences packed into a row: a query attends to
        keys with its own id; ids below 0 are padding, which attends to nothing and is masked. `near(r)` allows r keys on
        each side. The scale defaults to 1/√head_dim. A query without keys gives zeros. `num_heads` and `head_dim` only
        check the shapes.
        """
    def attention_lse(
        self, k: Operand, v: Operand, mask: Operand | None = None, *, mask_kind: str | Enum = 'none',
        scale: float | None = None, softcap: float | None = None, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """`attention`, and per query the logsumexp of its scores, [batch, heads, seq], -inf without keys.

        The gradient of `attention` stores it instead of the weights. For narrow floats it is f32.
        """
    def attention_grad(
        self, k: Operand, v: Operand, dy: Operand, lse: Operand, delta: Operand, mask: Operand | None = None, *,
        mask_kind: str | Enum = 'none', scale: float | None = None, softcap: float | None = None, out_shape: Any = None
    ) -> tuple[Self, Self, Self]:
        """Gradients of q, k and v from `dy`, the gradient of the result of `attention_lse`.

        `lse` is its second result, `delta` the sum of dy · result per query, minus the gradient of its lse; both are
        [batch, heads, seq]. Weights are recomputed block by block: no memory grows with seq · keys.
        """
    def depthwise_conv1d_causal(
        self, weight: Operand, left_pad: Operand, segments: Operand | None = None, *, kernel_size: int,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """y[t, c] = sum over k of weight[c, k] x[t + k - (kernel_size - 1), c], for each channel c.

        x is [batch, seq, channels]; `left_pad` [batch, kernel_size - 1, channels] holds the previous tokens: zeros at the
        start, otherwise the last tokens of the previous piece. The weight is [channels, kernel_size]; axes of size 1
        between them, as in files, are accepted. With ids `segments` [batch, seq], tokens outside the segment of t count as
        zeros.
        """
    def depthwise_conv1d_causal_carry(
        self, weight: Operand, state: Operand, lengths: Operand | None = None, rows: Operand | None = None, *,
        kernel_size: int, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """`depthwise_conv1d_causal` after the tokens in `state`, and the state after the last token.

        The state has the last kernel_size - 1 tokens, [batch, kernel_size - 1, channels]. The first `lengths[b]` tokens of
        a row count; the rest is padding and does not enter the state.

        With `rows` [tokens] in place of lengths, x is [tokens, channels] and the state is
        [rows, kernel_size - 1, channels]: the previous tokens are those of the same row, as in `selective_scan_carry`.
        """
    def scan(self, body: Graph, length: Size) -> Self:
        """The carry after `length` steps of `body`, which maps a carry to the next one."""
    def while_loop(
        self, cond: Graph, body: Graph, *, broadcasts: Sequence[Any] = (), max_steps: int | None = None
    ) -> Any:
        """The carries once `cond` returns false, or after `max_steps` steps; one value, or a tuple for a tuple."""
    def ended(self, more: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """`x`, a result of a while loop with `max_steps`; an error at run time if `more`, its condition, still holds.
        """
    def cond(self, operands: Sequence[Any], then_body: Graph, else_body: Graph) -> Any:
        """The outputs of `then_body` if the predicate is true, else those of `else_body`; only one of them runs."""
    def conv2d(
        self, weight: Operand, bias: Operand | None = None, *, stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """Cross-correlation of x [batch, channels, height, width] with weight [out, channels / groups, kernel_y, kernel_x].

        `stride`, `padding` (zeros on both sides) and `dilation` are one number, or one per axis.
        """
    def pool2d(
        self, *, kind: str | Enum, kernel: int | Sequence[int], stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0, out_shape: ShapeLike | None = None
    ) -> Self:
        """The largest (`kind` max) or mean number of each window of x [batch, channels, height, width].

        `stride` defaults to the kernel's size. Padding counts as zeros in a mean and never as the largest.
        """
    def conv1d(
        self, weight: Operand, bias: Operand | None = None, *, stride: int = 1, padding: int = 0, dilation: int = 1,
        groups: int = 1, out_shape: ShapeLike | None = None
    ) -> Self:
        """Cross-correlation of x [batch, channels, length] with weight [out, channels / groups, kernel]."""
    def pool1d(
        self, *, kind: str | Enum, kernel: int, stride: int | None = None, padding: int = 0,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """The largest (`kind` max) or mean number of each window of x [batch, channels, length], as `pool2d` does it.
        """
    def custom_fn(self, fwd_body: Graph, vjp_body: Graph | None = None, jvp_body: Graph | None = None) -> Self:
        """Applies `fwd_body` to the inputs, with custom derivative rules; see the op `custom_fn`."""
    def add(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Sum."""
    def sub(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Difference."""
    def mul(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Product."""
    def div(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Quotient of floats; integers use `floor_divide`."""
    def floor_divide(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Quotient of integers, rounded down; a zero divisor gives 0."""
    def mod(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Remainder of integers with the sign of the divisor; a zero divisor gives 0."""
    def pow(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """`a` to the power `b`, for floats."""
    def maximum(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """The larger; NaN if either is NaN."""
    def minimum(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """The smaller; NaN if either is NaN."""
    def equal(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Whether equal."""
    def not_equal(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Whether different."""
    def less(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Whether a < b."""
    def less_equal(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Whether a <= b."""
    def greater(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Whether a > b."""
    def greater_equal(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Whether a >= b."""
    def logical_and(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Both."""
    def logical_or(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Either."""
    def logical_not(self, *, out_shape: ShapeLike | None = None) -> Self:
        """The opposite."""
    def neg(self, *, out_shape: ShapeLike | None = None) -> Self:
        """The negative."""
    def abs(self, *, out_shape: ShapeLike | None = None) -> Self:
        """The magnitude."""
    def exp(self, *, out_shape: ShapeLike | None = None) -> Self:
        """e raised to x."""
    def log(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Natural logarithm."""
    def sqrt(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Square root."""
    def rsqrt(self, *, out_shape: ShapeLike | None = None) -> Self:
        """One over the square root."""
    def sin(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Sine, of angles in radians of any size; NaN of infinities."""
    def cos(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Cosine, of angles in radians of any size; NaN of infinities."""
    def tan(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Tangent, of angles in radians of any size; NaN of infinities."""
    def atan(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Inverse tangent, within ±π/2."""
    def tanh(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Hyperbolic tangent."""
    def relu(self, *, out_shape: ShapeLike | None = None) -> Self:
        """x where positive, else 0."""
    def round(self, *, out_shape: ShapeLike | None = None) -> Self:
        """The nearest whole number; a half goes to the even one."""
    def erf(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Error function."""
    def sigmoid(self, *, out_shape: ShapeLike | None = None) -> Self:
        """1 / (1 + e^-x)."""
    def silu(self, *, out_shape: ShapeLike | None = None) -> Self:
        """x · sigmoid(x), also called swish."""
    def gelu(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Gaussian error linear unit by the error function: x · (1 + erf(x / √2)) / 2."""
    def gelu_tanh(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Gaussian error linear unit by its tanh form: x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    def where(self, a: Operand, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """`a` where the condition holds, else `b`."""
    def matmul(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Matrix product over the last axis of `a` and the second-to-last of `b`; leading axes broadcast."""
    def integer_matmul(self, b: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Matrix product of 8-bit integers, u8 by i8, accumulated in i32."""
    def dequantise(
        self, scale: Operand | None = None, zp: Operand | None = None, *, axis: int | None = None,
        scheme: str | Enum | None = None, out_shape: ShapeLike | None = None
    ) -> Self:
        """Converts quantised numbers to f32, or to f64 if scales are f64.

        Packed blocks contain all they need. Integers i8 and u8 are (x - zp) · scale: one scale for all, or one per index of
        `axis`. With a scheme, `x` is the stored weight. Blocks of integers are [..., k, n] and have scales and zero points
        [..., k / block, n]; two signed int4 share a byte, [..., k, n / 2], low nibble first. 8-bit floats (E4M3 has NaN but
        no infinities, and ends at 448) may have one scale per column. Blocks of NVFP4, packed like int4, have 8-bit floats
        as scales, and one f32 for all as `zp`.
        """
    def quantise(
        self, scale: Any = None, zp: Any = None, *, axis: int | None = None, dtype: DTypeLike | None = None,
        scheme: str | None = None, out_shape: Any = None
    ) -> Any:
        """Quantises x to i8, u8 or a scheme's blocks. Without a scale, computes one (`quant_scale`) and returns it too.

        NVFP4 has two: E4M3 scales per block, and one f32 scale that maps the largest of them to 448.
        """
    def quant_scale(
        self, *, axis: int | None = None, scheme: str | Enum | None = None, out_shape: ShapeLike | None = None
    ) -> Self:
        """The smallest scale with which `quantise` clips nothing: the largest magnitude / 127 (int4: 7).

        Per tensor, per index of `axis`, or per block along k with a scheme. Zeros have a scale of 1e-12. 8-bit floats have
        scales per column (the largest magnitude / 448 or 57344); NVFP4 divides by 6.
        """
    def dequant_matmul(
        self, w: Value, scale: Any = None, zp: Any = None, *, scheme: Any, out_shape: Any = None
    ) -> Self:
        """x times a quantised weight; see the op. A plain param is redeclared if the scheme has GGUF blocks."""
    def fake_quantise(
        self, scale: Operand | None = None, *, bits: int = 8, axis: int | None = None,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """Quantises x to integers of `bits` bits and back, with a symmetric scale per tensor or per index of `axis`.

        Rounds to nearest, ties to even; integers are clipped to ±(2^(bits - 1) - 1). An explicit scale is fixed, learned
        (`fake_quantise_scale_grad`) or follows the numbers (`running_scale`); without one it is computed from x: the
        largest magnitude / (2^(bits - 1) - 1). Scales are at least 1e-12.
        """
    def running_scale(
        self, state: Operand, *, bits: int = 8, axis: int | None = None, decay: float = 0.99,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """The next state of a scale that follows x: decay · state + (1 - decay) · the scale of x alone.

        A state that is not positive is uninitialised and becomes the scale of x. Scales are those of `fake_quantise`.
        """
    def fake_quantise_grad(
        self, dy: Operand, scale: Operand | None = None, *, bits: int = 8, axis: int | None = None,
        ste: str | Enum = 'identity', out_shape: ShapeLike | None = None
    ) -> Self:
        """The gradient of `fake_quantise` for x by a straight-through estimator, since rounding itself has none.

        `identity` is dy; `clipped` is dy where x was not clipped, else 0; with z = x / scale, `tanh` is dy · (1 - tanh(z)²)
        and `hard_tanh` is dy · max(0, 1 - |z| / (2^(bits - 1) - 1)).
        """
    def fake_quantise_scale_grad(
        self, scale: Operand, dy: Operand, *, bits: int = 8, axis: int | None = None, out_shape: ShapeLike | None = None
    ) -> Self:
        """The gradient of `fake_quantise` for a learned scale (LSQ, Esser et al. 2020, equation 3).

        The sum of dy · (round(z) - z), where z = x / scale; where z is clipped, of dy · ±(2^(bits - 1) - 1).
        """
    def grouped_matmul(self, w: Operand, index: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """Row i of `x` times the matrix `w[index[i]]`; other matrices are not read.

        `x` is [rows, k], `w` is [groups, k, n], `index` is [rows]; an index outside the groups is an error at run time.
        Consecutive rows with the same index share one read of their matrix, so many rows are fastest in the order of
        `group_rows`.
        """
    def group_rows(self, *, groups: Size | str, out_shape: Any = None) -> tuple[Self, Self, Self]:
        """Sorts rows by group: the order of rows, its inverse, and the offset of each group.

        The first result says which row comes at each place, group by group, stable within a group. The second one is its
        inverse. Rows of group g are at places `offsets[g]` to `offsets[g + 1]`, the third result. An index outside the
        groups is an error at run time.
        """
    def grouped_outer(
        self, y: Operand, index: Operand, *, groups: Size | str, out_shape: ShapeLike | None = None
    ) -> Self:
        """Per group, the sum of the outer products of its rows, xᵀ y: the gradient of the matrices of `grouped_matmul`.

        `x` is [rows, k], `y` is [rows, n], `index` is [rows]; the result is [groups, k, n], zeros for a group without rows.
        Each row is multiplied once. An index outside the groups is an error at run time.
        """
    def outer_of_runs(self, y: Operand, offsets: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """x[:, s:e] @ y[s:e] from each offset to the next: [k, rows] and [rows, n] give [offsets - 1, k, n]."""
    def layer_norm(
        self, gamma: Operand | None = None, beta: Operand | None = None, *, eps: float = 1e-05,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """(x - mean) / √(variance + eps) · gamma + beta over the last axis."""
    def rms_norm(
        self, gamma: Operand | None = None, beta: Operand | None = None, *, eps: float = 1e-06,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """x / √(mean of squares + eps) · gamma + beta over the last axis."""
    def norm_grad(
        self, dy: Operand, gamma: Operand | None = None, *, kind: str | Enum, eps: float, out_shape: Any = None
    ) -> tuple[Self, Self, Self]:
        """Gradients of x, gamma and beta from `dy`, the gradient of the result of `layer_norm` or `rms_norm` (by `kind`).

        Reads x and dy once for the gradient of x, and once for the others. With narrow floats, those of gamma and beta are
        f32.
        """
    def region(self, *xs: Operand | Sequence[Operand], body: Graph, out_shape: Any = None) -> Any:
        """Elementwise ops in one kernel: each element is loaded once, computed in registers, stored once."""
    def prepack(self, *ws: Operand | Sequence[Operand], layout: Layout, out_shape: ShapeLike | None = None) -> Self:
        """Weights, or the left operand of a matmul, in the layout that a target's kernels read."""
    def fused_matmul(
        self, *rest: Operand | Sequence[Operand], body: Graph, weights: int, columns: Size | str,
        layout: Layout | None = None, out_shape: Any = None
    ) -> Any:
        """x times one or two weights, with elementwise work on the sums while they are in registers.

        Operands are x, the weights, then the body's other inputs. `columns` is the width of each product. With a `layout`,
        the weights are one tensor made by `prepack`, and x may have to be packed too; otherwise they are matrices [k, n],
        possibly of 16-bit floats, which are widened to the type of x, or packed rows [n, k], as in files.
        """
    def fused_grouped(
        self, *rest: Operand | Sequence[Operand], body: Graph, weights: int, columns: Size | str,
        layout: Layout | None = None, out_shape: Any = None
    ) -> Any:
        """`fused_matmul` in which each row of x has its own matrix, as in `grouped_matmul`.

        Weights have one more leading axis; after them comes the index into it of each row.
        """
    def residual_norm(
        self, residual: Operand, gamma: Operand | None = None, beta: Operand | None = None, *, kind: str | Enum,
        eps: float, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """x + residual, normalised (`kind` is layer or rms), and the sum itself."""
    def gated_delta_net(
        self, k: Operand, v: Operand, g: Operand, beta: Operand, segments: Operand | None = None, *, state_size: int,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """Linear attention with the gated delta rule; each head has a state matrix S from keys to values.

        Per token, S = exp(g) S, then S += k ⊗ beta (v - kᵀ S), and the output is qᵀ S / sqrt(state_size). q, k and v are
        [batch, seq, heads, state_size], g (the logarithm of the gate) and beta are [batch, seq, heads]. Where the ids
        `segments` [batch, seq] change from one token to the next, S is reset to zero.
        """
    def gated_delta_net_carry(
        self, k: Operand, v: Operand, g: Operand, beta: Operand, state: Operand, segments: Operand | None = None,
        rows: Operand | None = None, *, state_size: int, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """`gated_delta_net` from `state` [batch, heads, n, n] that also returns the state after the last token.

        With `rows` [tokens], other operands have the axis `tokens` in place of batch and seq, and the state is
        [rows, heads, n, n]: a token continues from the state of its row, as in `selective_scan_carry`.
        """
    def gated_delta_net_with_states(
        self, k: Operand, v: Operand, g: Operand, beta: Operand, state: Operand, segments: Operand | None = None, *,
        state_size: int, chunk: int = 32, out_shape: Any = None
    ) -> tuple[Self, Self, Self, Self]:
        """`gated_delta_net_carry` that also returns the values stored for its gradient.

        These are the state before each chunk of tokens, [batch, heads, chunks, n, n], and the error of each token, v - kᵀ
        S.
        """
    def gated_delta_net_backward(
        self, k: Operand, g: Operand, beta: Operand, states: Operand, misses: Operand, d_out: Operand, d_last: Operand,
        segments: Operand | None = None, *, state_size: int, chunk: int = 32, out_shape: Any = None
    ) -> tuple[Self, Self, Self, Self, Self, Self]:
        """Gradients of q, k, v, g, beta and state of `gated_delta_net_carry`, from those of its results.

        `states` and `misses` are the results of `gated_delta_net_with_states` for the same chunk; states inside a chunk are
        recomputed.
        """
    def gated_linear_attention_carry(
        self, k: Operand, v: Operand, g: Operand, state: Operand, segments: Operand | None = None,
        rows: Operand | None = None, *, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """Gated linear attention; each head has a state matrix S from keys to values. Used by Mamba 2, among others.

        Per token, S = exp(g) S + k ⊗ v, and the output is qᵀ S. q and k are [batch, seq, groups, n], v is [batch, seq,
        heads, m], g (the logarithm of the gate) is [batch, seq, heads]; adjacent heads share a group. Starts from `state`
        [batch, heads, n, m] and also returns the state after the last token. Where the ids `segments` [batch, seq] change
        from one token to the next, S is reset to zero.

        With `rows` [tokens], other operands have the axis `tokens` in place of batch and seq, and the state is
        [rows, heads, n, m]: a token continues from the state of its row, as in `selective_scan_carry`.
        """
    def gather(self, indices: Operand, *, axis: int = 0, out_shape: ShapeLike | None = None) -> Self:
        """Slices of `table` along an axis, one per index, like `np.take`. An index outside it is an error at run time.

        From a packed table only rows can be taken (axis 0 of two); they are returned as f32.
        """
    def scatter_add(self, indices: Operand, updates: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """`x` with row `updates[i]` added to row `indices[i]` of its first axis; equal indices accumulate, in order.

        Takes numbers, as `add` does.
        """
    def scatter(self, indices: Operand, updates: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """`x` with row `indices[i]` of its first axis replaced by row `updates[i]`; of equal indices the last wins."""
    def quantise_rows(self, *, out_shape: Any = None) -> tuple[Self, Self, Self]:
        """x as u8, with a scale and an offset per row of the last axis: x ≈ u8 · scale + offset.

        The offset is the smallest number of the row, the scale (largest - smallest) / 255, at least 1e-12. (x - offset) ·
        (1 / scale) is rounded to the nearest integer, ties to even. The scale of a row with a NaN or an infinity is not
        finite either; its integers are 0.
        """
    def quantised_norm(
        self, residual: Operand | None = None, gamma: Operand | None = None, beta: Operand | None = None,
        even: Operand | None = None, *, kind: str | Enum, eps: float, keep: bool, out_shape: Any = None
    ) -> tuple[Self, ...]:
        """The norm (`kind` is layer or rms) of x, or of x + residual, times `even`, as rows of u8 with scales and offsets.

        With `keep`, the norm itself is the next result, and the sum, if there is one, the last.
        """
    def kv_append(
        self, new: Operand, positions: Operand, table: Operand, rows: Operand | None = None, *,
        axes: str | Enum = 'phsd', ring: bool = False, out_shape: ShapeLike | None = None
    ) -> Self:
        """Writes each new token to its position of its row in the pool, rounded to the pool's type.

        `axes` is the order of the axes of `pool`: p (pages), h (kv_heads), s (positions per page), d (dim). `table` is
        [rows, blocks] and holds page numbers. `new` is [batch, seq, kv_heads, dim] with `positions` [batch, seq], where
        batch entry b uses row b; or [tokens, kv_heads, dim] with `positions` and `rows` [tokens].

        A negative position is padding and skipped; of equal positions of a row the last wins. A position beyond the
        capacity (blocks · page) is an error at run time, unless the cache is a `ring`, where it overwrites the position one
        capacity earlier. A row or page number that does not exist is an error too, if a token uses it. Rows may share pages
        as long as no token is written there.

        The operand `pool` is consumed: on the CPU the result of appending to a state is the state itself, written in place,
        and its old contents must not be read again. An input, a weight or a constant is copied instead.
        """
    def cached_attention(
        self, keys: Operand, values: Operand, positions: Operand, table: Operand, rows: Operand | None = None, *,
        mask_kind: str | Enum = 'causal', scale: float | None = None, softcap: float | None = None,
        key_axes: str | Enum = 'phsd', value_axes: str | Enum = 'phsd', ring: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """softmax(scale · q kᵀ, softcapped and masked) v per head, over the keys and values of cached sequences.

        `q` is [batch, seq, heads, head_dim] with `positions` [batch, seq], or [tokens, heads, head_dim] with `positions`
        and `rows` [tokens]; heads are a multiple of kv_heads. `keys` and `values` are pools of pages of one size with their
        axes in the order of `key_axes` and `value_axes`; `table` [rows, blocks] has the page numbers of both (see
        kv_append). A query attends to the keys of its row up to and including its position, or to the last w of them (mask
        kind sliding(w)); page contents at other positions do not matter. A negative position is padding and gives zeros. A
        position beyond the capacity, a row, or a page that is needed and does not exist is an error at run time. The scale
        defaults to 1/√head_dim.

        `ring` caches require sliding windows. From the oldest key that a query of a row attends to up to the newest query
        of the row there must be at most as many positions as the ring holds; more are an error at run time.
        """
    def cholesky(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Lower triangular L with x = L Lᵀ, from the lower triangle of x; NaN where x is not positive definite."""
    def triangular_solve(
        self, b: Operand, *, lower: bool = True, transpose: bool = False, unit_diagonal: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """x with A x = b, where A is a triangle of `a`, transposed if `transpose`; its diagonal may count as ones."""
    def lu(self, *, out_shape: Any = None) -> tuple[Self, Self, Self]:
        """L and U in one matrix, with x[order] = L U: L has a unit diagonal, which is left out.

        The second result says which row each row was swapped with, in turn; the third is `order`, the rows of x after all
        swaps. Both are i32.
        """
    def qr(self, *, complete: bool = False, out_shape: Any = None) -> tuple[Self, Self]:
        """Q with orthonormal columns and upper triangular R, with x = Q R, by Householder reflections.

        Q has as many columns as the smaller size of x; with `complete`, as many as x has rows.
        """
    def eigh(self, *, out_shape: Any = None) -> tuple[Self, Self]:
        """Eigenvalues, in ascending order, and eigenvectors (columns) of symmetric matrices, from their lower triangle.

        The components of each eigenvector add up to a number that is not negative.
        """
    def orthogonalise(self, v: Operand, *, out_shape: Any = None) -> tuple[Self, Self, Self]:
        """Rotates the rows of `w`, and those of `v` alike, until those of `w` are orthogonal; and their norms.

        The norms are in descending order. One-sided Jacobi rotations.
        """
    def svd(self, *, out_shape: Any = None) -> tuple[Self, Self, Self]:
        """U, the singular values in descending order, and V, with x = U diag(values) Vᵀ, of matrices with rows >= columns.

        The components of each column of V add up to a number that is not negative.
        """
    def cross_entropy(self, labels: Operand, *, ignore_index: int = -100, out_shape: ShapeLike | None = None) -> Self:
        """logsumexp(logits) - logits[label] per row of the last axis: the negative log-probability of the label.

        A row whose label is `ignore_index` has a loss of 0, which a plain mean counts:
        `np.mean(losses, where=rlx.not_equal(labels, -100))` is the mean of the others. Any other label outside the row is
        an error at run time. Narrow floats give f32.
        """
    def cross_entropy_grad(
        self, labels: Operand, dy: Operand, *, ignore_index: int = -100, out_shape: ShapeLike | None = None
    ) -> Self:
        """The gradient of `cross_entropy` for the logits: softmax(logits), minus 1 at the label, times dy of the row.
        """
    def round_blocks(self, *, block: int, out_shape: ShapeLike | None = None) -> Self:
        """x rounded to 8-bit numbers with one scale per `block` of them along the last axis, and back."""
    def random_bits(self, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Self:
        """Random 32-bit words. Element i is word i mod 4 of Philox 4x32-10 at counter i div 4, whatever the shape."""
    def random_uniform(self, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Self:
        """Random f32 numbers in [0, 1): the upper 24 of the 32 bits of `random_bits`, as a fraction."""
    def random_normal(self, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Self:
        """Random f32 numbers from the standard normal distribution (Box and Muller 1958).

        Element i uses two numbers u of `random_uniform`: sqrt(-2 log(1 - u[2i])) cos(2π u[2i + 1]).
        """
    def sum(
        self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, out_shape: ShapeLike | None = None
    ) -> Self:
        """Sum over axes, in the element type of `x`."""
    def prod(
        self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, out_shape: ShapeLike | None = None
    ) -> Self:
        """Product over axes."""
    def mean(
        self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, out_shape: ShapeLike | None = None
    ) -> Self:
        """Mean over axes, of floats; NaN over an empty axis."""
    def max(
        self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, out_shape: ShapeLike | None = None
    ) -> Self:
        """Largest element over axes; NaN if there is one.

        Over an axis that is empty at run time it is the smallest number of the type.
        """
    def min(
        self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, out_shape: ShapeLike | None = None
    ) -> Self:
        """Smallest element over axes; NaN if there is one.

        Over an axis that is empty at run time it is the largest number of the type.
        """
    def argmax(self, *, axis: int = -1, keepdims: bool = False, out_shape: ShapeLike | None = None) -> Self:
        """Index of the largest element along an axis, as i32; the first of equals; a NaN counts as largest.

        Along an axis that is empty at run time it is 0.
        """
    def topk(self, *, k: int, out_shape: Any = None) -> tuple[Self, Self]:
        """The `k` largest along the last axis, largest first, and their indices as i32; the first of equals comes first.
        """
    def cumsum(self, *, axis: int = -1, exclusive: bool = False, out_shape: ShapeLike | None = None) -> Self:
        """Cumulative sum along an axis; `exclusive` leaves out the element itself. Summed in index order."""
    def optimization_barrier(self, *, out_shape: ShapeLike | None = None) -> Self:
        """Identity that blocks CSE: passes do not merge computations across it (as in JAX)."""
    def rope(
        self, cos: Operand, sin: Operand, positions: Operand, *, style: str | Enum = 'halves',
        out_shape: ShapeLike | None = None
    ) -> Self:
        """Rotate pairs of each head by the angle of its position.

        `x` is [batch, seq, heads, head_dim], `cos` and `sin` are [positions, n] tables, `positions` is [batch, seq]. The
        first 2n elements of a head are rotated, the rest is copied. Pairs are (i, i + n) in style `halves` and (2i, 2i + 1)
        in style `pairs`.
        """
    def sample_tokens(
        self, uniform: Operand, temperature: Operand, top_k: Operand, top_p: Operand, min_p: Operand,
        allowed: Operand | None = None, history: Operand | None = None, prompt_length: Operand | None = None,
        repetition_penalty: Operand | None = None, frequency_penalty: Operand | None = None,
        presence_penalty: Operand | None = None, bias_tokens: Operand | None = None, bias: Operand | None = None,
        scored: Operand | None = None, *, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """The next token per row of logits `[rows, vocab]`, and its log-probability under the unmodified logits.

        Settings are arrays `[rows]`. Temperature 0 picks the highest logit, the lowest id among ties; otherwise the token
        is where the cumulative sum of weights, in order of ids, passes `uniform` (in [0, 1)) of the total. Candidates are
        the `top_k` highest (0: all; ties of the last stay), of these the smallest set that weighs `top_p`, of these those
        that weigh at least `min_p` of the heaviest. Weights are integers, 2^42 for the highest logit, so their sums are
        exact and tokens are the same on every device; `uniform` and `top_p` are best f64.

        `allowed`: integer words of bits, token t is bit t mod 32 of i32 word t div 32; other tokens are never picked. If
        the number of words is a symbol, tokens beyond the last word are allowed too, so no words allow all. `bias` is added
        to the logits of `bias_tokens`, both `[rows, m]`. `history`: tokens `[rows, n]`, in any order, of which the first
        `prompt_length` of a row are the prompt's. The repetition penalty counts all of them, frequency and presence only
        those after the prompt. Ids outside the vocabulary are padding. A row whose highest logit is not finite, or that has
        no token left, gives token
        -1 and NaN. If the integer `scored` of a row is 0, its log-probability is NaN and costs nothing.
        """
    def nearest_rows(
        self, rows: Operand, scales: Operand | None = None, offsets: Operand | None = None,
        among: Operand | None = None, *, k: int, metric: str | Enum = 'dot', out_shape: Any = None
    ) -> tuple[Self, Self]:
        """The `k` rows of a matrix with the highest scores for each query: scores (f32), highest first, and indices (i32).

        `queries` is [..., q, d], `rows` [..., n, d]. The score of a row is its dot product with the query, or minus their
        squared distance (`metric="l2"`), times the row's scale, plus its offset; both are [..., n]. Sums are f32. Of equal
        scores the lower row comes first. Rows with a score of -inf or NaN are left out; places without a row have the score
        -inf and the index -1. With `among`, [..., q, m], only these rows are scored; those that do not exist are left out.
        Rows of i8 take the dot product with the query rounded to integers from -64 to 64, which is exact in integers.
        """
    def selective_scan(
        self, delta: Operand, a: Operand, b: Operand, c: Operand, d: Operand | None = None,
        segments: Operand | None = None, *, state_size: int, out_shape: ShapeLike | None = None
    ) -> Self:
        """Mamba's scan: h = exp(delta a) h + delta b x along the sequence, y = c · h + d x.

        x and delta are [batch, seq, channels], a is [channels, n], b and c are [batch, seq, n], d (optional) is [channels].
        Where the ids `segments` [batch, seq] change from one token to the next, h is reset to zero.
        """
    def selective_scan_carry(
        self, delta: Operand, a: Operand, b: Operand, c: Operand, state: Operand, d: Operand | None = None,
        segments: Operand | None = None, rows: Operand | None = None, *, state_size: int, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """`selective_scan` from `state` [batch, channels, n] that also returns the state after the last token.

        With `rows` [tokens], x and delta are [tokens, channels], b and c are [tokens, n], and the state is [rows, channels,
        n]: a token continues from the state of its row, and a row without tokens keeps its state. Tokens of a row are in
        order, those of different rows may interleave. A negative row is padding, which changes no state and gives zeros; a
        row that does not exist is an error at run time.
        """
    def selective_scan_with_states(
        self, delta: Operand, a: Operand, b: Operand, c: Operand, state: Operand, segments: Operand | None = None, *,
        state_size: int, chunk: int = 32, out_shape: Any = None
    ) -> tuple[Self, Self, Self]:
        """`selective_scan_carry` without d that also returns the state before each chunk, [batch, chunks, n, channels].
        """
    def selective_scan_backward(
        self, delta: Operand, a: Operand, b: Operand, c: Operand, states: Operand, d_out: Operand, d_last: Operand,
        segments: Operand | None = None, *, state_size: int, chunk: int = 32, out_shape: Any = None
    ) -> tuple[Self, Self, Self, Self, Self, Self]:
        """Gradients of x, delta, a, b, c and state of `selective_scan_carry` without d, from those of its results.

        `states` is the result of `selective_scan_with_states` for the same chunk; states inside a chunk are recomputed.
        """
    def transpose(self, *, axes: Sequence[int], out_shape: ShapeLike | None = None) -> Self:
        """Permutes axes: axis i of the result is axis `axes[i]` of `x`."""
    def slice(
        self, *, start: ShapeLike, stop: ShapeLike, step: Sequence[int], out_shape: ShapeLike | None = None
    ) -> Self:
        """Elements start, start + step, ... below stop on each axis; run time checks that bounds lie inside the axis.
        """
    def expand(self, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Self:
        """`x` repeated along its size-1 axes (and new leading ones) to a shape; no data is copied."""
    def assume_equal(self, *, shape: ShapeLike, out_shape: ShapeLike | None = None) -> Self:
        """`x` with a shape that is equal to its own, axis by axis, which is checked at each run."""
    def concatenate(self, *xs: Operand | Sequence[Operand], axis: int = 0, out_shape: ShapeLike | None = None) -> Self:
        """Tensors joined along an axis; their other sizes are equal."""
    def pad(self, *, low: ShapeLike, high: ShapeLike, value: float = 0.0, out_shape: ShapeLike | None = None) -> Self:
        """`x` with `low` elements before and `high` after it on each axis, filled with `value`."""
    def softmax(self, *, axis: int = -1, out_shape: ShapeLike | None = None) -> Self:
        """exp(x) divided by its sum along an axis. A row of only -inf gives NaN."""
    def assign(self, value: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """`value`, in the memory of `x`: sets the next contents of a state."""
    def adamw_update(
        self, m: Operand, v: Operand, grad: Operand, rate: Operand, decay: Operand, root: Operand,
        scale: Operand | None = None, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-08,
        out_shape: Any = None
    ) -> tuple[Self, Self, Self]:
        """One step of AdamW: the new parameter, first moment and second moment, each written in place.

        m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g², with g = scale · grad; then
        p = decay · p - rate · m / (sqrt(v) / root + eps). For step t of a learning rate lr, the numbers are
        rate = lr / (1 - beta1^t), root = sqrt(1 - beta2^t), and decay = 1 - lr · weight_decay.
        """
    def sgd_update(
        self, grad: Operand, rate: Operand, velocity: Operand | None = None, scale: Operand | None = None, *,
        momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, out_shape: Any = None
    ) -> tuple[Self, ...]:
        """One step of gradient descent: the new parameter, and the new velocity if there is one, written in place.

        g = scale · grad + weight_decay · p, then p = p - rate · g. With a velocity, u = momentum · u + g replaces g in the
        last step, or g + momentum · u if `nesterov`.
        """
    def read_before_update(self, *, out_shape: ShapeLike | None = None) -> Self:
        """A copy of `x` outside states, so that a value computed before a state's update can be read after it."""
    def depends_on(self, *done: Operand | Sequence[Operand], out_shape: ShapeLike | None = None) -> Self:
        """`x`, computed after all of `done`: keeps state updates alive whose results nobody reads."""
    def linear(
        self, weight: Operand, bias: Operand | None = None, *, activation: str | Enum | None = None,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """activation(x @ weight + bias); `weight` is [in, out]."""
    def linear_fused(
        self, weight: Operand, bias: Operand, *, activation: str | Enum | None = None,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """activation(x @ weight + bias) as a single MIR op under every fusion policy."""
    def shared_linear_pair(self, first: Operand, second: Operand, *, out_shape: Any = None) -> tuple[Self, Self]:
        """x @ first and x @ second, reading x once."""
    def swiglu_ffn(self, up: Operand, gate: Operand, down: Operand, *, out_shape: ShapeLike | None = None) -> Self:
        """(silu(x @ gate) * (x @ up)) @ down."""
    def residual_rms_norm(
        self, residual: Operand, gamma: Operand, beta: Operand | None = None, *, eps: float,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """rms_norm(x + residual)."""
    def attention_block(
        self, k: Operand, v: Operand, mask: Operand | None = None, *, num_heads: int, head_dim: int,
        mask_kind: str | Enum = 'none', scale: float | None = None, softcap: float | None = None,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """Attention over [batch, seq, heads * head_dim], [batch, seq, heads, head_dim] or [batch, heads, seq, head_dim].

        k and v may have fewer heads than q. The result has q's layout. Masks, scale and softcap are those of `attention`.
        """
    def rope_block(
        self, cos: Operand, sin: Operand, positions: Operand | None = None, *, head_dim: int, n_rot: int | None = None,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """Rotate the first `n_rot` elements of each head (default: all) by the angle of its position.

        `x` is [batch, seq, heads * head_dim] or [batch, seq, heads, head_dim]; tables are [positions, n_rot / 2] or wider.
        Positions count from 0 along the sequence, unless passed as [batch, seq].
        """
    def llama_decoder_block(
        self, input_norm: Operand, q: Operand, k: Operand, v: Operand, o: Operand, post_norm: Operand, gate: Operand,
        up: Operand, down: Operand, cos: Operand, sin: Operand, input_beta: Operand | None = None,
        post_beta: Operand | None = None, mask: Operand | None = None, *, num_heads: int, num_kv_heads: int,
        head_dim: int, eps: float, mask_kind: str | Enum = 'causal', out_shape: ShapeLike | None = None
    ) -> Self:
        """A Llama layer without a cache: x + attention(rms_norm x), then + swiglu(rms_norm ·).

        `x` is [batch, seq, hidden], weights are [in, out], tables [positions, head_dim / 2]; positions count from 0.
        """
    def qwen35_mtp_head(
        self, ids: Operand, last: Operand, embed: Operand, hidden_norm: Operand, embed_norm: Operand, eh_proj: Operand,
        input_norm: Operand, q: Operand, k: Operand, v: Operand, o: Operand, q_norm: Operand, k_norm: Operand,
        cos: Operand, sin: Operand, post_norm: Operand, gate: Operand, up: Operand, down: Operand, norm: Operand,
        head: Operand, *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, n_rot: int | None = None,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """The multi-token-prediction head of Qwen3.5: logits of the token after next, [batch, vocab].

        `x` is the trunk's [batch, seq, hidden], `ids` the token after each of them, `last[b]` the index in row b to predict
        from. Normed embeddings and normed x are concatenated and go through `eh_proj` into one layer of gated attention
        (`q` gives queries and gates, [hidden, heads * 2 * head_dim], adjacent per head; queries and keys are normed per
        head; the first `n_rot` elements are rotated) and SwiGLU, then through `norm` and `head`.
        """
    def linear_stored(
        self, weight: Operand, bias: Operand | None = None, *, activation: str | Enum | None = None,
        transposed: bool = True, heads: int | None = None, out_shape: ShapeLike | None = None
    ) -> Self:
        """activation(x @ weight + bias) with a weight and bias as files store them: quantised, or of any element type.

        They are converted to f32 (f64 if x is f64). The weight is [out, in] if `transposed`, else [in, out]. With `heads`,
        the last axis of the result is split into [..., heads, head_dim].
        """
    def norm(
        self, weight: Operand, bias: Operand | None = None, *, kind: str | Enum, eps: float, unit_offset: bool = False,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """RMSNorm (`kind="rms"`) or LayerNorm (`kind="layer"`) over the last axis, times a stored weight, plus a bias.

        `unit_offset` multiplies by 1 + weight, as in Gemma's files.
        """
    def gated_ffn(
        self, gate: Operand, up: Operand, down: Operand, gate_bias: Operand | None = None,
        up_bias: Operand | None = None, down_bias: Operand | None = None, *, activation: str | Enum = 'silu',
        out_shape: ShapeLike | None = None
    ) -> Self:
        """down(activation(gate(x)) * up(x)) by stored weights [out, in]: SwiGLU, GeGLU and their relatives."""
    def fused_gated_ffn(
        self, both: Operand, down: Operand, both_bias: Operand | None = None, down_bias: Operand | None = None, *,
        activation: str | Enum = 'silu', out_shape: ShapeLike | None = None
    ) -> Self:
        """`gated_ffn` whose gate and up are the two halves of one weight, [2 * inner, in]."""
    def moe_ffn(
        self, router: Operand, gate: Operand, up: Operand, down: Operand, shared_router: Operand | None = None,
        shared_gate: Operand | None = None, shared_up: Operand | None = None, shared_down: Operand | None = None, *,
        chosen: int, normalise: bool = True, activation: str | Enum = 'silu', out_shape: ShapeLike | None = None
    ) -> Self:
        """A mixture of experts: the sum of p * gated_ffn(x) over the `chosen` most likely experts of each token.

        `x` is [batch, seq, hidden], `router` [experts, hidden]; expert weights are stacked, [experts, out, in].
        Probabilities are a softmax over all experts; `normalise` rescales those of the chosen ones to sum to 1. With a
        shared expert, which all tokens go through, sigmoid(x @ shared_router.T) * gated_ffn(x) of its weights is added;
        `shared_router` is [1, hidden].
        """
    def patch_embedding(
        self, weight: Operand, bias: Operand | None = None, *, out_shape: ShapeLike | None = None
    ) -> Self:
        """One vector per patch: [batch, channels, height, width] to [batch, patches, dim], row by row.

        `weight` is [dim, channels, side, side].
        """
    def split_qkv(self, *, num_heads: int, out_shape: Any = None) -> tuple[Self, Self, Self]:
        """Splits a fused projection into queries, keys and values [batch, seq, heads, head_dim]."""
    def normed_heads(
        self, weight: Operand, norm: Operand, bias: Operand | None = None, cos: Operand | None = None,
        sin: Operand | None = None, rows: Operand | None = None, positions: Operand | None = None, *, heads: int,
        eps: float, unit_offset: bool = False, style: str | Enum = 'halves', out_shape: ShapeLike | None = None
    ) -> Self:
        """Queries or keys with a norm of their own: rms_norm(x @ weight.T + bias) per head, [batch, seq, heads, head_dim].

        `weight` is [heads * head_dim, hidden], `norm` [head_dim]; `unit_offset` multiplies by 1 + norm. With `cos` and
        `sin`, heads are rotated after the norm, as in `self_attention`.
        """
    def gated_queries(
        self, weight: Operand, bias: Operand | None = None, norm: Operand | None = None, *, heads: int,
        eps: float = 1e-06, unit_offset: bool = False, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """Queries [batch, seq, heads, head_dim] and the gates of attention's output, [batch, seq, heads * head_dim].

        One weight [heads * 2 * head_dim, hidden] gives the query and then the gate of each head. With `norm` [head_dim],
        queries are normed per head, as in `normed_heads`.
        """
    def self_attention(
        self, k: Operand, v: Operand, mask: Operand | None = None, cos: Operand | None = None,
        sin: Operand | None = None, rows: Operand | None = None, positions: Operand | None = None,
        kept_tokens: Operand | None = None, gate: Operand | None = None, *, mask_kind: str | Enum = 'none',
        scale: float | None = None, softcap: float | None = None, style: str | Enum = 'halves',
        out_shape: ShapeLike | None = None
    ) -> Self:
        """Attention of heads [batch, seq, heads, head_dim], joined to [batch, seq, heads * head_dim].

        With `cos` and `sin` queries and keys are rotated first: by the rows of these tables that `rows` picks, else by
        `positions` (a negative one is padding), else by positions that count from 0. Masks, scale and softcap are those of
        `attention`, styles those of `rope`. `kept_tokens` [batch, seq], true or at least 0.5 except for padding, also hides
        padding; it goes with mask kinds that take no mask. The result is multiplied by sigmoid(gate).
        """
    def cached_self_attention(
        self, k: Operand, v: Operand, keys: Operand, values: Operand, positions: Operand, table: Operand,
        cos: Operand | None = None, sin: Operand | None = None, rows: Operand | None = None,
        token_rows: Operand | None = None, gate: Operand | None = None, *, mask_kind: str | Enum = 'causal',
        scale: float | None = None, softcap: float | None = None, style: str | Enum = 'halves',
        key_axes: str | Enum = 'phsd', value_axes: str | Enum = 'phsd', out_shape: ShapeLike | None = None
    ) -> Self:
        """`self_attention` over a cache: appends k and v at `positions`, then attends over the cache.

        `keys` and `values` are page pools and `table` maps sequences to pages, as in `kv_append`. Pools are written in
        place; with a window they are ring buffers. With `token_rows` [tokens], the batch is one
        sequence of ragged tokens, and `token_rows` is the table row of each. The result is multiplied by sigmoid(gate).
        """
    def attention_pool(
        self, weight: Operand, bias: Operand, probe: Operand, *, heads: int, out_shape: ShapeLike | None = None
    ) -> Self:
        """Attention of one learned query, `probe` [1, 1, dim], over all tokens: [batch, seq, dim] to [batch, dim].

        `weight` [3 * dim, dim] and `bias` [3 * dim] project to the query, the keys and the values, in this order.
        """
    def mamba_block(
        self, conv: Operand, mix: Operand, step: Operand, step_bias: Operand, rates: Operand, skip: Operand,
        conv_bias: Operand | None = None, conv_state: Operand | None = None, state: Operand | None = None,
        positions: Operand | None = None, token_rows: Operand | None = None, *, activation: str | Enum = 'silu',
        log_rates: bool = True, out_shape: ShapeLike | None = None
    ) -> Self:
        """Mamba between its input and its output projection: scan(activation(conv(x))) * silu(gate).

        `both` is [batch, seq, 2 * inner]: x and the gate. `mix` [rank + 2 * n, inner] projects x to the low-rank step, b
        and c; `step` [inner, rank] and `step_bias` project the step to its full width. `rates` [inner, n] are log decay
        rates unless `log_rates` is false; `skip` [inner] scales the part of x that bypasses the scan.
        """
    def mamba2_block(
        self, conv: Operand, step_bias: Operand, rates: Operand, skip: Operand, norm: Operand,
        conv_bias: Operand | None = None, conv_state: Operand | None = None, state: Operand | None = None,
        positions: Operand | None = None, token_rows: Operand | None = None, *, groups: int, eps: float,
        activation: str | Enum = 'silu', log_rates: bool = True, least_step: float = 0.0,
        most_step: float | None = None, norm_groups: int = 1, out_shape: ShapeLike | None = None
    ) -> Self:
        """Mamba 2 between its projections: rms_norm(gated_linear_attention(activation(conv(x))) * silu(gate)).

        `mixed` is [batch, seq, inner + channels + heads]: the gate, the convolution's input (values per head, keys and
        queries per group), and a step per head. `step_bias`, `rates` and `skip` have one number per head, `norm` one per
        channel; the norm is over all channels, or over each of `norm_groups` parts.
        """
    def delta_net_block(
        self, z: Operand, b: Operand, a: Operand, conv: Operand, rates: Operand, step_bias: Operand, norm: Operand,
        conv_state: Operand | None = None, state: Operand | None = None, positions: Operand | None = None,
        token_rows: Operand | None = None, *, state_size: int, eps: float, tiled: bool = False,
        activation: str | Enum = 'silu', log_rates: bool = True, out_shape: Any = None
    ) -> tuple[Self, Self]:
        """The gated delta rule (Yang et al., 2024) between its projections: the layer's output, and the state after it.

        `qkv` [batch, seq, channels] are queries, keys and values before the convolution; `z` [batch, seq, heads * size]
        gates the output, after a norm per head; `b` and `a` [batch, seq, heads] determine update strength and decay. Query
        and key heads have `state_size` elements and are shared by adjacent value heads, or, if `tiled`, by every n-th.
        States are square, with the larger of both sizes, zero-padded. Returns [batch, seq, heads * size].
        """
    def quantize(
        self, scale: Any = None, zp: Any = None, *, axis: int | None = None, dtype: DTypeLike | None = None,
        scheme: str | None = None, out_shape: Any = None
    ) -> Any:
        """Quantises x to i8, u8 or a scheme's blocks. Without a scale, computes one (`quant_scale`) and returns it too.

        NVFP4 has two: E4M3 scales per block, and one f32 scale that maps the largest of them to 448.
        """
    def dequantize(
        self, scale: Operand | None = None, zp: Operand | None = None, *, axis: int | None = None,
        scheme: str | Enum | None = None, out_shape: ShapeLike | None = None
    ) -> Self:
        """Converts quantised numbers to f32, or to f64 if scales are f64.

        Packed blocks contain all they need. Integers i8 and u8 are (x - zp) · scale: one scale for all, or one per index of
        `axis`. With a scheme, `x` is the stored weight. Blocks of integers are [..., k, n] and have scales and zero points
        [..., k / block, n]; two signed int4 share a byte, [..., k, n / 2], low nibble first. 8-bit floats (E4M3 has NaN but
        no infinities, and ends at 448) may have one scale per column. Blocks of NVFP4, packed like int4, have 8-bit floats
        as scales, and one f32 for all as `zp`.
        """
    def fake_quantize(
        self, scale: Operand | None = None, *, bits: int = 8, axis: int | None = None,
        out_shape: ShapeLike | None = None
    ) -> Self:
        """Quantises x to integers of `bits` bits and back, with a symmetric scale per tensor or per index of `axis`.

        Rounds to nearest, ties to even; integers are clipped to ±(2^(bits - 1) - 1). An explicit scale is fixed, learned
        (`fake_quantise_scale_grad`) or follows the numbers (`running_scale`); without one it is computed from x: the
        largest magnitude / (2^(bits - 1) - 1). Scales are at least 1e-12.
        """


class FlowValueOps(ValueOps):
    index: int
    node: Node
    def astype(self, like: DTypeLike) -> Self:
        """Casts to another element type."""
    def cast(self, dtype: DTypeLike) -> Self:
        """The same as `astype`."""
    @property
    def dtype(self) -> DType:
        """The element type."""
    @property
    def graph(self) -> Graph:
        """The graph that the value belongs to."""
    @property
    def mT(self) -> Self:
        """Swaps the last two axes."""
    @property
    def ndim(self) -> int:
        """The same as `rank`, as NumPy calls it."""
    @property
    def rank(self) -> int:
        """The number of axes."""
    def reshape(self, *shape: Any) -> Self:
        """Changes the shape; one size may be -1."""
    @property
    def type(self) -> TensorType:
        """Shape and element type."""
