"""Unabridged text of LIR programs, which `lir/parse.py` reads back.

`Program.text()` is for people and omits details: strides, argument words, types of constants, tables. This form has
all of them, so that `parse_program(program_text(p)) == p`.

    program @sums(n) for avx512
      input x: f32[n, 4]
      output output0: f32[n]
      launch sum.1f2e3d4c split rows units n
        x0 = view x: f32[n, 4]
        y1 = view output0: f32[n, 4] strides (1, 0)
        r0 = 4
        node 1 flops 4*n
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields

from rlx.ir.text import attr_text
from rlx.lir.expressions import Lookup, Table
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel, EpilogueOperand, Kernel, MatmulKernel
from rlx.lir.loops import LoopKernel, expr_text, expressions
from rlx.lir.program import Assertion, Buffer, Launch, Program
from rlx.lir.views import View
from rlx.types import TensorType, contiguous_strides

PLAIN_NAME = r"[\w.@+-]+"  # others are quoted


def program_text(program: Program) -> str:
    """A program and its kernels."""
    lines = [*_interface(program), *program.launch_lines(launch_text, view_text)]
    for kernel in program.kernels().values():
        lines += ["", kernel_text(kernel)]
    return "\n".join(lines) + "\n"


def quoted(name: str) -> str:
    """The name of a buffer or program, quoted unless it is plain."""
    return name if re.fullmatch(PLAIN_NAME, name) else json.dumps(name)


# -- programs ---------------------------------------------------------------------------------------------------------
def _interface(program: Program) -> Iterator[str]:
    yield f"program @{quoted(program.name)}({', '.join(program.symbols)}) for {quoted(program.target)}"
    for symbol, limit in program.limits.items():
        yield f"  limit {symbol} <= {limit}"
    for buffer in program.buffers.values():
        yield f"  {_buffer(buffer)}"
    if program.batch is not None:
        yield f"  entries of {program.batch} are independent"
    for assertion in program.assertions:
        yield f"  {_assertion(assertion)}"


def _buffer(buffer: Buffer) -> str:
    note = f" as {json.dumps(buffer.note)}" if buffer.note else ""
    value = "" if buffer.value is None else f" = {attr_text(buffer.value, full=True)}"
    return f"{buffer.kind} {quoted(buffer.name)}: {buffer.type}{note}{value}"


def _assertion(a: Assertion) -> str:
    steps = f" steps {attr_text(a.steps)}" if a.steps else ""
    launched = " launched" if a.launched else ""
    return f"assert {a.a} {a.relation} {a.b}{steps}{launched} op {json.dumps(a.op)} where {json.dumps(a.where)}"


def launch_text(launch: Launch) -> str:
    """A launch: its kernel and units, one line per word that has a value, and its origin."""
    barrier = " barrier" if launch.barrier else ""
    units = "" if launch.units is None else f" split {launch.split} units {launch.units}"
    lines = [f"launch {launch.kernel.symbol}{units}{barrier}"]
    for word, value in zip(launch.kernel.words, launch.words, strict=True):
        if value is not None:
            lines.append(f"  {word} = {view_text(value) if isinstance(value, View) else value}")
    lines += [f"  share {name} = {size}" for name, size in launch.shares.items()]
    lines.append(f"  node {launch.node} also {attr_text(launch.also)} flops {launch.flops}")
    lines.append(f"  where {json.dumps(launch.where)}")
    return "\n".join(lines)


def view_text(view: View) -> str:
    """A view with its type; strides only if not contiguous, the offset only if not 0."""
    strides = f" strides {attr_text(view.strides)}" if view.strides != contiguous_strides(view.shape) else ""
    offset = "" if view.offset == 0 else f" at {view.offset}"
    return f"view {quoted(view.buffer)}: {TensorType(view.shape, view.dtype)}{strides}{offset}"


# -- kernels ----------------------------------------------------------------------------------------------------------
def kernel_text(kernel: Kernel) -> str:
    """A kernel record with all its fields."""
    match kernel:
        case LoopKernel():
            head, *body = kernel.text(full=True).splitlines()
            tables = {e.table for e in expressions(kernel.root) if isinstance(e, Lookup)}
            lines = [f"  words {', '.join(kernel.words)}", *map(_table, sorted(tables, key=lambda t: t.name)), *body]
            return "\n".join([head, *lines])
        case MatmulKernel():
            return "\n".join([f"kernel {kernel.symbol}", *_matmul(kernel)])
        case AttentionKernel():
            return f"kernel {kernel.symbol}\n  attention {_fields(kernel)}"
        case AttentionGradKernel():
            return f"kernel {kernel.symbol}\n  attention_grad {_fields(kernel.attention)}"


def _table(table: Table) -> str:
    return f"  table {table.name} = {', '.join(map(str, table.values))}"


def _fields(record: MatmulKernel | AttentionKernel, *left_out: str) -> str:
    """The fields of a record that are not records themselves."""
    names = (f.name for f in fields(record) if f.name not in left_out)
    return ", ".join(f"{name} {attr_text(getattr(record, name))}" for name in names)


def _matmul(kernel: MatmulKernel) -> Iterator[str]:
    yield f"  matmul {_fields(kernel, 'epilogue', 'epilogue_operands')}"
    for operand in kernel.epilogue_operands:
        yield f"  operand {_operand(operand)}"
    if kernel.epilogue is not None:
        written = (operand.name for operand in kernel.epilogue_operands if operand.written)
        yield f"  epilogue {kernel.epilogue.name}"
        for let in kernel.epilogue.lets:
            yield f"    {let.name} = {expr_text(let.value, full=True)}"
        for name, value in zip(written, kernel.epilogue.values, strict=True):
            yield f"    {name} = {expr_text(value, full=True)}"


def _operand(operand: EpilogueOperand) -> str:
    columns = "" if operand.columns else " per row"
    return f"{operand.name}: {operand.dtype}{columns}{' written' if operand.written else ''}"
