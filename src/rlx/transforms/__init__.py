"""Differentiation and batching of graphs: grad, jvp, vjp, hvp, jacobians, vmap and checkpoint, to any order.

Each takes a graph (or module) and returns a new one, which compiles like any other:

    loss.set_outputs([((x @ w - y) ** 2).mean()])
    g = rlx.transforms.grad(loss, wrt="w")          # outputs: the derivative by w
    f = rlx.compile(rlx.transforms.vmap(g, in_axes={"x": 0, "y": 0}))

Functions of arrays have the same transforms: `rlx.grad`, `rlx.vmap`. Rules of single ops are in
`rlx.transforms.rule_tables`.
"""

from rlx.transforms.api import checkpoint as checkpoint
from rlx.transforms.api import grad as grad
from rlx.transforms.api import hvp as hvp
from rlx.transforms.api import jacfwd as jacfwd
from rlx.transforms.api import jacrev as jacrev
from rlx.transforms.api import jvp as jvp
from rlx.transforms.api import value_and_grad as value_and_grad
from rlx.transforms.api import vjp as vjp
from rlx.transforms.api import vmap as vmap
