"""Unabridged text of LIR: what is printed is read back as it was, and broken text is refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from graphs import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_programs import PROGRAMS, plan
from loop_graphs import loop_graphs, odd_graph
from targets import AVX2, AVX512

import rlx
from rlx.dtypes import BF16, BOOL, F32, F64, I32, I64, U8, DType, dtype
from rlx.errors import ParseError, RlxError
from rlx.ir import registry
from rlx.lir.loops import (
    Apply,
    Arg,
    Assign,
    Check,
    Choose,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    Lookup,
    LoopKernel,
    Param,
    Reduce,
    Ref,
    Store,
    Table,
    Var,
)
from rlx.lir.module import plan_lir
from rlx.lir.parse import parse_kernel
from rlx.lir.program import Program
from rlx.lir.text import kernel_text
from rlx.profile import CompileProfile

rlx.Graph("any")  # declares the ops
OPS = [
    op.name
    for op in registry.OPS.values()
    if op.samples and not op.traits & {registry.LEAF, registry.FUSED, registry.CONTROL}
]


def check_round_trip(graph: rlx.Graph) -> None:
    module = plan_lir(graph, AVX512, CompileProfile())
    for program in (module.main, module.bind):
        check_program(program)


def check_program(program: Program) -> None:
    text = program.text(full=True)
    parsed = Program.parse(text)
    assert parsed == program
    assert parsed.text(full=True) == text
    assert parsed.fingerprint() == program.fingerprint()


def sample_graph(name: str, floats: DType) -> rlx.Graph:
    """All samples of an op in one graph, their floats in a type."""
    op = registry.get(name)
    graph = rlx.Graph(name, level=op.level)
    outputs: list[rlx.Value] = []
    for number, s in enumerate(op.samples):
        values: list[Any] = []
        for position, spec in enumerate(s.operands):
            kind = None if spec is None else dtype(spec.dtype)
            leaf = graph.param if kind is not None and kind.is_packed else graph.input
            kind = floats if kind is F32 else kind
            values.append(None if spec is None else leaf(f"x{number}_{position}", spec.shape, kind))
        try:
            results = graph.apply(name, *values, **s.attrs)
        except RlxError:  # this sample only takes f32
            assert floats is not F32
            continue
        outputs += results if isinstance(results, tuple) else [results]
    return graph.set_outputs(outputs)


@pytest.mark.parametrize("op", OPS)
def test_programs_of_every_op_are_read_back(op: str) -> None:
    for floats in (F32, BF16):
        graph = sample_graph(op, floats)
        if graph.outputs:
            check_round_trip(graph)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_models_are_read_back(tmp_path: Path, name: str) -> None:
    module = plan(name, tmp_path, AVX2)
    check_program(module.main)
    check_program(module.bind)


def test_loops_and_branches_are_read_back() -> None:
    check_round_trip(odd_graph())
    g, more, step = (rlx.Graph(name) for name in ("g", "more", "step"))
    more.set_outputs([more.input("i", (), "i32") < 5])
    step.set_outputs([step.input("i", (), "i32") + 1])
    check_round_trip(g.set_outputs([g.while_loop(g.input("i", (), "i32"), more, step)]))


@given(loop_graphs())
@examples(15)
def test_random_loops_are_read_back(graph: rlx.Graph) -> None:
    check_round_trip(graph)


def test_names_and_notes_of_any_kind_are_read_back() -> None:
    g = rlx.Graph('a "name"')
    x = g.input("x, y: (1)", ("n", 4))
    n = rlx.dim("n", max=70)
    check_round_trip(g.set_outputs([x @ g.param("w -> =", (4, 3)), g.input("z", (n,)) + 1.5]))


# -- kernels -----------------------------------------------------------------------------------------------------------
TABLE = Table.of("squares", (0, 1, 4, 9))
numbers = st.one_of(
    st.integers(-(2**40), 2**40).map(lambda v: Const(v, I64)), st.integers(-9, 9).map(lambda v: Const(v, I32)),
    st.floats(allow_nan=False).map(lambda v: Const(v, F32)), st.floats(allow_nan=False).map(lambda v: Const(v, F64)),
    st.booleans().map(lambda v: Const(v, BOOL)), st.just(Const(0, F32)), st.just(Const(3, U8)),
)  # fmt: skip
leaves = numbers | st.sampled_from([Index("u"), Arg("n"), Ref("v", F32), Ref("total", I64)])


def larger(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    """Expressions of others; types need not make sense, only be as they are."""
    places = st.lists(st.tuples(inner, st.sampled_from([1, 4, -2, Arg("n")])), max_size=3).map(tuple)
    infix = st.sampled_from(
        ["add", "sub", "mul", "div", "floordiv", "mod", "and", "or", "xor", "shl", "shr", "max", "lt"]
    )
    return st.one_of(
        st.builds(lambda op, a, b, d: Apply(op, (a, b), d), infix, inner, inner, st.sampled_from([F32, I64, BOOL])),
        st.builds(lambda a, d: Apply("cast", (a,), d), inner, st.sampled_from([F32, I64, U8])),
        st.builds(lambda a, b, c: Apply("select", (a, b, c), b.dtype), inner, inner, inner),
        st.builds(Choose, inner, inner, inner),
        st.builds(lambda op, x: Reduce(op, "q", Arg("n"), x), st.sampled_from(["sum", "max"]), inner),
        st.builds(lambda at: Load(0, at, F32), places),
        st.builds(lambda i: Lookup(TABLE, i), inner),
    )


@given(st.recursive(leaves, larger, max_leaves=12), st.booleans())
@examples(300)
def test_any_expression_is_read_back(value: Expr, vector: bool) -> None:
    store = Store(1, ((value, 1), (Index("j"), 3)), value)
    inner = For("j", Ref("total", I64), (Let("w", value), Assign("total", value), store), vector)
    body = (Let("v", Const(1.0, F32)), Var("total", Const(0, I64)), Check(value, 7), inner)
    params = (Param("out", F32, True), Param("y", F32, True), Param("x", F32))
    kernel = LoopKernel("any", params, ("n",), For("u", Arg("n"), body), 64, (Let("first", Arg("n")),))
    parsed = parse_kernel(kernel_text(kernel))
    assert parsed == kernel
    assert parsed.symbol == kernel.symbol
    assert kernel_text(parsed) == kernel_text(kernel)


def test_tables_are_read_back_with_their_numbers() -> None:
    body = (Store(0, ((Index("u"), 1),), Lookup(TABLE, Index("u"))),)
    kernel = LoopKernel("square", (Param("y", I32, True),), (), For("u", 4, body))
    parsed = parse_kernel(kernel_text(kernel))
    (load,) = (s.value for s in parsed.root.body if isinstance(s, Store))  # type: ignore[union-attr]
    assert isinstance(load, Lookup)
    assert load.table.values == (0, 1, 4, 9)


# -- broken text -------------------------------------------------------------------------------------------------------
GOOD = """program @p(n) for avx512
  input x: f32[n]
  output y: f32[n]
  launch copy split rows units n
    x0 = view x: f32[n]
    y1 = view y: f32[n]
    units = n

kernel copy(x0: f32) -> y1: f32
  words x0, y1, units
  for u in units split:
    y1[u] = x0[u]
"""
BROKEN: list[tuple[Callable[[str], str], str]] = [
    (lambda t: "", "line 1: this is not a program"),
    (lambda t: t.replace("launch copy", "launch cop"), r"line 4: no kernel is called cop"),
    (lambda t: t.replace("view x:", "view z:"), r"line 5: no buffer is called 'z'"),
    (lambda t: t.replace("units = n", "unit = n"), r"line 4: copy has no word 'unit'"),
    (lambda t: t.replace("units = n", "units = n +"), "line 7"),
    (lambda t: t.replace("input x: f32[n]", "input y: f32[n]"), "line 3: buffer 'y' is declared twice"),
    (lambda t: t.replace("input x: f32[n]", "input x: f33[n]"), "line 2: .*'f33'"),
    (lambda t: t.replace("kernel copy(", "kernel copy.01234567("), "line 9: the contents .* copy.[0-9a-f]{8}"),
    (lambda t: t.replace("= x0[u]", "= x9[u]"), "line 12: 'x9' is neither a parameter nor a table"),
    (lambda t: t.replace("= x0[u]", "= (x0[u] + )"), r"line 12: expected an expression, found '\)'"),
    (lambda t: t.replace("= x0[u]", "= x0[u] x0[u]"), "line 12: 'x0' follows the expression"),
    (lambda t: t.replace("= x0[u]", "= ex(x0[u])"), "line 12: no operation 'ex' takes 1 operands"),
    (lambda t: t.replace("y1[u] = x0[u]", "y1[u] =="), "line 12"),
    (lambda t: t.replace(" split:", ":"), "line 11: a kernel needs one outer loop marked split"),
    (lambda t: t.replace("words x0, y1", "words x0, y2"), "line 10: the first words are not the parameters"),
    (lambda t: t.replace("  launch copy split", "  lunch copy split"), "line 4: this is not a launch"),
    (lambda t: t + t[t.index("kernel") :], "line 1[34]: kernel copy is declared twice"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_broken_text_is_refused_with_its_line(change: Callable[[str], str], message: str) -> None:
    assert Program.parse(GOOD).launches[0].kernel.name == "copy"  # type: ignore[union-attr]
    with pytest.raises(ParseError, match=message):
        Program.parse(change(GOOD))


def test_comments_and_blank_lines_are_left_out() -> None:
    commented = GOOD.replace("\n", '  # a "note"\n\n')
    assert Program.parse("# first\n" + commented) == Program.parse(GOOD)


def test_an_attribute_that_is_broken_is_refused_with_the_line_of_the_program() -> None:
    broken = GOOD.replace("x0 = view x: f32[n]", 'x0 = view x: f32[n] strides ("a\\q", 1)')
    with pytest.raises(ParseError, match=r"^LIR text: line 5: .* is not a string"):
        Program.parse(broken)


@given(st.data())
@examples(200)
def test_mutated_text_is_read_or_refused(data: st.DataObject) -> None:
    lines = GOOD.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        i, j = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        lines[i] = data.draw(
            st.sampled_from([lines[j], lines[i][:-3], lines[i] + lines[j].strip(), "  " + lines[i], ""])
        )
    try:
        Program.parse("\n".join(lines))
    except RlxError as error:
        assert len(str(error)) <= 500
