"""The plan of a matmul kernel on a target: register tiles, row blocks, argument block, scratch map.

A unit is (batch, row block, panel), panel fastest. A panel is one tile wide: `[panels][k][panel]` from the weight
store, zero-padded, or packed into scratch by the call that uses it. In a layout of two weights, each has half of every
panel.
"""

from __future__ import annotations

from rlx.backends.cpu.builder import vector
from rlx.backends.cpu.quant_blocks import BlockLayout, Blocks
from rlx.backends.cpu.routine import HEADER_BYTES
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import BF16, F16, F32, I64, DType
from rlx.errors import LowerError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.host_memory import LINE
from rlx.lir.kernels import MatmulKernel, sum_name
from rlx.lir.loops import Arg, Const, Expr, For, Index, Let, Load, LoopKernel, Param, Place, Store, substitute

ROW_BLOCK = 192  # maximum rows of A per unit
CODES_ROW_BLOCK = 256  # the same if weights are unpacked per row block
SLAB = 512  # k steps of B that all tiles of a row block process before the next ones: 128 KiB of an AVX-512 panel
CODES_SLAB = 1024  # the same for codes, of which a word holds four
WIDENING_TILES = 8  # tiles per row block up to which each widens narrow panels itself: next to FMAs that costs little
WIDENING_TILES_BASELINE = 2  # the same where multiply-adds and f16 conversions take several instructions
NARROW = (F16, BF16)  # storage types of panels for f32 tiles

_SCALAR = {"f32": "float", "f64": "double", "i32": "i32"}  # for i32, words of A and B hold four bytes each


@dataclass(frozen=True, slots=True)
class Geometry:
    """The tile geometry of one element type on a target: the largest tile is `rows` × `vectors` registers."""

    dtype: DType
    lanes: int
    rows: int
    vectors: int
    max_rows: int = ROW_BLOCK  # of a row block
    stored: DType | None = None  # element type of panels, if narrower
    widening_tiles: int = WIDENING_TILES

    @property
    def scalar(self) -> str:
        return _SCALAR[self.dtype.name]

    @property
    def vector(self) -> str:
        return vector(self.lanes, self.scalar)

    @property
    def right(self) -> DType:
        """The type of B in memory."""
        return self.stored or self.dtype

    @property
    def right_scalar(self) -> str:
        return f"i{8 * self.stored.size}" if self.stored else self.scalar

    @property
    def panel(self) -> int:
        """Columns per tile."""
        return self.lanes * self.vectors

    @property
    def step_bytes(self) -> int:
        """Bytes per row of a tile; equal to the bytes of B per k step unless B is narrower."""
        return self.panel * self.dtype.size

    @property
    def right_bytes(self) -> int:
        """Bytes of a panel per k step."""
        return self.panel * self.right.size

    @property
    def block_rows(self) -> int:
        """Maximum rows per row block, a multiple of the tile height."""
        return -(-self.max_rows // self.rows) * self.rows


@dataclass(frozen=True)
class Plan:
    """Sizes, all known when the kernel is emitted."""

    kernel: MatmulKernel
    target: CpuTarget

    def __post_init__(self) -> None:
        kernel, stored = self.kernel, self.kernel.stored
        if kernel.dtype.name not in _SCALAR or (kernel.dtype.is_integer and not self.packed):
            raise LowerError(f"cpu matmul: no tiles of {kernel.dtype}", hint="widen the operands to f32 first")
        if kernel.weights != 1 and not self.packed:
            raise LowerError("cpu matmul: two weights share a panel only when they are packed")
        if stored is not None and (not self.packed or kernel.dtype is not F32 or stored not in NARROW):
            hint = "only packed panels of f16 and bf16 are widened, to f32"
            raise LowerError(f"cpu matmul: no tiles of {kernel.dtype} times {stored}", hint=hint)

    @property
    def packed(self) -> bool:
        """Whether B is in panels."""
        return self.kernel.layout is not None

    @cached_property
    def blocks(self) -> Blocks | None:
        """The kernels that read B, if it is quantised."""
        layout = self.kernel.layout
        return layout.blocks(self.target) if isinstance(layout, BlockLayout) else None

    @property
    def integers(self) -> bool:
        """Whether 8-bit activations are multiplied by integer codes."""
        return self.blocks is not None and bool(self.blocks.tiles)

    @property
    def side_by_side(self) -> bool:
        """Whether a single row is multiplied by several panels together. Wide panels have chains enough."""
        return self.kernel.stored is not None and not self.kernel.transposed and self.form.right_bytes < LINE

    @cached_property
    def form(self) -> Geometry:
        target, kernel = self.target, self.kernel
        rows = self.blocks.tile_rows if self.blocks and self.integers else target.tile_rows
        widening = WIDENING_TILES if target.has_fma else WIDENING_TILES_BASELINE
        size = target.lanes(kernel.dtype.size), rows, target.tile_vectors
        return Geometry(kernel.dtype, *size, self.row_block, kernel.stored, widening)

    @property
    def row_block(self) -> int:
        """Maximum rows of A per unit."""
        return CODES_ROW_BLOCK if self.integers else ROW_BLOCK

    @property
    def slab(self) -> int:
        """Maximum k steps before tiles move on to the next panel or row block."""
        return CODES_SLAB if self.integers else SLAB

    @property
    def columns(self) -> int:
        """Output columns per panel."""
        return self.target.panel(self.kernel.dtype.size) // self.kernel.weights

    @property
    def words(self) -> tuple[str, ...]:
        """The argument block: addresses of routine tables, then the launch's words with the row block count."""
        addresses = ("tiles", "epilogue", *(("blocks",) if self.blocks else ()))
        launch_words = self.kernel.words
        sizes = launch_words.index("k") + 1
        return (*addresses, *launch_words[:sizes], "row_blocks", *launch_words[sizes:])

    # -- scratch --
    @property
    def sums_end(self) -> int:
        """End of a row block's sums in scratch, which follow the header."""
        return HEADER_BYTES + self.form.block_rows * self.form.step_bytes

    def scratch_bytes(self, k: int) -> int:
        """Scratch bytes of a launch with this `k`, including the driver's header."""
        form = self.form
        if self.blocks:
            block = self.blocks.storage.block
            panel = min(-(-k // block), self.slab // block) * self.blocks.unpacked_bytes * form.panel
        else:
            unpacked = not self.packed or self.kernel.stored is not None
            panel = min(-(-k // form.lanes) * form.lanes, SLAB) * form.step_bytes if unpacked else 0
        return self.sums_end + panel

    # -- epilogue --
    @cached_property
    def epilogue(self) -> LoopKernel | None:
        """The epilogue as loops over a tile: its first parameter is the sums in scratch, with the panel as row stride.

        The others are the operands at the tile's position; arguments are `columns` and the row stride of each operand.
        """
        kernel, epilogue = self.kernel, self.kernel.epilogue
        if epilogue is None:
            return None
        r, j, sums, width = Index("r"), Index("j"), kernel.accumulator, self.form.panel
        known: dict[str, Expr] = {}
        for i in range(kernel.weights):
            offset: Place = ((Const(self.columns * i, I64), 1),) if i else ()
            known[sum_name(i)] = Load(0, ((r, width), (j, 1), *offset), sums)
        places: list[Place] = []
        for i, operand in enumerate(kernel.epilogue_operands):
            row: Place = ((r, Arg(f"row{i}")),)
            places.append((*row, (j, 1)) if operand.columns else row)
            if not operand.written:
                known[operand.name] = Load(1 + i, places[i], operand.dtype)
        lets = [Let(let.name, substitute(let.value, known)) for let in epilogue.lets]
        written = [i for i, operand in enumerate(kernel.epilogue_operands) if operand.written]
        values = (substitute(value, known) for value in epilogue.values)
        stores = [Store(1 + i, places[i], value) for i, value in zip(written, values, strict=True)]
        params = (Param("sums", sums), *(Param(o.name, o.dtype, o.written) for o in kernel.epilogue_operands))
        args = ("columns", *(f"row{i}" for i in range(len(kernel.epilogue_operands))))
        columns = For("j", Arg("columns"), (*lets, *stores), vector=True)
        return LoopKernel(epilogue.name, params, args, For("r", Arg("rows"), (columns,)))
