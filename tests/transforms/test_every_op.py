"""Every op: its JVP against differences, its VJP against its JVP, derivatives of derivatives, vmap against a loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numeric import Array, Case, check_forward, check_reverse, check_vmap, evaluate, reverse_case, sample_case

import rlx
from rlx.errors import GraphError
from rlx.ir import registry
from rlx.ir.registry import CONTROL, FUSED, HIR, LEAF, OpDef, Sample
from rlx.transforms import jvp, rule_tables, vjp
from rlx.types import concrete

rlx.Graph("any")  # declares the ops
OPS = [o for o in registry.OPS.values() if o.is_builtin and not o.traits & {LEAF, FUSED}]
SAMPLED = [o for o in OPS if CONTROL not in o.traits]
NARROW = ("f16", "bf16", "f32")  # results that differences in float64 cannot be taken of
LONG = 64  # tokens; longer recurrences are differentiated once
RECURRENT = ("gated_delta_net", "gated_linear_attention", "selective_scan", "causal_conv")


def is_packed(sample: Sample) -> bool:
    return any(o is not None and rlx.dtype(o.dtype).is_packed for o in sample.operands)


def refused_operand(op: OpDef, sample: Sample) -> bool:
    """Whether a sample has an operand that nothing is differentiated beside."""
    operands = zip(op.schema.operands, sample.operands, strict=False)
    return any(o is not None and name in rule_tables.NO_DERIVATIVE_WITH.get(op.name, ()) for name, o in operands)


def smooth_samples(op: OpDef) -> Iterator[tuple[int, Sample]]:
    """Samples that have derivatives to look at."""
    for i, sample in enumerate(op.samples):
        if op.name == "pow" and i == 1:  # negative numbers to the power of fractions are NaN
            continue
        if op.name in rule_tables.NO_DERIVATIVE or op.name in rule_tables.STRAIGHT_THROUGH:  # tested on their own
            continue
        if op.name in ("depthwise_conv1d_causal_carry", "cached_self_attention"):  # have none
            continue
        if refused_operand(op, sample) or sample.attrs.get("complete"):  # a complete Q has no derivative
            continue
        if "conv_state" in op.schema.operands[: len(sample.operands)]:  # carries on a convolution
            continue
        if str(sample.attrs.get("dtype")) in NARROW or (op.name == "dequant_matmul" and is_packed(sample)):
            continue
        floats = [o for o in sample.operands if o is not None and o.dtype == "f32"]
        if floats:
            yield i, sample


def is_long(op: str, sample: Sample) -> bool:
    first = sample.operands[0]
    return registry.get(op).group in RECURRENT and first is not None and first.shape[1] > LONG


def has_float_result(case: Case) -> bool:
    return any(str(o.dtype) == "f64" for o in case.graph.outputs)


CASES = [pytest.param(op.name, s, id=f"{op.name}-{i}") for op in SAMPLED for i, s in smooth_samples(op)]


# -- completeness ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", [o.name for o in OPS if o.level != HIR])
def test_an_op_says_how_it_is_differentiated_and_batched(op: str) -> None:
    written = registry.get(op).decompose is not None
    assert rule_tables.covered(op) or written, f"{op}: add a rule in transforms/rules/{registry.get(op).group}.py"
    assert op in rule_tables.batching or written, (
        f"{op}: add a vmap rule in transforms/rules/{registry.get(op).group}.py"
    )


def test_rules_are_for_ops_that_exist() -> None:
    names = [
        *rule_tables.partials,
        *rule_tables.vjp,
        *rule_tables.jvp,
        *rule_tables.linearise,
        *rule_tables.push,
        *rule_tables.parts,
    ]
    assert {
        *names,
        *rule_tables.batching,
        *rule_tables.ZERO_GRADIENT,
        *rule_tables.NO_DERIVATIVE,
        *rule_tables.STRAIGHT_THROUGH,
    } <= set(registry.OPS)


def test_an_op_is_declared_without_derivative_or_has_a_rule_but_not_both() -> None:
    none = {*rule_tables.ZERO_GRADIENT, *rule_tables.NO_DERIVATIVE}
    assert not none & {*rule_tables.partials, *rule_tables.vjp, *rule_tables.linearise, *rule_tables.parts}
    assert not set(rule_tables.ZERO_GRADIENT) & set(rule_tables.NO_DERIVATIVE)


@pytest.mark.parametrize("op", sorted(rule_tables.NO_DERIVATIVE))
def test_an_op_without_derivative_says_why(op: str) -> None:
    case = sample_case(op, registry.get(op).samples[0])
    for transform in (jvp, vjp):
        with pytest.raises(GraphError, match=rf"{op}: has no derivative, .*training") as caught:
            transform(case.graph, case.floats)
        assert any("test_every_op" in n or "numeric.py" in n for n in caught.value.notes)


@pytest.mark.parametrize("op", sorted(rule_tables.NO_DERIVATIVE_WITH))
def test_an_op_without_derivative_beside_an_operand_says_why(op: str) -> None:
    definition = registry.get(op)
    case = sample_case(op, next(s for s in definition.samples if refused_operand(definition, s)))
    for transform in (jvp, vjp):
        with pytest.raises(GraphError, match=rf"{op}: has no derivative, .*rows.*training"):
            transform(case.graph, case.floats)


# -- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("op", "sample"), CASES)
def test_a_jvp_is_the_limit_of_differences(op: str, sample: Sample) -> None:
    case = sample_case(op, sample)
    if has_float_result(case):
        check_forward(case, np.random.default_rng(0))


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_a_vjp_is_the_transpose_of_the_jvp(op: str, sample: Sample) -> None:
    case = sample_case(op, sample)
    if has_float_result(case):
        check_reverse(case, np.random.default_rng(0))


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_derivatives_have_derivatives(op: str, sample: Sample) -> None:
    """Forward over reverse against differences, and reverse over reverse against that."""
    case = sample_case(op, sample)
    if not has_float_result(case) or is_long(op, sample) or registry.get(op).level == HIR:
        return  # blocks consist of ops that are tested here
    rng = np.random.default_rng(0)
    back = reverse_case(case, rng)
    check_forward(back, rng)
    check_reverse(back, rng)


BATCHED = [pytest.param(op.name, s, id=f"{op.name}-{i}")
           for op in SAMPLED for i, s in enumerate(op.samples) if not is_packed(s)]  # fmt: skip


@pytest.mark.parametrize(("op", "sample"), BATCHED)
def test_vmap_is_a_loop(op: str, sample: Sample) -> None:
    """With all operands batched, and with each one alone; axes anywhere."""
    case, rng = sample_case(op, sample), np.random.default_rng(1)
    names = list(case.arrays)
    check_vmap(case, rng, names)
    if len(names) > 1 and not is_long(op, sample) and registry.get(op).level != HIR:
        for name in names:
            check_vmap(case, rng, [name])


# -- rules that differences do not tell ------------------------------------------------------------------------------
def gradient(graph: rlx.Graph, **arrays: Array) -> list[Array]:
    back = vjp(graph, [n for n, a in arrays.items() if a.dtype == np.float64])
    ones = {
        n.attrs["name"]: np.ones(concrete(n.types[0].shape, {})) for n in back.inputs if n.attrs["name"] not in arrays
    }
    return evaluate(back, arrays | ones)[len(graph.outputs) :]


def test_equal_numbers_share_a_gradient() -> None:
    g = rlx.Graph("ties")
    a, b = g.input("a", (3,), "f64"), g.input("b", (3,), "f64")
    g.set_outputs([g.maximum(a, b).sum() + a.max() + g.minimum(a, b).sum()])
    da, db = gradient(g, a=np.array([1.0, 2.0, 2.0]), b=np.array([1.0, 0.0, 3.0]))
    np.testing.assert_array_equal(da, [1.0, 1.5, 1.5])
    np.testing.assert_array_equal(db, [1.0, 1.0, 1.0])


def test_a_product_with_zeros_has_a_gradient() -> None:
    g = rlx.Graph("zeros")
    g.set_outputs([g.input("x", (2, 3), "f64").prod(axis=1).sum()])
    (dx,) = gradient(g, x=np.array([[2.0, 0.0, 5.0], [0.0, 0.0, 4.0]]))
    np.testing.assert_array_equal(dx, [[0.0, 10.0, 0.0], [0.0, 0.0, 0.0]])


def test_zero_to_a_power_has_a_gradient() -> None:
    g = rlx.Graph("power")
    x, p = g.input("x", (3,), "f64"), g.input("p", (3,), "f64")
    g.set_outputs([(x**p).sum()])
    dx, dp = gradient(g, x=np.zeros(3), p=np.array([2.0, 1.0, 0.0]))
    np.testing.assert_array_equal(dx, [0.0, 1.0, 0.0])
    np.testing.assert_array_equal(dp, [0.0, 0.0, 0.0])


def test_fake_quantisation_is_straight_through() -> None:
    g = rlx.Graph("ste")
    x, s = g.input("x", (4,), "f64"), g.input("s", (), "f64")
    g.set_outputs([g.fake_quantise(x, s, bits=4)])
    dx, ds = gradient(g, x=np.array([0.13, -0.31, 5.0, -5.0]), s=np.array(0.1))
    np.testing.assert_array_equal(dx, [1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(ds, (1 - 1.3) + (-3 + 3.1) + 7 - 7)


def test_rounding_by_blocks_is_straight_through() -> None:
    g = rlx.Graph("ste")
    x = g.input("x", (2, 64), "f64")
    g.set_outputs([g.round_blocks(x.astype("f32"), block=32).astype("f64")])
    (dx,) = gradient(g, x=np.random.default_rng(0).normal(size=(2, 64)))
    np.testing.assert_array_equal(dx, np.ones((2, 64)))


def test_a_cast_takes_gradients_through_narrow_floats() -> None:
    g = rlx.Graph("cast")
    x = g.input("x", (3,), "f64")
    g.set_outputs([(x.astype("f16") * 2).astype("f64")])
    (dx,) = gradient(g, x=np.array([1.0, 2.0, 3.0]))
    assert dx.dtype == np.float64
    np.testing.assert_array_equal(dx, [2.0, 2.0, 2.0])


def test_a_query_that_sees_no_key_has_no_gradient() -> None:
    g = rlx.Graph("blind")
    q, k, v = (g.input(n, (1, 2, 1, 4), "f64") for n in "qkv")
    mask = g.input("mask", (1, 2), "bool")
    g.set_outputs([g.attention(q, k, v, mask, mask_kind="custom")])
    x = np.ones((1, 2, 1, 4))
    for gradients in gradient(g, q=x, k=x, v=x, mask=np.array([[False, False]])):
        np.testing.assert_array_equal(gradients, 0 * x)
