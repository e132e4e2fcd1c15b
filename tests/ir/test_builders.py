"""`dir`, `help` and signatures of ops: what people see who try things out at a prompt."""

from __future__ import annotations

import inspect
import pydoc
import rlcompleter
from collections.abc import Iterator

import pytest

import rlx
from rlx import Emit, FlowValue, Graph, GraphModule, LayerStack, ModelFlow, Value
from rlx.errors import GraphError
from rlx.ir.registry import LEAF, OPS, RENAMED
from rlx.lir.forms.custom import forget
from rlx.types import TensorType

GRAPH = Graph("discovery")
X = GRAPH.input("x", (2, 4))
METHODS = sorted(o.name for o in OPS.values() if LEAF not in o.traits and o.is_builtin)


def shown(method: object) -> str:
    return pydoc.render_doc(method, renderer=pydoc.plaintext)


def test_dir_has_every_op() -> None:
    assert len(METHODS) > 130
    for holder in (GRAPH, X, GraphModule.hir("m"), GraphModule.mir("m")):
        assert set(METHODS) <= set(dir(holder))
        assert {"quantize", "dequantize"} <= set(dir(holder))
        assert dir(holder) == sorted(set(dir(holder)))


@pytest.mark.parametrize("name", METHODS)
def test_every_op_has_a_real_signature_and_its_docstring(name: str) -> None:
    schema = OPS[name].schema
    for holder in (GRAPH, GraphModule.hir("m")):
        method = getattr(holder, name)
        assert method.__name__ == name and inspect.getdoc(method)
        if name not in dir(type(holder)) and name not in dir(Graph):  # builders by hand have signatures of their own
            parameters = list(inspect.signature(method).parameters)
            assert parameters == [*schema.operands, *schema.attrs, "out_shape"]
            assert inspect.getdoc(method) == OPS[name].doc
        kinds = {p.kind for p in inspect.signature(method).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.getdoc(getattr(X, name))
    assert inspect.Parameter.VAR_KEYWORD not in {
        p.kind for p in inspect.signature(getattr(X, name)).parameters.values()
    }


def test_help_shows_the_call_and_what_it_does() -> None:
    line = "softmax(x: Operand, *, axis: int = -1, out_shape: ShapeLike | None = None) -> Value"
    assert line in shown(GRAPH.softmax) and OPS["softmax"].doc.splitlines()[0] in shown(GRAPH.softmax)
    assert "softmax(*, axis: int = -1, out_shape: ShapeLike | None = None) -> Value" in shown(X.softmax)
    assert "topk(*, k: int, out_shape: Any = None) -> tuple[Value, Value]" in shown(X.topk)
    assert "concatenate(*xs: Operand | Sequence[Operand], axis: int = 0" in shown(GRAPH.concatenate)
    assert "num_kv_heads: int" in shown(GraphModule.hir("m").llama_decoder_block)


def test_a_prompt_completes_ops() -> None:
    module = GraphModule.hir("m")
    module.set_outputs([module.input("x", (2,)).exp()])
    planned = module.plan()
    names = {"g": GRAPH, "x": X, "m": module, "mir": module.lower(), "lir": planned}
    complete = rlcompleter.Completer(names)
    for text in ("g.softm", "x.softm", "m.softm", "mir.softm"):
        assert complete.complete(text, 0) == f"{text}ax("
    # a module lists what it has at its level: completion reads each of them
    for name in ("m", "mir", "lir"):
        for attribute in dir(names[name]):
            getattr(names[name], attribute)
    assert "softmax" not in dir(planned) and "nodes" in dir(planned) and "nodes" not in dir(module)


@pytest.fixture
def own_op() -> Iterator[str]:
    @rlx.op("discovery_twice", reference=lambda x, *, by: by * x)
    def twice(x: TensorType, *, by: float = 2.0) -> TensorType:
        """x times a number."""
        return x

    yield "discovery_twice"
    forget("discovery_twice")


def test_an_op_that_is_declared_later_is_there_at_once(own_op: str) -> None:
    assert own_op in dir(GRAPH) and own_op in dir(X)
    method = getattr(X, own_op)
    assert str(inspect.signature(method)) == "(*, by: float = 2.0, out_shape: ShapeLike | None = None) -> Value"
    assert inspect.getdoc(method) == "x times a number."
    forget(own_op)
    assert own_op not in dir(GRAPH)


def test_a_block_of_several_results_gives_all_of_them() -> None:
    module = GraphModule.hir("m")
    parts = module.split_qkv(module.input("qkv", (1, 2, 12)), num_heads=2)
    assert len(parts) == 3 and all(isinstance(part, Value) for part in parts)


def test_an_attribute_that_a_builder_does_not_have_is_a_graph_error_with_a_hint() -> None:
    module = GraphModule.hir("m")
    q = module.input("q", (1, 2, 8))
    with pytest.raises(GraphError, match="attention: has no attribute 'head_dims'") as caught:
        module.attention(q, q, q, num_heads=2, head_dims=4)  # type: ignore[call-arg]
    assert "head_dim" in str(caught.value.notes)
    with pytest.raises(GraphError, match="rope: has no attribute 'nrot'"):
        module.rope(q, q, q, head_dim=4, nrot=2)  # type: ignore[call-arg]
    for quantise in (X.quantise, X.quantize):
        with pytest.raises(GraphError, match="quantise: has no attribute 'scheem'"):
            quantise(1.0, scheem="int8/32")  # type: ignore[call-arg]
    with pytest.raises(TypeError):  # a mistake of another kind stays what it is
        module.attention(q)  # type: ignore[call-arg]


def test_what_flows_has_ops_with_docstrings() -> None:
    seen: list[str] = []

    def author(emit: Emit, value: FlowValue) -> FlowValue:
        for holder in (emit, value):
            assert set(METHODS) <= set(dir(holder))
            seen.append(shown(holder.softmax))
        return value.quantize(value.quant_scale()).dequantize(0.5)

    ModelFlow("m").input("x", (2, 4)).custom(author).build()
    assert all("axis: int = -1" in text and OPS["softmax"].doc.splitlines()[0] in text for text in seen)


@pytest.mark.parametrize("cls", [Graph, Value, GraphModule, ModelFlow, LayerStack, FlowValue, Emit])
def test_every_public_method_has_a_docstring_and_types(cls: type) -> None:
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        assert inspect.getdoc(function), f"{cls.__name__}.{name} has no docstring"
        hints = function.__annotations__
        assert "return" in hints, f"{cls.__name__}.{name} does not say what it returns"


@pytest.mark.parametrize("old", RENAMED)
def test_the_old_name_of_an_op_warns_and_says_the_new_one(old: str) -> None:
    g, new = rlx.Graph("g"), RENAMED[old]
    x = g.input("x", (2,))
    for build in (lambda: getattr(g, old)(x), lambda: getattr(x, old)(), lambda: g.apply(old, x)):
        with pytest.warns(DeprecationWarning, match=f"the op {old} is now called {new}"):
            assert build().node.op == new
    text = g.set_outputs([getattr(g, new)(x)]).text()
    with pytest.warns(DeprecationWarning, match=new):
        assert rlx.Graph.parse(text.replace(f" {new}(", f" {old}(")).text() == text
