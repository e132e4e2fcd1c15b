"""What the transforms take and give: names, orders, errors, symbolic sizes, and what they make of each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from graphs import examples
from hypothesis import given
from hypothesis import strategies as st
from numeric import Array, Case, assert_close, check_forward, check_reverse, check_vmap, evaluate, reverse_case

import rlx
from rlx.errors import DTypeError, GraphError, LowerError, ShapeError
from rlx.ir.registry import CONTROL, FUSED, LEAF, OPS
from rlx.transforms import checkpoint, grad, hvp, jacfwd, jacrev, jvp, rule_tables, value_and_grad, vjp, vmap
from rlx.types import concrete

rng = np.random.default_rng(3)


def mlp() -> rlx.Graph:
    """A loss of rows: two weights, labels that are integers, a size that only run time knows."""
    g = rlx.Graph("mlp")
    x, labels = g.input("x", ("n", 4), "f64"), g.input("labels", ("n",), "i32")
    w, b = g.param("w", (4, 3), "f64"), g.param("b", (3,), "f64")
    return g.set_outputs([((x @ w).tanh() + b).cross_entropy(labels).mean()])


def mlp_arrays(n: int = 5) -> dict[str, Array]:
    labels = rng.integers(0, 3, n).astype(np.int32)
    return {"x": rng.normal(size=(n, 4)), "labels": labels, "w": rng.normal(size=(4, 3)), "b": rng.normal(size=3)}


def cube() -> rlx.Graph:
    g = rlx.Graph("cube")
    x = g.input("x", (), "f64")
    return g.set_outputs([x * x * x])


# -- names and orders ------------------------------------------------------------------------------------------------
def test_leaves_keep_their_names_and_order_and_new_inputs_follow() -> None:
    names = ["x", "labels", "w", "b"]
    assert [n.attrs["name"] for n in grad(mlp()).nodes if n.op in ("input", "param")] == names
    pushed = jvp(mlp(), ["w", "x"])
    assert [n.attrs["name"] for n in pushed.nodes if n.op in ("input", "param")] == [*names, "tangent_w", "tangent_x"]
    assert [n.attrs["name"] for n in vjp(mlp()).inputs] == ["x", "labels", "d_output"]
    assert {n.attrs["name"] for n in vjp(mlp()).params} == {"w", "b"}


def test_params_are_differentiated_unless_something_else_is_named() -> None:
    assert [str(o.type) for o in grad(mlp()).outputs] == ["f64[4, 3]", "f64[3]"]
    assert [str(o.type) for o in grad(mlp(), ["b", "x"]).outputs] == ["f64[3]", "f64[n, 4]"]
    g = mlp()
    assert [str(o.type) for o in grad(g, g.named("x")).outputs] == ["f64[n, 4]"]
    assert [str(o.type) for o in grad(cube()).outputs] == ["f64[]"]


def test_what_does_not_matter_has_a_gradient_of_zero() -> None:
    g = rlx.Graph("g")
    x, y = g.input("x", (2,), "f64"), g.input("y", (3,), "f64")
    g.set_outputs([(x * x).sum() + (y > 0.0).astype("f64").sum()])
    gradients = grad(g, ["y", "x"])
    dy, dx = evaluate(gradients, {"x": np.array([1.0, 2.0]), "y": np.ones(3)})
    np.testing.assert_array_equal(dy, np.zeros(3))
    np.testing.assert_array_equal(dx, [2.0, 4.0])


def test_nothing_is_computed_for_zero_cotangents() -> None:
    """Only the one output that the loss is: the matmuls of the other have no transpose in the graph."""
    g = rlx.Graph("g")
    x, w = g.input("x", (2, 4)), g.param("w", (4, 4))
    g.set_outputs([x.sum() + w.sum(), x @ w @ w])
    gradient = grad(g, "x", has_aux=True)
    gradient.outputs = gradient.outputs[1:]
    assert [n.op for n in gradient.nodes if n.op == "matmul"] == ["matmul"] * 2


def test_nodes_say_where_they_come_from() -> None:
    transformed = value_and_grad(mlp())
    back = [n for n in transformed.nodes if n.origin.made_by == "vjp"]
    assert back and all("test_graph_transforms.py" in n.origin.file for n in back)


def test_a_module_is_lowered_first() -> None:
    module = rlx.Graph.define("m", lambda m: m.linear(m.input("x", ("n", 4)), m.param("w", (4, 3))).sum())
    inputs = {"x": np.ones((2, 4), np.float32), "w": np.ones((4, 3), np.float32)}
    np.testing.assert_array_equal(evaluate(grad(module, "w"), inputs, {"n": 2})[0], np.full((4, 3), 2.0))


# -- orders ----------------------------------------------------------------------------------------------------------
def test_transforms_compose_to_any_order() -> None:
    at = {"x": np.array(2.0)}
    third = grad(grad(grad(cube(), "x"), "x"), "x")
    assert evaluate(third, at)[0] == 6.0
    pushed = jvp(jvp(grad(cube(), "x"), "x"), "x")
    names = [n.attrs["name"] for n in pushed.inputs]
    assert names == ["x", "tangent_x", "tangent_x_2"]
    one = {n: np.array(1.0) for n in names[1:]}
    assert [float(v) for v in evaluate(pushed, at | one)] == [12.0, 12.0, 12.0, 6.0]


def test_a_hessian_is_the_same_in_every_way() -> None:
    inputs = mlp_arrays()
    gradient = grad(mlp(), "w")
    hessians = [f(gradient, "w") for f in (jacfwd, jacrev)] + [jacfwd(grad(mlp(), "w"), "w")]
    results = [evaluate(h, inputs, {"n": 5})[0] for h in hessians]
    v = rng.normal(size=(4, 3))
    (product,) = evaluate(hvp(mlp(), "w"), inputs | {"tangent_w": v}, {"n": 5})
    for h in results:
        assert h.shape == (4, 3, 4, 3)
        assert_close(h, results[0], 1e-12)
        assert_close(h, h.transpose(2, 3, 0, 1), 1e-12)
        assert_close(np.einsum("ijkl,kl->ij", h, v), product, 1e-12)


def test_jacobians_of_several_outputs_by_several_inputs() -> None:
    g = rlx.Graph("g")
    a, b = g.input("a", ("n",), "f64"), g.input("b", (2,), "f64")
    g.set_outputs([a * a, b.sum() * a, b * 3.0])
    inputs = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([0.5, 1.5])}
    ones = np.repeat(inputs["a"][:, None], 2, 1)
    wanted = [np.diag(2 * inputs["a"]), np.zeros((3, 2)), 2 * np.eye(3), ones, np.zeros((2, 3)), 3 * np.eye(2)]
    for transform in (jacfwd, jacrev):
        for jacobian, want in zip(evaluate(transform(g, ["a", "b"]), inputs, {"n": 3}), wanted, strict=True):
            np.testing.assert_allclose(jacobian, want, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_symbolic_sizes_go_through_everything(n: int) -> None:
    case = Case(mlp(), mlp_arrays(n))
    check_forward(case, rng, sizes={"n": n})
    back = reverse_case(case, rng, {"n": n})
    check_forward(back, rng, sizes={"n": n})
    check_reverse(back, rng, {"n": n})


def symbolic_ops(g: rlx.Graph, x: rlx.Value) -> rlx.Value:
    """Ops whose rules need to know a size that only run time knows."""
    n = x.shape[0]
    q = x.reshape(1, n, 2, 2)
    pooled = g.conv2d(x.reshape(1, 1, n, 4), g.constant(np.ones((1, 1, 1, 2))), stride=(2, 1))
    seen = g.attention(q, q, q, mask_kind="sliding(3)").reshape(n, 4)
    parts = [x.mean(axis=0), x.cumsum(axis=0).sum(axis=0), x.prod(axis=0), x.max(axis=0), seen.sum(axis=0)]
    total: rlx.Value = pooled.sum() + x[0::2].sum()
    for part in parts:
        total = total + (part * part).sum()
    return total


def test_rules_that_need_a_size_count_it_at_run_time() -> None:
    def build(n: Any) -> rlx.Graph:
        g = rlx.Graph("g")
        return g.set_outputs([symbolic_ops(g, g.input("x", (n, 4), "f64"))])

    symbolic = grad(build("n"), "x")
    for n in (2, 5, 6):
        x = {"x": rng.normal(size=(n, 4))}
        assert_close(evaluate(symbolic, x, {"n": n})[0], evaluate(grad(build(n), "x"), x)[0], 1e-12)


# -- vmap ------------------------------------------------------------------------------------------------------------
def test_vmap_in_vmap_and_of_gradients() -> None:
    g = rlx.Graph("dot")
    a, b = g.input("a", (4,), "f64"), g.input("b", (4,), "f64")
    g.set_outputs([(a * b).tanh().sum()])
    table = vmap(vmap(g, {"b": 0}, size="m"), {"a": 0}, size="n")
    x, y = rng.normal(size=(3, 4)), rng.normal(size=(5, 4))
    wanted = np.tanh(x[:, None] * y[None]).sum(-1)
    assert_close(evaluate(table, {"a": x, "b": y}, {"n": 3, "m": 5})[0], wanted, 1e-12)
    each = vmap(grad(g, "a"), {"a": 1, "b": None}, 1, size=3)
    slope = (1 - np.tanh(x * y[0]) ** 2) * y[0]
    assert_close(evaluate(each, {"a": x.T, "b": y[0]})[0], slope.T, 1e-12)
    batched = vmap(g, {"a": 0}, size=3)
    total = batched.set_outputs([batched.outputs[0].sum()])
    assert_close(evaluate(grad(total, "a"), {"a": x, "b": y[0]})[0], slope, 1e-12)


def test_vmap_shares_params_and_names_its_batch() -> None:
    batched = vmap(mlp())
    assert [str(n.types[0]) for n in batched.inputs] == ["f64[batch, n, 4]", "i32[batch, n]"]
    assert [str(n.types[0]) for n in batched.params] == ["f64[4, 3]", "f64[3]"]
    assert [str(o.type) for o in batched.outputs] == ["f64[batch]"]


def test_an_output_that_no_lane_changes_is_repeated() -> None:
    g = rlx.Graph("g")
    a, b = g.input("a", (2,), "f64"), g.input("b", (2,), "f64")
    g.set_outputs([b * 2.0, a])
    outputs = evaluate(vmap(g, {"a": 0}, [1, 0], size=3), {"a": np.zeros((3, 2)), "b": np.array([1.0, 2.0])})
    np.testing.assert_array_equal(outputs[0], [[2.0] * 3, [4.0] * 3])


# -- checkpoints -----------------------------------------------------------------------------------------------------
def deep(layers: int, wrap: Any = None) -> rlx.Graph:
    layer = rlx.Graph("layer")
    h, w = layer.input("h", (8, 6), "f64"), layer.input("w", (6, 6), "f64")
    layer.set_outputs([h + (h @ w).gelu().rms_norm()])
    g = rlx.Graph("deep")
    h = g.input("x", (8, 6), "f64")
    for i in range(layers):
        w = g.param(f"w{i}", (6, 6), "f64")
        h = h + (h @ w).gelu().rms_norm() if wrap is None else wrap(layer)(h, w)
    return g.set_outputs([(h * h).sum()])


@pytest.mark.parametrize("keep", ["nothing", "matmuls", lambda node: node.op == "gelu"])
def test_what_is_kept_changes_no_gradient(keep: Any) -> None:
    inputs = {"x": rng.normal(size=(8, 6))} | {f"w{i}": rng.normal(size=(6, 6)) for i in range(3)}
    wanted = evaluate(value_and_grad(deep(3)), inputs)
    checkpointed = deep(3, lambda body: checkpoint(body, keep=keep))
    for graph in (value_and_grad(deep(3), keep=keep), value_and_grad(checkpointed)):
        for a, b in zip(evaluate(graph, inputs), wanted, strict=True):
            assert_close(a, b, 1e-12)
    again = hvp(deep(2, checkpoint), "w0")
    direction = {"tangent_w0": rng.normal(size=(6, 6))}
    inputs = {n: a for n, a in inputs.items() if n != "w2"}
    assert_close(evaluate(again, inputs | direction)[0], evaluate(hvp(deep(2), "w0"), inputs | direction)[0], 1e-11)


def test_checkpoints_need_less_memory() -> None:
    def arena(graph: rlx.Graph) -> int:
        return int(rlx.compile(rlx.Graph.parse(graph.text(full=True).replace("f64", "f32"))).memory().arena)

    plain = arena(value_and_grad(deep(6)))
    assert arena(value_and_grad(deep(6), keep=lambda node: node.op in ("matmul", "add"))) < 0.8 * plain
    assert arena(value_and_grad(deep(6, checkpoint))) < 0.8 * plain


# -- errors ----------------------------------------------------------------------------------------------------------
def test_a_loss_is_one_float() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (2, 3))
    g.set_outputs([x * 2.0])
    with pytest.raises(ShapeError, match=r"grad: the output is f32\[2, 3\], expected one number"):
        grad(g, "x")
    g.set_outputs([x.sum(), x.max()])
    with pytest.raises(GraphError, match="has 2 outputs, expected one"):
        value_and_grad(g, "x")
    g.set_outputs([x.argmax(axis=1).sum()])
    with pytest.raises(DTypeError, match=r"the output is i32\[\], expected one float"):
        grad(g, "x")


def test_only_floats_have_gradients() -> None:
    with pytest.raises(DTypeError, match=r"grad: 'labels' is i32\[n\], only floats have a gradient"):
        grad(mlp(), "labels")
    with pytest.raises(GraphError, match="nothing is called 'weight' in graph 'mlp'"):
        jvp(mlp(), "weight")
    with pytest.raises(GraphError, match="each once"):
        vjp(mlp(), ["w", "w"])
    with pytest.raises(GraphError, match="neither an input nor a param"):
        g = mlp()
        grad(g, g.outputs[0])
    with pytest.raises(GraphError, match="has no outputs"):
        grad(rlx.Graph("empty"))
    with pytest.raises(GraphError, match="int is neither a Graph nor a GraphModule"):
        grad(3)
    with pytest.raises(GraphError, match=r"keep is 'all'"):
        grad(mlp(), keep="all")
    integers = rlx.Graph("integers")
    integers.set_outputs([integers.input("i", (2,), "i32").astype("f32").sum()])
    with pytest.raises(GraphError, match="has no float inputs"):
        grad(integers)


def test_vmap_says_what_it_cannot_batch() -> None:
    with pytest.raises(GraphError, match="nothing is called 'y'"):
        vmap(mlp(), {"y": 0})
    with pytest.raises(ShapeError, match="vmap: 'x': axis 3 is outside"):
        vmap(mlp(), {"x": 3})
    with pytest.raises(GraphError, match="nothing in graph 'mlp' is batched"):
        vmap(mlp(), {"x": None})
    with pytest.raises(GraphError, match="2 out_axes for 1 outputs"):
        vmap(mlp(), 0, [0, 1])


def test_an_op_of_a_user_is_differentiated_by_its_parts(own_ops: None) -> None:
    @rlx.op("softplus", decompose=lambda x: (1.0 + x.exp()).log())
    def softplus(x: Any) -> Any:
        """log(1 + e^x)."""
        return x

    @rlx.op("opaque", reference=np.floor)
    def opaque(x: Any) -> Any:
        """Nobody knows."""
        return x

    g = rlx.Graph("g")
    x = g.input("x", (3,), "f64")
    case = Case(g.set_outputs([x.softplus()]), {"x": rng.normal(size=3)})
    check_forward(case, rng)
    check_reverse(case, rng)
    check_vmap(case, rng, ["x"])
    g.set_outputs([x.opaque().sum()])
    with pytest.raises(LowerError, match="op opaque: has no derivative rule") as caught:
        grad(g, "x")
    assert caught.value.hint and "decompose=" in caught.value.hint and "rule_tables.vjp('opaque')" in caught.value.hint
    check_vmap(Case(g, {"x": rng.normal(size=3)}), rng, ["x"])


# -- shapes ----------------------------------------------------------------------------------------------------------
@examples(30)
@given(data=st.data())
def test_random_graphs_of_random_shapes(data: Any) -> None:
    """Chains of ops that broadcast, reduce and move, over sizes with 0 and 1 among them."""
    sizes = st.sampled_from([0, 1, 2, 3, 5])
    rows, columns = data.draw(sizes), data.draw(sizes)
    g = rlx.Graph("random")
    a, b, c = g.input("a", (rows, columns), "f64"), g.input("b", (columns,), "f64"), g.input("c", (rows, 1), "f64")
    values = [a, a * b + c]
    for _ in range(data.draw(st.integers(1, 5))):
        x, y = (values[data.draw(st.integers(0, len(values) - 1))] for _ in range(2))
        match data.draw(st.integers(0, 9)):
            case 0:
                values.append((x * y).tanh())
            case 1:
                values.append(x - y.sum(axis=data.draw(st.sampled_from([0, 1])), keepdims=True))
            case 2:
                values.append(g.concatenate(x[: rows // 2], y[rows // 2 :], axis=0).sin())
            case 3:
                values.append((x @ y.mT) @ x * 0.1)
            case 4:
                values.append(x.reshape(columns, rows).mT * y)
            case 5:
                values.append(g.where(x > y, x, y * 0.5))
            case 6:
                values.append(x.cumsum(axis=0, exclusive=True) * 0.3 + y)
            case 7:
                values.append(x.pad(low=(1, 0), high=(0, 2))[1:, :columns].cos())
            case 8:
                index = np.arange(rows, dtype=np.int32)[::-1] // 2
                values.append(x.gather(index) + g.scatter_add(y, index, x))
            case 9:
                values.append(x.exp() * 0.1 if columns == 0 else x.softmax(axis=1) * y)
    g.set_outputs([values[-1], values[-1].sum()])
    case = Case(
        g, {"a": rng.normal(size=(rows, columns)), "b": rng.normal(size=columns), "c": rng.normal(size=(rows, 1))}
    )
    check_forward(case, rng, 1e-5)
    check_reverse(case, rng)
    check_vmap(case, rng, [n for n in "abc" if data.draw(st.booleans())] or ["a"], size=data.draw(st.integers(1, 3)))


# -- machine code ----------------------------------------------------------------------------------------------------
GROUPS = sorted(
    {
        o.group
        for o in OPS.values()
        if o.name in rule_tables.vjp or o.name in rule_tables.partials or o.name in rule_tables.parts
    }
)


@pytest.mark.parametrize("group", GROUPS)
def test_gradients_run_as_machine_code(group: str) -> None:
    """The first sample of every op of a group, forward and back, in one graph: the CPU against the reference."""
    g = rlx.Graph(group)
    arrays: dict[str, Array] = {}
    outputs: list[rlx.Value] = []
    for op in OPS.values():
        if op.group != group or not op.samples or not op.is_builtin or op.traits & {LEAF, FUSED, CONTROL}:
            continue
        if op.name in rule_tables.ZERO_GRADIENT or op.name in rule_tables.NO_DERIVATIVE:
            continue
        values: list[Any] = []
        for i, spec in enumerate(op.samples[0].operands):
            if spec is None:
                values.append(None)
                continue
            array = spec.array(rng)
            arrays[f"{op.name}{i}"] = array
            is_packed = rlx.dtype(spec.dtype).is_packed
            values.append(g.input(f"{op.name}{i}", spec.shape, spec.dtype if is_packed else array.dtype))
        result = g.apply(op.name, *values, **op.samples[0].attrs)
        outputs += [v for v in (result if isinstance(result, tuple) else (result,)) if v.dtype.is_float]
    if not outputs:
        return
    floats = [n for n, a in arrays.items() if a.dtype == np.float32]
    back = vjp(g.set_outputs(outputs), floats)
    for node in back.inputs:
        if node.attrs["name"] not in arrays:
            arrays[node.attrs["name"]] = rng.normal(size=concrete(node.types[0].shape, {})).astype(np.float32)
    results, wanted = rlx.compile(back).run(arrays), evaluate(back, arrays)
    for a, b in zip(results, wanted, strict=True):
        scale = max(1.0, float(np.abs(b).max(initial=0)))
        assert math.isfinite(scale) and np.abs(a - b).max(initial=0) <= 2e-5 * scale


def test_the_axis_of_a_batch_has_a_name_of_its_own() -> None:
    g = rlx.Graph("rows")
    x = g.input("x", ("batch", 4))
    g.set_outputs([(x * x).sum()])
    assert str(vmap(g).inputs[0].types[0]) == "f32[batch_1, batch, 4]"
    assert str(vmap(g, size="examples").inputs[0].types[0]) == "f32[examples, batch, 4]"
    assert str(vmap(vmap(g)).inputs[0].types[0]) == "f32[batch_2, batch_1, batch, 4]"
