"""Builders of quantised weights on `Graph`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.dtypes import U8, dtype
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.quant_schemes import QuantScheme
from rlx.types import Size, TensorType

if TYPE_CHECKING:
    from rlx.ir.value import Value


class QuantBuilders:
    """What `Graph` inherits: builders that find out more than an op could."""

    if TYPE_CHECKING:

        def redeclare(self, leaf: Value, type_: TensorType) -> None: ...

        def one(self, op: str, *operands: Any, **attrs: Any) -> Value: ...

    def quantise(self, x: Value, scale: Any = None, zp: Any = None, **attrs: Any) -> Any:
        """x in i8, u8 or a scheme's blocks. Without a scale, one is found (`quant_scale`): the result is both.

        NVFP4 has two: E4M3 scales of blocks, and one f32 by which the largest of these is 448.
        """
        if scale is not None:
            return self.one("quantise", x, scale, zp, **attrs)
        if zp is not None:
            raise GraphError("quantise: has a zp, but no scale", hint="quantise(x, scale, zp)")
        if attrs.get("dtype") is not None and dtype(attrs["dtype"]) is U8:
            raise GraphError(
                "quantise: u8 needs a scale and a zp, only those of i8 are found", hint="quantise(x, scale, zp)"
            )
        found = self.one("quant_scale", x, **{k: v for k, v in attrs.items() if k in ("axis", "scheme")})
        if attrs.get("scheme") != QuantScheme.NVFP4:
            return self.one("quantise", x, found, **attrs), found
        whole = self.one("max", found, axis=tuple(range(found.rank))) / 448.0
        small = self.one("quantise", found, whole, scheme=QuantScheme.FP8_E4M3)
        return self.one("quantise", x, small, whole, **attrs), small, whole

    def dequant_matmul(
        self, x: Value, w: Value, scale: Any = None, zp: Any = None, *, scheme: Any, out_shape: Any = None
    ) -> Value:
        """x times a quantised weight; see the op. A plain param that is to hold GGUF blocks is made to do so."""
        given = QuantScheme(scheme)
        if given.packed is not None and not w.dtype.is_packed:
            self._retype(x, w, given)
        elif given.packed is None and w.rank == 1:
            w = _as_matrix(x, w, given)
        return self.one("dequant_matmul", x, w, scale, zp, scheme=given, out_shape=out_shape)

    def _retype(self, x: Value, w: Value, scheme: QuantScheme) -> None:
        """Make a param packed rows [n, k]: k is that of x, and what is declared tells n."""
        where, packed = "dequant_matmul", scheme.packed
        assert packed is not None
        if w.node.op != "param":
            raise DTypeError(f"{where}: w is {w.type}, wanted {packed}[n, k] or a param")
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
    """n of a param declared as [n, k], [k, n], or as the bytes of its rows."""
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
    raise ShapeError(f"dequant_matmul: w is {declared}, wanted [n, {k}], or u8[n, {row}] for the bytes of {scheme}")


def _as_matrix(x: Value, w: Value, scheme: QuantScheme) -> Value:
    """The bytes of a weight in a row as [k, n / elements a byte]."""
    k, size = x.shape[-1] if x.rank else 0, w.shape[0]
    if not isinstance(k, int) or not isinstance(size, int) or k == 0 or size % k:
        raise ShapeError(f"dequant_matmul: w is {w.type}, not {k} rows of bytes ({scheme})")
    return w.reshape(k, size // k)
