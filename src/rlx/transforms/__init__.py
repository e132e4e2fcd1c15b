"""Differentiation and batching of graphs: grad, jvp, vjp, hvp, jacobians, vmap and checkpoint, to any order."""

from rlx.transforms.api import checkpoint as checkpoint
from rlx.transforms.api import grad as grad
from rlx.transforms.api import hvp as hvp
from rlx.transforms.api import jacfwd as jacfwd
from rlx.transforms.api import jacrev as jacrev
from rlx.transforms.api import jvp as jvp
from rlx.transforms.api import value_and_grad as value_and_grad
from rlx.transforms.api import vjp as vjp
from rlx.transforms.api import vmap as vmap
