"""Sizes: the algebra of dims, their text, their evaluation; broadcasting; bindings at run time."""

from __future__ import annotations

import keyword
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from graphs import examples
from hypothesis import assume, given
from hypothesis import strategies as st

import rlx
from rlx.errors import BindError, GraphError, ParseError, ShapeError
from rlx.types import (
    MAX_BITS,
    MAX_NAME,
    MAX_NESTING,
    MAX_PARTS,
    Dim,
    DimBinding,
    Size,
    TensorType,
    as_shape,
    broadcast,
    compile_sizes,
    contiguous_strides,
    dim,
    dim_max,
    dim_min,
    evaluate,
    is_monotone,
    known_equal,
    parse_dim,
    parse_type,
    require_equal,
    round_up_power_of_two,
    split_top,
    tensor,
)

NAMES = ["batch", "seq", "n", "min", "max", "in", "lambda", "None", "β", "s0"]
names = st.sampled_from(NAMES)
bindings = st.fixed_dictionaries({name: st.integers(0, 9) for name in NAMES})

# An expression is a number, a name or (op, left, right): what it means is plain Python.
Tree = Any
trees: st.SearchStrategy[Tree] = st.recursive(
    st.integers(-3, 9) | names,
    lambda inner: st.tuples(st.sampled_from(["+", "-", "*", "//", "min", "max"]), inner, inner),
    max_leaves=8,
)


def combine(op: str, a: Any, b: Any) -> Any:
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return a // b
        case "min":
            return min(a, b) if isinstance(a, int) and isinstance(b, int) else dim_min(a, b)
        case _:
            return max(a, b) if isinstance(a, int) and isinstance(b, int) else dim_max(a, b)


def size_of(tree: Tree) -> Size:
    """The tree as a size; trees that divide by zero are not tried."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return dim(tree)
    op, left, right = tree
    a, b = size_of(left), size_of(right)
    assume(op != "//" or b != 0)
    result: Size = combine(op, a, b)
    return result


def value_of(tree: Tree, binding: Mapping[str, int]) -> int:
    """The tree's value, by Python alone."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return binding[tree]
    op, left, right = tree
    a, b = value_of(left, binding), value_of(right, binding)
    assume(op != "//" or b != 0)
    result: int = combine(op, a, b)
    return result


# -- algebra ----------------------------------------------------------------------------------------------------------
@given(trees, bindings)
@examples()
def test_a_size_means_what_its_expression_means(tree: Tree, binding: dict[str, int]) -> None:
    expected = value_of(tree, binding)
    assert evaluate(size_of(tree), binding) == expected


@given(trees, trees, trees)
@examples()
def test_sums_and_products_have_one_form(a: Tree, b: Tree, c: Tree) -> None:
    x, y, z = size_of(a), size_of(b), size_of(c)
    assert x + y == y + x
    assert x * y == y * x
    assert (x + y) + z == x + (y + z)
    assert (x * y) * z == x * (y * z)
    assert x * (y + z) == x * y + x * z
    assert (x + y) * (x - y) == x * x - y * y
    assert x - x == 0
    assert dim_min(x, y) == dim_min(y, x)
    assert dim_max(x, y) == dim_max(y, x)
    assert hash(x + y) == hash(y + x)


@given(trees, trees)
@examples()
def test_what_was_multiplied_divides_again(a: Tree, b: Tree) -> None:
    x, y = size_of(a), size_of(b)
    assume(y != 0)
    assert (x * y) // y == x


@given(trees)
@examples()
def test_text_reads_back(tree: Tree) -> None:
    size = size_of(tree)
    assert parse_dim(str(size)) == size
    assert pickle.loads(pickle.dumps(size)) == size


@given(st.lists(trees, max_size=5), bindings)
@examples()
def test_compiled_sizes_agree_with_evaluation(several: list[Tree], binding: dict[str, int]) -> None:
    sizes = [size_of(t) for t in several]
    expected = [value_of(t, binding) for t in several]
    symbols = sorted(binding)
    assert list(compile_sizes(symbols, sizes)(*(binding[s] for s in symbols))) == expected


@given(trees, bindings, names, st.integers(0, 3))
@examples()
def test_monotone_sizes_only_grow(tree: Tree, binding: dict[str, int], name: str, more: int) -> None:
    size = size_of(tree)
    assume(is_monotone(size))
    assert 0 <= evaluate(size, binding) <= evaluate(size, binding | {name: binding[name] + more})


def test_plain_sizes_are_ints() -> None:
    n, m = dim("n"), dim("m")
    assert n - n + 4 == 4 and isinstance(n - n + 4, int)
    assert (n * 6) // 3 == n * 2
    assert (n * m + m * 2) // m == n + 2
    assert ((n + m) * 4) // (n + m) == 4
    assert (n * 64 + 63) // 64 == n
    assert (n * 2 + 3) // 2 == n + 1
    assert dim_max(n, n + 3) == n + 3
    assert dim_min(n, n + 3) == n
    assert 0 // n == 0


@pytest.mark.parametrize("name", ["batch", "min", "max", "s0", "_x1", "β", *keyword.kwlist, *keyword.softkwlist])
def test_any_word_can_name_a_symbol(name: str) -> None:
    n = dim(name)
    size = dim_min(n * n + 1, dim_max(n, 3)) // 2
    assert parse_dim(str(n)) == n
    assert parse_dim(str(size)) == size
    assert compile_sizes([name], [n, size])(5) == (5, 2)
    assert DimBinding({name: 5}).get(size) == 2


@pytest.mark.parametrize("name", ["", "2n", "a b", "a-b", "a.b", "a·b", "none", "true", "f32", "nan"])
def test_words_that_cannot_name_a_symbol(name: str) -> None:
    with pytest.raises(GraphError, match="dim: "):
        dim(name)


@pytest.mark.parametrize(
    "text",
    ["", "n +", "n n", "2.5", "n ** 2", "n / 2", "n // 0", "min(n)", "min(n, 1, 2)", "f(n)", "(n", "n)", "n[0]",
     "n % 2", "'n'", "1_000", "0x10", "None + true", "é́", "(" * 3000 + "n" + ")" * 3000, "-" * 5000 + "n"],
)  # fmt: skip
def test_text_that_is_no_size_is_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError, match="is not a size"):
        parse_dim(text)


def test_numbers_that_are_no_sizes_do_not_combine_with_dims() -> None:
    n: Any = dim("n")
    for other in (2.5, "3", None):
        with pytest.raises(ShapeError, match="is not a size"):
            n + other
        with pytest.raises(ShapeError, match="is not a size"):
            n * other
    assert np.int64(3) * n == n * np.int32(3) == 3 * n
    assert np.int64(3) + n == 3 + n


def test_a_dim_has_no_value_before_run_time() -> None:
    n = dim("n")
    for ask in (bool, int):
        with pytest.raises(ShapeError, match="not known before run time") as caught:
            ask(n)
        assert caught.value.hint


def test_division_by_a_size_of_zero_says_which() -> None:
    size = dim("n") // dim("m")
    with pytest.raises(BindError, match=r"m is 0"):
        evaluate(size, {"n": 4, "m": 0})
    with pytest.raises(BindError, match=r"m is 0"):
        compile_sizes(["n", "m"], [4, size])(4, 0)
    with pytest.raises(ShapeError, match="// 0"):
        dim("n") // 0


def test_an_unbound_symbol_is_named() -> None:
    with pytest.raises(BindError, match="'m' is not bound"):
        evaluate(dim("n") * dim("m"), {"n": 1})
    with pytest.raises(BindError, match="'m' is not among n"):
        compile_sizes(["n"], [dim("m")])
    with pytest.raises(BindError, match="'m' is not among none"):
        compile_sizes([], [dim("m")])


@pytest.mark.parametrize(
    ("n", "up"), [(0, 0), (1, 1), (2, 2), (3, 4), (1023, 1024), (2**53 + 1, 2**54), (2**62, 2**62)]
)
def test_rounding_up_to_a_power_of_two(n: int, up: int) -> None:
    assert round_up_power_of_two(n) == up


# -- bounds -----------------------------------------------------------------------------------------------------------
def total(count: int) -> str:
    return " + ".join(f"n{i}" for i in range(count))


@pytest.mark.parametrize(
    "text",
    [
        "*".join(f"(a{i} + b{i})" for i in range(40)),  # 2^40 terms
        "*".join(["(a + b + c + d)"] * 40),
        total(MAX_PARTS + 1),
        "*".join(["n"] * (MAX_PARTS + 1)),
        "*".join(["9" * 990] * 100),
        "n*" + "*".join(["9" * 990] * 100),
        "min(n, " * 60 + "m" + ")" * 60,
        "(" * 60 + "n" + " // m)" * 60,
    ],
    ids=lambda text: text[:12],
)
def test_a_size_that_grows_beyond_the_bound_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match=rf"is not a size: .* more than {MAX_PARTS} symbols, numbers") as caught:
        parse_dim(text)
    assert caught.value.hint and "rlx.dim" in caught.value.hint
    assert len(str(caught.value)) <= 500


def test_products_in_python_have_the_same_bound() -> None:
    def product_of_sums() -> Size:
        size: Size = 1
        for i in range(40):
            size = size * (dim(f"a{i}") + dim(f"b{i}"))
        return size

    def sum_of_symbols() -> Size:
        return sum((dim(f"n{i}") for i in range(MAX_PARTS + 1)), start=0)  # type: ignore[arg-type]

    def divisions() -> Size:  # each has the one before in it twice, so that the text of the last has 2^100 parts
        size: Size = dim("n")
        for _ in range(100):
            size = size // 3 + size // 5
        return size

    def large_number() -> Size:
        return dim("n") * (1 << MAX_BITS)

    for build in (product_of_sums, sum_of_symbols, divisions, large_number):
        with pytest.raises(ShapeError, match=f"more than {MAX_PARTS} symbols, numbers and operations") as caught:
            build()
        assert caught.value.hint


def test_sizes_within_the_bound_are_sizes_in_every_way() -> None:
    deep = parse_dim("(" * 50 + "n" + " // 3)" * 50)
    large = parse_dim(total(MAX_PARTS))
    powers = parse_dim("*".join(["n"] * MAX_PARTS))
    for size, value in ((deep, 3**50 * 7), (large, 5), (powers, 2)):
        binding = {s.name: value for s in size.symbols()}  # type: ignore[union-attr]
        wanted = {3**50 * 7: 7, 5: 5 * MAX_PARTS, 2: 2**MAX_PARTS}[value]
        assert parse_dim(str(size)) == size == pickle.loads(pickle.dumps(size))
        assert evaluate(size, binding) == wanted
        assert compile_sizes(list(binding), [size])(*binding.values()) == (wanted,)


def test_division_gives_up_before_it_grows() -> None:
    n = dim("n")
    power = parse_dim("*".join(["n"] * 200))
    assert str(power // (n + dim("m"))) == f"(({power}) // (m + n))"  # the quotient would have 200 terms of 200 symbols
    assert power // n == parse_dim("*".join(["n"] * 199))


def test_every_number_of_a_size_reads_back() -> None:
    """Python prints no number of more than 4,300 digits, and the parser takes none of more than 999."""
    size = dim("n") * ((1 << MAX_BITS) - 1) + 1
    assert parse_dim(str(size)) == size
    for text in ("*".join(["9" * 990] * 2), "n*" + "9" * 990 + "*9", "n*" + "9" * 990):
        with pytest.raises(ParseError, match=f"a number of more than {MAX_BITS} bits"):
            parse_dim(text)


def test_names_and_parentheses_are_bounded() -> None:
    assert parse_dim("n" * MAX_NAME) == dim("n" * MAX_NAME)
    with pytest.raises(GraphError, match="is not a name") as caught:
        dim("n" * (MAX_NAME + 1))
    assert len(str(caught.value)) < 200
    assert parse_dim("(" * (MAX_NESTING - 1) + "n" + ")" * (MAX_NESTING - 1)) == dim("n")
    with pytest.raises(ParseError, match=f"more than {MAX_NESTING} parentheses"):
        parse_dim("(" * 100_000 + "n" + ")" * 100_000)


# -- shapes and types -------------------------------------------------------------------------------------------------
def test_sizes_come_in_many_forms() -> None:
    n = dim("n")
    assert as_shape((n, "n", "2*n", np.int64(3), 0)) == (n, n, 2 * n, 3, 0)
    for wrong in (-1, "-1", 2.0, True, None, [3]):
        with pytest.raises(ShapeError):
            as_shape((wrong,))
    with pytest.raises(ShapeError, match="is a string"):
        as_shape("abc")


@given(st.lists(trees, max_size=3), st.sampled_from(["f32", "bf16", "i64", "bool"]))
@examples()
def test_types_read_back(shape: list[Tree], name: str) -> None:
    sizes = [s for s in map(size_of, shape) if isinstance(s, Dim) or s >= 0]
    type_ = tensor(sizes, name)
    assert parse_type(str(type_)) == type_


@pytest.mark.parametrize(
    "text", ["f32", "f32[", "f32]", "f33[2]", "f32[-1]", "f32[2,,3]", "f32[2 3]", "[2]", "f32[n[2]]"]
)
def test_text_that_is_no_type_is_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError):
        parse_type(text)


def test_a_type_knows_its_size() -> None:
    t = tensor(("batch", 3), "f64")
    assert t.elements == 3 * dim("batch")
    assert t.bytes == 24 * dim("batch")
    assert tensor(()).elements == 1
    assert t.with_dtype("i8").with_shape(2) == TensorType((2,), rlx.dtype("i8"))
    assert contiguous_strides(("n", 2, 3)[1:]) == (3, 1)


shapes = st.lists(st.sampled_from([1, 1, 2, 3, 0]), max_size=4).map(tuple)


@given(shapes, shapes)
@examples()
def test_broadcasting_agrees_with_numpy(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        expected = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(ShapeError, match="do not broadcast"):
            broadcast(a, b)
    else:
        assert broadcast(a, b) == expected


def test_a_symbol_never_broadcasts_as_one() -> None:
    n, m = dim("n"), dim("m")
    assert broadcast((n, 1), (1, m)) == (n, m)
    assert broadcast((2 * n,), (n + n,)) == (2 * n,)
    assert broadcast((3, n), (n,)) == (3, n)
    for a, b in (((n,), (m,)), ((n,), (4,)), ((n,), (n + 1,)), ((n,), (0,))):
        with pytest.raises(ShapeError, match="do not broadcast"):
            broadcast(a, b)


def test_sizes_that_cannot_be_compared_say_how_to_go_on() -> None:
    n, m = dim("n"), dim("m")
    assert known_equal(n, m) is None
    assert known_equal(n, n + 1) is False
    assert known_equal(n * m, m * n) is True
    with pytest.raises(ShapeError) as caught:
        require_equal(n, m, "here: sizes differ")
    assert caught.value.hint == "if n and m are equal whenever this runs, say so: x.assume_equal(shape=...)"
    with pytest.raises(ShapeError) as caught:
        require_equal(n, n + 1, "here: sizes differ")
    assert caught.value.hint is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []), ("  ", []), ("a", ["a"]), ("a, b", ["a", "b"]),
        ("f(a, b), [c, d], {e, f}", ["f(a, b)", "[c, d]", "{e, f}"]),
        ('"a, b", c', ['"a, b"', "c"]), (r'"\", b", c', [r'"\", b"', "c"]), (r'"\\", c', [r'"\\"', "c"]),
        ('"(", c', ['"("', "c"]), ("a,", ["a", ""]),
    ],
)  # fmt: skip
def test_splitting_respects_brackets_and_quotes(text: str, parts: list[str]) -> None:
    assert split_top(text) == parts


# -- bindings ---------------------------------------------------------------------------------------------------------
def test_a_binding_gives_sizes_of_symbols_and_expressions() -> None:
    b = DimBinding.batch_seq(2, 7).set(dim("past_seq"), 3)
    assert b.get("seq") == 7
    assert b.get(rlx.sym.ROWS) == 14
    assert b.get("past_seq + seq") == 10
    assert b.get("unknown") is None
    assert b.items() == [("batch", 2), ("past_seq", 3), ("seq", 7)]
    assert b == DimBinding({"seq": 7, "batch": 2, "past_seq": 3})
    assert DimBinding.batch_past_seq(1, 5).as_dict() == {"batch": 1, "past_seq": 5}
    with pytest.raises(GraphError, match="is an expression"):
        b.set(rlx.sym.ROWS, 3)
    with pytest.raises(ShapeError, match="negative"):
        b.set("seq", -1)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_assumed_sizes_are_checked_at_run_time(device: str) -> None:
    g = rlx.Graph("assumed")
    a, b = g.input("a", ("n", 2)), g.input("b", ("m", 2))
    with pytest.raises(ShapeError) as caught:
        a + b
    assert caught.value.hint and "assume_equal" in caught.value.hint
    f = rlx.compile(g.set_outputs([a + b.assume_equal(shape=("n", 2))]), device)
    ones, wrong = np.ones((3, 2), np.float32), np.ones((4, 2), np.float32)
    assert (f.run({"a": ones, "b": ones})[0] == 2).all()
    with pytest.raises(BindError, match=r"assume_equal: m is 4, n is 3"):
        f.run({"a": ones, "b": wrong})
    with pytest.raises(BindError, match=r"assume_equal: m is 1, n is 3"):
        f.run({"a": ones, "b": wrong[:1]})


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_the_limit_of_a_dim_is_enforced_at_run_time(device: str) -> None:
    g = rlx.Graph("limited")
    n = rlx.dim("n", max=4)
    x = g.input("x", (n, 2))
    y = g.input("y", ("n + 1",))
    assert g.limits == {"n": 4}
    f = rlx.compile(g.set_outputs([x * 2.0, y]), device)
    f.run({"x": np.ones((4, 2), np.float32), "y": np.ones(5, np.float32)})
    with pytest.raises(BindError, match="n is 5, its limit is 4"):
        f.run({"x": np.ones((5, 2), np.float32), "y": np.ones(6, np.float32)})


def test_the_lowest_limit_counts() -> None:
    g = rlx.Graph("limited")
    g.input("x", (rlx.dim("n", max=9),))
    g.input("y", (rlx.dim("n", max=4) * 2,))
    g.input("z", (rlx.dim("n"),))
    assert g.limits == {"n": 4}
    assert rlx.dim("n", max=3) == rlx.dim("n")
