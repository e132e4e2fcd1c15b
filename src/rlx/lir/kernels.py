"""Kernels that are more than loops: matmul, attention and its gradient, as the records that backends emit from.

Together with `loops.LoopKernel` these are all that a backend sees. Each lists the words of its argument block; sizes
and strides are run-time words, so one kernel serves every shape.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from rlx.dtypes import I32, DType
from rlx.lir.loops import INTEGER_DOTS, Let, LoopKernel, Store, expr_text, multiplied, statements
from rlx.locks import cached_property
from rlx.target import KvLayout

ROW_BLOCK = 192  # rows of A that one unit of a matmul covers at most
CODES_ROW_BLOCK = 256  # the same where weights are taken apart for each row block
KEY_BLOCK = KvLayout().page  # keys of one attention block, cut at absolute positions
OUT_OF_RANGE = 1  # fault code: an index lies outside the axis
BEYOND_CAPACITY = 2  # fault code: a position does not lie within the cache
OUTSIDE_TABLE = 4  # fault code: a row number does not lie within the table of a cache
OUTSIDE_POOL = 5  # fault code: a page number does not lie within the pool
OUT_OF_STEPS = 3  # fault code: the condition of a while loop still holds after `max_steps`
UNFIT_SIZES = 1 << 16  # fault code, plus the number of the program's assertion that does not hold
ATTENTION_ROWS = 24  # query rows (positions × heads of a group) of one attention unit, at least one position


@dataclass(frozen=True, slots=True)
class TileOperand:
    """A buffer that an epilogue reads or writes beside the tile: `columns` is its stride along n, 0 or 1."""

    name: str
    dtype: DType
    columns: int
    written: bool = False


@dataclass(frozen=True)
class Blocks:
    """Packed weights of a matmul: what they are, and the kernels (see `lir/forms/blocks.py`) that read them.

    With `tiles`, sums are of whole numbers: A is words of activations, `unpack` takes weights apart, and tiles of so
    many rows, the fewest first, multiply what it leaves (see `lir/forms/block_dots.py`).
    """

    storage: DType
    unpack: LoopKernel
    unpacked_bytes: int  # that a block of one column has after that
    dots: tuple[LoopKernel, ...]  # for 1, 2, ... rows
    tiles: tuple[LoopKernel, ...] = ()
    tile_rows: int = 0  # of the highest tile
    x_words: int = 0  # that a block of A is

    @property
    def kernels(self) -> tuple[LoopKernel, ...]:
        return (self.unpack, *self.dots, *self.tiles)


@dataclass(frozen=True)
class MatmulKernel:
    """C[batch, m, n] = epilogue(A[batch, m, k] B[batch, k, n]).

    `packed`: B is panels from the weight store, `[panels][k][panel]`, zero-padded to whole panels; else B is any
    strided matrix and each panel is packed into scratch by the call that uses it. Products are added up in the type
    `accumulator`, and so does the epilogue see them. With `blocks`, panels hold packed
    weights (see `lir/forms/blocks.py`): `unpack` makes numbers of them in scratch, `dots` use them up at once where m
    is small. With `weights` 2, each panel holds half a panel of each of two matrices, and the epilogue sees both.
    With `stored`, panels hold floats of that type, which is narrower, and the kernel widens them.
    `turned`: A lies in memory as [batch, k, m], and `a_row` is the step along k; tiles read it where it is.
    `epilogue` is a loop kernel over (rows, columns) of a tile: its first parameter is the tile (rows `panel` apart),
    the others are `tile`; its arguments are `columns` and one row stride an operand. Without one, the only operand
    is C of the same dtype. A unit is (batch, row block, panel), panel fastest.

    `grouped` "rows": there is no batch; row i is multiplied by B[index[i]], and rows next to each other that have the
    same index share the reading of it. An index that is not one of the `groups` is a fault. "depth": C[g] is the
    product over k from index[g] to index[g + 1], of A[m, k] and B[k, n] that all batches share; `k` is the most.
    """

    dtype: DType
    packed: bool
    weights: int
    epilogue: LoopKernel | None
    tile: tuple[TileOperand, ...]  # what the epilogue reads and writes
    blocks: Blocks | None = None
    turned: bool = False
    grouped: str = ""
    index: DType = I32  # of groups
    sums: DType | None = None  # of the accumulators, where that is not the type of A and B
    stored: DType | None = None  # of B, where that is narrower than A

    kind = "matmul"

    @property
    def accumulator(self) -> DType:
        """The type in which products are added up."""
        return self.sums or self.dtype

    @property
    def row_block(self) -> int:
        """Rows of A that one unit covers at most."""
        return CODES_ROW_BLOCK if self.blocks and self.blocks.tiles else ROW_BLOCK

    @property
    def words(self) -> tuple[str, ...]:
        """`tiles`, `epilogue` and `blocks` are addresses that the backend fills in; the rest comes from the launch."""
        addresses = ("tiles", "epilogue", *(("blocks",) if self.blocks else ()))
        head = (*addresses, "a", "b", "m", "n", "k", "row_blocks", "batch0", "batch1")
        strides = ("a_row", "a_batch0", "a_batch1", "b_k", "b_n", "b_batch0", "b_batch1")
        groups = ("index", "groups") if self.grouped else ()
        tail = tuple(f"{p}{i}" for i in range(len(self.tile)) for p in ("ptr", "row", "outer", "inner"))
        return head + strides + groups + tail

    def operands(self) -> dict[str, bool]:
        """The words that are addresses of operands, and whether the kernel writes there."""
        read = ("a", "b", "index") if self.grouped else ("a", "b")
        return dict.fromkeys(read, False) | {f"ptr{i}": o.written for i, o in enumerate(self.tile)}

    def arithmetic(self) -> str:
        """What it multiplies and adds; see `LoopKernel.arithmetic`."""
        dots = {kernel.arithmetic() for kernel in self.blocks.kernels} if self.blocks else set()
        return next((op for op in INTEGER_DOTS if op in dots), multiplied(self.dtype))

    @cached_property
    def fingerprint(self) -> str:
        inner = self.epilogue.fingerprint if self.epilogue else "-"
        text = f"matmul|{self.dtype}|{self.packed}|{self.weights}|{inner}|{self.tile}"
        if self.sums:
            text += f"|sums {self.sums}"
        if self.stored:
            text += f"|stored {self.stored}"
        if self.turned:
            text += "|turned"
        if self.grouped:
            text += f"|{self.grouped} {self.index}"
        if self.blocks:
            text += "".join(f"|{k.fingerprint}" for k in self.blocks.kernels)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def symbol(self) -> str:
        return f"matmul.{self.fingerprint[:8]}"

    def epilogue_text(self) -> str:
        """The epilogue as one line, or an empty string."""
        if self.epilogue is None:
            return ""
        inside = list(statements(self.epilogue.root))
        lets = {s.name: s.value for s in inside if isinstance(s, Let)}
        texts = (expr_text(s.value, self.epilogue.params, lets) for s in inside if isinstance(s, Store))
        named = (re.sub(r"sums\[[^]]* \+ \d+\]", "sums1", text) for text in texts)  # of the second weight
        return "; ".join(re.sub(r"\[[^]]*\]", "", text) for text in named)

    def text(self) -> str:
        b = f"panels of {self.blocks.storage}" if self.blocks else "panels" if self.packed else "rows"
        stored = self.stored or self.dtype
        pair = ", 2 weights interleaved" if self.weights == 2 else ""
        turned = " turned" if self.turned else ""
        groups = {"": "", "rows": ", a matrix a row", "depth": ", a piece of k a matrix"}[self.grouped]
        sums = f", sums: {self.sums}" if self.sums else ""
        lines = [f"kernel {self.symbol}(a: {self.dtype}{turned}, b: {stored} {b}{pair}{groups}{sums})"]
        if self.blocks is not None:
            few, many = (", ".join(k.symbol for k in kernels) for kernels in (self.blocks.dots, self.blocks.tiles))
            lines.append(f"  blocks become numbers by {self.blocks.unpack.symbol}, few rows are multiplied by {few}")
            if many:
                lines.append(f"  activations have 8 bits; tiles are multiplied by {many}")
        if self.epilogue is not None:
            lines += ["  epilogue:"] + ["  " + line for line in self.epilogue.text().splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True)
class AttentionKernel:
    """softmax(scale · QKᵀ, softcapped, masked) V for every batch row and head, with online softmax.

    `group` query heads share one key head. `mask` is none, causal, sliding, custom or bias; rows and keys are aligned
    at the end (row i sits at position k_len - q_len + i). A unit is (batch, key head, block of query positions).

    `cached`: k and v are pools of pages in any order of pages and heads, read in place: pages of k are
    `[head_dim][KEY_BLOCK]`, pages of v `[KEY_BLOCK][value_dim]`. `table[b][block]`, an i32, is the page of a block of
    positions. Row i of batch entry b sits at `positions[b][i]`, an i32, and sees the keys up to there, all (causal) or
    the last `window` of them (sliding). A negative position is padding, whose result is zeros; one that is not below
    `capacity` is a fault, as is a page outside the pool. Packed pages are both rows, as v is, with strides in 16-bit
    units. In a `ring`, position p lies at p modulo `capacity`, which is whole pages. `ragged`: batch entry b is one
    token, of row `rows[b]` of the table.

    `lse`: also gives the logarithm of the sum of exp(scores) of each row, `[batch][head][q_len]`.

    `ahead`: a sliding window ends that many keys after the position of its row. `segments`: the mask operand holds
    i32 ids of sequences packed into a batch row, `[batch][k_len]`; of the keys that `mask` shows, a row sees those of
    its own id. Ids below 0 are padding, which sees nothing.
    """

    dtype: DType  # of q and the result, and of k and v unless said: f32, f16, bf16 or f64
    head_dim: int
    value_dim: int
    group: int
    mask: str
    window: int
    scale: float
    softcap: float
    mask_dtype: DType | None
    cached: bool = False
    cache_dtype: DType | None = None  # of k and v in a cache, where it is not `dtype`
    ring: bool = False
    lse: bool = False
    ahead: int = 0
    segments: bool = False
    ragged: bool = False

    kind = "attention"

    @property
    def positions(self) -> int:
        """Query positions of one unit."""
        return max(1, ATTENTION_ROWS // self.group)

    @property
    def words(self) -> tuple[str, ...]:
        """`parts` is the address of the backend's table of routines; strides are in elements."""
        strides = tuple(f"{t}_{axis}" for t in ("q", "k", "v", "out") for axis in ("batch", "seq", "head"))
        if self.cached:
            pools = ("k_page", "k_head", "v_page", "v_seq", "v_head")
            sizes = ("batch", "q_len", "capacity", "kv_heads", "pages", "table_rows")
            own = tuple(s for s in strides if s[0] not in "kv")
            return ("parts", *self.operands(), *sizes, *own, *pools, "positions_batch", "table_row")
        head = ("parts", "q", "k", "v", "out", "mask", "batch", "q_len", "k_len", "kv_heads")
        tail = ("lse", "lse_batch", "lse_head") if self.lse else ()
        return head + strides + ("mask_batch", "mask_head", "mask_query") + tail

    def operands(self) -> dict[str, bool]:
        """The words that are addresses of operands, and whether the kernel writes there."""
        tensors = {"q": False, "k": False, "v": False, "out": True}
        if self.cached:
            return tensors | {"positions": False, "table": False} | ({"rows": False} if self.ragged else {})
        return tensors | {"mask": False} | ({"lse": True} if self.lse else {})

    def arithmetic(self) -> str:
        """What it multiplies and adds; see `LoopKernel.arithmetic`."""
        return multiplied(self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        later = {"ahead": 0, "segments": False, "ragged": False}  # a kernel without them keeps its name
        fields = {f: getattr(self, f) for f in self.__dataclass_fields__}
        values = (value for name, value in fields.items() if name not in later or value != later[name])
        text = "|".join(map(repr, ("attention", *values, *("pages",) * self.cached)))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def symbol(self) -> str:
        return f"attention.{self.fingerprint[:8]}"

    def text(self) -> str:
        cap = f", softcap {self.softcap}" if self.softcap else ""
        window = f" {self.window}" if self.mask == "sliding" else ""
        window += f" to {self.ahead} ahead" if self.ahead else ""
        window += ", in segments" if self.segments else ""
        operands = f"q, k, v: {self.dtype}"
        if self.cached:
            operands = f"q: {self.dtype}, k, v: {'ring' if self.ring else 'cache'} of {self.cache_dtype or self.dtype}"
            operands += ", ragged" * self.ragged
        return (
            f"kernel {self.symbol}({operands}) head_dim {self.head_dim}, "
            f"{self.group} query heads a key head, "
            f"mask {self.mask}{window}, scale {self.scale:.6g}{cap}, keys in blocks of {KEY_BLOCK}"
        )


@dataclass(frozen=True)
class AttentionGradKernel:
    """dQ, dK and dV of `attention`, whose weights are made again from Q, K and the `lse` of each row.

    With P the weights and dP = dY Vᵀ, `delta` a number of each row: dV = Pᵀ dY, dS = P (dP - delta) times how scores
    grow with products, dQ = dS K, dK = dSᵀ Q; dK and dV are sums over the query heads of a key head. A unit is (batch,
    key head): it goes through blocks of query rows, and for each through blocks of keys, so every sum has one order.
    `lse` and `delta` are `[batch][head][q_len]`.
    """

    attention: AttentionKernel  # of a type that is native, without a cache; lse and delta are wide

    kind = "attention_grad"
    READS = ("q", "k", "v", "dy", "lse", "delta", "mask")
    WRITES = ("dq", "dk", "dv")

    @property
    def words(self) -> tuple[str, ...]:
        """`parts` is the address of the backend's table of routines; strides are in elements."""
        tensors = ("q", "k", "v", "dy", "dq", "dk", "dv")
        strides = tuple(f"{t}_{axis}" for t in tensors for axis in ("batch", "seq", "head"))
        rows = tuple(f"{t}_{axis}" for t in ("lse", "delta") for axis in ("batch", "head"))
        head = ("parts", *self.READS, *self.WRITES, "batch", "q_len", "k_len", "kv_heads")
        return head + strides + rows + ("mask_batch", "mask_head", "mask_query")

    def operands(self) -> dict[str, bool]:
        """The words that are addresses of operands, and whether the kernel writes there."""
        return dict.fromkeys(self.READS, False) | dict.fromkeys(self.WRITES, True)

    def arithmetic(self) -> str:
        """What it multiplies and adds; see `LoopKernel.arithmetic`."""
        return multiplied(self.attention.dtype)

    @property
    def fingerprint(self) -> str:
        return self.attention.fingerprint

    @property
    def symbol(self) -> str:
        return f"attention_grad.{self.fingerprint[:8]}"

    def text(self) -> str:
        return f"kernel {self.symbol}(q, k, v, dy, lse, delta) of {self.attention.text().removeprefix('kernel ')}"


Kernel = LoopKernel | MatmulKernel | AttentionKernel | AttentionGradKernel
