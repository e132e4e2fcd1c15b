"""Rewrites convolutions with non-overlapping windows, such as a vision model's patch embedding, as one matmul."""

from __future__ import annotations

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.ops.conv import pair


def patches_as_matmuls(graph: Graph) -> Graph:
    """conv2d with stride == kernel, no padding, no dilation, no groups -> reshape, transpose, matmul."""
    if not any(node.op == "conv2d" for node in graph.nodes):
        return graph
    return rebuild(graph, _visit, made_by="patches_as_matmuls")


def _visit(rewriter: Rewriter, node: Node) -> Value | None:
    if node.op != "conv2d" or not _is_patches(node):
        return None
    x, weight, *rest = (None if o is None else rewriter[o] for o in node.operands)
    assert x is not None and weight is not None
    outs, channels, ky, kx = weight.shape
    batch, _, rows, columns = node.types[0].shape
    # Crop pixels that no window covers.
    used = (batch, channels, rows * ky, columns * kx)
    if x.shape != used:
        x = rewriter.one(node, "slice", x, start=(0,) * 4, stop=used, step=(1,) * 4)
    split = rewriter.one(node, "reshape", x, shape=(batch, channels, rows, ky, columns, kx))
    windows = rewriter.one(node, "transpose", split, axes=(0, 2, 4, 1, 3, 5))
    flat = rewriter.one(node, "reshape", windows, shape=(batch, rows * columns, channels * ky * kx))
    taps = rewriter.one(node, "reshape", weight, shape=(outs, channels * ky * kx))
    y = rewriter.one(node, "matmul", flat, rewriter.one(node, "transpose", taps, axes=(1, 0)))
    if rest and rest[0] is not None:
        y = rewriter.one(node, "add", y, rest[0])
    planes = rewriter.one(node, "transpose", y, axes=(0, 2, 1))
    return rewriter.one(node, "reshape", planes, shape=node.types[0].shape)


def _is_patches(node: Node) -> bool:
    weight = node.operands[1]
    assert weight is not None
    kernel = weight.shape[2:]
    settings = {name: pair("conv2d", name, node.attrs[name], 0) for name in ("stride", "padding", "dilation")}
    plain = settings["padding"] == (0, 0) and settings["dilation"] == (1, 1) and node.attrs["groups"] == 1
    fits = all(isinstance(size, int) for size in node.types[0].shape[2:])  # symbolic sizes are checked at run time
    return plain and fits and settings["stride"] == kernel
