"""Optimisers: the moments of each parameter, the scalars of a step, and the update of a parameter.

An optimiser is data and two functions, so you can write your own with `Optimiser(...)`: its `update` builds ordinary
ops and ends in `assign`, or in a custom op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.errors import RequestError
from rlx.ir.graph import Value

Numbers = Callable[[int, float], Mapping[str, float]]
Update = Callable[[Value, Mapping[str, Value], Value, Mapping[str, Value], Value | None], Sequence[Value]]


@dataclass(frozen=True)
class Optimiser:
    """An update rule for parameters.

    `moments` names the state of each parameter: tensors of its type, initially zero. `numbers(t, lr)` returns the
    scalars of step t = 1, 2, ..., which all parameters share; they are run-time inputs, so a learning rate schedule
    does not recompile. `update(param, moments, grad, numbers, scale)` builds the update of one parameter and returns
    the new parameter and then its new moments; each is a state, updated in place. `scale` multiplies a clipped
    gradient; None without clipping.
    """

    name: str
    lr: float
    moments: tuple[str, ...]
    numbers: Numbers
    update: Update


def adamw(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimiser:
    """AdamW (Loshchilov and Hutter, 2019): Adam with decoupled weight decay, as in torch."""
    _check_non_negative("adamw", lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = betas
    for name, beta in (("betas[0]", beta1), ("betas[1]", beta2)):
        _check_fraction("adamw", name, beta)

    def numbers(t: int, rate: float) -> Mapping[str, float]:
        root = math.sqrt(1 - beta2**t)
        return {"rate": rate / (1 - beta1**t), "decay": 1 - rate * weight_decay, "root": root}

    def update(
        p: Value, moments: Mapping[str, Value], grad: Value, n: Mapping[str, Value], scale: Value | None
    ) -> Sequence[Value]:
        operands = (p, moments["m"], moments["v"], grad, n["rate"], n["decay"], n["root"], scale)
        return p.graph.build("adamw_update", operands, {"beta1": beta1, "beta2": beta2, "eps": eps}).results

    return Optimiser("adamw", lr, ("m", "v"), numbers, update)


def sgd(lr: float = 1e-2, momentum: float = 0.0, *, nesterov: bool = False, weight_decay: float = 0.0) -> Optimiser:
    """Gradient descent with optional momentum, as in torch."""
    _check_non_negative("sgd", lr=lr, weight_decay=weight_decay)
    _check_fraction("sgd", "momentum", momentum)
    if nesterov and not momentum:
        raise RequestError("sgd: nesterov needs a momentum, which is 0")
    attrs = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}

    def update(
        p: Value, moments: Mapping[str, Value], grad: Value, n: Mapping[str, Value], scale: Value | None
    ) -> Sequence[Value]:
        return p.graph.build("sgd_update", (p, grad, n["rate"], moments.get("velocity"), scale), attrs).results

    return Optimiser("sgd", lr, ("velocity",) if momentum else (), lambda t, rate: {"rate": rate}, update)


def _check_non_negative(where: str, **numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise RequestError(f"{where}: {name} is {value!r}, wanted a number from 0")


def _check_fraction(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise RequestError(f"{where}: {name} is {value!r}, wanted 0 to below 1")
