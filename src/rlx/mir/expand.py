"""Expansion: replaces ops that have no kernel by their decomposition, and custom functions by their forward body.

Ops that do have a kernel are expanded too if the profile asks for their common form. Runs first, so that every later
pass sees through them. MIR in, MIR without composed ops out, including loop bodies.
"""

from __future__ import annotations

from typing import Any

from rlx.errors import CapabilityError, LowerError, nearest
from rlx.ir import registry
from rlx.ir.compose import expand_decomposition, is_composed
from rlx.ir.graph import Graph, Node, Value, attr_key
from rlx.ir.registry import COMPOSED, CONTROL
from rlx.ir.rewrite import Rewriter, inline, map_bodies, rebuild
from rlx.mir.common_forms import common_form
from rlx.profile import KernelDispatchConfig, KernelDispatchPolicy

Key = tuple[Any, ...]
NATIVE = KernelDispatchConfig()


def has_composed(graph: Graph, dispatch: KernelDispatchConfig = NATIVE) -> bool:
    """Whether the graph or one of its bodies has an op to expand."""
    for node in graph.nodes:
        if _expands(node, dispatch):
            return True
        if CONTROL in node.definition.traits and any(has_composed(v, dispatch) for v in _bodies(node)):
            return True
    return False


def expand(graph: Graph, *, dispatch: KernelDispatchConfig = NATIVE) -> Graph:
    """Expand every composed op, and the ops for which `dispatch` asks for the common form."""
    for kind in (*dispatch.force_common_kinds, *dispatch.force_native_kinds):
        if kind not in registry.OPS:
            hint = nearest(kind, registry.OPS)
            raise CapabilityError(f"profile: kernel_dispatch: no op is called {kind!r}", hint=hint)
    for kind in dispatch.force_common_kinds:
        if kind not in common_form and COMPOSED not in registry.OPS[kind].traits:
            known = f"known: {', '.join(sorted(common_form))}"
            raise CapabilityError(f"profile: kernel_dispatch: op {kind} has no common form", hint=known)
    return _expand(graph, dispatch, ())


def _expands(node: Node, dispatch: KernelDispatchConfig) -> bool:
    policy, composed = dispatch.of(node.op), is_composed(node)
    if composed and policy is KernelDispatchPolicy.FORCE_NATIVE and CONTROL not in node.definition.traits:
        hint = "take it out of kernel_dispatch.force_native_kinds, or use the policy prefer_native"
        raise LowerError(f"op {node.op}: has no kernel of its own, but kernel_dispatch asks for it", hint=hint)
    # a state is updated in place, which only the op's own kernel can do
    writes_state = any(o is not None and o.node.op == "state" for o in node.operands)
    return composed or (policy is KernelDispatchPolicy.FORCE_COMMON and node.op in common_form and not writes_state)


def _bodies(node: Node) -> list[Graph]:
    return [v for v in node.attrs.values() if isinstance(v, Graph)]


def _expand(graph: Graph, dispatch: KernelDispatchConfig, inside: tuple[Key, ...]) -> Graph:
    """Expand a graph that is part of the decomposition of the ops `inside`."""
    if not has_composed(graph, dispatch):
        return graph

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if not _expands(node, dispatch):
            return None
        key = _key(node)
        if key in inside:
            path = " > ".join(k[0] for k in (*inside[inside.index(key) :], key))
            raise LowerError(f"op {node.op}: its decomposition contains itself, {path}", hint=node.definition.place)
        if node.op == "custom_fn":
            body = node.attrs["fwd_body"]
        else:
            types = [None if o is None else o.type for o in node.operands]
            form = None if is_composed(node) else common_form.get(node.op)
            body = expand_decomposition(node.definition, types, node.attrs, form)
        operands = [o for o in rewriter.operands(node) if o is not None]
        return inline(rewriter.graph, _expand(body, dispatch, (*inside, key)), operands, node.origin.by("expand"))

    return map_bodies(rebuild(graph, visit, made_by="expand"), lambda body: _expand(body, dispatch, inside))


def _key(node: Node) -> Key:
    types = tuple(None if o is None else o.type for o in node.operands)
    return (node.op, types, *((k, attr_key(v)) for k, v in sorted(node.attrs.items())))
