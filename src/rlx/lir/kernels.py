"""Kernels beyond plain loops: matmul, attention and its gradient, described for backends to implement.

Together with `loops.LoopKernel` these are all the kernels a backend sees. A record says what to compute: element
types, layouts, masks, an epilogue as expressions. Operands, sizes and strides are words of the launch, so one kernel
serves every shape. The backend decides how to split the work and which machine code to call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rlx.dtypes import I32, DType
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.lir.loops import Expr, Let, LoopKernel, Ref, flops_type, inlined_text, walk
from rlx.operand_layouts import WeightLayout

OUT_OF_RANGE = 1  # fault code: an index lies outside the axis
BEYOND_CAPACITY = 2  # fault code: a position lies outside the cache
OUTSIDE_TABLE = 4  # fault code: a row number lies outside the table of a cache
OUTSIDE_POOL = 5  # fault code: a page number lies outside the pool
OUTSIDE_STATES = 6  # fault code: a row number lies outside the states of a cache
OUT_OF_STEPS = 3  # fault code: the condition of a while loop still holds after `max_steps`
UNFIT_SIZES = 1 << 16  # fault code, plus the index of the violated assertion of the program
LONGEST_EPILOGUE = 200  # terms shown on one line of text


@dataclass(frozen=True, slots=True)
class EpilogueOperand:
    """A tensor that an epilogue reads or writes at (row, column); without `columns` it has one element per row."""

    name: str
    dtype: DType
    columns: bool
    written: bool = False


def sum_name(weight: int) -> str:
    """The name of the accumulator of a weight in epilogue expressions: acc, acc1, ..."""
    return f"acc{weight or ''}"


def weight_name(weight: int) -> str:
    """The word of a weight that is an operand of its own: b, b1, ..."""
    return f"b{weight or ''}"


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The values a matmul stores at (row, column), one per written operand.

    Expressions refer by name to the accumulators (`acc`, and `acc1` for a second weight), to the operands read, and to
    earlier lets. They contain no addresses, so a backend can emit them for any tile shape.
    """

    name: str
    lets: tuple[Let, ...]
    values: tuple[Expr, ...]

    def text(self, names: Mapping[str, str] | None = None) -> str:
        """The values on one line, or just the name if they are too long; `names` maps operands to display names."""
        terms: dict[str, int] = {}
        for let in self.lets:
            terms[let.name] = sum(terms.get(e.name, 1) if isinstance(e, Ref) else 1 for e in walk(let.value))
        if max(terms.values(), default=0) > LONGEST_EPILOGUE:
            return self.name
        known = {let.name: let.value for let in self.lets}
        return "; ".join(inlined_text(value, known, names or {}) for value in self.values)


@dataclass(frozen=True)
class MatmulKernel:
    """C[batch, m, n] = epilogue(A[batch, m, k] B[batch, k, n]).

    Products are accumulated in the type `accumulator`, which is what the epilogue sees. Without an epilogue the only
    operand is C, of the same type. B has a backend's `layout`, which may hold several `weights`, or is any strided
    matrix, and further weights are operands with the same strides; with `stored`, its elements are floats of that
    narrower type. `transposed`: A is stored as [batch, k, m], and `a_row` is the stride along k.

    `grouped` "rows": no batch; row i is multiplied by B[index[i]], and an index outside the `groups` is a fault.
    "depth": C[g] is the product over k in [index[g], index[g + 1]) of A[m, k] and B[k, n], which all groups share;
    `k` is the upper bound.
    """

    dtype: DType
    layout: WeightLayout | None
    weights: int
    epilogue: Epilogue | None
    epilogue_operands: tuple[EpilogueOperand, ...]  # read and written by the epilogue
    transposed: bool = False
    grouped: str = ""
    index: DType = I32  # of the group index
    sums: DType | None = None  # of the accumulators, if not that of A and B
    stored: DType | None = None  # of B, if narrower than A

    kind = "matmul"

    @property
    def accumulator(self) -> DType:
        """The type in which products are accumulated."""
        return self.sums or self.dtype

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of a launch: operands, sizes, strides in elements, then the same for each epilogue operand."""
        head = ("a", "b", "m", "n", "k", "batch0", "batch1")
        strides = ("a_row", "a_batch0", "a_batch1", "b_k", "b_n", "b_batch0", "b_batch1")
        groups = ("index", "groups") if self.grouped else ()
        steps = ("", "_row", "_batch0", "_batch1")
        tail = tuple(f"{operand.name}{step}" for operand in self.epilogue_operands for step in steps)
        return head + strides + groups + self._further_weights() + tail

    def _further_weights(self) -> tuple[str, ...]:
        """The words of weights after the first, unless one operand holds all."""
        return tuple(weight_name(i) for i in range(1, self.weights if self.layout is None else 1))

    def operands(self) -> dict[str, bool]:
        """The words that are operands, and whether the kernel writes them."""
        read = ("a", "b", *self._further_weights(), *(("index",) if self.grouped else ()))
        return dict.fromkeys(read, False) | {operand.name: operand.written for operand in self.epilogue_operands}

    @property
    def selected(self) -> frozenset[str]:
        """Operands accessed at data-dependent indices: the matrices of groups."""
        return frozenset(("b",)) if self.grouped else frozenset()

    def arithmetic(self) -> str:
        """The arithmetic whose peak rate limits it; see `LoopKernel.arithmetic`."""
        return (self.layout and self.layout.arithmetic()) or flops_type(self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        values = (str(self.layout) if name == "layout" else getattr(self, name) for name in self.__dataclass_fields__)
        text = "|".join(map(repr, ("matmul", *values)))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def symbol(self) -> str:
        return f"matmul.{self.fingerprint[:8]}"

    def text(self) -> str:
        layout = f" as {self.layout}" if self.layout else ""
        pair = f", {self.weights} weights" if self.weights > 1 else ""
        transposed = " transposed" if self.transposed else ""
        groups = {"": "", "rows": ", one matrix per row", "depth": ", one piece of k per matrix"}[self.grouped]
        sums = f", sums: {self.sums}" if self.sums else ""
        reads = "".join(
            f", {o.name}: {o.dtype}{'' if o.columns else ' per row'}" for o in self.epilogue_operands if not o.written
        )
        writes = ", ".join(f"{o.name}: {o.dtype}" for o in self.epilogue_operands if o.written)
        b = f"b: {self.stored or self.dtype}{layout}{pair}{groups}{sums}"
        head = f"kernel {self.symbol}(a: {self.dtype}{transposed}, {b}{reads}) -> {writes}"
        return f"{head}\n  epilogue {self.epilogue.text()}" if self.epilogue else head


@dataclass(frozen=True)
class AttentionKernel:
    """softmax(scale · QKᵀ, softcapped, masked) V for every batch row and head, with online softmax.

    `group` query heads share one key head. `mask` is none, causal, sliding, custom or bias; queries and keys are
    aligned at the end (query i is at position k_len - q_len + i).

    With a `page`, k and v are pools of pages in any order of pages and heads, read in place: pages of k are
    `[head_dim][page]`, or `[page][head_dim]` with `key_axes` "sd", pages of v `[page][value_dim]`. `table[b][block]`,
    an i32, is the page of a block of positions. Query i of batch entry b is at `positions[b][i]`, an i32, and attends
    to the keys up to there: all of them (causal) or the last `window` (sliding). A negative position is padding, whose
    result is zero; a position of `capacity` or above is a fault, as is a page outside the pool. Quantised pages are
    `[page][dim]` for both k and v, with strides in 16-bit units. In a `ring`, position p is stored at p modulo
    `capacity`, a multiple of the page size. `ragged`: batch entry b is a single token of row `rows[b]` of the table.
    `appends`: of the keys that queries see, the program writes those at `positions`, and no others.

    `lse`: also returns the log-sum-exp of the scores of each query, `[batch][head][q_len]`.

    `ahead`: a sliding window ends that many keys after the position of its query. `segments`: the mask operand holds
    i32 ids of sequences packed into a batch row, `[batch][k_len]`; of the keys that `mask` allows, a query attends to
    those with its own id. Ids below 0 are padding, which attends to nothing.
    """

    dtype: DType  # of q and the result, and of k and v without `cache_dtype`: f32, f16, bf16 or f64
    head_dim: int
    value_dim: int
    group: int
    mask: str
    window: int
    scale: float
    softcap: float
    mask_dtype: DType | None
    page: int = 0  # positions per page of a cache; 0 without a cache
    cache_dtype: DType | None = None  # of k and v in a cache, if not `dtype`
    ring: bool = False
    lse: bool = False
    ahead: int = 0
    segments: bool = False
    ragged: bool = False
    key_axes: str = "ds"  # of a page of k, s: slot, d: element; "sd" has the word `k_seq`
    appends: bool = False
    result: DType | None = None  # if not `dtype`

    kind = "attention"

    @property
    def cached(self) -> bool:
        return self.page > 0

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of a launch: operands, sizes, and strides in elements."""
        strides = tuple(f"{t}_{axis}" for t in ("q", "k", "v", "out") for axis in ("batch", "seq", "head"))
        if self.cached:
            pools = ("k_page", "k_head", *(["k_seq"] if self.key_axes == "sd" else []), "v_page", "v_seq", "v_head")
            sizes = ("batch", "q_len", "capacity", "kv_heads", "pages", "table_rows")
            own = tuple(s for s in strides if s[0] not in "kv")
            return (*self.operands(), *sizes, *own, *pools, "positions_batch", "table_row")
        head = ("q", "k", "v", "out", "mask", "batch", "q_len", "k_len", "kv_heads")
        tail = ("lse", "lse_batch", "lse_head") if self.lse else ()
        return head + strides + ("mask_batch", "mask_head", "mask_query") + tail

    def operands(self) -> dict[str, bool]:
        """The words that are operands, and whether the kernel writes them."""
        tensors = {"q": False, "k": False, "v": False, "out": True}
        if self.cached:
            return tensors | {"positions": False, "table": False} | ({"rows": False} if self.ragged else {})
        return tensors | {"mask": False} | ({"lse": True} if self.lse else {})

    @property
    def selected(self) -> frozenset[str]:
        """Operands accessed at data-dependent indices: the pools of a cache."""
        return frozenset(("k", "v")) if self.cached else frozenset()

    @property
    def min_work(self) -> float:
        """The part of its flops, which count all keys for each query, that every run does; 0 if data decides."""
        if self.cached or self.mask == "sliding" or self.segments:
            return 0.0
        return 0.5 if self.mask == "causal" else 1.0

    def arithmetic(self) -> str:
        """The arithmetic whose peak rate limits it; see `LoopKernel.arithmetic`."""
        return flops_type(self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        # At these defaults, digests do not include them.
        later = {"ahead": 0, "segments": False, "ragged": False, "key_axes": "ds", "appends": False, "result": None}
        fields = {f: getattr(self, f) for f in self.__dataclass_fields__} | {"page": self.page or False}
        values = (value for name, value in fields.items() if name not in later or value != later[name])
        text = "|".join(map(repr, ("attention", *values)))
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
            operands += f" in pages of {self.page}" + ", ragged" * self.ragged
        return (
            f"kernel {self.symbol}({operands}) head_dim {self.head_dim}, "
            f"{self.group} query heads a key head, "
            f"mask {self.mask}{window}, scale {self.scale:.6g}{cap}"
        )


@dataclass(frozen=True)
class AttentionGradKernel:
    """dQ, dK and dV of `attention`, recomputing its weights from Q, K and the `lse` of each query.

    With P the weights, dP = dY Vᵀ and `delta` one number per query: dV = Pᵀ dY, dS = P (dP - delta) times the
    derivative of the score with respect to q·k, dQ = dS K, dK = dSᵀ Q; dK and dV are summed over the query heads of a
    key head. `lse` and `delta` are `[batch][head][q_len]`.
    """

    attention: AttentionKernel  # of a native type, without a cache; lse and delta are wide

    kind = "attention_grad"
    READS = ("q", "k", "v", "dy", "lse", "delta", "mask")
    WRITES = ("dq", "dk", "dv")

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of a launch: operands, sizes, and strides in elements."""
        tensors = ("q", "k", "v", "dy", "dq", "dk", "dv")
        strides = tuple(f"{t}_{axis}" for t in tensors for axis in ("batch", "seq", "head"))
        rows = tuple(f"{t}_{axis}" for t in ("lse", "delta") for axis in ("batch", "head"))
        head = (*self.READS, *self.WRITES, "batch", "q_len", "k_len", "kv_heads")
        return head + strides + rows + ("mask_batch", "mask_head", "mask_query")

    def operands(self) -> dict[str, bool]:
        """The words that are operands, and whether the kernel writes them."""
        return dict.fromkeys(self.READS, False) | dict.fromkeys(self.WRITES, True)

    @property
    def selected(self) -> frozenset[str]:
        """Operands accessed at data-dependent indices: none."""
        return frozenset()

    def arithmetic(self) -> str:
        """The arithmetic whose peak rate limits it; see `LoopKernel.arithmetic`."""
        return flops_type(self.attention.dtype)

    @property
    def fingerprint(self) -> str:
        return self.attention.fingerprint

    @property
    def symbol(self) -> str:
        return f"attention_grad.{self.fingerprint[:8]}"

    def text(self) -> str:
        return f"kernel {self.symbol}(q, k, v, dy, lse, delta) of {self.attention.text().removeprefix('kernel ')}"


Kernel = LoopKernel | MatmulKernel | AttentionKernel | AttentionGradKernel
