"""Binds symbolic dims: replaces symbols by numbers, in types and attributes. HIR or MIR in, the same level out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.errors import BindError, GraphError, VerifyError, nearest
from rlx.ir.graph import Graph
from rlx.ir.rewrite import Rewriter
from rlx.types import Composite, Dim, DimBinding, Size, Symbol, TensorType, dim_floordiv, dim_max, dim_min

_COMPOSITES = {"//": dim_floordiv, "min": dim_min, "max": dim_max}


def bind_dims(graph: Graph, sizes: Mapping[str, int] | DimBinding, *, strict: bool = True) -> Graph:
    """Return the graph for these sizes. Symbols without a size stay; a size for an unknown symbol is an error.

    Without `strict`, sizes of unknown symbols are ignored, so one binding serves graphs that use different symbols.
    """
    known = sizes.as_dict() if isinstance(sizes, DimBinding) else dict(sizes)
    symbols = graph.symbols()
    for name, size in known.items():
        if strict and name not in symbols:
            raise BindError(f"bind_dims: graph {graph.name!r} has no symbol {name!r}", hint=nearest(name, symbols))
        if size > graph.limits.get(name, size):
            raise BindError(f"bind_dims: {name} is {size}, the graph allows at most {graph.limits[name]}")
    try:
        return _bound(graph, known).verify()
    except (GraphError, VerifyError) as error:
        shown = ", ".join(f"{name} = {size}" for name, size in sorted(known.items()))
        raise BindError(f"bind_dims: graph {graph.name!r} does not take {shown}: {error}") from error


def _bound(graph: Graph, known: Mapping[str, int]) -> Graph:
    rewriter = Rewriter(graph, "bind_dims")
    rewriter.graph.limits = {k: v for k, v in graph.limits.items() if k not in known}
    for node in graph.nodes:
        attrs = {k: _attribute(v, known) for k, v in node.attrs.items()}
        types = tuple(TensorType(tuple(substitute(d, known) for d in t.shape), t.dtype) for t in node.types)
        new_node = rewriter.graph.append(node.op, rewriter.operands(node), attrs, types, node.origin)
        rewriter.values.update(zip(node.results, new_node.results, strict=True))
    rewriter.graph.outputs = tuple(rewriter[o] for o in graph.outputs)
    return rewriter.graph


def _attribute(value: Any, known: Mapping[str, int]) -> Any:
    if isinstance(value, Dim):
        return substitute(value, known)
    if isinstance(value, tuple):
        return tuple(_attribute(v, known) for v in value)
    return _bound(value, known) if isinstance(value, Graph) else value


def substitute(size: Size, known: Mapping[str, int]) -> Size:
    """Replace the symbols of a size by their numbers, where known."""
    if isinstance(size, int):
        return size
    total: Size = 0
    for monomial, coefficient in size.terms:
        term: Size = coefficient
        for atom in monomial:
            term = term * _atom(atom, known)
        total = total + term
    return total


def _atom(atom: Symbol | Composite, known: Mapping[str, int]) -> Size:
    if isinstance(atom, Symbol):
        return known.get(atom.name, Dim((((atom,), 1),)))
    return _COMPOSITES[atom.op](substitute(atom.a, known), substitute(atom.b, known))
