"""Names of JAX that are absent from `rlx`, and what takes their place: hints of attribute errors."""

from __future__ import annotations

PAGE = "docs/coming-from-jax.md lists JAX's names"
_HERE = {
    "lax": "its functions are in rlx itself: rlx.scan, rlx.cond, rlx.while_loop, rlx.dynamic_slice",
    "nn": "its functions are in rlx itself: rlx.relu, rlx.gelu, rlx.softmax, rlx.one_hot",
    "tree_util": "rlx.tree has map, flatten, unflatten, register and ravel",
    "tree_map": "rlx.tree.map",
    "make_jaxpr": "rlx.trace(f)(*args) returns the graph, which prints",
    "ShapeDtypeStruct": "rlx.TensorType(shape, dtype)",
    "PRNGKey": "rlx.random.key(seed)",
    "remat": "rlx.checkpoint",
    "pmap": "a function runs on one device; rlx.vmap batches",
    "shard_map": "a function runs on one device",
    "device_put": "arrays are NumPy arrays; rlx.jit(f, device=...) chooses a device",
    "device_get": "results are NumPy arrays already",
    "block_until_ready": "results are computed when a function returns",
    "pure_callback": "programs call no Python; rlx.debug.print prints",
    "closure_convert": "closures are captured by every transform",
    "top_k": "rlx.topk",
    "select": "rlx.where",
    "map": "rlx.vmap(f)(xs), or rlx.scan for one row after the other",
}


def hint(name: str) -> str | None:
    """Return what takes the place of a JAX name; None for a name that is not of JAX."""
    return f"{_HERE[name]}; {PAGE}" if name in _HERE else None
