"""Activations by their names in model configurations (Hugging Face's `hidden_act`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlx.errors import CapabilityError
from rlx.ir.graph import Value

# Activations with weights of their own (prelu, xielu) are not included.
NAMED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("silu", "swish"), lambda x: x.silu()),
    **dict.fromkeys(("gelu", "gelu_python"), lambda x: x.gelu()),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_tanh"),
        lambda x: x.gelu_tanh(),
    ),
    "gelu_10": lambda x: x.gelu().maximum(-10.0).minimum(10.0),
    "quick_gelu": lambda x: x * (x * 1.702).sigmoid(),
    "relu": lambda x: x.relu(),
    "relu2": lambda x: x.relu() * x.relu(),
    "relu6": lambda x: x.relu().minimum(6.0),
    "leaky_relu": lambda x: x.maximum(x * 0.01),
    "hardswish": lambda x: x * (x + 3.0).relu().minimum(6.0) / 6.0,
    "mish": lambda x: x * softplus(x).tanh(),
    "sqrtsoftplus": lambda x: softplus(x).sqrt(),
    "laplace": lambda x: (((x - 0.707107) / (0.282095 * math.sqrt(2.0))).erf() + 1.0) * 0.5,
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "linear": lambda x: x,
}


def check_known(name: str) -> None:
    """Raise unless the name is a known activation."""
    if name not in NAMED:
        raise CapabilityError(f"activation {name!r} is not known", hint=f"known: {', '.join(sorted(NAMED))}")


def activate(x: Value, name: str) -> Value:
    """Apply an activation by its configuration name."""
    check_known(name)
    result: Value = NAMED[name](x)
    return result


def softplus(x: Value) -> Value:
    """log(1 + exp(x)), accurate for small results too: log(1 + e) ≈ e, with the rounding of 1 + e added back."""
    e = (-(abs(x))).exp()
    one = e + 1.0
    rest = one - 1.0
    graph = x.graph
    none = rest.equal(0.0)
    grown = graph.one("where", none, e, one.log() * e / graph.one("where", none, 1.0, rest))
    result: Value = x.maximum(0.0) + grown
    return result
