"""No op lacks a part: documentation, reference, samples, loop form, oracle; and every type rule says what is wrong."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from oracles import ORACLES
from sample_graphs import element_types, sample_graph, samples_of, user_ops
from targets import AVX512

import rlx
from rlx.errors import DTypeError, GraphError, LowerError, ShapeError
from rlx.hir.lower import lower, lowering
from rlx.ir import registry
from rlx.ir.registry import CHECKS_DATA, CHECKS_ROWS, CHECKS_SIZES, COMPOSED, ELEMENTWISE, HIR, LEAF, MIR, OpDef
from rlx.lir import forms
from rlx.lir.forms.elementwise import COMPARISONS, scalar_form
from rlx.lir.loops import SCALAR_OPS, Check, LoopKernel, statements
from rlx.lir.schedule import loop_form, schedule
from rlx.mir.pipeline import optimise
from rlx.types import parse_type

rlx.Graph("any")  # declares the ops
forms.load_all()
ALL_OPS = list(registry.OPS.values())
EVERY_OP = pytest.mark.parametrize("op", ALL_OPS, ids=str)
EVERY_USER_OP = pytest.mark.parametrize("op", user_ops(), ids=str)


# -- completeness ----------------------------------------------------------------------------------------------------
@EVERY_OP
def test_an_op_is_documented(op: OpDef) -> None:
    assert op.doc.endswith("."), f"{op.name}: its documentation is no sentence"
    file, line = op.place.rsplit(":", 1)
    assert file.endswith(f"{op.group}.py") and line.isdigit()


@EVERY_OP
def test_an_op_can_be_evaluated_and_lowered(op: OpDef) -> None:
    """Leaves aside: MIR ops have a reference and a loop form or scalar form, HIR blocks a lowering."""
    if LEAF in op.traits:
        return
    if op.level == HIR:
        assert op.name in lowering
        return
    assert op.level == MIR and op.reference is not None
    if ELEMENTWISE in op.traits:
        assert op.scalar in SCALAR_OPS or op.name in scalar_form, f"{op.name}: no scalar form"
    else:
        assert (op.name in loop_form) != (COMPOSED in op.traits), f"{op.name}: a loop form, or trait COMPOSED"
        assert op.decompose is not None or COMPOSED not in op.traits, f"{op.name}: no decomposition"


@pytest.mark.parametrize("op", [o for o in user_ops() if element_types(o) and ELEMENTWISE not in o.traits], ids=str)
def test_what_run_time_checks_is_said_by_traits(op: OpDef) -> None:
    """Nothing that can fail leaves a body that may not run: passes know it by these traits."""
    sized, plain = (sample_graph(op.name, element_types(op)[0], leaf).graph for leaf in ("sized", "input"))
    done = optimise(lower(sized if sized.outputs else plain), AVX512)
    program = schedule(done.main, AVX512)
    loops = [k for k in program.kernels().values() if isinstance(k, LoopKernel)]
    checks = any(isinstance(s, Check) for kernel in loops for s in statements(kernel.root))
    grouped = any(getattr(kernel, "grouped", "") == "rows" for kernel in program.kernels().values())
    with_rows = {n.op for n in done.main.nodes if n.operand("rows") is not None}
    traits = {t for n in done.main.nodes for t in n.definition.traits if t != CHECKS_ROWS or n.op in with_rows}
    assert (checks or grouped) == bool(traits & {CHECKS_DATA, CHECKS_ROWS})
    assert all(CHECKS_SIZES in registry.get(a.op).traits for a in program.assertions)


@EVERY_USER_OP
def test_a_user_facing_op_has_samples_and_an_oracle(op: OpDef) -> None:
    assert op.name in ORACLES, f"{op.name}: add its oracle to tests/oracles.py"
    samples = samples_of(op)
    assert samples, f"{op.name}: add samples= at {op.place}"
    for s in samples:
        operands = len(op.schema.operands)
        assert op.schema.variadic or operands - op.schema.optional <= len(s.operands) <= operands
        assert set(s.attrs) <= set(op.schema.attrs)


@EVERY_USER_OP
def test_samples_reach_every_operand_and_attribute(op: OpDef) -> None:
    samples = samples_of(op)
    for position, name in enumerate(op.schema.operands):
        assert any(len(s.operands) > position and s.operands[position] for s in samples), (
            f"{op.name}: no sample gives {name}"
        )
    only_checked = {"num_heads", "head_dim"}  # attributes that change nothing
    for name in set(op.schema.attrs) - only_checked:
        assert any(name in s.attrs for s in samples), f"{op.name}: no sample gives {name}"


def test_oracles_are_for_ops_that_exist() -> None:
    assert set(ORACLES) == {op.name for op in user_ops()}


def test_oracles_take_the_attributes_of_their_ops() -> None:
    for op in user_ops():
        if isinstance(ORACLES[op.name], np.ufunc) or not op.schema.attrs:
            continue
        parameters = inspect.signature(ORACLES[op.name]).parameters.values()
        actual = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        assert set(op.schema.attrs) == actual, op.name


def test_forms_are_for_ops_that_exist() -> None:
    for table in (loop_form, scalar_form, lowering):
        assert set(table) <= set(registry.OPS)
    assert set(COMPARISONS) <= set(SCALAR_OPS)


def test_the_loops_of_a_group_come_with_its_file() -> None:
    """The scheduler imports `lir/forms/<group>.py` for an op, and no other file."""
    for name in loop_form:
        op, home = registry.OPS[name], loop_form[name].__module__
        if op.is_builtin:
            own = vars(importlib.import_module(f"rlx.lir.forms.{op.group}"))
            assert home == own["__name__"] or own.get(home.rpartition(".")[2]) is sys.modules[home], name


def test_every_group_has_a_file_of_meanings_and_a_file_of_loops() -> None:
    """The grid: `ops/<group>.py` and `lir/forms/<group>.py`, unless all ops of the group are written with others."""
    groups = {op.group for op in ALL_OPS if op.level == MIR and LEAF not in op.traits}
    with_loops = {op.group for op in ALL_OPS if op.level == MIR and not op.traits & {LEAF, COMPOSED}}
    for package, names in (("ops", groups), ("lir.forms", with_loops)):
        for group in names:
            assert importlib.import_module(f"rlx.{package}.{group}")


@EVERY_USER_OP
def test_an_op_is_a_method_of_graphs_and_values(op: OpDef) -> None:
    graph = rlx.Graph("methods", level=op.level)
    x = graph.input("x", (2,))
    assert callable(getattr(graph, op.name))
    assert callable(getattr(x, op.name))


# -- names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("sofmax", "softmax"),
        ("matmull", "matmul"),
        ("layernorm", "layer_norm"),
        ("top_k", "topk"),
        ("concat", "concatenate"),
    ],
)
def test_an_unknown_op_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(GraphError, match=f"no op is called '{wrong}'") as caught:
        registry.get(wrong)
    assert caught.value.hint is not None and repr(right) in caught.value.hint
    graph = rlx.Graph("g")
    for holder in (graph, graph.input("x", (2,))):
        with pytest.raises(AttributeError, match=right):
            getattr(holder, wrong)


def test_an_op_is_declared_once() -> None:
    with pytest.raises(GraphError, match=r"op exp: declared twice, first at .*elementwise.py:\d+"):
        registry.op("exp")(lambda x: x)
    with pytest.raises(GraphError, match="op sum: has a loop form already"):
        loop_form("sum")(lambda s, node: [])


def test_a_missing_rule_says_where_it_belongs() -> None:
    with pytest.raises(LowerError, match="op input: has no loop form") as caught:
        loop_form["input"]
    assert caught.value.hint == "add it in src/rlx/lir/forms/leaf.py"


# -- type rules ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Bad:
    """A call that a type rule refuses: operands as types, the error, and what its message has to name."""

    op: str
    operands: str
    error: type[GraphError]
    says: str
    attrs: dict[str, Any]

    def __str__(self) -> str:
        attrs = "".join(f" {k}={v}" for k, v in self.attrs.items())
        return f"{self.op}({self.operands}){attrs}"


def bad(op: str, operands: str, error: type[GraphError], says: str, **attrs: Any) -> Bad:
    return Bad(op, operands, error, says, attrs)


FLOAT_UNARY = [
    "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tan", "atan", "tanh", "relu", "erf", "sigmoid", "silu", "gelu",
]  # fmt: skip
NUMBER_BINARY = ["add", "sub", "mul", "maximum", "minimum", "less", "less_equal", "greater", "greater_equal"]
FOLDS = ["sum", "prod", "mean", "max", "min"]
NUMBER_FOLDS = ["sum", "prod", "max", "min", "argmax", "cumsum"]
KEYS = "f32[6, 2, 8, 64]; f32[2, 5, 2, 8]; i32[2, 5]; i32[2, 3]"
CACHED = "f32[2, 5, 4, 8]; f32[6, 2, 64, 8]; f32[6, 2, 64, 8]; i32[2, 5]; i32[2, 3]"
QKV = "f32[2, 5, 4, 8]; f32[2, 7, 2, 8]; f32[2, 7, 2, 8]"
EVEN = "f32[2, 5, 2, 4]; f32[2, 5, 2, 4]; f32[2, 5, 2, 4]"
ROPE = "f32[2, 3, 2, 8]; f32[9, 4]; f32[9, 4]; i32[2, 3]"
FFN = "f32[8, 12]; f32[8, 12]; f32[12, 8]; f32[6, 2]; f32[6, 2]"
LAYER = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "eps": 1e-5}

RANDOM = ("random_bits", "random_uniform", "random_normal")
LOSSES = (("cross_entropy", ""), ("cross_entropy_grad", "; f32[4]"))
NUMBERS = "; f32[]; f32[]; f32[]"  # of an optimiser
SAMPLING = "f32[2, 9]; f32[2]; f32[2]; i32[2]; f32[2]; f32[2]"
BAD_CALLS = [
    # -- elementwise
    *(bad(op, "i32[3]", DTypeError, f"{op}: takes floats; i32") for op in (*FLOAT_UNARY, "gelu_tanh", "round")),
    *(bad(op, "bool[3]", DTypeError, f"{op}: takes floats and integers; bool") for op in ("neg", "abs")),
    bad("logical_not", "f32[3]", DTypeError, "logical_not: takes booleans; f32"),
    *(bad(op, "bool[3]; bool[3]", DTypeError, f"{op}: takes floats and integers; bool") for op in NUMBER_BINARY),
    *(bad(op, "f32[2, 3]; f32[2, 4]", ShapeError, f"{op}: ; 3 and 4") for op in NUMBER_BINARY),
    *(bad(op, "i32[3]; i32[3]", DTypeError, f"{op}: takes floats; i32") for op in ("div", "pow")),
    *(bad(op, "f32[4]; f32[n]", ShapeError, f"{op}: ; 4 and n") for op in ("div", "pow", "equal", "not_equal")),
    *(bad(op, "f32[3]; i32[3]", DTypeError, f"{op}: takes integers; f32") for op in ("floor_divide", "mod")),
    *(bad(op, "i32[2]; i32[3]", ShapeError, f"{op}: ; 2 and 3") for op in ("floor_divide", "mod")),
    *(bad(op, "bool[3]; i32[3]", DTypeError, f"{op}: takes booleans; i32") for op in ("logical_and", "logical_or")),
    *(bad(op, "bool[3]; bool[2]", ShapeError, f"{op}: ; 3 and 2") for op in ("logical_and", "logical_or")),
    bad("where", "f32[3]; f32[3]; f32[3]", DTypeError, "where: takes booleans; f32"),
    bad("where", "bool[3]; f32[3]; f32[5]", ShapeError, "where: ; 3 and 5"),
    bad("cast", "f32[3]", DTypeError, "no element type is called 'f33'", dtype="f33"),
    # -- reductions
    *(bad(op, "f32[2, 3]", ShapeError, f"{op}: ; axis 2; rank-2", axis=2)
      for op in ["sum", "prod", "mean", "max", "min", "argmax", "softmax", "cumsum"]),
    *(bad(op, "f32[2, 3]", ShapeError, f"{op}: ; twice; (0, -2)", axis=(0, -2)) for op in FOLDS),
    *(bad(op, "bool[3]", DTypeError, f"{op}: takes numbers; bool") for op in NUMBER_FOLDS),
    *(bad(op, "i32[3]", DTypeError, f"{op}: takes floats; i32") for op in ("mean", "softmax")),
    *(bad(op, "f32[3, 0]", ShapeError, f"{op}: ; size 0; f32[3, 0]", axis=1) for op in ("max", "min", "argmax")),
    bad("topk", "f32[2, 5]", ShapeError, "topk: k is 6; 5 elements", k=6),
    bad("topk", "f32[2, 5]", ShapeError, "topk: k is 0; 5 elements", k=0),
    bad("topk", "f32[]", ShapeError, "topk: needs an axis; scalar", k=1),
    bad("topk", "bool[5]", DTypeError, "topk: takes numbers; bool", k=1),
    bad("topk", "f32[5]", GraphError, "topk: attribute 'k' is missing"),
    # -- sampling
    *(bad("sample_tokens", operands, error, f"sample_tokens: {says}") for operands, error, says in (
        ("f32[8]; f32[8]; f32[8]; i32[8]; f32[8]; f32[8]", ShapeError, "; [rows, vocab]; f32[8]"),
        ("i32[2, 9]; f32[2]; f32[2]; i32[2]; f32[2]; f32[2]", DTypeError, "logits; floats; i32[2, 9]"),
        ("f32[2, 9]; f32[3]; f32[2]; i32[2]; f32[2]; f32[2]", ShapeError, "uniform f32[3]; [2]"),
        ("f32[2, 9]; f32[2]; f32[2]; f32[2]; f32[2]; f32[2]", DTypeError, "top_k; integers; f32[2]"),
        (f"{SAMPLING}; i32[2, 2]", ShapeError, "allowed i32[2, 2]; [2, 1]"),
        (f"{SAMPLING}; i32[2, 1]; i32[2, 5]", GraphError, "history is given; prompt_length is not"),
        (f"{SAMPLING}; i32[2, 1]; i32[2, 5]; i32[2]; f32[2]; f32[2]; f32[2]; i32[2, 3]", GraphError,
         "bias_tokens is given; bias is not"),
        (f"{SAMPLING}; i32[2, 1]; i32[2]; i32[2]; f32[2]; f32[2]; f32[2]", ShapeError, "history; [rows, tokens]"),
        ("f32[2, 2097153]; f32[2]; f32[2]; i32[2]; f32[2]; f32[2]", ShapeError, "2097153 tokens, at most 2097152"),
    )),
    # -- search
    *(bad("nearest_rows", operands, error, f"nearest_rows: {says}", **({"k": 3} | attrs))
      for operands, error, says, attrs in (
        ("f32[4]; f32[9, 4]", ShapeError, "; [..., q, d]; f32[4]", {}),
        ("f32[2, 4]; f32[9, 5]", ShapeError, "; f32[2, 4]; f32[9, 5]", {}),
        ("i32[2, 4]; f32[9, 4]", DTypeError, "queries are floats; i32[2, 4]", {}),
        ("f32[2, 4]; i32[9, 4]", DTypeError, "rows are floats or i8; i32[9, 4]", {}),
        ("f32[2, 4]; f32[9, 4]; f32[8]", ShapeError, "scales f32[8]; [9]", {}),
        ("f32[2, 4]; f32[9, 4]; f32[9]; f32[9, 1]", ShapeError, "offsets f32[9, 1]; [9]", {}),
        ("f32[2, 4]; f32[9, 4]; f32[9]; f32[9]; f32[2, 3]", DTypeError, "among is integers; f32[2, 3]", {}),
        ("f32[2, 4]; f32[9, 4]; f32[9]; f32[9]; i32[3, 3]", ShapeError, "among i32[3, 3]; [2, 3]", {}),
        ("f32[2, 4]; f32[9, 4]", ShapeError, "k is 0; 16384", {"k": 0}),
        ("f32[2, 4]; f32[9, 4]", GraphError, "metric 'l1'; dot, l2", {"metric": "l1"}),
        ("f32[2, 4]; i8[9, 4]", GraphError, "metric 'l2' of rows of i8", {"metric": "l2"}),
        ("f32[2, 65537]; i8[9, 65537]", ShapeError, "i8 rows of 65537 elements, at most 65536", {}),
    )),
    # -- scatter
    bad("scatter", "f32[3, 4]; f32[2]; f32[2, 4]", DTypeError, "scatter: indices are integers; f32"),
    bad("scatter", "f32[3, 4]; i32[2]; f32[2, 5]", ShapeError, "scatter: ; f32[2, 5]; [2, 4]"),
    bad("scatter", "f32[3, 4]; i32[2]; f32[2]", ShapeError, "scatter: ; f32[2]; [2, 4]"),
    bad("scatter", "f32[3, 4]; i32[2]; f16[2, 4]", DTypeError, "scatter: ; f16; f32"),
    bad("scatter", "f32[]; i32[2]; f32[2]", ShapeError, "scatter: ; axis; f32[]"),
    # -- losses
    *(bad(op, f"f32[4, 7]; f32[4]{more}", DTypeError, f"{op}: labels are integers; f32") for op, more in LOSSES),
    *(bad(op, f"f32[4, 7]; i32[5]{more}", ShapeError, f"{op}: labels; i32[5]; f32[4, 7]") for op, more in LOSSES),
    *(bad(op, f"i32[4, 7]; i32[4]{more}", DTypeError, f"{op}: logits are floats; i32") for op, more in LOSSES),
    *(bad(op, f"f32[]; i32[]{more}", ShapeError, f"{op}: ; axis of classes; f32[]") for op, more in LOSSES),
    bad("cross_entropy_grad", "f32[4, 7]; i32[4]; f32[5]", ShapeError, "cross_entropy_grad: dy; f32[5]; f32[4, 7]"),
    bad("cross_entropy_grad", "f32[4, 7]; i32[4]; i32[4]", DTypeError, "cross_entropy_grad: dy are floats; i32"),
    # -- updates
    bad("assign", "f32[3, 4]; f32[4, 3]", ShapeError, "assign: the value is f32[4, 3]; f32[3, 4]"),
    bad("assign", "f32[3]; f16[3]", DTypeError, "assign: the value is f16[3]; f32[3]"),
    bad("adamw_update", f"i32[3]; i32[3]; i32[3]; i32[3]{NUMBERS}", DTypeError, "adamw_update: takes floats; i32[3]"),
    bad("adamw_update", f"f32[3]; f32[3]; f32[4]; f32[3]{NUMBERS}", ShapeError, "adamw_update: v is f32[4]; f32[3]"),
    bad("adamw_update", f"f32[3]; f32[3]; f32[3]; f16[3]{NUMBERS}", DTypeError, "adamw_update: grad is f16[3]; f32[3]"),
    bad("adamw_update", "f32[3]; f32[3]; f32[3]; f32[3]; f32[1]; f32[]; f32[]",
        ShapeError, "adamw_update: rate is f32[1]; one float"),
    bad("adamw_update", f"f32[3]; f32[3]; f32[3]; f32[3]{NUMBERS}",
        GraphError, "adamw_update: beta2 is 1.0; 0 <= beta2 < 1", beta2=1.0),
    bad("adamw_update", f"f32[3]; f32[3]; f32[3]; f32[3]{NUMBERS}",
        GraphError, "adamw_update: eps is -1; number from 0", eps=-1),
    bad("sgd_update", "f32[3]; f32[3, 1]; f32[]", ShapeError, "sgd_update: grad is f32[3, 1]; f32[3]"),
    bad("sgd_update", "f32[3]; f32[3]; i32[]", ShapeError, "sgd_update: rate is i32[]; one float"),
    bad("sgd_update", "f32[3]; f32[3]; f32[]", GraphError, "sgd_update: momentum is 0.9; no velocity", momentum=0.9),
    bad("sgd_update", "f32[3]; f32[3]; f32[]",
        GraphError, "sgd_update: weight_decay is inf; number from 0", weight_decay=float("inf")),
    # -- shapes
    bad("reshape", "f32[2, 3]", ShapeError, "reshape: 6 elements; [4, 2]", shape=(4, 2)),
    bad("transpose", "f32[2, 3]", ShapeError, "transpose: axes (0, 0); 2 axes", axes=(0, 0)),
    bad("transpose", "f32[2, 3]", ShapeError, "transpose: axes (0,); 2 axes", axes=(0,)),
    bad("slice", "f32[4]", ShapeError, "slice: 0:5 on axis 0; 0:4", start=(0,), stop=(5,), step=(1,)),
    bad("slice", "f32[4]", ShapeError, "slice: 3:2 on axis 0; 0:4", start=(3,), stop=(2,), step=(1,)),
    bad("slice", "f32[4]", ShapeError, "slice: -1:2 on axis 0; 0:4", start=(-1,), stop=(2,), step=(1,)),
    bad("slice", "f32[4]", ShapeError, "slice: step 0 on axis 0", start=(0,), stop=(2,), step=(0,)),
    bad("slice", "f32[4, 2]", ShapeError, "slice: 1 starts; rank 2", start=(0,), stop=(2,), step=(1,)),
    bad("expand", "f32[3]", ShapeError, "expand: ; 3; 4", shape=(2, 4)),
    bad("expand", "f32[2, 3]", ShapeError, "expand: f32[2, 3] has 2 axes; 1", shape=(3,)),
    bad("assume_equal", "f32[2, 3]", ShapeError, "assume_equal: 3 and 4", shape=(2, 4)),
    bad("assume_equal", "f32[2, 3]", ShapeError, "assume_equal: ; 2 axes; 1", shape=(2,)),
    bad("concatenate", "f32[2, 3]; f32[2, 4]", ShapeError, "concatenate: sizes 3 and 4; axis 1"),
    bad("concatenate", "f32[2]; f32[2, 4]", ShapeError, "concatenate: ranks differ, 1 and 2"),
    bad("concatenate", "f32[2]; f32[2]", ShapeError, "concatenate: axis 1; rank-1", axis=1),
    bad("concatenate", "", ShapeError, "concatenate: needs at least one operand"),
    bad("pad", "f32[2]", ShapeError, "pad: size -1 is negative", low=(-1,), high=(0,)),
    bad("pad", "f32[2, 3]", ShapeError, "pad: 1 and 2 sizes; rank 2", low=(1,), high=(1, 1)),
    bad("pad", "i32[2]", DTypeError, "pad: value 0.5; i32", low=(1,), high=(0,), value=0.5),
    bad("pad", "i8[2]", DTypeError, "pad: value 128; i8", low=(1,), high=(0,), value=128),
    bad("pad", "bool[2]", DTypeError, "pad: value 2; bool", low=(1,), high=(0,), value=2),
    # -- indices
    bad("conv2d", "f32[1, 3, 8, 8]; f32[4, 2, 3, 3]", ShapeError, "conv2d: x f32[1, 3, 8, 8] has 3 channels; 2 · 1"),
    bad("conv2d", "f32[1, 3, 2, 8]; f32[4, 3, 3, 3]", ShapeError, "conv2d: a kernel of 3 does not fit 2"),
    bad("conv2d", "f32[1, 4, 8, 8]; f32[4, 2, 3, 3]", ShapeError, "groups", groups=3),
    bad("conv2d", "f32[1, 3, 8, 8]; f32[4, 3, 3, 3]", GraphError, "conv2d: stride is 0", stride=0),
    bad("conv2d", "f32[1, 3, 8, 8]; f64[4, 3, 3, 3]", DTypeError, "conv2d: takes floats of one type; f32, f64"),
    bad("conv1d", "f32[1, 3, 8, 8]; f32[4, 3, 3]", ShapeError, "conv1d: x is [batch, channels, length]"),
    bad("conv1d", "f32[1, 3, 8]; f32[4, 3, 3]", GraphError, "conv1d: stride is 1.5", stride=1.5),
    bad("pool2d", "f32[1, 3, 8, 8]", GraphError, "pool2d: kind 'least'", kind="least", kernel=2),
    bad("pool2d", "f32[1, 3, 8, 8]", ShapeError, "pool2d: padding (2, 2); (3, 3)", kind="max", kernel=3, padding=2),
    bad("pool1d", "f32[1, 3, 8, 8]", ShapeError, "pool1d: x is [batch, channels, length]", kind="max", kernel=2),
    bad("pool1d", "f32[1, 3, 8]", GraphError, "pool1d: kernel is (2, 2)", kind="max", kernel=(2, 2)),
    bad("pool1d", "f32[1, 3, 8]", ShapeError, "pool1d: a kernel of 9 does not fit 8", kind="max", kernel=9),
    bad("pool1d", "f32[1, 3, 8]", ShapeError, "pool1d: padding (2,); (3,)", kind="max", kernel=3, padding=2),
    bad("selective_scan", "f32[1, 5, 4]; f32[1, 5, 3]; f32[4, 2]; f32[1, 5, 2]; f32[1, 5, 2]", ShapeError,
        "selective_scan: delta is f32[1, 5, 3], expected [1, 5, 4]", state_size=2),
    bad("selective_scan_carry", "f32[1, 5, 4]; f32[1, 5, 4]; f32[4, 2]; f32[1, 5, 2]; f32[1, 5, 2]; f32[1, 4, 3]",
        ShapeError, "selective_scan_carry: state is f32[1, 4, 3], expected [1, 4, 2]", state_size=2),
    bad("gated_delta_net", "f32[1, 5, 2, 4]; f32[1, 5, 2, 4]; f32[1, 5, 2, 8]; f32[1, 5, 2]; f32[1, 5, 2]", ShapeError,
        "gated_delta_net: v is f32[1, 5, 2, 8], expected [1, 5, 2, 4]", state_size=4),
    bad("gated_delta_net_carry",
        "f32[1, 5, 2, 4]; f32[1, 5, 2, 4]; f32[1, 5, 2, 4]; f32[1, 5, 2]; f32[1, 5, 2]; f64[1, 2, 4, 4]", DTypeError,
        "gated_delta_net_carry: takes floats of one type; f64", state_size=4),
    bad("gated_linear_attention_carry",
        "f32[1, 5, 2, 4]; f32[1, 5, 2, 4]; f32[1, 5, 3, 8]; f32[1, 5, 3]; f32[1, 3, 4, 8]", ShapeError,
        "gated_linear_attention_carry: 3 heads are no multiple of 2 groups"),
    bad("depthwise_conv1d_causal_carry", "f32[1, 5, 4]; f32[4, 3]; f32[1, 2, 4]; f32[1]", DTypeError,
        "depthwise_conv1d_causal_carry: lengths are integers, found f32[1]", kernel_size=3),
    bad("depthwise_conv1d_causal", "f32[1, 5, 4]; f32[4, 3]; f32[1, 3, 4]", ShapeError,
        "depthwise_conv1d_causal: left_pad is f32[1, 3, 4], expected [1, 2, 4]", kernel_size=3),
    *(bad(op, "i32[2]", DTypeError, f"{op}: a key is two numbers of u32; i32[2]", shape=(3,)) for op in RANDOM),
    *(bad(op, "u32[3]", ShapeError, f"{op}: a key is two numbers of u32; u32[3]", shape=(3,)) for op in RANDOM),
    bad("round_blocks", "i32[2, 32]", DTypeError, "round_blocks: takes floats; i32[2, 32]", block=32),
    bad("round_blocks", "f32[2, 40]", ShapeError, "round_blocks: ; f32[2, 40]; whole blocks of 32", block=32),
    bad("round_blocks", "f32[2, 64]", ShapeError, "round_blocks: block is 64; 32 or 256", block=64),
    bad("dequantise", "f32[2, 32]", DTypeError, "dequantise: takes packed blocks, i8 or u8; f32[2, 32]"),
    bad("dequantise", "q8_0[2, 32]; f32[]", GraphError, "dequantise: q8_0[2, 32] keeps its scales inside"),
    bad("dequantise", "i8[2, 32]", GraphError, "dequantise: i8[2, 32] has no scale"),
    bad("dequantise", "i8[2, 3]; f32[2]", ShapeError, "dequantise: scale is f32[2], expected [3]", axis=1),
    bad("dequantise", "i8[2, 3]; i32[]", DTypeError, "dequantise: scale is i32[], expected floats"),
    bad("dequantise", "i8[2, 3]; f32[]; f32[2]", ShapeError, "dequantise: zp is f32[2], expected []"),
    bad("dequantise", "u8[8, 3]; f32[2, 3]", DTypeError, "int8/4 is stored as i8[..., k, n]; u8[8, 3]",
        scheme="int8/4"),
    bad("dequantise", "i8[9, 3]; f32[2, 3]", ShapeError, "k is 9, not whole blocks of 4 (int8/4)", scheme="int8/4"),
    bad("dequantise", "i8[8, 3]; f32[2, 3]", GraphError, "dequantise: int8a/4 has no zp", scheme="int8a/4"),
    bad("dequantise", "u8[8, 3]; f32[3]; f32[3]", GraphError, "fp8e4m3 has no zero points; f32[3]", scheme="fp8e4m3"),
    bad("dequantise", "u8[16, 3]; f32[1, 6]", DTypeError, "scale of nvfp4/16 is f32[1, 6], expected u8",
        scheme="nvfp4/16"),
    bad("dequantise", "i8[8, 3]; f32[2, 3]", GraphError, "'int9/4' is not a scheme", scheme="int9/4"),
    bad("quantise", "i32[2, 3]; f32[]", DTypeError, "quantise: makes i8 or u8 of floats; i32[2, 3]"),
    bad("quantise", "f32[2, 3]; f32[2]", ShapeError, "quantise: scale is f32[2], expected [3]", axis=-1),
    bad("quantise", "f32[8, 3]; f32[2, 3]", ShapeError, "quantise: n is 3; byte", scheme="int4/4"),
    bad("quantise", "f32[8, 3]; f32[3]", GraphError, "quantise: makes no blocks of files; gguf_q4k", scheme="gguf_q4k"),
    bad("quantise", "f32[8, 3]; f32[3]; f32[3]", GraphError, "quantise: fp8e5m2 has no zero points", scheme="fp8e5m2"),
    bad("quantise", "f32[8, 3]; f32[3]", GraphError, "fp8e4m3 has its own axis; axis=1", scheme="fp8e4m3", axis=1),
    bad("quantise", "f32[16, 4]; f32[1, 4]", DTypeError, "nvfp4/16 is f32[1, 4], expected u8", scheme="nvfp4/16"),
    bad("quant_scale", "f32[9, 3]", ShapeError, "quant_scale: k is 9, not whole blocks of 4", scheme="int8/4"),
    bad("quant_scale", "i32[3]", DTypeError, "quant_scale: takes floats; i32[3]"),
    bad("fake_quantise", "f32[3]", GraphError, "fake_quantise: bits is 1, expected 2 to 16", bits=1),
    bad("fake_quantise", "f32[3]", ShapeError, "fake_quantise: axis 1; rank-1", axis=1),
    bad("fake_quantise", "f32[3]; f32[3]", ShapeError, "fake_quantise: scale is f32[3], expected []"),
    bad("running_scale", "f32[2, 3]; f32[2]", ShapeError, "running_scale: scale is f32[2], expected [3]", axis=1),
    bad("running_scale", "f32[3]; f32[]", GraphError, "running_scale: decay is 2, expected 0 to 1", decay=2),
    bad("fake_quantise_grad", "f32[3]; f32[4]", ShapeError, "fake_quantise_grad: dy is f32[4], expected [3]"),
    bad("fake_quantise_grad", "f32[3]; f32[3]", GraphError, "fake_quantise_grad: ste is 'sign'; tanh", ste="sign"),
    bad("fake_quantise_scale_grad", "f32[3]; f32[]; f16[3]", DTypeError, "dy is f16[3], expected the type of x, f32"),
    bad("dequant_matmul", "i32[2, 32]; q8_0[4, 32]", DTypeError, "x is i32[2, 32], expected float", scheme="gguf_q8_0"),
    bad("dequant_matmul", "f32[2, 32]; q8_0[4, 32]", DTypeError, "stored as q4_0[n, k]; q8_0[4, 32]",
        scheme="gguf_q4_0"),
    bad("dequant_matmul", "f32[2, 64]; q8_0[4, 32]", ShapeError, "inner sizes differ, 64 and 32", scheme="gguf_q8_0"),
    bad("dequant_matmul", "f32[2, 32]; q8_0[4, 32]; f32[4]", GraphError, "gguf_q8_0 keeps its scales; f32[4]",
        scheme="gguf_q8_0"),
    bad("gather", "f32[3, 4]; f32[2]", DTypeError, "gather: indices are integers; f32"),
    bad("gather", "f32[3, 4]; i32[2]", ShapeError, "gather: axis 2; rank-2", axis=2),
    bad("grouped_matmul", "f32[3, 4]; f32[4, 5]; i32[3]", ShapeError, "grouped_matmul: ; f32[4, 5]"),
    bad("grouped_matmul", "f32[3, 4]; f32[2, 5, 6]; i32[3]", ShapeError, "grouped_matmul: inner sizes differ; 4; 5"),
    bad("grouped_matmul", "f32[3, 4]; f32[2, 4, 6]; i32[2]", ShapeError, "grouped_matmul: 3 rows; 2 indices"),
    bad("grouped_matmul", "f32[3, 4]; f32[2, 4, 6]; f32[3]", DTypeError, "grouped_matmul: indices are integers; f32"),
    bad("grouped_matmul", "i32[3, 4]; f32[2, 4, 6]; i32[3]", DTypeError, "grouped_matmul: takes floats; i32"),
    bad("group_rows", "i32[3, 4]", ShapeError, "group_rows: takes one index a row; i32[3, 4]", groups=2),
    bad("group_rows", "f32[3]", DTypeError, "group_rows: indices are integers; f32", groups=2),
    bad("grouped_outer", "f32[3, 4]; f32[4]; i32[3]", ShapeError, "grouped_outer: takes; f32[4]", groups=2),
    bad("grouped_outer", "f32[3, 4]; f32[2, 4]; i32[3]", ShapeError, "grouped_outer: 3 rows; 2 rows", groups=2),
    bad("grouped_outer", "f32[3, 4]; f32[3, 4]; i32[2]", ShapeError, "grouped_outer: 3 rows; 2 indices", groups=2),
    bad("grouped_outer", "f32[3, 4]; f32[3, 4]; f32[3]", DTypeError, "grouped_outer: indices are; f32", groups=2),
    bad("grouped_outer", "f32[3, 4]; i32[3, 4]; i32[3]", DTypeError, "grouped_outer: takes floats; i32", groups=2),
    bad("scatter_add", "f32[3, 4]; f32[2]; f32[2, 4]", DTypeError, "scatter_add: indices are integers; f32"),
    bad("scatter_add", "f32[3, 4]; i32[2]; f32[2, 5]", ShapeError, "scatter_add: ; f32[2, 5]; [2, 4]"),
    bad("scatter_add", "f32[3, 4]; i32[2]; f32[2]", ShapeError, "scatter_add: ; f32[2]; [2, 4]"),
    bad("scatter_add", "f32[3, 4]; i32[2]; f16[2, 4]", DTypeError, "scatter_add: ; f16; f32"),
    bad("scatter_add", "f32[]; i32[2]; f32[2]", ShapeError, "scatter_add: ; axis; f32[]"),
    # -- products and norms
    bad("cholesky", "f32[2, 3]", ShapeError, "cholesky: takes square matrices; 2 rows; 3 columns"),
    bad("cholesky", "i32[2, 2]", DTypeError, "cholesky: takes floats; i32"),
    bad("triangular_solve", "f32[2, 2]; f32[3, 1]", ShapeError, "triangular_solve: sizes differ, 2 and 3"),
    bad("triangular_solve", "f32[2, 2]; f64[2, 1]", DTypeError, "triangular_solve: ; f32 and f64"),
    bad("triangular_solve", "f32[4, 2, 2]; f32[3, 2, 1]", ShapeError, "triangular_solve: batches differ"),
    bad("lu", "f32[2, 3]", ShapeError, "lu: takes square matrices; 2 rows; 3 columns"),
    bad("qr", "f32[3]", ShapeError, "qr: takes matrices; f32[3]"),
    bad("qr", "f32[n, 3]", ShapeError, "qr: ; f32[n, 3]; static sizes"),
    bad("eigh", "f32[2, 3]", ShapeError, "eigh: takes square matrices; 2 rows; 3 columns"),
    bad("svd", "f32[2, 3]", ShapeError, "svd: takes at least as many rows as columns; 2 and 3"),
    bad("svd", "f32[n, 3]", ShapeError, "svd: ; f32[n, 3]; static sizes"),
    bad("matmul", "f32[2, 4]; f32[3, 5]", ShapeError, "matmul: inner sizes differ, 4 and 3"),
    bad("matmul", "f32[4]; f32[4, 5]", ShapeError, "matmul: ; f32[4]; f32[4, 5]"),
    bad("matmul", "f32[2, 3, 4]; f32[5, 4, 6]", ShapeError, "matmul: ; 2 and 5"),
    bad("matmul", "bool[2, 3]; bool[3, 2]", DTypeError, "matmul: takes numbers; bool"),
    bad("matmul", "f32[2, n]; f32[m, 5]", ShapeError, "matmul: inner sizes differ, n and m"),
    bad("quantise_rows", "i32[2, 4]", DTypeError, "quantise_rows: takes floats; i32[2, 4]"),
    bad("quantise_rows", "f32[]", ShapeError, "quantise_rows: needs an axis; scalar"),
    *(bad(op, "f32[2, 4]; f32[5]", ShapeError, f"{op}: gamma has 5; 4") for op in ("layer_norm", "rms_norm")),
    *(bad(op, "f32[2, 4]; f32[4]; f32[5]", ShapeError, f"{op}: beta has 5; 4") for op in ("layer_norm", "rms_norm")),
    *(bad(op, "f32[2, 4]; f32[1, 4]", ShapeError, f"{op}: gamma has 2 axes; 1") for op in ("layer_norm", "rms_norm")),
    *(bad(op, "i32[2, 4]", DTypeError, f"{op}: takes floats; i32") for op in ("layer_norm", "rms_norm")),
    *(bad(op, "f32[2, 4]; i32[4]", DTypeError, f"{op}: gamma is i32; f32") for op in ("layer_norm", "rms_norm")),
    *(bad(op, "f32[]", ShapeError, f"{op}: needs an axis; scalar") for op in ("layer_norm", "rms_norm")),
    # -- positions
    bad("rope", ROPE, GraphError, "rope: style 'spiral'; halves, pairs", style="spiral"),
    bad("rope", "f32[2, 3, 8]; f32[9, 4]; f32[9, 4]; i32[2, 3]", ShapeError,
         "rope: x is [batch, seq, heads, head_dim]; f32[2, 3, 8]"),
    bad("rope", "f32[2, 3, 2, 8]; f32[9, 4]; f32[9, 3]; i32[2, 3]", ShapeError, "rope: ; f32[9, 4]; f32[9, 3]"),
    bad("rope", "f32[2, 3, 2, 8]; f32[9, 5]; f32[9, 5]; i32[2, 3]", ShapeError, "rope: tables turn 10; 8"),
    bad("rope", "f32[2, 3, 2, 8]; f32[9, 4]; f32[9, 4]; i32[2, 4]", ShapeError, "rope: ; i32[2, 4]; f32[2, 3, 2, 8]"),
    bad("rope", "f32[2, 3, 2, 8]; f32[9, 4]; f32[9, 4]; i32[6]", ShapeError, "rope: positions; i32[6]"),
    bad("rope", "f32[2, 3, 2, 8]; f32[9, 4]; f32[9, 4]; f32[2, 3]", DTypeError,
         "rope: positions are integers; f32[2, 3]"),
    bad("rope", "i32[2, 3, 2, 8]; f32[9, 4]; f32[9, 4]; i32[2, 3]", DTypeError, "rope: takes floats; i32"),
    bad("norm_grad", "f32[2, 4]; f32[2, 5]", ShapeError, "norm_grad: dy is f32[2, 5]; f32[2, 4]", kind="rms", eps=0.1),
    bad("norm_grad", "f32[2, 4]; f32[2, 4]", GraphError, "norm_grad: kind 'batch'", kind="batch", eps=0.1),
    # -- attention
    bad("attention", "f32[2, 5, 32]; f32[2, 7, 2, 8]; f32[2, 7, 2, 8]", ShapeError, "attention: q is; f32[2, 5, 32]"),
    bad("attention", "f32[2, 5, 4, 8]; f32[2, 7, 2, 9]; f32[2, 7, 2, 8]", ShapeError,
         "attention: head_dim of q is 8; 9"),
    bad("attention", "f32[2, 5, 4, 8]; f32[2, 7, 2, 8]; f32[2, 6, 2, 8]", ShapeError, "attention: k has 7 keys; 6"),
    bad("attention", "f32[2, 5, 4, 8]; f32[2, 7, 2, 8]; f32[2, 7, 4, 8]", ShapeError, "attention: k has 2 heads; 4"),
    bad("attention", "f32[2, 5, 4, 8]; f32[3, 7, 2, 8]; f32[3, 7, 2, 8]", ShapeError,
         "attention: batch sizes differ, 2 and 3"),
    bad("attention", "f32[2, 5, 4, 8]; f32[2, 7, 3, 8]; f32[2, 7, 3, 8]", ShapeError,
         "attention: 4 query heads; 3 key heads"),
    bad("attention", "f32[2, 5, 4, 8]; f16[2, 7, 2, 8]; f32[2, 7, 2, 8]", DTypeError, "attention: ; f32 and f16"),
    bad("attention", "f32[2, 5, n, 8]; f32[2, 7, 2, 8]; f32[2, 7, 2, 8]", ShapeError,
         "attention: heads; f32[2, 5, n, 8]"),
    bad("attention", "f32[2, 5, 4, 0]; f32[2, 7, 2, 0]; f32[2, 7, 2, 8]", ShapeError,
         "attention: ; above 0; f32[2, 5, 4, 0]"),
    bad("attention", QKV, GraphError, "attention: mask kind 'casual'", mask_kind="casual"),
    bad("attention", QKV, GraphError, "attention: mask kind 'sliding(0)'", mask_kind="sliding(0)"),
    bad("attention", QKV, GraphError, "attention: mask kind 'near(-1)'", mask_kind="near(-1)"),
    bad("attention", QKV, GraphError, "attention: mask kind 'bias+segments'", mask_kind="bias+segments"),
    bad("attention", QKV, GraphError, "attention: mask kind 'causal+segment'", mask_kind="causal+segment"),
    bad("attention", QKV, GraphError, "attention: mask kind 'segments' needs a mask operand",
         mask_kind="causal+segments"),
    bad("attention", f"{QKV}; i32[2, 7]", ShapeError, "attention: segments are of one sequence; 5 queries, 7 keys",
         mask_kind="segments"),
    bad("attention", f"{QKV}; f32[2, 7]", DTypeError, "attention: segment ids are integers; f32", mask_kind="segments"),
    bad("attention", QKV, GraphError, "attention: mask kind 'bias' needs a mask operand", mask_kind="bias"),
    bad("attention", f"{QKV}; bool[2, 7]", GraphError, "attention: mask kind 'causal' takes no mask operand",
         mask_kind="causal"),
    bad("attention", f"{QKV}; bool[2, 5]", ShapeError, "attention: a custom mask; [2, 7]; bool[2, 5]",
         mask_kind="custom"),
    bad("attention", f"{QKV}; f32[2, 7]", ShapeError, "attention: a bias mask; [2, 4, 5, 7]; f32[2, 7]",
         mask_kind="bias"),
    bad("attention", f"{QKV}; f32[2, 3, 5, 7]", ShapeError, "attention: a bias mask; [2, 4, 5, 7]; f32[2, 3, 5, 7]",
         mask_kind="bias"),
    bad("attention", f"{QKV}; i32[2, 4, 5, 7]", DTypeError, "attention: a bias is a float tensor; i32",
         mask_kind="bias"),
    bad("attention", QKV, ShapeError, "attention: num_heads 3; f32[2, 5, 4, 8]", num_heads=3),
    bad("attention", QKV, GraphError, "attention: softcap is 0.0", softcap=0.0),
    bad("attention_lse", "f32[2, 5, 4, 8]; f32[2, 7, 2, 9]; f32[2, 7, 2, 8]", ShapeError,
         "attention_lse: head_dim of q is 8; 9"),
    bad("attention_grad", f"{QKV}; f32[2, 5, 4, 9]; f32[2, 4, 5]; f32[2, 4, 5]", ShapeError,
         "attention_grad: dy is f32[2, 5, 4, 9]; f32[2, 5, 4, 8]"),
    bad("attention_grad", f"{QKV}; f32[2, 5, 4, 8]; f32[2, 5, 4]; f32[2, 4, 5]", ShapeError,
         "attention_grad: lse is f32[2, 5, 4]; f32[2, 4, 5]"),
    bad("attention_grad", f"{QKV}; f32[2, 5, 4, 8]; f32[2, 4, 5]; i32[2, 4, 5]", DTypeError,
         "attention_grad: delta is i32[2, 4, 5]; floats"),
    # -- caches
    bad("kv_append", KEYS, ShapeError, "kv_append: new tokens f32[2, 5, 2, 8]; f32[6, 2, 8, 64]"),
    bad("kv_append", "f32[6, 2, 3, 8, 64]; f32[2, 5, 2, 8]; i32[2, 5]; i32[2, 3]",
        ShapeError, "kv_append: pool: expected [pages, kv_heads, dim, page]; f32[6, 2, 3, 8, 64]", axes="phds"),
    bad("kv_append", "f32[6, 2, 9, 8]; i32[2, 5, 2, 8]; i32[2, 5]; i32[2, 3]",
        DTypeError, "kv_append: new tokens are floats; i32"),
    bad("kv_append", "f32[6, 2, 9, 8]; f32[2, 5, 2, 8]; i32[2, 4]; i32[2, 3]",
        ShapeError, "kv_append: positions i32[2, 4]; [2, 5]"),
    bad("kv_append", "f32[6, 2, 9, 8]; f32[2, 5, 2, 8]; i32[2, 5]; f32[2, 3]",
        DTypeError, "kv_append: table: expected integers; f32[2, 3]"),
    bad("kv_append", "f32[6, 2, 9, 8]; f32[5, 2, 8]; i32[5]; i32[2, 3]; i32[4]",
        ShapeError, "kv_append: rows i32[4]; [5]"),
    bad("kv_append", "q8_0[6, 2, 32, 64]; f32[2, 5, 2, 32]; i32[2, 5]; i32[2, 3]",
        GraphError, "kv_append: pool: axes of q8_0 are 'phds'", axes="phds"),
    bad("kv_append", "q4_0[6, 2, 9, 32]; f32[2, 5, 2, 32]; i32[2, 5]; i32[2, 3]",
        DTypeError, "kv_append: pool: pages hold floats or q8_0; q4_0"),
    bad("cached_attention", CACHED, GraphError, "cached_attention: mask kind 'none'", mask_kind="none"),
    bad("cached_attention", CACHED, GraphError, "cached_attention: a ring forgets; 'causal'", ring=True),
    bad("cached_attention", "f32[2, 5, 4, 8]; f32[6, 2, 64, 8]; f32[6, 2, 32, 8]; i32[2, 5]; i32[2, 3]",
        ShapeError, "cached_attention: a page has 64 keys and 32 values"),
    bad("cached_attention", "f64[2, 5, 4, 32]; q8_0[6, 2, 64, 32]; q8_0[6, 2, 64, 32]; i32[2, 5]; i32[2, 3]",
        DTypeError, "cached_attention: both pools have one type; f64; q8_0"),
    bad("cached_attention", CACHED, GraphError, "cached_attention: softcap is -1.0", softcap=-1.0),
    bad("cached_attention", "f32[2, 5, 3, 8]; f32[6, 2, 64, 8]; f32[6, 2, 64, 8]; i32[2, 5]; i32[2, 3]",
        ShapeError, "cached_attention: 3 query heads; 2 key heads"),
    bad("cached_attention", "f32[2, 5, 4, 8]; f16[6, 2, 64, 8]; f32[6, 2, 64, 8]; i32[2, 5]; i32[2, 3]",
        DTypeError, "cached_attention: ; f16; f32"),
    bad("cached_attention", "f32[2, 5, 4, 8]; f32[6, 2, 64, 8]; f32[6, 2, 64, 8]; f32[2, 5]; i32[2, 3]",
        DTypeError, "cached_attention: positions: expected integers"),
    # -- blocks
    bad("linear", "f32[2, 4]; f32[3, 5]", ShapeError, "matmul: inner sizes differ, 4 and 3"),
    bad("linear", "f32[2, 4]; f32[4, 5]; f32[4]", ShapeError, "linear: bias f32[4]; 5 columns"),
    bad("linear", "f32[2, 4]; f32[4, 5]", GraphError, "linear: activation 'softmax'; gelu", activation="softmax"),
    bad("linear", "f32[2, 32]; q8_0[6, 32]", DTypeError, "linear: q8_0[6, 32] is packed"),
    bad("linear_stored", "f32[2, 4]; f32[4, 5]", ShapeError, "matmul: inner sizes differ, 4 and 5"),
    bad("linear_stored", "f32[2, 4]; f32[6, 4]", ShapeError, "linear_stored: 6 columns; 4 heads", heads=4),
    bad("norm", "f32[2, 4]; f32[5]", ShapeError, "norm: weight is f32[5]; expected [4]", kind="rms", eps=1e-6),
    bad("norm", "f32[2, 4]; f32[4]", GraphError, "norm: kind is 'batch'; rms", kind="batch", eps=1e-6),
    bad("normed_heads", "f32[2, 5, 8]; f32[12, 8]; f32[5]", ShapeError, "normed_heads: norm is f32[5]; expected [6]",
        heads=2, eps=1e-6),
    bad("normed_heads", "f32[5, 8]; f32[12, 8]; f32[6]", ShapeError, "normed_heads: x is f32[5, 8]; [batch,",
        heads=2, eps=1e-6),
    bad("gated_queries", "f32[2, 5, 8]; f32[6, 8]", ShapeError, "gated_queries: weight is f32[6, 8]; 2 * head_dim",
        heads=2),
    bad("attention_pool", "f32[2, 5, 8]; f32[16, 8]; f32[24]; f32[1, 1, 8]", ShapeError,
        "attention_pool: weight is f32[16, 8]; expected [24, 8]", heads=2),
    bad("attention_pool", "f32[2, 5, 8]; f32[24, 8]; f32[24]; f32[1, 1, 8]", ShapeError,
        "attention_pool: x is f32[2, 5, 8]; 3 * head_dim", heads=3),
    bad("split_qkv", "f32[2, 5, 16]", ShapeError, "split_qkv: found f32[2, 5, 16]; 3 * 2", num_heads=2),
    bad("self_attention", "f32[2, 5, 8]; f32[2, 5, 2, 4]; f32[2, 5, 2, 4]", ShapeError,
        "self_attention: q, k and v; f32[2, 5, 8]"),
    bad("self_attention", "f32[2, 5, 2, 4]; f32[2, 5, 2, 4]; f32[2, 5, 2, 4]; f32[2, 5]; f32[6, 2]", GraphError,
        "self_attention: takes cos and sin", mask_kind="custom"),
    bad("self_attention", f"{EVEN}; f32[2, 5]; -; -; -; -; f32[2, 5]", GraphError,
        "self_attention: takes a mask or kept_tokens", mask_kind="custom"),
    bad("self_attention", f"{EVEN}; -; -; -; -; -; -; f32[2, 5, 4]", ShapeError,
        "self_attention: gate is f32[2, 5, 4]; expected f32[2, 5, 8]"),
    bad("cached_self_attention",
        "f32[2, 5, 2, 4]; f32[2, 5, 2, 4]; f32[2, 5, 2, 4]; f32[3, 2, 64, 8]; f32[3, 2, 64, 4]; i32[2, 5]; i32[2, 1]",
        ShapeError, "kv_append; f32[3, 2, 64, 8]"),
    bad("gated_ffn", "f32[2, 4]; f32[8, 4]; f32[9, 4]; f32[4, 8]", ShapeError,
        "gated_ffn: up is f32[9, 4]; expected [8, 4]"),
    bad("fused_gated_ffn", "f32[2, 4]; f32[8, 4]; f32[4, 8]", ShapeError,
        "fused_gated_ffn: down is f32[4, 8]; expected [4, 4]"),
    bad("moe_ffn", "f32[2, 3, 4]; f32[5, 4]; f32[6, 8, 4]; f32[6, 8, 4]; f32[6, 4, 8]", ShapeError,
        "moe_ffn: router is f32[5, 4]; expected [6, 4]", chosen=2),
    bad("moe_ffn", "f32[2, 3, 4]; f32[6, 4]; f32[6, 8, 4]; f32[6, 8, 4]; f32[6, 4, 8]", GraphError,
        "moe_ffn: 7 of 6 experts", chosen=7),
    bad("moe_ffn", "f32[2, 3, 4]; f32[6, 4]; f32[6, 8, 4]; f32[6, 8, 4]; f32[6, 4, 8]; f32[1, 4]", GraphError,
        "moe_ffn: takes all four weights of a shared expert, or none", chosen=2),
    bad("patch_embedding", "f32[2, 3, 8, 8]; f32[5, 3, 2, 4]", ShapeError,
        "patch_embedding: weight is f32[5, 3, 2, 4]; expected [dim, channels, side, side]"),
    bad("mamba_block", "f32[2, 5, 12]; f32[6, 1, 3]; f32[10, 6]; f32[6, 5]; f32[6]; f32[6, 3]; f32[6]", ShapeError,
        "mamba_block: step is f32[6, 5]; expected [6, 4]"),
    bad("mamba_block", "f32[2, 5, 12]; f32[6, 1, 3]; f32[10, 6]; f32[6, 4]; f32[6]; f32[6, 3]; f32[6]; f32[6];"
        "f32[2, 2, 6]", GraphError, "mamba_block: takes conv_state, state and positions, or none of them"),
    bad("mamba2_block", "f32[2, 5, 27]; f32[16, 1, 3]; f32[2]; f32[2]; f32[2]; f32[8]", ShapeError,
        "mamba2_block: mixed is f32[2, 5, 27]; expected [2, 5, 26]", groups=1, eps=1e-5),
    bad("delta_net_block",
        "f32[2, 5, 24]; f32[2, 5, 16]; f32[2, 5, 4]; f32[2, 5, 4]; f32[24, 1, 3]; f32[4]; f32[3]; f32[4]", ShapeError,
        "delta_net_block: step_bias is f32[3]; expected [4]", state_size=2, eps=1e-5),
    bad("linear_fused", "f32[2, 4]; f32[4, 5]; f32[4]", ShapeError, "linear_fused: bias f32[4]; 5 columns"),
    bad("shared_linear_pair", "f32[2, 4]; f32[4, 5]; f32[3, 5]", ShapeError, "matmul: inner sizes differ, 4 and 3"),
    bad("swiglu_ffn", "f32[2, 4]; f32[4, 8]; f32[4, 9]; f32[8, 4]", ShapeError,
         "swiglu_ffn: up f32[4, 8]; gate f32[4, 9]"),
    bad("residual_rms_norm", "f32[2, 4]; f32[2, 5]; f32[4]", ShapeError, "residual_rms_norm: ; f32[2, 4]; f32[2, 5]",
         eps=1e-6),
    bad("attention_block", "f32[2, 5, 12]; f32[2, 5, 8]; f32[2, 5, 8]", ShapeError,
        "attention_block: q is f32[2, 5, 12]; expected 4 heads of 4", num_heads=4, head_dim=4),
    bad("rope_block", "f32[2, 3, 16]; f32[5, 3]; f32[5, 3]", ShapeError,
        "rope_block: cos is f32[5, 3]; expected [positions, 4]", head_dim=8),
    bad("rope_block", "f32[2, 3, 16]; f32[5, 4]; f32[5, 4]", ShapeError, "rope_block: n_rot is 3", head_dim=8, n_rot=3),
    bad("llama_decoder_block", f"f32[2, 5, 8]; f32[8]; f32[8, 16]; f32[8, 8]; f32[8, 12]; f32[16, 8]; f32[8]; {FFN}",
        ShapeError, "llama_decoder_block: v is f32[8, 12]; expected [8, 8]", **LAYER),
    bad("qwen35_mtp_head",
        "f32[2, 5, 8]; i32[2, 5]; i32[2]; f32[9, 8]; f32[8]; f32[8]; f32[8, 8]; f32[8]; f32[8, 32]; f32[8, 8];"
        "f32[8, 8]; f32[16, 8]; f32[4]; f32[4]; f32[6, 2]; f32[6, 2]; f32[8]; f32[8, 12]; f32[8, 12]; f32[12, 8];"
        "f32[8]; f32[8, 9]",
        ShapeError, "qwen35_mtp_head: eh_proj is f32[8, 8]; expected [16, 8]", **LAYER),
]  # fmt: skip


@pytest.mark.parametrize("call", BAD_CALLS, ids=str)
def test_a_type_rule_says_what_does_not_fit(call: Bad) -> None:
    graph = rlx.Graph("bad", level=registry.get(call.op).level)
    types = [None if t.strip() == "-" else parse_type(t) for t in call.operands.split(";") if t.strip()]
    operands = [t and graph.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types)]
    with pytest.raises(GraphError) as caught:
        graph.apply(call.op, *operands, **call.attrs)
    assert type(caught.value) is call.error, f"{type(caught.value).__name__}: {caught.value}"
    for fragment in call.says.split(";"):
        assert fragment.strip() in str(caught.value), f"{fragment.strip()!r} is not in: {caught.value}"


def test_every_user_facing_op_refuses_something() -> None:
    assert {op.name for op in user_ops()} == {call.op for call in BAD_CALLS}


@EVERY_USER_OP
def test_an_op_counts_its_operands(op: OpDef) -> None:
    graph = rlx.Graph("count", level=op.level)
    if op.schema.variadic:
        return
    x = graph.input("x", (2,))
    attrs = {k: 1 for k, default in op.schema.attrs.items() if default is registry.REQUIRED}
    with pytest.raises(GraphError, match=rf"{op.name}: takes .*operands? \(.*\), got {len(op.schema.operands) + 1}"):
        graph.apply(op.name, *[x] * (len(op.schema.operands) + 1), **attrs)
    with pytest.raises(GraphError, match=f"{op.name}: has no attribute 'colour'"):
        graph.apply(op.name, *[x] * len(op.schema.operands), colour="red", **attrs)
