"""What all matmul variants share: the order of summation, the parameter struct, and C for an element of the result."""

from __future__ import annotations

from rlx.backends.cuda.kernel_plan import words_struct
from rlx.backends.cuda.loops import operations
from rlx.backends.cuda.loops.operations import MEMORY, VALUE
from rlx.backends.cuda.matmul.instructions import instructions
from rlx.dtypes import F32, DType
from rlx.errors import LowerError
from rlx.lir.kernels import OUT_OF_RANGE, EpilogueOperand, MatmulKernel, sum_name
from rlx.lir.loops import Apply, Choose, Const, Expr, Let, Ref

CHUNKS = 8  # k is cut into at most this many
FINISH_TILE = r"""
// The epilogue of rows whose sums are in shared memory, for one warp: every `step`th row from `first` on, or several
// next to each other if they are narrower than a warp. Neighbours take neighbouring columns.
template <int HEIGHT, int WIDTH, int AT_ONCE, int SECOND, class Slot>
INLINE void finish_rows(const Words& w, i64 b0, i64 b1, i64 row0, i64 column0, i64 rows, i64 columns, i64 group,
    int first, int step, Slot slot) {
  constexpr int ACROSS = (WIDTH + 31) / 32, DOWN = WIDTH < 32 ? 32 / WIDTH : 1;
  const int lane = threadIdx.x & 31, down = DOWN > 1 ? lane / WIDTH : 0, across = DOWN > 1 ? lane % WIDTH : lane;
#pragma unroll 1
  for (int turn = first; turn < HEIGHT / DOWN; turn += AT_ONCE * step) {
    Reads reads[AT_ONCE][ACROSS];
    bool own[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int m = (turn + i * step) * DOWN + down;
      const i64 row = row0 + m;
      own[i] = m < HEIGHT && m < rows && (!GROUPED || group_of(w, row) == group);
#pragma unroll
      for (int j = 0; j < ACROSS; j++) {
        const int column = across + 32 * j;
        if (own[i] && column < WIDTH && column < columns) reads[i][j] = read_at(w, b0, b1, row, column0 + column);
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (int j = 0; j < ACROSS; j++) {
        const int m = (turn + i * step) * DOWN + down, column = across + 32 * j;
        if (!own[i] || column >= WIDTH || column >= columns) continue;
        const Acc* sum = slot(m, column);
        const Acc second = WEIGHTS == 2 ? sum[SECOND] : (Acc)0;
        finish(w, b0, b1, row0 + m, column0 + column, sum[0], second, reads[i][j]);
      }
  }
}
template <int HEIGHT, int WIDTH, int WARPS, int SECOND, class Slot>
INLINE void finish_tile(
    const Words& w, i64 b0, i64 b1, i64 row0, i64 column0, i64 rows, i64 columns, i64 group, Slot slot) {
  constexpr int AT_ONCE = HEIGHT >= 2 * WARPS ? 2 : 1;
  finish_rows<HEIGHT, WIDTH, AT_ONCE, SECOND>(
      w, b0, b1, row0, column0, rows, columns, group, threadIdx.x >> 5, WARPS, slot);
}
"""
SMALLEST_CHUNK = 128  # a multiple of the depth of a tile


def chunk_size(k: int) -> int:
    """Products per chunk."""
    return SMALLEST_CHUNK * max(1, -(-k // (SMALLEST_CHUNK * CHUNKS)))


def chunk_count(k: int) -> int:
    return max(1, -(-k // chunk_size(k)))


def multiplied(kernel: MatmulKernel) -> DType:
    """The type of the factors: that of the weights, to which 16-bit weights round a wider A; else that of A."""
    return kernel.stored if kernel.stored is not None and kernel.dtype is F32 else kernel.dtype


def on_tensor_cores(kernel: MatmulKernel) -> bool:
    return multiplied(kernel).size == 2


def preamble(kernel: MatmulKernel) -> str:
    """Types, the parameter struct, the chunks of k, and `finish`, which stores an element of the result."""
    operands = kernel.operands()
    types = {o.name: o.dtype for o in kernel.epilogue_operands}
    types |= {"a": kernel.dtype, "index": kernel.index}

    def field(word: str) -> str:
        if word not in operands:
            return "i64"
        kind = MEMORY[types.get(word, kernel.stored or kernel.dtype).name]
        return f"{kind}*" if operands[word] else f"const {kind}*"

    return f"""
typedef {MEMORY[kernel.dtype.name]} A;
typedef {MEMORY[(kernel.stored or kernel.dtype).name]} B;
typedef {MEMORY[kernel.accumulator.name]} Acc;
typedef {MEMORY[multiplied(kernel).name]} T;  // of factors
constexpr int WEIGHTS = {kernel.weights};
constexpr bool TRANSPOSED = {flag(kernel.transposed)};
constexpr int CHUNK_UNIT = {SMALLEST_CHUNK}, MOST_CHUNKS = {CHUNKS};
{words_struct({word: field(word) for word in kernel.words})}
INLINE int chunk_size(i64 k) {{
  const int count = (u32)(k + CHUNK_UNIT * MOST_CHUNKS - 1) / (CHUNK_UNIT * MOST_CHUNKS);
  return CHUNK_UNIT * (count > 1 ? count : 1);
}}
INLINE i64 least(i64 a, i64 b) {{ return a < b ? a : b; }}
INLINE const B* weights_of(const Words& w, int weight) {{ return {_weights(kernel)}; }}
// Address of A[row][0] of a batch, and the step along k.
INLINE const A* row_of(const Words& w, i64 b0, i64 b1, i64 row) {{
  return w.a + b0 * w.a_batch0 + b1 * w.a_batch1 + row * (TRANSPOSED ? 1 : w.a_row);
}}
INLINE i64 step_of(const Words& w) {{ return TRANSPOSED ? w.a_row : 1; }}
{instructions(multiplied(kernel))}{_groups(kernel)}{_finish(kernel)}
"""


def _groups(kernel: MatmulKernel) -> str:
    """C of the matrix that a row selects, and of the piece of k that a result sums over."""
    group = f"""
  const i64 group = (i64)w.index[row];
  if (group >= 0 && group < w.groups) return group;
  report(w.fault, (i32)w.launch, {OUT_OF_RANGE});"""
    piece = "start = (i64)w.index[result]; count = (i64)w.index[result + 1] - start;"
    rows, depth = kernel.grouped == "rows", kernel.grouped == "depth"
    return f"""
[[maybe_unused]] constexpr bool GROUPED = {flag(rows)}, BY_DEPTH = {flag(depth)};
INLINE i64 groups_of(const Words& w) {{ return {"w.groups" if rows else "w.batch0"}; }}
INLINE i64 group_of(const Words& w, i64 row) {{{group if rows else ""}
  return 0;
}}
INLINE void piece_of(const Words& w, i64 result, i64& start, i64& count) {{ {piece if depth else ""} }}
"""


def flag(value: bool) -> str:
    """A C constant."""
    return str(value).lower()


def _weights(kernel: MatmulKernel) -> str:
    return "w.b" if kernel.weights == 1 else "weight ? w.b1 : w.b"


def _address(operand: EpilogueOperand) -> str:
    name = operand.name
    column = " + column" if operand.columns else ""
    return f"w.{name} + b0 * w.{name}_batch0 + b1 * w.{name}_batch1 + row * w.{name}_row{column}"


def _finish(kernel: MatmulKernel) -> str:
    """C of the epilogue at (row, column): `read_at` loads its operands, `finish` stores its values.

    `expect` brings what `read_at` will load near. Loads stand apart from stores, which the compiler could not pass.
    """
    reads = [o for o in kernel.epilogue_operands if not o.written]
    writes = [o for o in kernel.epilogue_operands if o.written]
    place = "const Words& w, i64 b0, i64 b1, i64 row, i64 column"
    sums = ", ".join(f"Acc {sum_name(i)}" for i in range(2))
    values: tuple[Expr, ...] = (Ref("acc", kernel.accumulator),)
    lets: tuple[Let, ...] = ()
    if kernel.epilogue is not None:
        lets, values = kernel.epilogue.lets, kernel.epilogue.values
    lines = [
        "struct Reads {", *(f"  {VALUE[o.dtype.name]} {o.name};" for o in reads), "};",
        f"INLINE void expect({place}) {{", *(f"  fetch_near({_address(o)});" for o in reads), "}",
        f"INLINE Reads read_at({place}) {{", "  Reads reads;",
        *(f"  reads.{o.name} = {_load(o)};" for o in reads), "  return reads;", "}",
        f"INLINE void finish({place}, {sums}, const Reads& reads) {{",
        *(f"  const {VALUE[o.dtype.name]} {o.name} = reads.{o.name};" for o in reads),
        *(f"  const {VALUE[let.value.dtype.name]} {let.name} = {c_text(let.value)};" for let in lets),
    ]  # fmt: skip
    for operand, value in zip(writes, values, strict=True):
        lines.append(f"  *({_address(operand)}) = {operations.cast(c_text(value), value.dtype, operand.dtype)};")
    return "\n".join([*lines, "}", FINISH_TILE])


def _load(operand: EpilogueOperand) -> str:
    text = f"*({_address(operand)})"
    return f"({text} != 0)" if operand.dtype.is_bool else text


def c_text(expr: Expr) -> str:
    """A value of an epilogue as C."""
    match expr:
        case Ref():
            return expr.name
        case Const():
            return operations.constant(expr.value, expr.dtype)
        case Choose():
            return f"({c_text(expr.condition)} ? {c_text(expr.then)} : {c_text(expr.other)})"
        case Apply():
            kind = expr.args[1 if expr.op == "select" else 0].dtype
            return operations.apply(expr.op, [c_text(a) for a in expr.args], kind, expr.dtype)
    raise LowerError(f"cuda: an epilogue contains {type(expr).__name__}", hint="epilogues have no loads or loops")
