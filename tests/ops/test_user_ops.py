"""Ops that users declare: methods at once, right on both devices, in every place an op can be, and refused clearly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.cli.main import main
from rlx.dtypes import I32, I64
from rlx.errors import GraphError, LowerError
from rlx.ir import registry
from rlx.lir.loops import Expr
from rlx.lir.schedule import Elements, Scheduler, map_elements
from rlx.lir.views import View
from rlx.profile import CompileProfile, Precision
from rlx.transforms import rule_tables

pytestmark = pytest.mark.usefixtures("own_ops")
BOTH = pytest.mark.parametrize("device", ("reference", "cpu"))
rng = np.random.default_rng(5)
T = rlx.TensorType


def same(x: T) -> T:
    """What goes in comes out."""
    return x


def outputs(graph: rlx.Graph, device: str, **inputs: Any) -> list[Any]:
    return rlx.compile(graph, device).run(inputs)


def of_one(build: Any, device: str, x: Any) -> Any:
    """What `build` makes of an input of the shape of x, rows known at run time only."""
    g = rlx.Graph("g")
    g.set_outputs([build(g.input("x", ("n", *x.shape[1:]), x.dtype))])
    return outputs(g, device, x=x)[0]


def mish(x: Any) -> Any:
    return x * np.tanh(np.log1p(np.exp(x)))


def tril_loop(s: Scheduler, node: Any) -> list[View]:
    x, y = s.view(node.operands[0]), s.result(node)
    row, column = x.rank - 2, x.rank - 1

    def body(e: Elements) -> tuple[tuple[()], list[Expr]]:
        inside = e.index(column) <= e.index(row) + node.attrs["k"]
        return (), [inside.choose(e.load(0), 0)]

    map_elements(s, "tril", y.shape, [x], [y], body, keep=(row, column))
    return [y]


# -- the ways to run --------------------------------------------------------------------------------------------------
@BOTH
def test_an_op_by_decomposition(device: str) -> None:
    rlx.op("mish", decompose=lambda x: x * (1 + x.exp()).log().tanh(), doc="Mish.")(same)
    a = rng.normal(size=(5, 7)).astype(np.float32)
    np.testing.assert_allclose(of_one(lambda x: x.mish(), device, a), mish(a.astype(np.float64)), rtol=1e-5)
    np.testing.assert_allclose(
        of_one(lambda x: x.graph.mish(x * 2), device, a), mish(2.0 * a.astype(np.float64)), rtol=1e-5
    )
    half = a.astype(np.float16)
    actual = of_one(lambda x: x.mish(), device, half)
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual.astype(float), mish(half.astype(float)), rtol=2e-3, atol=1e-3)


@BOTH
def test_quotients_of_indices_may_stand_anywhere_in_an_expression(device: str) -> None:
    def loop(s: Scheduler, node: Any) -> list[View]:
        x, y = s.view(node.operands[0]), s.result(node)

        def body(e: Elements) -> tuple[tuple[()], list[Expr]]:
            by = e.load(0).cast(I64)
            quotient, rest = e.index(0).quot(by), e.index(1).rem(by)
            return (), [(by > 2).select(quotient, rest).cast(I32) + e.index(1).quot(5).cast(I32)]

        map_elements(s, "quotients", y.shape, [x], [y], body, keep=(0, 1))
        return [y]

    def reference(x: Any) -> Any:
        row, column = np.indices(x.shape)
        return (np.where(x > 2, row // x, column % x) + column // 5).astype(np.int32)

    rlx.op("quotients", loop=loop, reference=reference)(same)
    a = rng.integers(1, 6, (13, 21), dtype=np.int32)
    np.testing.assert_array_equal(of_one(lambda x: x.quotients(), device, a), reference(a))


@BOTH
def test_an_op_with_a_loop_form_and_an_attribute(device: str) -> None:
    @rlx.op("tril", reference=lambda x, *, k: np.tril(x, k), loop=tril_loop)
    def tril(x: T, *, k: int = 0) -> T:
        """Zeros above a diagonal."""
        return x

    a = rng.normal(size=(6, 5)).astype(np.float32)
    for k in (-2, 0, 1):
        np.testing.assert_array_equal(of_one(lambda x, k=k: x.tril(k=k), device, a), np.tril(a, k))
    np.testing.assert_array_equal(of_one(lambda x: x.tril() + 1, device, a), np.tril(a) + 1)


@BOTH
def test_an_op_of_one_element_fuses(device: str) -> None:
    def expression(x: Expr) -> Expr:
        return x / (abs(x) + 1)

    rlx.op("softsign", reference=lambda x: x / (1 + np.abs(x)), scalar=expression, doc="Softsign.")(same)
    a = rng.normal(size=(5, 7)).astype(np.float32)
    exact = a.astype(np.float64) * 2 / (1 + np.abs(a.astype(np.float64) * 2)) + 1
    np.testing.assert_allclose(of_one(lambda x: (x * 2).softsign() + 1, device, a), exact, rtol=1e-6)
    g = rlx.Graph("fused")
    g.set_outputs([(g.input("x", (4, 8)) @ g.param("w", (8, 8))).softsign() * 2])
    assert len(rlx.compile(g).plan.main.launches) == 1  # type: ignore[attr-defined]


@BOTH
def test_several_operands_results_and_types(device: str) -> None:
    def apart(x: rlx.Value, w: rlx.Value | None, *, head_dim: int) -> tuple[rlx.Value, rlx.Value]:
        y = x if w is None else x * w
        return y.sum(axis=-1), (y > head_dim).astype("i32")

    @rlx.op("sums", decompose=apart)
    def sums(x: T, w: T | None = None, *, head_dim: int = 1) -> tuple[T, T]:
        """Sums of rows, and which numbers are large."""
        return x.with_shape(*x.shape[:-1]), x.with_dtype("i32")

    g = rlx.Graph("g")
    x, w = g.input("x", ("n", 4)), g.input("w", (4,))
    g.set_outputs([*x.sums(w), *x.sums(head_dim=2)])
    a, b = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    actual = outputs(g, device, x=a, w=b)
    np.testing.assert_allclose(actual[0], (a.astype(np.float64) * b).sum(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(actual[1], a * b > 1)
    np.testing.assert_array_equal(actual[3], a > 2)


@BOTH
def test_ops_are_made_of_ops_that_are_made_of_ops(device: str) -> None:
    rlx.op("twice", decompose=lambda x: x + x, doc="2 x.")(same)
    rlx.op("four_times", decompose=lambda x: x.twice().twice(), doc="4 x.")(same)
    step = rlx.Graph("step")
    step.set_outputs([step.input("x", ("n", 3)).four_times()])
    a = rng.normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_array_equal(of_one(lambda x: x.graph.scan(x, step, 3), device, a), a * 64)
    np.testing.assert_array_equal(of_one(lambda x: x.graph.custom_fn([x], step), device, a), a * 4)


@BOTH
def test_narrow_precision_does_not_round_what_a_kernel_of_the_user_sees(device: str) -> None:
    @rlx.op("tril", reference=lambda x, *, k: np.tril(x, k), loop=tril_loop)
    def tril(x: T, *, k: int = 0) -> T:
        """Zeros above a diagonal."""
        if str(x.dtype) != "f32":
            raise rlx.errors.DTypeError(f"tril: takes f32, found {x}")
        return x

    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (4, 4)).exp().tril()])
    f = rlx.compile(g, device, profile=CompileProfile(precision=Precision("bf16")))
    a = rng.normal(size=(4, 4)).astype(np.float32)
    np.testing.assert_allclose(f.run({"x": a})[0], np.tril(np.exp(a)), rtol=2**-7)


# -- where it shows ---------------------------------------------------------------------------------------------------
def test_reports_and_text_know_the_op(capsys: pytest.CaptureFixture[str]) -> None:
    actual = rlx.op("mish", decompose=lambda x: x * (1 + x.exp()).log().tanh(), doc="Mish.")(same)
    assert actual.group == "test_user_ops" and Path(actual.place.rpartition(":")[0]) == Path(__file__)
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (3,)).mish()])
    assert "%1 = mish(%0) : f32[3]" in g.text() and rlx.Graph.parse(g.text()) == g
    (row,) = rlx.compile(g).dispatch().rows
    assert row.path == "decomposed" and row.became == ("exp", "add", "log", "tanh", "mul")
    assert main(["ops", "mish"]) == 0 and "test_user_ops.py" in capsys.readouterr().out


def test_the_command_lists_ops_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import rlx\n\n@rlx.op('twice', decompose=lambda x: x + x)\ndef twice(x):\n    '''2 x.'''\n    return x\n"
    (tmp_path / "rlx_test_ops.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["ops", "-m", "rlx_test_ops"]) == 0
    assert "rlx_test_ops: twice" in capsys.readouterr().out
    del sys.modules["rlx_test_ops"]
    assert main(["ops", "-m", "no_such_ops"]) == 2
    assert "cannot import 'no_such_ops'" in capsys.readouterr().err


def test_a_new_declaration_takes_effect_though_programs_are_cached() -> None:
    def compiled(factor: int) -> Any:
        rlx.op("scaled", decompose=lambda x: x * factor, doc="Scaled.", replace=True)(same)
        return of_one(lambda x: x.scaled(), "cpu", np.ones((1, 2), np.float32))[0, 0]

    assert [compiled(2), compiled(3)] == [2, 3]


# -- errors -----------------------------------------------------------------------------------------------------------
def test_without_a_loop_form_the_cpu_says_what_is_missing() -> None:
    rlx.op("nothing", reference=lambda x: x, doc="Nothing.")(same)
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (3,)).nothing()])
    np.testing.assert_array_equal(outputs(g, "reference", x=np.ones(3, np.float32))[0], 1)
    with pytest.raises(LowerError, match="op nothing: has no loop form and no decomposition") as caught:
        rlx.compile(g)
    assert "decompose=, loop= or scalar=" in str(caught.value.hint) and __file__ in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exp", "op exp: is built into rlx, declared at .*elementwise.py"),
        ("shape", "op shape: Value has an attribute of this name"),
        ("nodes", "op nodes: Graph has an attribute of this name"),
        ("quantize", "op quantize: Graph has an attribute of this name"),
        ("two words", "'two words' cannot be the name of a method"),
        ("lambda", "'lambda' cannot be the name of a method"),
        ("_hidden", "'_hidden' cannot be the name of a method"),
        ("taken", "op taken: declared twice, first at .*test_user_ops.py"),
    ],
)
def test_names_that_clash(name: str, says: str) -> None:
    rlx.op("taken", decompose=lambda x: x * 1, doc="Taken.")(same)
    with pytest.raises(GraphError, match=says):
        rlx.op(name, decompose=lambda x: x * 1, doc="Clashes.")(same)


def test_declarations_that_say_too_little_or_too_much() -> None:
    with pytest.raises(GraphError, match="has neither reference= nor decompose="):
        rlx.op("vague", doc="Vague.")(same)
    with pytest.raises(GraphError, match="both loop= and scalar="):
        rlx.op("both", reference=abs, loop=tril_loop, scalar=lambda x: x, doc="Both.")(same)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="a scalar expression sees no attributes, found by"):
        rlx.op("shifted", reference=abs, scalar=lambda x: x, doc="Shifted.")(lambda x, *, by: x)
    assert "shifted" not in registry.OPS and "vague" not in registry.OPS


def _compile_error(declare: Any, *, error: type[Exception] = LowerError) -> str:
    declare()
    g = rlx.Graph("g")
    with pytest.raises(error) as caught:
        g.set_outputs([g.input("x", (2, 3)).wrong()])
        rlx.compile(g)
    return str(caught.value)


def test_a_decomposition_that_is_not_the_op() -> None:
    def wrong(decompose: Any, rule: Any = same) -> Any:
        return lambda: rlx.op("wrong", decompose=decompose, doc="Wrong.", replace=True)(rule)

    shape = _compile_error(wrong(lambda x: x.sum()))
    assert "op wrong: its decomposition gives f32[], its type rule f32[2, 3]" in shape
    assert "gives (3,), expected values" in _compile_error(wrong(lambda x: 3))
    assert "op wrong: its decomposition contains itself, wrong > wrong" in _compile_error(wrong(lambda x: x.wrong()))
    none = _compile_error(wrong(lambda x: x, lambda x: None), error=GraphError)
    assert "wrong: its type rule gives None, expected a TensorType" in none
    block = _compile_error(wrong(lambda x: x.linear(np.ones((3, 3), np.float32))))
    assert "uses the HIR block linear" in block
    with pytest.raises(rlx.errors.ShapeError) as caught:
        rlx.op("wrong", decompose=lambda x: x @ x, doc="Wrong.", replace=True)(same)
        g = rlx.Graph("g")
        g.set_outputs([g.input("x", (2, 3)).wrong()])
        rlx.compile(g)
    assert any("in the decomposition of op wrong" in note for note in caught.value.notes)


def test_an_op_written_with_itself_is_refused_by_the_reference_too() -> None:
    rlx.op("endless", decompose=lambda x: x.endless())(same)
    with pytest.raises(LowerError, match="op endless: is written with itself"):
        of_one(lambda x: x.endless(), "reference", np.ones((2, 2), np.float32))


# -- derivatives and vmap ---------------------------------------------------------------------------------------------
def gradient(build: Any, x: Any) -> Any:
    g = rlx.Graph("loss")
    g.set_outputs([build(g.input("x", x.shape)).sum()])
    return np.asarray(rlx.compile(rlx.transforms.grad(g)).run({"x": x})[0])


def test_a_kernel_with_a_decomposition_runs_as_the_kernel_and_has_its_derivative() -> None:
    soft = {"scalar": lambda x: x / (abs(x) + 1), "decompose": lambda x: x / (1 + x.abs())}
    rlx.op("softsign", **soft, reference=lambda x: x / (1 + np.abs(x)))(same)  # type: ignore[arg-type]
    x = np.float32([[-2.0, 0.5]])
    np.testing.assert_allclose(gradient(lambda v: v.softsign(), x), 1 / (1 + np.abs(x)) ** 2, rtol=1e-5)
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (2,)).softsign()])
    assert [row.path for row in rlx.compile(g).dispatch().rows] == ["native"]


def test_rules_from_outside_and_without_them_a_scan(capsys: pytest.CaptureFixture[str]) -> None:
    def declare() -> None:
        rlx.op("lower", reference=lambda x, *, k: np.tril(x, k), loop=tril_loop, replace=True)(lambda x, *, k=0: x)

    declare()
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (2, 2)).lower(k=0)])
    assert "scan" in {node.op for node in rlx.transforms.vmap(g).nodes}
    assert main(["ops", "lower"]) == 0 and "a scan over the batch: no rule" in capsys.readouterr().out
    for _ in range(2):  # declaring it again drops its rules
        declare()
        rule_tables.vjp("lower")(lambda at, ct: [ct.lower(k=at.attrs["k"])])
        rule_tables.batching("lower")(lambda vmapped: [vmapped.full(0).lower(k=vmapped.attrs["k"])])
    assert {node.op for node in rlx.transforms.vmap(g).nodes} == {"input", "lower"}
    np.testing.assert_array_equal(gradient(lambda v: v.lower(), np.ones((2, 2), np.float32)), [[1, 0], [1, 1]])


def test_a_rule_that_returns_nothing_is_an_error_with_the_name_of_its_op() -> None:
    rlx.op("idle", reference=lambda x: x, loop=lambda s, node: None)(same)  # type: ignore[arg-type,return-value]
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (2, 2)).idle()])
    with pytest.raises(LowerError, match="op idle: its loop form returned NoneType, expected a list of 1"):
        rlx.compile(g)
    rule_tables.batching("idle")(lambda vmapped: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(LowerError, match="op idle: its vmap rule returned NoneType, expected a list of 1"):
        rlx.transforms.vmap(g)
    rule_tables.vjp("idle")(lambda at, ct: ct)
    with pytest.raises(LowerError, match="op idle: its VJP returned Value, expected a list of 1") as caught:
        gradient(lambda v: v.idle(), np.ones((2, 2), np.float32))
    assert caught.value.hint == "return [y], not y"


def test_the_tour_imports_a_module_with_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'import rlx\n@rlx.op("thrice", decompose=lambda x: x * 3)\ndef thrice(x):\n    """3x."""\n    return x\n'
    (tmp_path / "tour_ops.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["tour", "thrice(x)", "-m", "tour_ops"]) == 0 and "thrice(%0)" in capsys.readouterr().out
    assert main(["tour", "x", "-m", "absent_ops"]) == 2 and "tour: cannot import" in capsys.readouterr().err


# -- loop forms that would compute something else ---------------------------------------------------------------------
def shifted(name: str, body: Any, keep: tuple[int, ...]) -> Any:
    """Compiles an op whose loop form has this body."""

    def loop(scheduler: Scheduler, node: Any) -> list[View]:
        x, y = scheduler.view(node.operands[0]), scheduler.result(node)
        map_elements(scheduler, name, y.shape, [x], [y], lambda e: ([], [body(e, x)]), keep=keep)
        return [y]

    rlx.op(name, reference=lambda x: x, loop=loop)(same)
    g = rlx.Graph("g")
    g.set_outputs([getattr(g.input("x", ("rows", 5)), name)()])
    return rlx.compile(g)


@pytest.mark.parametrize("name", ["n", "units", "x0"])
def test_names_of_arguments_that_a_kernel_has_itself_are_refused(name: str) -> None:
    with pytest.raises(LowerError, match=f"argument '{name}' is .*, and also") as caught:
        shifted("limited", lambda e, x: (e.index(1) < e.arg(name, x.shape[0] - 1)).choose(e.load(0), 0), (0, 1))
    assert "another name" in caught.value.notes[0]


@pytest.mark.parametrize("keep", [(), (0,)])
def test_an_index_of_a_merged_axis_is_refused(keep: tuple[int, ...]) -> None:
    with pytest.raises(LowerError, match=r"index\(1\) of an axis that may be merged") as caught:
        shifted("limited", lambda e, x: (e.index(1) < 3).choose(e.load(0), 0), keep)
    assert "keep=(" in caught.value.notes[0]


def test_integers_are_offsets_and_results() -> None:
    x = rng.standard_normal((3, 5)).astype(np.float32)
    before = shifted(
        "before", lambda e, v: (e.index(1) > 0).choose(e.load(0, (-1, e.arg("step", v.strides[1]))), 0), (1,)
    )
    np.testing.assert_array_equal(before.run({"x": x})[0], np.pad(x, ((0, 0), (1, 0)))[:, :-1])
    np.testing.assert_array_equal(shifted("threes", lambda e, v: 3, ()).run({"x": x})[0], np.full((3, 5), 3))


def test_functions_that_expressions_lack_are_named() -> None:
    with pytest.raises(AttributeError, match=r"expressions of loops have no 'sigmoid'; they have .*tanh"):
        shifted("gated", lambda e, v: e.load(0).sigmoid(), ())
    with pytest.raises(LowerError, match="pow of i64"):
        shifted("squared", lambda e, v: e.index(1) ** 2, (1,))
    x = rng.standard_normal((3, 5)).astype(np.float32)
    waves = shifted("waves", lambda e, v: e.load(0).sin() ** 2 + e.load(0).cos() ** 2, ())
    np.testing.assert_allclose(waves.run({"x": x})[0], np.ones((3, 5)), rtol=1e-6)
