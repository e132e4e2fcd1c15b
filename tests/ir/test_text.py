"""Graphs as text: what prints reads back, and what does not read is a ParseError that tells the line."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
from graphs import any_graphs, examples
from hypothesis import given
from hypothesis import strategies as st
from targets import AVX512

from rlx import Graph
from rlx.dtypes import ALL, DType
from rlx.errors import ParseError
from rlx.ir import source as source_module
from rlx.ir import text as text_module
from rlx.ir.source import Source
from rlx.ir.text import attr_text, parse_attr
from rlx.mir.pipeline import optimise
from rlx.types import dim, parse_dim


@given(any_graphs())
@examples(200)
def test_a_printed_graph_reads_back(g: Graph) -> None:
    text = g.text(full=True)
    again = Graph.parse(text)
    assert again == g
    assert again.verify().text(full=True) == text
    assert pickle.loads(pickle.dumps(g)) == g


@given(any_graphs(max_steps=6), st.randoms(use_true_random=False))
@examples(300)
def test_mutated_text_is_a_graph_or_a_parse_error(g: Graph, random: Any) -> None:
    """Whatever happens to the text, the parser gives a graph that verifies or says what is wrong, and where."""
    text = g.text(full=True)
    for _ in range(random.randint(1, 4)):
        at, size = random.randrange(len(text) + 1), random.choice([0, 1, 1, 3, 20])
        new = random.choice(
            [
                "",
                "",
                *'"\\%=:;,()[]{}#\n 7n-.',
                "none",
                "return",
                "f32[2]",
                "%0",
                "graph @g mir {",
                "\x00",
                "é",
                "1e999",
            ]
        )
        new = text[(b := random.randrange(len(text) + 1)) : b + 20] if random.random() < 0.2 else new
        text = text[:at] + new + text[at + size :]
    try:
        again = Graph.parse(text)
    except ParseError as error:
        assert str(error).startswith(("graph text: line ", "graph text: "))
    else:
        again.verify()


SMALL = """\
graph @small mir {
  %0 = input(name="x") : f32[n, 4]
  %1 = const(value=[1.0, 2.0, 3.0, 4.0]) : f32[4]
  %2 = add(%0, %1) : f32[n, 4]
  %3 = topk(%2, k=2) : f32[n, 2]; i32[n, 2]
  %4 = attention(%0, %0, %0, none, mask_kind="none") : f32[n, 4]
  return %3.0, %3.1
}"""
VALID = SMALL.replace('  %4 = attention(%0, %0, %0, none, mask_kind="none") : f32[n, 4]\n', "")


def test_text_may_be_laid_out_freely_and_commented() -> None:
    g = Graph.parse(VALID)
    assert g.text() == VALID
    assert Graph.parse(" ".join(VALID.split())) == g
    assert (
        Graph.parse("# a graph\n\n" + VALID.replace(" : ", "\n   :   ").replace("\n", "  # why\n") + "\n # end\n") == g
    )
    assert len(g.outputs) == 2 and g.outputs[1].dtype.name == "i32"


def test_origins_print_as_comments_and_read_back() -> None:
    g = Graph("g")
    x = g.input("x  # no comment", (2,))
    g.set_outputs([x * 2.0])
    text = g.text(origins=True)
    assert "test_text.py:" in text
    assert Graph.parse(text) == g


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("%2 = add", "%7 = add", 4, "node %7 stands where %2 is expected"),
        ("= add(", "= ad(", 4, "no op is called 'ad'"),
        ("(%0, %1)", "(%0, %2)", 4, "%2 is not defined before it is used"),
        ("(%0, %1)", "(%0, %0.1)", 4, "%0.1: %0 has 1 results"),
        ("(%0, %1)", "(%0)", 4, "add: cannot be typed"),
        ("(%0, %1)", "(%0, axis=1)", 4, "add: cannot be typed"),
        ("(%0, %1) : f32[n, 4]", "(%0, %1) : f32[n, 5]", 4, r"has type f32\[n, 5\], its rule gives f32\[n, 4\]"),
        ("(%0, %1) : f32[n, 4]", "(%0, %1)", 4, "is not a node"),
        ("(%0, %1) : f32[n, 4]", "(%0, %1) : f33[n, 4]", 4, "'f33' is not an element type"),
        ("(%0, %1) : f32[n, 4]", "(%0, %1) : f32[n +, 4]", 4, "is not a size"),
        ('name="x"', 'name="x', 2, "is not a string"),
        ('name="x"', 'name=x"', 2, "is not a string"),
        ('name="x"', 'nom="x"', 2, "attribute 'name' is missing"),
        ('name="x"', 'name=""', 2, "'' is not a new name"),
        ('name="x"', "name=3", 2, "3 is not a new name"),
        ("const(value=[1.0, 2.0, 3.0, 4.0])", 'param(name="x")', 3, "'x' is not a new name"),
        ("[1.0, 2.0, 3.0, 4.0]", "[1.0, 2.0, 3.0]", 3, r"a constant f32\[4\] has 3 elements"),
        ("[1.0, 2.0, 3.0, 4.0]", "[1.0, 2.0, x]", 3, "broken data"),
        ("[1.0, 2.0, 3.0, 4.0]", '["1", 2, 3, 4]', 3, "is not a number"),
        ("[1.0, 2.0, 3.0, 4.0]", "@0123456789ab", 3, "has no data here"),
        ("[1.0, 2.0, 3.0, 4.0]", "f32[4]:AAAA", 3, "broken data|elements"),
        ("[1.0, 2.0, 3.0, 4.0]", "f64[4]:AAAA", 3, "has data of type f64"),
        ("k=2", "k=two", 5, "cannot be typed"),
        ("k=2", "k", 5, "is neither an operand nor an attribute"),
        ("k=2", "k=2, k=2", 5, "is neither an operand nor an attribute"),
        ("k=2", "k=graph @b mir {\n return %0\n}", 6, "%0 is not defined"),
        ("k=2", 'k="', 5, "is not a string"),
        ("return %3.0, %3.1", "return %3.0, %3.2", 6, "%3 has 2 results"),
        ("return %3.0, %3.1", "return x", 6, "'x' is not a value"),
        ("return %3.0, %3.1", "", 5, "a graph ends with its return"),
        ("return %3.0, %3.1", "return %0 return %0", 6, "more follows the return"),
        ("graph @small mir {", "graph @small lir {", 1, "level 'lir' is not hir or mir"),
        ("graph @small mir {", "graph @small mir max(n) {", 1, "is not a limit"),
        ("graph @small mir {", "graph small mir {", 1, "expected 'graph @name level {'"),
        ("graph @small mir {", "graph @small mir { 3", 1, "'3' is not a node"),
    ],
)  # fmt: skip
def test_a_parse_error_tells_the_line(old: str, new: str, line: int, problem: str) -> None:
    assert VALID.count(old) == 1
    with pytest.raises(ParseError, match=problem) as caught:
        Graph.parse(VALID.replace(old, new))
    assert str(caught.value).startswith(f"graph text: line {line}: ")


def test_attributes_and_operands_that_are_left_out_have_their_defaults() -> None:
    """An op may gain them without breaking saved texts."""
    g = Graph("g")
    x = g.input("x", (3, 5))
    g.set_outputs([x.sum(axis=(0,)), x.fake_quantise(axis=1)])
    text = g.text()
    short = text
    for part in (", keepdims=false", ", none", "bits=8, "):
        assert part in short
        short = short.replace(part, "")
    actual = Graph.parse(short)
    assert actual == g
    assert actual.text() == text  # in the order of the signature, too
    assert actual.fingerprint() == g.fingerprint()


def test_text_around_a_graph_is_an_error() -> None:
    for text, problem in (("", "expected"), (VALID + " x", "follows the closing brace"), (VALID[:-1], "closing brace")):
        with pytest.raises(ParseError, match=problem):
            Graph.parse(text)
    with pytest.raises(ParseError, match="HIR op in an MIR graph"):
        Graph.parse(SMALL.replace("attention(%0, %0, %0, none, mask_kind", "linear(%0, %0, %0, activation"))


def test_nesting_without_end_is_an_error() -> None:
    body = '%0 = input(name="x") : f32[2] %1 = region(%0, body=graph @b mir {'
    with pytest.raises(ParseError, match=r"line 1: .* nested too deeply, in more than 200 brackets"):
        Graph.parse("graph @g mir {" + body * 3000)
    for deep in ("[" * 100_000 + "]" * 100_000, "(" * 50_000 + ",)" * 50_000, "(" * 100_000 + "n" + ")" * 100_000):
        with pytest.raises(ParseError, match="nested too deeply"):
            Graph.parse(f"graph @g mir {{ %0 = const(value={deep}) : f32[0] return %0 }}")


def nested_text(depth: int, nodes: int) -> str:
    """A chain of nodes inside of as many loops."""
    chain = "".join(f"%{i} = exp(%{i - 1}) : f32[4]\n" for i in range(1, nodes))
    text = f'graph @b mir {{ %0 = input(name="c") : f32[4]\n{chain} return %{nodes - 1} }}'
    rest = "length=2, carries=1, broadcasts=0, reverse=false, checkpoints=0"
    for _ in range(depth):
        text = f'graph @b mir {{ %0 = input(name="c") : f32[4] %1 = scan(%0, body={text}, {rest}) : f32[4] return %1 }}'
    return text


class Counting:
    """A pattern that counts how often it is searched for."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.searches = pattern, 0

    def search(self, *where: Any) -> re.Match[str] | None:
        self.searches += 1
        return self.pattern.search(*where)


def test_the_text_of_a_body_is_not_read_again_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    def searches(depth: int) -> int:
        statements = Counting(text_module._STATEMENT)
        separators = {c: Counting(p) for c, p in source_module._SEPARATORS.items()}
        with monkeypatch.context() as patch:
            patch.setattr(text_module, "_STATEMENT", statements)
            patch.setattr(source_module, "_SEPARATORS", separators)
            Graph.parse(nested_text(depth, 100))
        return statements.searches + sum(s.searches for s in separators.values())

    flat, deep = searches(0), searches(90)
    assert flat > 300 and deep < flat + 90 * 40


def test_an_unclosed_string_is_found_at_once() -> None:
    """Each quote of it could be the start of another string that does not end."""
    with pytest.raises(ParseError, match=r"line 2: .* is not a string"):
        Graph.parse('graph @a mir {\n "' + '\\"' * 200_000)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("graph @a mir { %0 = input(name=(1]) : f32[2] return %0 }", "']' closes nothing"),
        ("graph @a mir { return } }", "'}' closes nothing"),
        ("graph @a mir {\n %0 = exp(%1\n return %0 }", "'}' closes nothing"),
        ("graph @a mir {\n %0 = input(name=[", "line 2: a closing bracket is missing"),
        ("graph @a mir {\n %0 = input(", "line 2: a closing parenthesis is missing"),
    ],
)
def test_brackets_that_do_not_match_are_named(text: str, problem: str) -> None:
    with pytest.raises(ParseError, match=re.escape(problem)):
        Graph.parse(text)


@pytest.mark.parametrize(
    "old",
    ["add", "f32[4]", "n, 4]\n  %1", "%3.1", "topk(%2, k=2)", "mir", "[1.0, 2.0, 3.0, 4.0]", "k=2", "2]; i32"],
)
def test_messages_stay_short(old: str) -> None:
    for new in (
        "x" * 100_000,
        "x" * 100_000 + "[4]",
        "%" + "9" * 10_000,
        "(" + "n, " * 10_000 + ")",
        '"' + "é" * 10_000 + '"',
    ):
        assert VALID.count(old) >= 1
        with pytest.raises(ParseError) as caught:
            Graph.parse(VALID.replace(old, new, 1))
        assert len(str(caught.value)) <= 500
        assert all(len(note) <= 500 for note in caught.value.notes)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -7, 10**30, 0.0, -0.0, 1e-45, 1e300, 0.1, float("inf"), float("-inf"), "", "none", "1",
        'say "hi"', "{}, (a) = [b]; # c", "\\", '\\"', "line\nbreak", "é\u2028\x00", (), (1,), ((),), ((1,), (2, 3)),
        (1, "a,b", None),
        dim("n"), dim("n") * 2 - 1, dim("n") // 2, (dim("n") // 2 * dim("m"),), (parse_dim("(n // 2) // m"), 3),
        parse_dim("min(n, m // 3)"), (parse_dim("max(n, 3)"), -1), *ALL,
    ],
    ids=str,
)  # fmt: skip
def test_attributes_read_back(value: Any) -> None:
    again = parse_attr(Source(attr_text(value), "attribute"))
    assert again == value and type(again) is type(value)
    assert np.signbit(again) == np.signbit(value) if isinstance(value, float) else True


def test_a_nan_attribute_reads_back() -> None:
    assert np.isnan(parse_attr(Source(attr_text(float("nan")), "attribute")))


@pytest.mark.parametrize("d", ALL, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3), (65,), (10, 10)], ids=str)
def test_constants_read_back_bit_for_bit(d: DType, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    data = np.frombuffer(rng.bytes(int(np.prod(shape)) * d.size), np.uint8)
    array = (data % 2 if d.is_bool else data).view(d.numpy).reshape(shape)
    g = Graph("g")
    g.set_outputs([g.constant(array)])
    again = Graph.parse(g.text(full=True))
    actual = again.outputs[0].node.attrs["value"].data
    assert actual.dtype == array.dtype and actual.tobytes() == array.tobytes()
    if array.size > 64:
        assert re.search(r"value=@[0-9a-f]{32}\)", g.text())
        with pytest.raises(ParseError, match="has no data here"):
            Graph.parse(g.text())
    elif not d.is_float:
        assert Graph.parse(g.text()) == g


def test_special_numbers_print_plainly() -> None:
    g = Graph("g")
    for kind in ("f32", "bf16", "f16", "f64"):
        g.constant([0.0, -0.0, np.inf, -np.inf, 1.5], kind)
    text = g.set_outputs([]).text()
    assert text.count("[0.0, -0.0, Infinity, -Infinity, 1.5]") == 4
    assert Graph.parse(text) == g


def test_limits_and_odd_names_are_part_of_the_text() -> None:
    g = Graph('my "graph" {', level="hir")
    x = g.input("x", (dim("n", max=7), "m"))
    g.set_outputs([x])
    assert g.text().startswith('graph @"my \\"graph\\" {" hir max(n=7) {')
    again = Graph.parse(g.text())
    assert again == g and again.name == g.name and again.limits == {"n": 7}


def test_a_body_prints_as_indented_lines() -> None:
    g = Graph("g")
    x, w = g.input("x", ("n", 4)), g.param("w", (4, 2))
    g.set_outputs([(x @ w).tanh() * 2.0])
    assert (
        optimise(g, AVX512).main.text()
        == """\
graph @g mir {
  %0 = param(name="@0") : f32[1, 4, 64]
  %1 = input(name="x") : f32[n, 4]
  %2 = fused_matmul(%1, %0, body=graph @body mir {
    %0 = input(name="acc0") : f32[n, 2]
    %1 = tanh(%0) : f32[n, 2]
    %2 = const(value=2.0) : f32[]
    %3 = mul(%1, %2) : f32[n, 2]
    return %3
  }, weights=1, columns=2, layout=cpu.panels(64)) : f32[n, 2]
  return %2
}"""
    )


@pytest.mark.parametrize("weights", [0, -1, 2, 2**31, 10**30])
def test_a_fused_product_has_as_many_weights_as_its_body_reads(weights: int) -> None:
    g = Graph("g")
    x, w = g.input("x", ("n", 4)), g.param("w", (4, 2))
    text = optimise(g.set_outputs([(x @ w).tanh()]), AVX512).main.text()
    assert Graph.parse(text)
    with pytest.raises(ParseError, match=f"fused_matmul: {weights} weights, and a body of 1 inputs"):
        Graph.parse(text.replace("weights=1", f"weights={weights}"))


def test_fixed_params_are_in_the_head() -> None:
    g = Graph("g")
    x, names = g.input("x", (3,)), ['a "b" (c), {d', "rope.cos", "gone"]
    for name in names[:2]:
        x = x * g.param(name, (3,))
    g.set_outputs([x])
    g.fixed = set(names)
    text = g.text()
    assert text.splitlines()[0] == r'graph @g mir fixed("a \"b\" (c), {d", "rope.cos") {'
    spaced = text.replace("fixed(", "fixed ( ").replace("fixed ( ", "fixed(  \n ")
    for again in (text, spaced):
        assert Graph.parse(again).fixed == set(names[:2])
    assert Graph.parse(text).text() == text


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ('fixed("x")', "fixed: 'x' is not a param"), ('fixed("y")', "fixed: 'y' is not a param"),
        ("fixed(w)", "expected 'graph @name level {'"), (r'fixed("\x")', "is not a string"),
    ],
)  # fmt: skip
def test_wrong_names_of_fixed_params_are_errors(head: str, problem: str) -> None:
    text = f'graph @g mir {head} {{\n  %0 = input(name="x") : f32[3]\n  return %0\n}}'
    with pytest.raises(ParseError, match=re.escape(problem)):
        Graph.parse(text)


@pytest.mark.parametrize(("kind", "is_refused"), [("bf16", False), ("f16", False), ("f64", True), ("i16", True)])
def test_a_fused_product_takes_weights_that_are_narrower_than_x(kind: str, is_refused: bool) -> None:
    g = Graph("g")
    x, w = g.input("x", ("n", 4)), g.param("w", (4, 2))
    text = optimise(g.set_outputs([(x @ w).tanh()]), AVX512).main.text()
    other = text.replace('(name="@0") : f32', f'(name="@0") : {kind}')
    assert other != text
    if is_refused:
        with pytest.raises(ParseError, match=f"fused_matmul: x is f32, the weight {kind}"):
            Graph.parse(other)
    else:
        assert Graph.parse(other).text() == other
