"""Names of JAX that are absent from `rlx`, and what takes their place: hints of attribute errors."""

from __future__ import annotations

PAGE = "docs/coming-from-jax.md lists JAX's names"
_TRAIN = "rlx.train has adamw, sgd and schedules, for graphs and flows; write Adam for functions with rlx.tree.map"
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
    "jnp": "rlx.numpy, or plain numpy: its functions work on traced arrays",
    "scipy": "rlx.numpy.linalg has solve_triangular, cholesky and more; rlx.logsumexp and rlx.erf are in rlx itself",
    "config": "there are no global switches: f64 is always enabled, rlx.debug.nans() finds NaN",
    "devices": 'rlx env lists what this machine has; device="cuda" is an argument of rlx.jit, compile and load',
    "local_devices": "rlx env lists what this machine has; device= is an argument of rlx.jit, compile and load",
    "device_count": "a function runs on one device; rlx env lists what this machine has",
    "local_device_count": "a function runs on one device; rlx env lists what this machine has",
    "default_backend": 'device="cpu" is the default of rlx.jit, compile and load',
    "Array": "np.ndarray: arrays are NumPy arrays",
    "disable_jit": "call f.function of a jitted f, or leave rlx.jit out; rlx.debug.print prints inside",
    "profiler": "f.report(x) of a jitted f lists the time of each kernel, f.trace(path, x) writes a timeline",
    "named_call": "reports name lines of your code",
    "named_scope": "reports name lines of your code",
    "clear_caches": "programs of calls are dropped by age; rlx cache clears the folder of compiled code",
    "custom_gradient": "rlx.custom_vjp",
    "experimental": "there is no such module; what there is, is in rlx itself",
    "sharding": "a function runs on one device",
    "typeof": "x.shape and x.dtype, also of traced arrays; rlx.eval_shape(f, x) is the type of a result",
    "grad_and_value": "rlx.value_and_grad, which returns the value first",
    "ensure_compile_time_eval": "NumPy arrays stay NumPy under a trace: what depends on no argument is computed once",
    "io_callback": "programs call no Python; rlx.debug.print prints",
    "host_callback": "programs call no Python; rlx.debug.print prints",
    "optax": _TRAIN,
    "optim": _TRAIN,
    "dlpack": "np.from_dlpack(x): arrays are NumPy arrays",
    "ops": "x.at[i].add(y), rlx.scatter_add",
    "Tracer": "a traced array has x.shape and x.dtype, but no numbers",
    "leaky_relu": "rlx.where(x > 0, x, 0.01 * x)",
    "flatten_util": "rlx.tree.ravel is ravel_pytree",
    "ravel_pytree": "rlx.tree.ravel",
    "swish": "rlx.silu",
    "expit": "rlx.sigmoid",
    "logit": "rlx.log(p / (1 - p))",
    "iota": "rlx.arange",
    "tree_leaves": "rlx.tree.leaves",
    "tree_flatten": "rlx.tree.flatten",
    "tree_unflatten": "rlx.tree.unflatten",
    "tree_structure": "rlx.tree.structure",
    "map": "rlx.vmap(f)(xs), or rlx.scan for one row after the other",
}


def hint(name: str) -> str | None:
    """Return what takes the place of a JAX name; None for a name that is not of JAX."""
    return f"{_HERE[name]}; {PAGE}" if name in _HERE else None
