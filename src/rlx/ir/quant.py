"""Builders for quantised weights on `Graph`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.dtypes import U8, DTypeLike
from rlx.dtypes import dtype as as_dtype
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.builders import builder
from rlx.quant_schemes import QuantScheme
from rlx.types import Size, TensorType

if TYPE_CHECKING:
    from rlx.ir.value import Value


class QuantBuilders:
    """Mixin of `Graph`: builders that infer more than an op can."""

    if TYPE_CHECKING:

        def redeclare(self, leaf: Value, type_: TensorType) -> None: ...

        def one(self, op: str, *operands: Any, **attrs: Any) -> Value: ...

    @builder
    def quantise(
        self, x: Value, scale: Any = None, zp: Any = None, *, axis: int | None = None, dtype: DTypeLike | None = None,
        scheme: str | None = None, out_shape: Any = None,
    ) -> Any:  # fmt: skip
        """Quantises x to i8, u8 or a scheme's blocks. Without a scale, computes one (`quant_scale`) and returns it too.

        NVFP4 has two: E4M3 scales per block, and one f32 scale that maps the largest of them to 448.
        """
        where = {key: value for key, value in (("axis", axis), ("scheme", scheme)) if value is not None}
        attrs: dict[str, Any] = where if dtype is None else where | {"dtype": dtype}
        if scale is not None:
            return self.one("quantise", x, scale, zp, **attrs, out_shape=out_shape)
        if zp is not None:
            raise GraphError("quantise: has a zp, but no scale", hint="quantise(x, scale, zp)")
        if dtype is not None and as_dtype(dtype) is U8:
            raise GraphError(
                "quantise: u8 needs a scale and a zp, only those of i8 are found", hint="quantise(x, scale, zp)"
            )
        scale = self.one("quant_scale", x, **where)
        if scheme != QuantScheme.NVFP4:
            return self.one("quantise", x, scale, **attrs, out_shape=out_shape), scale
        tensor_scale = self.one("max", scale, axis=tuple(range(scale.rank))) / 448.0
        block_scales = self.one("quantise", scale, tensor_scale, scheme=QuantScheme.FP8_E4M3)
        return (
            self.one("quantise", x, block_scales, tensor_scale, **attrs, out_shape=out_shape),
            block_scales,
            tensor_scale,
        )

    def dequant_matmul(
        self, x: Value, w: Value, scale: Any = None, zp: Any = None, *, scheme: Any, out_shape: Any = None
    ) -> Value:
        """x times a quantised weight; see the op. A plain param is redeclared if the scheme has GGUF blocks."""
        parsed = QuantScheme(scheme)
        if parsed.packed is not None and not w.dtype.is_packed:
            self._retype(x, w, parsed)
        elif parsed.packed is None and w.rank == 1:
            w = _as_matrix(x, w, parsed)
        return self.one("dequant_matmul", x, w, scale, zp, scheme=parsed, out_shape=out_shape)

    def _retype(self, x: Value, w: Value, scheme: QuantScheme) -> None:
        """Redeclare a param as packed rows [n, k]: k comes from x, n from the declaration."""
        where, packed = "dequant_matmul", scheme.packed
        assert packed is not None
        if w.node.op != "param":
            raise DTypeError(f"{where}: w is {w.type}, expected {packed}[n, k] or a param")
        k = x.shape[-1] if x.rank else 0
        if not isinstance(k, int) or k % packed.block:
            raise ShapeError(f"{where}: k is {k}, not whole blocks of {packed.block} ({scheme})")
        rows = _rows(w.type, k, scheme)
        try:
            self.redeclare(w, TensorType((rows, k), packed))
        except GraphError as error:
            hint = f"declare it as it is: g.param({w.node.attrs['name']!r}, (n, {k}), {packed.name!r})"
            raise DTypeError(f"{where}: {error}", hint=hint) from None


def _rows(declared: TensorType, k: int, scheme: QuantScheme) -> Size:
    """n of a param declared as [n, k], as [k, n], or as the bytes of its rows."""
    row = k // scheme.block * scheme.block_bytes
    shape = declared.shape
    if len(shape) == 2 and shape[1] == k:
        return shape[0]
    if len(shape) == 2 and shape[0] == k:
        return shape[1]
    if declared.dtype is U8 and len(shape) == 2 and shape[1] == row:
        return shape[0]
    if declared.dtype is U8 and len(shape) == 1 and isinstance(shape[0], int) and row and shape[0] % row == 0:
        return shape[0] // row
    raise ShapeError(f"dequant_matmul: w is {declared}, expected [n, {k}], or u8[n, {row}] for the bytes of {scheme}")


def _as_matrix(x: Value, w: Value, scheme: QuantScheme) -> Value:
    """Reshapes the bytes of a flat weight to [k, n / elements per byte]."""
    k, size = x.shape[-1] if x.rank else 0, w.shape[0]
    if not isinstance(k, int) or not isinstance(size, int) or k == 0 or size % k:
        raise ShapeError(f"dequant_matmul: w is {w.type}, not {k} rows of bytes ({scheme})")
    return w.reshape(k, size // k)
